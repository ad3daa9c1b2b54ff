"""Find the job that a command means by JOB or SAVE_DIR, and determine whose its remotes must be.

A job that `ckptd run SAVE_DIR URL` or `ckptd run FILE` started is in no configuration directory; its
state directory keeps how it was started (`job.json`), which a wiped node has no longer. A remote's owner is
known by the job id in the daemon's journal, else by the name: a job file may be renamed, and its daemon goes
on.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ckptd.base.names import IDENTITY_KEY
from ckptd.base.owned_dirs import path_of
from ckptd.config.commands import default_config_dir, node_name
from ckptd.config.loader import job_from_memory, load_daemon, load_job_file, resolve_job
from ckptd.core.model.listing import OURS
from ckptd.errors import CkptdError, NotFoundError, RemoteNotOurs
from ckptd.storage.local.job_names import (
    named_below,
    remotes_below,
    running_job,
    running_state_dir,
    with_running,
)
from ckptd.storage.local.state_dir import (
    JOB,
    private_place,
    remembered_job,
    remembered_save_dir,
    state_dir_of,
)
from ckptd.storage.remote.messages import RemoteSettings, known_url
from ckptd.storage.stores.access import access_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptd.config.schema import JobConfig, RemoteConfig
    from ckptd.core.model.manifest import RemoteIdentity


_SERVICES = Path("/var/lib/ckptd")


def job_named(job: str, environ: Mapping[str, str], *, config_dir: Path | None = None) -> JobConfig:
    """Return the job that JOB names: a name, a job file or a save_dir, with its remotes as far as known.

    A name is that of a configured job, else that of a job which a daemon of this user watches, or which has
    its state below a `state_dir`, else a folder.

    Raises:
        NotFoundError: no such job, or the job file that it was started by is gone (66).
        UsageError: several daemons watch a job of that name.
        ConfigError, NotPermitted: of the file that names it (78, 77).
    """
    try:
        found = resolve_job(job, environ, config_dir=config_dir)
    except NotFoundError as error:
        running = None if "/" in job else running_job(job)
        kept = (remembered_save_dir(base / job) for base in _state_bases(environ, config_dir))
        save_dir = running.save_dir if running is not None else next(filter(None, kept), None)
        if save_dir is None or "/" in job:
            raise with_running(error) from None
        found = resolve_job(str(save_dir), environ, config_dir=config_dir)
    else:
        if found.file is None and "/" not in job and (running := running_job(job)) is not None:
            found = resolve_job(str(running.save_dir), environ, config_dir=config_dir)
    if found.file is not None:
        return found
    return _remembered(found, environ, config_dir) or found


def no_remote(config: JobConfig) -> NotFoundError:
    """Say that no remote of a save_dir is known, where one is needed."""
    msg = f"no remote is known of {config.save_dir}: no job file names it, and no daemon has run for it here"
    hint = "set CKPTD_URL to its remote, or name its job file or the remote instead"
    if below := named_below(remotes_below(config.save_dir)):
        msg, hint = f"{config.save_dir} is no remote, and {msg.partition(': ')[0]}", below
    return NotFoundError(msg, hint=hint)


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
    if (running := running_state_dir(save_dir)) is not None:
        yield running
    for base in _state_bases(environ, config_dir):
        yield from sorted(path.parent for path in base.glob(f"*/{JOB}"))
    yield from sorted(path.parent for path in _SERVICES.glob(f"*/*/{JOB}"))


def _state_bases(environ: Mapping[str, str], config_dir: Path | None) -> list[Path]:
    """Return the directories with a state directory for each job."""
    bases = [Path(base.split(":")[0]) for base in (environ.get("STATE_DIRECTORY"),) if base]
    with contextlib.suppress(CkptdError):
        daemon = load_daemon((config_dir or default_config_dir(environ)) / "ckptd.toml", environ)
        bases += [daemon.state_dir] if daemon.state_dir is not None else []
    return bases


# --- whose a remote must be ------------------------------------------------------------------------------

_JOURNAL_WAIT_SECONDS = 2.0
"""Wait for a writer that holds the journal."""


def journal_rows(path: Path, query: str, *values: str) -> list[tuple[object, ...]]:
    """Return rows of the daemon's journal, read beside its writer; none where that fails."""
    try:
        os.stat(path)
        place = f"file:{quote(str(path))}?mode=ro"
        with closing(sqlite3.connect(place, uri=True, timeout=_JOURNAL_WAIT_SECONDS)) as db:
            return list(db.execute(query, values).fetchall())
    except (OSError, sqlite3.Error):
        return []


