"""Parse quantities with units as people write them: "512MiB", "5%", "1h30m", "8Gb/s" → typed numbers.

Bits and bytes differ by the case of the b (8Gb/s is 1 GB/s), so every parsed value can be shown back in one
unambiguous spelling. Sizes are parsed by pydantic's ByteSize, durations as ISO 8601.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError

from ckptd.base.humanize import size_of
from ckptd.base.identity import Model

_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)
_DURATION: TypeAdapter[timedelta] = TypeAdapter(timedelta)
_UNITS = "smhdw"


class Share(Model):
    """Hold an amount of bytes, or a percentage of something whose size is known only later."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, total_bytes: int) -> int:
        """Return the bytes of a whole of `total_bytes`."""
        if self.bytes is not None:
            return self.bytes
        return int(total_bytes * (self.percent or 0.0) / 100)

    def __str__(self) -> str:
        return size_of(self.bytes) if self.bytes is not None else f"{self.percent:g}%"


def text_of(value: object, what: str, example: str) -> str:
    if not isinstance(value, str):
        msg = f'{what} is a string with a unit, such as "{example}"'
        raise ValueError(msg)
    return value.strip()


def parse_bytes(value: object) -> int:
    """Parse "512MiB", "5GB", "1.5TiB" to bytes (1000 or 1024 as the unit says); a unit is needed."""
    text = text_of(value, "a size", "512MiB")
    wrong = f'{text!r} is no size; write it as "512MiB" or "5GB"'
    number = text.rstrip("".join(c for c in set(text) if c.isalpha())).strip()
    unit = text[len(number) :].strip() if text.startswith(number) else ""
    if not unit.endswith("B") or not _is_number(number):
        raise ValueError(wrong)
    try:
        return int(_SIZE.validate_python(number + unit))
    except ValidationError as error:
        raise ValueError(wrong) from error


def parse_share(value: object) -> Share:
    """Parse a size, or a percentage "5%" between 0 and 100."""
    if isinstance(value, Share):
        return value
    text = text_of(value, "a size or percentage", "5%")
    if not text.endswith("%"):
        return Share(bytes=parse_bytes(text))
    number = text[:-1].strip()
    if not _is_number(number) or not 0 <= float(number) <= 100:
        msg = f'{text!r} is no percentage between "0%" and "100%"'
        raise ValueError(msg)
    return Share(percent=float(number))


def parse_duration(value: object) -> float:
    """Parse "5s", "1h30m", "2d", "1w" to seconds; units s, m, h, d, w, largest first."""
    text = text_of(value, "a duration", "60s")
    wrong = f'{text!r} is no duration; write it as "60s", "20m", "1h30m" or "2d"'
    head, day, tail = text.partition("d")
    days, clock = (f"{head}D", tail) if day else ("", head)
    units = [c for c in text if c.isalpha()]
    if units != sorted(set(units), key=_UNITS[::-1].find) or text[:1] in "+-":
        raise ValueError(wrong)
    iso = f"P{text.upper()}" if text.endswith("w") else f"P{days}{'T' if clock else ''}{clock.upper()}"
    try:
        return _DURATION.validate_python(iso).total_seconds()
    except ValidationError as error:
        raise ValueError(wrong) from error


def parse_bandwidth(value: object) -> int | None:
    """Parse "1GB/s", "100MiB/s", "8Gb/s", "800Mbit/s", "8Gbps" to bytes per second; None for "none"."""
    if value in (None, "none"):
        return None
    if not isinstance(value, str):
        msg = 'a bandwidth is a string such as "1GB/s" or "8Gb/s", or a timetable "08:00,1GB/s 20:00,none"'
        raise ValueError(msg)
    text = value.strip()
    wrong = f'{text!r} is no bandwidth; write it as "1GB/s" (bytes) or "8Gb/s" (bits)'
    amount = next((text.removesuffix(end) for end in ("/s", "ps") if text.endswith(end)), None)
    if not amount:
        raise ValueError(wrong)
    bits = amount.endswith(("b", "bit"))
    sized = amount.removesuffix("it")[:-1] + "B" if bits else amount
    try:
        speed = parse_bytes(sized)
    except ValueError as error:
        raise ValueError(wrong) from error
    speed = speed // 8 if bits else speed
    if speed <= 0:
        msg = f'{text!r} moves nothing; leave the key out for "none", or pause with `ckptd pause`'
        raise ValueError(msg)
    return speed


def parse_per_day(value: object) -> int | None:
    """Parse "50GB/day" or "2TiB/day" to bytes per day; None for "off"."""
    if value in (None, "off"):
        return None
    text = text_of(value, "a speed of reading", "50GB/day")
    if not text.endswith("/day"):
        msg = f'{text!r} is no amount a day; write it as "50GB/day", or "off"'
        raise ValueError(msg)
    amount = parse_bytes(text.removesuffix("/day"))
    if amount <= 0:
        msg = f'{text!r} reads nothing; write "off"'
        raise ValueError(msg)
    return amount


def _is_number(text: str) -> bool:
    digits = text.replace(".", "", 1)
    return digits.isascii() and digits.isdigit() and text[:1] != "." and text[-1:] != "."


def show_bandwidth(bytes_per_second: int) -> str:
    """Show both spellings, so that nobody has to guess: "1.0GB/s = 8.0Gb/s"."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.4g} {unit}B/s = {bytes_per_second * 8 / size:.4g} {unit}b/s"
    return f"{bytes_per_second} B/s"


def show_seconds(seconds: float) -> str:
    """Show a duration for people, two units at most: "1h30m", "2d4h", "5s"."""
    rest = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if rest >= size or (unit == "s" and not parts):
            parts.append(f"{rest // size}{unit}")
            rest %= size
    return "".join(parts[:2])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]
BytesPerDay = Annotated[int | None, BeforeValidator(parse_per_day)]
ShareOrBytes = Annotated[Share, BeforeValidator(parse_share)]
Count = Annotated[int, Field(ge=1)]
