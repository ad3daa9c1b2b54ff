"""Prepare once what a job needs before it acts: node id, settings of remotes, device; finish or undo what a
crash interrupted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shlex
import time
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.identity import Model
from ckptd.base.owned_dirs import lock as lock_if_possible
from ckptd.base.owned_dirs import opened_ours, path_of
from ckptd.core.model.listing import OURS
from ckptd.core.model.records import UNIVERSAL, WEIGHTS, DerivedState, UploadState
from ckptd.daemon.actions.convert import found_universal
from ckptd.daemon.actions.local_deletion import finish, moved_back
from ckptd.daemon.intake.clones import recover_holds
from ckptd.daemon.intake.initial_scan import PreexistingSaves, beginning
from ckptd.daemon.uploads.duplicates import settle
from ckptd.daemon.uploads.shared_dir import own_state
from ckptd.errors import CkptdError, LockHeld, NotPermitted, StorageError, from_os_error
from ckptd.observe.logs import line_fields
from ckptd.storage.journal.schema import move_aside
from ckptd.storage.local import fs
from ckptd.storage.local.fs import ensure_ours
from ckptd.storage.local.state_dir import (
    NODE_ID,
    NODE_PLACE,
    REPAIR_UPLOADS,
    is_default_state,
    is_of_another,
    prepare_state_dir,
    read_node_id,
    state_base,
)
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.coordination import NEXT_STEP, other_writers
from ckptd.storage.remote.messages import known_url
from ckptd.storage.stores.access import access_of
from ckptd.storage.stores.base import Abilities

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ckptd.config.loader import LoadedConfig
    from ckptd.config.schema import JobConfig, RemoteConfig
    from ckptd.core.model.records import DerivedRecord, SaveRow
    from ckptd.daemon.health.watched_job import WatchedJob
    from ckptd.daemon.state.state import JobState
    from ckptd.observe.audit import Audit
    from ckptd.storage.journal.journal import Journal

log = logging.getLogger("ckptd")

_TOLD_SECONDS = 86_400.0
"""A job names another node that writes under its name for so long after its first start."""


def must_wait(state_dir: Path, save_dir: Path) -> bool:
    """Tell whether a job begins with its first checkpoint only: nothing of ours lies in save_dir until then
    (P11).

    One whose save_dir was emptied goes on: what it has in the remotes and misses here is to be said.
    """
    if not state_dir.is_relative_to(save_dir):
        return False
    with contextlib.suppress(OSError), opened_ours(state_dir) as fd:
        return files.stat_beneath(fd, "journal.db") is None
    return True


def prior_state(
    config: JobConfig, journal: Journal, state_dir: Path, save_dir_fd: int, here: frozenset[str]
) -> PreexistingSaves:
    """Return what lay in save_dir before ckptd; `here`: its tags when this daemon first listed it."""
    save_dir, inode = config.save_dir, os.fstat(save_dir_fd).st_ino
    holds_state = is_default_state(state_dir, save_dir)
    return beginning(journal, str(save_dir), inode, here, holds_state=holds_state)


def make_state(state_dir: Path, save_dir: Path, save_dir_fd: int) -> Path:
    """Create the state directory; where ours lies is known only when the first checkpoint is there."""
    inside = f"{OURS}/state"
    if state_dir == save_dir / inside:
        os.close(ensure_ours(save_dir_fd, inside))
        return path_of(save_dir, inside)
    prepare_state_dir(state_dir)
    return state_dir


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


def remote_settings(
    config: JobConfig,
    remote: RemoteConfig,
    journal: Journal,
    *,
    node: str,
    node_id: str,
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


def on_attached(job: WatchedJob, name: str) -> Callable[[m.Attached], None]:
    """Return the callback that records a remote once it is proved to be this job's and no duplicate of
    another.
    """

    def attached(answer: m.Attached) -> None:
        assert job.state is not None
        if not settle(job.sessions, name, answer, job.state.journal):
            return
        if answer.living and not job.config.shared_fs:
            text = other_writers(answer.living, name, answer.identity.created)
            job.problems.put("name-shared", name, text, NEXT_STEP, lasts_seconds=_TOLD_SECONDS)
        job.learn_job_id(answer.identity.job_id)
        job.state.journal.set_meta(f"job_id:{name}", answer.identity.job_id)
        job.state.journal.set_meta(f"remote_id:{name}", answer.identity.remote_id)
        where = job.sessions[name].settings.url
        known = _Known(url=where, remote_id=answer.identity.remote_id, abilities=answer.abilities)
        job.state.journal.set_meta(f"abilities:{name}", known.model_dump_json())
        job.wake()

    return attached


def open_job(config: JobConfig, state_dir: Path) -> tuple[int, int] | None:
    """Descriptors of save_dir and of what is locked: it, or of a shared one this host's state directory.

    None: there is no such directory yet.

    Raises:
        LockHeld: another daemon owns it (75). ConfigError: the state of a shared one lies in there.
    """
    if not config.shared_fs:
        fd = open_locked(str(config.save_dir))
        return None if fd is None else (fd, fd)
    lock = own_state(state_dir, config.save_dir)
    fd = _open(str(config.save_dir))
    if fd is None:
        os.close(lock)
        return None
    try:
        # beside other hosts' daemons; a command that wants save_dir alone finds that one runs
        lock_if_possible(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        close_save_dir(fd, lock)
        msg = f"a daemon without shared_fs, or a command, owns {config.save_dir}"
        raise LockHeld(msg) from error
    return fd, lock


def open_locked(save_dir: str) -> int | None:
    """A descriptor of save_dir that holds its lock; None: there is no such directory yet.

    Raises:
        LockHeld: another daemon owns it (75).
    """
    fd = _open(save_dir)
    if fd is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        hint = f"one daemon per save_dir; `{shlex.join(['ckptd', 'status', save_dir])}` shows it"
        raise LockHeld(f"another daemon owns {save_dir}", hint=hint) from error
    return fd


def may_open_now(config: JobConfig, error: CkptdError) -> bool:
    """Tell whether a job that did not open may be tried again: disks and rights heal; of a locked one only
    if no other daemon owns save_dir now (of a shared one only a reload asks again).
    """
    if not isinstance(error, LockHeld):
        return isinstance(error, StorageError | NotPermitted)
    if config.shared_fs:
        return False
    try:
        fd = open_locked(str(config.save_dir))
    except CkptdError:
        return False
    if fd is not None:
        close_save_dir(fd, fd)
    return True


def await_matches(loaded: LoadedConfig, environ: Mapping[str, str]) -> None:
    """Refuse a start whose globs may bring jobs later that have no place for their state, and nobody to tell
    of them.

    Raises:
        ConfigError: there is none; the first that comes beside another would stop both.
    """
    if loaded.has_globs:
        state_base(loaded.daemon.state_dir, environ, loaded.jobs_in_daemon)
    for pattern in loaded.unmatched:
        log.info("no directory matches %s yet; each that appears becomes a job", pattern)


def close_save_dir(fd: int, lock: int) -> None:
    """Workers may hold duplicates for a moment longer; the lock must not outlive the job with them."""
    for one in {fd, lock}:
        lock_if_possible(one, fcntl.LOCK_UN)
        os.close(one)


def _open(save_dir: str) -> int | None:
    try:
        return os.open(save_dir, files.DIR_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, f"opening {save_dir}") from error


def check_device(job: WatchedJob, state: JobState, save_dir_fd: int) -> None:
    """Report another device than before: perhaps the NVMe is not mounted; nothing is deleted (H30)."""
    device = str(os.fstat(save_dir_fd).st_dev)
    known = state.journal.meta("device")
    if known is None:
        state.journal.set_meta("device", device)
    if known in (None, device):
        job.problems.clear("device-changed", str(job.config.save_dir))
    else:
        job.problems.put(
            "device-changed",
            str(job.config.save_dir),
            f"{job.config.save_dir} lies on another file system than before; nothing is deleted",
            "is the NVMe mounted? if this is meant, delete the journal in the state directory",
        )


def is_still(path: Path, fd: int) -> bool:
    """True while `path` names the open directory; an error other than "not there" changes nothing."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
    except OSError:
        return True


# --- After a restart: finish or undo what a crash interrupted on this node (P7) --------------------------
# Runs once, in the deciding thread, before the first plan; everything it does is idempotent.

PARTIAL_END = ".ckptd-partial"
"""Ending of the name of a conversion that is not published yet."""
MIRROR = "mirror."
"""Begin of the name of what planning reads of a remote's objects (`ckptd.conversion.remote.derive`)."""


def recover(state: JobState, save_dir_fd: int, audit: Audit) -> None:
    """Finish journalled deletions after a restart, move back what was renamed aside without one, tidy ours.

    A prune whose intent is journalled rested on confirmed COMMITs, once: where nothing went yet it is taken
    back and needs a fresh permit (adr/0153). What has lost a file is finished, as far as the sealed files lie
    there, and never moved back (docs/design.md §5 *Permit*). What else lies below `_ckptd` in a
    directory that is shared may be another host's work under way (adr/0110).
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
