"""A disk that refuses: the journal is not given up, a job begins again, a prune is finished (adr/0097)."""

from __future__ import annotations

import errno
import os
import queue
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files
from ckptd.config.loader import load_daemon, load_jobs
from ckptd.core.model.other_layouts import NOTHING_DECLARED
from ckptd.core.model.records import ObjectRow
from ckptd.core.policy.actions import DeleteLocal
from ckptd.daemon.actions.local_deletion import TIDY_SECONDS, LocalDeleter
from ckptd.daemon.crash_recovery import finish_after_crash
from ckptd.daemon.health.drain import drain_code, is_drained
from ckptd.daemon.loop import Daemon
from ckptd.errors import CkptdError, JournalDamaged, JournalFailed, from_os_error
from ckptd.observe.audit import Audit
from ckptd.storage.journal.journal import Journal
from ckptd.storage.journal.schema import Database
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan
from tests.support.states import job_state
from tests.unit.storage.local.test_local_prune import NAMES, TAG, permit_for, save_dir

__all__ = ["save_dir"]


def failing(code: int, word: str) -> Callable[..., sqlite3.Cursor]:
    """In the place of `Database._run`: statements with that word meet SQLite's error."""
    run = Database._run

    def broken(self: Database, statement: Callable[..., Any], sql: str, *rest: Any) -> sqlite3.Cursor:
        def raising(*_: Any) -> Any:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = code
            raise error

        return run(self, raising if word in sql else statement, sql, *rest)

    return broken


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN])
def test_a_disk_that_fails_is_no_damaged_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """An error of the disk while it is opened leaves the journal where and as it is."""
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.set_meta("a", "b")
    journal.close()
    with monkeypatch.context() as patch:
        patch.setattr(Database, "_run", failing(code, "quick_check"))
        with pytest.raises(JournalFailed):
            Journal(path)
    again = Journal(path)
    assert again.meta("a") == "b"
    assert again.set_aside is None
    again.close()


def test_a_full_journal_says_so_and_works_again(tmp_path: Path) -> None:
    """SQLite's own "full": a failed transaction leaves nothing, the next one after there is room is whole."""
    journal = Journal(tmp_path / "journal.db")
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages}")
    row = ObjectRow(key="k" * 20_000, bytes=1, flushed_bytes=1, crc64="0" * 16, proof=None, token="")
    with pytest.raises(JournalFailed, match="full"):
        journal.put_object(1, "nas", "zero", row)
    assert journal.objects(1, "nas", "zero") == []
    journal._db.execute("PRAGMA max_page_count=100000")
    journal.put_object(1, "nas", "zero", row)
    assert journal.objects(1, "nas", "zero") == [row]
    journal.close()


def test_a_damage_that_shows_later_is_told_apart(tmp_path: Path) -> None:
    """A table that is not there: this is no journal of ours, whatever its number says."""
    journal = Journal(tmp_path / "journal.db")
    journal._db.execute("DROP TABLE objects")
    with pytest.raises(JournalDamaged):
        journal.objects(1, "nas", "zero")
    journal.give_up()
    new = Journal(tmp_path / "journal.db")
    assert new.objects(1, "nas", "zero") == []
    new.close()


def test_a_row_that_flipped_sets_the_journal_aside(tmp_path: Path) -> None:
    """SQLite sees nothing wrong with it; what is in the row cannot be read."""
    journal = Journal(tmp_path / "journal.db")
    journal._db.execute("INSERT INTO ships VALUES (1,'nas','zero','{\"remote\";\"nas\"}',0,0,NULL)")
    with pytest.raises(JournalDamaged):
        journal.uploads()
    journal.close()
    again = Journal(tmp_path / "journal.db")
    assert again.set_aside is not None
    assert again.uploads() == {}
    again.close()


def opened_daemon(tmp_path: Path) -> Daemon:
    """A daemon whose only job has an incomplete checkpoint; nothing is done but what a test asks for."""
    (tmp_path / "save" / TAG).mkdir(parents=True)
    (tmp_path / "save" / TAG / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    (tmp_path / "nas").mkdir()
    job_file = tmp_path / "run.toml"
    remote = f'name = "nas"\nurl = "{tmp_path}/nas"\nsame_filesystem = true\n'
    job_file.write_text(f'save_dir = "{tmp_path}/save"\n[[remote]]\n{remote}')
    daemon = Daemon(load_jobs([job_file], load_daemon(None, {}), {}), {})
    daemon._open_jobs()
    return daemon


def test_a_job_begins_again_when_its_journal_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, said, opened anew after ten seconds, and the word is taken back once a turn went through."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    daemon = opened_daemon(tmp_path)
    job = daemon.jobs[0]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Database, "_run", failing(sqlite3.SQLITE_FULL, "opened_at"))
            daemon._turn(job, now)
            assert [p.code for p in job.problems.all()] == ["job-interrupted"]
            assert job.phase == "waiting"
        daemon._turn(job, now)
        assert job.phase == "waiting"
        now += 11
        for _ in range(3):
            daemon._turn(job, now)
            job.wake()
        assert job.phase == "active"
        assert "job-interrupted" not in [p.code for p in job.problems.all()]
    finally:
        job.close()
        daemon._workers.stop()


