"""Read and record what a remote holds, for the deciding thread: observe, describe, confirm, point, record.

Each is one pass of fresh reads; nothing is remembered between two calls, so that a remote that changed hands
or lost its identity is noticed at the next question (docs/design.md §5).
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from ckptd.base.names import IDENTITY_KEY, ROOT, encode_name
from ckptd.core.model.decision import PINS, Decision, decision_key, lacking, named_pin, parse_decision
from ckptd.core.model.generation import choose_pointers, order_of
from ckptd.core.model.layouts import LATEST_UNIVERSAL
from ckptd.core.model.manifest import (
    Commit,
    RemoteIdentity,
    Tombstone,
    TombstoneHeader,
    may_cover,
    name_in,
    sha256_of,
    side_key,
    stem,
    supplement_of,
    to_bytes,
)
from ckptd.core.model.runs import RUNS, pointed_at
from ckptd.errors import CkptdError, DamagedError, NotPermitted, RemoteNotOurs, StorageError
from ckptd.storage.remote.documents import (
    NODES,
    DocumentCache,
    GenerationSnapshot,
    ManifestCache,
    committed_digests,
    manifest_folder,
    manifest_keys,
    manifests_of_commit,
    read_commits,
    read_decisions,
    read_identity,
    read_snapshot,
    read_stones,
    stem_of,
    stem_of_key,
)
from ckptd.storage.remote.messages import (
    CommitView,
    Confirmed,
    ManifestView,
    NamedManifest,
    Observation,
    TagView,
)
from ckptd.storage.remote.runs import read_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.model.manifest import NodeManifest
    from ckptd.core.model.runs import Row
    from ckptd.storage.remote.documents import Documents, Stem
    from ckptd.storage.remote.kept import KeptDocuments
    from ckptd.storage.stores.base import Abilities, ObjectInfo, Store


_POINTER_TRIES = 3
_SERIAL_TRIES = 20
_MOST_KNOWN = 1024
_whole: dict[bytes, bool] = {}
"""Digests of listings that were looked at, in this process."""


def still_ours(store: Store, identity: RemoteIdentity) -> RemoteIdentity:
    """Read `remote.json` afresh.

    Raises:
        RemoteNotOurs: it is gone, or another than `identity`.
    """
    found = require_identity(store)
    if (found.remote_id, found.job_id) != (identity.remote_id, identity.job_id):
        msg = f"{store.url} belongs to job {found.job} ({found.job_id}) now"
        hint = "another share is mounted there, or the job was taken over"
        if found.job == identity.job:
            msg = f"{store.url} is not the remote that it was: its {IDENTITY_KEY} was made again"
            hint = "another share is mounted there? else stop the daemon, `ckptd takeover JOB`"
        raise RemoteNotOurs(msg, hint=hint)
    return found


def require_identity(store: Store) -> RemoteIdentity:
    """Read `remote.json` of a remote whose identity is not known yet.

    Raises:
        RemoteNotOurs: it has none.
    """
    found = read_identity(store)
    if found is None:
        msg = f"{store.url} has no {IDENTITY_KEY}"
        raise RemoteNotOurs(msg, hint="not mounted, or emptied? see `ckptd check`")
    return found


def observe(
    store: Store,
    identity: RemoteIdentity,
    cache: DocumentCache | None = None,
    *,
    skip: tuple[type[CkptdError], ...] = (DamagedError,),
) -> Observation:
    """Read everything the deciding thread needs to know of a remote, in one dated observation.

    Documents that fail with one of `skip` are named in `damaged`.
    """
    found_identity = still_ours(store, identity)
    cache = DocumentCache() if cache is None else cache
    found = read_commits(store, cache=cache, skip=skip)
    read_decisions(store, found, cache)
    listed = manifest_keys(found.listing.below(NODES))
    with_manifests = listed.keys()
    committed = {stem_of(view.commit) for view in found.commits}
    retired = _stones_that_matter(store, found, with_manifests | committed, cache)
    rows = _rows(store, found, cache)
    wanted = choose_pointers(pointed_at(rows, [view.commit for view in found.live()]))
    pointers = _pointer(store, "latest"), _pointer(store, LATEST_UNIVERSAL)
    saves = {where[:2] for where in committed}
    open_stones = {stem_of(stone) for stone in retired} & (with_manifests | committed)
    uncommitted = sorted(with_manifests - committed - found.stones.keys())
    cache.forget_unasked()
    return Observation(
        identity=found_identity,
        commits=tuple(found.commits),
        retired=tuple(retired),
        retired_tags=tuple(sorted({where[0] for where in found.stones})),
        retired_beside=tuple(sorted(where for where in found.stones if where[:2] in saves)),
        unreadable=tuple(sorted(found.unreadable)),
        decisions=tuple(found.decisions),
        uncommitted=tuple(uncommitted),
        listed_whole=tuple(where for where in uncommitted if _is_whole(listed[where])),
        retiring=tuple(sorted(open_stones)),
        latest=pointers[0],
        latest_universal=pointers[1],
        is_pointing=bool(found.damaged) or pointers == (wanted.latest, wanted.latest_universal),
        damaged=tuple(found.damaged),
        damaged_pins=tuple(found.damaged_pins),
        supplements=tuple(found.supplements),
        free_bytes=store.free_bytes(),
        rows=rows,
    )


def _rows(store: Store, found: Documents, cache: DocumentCache) -> tuple[Row, ...]:
    """Return which runs there are; what cannot be read is named in `found`."""
    try:
        return read_runs(store, cache, found.listing.below(RUNS))
    except found.skip as error:
        found.damaged.append(error.message)
        return ()


def _is_whole(keys: Sequence[str]) -> bool:
    """Tell whether a listing may be a whole generation, computed once for each by digest: listings may be
    long."""
    digest = blake2b("\0".join(keys).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    found = _whole.get(digest)
    if found is None:
        if len(_whole) >= _MOST_KNOWN:
            _whole.clear()
        found = _whole[digest] = may_cover([name for key in keys if (name := name_in(key)) is not None])
    return found


def _stones_that_matter(
    store: Store, found: Documents, left: set[Stem], cache: DocumentCache | None
) -> list[TombstoneHeader]:
    """Return the tombstones of removals that are under way, and of disputed COMMITs.

    No other can be the highest order, because a COMMIT that counted was deleted only while a higher one stood
    (retention never removes the newest). That is not relied on where a document is unreadable, or nothing
    counts.
    """
    is_doubtful = bool(found.damaged) or not found.live()
    wanted = found.stones.keys() if is_doubtful else found.stones.keys() & (left | found.disputed)
    return read_stones(store, found, wanted, TombstoneHeader, cache)


def describe(
    store: Store,
    tag: str,
    identity: RemoteIdentity,
    *,
    node: str | None = None,
    manifests: ManifestCache | None = None,
) -> TagView:
    """Read the COMMITs, tombstones and manifests of one tag: all, or those that `node` needs of many."""
    cache = ManifestCache() if manifests is None else manifests
    still_ours(store, identity)
    found = read_commits(store, only_tag=tag)
    if found.commits:
        store.flush_name(found.commits[0].key)
    digests = committed_digests(found.commits)
    views = {stem_of(view.commit): view for view in found.commits}
    with_manifests = manifest_keys(found.listing.below(NODES))
    stems = {where for where in with_manifests if where[0] == tag} | views.keys()
    seen = {where: _needed(store, found, where, node, cache) for where in sorted(stems)}
    stones = read_stones(store, found, found.stones, Tombstone)
    unreadable = found.unreadable | (found.stones.keys() - {stem_of(stone) for stone in stones})
    return TagView(
        tag=tag,
        manifests=tuple(
            ManifestView(
                key=known.key,
                sha256=known.sha256,
                manifest=known.manifest,
                committed=known.sha256 in digests,
            )
            for one in seen.values()
            for known in one.read
        ),
        named=tuple(
            NamedManifest(generation=where[1], form=where[2], name=name)
            for where, one in seen.items()
            for name in one.named
        ),
        commits=tuple(found.commits),
        retired=tuple(stones),
        unreadable=tuple(sorted(unreadable)),
    )


def _needed(
    store: Store, found: Documents, where: Stem, node: str | None, cache: ManifestCache
) -> GenerationSnapshot:
    """Read the manifests of a generation that tell a node whether it is its save and lists its files.

    An open generation may tell a node without model states which save this is.
    """
    commit = next((view for view in found.commits if stem_of(view.commit) == where), None)
    infos = found.listing.below(manifest_folder(where))
    seen = read_snapshot(store, where, cache, node=node, commit=commit, reads_one=commit is None, infos=infos)
    is_counted = commit is not None and not commit.disputed
    is_strange = is_counted and all(known.manifest.node != node for known in seen.read)
    if not (is_strange and seen.named):
        return seen
    return read_snapshot(store, where, cache, node=None, commit=commit, infos=infos)


def confirm(store: Store, commits: tuple[tuple[str, str], ...], identity: RemoteIdentity) -> Confirmed:
    """Confirm that each COMMIT is there, with that digest, undisputed and not entombed: read afresh."""
    still_ours(store, identity)
    if not commits:
        return Confirmed(ok=False, reason="no COMMIT was named")
    for key, sha256 in commits:
        data = store.get(key)
        if data is None:
            return Confirmed(ok=False, reason=f"{key} is gone")
        if sha256_of(data) != sha256:
            return Confirmed(ok=False, reason=f"{key} is another COMMIT now")
        late = supplement_of(key)
        where = late[:3] if late is not None else stem_of_key(key)
        if where is None:
            continue
        if store.get(side_key("disputes", stem(*where))) is not None:
            return Confirmed(ok=False, reason=f"{key} is disputed")
        if store.get(side_key("retired", stem(*where))) is not None:
            return Confirmed(ok=False, reason=f"{key} is being deleted")
        store.flush_name(key)
    return Confirmed(ok=True)


def point(store: Store, cache: DocumentCache | None = None, leaving: Stem | None = None) -> None:
    """Let the pointers name what they should, re-read until they do (another node may move them too; P6).

    `cache`: COMMITs that were read before; which there are is listed each time. `leaving`: one that is about
    to be deleted, which they no longer name.
    """
    cache = DocumentCache() if cache is None else cache
    for _ in range(_POINTER_TRIES):
        found = read_commits(store, cache=cache)
        rows = read_runs(store, cache, found.listing.below(RUNS))
        staying = [view.commit for view in found.live() if stem_of(view.commit) != leaving]
        wanted = choose_pointers(pointed_at(rows, staying))
        changed = _set(store, "latest", wanted.latest)
        if not _set(store, LATEST_UNIVERSAL, wanted.latest_universal) and not changed:
            return


def is_pointed_at(store: Store, folder: str) -> bool:
    """Tell whether a pointer names the folder of a COMMIT."""
    return folder in (_pointer(store, "latest"), _pointer(store, LATEST_UNIVERSAL))


def _set(store: Store, key: str, name: str | None) -> bool:
    found = _pointer(store, key)
    if name is None:
        if found is None:
            return False
        store.delete(key)
        return True
    if found == name:
        return False
    store.put(key, name.encode())
    return True


def _pointer(store: Store, name: str) -> str | None:
    """Return the content of a pointer; None where there is none, or something else bears its name."""
    try:
        data = store.get(name)
    except DamagedError:
        return None
    return None if data is None else data.decode(errors="replace").strip()


def record(store: Store, decision: Decision, identity: RemoteIdentity) -> Decision:
    """Put a person's decision in the remote, create-only, as the newest of its subject (P8).

    Returns it as it stands there: its serial is raised above every other of the same subject (pin and unpin
    are one subject); saying the same thing twice changes nothing, but for `adopt`.
    """
    still_ours(store, identity)
    for _ in range(_SERIAL_TRIES):
        newest = _newest(store, decision)
        # an adopt is of the first starts before it: said again, it means those since
        is_new = decision.kind == "adopt"
        if not is_new and newest is not None and newest.model_copy(update=_of(decision)) == decision:
            # of one that cannot be read its name does not say who decided it, and when
            is_read = newest.by or newest.at
            return newest if is_read else decision.model_copy(update={"serial": newest.serial})
        if newest is not None and newest.serial >= decision.serial:
            decision = decision.model_copy(update={"serial": newest.serial + 1})
        if store.put_if_absent(decision_key(decision), to_bytes(decision)):
            return decision
        # another writer's, or one that cannot be read
        decision = decision.model_copy(update={"serial": decision.serial + 1})
    raise _changes_too_fast(store, decision)


def publish(store: Store, decision: Decision, identity: RemoteIdentity) -> None:
    """Put what was decided before in a remote that lacks it, create-only (P8, adr/0165).

    Unlike `record`, it overrides nothing: a pin or unpin keeps its serial, so that a newer word counts.
    """
    still_ours(store, identity)
    for _ in range(_SERIAL_TRIES):
        # what cannot be read may be what takes it back
        if not lacking([decision], _of_subject(store, decision, skips_damaged=False)):
            return
        key, data = decision_key(decision), to_bytes(decision)
        if store.put_if_absent(key, data) or decision.kind in PINS or store.get(key) == data:
            return
        decision = decision.model_copy(update={"serial": decision.serial + 1})
    raise _changes_too_fast(store, decision)


def _changes_too_fast(store: Store, decision: Decision) -> RemoteNotOurs:
    msg = f"{store.url} changes faster than a decision on {decision.tag} can be put there"
    return RemoteNotOurs(msg, hint="something else writes there; see `ckptd check`")


def _of(decision: Decision) -> dict[str, object]:
    """Return the fields that may differ between two records of the same decision."""
    return {"serial": decision.serial, "at": decision.at, "by": decision.by}


def _newest(store: Store, decision: Decision) -> Decision | None:
    return max(_of_subject(store, decision), key=lambda held: held.serial, default=None)


def _of_subject(store: Store, decision: Decision, *, skips_damaged: bool = True) -> list[Decision]:
    """Read the decisions in the remote on the same subject; of other decisions, and of a pin that is damaged,
    only the names are read.

    Raises:
        DamagedError: another cannot be read, and is not to be skipped.
    """
    kinds = PINS if decision.kind in PINS else (decision.kind,)
    found: list[Decision] = []
    for info in store.list(f"{decision_key(decision).rpartition('/')[0]}/"):
        file = info.key.rpartition("/")[2]
        kind, _, rest = file.removesuffix(".json").partition("~")
        if kind not in kinds or rest.rpartition("~")[0] != encode_name(decision.tag):
            continue
        try:
            data = store.get(info.key)
            held = None if data is None else parse_decision(data, info.key)
        except DamagedError:
            held = named_pin(file)
            if held is None and not skips_damaged:
                raise
        if held is not None:
            found.append(held)
    return found


def is_pinned(store: Store, tag: str) -> bool:
    """Whether the newest pin or unpin of the tag in the remote is a pin."""
    newest = _newest(store, Decision(kind="pin", tag=tag))
    return newest is not None and newest.kind == "pin"


# --- a remote read by commands without the daemon --------------------------------------------------------
# `list`, `resume`, `restore` and `verify` write nothing and initialise nothing; a remote that is not there
# raises, a remote without commits is an answer.

UNREADABLE = (DamagedError, NotPermitted, StorageError)
"""Errors of one document after which the others are still wanted (`verify`)."""


def read_remote(store: Store, *, is_tolerant: bool = False) -> Observation:
    """Read what the remote holds now.

    `is_tolerant`: also where rights or the disk forbid reading one document.

    Raises:
        RemoteNotOurs: it has no `remote.json` ("not mounted?").
        RemoteUnreachable: it is not there.
    """
    skip: tuple[type[CkptdError], ...] = UNREADABLE if is_tolerant else (DamagedError,)
    found = require_identity(store)  # an unmounted place is named as such before it is listed
    return observe(store, found, cache=_fetched(store), skip=skip)


def _fetched(store: Store) -> DocumentCache:
    """Fetch COMMITs and tombstones, many at a time: each costs a round trip. What fails is read again, in
    turn.
    """
    cache = DocumentCache()

    def fetch(info: ObjectInfo, kind: type[Commit] | type[Tombstone]) -> None:
        with contextlib.suppress(CkptdError):
            cache.get(store, info, kind)

    if store.lanes > 1:
        kinds: tuple[tuple[str, type[Commit] | type[Tombstone]], ...]
        kinds = ((f"{ROOT}/retired/", Tombstone), (f"{ROOT}/commits/", Commit))
        with ThreadPoolExecutor(store.lanes, thread_name_prefix="documents") as pool:
            for prefix, kind in kinds:
                for info in list(store.list(prefix)):
                    pool.submit(fetch, info, kind)
    return cache


def live_commits(observation: Observation) -> tuple[CommitView, ...]:
    """Return the COMMITs that exist for consumers (undisputed, not being retired), oldest first (P3, P9)."""
    gone = {(stone.tag, stone.generation, stone.form) for stone in observation.retired}
    live = [v for v in observation.commits if not v.disputed and stem_of(v.commit) not in gone]
    return tuple(sorted(live, key=lambda view: (order_of(view.commit), view.commit.generation)))


def manifests_of(store: Store, commit: Commit | CommitView) -> list[NodeManifest]:
    """Return the manifests that a COMMIT rests on, digests checked.

    Raises:
        DamagedError: one is absent or another than the COMMIT quotes.
    """
    document = commit if isinstance(commit, Commit) else commit.commit
    return [known.manifest for known in manifests_of_commit(store, document)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedRemote:
    """Hold a store with the abilities and the identity that were seen when it was attached."""

    store: Store
    abilities: Abilities
    identity: RemoteIdentity
    manifests: ManifestCache = field(default_factory=ManifestCache)
    """Manifests read before; they never change."""
    documents: DocumentCache = field(default_factory=DocumentCache)
    kept: KeptDocuments | None = None
    """None: this process keeps none."""
