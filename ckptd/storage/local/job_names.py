"""Tell what JOB names that no configuration knows: a remote, or a job of a daemon that runs.

Daemons are found in /proc, which is never out of date: one holds the journal of each of its jobs open in the
state directory where it publishes status.json. Of a job that waits for its first checkpoint it publishes in
the user's own place in /var/tmp. `ckptd status` looks here, so nothing heavy is imported (docs/adr/0197).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base.process import must_answer
from ckptd.errors import NotFoundError, UsageError
from ckptd.observe.status import FILE_NAME, pid_space
from ckptd.observe.status_reader import read_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptd.observe.status import Status

_PROC = Path("/proc")
_JOURNAL = "journal.db"
_PROGRAM = re.compile(rb"python|ckptd")
"""Not `sudo ckptd run`, `dumb-init ckptd run`, which wait for the daemon and pass signals on to it."""
_MOST_LOOKED, _SHOWN = 2000, 5
"""Folders that are looked at for remotes below one, and how many of those are named."""
_VERBS = {b"run", b"drain"}
"""Verbs of processes that work as a daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that a daemon of this user watches now."""

    name: str
    save_dir: Path
    urls: tuple[str, ...]
    """URLs of its remotes, without `file://` and a slash at the end."""
    place: Path
    """The directory in which its status lies; its state directory, unless it waits for a checkpoint."""
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDaemon:
    """A daemon of this user that runs."""

    pid: int
    places: tuple[Path, ...]
    """Directories in which it publishes; none in the moment after its start."""


def is_remote(job: str) -> bool:
    """Tell whether it is a URL, or the directory of a remote.

    Raises:
        RemoteUnreachable: the path does not answer.
    """
    if "://" in job:
        return True
    if "/" in job:
        must_answer(job)
    return os.path.isfile(os.path.join(job, "_ckptd", "remote.json"))


def remotes_below(folder: str | Path) -> list[str]:
    """Return the remotes of ckptd that lie one or two folders below; of a vast folder not all are found."""
    found: list[str] = []
    looked, above = 0, [str(folder)]
    for _ in range(2):
        below: list[str] = []
        for place in above:
            with contextlib.suppress(OSError):
                below += [os.path.join(place, name) for name in sorted(os.listdir(place))]
        above = below[: _MOST_LOOKED - looked]
        looked += len(above)
        found += [one for one in above if os.path.isfile(os.path.join(one, "_ckptd", "remote.json"))]
    return found


def named_below(remotes: Sequence[str], verb: str = "list") -> str:
    """Say which remotes lie below what was named, and what to type; empty: none does."""
    if not remotes:
        return ""
    typed = shlex.join(["ckptd", verb, remotes[0]])
    if len(remotes) == 1:
        return f"the remote {remotes[0]} lies below it: {typed}"
    more = f" and {len(remotes) - _SHOWN} more" if len(remotes) > _SHOWN else ""
    return f"remotes lie below it, {', '.join(remotes[:_SHOWN])}{more}: {typed}"


def must_be_of_this_node(job: str | None, verb: str) -> None:
    """Refuse a remote where `verb` acts on a job of this node.

    Raises:
        UsageError: JOB is a remote; the hint names the job here that uploads there, if one runs.
    """
    if job is None or not is_remote(job):
        return
    url = _as_compared(job if "://" in job else os.path.abspath(job))
    here = next((one for one in running_jobs() if url in one.urls), None)
    words = ["ckptd", *verb.split()]
    if here is not None:
        hint = f"{shlex.join([*words, str(here.save_dir)])}: job {here.name} uploads there"
    else:
        hint = f"{shlex.join(words)} JOB: its file, its name or its SAVE_DIR"
    raise UsageError(f"{verb.split()[0]} works on a job of this node, and {job} is a remote", hint=hint)


def running_daemons() -> list[RunningDaemon]:
    """Return this user's daemons that run in this namespace of processes, the oldest first."""
    pids = [int(name) for name in os.listdir(_PROC) if name.isdecimal()]
    daemons = [pid for pid in sorted(pids) if _is_own(_PROC / str(pid)) and is_daemon(pid, signal.SIGHUP)]
    waiting = _waiting_places() if daemons else {}
    return [
        RunningDaemon(pid=pid, places=tuple(dict.fromkeys([*_state_dirs(pid), *waiting.get(pid, [])])))
        for pid in daemons
    ]


