"""File events: what is a hint and what is not, with real inotify."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING

import pytest
from watchdog.events import FileClosedEvent, FileSystemEvent

from ckptd.storage.local.watch import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Ear:
    """A save_dir, its watcher, and what it said."""

    def __init__(self, save_dir: Path) -> None:
        self.save_dir = save_dir
        self.hints = 0
        self.is_writing = False
        self.watcher = Watcher(str(save_dir), self.hint)
        self.closed: set[str] = set()
        handler = self.watcher._handler
        tell = handler.on_any_event

        def told(event: FileSystemEvent) -> None:
            tell(event)
            if isinstance(event, FileClosedEvent):  # the last one of a file that was written
                self.closed.add(os.fsdecode(event.src_path))

        handler.on_any_event = told  # type: ignore[method-assign]
        self.watcher.start()

    def hint(self, *, is_writing: bool = False) -> None:
        self.is_writing |= is_writing
        self.hints += 1

    def hears(self, seconds: float = 200.0) -> bool:
        end = time.monotonic() + seconds
        while self.hints == 0 and time.monotonic() < end:
            time.sleep(0.02)
        return self.hints > 0

    def hears_writing(self, seconds: float = 200.0) -> None:
        end = time.monotonic() + seconds
        while not self.is_writing:
            assert time.monotonic() < end
            time.sleep(0.02)

    def forget(self) -> None:
        """What was said so far and is still on its way: a watch tells in order, so of a mark last.

        watchdog holds deletions back for half a second.
        """
        time.sleep(0.8)
        marks = []
        for folder in (self.save_dir, *(self.save_dir / name for name in self.watcher._watches)):
            if folder.is_dir():
                marks.append(folder / f"mark{time.monotonic_ns()}")
                marks[-1].write_bytes(b"")
        end = time.monotonic() + 200
        while not {str(mark) for mark in marks} <= self.closed:
            assert time.monotonic() < end
            time.sleep(0.02)
        self.hints = 0
        self.is_writing = False


@pytest.fixture(params=["run", "_ckptd-tests/run"])
def ear(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ear]:
    save_dir = tmp_path / request.param
    save_dir.mkdir(parents=True)
    made = Ear(save_dir)
    yield made
    made.watcher.stop()


def test_a_new_folder_is_a_hint_and_ours_is_none(ear: Ear) -> None:
    """Also where a directory above save_dir has a name like ours."""
    (ear.save_dir / "_ckptd").mkdir()
    assert not ear.hears(0.5)
    (ear.save_dir / "global_step1").mkdir()
    assert ear.hears()
    assert ear.is_writing


def test_what_lies_beside_the_checkpoints_is_no_save(ear: Ear) -> None:
    """A log that is written in every step would keep transfers slow for ever."""
    (ear.save_dir / "log.txt").write_text("step 1")
    assert ear.hears()
    (ear.save_dir / "global_step1").mkdir()
    ear.watcher.follow(["global_step1"])
    ear.forget()
    (ear.save_dir / "log.txt").write_text("step 2")
    assert ear.hears()
    assert not ear.is_writing
    (ear.save_dir / "global_step1" / "shard").write_bytes(b"x")
    ear.hears_writing()
    ear.forget()
    (ear.save_dir / "global_step1" / "shard").unlink()
    assert ear.hears()
    assert not ear.is_writing


def test_a_folder_made_anew_under_its_name_is_heard_again(ear: Ear) -> None:
    """A trainer with a constant name removes its folder and saves again."""
    folder = ear.save_dir / "checkpoint"
    for _ in range(2):
        folder.mkdir()
        ear.watcher.follow(["checkpoint"])
        ear.forget()
        (folder / "shard").write_bytes(b"x")
        assert ear.hears()
        ear.forget()
        shutil.rmtree(folder)
        assert ear.hears()
        ear.forget()
