"""Execute a plan's actions on this node in workers: hold, convert, drop a form, write the pointer
(docs/design.md §3, §4).
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from ckptd.base.humanize import size_of
from ckptd.base.retry import backoff_seconds, changed_seconds
from ckptd.conversion import options as convert_options
from ckptd.conversion.engine.staging import partial_name
from ckptd.core.model.layouts import LATEST_UNIVERSAL
from ckptd.core.model.records import UNIVERSAL, DerivedRecord, DerivedState
from ckptd.daemon.actions.convert import PLACE, Signals, make_universal
from ckptd.daemon.actions.local_deletion import LocalDeleter
from ckptd.daemon.state.state import JobState
from ckptd.daemon.uploads.requests import hold_name
from ckptd.errors import (
    CkptdError,
    LockHeld,
    NoSpaceError,
    NotPermitted,
    RefusedError,
    StorageError,
    UsageError,
    from_os_error,
)
from ckptd.observe.logs import line_fields
from ckptd.storage.local import clones, fs
from ckptd.storage.local.scan import read_pointer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.config.schema import JobConfig
    from ckptd.core.policy.actions import (
        Convert,
        DropDerived,
        Hold,
        PointUniversal,
        ReleaseHold,
        StopConverting,
    )
    from ckptd.daemon.resources.limits import HostLimits
    from ckptd.daemon.resources.workers import JobWorkers
    from ckptd.observe.audit import Audit

log = logging.getLogger("ckptd.local")


class LocalActions:
    """The local half of executing a plan, for one job."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        workers: JobWorkers,
        audit: Audit,
        limits: HostLimits,
        wake: Callable[[], None],
        is_pinned: Callable[[str], bool],
        holds_lease: Callable[[], bool],
    ) -> None:
        self._config = config
        self._state = state
        self._workers = workers
        self._audit = audit
        self._limits = limits
        self._wake = wake
        self.signals = Signals(holds=holds_lease)
        self.deleter = LocalDeleter(
            state,
            audit,
            self._in_worker,
            wake,
            trainer=config.trainer,
            declared=config.declared,
            is_pinned=is_pinned,
        )
        self._dropping: set[int] = set()
        self._releasing: set[int] = set()

    def pace(self, *, is_resting: bool) -> None:
        """Pause conversions: a save is in flight (P11), or a person asked for it."""
        if is_resting:
            self.signals.pause.set()
        else:
            self.signals.pause.clear()

    def stop(self) -> None:
        """Tell conversions to end; what they finished is taken up again after a restart."""
        self.signals.stop.set()
        self.signals.pause.clear()

    # --- holds -----------------------------------------------------------------------------------------

    def hold(self, action: Hold, save_dir_fd: int) -> None:
        """Clone a complete save."""
        state = self._state
        row = state.saves.rows[action.save_id]
        if hold_name(row) in state.holds.stray:
            return  # of a lost journal, not settled yet: the new one would go over it
        about = row.save.model_dump_json().encode()
        state.saves.begin_reading(row.id)

        def done(_: None) -> None:
            state.saves.end_reading(row.id)
            state.set_held(row.id, held=True)
            self._wake()

        def failed(error: CkptdError) -> None:
            state.saves.end_reading(row.id)
            if isinstance(error, RefusedError):
                state.holds.set_can_clone(can_clone=False)
            state.holds.note_failed(row.id)
            log.warning("holding %s: %s", row.save.tag, error, extra=line_fields("hold", row.save.tag))

        self._in_worker(
            f"holding {row.save.tag}",
            save_dir_fd,
            lambda fd: clones.make(fd, row.save.tag, hold_name(row), row.save.files, about, row.save.empty),
            done,
            failed,
        )

    def release_hold(self, action: ReleaseHold, save_dir_fd: int) -> None:
        """Remove the clones; under disk pressure say which checkpoint lost its hold (P13)."""
        state = self._state
        row = state.saves.rows[action.save_id]
        tag = row.save.tag
        if row.id in self._releasing:
            return
        if action.reason != "committed":
            text = f"{tag} lost its hold: {action.reason}; the trainer may delete it before it is uploaded"
            state.holds.note_released(row.id, text)
        rests_on = state.uploads.commits_of(row.id)
        self._audit.write("release-hold", tag=tag, form="hold", reason=action.reason, **rests_on)
        self._releasing.add(row.id)

        def done(_: None) -> None:
            self._releasing.discard(row.id)
            state.set_held(row.id, held=False)
            self._wake()

        def failed(error: CkptdError) -> None:
            self._releasing.discard(row.id)
            self._not_removed(f"releasing the hold of {tag}", error)

        # held until it is gone: a hold that the journal does not know would stay for ever
        self._in_worker(
            f"releasing the hold of {tag}",
            save_dir_fd,
            lambda fd: clones.release(fd, hold_name(row)),
            done,
            failed,
        )

    def _not_removed(self, what: str, error: CkptdError) -> None:
        log.warning("%s: %s", what, error)
        self.deleter.later()

    # --- the universal form ----------------------------------------------------------------------------

    def convert(self, action: Convert, save_dir_fd: int, reserve_bytes: int) -> None:
        """Make it below `_ckptd/derived/universal/<tag>`."""
        state = self._state
        row = state.saves.rows[action.save_id]
        tag = row.save.tag
        others = [r for r in state.saves.rows.values() if r.save.tag == tag and r.id != row.id]
        is_taken = any(r.derived.state is DerivedState.READY for r in others)
        if is_taken or row.id in self._dropping:
            return
        state.saves.put_derived(row.id, row.derived.model_copy(update={"state": DerivedState.CONVERTING}))
        conversion = state.saves.begin_conversion(row.id, total_bytes=row.save.total_bytes)
        state.saves.begin_reading(row.id)

        def progress(p: convert_options.ConvertProgress) -> None:
            conversion.advance(p.bytes_done, p.bytes_total)

        def removing(why: str) -> None:
            self._audit.write("drop-derived", tag=tag, generation=0, form=UNIVERSAL, reason=why)

        self.signals.give_room.clear()
        options = convert_options.ConvertOptions(
            memory_budget_bytes=self._limits.conversion_bytes(),
            reserve_bytes=reserve_bytes,
            bytes_per_second=self._limits.conversion_bytes_per_second(),
            compare_masters=self._config.compare_masters,
        )
        self._in_worker(
            f"converting {tag}",
            save_dir_fd,
            lambda fd: make_universal(
                fd, self._config.save_dir, row, options, progress, self.signals, removing
            ),
            lambda record: self._converted(row.id, record),
            lambda error: self._not_converted(row.id, error),
            is_told=True,
        )

    def _converted(self, save_id: int, record: DerivedRecord) -> None:
        state = self._state
        tag = state.saves.rows[save_id].save.tag
        state.saves.end_reading(save_id)
        state.saves.end_conversion()
        state.saves.put_derived(save_id, record)
        made = size_of(record.bytes)
        log.info("%s has its universal form here: %s", tag, made, extra=line_fields("convert", tag))
        self._wake()

    def _not_converted(self, save_id: int, error: CkptdError) -> None:
        state = self._state
        row = state.saves.rows[save_id]
        tag, derived = row.save.tag, row.derived
        state.saves.end_reading(save_id)
        state.saves.end_conversion()
        update: dict[str, object] = {
            "state": DerivedState.FAILED,
            "reason": error.message,
            "hint": error.hint,
        }
        if self.signals.stop.is_set() or not self.signals.holds():
            update = {"state": DerivedState.NONE}
        elif isinstance(error, NoSpaceError):  # tried until there is room, but not at every turn
            update["retry_at_seconds"] = time.monotonic() + backoff_seconds(derived.tries + 5)
        elif isinstance(error, StorageError | NotPermitted | LockHeld):  # what a disk or a person gives back
            # ever more seldom: each time a whole save may be read
            update["lacks"] = derived.lacks + 1
            update["retry_at_seconds"] = time.monotonic() + changed_seconds(derived.lacks + 3)
        elif isinstance(error, RefusedError | UsageError):
            update["state"] = DerivedState.REFUSED
        else:
            update["tries"] = derived.tries + 1
            update["retry_at_seconds"] = time.monotonic() + backoff_seconds(derived.tries + 3)
        state.saves.put_derived(save_id, derived.model_copy(update=update))
        log.warning("converting %s: %s", tag, error, extra=line_fields("convert", tag))
        self._wake()

    def stop_converting(self, action: StopConverting) -> None:
        """Stop the conversion under way and delete its output at once; it is tried again when there is
        space.
        """
        if not self.signals.give_room.is_set():
            log.warning("the conversion under way is given up: %s", action.reason)
            self.signals.give_room.set()

    def drop_derived(self, action: DropDerived, save_dir_fd: int) -> None:
        """Remove the universal form of a save."""
        state, save_id = self._state, action.save_id
        if save_id in self._dropping:
            return
        row = state.saves.rows[save_id]
        tag = row.save.tag
        rests_on = state.uploads.commits_of(row.id)
        self._audit.write("drop-derived", tag=tag, form=UNIVERSAL, reason=action.reason, **rests_on)
        self._dropping.add(save_id)

        def done(_: None) -> None:
            self._dropping.discard(save_id)
            state.saves.put_derived(save_id, DerivedRecord(reason=action.reason))
            self._wake()

        def failed(error: CkptdError) -> None:
            self._dropping.discard(save_id)
            self._not_removed(f"dropping the universal form of {tag}", error)

        self._in_worker(
            f"dropping the universal form of {tag}",
            save_dir_fd,
            lambda fd: _drop(fd, tag),
            done,
            failed,
        )

    def point_universal(self, action: PointUniversal, save_dir_fd: int) -> None:
        """Rewrite `latest_universal` at once: one small atomic file.

        One that cannot be read back would be written again at every turn: not before the next one is due.
        """
        target = f"{PLACE}/{action.tag}" if action.tag else None
        fs.point_latest_universal(save_dir_fd, target)
        if read_pointer(save_dir_fd, LATEST_UNIVERSAL) == target:
            self._state.failures.clear(LATEST_UNIVERSAL)
            self._wake()
        else:
            self.refused(LATEST_UNIVERSAL, StorageError(f"{LATEST_UNIVERSAL} was written and cannot be read"))

    def refused(self, what: str, error: CkptdError) -> None:
        """Something small failed in the deciding thread; the next turn tries again."""
        log.error("%s", error)
        self._state.failures.note(what, error)

    # --- workers ---------------------------------------------------------------------------------------

    def _in_worker(
        self,
        what: str,
        save_dir_fd: int,
        work: Callable[[int], object],
        done: Callable[..., None],
        failed: Callable[[CkptdError], None],
        *,
        is_told: bool = False,
    ) -> None:
        """Run `work` with a descriptor of its own; unless `is_told` otherwise, status says for a while
        that it failed (P17).
        """
        state = self._state

        def run() -> object:
            try:
                return work(fd)
            finally:
                os.close(fd)

        def succeeded(result: object) -> None:
            state.failures.clear(what)
            done(result)

        def refused(error: CkptdError) -> None:
            if not is_told:
                state.failures.note(what, error)
            failed(error)

        try:
            fd = os.dup(save_dir_fd)
        except OSError as error:
            refused(from_os_error(error, what))
            return
        self._workers.submit(what, run, succeeded, refused)


def _drop(save_dir_fd: int, tag: str) -> None:
    """The universal form, and what an attempt that failed left of making it."""
    fs.remove_ours(save_dir_fd, PLACE, tag)
    fs.remove_ours(save_dir_fd, fs.STAGING, partial_name(tag))
