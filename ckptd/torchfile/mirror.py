"""The mirror of a remote archive: a sparse file that holds what planning reads, all else being holes.

It exists so that whatever reads pickles needs neither network nor credentials (P14): its parent fetches the
zip directory, the local headers, `data.pkl` and records up to `SMALL_BYTES` (docs/adr/0092). No pickle is
run here.
"""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

from ckptd.errors import DamagedError, NeedsWholeFiles
from ckptd.torchfile.archive import (
    AT_ONCE_BYTES,
    LOCAL_HEADER_BYTES,
    TAIL_BYTES,
    Framing,
    directory_place,
    frame,
    header_offsets,
    read_directory,
)
from ckptd.torchfile.fingerprint import has_crc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SMALL_BYTES = 64 << 10
"""Records up to this are mirrored whole: the step of an optimizer is a tensor of one element."""
_GAP_BYTES = 32 << 10
_MORE_TAIL_BYTES = 4096
WHOLE = "bring it here (`ckptd restore`) and convert that"


class MirrorFd(int):
    """A descriptor of a mirror: values may be read from small records alone."""


def fill(fd: int, name: str, fetch: Callable[[int, int], bytes]) -> None:
    """Fill the mirror open at `fd`, which has its final size, with what planning reads.

    `fetch(offset, nbytes)` gives bytes of the remote file. What is no archive is left to the planner to say.

    Raises:
        TornArchiveError: a directory that leaves the file.
        DamagedError: a record that was fetched is not what `torch.save` wrote.
        NeedsWholeFiles: its fingerprint needs all its bytes (of before zip archives, or without CRCs).
    """
    size = os.fstat(fd).st_size
    tail = max(0, size - TAIL_BYTES - _MORE_TAIL_BYTES)
    _bring(fd, fetch, [(0, min(size, SMALL_BYTES)), (tail, size - tail)])
    framing = frame(fd, expected=True)
    if framing is Framing.LEGACY:
        raise NeedsWholeFiles(f"{name} is of torch's format before zip archives", hint=WHOLE)
    if framing is not Framing.ZIP:
        return
    start, length = directory_place(fd, name)
    _bring(fd, fetch, [(start, length)] if start > AT_ONCE_BYTES else [(0, start + length)])
    headers = header_offsets(fd, name)
    _bring(fd, fetch, ((offset, min(LOCAL_HEADER_BYTES, size - offset)) for offset in headers))
    directory = read_directory(fd, name)
    if not has_crc(directory):
        raise NeedsWholeFiles(f"{name} was written without CRC32s", hint=WHOLE)
    records = directory.records.values()
    wanted = [r for r in records if r.name == "data.pkl" or r.size <= SMALL_BYTES]
    _bring(fd, fetch, ((record.offset, record.size) for record in wanted))
    for record in wanted:
        if record.crc and zlib.crc32(os.pread(fd, record.size, record.offset)) != record.crc:
            raise DamagedError(f"{name}: record {record.name} is not what torch.save wrote")


def _bring(fd: int, fetch: Callable[[int, int], bytes], ranges: Iterable[tuple[int, int]]) -> None:
    """Fetch ranges (offset, bytes) and write them where they belong; near ones in one go."""
    for begin, end in _joined(ranges):
        data, at = fetch(begin, end - begin), begin
        while data:
            count = os.pwrite(fd, data, at)
            at, data = at + count, data[count:]


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for offset, nbytes in sorted(r for r in ranges if r[1] > 0):
        if found and offset - found[-1][1] <= _GAP_BYTES:
            found[-1] = (found[-1][0], max(found[-1][1], offset + nbytes))
        else:
            found.append((offset, offset + nbytes))
    return found
