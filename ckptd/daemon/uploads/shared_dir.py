"""Hold one host's lease on a directory that hosts share (adr/0110, H36: only one host deletes and converts).

A lease that was read is trusted for half of the time after which others take over, counted by the monotonic
clock from before the heartbeat was sent: a process that was stopped and wakes finds that its lease is over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.identity import FolderIdentity
from ckptd.base.owned_dirs import lies_in_save_dir, opened_ours
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.policy.leases import beat_seconds, term_seconds
from ckptd.core.policy.view import LeaseStatus
from ckptd.daemon.state.state import OtherHost
from ckptd.errors import ConfigError, LockHeld, StorageError
from ckptd.storage.local import fs
from ckptd.storage.local.state_dir import prepare_state_dir

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.save import SealedSave
    from ckptd.core.policy.leases import LeaseSeen
    from ckptd.daemon.state.problems import Problems
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.observe.audit import Audit
    from ckptd.storage.remote.messages import TagView

log = logging.getLogger("ckptd.nodes")


class SharedDirLease:
    """One job's; every method is called in the deciding thread but `holds`."""

    def __init__(self, config: JobConfig) -> None:
        self.takeover_seconds = config.shared_takeover_seconds
        self.remote = next(remote.name for remote in config.remotes if remote.required)
        """The hosts meet in the first one that is required."""
        self.lease: LeaseSeen | None = None
        self.until_seconds = 0.0
        self._is_new = False

    def beat_seconds(self, usual_seconds: float) -> float:
        """Between heartbeats."""
        return beat_seconds(self.takeover_seconds, usual_seconds)

    def heard(self, lease: LeaseSeen | None, asked_at_seconds: float) -> bool:
        """Update the lease from a remote's answer; return whether this host's rights changed."""
        before = self.holds()
        if lease is not None:
            if lease.is_ours and (self.lease is None or not self.lease.is_ours):
                log.info("this host holds the lease (epoch %d): it deletes and converts", lease.epoch)
                self._is_new = True
            elif self.lease is not None and self.lease.is_ours and not lease.is_ours:
                log.warning("%s holds the lease now (epoch %d)", lease.node, lease.epoch)
            self.lease = lease
            self.until_seconds = (
                asked_at_seconds + term_seconds(self.takeover_seconds) if lease.is_ours else 0.0
            )
        return self.holds() != before

    def holds(self) -> bool:
        """The lease is ours, and was a short while ago."""
        return self.lease is not None and self.lease.is_ours and time.monotonic() < self.until_seconds

    @property
    def view(self) -> LeaseStatus:
        """Return the lease as the planner sees it."""
        return LeaseStatus(holds_lease=self.holds(), until_seconds=self.until_seconds)

    def take_over(self, state: JobState, save_dir_fd: int, audit: Audit) -> None:
        """Remove what the holder before us had renamed aside, once after each new lease.

        It had a permit; the folder is known by its inode, its files by their identities, and by our own
        journal a COMMIT lists them on every remote that counts.
        """
        if not self._is_new or not self.holds() or state.is_first_scan:
            return
        self._is_new = False
        own = {deletion.trash for deletion in state.journal.open_deletions()}
        for name in fs.trash_names(save_dir_fd):
            if name not in own and not fs.is_ours_in_trash(name):
                _finish(state, save_dir_fd, name, audit)


def _finish(state: JobState, save_dir_fd: int, name: str, audit: Audit) -> None:
    tag = name.rpartition(".")[0]
    trash_fd = fs.ensure_ours(save_dir_fd, fs.TRASH)
    try:
        status = files.stat_beneath(trash_fd, name)
        for row in state.saves.rows.values():
            records = [x for x in state.uploads.of(row.id).values() if x.form == ZERO]
            is_safe = bool(records) and all(x.state is UploadState.COMMITTED for x in records)
            is_it = status is not None and row.save.folder == FolderIdentity(
                dev=status.st_dev, ino=status.st_ino
            )
            if row.save.tag == tag and is_it and is_safe:
                audit.write(
                    "prune",
                    tag=tag,
                    form=ZERO,
                    reason="another host renamed it aside and did not end",
                    **state.uploads.commits_of(row.id),
                )
                fs.finish_deletion(trash_fd, name, row.save.files)
                return
        log.warning("%s lies in the trash, renamed aside by another host; it is left there", name)
    except FileNotFoundError:
        log.info("%s is gone from the trash", name)
    except StorageError as error:
        log.warning("what another host renamed aside: %s", error)
    finally:
        os.close(trash_fd)


def own_state(state_dir: Path, save_dir: Path) -> int:
    """Lock the state directory of a host: the lock of a shared save_dir would refuse the second host.

    Returns a descriptor that holds the lock.

    Raises:
        ConfigError: it lies in the shared directory. LockHeld: another daemon of this host has it (75).
    """
    if lies_in_save_dir(state_dir, save_dir):
        msg = f"state_dir {state_dir} lies in the shared save_dir"
        raise ConfigError(msg, hint="set state_dir in ckptd.toml to a directory on this host's own disk")
    prepare_state_dir(state_dir)
    with opened_ours(state_dir) as inside:
        fd = os.dup(inside)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        msg = f"another daemon owns {state_dir}"
        raise LockHeld(
            msg, hint="one daemon per host and directory; give each host its own state_dir"
        ) from error
    return fd


# --- Another host without a lease: one of the two stands by, and both report it (adr/0105) ---------------
# flock keeps daemons of one host apart, not those of two hosts over one network file system. What gives the
# other away is its manifest of a save that was written while we watched, with the very mtimes of our files. A
# directory that moved from host to host shows none; what was restored has an older mtime than ctime.

_WRITTEN_NS = 2_000_000_000
"""A file whose times lie further apart was put there with the times of another."""


def look_for_sharer(state: JobState, session: RemoteSession, tags_at_start: frozenset[str]) -> None:
    """Tell whether a remote tells of another host that uploads what lies here."""
    if state.other_host is not None or state.is_shared:
        return
    for row in state.saves.rows.values():
        view = session.tag_views.get(row.save.tag)
        if view is None or row.state != "present" or row.save.tag in tags_at_start:
            continue
        host = sharer_in(row.save, view, session.settings.node, session.settings.node_id)
        if host is not None:
            state.note_other_host(host)
            return


def sharer_in(save: SealedSave, view: TagView, node: str, node_id: str) -> OtherHost | None:
    """The host whose manifests list files of this save with their very times."""
    ours = {
        (f.path, f.identity.size_bytes, f.identity.mtime_ns, f.fingerprint)
        for f in save.files
        if f.identity.ctime_ns - f.identity.mtime_ns < _WRITTEN_NS
    }
    for seen in view.manifests:
        other = seen.manifest
        if other.form != ZERO or other.node == node or other.node_id == node_id:
            continue
        if any((f.path, f.bytes, f.mtime_ns, f.fingerprint) in ours for f in other.files):
            return OtherHost(node=other.node, tag=save.tag, stands_by=other.node_id < node_id)
    return None


def report_other_host(problems: Problems, save_dir: str, state: JobState) -> None:
    """Report another host on this directory until a restart: nothing here shows that it has stopped."""
    found = state.other_host
    if found is None:
        return
    text = f"{found.node} uploads the files of {save_dir} too ({found.tag}): one directory, two hosts"
    what = "; this one stands by: it sends, converts and deletes nothing" if found.stands_by else ""
    cure = "run ckptd on one of the hosts that see this directory, then restart it there"
    problems.see("save-dir-shared", save_dir, text + what, cure)
