"""Carry out the steps of service install and service uninstall, one after the other."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.errors import NotPermitted, StorageError, from_os_error
from ckptd.maintenance.install.plan import Command, MakeFolder, Remove, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckptd.maintenance.install.plan import Step

_COMMAND_SECONDS = 240
"""Longer than TimeoutStopSec: stopping may finish what is being sent."""


def execute(steps: Sequence[Step], tell: Callable[[str], None]) -> None:
    """Execute; each step is told as it is done. Doing them again changes nothing.

    Raises:
        NotPermitted: a file cannot be written. StorageError: systemd refused, in its own words.
    """
    for step in steps:
        tell(describe(step))
        try:
            _one(step)
        except PermissionError as error:
            msg = f"{describe(step)}: {error.strerror}"
            raise NotPermitted(msg, hint="run it as root (sudo), or with --user") from error
        except OSError as error:
            raise from_os_error(error, describe(step)) from error


def describe(step: Step) -> str:
    """Return a step in words."""
    match step:
        case Write(path=path):
            return f"write {path}"
        case MakeFolder(path=path):
            return f"make {path}"
        case Remove(path=path):
            return f"remove {path}"
        case Command(argv=argv):
            return "run " + " ".join(argv)


def _one(step: Step) -> None:
    match step:
        case Write(path=path, text=text):
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.opened_dir(path.parent) as folder:
                files.write_atomic(folder, path.name, text.encode(), mode=0o644)
        case MakeFolder(path=path):
            path.mkdir(parents=True, exist_ok=True)
        case Remove(path=path):
            _remove(path)
        case Command():
            _run(step)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), files.opened_dir(path.parent) as folder:
        files.remove_file(folder, path.name)
    if path.parent.name.endswith(".d"):
        with contextlib.suppress(OSError):  # somebody else's drop-ins stay, and the folder with them
            os.rmdir(path.parent)


def _run(command: Command) -> None:
    try:
        done = subprocess.run(
            command.argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_COMMAND_SECONDS,
            start_new_session=True,  # what another user's interpreter loads gets no hold of root's terminal
        )
    except FileNotFoundError as error:
        msg = f"there is no {command.argv[0]} here"
        hint = "without systemd, start `ckptd run` as a step of the job (docs/clusters.md)"
        raise StorageError(msg, hint=hint) from error
    except subprocess.TimeoutExpired as error:
        msg = f"{' '.join(command.argv)} did not end within {_COMMAND_SECONDS} s"
        raise StorageError(msg, hint="see `journalctl -u 'ckptd@*'`") from error
    if done.returncode != 0 and not command.may_fail:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        msg = f"{' '.join(command.argv)} failed: {said or f'exit status {done.returncode}'}"
        raise command.error(msg, hint=command.hint)
