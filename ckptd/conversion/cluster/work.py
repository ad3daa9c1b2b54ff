"""Run one task on a worker of the cluster, from descriptors to proven outputs (docs/internals/conversion.md).

It never unpickles a checkpoint. What goes wrong comes back as data, which the command raises as its own.
Credentials are those of its environment. A task does nothing for an attempt that another one took over.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import ckptd
from ckptd.base import files
from ckptd.base.files import opened_real
from ckptd.conversion.cluster import uploader
from ckptd.conversion.cluster.extents import (
    Extents,
    FolderPlace,
    LocalPlace,
    LocalShards,
    StorePlace,
    save_dirs,
    spans_of,
)
from ckptd.conversion.cluster.grouping import parts_of
from ckptd.conversion.cluster.memory import keep_small, shares_of
from ckptd.conversion.cluster.messages import Claims, ClusterJob, Question, Result, Task
from ckptd.conversion.dtypes import numpy_folder, use_numpy_of
from ckptd.conversion.engine.sandbox import peak_rss_bytes
from ckptd.conversion.engine.verify import verify_source
from ckptd.conversion.parts import ranges_of
from ckptd.conversion.plan import check_of
from ckptd.conversion.reader import refuse_unequal
from ckptd.errors import (
    BehindError,
    CkptdError,
    ConfigError,
    LockHeld,
    NotFoundError,
    StorageError,
    from_os_error,
)
from ckptd.storage.child.apart import open_apart
from ckptd.storage.stores.fsspec_store import FilesStore
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3.store import S3Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.conversion.cluster.extents import SourcePlace
    from ckptd.conversion.cluster.messages import TaskSource
    from ckptd.conversion.parts import Range
    from ckptd.storage.stores.base import Store

WINDOW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Ends:
    """Clients that a process keeps open from task to task: each costs memory and handshakes."""

    source: Store | None
    target: Store

    def close(self) -> None:
        """End the connections; a directory has none."""
        for store in (self.source, self.target):
            if isinstance(store, S3Store | FilesStore):
                with suppress(Exception):  # nobody needs it any more
                    store.close()


class _Attempts:
    """Track attempts in this process: which are over, how many tasks of each run here, their clients.

    A worker may live for months and serve thousands of attempts, so clients are closed with their attempt:
    when it is over, or, if its command died without a word, when another attempt opens its own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._over: set[str] = set()
        self._running: Counter[str] = Counter()
        self._ends: dict[tuple[str, str], _Ends] = {}

    @contextmanager
    def slot(self, attempt: str, most: int) -> Iterator[None]:
        """One of the tasks that the memory budget of this process allows at a time."""
        with self._changed:
            while self._running.total() >= most and attempt not in self._over:
                self._changed.wait(1.0)
            self._running[attempt] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[attempt] -= 1
                if not self._running[attempt]:
                    del self._running[attempt]
                idle = self._taken_idle() if attempt in self._over else []
                self._changed.notify_all()
            for ends in idle:
                ends.close()

    def ends(self, job: ClusterJob) -> _Ends:
        """Return the clients of a job, opened by the first of its tasks; called within a slot."""
        key = job.attempt, job.model_dump_json()
        with self._changed:
            idle = [] if key in self._ends else self._taken_idle()
            if key not in self._ends:
                self._ends[key] = _opened(job)
            found = self._ends[key]
        for ends in idle:
            ends.close()
        return found

    def _taken_idle(self) -> list[_Ends]:
        """Forget the clients of attempts without a task here; the caller closes them outside the lock."""
        return [self._ends.pop(key) for key in [*self._ends] if key[0] not in self._running]

    def check(self, attempt: str) -> None:
        if attempt in self._over:
            raise BehindError("the conversion was stopped")

    def end(self, attempt: str) -> None:
        with self._changed:
            self._over.add(attempt)
            idle = self._taken_idle()
            self._changed.notify_all()
        for ends in idle:
            ends.close()

    def running(self, attempt: str) -> int:
        """Tasks of an attempt."""
        return self._running[attempt]

    @property
    def open(self) -> int:
        """Pairs of clients that are kept."""
        return len(self._ends)


_attempts = _Attempts()


def report_version(dask_worker: Any = None) -> str:
    """Return the version of ckptd in this worker, whose profiler is stopped."""
    stop_profiler(dask_worker)
    keep_small()
    return ckptd.__version__


def stop_profiler(dask_worker: Any) -> None:
    """Stop dask's profiler: before Python 3.11.8 it can halt a worker for ever.

    It asks for all frames under a lock that a collection of garbage takes as well (CPython gh-106883).
    """
    callback = dask_worker.periodic_callbacks.pop("profile", None) if dask_worker is not None else None
    if callback is not None:
        dask_worker.loop.add_callback(callback.stop)


def stop(attempt: str) -> None:
    """Tasks of an attempt end as soon as they can."""
    _attempts.end(attempt)


def running(attempt: str) -> int:
    """Tasks of an attempt that run in this process."""
    return _attempts.running(attempt)


def open_clients() -> int:
    """Pairs of clients that this process keeps for its attempts."""
    return _attempts.open


def claims(question_text: str) -> str:
    """Answer which of the sources in question are on this machine; a `Claims` as JSON."""
    question = Question.model_validate_json(question_text)
    try:
        return Claims(numbers=_shelf().claims(question.sources)).model_dump_json()
    except CkptdError as error:
        return Claims(error=error.message, hint=error.hint).model_dump_json()


@cache
def _shelf() -> LocalShards:
    return LocalShards(save_dirs(os.environ))


