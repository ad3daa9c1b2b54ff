"""How an attempt to commit ends while other nodes' parts have not come, or once others committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.layouts import Role
from ckptd.remote.messages import ShipResult
from ckptd.remote.replicas import tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.coverage import KnownManifest
    from ckptd.core.layouts import NamedShard
    from ckptd.remote.messages import CommitView, ShipOrder
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


def as_others_committed(whole: ShipOrder, commit: CommitView, members: Iterable[KnownManifest]) -> ShipResult:
    """Committed by others: our files are listed all the same (replicas), or are not needed for it.

    `whole`: the order with all its files; `members`: the manifests that the COMMIT rests on.
    """
    held = tensors_of(members)
    absent = [f for f in whole.files if tensors(f) not in held]
    if whole.takeover_seconds is not None:  # what lies beside a shared folder is sent by one host
        absent = [f for f in absent if not f.is_extra]
    words = f"committed by other nodes without {', '.join(f.path for f in absent[:3])}"
    is_conflict = any(file.role not in (Role.SIDE, Role.EXTRA) for file in absent)
    return ShipResult(
        outcome="conflict" if is_conflict else "committed",
        reason=words if absent else None,
        commit=commit,
        unlisted=tuple(f.path for f in absent if not f.is_extra),
    )
