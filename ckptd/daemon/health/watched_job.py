"""Declare what health checks, heartbeats and a job's start read of a job, so that they need not import it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.core.policy.view import JobView
    from ckptd.daemon.actions.control import Control
    from ckptd.daemon.actions.local import LocalActions
    from ckptd.daemon.intake.known_saves import KnownSaves
    from ckptd.daemon.intake.runs import JobRuns
    from ckptd.daemon.intake.sealer import Sealer
    from ckptd.daemon.resources.disk_yield import DiskYield
    from ckptd.daemon.resources.workers import JobWorkers
    from ckptd.daemon.state.permissions import DeletionRights
    from ckptd.daemon.state.problems import Problems
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.peers import Peers
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.local.watch import Watcher


class WatchedJob(Protocol):
    """`daemon.job.Job`, as far as it is looked at in the deciding thread; it alone sets its attributes."""

    config: JobConfig
    problems: Problems
    state: JobState | None
    """None: save_dir does not exist yet, or nothing was saved into it."""
    view: JobView | None
    """View of the last plan."""
    sessions: dict[str, RemoteSession]
    peers: Peers
    local_actions: LocalActions
    disk_yield: DiskYield
    node: str
    job_id: str | None
    needs_turn: bool
    turns: int
    state_dir: Path
    control: Control
    known_saves: KnownSaves
    sealer: Sealer
    runs: JobRuns
    deletion_rights: DeletionRights
    watcher: Watcher | None
    workers: JobWorkers

    @property
    def phase(self) -> str:
        """Return waiting, watching or active."""

    @property
    def unseen(self) -> str:
        """Say why it is not known whether all that was saved here is committed; empty: it can be seen."""

    @property
    def slows_transfers(self) -> bool:
        """Tell whether transfers slow down for a save."""

    @property
    def waits_for_memory(self) -> bool:
        """Tell whether it slows down as tasks of this node wait for memory."""

    def __hash__(self) -> int:
        """A job is the same as itself alone."""

    def wake(self) -> None:
        """Plan again soon."""

    def sleep(self) -> None:
        """Make no turn before the next is due."""

    def learn_job_id(self, job_id: str) -> None:
        """Take the job's id from a remote that was attached."""

    def close(self) -> None:
        """Give up the lock and everything that is open."""
