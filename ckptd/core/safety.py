"""The newest checkpoint that is safe: in a COMMIT on every required remote, as last observed (P17, P2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.view import ZERO

if TYPE_CHECKING:
    from ckptd.core.save import Order
    from ckptd.core.view import JobView, RemoteCommit


def newest_safe(view: JobView) -> RemoteCommit | None:
    """Its COMMIT on the first required remote; None: nothing is safe, or no remote is required."""
    required = [r for r in view.remotes if r.is_required]
    if not required:
        return None
    held = [
        {(c.tag, c.order): c for c in r.commits if c.form == ZERO and not c.is_model_only} for r in required
    ]
    common = set.intersection(*(set(h) for h in held))
    return held[0][max(common, key=_order)] if common else None


def _order(key: tuple[str, Order]) -> Order:
    return key[1]
