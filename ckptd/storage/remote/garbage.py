"""Find objects in a remote that nothing refers to and that are provably ours, for `ckptd gc`.

Keys come from tombstones, from manifests that a newer revision replaced and from this node's own journal,
never from a prefix (docs/design.md §5). Any other object that nobody ever listed stays: an upload under way
looks the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.base.names import ROOT
from ckptd.core.model.generation import newest_revisions, objects_of, order_of
from ckptd.core.model.layouts import POINTERS
from ckptd.core.model.manifest import Tombstone, folder_name
from ckptd.core.model.runs import run_of
from ckptd.errors import CommitConflict, DamagedError, NotFoundError, RefusedError
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.documents import (
    LEASES,
    read_commits,
    read_manifest,
    read_stones,
    stem_of,
    stem_of_key,
)
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.messages import DeleteCommit
from ckptd.storage.remote.observe import AttachedRemote, still_ours
from ckptd.storage.remote.readers import expired
from ckptd.storage.remote.repair import SPARE, holds, staging_key
from ckptd.storage.stores.base import Abilities

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ckptd.core.model.generation import KnownManifest
    from ckptd.core.model.manifest import RemoteIdentity
    from ckptd.core.model.save import Order
    from ckptd.errors import CkptdError
    from ckptd.storage.remote.documents import Documents, Stem
    from ckptd.storage.remote.messages import CommitView
    from ckptd.storage.stores.base import Store

_AT_A_TIME = 100
"""Objects that go before manifests are looked at again."""
REMOVED_RUN = "its run was removed by a person"
_HINT = "see `ckptd verify`; what a document that cannot be read lists is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One object that may go. `bytes`: 0 for what is gone already."""

    key: str
    bytes: int
    why: str
    tag: str = ""
    generation: int = 0
    form: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """List what `gc` finds in a remote: objects, interrupted removals, bytes not provably ours."""

    objects: tuple[Garbage, ...]
    retiring: tuple[tuple[Tombstone, int], ...]
    """(tombstone, bytes that finishing it frees)."""
    unlisted: Mapping[str, int]
    """Key → bytes of objects that no manifest lists, nor a tombstone names."""
    spares: int = 0
    """Good bytes that a repair needs: their object is not right yet."""
    manifests: frozenset[str] = frozenset()
    """Keys of all manifests that this rests on."""


def find(store: Store, identity: RemoteIdentity) -> Collected:
    """Look, change nothing.

    Raises:
        RefusedError: a document cannot be read: what it lists is not known.
        RemoteNotOurs: the remote is another one than `identity`.
    """
    still_ours(store, identity)
    found = read_commits(store)
    keys = _manifest_keys(store)
    sizes = {
        info.key: info.bytes
        for info in store.list("")
        if not info.key.startswith(f"{ROOT}/") and info.key not in POINTERS
    }
    places = _by_generation(keys)
    left = {key.partition("/")[0] for key in sizes}
    is_open = {where for where in found.stones if where in places or where in _stems(found)}
    speaking = is_open | {where for where in found.stones if folder_name(*where) in left}
    stones = {stem_of(stone): stone for stone in read_stones(store, found, speaking, Tombstone)}
    if found.damaged:
        raise RefusedError(f"nothing in {store.url} is removed: {found.damaged[0]}", hint=_HINT)
    spares = {info.key: info.bytes for info in store.list(SPARE)}
    seen = _read(store, places, _Dead(found, is_open), spares.keys(), is_open)
    objects = _objects(seen, {w: t for w, t in stones.items() if w not in is_open}, sizes)
    documents = [
        _garbage(k.key, 0, "a replaced revision of a manifest", stem_of(k.manifest)) for k in seen.dead
    ]
    over = _stems(found) | found.stones.keys()
    leases = [
        _garbage(info.key, 0, "a lease of a generation that is over", stem_of_key(info.key))
        for info in store.list(LEASES)
        if stem_of_key(info.key) in over
    ]
    unlisted = sizes.keys() - seen.listed.keys() - objects.keys()
    unlisted -= {key for known in seen.dead for key in objects_of([known.manifest])}
    return Collected(
        objects=(
            *objects.values(),
            *documents,
            *leases,
            *(_garbage(i.key, i.bytes, "the lease of a reader that has ended", None) for i in expired(store)),
            *(_garbage(k, n, "left by a repair", None) for k, n in spares.items() if k not in seen.spares),
        ),
        retiring=tuple((stones[where], seen.freed(where, sizes)) for where in sorted(is_open)),
        unlisted={key: sizes[key] for key in unlisted},
        spares=len(seen.spares),
        manifests=keys,
    )


