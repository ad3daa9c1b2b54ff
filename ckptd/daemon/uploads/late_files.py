"""Upload files that appear in a folder after it was sealed: flushed first, then stored beside its COMMIT
(P1).

A trainer writes trainer_state.json or a README late, a user drops notes into a checkpoint. A file that still
changes, or that a process has open for writing, waits, and the folder with it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.base.retry import changed_seconds
from ckptd.convert.engine import inspect
from ckptd.core.completeness.sealing import sealed_file
from ckptd.core.model.layouts import Role, ShardKey
from ckptd.core.model.records import ZERO, SupplementRecord, UploadState
from ckptd.core.policy.blockers import newcomers
from ckptd.daemon.uploads.requests import late_upload_request
from ckptd.errors import (
    CommitConflict,
    DamagedError,
    NotPermitted,
    RefusedError,
    SourceChanged,
    SourceUnreadable,
)
from ckptd.observe.logs import line_fields
from ckptd.storage.child.slots import error_of
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan_folder
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.listing import FolderListing, SaveDirListing
    from ckptd.core.policy.actions import UploadLateFiles
    from ckptd.daemon.resources.workers import JobWorkers
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.errors import CkptdError
    from ckptd.storage.local.scan import OpenWriters

log = logging.getLogger("ckptd.late")

_OF_THIS_SAVE = (RefusedError, DamagedError, CommitConflict, NotPermitted, SourceUnreadable)
"""The remote works and takes other uploads: it is not left alone for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """Record a read failure of one state of a folder, and when it is read again."""

    digest: str
    failures: int
    again_at_seconds: float
    reason: str


