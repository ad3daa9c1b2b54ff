"""What a play of the coming saves is about: a disk, its checkpoints, and the pace of a run (adr/0160)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.core.retention import RetentionPolicy
from ckptd.core.view import ZERO

if TYPE_CHECKING:
    from ckptd.core.permit import Unuploaded
    from ckptd.core.save import Order

_ZERO = frozenset({ZERO})


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A checkpoint on this disk, as far as its future there depends on it."""

    key: str
    order: Order
    bytes: int
    is_committed: bool = False
    """On every required remote."""
    committed_at_seconds: float | None = None
    """Unix time."""
    is_pinned: bool = False
    score: float | None = None
    may_go: bool = True
    """False: it stays whatever the policy says (found at the first start, the best, others' files)."""
    is_sent: bool = True
    """It waits for the link while it is not committed."""
    is_trainers: bool = True
    """The trainer's own rotation counts it."""
    forms: frozenset[str] = _ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the run goes on."""

    sizes_bytes: tuple[int, ...]
    """Of the coming saves, over and over."""
    every_seconds: float
    flight_seconds: float = 0.0
    """From the first file of a save until it may be sent; nothing is let go meanwhile."""
    last_step: int = 0
    steps: int = 1
    """From save to save."""
    since_last_seconds: float = 0.0
    now_unix_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The disk, what lies on it, and what may leave it."""

    free_bytes: int
    """With what makes room under disk pressure before a save lacks it."""
    pieces: tuple[Piece, ...] = ()
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    unuploaded: Unuploaded = "keep"
    link_bytes_per_second: float | None = None
    """Of the slowest required remote; None: it takes nothing; inf: not known, and fast enough."""
    may_delete: bool = True
    """False: removals rest (a pause, a drain, rights that are not proved)."""
    sent: str | None = None
    """Key of what is under way."""
    left_bytes: int = 0
    """Of that, still to be sent."""
    written_bytes: int = 0
    """Of the save in flight."""
    is_in_flight: bool = False
    reserve_bytes: int = 0
    """P13's line."""
    makes_universal: bool = False
    """A ladder leaves a universal form, and those to come can be made."""
    trainer_keeps: int | None = None
    """What the trainer's own rotation leaves here; None: it removes nothing."""
    others: tuple[tuple[float, int], ...] = ()
    """(seconds from now, bytes) that other jobs will have taken of this disk by then."""

    @property
    def deletes(self) -> bool:
        """Something of ours may go at all."""
        return self.may_delete and self.policy.deletes


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of it."""

    fit: int
    """Saves that found room."""
    full_at_seconds: float | None
    """When the next one runs out of it; None: it did not fill."""
    taken: tuple[tuple[float, int], ...] = ()
    """(seconds, bytes taken by then): what other jobs on this disk must reckon with."""

    @property
    def is_full(self) -> bool:
        """Within the horizon."""
        return self.full_at_seconds is not None
