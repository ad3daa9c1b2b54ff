"""Parse quantities with units as people write them: "512MiB", "5%", "1h30m", "8Gb/s" → typed numbers.

Bits and bytes differ by the case of the b (8Gb/s is 1 GB/s), so every parsed value can be shown back in one
unambiguous spelling. Sizes are parsed by pydantic's ByteSize, durations as ISO 8601.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_right
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, NoReturn
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, Strict, TypeAdapter, ValidationError

from ckptd.base.humanize import NAME_CHARACTERS, size_of
from ckptd.base.identity import Model
from ckptd.base.names import stays_inside
from ckptd.config.schemes import url_fault
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def _text(value: object, what: str, example: str) -> str:
    if not isinstance(value, str):
        msg = f'{what} is a string with a unit, such as "{example}"'
        raise ValueError(msg)
    return value.strip()


def parse_bytes(value: object) -> int:
    """Parse "512MiB", "5GB", "1.5TiB" to bytes (1000 or 1024 as the unit says); a unit is needed."""
    text = _text(value, "a size", "512MiB")
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
    text = _text(value, "a size or percentage", "5%")
    if not text.endswith("%"):
        return Share(bytes=parse_bytes(text))
    number = text[:-1].strip()
    if not _is_number(number) or not 0 <= float(number) <= 100:
        msg = f'{text!r} is no percentage between "0%" and "100%"'
        raise ValueError(msg)
    return Share(percent=float(number))


def parse_duration(value: object) -> float:
    """Parse "5s", "1h30m", "2d", "1w" to seconds; units s, m, h, d, w, largest first."""
    text = _text(value, "a duration", "60s")
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
    text = _text(value, "a speed of reading", "50GB/day")
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


# --- Values of single keys: names, paths, URLs, patterns, and what this version does not take yet --------
# A validator raises ValueError with the reason; `config_explain` adds file, key and value.

SHORTEST_TAKEOVER_SECONDS = 6.0

UNNAMED = "remote"
"""Name of a remote that only a command line gives."""


def shown_remote(name: str, url: str) -> str:
    """Return how messages call a remote: by its name, or its URL where nobody gave it one."""
    return url if name == UNNAMED else f"remote {name}"


def said_of(name: str, url: str, text: str) -> str:
    """Return a line about a remote; a URL that the text names already is not said twice."""
    shown = shown_remote(name, url)
    return text if shown == url and url in text else f"{shown}: {text}"


def reject(text: str) -> NoReturn:
    """End a validation with this reason."""
    raise ValueError(text)


def check_name(value: str) -> str:
    """Check a name of a job, remote or node."""
    if not value or not set(value) <= NAME_CHARACTERS or value[0] in ".-":
        reject("a name is made of letters, digits and . _ = + -, and starts with none of . and -")
    return value


def absolute_path(value: object) -> Path:
    """Check an absolute path without `..`."""
    if not isinstance(value, str | Path):
        reject('a path is a string, such as "/nvme/llama-7b"')
    path = Path(str(value))
    if not path.is_absolute():
        # whoever reads the file may have another home, so nothing is expanded
        full = os.path.expandvars(os.path.expanduser(str(value)))
        reject("the path must be absolute" + (f': write "{full}"' if os.path.isabs(full) else ""))
    if "\0" in str(value) or ".." in path.parts:
        reject("the path must not contain '..' or NUL")
    return path


def check_save_dir(value: object) -> Path:
    """Check an absolute path that is neither a glob nor the root directory."""
    if isinstance(value, str) and any(c in value for c in "*?["):
        reject("a glob stands in a job file alone, not in arguments")
    path = absolute_path(value)
    if path == Path("/"):
        reject("save_dir cannot be the root directory")
    return path


def check_url(value: str) -> str:
    """Check a directory (absolute path or file:// URL), s3://bucket/prefix or another URL; refuse secrets."""
    parts = urlsplit(value)
    if parts.password is not None:
        reject("a secret does not belong in a URL")
    if parts.scheme == "s3":
        return _check_s3_url(value)
    if parts.scheme not in ("", "file"):
        fault = url_fault(parts)
        if fault is not None:
            reject(fault)
        return value.rstrip("/")
    if parts.netloc not in ("", "localhost"):
        here, there = f"file:///{parts.netloc}{parts.path}", f"sftp://{parts.netloc}{parts.path}"
        reject(f"file:// names no other machine: write {here} for a directory here, or {there}")
    path = url_path(value)
    if path is None or not path.is_absolute() or ".." in path.parts or path == Path("/"):
        reject("the path must be absolute, without '..', and not the root directory")
    return value


def check_spelling(url: str) -> None:
    """Refuse what is typed like an address of another machine and would become a directory in this one.

    Raises:
        ConfigError: `host:/path`, `s3:/bucket`, `C:\\x`; a directory with a colon is named ./x:y or absolute.
    """
    head, colon, rest = url.partition(":")
    if not colon or "/" in head or rest.startswith("//") or head.startswith((".", "~")):
        return
    path = rest.lstrip("/\\")
    if head == "rclone" or ":" in rest:
        hint = "rclone's remotes are no URLs: `rclone mount` it and name the mounted path"
    elif head in _SCHEMES:
        hint = f"write {head}://{'/' if head == 'file' else ''}{path or 'bucket/prefix'}"
    elif len(head) == 1:
        hint = "ckptd runs on Linux: mount that drive there and name the mounted path"
    else:
        hint = f"write sftp://{head}/{path or 'path'}, or mount it and name the mounted path"
    msg = f'"{url}" is neither a URL nor an absolute path'
    raise ConfigError(msg, hint=f"{hint}; a directory of that name here: ./{url}")


def _check_s3_url(value: str) -> str:
    parts = urlsplit(value)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc):
        reject("the bucket must be 3 to 63 small letters, digits, dots and dashes: s3://bucket/prefix")
    prefix = parts.path.strip("/")
    if not prefix or parts.query or parts.fragment or any(p in ("", ".", "..") for p in prefix.split("/")):
        reject("a job has a prefix of its own in the bucket: s3://bucket/llama-7b")
    return f"s3://{parts.netloc}/{prefix}"


