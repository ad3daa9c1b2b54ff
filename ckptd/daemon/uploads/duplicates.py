"""Detect two remotes of a job that are one directory or one bucket: one copy, not two (P1, P2;
docs/adr/0166).

A copy of a remote keeps its identity, and so does a second mount or URL of it. The device and inode of the
root tell the two apart, or the creation time of a bucket's identity, as the remote's own child sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.errors import CkptdError, RemoteNotOurs, RemoteUnreachable
from ckptd.storage.remote.attach import NEXT_STEP, are_one, one_place
from ckptd.storage.stores.open import directory_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.journal.journal import Journal
    from ckptd.storage.remote.messages import Attached

AWAY_NEXT_STEP = "bring that one back; if it is gone for good, remove it from the job file"


def settle(sessions: Mapping[str, RemoteSession], name: str, answer: Attached, journal: Journal) -> bool:
    """Reject the later one of two remotes that are one place; False: it is the one that answered just now.

    Nothing is retired from a remote that is not attached, and what it holds proves nothing.
    """
    names = list(sessions)
    for other in names:
        if other == name:
            continue
        before = names.index(other) < names.index(name)
        error = _verdict(sessions, name, other, answer, journal, is_earlier=before)
        if error is not None:
            _reject(sessions, name if before else other, error, journal)
        if error is not None and before:
            return False
    sessions[name].set_duplicate(is_duplicate=False)
    if answer.place is not None:
        journal.set_meta(f"place:{name}", answer.place)
    return True


def _verdict(
    sessions: Mapping[str, RemoteSession],
    name: str,
    other: str,
    answer: Attached,
    journal: Journal,
    *,
    is_earlier: bool,
) -> CkptdError | None:
    """Return why the later one of `name`, which answered, and `other` is not attached; None: they are two."""
    mine, theirs = sessions[name].settings.url, sessions[other].settings.url
    there = sessions[other].attached
    if there is not None:
        if not are_one(answer, there):
            return None
        words = one_place(mine, other, theirs) if is_earlier else one_place(theirs, name, mine)
        return RemoteNotOurs(words, hint=NEXT_STEP)
    is_alike = journal.meta(f"remote_id:{other}") == answer.identity.remote_id
    if not is_earlier or not is_alike or answer.place is None:
        return None
    if directory_path(mine) is None or directory_path(theirs) is None:
        return None
    # devices are numbered anew by each boot, inodes are not
    known = journal.meta(f"place:{other}")
    if known is not None and known.partition(":")[2] != answer.place.partition(":")[2]:
        return None
    words = (
        f"{mine} shows the identity of remote {other} ({theirs}), which has not answered: perhaps one copy"
    )
    return RemoteUnreachable(words, hint=AWAY_NEXT_STEP)


def _reject(sessions: Mapping[str, RemoteSession], name: str, error: CkptdError, journal: Journal) -> None:
    """Undo what the session took over from an answer that is another remote's."""
    known = {key: journal.meta(f"{key}:{name}") for key in ("job_id", "remote_id")}
    sessions[name].reject(error, **known)
