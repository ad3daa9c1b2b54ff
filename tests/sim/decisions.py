"""What people decide about checkpoints (limits, pins), and what must hold then (docs/design.md §2, P5; §5).

Judged from the world's own books, never by the planner: plain counts of saves. Where what ckptd could know
is open (a permit under way, an order that only steps tell), the rule asks for less, never for more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.config.schema import JobConfig

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Retention keys of one place, as the job file has them."""

    limit: int | None
    every: int | None = None
    """keep_every_steps."""
    rung: int | None = None
    """ladder: what the limit lets go is gone after so many newer ones."""
    best: bool = False
    """keep_best = 1."""
    has_bytes: bool = False
    """keep_bytes: the number alone keeps none, and none goes for a number alone."""

    def why_kept(
        self, step: int, newer: int, *, is_committed: bool = True, is_best: bool = False
    ) -> str | None:
        """Why a checkpoint stays that has so many newer ones; None: these keys let it go."""
        if self.limit is None and not self.has_bytes:
            return "no key limits anything"
        if self.every is not None and step % self.every == 0:
            return f"keep_every_steps {self.every}"
        if self.best and is_best:
            return "keep_best"
        if newer == 0:
            return "the newest"
        if self.limit is not None and not self.has_bytes and newer < self.limit:
            return f"save_total_limit {self.limit}, and {newer} are newer"
        if is_committed and self.rung is not None and newer < self.rung:
            return f"a ladder that lets go after {self.rung} newer, and {newer} are"
        return None

    def may_stay(self, step: int) -> bool:
        """Beyond any count."""
        return self.every is not None and step % self.every == 0

    @property
    def most(self) -> int | None:
        """As many may stay, but for those that stay beyond any count."""
        return None if self.limit is None else max(self.limit, self.rung or 0) + self.best


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All that a job file says of what stays."""

    local: Keys
    remotes: dict[str, Keys]
    unuploaded: str


def rules_of(config: JobConfig) -> Rules:
    """As a person reads the job file."""
    ladder = config.local.ladder
    local = Keys(
        limit=config.local.save_total_limit,
        every=config.local.keep_every_steps,
        rung=int(str(ladder[0].after)) if ladder else None,
        best=config.local.keep_best is not None,
        has_bytes=config.local.keep_bytes is not None,
    )
    remotes = {
        r.name: Keys(
            limit=r.save_total_limit,
            every=r.keep_every_steps,
            best=r.keep_best is not None,
            has_bytes=r.keep_bytes is not None,
        )
        for r in config.remotes
    }
    return Rules(local=local, remotes=remotes, unuploaded=config.unuploaded)


@dataclass(slots=True)
class Belt:
    """The hourly limit of one life of the daemon: removals in any hour ≤ saves completed in it + a few."""

    gone_at: dict[int, float] = field(default_factory=dict)
    completed_at: list[float] = field(default_factory=list)
    """At the latest: a little later is a little less strict."""

    def is_torn(self, limit: int, now_seconds: float) -> bool:
        """More went than may."""
        gone = sum(now_seconds - at < HOUR_SECONDS for at in self.gone_at.values())
        completed = sum(now_seconds - at < 2 * HOUR_SECONDS for at in self.completed_at)
        return gone > completed + max(3, 2 * limit)
