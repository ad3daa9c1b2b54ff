"""Request early uploads: of shards at rest, before their save is whole (docs/adr/0220).

The journal has a row of each object before its first byte. A save that is sealed takes over the rows of its
files; the objects of all other rows are deleted, and half uploads are given up.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.completeness.judge import State
from ckptd.core.model.manifest import folder_name
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.policy.uploads import EARLY
from ckptd.daemon.uploads.requests import begun_row, early_file, half_row, verified_row
from ckptd.errors import DamagedError, NotPermitted, RefusedError, SourceChanged, SourceUnreadable
from ckptd.storage.journal.journal import EARLY_ID
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.records import ObjectRow
    from ckptd.core.policy.actions import UploadEarly
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession

log = logging.getLogger("ckptd.uploads")

_AWAITED = (State.SAVING, State.UNKNOWN, State.COMPLETE)
"""Verdicts on folders that become saves: being read and flushed may take longer than a save is in flight."""


@dataclass(slots=True)
class _Attempt:
    """Record what the remote said of one early upload."""

    remote: str
    key: str
    token: str = ""
    is_there: bool = False


class EarlyUploader:
    """Upload shards early, and settle what became of them; every method is called in the deciding thread."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        sessions: Mapping[str, RemoteSession],
        wake: Callable[[], None],
    ) -> None:
        self._save_dir = str(config.save_dir)
        self._state = state
        self._sessions = sessions
        self._wake = wake

    def upload(self, action: UploadEarly) -> None:
        """Start the upload of one shard, at full speed: it is read from memory."""
        state, session = self._state, self._sessions[action.remote]
        file = early_file(action)
        state.uploads.begin_early(action.remote, action.tag, action.file, state.folders.in_flight)
        if any(row.key == file.key for row in self._rows(action.remote)):
            state.uploads.end_early(action.remote, is_cancelled=False)  # an earlier write of it is there
            self._wake()
            return
        state.journal.put_object(EARLY_ID, action.remote, ZERO, begun_row(file))
        order = m.EarlyRequest(root=self._save_dir, file=file, node_id=session.settings.node_id)
        attempt = _Attempt(remote=action.remote, key=file.key)
        session.start_transfer(order, partial(self._on_answer, attempt), EARLY)
        session.pace(1.0)
        log.debug("uploading %s of %s to %s", action.file.path, action.tag, action.remote)

    def _on_answer(self, attempt: _Attempt, answer: m.Answer) -> None:
        state, remote = self._state, attempt.remote
        if isinstance(answer, m.TransferProgress):
            if answer.token != attempt.token:
                attempt.token = answer.token
                state.journal.put_object(EARLY_ID, remote, ZERO, half_row(answer))
            return
        if isinstance(answer, m.ObjectDone):
            attempt.is_there = True
            state.journal.put_object(EARLY_ID, remote, ZERO, verified_row(answer.object))
            return
        session = self._sessions[remote]
        error = answer.raised if isinstance(answer, m.Failed) else None
        state.uploads.end_early(remote, is_cancelled=session.is_cancelled)
        if error is None or isinstance(error, SourceChanged | DamagedError):
            if not attempt.is_there:
                state.journal.forget_early(remote, [attempt.key])
        elif not isinstance(error, SourceUnreadable):
            session.note_transfer_failed(error)
        self._wake()

    def settle(self, *, rests: bool) -> None:
        """Give objects to the saves that have their files; start the deletion of what no save will use.

        Called when the turn's uploads have their remotes; `rests`: nothing is deleted now.
        """
        awaited = self._awaited() if self._state.journal.with_early else set()
        for remote in tuple(self._state.journal.with_early):
            rows = self._rows(remote)
            if not rows:
                self._state.journal.with_early.discard(remote)
            owners = self._owners({_folder_of(row) for row in rows})
            for row in rows:
                if row.key in owners and row.proof is not None:
                    self._hand_over(owners[row.key], remote, row.key)
            useless = [
                row
                for row in rows
                if (row.proof is None if row.key in owners else _folder_of(row) not in awaited)
            ]
            session = self._sessions.get(remote)
            if useless and session is not None and session.may_transfer and session.is_claimed and not rests:
                self._delete(session, useless, [row.key for row in useless if row.key not in owners])

    def _rows(self, remote: str) -> list[ObjectRow]:
        return self._state.journal.objects(EARLY_ID, remote, ZERO)

    def _awaited(self) -> set[str]:
        """Return the remote folders of tags of which a save may be sealed soon."""
        folders, saves = self._state.folders, self._state.saves
        judged = {tag for tag, verdict in folders.verdicts.items() if verdict.state in _AWAITED}
        new = {tag for tag in judged if saves.of_tag(tag) is None}
        return {folder_name(tag, 1, ZERO) for tag in folders.in_flight | new}

    def _owners(self, folders: set[str]) -> dict[str, int]:
        """Return the saves that have the files of these remote folders: key → id."""
        return {
            f"{folder}/{file.path}": row.id
            for row in self._state.saves.rows.values()
            if (folder := folder_name(row.save.tag, 1, ZERO)) in folders
            for file in row.save.files
        }

    def _hand_over(self, save_id: int, remote: str, key: str) -> None:
        self._state.journal.adopt_early(save_id, remote, key)
        if self._state.uploads.record(save_id, remote, ZERO).state is UploadState.COMMITTED:
            self._state.journal.forget_objects(save_id, remote, ZERO)

    def _delete(self, session: RemoteSession, useless: list[ObjectRow], objects: list[str]) -> None:
        order = m.DeleteEarly(
            uploads=tuple((row.key, row.token) for row in useless if row.proof is None),
            objects=tuple(objects),
            node_id=session.settings.node_id,
        )
        # of no form: as other deletions it is not cancelled for an upload, which waits a moment
        session.start_transfer(order, partial(self._deleted, session, [row.key for row in useless]))

    def _deleted(self, session: RemoteSession, keys: list[str], answer: m.Answer) -> None:
        error = answer.raised if isinstance(answer, m.Failed) else None
        if error is None:
            self._state.journal.forget_early(session.name, keys)
            log.info("%s: shards of a save that did not become whole were deleted", session.name)
        elif isinstance(error, RefusedError | DamagedError | NotPermitted):
            # until the next start; `ckptd gc` finds them
            self._state.journal.with_early.discard(session.name)
            log.warning("%s: shards of a save that did not become whole stay: %s", session.name, error)
        elif not isinstance(error, SourceChanged):
            session.note_transfer_failed(error)
        self._wake()


def _folder_of(row: ObjectRow) -> str:
    return row.key.partition("/")[0]