def check_endpoint(value: str) -> str:
    """Return the URL of an S3 server, checked: http(s)://host[:port], without a secret in it."""
    parts = urlsplit(value)
    if parts.username or parts.password:
        reject("a secret does not belong in a URL")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        reject('an endpoint is http(s)://host[:port], such as "https://s3.example.org:9000"')
    return value


def check_credentials(value: str) -> str:
    """Return the place of credentials, checked: env, a profile or a file, never the secrets themselves."""
    kind, _, rest = value.partition(":")
    if value != "env" and (kind not in ("profile", "file") or not rest):
        reject('it is "env", "profile:NAME" or "file:PATH"; secrets themselves stay out of job files')
    name = rest.removeprefix("$CREDENTIALS_DIRECTORY/")
    if (
        kind == "file"
        and not name.startswith("/")
        and ("/" in name or name in ("", ".", "..") or "$" in name)
    ):
        reject(
            "a credentials file is an absolute path, or a name in $CREDENTIALS_DIRECTORY (LoadCredential=)"
        )
    return value


def check_part_size(value: int) -> int:
    """Check that it is within what S3 takes."""
    if not 5 << 20 <= value <= 5 << 30:
        reject('a part has at least "5MiB" and at most "5GiB"')
    return value


def check_pattern(value: str) -> str:
    """Check a shell pattern for names directly in save_dir."""
    if not value or "/" in value or value.startswith("_ckptd"):
        reject("a pattern names files directly in save_dir, such as tokenizer*")
    return value


def check_metrics_place(value: str) -> str:
    """Check HOST:PORT, or the absolute path of a file that node_exporter reads."""
    if value.startswith("/"):
        if not value.endswith(".prom"):
            reject("node_exporter reads files that end in .prom")
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        reject('it is "HOST:PORT" ("127.0.0.1:9310"), or the path of a file that ends in .prom')
    return value


def check_metrics_file(value: str) -> str:
    """Check a file below save_dir, where no link is followed (P15)."""
    parts = value.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in value or parts[0].startswith("_ckptd"):
        reject('metrics_file is a relative path below save_dir, such as "metrics.jsonl"')
    return value


