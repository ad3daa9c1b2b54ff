"""Define the documents of a remote: remote.json, node manifests, COMMITs, tombstones (docs/contract.md).

Every document is immutable and named or quoted by the SHA-256 of its canonical bytes, so that two readers
that saw the same digest decided on the same thing. Unknown fields are ignored; a higher major is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

from pydantic import FailFast, Field, ValidationError

from ckptd.base.identity import Model
from ckptd.base.names import ROOT, decode_name, encode_name, shown
from ckptd.core.model.layouts import Grid, NamedShard, Role, ShardKey, universal_name
from ckptd.core.model.save import Best, SaveMark, SaveWindow, Writer, _tensors
from ckptd.errors import DocumentDamaged, RefusedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ckptd.core.model.save import SealedFile


# --- The topology: which rank of a run wrote which shard (ADR 0104) --------------------------------------
# A shard's name holds two numbers, D (data-parallel rank) and MM (model-parallel rank). D alone names no
# node, since the pipeline stages and tensor ranks repeat it. If the layout is unknown, or manifests
# contradict it, the answer is None.


class Cell(NamedTuple):
    """A place in the grid of a save: ZeRO data-parallel rank, model-parallel rank (D and MM of its name)."""

    d: int
    mm: int


def cells_of(files: Iterable[SealedFile | ManifestFile | NamedShard]) -> frozenset[Cell]:
    """Return those whose optimizer shards are among the files."""
    return frozenset(
        Cell(f.shard.d, f.shard.mm or 0) for f in files if f.role is Role.OPTIM and f.shard.d is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """PipeModelDataParallelTopology: pipeline stage outermost, then data, tensor-parallel rank innermost."""

    dp: int
    tp: int
    pp: int

    def cell_of(self, rank: int) -> Cell:
        """Return the cell of the grid that a rank of the run writes."""
        rest, tensor = divmod(rank, self.tp)
        stage, d = divmod(rest, self.dp)
        return Cell(d, stage * self.tp + tensor)

    def rank_of(self, cell: Cell) -> int:
        """Return the rank of the run that writes a cell.

        >>> Topology(dp=4, tp=1, pp=2).rank_of(Cell(1, 1)), Topology(dp=4, tp=2, pp=1).rank_of(Cell(1, 1))
        (5, 3)
        """
        stage, tensor = divmod(cell.mm, self.tp)
        return (stage * self.dp + cell.d) * self.tp + tensor

    def first_of_run(self, cells: Collection[Cell]) -> int | None:
        """The lowest of the ranks that write these; None: they do not follow each other, as a node's do."""
        ranks = sorted(map(self.rank_of, cells))
        return ranks[0] if ranks and ranks[-1] - ranks[0] + 1 == len(ranks) else None


def topology_of(grid: Grid, layers: Iterable[ManifestFile] = ()) -> Topology | None:
    """Return the topology of a grid; None: unknown, or with sequence-parallel ranks (in Megatron's order).

    Before DeepSpeed 0.19.5 the grid does not record it: a pipeline's layer files tell its tensor parallelism,
    and a grid without layers is no pipeline.
    """
    if grid.mm_count == 1:
        return Topology(dp=grid.dp, tp=1, pp=1)
    is_recorded = grid.tp is not None and grid.pp is not None
    named = [file.shard.mm or 0 for file in layers]
    named_tp = max(named) + 1 if named else None if grid.layers else grid.mm_count
    tp = grid.tp if is_recorded else named_tp
    if not tp or grid.mm_count % tp or (grid.sp or 1) > 1:
        return None
    pp = grid.mm_count // tp
    return Topology(dp=grid.dp, tp=tp, pp=pp) if grid.pp in (None, pp) and grid.tp in (None, tp) else None


def proven_topology(grid: Grid, manifests: Sequence[NodeManifest]) -> Topology | None:
    """Return the topology of a whole save; None also if some node's ranks are not consecutive in it.

    With one rank a node nothing can contradict DeepSpeed's order.
    """
    layers = [file for m in manifests for file in m.files if file.role is Role.LAYER]
    found = topology_of(grid, layers)
    if found is None:
        return None
    parts = [cells for m in manifests if (cells := cells_of(m.files))]
    return found if all(found.first_of_run(cells) is not None for cells in parts) else None


# --- Hints in the names of node manifests (ADR 0105) -----------------------------------------------------
# With a thousand nodes a generation has a thousand manifests, which a waiting node need not read: their
# names say how many optimizer shards are listed, and of which save. Hints may only veto or delay; a COMMIT
# rests on manifests that were read.


_HINT = re.compile(r"d(\d+)\.n(\d+)of(\d+)\.m([0-9a-f]{8})\.t(-?\d+)_(-?\d+)")
_MOST_DIGITS = 18
_HAVE, _WANT = attrgetter("have"), attrgetter("want")
_ROUNDING_SECONDS = 1


