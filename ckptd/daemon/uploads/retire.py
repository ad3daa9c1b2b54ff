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
from ckptd.core.model.records import ZERO, ShipState
from ckptd.core.policy.remote import TURN_SECONDS
from ckptd.errors import (
    CommitConflict,
    DamagedError,
    NotFoundError,
    NotPermitted,
    RefusedError,
    SourceChanged,
)
from ckptd.observe.logs import doing
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.manifest import TombstoneHeader
    from ckptd.core.policy.actions import Retire
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.errors import CkptdError
    from ckptd.observe.audit import Audit

log = logging.getLogger("ckptd.retire")

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
        links: Mapping[str, RemoteSession],
        audit: Audit,
        wake: Callable[[], None],
    ) -> None:
        self._takes_zero = {remote.name: ZERO in remote.forms for remote in config.remotes}
        self._state = state
        self._links = links
        self._audit = audit
        self._wake = wake

    def retire(self, action: Retire) -> None:
        """Tombstone, COMMIT, objects."""
        link, commit, instead = self._links[action.remote], action.commit, action.instead
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
        order = m.Retire(
            tag=commit.tag,
            generation=commit.generation,
            form=commit.form,
            reason=action.reason,
            commit_sha256=commit.sha256,
            instead=None if instead is None else (instead.form, instead.sha256),
            counted=action.counted,
        )
        link.start_transfer(order, partial(self._retired, action))
        log.info(
            "%s (%s) retired from %s: %s",
            commit.tag,
            commit.form,
            action.remote,
            action.reason,
            extra=doing("retire", commit.tag),
        )

    def _retired(self, action: Retire, answer: m.Answer) -> None:
        link, commit, state = self._links[action.remote], action.commit, self._state
        about = _about(link, commit.tag, commit.form)
        if isinstance(answer, m.Failed):
            self._not_retired(link, about, commit.sha256, answer.raised)
            return
        link.forget_commit(commit.key)
        for save_id, records in list(state.uploads.records.items()):
            for record in list(records.values()):
                if record.remote == action.remote and record.commit_sha256 == commit.sha256:
                    state.uploads.update(save_id, record, state=ShipState.RETIRED)
        link.forget_tag(commit.tag)
        state.deletions.forget_refused(link.name, commit.sha256)
        self._gone(link)

    def _gone(self, link: RemoteSession) -> None:
        link.observe()
        self._wake()

    def _not_retired(self, link: RemoteSession, about: str, sha256: str, error: CkptdError) -> None:
        if isinstance(error, _NOT_ITS_FAULT):
            log.warning("%s stays: %s", about, error)
            self._state.deletions.note_refused(link.name, sha256, about, error)
        elif not isinstance(error, SourceChanged):
            link.move_failed(error)
        # else: it made way, and goes on when its turn comes again
        link.observe()
        self._wake()

    def finish(self, *, rests: bool) -> None:
        """Removals that a crash cut short: the tombstone is there, the rest goes now (P7).

        Called when the turn's uploads have their remotes: what sends comes before what removes.
        """
        for link in () if rests else self._links.values():
            seen = link.observation
            if seen is None or not link.may_move or link.name in self._state.deletions.undecided:
                continue
            stone = next((t for t in seen.retired if self._is_to_finish(link, seen, t)), None)
            if stone is not None:
                self._finish(link, stone)

    def _is_to_finish(self, link: RemoteSession, seen: m.Observation, stone: TombstoneHeader) -> bool:
        stem = (stone.tag, stone.generation, stone.form)
        if stem not in seen.retiring:
            return False
        if (link.name, stone.commit_sha256) in self._state.deletions.refused_lately():
            return False
        begun = self._state.deletions.seconds_begun(link.name, stem)
        return begun >= patience_seconds(seen, link.settings.node)

    def _finish(self, link: RemoteSession, stone: TombstoneHeader) -> None:
        tag, generation, form = stone.tag, stone.generation, stone.form
        self._audit.write(
            "retire",
            tag=tag,
            generation=generation,
            form=form,
            reason=f"what was cut short is finished: {stone.reason}",
            commits=[(commit_key(tag, generation, form), stone.commit_sha256)],
        )
        order = m.Retire(
            tag=tag,
            generation=generation,
            form=form,
            reason=stone.reason,
            commit_sha256=stone.commit_sha256,
        )
        link.start_transfer(order, partial(self._finished, link, stone))

    def _finished(self, link: RemoteSession, stone: TombstoneHeader, answer: m.Answer) -> None:
        about = _about(link, stone.tag, stone.form)
        if isinstance(answer, m.Failed):
            self._not_retired(link, about, stone.commit_sha256, answer.raised)
        else:
            self._state.deletions.forget_refused(link.name, stone.commit_sha256)
            self._gone(link)


def _about(link: RemoteSession, tag: str, form: str) -> str:
    return f"{tag} ({form}) of {link.name}"
