"""Keep a remote's documents on this node, and write those again that rot or are lost there.

COMMITs, SUPPLEMENTs and manifests are created once and never changed, so the bytes that were read back then,
proven by their SHA-256, are the only ones that may ever lie under their keys (docs/adr/0221). So are side
documents: decisions, rows of runs and tombstones. `remote.json`, which a takeover writes anew, is one of them
as long as it names the remote.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ckptd.base import files
from ckptd.base.identity import Model
from ckptd.base.names import IDENTITY_KEY, ROOT, encode_name
from ckptd.base.owned_dirs import list_dir, opened_ours
from ckptd.core.model.decision import decision_key, parse_decision
from ckptd.core.model.generation import build_commit, objects_of
from ckptd.core.model.manifest import (
    Commit,
    NodeManifest,
    RemoteIdentity,
    Tombstone,
    node_in,
    parse,
    parse_stem,
    sha256_of,
    side_key,
    stem,
    to_bytes,
)
from ckptd.core.model.runs import RUNS, Row
from ckptd.core.policy.leases import numbered
from ckptd.errors import CkptdError, DamagedError, RefusedError, RemoteError, RemoteUnreachable
from ckptd.observe.audit import Audit
from ckptd.storage.remote.documents import (
    FEW,
    NODES,
    manifests_of_commit,
    stem_of,
    stem_of_key,
    tag_of_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ckptd.storage.remote.documents import ManifestCache, Stem
    from ckptd.storage.remote.messages import CommitView, Observation
    from ckptd.storage.stores.base import Store

log = logging.getLogger("ckptd.kept")

_FOLDER = "documents"
_DIGITS = 8
"""Count of hex digits of a COMMIT's digest in a file's name: names of 255 bytes have room for no more."""
_LIMIT_BYTES = 1 << 30
_SIDE_FOLDERS = ("pins", "decisions", "runs", "retired")
_RETIRED = f"{ROOT}/retired/"
_AGAIN_SECONDS = 86400.0
"""Between two comparisons of all side documents."""
_REMOTE_ID = re.compile(rb'"remote_id"\s*:\s*"([^"]*)"')
_TAKEN_OVER = b"taken_from"
SOURCE = "what this node kept"
"""Words that name the source of a repaired document."""


class KeptDocument(Model):
    """A document as it was created."""

    key: str
    sha256: str
    text: str

    @property
    def data(self) -> bytes:
        """Return its bytes."""
        return self.text.encode()


class _Kept(Model):
    """The documents of one COMMIT, in the order in which they would be written again."""

    documents: tuple[KeptDocument, ...]


class KeptDocuments:
    """Those of one remote in a job's state directory: `documents/<remote_id>/<stem>~<digest>.json`.

    A side document lies there by its key below `_ckptd/`, in a file of its own.
    """

    def __init__(self, state_dir: Path, remote_id: str) -> None:
        self.remote_id = remote_id
        self._state_dir = state_dir
        self._folder = f"{_FOLDER}/{encode_name(remote_id)}"
        self._names: dict[Stem, str] | None = None
        self._side_keys: set[str] | None = None
        self._compared_at: float | None = None

    def names(self) -> dict[Stem, str]:
        """Return the first digits of each COMMIT's digest."""
        if self._names is None:
            names = []
            with contextlib.suppress(OSError, RefusedError), self._opened() as fd:
                names = list_dir(fd)
            parts = (name.removesuffix(".json").rpartition("~") for name in names)
            self._names = {where: digest for head, _, digest in parts if (where := parse_stem(head))}
        return self._names

    def of(self, where: Stem) -> tuple[KeptDocument, ...]:
        """Return the documents of a COMMIT, those that are whole."""
        with contextlib.suppress(OSError, RefusedError, ValidationError), self._opened() as fd:
            found = _Kept.model_validate_json(
                files.read_beneath(fd, self._name(where), limit_bytes=_LIMIT_BYTES)
            )
            return tuple(one for one in found.documents if sha256_of(one.data) == one.sha256)
        return ()

    def keep(self, where: Stem, documents: Sequence[KeptDocument], commit_sha256: str) -> None:
        """Replace what is kept of a COMMIT."""
        if self.names().get(where, "") != commit_sha256[:_DIGITS]:
            self.forget(where)
        elif self.of(where) == tuple(documents):
            return
        self.names()[where] = commit_sha256[:_DIGITS]
        with self._opened(create_mode=0o755) as fd:
            data = _Kept(documents=tuple(documents)).model_dump_json().encode()
            files.write_atomic(fd, self._name(where), data)

    def forget(self, where: Stem) -> None:
        """Remove what is kept of a COMMIT."""
        if where in self.names():
            with contextlib.suppress(OSError, RefusedError), self._opened() as fd:
                files.remove_file(fd, self._name(where))
            del self.names()[where]

    # --- side documents --------------------------------------------------------------------------------

    def side_keys(self) -> set[str]:
        """Return the keys of the side documents that are kept."""
        if self._side_keys is None:
            self._side_keys = set()
            for folder in ("", *_SIDE_FOLDERS):
                with contextlib.suppress(OSError, RefusedError), self._opened(folder) as fd:
                    keys = {"/".join(filter(None, (ROOT, folder, name))) for name in list_dir(fd)}
                    self._side_keys |= keys if folder else keys & {IDENTITY_KEY}
        return self._side_keys

    def side_document(self, key: str) -> KeptDocument | None:
        """Return a side document where it is whole."""
        folder, name = _parts(key)
        with contextlib.suppress(OSError, RefusedError, ValidationError), self._opened(folder) as fd:
            found = KeptDocument.model_validate_json(files.read_beneath(fd, name, limit_bytes=_LIMIT_BYTES))
            return found if found.key == key and sha256_of(found.data) == found.sha256 else None
        return None

    def keep_side_document(self, key: str, data: bytes) -> None:
        """Keep a side document; where the disk is full it is kept at the next comparison."""
        folder, name = _parts(key)
        one = KeptDocument(key=key, sha256=sha256_of(data), text=data.decode())
        self.side_keys().add(key)
        try:
            with self._opened(folder, create_mode=0o755) as fd:
                files.write_atomic(fd, name, one.model_dump_json().encode())
        except (OSError, RefusedError) as error:
            log.warning("%s is not kept on this node: %s", key, error)

    def is_comparison_due(self) -> bool:
        """Tell whether a day has passed since the side documents were compared in this process."""
        return self._compared_at is None or time.monotonic() - self._compared_at >= _AGAIN_SECONDS

    def note_comparison(self) -> None:
        """Note that the side documents were compared now."""
        self._compared_at = time.monotonic()

    @contextlib.contextmanager
    def _opened(self, below: str = "", create_mode: int | None = None) -> Iterator[int]:
        with opened_ours(self._state_dir) as state:
            folder = f"{self._folder}/{below}" if below else self._folder
            fd = files.open_dir_beneath(state, folder, create_mode=create_mode)
            try:
                yield fd
            finally:
                os.close(fd)

    def _name(self, where: Stem) -> str:
        return f"{stem(*where)}~{self.names().get(where, '')}.json"


