"""After a restart, finish or undo what a crash interrupted on this node (P7).

Runs once, in the deciding thread, before the first plan; everything it does is idempotent.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.core.model.records import UNIVERSAL, WEIGHTS, ZERO, DerivedState, UploadState
from ckptd.daemon.actions.convert import found_universal
from ckptd.daemon.actions.local_deletion import finish, moved_back
from ckptd.daemon.intake.clones import recover_holds
from ckptd.errors import CkptdError, StorageError
from ckptd.observe.logs import line_fields
from ckptd.storage.local import fs

if TYPE_CHECKING:
    from ckptd.core.model.records import DerivedRecord, SaveRow
    from ckptd.daemon.state.state import JobState
    from ckptd.observe.audit import Audit

log = logging.getLogger("ckptd")

PARTIAL_END = ".ckptd-partial"
"""Ending of the name of a conversion that is not published yet."""
MIRROR = "mirror."
"""Begin of the name of what planning reads of a remote's objects (`ckptd.conversion.remote.derive`)."""


def finish_after_crash(
    state: JobState, save_dir_fd: int, audit: Audit, *, reopens_refused: bool = False
) -> None:
    """Finish journalled deletions after a restart, move back what was renamed aside without one, tidy ours.

    A deletion whose intent is journalled rested on confirmed COMMITs, once: where nothing is gone yet it is
    taken back and needs a fresh permit (adr/0153). What has lost a file is finished, as far as the sealed
    files lie there, and never moved back (docs/design.md §5 *Permit*). What else lies below `_ckptd` in a
    directory that is shared may be another host's work under way (adr/0110). `reopens_refused`: forms that
    were refused are tried again.
    """
    names = set(fs.trash_names(save_dir_fd))
    for deletion in state.journal.open_deletions():
        if deletion.trash in names:
            names.discard(deletion.trash)
            if moved_back(save_dir_fd, deletion.trash, deletion.intent, audit):
                state.journal.end_deletion(deletion.id, done=False)
                continue
            if fs.is_whole_in_trash(save_dir_fd, deletion.trash, deletion.intent.files):
                state.deletions.set_interrupted(deletion.id, is_interrupted=True)
                continue
            tag = deletion.intent.tag
            try:
                finish(save_dir_fd, deletion)
            except StorageError as error:
                log.warning("deleting %s: %s", tag, error, extra=line_fields("delete-local", tag))
                state.deletions.set_interrupted(deletion.id, is_interrupted=True)
                state.failures.note(f"deleting {tag}", error)
                continue
            state.journal.end_deletion(deletion.id, done=True)
            state.journal.end_save(deletion.save_id, "pruned")
            log.info("finished deleting %s", tag, extra=line_fields("delete-local", tag))
        else:
            row = state.saves.rows.get(deletion.save_id)
            # one that was saved again since, in part perhaps, is judged by what was sealed before (P4)
            gone = row is not None and files.stat_beneath(save_dir_fd, row.save.tag) is None
            state.journal.end_deletion(deletion.id, done=gone)
            if gone:
                state.journal.end_save(deletion.save_id, "pruned")
    _take_up_again(state, save_dir_fd)
    if not state.is_shared:
        _tidy(state, save_dir_fd, audit, names)
        recover_holds(state, save_dir_fd)
    state.load()
    if reopens_refused:
        _reopen_refused_forms(state)
    state.deletions.restore_rate_limit()


def _tidy(state: JobState, save_dir_fd: int, audit: Audit, names: set[str]) -> None:
    fs.empty_our_trash(save_dir_fd)
    for name in names:
        if not fs.is_ours_in_trash(name):
            tag = name.rsplit(".", 1)[0]
            if fs.return_from_trash(save_dir_fd, name, tag):
                audit.write(
                    "trash", tag=tag, generation=0, form="zero", reason="moved back: no permit on record"
                )
                log.warning("%s was in the trash without a permit on record; moved back", tag)
    _sweep_partials(state, save_dir_fd, audit)


def _take_up_again(state: JobState, save_dir_fd: int) -> None:
    """Conversions and uploads that the crash interrupted are open again; backoffs are over."""
    for row in list(state.saves.rows.values()):
        for form, derived in {UNIVERSAL: row.derived, **row.weights}.items():
            is_staged = form != UNIVERSAL and derived.state is DerivedState.READY
            if is_staged or derived.state is DerivedState.CONVERTING:
                made = None if is_staged or state.is_shared else _published(row, save_dir_fd)
                none = derived.model_copy(update={"state": DerivedState.NONE})
                state.saves.put_derived(row.id, made or none, form)
            elif derived.retry_at_seconds:
                state.saves.put_derived(row.id, derived.model_copy(update={"retry_at_seconds": 0.0}), form)
    for save_id, records in list(state.uploads.records.items()):
        for record in list(records.values()):
            if record.state is UploadState.UPLOADING:
                state.uploads.update(save_id, record, state=UploadState.NEW)


def _reopen_refused_forms(state: JobState) -> None:
    """Try refused forms again: masters that are not the weights may be why, which the job file allows now."""
    for row in state.saves.rows.values():
        for form, derived in {UNIVERSAL: row.derived, **row.weights}.items():
            if derived.state is DerivedState.REFUSED:
                none = derived.model_copy(update={"state": DerivedState.NONE, "reason": None, "hint": ""})
                state.saves.put_derived(row.id, none, form)
        for record in list(state.uploads.of(row.id).values()):
            if record.form != ZERO and record.state is UploadState.REFUSED:
                state.uploads.update(row.id, record, state=UploadState.NEW, reason=None)


def _published(row: SaveRow, save_dir_fd: int) -> DerivedRecord | None:
    """A form that was published when the crash came, and not noted."""
    try:
        return found_universal(save_dir_fd, row)
    except (CkptdError, OSError) as error:
        log.warning("the universal form of %s is looked for again: %s", row.save.tag, error)
        return None


def _sweep_partials(state: JobState, save_dir_fd: int, audit: Audit) -> None:
    """Half conversions that nothing will continue: of saves that are gone, or whose form is there."""
    over = (DerivedState.READY, DerivedState.REFUSED)
    present = {
        row.save.tag
        for row in state.saves.rows.values()
        if row.state == "present" and row.derived.state not in over
    }
    for place in (f"{fs.DERIVED}/{UNIVERSAL}", fs.STAGING):
        for name in fs.names_in(save_dir_fd, place):
            is_partial = name.startswith(".") and name.endswith(PARTIAL_END)
            is_mirror = place == fs.STAGING and name.startswith(MIRROR)
            if is_mirror or (is_partial and name[1 : -len(PARTIAL_END)] not in present):
                fs.remove_idle(save_dir_fd, place, name)
    for form in WEIGHTS:  # as earlier releases made them to upload them from here
        for name in fs.names_in(save_dir_fd, f"{fs.DERIVED}/{form}"):
            why = "forms for remotes alone are not kept here"
            audit.write("drop-derived", tag=name, generation=0, form=form, reason=why)
            fs.remove_ours(save_dir_fd, f"{fs.DERIVED}/{form}", name)
