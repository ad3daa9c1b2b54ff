"""Read what lies under `_ckptd/` in a remote: COMMITs, manifests, tombstones, disputes, decisions.

Readers go COMMIT → manifest → objects and check each digest on the way (docs/contract.md). A document that
cannot be read is named and skipped; one of a higher major version stops everything (`RefusedError`).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from ckptd.base.names import IDENTITY_KEY, ROOT, decode_name
from ckptd.core.model.decision import Decision, check_key, named_pin
from ckptd.core.model.generation import KnownManifest
from ckptd.core.model.manifest import (
    AnyDocument,
    Commit,
    Lease,
    ManifestName,
    NodeManifest,
    RemoteIdentity,
    TombstoneHeader,
    commit_key,
    may_cover,
    name_in,
    parse,
    parse_stem,
    sha256_of,
    side_key,
    stem,
    supplement_of,
)
from ckptd.errors import CkptdError, DamagedError, DocumentDamaged
from ckptd.storage.remote.messages import CommitView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.base.identity import Model
    from ckptd.storage.stores.base import ObjectInfo, Store


LEASES = f"{ROOT}/leases/"
NODES = f"{ROOT}/nodes/"
_RETIRED = f"{ROOT}/retired/"
_TRIES = 3
_AFTER_SLASH = chr(ord("/") + 1)
"""First character of a key that comes right after a folder's contents."""
Stone = TypeVar("Stone", bound=TombstoneHeader)
Stem = tuple[str, int, str]
"""(tag, generation, form)."""


class Listing:
    """Name all documents of a remote, as two listings showed them: each request of a look costs money."""

    def __init__(self, store: Store) -> None:
        # tombstones first: listed after the COMMITs, they could name all of those, and not what came instead
        stones = list(store.list(_RETIRED))
        others = [info for info in store.list(f"{ROOT}/") if not info.key.startswith(_RETIRED)]
        self._infos = sorted((*stones, *others), key=lambda info: info.key)
        self._keys = [info.key for info in self._infos]

    def below(self, folder: str) -> list[ObjectInfo]:
        """Return the documents in that folder, which ends with `/`, by key."""
        end = bisect.bisect_left(self._keys, folder[:-1] + _AFTER_SLASH)
        return self._infos[bisect.bisect_left(self._keys, folder) : end]


@dataclass(slots=True)
class Documents:
    """Hold the documents read from a remote; `damaged` names those that could not be read."""

    listing: Listing
    """Names of all documents, as they were listed when these were read."""
    commits: list[CommitView] = field(default_factory=list)
    stones: dict[Stem, ObjectInfo] = field(default_factory=dict)
    """Tombstones, which their names tell: thousands in a long run, read only where more is asked."""
    disputed: set[Stem] = field(default_factory=set)
    decisions: list[Decision] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    damaged_pins: list[Decision] = field(default_factory=list)
    unreadable: set[Stem] = field(default_factory=set)
    """COMMITs among them: what they commit is not known, and their generations are taken."""
    supplements: list[CommitView] = field(default_factory=list)
    skip: tuple[type[CkptdError], ...] = (DamagedError,)

    def live(self) -> list[CommitView]:
        """Return the COMMITs that exist for consumers: undisputed, and without a tombstone (P3)."""
        return [v for v in self.commits if not v.disputed and stem_of(v.commit) not in self.stones]


def now_utc() -> str:
    """Return the present as documents say it: RFC 3339, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def stem_of(document: Commit | NodeManifest | TombstoneHeader | Lease) -> Stem:
    """Return (tag, generation, form) of a document."""
    return document.tag, document.generation, document.form


@lru_cache(maxsize=8192)
def stem_of_key(key: str) -> Stem | None:
    """Return (tag, generation, form) that a key under `_ckptd/` speaks of; None: a supplement, a foreign
    name.
    """
    parts = key.split("/")
    return parse_stem(parts[2].removesuffix(".json")) if len(parts) > 2 else None


def tag_of_key(key: str) -> str:
    """Return the tag that the key of a document speaks of; "": of none."""
    parts = key.split("/")
    if parts[1:2] in (["pins"], ["decisions"]):
        return decode_name(parts[-1].split("~")[1]) if parts[-1].count("~") == 2 else ""
    where = supplement_of(key) or stem_of_key(key)
    return where[0] if where is not None else ""


def read_identity(store: Store) -> RemoteIdentity | None:
    """`remote.json`, or None."""
    data = store.get(IDENTITY_KEY)
    return None if data is None else parse(RemoteIdentity, data, IDENTITY_KEY)


def read_commit(store: Store, where: Stem) -> CommitView | None:
    """Return the COMMIT of one generation of one form, fresh, with its dispute; None when there is none."""
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
        """Return the document and its digest; None when it is gone.

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
    """Return every COMMIT and the names of tombstones (of one tag); what fails with one of `skip` is named
    and left out.
    """
    cache = DocumentCache() if cache is None else cache
    found = Documents(Listing(store), skip=skip)
    tries = 1
    # what is gone when it is read was retired, and what came instead of it may not have been listed
    while _read_commits(store, found, only_tag, cache) and tries < _TRIES:
        found, tries = Documents(Listing(store), skip=skip), tries + 1
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
    for info in found.listing.below(_RETIRED):
        where = stem_of_key(info.key)
        if where is not None and only_tag in (None, where[0]):
            found.stones[where] = info
    disputes = (stem_of_key(info.key) for info in found.listing.below(f"{ROOT}/disputes/"))
    found.disputed |= {where for where in disputes if where is not None}
    for info in found.listing.below(f"{ROOT}/commits/"):
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
    """Return those tombstones, as much of each as `kind` says; what cannot be read is named in `found`."""
    cache = DocumentCache() if cache is None else cache
    stones: list[Stone] = []
    for where in sorted(wheres):
        _collect(store, found.stones[where], kind, stones, found, cache)
    return stones


