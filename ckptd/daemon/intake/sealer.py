"""Turn a listing into sealed saves: quiet time, inspection, verdicts, flushing, order (docs/design.md §3).

A folder is judged each turn from what is on disk now; a complete one is flushed by a worker, read again, and
only then sealed: identities, fingerprints, (branch, step, save_seq).
"""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import time
from typing import TYPE_CHECKING

from ckptd.base.humanize import size_of
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, Verdict, judge
from ckptd.core.completeness.sealing import (
    best_checkpoint_of,
    memory_of,
    refreshed,
    same_files,
    sealed_extra,
    sealed_file,
    shards_of,
)
from ckptd.core.model.save import SealedSave
from ckptd.daemon.intake.clones import forget_lost_holds, settle_holds
from ckptd.daemon.intake.inspection import LateFiles, ShardInspector
from ckptd.daemon.intake.known_saves import KnownSaves
from ckptd.daemon.intake.ordering import Ordering, written_ns
from ckptd.daemon.intake.trainer_metrics import TrainerMetrics
from ckptd.daemon.state.state import JobState
from ckptd.observe.logs import line_fields
from ckptd.storage.local.scan import OpenWriters

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.config.schema import JobConfig
    from ckptd.core.completeness.grid import Spread
    from ckptd.core.model.layouts import Grid
    from ckptd.core.model.listing import FolderListing, SaveDirListing
    from ckptd.core.model.records import SaveRow
    from ckptd.core.model.save import SaveWindow
    from ckptd.daemon.resources.workers import JobWorkers

log = logging.getLogger("ckptd.intake")

IN_FLIGHT_SECONDS = 60.0
REST_SECONDS = 0.3
"""Between two looks that find a shard at rest, for it to be uploaded early."""


