"""Coordinate nodes through a remote: heartbeats, shares of a save, the lease on a directory, and runs.

Each but the heartbeats is a row of numbered documents, created only if absent: of two nodes that write the
same number one wins, and both read back who (docs/adr/0110). Only the store's clock decides which host is
alive.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from ckptd.base.humanize import ago
from ckptd.base.names import ROOT
from ckptd.core.model.heartbeat import HEARTBEATS, Heartbeat, SeenNode, heartbeat_key, node_of_key
from ckptd.core.model.manifest import Document, parse, to_bytes
from ckptd.core.model.records import ZERO
from ckptd.core.model.runs import RUNS, Row, RunSeen, judge
from ckptd.core.policy.leases import (
    LEASE,
    LeaseSeen,
    LeaseTerm,
    Shares,
    attempts_folder,
    judge_lease,
    living,
    next_members,
    number_of,
    numbered,
    share_of,
    shares_folder,
)
from ckptd.errors import DamagedError, RefusedError, RemoteError
from ckptd.storage.remote.documents import DocumentCache, stem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptd.core.model.generation import KnownManifest
    from ckptd.core.model.manifest import ManifestFile
    from ckptd.core.model.runs import Claim
    from ckptd.storage.remote.messages import UploadFile, UploadRequest
    from ckptd.storage.stores.base import ObjectInfo, Store


# --- heartbeats ------------------------------------------------------------------------------------------
# Each node replaces one small object at most once a minute; whoever asks reads them. Ages are by the store's
# own times: between two nodes whose clocks differ by an hour they are still right. Where a store keeps no
# times, the documents' own are compared, and the answer says so.

READ_AGAIN_SECONDS = 600.0
"""A node's heartbeat is read again so seldom, unless somebody wants it."""
MOST_NODES = 10_000


