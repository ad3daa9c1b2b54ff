"""Recover holds after a restart: from the journal, or from their own descriptions where it is lost (P8).

Beside each hold lies the description of its save as it was sealed. A hold that no journal knows, of a
checkpoint that the trainer has deleted or overwritten since, may be the last copy: it is uploaded from there
(docs/adr/0102). A hold that is not whole, or has no description, stays, and status says so.
"""

from __future__ import annotations

import contextlib
import logging
import time
from itertools import count
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ckptd.base import files
from ckptd.base import names as base_names
from ckptd.base.humanize import size_of
from ckptd.core.completeness.sealing import same_files
from ckptd.core.model.records import UploadState
from ckptd.core.model.save import SealedSave
from ckptd.core.policy.local import was_committed
from ckptd.daemon.uploads.requests import hold_name
from ckptd.errors import CkptdError, JournalFailed, from_os_error
from ckptd.storage.local import clones, fs
from ckptd.storage.local.scan import scan_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.core.model.records import SaveRow, SaveState
    from ckptd.daemon.state.state import JobState

log = logging.getLogger("ckptd.local")

_END = clones.about_name("")
_ASIDE = ".unknown"
"""Ending, before a number, of the name of a hold that belongs to no known save."""


def recover_holds(state: JobState, save_dir_fd: int) -> None:
    """Settle each hold found at the start: known, released, not yet journalled, or of a lost journal."""
    names = fs.names_in(save_dir_fd, fs.HOLD)
    known = {hold_name(row): row for row in state.saves.rows.values()}
    holds = []
    for name in names:
        if name.startswith(base_names.TEMPORARY_PREFIX):
            with _told(state, name):
                clones.remove_temporary(save_dir_fd, name)
        elif not name.endswith(_END):
            holds.append(name)
        elif name.removesuffix(_END) not in names:
            with _told(state, name):
                clones.release(save_dir_fd, name.removesuffix(_END))
    # after what describes no hold is gone: a hold may take that very name
    for name in holds:
        with _told(state, name, is_hold=True):
            _take_up(state, save_dir_fd, name, known.get(name.removesuffix(".partial")))
    state.load()


def settle_holds(state: JobState, save_dir_fd: int) -> None:
    """Settle holds whose checkpoint was still here, unsealed, when the daemon started; called after saves
    were sealed.

    Before anything new is held: a new hold may bear such a one's name. And what is left of those that failed.
    """
    for name in state.holds.take_unsettled():
        with _told(state, name, is_hold=True):
            _unknown(state, save_dir_fd, name)
    for save_id in [save_id for save_id in state.holds.failed if not state.saves.busy[save_id]]:
        _clear_failed(state, save_dir_fd, save_id)


def _clear_failed(state: JobState, save_dir_fd: int, save_id: int) -> None:
    """A hold that failed may have left its word, or all of itself, of which no journal knows.

    All of itself goes only once its save is committed: until then the next attempt takes its place, and it
    may be the last copy.
    """
    row = state.saves.rows.get(save_id)
    if row is None or row.held:
        state.holds.forget_failed(save_id)
        return
    name = hold_name(row)
    with _told(state, name):
        if name not in fs.names_in(save_dir_fd, fs.HOLD):
            clones.release(save_dir_fd, name)  # what was noted of it, at most
        elif _was_committed(state, row):
            _release(state, save_dir_fd, name, row, "committed")
        else:
            return
        fs.remove_ours(save_dir_fd, fs.HOLD, f"{name}.partial")
        state.holds.forget_failed(save_id)


def _release(state: JobState, save_dir_fd: int, name: str, row: SaveRow, why: str) -> None:
    """Like one that the planner lets go: with a line that says on what that rests."""
    rests_on = state.uploads.commits_of(row.id)
    state.audit.write("release-hold", tag=row.save.tag, form="hold", reason=why, **rests_on)
    clones.release(save_dir_fd, name)


@contextlib.contextmanager
def _told(state: JobState, name: str, *, is_hold: bool = False) -> Iterator[None]:
    """Report a disk error that concerns one hold and go on with the others; the hold is settled at a later
    turn.
    """
    what = f"settling {fs.HOLD}/{name}"
    try:
        yield
    except JournalFailed:
        raise
    except (CkptdError, OSError) as error:
        if what not in state.failures.all():
            log.warning("%s: %s", what, error)
        state.failures.note(what, error if isinstance(error, CkptdError) else from_os_error(error, what))
        if is_hold:
            state.holds.put_stray(name)
    else:
        state.failures.clear(what)


def forget_lost_holds(state: JobState, save_dir_fd: int) -> None:
    """A person had the hold of a damaged save removed (`gc --incomplete`): nothing of that save is left."""
    damaged = [
        row
        for row in state.saves.rows.values()
        if row.held and any(r.state is UploadState.REFUSED for r in state.uploads.of(row.id).values())
    ]
    names = fs.names_in(save_dir_fd, fs.HOLD) if damaged else ()
    for row in damaged:
        if hold_name(row) not in names and not state.saves.busy[row.id]:
            state.set_held(row.id, held=False)


def _take_up(state: JobState, save_dir_fd: int, name: str, row: SaveRow | None) -> None:
    if row is None:
        _unknown(state, save_dir_fd, name)
    elif name.endswith(".partial"):
        fs.remove_ours(save_dir_fd, fs.HOLD, name)
    elif not row.held:
        _not_noted(state, save_dir_fd, name, row)