def running_jobs() -> Iterator[RunningJob]:
    """Yield the jobs of this user's daemons that run."""
    for daemon in running_daemons():
        for place in daemon.places:
            found = _read(place)
            for job in found.jobs if found is not None else ():
                if job.state != "invalid":
                    yield RunningJob(
                        name=job.name,
                        save_dir=Path(job.save_dir),
                        urls=tuple(_as_compared(one.url) for one in job.remotes),
                        place=place,
                        pid=daemon.pid,
                    )


def running_job(name: str) -> RunningJob | None:
    """Return the job of that name which a daemon of this user watches; None: none does.

    Raises:
        UsageError: several do.
    """
    found = {one.save_dir: one for one in running_jobs() if one.name == name}
    if len(found) > 1:
        msg = f"{len(found)} jobs called {name} run here"
        raise UsageError(msg, hint=f"name its SAVE_DIR: {', '.join(map(str, found))}")
    return next(iter(found.values()), None)


def with_running(error: NotFoundError) -> NotFoundError:
    """Add the jobs of this user's daemons to an error that lists the configured ones."""
    names = sorted({one.name for one in running_jobs()})
    return NotFoundError(f"{error.message}; running: {', '.join(names) or 'none'}", hint=error.hint)


def running_in(save_dir: Path) -> RunningJob | None:
    """Return the job that a daemon of this user watches in `save_dir`; None: none does."""
    real = os.path.realpath(save_dir)
    return next((one for one in running_jobs() if os.path.realpath(one.save_dir) == real), None)


def running_state_dir(save_dir: Path) -> Path | None:
    """Return where a daemon of this user that runs keeps the state of `save_dir`; None: none has any."""
    found = running_in(save_dir)
    return found.place if found is not None and (found.place / _JOURNAL).exists() else None


def is_daemon(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process is a daemon of ckptd that listens to a signal."""
    place = _PROC / str(pid)
    try:
        words = (place / "cmdline").read_bytes().split(b"\0")
        if not _PROGRAM.match(os.path.basename(words[0])):
            return False
        if not _VERBS & set(words) or not any(b"ckptd" in word for word in words):
            return False
        lines = (place / "status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _as_compared(url: str) -> str:
    return url.removeprefix("file://").rstrip("/")


def _is_own(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(path).st_uid == os.geteuid()
    return False


def _state_dirs(pid: int) -> list[Path]:
    """Return the directories whose journal the process has open."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(_PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                path = Path(os.readlink(_PROC / str(pid) / "fd" / name))
                if path.name == _JOURNAL and path.parent not in found:
                    found.append(path.parent)
    return sorted(found)


def _waiting_places() -> dict[int, list[Path]]:
    """Return by process where jobs without a checkpoint are published: the user's own place in /var/tmp."""
    found: dict[int, list[Path]] = {}
    own = Path("/var/tmp") / f"ckptd-{os.getuid()}"  # noqa: S108 — owner is checked
    for path in sorted(own.glob(f"*/{FILE_NAME}")) if _is_own(own) else ():
        status = _read(path.parent)
        if status is not None and status.daemon.alive and status.daemon.pid_space in ("", pid_space()):
            found.setdefault(status.daemon.pid, []).append(path.parent)
    return found


def _read(place: Path) -> Status | None:
    """Return what is published in a directory; None where nothing is, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_status((place / FILE_NAME).read_bytes())[0]
    return None
