"""Reading what lies under `_ckptd/` in a remote: COMMITs, manifests, tombstones, disputes, decisions.

Readers go COMMIT → manifest → objects and check each digest on the way (docs/contract.md). A document that
cannot be read is named and skipped; one of a higher major stops everything (`RefusedError`).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from ckptd.core.coverage import KnownManifest
from ckptd.core.decision import Decision
from ckptd.core.lateness import supplement_of
from ckptd.core.manifest import (
    ROOT,
    AnyDocument,
    Commit,
    Headstone,
    Lease,
    NodeManifest,
    RemoteIdentity,
    commit_key,
    parse,
    parse_stem,
    sha256_of,
    side_key,
    stem,
)
from ckptd.errors import CkptdError, DamagedError, DocumentDamaged
from ckptd.remote.messages import CommitView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.identity import Model
    from ckptd.remote.store import ObjectInfo, Store

IDENTITY_KEY = f"{ROOT}/remote.json"
LEASES = f"{ROOT}/leases/"
_TRIES = 3
_AFTER_SLASH = chr(ord("/") + 1)
"""What begins with it comes right after a folder's contents."""
Stone = TypeVar("Stone", bound=Headstone)
Stem = tuple[str, int, str]
"""(tag, generation, form)."""


@dataclass(slots=True)
class Documents:
    """What was read; `damaged` names what could not be."""

    commits: list[CommitView] = field(default_factory=list)
    stones: dict[Stem, ObjectInfo] = field(default_factory=dict)
    """Tombstones, which their names tell: thousands in a long run, read only where more is asked."""
    disputed: set[Stem] = field(default_factory=set)
    decisions: list[Decision] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    unreadable: set[Stem] = field(default_factory=set)
    """COMMITs among them: what they commit is not known, and their generations are taken."""
    supplements: list[CommitView] = field(default_factory=list)
    skip: tuple[type[CkptdError], ...] = (DamagedError,)

    def live(self) -> list[CommitView]:
        """COMMITs that exist for consumers: undisputed, and without a tombstone (P3)."""
        return [v for v in self.commits if not v.disputed and stem_of(v.commit) not in self.stones]


def stem_of(document: Commit | NodeManifest | Headstone | Lease) -> Stem:
    """(tag, generation, form) of a document."""
    return document.tag, document.generation, document.form


@lru_cache(maxsize=8192)
def stem_of_key(key: str) -> Stem | None:
    """(tag, generation, form) that a key under `_ckptd/` speaks of; None: a supplement, a foreign name."""
    parts = key.split("/")
    return parse_stem(parts[2].removesuffix(".json")) if len(parts) > 2 else None


def read_identity(store: Store) -> RemoteIdentity | None:
    """`remote.json`, or None."""
    data = store.get(IDENTITY_KEY)
    return None if data is None else parse(RemoteIdentity, data, IDENTITY_KEY)


def read_commit(store: Store, where: Stem) -> CommitView | None:
    """The COMMIT of one generation of one form, fresh, with its dispute; None when there is none."""
    key = commit_key(*where)
    data = store.get(key)
    if data is None:
        return None
    commit = parse(Commit, data, key)
    disputed = store.get(side_key("disputes", stem(*where))) is not None
    return CommitView(key=key, sha256=sha256_of(data), commit=commit, disputed=disputed)


