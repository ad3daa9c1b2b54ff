"""Which ranks' shards a save lacks for good, as it seems, and on which node they were last seen (P17).

From manifests and heartbeats; nothing is committed or deleted because of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.layouts import Role
from ckptd.words import ago, ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptd.core.heartbeat import SeenNode
    from ckptd.core.layouts import NamedShard

INCOMPLETE_SECONDS = 60.0
"""After a part was sealed: as long as replicas are left to their owner."""
SLOW_SECONDS = 180.0
"""The same for ranks of a node that is alive: it may be about to say that it has the save."""


def late(
    missing: Sequence[NamedShard], others: Sequence[SeenNode], step: int, age_seconds: float
) -> str | None:
    """Which ranks are missing for good, as it seems, and where they were last; None: perhaps on their way.

    A node that is alive and has that save is waited for, however long its upload takes.
    """
    ranks = {shard.shard.d for shard in missing if shard.shard.d is not None}
    held = {seen: ranks & set(seen.heartbeat.ranks) for seen in others if seen.heartbeat is not None}
    uploading = {d for seen, d_here in held.items() if not seen.is_dead and _has(seen, step) for d in d_here}
    ranks -= uploading
    alive = {d for seen, d_here in held.items() if not seen.is_dead for d in d_here}
    if age_seconds < SLOW_SECONDS:
        ranks -= alive
    only_model = not ranks and any(s.role is Role.MODEL and s.shard.d is None for s in missing)
    if age_seconds < INCOMPLETE_SECONDS or not (ranks or (only_model and len(missing) == 1)):
        return None
    if not ranks:
        return f"no node has sent {_model_names(missing)}"
    return f"missing {_words(ranks)} ({_where(ranks, held, others)})"


def _has(seen: SeenNode, step: int) -> bool:
    return (
        seen.heartbeat is not None
        and seen.heartbeat.newest is not None
        and seen.heartbeat.newest.step >= step
    )


def _model_names(missing: Iterable[NamedShard]) -> str:
    return ", ".join(
        f"mp_rank_{s.shard.mm or 0:02d}_model_states.pt" for s in missing if s.role is Role.MODEL
    )


def _words(ranks: set[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_in_words(ranks)}"


def _where(ranks: set[int], held: dict[SeenNode, set[int]], others: Sequence[SeenNode]) -> str:
    """The nodes that held them last; of ranks that none is known for, those not heard of."""
    places = [
        (seen, ranks & here)
        for seen, here in sorted(held.items(), key=lambda row: row[0].node)
        if ranks & here
    ]
    several = len(places) > 1
    said = [f"{_words(here)} " * several + f"last seen on {last_seen(seen)}" for seen, here in places]
    unknown = ranks - {d for _, here in places for d in here}
    if unknown:
        silent = [last_seen(seen) for seen in others if seen.is_dead]
        more = f"; not heard of: {', '.join(silent)}" if silent else ""
        which = f"{_words(unknown)}: " if places else ""
        said.append(f"{which}no node is known to hold them{more}")
    return "; ".join(said)


def last_seen(seen: SeenNode) -> str:
    """`gpu-3, 14 min ago`, and how that is known."""
    if seen.seconds_ago is None:
        return f"{seen.node}, nobody knows when"
    by_clock = "" if seen.is_store_time else " by the nodes' own clocks"
    return f"{seen.node}, {ago(seen.seconds_ago)} ago{by_clock}"
