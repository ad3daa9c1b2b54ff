"""Plan what service install and service uninstall would do, as data; nothing is executed here.

Reads the units that are there: a unit without our mark is never overwritten nor removed, and the slice's
limit is the sum of all instances'.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base.owned_dirs import OURS
from ckptd.base.process import must_answer
from ckptd.config.remote_names import url_path
from ckptd.errors import CkptdError, NotFoundError, NotPermitted, StorageError, TargetExists
from ckptd.maintenance.install import units
from ckptd.maintenance.install.units import DROP_IN, SLICE, SYSTEM, USER, DropIn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.config.loader import LoadedConfig
    from ckptd.config.schema import JobConfig

SYSTEM_UNITS = Path("/etc/systemd/system")
_CONFIG = Path("/etc/ckptd")
_IMPORTS = "import ssl, ckptd.daemon.loop"
"""Imports that a daemon needs; an interpreter of another release lacks some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsTarget:
    """Name where units go: `folder` holds them; `user` is the training user, None in a user's own manager."""

    folder: Path
    user: str | None
    root: Path = Path("/")
    """Root of the file system to install into; another than / is not running: nothing is started."""

    @property
    def service(self) -> str:
        """Name of the instance."""
        return USER if self.user is None else SYSTEM.replace("@", f"@{self.user}")

    @property
    def unit(self) -> Path:
        """Return the unit's file."""
        return self.folder / (USER if self.user is None else SYSTEM)

    @property
    def drop_in(self) -> Path:
        """Return the drop-in of this instance."""
        return self.folder / f"{self.service}.d" / DROP_IN

    @property
    def systemctl(self) -> tuple[str, ...]:
        """Return how its manager is asked."""
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
    error: type[CkptdError] = StorageError
    hint: str = "the files are in place; mend what it says and run the same again"


Step = Write | MakeFolder | Remove | Command


def install_steps(
    target: UnitsTarget, drop_in: DropIn, program: tuple[str, ...], config_dir: Path, *, starts: bool
) -> tuple[Step, ...]:
    """Try the interpreter as that user; write units, drop-in, a place for job files; tell systemd.

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
    steps: list[Step] = [*_tries(target), *written, MakeFolder(path=config_dir / "jobs.d")]
    if is_live:
        steps.append(Command(argv=(*target.systemctl, "daemon-reload")))
    steps.append(Command(argv=(*target.systemctl, "enable", target.service)))
    if is_live and starts:
        steps.append(Command(argv=(*target.systemctl, "restart", target.service)))
    return tuple(steps)


def _tries(target: UnitsTarget) -> Iterable[Command]:
    """Yield the command that tries this interpreter as the training user.

    systemd says late that it cannot run an interpreter below /root or in another user's home. Worse: where
    the interpreter's own library cannot be reached, the loader takes the system's of another release, and
    ssl fails once a store is asked.
    """
    if target.user not in (None, "root") and target.root == Path("/") and os.geteuid() == 0:
        yield Command(
            argv=("runuser", "-u", str(target.user), "--", sys.executable, "-c", _IMPORTS),
            error=NotPermitted,
            hint="install ckptd where that user can read it, for example in /opt/ckptd",
        )


def uninstall_steps(target: UnitsTarget) -> tuple[Step, ...]:
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


def _limits(target: UnitsTarget) -> tuple[int, ...]:
    """Return the MemoryMax of the other instances in that folder, in bytes."""
    found = target.folder.glob(f"ckptd*.service.d/{DROP_IN}")
    others = [text for path in found if path != target.drop_in and (text := _text(path))]
    return tuple(units.memory_max_of(text) for text in others if units.is_ours(text))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


# --- directories that the service writes -----------------------------------------------------------------
# `ReadWritePaths` must cover them. A directory that is not there yet stands for its nearest parent, since a
# service sees it only if it was writable when the service started.


def writable_paths(loaded: LoadedConfig) -> tuple[str, ...]:
    """Return the absolute directories, none below another: save_dirs, directory remotes, state_dir."""
    wanted = [path for job in loaded.jobs for path in _of_job(job)]
    wanted += [_present(Path(pattern)) for pattern in loaded.glob_roots]
    if loaded.daemon.state_dir is not None:
        wanted.append(_present(loaded.daemon.state_dir))
    return _least(wanted)


def _of_job(job: JobConfig) -> Iterable[Path]:
    yield _present(job.save_dir)
    beside = job.save_dir.parent / f"{OURS}.{job.save_dir.name}"
    if job.trainer == "accelerate" or beside.is_dir():
        yield _present(job.save_dir.parent)
    for remote in job.remotes:
        place = url_path(remote.url)
        if place is not None:
            must_answer(str(place))
            yield _present(place)


def _present(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.is_dir())


def _least(paths: Iterable[Path]) -> tuple[str, ...]:
    chosen: list[str] = []
    for path in sorted({os.path.realpath(p) for p in paths}):
        if not any(Path(path).is_relative_to(place) for place in chosen):
            chosen.append(path)
    return tuple(chosen)


def service_user(config_dir: Path, units_dir: Path = SYSTEM_UNITS) -> str | None:
    """Return the user whose installed service reads that directory of job files; None: no service does."""
    config_dir = config_dir.absolute()
    named = units.config_dir_line(str(config_dir))
    for drop_in in sorted(units_dir.glob(f"{SYSTEM.replace('@', '@*')}.d/{DROP_IN}")):
        user = drop_in.parent.name.partition("@")[2].removesuffix(".service.d")
        with contextlib.suppress(OSError):
            if config_dir == _CONFIG / user or named in drop_in.read_text(errors="replace").splitlines():
                return user
    return None
