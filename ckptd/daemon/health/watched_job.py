"""Declare what health checks, heartbeats and a job's start read of a job, so that they need not import it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckptd.daemon.uploads.job_record import JobRecord

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.daemon.actions.control import Control
    from ckptd.daemon.intake.known_saves import KnownSaves
    from ckptd.daemon.intake.runs import Runs
    from ckptd.daemon.intake.sealer import Sealer
    from ckptd.daemon.resources.workers import JobWorkers
    from ckptd.daemon.state.permissions import DeletionRights
    from ckptd.storage.local.watch import Watcher


class WatchedJob(JobRecord, Protocol):
    """`daemon.job.Job`, as far as it is looked at."""

    state_dir: Path
    control: Control
    known_saves: KnownSaves
    sealer: Sealer
    runs: Runs
    deletion_rights: DeletionRights
    watcher: Watcher | None
    workers: JobWorkers

    @property
    def phase(self) -> str:
        """Return waiting, watching or active."""

    def wake(self) -> None:
        """Plan again soon."""

    def close(self) -> None:
        """Give up the lock and everything that is open."""
