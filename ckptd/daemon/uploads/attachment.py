"""Attach the remotes of a job: the settings of each one's child, and what is recorded once it has answered.

Two remotes that are one directory or one bucket are one copy, not two (P1, P2; docs/adr/0166). A copy of a
remote keeps its identity, and so does a second mount or URL of it. The device and inode of the root tell the
two apart, or the creation time of a bucket's identity, as the remote's own child sees it.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from ckptd.base.identity import Model
from ckptd.errors import CkptdError, RemoteNotOurs, RemoteUnreachable
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.attach import NEXT_STEP, are_one, one_place
from ckptd.storage.remote.heartbeats import NEXT_STEP as OTHER_WRITERS_NEXT_STEP
from ckptd.storage.remote.heartbeats import other_writers
from ckptd.storage.remote.messages import Attached, known_url
from ckptd.storage.stores.access import access_of
from ckptd.storage.stores.base import Abilities
from ckptd.storage.stores.open import directory_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.config.schema import JobConfig, RemoteConfig
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.journal.journal import Journal

AWAY_NEXT_STEP = "bring that one back; if it is gone for good, remove it from the job file"
_NAMED_SECONDS = 86_400.0
"""A job names another node that writes under its name for so long after its first start."""


def remote_settings(
    config: JobConfig,
    remote: RemoteConfig,
    journal: Journal,
    *,
    node: str,
    node_id: str,
    state_dir: str = "",
    apart_from: tuple[str, ...] = (),
) -> m.RemoteSettings:
    """Build the settings of a remote's child process: the job file's keys and the identity seen before (P2:
    no other remote is taken for it).
    """
    return m.RemoteSettings(
        name=remote.name,
        url=remote.url,
        job=config.name,
        job_id=journal.meta(f"job_id:{remote.name}"),
        remote_id=journal.meta(f"remote_id:{remote.name}"),
        known_url=known_url(journal.meta(f"abilities:{remote.name}")),
        abilities=_abilities_of(journal, remote),
        same_filesystem=remote.same_filesystem,
        save_dir=str(config.save_dir),
        apart_from=apart_from,
        verify=remote.verify,
        access=access_of(remote),
        bytes_per_second=remote.bandwidth.at(time.time()),
        node=node,
        node_id=node_id,
        state_dir=state_dir,
        is_scrubbed=bool(remote.scrub_bytes_per_day),
    )


class _Known(Model):
    """Record a remote's abilities together with its URL and identity."""

    url: str
    remote_id: str
    abilities: Abilities


def _abilities_of(journal: Journal, remote: RemoteConfig) -> Abilities | None:
    """Return the abilities of this very remote when it was last attached; None: not known, or written by
    another version.
    """
    text = journal.meta(f"abilities:{remote.name}")
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        known = _Known.model_validate_json(text)
        if (known.url, known.remote_id) == (remote.url, journal.meta(f"remote_id:{remote.name}")):
            return known.abilities
    return None


def on_attached(
    name: str,
    sessions: Mapping[str, RemoteSession],
    state: JobState,
    *,
    is_shared: bool,
    learn_job_id: Callable[[str], None],
    wake: Callable[[], None],
) -> Callable[[m.Attached], None]:
    """Return the callback that records a remote once it is proved to be this job's and no duplicate of
    another.
    """

    def attached(answer: m.Attached) -> None:
        if not reject_duplicate_remote(sessions, name, answer, state.journal):
            return
        if answer.living and not is_shared:
            text = other_writers(answer.living, name, answer.identity.created)
            state.problems.put(
                "name-shared", name, text, OTHER_WRITERS_NEXT_STEP, lasts_seconds=_NAMED_SECONDS
            )
        learn_job_id(answer.identity.job_id)
        state.journal.set_meta(f"job_id:{name}", answer.identity.job_id)
        state.journal.set_meta(f"remote_id:{name}", answer.identity.remote_id)
        where = sessions[name].settings.url
        known = _Known(url=where, remote_id=answer.identity.remote_id, abilities=answer.abilities)
        state.journal.set_meta(f"abilities:{name}", known.model_dump_json())
        wake()

    return attached


def reject_duplicate_remote(
    sessions: Mapping[str, RemoteSession], name: str, answer: Attached, journal: Journal
) -> bool:
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
