"""Render the units that the wheel carries in `systemd/`, made to fit this installation; pure.

Whatever is written begins with `MARK`: nothing without it is overwritten or removed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.base.package_data import data_file
from ckptd.errors import RefusedError

MARK = "# Written by `ckptd service install`, which writes it anew; `ckptd service uninstall` removes it.\n"
_OLD_MARK = (
    "# Written by `ckptd install-service`, which writes it anew; `ckptd uninstall-service` removes it.\n"
)
"""First line of units that ckptd 0.1 wrote."""
SYSTEM, USER, SLICE = "ckptd@.service", "ckptd.service", "ckptd.slice"
DROP_IN = "10-ckptd.conf"
_ENV = "/usr/bin/env ckptd"
_MAX = "MemoryMax="
_ROOM = 1.25
"""MemoryMax above the budget: the budget is kept by ckptd itself, the limit is for when it is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropIn:
    """Hold what one instance may write, and how much memory it may take."""

    paths: tuple[str, ...]
    memory_budget_bytes: int
    sets_paths: bool = True
    """A user's own manager cannot make the rest read-only, so that listing paths would say nothing."""
    config_dir: str = ""
    """Directory from which the service reads its jobs, if not the unit's."""

    @property
    def memory_max_bytes(self) -> int:
        """Return the memory at which the kernel ends it."""
        return int(self.memory_budget_bytes * _ROOM)

    @property
    def text(self) -> str:
        """Render it as a drop-in of systemd."""
        lines = [f"MemoryHigh={self.memory_budget_bytes}", f"{_MAX}{self.memory_max_bytes}"]
        if self.sets_paths:
            lines += [f"ReadWritePaths={quoted('-' + path)}" for path in self.paths]
        if self.config_dir:
            lines.append(config_dir_line(self.config_dir))
        return MARK + "\n[Service]\n" + "\n".join(lines) + "\n"


def unit(name: str, program: tuple[str, ...]) -> str:
    """Return a unit of the wheel that starts `program`.

    Raises:
        RefusedError: the program's path cannot stand in a unit.
    """
    text = data_file("systemd", name).read_text(encoding="utf-8")
    return MARK + text.replace(_ENV, " ".join(quoted(part) for part in program))


def slice_unit(memory_max_bytes: int) -> str:
    """Return the slice of all instances; `memory_max_bytes` is the sum of theirs."""
    return unit(SLICE, ()) + f"{_MAX}{memory_max_bytes}\n"


def is_ours(text: str) -> bool:
    """Whether `service install` wrote it."""
    return text.startswith((MARK, _OLD_MARK))


def memory_max_of(text: str) -> int:
    """Return the MemoryMax of a drop-in of ours, in bytes; 0 where it has none."""
    values = [line.removeprefix(_MAX) for line in text.splitlines() if line.startswith(_MAX)]
    return int(values[0]) if values and values[0].isdecimal() else 0


def config_dir_line(config_dir: str) -> str:
    """Return the line of a drop-in that names the directory of job files."""
    return f"Environment={quoted('CKPTD_CONFIG_DIR=' + config_dir)}"


def quoted(value: str) -> str:
    """Return a word as systemd reads it.

    Raises:
        RefusedError: it holds a line break or another control character.
    """
    if not value.isprintable():
        msg = f"{value!r} cannot stand in a unit of systemd"
        raise RefusedError(msg, hint="use a path without control characters")
    value = value.replace("%", "%%")
    if any(character in value for character in " \"'\\"):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return value
