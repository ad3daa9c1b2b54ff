"""What leaves a disk that is played: as keeping.py decides it for a view, by the same policy (adr/0160)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.optout import loose_under
from ckptd.core.retention import Held, Item, fates
from ckptd.core.view import UNIVERSAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.pieces import Ground, Piece
    from ckptd.core.retention import RetentionPolicy
    from ckptd.core.save import Order

_ALONE = frozenset({UNIVERSAL})


def moving(ground: Ground) -> tuple[Piece, ...]:
    """Without what stays for ever by its step, which takes no newer one's place where all goes by number."""
    policy = ground.policy.model_copy(update={"keep_every_steps": None, "keep_steps": (), "ephemeral": None})
    if not goes_by_number(policy):
        return ground.pieces
    first = (policy.save_total_limit or 0) + 1
    newest_first = sorted(ground.pieces, key=lambda p: p.order, reverse=True)
    rest = (
        p for p in newest_first[first:] if not p.is_committed or not ground.policy.keeps_step(p.order.step)
    )
    return (*newest_first[:first], *rest)


def goes_by_number(policy: RetentionPolicy) -> bool:
    """What goes is a matter of how many there are."""
    keys = (policy.keep_every_steps, policy.keep_every_seconds, policy.keep_within_seconds, policy.keep_best)
    others = (policy.keep_steps, policy.ephemeral, policy.ladder)
    return not any(keys) and not any(others)


def going(
    pieces: Sequence[Piece], ground: Ground, sent: str | None, *, is_short: bool
) -> dict[str, frozenset[str]]:
    """What may go now, with the forms that stay of it: as core/keeping.py decides it for a view."""
    committed = [p for p in pieces if p.is_committed]
    safe = max((p.order for p in committed), default=None)
    loose = [p for p in pieces if not p.is_committed and _may_go_uncommitted(p, ground, safe)]
    by_policy = fates([_held(p) for p in committed], ground.policy)
    mine = by_policy
    if loose:
        everything = [_held(p) for p in (*committed, *loose)]
        policy = loose_under(ground.policy, ground.unuploaded, is_short=is_short)
        mine = fates(everything, policy)
        if ground.unuploaded == "delete":
            by_policy = fates(everything, ground.policy)
    top = max(pieces, key=lambda p: p.order, default=None)
    found: dict[str, frozenset[str]] = {}
    for piece in (*committed, *loose):
        is_newest = top is not None and (piece is top or piece.order.step >= top.order.step)
        if is_newest or not piece.may_go or piece.key == sent:
            continue
        fate = (by_policy if piece.is_committed else mine)[piece.key]
        stay = frozenset(form for form, one in fate.items() if one.keeps)
        if stay != piece.forms:
            found[piece.key] = stay
    return found


def _may_go_uncommitted(piece: Piece, ground: Ground, safe: Order | None) -> bool:
    if ground.unuploaded == "thin":
        return safe is not None and safe > piece.order
    return ground.unuploaded == "delete"


def _held(piece: Piece) -> Held:
    item = Item(
        key=piece.key,
        order=piece.order,
        pinned=piece.is_pinned,
        committed_at_seconds=piece.committed_at_seconds,
        score=piece.score,
    )
    return Held(item=item, forms=piece.forms, standing=piece.forms & _ALONE)
