"""Find the job that a command means by JOB or SAVE_DIR: a job file's, or the one that its daemon wrote down.

A job that `ckptd run SAVE_DIR URL` or `ckptd run --job FILE` started is in no configuration directory; its
state directory keeps how it was started (`job.json`), which a wiped node has no longer.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base.owned_dirs import path_of
from ckptd.config.commands import default_config_dir
from ckptd.config.loader import job_from_memory, load_daemon, load_job_file, resolve_job
from ckptd.core.model.listing import OURS
from ckptd.errors import CkptdError, NotFoundError
from ckptd.storage.local.state_dir import JOB, private_place, remembered_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptd.config.schema import JobConfig

_SERVICES = Path("/var/lib/ckptd")


def job_named(job: str, environ: Mapping[str, str], *, config_dir: Path | None = None) -> JobConfig:
    """Return the job that JOB names: a name, a job file or a save_dir, with its remotes as far as known.

    Raises:
        NotFoundError: no such job, or the job file that it was started by is gone (66).
        ConfigError, NotPermitted: of the file that names it (78, 77).
    """
    found = resolve_job(job, environ, config_dir=config_dir)
    if found.file is not None:
        return found
    return _remembered(found, environ, config_dir) or found


def no_remote(config: JobConfig) -> NotFoundError:
    """Say that no remote of a save_dir is known, where one is needed."""
    msg = f"no remote is known of {config.save_dir}: no job file names it, and no daemon has run for it here"
    return NotFoundError(msg, hint="set CKPTD_URL to its remote, or name its job file or the remote instead")


def _remembered(found: JobConfig, environ: Mapping[str, str], config_dir: Path | None) -> JobConfig | None:
    places = _state_dirs(found.save_dir, environ, config_dir)
    file, given = remembered_job(places, found.save_dir)
    if file is not None and not found.remotes:
        jobs = load_job_file(Path(file), check_paths=False)
        return next((one for one in jobs if one.save_dir == found.save_dir), None)
    if given is None:
        return None
    with contextlib.suppress(ValueError, KeyError):  # what another version wrote is not known
        return job_from_memory(str(found.save_dir), given, environ)
    return None


def _state_dirs(save_dir: Path, environ: Mapping[str, str], config_dir: Path | None) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield path_of(save_dir, f"{OURS}/state")
    yield private_place(save_dir)
    bases = [Path(base.split(":")[0]) for base in (environ.get("STATE_DIRECTORY"),) if base]
    with contextlib.suppress(CkptdError):
        daemon = load_daemon((config_dir or default_config_dir(environ)) / "ckptd.toml", environ)
        bases += [daemon.state_dir] if daemon.state_dir is not None else []
    for base in bases:
        yield from sorted(path.parent for path in base.glob(f"*/{JOB}"))
    yield from sorted(path.parent for path in _SERVICES.glob(f"*/*/{JOB}"))