class Heartbeats:
    """One remote's, as one process sees them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[str, tuple[float, int, Heartbeat | None]] = {}
        """Key → when it was read (monotonic), which it was, and what it says."""
        self.newest_seconds = 0.0
        """The store's time of the newest one that was listed; 0 unknown."""
        self._put_at: tuple[int, float] | None = None
        """Time of our own last heartbeat: the store's (ns), and our monotonic clock's."""

    def put(self, heartbeat: Heartbeat) -> None:
        """Write one; where another daemon that lives has this node's name, beside its own."""
        key = heartbeat_key(heartbeat.node)
        if heartbeat.save_dir and self._is_anothers(key, heartbeat):
            key = heartbeat_key(heartbeat.node, heartbeat.node_id)
        self.store.put(key, to_bytes(heartbeat))
        info = self.store.stat(key)
        if info is not None and info.mtime_ns:
            self._put_at = info.mtime_ns, time.monotonic()

    def others(
        self, node: str, *, reads_all: bool = False, now_seconds: float | None = None
    ) -> tuple[SeenNode, ...]:
        """Return the heartbeats of all nodes but `node`, by name; `now_seconds`: the store's time."""
        found = [
            (name, info)
            for info in self.store.list(HEARTBEATS)
            if (name := node_of_key(info.key)) is not None
        ][:MOST_NODES]
        infos = [info for _, info in found]
        self.newest_seconds = max((info.mtime_ns for info in infos), default=0) / 1e9
        now_ns = (
            self._now_ns(infos) if now_seconds is None else int(max(now_seconds, self.newest_seconds) * 1e9)
        )
        return tuple(
            self._seen(name, info, now_ns, reads_all=reads_all)
            for name, info in sorted(found, key=lambda one: (one[0], one[1].key))
            if name != node
        )

    def _is_anothers(self, key: str, ours: Heartbeat) -> bool:
        """Whether the plain name is that of a daemon over another directory, which lives."""
        found = list(self.store.list(HEARTBEATS))
        info = next((info for info in found if info.key == key), None)
        if info is None:
            return False
        seen = self._seen(ours.node, info, self._now_ns(found), reads_all=True)
        return not seen.is_dead and _is_elsewhere(seen, ours)

    def elsewhere(self, ours: Heartbeat) -> tuple[SeenNode, ...]:
        """Daemons over other directories than ours, as far as they say over which.

        Who told of another run is read again each time: a second node of this one joins it a moment later.
        """
        for key, (_, at, heartbeat) in list(self._known.items()):
            if heartbeat is not None and heartbeat.run_id != ours.run_id:
                self._known[key] = (-READ_AGAIN_SECONDS, at, heartbeat)
        return tuple(seen for seen in self.others("") if _is_elsewhere(seen, ours))

    def everyone(self, now_seconds: float | None = None) -> tuple[SeenNode, ...]:
        """Return every daemon's, read afresh, also of those that share a node name."""
        return self.others("", reads_all=True, now_seconds=now_seconds)

    def of(self, node: str) -> SeenNode | None:
        """Return one node's, read afresh; None: there is none."""
        found = list(self.store.list(HEARTBEATS))
        info = next((info for info in found if node_of_key(info.key) == node), None)
        return None if info is None else self._seen(node, info, self._now_ns(found), reads_all=True)

    def _now_ns(self, infos: Sequence[ObjectInfo]) -> int | None:
        """Return the store's present: its time of our own heartbeat and what passed since, else its newest
        time.
        """
        newest = max((info.mtime_ns for info in infos), default=0)
        if self._put_at is not None:
            put_ns, at_seconds = self._put_at
            newest = max(newest, put_ns + int((time.monotonic() - at_seconds) * 1e9))
        return newest or None

    def _seen(self, name: str, info: ObjectInfo, now_ns: int | None, *, reads_all: bool) -> SeenNode:
        heartbeat = self._read(info, reads_all=reads_all or not info.mtime_ns)
        if info.mtime_ns and now_ns is not None:
            age = (now_ns - info.mtime_ns) / 1e9
            return SeenNode(node=name, seconds_ago=max(0.0, age), heartbeat=heartbeat)
        age_by_clock = _age_by_clocks(heartbeat) if heartbeat is not None else None
        return SeenNode(node=name, seconds_ago=age_by_clock, is_store_time=False, heartbeat=heartbeat)

    def _read(self, info: ObjectInfo, *, reads_all: bool) -> Heartbeat | None:
        now = time.monotonic()
        known = self._known.get(info.key)
        if known is not None:
            is_same = info.mtime_ns != 0 and known[1] == info.mtime_ns
            if is_same or (not reads_all and now - known[0] < READ_AGAIN_SECONDS):
                return known[2]
        data = self.store.get(info.key)
        found: Heartbeat | None = None
        if data is not None:
            try:
                found = parse(Heartbeat, data, info.key)
            except (DamagedError, RefusedError):
                found = None
        self._known[info.key] = (now, info.mtime_ns, found)
        return found


def _is_elsewhere(seen: SeenNode, ours: Heartbeat) -> bool:
    beat = seen.heartbeat
    if beat is None or not beat.save_dir or beat.node_id == ours.node_id:
        return False
    return (beat.host, beat.save_dir) != (ours.host, ours.save_dir)


def _age_by_clocks(heartbeat: Heartbeat) -> float | None:
    try:
        at = datetime.fromisoformat(heartbeat.as_of)
    except ValueError:
        return None
    aware = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (datetime.now(UTC) - aware).total_seconds())


# --- replicas: files that several nodes have, uploaded once ----------------------------------------------
# Under ZeRO-1/2 every node has the same `mp_rank_*_model_states.pt`. The holder of data-parallel rank 0
# uploads them at once. The others leave them to it for a while after their own shards are verified, and for
# good once a manifest of the generation lists them with the same tensors: pickles of replicas may differ,
# their storages do not (docs/design.md §5).


def tensors(file: UploadFile | ManifestFile) -> tuple[str, str]:
    """Return what identifies a replica of a file: its path, and the fingerprint of its storages."""
    return file.path, file.tensor_fingerprint or file.fingerprint


def tensors_of(manifests: Iterable[KnownManifest]) -> frozenset[tuple[str, str]]:
    """Return what identifies replicas (see `tensors`) for every file that the manifests list."""
    return frozenset(tensors(file) for known in manifests for file in known.manifest.files)


