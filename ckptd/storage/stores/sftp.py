"""Store files on a server over SFTP, by paramiko: known hosts only; a name has a whole file or none.

fsspec's own SFTP file system accepts any host key, replaces what is there and never flushes; so this speaks
the protocol by itself. Names are published by hard link, the one exclusive step that a server
keeps wherever its file system has links; requests are pipelined, since each answer costs a round trip.
"""

from __future__ import annotations

import errno
import os
import posixpath
import secrets
import stat
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from paramiko import SFTPAttributes
from paramiko import sftp as wire
from paramiko.sftp import int64

from ckptd.errors import NoSpaceError, RefusedError, RemoteNotOurs, RemoteUnreachable, StorageError
from ckptd.storage.stores.base import DOCUMENT_LIMIT_BYTES, Abilities, too_large
from ckptd.storage.stores.fsspec_store import TEMPORARY_PREFIX, Entry, Rights, quietly
from ckptd.storage.stores.sftp_session import SftpPlace, connect, explain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.stores.sftp_session import Session


# --- pipelined reads and writes --------------------------------------------------------------------------
# Each answer costs a round trip, so many requests are in flight on an open file.

_PIECE_BYTES = 32 << 10
"""Bytes that every server takes in one request."""
_IN_FLIGHT = 64
_MOST_ORIGINS = 16
"""Files that a sink keeps open to copy from: servers allow a connection a hundred or more."""


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
        """Return the answer to the oldest request; what it says of failure is raised."""
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

    def __init__(self, drive: SftpConnection, handle: bytes) -> None:
        self._session = drive.session
        self._handle = handle

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes or up to the end; a server that gives less per answer is asked again from
        there.
        """
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
        self, drive: SftpConnection, handle: bytes, at: int, path: str, partial: str, rights: Rights
    ) -> None:
        self._drive = drive
        self._handle = handle
        self._at = at
        self._path = path
        self._partial = partial
        self._rights = rights
        self._pipeline = Pipeline(drive.session)
        self._is_open = True
        self._origins: dict[str, bytes] = {}
        """Handles of files that were copied from, by path."""

    def copy(self, path: str, offset: int, length: int) -> bool:
        """Copy by the request `copy-data` (OpenSSH 9.0); False: the server fails, or does not know it."""
        session, place = self._drive.session, self._drive.place
        if not place.has_copy:
            return False
        self._pipeline.drain()
        try:
            words = self._opened(path), int64(offset), int64(length), self._handle, int64(self._at)
            session.ask(wire.CMD_EXTENDED, "copy-data", *words)
        except (OSError, EOFError) as error:
            is_unknown = isinstance(error, OSError) and error.errno in _UNKNOWN_REQUEST
            if is_unknown or session.is_broken:
                place.has_copy = False
            if session.is_broken:
                raise
            return False
        self._at += length
        return True

    def _opened(self, path: str) -> bytes:
        """Return the handle of a file that is copied from."""
        if path not in self._origins:
            if len(self._origins) >= _MOST_ORIGINS:
                self._close_origins()
            self._origins[path] = self._drive.open(path, wire.SFTP_FLAG_READ)
        return self._origins[path]

    def _close_origins(self) -> None:
        while self._origins:
            self._drive.session.close_file(self._origins.popitem()[1])

    def write(self, data: memoryview) -> None:
        """Send; a failure of an earlier piece may show here."""
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = bytes(data[begin : begin + _PIECE_BYTES])
            self._pipeline.ask(wire.CMD_WRITE, self._handle, int64(self._at), piece)
            self._at += len(piece)
            self._pipeline.drain(_IN_FLIGHT)

    def flush(self) -> bool:
        """Wait for all answers, then fsync."""
        self._pipeline.drain()
        self._drive.fsync(self._handle)
        return True

    def seal(self) -> None:
        """Limit the rights to the source's, flush, and close without an error."""
        session = self._drive.session
        self._close_origins()
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
            self._close_origins()
            self._drive.session.close_file(self._handle)


