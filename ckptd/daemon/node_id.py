"""Make this node's id once, and another for a copy of its save_dir."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.owned_dirs import opened_ours
from ckptd.storage.journal.schema import move_aside
from ckptd.storage.local.state_dir import NODE_ID, NODE_PLACE, REPAIR_UPLOADS, is_of_another, read_node_id

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("ckptd")


def node_id_of(state_dir: Path, inode: int | None = None) -> str:
    """Return the random id of this node, made once and kept in the state directory.

    `inode`: of the save_dir in which the state lies. Where both were copied together, the copy gets an id and
    a journal of its own: under one id two places would be taken for one, and both let into one remote; and
    what the journal says of checkpoints and uploads is true of the original, which may go on with them.
    """
    with opened_ours(state_dir) as fd:
        known = read_node_id(fd)
        is_copied = inode is not None and is_of_another(fd, inode)
        if is_copied:
            aside = move_aside(state_dir / "journal.db")
            log.warning("%s is of another directory: set aside as %s", state_dir / "journal.db", aside.name)
            if files.stat_beneath(fd, REPAIR_UPLOADS) is not None:
                files.write_atomic(fd, REPAIR_UPLOADS, b"[]")
        if known is None or is_copied:
            known = secrets.token_hex(8)
            files.write_atomic(fd, NODE_ID, known.encode())
        # last: after a crash before this the state is a copy's still
        if inode is not None and (is_copied or files.stat_beneath(fd, NODE_PLACE) is None):
            files.write_atomic(fd, NODE_PLACE, str(inode).encode())
    return known
