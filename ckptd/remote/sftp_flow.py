"""Bytes to and from an open SFTP file, many requests in flight, since each answer costs a round trip."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paramiko import SFTPAttributes
from paramiko import sftp as wire
from paramiko.sftp import int64

from ckptd.remote.drive import quietly

if TYPE_CHECKING:
    from ckptd.remote.drive import Rights
    from ckptd.remote.sftp import SftpDrive
    from ckptd.remote.sftp_session import Session

_PIECE_BYTES = 32 << 10
"""What every server takes in one request."""
_IN_FLIGHT = 64


class Pipeline:
    """Requests in flight, their answers taken in the order of asking whatever order they come in."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: deque[int] = deque()
        self._early: dict[int, tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, kind: int, *words: Any) -> None:
        """Send and do not wait."""
        self._asked.append(self._session._async_request(self, kind, *words))

    def answer(self) -> Any:
        """The answer to the oldest request; what it says of failure is raised."""
        number = self._asked.popleft()
        if number in self._early:
            kind, answer = self._early.pop(number)
            if kind == wire.CMD_STATUS:
                self._session._convert_status(answer)
            return answer
        return self._session._read_response(number)[1]

    def drain(self, left: int = 0) -> None:
        """Take answers until `left` are open."""
        while len(self._asked) > left:
            self.answer()

    def forget(self) -> None:
        """Take what is open and look at none of it."""
        while self._asked and not self._session.is_broken:
            with suppress(OSError, EOFError):
                self.answer()

    def _async_response(self, kind: int, answer: Any, number: int) -> None:
        """Called by paramiko with an answer that came before its turn."""
        self._early[number] = (kind, answer)


class SftpReader:
    """Ranges of an open file, pieces of 32 KiB in flight."""

    def __init__(self, drive: SftpDrive, handle: bytes) -> None:
        self._session = drive.session
        self._handle = handle

    def read(self, offset: int, length: int) -> bytes:
        """Until `length` or the end; a server that gives less per answer is asked again from there."""
        data = bytearray()
        while len(data) < length:
            got = len(data)
            pipeline = Pipeline(self._session)
            for at in range(offset + got, offset + length, _PIECE_BYTES):
                size = min(_PIECE_BYTES, offset + length - at)
                pipeline.ask(wire.CMD_READ, self._handle, int64(at), size)
            try:
                while pipeline:
                    piece = pipeline.answer().get_string()
                    data += piece
                    if len(piece) < min(_PIECE_BYTES, length - (len(data) - len(piece))):
                        break
            except EOFError:
                if len(data) == got:
                    pipeline.forget()
                    break
            pipeline.forget()
        return bytes(data)


class SftpSink:
    """Writes at the end of an open file, 2 MiB in flight."""

    def __init__(
        self, drive: SftpDrive, handle: bytes, at: int, path: str, partial: str, rights: Rights
    ) -> None:
        self._drive = drive
        self._handle = handle
        self._at = at
        self._path = path
        self._partial = partial
        self._rights = rights
        self._pipeline = Pipeline(drive.session)
        self._is_open = True

    def write(self, data: memoryview) -> None:
        """Send; a failure of an earlier piece may show here."""
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = bytes(data[begin : begin + _PIECE_BYTES])
            self._pipeline.ask(wire.CMD_WRITE, self._handle, int64(self._at), piece)
            self._at += len(piece)
            self._pipeline.drain(_IN_FLIGHT)

    def flush(self) -> bool:
        """All answers taken, then fsync."""
        self._pipeline.drain()
        self._drive.fsync(self._handle)
        return True

    def seal(self) -> None:
        """Rights as the source's or less, flushed, closed without an error."""
        session = self._drive.session
        status = SFTPAttributes._from_msg(session.ask(wire.CMD_FSTAT, self._handle))
        mode = self._rights.mode & 0o777
        if self._rights.gid is not None and status.st_gid != self._rights.gid:
            mode &= ~0o070
        wanted = SFTPAttributes()
        wanted.st_mode = mode
        session.ask(wire.CMD_FSETSTAT, self._handle, wanted)
        self.flush()
        self._is_open = False
        session.ask(wire.CMD_CLOSE, self._handle)

    def finish(self) -> bool:
        """Seal and publish."""
        self.seal()
        return self._drive.publish(self._partial, self._path)

    def abandon(self) -> None:
        """Close; the partial file stays, to go on."""
        if self._is_open:
            self._is_open = False
            quietly(self._pipeline.forget)
            self._drive.session.let_go(self._handle)