def leave_to_owner(order: UploadRequest, listed: Callable[[], Iterable[KnownManifest]]) -> UploadRequest:
    """Return the order without the replicas that another node listed, or that are still left to it.

    `listed` reads the generation's manifests; it is asked only by who would step in.
    """
    if not any(file.is_replica for file in order.files):
        return order
    others = listed() if order.steps_in else ()
    held = tensors_of(known for known in others if known.manifest.node_id != order.manifest.node_id)
    kept = tuple(
        file for file in order.files if not file.is_replica or (order.steps_in and tensors(file) not in held)
    )
    if len(kept) == len(order.files):
        return order
    left = tuple(sorted(tensors(file) for file in order.files if file not in kept))
    manifest = order.manifest.model_copy(update={"replicas": left})
    return order.model_copy(update={"files": kept, "manifest": manifest})


# --- rows of numbered documents --------------------------------------------------------------------------


_TRIES = 8
_Row = TypeVar("_Row", bound=Document)


def latest_row(store: Store, folder: str, kind: type[_Row]) -> tuple[int, _Row | None]:
    """Return the newest document of a row; (0, None): there is none."""
    number = max((number_of(folder, info.key) for info in store.list(folder)), default=0)
    data = store.get(numbered(folder, number)) if number else None
    return (number, parse(kind, data, numbered(folder, number))) if data is not None else (number, None)


def append_row(
    store: Store, folder: str, kind: type[_Row], wanted: Callable[[_Row | None], _Row | None]
) -> _Row:
    """Supersede the newest document by `wanted` where that gives one; return the newest, read back."""
    for _ in range(_TRIES):
        number, found = latest_row(store, folder, kind)
        after = wanted(found)
        if after is None:
            if found is not None:
                return found
            continue
        made = after.model_copy(update={"number": number + 1})
        store.put_if_absent(numbered(folder, number + 1), to_bytes(made))
    msg = f"{store.url}: the hosts of this job do not agree under {folder}"
    raise RemoteError(msg, hint="it is tried again; see that no two hosts have one node_name")


def _timed(store: Store, others: Iterable[SeenNode]) -> tuple[SeenNode, ...]:
    found = tuple(others)
    if any(not seen.is_store_time for seen in found):
        msg = f"{store.url} keeps no times: which hosts of a shared directory live cannot be told there"
        raise RefusedError(msg, hint="shared_fs needs a directory, S3 or SFTP remote")
    return found


# --- shares of a save ------------------------------------------------------------------------------------


def take_share(
    store: Store, order: UploadRequest, listed: Callable[[], Sequence[KnownManifest]]
) -> UploadRequest:
    """Return the order with this node's share of the files alone; the others are left to theirs, by
    fingerprint.

    What somebody listed already is nobody's to send, what we listed ourselves stays ours.

    Raises:
        RefusedError: the store cannot tell who lives.
    """
    if order.takeover_seconds is None or order.manifest.form != ZERO:
        return order
    ours, (tag, generation, form) = order.manifest, stem_of(order.manifest)
    seen = _timed(store, Heartbeats(store).others(ours.node, reads_all=True))
    here = living(ours.node, seen, order.takeover_seconds)

    def wanted(found: Shares | None) -> Shares | None:
        members = (
            next_members(found.members, here | {ours.node}) if found is not None else tuple(sorted(here))
        )
        if found is not None and members == found.members:
            return None
        return Shares(job_id=ours.job_id, number=0, members=members, by=ours.node)

    shares = append_row(store, shares_folder(tag, generation, form), Shares, wanted)
    folder = [f.path for f in order.files if f.identity is not None]
    mine = share_of(tag, folder, shares.members, ours.node)
    known = listed() if shares.number > 1 or ours.node not in shares.members else ()
    others = {f.key for k in known if k.manifest.node_id != ours.node_id for f in k.manifest.files}
    own = {f.key for k in known if k.manifest.node_id == ours.node_id for f in k.manifest.files}
    # what lies beside the folder travels with the first file, so that a COMMIT over all files has it too
    has_first = bool(folder) and min(folder) in mine
    kept = tuple(
        f
        for f in order.files
        if f.key in own or (f.key not in others and (f.path in mine if f.identity is not None else has_first))
    )
    left = tuple(sorted(tensors(f) for f in order.files if f not in kept and f.tensor_fingerprint))
    manifest = ours.model_copy(update={"replicas": left})
    return order.model_copy(update={"files": kept, "manifest": manifest})


