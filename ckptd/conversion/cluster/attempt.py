"""One attempt: tasks to the workers, results into the note, until every output of the plan is in its place.

What remains of it after a kill is the note and the outputs themselves; the next attempt goes on (P7).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from ckptd import errors
from ckptd.conversion.cluster.grouping import ANYWHERE
from ckptd.conversion.cluster.messages import Extent, Join, Result, Task, TaskSource
from ckptd.conversion.cluster.tasks import TaskBuilder
from ckptd.conversion.cluster.uploader import shares_uploads, upload_of
from ckptd.conversion.options import ConvertProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckptd.conversion.cluster.destination import AttemptLog
    from ckptd.conversion.cluster.grouping import Home, Index
    from ckptd.conversion.cluster.messages import ClusterJob
    from ckptd.conversion.cluster.pool import WorkerPool
    from ckptd.storage.stores.base import Store

QUEUED_PER_THREAD = 2
TRIES = 3
"""Tries of one task whose failure may pass."""
POLL_SECONDS = 0.05


@dataclass(slots=True)
class AttemptTally:
    """Count what an attempt did; bytes are of sources, but `bytes_done` of outputs."""

    bytes_local: int = 0
    """Part of `bytes_read` that came from workers' own disks."""

    bytes_done: int = 0
    files_resumed: int = 0
    was_begun: bool = False
    """It continues an earlier attempt; nobody compared what that one read."""
    bytes_read: int = 0
    bytes_needed: int = 0
    tasks: int = 0
    tasks_again: int = 0
    peak_rss_bytes: int = 0
    extents: list[Extent] = field(default_factory=list)


@dataclass(slots=True)
class _Feed:
    """Tasks of one home: what comes, what waits, and how many are asked for."""

    home: Home
    handfuls: Iterator[list[Task]]
    waiting: list[Task] = field(default_factory=list)
    asked: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    """A task that is under way, for the `tries`th time."""

    task: Task
    tries: int
    feed: _Feed
    home: Home
    future: Any