class Sealer:
    """Judges folders and seals saves of one job."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        workers: JobWorkers,
        known: KnownSaves,
        wake: Callable[[], None],
        spread: Callable[[str], Spread | None],
    ) -> None:
        self._config = config
        self._state = state
        self._known = known
        self._reading = ShardInspector(config, state, workers, wake)
        self._spread = spread
        """Function that tells what other nodes hold of a tag."""
        self._asked_at: dict[str, float] = {}  # durable ones that a remote was asked about
        self._compared: dict[str, tuple[FolderListing, SealedSave, bool]] = {}
        """Tag → what was compared last, and whether the folder still is that save."""
        self._grids: frozenset[tuple[int, int, int]] = frozenset()
        """(dp, mm_count, zero_stage) of what was sealed before this look."""
        self._accepted: frozenset[tuple[tuple[str, str], ...]] = frozenset()
        """Fingerprint sets that a person accepted, as of this look."""
        self.metrics = TrainerMetrics(config, state)
        self._writers = OpenWriters(str(config.save_dir))
        self.late = LateFiles(config, state, workers, self._writers, wake)
        self._ordering = Ordering(state, known, self._is_sealed)

    def judge_and_seal(self, listing: SaveDirListing, save_dir_fd: int, now_seconds: float) -> None:
        """Judge every folder of a fresh listing, inspect and flush what is due, seal what is durable."""
        state = self._state
        self._refuse_closed(listing)
        self._accepted = self._known.accepted
        self._ordering.note_changes(listing, now_seconds)
        for gone in state.folders.update(listing):
            self._compared.pop(gone, None)
            self._reading.forget(gone)
        grids = (row.save.grid for row in state.saves.rows.values())
        self._grids = frozenset((grid.dp, grid.mm_count, grid.zero_stage) for grid in grids)
        ready: list[tuple[FolderListing, Verdict]] = []
        for folder in listing.folders:
            verdict = self._judge(folder, now_seconds)
            state.folders.set_verdict(folder.tag, verdict)
            self._reading.inspect(folder, verdict.needs, now_seconds)
            if verdict.state is State.COMPLETE and not self._is_sealed(folder):
                if self._reading.flushed.get(folder.tag) == folder.digest:
                    ready.append((folder, verdict))
                else:
                    self._reading.flush(folder, save_dir_fd)
        self.metrics.read_late_values(save_dir_fd)
        self._seal(ready)
        settle_holds(state, save_dir_fd)
        forget_lost_holds(state, save_dir_fd)
        self.late.read_late_files(listing, save_dir_fd, now_seconds)
        state.folders.set_in_flight(
            folder.tag
            for folder in listing.folders
            if not self._is_sealed(folder)
            and state.folders.verdicts[folder.tag].state is not State.LEFTOVER
            and self._reading.flushed.get(folder.tag) != folder.digest
            and self._recently_changed(folder, now_seconds)
        )

    def _refuse_closed(self, listing: SaveDirListing) -> None:
        """A checkpoint of ours that may not be entered any more has not vanished: it is waited for.

        Raises:
            PermissionError: there is one.
        """
        present = {row.save.tag for row in self._state.saves.rows.values() if row.state == "present"}
        for tag in present.intersection(listing.closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), tag)

    def next_due_seconds(self, now_seconds: float) -> float:
        """Return how long until a folder may have become quiet."""
        settle = max(self._config.settle_seconds, self._config.declared.quiet_seconds)
        waits = [
            settle - (now_seconds - quiet.since_seconds)
            for tag, quiet in self._state.folders.quiet.items()
            if now_seconds - quiet.since_seconds < settle
        ]
        reads = self._reading.seconds_to_read(now_seconds)
        if not self._config.shared_fs and any(
            moving for _, moving in self._state.folders.written_shards().values()
        ):
            waits.append(REST_SECONDS)
        return max(0.05, min([*waits, *reads, self.metrics.seconds_to_look(now_seconds), 60.0]))

    def is_due(self, now_seconds: float) -> bool:
        """Tell whether a failed read or a late metric is due, however seldom an idle job is scanned
        otherwise.
        """
        waits = [*self._reading.seconds_to_read(now_seconds), self.metrics.seconds_to_look(now_seconds)]
        return any(wait <= 0 for wait in waits)

    # --- verdicts --------------------------------------------------------------------------------------

    def _judge(self, folder: FolderListing, now_seconds: float) -> Verdict:
        folders = self._state.folders
        before = folders.quiet.get(folder.tag)
        is_new_save = before is not None and self._reading.flushed.get(folder.tag) == before.digest
        quiet = folders.note_digest(folder, now_seconds, is_new_save=is_new_save)
        if self._is_sealed(folder):
            folders.forget_facts(folder.tag)
            row = self._state.saves.of_tag(folder.tag)
            assert row is not None
            return Verdict(
                state=State.COMPLETE,
                grid=row.save.grid,
                step=row.save.step,
                writer=row.save.writer,
                window=row.save.window,
            )
        facts = folders.facts.get(folder.tag)
        if facts is None:
            facts = folders.set_facts(folder.tag, self._reading.known_facts(folder))
        context = Context(
            settle_seconds=self._config.settle_seconds,
            quiet_seconds=now_seconds - quiet.since_seconds,
            is_in_flight=self._recently_changed(folder, now_seconds),
            save_spread_seconds=self._config.save_spread_seconds,
            widest_save_seconds=self._state.saves.widest_save_seconds,
            accepted=self._accepted,
            known_grids=self._grids,
            spread=self._spread(folder.tag),
            saw_end=folders.saw_end(folder),
        )
        verdict = judge(
            folder, facts, memory_of(self._state.saves.of_tag(folder.tag), folder, facts), context
        )
        if verdict.state is State.COMPLETE and self._is_written(folder, context):
            return Verdict(state=State.SAVING, reason="a file is open for writing")
        lost = self._reading.lost(folder)
        if lost is None or verdict.state not in (State.COMPLETE, State.INCOMPLETE, State.TORN_RESAVE):
            return verdict
        # whole but for what lies beside its shards, or nobody knows
        state = State.INCOMPLETE if verdict.state is State.COMPLETE else verdict.state
        return Verdict(state=state, reason=lost, is_unread=True)

    def _is_written(self, folder: FolderListing, context: Context) -> bool:
        """Tell whether somebody has a file open in a folder that is not quiet.

        One that was flushed was asked about before.
        """
        is_quiet = context.quiet_seconds >= context.settle_seconds
        if is_quiet or self._reading.flushed.get(folder.tag) == folder.digest:
            return False
        return self._writers.has(folder.tag, context.quiet_seconds)

    def has_writer(self, tag: str, rested_seconds: float) -> bool:
        """Tell whether a file of the folder is open for writing, or may be (`OpenWriters.has`)."""
        return self._writers.has(tag, rested_seconds)

    def _recently_changed(self, folder: FolderListing, now_seconds: float) -> bool:
        quiet = self._state.folders.quiet[folder.tag]
        limit = max(IN_FLIGHT_SECONDS, 3 * self._config.settle_seconds, folder.quiet_seconds)
        if now_seconds - quiet.since_seconds < limit:
            return True
        return self._writers.has(folder.tag, now_seconds - quiet.since_seconds)

    def _is_sealed(self, folder: FolderListing) -> bool:
        row = self._state.saves.of_tag(folder.tag)
        if row is None:
            return False
        known = self._compared.get(folder.tag)
        if known is None or known[0] is not folder or known[1] is not row.save:
            known = self._compared[folder.tag] = (folder, row.save, same_files(row.save, folder))
        return known[2]

    # --- sealing ---------------------------------------------------------------------------------------

    def _seal(self, ready: list[tuple[FolderListing, Verdict]]) -> None:
        """Seal durable saves in step order, once it is known whether a remote has them already (P8)."""
        if not self._known.is_run_settled(ready):
            return
        found_first = self._known.found_first()
        if found_first is None:
            return
        due = {folder.tag for folder, _ in ready}
        may_seal = {tag: self._known.may_seal(tag) for tag in due}
        waits_for = [t for t in found_first if not may_seal.get(t, not self._is_undecided(t))]
        now = {tag for tag in due if may_seal[tag]}
        self._asked_at = {t: self._asked_at.get(t, time.monotonic()) for t in due - now} if now else {}
        for folder, verdict in self._ordering.ranked(ready):
            if folder.tag in found_first and waits_for:
                continue
            if folder.tag not in now or self._waits_for_older(folder, now):
                continue
            row = self._state.saves.of_tag(folder.tag)
            same = refreshed(row.save, folder, self._state.folders.facts.get(folder.tag, {})) if row else None
            if row is not None and same is not None:
                self._state.replace_sealed(row.id, same)
                self._state.uploads.forget_damage(row.id)
                continue
            assert verdict.grid is not None and verdict.window is not None and verdict.step is not None
            if row is not None and row.save.is_part and self._grows(row, folder, verdict):
                continue
            self._seal_one(folder, verdict, verdict.grid, verdict.window, verdict.step, found_first)

    def _waits_for_older(self, folder: FolderListing, due: set[str]) -> bool:
        """One written before, or of a lower step, is about to be sealed: later it would be a rewind."""
        mine, step = written_ns(folder), self._state.folders.verdicts[folder.tag].step or 0
        for other in self._state.folders.listing.folders if self._state.folders.listing else ():
            verdict = self._state.folders.verdicts.get(other.tag)
            if verdict is None or verdict.state not in (State.UNKNOWN, State.COMPLETE) or other.tag in due:
                continue
            since = max(
                self._state.folders.quiet[other.tag].since_seconds, self._asked_at.get(other.tag, 0.0)
            )
            is_older = written_ns(other) < mine or verdict.step is None or verdict.step < step
            if time.monotonic() - since < IN_FLIGHT_SECONDS and is_older and not self._is_sealed(other):
                return True
        return False

    def _is_undecided(self, tag: str) -> bool:
        """Found at the first start and not judged to its end: `existing` needs to know the newest of all."""
        verdict = self._state.folders.verdicts.get(tag)
        if verdict is None or self._state.saves.of_tag(tag) is not None:
            return False
        return verdict.state in (State.UNKNOWN, State.COMPLETE)

    def _seal_one(
        self,
        folder: FolderListing,
        verdict: Verdict,
        grid: Grid,
        window: SaveWindow,
        step: int,
        found_first: frozenset[str],
    ) -> None:
        state = self._state
        facts = state.folders.facts[folder.tag]
        sealed = tuple(sealed_file(f, facts[f.path], folder, verdict.stale) for f in folder.own)
        known = [row for row in state.saves.rows.values() if row.save.tag == folder.tag]
        order = self._ordering.order_of(folder, step, sealed, is_new_tag=not known)
        extras = tuple(
            f
            for f in (state.folders.listing.extras if state.folders.listing else ())
            if self._is_extra(f.path)
        )
        save = SealedSave(
            tag=folder.tag,
            folder=folder.folder,
            files=sealed,
            extras=tuple(sealed_extra(f) for f in extras),
            grid=grid,
            branch=order.branch,
            step=order.step,
            save_seq=order.save_seq,
            window=window,
            writer=verdict.writer,
            optimizer_step=verdict.optimizer_step,
            roots=folder.roots,
            empty=folder.empty,
            is_part=bool(verdict.missing),
            best=self.metrics.best_of(folder.tag, state.folders.facts[folder.tag], step),
            best_checkpoint=best_checkpoint_of(state.folders.facts[folder.tag]),
            beside=self._ordering.beside(folder.tag),
            rivals=self._ordering.rivals(folder, order),
        )
        again = self._found_before(save)
        # a row that was made of a hold, after the journal was lost, does not say when the folder was written
        is_new_tag = all(row.state != "present" and shards_of(row.save) == shards_of(save) for row in known)
        was_found = folder.tag in found_first and is_new_tag
        fingerprints = tuple(sorted((f.path, f.fingerprint) for f in sealed))
        is_old = was_found and not self._known.came_back(folder.tag, fingerprints)
        is_first = is_old or again is not None
        adopted = not is_first or self._config.existing == "all" or (again is not None and again.adopted)
        before = state.saves.of_tag(folder.tag)
        seen_at = state.folders.quiet[folder.tag].first_seen_unix
        save_id = state.journal.add_save(save, found_first=is_first, adopted=adopted, seen_at=seen_at)
        state.reload(save_id, *([before.id] if before is not None else []))
        state.tidy(time.monotonic())
        state.deletions.note_completed()
        others = f"; of this node, {len(verdict.missing)} shards are others'" if save.is_part else ""
        rewound = f" after a rewind (branch {order.branch})" if order.branch > 1 else ""
        what = (folder.tag, order.step, rewound, size_of(save.total_bytes), others)
        log.info("%s is complete: step %d%s, %s%s", *what, extra=line_fields("complete", folder.tag))
        log.debug("%s: %s", folder.tag, grid.proof)

    def _grows(self, row: SaveRow, folder: FolderListing, verdict: Verdict) -> bool:
        """A part of which more shards came: the same save, whose manifest gets another revision (H27)."""
        now = {f.path: f.identity for f in folder.own}
        if any(now.get(f.path) != f.identity for f in row.save.files) or verdict.window is None:
            return False
        facts = self._state.folders.facts[folder.tag]
        sealed = tuple(sealed_file(f, facts[f.path], folder, verdict.stale) for f in folder.own)
        update = {
            "files": sealed,
            "empty": folder.empty,
            "window": verdict.window,
            "is_part": bool(verdict.missing),
        }
        self._state.grow(row.id, row.save.model_copy(update=update))
        log.info("%s grew to %d files", folder.tag, len(sealed))
        return True

    def _found_before(self, save: SealedSave) -> SaveRow | None:
        """The row of the same shards, found at the first start: a note beside them makes no save of ours."""
        same = shards_of(save)
        rows = (
            row for row in self._state.saves.rows.values() if row.found_first and row.save.tag == save.tag
        )
        return next((row for row in rows if shards_of(row.save) == same), None)

    def _is_extra(self, name: str) -> bool:
        patterns = self._config.extra
        return patterns is None or any(fnmatch.fnmatch(name, p) for p in patterns)
