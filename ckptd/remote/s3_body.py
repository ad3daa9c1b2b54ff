"""What one request sends: a range of a source as a file that botocore can read, measure and rewind.

Bytes are read once, in steps of at most 1 MiB, and hashed on the way; a request that botocore sends again
starts over at the range's beginning, and the hash with it. Nothing is held whole (P12).
"""

from __future__ import annotations

import base64
import hashlib
import io
from typing import TYPE_CHECKING

from ckptd.errors import SourceChanged
from ckptd.remote.checksums import crc64

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from ckptd.remote.store import Source

STEP_BYTES = 1 << 20


class SourceStopped(BaseException):
    """The source raised `error`; no `Exception`, so that no retry of botocore's keeps it back."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Body(io.RawIOBase):
    """`length` bytes of `source` from `offset`; `crc` goes on from `crc_before` over what was read.

    A signature or an MD5 that stands in a header needs the bytes before they are sent: that reading is a
    rehearsal, unpaced and not hashed (`peek_into` of the source, where it has one).
    """

    def __init__(
        self, source: Source, offset: int, length: int, crc_before: int, *, wants_md5: bool = False
    ) -> None:
        super().__init__()
        self._source = source
        self._offset = offset
        self._length = length
        self._crc_before = crc_before
        self._buffer = memoryview(bytearray(min(STEP_BYTES, max(length, 1))))
        self._filled = (0, 0)
        self._at = 0
        self.crc = crc_before
        self._hashed = 0
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
        """Position in the range."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; going back to the beginning forgets the hash, so that a second sending hashes anew."""
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + offset
        if self._at == 0:
            self.crc, self._hashed, self._filled = self._crc_before, 0, (0, 0)
            self._md5 = _md5() if self._wants_md5 else None
        return self._at

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, fewer at the end of a step; b"" at the end of the range."""
        begin, end = self._filled
        if not begin <= self._at < end:
            begin, end = self._fill()
        last = end if size < 0 else min(end, self._at + size)
        data = bytes(self._buffer[self._at - begin : last - begin])
        self._at = last
        return data

    def readinto(self, buffer: WriteableBuffer) -> int:
        """As `read`; what the CRT signs bodies by."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
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
        except Exception as error:
            raise SourceStopped(error) from error
        if self._at == self._hashed and not self._is_rehearsal:
            self.crc = crc64(self._buffer[:count], self.crc)
            if self._md5 is not None:
                self._md5.update(self._buffer[:count])
            self._hashed += count
        self._filled = (self._at, self._at + count)
        return self._filled

    def rehearse(self, is_rehearsal: bool) -> None:
        """From now on it is read to be signed or measured (True), or to be sent (False)."""
        self._is_rehearsal = is_rehearsal
        self.seek(0)

    def content_md5(self) -> str:
        """MD5 (base64) of the range, read once before it is sent; for servers that compare it on arrival."""
        self.rehearse(True)
        digest = _md5()
        try:
            while data := self.read():
                digest.update(data)
        finally:
            self.rehearse(False)
        return base64.b64encode(digest.digest()).decode()

    @property
    def md5(self) -> bytes | None:
        """MD5 of what was sent; None when it was not sent once, whole and in order, or nobody wanted it."""
        return self._md5.digest() if self._md5 is not None and self.is_whole else None

    @property
    def is_whole(self) -> bool:
        """Every byte was read and hashed once, in order."""
        return self._hashed == self._length


def _md5() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)
