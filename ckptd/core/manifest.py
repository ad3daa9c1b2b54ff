"""What the remote holds beside the objects: remote.json, node manifests, COMMITs (docs/contract.md).

Every document is immutable and named or quoted by the SHA-256 of its canonical bytes, so that two readers
that saw the same digest decided on the same thing. Unknown fields are ignored; a higher major is refused.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

from pydantic import FailFast, Field, ValidationError

from ckptd.core.best import Best
from ckptd.core.canonical import canonical, canonical_with_rows
from ckptd.core.identity import Model
from ckptd.core.layouts import Grid, Role, ShardKey
from ckptd.core.manifest_names import hint_of
from ckptd.core.names import ROOT as ROOT
from ckptd.core.names import decode_name as decode_name
from ckptd.core.names import encode_name as encode_name
from ckptd.core.names import tag_problem as tag_problem
from ckptd.core.trainers import universal_name
from ckptd.errors import DocumentDamaged, RefusedError

FORMAT = "1.0"
MAJOR = 1
EXTRA_FOLDER = "_extra"
"""Files that lie directly in save_dir travel under `<folder>/_extra/<name>` (role `extra`)."""

Proof = Literal["store-checksum", "part-etags", "read-back", "none"]

_DIGITS = 10
_MOST_OBJECTS = 500_000
"""Of a document, three to a file; reading takes up to 2 kB for each."""

Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], FailFast()]
"""A list that is refused at its first wrong item: the errors of millions would take gigabytes."""

AnyDocument = TypeVar("AnyDocument", bound="Document")


class Document(Model):
    """A JSON document in the remote."""

    format: str = FORMAT


class RemoteIdentity(Document):
    """`_ckptd/remote.json`, create-only: this remote is that one, and this job's (P2, H5, H6)."""

    remote_id: str
    job_id: str
    job: str
    created: str
    """RFC 3339, UTC."""


class SaveWindow(Model):
    """Least and greatest mtime of a save's shards, unix time in nanoseconds, by the node's clock."""

    first: int
    last: int


class Writer(Model):
    """Who wrote the save."""

    trainer: str = "deepspeed"
    engine: str | None = None
    ds_version: str | None = None
    zero_stage: int | None = None
    dtype: str | None = None
    optimizer: str | None = None


class DerivedSource(Model):
    """What a derived form was made from (H15)."""

    generation: int
    fingerprints: Many[tuple[str, str]] = ()
    """(path, fingerprint) of each source shard, sorted."""
    plan_sha256: str
    layout: str
    alignment: int


class Checksums(Model):
    """Hex checksums of a whole file, taken while reading the source (P2)."""

    crc64nvme: str


class ManifestFile(Model):
    """One file as shipped and verified."""

    path: str
    key: str
    """Relative to the remote root; another generation's or node's object when `replica_of` says so."""
    bytes: int
    role: Role
    shard: ShardKey = ShardKey()
    checksums: Checksums
    fingerprint: str
    tensor_fingerprint: str | None = None
    proof: Proof
    replica_of: str | None = None
    mode: int = 0o644
    mtime_ns: int = 0


class NodeManifest(Document):
    """ "This is what I shipped and verified, and how": one node's part of one save."""

    job_id: str
    tag: str
    generation: int
    form: str
    folder: str
    revision: int = 1
    node: str
    node_id: str
    attempt: int = 1
    run_id: str | None = None
    """The run that saved it (core/runs.py); None: a release that knew none."""
    ckptd_version: str
    config_digest: str
    branch: int
    step: int
    optimizer_step: int | None = None  # all that a node without model states knows (adr/0150)
    save_seq: int
    save_window: SaveWindow
    writer: Writer = Writer()
    grid: Grid
    best: Best | None = None
    best_checkpoint: str | None = None
    source: DerivedSource | None = None
    replicas: Many[tuple[str, str]] = ()
    """(path, tensor fingerprint) of what this node has too and leaves to its owner: it tells saves apart."""
    empty_folders: Many[str] = ()
    """Folders of the save with nothing in them, relative to its folder: made again when it is restored."""
    files: Many[ManifestFile]


class ManifestRef(Model):
    """A manifest that a COMMIT rests on."""

    key: str
    sha256: str


class Commit(Document):
    """COMMIT: this generation of this form is whole and verified. Created once, last, never replaced (P3)."""

    job_id: str
    tag: str
    generation: int
    form: str
    folder: str
    branch: int
    step: int
    save_seq: int
    run_id: str | None = None
    """The run that its manifests are of; None: a release that knew none."""
    grid: Grid
    bytes: int
    files: int
    manifests: Many[ManifestRef] = Field(min_length=1)
    committed_by: str
    committed_at: str
    """RFC 3339, UTC; shown, and what keep_every and keep_within go by; never used for order (P9)."""
    config_digest: str
    best: Best | None = None
    best_checkpoint: str | None = None

    @property
    def names_best(self) -> str | None:
        """The tag that its trainer called the best so far; where none is written, this one if it is that."""
        return self.best_checkpoint or (self.tag if self.best is not None and self.best.is_best else None)

    @property
    def committed_at_seconds(self) -> float | None:
        """Unix time; None when the text is no time."""
        try:
            return datetime.fromisoformat(self.committed_at).timestamp()
        except ValueError:
            return None

    @property
    def stands_alone(self) -> bool:
        """Usable without the ZeRO form: all but a universal form that lies beside a trainer's other files."""
        return self.form != "universal" or "_universal" in self.folder.removeprefix(encode_name(self.tag))


