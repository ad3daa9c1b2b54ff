"""Tell another disk in the place of save_dir's from the same one under another device number."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.errors import CkptdError
from ckptd.storage.local import fs

if TYPE_CHECKING:
    from ckptd.core.model.save import SealedSave
    from ckptd.daemon.state.problems import Problems
    from ckptd.storage.journal.journal import Journal

log = logging.getLogger("ckptd")


def check_device(journal: Journal, save_dir_fd: int, problems: Problems, save_dir: str) -> None:
    """Report another disk than before: perhaps the NVMe is not mounted; nothing is deleted (H30).

    A boot may give a disk another number. It is the one that the journal knows if a save lies there whose
    files have the inodes and the times of change that were noted, as no copy of them has; the journal's
    identities get the new number then, or every save would be taken for another and uploaded again.
    """
    device = os.fstat(save_dir_fd).st_dev
    known = journal.meta("device")
    if known is None:
        journal.set_meta("device", str(device))
    elif known != str(device) and _is_known_disk(journal, save_dir_fd, device):
        journal.renumber_device(int(known), device)
        log.info("the disk of %s has another device number than before, and the same saves", save_dir)
    elif known != str(device):
        problems.put(
            "device-changed",
            save_dir,
            f"{save_dir} lies on another file system than before; nothing is deleted",
            "is the NVMe mounted? if this is meant, delete the journal in the state directory",
        )
        return
    problems.clear("device-changed", save_dir)


def _is_known_disk(journal: Journal, save_dir_fd: int, device: int) -> bool:
    # also what was missed while another disk lay in this place: it is here again
    return any(_lies_here(row.save, save_dir_fd, device) for row in journal.saves())


def _lies_here(save: SealedSave, save_dir_fd: int, device: int) -> bool:
    """Whether a save lies here untouched but for the number of its disk."""
    sealed = [f.model_copy(update={"identity": replace(f.identity, dev=device)}) for f in save.files]
    try:
        with fs.closing(fs.open_tag(save_dir_fd, save.tag)) as folder:
            fs.check_identities(folder, sealed, only_listed=False)
    except (CkptdError, OSError):
        return False
    return bool(sealed)