def lacking(whole: UploadRequest, members: Iterable[KnownManifest]) -> tuple[str, ...]:
    """Return the files of a shared folder that no manifest lists yet: nothing is committed before each has
    its place.
    """
    if whole.takeover_seconds is None or whole.manifest.form != ZERO:
        return ()
    held = tensors_of(members)
    return tuple(f.path for f in whole.files if f.identity is not None and tensors(f) not in held)


def forget_rows(store: Store, where: tuple[str, int, str]) -> None:
    """Delete the shares and attempts of a retired generation: no node divides or makes it any more."""
    for info in list(store.list(shares_folder(*where) if where[2] == ZERO else attempts_folder(*where))):
        store.delete(info.key)


# --- the lease on a shared save_dir ----------------------------------------------------------------------


def hold_lease(
    store: Store, job_id: str, node: str, node_id: str, others: Iterable[SeenNode], takeover_seconds: float
) -> LeaseSeen:
    """Take the lease where nobody holds it, and say who does; `others`: heard of after ours was written.

    Raises:
        RefusedError: the store cannot tell who lives.
    """
    heard = _timed(store, others)

    def wanted(found: LeaseTerm | None) -> LeaseTerm | None:
        if judge_lease(found, node, node_id, heard, takeover_seconds) != "take":
            return None
        return LeaseTerm(job_id=job_id, number=0, node=node, node_id=node_id)

    term = append_row(store, LEASE, LeaseTerm, wanted)
    is_ours = term.node_id == node_id
    if is_ours:
        for info in list(store.list(LEASE)):
            if 0 < number_of(LEASE, info.key) < term.number:
                store.delete(info.key)
    return LeaseSeen(epoch=term.number, node=term.node, is_ours=is_ours)


# --- live nodes ------------------------------------------------------------------------------------------
# They are told by their heartbeats and the store's own time. Documents half written by killed processes of
# this node are removed here, too.

NEXT_STEP = (
    "a run of its own needs a name and a url of its own; for a second node of this run nothing is to do"
)


def live_nodes(store: Store, *, but_node: str = "", but_node_id: str = "") -> tuple[SeenNode, ...]:
    """Return the nodes that were heard of lately and have not ended, but for the one named; the last heard of
    first.

    Writes a small object and removes it again where there are heartbeats and the store tells no time itself.
    """
    if next(iter(store.list(HEARTBEATS)), None) is None:
        return ()
    found = Heartbeats(store).others(but_node, reads_all=True, now_seconds=server_time_seconds(store))
    here = [
        (seen.seconds_ago, seen.node, seen)
        for seen in found
        if seen.seconds_ago is not None and not seen.is_dead and not _is_own(seen, but_node_id)
    ]
    return tuple(seen for _, _, seen in sorted(here, key=lambda one: one[:2]))


_TEMPORARY_SECONDS = 600.0
"""An older temporary of ours was left by a process that was killed: each lives for one small write."""


def remove_stale_temporaries(store: Store) -> tuple[ObjectInfo, ...]:
    """Remove what killed processes of the store's owner left of documents; return what was removed."""
    found = stale_temporaries(store)
    for info in found:
        store.delete(info.key)
    return found


def stale_temporaries(store: Store) -> tuple[ObjectInfo, ...]:
    """List it, by the store's time."""
    found = store.left_temporaries()
    now = server_time_seconds(store) if found else None
    return () if now is None else tuple(i for i in found if i.mtime_ns / 1e9 < now - _TEMPORARY_SECONDS)


