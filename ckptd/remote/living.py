"""Which nodes write to a remote just now, by their heartbeats and the store's own present; and what processes
of this node that were killed there left of documents."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ckptd.core.heartbeat import HEARTBEATS
from ckptd.core.manifest import ROOT
from ckptd.remote.clock import store_now_seconds
from ckptd.remote.heartbeats import Heartbeats
from ckptd.words import ago

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.heartbeat import SeenNode
    from ckptd.remote.store import ObjectInfo, Store

NEXT_STEP = (
    "a run of its own needs a name and a url of its own; for a second node of this run nothing is to do"
)


def living(store: Store, *, but_node: str = "", but_node_id: str = "") -> tuple[SeenNode, ...]:
    """Nodes that were heard of lately and have not ended, but for the one named; the last heard of first.

    Writes a small object and removes it again where there are heartbeats and the store tells no time itself.
    """
    if next(iter(store.list(HEARTBEATS)), None) is None:
        return ()
    found = Heartbeats(store).others(but_node, reads_all=True, now_seconds=present_seconds(store))
    here = [
        (seen.seconds_ago, seen.node, seen)
        for seen in found
        if seen.seconds_ago is not None and not seen.is_dead and not _is_own(seen, but_node_id)
    ]
    return tuple(seen for _, _, seen in sorted(here, key=lambda one: one[:2]))


def remove_stale_temporaries(store: Store) -> tuple[ObjectInfo, ...]:
    """Remove what killed processes of the store's owner left of documents; return what was removed."""
    found = stale_temporaries(store)
    for info in found:
        store.delete(info.key)
    return found


def stale_temporaries(store: Store) -> tuple[ObjectInfo, ...]:
    """List it. Only directories have temporaries."""
    look = getattr(store, "stale_temporaries", None)
    now = present_seconds(store) if look is not None else None
    return () if look is None or now is None else look(now)


def said_of(found: Sequence[SeenNode], remote: str, since: str) -> str:
    """Of the last heard of: somebody who begins a run may have meant another remote, or another name."""
    seen = found[0]
    newest = seen.heartbeat.newest if seen.heartbeat is not None else None
    step = f", its newest step {newest.step}" if newest is not None else ""
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    heard = f"heard of {ago(seen.seconds_ago or 0.0)} ago{step}; that remote was made {since}"
    return f"node {seen.node}{more} writes to {remote} under this name, too: {heard}"


def _is_own(seen: SeenNode, node_id: str) -> bool:
    return bool(node_id) and seen.heartbeat is not None and seen.heartbeat.node_id == node_id


def present_seconds(store: Store) -> float | None:
    """By its answers, else by the time that it gives to what is written now; None: it keeps none."""
    now = store_now_seconds(store)
    if now is not None:
        return now
    key = f"{ROOT}/probe~{secrets.token_hex(8)}"
    try:
        store.put(key, b"1")
        info = store.stat(key)
    finally:
        store.delete(key)
    return info.mtime_ns / 1e9 if info is not None and info.mtime_ns else None
