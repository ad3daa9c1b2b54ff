"""A disk that refuses a file of a new save: read again, then judged without it, whole once it is given."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.base import files
from ckptd.base.humanize import user_in_words
from ckptd.conversion.engine import inspect, inspect_child
from ckptd.core.completeness.judge import State, Verdict
from ckptd.core.model.facts import Archive
from ckptd.daemon.health.stalls import what_reads_it
from ckptd.daemon.intake.inspection import TRIES, LateFiles
from ckptd.daemon.intake.sealer import Sealer
from ckptd.daemon.state.local_saves import Quiet
from ckptd.daemon.state.state import JobState
from ckptd.errors import CkptdError
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local.scan import OpenWriters, scan
from tests.support.recover_scene import Scene, known_save
from tests.support.refusing import refuse
from tests.support.states import job_state
from tests.support.synthetic import write_stage12

SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
HOUR_SECONDS = 3600.0


class AtOnce:
    """Workers that work while they are asked."""

    def __init__(self) -> None:
        self.asked = self.tried = 0

    def submit(
        self,
        what: str,
        work: Callable[[], Any],
        then: Callable[[Any], None],
        failed: Callable[[CkptdError], None],
    ) -> None:
        self.asked += what.startswith("inspecting")
        self.tried += 1
        try:
            result = work()
        except CkptdError as error:
            failed(error)
        else:
            then(result)


def hourly(scene: Scene, workers: AtOnce) -> tuple[Sealer, JobState, Callable[[], Verdict]]:
    """Intake of one save, of step 5, and a look at it two hours after the one before."""
    state = job_state(Journal(scene.root / "journal.db"))
    recogniser = SimpleNamespace(
        accepted=frozenset(), is_run_settled=lambda _: True, found_first=lambda: None
    )
    sealer = Sealer(scene.job(), state, workers, recogniser, lambda: None, lambda _tag: None)  # type: ignore[arg-type]
    looks = itertools.count(1)
    began_seconds = time.monotonic()

    def look() -> Verdict:
        with files.opened_dir(scene.save_dir) as fd:
            sealer.judge_and_seal(scan(fd), fd, began_seconds + 2 * HOUR_SECONDS * next(looks))
        return state.folders.verdicts["global_step5"]

    return sealer, state, look


@pytest.mark.parametrize("path", [SHARD, "note.txt"])
def test_what_the_disk_never_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Three times it is asked; then the folder is incomplete and holds nothing up, until it is given."""
    scene, workers = Scene(tmp_path), AtOnce()
    scene.save(5)
    (scene.save_dir / "global_step5" / "note.txt").write_text("loss")
    sealer, state, look = hourly(scene, workers)

    with monkeypatch.context() as patch:
        refuse(patch, path)
        look()
        for _ in range(TRIES):
            assert look().state is State.UNKNOWN
        look()
        verdict = look()
        assert verdict.state is State.INCOMPLETE
        assert f"{path} cannot be read" in (verdict.reason or "")
        assert verdict.is_unread
        assert not state.failures.all()
        asked = workers.asked
        assert asked <= TRIES + 3
        assert sealer.next_due_seconds(time.monotonic()) > 1.0
        assert not sealer.is_due(time.monotonic())
        assert sealer.is_due(time.monotonic() + HOUR_SECONDS)  # a job at rest looks for it alone
    look()
    assert look().state is State.COMPLETE
    assert workers.asked > asked
    state.journal.close()


