"""A prune that was cut short before a file went is taken back: the next one asks anew (P1, P5, adr/0153)."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.base import files, owned_dirs
from ckptd.core.model.records import ZERO, UploadRecord, UploadState
from ckptd.core.model.save import SealedFile
from ckptd.core.policy.actions import DeleteLocal
from ckptd.daemon.actions.local_deletion import TIDY_SECONDS
from ckptd.daemon.crash_recovery import finish_after_crash
from ckptd.daemon.state.remote_sync import notice_lost
from ckptd.storage.local import fs
from tests.unit.config.test_begin_again import Scene
from tests.unit.storage.local.test_local_prune import NAMES, TAG, permit_for, save_dir, save_of

__all__ = ["save_dir"]


class Killed(Scene):
    """The daemon was killed between the rename aside and the first unlink."""

    def __init__(self, save_dir: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(save_dir, fd)
        self.now = time.monotonic()
        self.state.required = ("nas",)
        permit = permit_for(save_dir)
        save = save_of(permit)
        self.save_id = self.state.journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
        self.state.load()
        self.put(UploadState.COMMITTED)

        class Kill(BaseException):
            """SIGKILL."""

        def killed(*_: object) -> None:
            raise Kill

        with monkeypatch.context() as patch, pytest.raises(Kill):
            patch.setattr(fs, "finish_deletion", killed)
            self.pruner.delete(DeleteLocal(save_id=self.save_id, permit=permit), fd)
        assert not (save_dir / TAG).exists()

    def put(self, state: UploadState) -> None:
        """What is known of it on the remote."""
        self.state.uploads.put(self.save_id, UploadRecord(remote="nas", form=ZERO, state=state))

    def start(self) -> None:
        """The daemon starts again."""
        self.state.deletions.interrupted.clear()
        finish_after_crash(self.state, self.fd, self.audit)

    def later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The trash is looked after."""
        self.now = now = self.now + TIDY_SECONDS + 1
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now)
            self.pruner.tidy(self.fd)

    @property
    def is_whole(self) -> bool:
        """It lies where it lay."""
        return all((self.save_dir / TAG / name).read_text() == name for name in NAMES)

    @property
    def audited(self) -> list[str]:
        """What the audit says of it."""
        lines = (self.save_dir / "_ckptd/state/audit.jsonl").read_text().splitlines()
        return [json.loads(line)["action"] for line in lines]


@contextmanager
def taken(save_dir: Path) -> Iterator[Path]:
    """The run was rewound, and the trainer has saved under that name again."""
    folder = save_dir / TAG
    folder.mkdir()
    (folder / "a.pt").write_text("another save")
    yield folder
    assert (folder / "a.pt").read_text() == "another save"


@pytest.fixture
def killed(save_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Killed]:
    """The scene after the kill."""
    with files.opened_dir(save_dir) as fd:
        yield Killed(save_dir, fd, monkeypatch)


def test_a_restart_takes_back_what_lost_nothing(killed: Killed) -> None:
    """Who pinned it while the daemon was down, and what the remote lost, is asked by the next permit."""
    killed.start()
    assert killed.is_whole
    assert killed.trash == []
    assert killed.state.journal.open_deletions() == []
    assert killed.state.saves.rows[killed.save_id].state == "present"
    assert killed.state.journal.lately(0.0)[1] == [], "the hourly limit is for what went"
    assert killed.audited == ["prune", "trash"]
    killed.pruner._deleting.clear()  # another process
    killed.pruner.delete(DeleteLocal(save_id=killed.save_id, permit=permit_for(killed.save_dir)), killed.fd)
    assert not (killed.save_dir / TAG).exists()
    assert killed.state.saves.rows[killed.save_id].state == "pruned"


