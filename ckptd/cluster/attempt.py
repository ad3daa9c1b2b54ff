"""One attempt: tasks to the workers, results into the note, until every output of the plan is in its place.

What remains of it after a kill is the note and the outputs themselves; the next attempt goes on (P7).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from ckptd import errors
from ckptd.cluster.messages import Extent, Join, Result, Task, TaskSource
from ckptd.cluster.sending import part_bytes, shares_uploads
from ckptd.cluster.tasking import Tasking
from ckptd.convert.options import ConvertProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckptd.cluster.crew import Crew
    from ckptd.cluster.grouping import Index
    from ckptd.cluster.messages import Job
    from ckptd.cluster.note import Note
    from ckptd.remote.store import Store

QUEUED_PER_THREAD = 2
TRIES = 3
"""Of one task, when what went wrong may pass."""
POLL_SECONDS = 0.05


@dataclass(slots=True)
class Tally:
    """What an attempt came to; bytes of sources, but `bytes_done` of outputs."""

    bytes_done: int = 0
    files_resumed: int = 0
    bytes_read: int = 0
    bytes_needed: int = 0
    tasks: int = 0
    tasks_again: int = 0
    peak_rss_bytes: int = 0
    extents: list[Extent] = field(default_factory=list)


class Attempt:
    """See the module's first lines. `stream`: the plan; `known`: every source that it names, by number."""

    def __init__(
        self,
        crew: Crew,
        job: Job,
        store: Store,
        note: Note,
        stream: IO[bytes],
        index: Index,
        known: Mapping[int, TaskSource],
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
        self._tasking = Tasking(job, store, note, stream, index, known)
        self._verify = verify
        self._tell = tell
        self._should_stop = should_stop
        self._sizes = {name: item.nbytes for item in index.items for name in item.names}
        self._links = {name for item in index.items for name in item.names[1:]}
        """Whose bytes count with their first name."""
        self._there: dict[str, int] = {}
        self._asked: dict[str, tuple[Task, int, object]] = {}
        self._ready_joins: list[Join] = []
        self.tally = Tally()

    def run(self) -> Tally:
        """Until every output is in its place and proven.

        Raises:
            CkptdError: what a worker ran into. BehindError: stopped. RemoteUnreachable: no cluster any more.
            LockHeld: another command took the destination over.
        """
        missing = self._take_over()
        try:
            threads = self._crew.threads
            making = self._tasking.making(missing, self._there, threads=threads, verify=self._verify)
            self._drain(making)
            self._check_coverage()
            if self._verify:
                self._tell_phase("verifying")
                self._drain(self._tasking.proving(self._sizes))
        except BaseException:
            self._crew.end(self._job.attempt, [future for _, _, future in self._asked.values()])
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
        return [number for number in range(1, held.parts + 1) if number not in noted]

    # --- results -----------------------------------------------------------------------------------------

    def _drain(self, handfuls: Iterator[list[Task]]) -> None:
        """Keep the workers busy with what comes until nothing is left."""
        waiting: list[Task] = []
        is_over = False
        while True:
            most = QUEUED_PER_THREAD * max(1, self._crew.threads) + 2
            while self._ready_joins:
                waiting.insert(0, self._tasking.task(joins=(self._ready_joins.pop(),)))
            while not is_over and len(waiting) + len(self._asked) < most:
                handful = next(handfuls, None)
                is_over = handful is None
                waiting += handful or []
            while waiting and len(self._asked) < most:
                self._ask(waiting.pop(0), 1)
            if is_over and not waiting and not self._asked and not self._ready_joins:
                return
            self._take_what_is_ready()

    def _ask(self, task: Task, tries: int) -> None:
        key = f"ckptd-{self._job.attempt}-{task.number}-{tries}"
        future = self._crew.ask(self._job.model_dump_json(), task.model_dump_json(), key)
        self._asked[key] = (task, tries, future)
        self.tally.tasks += 1

    def _take_what_is_ready(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise errors.BehindError("converting was stopped", hint="the next attempt goes on where it ended")
        ready = self._crew.ready()
        for future in ready:
            task, tries, _ = self._asked.pop(future.key)
            text = self._crew.answer(future)
            result = Result.model_validate_json(text) if text is not None else _killed(task)
            self.tally.peak_rss_bytes = max(self.tally.peak_rss_bytes, result.peak_rss_bytes)
            if result.error:
                self._try_again(task, tries, result)
            else:
                self._take(result)
        self._note.write(force=False)
        if ready:
            self._tell_phase("copying")
        else:
            time.sleep(POLL_SECONDS)

    def _try_again(self, task: Task, tries: int, result: Result) -> None:
        kind = getattr(errors, result.error, errors.StorageError)
        error = kind(result.message, hint=result.hint)
        if error.retry is not errors.Retry.BACKOFF or tries >= TRIES or isinstance(error, errors.BehindError):
            raise error
        self.tally.tasks_again += 1
        self._ask(task, tries + 1)

    def _take(self, result: Result) -> None:
        known, tally = self._note.progress, self.tally
        self._note.is_behind = True
        tally.bytes_read += result.read_bytes
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
        for sent in result.parts:
            if sent.path not in known.uploads:
                continue
            parts = known.parts.setdefault(sent.path, {})
            for part in sent.parts:
                if part.number not in parts:
                    self._count_part(sent.path, part.number)
                parts[part.number] = part
            self._join_if_whole(sent.path)

    def _count_part(self, path: str, number: int) -> None:
        size = part_bytes(self._note.progress.uploads[path])
        if path not in self._links:
            self.tally.bytes_done += min(size, self._sizes[path] - (number - 1) * size)

    def _join_if_whole(self, path: str) -> None:
        known, nbytes = self._note.progress, self._sizes[path]
        token, parts = known.uploads[path], known.parts.get(path, {})
        if len(parts) == -(-nbytes // part_bytes(token)):
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
