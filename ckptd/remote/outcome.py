"""How an attempt to commit ends while other nodes' parts have not come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.remote.messages import ShipResult

if TYPE_CHECKING:
    from ckptd.core.coverage import KnownManifest
    from ckptd.core.layouts import NamedShard
    from ckptd.remote.transfer import Carried

MOST_NAMED = 4096
"""Missing shards that an answer names: what is missing of more is said in words."""


def waiting(
    why: tuple[str, str], ours: KnownManifest, carried: Carried, absent: tuple[NamedShard, ...]
) -> ShipResult:
    """Shipped and listed, not committed; `why`: reason and next step."""
    return ShipResult(
        outcome="waiting",
        reason=why[0],
        hint=why[1],
        missing=absent[:MOST_NAMED],
        manifest_key=ours.key,
        manifest_sha256=ours.sha256,
        bytes_sent=carried.bytes_sent,
        bytes_skipped=carried.bytes_skipped,
    )