class Scene:
    """A pruner over real files, whose workers work at once, or (`is_busy`) once they are told to."""

    def __init__(self, save_dir: Path, fd: int, *, is_busy: bool = False) -> None:
        state_dir = save_dir / "_ckptd" / "state"
        state_dir.mkdir(parents=True)
        self.save_dir, self.fd = save_dir, fd
        self.audit = Audit(state_dir / "audit.jsonl")
        self.state = job_state(Journal(state_dir / "journal.db"))
        self.waiting: list[Callable[[], None]] = []
        work = self._queue if is_busy else self._work
        self.pruner = LocalDeleter(
            self.state,
            self.audit,
            work,
            lambda: None,
            trainer="auto",
            declared=NOTHING_DECLARED,
            is_pinned=lambda _tag: False,
        )

    def _queue(self, *order: Any) -> None:
        self.waiting.append(lambda: self._work(*order))

    def go_on(self) -> None:
        """The workers have time."""
        while self.waiting:
            self.waiting.pop(0)()

    def _work(
        self,
        what: str,
        fd: int,
        work: Callable[[int], object],
        done: Callable[..., None],
        failed: Callable[[CkptdError], None],
    ) -> None:
        try:
            result = work(fd)
        except CkptdError as error:
            failed(error)
        except OSError as error:
            failed(from_os_error(error, what))
        else:
            done(result)

    def cut_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second file cannot be removed."""
        permit = permit_for(self.save_dir)
        removed = queue.SimpleQueue[str]()
        remove = files.remove_file

        def refusing(dir_fd: int, name: str) -> None:
            if not removed.empty():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            removed.put(name)
            remove(dir_fd, name)

        with monkeypatch.context() as patch:
            patch.setattr(files, "remove_file", refusing)
            self.pruner.delete(DeleteLocal(save_id=1, permit=permit), self.fd)
        assert not (self.save_dir / TAG).exists()
        assert len(self.state.journal.open_deletions()) == 1
        assert len(self.state.deletions.local_at) == 1, "it is on its way"
        assert not self.state.deletions.blocked[1].is_brief

    @property
    def trash(self) -> list[str]:
        """What lies there."""
        return sorted(os.listdir(self.save_dir / fs.TRASH))


def test_a_prune_that_an_error_cut_short_is_gone_on_with(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a checkpoint lies in the trash: after a while the rest goes, and nothing stands in status."""
    with files.opened_dir(save_dir) as fd:
        scene = Scene(save_dir, fd)
        scene.cut_short(monkeypatch)
        scene.pruner.tidy(fd)
        assert len(scene.trash) == 1
        later = time.monotonic() + TIDY_SECONDS + 1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        scene.pruner.tidy(fd)
        assert scene.trash == []
        assert scene.state.journal.open_deletions() == []
        assert scene.state.deletions.blocked == {}


@pytest.mark.parametrize("other", ["global_step2", "global_step3"], ids=["the newest again", "a new one"])
def test_a_save_that_begins_while_workers_are_busy_keeps_the_one_that_was_to_go(
    save_dir: Path, other: str
) -> None:
    """Planned while the trainer rested, begun late: nothing goes beside a save in flight (§5 *Permit*)."""
    shard = "mp_rank_00_model_states.pt"
    (save_dir / "global_step2").mkdir()
    (save_dir / "global_step2" / shard).write_text("kept instead")
    with files.opened_dir(save_dir) as fd:
        scene = Scene(save_dir, fd, is_busy=True)
        scene.state.folders.listing = scan(fd)
        scene.pruner.delete(DeleteLocal(save_id=1, permit=permit_for(save_dir)), fd)
        (save_dir / other).mkdir(exist_ok=True)
        (save_dir / other / shard).write_text("half of another save")
        scene.go_on()
        assert all((save_dir / TAG / name).exists() for name in NAMES)
        assert scene.state.journal.open_deletions() == []
        assert scene.state.deletions.blocked[1].is_brief, "it heals by itself: nobody is called"
        assert not scene.state.deletions.local_at, "the hourly limit is for what went"
        # a turn later, of what lies there then
        scene.state.folders.listing = scan(fd)
        scene.pruner.delete(DeleteLocal(save_id=1, permit=permit_for(save_dir)), fd)
        (save_dir / "global_step2" / "notes.txt").write_text("no shard")
        scene.go_on()
        assert not (save_dir / TAG).exists()
        assert scene.state.deletions.blocked == {}


