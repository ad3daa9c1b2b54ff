"""A trainer as DeepSpeed is: shards written in place and never flushed, `latest` ahead of the last of them.

Each save is a list of small steps that the life carries out one by one, so that anything may come in between.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tests.sim.kernel import Kernel
from tests.support import synthetic

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.sim.disk import Inode

SAVE_DIR = "/sim/nvme/run"
METRICS = "metrics.jsonl"
RANKS = 2
CHUNK_BYTES = 4096
STEP_SECONDS = 0.01


def _timeless(path: Path, records: dict[str, bytes], prefix: str = "archive") -> None:
    """As `write_archive`, the same bytes at any time of day."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for name, data in records.items():
            out.writestr(zipfile.ZipInfo(f"{prefix}/{name}"), data)


@cache
def shards_of(step: int, number: int) -> dict[str, bytes]:
    """The files of one save in the order in which DeepSpeed writes them; `number` makes its bytes its own."""
    with tempfile.TemporaryDirectory(prefix="ckptd-sim-") as root:
        folder = Path(root)

        def own(rank: int, inner: dict[str, object]) -> None:
            groups = inner["base_optimizer_state"]["param_groups"]  # type: ignore[index]
            groups[0]["lr"] = number + rank / 10

        def own_model(model: dict[str, object]) -> None:
            model["lr_scheduler"] = number

        with mock.patch.object(synthetic, "write_archive", _timeless):
            synthetic.write_stage12(
                folder, [{"w": (1400,)}], RANKS, step=step, change=own, change_model=own_model
            )
        names = sorted(os.listdir(folder), key=lambda name: ("optim" in name, name))
        return {name: (folder / name).read_bytes() for name in names}


@dataclass(slots=True, kw_only=True)
class Save:
    """One save: what the trainer meant it to be, and what became of it."""

    number: int
    tag: str
    step: int
    files: dict[str, bytes]
    written: set[str] = field(default_factory=set)
    """Files whose last byte was written."""
    gone_seconds: float = 0.0
    is_rotated: bool = False
    """The trainer removed it; a power cut may have brought it back."""
    is_gone: bool = False
    """The trainer itself removed or overwrote it, or a power cut took what was never flushed."""
    inodes: dict[str, Inode] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """What the trainer notes of it; no two are alike."""
        return self.number * 613 % 1009 / 1009

    @property
    def is_finished(self) -> bool:
        """Every byte of it was written."""
        return len(self.written) == len(self.files)

    @property
    def written_ns(self) -> int:
        """When the last of its files was written, by a wall clock that may have been moved."""
        return max((inode.written_ns for inode in self.inodes.values()), default=0)

    @property
    def window_seconds(self) -> float:
        """Between the first of its files and the last."""
        times = [inode.written_ns for inode in self.inodes.values()]
        return (max(times) - min(times)) / 1e9 if times else 0.0


