"""`python -m ckptd.conversion.engine.executor_child`: makes the files of a plan (docs/design.md §4).

Request on stdin: see `Request`. Progress goes to stdout as JSON lines, a failure to stderr as one line.
`STOP_SIGNAL` stops it between windows; SIGSTOP and SIGCONT pause it; kill -9 leaves a folder that the next
attempt finishes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass, replace
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from ckptd.base import extents, files
from ckptd.base.extents import identity_of
from ckptd.base.files import opened_real
from ckptd.base.names import DESCRIPTION
from ckptd.base.process import limit_malloc
from ckptd.conversion.dtypes import use_numpy_of
from ckptd.conversion.engine.executor import Maker, StoppedByParent, Worker
from ckptd.conversion.engine.sandbox import STOP_SIGNAL, UNLIMITED, fail, restrict
from ckptd.conversion.engine.verify import verify_outputs, verify_sources
from ckptd.conversion.engine.writer import Counters, OutputFolders, Ticker, WriteLimits, own
from ckptd.conversion.outputs import description_of, large_first
from ckptd.conversion.parts import Range
from ckptd.conversion.plan import OutputCheck, OutputFile, OutputLink, PlanReader, read_trailer
from ckptd.conversion.reader import Ranges, SourceFiles
from ckptd.errors import CkptdError, SourceChanged, StorageError, from_os_error
from ckptd.storage.stores.parallel import FailFastPool
from ckptd.storage.stores.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptd.conversion.plan import Output

LARGE_BYTES = 64 << 20
_CHECKS_AT_ONCE = 16
"""Comparisons that one thread takes: weights have those of a whole file before it."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MALLOC_BYTES = 2 << 20
"""Larger than all blocks that a thread holds: a freed one is taken again, and costs no new pages."""


@dataclass(frozen=True, slots=True)
class Request:
    """`source`: folder read; `work`: our folder (plan.jsonl, tmp/, out/); `files`: names that may be read."""

    source: str
    work: str
    files: list[str]
    memory_budget_bytes: int
    reserve_bytes: int
    threads: int
    is_striped: bool
    """Few and large files: one lane makes them one after another, the others compare meanwhile."""
    clone: bool
    file_mode: int
    folder_mode: int
    gid: int
    verify: bool
    low_priority: bool
    manifest: dict[str, Any]
    numpy_folder: str
    """Folder to import numpy from when weights are rounded; empty: none are."""
    network: bool = False
    """Allow connections: for sources and outputs that lie in a remote."""
    bytes_per_second: int | None = None
    """Limit of what is copied and compared."""


def main() -> int:
    """Serve one request; exit status 0 = every file is in place and durable."""
    return serve(Request(**json.loads(sys.stdin.buffer.read())), Execution)


def serve(request: Request, execution: Callable[[Request, int, int, threading.Event], Execution]) -> int:
    """Carry out one request; a failure is one line on stderr."""
    restrict(
        memory_bytes=UNLIMITED,
        cpu_seconds=UNLIMITED,
        file_bytes=UNLIMITED,
        network=request.network,
        priority=request.low_priority,
    )
    limit_malloc({_M_TRIM_THRESHOLD: _MALLOC_BYTES, _M_MMAP_THRESHOLD: _MALLOC_BYTES})
    if request.numpy_folder:
        use_numpy_of(request.numpy_folder)
    os.umask(0)  # modes are given explicitly, those of the checkpoint (P15)
    stop = threading.Event()
    signal.signal(STOP_SIGNAL, lambda *_: stop.set())
    try:
        with opened_real(request.work) as work_fd, opened_real(request.source) as source_fd:
            execution(request, work_fd, source_fd, stop).run()
    except StoppedByParent:
        return 128 + STOP_SIGNAL
    except CkptdError as error:
        return fail(error)
    except OSError as error:
        return fail(from_os_error(error, f"converting into {request.work}"))
    except MemoryError:
        hint = "raise the limit (ulimit -v), or lower --memory-budget"
        return fail(StorageError("converting needs more memory than this process may have", hint=hint))
    except Exception as error:  # noqa: BLE001 - the parent shows words, no traceback
        kind = type(error).__name__
        return fail(
            StorageError(f"converting into {request.work} failed ({kind}: {ascii(str(error))[:200]})")
        )
    return 0


