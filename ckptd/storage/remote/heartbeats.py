"""Tell which nodes live: heartbeats in a remote, dated by the store's own clock.

Also here, since they are dated by it: documents half written by killed processes of this node.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from ckptd.base.humanize import ago
from ckptd.base.names import ROOT
from ckptd.core.model.heartbeat import HEARTBEATS, Heartbeat, SeenNode, heartbeat_key, node_of_key
from ckptd.core.model.manifest import parse, to_bytes
from ckptd.errors import DamagedError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckptd.storage.stores.base import ObjectInfo, Store

# Each node replaces one small object at most once a minute; whoever asks reads them. Ages are by the store's
# own times: between two nodes whose clocks differ by an hour they are still right. Where a store keeps no
# times, the documents' own are compared, and the answer says so.

READ_AGAIN_SECONDS = 600.0
"""A node's heartbeat is read again so seldom, unless somebody wants it."""
MOST_READ_AGAIN = 16
"""So many at each look, the longest unread first: a thousand nodes would read a hundred a minute each."""
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

    def listed(self) -> list[ObjectInfo]:
        """List everybody's, without reading them."""
        infos = (info for info in self.store.list(HEARTBEATS) if node_of_key(info.key) is not None)
        return list(islice(infos, MOST_NODES))

    def others(
        self,
        node: str,
        *,
        reads_all: bool = False,
        now_seconds: float | None = None,
        infos: Sequence[ObjectInfo] | None = None,
        due: Collection[str] | None = None,
    ) -> tuple[SeenNode, ...]:
        """Return the heartbeats of all nodes but `node`, by name; `now_seconds`: the store's time.

        `infos`: as `listed` a moment ago, else listed now; `due`: keys of those read again, else the oldest.
        """
        infos = self.listed() if infos is None else infos
        found = [(name, info) for info in infos if (name := node_of_key(info.key)) is not None]
        self.newest_seconds = max((info.mtime_ns for info in infos), default=0) / 1e9
        now_ns = (
            self._now_ns(infos) if now_seconds is None else int(max(now_seconds, self.newest_seconds) * 1e9)
        )
        due = self._due(infos) if due is None else due
        return tuple(
            self._seen(name, info, now_ns, reads_all=reads_all or info.key in due)
            for name, info in sorted(found, key=lambda one: (one[0], one[1].key))
            if name != node
        )

    def _due(self, infos: Sequence[ObjectInfo]) -> set[str]:
        """Return the keys that are read again now though nobody wants it, MOST_READ_AGAIN at most."""
        until = time.monotonic() - READ_AGAIN_SECONDS
        known = ((self._known[info.key][0], info.key) for info in infos if info.key in self._known)
        return {key for _, key in sorted(one for one in known if one[0] <= until)[:MOST_READ_AGAIN]}

    def _is_anothers(self, key: str, ours: Heartbeat) -> bool:
        """Whether the plain name is that of a daemon over another directory, which lives."""
        there = self.store.stat(key)
        if there is None or (self._put_at is not None and there.mtime_ns == self._put_at[0]):
            return False  # nobody's, or as we left it: one cheap request, every minute
        found = self.listed()
        info = next((info for info in found if info.key == key), None)
        if info is None:
            return False
        seen = self._seen(ours.node, info, self._now_ns(found), reads_all=True)
        return not seen.is_dead and _is_elsewhere(seen, ours)

    def elsewhere(self, ours: Heartbeat, infos: Sequence[ObjectInfo] | None = None) -> tuple[SeenNode, ...]:
        """Daemons over other directories than ours, as far as they say over which; `infos` as for `others`.

        Who told of another run is read again each time: a second node of this one joins it a moment later.
        """
        known = ((key, heartbeat) for key, (_, _, heartbeat) in self._known.items())
        due = {key for key, heartbeat in known if heartbeat is not None and heartbeat.run_id != ours.run_id}
        return tuple(seen for seen in self.others("", infos=infos, due=due) if _is_elsewhere(seen, ours))

    def everyone(self, now_seconds: float | None = None) -> tuple[SeenNode, ...]:
        """Return every daemon's, read afresh, also of those that share a node name."""
        return self.others("", reads_all=True, now_seconds=now_seconds)

    def newest(self) -> tuple[SeenNode, ...]:
        """Return those written last, MOST_READ_AGAIN at most, ages from the newest one on."""
        infos = sorted(self.listed(), key=lambda info: info.mtime_ns)
        return self.others("", reads_all=True, infos=infos[-MOST_READ_AGAIN:])

    def of(self, node: str) -> SeenNode | None:
        """Return one node's, read afresh; None: there is none."""
        found = self.listed()
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
            if is_same or not reads_all:
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