class DocumentCache:
    """Documents that were read, by key, size and time: they are created once and never changed (contract).

    Which there are is listed each time; what a permit rests on is read afresh.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[ObjectInfo, tuple[Model, str]]] = {}
        self._asked: set[str] = set()

    def get(self, store: Store, info: ObjectInfo, kind: type[AnyDocument]) -> tuple[AnyDocument, str] | None:
        """The document and its digest; None when it is gone.

        Raises:
            DocumentDamaged, RefusedError: it cannot be read.
        """
        self._asked.add(info.key)
        held = self._held.get(info.key)
        if held is not None and held[0] == info and isinstance(held[1][0], kind):
            return held[1][0], held[1][1]
        data = store.get(info.key)
        if data is None:
            return None
        found = parse(kind, data, info.key), sha256_of(data)
        if info.mtime_ns:
            self._held[info.key] = (info, found)
        return found

    def forget_unasked(self) -> None:
        """Let go of what nobody asked for since the last call: COMMITs that were retired (P12)."""
        for key in self._held.keys() - self._asked:
            self._held.pop(key, None)
        self._asked.clear()

    def __len__(self) -> int:
        return len(self._held)


def read_commits(
    store: Store,
    only_tag: str | None = None,
    *,
    cache: DocumentCache | None = None,
    skip: tuple[type[CkptdError], ...] = (DamagedError,),
) -> Documents:
    """Every COMMIT and the names of tombstones (of one tag); what fails with one of `skip` is named and left
    out."""
    cache = DocumentCache() if cache is None else cache
    found = Documents(skip=skip)
    tries = 1
    # what is gone when it is read was retired, and what came instead of it may not have been listed
    while _read_commits(store, found, only_tag, cache) and tries < _TRIES:
        found, tries = Documents(skip=skip), tries + 1
    found.commits.sort(key=lambda view: view.key)
    found.supplements.sort(key=number_of)
    return found


def number_of(view: CommitView) -> int:
    """k of a SUPPLEMENT."""
    late = supplement_of(view.key)
    return late[3] if late is not None else 0


def _read_commits(store: Store, found: Documents, only_tag: str | None, cache: DocumentCache) -> bool:
    """One pass; True when something that was listed is gone."""
    is_gone = False
    # tombstones first: read after the COMMITs, they could name all of those, and not what came instead
    for info in store.list(f"{ROOT}/retired/"):
        where = stem_of_key(info.key)
        if where is not None and only_tag in (None, where[0]):
            found.stones[where] = info
    disputes = (stem_of_key(info.key) for info in store.list(f"{ROOT}/disputes/"))
    found.disputed |= {where for where in disputes if where is not None}
    for info in store.list(f"{ROOT}/commits/"):
        late = supplement_of(info.key)
        where = late[:3] if late is not None else stem_of_key(info.key)
        if where is None or only_tag not in (None, where[0]):
            continue
        try:
            read = cache.get(store, info, Commit)
        except found.skip as error:
            found.damaged.append(error.message)
            if late is None:
                found.unreadable.add(where)
            continue
        is_gone = is_gone or read is None
        if read is not None:
            commit, digest = read
            view = CommitView(key=info.key, sha256=digest, commit=commit, disputed=where in found.disputed)
            (found.commits if late is None else found.supplements).append(view)
    return is_gone


def read_stones(
    store: Store,
    found: Documents,
    wheres: Iterable[Stem],
    kind: type[Stone],
    cache: DocumentCache | None = None,
) -> list[Stone]:
    """Those tombstones, as much of each as `kind` says; what cannot be read is named in `found`."""
    cache = DocumentCache() if cache is None else cache
    stones: list[Stone] = []
    for where in sorted(wheres):
        _collect(store, found.stones[where], kind, stones, found, cache)
    return stones


def read_decisions(store: Store, found: Documents, cache: DocumentCache | None = None) -> None:
    """Add every decision and pin, in order of serial."""
    cache = DocumentCache() if cache is None else cache
    for folder in ("decisions", "pins"):
        for info in store.list(f"{ROOT}/{folder}/"):
            _collect(store, info, Decision, found.decisions, found, cache)
    found.decisions.sort(key=lambda d: (d.serial, d.kind, d.tag))


def _collect(
    store: Store,
    info: ObjectInfo,
    kind: type[AnyDocument],
    into: list[AnyDocument],
    found: Documents,
    cache: DocumentCache,
) -> None:
    try:
        read = cache.get(store, info, kind)
    except found.skip as error:
        found.damaged.append(error.message)
        return
    if read is not None:
        into.append(read[0])


def manifest_folder(where: Stem) -> str:
    """Where the manifests of one generation of one form lie; ends with `/`."""
    return f"{ROOT}/nodes/{stem(*where)}/"


def lease_folder(where: Stem) -> str:
    """Where nodes say that they replace objects of one generation of one form; ends with `/`."""
    return f"{LEASES}{stem(*where)}/"


def read_manifest(
    store: Store, key: str, sha256: str | None = None, ours: KnownManifest | None = None
) -> KnownManifest | None:
    """One manifest; None when absent. `ours`: one that is known already, and is not taken apart again.

    Raises:
        DocumentDamaged: it is not what its name or `sha256` says.
    """
    data = store.get(key)
    if data is None:
        return None
    found = sha256_of(data)
    named = key.rsplit("~", 1)[-1].removesuffix(".json")
    if (sha256 is not None and found != sha256) or not found.startswith(named):
        msg = f"{key} is not the manifest that its name and COMMIT promise (SHA-256 {found})"
        raise DocumentDamaged(
            msg, hint="it was changed in the remote; restore falls back to an older checkpoint"
        )
    if ours is not None and (ours.key, ours.sha256) == (key, found):
        return ours
    return KnownManifest(key=key, sha256=found, manifest=parse(NodeManifest, data, key))


def read_generation(
    store: Store, where: Stem, damaged: list[str] | None = None, ours: KnownManifest | None = None
) -> tuple[KnownManifest, ...]:
    """Every readable manifest of one generation of one form, all revisions, by key; `ours` as above."""
    found = []
    for info in store.list(manifest_folder(where)):
        try:
            known = read_manifest(store, info.key, ours=ours)
        except DamagedError as error:
            if damaged is not None:
                damaged.append(error.message)
            continue
        if known is not None and stem_of(known.manifest) == where:
            found.append(known)
    return tuple(sorted(found, key=lambda known: known.key))


def manifests_of_commit(store: Store, commit: Commit) -> tuple[KnownManifest, ...]:
    """The manifests that a COMMIT rests on, digests checked.

    Raises:
        DocumentDamaged: one is absent or another than the COMMIT quotes.
    """
    found = []
    for ref in commit.manifests:
        known = read_manifest(store, ref.key, ref.sha256)
        if known is None:
            msg = f"{ref.key}, which the COMMIT of {commit.tag} rests on, is gone"
            raise DocumentDamaged(msg, hint="this checkpoint cannot be restored; use an older one")
        found.append(known)
    return tuple(found)


def read_supplements(store: Store, where: Stem) -> list[CommitView]:
    """The SUPPLEMENTs of one COMMIT, fresh, in order."""
    found = []
    for info in store.list(f"{ROOT}/commits/"):
        late = supplement_of(info.key)
        data = store.get(info.key) if late is not None and late[:3] == where else None
        if data is not None:
            commit = parse(Commit, data, info.key)
            found.append(CommitView(key=info.key, sha256=sha256_of(data), commit=commit))
    return sorted(found, key=number_of)


def manifest_keys(store: Store) -> dict[Stem, list[str]]:
    """Keys of all node manifests, by generation."""
    found: dict[Stem, list[str]] = {}
    place = f"{ROOT}/nodes/"
    keys = sorted([info.key for info in store.list(place)])
    begin = 0
    # thousands of nodes have their files in few folders: names are taken apart once for each folder
    while begin < len(keys):
        folder = keys[begin].rpartition("/")[0]
        # what a stranger left beside the folders belongs to none, and ends where it begins
        is_beside = len(folder) < len(place)
        end = begin + 1 if is_beside else bisect.bisect_left(keys, folder + _AFTER_SLASH, begin)
        where = None if is_beside else stem_of_key(folder + "/")
        if where is not None:
            found.setdefault(where, []).extend(keys[begin:end])
        begin = end
    return found


def generations_with_manifests(store: Store) -> set[Stem]:
    """(tag, generation, form) of everything that has a node manifest."""
    return set(manifest_keys(store))


def committed_digests(commits: Iterable[CommitView]) -> set[str]:
    """SHA-256 of every manifest that a COMMIT lists."""
    return {ref.sha256 for view in commits for ref in view.commit.manifests}
