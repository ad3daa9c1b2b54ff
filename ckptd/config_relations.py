"""Relations between paths of jobs: nothing of one lies inside another (H5, H6, H30).

Two jobs with one URL would destroy each other, a remote inside save_dir would be watched as a checkpoint;
such mistakes are refused here, before anything is written. The path of a remote is compared as it is spelled:
a call on a dead mount does not return, so only the remote's own process touches it, and refuses there what is
found out by resolving symlinks alone (ckptd/remote/attach.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.config_values import url_path
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.config_model import JobConfig

APART_HINT = "no URL, save_dir or state directory may lie inside another"


def check_job_paths(job: JobConfig, where: str) -> None:
    """Refuse a save_dir that is a symlink or has no parent, and a remote inside it or around it.

    Raises:
        ConfigError: naming the path and what it resolves to.
    """
    save_dir = job.save_dir
    if save_dir.is_symlink():
        msg = f'{where}: save_dir = "{save_dir}" is a symlink'
        raise ConfigError(msg, hint=f'write what it points to: save_dir = "{os.path.realpath(save_dir)}"')
    if save_dir.exists() and not save_dir.is_dir():
        msg = f'{where}: save_dir = "{save_dir}" is not a directory'
        raise ConfigError(msg)
    if not save_dir.parent.is_dir():
        msg = (
            f'{where}: save_dir = "{save_dir}": its parent {os.path.realpath(save_dir.parent)} does not exist'
        )
        raise ConfigError(
            msg, hint="is the disk mounted? save_dir itself may appear later, its parent must exist"
        )
    places = _places(job)
    for index, place in enumerate(places):
        for other in places[:index]:
            _apart(where, place, other)


def conflicts(job: JobConfig, others: Sequence[JobConfig], state_dirs: Sequence[Path], where: str) -> None:
    """Compare names, URLs and directories with those of the jobs before it and the state directories.

    Raises:
        ConfigError: naming both.
    """
    for other in others:
        if other.name == job.name:
            msg = f'{where}: name = "{job.name}" is taken by {other.file or other.save_dir}'
            raise ConfigError(msg, hint="names of jobs are unique in one daemon")
        for place in _places(job):
            for theirs in _places(other):
                _apart(where, place, replace(theirs, what=f"{theirs.what} of job {other.name}"))
    for state_dir in state_dirs:
        for place in _places(job):
            _apart(where, place, _Place("state_dir", state_dir))


@dataclass(frozen=True, slots=True)
class _Place:
    what: str
    path: Path
    is_remote: bool = False

    def spellings(self) -> set[Path]:
        """Return the path as written and, of a local directory, what it resolves to."""
        written = Path(os.path.normpath(self.path))
        if self.is_remote:
            return {written}
        return {written, Path(os.path.realpath(self.path))}


def _places(job: JobConfig) -> list[_Place]:
    places = [_Place("save_dir", job.save_dir)]
    for index, remote in enumerate(job.remotes):
        path = url_path(remote.url)
        if path is not None:
            places.append(_Place(f"remote[{index}].url", path, is_remote=True))
    return places


def _apart(where: str, mine: _Place, other: _Place) -> None:
    what, path = mine.what, mine.path
    for here in mine.spellings():
        for there in other.spellings():
            if here == there:
                msg = f'{where}: {what} = "{path}" is also {other.what}'
                raise ConfigError(msg, hint="each save_dir and each URL belongs to one job alone")
            if there in here.parents or here in there.parents:
                inner, outer = (what, other.what) if there in here.parents else (other.what, what)
                msg = f'{where}: {what} = "{path}": {inner} lies inside {outer} ({other.path})'
                raise ConfigError(msg, hint=APART_HINT)
