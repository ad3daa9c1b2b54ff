"""Give one request its body: a range of a source as a file that botocore can read, measure and rewind.

Bytes are read once, in steps of at most 1 MiB, and hashed on the way; a request that botocore sends again
starts over at the range's beginning, and the hash with it. Nothing is held whole, so that memory does not
grow with the size of a part.
"""

from __future__ import annotations

import base64
import hashlib
import io
from typing import TYPE_CHECKING

from ckptd.errors import DamagedError, SourceChanged
from ckptd.storage.stores.checksums import crc64

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from ckptd.storage.stores.base import Source

STEP_BYTES = 1 << 20
_BLOCK_BYTES = 64 << 10


class SourceStopped(BaseException):
    """The source raised `error`; no `Exception`, so that no retry of botocore's keeps it back."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Body(io.RawIOBase):
    """`length` bytes of `source` from `offset`; `crc` is the CRC64NVME of what was read of them.

    `known_crc`: of the whole range, when it was hashed before. What is sent a second time must be what was
    read the first time: that alone was compared with the CRCs of the source's own archive.

    A signature or an MD5 that stands in a header needs the bytes before they are sent: that reading is a
    rehearsal, unpaced and not hashed (`peek_into` of the source, where it has one).
    """

    def __init__(
        self,
        source: Source,
        offset: int,
        length: int,
        known_crc: int | None = None,
        *,
        wants_md5: bool = False,
    ) -> None:
        super().__init__()
        self._source = source
        self._offset = offset
        self._length = length
        self._buffer = memoryview(bytearray(min(STEP_BYTES, max(length, 1))))
        self._filled = (0, 0)
        self._at = 0
        self.crc = 0
        self._hashed = 0
        self._before = (0, 0) if known_crc is None else (length, known_crc)
        self._wants_md5 = wants_md5
        self._md5 = _md5() if wants_md5 else None
        self._is_rehearsal = False
        # what is read here is read again: it costs no bandwidth and is no progress
        self._peek = getattr(source, "peek_into", source.read_into)

    def __len__(self) -> int:
        return self._length

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Within the range."""
        return True

    def tell(self) -> int:
        """Return the position in the range."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; going back to the beginning forgets the hash, so that a second sending hashes anew."""
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + offset
        if self._at == 0:
            self._before = max(self._before, (self._hashed, self.crc))
            self.crc, self._hashed, self._filled = 0, 0, (0, 0)
            self._md5 = _md5() if self._wants_md5 else None
        return self._at

    def read(self, size: int = -1) -> memoryview:
        """Return the rest of a step, none at the end; valid until the next read.

        More than `size` where that is a block for a socket: who reads such blocks sends what it gets, and a
        call per MiB instead of eight takes a fifth off the CPU time of an upload. Small sizes are kept to.
        """
        return self.take(size if 0 <= size < _BLOCK_BYTES else len(self._buffer))

    def take(self, most: int) -> memoryview:
        """Return at most so many bytes, none at the end; valid until the next read."""
        begin, end = self._filled
        if not begin <= self._at < end:
            begin, end = self._fill()
        last = min(end, self._at + most)
        data = self._buffer[self._at - begin : last - begin]
        self._at = last
        return data

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read into a buffer as `read` does; the CRT signs bodies through it."""
        view = memoryview(buffer).cast("B")
        data = self.take(len(view))
        view[: len(data)] = data
        return len(data)

    def _fill(self) -> tuple[int, int]:
        room = min(len(self._buffer), self._length - self._at)
        try:
            read_into = self._peek if self._is_rehearsal else self._source.read_into
            count = read_into(self._offset + self._at, self._buffer[:room]) if room > 0 else 0
            if room > 0 and count == 0:
                msg = f"the source ended after {self._offset + self._at} bytes"
                raise SourceChanged(msg, hint="this attempt is dropped; the next turn looks again")
            if self._at == self._hashed and not self._is_rehearsal:
                self._hash(self._buffer[:count])
        except Exception as error:
            raise SourceStopped(error) from error
        self._filled = (self._at, self._at + count)
        return self._filled

    def _hash(self, data: memoryview) -> None:
        if self._md5 is not None:
            self._md5.update(data)
        before, crc = self._before
        if self._hashed < before <= self._hashed + len(data):
            head = before - self._hashed
            self.crc = crc64(data[:head], self.crc)
            if self.crc != crc:
                msg = f"the {before} bytes at {self._offset} were others when they were read before"
                raise DamagedError(msg, hint="the local disk or memory fails; nothing was uploaded")
            self._hashed, data = before, data[head:]
        self.crc = crc64(data, self.crc)
        self._hashed += len(data)

    def rehearse(self, is_rehearsal: bool) -> None:
        """Switch to being read for a signature or a measurement (True), or to being sent (False)."""
        self._is_rehearsal = is_rehearsal
        self.seek(0)

    def content_md5(self) -> str:
        """Return the MD5 (base64) of the range, read once before it is sent; for servers that compare it on
        arrival.
        """
        self.rehearse(True)
        digest = _md5()
        try:
            while data := self.read():
                digest.update(data)
        finally:
            self.rehearse(False)
        return base64.b64encode(digest.digest()).decode()

    @property
    def encoded_crc(self) -> bytes:
        """`crc` as in S3's headers and trailers."""
        return base64.b64encode(self.crc.to_bytes(8))

    @property
    def md5(self) -> bytes | None:
        """Return the MD5 of what was sent; None when it was not sent once, whole and in order, or nobody
        wanted it.
        """
        return self._md5.digest() if self._md5 is not None and self.is_whole else None

    @property
    def is_whole(self) -> bool:
        """Every byte was read and hashed once, in order."""
        return self._hashed == self._length


class BufferedBody:
    """Give the part of `Body`'s interface that is used for at most 1 MiB in memory; sent again it is the
    same.
    """

    is_whole = True

    def __init__(self, data: bytearray, *, wants_md5: bool) -> None:
        self.data = data
        self.crc = crc64(memoryview(data))
        self.md5 = hashlib.md5(data, usedforsecurity=False).digest() if wants_md5 else None

    def content_md5(self) -> str:
        """Return the MD5 (base64) of the range."""
        return base64.b64encode(hashlib.md5(self.data, usedforsecurity=False).digest()).decode()


def _md5() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)
