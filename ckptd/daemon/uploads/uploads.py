"""Request uploads and deletions from a remote's child, and journal the answers.

The intent is journalled before the request is sent and the outcome when the answer arrives, so that a crash
in between leaves an upload that the next start continues (P7: a crash at any moment loses nothing).
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from ckptd import errors
from ckptd.base.humanize import size_of
from ckptd.base.owned_dirs import path_of
from ckptd.base.retry import backoff_seconds, changed_seconds
from ckptd.config.commands import command_for
from ckptd.core.model.records import (
    ZERO,
    DerivedRecord,
    DerivedState,
    UploadRecord,
    UploadState,
)
from ckptd.core.policy.leases import beat_seconds
from ckptd.core.policy.uploads import EARLY
from ckptd.core.policy.view import Confirmation
from ckptd.daemon.state.upload_records import waiting_on
from ckptd.daemon.uploads.early import EarlyUploader
from ckptd.daemon.uploads.remote_deletion import RemoteDeleter
from ckptd.daemon.uploads.requests import (
    committed_source,
    derive_request,
    files_to_upload,
    forget_replaced_objects,
    half_row,
    late_upload_request,
    pointer_to_upload,
    upload_request,
    verified_row,
)
from ckptd.errors import (
    CommitConflict,
    DamagedError,
    NotPermitted,
    RefusedError,
    SourceChanged,
    SourceUnreadable,
)
from ckptd.observe.logs import line_fields
from ckptd.storage.local import fs
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.records import SaveRow
    from ckptd.core.policy.actions import CancelUpload, ConfirmCommits, Upload, UploadLateFiles
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.observe.audit import Audit


log = logging.getLogger("ckptd.uploads")

STEP_IN_SECONDS = 60.0
"""Seconds until a waiting part is looked at again, and replicas are uploaded that their owner did not
(H29)."""

NEXT_STEP_CHANGED = "find out what writes there: ckptd sends it once it rests, an hour later at most"


class UploadManager:
    """The remote half of executing a plan, for one job."""

    def __init__(
        self,
        config: JobConfig,
        config_digest: str,
        state: JobState,
        sessions: Mapping[str, RemoteSession],
        audit: Audit,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._config_digest = config_digest
        self._state = state
        self._sessions = sessions
        self._wake = wake
        beat = beat_seconds(config.shared_takeover_seconds, STEP_IN_SECONDS)
        self._step_in_seconds = beat if config.shared_fs else STEP_IN_SECONDS
        self.deleter = RemoteDeleter(config, state, sessions, audit, wake)
        self.early = EarlyUploader(config, state, sessions, wake)
        self.late = SupplementUploader(config, config_digest, state, sessions, wake)

    # --- uploads ---------------------------------------------------------------------------------------

    def upload(self, action: Upload, save_dir_fd: int, memory_bytes: int) -> None:
        """Start the upload of one form of one save; `memory_bytes`: what making it may use (P12)."""
        state, session = self._state, self._sessions[action.remote]
        row = state.saves.rows[action.save_id]
        key = (action.save_id, action.remote, action.form)
        old = state.uploads.record(*key)
        if old.generation not in (None, action.generation) or old.attempt != action.attempt:
            state.journal.forget_objects(*key)
        files, making = self._sources(row, action, save_dir_fd, memory_bytes)
        if files is None:
            if action.form != ZERO:  # somebody removed it, or the journal is of before it went
                state.saves.put_derived(row.id, DerivedRecord(reason="its files are gone"), action.form)
            elif row.held:
                state.set_held(row.id, held=False)
            return
        forget_replaced_objects(state, row, action)
        state.uploads.update(
            action.save_id,
            old,
            state=UploadState.UPLOADING,
            generation=action.generation,
            attempt=action.attempt,
            reason=None,
        )
        order = upload_request(
            row,
            action,
            files,
            making,
            root=str(self._config.save_dir),
            settings=session.settings,
            config_digest=self._config_digest,
            objects=state.journal.objects(*key),
            save_spread_seconds=self._config.save_spread_seconds,
            steps_in=old.state is UploadState.WAITING,
            takeover_seconds=self._config.shared_takeover_seconds if self._config.shared_fs else None,
            run_id=state.run_id,
        )
        total = sum(f.bytes for f in files)
        state.uploads.begin(key, total)
        state.saves.begin_reading(action.save_id)
        if making is not None:
            state.saves.begin_conversion(action.save_id, action.form)
        session.start_transfer(order, lambda answer: self._on_answer(action, answer), action.form)
        again = f", saved again (generation {action.generation})" if action.generation > 1 else ""
        what = (row.save.tag, action.form, action.remote, size_of(total), again)
        log.info("uploading %s (%s) to %s: %s%s", *what, extra=line_fields("upload", row.save.tag))

    def _sources(
        self, row: SaveRow, action: Upload, save_dir_fd: int, memory_bytes: int
    ) -> tuple[tuple[m.UploadFile, ...] | None, m.DeriveRequest | None]:
        """Return the files that lie here, or what is made of shards while it is uploaded."""
        if not action.is_streamed:
            return files_to_upload(row, action, save_dir_fd), None
        os.close(fs.ensure_ours(save_dir_fd, fs.STAGING))
        staging = path_of(self._config.save_dir, fs.STAGING)
        zero = self._state.uploads.record(row.id, action.remote, ZERO)
        source = committed_source(row, zero, self._config.shared_takeover_seconds)
        making = derive_request(
            row,
            action,
            source,
            str(staging),
            memory_bytes,
            compare_masters=self._config.compare_masters,
        )
        return pointer_to_upload(row, action), making

    def cancel(self, action: CancelUpload) -> None:
        """Cancel the upload under way for a save; it continues later where it stopped."""
        session = self._sessions[action.remote]
        if not session.is_cancelled:
            what = "a shard" if session.uploading == EARLY else f"a {session.uploading} form"
            log.info("the upload of %s to %s makes way: %s", what, action.remote, action.reason)
            session.cancel_transfer()

    def _on_answer(self, action: Upload, answer: m.Answer) -> None:
        key = (action.save_id, action.remote, action.form)
        if isinstance(answer, m.TransferProgress):
            self._progress(key, answer)
            return
        if isinstance(answer, m.Planned):
            self._planned(action, answer)
            return
        if isinstance(answer, m.ObjectDone):
            done = answer.object
            self._state.journal.put_object(*key, verified_row(done))
            moving = self._state.uploads.progress.get(key)
            if moving is not None:
                moving.advance(done.key, done.bytes)
            return
        self._state.saves.end_reading(action.save_id)
        if action.is_streamed:
            self._state.saves.end_conversion()
        self._end(action, answer)
        self._state.uploads.end(key)
        self._wake()

    def _planned(self, action: Upload, planned: m.Planned) -> None:
        """Record the plan of a derived form, and forget objects that an attempt by another plan uploaded."""
        state, key = self._state, (action.save_id, action.remote, action.form)
        state.uploads.progress[key].set_total(planned.bytes)
        record = state.saves.rows[action.save_id].derived_of(action.form)
        if record.plan_sha256 not in ("", planned.plan_sha256):
            state.journal.forget_objects(*key)
        update = {
            "plan_sha256": planned.plan_sha256,
            "layout": planned.layout,
            "bytes": planned.bytes,
            "comparison": planned.comparison,
        }
        state.saves.put_derived(action.save_id, record.model_copy(update=update), action.form)

    def _progress(self, key: tuple[int, str, str], moving: m.TransferProgress) -> None:
        state = self._state
        entry = state.uploads.progress.get(key)
        if entry is None:
            return
        entry.advance(moving.key, moving.done_bytes)
        if entry.note_durable(moving.key, moving.flushed_bytes, moving.token):
            state.journal.put_object(*key, half_row(moving))

    def _end(self, action: Upload, answer: m.Answer) -> None:
        state, session = self._state, self._sessions[action.remote]
        key = (action.save_id, action.remote, action.form)
        record = state.uploads.record(*key)
        tag = state.saves.rows[action.save_id].save.tag
        if isinstance(answer, m.UploadResult):
            session.forget_tag(tag)
            state.uploads.forget_generation(key)
            session.note_answer()
            session.observe()
            self._uploaded(action, record, answer)
        elif isinstance(answer, m.Failed) and session.is_cancelled:
            state.uploads.update(action.save_id, record, state=UploadState.NEW)
        elif isinstance(answer, m.Failed):
            self._failed(action, record, answer.raised)

    def _uploaded(self, action: Upload, record: UploadRecord, answer: m.UploadResult) -> None:
        state = self._state
        tag = state.saves.rows[action.save_id].save.tag
        record = record.model_copy(update={"is_damaged": answer.outcome == "damaged", "hint": ""})
        if answer.outcome == "committed" and answer.commit is not None:
            moved_bytes = answer.bytes_sent + answer.bytes_copied
            state.uploads.note_speed((action.save_id, action.remote, action.form), moved_bytes)
            record = record.model_copy(
                update={
                    "state": UploadState.COMMITTED,
                    "generation": answer.commit.commit.generation,
                    "commit_key": answer.commit.key,
                    "commit_sha256": answer.commit.sha256,
                    "unlisted": answer.unlisted,
                    "tries": 0,
                    "reason": None,
                    "bytes_sent": answer.bytes_sent,
                }
            )
            if action.is_streamed:  # half uploads of an attempt that does not count are given up
                state.journal.forget_objects(action.save_id, action.remote, action.form)
            copied = f", {size_of(answer.bytes_copied)} copied there" if answer.bytes_copied else ""
            line = line_fields("commit", tag)
            log.info("%s (%s) committed on %s%s", tag, action.form, action.remote, copied, extra=line)
        elif answer.outcome in ("waiting", "damaged"):
            if answer.outcome == "damaged":
                step = command_for(self._config, "verify", tag, "--repair", "--read-data")
                record = record.model_copy(update={"hint": f"{step} on the node that has that shard"})
            again_at = time.monotonic() + self._wait_seconds(action, answer)
            update = {"state": UploadState.WAITING, "reason": answer.reason, "retry_at_seconds": again_at}
            record = record.model_copy(update=update)
        elif answer.outcome == "refused":
            record = record.model_copy(update={"state": UploadState.REFUSED, "reason": answer.reason})
            update = {"state": DerivedState.REFUSED, "reason": answer.reason, "hint": answer.hint}
            derived = state.saves.rows[action.save_id].derived_of(action.form)
            state.saves.put_derived(action.save_id, derived.model_copy(update=update), action.form)
            log.warning("%s (%s): %s", tag, action.form, answer.reason, extra=line_fields("upload", tag))
        else:
            record = self._again(record, answer.reason or "another save holds this generation")
            if action.form != ZERO:
                record = record.model_copy(update={"attempt": record.attempt + 1})
            state.journal.forget_objects(action.save_id, action.remote, action.form)
        state.uploads.put(action.save_id, record)

    def _wait_seconds(self, action: Upload, answer: m.UploadResult) -> float:
        """Return the seconds until the next attempt, while other nodes' parts, another node's form or a
        repair are awaited.
        """
        if action.form != ZERO:
            return self._config.shared_takeover_seconds
        key, first = (action.save_id, action.remote, action.form), self._step_in_seconds
        uploads = self._state.uploads
        waiting = uploads.wait(key, waiting_on(uploads.waiting.get(key), answer, first))
        # of a shared directory what takes over from a silent host is the attempt itself
        return first if self._config.shared_fs else waiting.retry_seconds

    def _again(
        self, record: UploadRecord, reason: str, pause_seconds: Callable[[int], float] = backoff_seconds
    ) -> UploadRecord:
        tries = record.tries + 1
        again_at = time.monotonic() + pause_seconds(tries)
        update = {"tries": tries, "reason": reason, "retry_at_seconds": again_at}
        return record.model_copy(update={"state": UploadState.FAILED, **update})

    def _failed(self, action: Upload, record: UploadRecord, error: errors.CkptdError) -> None:
        state, session = self._state, self._sessions[action.remote]
        key, tag = (action.save_id, action.remote, action.form), state.saves.rows[action.save_id].save.tag
        log.warning(
            "%s → %s (%s): %s", tag, action.remote, action.form, error, extra=line_fields("upload", tag)
        )
        record = record.model_copy(update={"hint": error.hint, "is_damaged": False})
        if isinstance(error, errors.SourceChanged):
            state.journal.forget_objects(*key)
            record = record.model_copy(update={"hint": NEXT_STEP_CHANGED})
            record = self._again(record, error.message, changed_seconds)
        elif isinstance(error, errors.SourceUnreadable):
            # this node's disk: the remote is well, and other checkpoints go on
            record = self._again(record, error.message)
        elif isinstance(error, errors.DocumentDamaged):
            # the remote's, not the save's; a COMMIT that cannot be read takes its generation: choose anew
            session.forget_tag(tag)
            state.uploads.forget_generation(key)
            record = self._again(record, error.message)
            session.observe()
        elif isinstance(error, errors.DamagedError) and not isinstance(error, errors.VerifyError):
            update = {"state": UploadState.REFUSED, "reason": error.message, "is_damaged": True}
            record = record.model_copy(update=update)
        else:
            record = self._again(record, error.message)
            wrong = isinstance(error, errors.VerifyError)
            if wrong or isinstance(error, errors.RemoteError | errors.StorageError) or error.exit_code == 77:
                session.note_transfer_failed(error, is_answering=wrong)
        state.uploads.put(action.save_id, record)

    # --- confirm ---------------------------------------------------------------------------------------

    def confirm(self, action: ConfirmCommits) -> None:
        """Ask every required remote for a fresh read of the COMMITs (P1)."""
        state = self._state
        if not action.commits or not state.deletions.begin_confirmation(action.save_id):
            return
        waiting = {ref.remote for ref in action.commits}
        asked_at_seconds = time.monotonic()

        def heard(remote: str, answer: m.Answer) -> None:
            waiting.discard(remote)
            if not (isinstance(answer, m.Confirmed) and answer.ok):
                self._denied(action, remote, answer)
                waiting.add("")
            if not waiting:
                confirmation = Confirmation(commits=action.commits, at_seconds=asked_at_seconds)
                state.deletions.confirm(action.save_id, confirmation)
            if not waiting - {""}:
                state.deletions.end_confirmation(action.save_id)
                self._wake()

        for remote in tuple(waiting):
            refs = tuple((r.key, r.sha256) for r in action.commits if r.remote == remote)
            self._sessions[remote].request(m.Confirm(commits=refs), partial(heard, remote))

    def _denied(self, action: ConfirmCommits, remote: str, answer: m.Answer) -> None:
        """Handle a failed confirmation: a save that the remote no longer vouches for is uploaded again."""
        state = self._state
        session = self._sessions[remote]
        if isinstance(answer, m.Failed):
            session.note_error(answer.raised)
            return
        reason = (answer.reason if isinstance(answer, m.Confirmed) else None) or "no answer"
        asked = {ref.sha256 for ref in action.commits if ref.remote == remote}
        for save_id in list(state.uploads.records):
            # with `unuploaded` the COMMITs may be those of a newer save
            if state.uploads.record(save_id, remote, ZERO).commit_sha256 not in asked:
                continue
            tag = state.saves.rows[save_id].save.tag
            log.error("%s: %s no longer holds its COMMIT (%s); it is uploaded again", tag, remote, reason)
            state.uploads.lose_commit(save_id, remote, reason)
            session.forget_tag(tag)
        session.observe()


# --- Supplements: files that came after their save was sealed -----------------------------------------


_OF_THIS_SAVE = (RefusedError, DamagedError, CommitConflict, NotPermitted, SourceUnreadable)
"""The remote works and takes other uploads: it is not left alone for these."""


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
            extra=line_fields("upload", row.save.tag),
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
                known |= {one.key: one for one in answer.supplements if one.key != record.commit_key}
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
            error = answer.raised
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
