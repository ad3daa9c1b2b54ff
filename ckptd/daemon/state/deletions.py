"""Record deletions, here and in remotes: rate limits, confirmed COMMITs, failures and when to try again."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.base.retry import doubled
from ckptd.errors import BeingRead, SourceChanged
from ckptd.storage.journal.history import BELT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ckptd.core.policy.retention import RetentionVerdict
    from ckptd.core.policy.view import Confirmation
    from ckptd.errors import CkptdError
    from ckptd.storage.journal.journal import Journal
    from ckptd.storage.remote.documents import Stem

HOUR_SECONDS = BELT_SECONDS
_MINUTE_SECONDS = 60.0
_MOST_TIMES = 4
_SOON_SECONDS = 10.0
_LATELY = "retired-lately"
"""Key of the journal: COMMITs ("digest remote") whose deletion was ordered within the hour, and when
(Unix)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedDeletion:
    """Record why a checkpoint that may be deleted here is still here."""

    text: str
    hint: str
    is_brief: bool
    """The trainer wrote meanwhile: it goes at the next look."""
    times: int = 1
    """Times in a row."""
    at_seconds: float = 0.0
    """The last time; monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedDeletion:
    """Record a deletion that a remote refused: how often in a row, and when last (monotonic)."""

    about: str
    text: str
    hint: str
    times: int
    at_seconds: float
    is_read: bool = False
    """It waits for a reader."""


class Deletions:
    """The deletions of one job; what is not in the journal the next scan finds again."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.local_at: deque[float] = deque()
        """Monotonic times of deletions on this node, for the rate limit."""
        self.completed_at: deque[float] = deque()
        """Monotonic times at which saves were sealed, for the rate limit."""
        self.remote_at: dict[tuple[str, str], float] = {}
        """(remote, digest of a zero COMMIT) → monotonic time of its (first) deletion; tries of one count
        once."""
        self.confirmations: dict[int, Confirmation] = {}
        self.asking: set[int] = set()
        """Ids of saves whose COMMITs are being read again."""
        self.blocked: dict[int, BlockedDeletion] = {}
        """Save id → why it may go, and is still here."""
        self.refused: dict[tuple[str, str], RefusedDeletion] = {}
        """(remote, digest) of a COMMIT that the remote did not delete: two may hold the same bytes."""
        self.interrupted: set[int] = set()
        """Deletions of the journal whose folder lies in the trash and that nobody works on."""
        self.observed: set[str] = set()
        """Remotes that were observed since the start, though they may be away by now."""
        self.undecided: set[str] = set()
        """Remotes that lack a decision that is known here: nothing is deleted from them (adr/0165)."""
        self.due_since_seconds: dict[tuple[str, str], float] = {}
        """(remote, COMMIT key) → since when nothing has kept it there; monotonic."""
        self._begun_seconds: dict[tuple[str, Stem], float] = {}
        self._obstacle: tuple[str, float] | None = None

    # --- the rate limit --------------------------------------------------------------------------------

    def restore_rate_limit(self) -> None:
        """Count the deletions of the hour before a restart: a daemon that restarts again and again needs the
        limit most.

        By wall-clock time: where the clock jumped an hour forward the hour counts as over. Where it went
        back, deletions count as just done, and saves that were completed later than now not at all: the limit
        must not grow. An older journal has digests alone: each counts for every remote.
        """
        now, unix = time.monotonic(), time.time()
        sealed, pruned = self._journal.lately(unix - HOUR_SECONDS)
        self.completed_at.extend(now - (unix - at) for at in sealed if at <= unix)
        self.local_at.extend(now - max(0.0, unix - at) for at in pruned)
        lately: dict[str, float] = json.loads(self._journal.meta(_LATELY) or "{}")
        for key, at in lately.items():
            sha256, _, remote = key.partition(" ")
            self.remote_at[remote, sha256] = now - max(0.0, unix - at)

    def forget_past_hour(self) -> None:
        """Forget what no longer counts against the rate limit."""
        begin = time.monotonic() - HOUR_SECONDS
        for times in (self.local_at, self.completed_at):
            while times and times[0] < begin:
                times.popleft()
        self.remote_at = {key: at for key, at in self.remote_at.items() if at >= begin}

    def local_left(self, save_total_limit: int | None) -> int:
        """Return how many deletions the rate limit still permits on this node."""
        return self._left(len(self.local_at), save_total_limit)

    def remote_left(self, other_remotes: Collection[str], save_total_limit: int | None) -> int:
        """Return how many deletions the rate limit still permits in a remote.

        Deletions in a remote that has another name now, and those of an older journal without names, count
        too.
        """
        done = sum(name not in other_remotes for name, _ in self.remote_at)
        return self._left(done, save_total_limit)

    def _left(self, done: int, limit: int | None) -> int:
        """Saves completed in this hour + max(3, 2 × save_total_limit), less the deletions done."""
        return len(self.completed_at) + max(3, 2 * (limit or 0)) - done

    def note_completed(self) -> None:
        """Count a save that was sealed: one more deletion is permitted in this hour."""
        self.completed_at.append(time.monotonic())

    def begin_local(self, save_id: int) -> float:
        """Count a deletion on this node, and use up its confirmation; return when it began."""
        self.confirmations.pop(save_id, None)
        self.local_at.append(begun_at := time.monotonic())
        return begun_at

    def undo_local(self, begun_at: float) -> None:
        """Count a deletion that did not happen no more."""
        with contextlib.suppress(ValueError):
            self.local_at.remove(begun_at)

    def begin_remote(self, remote: str, commit_sha256: str) -> None:
        """Count a deletion in a remote: once for all its tries, and before the first."""
        if (remote, commit_sha256) in self.remote_at or ("", commit_sha256) in self.remote_at:
            return
        now, unix = time.monotonic(), time.time()
        counted = {**self.remote_at, (remote, commit_sha256): now}
        lately = {f"{sha256} {name}": unix - (now - at) for (name, sha256), at in counted.items()}
        self._journal.set_meta(_LATELY, json.dumps(lately))
        self.remote_at = counted

    # --- confirmations ---------------------------------------------------------------------------------

    def begin_confirmation(self, save_id: int) -> bool:
        """Record that the COMMITs of a save are being read again; False: they were already."""
        is_new = save_id not in self.asking
        self.asking.add(save_id)
        return is_new

    def confirm(self, save_id: int, confirmation: Confirmation) -> None:
        """Record that every required remote confirmed the COMMITs of a save."""
        self.confirmations[save_id] = confirmation

    def end_confirmation(self, save_id: int) -> None:
        """Record that every remote has answered."""
        self.asking.discard(save_id)

    def forget(self, save_id: int) -> None:
        """Forget a save that the journal forgot."""
        self.confirmations.pop(save_id, None)
        self.asking.discard(save_id)

    # --- failures --------------------------------------------------------------------------------------

    def note_blocked(self, save_id: int, error: CkptdError) -> None:
        """Record that a deletion on this node failed once more."""
        before = self.blocked.get(save_id)
        self.blocked[save_id] = BlockedDeletion(
            text=error.message,
            hint=error.hint,
            is_brief=isinstance(error, SourceChanged),
            times=before.times + 1 if before is not None else 1,
            at_seconds=time.monotonic(),
        )

    def forget_blocked(self, *save_ids: int) -> None:
        """Forget failed deletions of these saves; without any, of all: they are tried at once."""
        for save_id in save_ids or list(self.blocked):
            self.blocked.pop(save_id, None)

    def blocked_lately(self) -> frozenset[int]:
        """Saves that could not be deleted here: tried again in ten seconds, twenty … an hour."""
        now = time.monotonic()
        return frozenset(
            save_id
            for save_id, blocked in self.blocked.items()
            if not blocked.is_brief
            and now - blocked.at_seconds < doubled(_SOON_SECONDS, blocked.times, HOUR_SECONDS)
        )

    def note_refused(self, remote: str, sha256: str, about: str, error: CkptdError) -> None:
        """Record that a remote refused to delete a COMMIT once more."""
        before, is_read = self.refused.get((remote, sha256)), isinstance(error, BeingRead)
        times = before.times + 1 if before is not None else 1
        self.refused[remote, sha256] = RefusedDeletion(
            about=about,
            text=f"{about} stays: {error.message}",
            hint=error.hint,
            # a reader ends without a word to us
            times=min(times, _MOST_TIMES) if is_read else times,
            at_seconds=time.monotonic(),
            is_read=is_read,
        )

    def forget_refused(self, remote: str, sha256: str) -> None:
        """Forget that a remote refused to delete a COMMIT: it is gone, or wanted again."""
        self.refused.pop((remote, sha256), None)

    def refused_lately(self) -> frozenset[tuple[str, str]]:
        """(remote, digest) of COMMITs that a remote refused to delete: asked again in a minute … an hour; of
        one that is being read, in eight minutes at most.
        """
        now = time.monotonic()
        return frozenset(
            at
            for at, refused in self.refused.items()
            if now - refused.at_seconds < doubled(_MINUTE_SECONDS, refused.times, HOUR_SECONDS)
        )

    def set_interrupted(self, deletion_id: int, *, is_interrupted: bool) -> None:
        """Record whether a deletion waits half-done in the trash."""
        (self.interrupted.add if is_interrupted else self.interrupted.discard)(deletion_id)

    def seconds_blocked_by(self, obstacle: str | None) -> float:
        """Return how long the same obstacle has blocked retention; None: there is none now."""
        now = time.monotonic()
        if obstacle is None:
            self._obstacle = None
        elif self._obstacle is None or self._obstacle[0] != obstacle:
            self._obstacle = (obstacle, now)
        return now - self._obstacle[1] if self._obstacle is not None else 0.0

    @property
    def is_blocked(self) -> bool:
        """Something blocks retention."""
        return self._obstacle is not None

    # --- remotes ---------------------------------------------------------------------------------------

    def note_observed(self, remotes: Iterable[str]) -> None:
        """Record which remotes were observed."""
        self.observed.update(remotes)

    def set_undecided(self, remote: str, *, is_undecided: bool) -> None:
        """Record whether a remote lacks a decision that is known here."""
        (self.undecided.add if is_undecided else self.undecided.discard)(remote)

    def note_verdicts(self, verdicts: Mapping[tuple[str, str], RetentionVerdict]) -> None:
        """Record since when nothing has kept a COMMIT, by the verdicts of the last plan."""
        self.due_since_seconds = due_since(self.due_since_seconds, verdicts, time.monotonic())

    def seconds_begun(self, remote: str, stem: Stem) -> float:
        """Return how long ago a deletion that is under way in a remote was first seen."""
        now = time.monotonic()
        return now - self._begun_seconds.setdefault((remote, stem), now)


def due_since(
    known: dict[tuple[str, str], float],
    verdicts: Mapping[tuple[str, str], RetentionVerdict],
    now_seconds: float,
) -> dict[tuple[str, str], float]:
    """(remote, COMMIT key) → since when nothing has kept it, by the verdicts of one more plan."""
    return {at: known.get(at, now_seconds) for at, one in verdicts.items() if not one.keeps}
