"""What may be done in a save_dir: asked again when nothing could be known; other hosts' proofs stay."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ckptd.base import files, names
from ckptd.daemon.state import permissions
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local import probe
from tests.support.core_views import sealed
from tests.support.states import job_state

if TYPE_CHECKING:
    import pytest


def test_clones_are_asked_for_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full at the start took holds away for the whole run."""
    journal = Journal(tmp_path / "journal.db")
    state = job_state(journal)
    journal.add_save(sealed(5), found_first=False, adopted=True, seen_at=0.0)
    state.load()
    job: Any = SimpleNamespace(config=SimpleNamespace(save_dir=tmp_path), problems=state.problems)
    held = permissions.DeletionRights()
    answers: list[OSError | bool] = [OSError(errno.ENOSPC, "full"), True, False]

    def can_clone(save_dir_fd: int, mark: str) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(probe, "can_clone", can_clone)
    monkeypatch.setattr(permissions, "AGAIN_SECONDS", 0.0)
    with files.opened_dir(tmp_path) as fd:
        journal.set_meta("device", str(os.fstat(fd).st_dev))
        held.prove(job.problems, str(job.config.save_dir), state, fd)
        assert (held.are_held, state.holds.can_clone) == (True, False)
        for _ in range(2):
            held.prove(job.problems, str(job.config.save_dir), state, fd)
            assert state.holds.can_clone
    assert answers == [False]
    journal.close()


def test_another_hosts_proof_is_left_alone(tmp_path: Path) -> None:
    """It was removed between its mkdir and its rename, and that host had no rights for a minute."""
    staging = tmp_path / "_ckptd" / "staging"
    with files.opened_dir(tmp_path) as fd:
        probe.prove_rights(fd, "run", "mark")
        another, left = (staging / f"{names.TEMPORARY_PREFIX}{name}" for name in ("other", "killed"))
        for folder in (another, left):
            folder.mkdir()
        os.utime(left, (1e9, 1e9))
        probe.prove_rights(fd, "run", "mark")
    assert list(staging.iterdir()) == [another]


def test_what_a_disk_does_not_let_go_is_taken_along_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof a minute: each left one more, and a clone's two files more, until the next start."""

    def refuse(name: str, *, dir_fd: int) -> None:
        os.stat(name, dir_fd=dir_fd)
        raise OSError(errno.EIO, "Input/output error")

    places = [tmp_path / "_ckptd" / name for name in ("staging", "trash")]
    with files.opened_dir(tmp_path) as fd:
        for call in ("rmdir", "unlink"):
            with monkeypatch.context() as broken:
                broken.setattr(os, call, refuse)
                for _ in range(5):
                    with contextlib.suppress(OSError):
                        probe.prove_rights(fd, "run", "mark")
                    with contextlib.suppress(OSError):
                        probe.can_clone(fd, "mark")
            assert sum(len(list(place.iterdir())) for place in places) in (1, 2)
            probe.prove_rights(fd, "run", "mark")
            probe.can_clone(fd, "mark")
            assert sum(len(list(place.iterdir())) for place in places) == 0
