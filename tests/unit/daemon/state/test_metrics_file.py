"""The trainer's metrics file, on a disk that refuses for a while."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.core.model.records import SaveRow
from ckptd.daemon.intake.trainer_metrics import TrainerMetrics
from ckptd.storage.journal.journal import Journal
from tests.support.core_views import sealed
from tests.support.recover_scene import Scene
from tests.support.states import job_state


def test_a_passing_error_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO of a file that does not change afterwards: the problem ends with the error."""
    scene = Scene(tmp_path)
    scene.save_dir.mkdir(parents=True, exist_ok=True)
    (scene.save_dir / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 1.5}\n')
    journal = Journal(tmp_path / "journal.db")
    state = job_state(journal)
    journal.add_save(sealed(5), found_first=False, adopted=True, seen_at=0.0)
    state.load()
    metrics = TrainerMetrics(scene.job(metrics_file="metrics.jsonl", metric="eval_loss"), state)
    monkeypatch.setattr("ckptd.daemon.intake.trainer_metrics.AGAIN_SECONDS", -1.0)
    monkeypatch.setattr(TrainerMetrics, "_waits", lambda self, row: isinstance(row, SaveRow))

    def refusing(path: str, *rest: object, **more: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def codes() -> list[str]:
        return [problem.code for problem in state.problems.all()]

    with files.opened_dir(scene.save_dir) as fd:
        metrics.read_late_values(fd)
        assert codes() == []
        with monkeypatch.context() as patch:
            patch.setattr(files, "open_beneath", refusing)
            metrics.read_late_values(fd)
            assert codes() == ["metrics-unreadable"]
        metrics.read_late_values(fd)
        assert codes() == []
    journal.close()
