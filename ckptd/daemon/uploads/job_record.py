"""Declare the part of `daemon.job.Job` that uploads, intake and actions read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ckptd.config.schema import JobConfig
    from ckptd.core.policy.view import JobView
    from ckptd.daemon.actions.local import LocalActions
    from ckptd.daemon.resources.disk_yield import DiskYield
    from ckptd.daemon.state.problems import Problems
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.peers import Peers
    from ckptd.daemon.uploads.session import RemoteSession


class JobRecord(Protocol):
    """Read in the deciding thread alone; the job itself sets every attribute."""

    config: JobConfig
    problems: Problems
    state: JobState | None
    """None: save_dir does not exist yet, or nothing was saved into it."""
    view: JobView | None
    """What was planned on last."""
    sessions: dict[str, RemoteSession]
    peers: Peers
    local_actions: LocalActions
    disk_yield: DiskYield
    node: str
    job_id: str | None
    needs_turn: bool
    turns: int

    def __hash__(self) -> int:
        """A job is the same as itself alone."""