class LateFiles:
    """The late files of one job's saves, as they become durable."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        workers: JobWorkers,
        writers: OpenWriters,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._state = state
        self._workers = workers
        self._writers = writers
        self._wake = wake
        self._looking: dict[str, str] = {}
        self._refused: dict[str, _Refused] = {}
        self.is_waiting = False
        """A file came late and may be durable soon."""

    @property
    def refused(self) -> dict[str, str]:
        """Tag → why a file that came late cannot be read; tried ever more seldom, up to an hour."""
        return {tag: refused.reason for tag, refused in self._refused.items()}

    def look(self, listing: SaveDirListing, save_dir_fd: int, now_seconds: float) -> None:
        """Flush and read what has come to rest since its folder was sealed."""
        self.is_waiting = False
        digests = {folder.tag: folder.digest for folder in listing.folders} if self._refused else {}
        self._refused = {t: r for t, r in self._refused.items() if digests.get(t) == r.digest}
        for folder in listing.folders:
            row = self._state.saves.of_tag(folder.tag)
            quiet = self._state.folders.quiet.get(folder.tag)
            if row is None or quiet is None or folder.folder != row.save.folder:
                continue
            if not newcomers(row.save, folder):
                continue
            refused = self._refused.get(folder.tag)
            if refused is not None and now_seconds < refused.again_at_seconds:
                continue
            self.is_waiting = True
            is_quiet = now_seconds - quiet.since_seconds >= self._config.settle_seconds
            if not is_quiet or self._looking.get(folder.tag) == folder.digest:
                continue
            if not self._writers.has(folder.tag, now_seconds - quiet.since_seconds):
                self._look_at(row.id, folder, save_dir_fd)

    def _look_at(self, save_id: int, folder: FolderListing, save_dir_fd: int) -> None:
        self._looking[folder.tag] = folder.digest
        save = self._state.saves.rows[save_id].save
        files = newcomers(save, folder)
        identities = {file.path: file.identity for file in files}
        root = self._config.save_dir / folder.tag
        fd = os.dup(save_dir_fd)

        def work() -> list[FileFacts] | None:
            try:
                fs.flush(fd, folder.tag, list(identities))
                facts = inspect.inspect_files(root, list(identities), identities=identities, is_final=False)
                again = scan_folder(fd, folder.tag)
            finally:
                os.close(fd)
            return facts if again is not None and again.digest == folder.digest else None

        def then(facts: list[FileFacts] | None) -> None:
            self._looking.pop(folder.tag, None)
            self._refused.pop(folder.tag, None)
            row = self._state.saves.rows.get(save_id)
            if facts is not None and row is not None and row.save == save:
                by_path = {fact.path: fact for fact in facts}
                aside = {"role": Role.SIDE, "shard": ShardKey(), "tensor_fingerprint": None}
                found = {
                    file.path: sealed_file(file, by_path[file.path], folder).model_copy(update=aside)
                    for file in files
                }
                late = {file.path: file for file in save.late} | found
                self._state.replace_sealed(save_id, save.model_copy(update={"late": tuple(late.values())}))
                log.info("%s: %d files came after it was complete", folder.tag, len(found))
            self._wake()

        def failed(error: CkptdError) -> None:
            self._looking.pop(folder.tag, None)
            before = self._refused.get(folder.tag)
            failures = before.failures + 1 if before and before.digest == folder.digest else 1
            self._refused[folder.tag] = _Refused(
                digest=folder.digest,
                failures=failures,
                again_at_seconds=time.monotonic() + changed_seconds(failures),
                reason=error.message,
            )
            log.warning("what came late in %s: %s", folder.tag, error)

        self._workers.submit(f"looking at what came late in {folder.tag}", work, then, failed)


class SupplementUploader:
    """Upload supplements, and note what is committed beside a COMMIT."""

    def __init__(
        self,
        config: JobConfig,
        config_digest: str,
        state: JobState,
        sessions: Mapping[str, RemoteSession],
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._config_digest = config_digest
        self._state = state
        self._sessions = sessions
        self._wake = wake

    def upload(self, action: UploadLateFiles) -> None:
        """Upload the files; what another attempt, or a lost journal, had uploaded is only looked up."""
        state, session = self._state, self._sessions[action.remote]
        row = state.saves.rows[action.save_id]
        record = state.uploads.record(action.save_id, action.remote, ZERO)
        if record.commit_sha256 is None:
            return
        order = late_upload_request(
            row,
            action,
            record,
            root=str(self._config.save_dir),
            settings=session.settings,
            config_digest=self._config_digest,
            run_id=self._state.run_id,
        )
        state.saves.begin_reading(row.id)
        session.start_transfer(order, lambda answer: self._on_answer(action, answer), "supplement")
        log.info(
            "%s → %s: %d files that came late",
            row.save.tag,
            action.remote,
            len(action.files),
            extra=line_fields("ship", row.save.tag),
        )

    def _on_answer(self, action: UploadLateFiles, answer: m.Answer) -> None:
        if isinstance(answer, m.TransferProgress | m.ObjectDone | m.Planned):
            return
        state, session = self._state, self._sessions[action.remote]
        state.saves.end_reading(action.save_id)
        tag = state.saves.rows[action.save_id].save.tag
        if isinstance(answer, m.UploadResult) and answer.outcome == "committed":
            session.note_answer()
            state.uploads.forget_late_failed(action.save_id, action.remote)
            record = state.uploads.record(action.save_id, action.remote, ZERO)
            if record.state is UploadState.COMMITTED:
                known = {one.key: one for one in record.supplements}
                known |= {
                    one.key: SupplementRecord(key=one.key, sha256=one.sha256, files=one.files)
                    for one in answer.supplements
                    if one.key != record.commit_key
                }
                state.uploads.update(
                    action.save_id,
                    record,
                    supplements=tuple(known.values()),
                    unlisted=_left(record.unlisted, answer),
                )
        elif isinstance(answer, m.UploadResult):
            # as when a permit is refused: what the remote holds is looked at anew
            log.warning("%s → %s: %s", tag, action.remote, answer.reason)
            if state.uploads.record(action.save_id, action.remote, ZERO).state is UploadState.COMMITTED:
                state.uploads.lose_commit(
                    action.save_id, action.remote, answer.reason or "its COMMIT is gone"
                )
            session.forget_tag(tag)
        elif isinstance(answer, m.Failed) and not session.is_cancelled:
            error = error_of(answer)
            log.warning("what came late in %s → %s: %s", tag, action.remote, error)
            if isinstance(error, _OF_THIS_SAVE):
                about = f"{tag} → {session.name}"
                state.uploads.note_late_failed(action.save_id, action.remote, about, error)
            elif not isinstance(error, SourceChanged):
                session.note_transfer_failed(error)
        session.observe()
        self._wake()


def _left(unlisted: tuple[str, ...], answer: m.UploadResult) -> tuple[str, ...]:
    """Files of the save that its COMMIT was thought not to list, and does."""
    base = answer.commit.key if answer.commit is not None else ""
    listed = {path for one in answer.supplements if one.key == base for path, _, _ in one.files}
    return tuple(path for path in unlisted if path not in listed)