def _parts(key: str) -> tuple[str, str]:
    """Return the folder below `_ckptd/`, "" for none, and the name of a side document."""
    folder, _, name = key.removeprefix(f"{ROOT}/").rpartition("/")
    return folder, name


def keep_documents(
    kept: KeptDocuments, store: Store, views: Sequence[CommitView], cache: ManifestCache, node: str
) -> None:
    """Keep a COMMIT, its SUPPLEMENTs and their manifests: this node's, of a few nodes all of them.

    A document that cannot be read, or a disk that is full, keeps nobody from anything else.
    """
    where, first = stem_of(views[0].commit), views[0]
    try:
        if kept.names().get(where, first.sha256[:_DIGITS]) != first.sha256[:_DIGITS] and not is_proven(
            store, first.commit
        ):
            return
        documents: list[KeptDocument] = []
        for view in views:
            keys = [ref.key for ref in view.commit.manifests]
            wanted = keys if len(keys) <= FEW else [key for key in keys if node_in(key) == node]
            read = [one for key in wanted if (one := cache.get(store, key)) is not None]
            documents += [_document(store, one.key, one.sha256, to_bytes(one.manifest)) for one in read]
            documents.append(_document(store, view.key, view.sha256, to_bytes(view.commit)))
        kept.keep(where, documents, first.sha256)
    except DamagedError:
        return  # the scrub names it
    except (OSError, RefusedError) as error:
        log.warning("%s is not kept on this node: %s", first.key, error)


def _document(store: Store, key: str, sha256: str, data: bytes) -> KeptDocument:
    """Take a document as this version writes it, else as it lies there.

    Raises:
        DamagedError: neither is what it was.
    """
    if sha256_of(data) != sha256:
        data = store.get(key) or b""
    if sha256_of(data) != sha256:
        raise DamagedError(f"{key} is not what was read a moment ago")
    return KeptDocument(key=key, sha256=sha256, text=data.decode())


def audited(state_dir: Path, remote: str, repaired: Sequence[RepairedDocument]) -> tuple[str, ...]:
    """Write an audit line for each repair, and return the keys."""
    audit = Audit(state_dir / "audit.jsonl")
    for one in repaired:
        tag, generation, form = one.where
        audit.write(
            "repair",
            tag=tag,
            generation=generation,
            form=form,
            reason=f"{remote}: {one.damage}; from {SOURCE}",
            commits=one.commits,
            files=[(one.key, one.bytes)],
        )
    return tuple(one.key for one in repaired)