def test_a_folder_that_goes_while_it_is_read_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Life 840994: the answer came after the folder had gone, and the job turned twenty times a second."""
    scene = Scene(tmp_path)
    scene.save(5)
    journal = Journal(tmp_path / "journal.db")
    state = job_state(journal)

    class Later(AtOnce):
        """Answers when they are asked for."""

        def __init__(self) -> None:
            super().__init__()
            self.waiting: list[Callable[[], None]] = []

        def submit(self, what: str, work: Any, then: Any, failed: Any) -> None:
            self.waiting.append(lambda: AtOnce.submit(self, what, work, then, failed))

    workers = Later()
    recogniser = SimpleNamespace(
        accepted=frozenset(), is_run_settled=lambda _: True, found_first=lambda: None
    )
    sealer = Sealer(scene.job(), state, workers, recogniser, lambda: None, lambda _tag: None)  # type: ignore[arg-type]
    now_seconds = time.monotonic()
    with files.opened_dir(scene.save_dir) as fd:
        for wait in (0.0, HOUR_SECONDS):
            sealer.judge_and_seal(scan(fd), fd, now_seconds + wait)
        assert workers.waiting
        with monkeypatch.context() as patch:
            refuse(patch, SHARD)
            (scene.save_dir / "global_step5").rename(scene.save_dir / "_ckptd-gone")
            sealer.judge_and_seal(scan(fd), fd, now_seconds + HOUR_SECONDS)
            (scene.save_dir / "_ckptd-gone").rename(scene.save_dir / "global_step5")
            for answer in workers.waiting:
                answer()
    assert not sealer.is_due(now_seconds + 3 * HOUR_SECONDS)
    journal.close()


def test_what_came_late_and_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked ever more seldom, and said with who may not; given at last, it is taken."""
    scene, workers = Scene(tmp_path), AtOnce()
    _, state = known_save(scene, tmp_path / "journal.db")
    (scene.save_dir / "global_step5" / "README.md").write_text("loss")
    monkeypatch.setattr(
        "ckptd.storage.local.scan.WALK_WAIT_SECONDS", 60.0
    )  # this clock runs ahead of the walk
    late = LateFiles(scene.job(), state, workers, OpenWriters(str(scene.save_dir)), lambda: None)  # type: ignore[arg-type]
    now_seconds = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_seconds)

    def look_for(seconds: float) -> None:
        nonlocal now_seconds
        until = now_seconds + seconds
        with files.opened_dir(scene.save_dir) as fd:
            listing = scan(fd)
            folder = listing.folders[0]
            state.folders.quiet[folder.tag] = Quiet(
                digest=folder.digest, since_seconds=0.0, first_seen_unix=0.0
            )
            while now_seconds < until:
                now_seconds += 10.0
                late.read_late_files(listing, fd, now_seconds)

    with monkeypatch.context() as patch:
        refuse(patch, "README.md")
        look_for(3 * HOUR_SECONDS)
        assert 5 < workers.tried < 20
        assert "README.md" in late.refused["global_step5"]
        assert not late.is_waiting
    look_for(HOUR_SECONDS + 60)
    assert not late.refused
    assert [file.path for file in state.saves.rows[1].save.late] == ["README.md"]
    state.journal.close()


def test_who_may_not_read_it() -> None:
    """Rights are told apart from a disk that fails."""
    me = user_in_words(os.geteuid())
    assert me in what_reads_it(f"x.pt cannot be read ({os.strerror(errno.EACCES)})")
    assert me not in what_reads_it(f"x.pt cannot be read ({os.strerror(errno.EIO)})")


def test_an_error_after_the_first_findings_takes_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The framing was read and the pickle was not: with its fingerprint it was torn for ever, not unread."""
    write_stage12(tmp_path, [{"w": (4, 4)}], 1)
    path = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    said = OSError(errno.EIO, os.strerror(errno.EIO))

    def unreadable(*_: object) -> None:
        raise said

    monkeypatch.setattr(inspect_child, "shard_facts", unreadable)
    with files.opened_dir(tmp_path) as fd:
        last = inspect_child._inspect(fd, 0, {"path": path, "expected": True, "facts": True})
    (first,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["fingerprint"]
    row = inspect._facts_of(path, {**first, **last})
    assert (row.archive, row.fingerprint, last["is_unread"]) == (Archive.TORN, "", True)