def read_decisions(store: Store, found: Documents, cache: DocumentCache | None = None) -> None:
    """Add every decision and pin, in order of serial, and what the names of damaged pins tell."""
    cache = DocumentCache() if cache is None else cache
    for folder in ("decisions", "pins"):
        for info in found.listing.below(f"{ROOT}/{folder}/"):
            try:
                read = cache.get(store, info, Decision)
                if read is not None:
                    found.decisions.append(check_key(read[0], info.key))
            except found.skip as error:
                found.damaged.append(error.message)
                pin = named_pin(info.key.rpartition("/")[2])
                found.damaged_pins += [pin] if pin is not None else []
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
    """Return the folder that holds the manifests of one generation of one form; it ends with `/`."""
    return f"{NODES}{stem(*where)}/"


def lease_folder(where: Stem) -> str:
    """Return the folder of the leases by which nodes announce that they replace objects; it ends with `/`."""
    return f"{LEASES}{stem(*where)}/"


def read_manifest(
    store: Store, key: str, sha256: str | None = None, ours: KnownManifest | None = None
) -> KnownManifest | None:
    """Return one manifest; None when absent. `ours`: one that is known already, and is not taken apart again.

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


def read_generation(store: Store, where: Stem, damaged: list[str] | None = None) -> tuple[KnownManifest, ...]:
    """Return every readable manifest of a form's generation, all revisions, by key."""
    found = []
    for info in store.list(manifest_folder(where)):
        try:
            known = read_manifest(store, info.key)
        except DamagedError as error:
            if damaged is not None:
                damaged.append(error.message)
            continue
        if known is not None and stem_of(known.manifest) == where:
            found.append(known)
    return tuple(sorted(found, key=lambda known: known.key))


