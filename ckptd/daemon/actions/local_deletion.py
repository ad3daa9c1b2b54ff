"""Delete committed checkpoints from this node, and finish what an error left of that in the trash (P1, P7).

A deletion is journalled before the folder is renamed aside, and audited before it is called done. Once the
folder lies in the trash its intent stays open until every sealed file is gone: a restart would otherwise
move the rest of it back, as a checkpoint that lacks files. What is whole there still is moved back: its
permit has ended, and who pins it or loses its COMMIT meanwhile is asked by the next one (adr/0153).
"""

from __future__ import annotations

import logging
import time
from enum import Enum
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.conversion.engine.staging import partial_name
from ckptd.core.model.records import UNIVERSAL, ZERO, DeletionIntent, DerivedState
from ckptd.core.policy.local import was_committed
from ckptd.core.policy.permit import OptOutPermit
from ckptd.errors import SourceChanged, StorageError
from ckptd.observe.logs import line_fields
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.core.model.listing import SaveDirListing
    from ckptd.core.model.other_layouts import DeclaredSave
    from ckptd.core.model.records import DeletionRow
    from ckptd.core.policy.actions import DeleteLocal
    from ckptd.core.policy.permit import DeletePermit
    from ckptd.daemon.state.state import JobState
    from ckptd.errors import CkptdError
    from ckptd.observe.audit import Audit

    InWorker = Callable[
        [str, int, Callable[[int], object], Callable[[object], None], Callable[[CkptdError], None]], None
    ]

log = logging.getLogger("ckptd.local")

TIDY_SECONDS = 20.0


class _End(Enum):
    """Name the ways in which an interrupted deletion is settled."""

    GONE = "gone"
    BACK = "back"
    WAITS = "waits"


