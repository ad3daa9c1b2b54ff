"""Which manifests of a generation are read: all of a few, of many only where a COMMIT may rest on them.

Manifests never change, and their names hold their digests: what was read once is not fetched again. That one
is there still is told by each listing (docs/adr/0105).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.manifest_names import ManifestName, may_cover, name_in
from ckptd.errors import DamagedError
from ckptd.remote.documents import manifest_folder, read_manifest, stem_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.coverage import KnownManifest
    from ckptd.remote.documents import Stem
    from ckptd.remote.messages import CommitView
    from ckptd.remote.store import Store

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
        """The manifest; None when it is gone before it was read.

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
class Seen:
    """The manifests of one generation of one form, as one listing told of them."""

    read: tuple[KnownManifest, ...]
    named: tuple[ManifestName, ...] = ()
    """Those that were not read: the generation is not covered yet."""
    damaged: tuple[str, ...] = ()

    @property
    def likely(self) -> ManifestName | None:
        """Who most likely lists what several nodes have."""
        return min(self.named, key=lambda name: (name.low, name.node), default=None)

    @property
    def words(self) -> str:
        """How far the others are."""
        names = [*self.named, *(n for known in self.read if (n := name_in(known.key)) is not None)]
        have, want = sum(name.have for name in names), max(name.want for name in names)
        nodes = len({name.node for name in names})
        return (
            f"waiting for {max(want - have, 0)} of {want} optimizer shards; {nodes} nodes shipped their part"
        )


def look(
    store: Store,
    where: Stem,
    cache: ManifestCache,
    *,
    node: str | None,
    ours: KnownManifest | None = None,
    commit: CommitView | None = None,
    reads_one: bool = False,
) -> Seen:
    """List a generation and read what needs to be read; `node` None: all.

    Of many: our own node's, those whose names say nothing, and all once their shards may cover the grid;
    not of those that are committed. What `commit` names is there, whether or not a late listing tells it yet.
    `reads_one`: at least one, whosesoever, for who cannot prove the grid (docs/adr/0150).
    """
    listed = {info.key for info in store.list(manifest_folder(where))}
    told = {ref.key for ref in commit.commit.manifests} if commit is not None else set()
    names = {key: name_in(key) for key in listed | told}
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
    return Seen(read=read, named=left, damaged=damaged)


def _one_of(
    store: Store, where: Stem, keys: Iterable[str], cache: ManifestCache
) -> tuple[tuple[KnownManifest, ...], tuple[str, ...]]:
    """One that was read before, else that of the lowest rank, which most likely lists model states."""
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
    """The readable ones of those manifests, by key, and why others are not."""
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