# --- writing again ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedDocument:
    """A document that was written again, and how it was found."""

    key: str
    bytes: int
    where: Stem
    """Name the COMMIT that it belongs to; of a pin or decision its tag, of others "", each with 0 and ""."""
    commits: tuple[tuple[str, str], ...] = ()
    """Key and digest of the COMMIT that it belongs to."""
    damage: str


def heal_commits(
    kept: KeptDocuments, store: Store, seen: Observation, *, dry_run: bool = False
) -> list[RepairedDocument]:
    """Write again what is kept of COMMITs that were not read as they were kept; failing changes nothing."""
    read = {stem_of(view.commit): view.sha256 for view in seen.commits}
    wanted = [where for where, digits in kept.names().items() if read.get(where, "")[:_DIGITS] != digits]
    repaired: list[RepairedDocument] = []
    for where in sorted(wanted):
        with contextlib.suppress(CkptdError):  # of a remote that may only be read
            repaired += heal_documents(kept, store, where, dry_run=dry_run)
    return repaired


def heal_documents(
    kept: KeptDocuments, store: Store, where: Stem, *, dry_run: bool = False
) -> list[RepairedDocument]:
    """Write again, byte for byte, what rotted or is lost of one COMMIT's documents.

    Nothing is written under a tombstone or a dispute, nor over another COMMIT that its manifests prove, and
    no COMMIT that is gone together with an object: then nothing more is kept of it.

    Raises:
        RemoteError: the store refuses, or does not give back what was written; nothing was written before.
    """
    documents = kept.of(where)
    commits = [one for one in documents if not one.key.startswith(NODES)]
    if not commits:
        return []
    found = {one.key: _read(store, one.key) for one in documents}
    if _is_over(store, where, documents, commits, found):
        kept.forget(where)
        return []
    wrong = [one for one in documents if found[one.key] != one.data]
    for number, one in enumerate(() if dry_run else wrong):
        try:
            _write(store, one, is_gone=found[one.key] is None)
        except CkptdError:
            if not number:
                raise
            wrong = wrong[:number]  # what was written is told; the next look meets the rest
            break
    return [
        RepairedDocument(
            key=one.key,
            bytes=len(one.data),
            where=where,
            commits=((commits[0].key, commits[0].sha256),),
            damage="absent" if found[one.key] is None else "other bytes",
        )
        for one in wrong
    ]


def _read(store: Store, key: str) -> bytes | None:
    """Return what lies under a key, nothing of what cannot be a document; None: it is gone."""
    try:
        return store.get(key)
    except DamagedError:
        return b""


def _is_over(
    store: Store,
    where: Stem,
    documents: Sequence[KeptDocument],
    commits: Sequence[KeptDocument],
    found: Mapping[str, bytes | None],
) -> bool:
    """Tell whether a COMMIT counts no more, is another one by now, or was removed with its objects."""
    # a name is enough: a tombstone may be damaged itself
    if any(store.stat(side_key(kind, stem(*where))) is not None for kind in ("retired", "disputes")):
        return True
    there = ((one, found[one.key]) for one in commits)
    if any(data not in (None, one.data) and _is_another(store, one.key, data or b"") for one, data in there):
        return True
    return found[commits[0].key] is None and not _is_whole(store, commits[0], documents)


def _is_another(store: Store, key: str, data: bytes) -> bool:
    with contextlib.suppress(DamagedError):
        return is_proven(store, parse(Commit, data, key))
    return False


def is_proven(store: Store, commit: Commit) -> bool:
    """Tell whether a COMMIT is what its manifests make it: rot in one that can still be read is not."""
    with contextlib.suppress(DamagedError):
        known = manifests_of_commit(store, commit)
        made = build_commit(
            known,
            committed_by=commit.committed_by,
            committed_at=commit.committed_at,
            config_digest=commit.config_digest,
        )
        is_named = commit.committed_by in {one.manifest.node for one in known}
        is_same = made.model_copy(update={"format": commit.format}) == commit
        return is_named and commit.committed_at_seconds is not None and is_same
    return False


def _is_whole(store: Store, one: KeptDocument, documents: Sequence[KeptDocument]) -> bool:
    """Tell whether all objects of a COMMIT are there, as long as its manifests say."""
    ours = {document.key: document.data for document in documents}
    manifests = []
    commit = parse(Commit, one.data, one.key)
    for ref in commit.manifests:
        data = ours.get(ref.key) or _read(store, ref.key) or b""
        if sha256_of(data) != ref.sha256:
            return False
        manifests.append(parse(NodeManifest, data, ref.key))
    bytes_of = {info.key: info.bytes for info in store.list(f"{commit.folder}/")}
    return all(bytes_of.get(key) == file.bytes for key, file in objects_of(manifests).items())


