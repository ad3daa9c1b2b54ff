"""Record the uploads of a job: the state of each form of a save on a remote, and what is under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptd.base.retry import doubled
from ckptd.core.model.records import ZERO, UploadRecord, UploadState

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from ckptd.core.completeness.missing import MissingPart
    from ckptd.core.model.layouts import NamedShard
    from ckptd.core.model.listing import ListedFile
    from ckptd.core.policy.view import GenerationAnswer
    from ckptd.errors import CkptdError
    from ckptd.storage.journal.journal import Journal
    from ckptd.storage.remote.messages import UploadResult

UploadKey = tuple[int, str, str]
"""(save id, remote, form)."""

MOST_TIMES = 8
_FIRST_SECONDS, _MOST_SECONDS = 60.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitWait:
    """Record what the last commit attempt lacked; `reason`: the same as text."""

    reason: str
    hint: str = "see the other nodes"
    missing: tuple[NamedShard, ...] = ()
    parts: tuple[MissingPart, ...] = ()
    """Parts of the tag that other nodes hold, as of the last look."""
    attempts: int = 1
    """Attempts in a row with that reason."""
    first_seconds: float = 0.0
    """Time of the first attempt."""
    is_whole: bool = False
    """All parts are listed, as the last look told: a COMMIT is due."""

    @property
    def retry_seconds(self) -> float:
        """Return the seconds until the next attempt, doubled with each one, at most 8 times the first wait.

        Without the back-off all other nodes would ask each minute, for ever, for a save that one node never
        wrote. A COMMIT by another node is noticed at once, whatever this returns.
        """
        return doubled(self.first_seconds, self.attempts, self.first_seconds * MOST_TIMES)


def waiting_on(before: CommitWait | None, answer: UploadResult, first_seconds: float) -> CommitWait:
    """Return the record of a commit attempt that lacked something, counting on from the attempt before."""
    reason = answer.reason or ""
    attempts = before.attempts + 1 if before is not None and before.reason == reason else 1
    return CommitWait(
        reason=reason,
        hint=answer.hint or "see the other nodes",
        missing=answer.missing,
        parts=before.parts if before is not None else (),
        attempts=attempts,
        first_seconds=first_seconds,
        is_whole=before is not None and before.is_whole,
    )


def note_parts(
    waiting: CommitWait, retry_at_seconds: float, *, is_whole: bool, now_seconds: float
) -> tuple[CommitWait, float]:
    """Return the record updated with what other nodes' manifests show, and when to try again now.

    The node with the last part commits. If it dies before, the others try again after the first wait, however
    long they had waited, but not at once: of a thousand nodes each would read a thousand manifests.
    """
    if is_whole and not waiting.is_whole:
        retry_at_seconds = min(retry_at_seconds, now_seconds + waiting.first_seconds)
    return replace(waiting, is_whole=is_whole), retry_at_seconds


@dataclass(slots=True)
class UploadProgress:
    """Track the progress of an upload under way."""

    done_bytes: int
    total_bytes: int
    started_seconds: float
    start_bytes: int = 0
    objects: dict[str, int] = field(default_factory=dict)
    """Bytes done, by key."""
    durable: tuple[str, int, str] = ("", 0, "")
    """Key, flushed bytes and token last noted in the journal."""

    def advance(self, key: str, done_bytes: int) -> None:
        """Record how much of an object is uploaded."""
        self.done_bytes += done_bytes - self.objects.get(key, 0)
        self.objects[key] = done_bytes

    def note_durable(self, key: str, flushed_bytes: int, token: str) -> bool:
        """Record how much of an object is durable; return whether that is to be journalled."""
        durable = (key, flushed_bytes, token)
        is_news = bool(flushed_bytes or token) and durable != self.durable
        if is_news:
            self.durable = durable
        return is_news

    def set_total(self, total_bytes: int) -> None:
        """Record how much there is to upload, once that is planned."""
        self.total_bytes = total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLateFiles:
    """Record why files that came late in a save are not committed beside its COMMIT, while the remote
    works.
    """

    about: str
    text: str
    hint: str
    times: int
    """Times in a row."""
    at_seconds: float
    """The last time; monotonic."""


class Uploads:
    """The uploads of one job; records are journalled as they change."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.records: dict[int, dict[tuple[str, str], UploadRecord]] = {}
        self.generations: dict[UploadKey, GenerationAnswer] = {}
        self.progress: dict[UploadKey, UploadProgress] = {}
        """Progress of uploads under way."""
        self.waiting: dict[UploadKey, CommitWait] = {}
        """Parts that wait for other nodes' shards."""
        self.failed_late: dict[tuple[int, str], FailedLateFiles] = {}
        """(save id, remote) → why files that came late are not committed there."""
        self.early: dict[str, tuple[str, ListedFile]] = {}
        """Remote → tag and shard that are uploaded there before their save is whole."""
        self.tried_early: set[tuple[str, str, ListedFile]] = set()
        """(remote, tag, shard) that were uploaded so, or could not be."""
        self.speeds: dict[str, float] = {}
        """Remote → bytes per second of its last upload that was committed."""

    # --- records ---------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read all records from the journal."""
        known, self.records = self.records, self._journal.uploads()
        for save_id, records in self.records.items():
            for key, record in records.items():
                records[key] = _with_wait(record, known.get(save_id, {}).get(key))

    def reload(self, *ids: int) -> None:
        """Read the records of some saves again from the journal."""
        fresh = self._journal.uploads(*ids)
        for save_id in ids:
            known = self.records.get(save_id, {})
            self.records[save_id] = {
                key: _with_wait(record, known.get(key)) for key, record in fresh.get(save_id, {}).items()
            }

    def of(self, save_id: int) -> Mapping[tuple[str, str], UploadRecord]:
        """Return the records of a save, by remote and form."""
        return self.records.get(save_id, {})

    def record(self, save_id: int, remote: str, form: str) -> UploadRecord:
        """Return the record of one form of a save on a remote, or a new one."""
        return self.of(save_id).get((remote, form)) or UploadRecord(remote=remote, form=form)

    def commits_of(self, save_id: int) -> dict[str, Any]:
        """Return generation and COMMITs of a save's ZeRO form, for an audit line about something of that
        save.
        """
        zero = [r for r in self.of(save_id).values() if r.form == ZERO and r.commit_key]
        return {
            "generation": max((r.generation or 0 for r in zero), default=0),
            "commits": [(r.commit_key or "", r.commit_sha256 or "") for r in zero],
        }

    def is_first(self, remote: str) -> bool:
        """Tell whether the ZeRO form of a save that is committed nowhere yet is on its way to a remote."""
        return any(
            name == remote
            and form == ZERO
            and all(r.state is not UploadState.COMMITTED for r in self.of(save_id).values() if r.form == ZERO)
            for save_id, name, form in self.progress
        )

    def put(self, save_id: int, record: UploadRecord) -> None:
        """Record the state of an upload in the journal and here."""
        self._journal.put_upload(save_id, record)
        self.records.setdefault(save_id, {})[record.remote, record.form] = record

    def update(self, save_id: int, record: UploadRecord, **changes: object) -> None:
        """Record an upload with some fields changed."""
        self.put(save_id, record.model_copy(update=changes))

    def forget_waits(self, save_id: int) -> None:
        """Upload a part that got more shards again, as another revision of its manifest."""
        for (remote, form), record in list(self.of(save_id).items()):
            if record.state in (UploadState.WAITING, UploadState.FAILED):
                self.update(save_id, record, state=UploadState.NEW, retry_at_seconds=0.0)
                self.forget_generation((save_id, remote, form))

    def forget_damage(self, save_id: int) -> None:
        """Reset refused uploads of a save whose files were put back, so that they are read again."""
        for record in list(self.of(save_id).values()):
            if record.form == ZERO and record.state is UploadState.REFUSED:
                self.update(save_id, record, state=UploadState.NEW, reason=None, is_damaged=False)
                self.forget_generation((save_id, record.remote, ZERO))

    def lose_commit(self, save_id: int, remote: str, reason: str, form: str = ZERO) -> None:
        """Mark a form as not committed in a remote that no longer vouches for it, so that it is uploaded
        again.
        """
        gone = {"state": UploadState.NEW, "commit_key": None, "commit_sha256": None, "supplements": ()}
        self.update(save_id, self.record(save_id, remote, form), **gone, reason=reason)
        self.forget_generation((save_id, remote, form))

    def forget(self, save_id: int) -> None:
        """Forget a save that the journal forgot."""
        self.records.pop(save_id, None)
        for known in (self.generations, self.waiting):
            for key in [key for key in known if key[0] == save_id]:
                del known[key]

    # --- generations -----------------------------------------------------------------------------------

    def set_generation(self, key: UploadKey, answer: GenerationAnswer) -> None:
        """Record the generation under which a form is to be uploaded."""
        self.generations[key] = answer

    def forget_generation(self, key: UploadKey | None = None) -> None:
        """Have the generation of a form chosen anew; without a key, those of all."""
        if key is None:
            self.generations.clear()
        else:
            self.generations.pop(key, None)

    # --- under way -------------------------------------------------------------------------------------

    def begin(self, key: UploadKey, total_bytes: int) -> None:
        """Record that an upload begins."""
        now = time.monotonic()
        self.progress[key] = UploadProgress(done_bytes=0, total_bytes=total_bytes, started_seconds=now)

    def end(self, key: UploadKey) -> None:
        """Record that an upload ended, whatever came of it."""
        self.progress.pop(key, None)

    def begin_early(self, remote: str, tag: str, file: ListedFile, tags: Container[str]) -> None:
        """Record that a shard is uploaded before its save is whole; `tags`: those of saves under way."""
        self.tried_early = {one for one in self.tried_early if one[1] in tags} | {(remote, tag, file)}
        self.early[remote] = tag, file

    def end_early(self, remote: str, *, is_cancelled: bool) -> None:
        """Record that it ended; one that made way is tried again."""
        ended = self.early.pop(remote, None)
        if ended is not None and is_cancelled:
            self.tried_early.discard((remote, *ended))

    def note_speed(self, key: UploadKey, moved_bytes: int) -> None:
        """Measure the speed of an upload that was committed: of bytes sent, and of those copied there."""
        progress = self.progress.get(key)
        seconds = time.monotonic() - progress.started_seconds if progress else 0.0
        if moved_bytes and seconds > 0:
            self.speeds[key[1]] = moved_bytes / seconds

    def running_speed(self, remote: str, least_seconds: float) -> float | None:
        """Return the speed (bytes/s) of a ZeRO upload under way: on the first day there is no finished one to
        measure.
        """
        now = time.monotonic()
        for (_, name, form), moving in self.progress.items():
            seconds, done = now - moving.started_seconds, moving.done_bytes - moving.start_bytes
            if name == remote and form == ZERO and seconds >= least_seconds and done > 0:
                return done / seconds
        return None

    # --- waits and failures ----------------------------------------------------------------------------

    def wait(self, key: UploadKey, waiting: CommitWait) -> CommitWait:
        """Record that a part waits for other nodes' shards."""
        self.waiting[key] = waiting
        return waiting

    def end_wait(self, key: UploadKey) -> None:
        """Record that a part waits no more."""
        self.waiting.pop(key, None)

    def note_late_failed(self, save_id: int, remote: str, about: str, error: CkptdError) -> None:
        """Record that files that came late in a save failed to upload once more."""
        before = self.failed_late.get((save_id, remote))
        self.failed_late[save_id, remote] = FailedLateFiles(
            about=about,
            text=f"{about}: files that came late are not committed: {error.message}",
            hint=error.hint or "tried again by itself, ever more seldom; the folder stays here until then",
            times=before.times + 1 if before is not None else 1,
            at_seconds=time.monotonic(),
        )

    def forget_late_failed(self, save_id: int, remote: str) -> None:
        """Forget that late files failed to upload: they are committed, or gone."""
        self.failed_late.pop((save_id, remote), None)

    def late_failed_lately(self) -> frozenset[tuple[int, str]]:
        """(save id, remote) whose late files are tried again in a minute, two … an hour."""
        now = time.monotonic()
        return frozenset(
            at
            for at, one in self.failed_late.items()
            if now - one.at_seconds < doubled(_FIRST_SECONDS, one.times, _MOST_SECONDS)
        )


def _with_wait(record: UploadRecord, known: UploadRecord | None) -> UploadRecord:
    """Waits are monotonic, so the journal does not have them; a new state of the record needs none."""
    if known is None or record.state not in (UploadState.FAILED, UploadState.WAITING):
        return record
    return record.model_copy(update={"retry_at_seconds": known.retry_at_seconds})
