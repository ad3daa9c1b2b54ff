"""What install-service and uninstall-service would do, as data; nothing is executed here.

Reads the units that are there: what bears no mark of ours is never overwritten nor removed, and the slice's
limit is the sum of all instances'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptd.errors import NotFoundError, TargetExists
from ckptd.install import units
from ckptd.install.units import DROP_IN, SLICE, SYSTEM, USER, DropIn

SYSTEM_UNITS = Path("/etc/systemd/system")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where: `folder` holds the units; `user` is the training user, None in a user's own manager."""

    folder: Path
    user: str | None
    root: Path = Path("/")
    """Of the file system installed into; another than / is not running: nothing is started."""

    @property
    def service(self) -> str:
        """Name of the instance."""
        return USER if self.user is None else SYSTEM.replace("@", f"@{self.user}")

    @property
    def unit(self) -> Path:
        """The unit's file."""
        return self.folder / (USER if self.user is None else SYSTEM)

    @property
    def drop_in(self) -> Path:
        """The drop-in of this instance."""
        return self.folder / f"{self.service}.d" / DROP_IN

    @property
    def systemctl(self) -> tuple[str, ...]:
        """How its manager is asked."""
        if self.user is None:
            return ("systemctl", "--user")
        return ("systemctl",) if self.root == Path("/") else ("systemctl", f"--root={self.root}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A file with that text, and the folders above it."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeFolder:
    """A folder that job files are put into."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """A file of ours, and its folder when that is empty then."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program; `may_fail`: what it would undo may be undone already."""

    argv: tuple[str, ...]
    may_fail: bool = False


Step = Write | MakeFolder | Remove | Command


def install_steps(
    target: Target, drop_in: DropIn, program: tuple[str, ...], config_dir: Path, *, starts: bool
) -> tuple[Step, ...]:
    """Units, drop-in, a place for job files; then systemd is told.

    Raises:
        TargetExists: a unit of that name is not ours.
        RefusedError: a path that no unit can name.
    """
    is_live = target.root == Path("/")
    others = sum(_limits(target))
    written = (
        Write(path=target.unit, text=units.unit(target.unit.name, program)),
        Write(path=target.folder / SLICE, text=units.slice_unit(others + drop_in.memory_max_bytes)),
        Write(path=target.drop_in, text=drop_in.text),
    )
    for step in written:
        if _text(step.path) not in (None, "") and not units.is_ours(_text(step.path) or ""):
            raise TargetExists(
                f"{step.path} was not written by ckptd", hint="move it away, or keep it and install nothing"
            )
    steps: list[Step] = [*written, MakeFolder(path=config_dir / "jobs.d")]
    if is_live:
        steps.append(Command(argv=(*target.systemctl, "daemon-reload")))
    steps.append(Command(argv=(*target.systemctl, "enable", target.service)))
    if is_live and starts:
        steps.append(Command(argv=(*target.systemctl, "restart", target.service)))
    return tuple(steps)


def uninstall_steps(target: Target) -> tuple[Step, ...]:
    """Stop, disable, remove what is ours; unit and slice go with the last instance.

    Raises:
        NotFoundError: that instance is not installed.
    """
    if _text(target.drop_in) is None:
        msg = f"{target.service} is not installed ({target.drop_in} is not there)"
        raise NotFoundError(msg, hint="name the user it was installed for: --run-as USER, or --user")
    is_live = target.root == Path("/")
    stop = ("--now",) if is_live else ()
    steps: list[Step] = [Command(argv=(*target.systemctl, "disable", *stop, target.service), may_fail=True)]
    limits = _limits(target)
    doomed = [target.drop_in]
    if limits:
        steps.append(Write(path=target.folder / SLICE, text=units.slice_unit(sum(limits))))
    else:
        doomed += [target.unit, target.folder / SLICE]
    steps += [Remove(path=path) for path in doomed if units.is_ours(_text(path) or "")]
    if is_live:
        steps.append(Command(argv=(*target.systemctl, "daemon-reload")))
    return tuple(steps)


def _limits(target: Target) -> tuple[int, ...]:
    """MemoryMax of the other instances in that folder, in bytes."""
    found = target.folder.glob(f"ckptd*.service.d/{DROP_IN}")
    others = [text for path in found if path != target.drop_in and (text := _text(path))]
    return tuple(units.memory_max_of(text) for text in others if units.is_ours(text))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
