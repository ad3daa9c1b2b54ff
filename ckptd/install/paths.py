"""Which directories the daemon of a configuration writes: what `ReadWritePaths` must cover (H32).

A directory that is not there yet stands for its nearest parent, since a service sees it only if it was
writable when the service started.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.config_values import url_path
from ckptd.place import OURS
from ckptd.spawn import must_answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptd.config import JobConfig, LoadedConfig


def writable_paths(loaded: LoadedConfig) -> tuple[str, ...]:
    """Absolute directories, none below another: save_dirs, directory remotes, state_dir."""
    wanted = [path for job in loaded.jobs for path in _of_job(job)]
    wanted += [_present(Path(pattern)) for pattern in loaded.glob_roots]
    if loaded.daemon.state_dir is not None:
        wanted.append(_present(loaded.daemon.state_dir))
    return _least(wanted)


def uncovered(wanted: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Those of `wanted` that lie below none of `allowed`."""
    return tuple(path for path in wanted if not any(_covers(place, path) for place in allowed))


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
        if not any(_covers(place, path) for place in chosen):
            chosen.append(path)
    return tuple(chosen)


def _covers(place: str, path: str) -> bool:
    return path == place or path.startswith(place.rstrip("/") + "/")