def test_killed_between_the_way_back_and_its_note(killed: Killed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start finds nothing in the trash and the checkpoint in its place, and leaves it there."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="rror"):
        patch.setattr(killed.state.journal, "end_deletion", refused)
        killed.start()
    assert killed.is_whole
    assert len(killed.state.journal.open_deletions()) == 1
    killed.start()
    assert killed.is_whole
    assert killed.state.journal.open_deletions() == []
    assert killed.state.saves.rows[killed.save_id].state == "present"


def test_what_has_lost_a_file_is_finished(killed: Killed) -> None:
    [name] = killed.trash
    (killed.save_dir / fs.TRASH / name / NAMES[0]).unlink()
    killed.start()
    assert killed.trash == []
    assert not (killed.save_dir / TAG).exists()
    assert killed.state.saves.rows[killed.save_id].state == "pruned"


def test_what_an_earlier_worker_is_about_to_remove_stays_in_the_trash(killed: Killed) -> None:
    """The job began again, the worker goes on: nothing is half removed in save_dir, whoever comes first."""
    [name] = killed.trash
    removed: list[bool] = []
    with files.opened_dir(killed.save_dir / fs.TRASH) as trash:
        look = files.stat_beneath

        def begin_again(dir_fd: int, path: str) -> os.stat_result | None:
            if dir_fd == trash and not removed:  # the lock is held, and no file has gone
                removed.append((killed.save_dir / TAG).exists())
                killed.start()
                removed.append((killed.save_dir / TAG).exists())
            return look(dir_fd, path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "stat_beneath", begin_again)
            fs.finish_deletion(trash, name, permit_files(killed))
        assert removed == [False, False]
        assert killed.trash == []
        with pytest.raises(FileNotFoundError):
            fs.finish_deletion(trash, name, permit_files(killed))


def permit_files(killed: Killed) -> tuple[SealedFile, ...]:
    """What the intent lists."""
    return killed.state.saves.rows[killed.save_id].save.files


def test_a_removal_that_comes_after_the_way_back_finds_nothing(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    [name] = killed.trash
    lock = owned_dirs.lock

    def first_back(folder_fd: int, how: int) -> None:
        monkeypatch.setattr(owned_dirs, "lock", lock)
        killed.start()
        lock(folder_fd, how)

    monkeypatch.setattr(owned_dirs, "lock", first_back)
    with files.opened_dir(killed.save_dir / fs.TRASH) as trash, pytest.raises(FileNotFoundError):
        fs.finish_deletion(trash, name, permit_files(killed))
    assert killed.is_whole


def test_what_an_earlier_worker_finishes_while_a_start_waits_for_its_lock_is_finished(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start finds nothing left to remove, which is what it wanted."""
    [name] = killed.trash
    (killed.save_dir / fs.TRASH / name / NAMES[0]).unlink()
    lock = owned_dirs.lock
    finished: list[list[str]] = []

    def worker_first(folder_fd: int, how: int) -> None:
        monkeypatch.setattr(owned_dirs, "lock", lock)
        with files.opened_dir(killed.save_dir / fs.TRASH) as trash:
            fs.finish_deletion(trash, name, permit_files(killed))
        finished.append(killed.trash)
        lock(folder_fd, how)

    monkeypatch.setattr(owned_dirs, "lock", worker_first)
    killed.start()
    assert finished == [[]]
    assert killed.state.journal.open_deletions() == []
    assert killed.state.saves.rows[killed.save_id].state == "pruned"


def test_a_file_that_was_touched_is_no_file_that_went(killed: Killed) -> None:
    """Its identity is another: the removal would pass it by and leave the rest of the checkpoint without."""
    [name] = killed.trash
    (killed.save_dir / fs.TRASH / name / NAMES[0]).chmod(0o600)
    killed.start()
    assert killed.is_whole


def test_where_its_name_is_taken_it_goes_once_the_remote_shows_it(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot go back: the remote is asked anew, and until it has answered, nothing goes."""
    with taken(killed.save_dir):
        killed.start()
        for _ in range(2):
            killed.later(monkeypatch)
            assert len(killed.trash) == 1
            assert len(killed.state.journal.open_deletions()) == 1
            assert killed.pruner.seconds_to_tidy is not None
            assert killed.state.failures.all() == {}, "who did not answer is told of already"
        killed.state.deletions.observed.add("nas")
        killed.later(monkeypatch)
        assert killed.trash == []
        assert killed.state.journal.open_deletions() == []
        assert killed.state.saves.rows[killed.save_id].state == "pruned"


@pytest.mark.parametrize("why", ["pinned", "its COMMIT is gone"])
def test_where_its_name_is_taken_it_stays_while_it_is_needed(
    killed: Killed, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    killed.state.deletions.observed.add("nas")
    if why == "pinned":
        killed.pruner.is_pinned = lambda tag: tag == TAG
    else:
        killed.put(UploadState.NEW)
    with taken(killed.save_dir) as folder:
        killed.start()
        killed.later(monkeypatch)
        [name] = killed.trash
        said = killed.state.failures.all()[f"deleting {TAG}"]
        assert f"{fs.TRASH}/{name}" in said.text
        assert "by hand" in said.hint
        killed.start()
        assert killed.trash == [name], "whoever starts"
    (folder / "a.pt").unlink()
    folder.rmdir()
    killed.later(monkeypatch)
    assert killed.is_whole, "its name is free again"
    assert killed.state.failures.all() == {}
    assert killed.state.journal.open_deletions() == []


def test_the_loss_of_its_commit_is_noticed_while_it_waits(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save took its place, and the remote lost what was proved: nothing goes by the record."""
    nothing = SimpleNamespace(commits=(), retired_beside=(), unreadable=())
    link = SimpleNamespace(name="nas", is_current=True, observation=nothing, forget_tag=lambda _: None)
    with taken(killed.save_dir):
        killed.start()
        killed.state.journal.end_save(killed.save_id, "superseded")
        killed.state.reload(killed.save_id)
        notice_lost(killed.state, cast("Any", link), (ZERO,))
        killed.state.deletions.observed.add("nas")
        killed.later(monkeypatch)
        assert len(killed.trash) == 1


def test_a_dispute_of_its_commit_is_noticed_while_it_waits(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The COMMIT is there, and another node's DISPUTE beside it: this may be the last copy (P1)."""
    proof = {"commit_key": "k", "commit_sha256": "s", "generation": 1}
    record = UploadRecord(remote="nas", form=ZERO, state=UploadState.COMMITTED, **proof)  # type: ignore[arg-type]
    view = SimpleNamespace(key="k", sha256="s", disputed=False)
    seen = SimpleNamespace(commits=(view,), retired_beside=(), unreadable=())
    link = SimpleNamespace(name="nas", is_current=True, observation=seen, forget_tag=lambda _: None)
    killed.state.uploads.put(killed.save_id, record)
    with taken(killed.save_dir):
        killed.start()
        killed.state.journal.end_save(killed.save_id, "superseded")
        killed.state.reload(killed.save_id)
        notice_lost(killed.state, cast("Any", link), (ZERO,))
        assert killed.state.uploads.record(killed.save_id, "nas", ZERO) == record
        view.disputed = True
        notice_lost(killed.state, cast("Any", link), (ZERO,))
        assert killed.state.uploads.record(killed.save_id, "nas", ZERO).reason == "its COMMIT is disputed"
        killed.state.deletions.observed.add("nas")
        killed.later(monkeypatch)
        assert len(killed.trash) == 1


def test_a_removal_that_failed_before_a_file_went_is_taken_back(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the first unlink: twenty seconds later it lies in its place, to be planned at once."""

    def refusing(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    woken: list[int] = []
    with files.opened_dir(save_dir) as fd:
        scene = Scene(save_dir, fd)
        scene.pruner._wake = lambda: woken.append(1)
        with monkeypatch.context() as patch:
            patch.setattr(files, "remove_file", refusing)
            scene.pruner.delete(DeleteLocal(save_id=1, permit=permit_for(save_dir)), fd)
        assert len(scene.trash) == 1
        assert len(scene.state.deletions.local_at) == 1
        with monkeypatch.context() as patch:
            now = time.monotonic() + TIDY_SECONDS + 1
            patch.setattr(time, "monotonic", lambda: now)
            scene.pruner.tidy(fd)
            assert scene.state.deletions.blocked_lately() == frozenset()
        assert all((save_dir / TAG / name).read_text() == name for name in NAMES)
        assert scene.state.journal.open_deletions() == []
        assert not scene.state.deletions.local_at
        assert woken
        scene.pruner.delete(DeleteLocal(save_id=1, permit=permit_for(save_dir)), fd)
        assert not (save_dir / TAG).exists()
        assert scene.state.deletions.blocked == {}