def run(job_text: str, task_text: str) -> str:
    """Carry out a task; a `Result` as JSON, also where it failed."""
    job, task = ClusterJob.model_validate_json(job_text), Task.model_validate_json(task_text)
    _calm_here()
    with _attempts.slot(job.attempt, shares_of(job.memory_budget_bytes).tasks):
        try:
            result = _Work(job, task).run()
        except CkptdError as error:
            result = _failed(task, error)
        except OSError as error:
            result = _failed(task, from_os_error(error, f"converting on {worker_name()}"))
        except Exception as error:  # noqa: BLE001 - the command shows words, no traceback
            words = f"{type(error).__name__}: {ascii(str(error))[:200]}"
            result = _failed(task, StorageError(f"converting on {worker_name()} failed ({words})"))
    return result.model_dump_json()


def worker_name() -> str:
    """Host and process, for messages."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _failed(task: Task, error: CkptdError) -> Result:
    return Result(number=task.number, worker=worker_name(), peak_rss_bytes=peak_rss_bytes(), **error.as_data)


def _opened(job: ClusterJob) -> _Ends:
    """Clients of a job's ends; nothing is asked of a server yet."""
    url = job.source_url
    source = open_apart(url, url, job.source_access) if url else None
    target = open_store(
        job.target_url,
        access=job.target_access,
        owner=f"{job.attempt}-{worker_name()}",
        window_bytes=WINDOW_BYTES,
    )
    if isinstance(target, S3Store) and job.abilities is not None:
        target.abilities = job.abilities
    return _Ends(source, target)


class _Work:
    """One task."""

    def __init__(self, job: ClusterJob, task: Task) -> None:
        if job.version != ckptd.__version__:
            raise ConfigError(
                f"worker {worker_name()} has ckptd {ckptd.__version__}, the command {job.version}",
                hint="install the same version everywhere",
            )
        self.job = job
        self.task = task
        self.sources = {source.number: source for source in task.sources}
        self.shares = shares_of(job.memory_budget_bytes)

    def check_stop(self) -> None:
        """Raise once the command wants no more."""
        _attempts.check(self.job.attempt)

    def run(self) -> Result:
        """Look whose attempt it is, compare, make, join, prove."""
        job, task = self.job, self.task
        self.check_stop()
        ends = _attempts.ends(job)
        self._check_note(ends.target)
        if job.rounds:
            _use_numpy()
        units = uploader.units_of(task.pieces)
        units.sort(key=lambda unit: unit.begin)
        spans = spans_of(self._ranges(units))
        with ExitStack() as stack:
            place = self._place(ends.source, stack)
            extents = Extents(
                place, self.sources, spans, cache_bytes=self.shares.cache_bytes, check_stop=self.check_stop
            )
            # an error's traceback may live on, and with it all that it saw
            stack.callback(extents.close)
            for line in task.checks:
                self._compare(line, extents)
            copied = self.sources if task.copies else {}
            sender = uploader.PieceUploader(job, ends.target, extents, copied, self.check_stop)
            work = [partial(sender.send, unit) for unit in units]
            work += [partial(sender.join, join) for join in task.joins]
            work += [partial(sender.prove, proof) for proof in task.proofs]
            sender.lanes.run(self.shares.lanes, work, lambda one: one(), name="outputs")
            return Result(
                number=task.number,
                worker=worker_name(),
                done=tuple(sender.done),
                parts=tuple(sender.parts),
                undone=tuple(sender.undone),
                extents=extents.hashed(),
                read_bytes=extents.read_bytes,
                local_bytes=place.local_bytes,
                needed_bytes=extents.needed_bytes,
                peak_rss_bytes=peak_rss_bytes(),
            )

    def _check_note(self, target: Store) -> None:
        """Stop this attempt if another command took the destination over."""
        raw = target.get(self.job.note_key)
        if raw is None:
            raise NotFoundError(
                f"worker {worker_name()} does not see the attempt at {self.job.target_url}",
                hint="DST must be the same place on every worker: a shared file system, or a URL",
            )
        if json.loads(raw).get("attempt") != self.job.attempt:
            raise LockHeld(
                f"another conversion took {self.job.target_url}/{self.job.target_name} over",
                hint="let that one finish",
            )

    def _ranges(self, units: list[uploader.Unit]) -> Iterator[Range]:
        for unit in units:
            for part in unit.parts:
                yield from ranges_of(part)
        for line in self.task.checks:
            for part in parts_of(line):
                yield from ranges_of(part)

    def _place(self, store: Store | None, stack: ExitStack) -> SourcePlace:
        if store is not None:
            held = LocalPlace(_shelf(), StorePlace(store), self.check_stop)
            stack.callback(held.close)
            return held
        if not self.sources:
            return FolderPlace(-1, files.open_beneath)
        root = self.job.source_root
        if not os.path.isdir(root):
            raise NotFoundError(
                f"worker {worker_name()} does not see {root}",
                hint="SRC must be the same place on every worker: a shared file system, or a URL",
            )
        root_fd = stack.enter_context(opened_real(root))
        folder = FolderPlace(root_fd, files.open_beneath)
        stack.callback(folder.close)
        for number in self.task.crc32s:
            self._verify_source(root_fd, self.sources[number])
        return folder

    def _verify_source(self, root_fd: int, source: TaskSource) -> None:
        self.check_stop()
        with files.reading(root_fd, source.name) as fd:
            verify_source(source.name, source.fingerprint, fd)

    def _compare(self, line: str, extents: Extents) -> None:
        refuse_unequal(check_of(json.loads(line)), extents, self.check_stop)


@cache
def _calm_here() -> None:
    """A worker that joined after the command looked."""
    from distributed import get_worker

    stop_profiler(get_worker())
    keep_small()


@cache
def _use_numpy() -> None:
    use_numpy_of(numpy_folder())