class ManifestName(Model):
    """A manifest that was not read."""

    node: str
    low: int
    """The lowest rank whose shard it lists: of several model-parallel ranks, as the run numbers them."""
    have: int
    """Optimizer shards that it lists."""
    want: int
    """Optimizer shards of the grid that it proves."""
    mark: str
    """Digest of step, grid and DeepSpeed's version."""
    first_seconds: int
    last_seconds: int
    """The save window, unix time."""


def hint_of(manifest: NodeManifest) -> str:
    """Return the hint between node and digest in the name of a ZeRO form's manifest; "" for derived forms."""
    if manifest.form != "zero":
        return ""
    have = sum(file.role is Role.OPTIM for file in manifest.files)
    want = manifest.grid.dp * manifest.grid.mm_count
    first, last = (at // 10**9 for at in (manifest.save_window.first, manifest.save_window.last))
    grid, low = manifest.grid, _lowest(manifest, want)
    mark = _mark(manifest.step, (grid.dp, grid.mm_count, grid.zero_stage), manifest.writer.ds_version)
    return f"d{low}.n{have}of{want}.m{mark}.t{first}_{last}~"


def _lowest(manifest: NodeManifest, want: int) -> int:
    """Older releases wrote the lowest data-parallel rank, which several nodes of a pipeline have: names look
    as they did, and tell of one model-parallel rank the same (docs/adr/0104)."""
    cells, topology = cells_of(manifest.files), topology_of(manifest.grid)
    if topology is None or manifest.grid.mm_count == 1:
        return min((cell.d for cell in cells), default=want)
    first = topology.first_of_run(cells)
    return want if first is None else first


def _mark(step: int, grid: tuple[int, int, int], ds_version: str | None) -> str:
    words = f"{step} {' '.join(map(str, grid))} {ds_version}"
    return hashlib.sha256(words.encode()).hexdigest()[:8]


@lru_cache(maxsize=8192)
def name_in(key: str) -> ManifestName | None:
    """Parse the hint in a manifest's key; None: it is of a derived form, or of a version without hints."""
    parts = key.rpartition("/")[2].split("~")
    found = _HINT.fullmatch(parts[1]) if len(parts) == 3 else None
    if found is None or any(len(digits) > _MOST_DIGITS for digits in found.groups()):
        return None
    low, have, want, mark, first, last = found.groups()
    return ManifestName(
        node=decode_name(parts[0]),
        low=int(low),
        have=int(have),
        want=int(want),
        mark=mark,
        first_seconds=int(first),
        last_seconds=int(last),
    )


def node_in(key: str) -> str:
    """Return the node whose manifest a key names."""
    return decode_name(key.rpartition("/")[2].partition("~")[0])


def may_cover(names: Sequence[ManifestName]) -> bool:
    """Tell whether all optimizer shards may be listed; a grid without any is for a reader to judge."""
    # each of a thousand nodes asks this of a thousand names, and nearly always they are too few
    if sum(map(_HAVE, names)) < min(map(_WANT, names), default=1):
        return False
    most: dict[tuple[str, int], dict[str, int]] = {}
    for name in names:
        have = most.setdefault((name.mark, name.want), {})
        have[name.node] = max(have.get(name.node, 0), name.have)
    return any(sum(have.values()) >= want for (_, want), have in most.items())


def named_conflict(
    ours: SaveMark, names: Iterable[ManifestName], *, save_spread_seconds: float
) -> str | None:
    """Return why `ours` is of another save than one of those, by their names; None: the names do not tell."""
    mark = _mark(ours.step, ours.grid, ours.ds_version)
    first, last = (at // 10**9 for at in (ours.window.first, ours.window.last))
    for name in names:
        if name.mark != mark:
            return f"{name.node} uploaded another save, as the name of its manifest says"
        apart = max(first - name.last_seconds, name.first_seconds - last)
        if apart > save_spread_seconds + _ROUNDING_SECONDS:
            return f"{name.node} uploaded another save: written {apart} s apart"
    return None


def absent_by_names(names: Iterable[ManifestName], read: Iterable[NodeManifest]) -> tuple[NamedShard, ...]:
    """Optimizer shards that no manifest lists, as far as names tell: a node's ranks follow each other.

    `read`: manifests that were read, at least one. None where a name does not tell: words about the wrong
    node are worse than no words.
    """
    read = tuple(read)
    grid, topology = read[0].grid, topology_of(read[0].grid)
    held = {cell for manifest in read for cell in cells_of(manifest.files)}
    for name in names:
        until = name.low + name.have
        if topology is None or (name.have and until > grid.dp * grid.mm_count):
            return ()
        held |= {topology.cell_of(rank) for rank in range(name.low, until)}
    return tuple(
        NamedShard(role=Role.OPTIM, shard=ShardKey(d=d, mm=mm))
        for mm in range(grid.mm_count)
        for d in range(grid.dp)
        if (d, mm) not in held
    )


# --- Canonical text: equal documents have equal digests --------------------------------------------------
# Rows are written one by one: as one tree, the files of a large checkpoint would take many times the memory
# of their text.

_NO_ROWS = '"files":[]'
"""Quotes are escaped in a value, so that this is the key."""


def canonical(document: Model) -> str:
    """Sorted keys, no blanks; None and defaults included."""
    return json.dumps(document.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def canonical_with_rows(empty: Model, rows: Iterable[Model]) -> str:
    """Return the canonical text of a document with these `files`, given the document without any."""
    head, none, tail = canonical(empty).partition(_NO_ROWS)
    return f"{head}{none[:-1]}{','.join(map(canonical, rows))}]{tail}"


# --- The documents and their keys ------------------------------------------------------------------------

FORMAT = "1.0"
MAJOR = 1
EXTRA_FOLDER = "_extra"
"""Files that lie directly in save_dir travel under `<folder>/_extra/<name>` (role `extra`)."""

Proof = Literal["store-checksum", "part-etags", "read-back", "none"]

_DIGITS = 10
_MOST_OBJECTS = 500_000
"""Most JSON objects of a document, three to a file; reading takes up to 2 kB for each."""

Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], FailFast()]
"""A list that is refused at its first wrong item: the errors of millions would take gigabytes."""

AnyDocument = TypeVar("AnyDocument", bound="Document")


class Document(Model):
    """A JSON document in the remote."""

    format: str = FORMAT


class RemoteIdentity(Document):
    """Identify a remote and its job (`_ckptd/remote.json`, create-only), so that no other is taken for it."""

    remote_id: str
    job_id: str
    job: str
    created: str
    """RFC 3339, UTC."""


class DerivedSource(Model):
    """Identify the source that a derived form was made from, so that equal forms are recognised."""

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
    """One file as uploaded and verified."""

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
    """ "This is what I uploaded and verified, and how": one node's part of one save."""

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
    """The run that saved it (core/model/runs.py); None: a release that knew none."""
    ckptd_version: str
    config_digest: str
    branch: int
    step: int
    optimizer_step: int | None = None  # all that a node without model states knows (adr/0104)
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
    def is_self_contained(self) -> bool:
        """Usable without the ZeRO form: all but a universal form that lies beside a trainer's other files."""
        return self.form != "universal" or "_universal" in self.folder.removeprefix(encode_name(self.tag))


class TombstoneHeader(Document):
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
    """Run of the COMMIT."""


class Tombstone(TombstoneHeader):
    """Record in `_ckptd/retired/…` the (path, fingerprint), sorted, that retention deleted for good."""

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
    where = shown(where)
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
    """Return (tag, generation, form) of a stem, or None."""
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
    """Return (remote folder, path of the universal form in it): where the loader of that trainer looks.

    Plain DeepSpeed (root ""): `<tag>_universal`, "". Hugging Face: `checkpoint-N`, `global_stepN_universal`.
    """
    if not root:
        return folder_name(tag, generation, "universal", attempt), ""
    return folder_name(tag, generation, "zero", attempt), universal_name(root)


def commit_key(tag: str, generation: int, form: str, supplement: int | None = None) -> str:
    """Key of a COMMIT, or of its supplement number k."""
    tail = f"~x{supplement}" if supplement else ""
    return f"{ROOT}/commits/{stem(tag, generation, form)}{tail}.json"


def supplement_of(key: str) -> tuple[str, int, str, int] | None:
    """Parse a SUPPLEMENT's key: (tag, generation, form, k); None: it is another key."""
    head, mark, number = key.rsplit("/", 1)[-1].removesuffix(".json").rpartition("~x")
    where = parse_stem(head) if mark and re.fullmatch(r"[1-9]\d{0,8}", number) else None
    return None if where is None else (*where, int(number))


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


def mark_of_manifest(manifest: NodeManifest) -> SaveMark:
    """Return the mark of a node manifest in the remote."""
    return SaveMark(
        run_id=manifest.run_id or manifest.job_id,
        step=manifest.step,
        grid=(manifest.grid.dp, manifest.grid.mm_count, manifest.grid.zero_stage),
        ds_version=manifest.writer.ds_version,
        window=manifest.save_window,
        tensors=tuple(
            sorted(
                {
                    *_tensors(
                        (f.path, f.tensor_fingerprint or f.fingerprint, f.role) for f in manifest.files
                    ),
                    *manifest.replicas,
                }
            )
        ),
    )