def other_writers(found: Sequence[SeenNode], remote: str, since: str) -> str:
    """Say in words that other nodes write under this name, naming the one last heard of.

    Whoever begins a run may have meant another remote, or another name.
    """
    seen = found[0]
    newest = seen.heartbeat.newest if seen.heartbeat is not None else None
    step = f", its newest step {newest.step}" if newest is not None else ""
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    heard = f"heard of {ago(seen.seconds_ago or 0.0)} ago{step}; that remote was made {since}"
    return f"node {seen.node}{more} writes to {remote} under this name, too: {heard}"


def _is_own(seen: SeenNode, node_id: str) -> bool:
    return bool(node_id) and seen.heartbeat is not None and seen.heartbeat.node_id == node_id


def server_time_seconds(store: Store) -> float | None:
    """Return the store's time: from its answers, else from the time stamp of a small object written now.

    None: the store keeps no times.
    """
    now = store.now_seconds()
    if now is not None:
        return now
    key = f"{ROOT}/probe~{secrets.token_hex(8)}"
    try:
        store.put(key, b"1")
        info = store.stat(key)
    finally:
        store.delete(key)
    return info.mtime_ns / 1e9 if info is not None and info.mtime_ns else None


# --- Runs: who may go on in a remote (docs/adr/0185) --------------------------------------------------


def read_runs(store: Store, cache: DocumentCache | None = None) -> tuple[Row, ...]:
    """Return every row, in order of number.

    Raises:
        DocumentDamaged, RefusedError: one cannot be read; whose turn it is, is not known then.
    """
    cache = DocumentCache() if cache is None else cache
    found = []
    for info in store.list(RUNS):
        number = number_of(RUNS, info.key)
        read = cache.get(store, info, Row) if number else None
        if read is not None:
            found.append(read[0].model_copy(update={"number": number}))
    return tuple(sorted(found, key=lambda row: row.number))


def claim_run(
    store: Store, claim: Claim, job_id: str, beat: Callable[[str], None] = lambda _run_id: None
) -> RunSeen:
    """Say that a place goes on with a run there, unless another one that lives does.

    Of two that say so at once one creates the row; the other reads it and is judged again. Who adds no row is
    judged again after its heartbeat, so that of two with one rank not both join. `beat` writes the
    place's heartbeat with a run id: before the row, so that whoever reads a row finds that its place lives.

    Raises:
        RemoteError: the places do not come to an end.
    """
    said: str | None = None
    for _ in range(_TRIES):
        number, row = latest_row(store, RUNS, Row)
        row = row.model_copy(update={"number": number}) if row is not None else None
        seen = Heartbeats(store).everyone(server_time_seconds(store)) if row is not None else ()
        is_virgin = row is None and next(iter(store.list(f"{ROOT}/commits/")), None) is None
        decision = judge(claim, row, seen, job_id=job_id, is_virgin=is_virgin)
        run_id = claim.run_id if decision.others else decision.run_id
        if said != run_id and not (decision.others and said is None):
            beat(run_id)
            said = run_id
            if not decision.others and not decision.appends:
                continue  # two that join at once with one rank each find the other's word now
        if decision.others or not decision.appends:
            return RunSeen(run_id=decision.run_id, number=number, others=decision.others)
        made = row_of(claim, job_id, decision.run_id, number + 1)
        data = to_bytes(made)
        key = numbered(RUNS, number + 1)
        if store.put_if_absent(key, data) or store.get(key) == data:
            return RunSeen(run_id=decision.run_id, number=number + 1)
    msg = f"{store.url}: the places that save this job do not agree under {RUNS}"
    raise RemoteError(msg, hint="it is tried again; `ckptd check` says who else writes there")


def row_of(claim: Claim, job_id: str, run_id: str, number: int) -> Row:
    """Return the row that a place appends."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    said = claim.model_dump(include=set(Row.model_fields) - {"run_id", "number"})
    return Row(**said, job_id=job_id, run_id=run_id, number=number, created_at=now)


def newest_run(store: Store) -> Row | None:
    """Return the newest row; None: no release that knows runs wrote there."""
    number, row = latest_row(store, RUNS, Row)
    return None if row is None else row.model_copy(update={"number": number})
