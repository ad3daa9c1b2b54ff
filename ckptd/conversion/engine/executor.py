"""Make the files of a plan: clone extents where the file system can, else copy in bounded windows.

Never unpickles. Each file is written under a temporary name in a folder of its own, flushed, and renamed;
so a final name in the output folder is a finished, durable file, and a restart skips it. Dirty pages
are written back and dropped window by window, so that the page cache counted to us stays small.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ckptd.base import extents
from ckptd.base.humanize import size_of
from ckptd.conversion.engine.writer import (
    BUFFER_BYTES,
    MIN_FILE_BYTES,
    STRIPE_BYTES,
    BufferedWriter,
    Counters,
    DirectReader,
    Dirty,
    OutputFolders,
    Stripe,
    WriteLimits,
    own,
    stripes,
)
from ckptd.conversion.parts import Literal, Part, Range, ranges_of
from ckptd.conversion.plan import OutputCheck, OutputFile
from ckptd.conversion.reader import BLOCK_BYTES as COMPARED_BYTES
from ckptd.conversion.reader import Ranges, blocks_of, descriptors, refuse_unequal
from ckptd.errors import NoSpaceError, SourceChanged
from ckptd.formats.torchfile.skeleton import BLOCK_BYTES
from ckptd.storage.stores.parallel import FailFastPool

if TYPE_CHECKING:
    from ckptd.conversion.reader import SourceFiles
    from ckptd.storage.stores.rate_limit import RateLimiter


# --- Clonable ranges: one rule for executor, planner and forecast ----------------------------------------
# Extents are shared in whole blocks, so a range must lie at the same offset modulo the block in both files;
# below 16 KiB a clone costs more than a copy (docs/design.md §4).

MIN_CLONE_BYTES = 16 << 10


def interior(offset: int, nbytes: int, at: int) -> tuple[int, int] | None:
    """Begin and end in the source of what can be cloned to `at` in the output; None where nothing can."""
    begin = offset + (-offset) % BLOCK_BYTES
    end = (offset + nbytes) // BLOCK_BYTES * BLOCK_BYTES
    if (offset - at) % BLOCK_BYTES or end - begin < MIN_CLONE_BYTES:
        return None
    return begin, end


@dataclass(slots=True)
class Tally:
    """Bytes of a plan by how they get into the outputs."""

    clonable: int = 0
    misplaced: int = 0
    """Bytes in ranges large enough to clone whose offsets do not agree: copied although extents clone."""

    def add(self, output: OutputFile) -> None:
        """Count one output."""
        at = 0
        for part in output.parts:
            if isinstance(part, Range):
                inside = interior(part.offset, part.nbytes, at)
                if inside is not None:
                    self.clonable += inside[1] - inside[0]
                elif part.nbytes >= MIN_CLONE_BYTES + BLOCK_BYTES:
                    self.misplaced += part.nbytes
            at += part.nbytes


# --- The executor ----------------------------------------------------------------------------------------

_BATCH_FILES = 128
_BATCH_BYTES = 512 << 20
"""Limit of what a thread has written and not named: a kill loses it, so that it is written again."""
FLUSHES_AT_ONCE = 48


class StoppedByParent(Exception):
    """The parent says so: what is finished stays, the rest is done by the next attempt."""


class Maker(Protocol):
    """One thread's worker, whatever it makes outputs in."""

    def make(self, output: OutputFile) -> None:
        """Make one output."""
        ...

    def compare(self, check: OutputCheck) -> None:
        """Refuse when what must be equal is not."""
        ...

    def settle(self) -> None:
        """Make durable what is not yet; nothing more comes."""
        ...

    def abandon(self) -> None:
        """Close what is open."""
        ...


