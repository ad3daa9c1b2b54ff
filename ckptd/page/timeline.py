"""Lay out when a checkpoint was saved, complete, committed and deleted: texts for a table, and a bar.

All positions of bars are thousandths of the time from the first save that is shown to now.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from ckptd.base.humanize import ago, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 1000
"""Width of a bar."""
_LEAST_WIDTH = 4
"""Least width at which a part of a bar can be seen."""

Kind = Literal["saving", "uploading", "safe", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """A moment, as it is shown."""

    at: str
    """RFC 3339, UTC."""
    absolute: str
    relative: str
    seconds: float
    """Unix time."""
    what: str = ""
    """Place where it happened, if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """A part of a bar."""

    kind: Kind
    x: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The life of one checkpoint."""

    tag: str
    saved: When | None = None
    complete: When | None = None
    committed: tuple[When, ...] = ()
    deleted_here: When | None = None
    deleted_there: tuple[When, ...] = ()
    is_here: bool = False
    bar: tuple[BarPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The lives of several checkpoints on one axis, from `begin` to now."""

    begin: When
    tracks: tuple[Track, ...]
    has_local: bool = True
    """False for a remote alone, where only the times of COMMITs are known."""


def when(at: str | None, now: float, what: str = "") -> When | None:
    """Return a moment as it is shown; None: there is no time, or no readable one."""
    try:
        then = datetime.fromisoformat(at or "")
        found = then.replace(tzinfo=then.tzinfo or UTC).astimezone(UTC)
        seconds = found.timestamp()
    except (ValueError, OverflowError):
        return None
    return When(
        at=found.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        absolute=f"{found:%Y-%m-%d %H:%M:%S} UTC",
        relative=f"{ago(now - seconds)} ago" if seconds <= now + 1 else f"in {ago(seconds - now)}",
        seconds=seconds,
        what=printable(what),
    )


def laid_out(tracks: Sequence[Track], now: float, *, has_local: bool = True) -> Timeline | None:
    """Return the tracks of which a time is known, with their bars; None: of none of them."""
    firsts = [(track, first) for track in tracks if (first := _first(track)) is not None]
    if not firsts:
        return None
    begin = min((first for _, first in firsts), key=lambda one: one.seconds)
    end = max(now, *(first.seconds for _, first in firsts))
    made = tuple(_with_bar(track, first.seconds, begin.seconds, end) for track, first in firsts)
    return Timeline(begin=begin, tracks=made, has_local=has_local)


def _first(track: Track) -> When | None:
    known = [one for one in (track.saved, track.complete, *track.committed) if one is not None]
    return min(known, key=lambda one: one.seconds, default=None)


def _with_bar(track: Track, first: float, begin: float, end: float) -> Track:
    """Return it with its bar: saving until complete, then here alone, safe once committed, until deleted."""
    committed = min((one.seconds for one in track.committed), default=None)
    gone = track.deleted_here.seconds if track.deleted_here is not None else None
    there = max((one.seconds for one in track.deleted_there), default=None)
    # what is committed lives on in the remote
    last = end if track.is_here or (committed is not None and there is None) else max(gone or 0, there or 0)
    stop = committed if committed is not None else last
    complete = track.complete.seconds if track.complete is not None else stop
    spans: list[tuple[Kind, float, float]] = [
        ("saving", first, complete),
        ("uploading", complete, stop),
        ("safe", stop, last),
    ]
    scale = WIDTH / max(end - begin, 1e-3)

    def part(kind: Kind, start: float, until: float) -> BarPart:
        width = max(_LEAST_WIDTH, round((until - start) * scale))
        return BarPart(kind=kind, x=min(WIDTH - _LEAST_WIDTH, round((start - begin) * scale)), width=width)

    bar = [part(*span) for span in spans if span[2] > span[1]]
    if gone is not None:
        bar.append(part("gone", gone, gone))
    return replace(track, bar=tuple(bar))
