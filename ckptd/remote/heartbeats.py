"""Heartbeats in a remote: one small object a node, replaced at most once a minute, read by whoever asks.

Ages are by the store's own times: between two nodes whose clocks differ by an hour they are still right.
Where a store keeps no times, the documents' own are compared, and the answer says so.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptd.core.heartbeat import HEARTBEATS, Heartbeat, SeenNode, heartbeat_key, node_of_key
from ckptd.core.manifest import parse, to_bytes
from ckptd.errors import DamagedError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.remote.store import ObjectInfo, Store

READ_AGAIN_SECONDS = 600.0
"""What is known of a node is read again so seldom, unless somebody wants it."""
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
        """Of our own last one: the store's time, and our monotonic clock's."""

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
        """Every node's but `node`'s, by name; `now_seconds`: the store's present, where it is known."""
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
        """Every daemon's, read afresh, also of those that share a node name."""
        return self.others("", reads_all=True, now_seconds=now_seconds)

    def of(self, node: str) -> SeenNode | None:
        """One node's, read afresh; None: there is none."""
        found = list(self.store.list(HEARTBEATS))
        info = next((info for info in found if node_of_key(info.key) == node), None)
        return None if info is None else self._seen(node, info, self._now_ns(found), reads_all=True)

    def _now_ns(self, infos: Sequence[ObjectInfo]) -> int | None:
        """The store's present: its time of our own heartbeat and what passed since, else its newest time."""
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
