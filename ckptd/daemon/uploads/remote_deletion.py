"""Delete in remotes what retention permits: audited first, refused deletions retried later.

A crash between tombstone, COMMIT and objects is finished by the next start (P7); a deletion that a remote
refuses is a problem with a next step, not a failure of the remote.
"""

from __future__ import annotations

import logging
import zlib
from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.model.manifest import commit_key, node_in
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.policy.remote import TURN_SECONDS
from ckptd.errors import (
    BeingRead,
    CommitConflict,
    DamagedError,
    NotFoundError,
    NotPermitted,
    RefusedError,
    SourceChanged,
)
from ckptd.observe.logs import line_fields
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.manifest import TombstoneHeader
    from ckptd.core.policy.actions import DeleteRemote
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.errors import CkptdError
    from ckptd.observe.audit import Audit

log = logging.getLogger("ckptd.deletion")

_NOT_ITS_FAULT = (RefusedError, DamagedError, CommitConflict, NotFoundError, NotPermitted)
"""The remote works and takes uploads; what was asked of it cannot be done as things are."""


def patience_seconds(seen: m.Observation, node: str) -> float:
    """Return how long a removal that is under way is left to whoever began it: of several nodes he may be
    at it.
    """
    several = any(_is_of_several([ref.key for ref in view.commit.manifests]) for view in seen.commits)
    return (1 + zlib.crc32(node.encode()) % 10) * TURN_SECONDS if several else 0.0


def _is_of_several(manifests: Sequence[str]) -> bool:
    # of a thousand nodes the second says it
    return any(node_in(key) != node_in(manifests[0]) for key in manifests)


class RemoteDeleter:
    """The removals of one job from its remotes."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        sessions: Mapping[str, RemoteSession],
        audit: Audit,
        wake: Callable[[], None],
    ) -> None:
        self._takes_zero = {remote.name: ZERO in remote.forms for remote in config.remotes}
        self._state = state
        self._sessions = sessions
        self._audit = audit
        self._wake = wake

    def delete(self, action: DeleteRemote) -> None:
        """Tombstone, COMMIT, objects."""
        session, commit, instead = self._sessions[action.remote], action.commit, action.instead
        rests_on = [commit] if instead is None else [commit, instead]
        self._audit.write(
            "retire",
            tag=commit.tag,
            generation=commit.generation,
            form=commit.form,
            reason=action.reason,
            commits=[(c.key, c.sha256) for c in rests_on],
        )
        if commit.form == ZERO or not self._takes_zero[action.remote]:
            self._state.deletions.begin_remote(action.remote, commit.sha256)
        order = m.DeleteCommit(
            tag=commit.tag,
            generation=commit.generation,
            form=commit.form,
            reason=action.reason,
            commit_sha256=commit.sha256,
            instead=None if instead is None else (instead.form, instead.sha256),
            counted=action.counted,
        )
        session.start_transfer(order, partial(self._deleted, action))
        log.info(
            "%s (%s) deleted from %s: %s",
            commit.tag,
            commit.form,
            action.remote,
            action.reason,
            extra=line_fields("delete-remote", commit.tag),
        )

    def _deleted(self, action: DeleteRemote, answer: m.Answer) -> None:
        session, commit, state = self._sessions[action.remote], action.commit, self._state
        about = _about(session, commit.tag, commit.form)
        if isinstance(answer, m.Failed):
            self._not_deleted(session, about, commit.sha256, answer.raised)
            return
        session.forget_commit(commit.key)
        for save_id, records in list(state.uploads.records.items()):
            for record in list(records.values()):
                if record.remote == action.remote and record.commit_sha256 == commit.sha256:
                    state.uploads.update(save_id, record, state=UploadState.DELETED)
        session.forget_tag(commit.tag)
        state.deletions.forget_refused(session.name, commit.sha256)
        self._gone(session)

    def _gone(self, session: RemoteSession) -> None:
        session.observe()
        self._wake()

    def _not_deleted(self, session: RemoteSession, about: str, sha256: str, error: CkptdError) -> None:
        if isinstance(error, _NOT_ITS_FAULT):
            level = logging.INFO if isinstance(error, BeingRead) else logging.WARNING
            log.log(level, "%s stays: %s", about, error)
            self._state.deletions.note_refused(session.name, sha256, about, error)
        elif not isinstance(error, SourceChanged):
            session.note_transfer_failed(error)
        # else: it made way, and goes on when its turn comes again
        session.observe()
        self._wake()

    def finish_interrupted(self, *, rests: bool) -> None:
        """Removals that a crash cut short: the tombstone is there, the rest goes now (P7).

        Called when the turn's uploads have their remotes: what sends comes before what removes.
        """
        for session in () if rests else self._sessions.values():
            seen = session.observation
            if seen is None or not session.may_transfer or session.name in self._state.deletions.undecided:
                continue
            stone = next((t for t in seen.retired if self._is_to_finish(session, seen, t)), None)
            if stone is not None:
                self._finish(session, stone)

    def _is_to_finish(self, session: RemoteSession, seen: m.Observation, stone: TombstoneHeader) -> bool:
        stem = (stone.tag, stone.generation, stone.form)
        if stem not in seen.retiring:
            return False
        if (session.name, stone.commit_sha256) in self._state.deletions.refused_lately():
            return False
        begun = self._state.deletions.seconds_begun(session.name, stem)
        return begun >= patience_seconds(seen, session.settings.node)

    def _finish(self, session: RemoteSession, stone: TombstoneHeader) -> None:
        tag, generation, form = stone.tag, stone.generation, stone.form
        self._audit.write(
            "retire",
            tag=tag,
            generation=generation,
            form=form,
            reason=f"what was cut short is finished: {stone.reason}",
            commits=[(commit_key(tag, generation, form), stone.commit_sha256)],
        )
        order = m.DeleteCommit(
            tag=tag,
            generation=generation,
            form=form,
            reason=stone.reason,
            commit_sha256=stone.commit_sha256,
        )
        session.start_transfer(order, partial(self._finished, session, stone))

    def _finished(self, session: RemoteSession, stone: TombstoneHeader, answer: m.Answer) -> None:
        about = _about(session, stone.tag, stone.form)
        if isinstance(answer, m.Failed):
            self._not_deleted(session, about, stone.commit_sha256, answer.raised)
        else:
            self._state.deletions.forget_refused(session.name, stone.commit_sha256)
            self._gone(session)


def _about(session: RemoteSession, tag: str, form: str) -> str:
    return f"{tag} ({form}) of {session.name}"
