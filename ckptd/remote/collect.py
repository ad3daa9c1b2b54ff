"""What lies in a remote though nothing counts on it, and is provably ours: for `ckptd gc` (design.md §5).

Keys come from tombstones and from manifests that a newer revision replaced, never from a prefix. An object
that nobody ever listed stays: an upload under way looks just so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.coverage import newest_revisions, objects_of, order_of
from ckptd.core.manifest import ROOT, Commit, Tombstone, folder_name, parse
from ckptd.errors import RefusedError
from ckptd.remote.commit import Ground
from ckptd.remote.documents import (
    LEASES,
    generations_with_manifests,
    read_commits,
    read_generation,
    read_stones,
    stem_of,
    stem_of_key,
)
from ckptd.remote.messages import Retire
from ckptd.remote.observe import still_ours
from ckptd.remote.resend import SPARE, holds, spare_key
from ckptd.remote.retire import retire
from ckptd.remote.store import Abilities

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.core.coverage import KnownManifest
    from ckptd.core.manifest import RemoteIdentity
    from ckptd.remote.documents import Documents, Stem
    from ckptd.remote.store import Store

_AT_A_TIME = 100
"""Objects that go before manifests are looked at again."""
_POINTERS = ("latest", "latest_universal")
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
    """What `gc` finds in a remote: objects, removals that were cut short, and what it cannot prove ours."""

    objects: tuple[Garbage, ...]
    retiring: tuple[tuple[Tombstone, int], ...]
    """(tombstone, bytes that finishing it frees)."""
    unlisted_objects: int
    unlisted_bytes: int
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
    manifests = _manifests(store)
    sizes = {
        info.key: info.bytes
        for info in store.list("")
        if not info.key.startswith(f"{ROOT}/") and info.key not in _POINTERS
    }
    left = {key.partition("/")[0] for key in sizes}
    speaking = {w for w in found.stones if w in manifests or w in _stems(found) or folder_name(*w) in left}
    stones = {stem_of(stone): stone for stone in read_stones(store, found, speaking, Tombstone)}
    if found.damaged:
        raise RefusedError(f"nothing in {store.url} is removed: {found.damaged[0]}", hint=_HINT)
    open_stones = {where: s for where, s in stones.items() if where in manifests or where in _stems(found)}
    dead = _dead(store, found, manifests, open_stones)
    objects = _objects(manifests, dead, {w: t for w, t in stones.items() if w not in open_stones}, sizes)
    documents = [_garbage(k.key, 0, "a replaced revision of a manifest", stem_of(k.manifest)) for k in dead]
    spares = {info.key: info.bytes for info in store.list(SPARE)}
    needed_spares = _needed(store, spares, manifests) if spares else set()
    over = _stems(found) | found.stones.keys()
    leases = [
        _garbage(info.key, 0, "a lease of a generation that is over", stem_of_key(info.key))
        for info in store.list(LEASES)
        if stem_of_key(info.key) in over
    ]
    listed = set(objects_of(k.manifest for known in manifests.values() for k in known))
    unlisted = sizes.keys() - listed - objects.keys()
    return Collected(
        objects=(
            *objects.values(),
            *documents,
            *leases,
            *(_garbage(k, n, "left by a repair", None) for k, n in spares.items() if k not in needed_spares),
        ),
        retiring=tuple((stone, _freed(where, manifests, sizes)) for where, stone in open_stones.items()),
        unlisted_objects=len(unlisted),
        unlisted_bytes=sum(sizes[key] for key in unlisted),
        spares=len(needed_spares),
        manifests=keys,
    )


def carry_out(
    store: Store, identity: RemoteIdentity, found: Collected, on_done: Callable[[Garbage], None]
) -> None:
    """Finish removals, then remove objects; `on_done` after each.

    Raises:
        RefusedError, CommitConflict: as `retire`.
    """
    ground = Ground(
        store=store, abilities=Abilities(create_only=True, checksum=None, resumable=True), identity=identity
    )
    for stone, size in found.retiring:
        order = Retire(
            tag=stone.tag,
            generation=stone.generation,
            form=stone.form,
            reason=stone.reason,
            commit_sha256=stone.commit_sha256,
        )
        retire(ground, order, lambda: None)
        on_done(_garbage(folder_name(*stem_of(stone)), size, f"retired: {stone.reason}", stem_of(stone)))
    seen, garbage = found.manifests, {one.key for one in found.objects}
    for begin in range(0, len(found.objects), _AT_A_TIME):
        still_ours(store, identity)
        if _manifest_keys(store) != seen:
            # something was listed, or retired, since: only what is garbage now too may go
            now = find(store, identity)
            seen, garbage = now.manifests, {one.key for one in now.objects}
        for one in found.objects[begin : begin + _AT_A_TIME]:
            if one.key in garbage:
                store.delete(one.key)
                seen -= {one.key}
                on_done(one)


def _objects(
    manifests: dict[Stem, tuple[KnownManifest, ...]],
    dead: list[KnownManifest],
    stones: dict[Stem, Tombstone],
    sizes: dict[str, int],
) -> dict[str, Garbage]:
    """What only replaced revisions list, and what came back after its generation was retired."""
    gone = {known.key for known in dead}
    needed = set(objects_of(k.manifest for known in manifests.values() for k in known if k.key not in gone))
    objects: dict[str, Garbage] = {}
    for known in dead:
        m = known.manifest
        for key in objects_of([m]).keys() - needed:
            if key in sizes:
                why = f"of revision {m.revision} of {m.node}, which a newer one replaced"
                objects[key] = _garbage(key, sizes[key], why, stem_of(m))
    for where, stone in stones.items():
        folder = folder_name(*where)
        for path, _ in stone.fingerprints:
            key = f"{folder}/{path}"
            if key in sizes and key not in needed:
                objects[key] = _garbage(key, sizes[key], "retired; sent again by a straggler", where)
    return objects


def _manifest_keys(store: Store) -> frozenset[str]:
    return frozenset(info.key for info in store.list(f"{ROOT}/nodes/"))


def _needed(
    store: Store, spares: Iterable[str], manifests: dict[Stem, tuple[KnownManifest, ...]]
) -> set[str]:
    """Spares whose object is listed and not what it should be: a repair is at work, or was killed."""
    files = (file for known in manifests.values() for k in known for file in k.manifest.files)
    of = {key: file for file in files if (key := spare_key(file)) in spares}
    return {key for key, file in of.items() if not holds(store, file.key, file)}


def _manifests(store: Store) -> dict[Stem, tuple[KnownManifest, ...]]:
    damaged: list[str] = []
    found = {
        where: read_generation(store, where, damaged) for where in sorted(generations_with_manifests(store))
    }
    if damaged:
        raise RefusedError(f"nothing in {store.url} is removed: {damaged[0]}", hint=_HINT)
    return found


def _stems(found: Documents) -> set[Stem]:
    return {stem_of(view.commit) for view in found.commits}


def _dead(
    store: Store,
    found: Documents,
    manifests: dict[Stem, tuple[KnownManifest, ...]],
    retiring: Iterable[Stem],
) -> list[KnownManifest]:
    """Revisions that neither a COMMIT nor a supplement quotes and a newer one of their node replaced, of
    generations that are committed and not the newest: nobody ships into those any more."""
    live = [view for view in found.live() if view.commit.form == "zero"]
    newest = max((order_of(view.commit) for view in live), default=None)
    quoted = {ref.sha256 for view in found.commits for ref in view.commit.manifests}
    quoted |= _supplemented(store)
    dead: list[KnownManifest] = []
    for view in found.live():
        where = stem_of(view.commit)
        if newest is None or order_of(view.commit) >= newest or where in retiring:
            continue
        current = {known.key for known in newest_revisions(manifests.get(where, ()))}
        dead += [k for k in manifests.get(where, ()) if k.key not in current and k.sha256 not in quoted]
    return dead


def _supplemented(store: Store) -> set[str]:
    """Digests that supplements quote."""
    quoted: set[str] = set()
    for info in store.list(f"{ROOT}/commits/"):
        if "~x" in info.key:
            data = store.get(info.key)
            if data is not None:
                quoted |= {ref.sha256 for ref in parse(Commit, data, info.key).manifests}
    return quoted


def _freed(where: Stem, manifests: dict[Stem, tuple[KnownManifest, ...]], sizes: dict[str, int]) -> int:
    mine = set(objects_of(k.manifest for k in manifests.get(where, ())))
    others = set(objects_of(k.manifest for stem, known in manifests.items() if stem != where for k in known))
    return sum(sizes.get(key, 0) for key in mine - others)


def _garbage(key: str, size: int, why: str, where: Stem | None) -> Garbage:
    tag, generation, form = where or ("", 0, "")
    return Garbage(key=key, bytes=size, why=why, tag=tag, generation=generation, form=form)