class Trainer:
    """One run: its saves, and the steps it has not carried out yet."""

    def __init__(self, kernel: Kernel, on_step: Callable[[], None]) -> None:
        self.saves: list[Save] = []
        self.writing: Save | None = None
        self.step = 0
        self.notes_losses = False
        """A line of metrics.jsonl before each save."""
        self._kernel = kernel
        self._on_step = on_step
        self._todo: deque[Callable[[], None]] = deque()
        self._fd: int | None = None

    @property
    def is_writing(self) -> bool:
        """A save is under way."""
        return bool(self._todo)

    def current(self, tag: str) -> Save | None:
        """The save that lies under a tag, else the newest that did."""
        mine = [save for save in self.saves if save.tag == tag]
        return next((save for save in reversed(mine) if not save.is_gone), mine[-1] if mine else None)

    def has_open(self, tag: str) -> bool:
        """A file of that checkpoint is open for writing."""
        return self._fd is not None and self.writing is not None and self.writing.tag == tag

    # --- saving ------------------------------------------------------------------------------------------

    def begin(self, step: int, rng: random.Random, *, tag: str | None = None) -> None:
        """Start a save; an earlier one of that tag is overwritten file by file."""
        self.abort()
        self.step = step
        name = tag or f"global_step{step}"
        number = len(self.saves) + 1
        save = Save(number=number, tag=name, step=step, files=shards_of(step, number))
        self.writing = save
        self._todo.append(lambda: self._make_folder(save))
        names = list(save.files)
        early = rng.randrange(1, len(names) + 1)
        for at, path in enumerate(names):
            if at == early:
                self._todo.append(lambda: self._point(save.tag))
            self._write_file(save, path)
        if early == len(names):
            self._todo.append(lambda: self._point(save.tag))
        self._todo.append(self._finish)

    def go_on(self, count: int) -> None:
        """Carry out the next steps of the save."""
        kernel = self._kernel
        for _ in range(count):
            if not self._todo:
                return
            before, kernel.actor = kernel.actor, "trainer"
            try:
                self._todo.popleft()()
            finally:
                kernel.actor = before
            kernel.now_seconds += STEP_SECONDS
            self._on_step()

    def end(self) -> None:
        """Carry out all that is left of the save."""
        while self._todo:
            self.go_on(1)

    def abort(self) -> None:
        """The trainer dies: what is written stays as it is."""
        self._todo.clear()
        self._fd = None
        self.writing = None

    def _make_folder(self, save: Save) -> None:
        self.saves.append(save)
        if self.notes_losses:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            fd = self._kernel.open(f"{SAVE_DIR}/{METRICS}", flags, 0o644)
            self._kernel.write(fd, json.dumps({"step": save.step, "loss": save.loss}).encode() + b"\n")
            self._kernel.close(fd)
        try:
            self._kernel.mkdir(f"{SAVE_DIR}/{save.tag}")
        except FileExistsError:
            return

    def _replace(self, save: Save) -> None:
        """A file of the save that lay under this tag goes; while its folder alone was made it was there."""
        known = [s for s in self.saves if s is not save and s.tag == save.tag and not s.is_gone]
        for other in known:
            other.is_gone, other.gone_seconds = True, self._kernel.now_seconds

    def _write_file(self, save: Save, path: str) -> None:
        data = save.files[path]
        shown = f"{SAVE_DIR}/{save.tag}/{path}"
        kernel = self._kernel

        def begin() -> None:
            try:
                self._fd = kernel.open(shown, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            except FileNotFoundError:
                self.abort()  # its folder vanished under it: a trainer dies of that
                return
            self._replace(save)
            inode = kernel.fds[self._fd].inode
            inode.saved = (save.number, path)
            save.inodes[path] = inode

        def chunk(at: int) -> None:
            if self._fd is not None:
                kernel.write(self._fd, data[at : at + CHUNK_BYTES])
                if at + CHUNK_BYTES >= len(data):
                    save.written.add(path)

        def close() -> None:
            if self._fd is not None:
                kernel.close(self._fd)
            self._fd = None

        self._todo.append(begin)
        for at in range(0, len(data), CHUNK_BYTES):
            self._todo.append(lambda at=at: chunk(at))  # type: ignore[misc]
        self._todo.append(close)

    def _point(self, tag: str) -> None:
        fd = self._kernel.open(f"{SAVE_DIR}/latest", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._kernel.write(fd, tag.encode())
        self._kernel.close(fd)

    def _finish(self) -> None:
        self.writing = None

    # --- rotation ----------------------------------------------------------------------------------------

    def rotate(self, keep: int) -> None:
        """Remove the oldest complete checkpoints, file by file, as the Hugging Face Trainer does."""
        kernel = self._kernel
        here = [s for s in self.saves if s.is_finished and not s.is_gone and self._is_here(s)]
        before, kernel.actor = kernel.actor, "trainer"
        try:
            for save in here[: max(0, len(here) - keep)]:
                save.is_gone = save.is_rotated = True
                self._remove(save.tag)
        finally:
            kernel.actor = before

    def remove_torn(self) -> None:
        """Remove what no training could load, as whoever starts it again does; nothing is being written."""
        kernel = self._kernel
        before, kernel.actor = kernel.actor, "trainer"
        try:
            for tag in sorted({save.tag for save in self.saves} & set(kernel.listdir(SAVE_DIR))):
                save = self.current(tag)
                if save is not None and (save.is_gone or not save.is_finished):
                    save.is_gone = True
                    self._remove(tag)
        finally:
            kernel.actor = before

    def _remove(self, tag: str) -> None:
        for path in self._kernel.listdir(f"{SAVE_DIR}/{tag}"):
            self._kernel.unlink(f"{SAVE_DIR}/{tag}/{path}")
        self._kernel.rmdir(f"{SAVE_DIR}/{tag}")
        self._on_step()

    def begin_anew(self) -> None:
        """Somebody removes all checkpoints and starts the training from its first step."""
        self.abort()
        kernel = self._kernel
        before, kernel.actor = kernel.actor, "trainer"
        try:
            for save in [save for save in self.saves if not save.is_gone]:
                save.is_gone = save.is_rotated = True
                save.gone_seconds = kernel.now_seconds
            there = kernel.listdir(SAVE_DIR)
            for tag in sorted({save.tag for save in self.saves} & set(there)):
                self._remove(tag)
            if "latest" in there:
                kernel.unlink(f"{SAVE_DIR}/latest")
        finally:
            kernel.actor = before
        self.step = 0
        self._on_step()

    def _is_here(self, save: Save) -> bool:
        try:
            folder = self._kernel.stat(f"{SAVE_DIR}/{save.tag}")
            names = self._kernel.listdir(f"{SAVE_DIR}/{save.tag}")
        except OSError:
            return False
        return folder is not None and set(names) >= set(save.files)
