"""An upload under way, as the deciding thread sees it: for status, forecasts, and the next start to go on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Moving:
    """An upload under way."""

    done_bytes: int
    total_bytes: int
    started_seconds: float
    start_bytes: int = 0
    objects: dict[str, int] = field(default_factory=dict)
    """Bytes done, by key."""
    durable: tuple[str, int, str] = ("", 0, "")
    """Key, flushed bytes and token last noted in the journal."""
