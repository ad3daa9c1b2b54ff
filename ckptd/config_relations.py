"""Relations between paths of jobs: nothing of one lies inside another (H5, H6, H30).

Two jobs with one URL would destroy each other, a remote inside save_dir would be watched as a checkpoint;
such mistakes are refused here, before anything is written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.config_values import url_path
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.config_model import JobConfig


def check_job_paths(job: JobConfig, where: str) -> None:
    """save_dir is no symlink and has a parent; no remote lies inside it or around it.

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
    for index, (what, path) in enumerate(places):
        for other, other_path in places[:index]:
            _apart(where, what, path, other, other_path)


def conflicts(job: JobConfig, others: Sequence[JobConfig], state_dirs: Sequence[Path], where: str) -> None:
    """Names, URLs and directories of `job` against those of the jobs before it and the state directories.

    Raises:
        ConfigError: naming both.
    """
    for other in others:
        if other.name == job.name:
            msg = f'{where}: name = "{job.name}" is taken by {other.file or other.save_dir}'
            raise ConfigError(msg, hint="names of jobs are unique in one daemon")
        for what, path in _places(job):
            for theirs, their_path in _places(other):
                _apart(where, what, path, f"{theirs} of job {other.name}", their_path)
    for state_dir in state_dirs:
        for what, path in _places(job):
            _apart(where, what, path, "state_dir", state_dir)


def _places(job: JobConfig) -> list[tuple[str, Path]]:
    places = [("save_dir", job.save_dir)]
    for index, remote in enumerate(job.remotes):
        path = url_path(remote.url)
        if path is not None:
            places.append((f"remote[{index}].url", path))
    return places


def _apart(where: str, what: str, path: Path, other: str, other_path: Path) -> None:
    mine, theirs = Path(os.path.realpath(path)), Path(os.path.realpath(other_path))
    if mine == theirs:
        msg = f'{where}: {what} = "{path}" is also {other}'
        raise ConfigError(msg, hint="each save_dir and each URL belongs to one job alone")
    if theirs in mine.parents or mine in theirs.parents:
        inner, outer = (what, other) if theirs in mine.parents else (other, what)
        msg = f'{where}: {what} = "{path}": {inner} lies inside {outer} ({other_path})'
        raise ConfigError(msg, hint="no URL, save_dir or state directory may lie inside another")