# --- the drive -------------------------------------------------------------------------------------------

_GET_BYTES = 2 << 20
_MAKE_TRIES = 3
_DOCUMENT = Rights(mode=0o644, folder_mode=0o755, gid=None)
_NEW = wire.SFTP_FLAG_WRITE | wire.SFTP_FLAG_CREATE | wire.SFTP_FLAG_EXCL
_TAKEN = (errno.EEXIST, errno.EIO)
_UNKNOWN_REQUEST = (errno.ENOTSUP, errno.EACCES)
"""Not known to the server, or denied there (OpenSSH: `internal-sftp -P`)."""


class SftpConnection:
    """One connection; what is learned of the server is kept in `place`, for all."""

    def __init__(self, place: SftpPlace) -> None:
        self.place = place
        self._client, self.session = connect(place)

    # --- looking ---------------------------------------------------------------------------------------

    def find_entry(self, path: str) -> Entry | None:
        """Return a regular file; symlinks are not followed."""
        status = self._status(path)
        if status is None or not stat.S_ISREG(status.st_mode or 0):
            return None
        return _entry(posixpath.basename(path), status)

    def entries(self, folder: str) -> list[Entry]:
        """Return the files and folders; symlinks and the like are none."""
        try:
            found = self.session.listdir_attr(folder)
        except FileNotFoundError:
            return []
        kinds = (stat.S_ISREG, stat.S_ISDIR)
        return [_entry(a.filename, a) for a in found if any(kind(a.st_mode or 0) for kind in kinds)]

    def get(self, path: str) -> bytes | None:
        """Read a file, whole; the handle keeps to one file though another is renamed over it."""
        data = b""
        try:
            with self.reading(path) as reader:
                while chunk := reader.read(len(data), _GET_BYTES):
                    data += chunk
                    if len(data) > DOCUMENT_LIMIT_BYTES:
                        raise too_large(path)
        except FileNotFoundError:
            return None
        self.place.is_seen = True
        return data

    @contextmanager
    def reading(self, path: str) -> Iterator[SftpReader]:
        """Open for ranges."""
        handle = self.open(path, wire.SFTP_FLAG_READ)
        try:
            yield SftpReader(self, handle)
        finally:
            self.session.close_file(handle)

    def free_bytes(self, path: str) -> int | None:
        """Ask by statvfs, where the server offers it."""
        found = self._file_system(path)
        return found[1] * found[4] if found is not None else None

    def disk(self, path: str) -> str:
        """Ask by statvfs, as `free_bytes`."""
        found = self._file_system(path)
        return f"{found[8]:x}" if found is not None else ""

    def _file_system(self, path: str) -> list[int] | None:
        """Return f_bsize, f_frsize, f_blocks, f_bfree, f_bavail, f_files, f_ffree, f_favail, f_fsid."""
        try:
            answer = self.session.extended("statvfs", os.fsencode(path))
        except OSError:
            return None
        return [answer.get_int64() for _ in range(9)]

    # --- writing ---------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> None:
        """Rename a finished temporary over the name."""
        temporary = self._temporary(path, data)
        try:
            self.session.posix_rename(temporary, path)
        except OSError as error:
            if error.errno not in _UNKNOWN_REQUEST:
                raise
            # a moment without the name: better than half a document under it
            self.remove(path)
            self.session.rename(temporary, path)

    def create(self, path: str, data: bytes) -> bool:
        """Link a finished temporary under the name; without links, create the name exclusively (O_EXCL)."""
        if self._status(path) is not None:
            return False
        if self.place.has_links:
            temporary = self._temporary(path, data)
            try:
                return self._link(temporary, path)
            except OSError as error:
                if error.errno not in (*_UNKNOWN_REQUEST, errno.EIO):
                    raise
                self.place.has_links = False
            finally:
                quietly(lambda: self.remove(temporary))
        try:
            self._write(path, data)
        except FileExistsError:
            return False
        return True

    def sink(self, path: str, partial: str, rights: Rights, resume_bytes: int) -> tuple[SftpSink, int]:
        """Return a new partial file, or the one of an earlier attempt cut to what was flushed."""
        if resume_bytes:
            with suppress(FileNotFoundError):
                handle = self.open(partial, wire.SFTP_FLAG_WRITE)
                kept = SFTPAttributes._from_msg(self.session.ask(wire.CMD_FSTAT, handle))
                if (kept.st_size or 0) >= resume_bytes:
                    cut = SFTPAttributes()
                    cut.st_size = resume_bytes
                    self.session.ask(wire.CMD_FSETSTAT, handle, cut)
                    return SftpSink(self, handle, resume_bytes, path, partial, rights), resume_bytes
                self.session.ask(wire.CMD_CLOSE, handle)
        # a new inode: a hung predecessor may still write into the old one
        self.remove(partial)
        return SftpSink(self, self._make(partial, rights), 0, path, partial, rights), 0

    def publish(self, partial: str, path: str) -> bool:
        """Give a finished file its name; False when that is taken."""
        if self.place.has_links:
            try:
                linked = self._link(partial, path)
                self.remove(partial)
                return linked
            except OSError as error:
                if error.errno not in (*_UNKNOWN_REQUEST, errno.EIO):
                    raise
                self.place.has_links = False
        if self._status(path) is not None:
            self.remove(partial)
            return False
        self.session.rename(partial, path)
        return True

    def remove(self, path: str) -> None:
        """Remove a file."""
        with suppress(FileNotFoundError):
            self.session.remove(path)

    def remove_folder(self, path: str) -> bool:
        """Remove a folder; the server refuses one that is not empty."""
        try:
            self.session.rmdir(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.EIO, errno.ENOTEMPTY, errno.EACCES):
                return False
            raise
        return True

    def probe(self, path: str) -> Abilities:
        """Probe rights, create-only, and what the server makes up for."""
        try:
            kept = self.create(path, b"1") and not self.create(path, b"2") and self.get(path) == b"1"
            self.put(path, b"3")
            if self.get(path) != b"3":
                msg = f"{self.place.url} does not give back what was written to it"
                raise StorageError(msg, hint="the server lies; do not trust it with checkpoints")
            copies = self._copies(path)
        finally:
            quietly(lambda: self.remove(path))
        notes = []
        if not kept:
            notes.append("nothing is create-only: one writing node only, each creation is read again")
        if not self.place.has_links:
            notes.append("the server makes no hard links: documents are created in place")
        if not self.place.has_fsync:
            notes.append("the server does not flush on request: a power cut there may lose the last files")
        return Abilities(
            create_only=kept,
            checksum=None,
            resumable=True,
            rename=True,
            copies=copies,
            notes=tuple(notes),
        )

    def _copies(self, path: str) -> bool:
        """Tell whether the server copies a byte of that file into another."""
        other = f"{path}~copied"
        sink, _ = self.sink(other, other, _DOCUMENT, 0)
        try:
            is_copied = sink.copy(path, 0, 1)
            sink.seal()
            return is_copied and self.get(other) == b"3"
        finally:
            sink.abandon()
            quietly(lambda: self.remove(other))

    # --- the connection --------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether the transport lives and no answer is missing."""
        transport = self._client.get_transport()
        is_open = transport is not None and transport.is_active() and not self.session.get_channel().closed
        return is_open and not self.session.is_broken

    def explain(self, error: Exception, what: str) -> Exception:
        """Translate an exception into the error tree; a full disk is told from other failures by asking for
        room.
        """
        named = explain(error, f"{self.place.url}: {what}", is_alive=self.is_usable)
        if type(named) is StorageError and self.is_usable and self.free_bytes(self.place.root) == 0:
            return NoSpaceError(named.message.replace("Failure", "no room"))
        return named

    def close(self) -> None:
        """End it."""
        quietly(self._client.close)

    def open(self, path: str, flags: int, mode: int | None = None) -> bytes:
        """Return a handle; a new file has `mode` from the start (P15)."""
        attributes = SFTPAttributes()
        if mode is not None:
            attributes.st_mode = mode
        try:
            return bytes(self.session.ask(wire.CMD_OPEN, os.fsencode(path), flags, attributes).get_binary())
        except OSError as error:
            if flags & wire.SFTP_FLAG_EXCL and error.errno in _TAKEN and self._status(path) is not None:
                raise FileExistsError(errno.EEXIST, path) from error
            raise

    def fsync(self, handle: bytes) -> None:
        """Flush to the server's disk, where the server does that."""
        if not self.place.has_fsync:
            return
        try:
            self.session.extended("fsync", handle)
        except OSError as error:
            if error.errno not in _UNKNOWN_REQUEST:
                raise
            self.place.has_fsync = False

    # --- inside ----------------------------------------------------------------------------------------

    def _status(self, path: str) -> Any:
        try:
            return self.session.lstat(path)
        except FileNotFoundError:
            return None

    def _link(self, old: str, new: str) -> bool:
        """Give a file the name `new`; False when that exists, OSError when the server has no links."""
        try:
            self.session.extended("hardlink", os.fsencode(old), os.fsencode(new))
        except OSError:
            if self._status(new) is None:
                raise
            return False
        return True

    def _temporary(self, path: str, data: bytes) -> str:
        temporary = f"{posixpath.dirname(path)}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        self._write(temporary, data)
        return temporary

    def _write(self, path: str, data: bytes) -> None:
        """Write a small new file, durably."""
        handle = self._make(path, _DOCUMENT)
        sink = SftpSink(self, handle, 0, path, path, _DOCUMENT)
        try:
            sink.write(memoryview(data))
            sink.seal()
        except BaseException:
            sink.abandon()
            quietly(lambda: self.remove(path))
            raise

    def _make(self, path: str, rights: Rights) -> bytes:
        """Create a file, its folders first; another thread may just be removing them as empty."""
        for attempt in range(_MAKE_TRIES):
            try:
                return self.open(path, _NEW, 0o600)
            except FileNotFoundError:
                if attempt == _MAKE_TRIES - 1:
                    raise
                self._make_folders(posixpath.dirname(path), rights)
        raise AssertionError

    def _make_folders(self, folder: str, rights: Rights) -> None:
        self._make_root()
        made = self.place.root
        for part in posixpath.relpath(folder, made).split("/"):
            made = posixpath.join(made, part) if part != "." else made
            status = self._status(made) if part != "." else None
            if status is not None and not stat.S_ISDIR(status.st_mode or 0):
                msg = f"{self.place.url}: {made} is a symlink or a file"
                raise RefusedError(msg, hint="below the remote's root no symlink is followed")
            if status is None and part != ".":
                self._make_folder(made, rights)

    def _make_root(self) -> None:
        """Make the last component of the root, once; never the place of a disk that is not mounted."""
        root, parent = self.place.root, posixpath.dirname(self.place.root)
        was_seen = self.place.is_seen
        with suppress(FileNotFoundError):
            self.session.stat(root)
            self.place.is_seen = True
            return
        if was_seen:
            msg = f"{self.place.url}: {root} is not there any more"
            raise RemoteUnreachable(msg, hint="is its disk mounted on the server?")
        if self._status(parent) is None:
            msg = f"{self.place.url}: there is no {parent} on the server"
            hint = f"is its disk mounted? else `ssh {self.place.login} mkdir -p {parent}`"
            raise RemoteNotOurs(msg, hint=hint)
        self._make_folder(root, _DOCUMENT)
        self.place.is_seen = True

    def _make_folder(self, path: str, rights: Rights) -> None:
        try:
            self.session.mkdir(path, (rights.folder_mode | 0o700) & 0o777)
        except OSError:
            if self._status(path) is None:
                raise


def _entry(name: str, status: Any) -> Entry:
    return Entry(
        name=name,
        is_folder=stat.S_ISDIR(status.st_mode or 0),
        bytes=status.st_size or 0,
        mtime_ns=int(status.st_mtime or 0) * 10**9,
    )
