"""How an attempt to commit ends while other nodes' parts have not come, or once others committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.layouts import Role
from ckptd.core.view import ZERO
from ckptd.remote.messages import ShipResult
from ckptd.remote.replicas import tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.coverage import KnownManifest
    from ckptd.core.layouts import NamedShard
    from ckptd.core.manifest import NodeManifest
    from ckptd.remote.messages import CommitView, ShipFile, ShipOrder
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
    known = tuple(members)
    held = tensors_of(known)
    rows = {(file.path, file.bytes, file.fingerprint) for one in known for file in one.manifest.files}
    absent = [
        f
        for f in whole.files
        # of what has no tensors, or is nobody's shard, the content counts
        if ((f.path, f.bytes, f.fingerprint) not in rows if _is_side(f) else tensors(f) not in held)
    ]
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


def _is_side(file: ShipFile) -> bool:
    return file.role is Role.SIDE and file.identity is not None


def left_out(whole: ShipOrder, ours: NodeManifest) -> tuple[str, ...]:
    """Side files of ours in whose place our own manifest lists another content: an earlier one, or a node's.

    What the object's name held was listed already, and is never replaced; ours is in no COMMIT (adr/0021).
    """
    listed = {file.path: (file.bytes, file.fingerprint) for file in ours.files}
    return tuple(
        file.path
        for file in whole.files
        if (file.role, whole.manifest.form) == (Role.SIDE, ZERO)
        and listed.get(file.path, (file.bytes, file.fingerprint)) != (file.bytes, file.fingerprint)
    )