class ClusterAttempt:
    """See the module's first lines.

    `stream`: the plan; `known`: every source that it names, by number; `holders`: who has which.
    """

    def __init__(
        self,
        crew: WorkerPool,
        job: ClusterJob,
        store: Store,
        note: AttemptLog,
        stream: IO[bytes],
        index: Index,
        known: Mapping[int, TaskSource],
        holders: Mapping[int, Home],
        *,
        verify: bool,
        tell: Callable[[ConvertProgress], None],
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self._crew = crew
        self._job = job
        self._store = store
        self._note = note
        self._index = index
        self._tasking = TaskBuilder(job, store, note, stream, index, known, holders)
        self._verify = verify
        self._tell = tell
        self._should_stop = should_stop
        self._sizes = {name: item.nbytes for item in index.items for name in item.names}
        self._links = {name for item in index.items for name in item.names[1:]}
        """Second names; their bytes count with the first name."""
        self._there: dict[str, int] = {}
        self._asked: dict[str, _Asked] = {}
        self._ready_joins: list[Join] = []
        self._undone: list[str] = []
        self._remade: set[str] = set()
        self.tally = AttemptTally()

    def run(self) -> AttemptTally:
        """Run tasks until every output is in its place and proven.

        Raises:
            CkptdError: what a worker ran into. BehindError: stopped. RemoteUnreachable: the cluster is gone.
            LockHeld: another command took the destination over.
        """
        missing = self._take_over()
        try:
            threads = self._crew.threads
            making = self._tasking.making(missing, self._there, threads=threads, verify=self._verify)
            self._drain([_Feed(home, handfuls) for home, handfuls in making.items()])
            self._check_coverage()
            if self._verify:
                self._tell_phase("verifying")
                self._drain([_Feed(ANYWHERE, self._tasking.proving(self._sizes))])
            self._crew.release(self._job.attempt)
        except BaseException:
            self._crew.end(self._job.attempt, [asked.future for asked in self._asked.values()])
            raise
        finally:
            if self._note.progress.done:
                self._noted_at_last()
        return self.tally

    # --- what there is already ---------------------------------------------------------------------------

    def _take_over(self) -> dict[str, list[int]]:
        """Drop from the note what is not there any more; returns parts that lack of uploads that are open."""
        head, known = f"{self._job.target_name}/", self._note.progress
        self._there = {info.key[len(head) :]: info.bytes for info in self._store.list(head)}
        known.done = {p: crc for p, crc in known.done.items() if self._there.get(p) == self._sizes.get(p, -1)}
        self.tally.files_resumed = len(known.done)
        self.tally.bytes_done = sum(self._sizes[path] for path in known.done if path not in self._links)
        missing: dict[str, list[int]] = {}
        for path, token in list(known.uploads.items()):
            left = self._continued(path, token) if path not in known.done else None
            if left is None:
                known.uploads.pop(path, None)
                known.parts.pop(path, None)
            else:
                missing[path] = left
        self.tally.was_begun = bool(known.done or known.parts)
        self._note.claim()
        return missing

    def _continued(self, path: str, token: str) -> list[int] | None:
        """Parts that lack of an upload that was begun; None: it is over, and is begun anew."""
        store, key = shares_uploads(self._store), f"{self._job.target_name}/{path}"
        nbytes = self._sizes.get(path)
        held = (
            store.uploads.held_shared(key, nbytes, token)
            if store is not None and nbytes is not None
            else None
        )
        if held is None or nbytes is None:
            self._store.discard(key, token)
            return None
        noted = self._note.progress.parts.setdefault(path, {})
        for number in [n for n, part in noted.items() if held.etags.get(n) != part.etag]:
            del noted[number]
        for number in noted:
            self._count_part(path, number)
        self._join_if_whole(path)
        return [number for number in range(1, held.cuts.parts + 1) if number not in noted]

    # --- results -----------------------------------------------------------------------------------------

    def _drain(self, feeds: list[_Feed]) -> None:
        """Keep the workers busy with what comes until nothing is left."""
        joins, again = _Feed(ANYWHERE, iter(())), _Feed(ANYWHERE, iter(()))
        while True:
            while self._undone:
                again.waiting += self._tasking.remaking(self._undone.pop())
            while self._ready_joins:
                joins.waiting.append(
                    Task(number=next(self._tasking.numbers), joins=(self._ready_joins.pop(),))
                )
            for feed in (joins, again, *feeds):
                self._feed(feed)
            is_idle = not (self._asked or self._ready_joins or self._undone or joins.waiting or again.waiting)
            if is_idle and all(feed.is_over and not feed.waiting for feed in feeds):
                return
            self._take_what_is_ready()

    def _feed(self, feed: _Feed) -> None:
        """Submit as many tasks as the workers of that home need to stay busy."""
        most = QUEUED_PER_THREAD * max(1, self._crew.threads_of(feed.home)) + 2
        while not feed.is_over and len(feed.waiting) + feed.asked < most:
            handful = next(feed.handfuls, None)
            feed.is_over = handful is None
            feed.waiting += handful or []
        while feed.waiting and feed.asked < most:
            self._ask(feed.waiting.pop(0), 1, feed)

    def _ask(self, task: Task, tries: int, feed: _Feed) -> None:
        # a home whose workers are gone is nobody's: its sources are read from the remote then
        home = feed.home & self._crew.alive
        key = f"ckptd-{self._job.attempt}-{task.number}-{tries}{'' if home or not feed.home else '-anywhere'}"
        future = self._crew.ask(self._job.model_dump_json(), task.model_dump_json(), key, home)
        self._asked[key] = _Asked(task, tries, feed, home, future)
        feed.asked += 1
        self.tally.tasks += 1

    def _take_what_is_ready(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise errors.BehindError("converting was stopped", hint="the next attempt goes on where it ended")
        ready = self._crew.ready()
        for future in ready:
            asked = self._asked.pop(future.key, None)
            if asked is None:
                continue  # cancelled, and asked of somebody else
            asked.feed.asked -= 1
            text = self._crew.answer(future)
            result = Result.model_validate_json(text) if text is not None else _killed(asked.task)
            self.tally.peak_rss_bytes = max(self.tally.peak_rss_bytes, result.peak_rss_bytes)
            if result.error:
                self._try_again(asked, result)
            else:
                self._take(result)
        self._take_from_the_dead()
        self._note.write(force=False)
        if ready:
            self._tell_phase("copying")
        else:
            time.sleep(POLL_SECONDS)

    def _take_from_the_dead(self) -> None:
        """Tasks of homes without a worker: dask would keep them until one of that address comes back."""
        for key, asked in list(self._asked.items()):
            if asked.home and not asked.home & self._crew.alive:
                self._crew.cancel(asked.future)
                del self._asked[key]
                asked.feed.asked -= 1
                self.tally.tasks_again += 1
                self._ask(asked.task, asked.tries, asked.feed)

    def _try_again(self, asked: _Asked, result: Result) -> None:
        error = errors.error_named(result.error, result.message, result.hint)
        if (
            error.retry is not errors.Retry.BACKOFF
            or asked.tries >= TRIES
            or isinstance(error, errors.BehindError)
        ):
            raise error
        self.tally.tasks_again += 1
        self._ask(asked.task, asked.tries + 1, asked.feed)

    def _take(self, result: Result) -> None:
        known, tally = self._note.progress, self.tally
        self._note.is_behind = True
        tally.bytes_read += result.read_bytes
        tally.bytes_local += result.local_bytes
        tally.bytes_needed += result.needed_bytes
        tally.extents += result.extents
        for done in result.done:
            is_joined = known.uploads.pop(done.path, None) is not None
            known.parts.pop(done.path, None)
            is_new = done.path not in known.done and done.path not in self._links
            if is_new and not is_joined:
                tally.bytes_done += done.nbytes
            tally.files_resumed += int(done.resumed)
            known.done[done.path] = done.crc64
        for path in result.undone:
            self._undo(path)
        for sent in result.parts:
            if sent.path not in known.uploads:
                continue
            parts = known.parts.setdefault(sent.path, {})
            for part in sent.parts:
                if part.number not in parts:
                    self._count_part(sent.path, part.number)
                parts[part.number] = part
            self._join_if_whole(sent.path)

    def _undo(self, path: str) -> None:
        """Forget an upload that came to other bytes, so that it is made again.

        Raises:
            VerifyError: it came to other bytes before.
        """
        if path in self._remade:
            where = f"{self._job.target_name}/{path} in {self._store.url}"
            raise errors.VerifyError(f"{where} came to other bytes than were sent, twice")
        self._remade.add(path)
        self._undone.append(path)
        self._note.progress.uploads.pop(path, None)
        self._note.progress.parts.pop(path, None)
        if path not in self._links:
            self.tally.bytes_done -= self._sizes[path]

    def _count_part(self, path: str, number: int) -> None:
        if path not in self._links:
            upload = upload_of(self._note.progress.uploads[path], self._sizes[path])
            self.tally.bytes_done += upload.cuts.range_of(number)[1]

    def _join_if_whole(self, path: str) -> None:
        known, nbytes = self._note.progress, self._sizes[path]
        token, parts = known.uploads[path], known.parts.get(path, {})
        if len(parts) == upload_of(token, nbytes).cuts.parts:
            join = Join(path=path, nbytes=nbytes, token=token, parts=tuple(parts.values()))
            if all(join.path != other.path for other in self._ready_joins):
                self._ready_joins.append(join)

    def _tell_phase(self, phase: str) -> None:
        trailer = self._index.trailer
        self._tell(
            ConvertProgress(
                phase="verifying" if phase == "verifying" else "copying",
                bytes_done=self.tally.bytes_done,
                bytes_total=trailer.bytes,
                files_done=len(self._note.progress.done),
                files_total=trailer.files,
            )
        )

    def _noted_at_last(self) -> None:
        try:
            self._note.write(force=True)
        except errors.CkptdError:
            return  # what an attempt ended with is said, not that its note could not be written

    def _check_coverage(self) -> None:
        """Every output of the plan: done and proven by its CRC64, and listed with its size (P3).

        Raises:
            StorageError: one is not. LockHeld: the destination is another attempt's.
        """
        head, done = f"{self._job.target_name}/", self._note.progress.done
        listed = {info.key[len(head) :]: info.bytes for info in self._store.list(head)}
        for path, nbytes in self._sizes.items():
            if path not in done or listed.get(path) != nbytes:
                raise errors.StorageError(
                    f"{head}{path} in {self._store.url} is not what was made there: {listed.get(path)} bytes "
                    f"instead of {nbytes}",
                    hint="somebody else writes there; the same command makes what lacks",
                )
        self._note.check_ours()


def _killed(task: Task) -> Result:
    """Workers died of it several times."""
    return Result(
        number=task.number,
        worker="",
        error="StorageError",
        message=f"workers died of a task of {task.nbytes} bytes again and again",
        hint="give them more memory, or lower --memory-budget; what is done is kept",
    )
