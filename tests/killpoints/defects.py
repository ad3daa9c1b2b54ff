"""Defects that are put in on purpose: a harness that finds none of them would prove nothing.

Each is applied in a forked process before the life begins (`python -m tests.killpoints --defect NAME`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.base import extents, files
from ckptd.daemon import crash_recovery
from ckptd.errors import CkptdError
from ckptd.storage.local import fs
from tests.killpoints.standins import put


def torn_documents() -> None:
    """Small files are written in place: no temporary, no rename (P3, P6)."""

    def write(dir_fd: int, name: str, data: bytes, *, mode: int = 0o644, mark: str = "") -> None:
        del mark
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode, dir_fd=dir_fd)
        extents.write_all(fd, data)
        os.fsync(fd)
        os.close(fd)

    put(files, "write_atomic", write)


def torn_commits() -> None:
    """A COMMIT becomes visible before it is whole (P3)."""

    def create(dir_fd: int, name: str, data: bytes, *, mode: int = 0o644, mark: str = "") -> bool:
        del mark
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=dir_fd)
        except FileExistsError:
            return False
        extents.write_all(fd, data)
        os.fsync(fd)
        os.close(fd)
        return True

    put(files, "create_exclusive", create)


def forgotten_prunes() -> None:
    """A restart does not finish what lies half removed in the trash (P7)."""
    finish = crash_recovery.finish_after_crash

    def forgetful(state: object, save_dir_fd: int, audit: object, **more: bool) -> None:
        for row in state.journal.open_deletions():  # type: ignore[attr-defined]
            state.journal.end_deletion(row.id, done=False)  # type: ignore[attr-defined]
        finish(state, save_dir_fd, audit, **more)  # type: ignore[arg-type]

    from ckptd.daemon import job

    put(job, "finish_after_crash", forgetful)


def pruned_in_place() -> None:
    """Files go one by one without the folder being renamed aside first (P1, P7)."""

    def delete_checkpoint(save_dir_fd: int, permit: object, name: str) -> None:
        fs.finish_deletion(save_dir_fd, permit.tag, permit.files)  # type: ignore[attr-defined]
        del name

    put(fs, "delete_checkpoint", delete_checkpoint)


def flushed_again() -> None:
    """A flush that failed is tried once more, and believed (F6)."""
    flush = os.fdatasync

    def twice(fd: int) -> None:
        try:
            flush(fd)
        except OSError:
            flush(fd)

    put(os, "fdatasync", twice)


def swallowed_errors() -> None:
    """What fails on this node is not said (P17)."""
    from ckptd.daemon.state.problems import Failures

    def nothing(self: Failures, what: str, error: CkptdError) -> None:
        del self, what, error

    put(Failures, "note", nothing)


@dataclass(frozen=True, slots=True)
class Defect:
    """How it is put in, which kind of points must find it, and what they say then."""

    apply: Callable[[], None]
    kind: str
    calls: tuple[str, ...]
    """Where to look for it."""
    shows: str


DEFECTS = {
    "torn_documents": Defect(torn_documents, "kill", ("open", "write"), "latest names"),
    "torn_commits": Defect(torn_commits, "kill", ("open", "write"), "is torn"),
    "forgotten_prunes": Defect(forgotten_prunes, "kill", ("unlink", "renameat2"), "save_dir holds"),
    "pruned_in_place": Defect(pruned_in_place, "kill", ("unlink",), "save_dir holds"),
    "flushed_again": Defect(flushed_again, "errors", ("fdatasync",), "was tried again"),
    "swallowed_errors": Defect(swallowed_errors, "errors", ("fdatasync",), "status said nothing"),
}