class LocalDeleter:
    """The deletions of one job on this node; every method is called in the deciding thread."""

    def __init__(
        self,
        state: JobState,
        audit: Audit,
        in_worker: InWorker,
        wake: Callable[[], None],
        *,
        trainer: str,
        declared: DeclaredSave,
        is_pinned: Callable[[str], bool],
    ) -> None:
        self._state = state
        self._trainer = trainer
        self._declared = declared
        self._audit = audit
        self._in_worker = in_worker
        self._wake = wake
        self._deleting: set[int] = set()
        self._begun_at: dict[int, float] = {}
        """Deletion that an error cut short → when it was begun, for the hourly limit."""
        self._is_untidy = False
        self._tidy_at_seconds = 0.0
        self.is_pinned = is_pinned
        """Asked in a worker: as people have it at that moment."""

    def delete(self, action: DeleteLocal, save_dir_fd: int) -> None:
        """Remove a checkpoint under its permit."""
        state, permit = self._state, action.permit
        if action.save_id in self._deleting:
            return
        self._deleting.add(action.save_id)
        name, leftovers = fs.trash_name(permit.tag), self._leftovers(permit.tag)
        deletion_id = state.journal.intend_deletion(action.save_id, name, _intent(permit))
        begun_at = state.deletions.begin_local(action.save_id)
        planned = state.folders.listing

        def work(fd: int) -> bool:
            # a worker may have been long in coming (conversions, flushes of every job)
            if self.is_pinned(permit.tag):
                return False
            if planned is not None:
                _check_no_save_began(fd, planned, permit.tag, self._trainer, self._declared)
            self._audit.write(
                "prune-unuploaded" if isinstance(permit, OptOutPermit) else "prune",
                tag=permit.tag,
                generation=permit.generation,
                form="zero",
                reason=permit.reason,
                commits=[(c.key, c.sha256) for c in permit.commits],
                files=[(f.path, f.identity.size_bytes) for f in permit.files],
            )
            self._remove_leftovers(fd, permit, leftovers)
            fs.delete_checkpoint(fd, permit, name)
            return True

        def done(was_removed: object) -> None:
            if not was_removed:
                state.deletions.undo_local(begun_at)
            end = self._deleted if was_removed else self._kept
            end(deletion_id, action.save_id, permit.tag, permit.reason)

        def failed(error: CkptdError) -> None:
            log.warning("deleting %s: %s", permit.tag, error, extra=line_fields("delete-local", permit.tag))
            if name in fs.trash_names(save_dir_fd):
                state.deletions.set_interrupted(deletion_id, is_interrupted=True)
                self._begun_at[deletion_id] = begun_at
                self.later()
            elif not isinstance(error, SourceChanged) and _is_gone(save_dir_fd, permit.tag):
                self._deleted(deletion_id, action.save_id, permit.tag, permit.reason)
                return
            else:
                self._deleting.discard(action.save_id)
                state.journal.end_deletion(deletion_id, done=False)
                state.deletions.undo_local(begun_at)
            state.deletions.note_blocked(action.save_id, error)

        self._in_worker(f"deleting {permit.tag}", save_dir_fd, work, done, failed)

    def _leftovers(self, tag: str) -> list[tuple[str, str]]:
        """(folder, name) of conversions that nobody goes on with: half made, or made and never noted."""
        rows = [row for row in self._state.saves.rows.values() if row.save.tag == tag]
        is_noted = any(row.derived.state is DerivedState.READY for row in rows)
        made = [] if is_noted else [(f"{fs.DERIVED}/{UNIVERSAL}", tag)]
        return [(fs.STAGING, partial_name(tag)), *made]

    def _remove_leftovers(self, fd: int, permit: DeletePermit, leftovers: Sequence[tuple[str, str]]) -> None:
        for folder, name in leftovers:
            if name == permit.tag and name in fs.names_in(fd, folder):
                reason = "made and never noted; its save is deleted"
                generation = permit.generation
                self._audit.write(
                    "drop-derived", tag=name, generation=generation, form=UNIVERSAL, reason=reason
                )
            fs.remove_ours(fd, folder, name)

    def _kept(self, deletion_id: int, save_id: int, tag: str, reason: str) -> None:
        """End a deletion that is not carried out: the checkpoint was pinned meanwhile."""
        log.info(
            "%s stays (%s): it was pinned meanwhile", tag, reason, extra=line_fields("delete-local", tag)
        )
        self._deleting.discard(save_id)
        self._state.journal.end_deletion(deletion_id, done=False)
        self._wake()

    def _deleted(self, deletion_id: int, save_id: int, tag: str, reason: str) -> None:
        state = self._state
        self._deleting.discard(save_id)
        state.journal.end_deletion(deletion_id, done=True)
        state.journal.end_save(save_id, "pruned")
        state.reload(save_id)
        state.deletions.forget_blocked(save_id)
        log.info("%s deleted here: %s", tag, reason, extra=line_fields("delete-local", tag))
        self._wake()

    # --- what an error left -----------------------------------------------------------------------------

    def later(self) -> None:
        """Something of ours lies in the trash: look after it in a while."""
        self._is_untidy = True
        self._tidy_at_seconds = time.monotonic() + TIDY_SECONDS

    @property
    def seconds_to_tidy(self) -> float | None:
        """Return the seconds until the trash is checked again; None: nothing is left there."""
        is_due = self._is_untidy or self._state.deletions.interrupted
        return max(0.0, self._tidy_at_seconds - time.monotonic()) if is_due else None

    def tidy(self, save_dir_fd: int) -> None:
        """Go on with deletions that an error cut short, and empty the trash of what is ours."""
        if self.seconds_to_tidy != 0:
            return
        self._is_untidy = False
        for row in self._state.journal.open_deletions():
            if row.id in self._state.deletions.interrupted:
                self._state.deletions.set_interrupted(row.id, is_interrupted=False)
                self._finish(row, save_dir_fd)
        self._in_worker(
            "emptying the trash",
            save_dir_fd,
            fs.empty_our_trash,
            lambda _: None,
            lambda error: self._untidy("emptying the trash", error),
        )

    def _finish(self, row: DeletionRow, save_dir_fd: int) -> None:
        """Settle an interrupted deletion: delete a folder that lost a file, move a whole one back.

        A whole folder waits in the trash while another save has its name.
        """
        intent, may_go = row.intent, self._is_needless(row.save_id)
        what = f"deleting {intent.tag}"
        self._deleting.add(row.save_id)

        def work(fd: int) -> _End:
            if moved_back(fd, row.trash, intent, self._audit):
                return _End.BACK
            is_whole = fs.is_whole_in_trash(fd, row.trash, intent.files)
            if is_whole and (not may_go or self.is_pinned(intent.tag)):
                return _End.WAITS
            finish(fd, row)
            return _End.GONE

        def done(end: object) -> None:
            if end is _End.WAITS:
                self._waits(row)
                return
            self._state.failures.clear(what)
            begun_at = self._begun_at.pop(row.id, 0.0)
            if end is _End.BACK:
                self._state.deletions.undo_local(begun_at)
                self._taken_back(row)
            else:
                self._deleted(row.id, row.save_id, intent.tag, intent.reason)

        def failed(error: CkptdError) -> None:
            self._state.deletions.set_interrupted(row.id, is_interrupted=True)
            self._untidy(what, error)

        self._in_worker(what, save_dir_fd, work, done, failed)

    def _is_needless(self, save_id: int) -> bool:
        """Every required remote was heard since the start, and has it, or had it and let it go."""
        state = self._state
        uploads = state.uploads.of(save_id)
        return state.deletions.observed.issuperset(state.required) and was_committed(uploads, state.required)

    def _taken_back(self, row: DeletionRow) -> None:
        """Planned again, for a permit of its own."""
        self._deleting.discard(row.save_id)
        self._state.journal.end_deletion(row.id, done=False)
        self._wake()

    def _waits(self, row: DeletionRow) -> None:
        """Keep a whole folder in the trash whose name another save has by now and that may still be
        needed.
        """
        self._state.deletions.set_interrupted(row.id, is_interrupted=True)
        self.later()
        if self._state.deletions.observed.issuperset(self._state.required):
            tag, place = row.intent.tag, f"{fs.TRASH}/{row.trash}"
            text = f"an older {tag} lies in {place}: its removal was cut short, and its name is taken"
            hint = "it is deleted once it is committed everywhere and not pinned; else move it away by hand"
            self._state.failures.note(f"deleting {tag}", StorageError(text, hint=hint))

    def _untidy(self, what: str, error: CkptdError) -> None:
        log.warning("%s: %s", what, error)
        self.later()