class Headstone(Document):
    """A tombstone without the names of what lay there: as much as an observation tells of it."""

    tag: str
    generation: int
    form: str
    branch: int
    step: int
    save_seq: int
    reason: str
    commit_sha256: str
    run_id: str | None = None
    """As the COMMIT had it."""


class Tombstone(Headstone):
    """`_ckptd/retired/…`: what retention removed ((path, fingerprint), sorted), never sent again (H16)."""

    fingerprints: Many[tuple[str, str]] = ()


class Dispute(Document):
    """`_ckptd/disputes/…`: a node's committed manifest no longer matched its files when the COMMIT was made;
    the COMMIT does not exist any more for list, restore, verify and permits (H1). Create-only."""

    tag: str
    generation: int
    form: str
    commit_sha256: str
    node: str
    reason: str
    at: str
    """RFC 3339, UTC."""


class Lease(Document):
    """`_ckptd/leases/…`: a node replaces objects of this generation that no manifest listed; until its own
    manifest does, nobody else commits the generation (adr/0083)."""

    tag: str
    generation: int
    form: str
    node: str
    node_id: str


def to_bytes(document: Model) -> bytes:
    """Canonical bytes: sorted keys, no blanks, UTF-8; None and defaults included."""
    if isinstance(document, NodeManifest):
        return canonical_with_rows(document.model_copy(update={"files": ()}), document.files).encode()
    return canonical(document).encode()


def sha256_of(data: bytes) -> str:
    """SHA-256, hex."""
    return hashlib.sha256(data).hexdigest()


def parse(kind: type[AnyDocument], data: bytes, where: str) -> AnyDocument:
    """Read a document.

    Raises:
        DocumentDamaged: not JSON or not of that kind.
        RefusedError: written by a newer major of ckptd.
    """
    if data.count(b"{") + data.count(b"[") > _MOST_OBJECTS:
        msg = f"{where} holds more than {_MOST_OBJECTS} objects"
        raise DocumentDamaged(msg, hint="no ckptd wrote it; `ckptd list` shows what is left")
    try:
        document = kind.model_validate_json(data)
    except ValidationError as error:
        # without inputs: each error would carry a copy of what it is about, in turn of all within
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        msg = f"{where} is no valid {kind.__name__}: {first['msg'][:200]}"
        what = (
            "write it again: docs/recovery.md"
            if kind is RemoteIdentity
            else "`ckptd list` shows what is left"
        )
        raise DocumentDamaged(msg, hint=f"it was cut or edited; {what}") from error
    major = document.format.split(".")[0]
    if not (major.isascii() and major.isdigit() and len(major) < _DIGITS):
        msg = f"{where} has format {document.format[:40]!r}, which is none"
        raise DocumentDamaged(msg, hint="it was cut or edited; `ckptd list` shows what is left")
    if int(major) > MAJOR:
        msg = f"{where} has format {document.format}, this ckptd knows {FORMAT}"
        raise RefusedError(msg, hint="upgrade ckptd; nothing was written or deleted")
    return document


def stem(tag: str, generation: int, form: str) -> str:
    """`<tag>~g<g>~<form>`: how everything about one generation of one form is named."""
    return f"{encode_name(tag)}~g{generation}~{form}"


@lru_cache(maxsize=4096)
def parse_stem(name: str) -> tuple[str, int, str] | None:
    """(tag, generation, form) of a stem, or None."""
    parts = name.split("~")
    if len(parts) != 3 or not re.fullmatch(r"g[1-9]\d*", parts[1]) or not parts[2]:
        return None
    return decode_name(parts[0]), int(parts[1][1:]), parts[2]


def folder_name(tag: str, generation: int, form: str, attempt: int = 1) -> str:
    """Remote folder: `<tag>[.g<g>][_<form>][.a<k>]`."""
    name = encode_name(tag) + (f".g{generation}" if generation > 1 else "")
    if form != "zero":
        name += f"_{form}"
    return name + (f".a{attempt}" if attempt > 1 else "")


def universal_folder(tag: str, generation: int, root: str, attempt: int = 1) -> tuple[str, str]:
    """(remote folder, path of the universal form in it): where the loader of that trainer looks.

    Plain DeepSpeed (root ""): `<tag>_universal`, "". Hugging Face: `checkpoint-N`, `global_stepN_universal`.
    """
    if not root:
        return folder_name(tag, generation, "universal", attempt), ""
    return folder_name(tag, generation, "zero", attempt), universal_name(root)


def commit_key(tag: str, generation: int, form: str, supplement: int | None = None) -> str:
    """Key of a COMMIT, or of its supplement number k."""
    tail = f"~x{supplement}" if supplement else ""
    return f"{ROOT}/commits/{stem(tag, generation, form)}{tail}.json"


def manifest_key(manifest: NodeManifest, sha256: str) -> str:
    """Key of a node manifest: named by its digest, hence immutable; a ZeRO form's says what it lists."""
    place = stem(manifest.tag, manifest.generation, manifest.form)
    return f"{ROOT}/nodes/{place}/{encode_name(manifest.node)}~{hint_of(manifest)}{sha256[:12]}.json"


def lease_key(manifest: NodeManifest) -> str:
    """Key of a node's lease of the generation that its manifest is made for."""
    place = stem(manifest.tag, manifest.generation, manifest.form)
    name = f"{encode_name(manifest.node)}~{encode_name(manifest.node_id)}"
    return f"{ROOT}/leases/{place}/{name}.json"


def side_key(kind: Literal["retired", "disputes", "pins", "decisions"], name: str) -> str:
    """Key of a tombstone, dispute, pin or decision."""
    return f"{ROOT}/{kind}/{name}.json"
