"""Determine whose a remote must be, as the daemon does: by the job id in its journal, else by the name.

A job file may be renamed: its daemon goes on, because it remembers which remote is its own. A command that
went by the name alone would call that remote a stranger's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.config.commands import default_config_dir
from ckptd.config.loader import load_daemon
from ckptd.errors import CkptdError, RemoteNotOurs
from ckptd.recover.select.journal_reader import journal_rows
from ckptd.storage.local.state_dir import state_dir_of
from ckptd.storage.remote.documents import IDENTITY_KEY
from ckptd.storage.remote.messages import known_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.manifest import RemoteIdentity

_IDS = "SELECT key, value FROM meta WHERE key GLOB '*_id:*' OR key GLOB 'abilities:*'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A job: its name, and of each remote the ids that this node's journal remembers."""

    job: str
    job_ids: Mapping[str, str] = field(default_factory=dict)
    remote_ids: Mapping[str, str] = field(default_factory=dict)
    urls: Mapping[str, str | None] = field(default_factory=dict)
    """Where the daemon attached to each remote last."""

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


def state_dir_hint(job: JobConfig, environ: Mapping[str, str], config_dir: Path | None) -> Path | None:
    """Return where the daemon's state may lie; a wrong ckptd.toml does not stop a command that can do
    without.
    """
    try:
        daemon = load_daemon((config_dir or default_config_dir(environ)) / "ckptd.toml", environ)
        return state_dir_of(job.save_dir, job.name, daemon.state_dir, environ)
    except CkptdError:
        return None