def finish(save_dir_fd: int, row: DeletionRow) -> None:
    """Go on with a removal that was begun; what is gone, by another worker or a person, is finished.

    Raises:
        StorageError: some of it stays, and so does its intent.
    """
    with fs.closing(fs.ensure_ours(save_dir_fd, fs.TRASH)) as trash_fd:
        try:
            fs.finish_deletion(trash_fd, row.trash, row.intent.files)
        except FileNotFoundError:
            if files.stat_beneath(trash_fd, row.trash) is not None:
                raise
            log.info("%s is gone from the trash", row.trash)


def moved_back(save_dir_fd: int, name: str, intent: DeletionIntent, audit: Audit) -> bool:
    """Put back what was renamed aside and lost nothing yet; False: it did, or its name is taken."""
    if not fs.put_back(save_dir_fd, name, intent.tag, intent.files):
        return False
    reason = "moved back: its removal was cut short before a file of it went"
    audit.write("trash", tag=intent.tag, generation=intent.generation, form=ZERO, reason=reason)
    log.info("%s %s", intent.tag, reason, extra=line_fields("delete-local", intent.tag))
    return True


def _intent(permit: DeletePermit) -> DeletionIntent:
    return DeletionIntent(
        tag=permit.tag,
        generation=permit.generation,
        folder=permit.folder,
        files=permit.files,
        commits=tuple((c.remote, c.key, c.sha256) for c in permit.commits),
        reason=permit.reason,
    )


def _check_no_save_began(
    save_dir_fd: int,
    planned: SaveDirListing,
    tag: str,
    trainer: str,
    declared: DeclaredSave,
) -> None:
    """Look again at what stays instead: nothing goes while a save is in flight, be it of the newest itself.

    Raises:
        SourceChanged: shards were written, or a run was resumed, since the removal was planned; nothing was
            removed.
    """
    before = {folder.tag: folder.shards for folder in planned.folders}
    now = scan(save_dir_fd, trainer, planned, declared)
    if now.resumed != planned.resumed:
        msg = f"`ckptd resume` gave the trainer a checkpoint since {tag} was to be removed"
        raise SourceChanged(msg, hint="the next turn looks again")
    for folder in now.folders:
        if folder.tag != tag and folder.shards != before.get(folder.tag):
            msg = f"{folder.tag} is being saved since that was planned"
            raise SourceChanged(msg, hint="it is deleted once that save is complete")


def _is_gone(save_dir_fd: int, tag: str) -> bool:
    """All of it was removed; what failed was the last flush."""
    return files.stat_beneath(save_dir_fd, tag) is None