_IDS = "SELECT key, value FROM meta WHERE key GLOB '*_id:*' OR key GLOB 'abilities:*'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A job: its name, and of each remote the ids that this node's journal remembers."""

    job: str
    job_ids: Mapping[str, str] = field(default_factory=dict)
    remote_ids: Mapping[str, str] = field(default_factory=dict)
    urls: Mapping[str, str | None] = field(default_factory=dict)
    """Remote → URL at which the daemon attached to it last."""

    def must_own(self, remote: str, url: str, found: RemoteIdentity) -> None:
        """Raise unless the remote that was found is this job's.

        Raises:
            RemoteNotOurs: another job id than is remembered; another name where none is (69).
        """
        known = self.job_ids.get(remote)
        if found.job_id == known or (known is None and found.job == self.job):
            return
        if known is not None:
            msg = f"{url} belongs to job {found.job} ({found.job_id}), this is job {self.job} ({known})"
            raise RemoteNotOurs(msg, hint="another share is mounted there? else `ckptd takeover JOB`")
        msg = f"{url} belongs to job {found.job}, this is job {self.job} ({IDENTITY_KEY})"
        hint = f"if it is the one you mean: CKPTD_NAME={found.job}, or name the job file"
        raise RemoteNotOurs(msg, hint=hint)


def owner_of(job: JobConfig, state_dir: Path | None) -> Owner:
    """Return the job as the journal in `state_dir` knows it; without one by its name alone."""
    rows = journal_rows(state_dir / "journal.db", _IDS) if state_dir is not None else []
    known = {str(key): str(value) for key, value in rows}

    def by_remote(what: str) -> dict[str, str]:
        return {key.removeprefix(what): value for key, value in known.items() if key.startswith(what)}

    return Owner(
        job=job.name,
        job_ids=by_remote("job_id:"),
        remote_ids=by_remote("remote_id:"),
        urls={name: known_url(text) for name, text in by_remote("abilities:").items()},
    )


def settings_to_ask(job: JobConfig, remote: RemoteConfig, owner: Owner) -> RemoteSettings:
    """Return the settings with which a remote is asked whose it is, and made nobody's: by what this node
    remembers of it.
    """
    return RemoteSettings(
        name=remote.name,
        url=remote.url,
        job=job.name,
        job_id=owner.job_ids.get(remote.name),
        remote_id=owner.remote_ids.get(remote.name),
        known_url=owner.urls.get(remote.name),
        may_initialise=False,
        same_filesystem=remote.same_filesystem,
        save_dir=str(job.save_dir),
        verify=remote.verify,
        access=access_of(remote),
        bytes_per_second=remote.bandwidth.at(time.time()),
        node=job.node_name or node_name(os.environ),
        node_id="asks",
    )


def state_dir_for(job: JobConfig, environ: Mapping[str, str], config_dir: Path | None) -> Path:
    """Return where a daemon of this user keeps the job's state; it may not be there.

    Raises:
        ConfigError, NotPermitted: of ckptd.toml, or where no place is allowed (78, 77).
    """
    daemon = load_daemon((config_dir or default_config_dir(environ)) / "ckptd.toml", environ)
    found = state_dir_of(job.save_dir, job.name, daemon.state_dir, environ)
    # one that runs may have been started with another state_dir
    return running_state_dir(job.save_dir) or found


def state_dir_hint(job: JobConfig, environ: Mapping[str, str], config_dir: Path | None) -> Path | None:
    """Return where the daemon's state may lie; a wrong ckptd.toml does not stop a command that can do
    without.
    """
    try:
        return state_dir_for(job, environ, config_dir)
    except CkptdError:
        return None