class Execution:
    """One run over one plan."""

    def __init__(self, request: Request, work_fd: int, source_fd: int, stop: threading.Event) -> None:
        self.request = request
        self.work_fd = work_fd
        self.source_fd = source_fd
        self.stop = stop
        self.counters = Counters()
        self.phase = "copying"
        self.out_fd = files.open_dir_beneath(work_fd, "out")
        self.temporary_fd = files.open_dir_beneath(work_fd, "tmp")
        self.sources: Ranges = SourceFiles(source_fd, [], [])
        self.settings = WriteLimits.within(
            request.memory_budget_bytes,
            threads=request.threads,
            clone=request.clone,
            reserve_bytes=request.reserve_bytes,
            modes=(request.file_mode, request.folder_mode, request.gid),
        )
        self.folders = OutputFolders(self.out_fd, self.settings)
        self.pacer = RateLimiter(request.bytes_per_second)

    def run(self) -> None:
        """Verify sources if asked, make all files, prove the sources unchanged, flush folders."""
        plan_fd = files.open_beneath(self.work_fd, "plan.jsonl")
        with open(plan_fd, "rb") as stream:
            plan = PlanReader(stream)
            self.sources = self.open_sources(plan)
            with Ticker(self.counters, lambda: self.phase):
                try:
                    self._make(stream, plan)
                except CkptdError:
                    self.recheck_sources(plan)  # what looks damaged or drifted may be a save under way
                    raise

    def _make(self, stream: IO[bytes], plan: PlanReader) -> None:
        if self.request.verify:
            self.phase = "verifying"
            self.verify_sources(plan)
            self.phase = "copying"
        large_bytes = max(LARGE_BYTES, read_trailer(stream).bytes // (4 * self.settings.threads))
        stream.seek(0)
        plan = PlanReader(stream)
        outputs = large_first(stream, plan, large_bytes)
        local = self.sources.local
        last: list[OutputFile] = []
        if self.request.is_striped:
            made = (output for output in outputs if not isinstance(output, OutputCheck))
            with open(files.open_beneath(self.work_fd, "plan.jsonl"), "rb") as again:
                checks = (output for output in PlanReader(again) if isinstance(output, OutputCheck))
                links = self._copy_all(made, checks, is_striped=True)
        else:
            copied = None if self.settings.clone else local
            links = self._copy_all(without_cold_copies(outputs, copied, last))
        if last:
            self._copy_all(iter(last), is_striped=True)
        for link in links:
            self.name_again(link)
        if self.request.verify:
            self.phase = "verifying"
            stream.seek(0)
            self.verify_outputs(PlanReader(stream))
        if local is not None:
            local.drop_cold()
        self.recheck_sources(plan)
        self._check_whole(plan)
        self.phase = "publishing"
        assert plan.trailer is not None
        self.finish(description_of(plan.header, plan.trailer, self.request.manifest))

    def verify_sources(self, plan: PlanReader) -> None:
        """Read the local sources by their own checksums; those of a store are compared at the end."""
        if self.sources.local is not None:
            verify_sources(plan.header, self.sources.local, self.check_stop)

    def verify_outputs(self, plan: PlanReader) -> None:
        """Read back what was made."""
        verify_outputs(plan, self.sources, self.out_fd, self.check_stop)

    def check_stop(self) -> None:
        """Raise `StoppedByParent` once the parent said so."""
        if self.stop.is_set():
            raise StoppedByParent

    def open_sources(self, plan: PlanReader) -> Ranges:
        """Open only names that the parent listed, each if it is still the file that was planned."""
        allowed = set(self.request.files)
        for source in plan.header.sources:
            if source.path not in allowed:
                raise SourceChanged(f"the plan names {source.path}, which was not listed")
        return SourceFiles(self.source_fd, [s.path for s in plan.header.sources], plan.identities)

    def recheck_sources(self, plan: PlanReader) -> None:
        """Raise unless the source files are still those that were planned."""
        for source, identity in zip(plan.header.sources, plan.identities, strict=True):
            status = files.stat_beneath(self.source_fd, source.path)
            if status is None or identity_of(status) != identity:
                raise SourceChanged(
                    f"{source.path} was written or removed while it was converted",
                    hint="nothing was published; convert again when the save is complete",
                )

    def _check_whole(self, plan: PlanReader) -> None:
        """Raise unless every file of the plan was made."""
        assert plan.trailer is not None
        if self.counters.files != plan.trailer.files:
            raise StorageError(f"{self.counters.files} of {plan.trailer.files} files were made")

    def _copy_all(
        self, plan: Iterator[Output], checks: Iterable[Output] = (), *, is_striped: bool = False
    ) -> list[OutputLink]:
        """Have outputs made by threads, begun in their order; returns the links.

        `is_striped`: one lane makes the files, what is rounded or cloned with as many threads as there are
        lanes; the others take the comparisons.
        """
        links: list[OutputLink] = []
        lock, lanes = threading.Lock(), FailFastPool()
        count, beside = self.settings.threads, iter(checks)
        self.settings = replace(self.settings, stripe_threads=count if is_striped else 1)

        def take(outputs: Iterator[Output]) -> list[OutputFile | OutputCheck]:
            """Take a file and the checks before it, which have read its bytes; or some checks."""
            found: list[OutputFile | OutputCheck] = []
            with lock:
                for output in outputs:
                    if isinstance(output, OutputLink):
                        links.append(output)
                        continue
                    found.append(output)
                    if isinstance(output, OutputFile) or len(found) == _CHECKS_AT_ONCE:
                        break
            return found

        def serve(number: int) -> None:
            worker = self.worker(number)
            shared = beside if is_striped and number else chain(plan, beside)
            try:
                while True:
                    self.check_stop()
                    taken = take(shared)
                    if not taken:
                        worker.settle()
                        return
                    for output in taken:
                        lanes.check()
                        if isinstance(output, OutputCheck):
                            worker.compare(output)
                        else:
                            worker.make(output)
            finally:
                worker.abandon()

        lanes.run(count, range(count), serve, name="copy")
        return links

    def worker(self, number: int) -> Maker:
        """One thread's worker."""
        return Worker(
            number=number,
            out_fd=self.out_fd,
            temporary_fd=self.temporary_fd,
            sources=self.sources,
            folders=self.folders,
            settings=self.settings,
            counters=self.counters,
            pacer=self.pacer,
            stop=self.stop,
        )

    def name_again(self, link: OutputLink) -> None:
        """A second name for a file of ours (never for a trainer's)."""
        if files.stat_beneath(self.out_fd, link.path) is None:
            os.link(
                link.target, link.path, src_dir_fd=self.out_fd, dst_dir_fd=self.out_fd, follow_symlinks=False
            )
        self.counters.add(files=1)

    def finish(self, description: bytes) -> None:
        """ckptd.json at the root, then every folder durable."""
        self._manifest(description)
        own(self.out_fd, self.request.gid, self.request.folder_mode)
        for folder in self.folders.made():
            with files.opened_dir(folder, self.out_fd) as fd:
                files.fsync_dir(fd)
        files.fsync_dir(self.out_fd)

    def _manifest(self, data: bytes) -> None:
        """Write ckptd.json; its temporary lies in tmp/, where no kill makes it part of the result."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(DESCRIPTION, flags, 0o600, dir_fd=self.temporary_fd)
        try:
            extents.write_all(fd, data)
            own(fd, self.request.gid, self.request.file_mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(DESCRIPTION, DESCRIPTION, src_dir_fd=self.temporary_fd, dst_dir_fd=self.out_fd)


def without_cold_copies(
    plan: Iterable[Output], local: SourceFiles | None, kept: list[OutputFile]
) -> Iterator[Output]:
    """Yield outputs, and keep those that are a whole source file of which most was not in the page cache.

    Such are the model files. Masters are compared with the weights in them: what is read for that is in the
    page cache when they are copied last, and read twice when they are copied first.
    """
    for output in plan:
        part = output.parts[0] if isinstance(output, OutputFile) and len(output.parts) == 1 else None
        if (
            local is not None
            and isinstance(output, OutputFile)
            and isinstance(part, Range)
            and output.path == local.path(part.source)
            and local.was_cold(local[part.source])
        ):
            kept.append(output)
        else:
            yield output


if __name__ == "__main__":
    sys.exit(main())