def _write(store: Store, one: KeptDocument, *, is_gone: bool) -> None:
    """Write a document and read it back.

    Raises:
        RemoteError: it is not given back.
    """
    if is_gone:
        store.put_if_absent(one.key, one.data)
    else:
        store.put(one.key, one.data)
    if store.get(one.key) != one.data:
        msg = f"{store.url} does not give back {one.key} as it was written"
        raise RemoteError(msg, hint="the store lies or another writer is at work; see `ckptd check`")


# --- side documents --------------------------------------------------------------------------------------


def keep_side_documents(kept: KeptDocuments, store: Store, seen: Observation) -> None:
    """Keep `remote.json`, and the decisions and rows of runs that a look read and were not kept before.

    Tombstones, of which a look tells the names alone, are kept by the daemon that makes them.
    """
    keys = {decision_key(decision) for decision in seen.decisions}
    keys |= {numbered(RUNS, row.number) for row in seen.rows}
    for key in sorted((keys | {IDENTITY_KEY}) - kept.side_keys()):
        data = _read(store, key)
        if data and _is_readable(kept, key, data):
            kept.keep_side_document(key, data)


def heal_side_documents(
    kept: KeptDocuments, store: Store, damaged: Sequence[str] | None = None, *, dry_run: bool = False
) -> list[RepairedDocument]:
    """Write the side documents that cannot be read again, byte for byte, from what is kept of them.

    A tombstone was kept by who made it, and may be no other; another document that can be read may be one
    that this node does not know. What is gone was removed. `damaged`: reasons that name those to look at.
    What the store refuses is logged and left.

    Raises:
        RemoteUnreachable: the remote does not answer.
    """
    repaired = []
    for key in sorted(kept.side_keys() - {IDENTITY_KEY}):
        if damaged is not None and not any(key in reason for reason in damaged):
            continue
        try:
            repaired += _heal_side_document(kept, store, key, dry_run=dry_run)
        except RemoteUnreachable:
            if not repaired:
                raise
            break
        except CkptdError as error:
            log.warning("%s is not repaired: %s", key, error.message)
    return repaired


def _heal_side_document(
    kept: KeptDocuments, store: Store, key: str, *, dry_run: bool
) -> list[RepairedDocument]:
    one, data = kept.side_document(key), _read(store, key)
    if data is None or (one is not None and data == one.data):
        return []
    is_readable = _is_readable(kept, key, data)
    if one is None:
        if is_readable:  # the copy here rots, or the disk was full
            kept.keep_side_document(key, data)
        return []
    return [_rewritten(store, one, dry_run=dry_run)] if key.startswith(_RETIRED) or not is_readable else []


def heal_identity(kept: KeptDocuments, store: Store) -> list[RepairedDocument]:
    """Write `remote.json` again where it cannot be read, and its bytes still name the remote.

    So no other share that is mounted there gets it, nor a remote that was taken over.

    Raises:
        RemoteError: the store refuses, or does not give back what was written.
    """
    one, data = kept.side_document(IDENTITY_KEY), _read(store, IDENTITY_KEY)
    if one is None or data is None or _is_readable(kept, IDENTITY_KEY, data):
        return []
    named = _REMOTE_ID.findall(data)
    if named != [kept.remote_id.encode()] or _TAKEN_OVER in data:
        return []  # after a takeover it names two: no one bit that turns hides both that and the word for it
    return [_rewritten(store, one, dry_run=False)]


def _rewritten(store: Store, one: KeptDocument, *, dry_run: bool) -> RepairedDocument:
    if not dry_run:
        _write(store, one, is_gone=False)
    where = stem_of_key(one.key) if one.key.startswith(_RETIRED) else (tag_of_key(one.key), 0, "")
    return RepairedDocument(
        key=one.key, bytes=len(one.data), where=where or ("", 0, ""), damage="other bytes"
    )


def _is_readable(kept: KeptDocuments, key: str, data: bytes) -> bool:
    """Tell whether that is the document that its key promises, or one of a newer release."""
    try:
        if key == IDENTITY_KEY:
            return parse(RemoteIdentity, data, key).remote_id == kept.remote_id
        if key.startswith(RUNS):
            parse(Row, data, key)
        elif key.startswith(_RETIRED):
            parse(Tombstone, data, key)
        else:
            parse_decision(data, key)
    except RefusedError:
        return True
    except DamagedError:
        return False
    return True