def manifests_of_commit(store: Store, commit: Commit) -> tuple[KnownManifest, ...]:
    """Return the manifests that a COMMIT rests on, digests checked.

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
    """Return the SUPPLEMENTs of one COMMIT, fresh, in order."""
    found = []
    for info in store.list(f"{ROOT}/commits/"):
        late = supplement_of(info.key)
        data = store.get(info.key) if late is not None and late[:3] == where else None
        if data is not None:
            commit = parse(Commit, data, info.key)
            found.append(CommitView(key=info.key, sha256=sha256_of(data), commit=commit))
    return sorted(found, key=number_of)


def manifest_keys(listed: Iterable[ObjectInfo]) -> dict[Stem, list[str]]:
    """Return the keys of those node manifests, by generation."""
    found: dict[Stem, list[str]] = {}
    keys = sorted([info.key for info in listed])
    begin = 0
    # thousands of nodes have their files in few folders: names are taken apart once for each folder
    while begin < len(keys):
        folder = keys[begin].rpartition("/")[0]
        # what a stranger left beside the folders belongs to none, and ends where it begins
        is_beside = len(folder) < len(NODES)
        end = begin + 1 if is_beside else bisect.bisect_left(keys, folder + _AFTER_SLASH, begin)
        where = None if is_beside else stem_of_key(folder + "/")
        if where is not None:
            found.setdefault(where, []).extend(keys[begin:end])
        begin = end
    return found


def generations_with_manifests(store: Store) -> set[Stem]:
    """Return (tag, generation, form) of everything that has a node manifest."""
    return set(manifest_keys(store.list(NODES)))


def committed_digests(commits: Iterable[CommitView]) -> set[str]:
    """Return the SHA-256 of every manifest that a COMMIT lists."""
    return {ref.sha256 for view in commits for ref in view.commit.manifests}


# --- manifests of a generation, cached -------------------------------------------------------------------
# All manifests of a small generation are read, of a large one only where a COMMIT may rest on them. Manifests
# never change, and their names hold their digests, so what was read once is not fetched again; that a
# manifest is still there is seen in each listing (docs/adr/0105).


FEW = 8
"""So many manifests are read at each look, so that status can name the shards that are missing."""
_MOST_FILES = 100_000
"""Rows of manifests that are remembered, of about 1 kB each; more are read again (P12)."""


class ManifestCache:
    """Manifests that were read, by key."""

    def __init__(self) -> None:
        self._held: dict[str, KnownManifest] = {}
        self._files = 0

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def get(self, store: Store, key: str, ours: KnownManifest | None = None) -> KnownManifest | None:
        """Return the manifest; None when it is gone before it was read.

        Raises:
            DamagedError: it is not what its name says.
        """
        found = self._held.get(key)
        if found is None:
            found = read_manifest(store, key, ours=ours)
            if found is not None:
                self._keep(found)
        return found

    def _keep(self, known: KnownManifest) -> None:
        self._files += len(known.manifest.files) + 1
        if self._files > _MOST_FILES:
            self._held.clear()
            self._files = len(known.manifest.files) + 1
        self._held[known.key] = known


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSnapshot:
    """The manifests of one generation of one form, as one listing showed them."""

    read: tuple[KnownManifest, ...]
    named: tuple[ManifestName, ...] = ()
    """Those that were not read: the generation is not covered yet."""
    damaged: tuple[str, ...] = ()

    @property
    def likely(self) -> ManifestName | None:
        """Return who most likely lists what several nodes have."""
        return min(self.named, key=lambda name: (name.low, name.node), default=None)

    @property
    def words(self) -> str:
        """Return how far the others are."""
        names = [*self.named, *(n for known in self.read if (n := name_in(known.key)) is not None)]
        have, want = sum(name.have for name in names), max(name.want for name in names)
        nodes = len({name.node for name in names})
        return (
            f"waiting for {max(want - have, 0)} of {want} optimizer shards; {nodes} nodes uploaded their part"
        )


def read_snapshot(
    store: Store,
    where: Stem,
    cache: ManifestCache,
    *,
    node: str | None,
    ours: KnownManifest | None = None,
    commit: CommitView | None = None,
    reads_one: bool = False,
    infos: Iterable[ObjectInfo] | None = None,
) -> GenerationSnapshot:
    """List a generation, unless `infos` are its listing, and read what needs to be read; `node` None: all.

    Of many: our own node's, those whose names say nothing, and all once their shards may cover the grid;
    not of those that are committed. What `commit` names is there, whether or not a late listing tells it yet.
    `reads_one`: at least one, whosesoever, for who cannot prove the grid (docs/adr/0104).
    """
    listed = {info.key for info in (store.list(manifest_folder(where)) if infos is None else infos)}
    committed = {ref.key for ref in commit.commit.manifests} if commit is not None else set()
    names = {key: name_in(key) for key in listed | committed}
    known = [name for name in names.values() if name is not None]
    is_settled = commit is not None and not commit.disputed
    is_all = node is None or len(names) <= FEW or (may_cover(known) and not is_settled)
    wanted = {key for key, name in names.items() if is_all or name is None or name.node == node}
    read, damaged = read_keys(store, where, wanted & listed, cache, ours)
    if wanted - listed:  # read afresh: no listing says that they are there still
        more, worse = read_keys(store, where, wanted - listed, ManifestCache(), ours)
        read, damaged = (*read, *more), (*damaged, *worse)
    if reads_one and not read:
        read, worse = _one_of(store, where, (names.keys() & listed) - wanted, cache)
        damaged = (*damaged, *worse)
    taken = wanted | {one.key for one in read}
    left = () if is_all else tuple(n for key, n in names.items() if n is not None and key not in taken)
    return GenerationSnapshot(read=read, named=left, damaged=damaged)


def _one_of(
    store: Store, where: Stem, keys: Iterable[str], cache: ManifestCache
) -> tuple[tuple[KnownManifest, ...], tuple[str, ...]]:
    """Return one that was read before, else that of the lowest rank, which most likely lists model states."""
    damaged: tuple[str, ...] = ()
    known = [(key not in cache, name.low, key) for key in keys if (name := name_in(key)) is not None]
    for _, _, key in sorted(known)[:FEW]:
        read, worse = read_keys(store, where, [key], cache)
        if read:
            return read, damaged
        damaged = (*damaged, *worse)
    return (), damaged


def read_keys(
    store: Store, where: Stem, keys: Iterable[str], cache: ManifestCache, ours: KnownManifest | None = None
) -> tuple[tuple[KnownManifest, ...], tuple[str, ...]]:
    """Return the readable ones of those manifests, by key, and why others are not."""
    found, damaged = [], []
    for key in sorted(keys):
        try:
            one = cache.get(store, key, ours)
        except DamagedError as error:
            damaged.append(error.message)
            continue
        if one is not None and stem_of(one.manifest) == where:
            found.append(one)
    return tuple(found), tuple(damaged)
