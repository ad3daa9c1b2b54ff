"""Hold, convert, drop, point: what a plan does on this node, in workers (docs/design.md §3, §4, P13)."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from ckptd.convert import supervise
from ckptd.core.view import UNIVERSAL, DerivedRecord, DerivedState
from ckptd.daemon.backoff import backoff_seconds
from ckptd.daemon.orders import hold_name
from ckptd.daemon.pruning import Pruner
from ckptd.daemon.state import Converting, JobState
from ckptd.errors import CkptdError, NoSpaceError, RefusedError, SourceChanged, UsageError
from ckptd.local import fs
from ckptd.local.derived import describe
from ckptd.place import path_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.config_model import JobConfig
    from ckptd.core.actions import Convert, DropDerived, Hold, PointUniversal, ReleaseHold
    from ckptd.daemon.workers import OneJobs
    from ckptd.journal import SaveRow
    from ckptd.observe.audit import Audit

log = logging.getLogger("ckptd.local")

PLACE = f"{fs.DERIVED}/{UNIVERSAL}"


class Chores:
    """The local half of executing a plan, for one job."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        workers: OneJobs,
        audit: Audit,
        conversion_bytes: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._state = state
        self._workers = workers
        self._audit = audit
        self._conversion_bytes = conversion_bytes
        self._wake = wake
        self._pause = threading.Event()
        self._stop = threading.Event()
        self.pruner = Pruner(state, audit, self._in_worker, wake)
        self._dropping: set[int] = set()

    def pace(self, *, is_save_in_flight: bool) -> None:
        """Pause conversions while a save is in flight (P11)."""
        if is_save_in_flight:
            self._pause.set()
        else:
            self._pause.clear()

    def stop(self) -> None:
        """Tell conversions to end; what they finished is taken up again after a restart."""
        self._stop.set()
        self._pause.clear()

    # --- holds -----------------------------------------------------------------------------------------

    def hold(self, action: Hold, save_dir_fd: int) -> None:
        """Clone a complete save."""
        state = self._state
        row = state.rows[action.save_id]
        state.busy[row.id] += 1

        def done(_: None) -> None:
            state.busy[row.id] -= 1
            state.journal.set_held(row.id, held=True)
            state.load()
            self._wake()

        def failed(error: CkptdError) -> None:
            state.busy[row.id] -= 1
            if isinstance(error, RefusedError):
                state.can_clone = False
            log.warning("holding %s: %s", row.save.tag, error)

        self._in_worker(
            f"holding {row.save.tag}",
            save_dir_fd,
            lambda fd: fs.hold(fd, row.save.tag, hold_name(row), row.save.files),
            done,
            failed,
        )

    def release_hold(self, action: ReleaseHold, save_dir_fd: int) -> None:
        """Remove the clones; under disk pressure say which checkpoint lost its hold (P13)."""
        state = self._state
        row = state.rows[action.save_id]
        tag = row.save.tag
        if action.reason != "committed":
            text = f"{tag} lost its hold: {action.reason}; the trainer may delete it before it is uploaded"
            state.problems.put("hold-released", tag, text, "free space, or save less often")
        rests_on = state.rests_on(row.id)
        self._audit.write("release-hold", tag=tag, form="hold", reason=action.reason, **rests_on)
        state.journal.set_held(row.id, held=False)
        state.load()
        self._in_worker(
            f"releasing the hold of {tag}",
            save_dir_fd,
            lambda fd: fs.remove_ours(fd, fs.HOLD, hold_name(row)),
            lambda _: self._wake(),
            lambda error: self._not_removed(f"releasing the hold of {tag}", error),
        )

    def _not_removed(self, what: str, error: CkptdError) -> None:
        log.warning("%s: %s", what, error)
        self.pruner.later()

    # --- the universal form ----------------------------------------------------------------------------

    def convert(self, action: Convert, save_dir_fd: int, reserve_bytes: int) -> None:
        """Make it below `_ckptd/derived/universal/<tag>`."""
        state = self._state
        row = state.rows[action.save_id]
        tag = row.save.tag
        others = [r for r in state.rows.values() if r.save.tag == tag and r.id != row.id]
        is_taken = any(r.derived.state is DerivedState.READY for r in others)
        if is_taken or row.id in self._dropping:
            return
        state.put_derived(row.id, row.derived.model_copy(update={"state": DerivedState.CONVERTING}))
        state.converting = Converting(save_id=row.id, total_bytes=row.save.total_bytes)
        state.busy[row.id] += 1
        converting = state.converting

        def progress(p: supervise.ConvertProgress) -> None:
            converting.done_bytes, converting.total_bytes = p.bytes_done, p.bytes_total

        options = supervise.ConvertOptions(
            memory_budget_bytes=self._conversion_bytes(), reserve_bytes=reserve_bytes
        )
        self._in_worker(
            f"converting {tag}",
            save_dir_fd,
            lambda fd: self._convert(fd, row, options, progress),
            lambda record: self._converted(row.id, record),
            lambda error: self._not_converted(row.id, error),
            is_told=True,
        )

    def _convert(
        self,
        fd: int,
        row: SaveRow,
        options: supervise.ConvertOptions,
        progress: Callable[[supervise.ConvertProgress], None],
    ) -> DerivedRecord:
        """In a worker: what is there already and was made from this save serves, anything else makes room."""
        tag, place = row.save.tag, PLACE
        os.close(fs.ensure_ours(fd, place))
        os.close(fs.ensure_ours(fd, fs.STAGING))
        found = describe(fd, f"{place}/{tag}")
        if len(row.save.roots) > 1:
            msg = f"{tag} holds two engines ({', '.join(row.save.roots)})"
            raise RefusedError(msg, hint="`ckptd convert` each; the ZeRO form is safe all the same")
        if found is not None and found.is_made_from(row.save.shard_fingerprints):
            return DerivedRecord(
                state=DerivedState.READY,
                plan_sha256=found.plan_sha256,
                layout=found.layout,
                alignment=found.alignment,
            )
        if found is not None:
            why = "made from another save of the tag"
            self._audit.write("drop-derived", tag=tag, generation=0, form=UNIVERSAL, reason=why)
        fs.remove_ours(fd, place, tag)
        save_dir = self._config.save_dir
        report = supervise.convert(
            save_dir / tag / row.save.roots[0],
            path_of(save_dir, f"{place}/{tag}"),
            options,
            on_progress=progress,
            should_stop=self._stop.is_set,
            should_pause=self._pause.is_set,
            work_dir=path_of(save_dir, fs.STAGING),
            beneath=save_dir,
        )
        made = describe(fd, f"{place}/{tag}")
        is_of_this_save = made is not None and made.is_made_from(row.save.shard_fingerprints)
        if not is_of_this_save or not fs.folder_is_intact(fd, tag, row.save.files):
            fs.remove_ours(fd, place, tag)
            msg = f"{tag} was saved again while it was converted"
            raise SourceChanged(msg)
        return DerivedRecord(
            state=DerivedState.READY,
            plan_sha256=report.plan_sha256,
            layout=report.layout,
            alignment=made.alignment if made else 0,
            is_cloned=report.bytes_cloned > 0,
            is_source_verified=report.verified,
            bytes=report.bytes,
        )

    def _converted(self, save_id: int, record: DerivedRecord) -> None:
        state = self._state
        tag = state.rows[save_id].save.tag
        state.busy[save_id] -= 1
        state.converting = None
        state.put_derived(save_id, record)
        log.info("%s has its universal form (%s, %.1f MB)", tag, record.layout, record.bytes / 1e6)
        self._wake()

    def _not_converted(self, save_id: int, error: CkptdError) -> None:
        state = self._state
        row = state.rows[save_id]
        tag, derived = row.save.tag, row.derived
        state.busy[save_id] -= 1
        state.converting = None
        update: dict[str, object] = {
            "state": DerivedState.FAILED,
            "reason": error.message,
            "hint": error.hint,
        }
        if self._stop.is_set():
            update = {"state": DerivedState.NONE}
        elif isinstance(error, NoSpaceError):  # tried until there is room, but not at every turn
            update["retry_at_seconds"] = time.monotonic() + backoff_seconds(derived.tries + 5)
        elif isinstance(error, RefusedError | UsageError):
            update["state"] = DerivedState.REFUSED
        elif not isinstance(error, SourceChanged):
            update["tries"] = derived.tries + 1
            update["retry_at_seconds"] = time.monotonic() + backoff_seconds(derived.tries + 3)
        state.put_derived(save_id, derived.model_copy(update=update))
        log.warning("converting %s: %s", tag, error)
        self._wake()

    def drop_derived(self, action: DropDerived, save_dir_fd: int) -> None:
        """Remove the universal form of a save."""
        state, save_id = self._state, action.save_id
        if save_id in self._dropping:
            return
        self._dropping.add(save_id)
        tag = state.rows[save_id].save.tag
        resting = state.rests_on(save_id)
        self._audit.write("drop-derived", tag=tag, form=UNIVERSAL, reason=action.reason, **resting)

        def done(_: None) -> None:
            self._dropping.discard(save_id)
            state.put_derived(save_id, DerivedRecord(reason=action.reason))
            self._wake()

        def failed(error: CkptdError) -> None:
            self._dropping.discard(save_id)
            self._not_removed(f"dropping the universal form of {tag}", error)

        self._in_worker(
            f"dropping the universal form of {tag}",
            save_dir_fd,
            lambda fd: fs.remove_ours(fd, PLACE, tag),
            done,
            failed,
        )

    def point_universal(self, action: PointUniversal, save_dir_fd: int) -> None:
        """Rewrite `latest_universal` at once: one small atomic file."""
        target = f"{PLACE}/{action.tag}" if action.tag else None
        fs.point_latest_universal(save_dir_fd, target)
        self._wake()

    def refused(self, what: str, error: CkptdError) -> None:
        """Something small failed in the deciding thread; the next turn tries again."""
        log.error("%s", error)
        self._state.note_failure(what, error)

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
        fd = os.dup(save_dir_fd)
        state = self._state

        def run() -> object:
            try:
                return work(fd)
            finally:
                os.close(fd)

        def succeeded(result: object) -> None:
            state.failures.pop(what, None)
            done(result)

        def refused(error: CkptdError) -> None:
            if not is_told:
                state.note_failure(what, error)
            failed(error)

        self._workers.submit(what, run, succeeded, refused)
