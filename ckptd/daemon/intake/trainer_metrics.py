"""Reads the trainer's `metrics_file` for the deciding thread: bounded, below save_dir, only when it changed.

Seldom, and only while a save waits for its value; a file that cannot be read costs values, nothing else.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.core.completeness.sealing import best_of
from ckptd.core.model.metrics import Values, parse_metrics, value_of
from ckptd.core.model.save import Best
from ckptd.errors import CkptdError, DamagedError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.base.identity import FileIdentity
    from ckptd.config.schema import JobConfig
    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.records import SaveRow
    from ckptd.daemon.state.state import JobState

AGAIN_SECONDS = 2.0
LATER_SECONDS = 60.0
"""An unreadable file is read again so seldom, even if no save waits for a value: it may be repaired."""
LATE_SECONDS = 3600.0
"""So long after a save its value may still come: for this node's disk alone once it is committed."""
TAIL_BYTES = 8 << 20


class TrainerMetrics:
    """The values of one job's metric, as last read."""

    def __init__(self, config: JobConfig, state: JobState) -> None:
        self._name = config.metrics_file
        self._metric = config.metric or ""
        self._state = state
        self._values: Values = {}
        self._identity: FileIdentity | None = None
        self._save_dir_fd = -1
        self._read_at_seconds = -AGAIN_SECONDS
        self._is_unreadable = False
        self.is_put_off = False
        """A save waits for its value, and the file was read a moment ago."""

    def best_of(self, tag: str, facts: Mapping[str, FileFacts], step: int) -> Best | None:
        """The value of a save that is about to be sealed: the trainer's own record, else its metrics file."""
        recorded = best_of(tag, facts, self._metric or None)
        if recorded is not None or self._name is None:
            return recorded
        self._read()
        earlier = sum(row.save.step == step for row in self._state.saves.rows.values())
        return self._best(step, earlier)

    def read_late_values(self, save_dir_fd: int) -> None:
        """Give values that came late to saves that have none; the descriptor serves until the next look."""
        self._save_dir_fd = save_dir_fd
        now = time.monotonic()
        waiting = [row for row in self._state.saves.rows.values() if self._waits(row)] if self._name else []
        self.is_put_off = bool(waiting) and now - self._read_at_seconds < AGAIN_SECONDS
        if self._is_unreadable and not waiting and now - self._read_at_seconds >= LATER_SECONDS:
            self._read()
        if not waiting or self.is_put_off:
            return
        self._read()
        found = False
        for row in waiting:
            earlier = sum(
                r.save.step == row.save.step and r.id < row.id for r in self._state.saves.rows.values()
            )
            best = self._best(row.save.step, earlier)
            if best is not None:
                self._state.journal.replace_sealed(row.id, row.save.model_copy(update={"best": best}))
                found = True
        if found:
            self._state.load()

    def _best(self, step: int, earlier_saves: int) -> Best | None:
        value = value_of(self._values, step, earlier_saves=earlier_saves)
        return None if value is None else Best(metric=self._metric, value=value)

    def seconds_to_look(self, now_seconds: float) -> float:
        """Return the seconds until a postponed read of the metrics file."""
        return self._read_at_seconds + AGAIN_SECONDS - now_seconds if self.is_put_off else AGAIN_SECONDS * 60

    def _waits(self, row: SaveRow) -> bool:
        return row.state == "present" and row.save.best is None and time.time() - row.sealed_at < LATE_SECONDS

    def _read(self) -> None:
        assert self._name is not None
        self._read_at_seconds = time.monotonic()
        about = self._name
        try:
            data, is_tail = self._changed()
            if data is None:
                return
            values = parse_metrics(data, self._metric, is_tail=is_tail)
            if values is None:
                msg = f"{about} has none of the shapes that metrics_file takes"
                raise DamagedError(msg, hint='a document of 1 MiB, or {"step": 100, "eval_loss": 1.5} a line')
        except FileNotFoundError:
            self._identity = None
            self._can_be_read()
        except OSError as error:
            self._identity = None  # once it can be read again it is, though it has not changed
            self._complain(from_os_error(error, about))
        except CkptdError as error:
            self._complain(error)
        else:
            self._values = values
            self._can_be_read()

    def _can_be_read(self) -> None:
        assert self._name is not None
        self._is_unreadable = False
        self._state.problems.clear("metrics-unreadable", self._name)

    def _complain(self, error: CkptdError) -> None:
        assert self._name is not None
        self._is_unreadable = True
        text = f"metrics_file: {error.message}"
        self._state.problems.put("metrics-unreadable", self._name, text, error.hint)

    def _changed(self) -> tuple[bytes | None, bool]:
        """(content, whether it is but the end of the file); None: it is as it was."""
        assert self._name is not None
        fd = files.open_beneath(self._save_dir_fd, self._name)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                msg = f"{self._name} is no regular file"
                raise DamagedError(msg, hint="name a file that the trainer writes")
            identity = files.identity_of(status)
            if identity == self._identity:
                return None, False
            start = max(0, status.st_size - TAIL_BYTES)
            data = os.pread(fd, TAIL_BYTES, start)
        finally:
            os.close(fd)
        self._identity = identity
        return data, start > 0