def carry_out(
    store: Store, identity: RemoteIdentity, found: Collected, on_done: Callable[[Garbage], None]
) -> None:
    """Finish removals, then remove objects; `on_done` after each.

    Raises:
        RefusedError, CommitConflict: as `delete_commit`.
    """
    attached = AttachedRemote(
        store=store, abilities=Abilities(create_only=True, checksum=None, resumable=True), identity=identity
    )
    for stone, size in found.retiring:
        order = DeleteCommit(
            tag=stone.tag,
            generation=stone.generation,
            form=stone.form,
            reason=stone.reason,
            commit_sha256=stone.commit_sha256,
        )
        delete_commit(attached, order, lambda: None)
        on_done(_garbage(folder_name(*stem_of(stone)), size, f"deleted: {stone.reason}", stem_of(stone)))
    seen, garbage = found.manifests, {one.key for one in found.objects}
    for begin in range(0, len(found.objects), _AT_A_TIME):
        still_ours(store, identity)
        now = _manifest_keys(store)
        # what went since makes nothing needed; of what came, only what it lists and its generation are
        garbage -= _wanted_since(store, now - seen, found.objects)
        seen |= now
        for one in found.objects[begin : begin + _AT_A_TIME]:
            if one.key in garbage:
                store.delete(one.key)
                on_done(one)


def remove_unlisted(
    store: Store,
    identity: RemoteIdentity,
    found: Collected,
    keys: Sequence[str],
    node_id: str,
    on_done: Callable[[str], None],
) -> None:
    """Remove objects that this node sent and nobody lists; `on_done` after each.

    Another node that has the same bytes may be about to list them (it takes what lies there for its own), so
    this is for a remote that no other node ever wrote to.

    Raises:
        RefusedError: another node has written there, or manifests came since `found`.
    """
    still_ours(store, identity)
    others = [
        seen.node
        for seen in Heartbeats(store).everyone()
        if seen.heartbeat is None or seen.heartbeat.node_id != node_id
    ]
    if others:
        raise RefusedError(
            f"node {others[0]} writes to {store.url}, too", hint="they cost room, nothing else"
        )
    if _manifest_keys(store) != found.manifests:
        raise RefusedError(f"manifests came to {store.url} meanwhile", hint="call it again")
    for key in keys:
        store.delete(key)
        on_done(key)


def remove_run(
    store: Store,
    identity: RemoteIdentity,
    commits: Iterable[CommitView],
    on_done: Callable[[Garbage], None],
    on_left: Callable[[CkptdError], None],
) -> None:
    """Remove all that one run committed, the oldest first and of a save the shards last, as retention does.

    `on_left`: a pinned one, or one whose manifests cannot be read, stays.

    Raises:
        RemoteError, NotPermitted, StorageError: the remote does not do it; said again, it goes on.
    """
    attached = AttachedRemote(
        store=store, abilities=Abilities(create_only=True, checksum=None, resumable=True), identity=identity
    )
    for view in sorted(commits, key=lambda one: (order_of(one.commit), one.commit.form == "zero")):
        commit = view.commit
        order = DeleteCommit(
            tag=commit.tag,
            generation=commit.generation,
            form=commit.form,
            reason=REMOVED_RUN,
            commit_sha256=view.sha256,
            ends_run=True,
        )
        try:
            delete_commit(attached, order, lambda: None)
        except (RefusedError, DamagedError, CommitConflict, NotFoundError) as error:
            on_left(error)
        else:
            on_done(_garbage(commit.folder, commit.bytes, REMOVED_RUN, stem_of(commit)))


def _wanted_since(store: Store, new: Iterable[str], garbage: Iterable[Garbage]) -> set[str]:
    """Return the keys that are garbage no more, as manifests came that the search did not see."""
    wanted: set[str] = set()
    for where, keys in _by_generation(new).items():
        wanted |= {one.key for one in garbage if (one.tag, one.generation, one.form) == where}
        for known in _generation(store, where, keys):
            wanted |= objects_of([known.manifest]).keys()
            wanted |= {staging_key(file) for file in known.manifest.files}
    return wanted


@dataclass(slots=True, kw_only=True)
class _Seen:
    """Keep what one pass over all manifests needs in memory: keys of objects, not the manifests."""

    listed: dict[str, int] = field(default_factory=dict)
    """Object → how many generations list it, in revisions that are not replaced."""
    dead: list[KnownManifest] = field(default_factory=list)
    opened: dict[Stem, frozenset[str]] = field(default_factory=dict)
    """Generation whose deletion was cut short → the objects that it lists."""
    spares: set[str] = field(default_factory=set)
    """Spares whose object is listed and not what it should be: a repair is at work, or was killed."""

    def freed(self, where: Stem, sizes: dict[str, int]) -> int:
        """Bytes that finishing a removal frees: of what no other generation lists."""
        mine = self.opened.get(where, frozenset())
        return sum(sizes.get(key, 0) for key in mine if self.listed[key] == 1)