def check_layout_files(value: str) -> str:
    """Accept a pattern of files directly in save_dir."""
    if "/" in value or not value or value.startswith("_ckptd"):
        reject('files is a pattern of names directly in save_dir, such as "model_*.pt"')
    return value


class CompleteWhen(NamedTuple):
    """Say what makes a checkpoint whole that no layout knows: a file, or quiet time."""

    kind: Literal["marker", "manifest", "quiet"]
    name: str = ""
    """Path of the marker or manifest in the folder of each checkpoint."""
    seconds: float = 0.0


def parse_complete_when(value: object) -> CompleteWhen | None:
    """Parse "marker DONE", "manifest files.json" and "quiet 120s"."""
    if value is None or isinstance(value, CompleteWhen):
        return value
    text = _text(value, "a rule", "marker DONE")
    kind, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if kind == "quiet" and rest:
        seconds = parse_duration(rest)
        if seconds <= 0:
            reject('"quiet" names a time, such as "quiet 120s"')
        return CompleteWhen("quiet", seconds=seconds)
    if kind in ("marker", "manifest") and stays_inside(rest):
        return CompleteWhen("marker" if kind == "marker" else "manifest", name=rest)
    msg = f'{text!r} is no rule; write "marker DONE" or "manifest files.json", a file in each checkpoint\'s '
    msg += 'folder that is written last, or "quiet 120s"'
    raise ValueError(msg)


def url_path(url: str) -> Path | None:
    """Return the directory that a remote's URL names; None for other kinds of stores."""
    parts = urlsplit(url)
    if parts.scheme == "":
        return Path(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


_SCHEMES = frozenset(("s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "sftp", "ssh", "file", "http", "https"))

Name = Annotated[str, AfterValidator(check_name)]
Url = Annotated[str, AfterValidator(check_url)]
Endpoint = Annotated[str, AfterValidator(check_endpoint)]
Credentials = Annotated[str, AfterValidator(check_credentials)]
AbsoluteDir = Annotated[Path | None, BeforeValidator(lambda v: None if v is None else absolute_path(v))]
MetricsPlace = Annotated[str, AfterValidator(check_metrics_place)]
LayoutFiles = Annotated[str, AfterValidator(check_layout_files)]
MetricsFile = Annotated[str, AfterValidator(check_metrics_file)]
Names = Annotated[tuple[Annotated[str, AfterValidator(check_pattern)], ...], Strict(False)]
Count = Annotated[int, Field(ge=1)]


def local_form(value: object) -> object:
    """Refuse forms that are made for remotes alone."""
    if isinstance(value, str) and value.startswith("weights-"):
        reject(f'the form "{value}" is made for remotes; name it in the forms of a [[remote]]')
    return value


def check_takeover(seconds: float) -> float:
    """Refuse less than six heartbeats of a second."""
    if seconds < SHORTEST_TAKEOVER_SECONDS:
        reject(f'a host is silent for at least "{SHORTEST_TAKEOVER_SECONDS:.0f}s" before it is replaced')
    return seconds


def not_shareable(remotes: Iterable[tuple[str, bool, tuple[str, ...]]]) -> str:
    """Return why hosts over one directory could not meet in these remotes (URL, required, forms); "": they
    can.
    """
    known = list(remotes)
    if not any(required and "zero" in forms for _, required, forms in known):
        return "shared_fs = true: the hosts agree in a remote; set required = true on one"
    kept = next((url for url, _, _ in known if url.startswith("hf://")), None)
    return f"shared_fs = true: {kept} keeps every heartbeat for ever; use another remote" if kept else ""


Trainer = Literal["auto", "deepspeed", "huggingface", "accelerate", "lightning", "megatron", "torch"]
Form = Literal["zero", "universal", "weights-fp32", "weights-bf16", "weights-fp16"]


# ---------------------------------------------------------------------------------------------------------
# A bandwidth, for ever or by the clock: rclone's timetable with units that say bits or bytes.
# `"08:00,1GB/s 20:00,none"`: each entry holds from its time until the next one, in local time, every day
# or, as
# "Mon-08:00,1GB/s", on one. The speed follows from the wall clock alone and is asked anew each time: no
# jump of the clock and no summer time can leave a wrong one behind.

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
