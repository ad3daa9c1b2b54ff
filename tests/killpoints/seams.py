"""Every durable call of the product, counted by one counter; at the n-th something happens to it.

It exists so that a life can be cut, or one call of it failed, at every place where a process that dies or a
disk that refuses would leave a trace; where calls are to fail, those that read are counted as well. Patches a
process that was forked for that purpose and ends with it.
"""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptd.base import extents, files
from ckptd.conversion.plan import PlanWriter
from ckptd.storage.journal.schema import Database
from tests.killpoints.reads import LISTS, READING, READS, Listing, lies_below, site

WRITES = ("write", "pwrite", "copy_file_range")
NAMES = ("mkdir", "rename", "link", "unlink", "rmdir", "symlink")
OTHERS = ("fsync", "fdatasync", "ftruncate", "fchmod")
CHANGING = ("INSERT", "UPDATE", "DELETE", "BEGIN", "COMMIT", "PRAGMA JOURNAL_MODE")
_O_MAKES = os.O_CREAT | os.O_TRUNC
APPENDED = "audit.jsonl"
"""Its last page is written again with each line, and a line that was not flushed stands for nothing done."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EROFS, errno.EACCES}
_ALLOCATES = {
    *("open", "mkdir", "link", "rename", "renameat2", "symlink", "journal", "plan", "clone_file"),
    *("write", "pwrite", "copy_file_range", "clone_range", "ftruncate", "fsync", "fdatasync", "store"),
}
_FLUSHES = {"fsync", "fdatasync", "write", "pwrite"}
_fstat, _readlink, _dup, _close = os.fstat, os.readlink, os.dup, os.close
_MOST_HELD = 64


@dataclass(slots=True)
class Fate:
    """What happens to a call: nothing of it, all of it, or half of it and then the end; or an errno."""

    at: int = 0
    """Which call, from 1; 0: none."""
    side: str = "before"
    """before, after or half (of a write; of any other call it is after); or fail: it raises."""
    code: int = errno.EIO
    often: str = "once"
    """once; always: every call from `at` on raises, of those that such an error meets; here: of these, the
    ones that the same lines of the product make (one file or folder that is not to be read any more)."""
    save: int | None = None
    """The count begins where the trainer has written this save (0: none yet), or, in a process that was
    started after it, at its start; None: at the start of the first process."""

    @property
    def is_persistent(self) -> bool:
        """It lasts."""
        return self.often != "once"

    def meets(self, name: str) -> bool:
        """Whether a call could fail so: a full disk lets files go, one that is read-only flushes."""
        word = name.split()[0]
        if word in READING:
            return self.code in (errno.EIO, errno.ESTALE) or (self.code == errno.EACCES and word in LISTS)
        if self.code in _FULL:
            return word in _ALLOCATES
        return word not in _FLUSHES if self.code in _DENIED else True


class Seams:
    """Counts the calls of this process and carries out the fate of one of them."""

    def __init__(
        self,
        fate: Fate,
        note: Callable[[str], None],
        *,
        reads: bool = False,
        is_sited: bool = False,
        root: str = "/",
    ) -> None:
        """`reads`: those below `root` are counted as well; `is_sited`: each with its site."""
        self.fate = fate
        self.parts: list[list[str]] = [[]]
        """What was called, in its order, up to each save and from there on."""
        self.is_open = True
        """False: what is called now is the test's own doing."""
        self.ours = "/nvme/run/"
        """Where the trainer's own files lie: what it never flushes we try until it is flushed."""
        self.hit = ""
        """What failed since the last save, and at which site."""
        self.hit_at_seconds = 0.0
        self._note = note
        self._broken: dict[tuple[int, int], tuple[str, int]] = {}
        """Inode of a file whose flush failed → its path, and a descriptor: nothing else gets its number."""
        """(dev, ino) of regular files whose flush failed and that were not begun anew since."""
        self._reads, self._is_sited, self._root = reads, is_sited, root

    # --- one call --------------------------------------------------------------------------------------

    def call(self, name: str, real: Callable[..., Any], *args: Any, half: Any = None, **kwargs: Any) -> Any:
        """Carry out one counted call, or its fate."""
        if not self.is_open:
            return real(*args, **kwargs)
        self.parts[-1].append(f"{name} @ {site()}" if self._is_sited else name)
        number = len(self.parts[-1]) if self.fate.save is not None else sum(map(len, self.parts))
        fate = self.fate
        if fate.side == "fail":
            if self._fails(name, number):
                self._flush_failed(name, args)
                raise OSError(fate.code, os.strerror(fate.code))
            self._flushes(name, args)
            result = real(*args, **kwargs)
            self._begins(name, args, result)
            return result
        if number != fate.at:
            return real(*args, **kwargs)
        self._note(f"killed {fate.side} {name}")
        if fate.side == "half" and half is not None:
            half()
        elif fate.side != "before":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _fails(self, name: str, number: int) -> bool:
        fate = self.fate
        is_due = number == fate.at or (fate.is_persistent and number > fate.at > 0)
        if not is_due or not fate.meets(name):
            return False
        if self.hit and fate.often != "here":
            return True
        called = f"{name} @ {site()}"
        if not self.hit:
            self.hit, self.hit_at_seconds = called, time.monotonic()
            self._note(f"hit {errno.errorcode[fate.code]}:{fate.often} {called}")
        return called == self.hit

    def arm(self, fate: Fate) -> None:
        """The trainer has written another save: count from here, for this fate."""
        self.parts.append([])
        self.fate, self.hit = fate, ""

    def _flush_failed(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("fsync", "fdatasync"):
            status = _fstat(args[0])
            if stat.S_ISREG(status.st_mode):
                where = status.st_dev, status.st_ino
                self._forget(where)
                self._broken[where] = (_readlink(f"/proc/self/fd/{args[0]}"), _dup(args[0]))
                if len(self._broken) > _MOST_HELD:
                    self._forget(next(iter(self._broken)))

    def _forget(self, where: tuple[int, int]) -> None:
        found = self._broken.pop(where, None)
        if found is not None:
            _close(found[1])

    def _begins(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """One that is emptied begins anew."""
        if name == "open" and args[1] & (os.O_EXCL | os.O_TRUNC) and self._broken:
            status = _fstat(result)
            self._forget((status.st_dev, status.st_ino))

    def _flushes(self, name: str, args: tuple[Any, ...]) -> None:
        """A flush that is tried again would be believed: the kernel has dropped the pages (F6)."""
        if name in ("fsync", "fdatasync", "ftruncate") and self._broken:
            status = _fstat(args[0])
            path, _ = self._broken.get((status.st_dev, status.st_ino), (None, -1))
            if path is not None and (name == "ftruncate" or not stat.S_ISREG(status.st_mode)):
                self._forget((status.st_dev, status.st_ino))
            elif (
                path is not None
                and not path.endswith(APPENDED)
                and (self.ours not in path or "/_ckptd/" in path)
            ):
                self._note(f"VIOLATION a flush of {path} that failed was tried again")

    @property
    def is_hurting(self) -> bool:
        """An error goes on."""
        return self.fate.is_persistent and self.hit != ""

    # --- where the calls are ---------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap them all, in this process, for good."""
        for name in (*NAMES, *OTHERS):
            self._wrap(os, name)
        if self._reads:
            for name in READS:
                self._wrap_read(name)
            self._wrap_scandir()
        self._wrap_open()
        self._wrap_writes()
        self._wrap(files, "_renameat2", "renameat2")
        self._wrap(extents, "clone_file")
        self._wrap(extents, "clone_range")
        self._wrap(PlanWriter, "_line", "plan line")
        self._wrap_journal()

    def _wrap(self, owner: Any, name: str, shown: str = "") -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            return self.call(shown or name, real, *args, **kwargs)

        setattr(owner, name, counted)

    def _wrap_read(self, name: str) -> None:
        real = getattr(os, name)

        def counted(target: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not self.is_open or not lies_below(self._root, target, kwargs.get("dir_fd")):
                return real(target, *args, **kwargs)
            return self.call(name, real, target, *args, **kwargs)

        setattr(os, name, counted)

    def _wrap_scandir(self) -> None:
        real = os.scandir

        def scanned(target: Any = ".") -> Any:
            if not self.is_open or not lies_below(self._root, target, None):
                return real(target)
            return Listing(self.call("scandir", real, target), lambda: self.call("readdir", int))

        setattr(os, "scandir", scanned)  # noqa: B010 - in this process, for good

    def _wrap_open(self) -> None:
        real = os.open

        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            is_read = not flags & _O_MAKES
            if is_read and not (self._reads and lies_below(self._root, path, kwargs.get("dir_fd"))):
                return real(path, flags, *args, **kwargs)
            made: int = self.call("open-read" if is_read else "open", real, path, flags, *args, **kwargs)
            return made

        setattr(os, "open", opened)  # noqa: B010 - in this process, for good

    def _wrap_writes(self) -> None:
        write, pwrite, copy = os.write, os.pwrite, os.copy_file_range

        def writing(fd: int, data: Any) -> int:
            part = memoryview(data)[: len(data) // 2]
            done: int = self.call("write", write, fd, data, half=lambda: write(fd, part))
            return done

        def writing_at(fd: int, data: Any, at: int) -> int:
            part = memoryview(data)[: len(data) // 2]
            done: int = self.call("pwrite", pwrite, fd, data, at, half=lambda: pwrite(fd, part, at))
            return done

        def copying(src: int, dst: int, count: int, **more: Any) -> int:
            part = max(1, count // 2)
            half = lambda: copy(src, dst, part, **more)  # noqa: E731
            done: int = self.call("copy_file_range", copy, src, dst, count, half=half, **more)
            return done

        os.write, os.pwrite, os.copy_file_range = writing, writing_at, copying  # type: ignore[assignment]

    def _wrap_journal(self) -> None:
        """Statements that change or read the journal; an error is SQLite's own for a failing disk."""
        seams, run = self, Database._run

        def counted(db: Database, statement: Callable[..., Any], sql: str, *args: Any) -> Any:
            word = " ".join(sql.upper().split()[:3])
            is_read = seams._reads and word.startswith("SELECT")

            def called(*given: Any) -> Any:
                try:
                    return seams.call("select" if is_read else f"journal {word}", statement, *given)
                except OSError as error:
                    raise _as_sqlite_says(error) from error

            return run(db, called if is_read or word.startswith(CHANGING) else statement, sql, *args)

        setattr(Database, "_run", counted)  # noqa: B010 - likewise


def _as_sqlite_says(error: OSError) -> sqlite3.OperationalError:
    """What a statement raises when the disk says that."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    told = sqlite3.OperationalError("database or disk is full" if is_full else "disk I/O error")
    told.sqlite_errorcode = sqlite3.SQLITE_FULL if is_full else sqlite3.SQLITE_IOERR
    return told


def stored(seams: Seams, store: Any, verbs: tuple[str, ...]) -> Any:
    """A store each of whose changing calls is a point: before it nothing, after it the answer is lost."""

    class Counted:
        def __getattr__(self, name: str) -> Any:
            real = getattr(store, name)
            if name not in verbs:
                return real
            return lambda *args, **kwargs: seams.call(f"store {name}", real, *args, **kwargs)

    return Counted()