def _not_noted(state: JobState, save_dir_fd: int, name: str, row: SaveRow) -> None:
    """A hold that bears the name of a save's: numbers begin anew with each journal, so what it says itself
    counts. Sent as another save's, it would be committed as that one (P4)."""
    save = _described(save_dir_fd, name)
    if isinstance(save, SealedSave) and not _is_same(save, row.save):
        _unknown(state, save_dir_fd, name)
    elif _was_committed(state, row):
        _release(state, save_dir_fd, name, row, "committed; released before, and back with a power cut")
    elif isinstance(save, SealedSave):
        # made, and killed before that was noted; or let go for want of room, and back with a power cut
        state.journal.set_held(row.id, held=True)
    else:
        _keep_aside(state, save_dir_fd, name, save)


def _was_committed(state: JobState, row: SaveRow) -> bool:
    """Tell whether every required remote has committed a save, as the planner judges it (P1: one remote alone
    is not enough).
    """
    return was_committed(state.uploads.of(row.id), state.required)


def _unknown(state: JobState, save_dir_fd: int, name: str) -> None:
    """A hold of a journal that is lost: it becomes a save of this one, or status says why it cannot."""
    save = _described(save_dir_fd, name)
    if isinstance(save, str):
        _keep_aside(state, save_dir_fd, name, save)
        return
    twins = [row for row in state.saves.rows.values() if _is_same(row.save, save)]
    needless = (row for row in twins if row.held or row.state == "pruned" or _was_committed(state, row))
    if (twin := next(needless, None)) is not None:
        why = "held twice" if twin.held else "pruned" if twin.state == "pruned" else "committed"
        _release(state, save_dir_fd, name, twin, f"{why}; of a journal that is lost")
        return
    folder = scan_folder(save_dir_fd, save.tag)
    if not twins and folder is not None and same_files(save, folder):
        state.holds.put_stray(name)  # until it is sealed anew
        return
    save_id = twins[-1].id if twins else _add(state, save)
    new = hold_name(state.saves.rows[save_id])
    if name != new and not clones.give_name(save_dir_fd, name, new):
        state.holds.put_stray(name)  # another one of a lost journal has that name, until it is settled
        return
    state.journal.set_held(save_id, held=True)
    state.load()
    log.info("%s is in nothing but a hold of a journal that is lost: it is uploaded from there", save.tag)


def _add(state: JobState, save: SealedSave) -> int:
    """A row for what no journal knows and no folder has; older than what its tag was written over with."""
    update: dict[str, object] = {"rivals": (), "beside": ()}
    here = state.saves.of_tag(save.tag)
    if here is not None and save.order >= here.save.order:
        update["branch"] = here.save.branch - 1
    gone: SaveState = "vanished" if here is None else "superseded"
    alone = save.model_copy(update=update)
    save_id = state.journal.add_save(alone, found_first=False, adopted=True, seen_at=time.time(), state=gone)
    state.load()
    return save_id


def _keep_aside(state: JobState, save_dir_fd: int, name: str, why: str) -> None:
    """Keep a hold of unknown worth, under a name that no hold of this journal may get."""
    held = scan_folder(save_dir_fd, f"{fs.HOLD}/{name}")
    if held is None or not held.files:
        clones.release(save_dir_fd, name)  # nothing of a checkpoint
        return
    if name.rpartition(".")[2].isdecimal():
        names = (f"{name}{_ASIDE}{number}" for number in count(1))
        name = next(new for new in names if clones.give_name(save_dir_fd, name, new))
    text = f"{size_of(held.total_bytes)} in {fs.HOLD}/{name} are not uploaded: {why}"
    state.holds.put_stray(name, text)
    log.warning("%s", text)


def _is_same(one: SealedSave, other: SealedSave) -> bool:
    return one.tag == other.tag and one.fingerprints == other.fingerprints


def _described(save_dir_fd: int, name: str) -> SealedSave | str:
    """Return the sealed save described beside a hold if all its files are there in full size, else the reason
    why the hold is useless.
    """
    try:
        with fs.closing(files.open_dir_beneath(save_dir_fd, fs.HOLD)) as fd:
            data = files.read_beneath(fd, clones.about_name(name), limit_bytes=clones.ABOUT_LIMIT_BYTES)
        save = SealedSave.model_validate_json(data)
    except (CkptdError, OSError, ValidationError):
        return "nothing beside it says which save it is of"
    if not _is_name_of(save, name):
        return f"what lies beside it is of {save.tag}"
    held = scan_folder(save_dir_fd, f"{fs.HOLD}/{name}")
    sizes = {f.path: f.identity.size_bytes for f in held.files} if held is not None else {}
    lacking = [f.path for f in save.files if sizes.get(f.path) != f.identity.size_bytes]
    if lacking:
        return f"{lacking[0]} is missing or cut short ({len(lacking)} of {len(save.files)} files)"
    return save if len(sizes) == len(save.files) else "it has files that its save has not"


def _is_name_of(save: SealedSave, name: str) -> bool:
    """The name is one that a hold of this save may have: its tag and a number."""
    tag, _, number = name.partition(_ASIDE)[0].rpartition(".")
    return tag == save.tag and number.isdecimal()