@dataclass(slots=True, kw_only=True)
class Worker:
    """One copying thread's state: its batch of files that are written but not yet flushed and renamed."""

    number: int
    out_fd: int
    temporary_fd: int
    sources: Ranges
    folders: OutputFolders
    settings: WriteLimits
    counters: Counters
    pacer: RateLimiter
    stop: threading.Event
    local: SourceFiles | None = field(init=False)
    clone: bool = field(init=False)
    most_files: int = field(init=False)
    """Outputs that may be open at once, waiting for their flush."""
    batch: list[tuple[int, str, OutputFile]] = field(default_factory=list)
    batched_bytes: int = 0
    dirty_bytes: int = 0
    serial: int = 0
    _writer: BufferedWriter | None = None
    _reader: DirectReader | None = None

    def __post_init__(self) -> None:
        self.local, self.clone = self.sources.local, self.settings.clone
        self.most_files = min(_BATCH_FILES, descriptors() // (2 * self.settings.threads))

    def make(self, output: OutputFile) -> None:
        """Write one output, or skip it when an earlier attempt finished it."""
        self.folders.ensure(output.path)
        if self._is_made(output):
            self.counters.add(files=1, nbytes=output.nbytes, resumed=1)
            return
        self.serial += 1
        name = f"{self.number}-{self.serial}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self.temporary_fd)
        self.batch.append((fd, name, output))
        if self.clone:
            os.ftruncate(fd, output.nbytes)  # first: XFS preallocates megabytes behind a growing end
        is_striped = self.settings.stripe_threads > 1 and output.nbytes > STRIPE_BYTES
        # weights that are copied wait for the disk, those that are rounded for the processor; a whole file of
        # the source, which lies in the page cache, may wait for a disk that answers late
        made_bytes = sum(part.nbytes for part in output.parts if not isinstance(part, Literal | Range))
        is_for_threads = len(output.parts) == 1 or made_bytes > STRIPE_BYTES
        through_buffer = not self.clone and not (is_striped and is_for_threads)
        is_written = through_buffer and self._through_buffer(fd, output)
        if is_striped and not is_written:
            found = stripes(output.parts, divide_ranges=not self.clone)
            threads = self.settings.stripe_threads
            FailFastPool().run(threads, found, lambda stripe: self._stripe(fd, stripe), name="stripe")
        else:
            if not is_written:
                self._parts(fd, 0, output.parts)
            if is_written and output.nbytes >= MIN_FILE_BYTES:
                # some file systems take O_DIRECT and use the cache all the same (ext4 with data=journal)
                self.dirty_bytes += extents.cached_bytes(fd) or 0
            else:
                self.dirty_bytes += output.nbytes
                extents.start_flush(fd)
        own(fd, self.settings.gid, self.settings.file_mode)
        self.batched_bytes += output.nbytes
        if (
            self.dirty_bytes >= self.settings.batch_bytes
            or self.batched_bytes >= _BATCH_BYTES
            or len(self.batch) >= self.most_files
        ):
            self.settle()

    def _is_made(self, output: OutputFile) -> bool:
        """Tell whether an earlier attempt finished it: what has its name is durable."""
        try:
            done = os.stat(output.path, dir_fd=self.out_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return done.st_size == output.nbytes

    def _through_buffer(self, fd: int, output: OutputFile) -> bool:
        """Write an output out of a buffer, a large one with O_DIRECT; False where that is not to be had."""
        local = self.local
        if local is None:
            return False
        if self._writer is None:
            self._writer = BufferedWriter(min(BUFFER_BYTES, self.settings.window_bytes // 2))
        writer = self._writer
        self._check_room(output.nbytes)
        if not writer.begin(fd, output.nbytes):
            return False
        for part in output.parts:
            if isinstance(part, Range):
                with local.named(part.source):
                    self._append(writer, local, part)
                continue
            for data in blocks_of(part, self.sources):
                self._check_stop()
                writer.put(data)
                if isinstance(part, Literal):
                    self.counters.add(nbytes=len(data))
                else:
                    self._copied(len(data))
            self._drop(part)
        writer.finish()
        return True

    def _append(self, writer: BufferedWriter, local: SourceFiles, part: Range) -> None:
        source, direct, done, kept = local[part.source], local.direct(part), 0, 0
        reader = None
        if direct is not None:
            if self._reader is None:
                self._reader = DirectReader(min(BUFFER_BYTES // 2, self.settings.window_bytes // 4))
            reader = self._reader
            reader.begin(direct, part.offset, part.nbytes)
        while done < part.nbytes:
            self._check_stop()
            step = min(writer.room(), part.nbytes - done)
            writer.take(source if reader is None else reader, part.offset + done, step)
            self._copied(step)
            done += step
            kept += step
            # not at each step: another thread's reading ahead would fetch again what was just dropped
            if local.was_cold(source) and (done == part.nbytes or 2 * kept >= self.settings.window_bytes):
                extents.drop_pages(source, part.offset + done - kept, kept)
                kept = 0

    def _parts(self, fd: int, at: int, parts: tuple[Part, ...]) -> None:
        dirty = Dirty(fd, self.settings.window_bytes, at)
        for part in parts:
            self._check_stop()
            self._part(fd, at, part, dirty)
            at += part.nbytes

    def _stripe(self, fd: int, stripe: Stripe) -> None:
        """One thread's share of a large file; its pages are on disk before it takes the next."""
        self._parts(fd, stripe.at, stripe.parts)
        extents.flush_range(fd, stripe.at, stripe.nbytes)
        extents.drop_pages(fd, stripe.at, stripe.nbytes)

    def settle(self) -> None:
        """Flush the batch, then give its files their final names: a final name means durable.

        Several flushes at once share a commit of the journal and a flush of the disk's own cache.
        """
        count = min(FLUSHES_AT_ONCE, len(self.batch))
        FailFastPool().run(count, [fd for fd, _, _ in self.batch], os.fsync, name="flush")
        while self.batch:
            fd, name, output = self.batch.pop()
            try:
                extents.drop_pages(fd)
                os.rename(name, output.path, src_dir_fd=self.temporary_fd, dst_dir_fd=self.out_fd)
            finally:
                os.close(fd)
            self.counters.add(files=1)
        self.batched_bytes = self.dirty_bytes = 0

    def abandon(self) -> None:
        """Close what is open; temporaries are removed by whoever resumes or gives up."""
        for fd, _, _ in self.batch:
            os.close(fd)
        self.batch.clear()

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise StoppedByParent

    def _copied(self, nbytes: int) -> None:
        """Count bytes that were copied, and rest as the limit says."""
        self.counters.add(nbytes=nbytes, copied=nbytes)
        self.pacer.take(nbytes, self._check_stop)

    def _check_room(self, length: int) -> None:
        """Raise unless writing `length` bytes leaves the reserve free for the trainer's next save (P13)."""
        if (
            self.settings.reserve_bytes
            and extents.free_bytes(self.out_fd) - length < self.settings.reserve_bytes
        ):
            raise NoSpaceError(
                f"writing on would leave less than {size_of(self.settings.reserve_bytes)} free "
                "for the next save"
            )

    def _part(self, fd: int, at: int, part: Part, dirty: Dirty) -> None:
        if isinstance(part, Literal):
            extents.write_at(fd, part.data, at)
            self.counters.add(nbytes=part.nbytes)
            dirty.wrote(at + part.nbytes, part.nbytes)
        elif isinstance(part, Range) and self.local is not None:
            with self.local.named(part.source):
                self._range(self.local, fd, at, part, dirty)
        else:
            self._made(fd, at, part, dirty)

    def _range(self, local: SourceFiles, fd: int, at: int, part: Range, dirty: Dirty) -> None:
        """Clone the block-aligned interior and copy the ragged ends; or copy everything."""
        source = local[part.source]
        inside = interior(part.offset, part.nbytes, at) if self.clone else None
        if inside is not None:
            begin, end = inside
            shift = at - part.offset
            self._copy(local, source, part.offset, fd, at, begin - part.offset, dirty)
            if extents.clone_range(source, begin, fd, begin + shift, end - begin):
                self.batched_bytes -= end - begin
                self.dirty_bytes -= end - begin
                self.counters.add(nbytes=end - begin, cloned=end - begin)
                self._copy(local, source, end, fd, end + shift, part.offset + part.nbytes - end, dirty)
                return
            self.clone = False
            self._copy(local, source, begin, fd, begin + shift, part.offset + part.nbytes - begin, dirty)
            return
        self._copy(local, source, part.offset, fd, at, part.nbytes, dirty)

    def _copy(
        self, local: SourceFiles, source: int, offset: int, fd: int, at: int, length: int, dirty: Dirty
    ) -> None:
        """Copy in steps; where extents clone, a hole stays a hole (the output has its full size already)."""
        done = 0
        while done < length:
            self._check_stop()
            step = min(dirty.room(), length - done)
            if self.clone:
                hole, extent = local.extent_at(source, offset + done, length - done)
                if hole:
                    self.counters.add(nbytes=extent)
                    done += extent
                    continue
                step = min(step, extent)
            self._check_room(step)
            extents.copy_range(source, offset + done, fd, at + done, step)
            self._copied(step)
            dirty.wrote(at + done + step, step)
            if local.was_cold(source):
                extents.drop_pages(source, offset + done, step)
            done += step

    def _made(self, fd: int, at: int, part: Part, dirty: Dirty) -> None:
        """Read and write block by block what no file system can copy (rearranged, or from elsewhere)."""
        begin = at
        for data in blocks_of(part, self.sources):
            self._check_stop()
            self._check_room(len(data))
            extents.write_at(fd, data, at)
            at += len(data)
            self._copied(len(data))
            dirty.wrote(at, len(data))
        if at != begin + part.nbytes:
            raise SourceChanged("a source ended early while it was read")
        self._drop(part)

    def _drop(self, part: Part) -> None:
        """Drop from the page cache what a part was made of and was not there before."""
        if self.local is None:
            return
        for used in ranges_of(part):
            source = self.local[used.source]
            if self.local.was_cold(source):
                extents.drop_pages(source, used.offset, used.nbytes)

    def compare(self, check: OutputCheck) -> None:
        """Refuse what must be equal and is not: see `refuse_unequal`."""
        refuse_unequal(check, self.sources, lambda: self.pacer.take(COMPARED_BYTES, self._check_stop))