def _read(
    store: Store,
    places: dict[Stem, list[str]],
    dead: _Dead,
    spares: Collection[str],
    is_open: Collection[Stem],
) -> _Seen:
    """Every manifest once, one generation at a time.

    Raises:
        RefusedError: one cannot be read.
    """
    seen = _Seen()
    for where in sorted(places):
        manifests = _generation(store, where, places[where])
        replaced = dead.of(where, manifests)
        seen.dead += replaced
        gone = {known.key for known in replaced}
        mine = frozenset(objects_of(k.manifest for k in manifests if k.key not in gone))
        for key in mine:
            seen.listed[key] = seen.listed.get(key, 0) + 1
        if where in is_open:
            seen.opened[where] = mine
        if spares:
            files = (file for known in manifests for file in known.manifest.files)
            wanted = {key: file for file in files if (key := staging_key(file)) in spares}
            seen.spares |= {key for key, file in wanted.items() if not holds(store, file.key, file)}
    return seen


def _generation(store: Store, where: Stem, keys: Iterable[str]) -> list[KnownManifest]:
    try:
        found = [read_manifest(store, key) for key in sorted(keys)]
    except DamagedError as error:
        raise RefusedError(f"nothing in {store.url} is removed: {error.message}", hint=_HINT) from error
    return [known for known in found if known is not None and stem_of(known.manifest) == where]


def _objects(seen: _Seen, stones: dict[Stem, Tombstone], sizes: dict[str, int]) -> dict[str, Garbage]:
    """Return objects listed only by replaced revisions, and objects uploaded after their generation was
    retired.
    """
    objects: dict[str, Garbage] = {}
    for known in seen.dead:
        m = known.manifest
        for key in objects_of([m]).keys() - seen.listed.keys():
            if key in sizes:
                why = f"of revision {m.revision} of {m.node}, which a newer one replaced"
                objects[key] = _garbage(key, sizes[key], why, stem_of(m))
    for where, stone in stones.items():
        folder = folder_name(*where)
        for path, _ in stone.fingerprints:
            key = f"{folder}/{path}"
            if key in sizes and key not in seen.listed:
                reason = "deleted by retention; sent again by a late node"
                objects[key] = _garbage(key, sizes[key], reason, where)
    return objects


def _by_generation(keys: Iterable[str]) -> dict[Stem, list[str]]:
    places: dict[Stem, list[str]] = {}
    for key in keys:
        where = stem_of_key(key.rpartition("/")[0])
        if where is not None:
            places.setdefault(where, []).append(key)
    return places


def _manifest_keys(store: Store) -> frozenset[str]:
    return frozenset(info.key for info in store.list(f"{ROOT}/nodes/"))


def _stems(found: Documents) -> set[Stem]:
    return {stem_of(view.commit) for view in found.commits}


class _Dead:
    """Revisions that neither a COMMIT nor a supplement quotes and a newer one of their node replaced, of
    generations that are committed and not the newest: nobody ships into those any more."""

    def __init__(self, found: Documents, retiring: Collection[Stem]) -> None:
        live = found.live()
        newest: dict[str, Order] = {}
        for commit in (view.commit for view in live if view.commit.form == "zero"):
            run_id = run_of(commit, commit.job_id)
            newest[run_id] = max(order_of(commit), newest.get(run_id, order_of(commit)))
        over = {
            stem_of(v.commit)
            for v in live
            if (top := newest.get(run_of(v.commit, v.commit.job_id))) is not None and order_of(v.commit) < top
        }
        self._over = over - set(retiring)
        views = (*found.commits, *found.supplements)
        self._quoted = {ref.sha256 for view in views for ref in view.commit.manifests}

    def of(self, where: Stem, manifests: list[KnownManifest]) -> list[KnownManifest]:
        """Return those of one generation."""
        if where not in self._over:
            return []
        current = {known.key for known in newest_revisions(manifests)}
        return [k for k in manifests if k.key not in current and k.sha256 not in self._quoted]


def _garbage(key: str, size: int, why: str, where: Stem | None) -> Garbage:
    tag, generation, form = where or ("", 0, "")
    return Garbage(key=key, bytes=size, why=why, tag=tag, generation=generation, form=form)