def test_what_is_pinned_while_its_removal_waits_for_a_worker_stays(save_dir: Path) -> None:
    with files.opened_dir(save_dir) as fd:
        scene = Scene(save_dir, fd, is_busy=True)
        scene.pruner.delete(DeleteLocal(save_id=1, permit=permit_for(save_dir)), fd)
        scene.pruner.is_pinned = lambda tag: tag == TAG
        scene.go_on()
        assert all((save_dir / TAG / name).exists() for name in NAMES)
        assert scene.state.journal.open_deletions() == []
        assert scene.state.problems.all() == ()
        scene.pruner.is_pinned = lambda tag: tag != TAG
        scene.pruner.delete(DeleteLocal(save_id=1, permit=permit_for(save_dir)), fd)
        scene.go_on()
        assert not (save_dir / TAG).exists()


def test_a_restart_does_not_move_half_a_checkpoint_back(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intent is still on record, so the next start removes what is left."""
    with files.opened_dir(save_dir) as fd:
        scene = Scene(save_dir, fd)
        scene.cut_short(monkeypatch)
        finish_after_crash(scene.state, fd, scene.audit)
        assert not (save_dir / TAG).exists()
        assert scene.trash == []


def test_a_job_that_cannot_be_looked_at_is_not_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its disk closed, and what was moved away: it may hold saves that nobody has committed."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    daemon = opened_daemon(tmp_path)
    job = daemon.jobs[0]

    def turns() -> None:
        nonlocal now
        for _ in range(3):
            now += 11
            daemon._turn(job, now)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Database, "_run", failing(sqlite3.SQLITE_FULL, "opened_at"))
            turns()
            assert job.state is None
            assert "the journal" in job.unseen
            assert (is_drained(job), drain_code([job])) == (False, 3)
        turns()
        assert (job.phase, job.unseen) == ("active", "")
        (tmp_path / "save").rename(tmp_path / "away")
        turns()
        assert (job.phase, is_drained(job), drain_code([job])) == ("waiting", False, 3)
        assert f"{tmp_path}/save is not as it was" in job.unseen
        (tmp_path / "save").mkdir()
        turns()
        assert (job.phase, is_drained(job)) == ("watching", False)
    finally:
        job.close()
        daemon._workers.stop()


def test_a_job_that_is_opened_while_its_daemon_drains_drains_too(tmp_path: Path) -> None:
    """A reload closes and opens a changed one: it has the time that is left."""
    daemon = opened_daemon(tmp_path)
    daemon._drain_seconds = 600.0
    daemon._on_stop(signal.SIGTERM)
    (before,) = daemon.jobs
    drain = before.control.drain
    assert drain is not None
    job_file = tmp_path / "run.toml"
    job_file.write_text(job_file.read_text() + 'bandwidth = "1MB/s"\n')
    daemon._apply(load_jobs([job_file], load_daemon(None, {}), {}), [before.config])
    (after,) = daemon.jobs
    try:
        assert after is not before
        assert after.control.is_draining
        again = after.control.drain
        assert again is not None
        assert abs(again.deadline_seconds - drain.deadline_seconds) < 0.1
        assert abs(again.asked_at_unix - drain.asked_at_unix) < 1.0
    finally:
        after.close()
        daemon._workers.stop()


def test_without_patience_a_job_ends_with_the_words_of_the_disk(tmp_path: Path) -> None:
    """`--once`: what fails in a turn, or while a result is taken in, is its end and no defect."""
    (tmp_path / "save").mkdir()
    (tmp_path / "nas").mkdir()
    job_file = tmp_path / "run.toml"
    remote = f'name = "nas"\nurl = "{tmp_path}/nas"\nsame_filesystem = true\n'
    job_file.write_text(f'save_dir = "{tmp_path}/save"\n[[remote]]\n{remote}')
    daemon = Daemon(load_jobs([job_file], load_daemon(None, {}), {}), {}, once=True)
    daemon._open_jobs()
    job = daemon.jobs[0]

    def fail() -> None:
        raise JournalFailed("the journal: disk I/O error")

    daemon._call(lambda: job.supervisor.guard(fail))
    assert job.problems.all() == ()
    daemon._turn(job, time.monotonic())
    assert daemon.jobs == []
    assert [one.error.exit_code for one in daemon.invalid] == [74]
    daemon._workers.stop()
