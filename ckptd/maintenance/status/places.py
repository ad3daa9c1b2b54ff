"""Find the state directories that `ckptd status` reads, by a save_dir, a job file or a name.

The configuration's models take longer to load than everything else that status does, so the few keys that
place a state directory are read as they are written; whatever needs judging (a glob, a wrong file, a job that
is not found so) is left to the models.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd.errors import NotFoundError
from ckptd.storage.local.job_names import running_in, running_job, with_running

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptd.errors import CkptdError
    from ckptd.observe.status import Status

_SERVICES = Path("/var/lib/ckptd")
"""Directory in which systemd keeps the state of `ckptd@USER.service`, by user and job."""
STATUS = "status.json"


def state_places(job: str | None, config_dir: Path | None) -> Iterator[Path]:
    """Yield the places where a state directory may be, the likeliest first; the models are loaded only after
    those.

    Raises:
        NotFoundError, ConfigError: from the configuration, once it is loaded.
    """
    if job is None:
        yield from _all_known(config_dir)
        return
    is_name = "/" not in job and not job.endswith(".toml")
    save_dir = _save_dir_of(job)
    if save_dir is not None and (running := running_in(save_dir)) is not None:
        yield running.place
    if save_dir is not None and not job.endswith(".toml"):
        yield from _state_dirs(save_dir)
        from ckptd.config.commands import job_name  # a status that lies in the save_dir needs none of it

        yield from _base_dirs(job_name(save_dir))
    yield from _as_written(job, config_dir) or ()
    if is_name:
        # whoever asks: a job of the node's services, by its name
        yield from _of_services(job)
        if (running := running_job(job)) is not None:
            yield running.place
            return
    try:
        yield from _configured(job, config_dir)
    except NotFoundError as error:
        raise with_running(error) if is_name else error from None


def _save_dir_of(job: str) -> Path | None:
    """Return the save_dir that JOB names, or that stands in the job file that it is; None: it is a name."""
    if job.endswith(".toml"):
        written = written_in(job)
        return written[1] if written is not None else None
    if "/" in job or os.path.isdir(job):
        return Path(os.path.normpath(os.path.abspath(job)))
    return None


def other_places(place: Path, status: Status) -> Iterator[Path]:
    """Yield where a newer document may lie while the disk of save_dir takes none: the user's own places."""
    from ckptd.base.owned_dirs import lies_in_ours

    for job in status.jobs if lies_in_ours(place) else ():
        yield _private(Path(job.save_dir))


def _all_known(config_dir: Path | None) -> list[Path]:
    written = _as_written(None, config_dir)
    if written and any(os.path.exists(place / STATUS) for place in written):
        return written
    from ckptd.config.loader import load_all

    loaded = load_all(_directory(config_dir), os.environ)
    found: list[Path] = []
    for config in loaded.jobs:
        found += _dirs_of(config.name, config.save_dir, loaded.daemon.state_dir)
    # whoever asks: what the node's services publish
    return found or sorted(path.parent for path in _SERVICES.glob(f"*/*/{STATUS}"))


def wrong_file(config_dir: Path | None) -> CkptdError | None:
    """Return why the first job file that cannot run cannot; None: none is wrong."""
    from ckptd.config.loader import load_all

    return next((error for _, error in load_all(_directory(config_dir), os.environ).problems), None)


def _configured(job: str, config_dir: Path | None) -> list[Path]:
    """Return the possible state directories of a job that the configuration names."""
    from ckptd.config.loader import load_daemon, resolve_job

    directory = _directory(config_dir)
    config = resolve_job(job, os.environ, config_dir=directory)
    base = load_daemon(directory / "ckptd.toml", os.environ).state_dir
    return _dirs_of(config.name, config.save_dir, base)


