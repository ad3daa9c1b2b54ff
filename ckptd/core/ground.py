"""What a play of the coming saves starts from, out of the view that the planner decides on (adr/0160)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.backfill import to_ship
from ckptd.core.keeping import best_here, dates_of, is_committed, score_of
from ckptd.core.keeping_remote import is_configured_otherwise
from ckptd.core.optout import unheard
from ckptd.core.pieces import Ground, Piece
from ckptd.core.save import Order
from ckptd.core.view import UNIVERSAL, ZERO, DerivedState, ShipState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptd.core.rows import SaveRow
    from ckptd.core.view import JobView, SaveView

_NEVER_SENT = (ShipState.REFUSED, ShipState.RETIRED)
_LEAST_REMOVALS = 2
_GAPS = 3
"""In two of the last three gaps between saves somebody else removed some: the trainer rotates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How the trainer rotates by itself, learned from what went lately by another hand."""

    keeps: int
    """The newest so many."""
    newest_gone: Order
    """What is older and still here is none of its business."""


def rotation_of(rows: Iterable[SaveRow]) -> Rotation | None:
    """None: what goes goes by our hand, or a person removed some once."""
    known = sorted((r for r in rows if r.state != "superseded"), key=lambda r: r.save.window.last)
    gone = [r for r in known if r.state == "vanished" and r.ended_at is not None]
    ends = [r.save.window.last / 1e9 for r in known]
    gaps = {sum(end <= (r.ended_at or 0.0) for end in ends[-_GAPS - 1 :]) for r in gone} - {0}
    if len(gaps) < _LEAST_REMOVALS:
        return None
    newest = max(r.save.order for r in gone)
    keeps = sum(r.save.order > newest for r in known)
    # between the newest save and the rotation that follows it there is one more
    is_pending = max(r.ended_at or 0.0 for r in gone) < ends[-1]
    return Rotation(keeps=max(keeps - is_pending, 1), newest_gone=newest)


def ground_of(
    view: JobView,
    link_bytes_per_second: float | None,
    left_bytes: int | None,
    *,
    written_bytes: int = 0,
    is_in_flight: bool = False,
    unsealed: Sequence[tuple[str, int, int]] = (),
    rotation: Rotation | None = None,
) -> Ground:
    """The disk of a job; `left_bytes`: of the upload under way, `unsealed`: (tag, step, bytes) without a row.

    `written_bytes`: of the save in flight; it counts as free, for that save has it already.
    """
    pieces = _pieces(view, rotation)
    newest = max((piece.order for piece in pieces), default=Order(1, 0, 0))
    for tag, step, size in unsealed:
        newest = Order(newest.branch, max(step, newest.step), newest.save_seq + 1)
        pieces.append(Piece(key=tag, order=newest, bytes=size))
    required = [remote for remote in view.remotes if remote.is_required]
    ships = [r.ships_save for r in required if r.ships == ZERO and r.ships_save is not None]
    sent = next((p for p in pieces if p.key in {str(n) for n in ships} and not p.is_committed), None)
    # a remote that never answered may know of a pin, so that nothing goes by the job file alone either
    is_silent = link_bytes_per_second is None and bool(unheard(view))
    rests = view.is_paused or view.drain is not None or not view.may_delete
    return Ground(
        free_bytes=view.disk.free_bytes + _remade_bytes(view),
        pieces=tuple(pieces),
        policy=view.local_retention,
        unuploaded="keep" if is_silent else view.unuploaded,
        link_bytes_per_second=None if rests or not required else link_bytes_per_second,
        may_delete=not rests and not any(is_configured_otherwise(view, r) for r in view.remotes),
        sent=sent.key if sent is not None else None,
        left_bytes=sent.bytes if sent is not None and left_bytes is None else left_bytes or 0,
        written_bytes=written_bytes,
        is_in_flight=is_in_flight or view.is_save_in_flight or written_bytes > 0,
        reserve_bytes=view.disk.reserve_bytes,
        makes_universal=_makes_universal(view),
        trainer_keeps=rotation.keeps if rotation is not None else None,
    )


def _pieces(view: JobView, rotation: Rotation | None) -> list[Piece]:
    """Of the kind that the run saves: the other kind lies where it lies."""
    newest = max(view.saves, key=lambda s: s.save.window.last, default=None)
    kind = [s for s in view.saves if newest is not None and s.is_model_only == newest.is_model_only]
    here = [s for s in kind if s.is_present and s.is_intact]
    if view.local_retention.has_rung(UNIVERSAL):
        here += [s for s in kind if not s.is_present and s.is_pruned and _is_ready(s)]
    dates, best = dates_of(view), best_here(view)
    required = [remote.name for remote in view.remotes if remote.is_required]
    return [_piece(view, save, required, dates, best, rotation) for save in here]


def _piece(
    view: JobView,
    save: SaveView,
    required: Sequence[str],
    dates: dict[tuple[str, str], float | None],
    best: str | None,
    rotation: Rotation | None,
) -> Piece:
    records = [save.ship(name, ZERO) for name in required]
    times = [dates.get((record.remote, record.commit_key or "")) for record in records]
    known = [at for at in times if at is not None]
    safe = is_committed(view, save)
    written_at = save.save.window.last / 1e9
    return Piece(
        key=str(save.id),
        order=save.order,
        bytes=save.save.total_bytes if save.is_present else save.universal.bytes,
        is_committed=safe,
        # not read yet: in a moment it is
        committed_at_seconds=(max(known) if known else written_at) if safe else None,
        is_pinned=save.is_pinned,
        score=score_of(view, save.save.best),
        may_go=save.is_adopted and not save.has_unlisted and save.save.tag != best,
        is_sent=to_ship(view, save) and not any(record.state in _NEVER_SENT for record in records),
        is_trainers=rotation is not None and save.order > rotation.newest_gone,
        forms=_forms(view, save),
    )


def _forms(view: JobView, save: SaveView) -> frozenset[str]:
    """The universal form of a ladder counts where it will be made; beside a folder it makes room first."""
    if not save.is_present:
        return frozenset({UNIVERSAL})
    is_made = view.local_retention.has_rung(UNIVERSAL) and save.save.roots == ("",) and _is_makable(save)
    return frozenset({ZERO, UNIVERSAL}) if is_made else frozenset({ZERO})


def _is_ready(save: SaveView) -> bool:
    return save.universal.state is DerivedState.READY


def _is_makable(save: SaveView) -> bool:
    return save.is_convertible and save.universal.state is not DerivedState.REFUSED


def _makes_universal(view: JobView) -> bool:
    """By the newest: what the run saves next is like it."""
    newest = next(iter(view.intact[False]), None)
    return newest is not None and UNIVERSAL in _forms(view, newest)


def _remade_bytes(view: JobView) -> int:
    """Universal forms beside their source: under disk pressure they go before a save lacks room.

    A clone frees nothing, and what a ladder left instead of its source stays.
    """
    is_left = view.local_retention.has_rung(UNIVERSAL)
    forms = (s.universal for s in view.saves if not s.is_busy and (s.is_present or not is_left))
    return sum(f.bytes for f in forms if f.state is DerivedState.READY and not f.is_cloned)
