"""Holds after a restart: what the journal knows of them, and what they say themselves when it is lost (P8).

Beside each hold lies the save that it is of, as it was sealed. A hold that no journal knows, of a checkpoint
that the trainer has removed since, may be the last copy: it is shipped from there (docs/adr/0102).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ckptd import files
from ckptd.core.save import SealedSave
from ckptd.core.sealing import same_files
from ckptd.core.view import ShipState
from ckptd.daemon.orders import hold_name
from ckptd.errors import CkptdError
from ckptd.local import fs, hold
from ckptd.local.scan import scan_folder

if TYPE_CHECKING:
    from ckptd.core.rows import SaveRow
    from ckptd.daemon.state import JobState

log = logging.getLogger("ckptd.local")

_ABOUT_LIMIT_BYTES = 64 << 20
_END = hold.about_name("")


def take_up_holds(state: JobState, save_dir_fd: int) -> None:
    """Settle each hold that is there: known, let go, made and not noted, or of a journal that is lost."""
    names = fs.names_in(save_dir_fd, fs.HOLD)
    known = {hold_name(row): row for row in state.rows.values()}
    for name in names:
        if name.startswith(files.TEMPORARY_PREFIX):
            hold.remove_temporary(save_dir_fd, name)
        elif name.endswith(_END):
            if name.removesuffix(_END) not in names:
                hold.release(save_dir_fd, name.removesuffix(_END))
        else:
            _take_up(state, save_dir_fd, name, known.get(name.removesuffix(".partial")))
    state.load()


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
    if save is not None and not _is_same(save, row.save):
        _unknown(state, save_dir_fd, name)
    elif _was_committed(state, row):
        # let go, and back with a power cut
        hold.release(save_dir_fd, name)
    elif save is not None:
        # made, and killed before that was noted; or let go for want of room, and back with a power cut
        state.journal.set_held(row.id, held=True)


def _was_committed(state: JobState, row: SaveRow) -> bool:
    done = (ShipState.COMMITTED, ShipState.RETIRED)
    return any(record.state in done for record in state.ships.get(row.id, {}).values())


def _unknown(state: JobState, save_dir_fd: int, name: str) -> None:
    """A hold of a journal that is lost; without a word about what it is of, it stays as it is."""
    save = _described(save_dir_fd, name)
    if save is None:
        return
    twins = [row for row in state.rows.values() if _is_same(row.save, save)]
    if any(row.held or row.state == "pruned" or _was_committed(state, row) for row in twins):
        hold.release(save_dir_fd, name)
        return
    folder = scan_folder(save_dir_fd, save.tag)
    if (folder is not None and same_files(save, folder)) or state.row_of_tag(save.tag) is not None:
        return  # it is sealed, and held, anew
    if twins:
        save_id = twins[-1].id
    else:
        alone = save.model_copy(update={"rivals": (), "beside": ()})
        save_id = state.journal.add_save(alone, found_first=False, adopted=True, seen_at=time.time())
        state.journal.end_save(save_id, "vanished")
        state.load()
    new = hold_name(state.rows[save_id])
    if name == new or hold.give_name(save_dir_fd, name, new):
        state.journal.set_held(save_id, held=True)
        state.load()
        log.info("%s is in nothing but a hold of a journal that is lost: it is shipped from there", save.tag)


def _is_same(one: SealedSave, other: SealedSave) -> bool:
    return one.tag == other.tag and one.fingerprints == other.fingerprints


def _described(save_dir_fd: int, name: str) -> SealedSave | None:
    """What lies beside a hold, if that has all its files, of their sizes."""
    try:
        with fs.closing(files.open_dir_beneath(save_dir_fd, fs.HOLD)) as fd:
            data = files.read_beneath(fd, hold.about_name(name), limit_bytes=_ABOUT_LIMIT_BYTES)
        save = SealedSave.model_validate_json(data)
    except (CkptdError, OSError, ValidationError):
        return None
    held = scan_folder(save_dir_fd, f"{fs.HOLD}/{name}")
    sizes = {f.path: f.identity.size_bytes for f in held.files} if held is not None else {}
    is_whole = sizes == {f.path: f.identity.size_bytes for f in save.files}
    return save if is_whole and _is_name_of(save, name) else None


def _is_name_of(save: SealedSave, name: str) -> bool:
    """The name is one that a hold of this save may have: its tag and a number."""
    tag, _, number = name.rpartition(".")
    return tag == save.tag and number.isdecimal()
