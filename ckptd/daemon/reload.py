"""Compare running jobs with a newly loaded configuration and return the changes as data; the loop carries
them out.

A job whose table is unchanged is not touched, its uploads go on; a file that is wrong keeps its jobs as they
were (P16, H31: one wrong file stops no other job). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckptd.config.loader import LoadedConfig
    from ckptd.config.schema import JobConfig
    from ckptd.errors import CkptdError


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """`close`: save_dirs of jobs to end; `start`: jobs to open, the changed ones among them."""

    close: tuple[Path, ...] = ()
    start: tuple[JobConfig, ...] = ()
    kept: Mapping[Path, CkptdError] = field(default_factory=dict)
    """save_dir of a running job → why its file was refused: it goes on as it was."""
    refused: tuple[tuple[Path, CkptdError], ...] = ()
    """Files that are wrong and of which no job runs."""

    @property
    def summary(self) -> str:
        """Say in one line what a reload changes, for the log."""
        return (
            f"{len(self.start)} started or changed, {len(self.close)} ended, {len(self.kept)} kept as before"
        )


def changes(running: Sequence[JobConfig], loaded: LoadedConfig, *, is_daemon_changed: bool) -> Changes:
    """Compare by save_dir: that is what a lock is held on.

    `is_daemon_changed`: ckptd.toml says something else, so every job starts anew with it.
    """
    wrong = {path.absolute(): error for path, error in loaded.problems}
    by_dir = {job.save_dir: job for job in running}
    kept = {job.save_dir: wrong[job.file] for job in running if job.file in wrong}
    wanted = {job.save_dir: job for job in loaded.jobs if job.save_dir not in kept}
    changed = [
        job
        for save_dir, job in wanted.items()
        if save_dir not in by_dir or by_dir[save_dir] != job or is_daemon_changed
    ]
    ended = [save_dir for save_dir in by_dir if save_dir not in wanted and save_dir not in kept]
    ended += [job.save_dir for job in changed if job.save_dir in by_dir]
    files_kept = {job.file for job in running if job.save_dir in kept}
    return Changes(
        close=tuple(ended),
        start=tuple(changed),
        kept=kept,
        refused=tuple((path, error) for path, error in wrong.items() if path not in files_kept),
    )
