"""Limit a bandwidth for ever or by the clock: rclone's timetable with units that say bits or bytes.

`"08:00,1GB/s 20:00,none"`: each entry holds from its time until the next one, in local time, every day or, as
"Mon-08:00,1GB/s", on one. The speed follows from the wall clock alone and is asked anew each time: no jump of
the clock and no summer time can leave a wrong one behind.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from typing import Annotated

from pydantic import BeforeValidator

from ckptd.base.identity import Model
from ckptd.config.quantities import parse_bandwidth, show_bandwidth

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_ENTRY = re.compile(r"(?:(?P<day>[A-Za-z]+)-)?(?P<hour>\d{1,2}):(?P<minute>\d\d),(?P<speed>.+)")
_DAY_MINUTES = 24 * 60
_EXAMPLE = '"08:00,1GB/s 20:00,none", with a day "Mon-08:00,1GB/s"'


class Timetable(Model):
    """Hold changes of speed in a week, sorted: (minutes since Monday 00:00, bytes per second or None)."""

    changes: tuple[tuple[int, int | None], ...] = ((0, None),)
    text: str = "none"
    """Text for people, with both spellings of each speed."""

    def at(self, unix_seconds: float) -> int | None:
        """Return the bytes per second at that time; None: no limit."""
        local = time.localtime(unix_seconds)
        minute = (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min
        # before the first one of the week the last one of the week before holds: index -1
        return self.changes[bisect_right(self.changes, minute, key=lambda change: change[0]) - 1][1]

    def shown(self, unix_seconds: float) -> str:
        """Show the timetable, and what holds now where that is not all of it."""
        if len(self.changes) == 1:
            return self.text
        return f"{self.text} (local time; now {_shown(self.at(unix_seconds))})"


def constant(bytes_per_second: int | None) -> Timetable:
    """Return a timetable with the same limit at any time."""
    return Timetable(changes=((0, bytes_per_second),), text=_shown(bytes_per_second))


def parse_timetable(value: object) -> Timetable:
    """Parse "1GB/s", "none", a timetable as above, or a list of its entries.

    Raises:
        ValueError: it is none of these; the text quotes the entry that is wrong.
    """
    if isinstance(value, Timetable):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(entry, str) for entry in value):
        entries = [str(entry).strip() for entry in value]
    elif isinstance(value, str) and ("," in value or ":" in value):
        entries = value.split()
    else:
        return constant(parse_bandwidth(None if value == "off" else value))
    daily: dict[int, int | None] = {}
    weekly: dict[int, int | None] = {}
    shown = []
    for entry in entries:
        day, minute, speed = _parsed(entry)
        begins = entry.partition(",")[0]
        table, key = (daily, minute) if day is None else (weekly, day * _DAY_MINUTES + minute)
        if key in table:
            msg = f"two entries of the timetable begin at {begins}"
            raise ValueError(msg)
        table[key] = speed
        shown.append(f"{begins} {_shown(speed)}")
    # a day's own entry wins over the one of every day at the same time
    week = {day * _DAY_MINUTES + minute: speed for day in range(7) for minute, speed in daily.items()}
    return Timetable(changes=tuple(sorted((week | weekly).items())), text=", ".join(shown))


def _parsed(entry: str) -> tuple[int | None, int, int | None]:
    """Return (day, Monday 0, or None for every day; minute of the day; bytes per second)."""
    found = _ENTRY.fullmatch(entry)
    if found is None:
        msg = f"{entry!r} is no entry of a timetable; write {_EXAMPLE}"
        raise ValueError(msg)
    hour, minute = int(found["hour"]), int(found["minute"])
    if hour > 23 or minute > 59:
        msg = f"{entry!r}: there is no {found['hour']}:{found['minute']}; a day has 00:00 to 23:59"
        raise ValueError(msg)
    try:
        speed = None if found["speed"] == "off" else parse_bandwidth(found["speed"])
    except ValueError as error:
        msg = f"{entry!r}: {error}"
        raise ValueError(msg) from error
    return _day(entry, found["day"]), hour * 60 + minute, speed


def _day(entry: str, name: str | None) -> int | None:
    if name is None:
        return None
    meant = [n for n, day in enumerate(_DAYS) if len(name) >= 3 and day.startswith(name.lower())]
    if not meant:
        msg = f"{entry!r}: {name!r} is no day; write Mon, Tue, Wed, Thu, Fri, Sat or Sun"
        raise ValueError(msg)
    return meant[0]


def _shown(bytes_per_second: int | None) -> str:
    return "none" if bytes_per_second is None else show_bandwidth(bytes_per_second)


Bandwidth = Annotated[Timetable, BeforeValidator(parse_timetable)]