def _as_written(job: str | None, config_dir: Path | None) -> list[Path] | None:
    """Return the state directories by the bare keys of the files; None: something in them has to be
    judged.
    """
    from ckptd.errors import CkptdError

    with contextlib.suppress(OSError, ValueError, CkptdError):
        directory = _directory(config_dir)
        base = os.environ.get("CKPTD_STATE_DIR") or _table(directory / "ckptd.toml").get("state_dir")
        found: list[Path] = []
        by_file: list[Path] = []
        for path in _job_files(job, directory):
            name, save_dir = _name_and_save_dir(path)
            places = _dirs_of(name, save_dir, None if base is None else _plain_path(base))
            if job is None or path == Path(job) or job == name or _is_path(job, save_dir):
                found += places
            elif job == path.stem:
                by_file += places
        found += by_file
        if base is not None and job is not None and "/" not in job and not job.endswith(".toml"):
            found.append(_plain_path(base) / job)
        return found
    return None


def _job_files(job: str | None, directory: Path) -> Iterable[Path]:
    if job is not None and job.endswith(".toml") and (os.path.isfile(job) or "/" in job):
        return [Path(job)]
    return sorted(path for path in (directory / "jobs.d").glob("*.toml") if not path.name.startswith("."))


def written_in(job: str, config_dir: Path | None = None) -> tuple[str, Path] | None:
    """Read name and save_dir of a job file, or of one in the configuration that has this name.

    None: there is none, or something in it has to be judged.
    """
    from ckptd.errors import CkptdError

    if "/" in job and not job.endswith(".toml"):
        return None
    path = Path(job) if job.endswith(".toml") else _directory(config_dir) / "jobs.d" / f"{job}.toml"
    with contextlib.suppress(OSError, ValueError, CkptdError):
        return _name_and_save_dir(path)
    return None


def _name_and_save_dir(path: Path) -> tuple[str, Path]:
    """Raises: ValueError, ConfigError, OSError: they cannot be had without judging."""
    from ckptd.config.commands import fill_placeholders
    from ckptd.config.globs import is_glob

    table = fill_placeholders(_table(path), os.environ, str(path))
    name, save_dir = table.get("name", path.stem), table.get("save_dir")
    if not isinstance(name, str) or "/" in name or is_glob(save_dir):
        raise ValueError(path)
    return name, _plain_path(save_dir)


def _table(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.name == "ckptd.toml":
            return {}
        raise
    except RecursionError as error:  # brackets a thousand deep
        raise ValueError(path) from error


def _plain_path(value: object) -> Path:
    if not isinstance(value, str) or not value.startswith("/"):
        raise ValueError(value)
    return Path(os.path.normpath(value))


def _is_path(job: str, save_dir: Path) -> bool:
    return "/" in job and os.path.normpath(os.path.abspath(job)) == str(save_dir)


def _directory(config_dir: Path | None) -> Path:
    from ckptd.config.commands import default_config_dir

    return config_dir or default_config_dir(os.environ)


def _dirs_of(name: str, save_dir: Path, base: Path | None) -> list[Path]:
    named = [base / name] if base is not None else []
    return [*named, *_base_dirs(name), *_state_dirs(save_dir)]


def _state_dirs(save_dir: Path) -> list[Path]:
    from ckptd.base.owned_dirs import path_of

    inside = save_dir / "_ckptd" / "state"
    with contextlib.suppress(PermissionError):  # said when it is read, unless another place answers
        inside = path_of(save_dir, "_ckptd/state")
    return [inside, _private(save_dir)]


def _private(save_dir: Path) -> Path:
    import hashlib

    digest = hashlib.sha256(os.fsencode(os.path.realpath(save_dir))).hexdigest()[:16]
    return Path("/var/tmp") / f"ckptd-{os.getuid()}" / digest  # noqa: S108 — read only


def _base_dirs(name: str) -> list[Path]:
    bases = [os.environ.get("CKPTD_STATE_DIR"), os.environ.get("STATE_DIRECTORY")]
    places = [Path(base.split(":")[0]) / name for base in bases if base]
    return places + _of_services(name)


def _of_services(name: str) -> list[Path]:
    return sorted(path for path in _SERVICES.glob(f"*/{name}") if path.is_dir())
