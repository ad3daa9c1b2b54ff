"""The calls of `os` that ckptd makes, on simulated disks, counted: any of them may be the last one.

One object is the kernel of a life: descriptors, clock, disks, and the number of the call at which the power
goes or the process is killed. Paths that do not begin with /sim go to the real `os`.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.sim.disk import Disk, Inode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST_FD = 1 << 20
ROOT = "/sim"
_BELOW = "/sim/"
EPOCH_SECONDS = 1_750_000_000.0
CAPACITY_BYTES = 1 << 30


class Killed(BaseException):
    """The process that made this call is no more; nothing of it runs after that."""


@dataclass(slots=True)
class Opened:
    """A descriptor."""

    inode: Inode
    flags: int
    path: str
    owner: str
    at: int = 0


class Entry:
    """What scandir gives."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Entries(list[Entry]):
    """A scandir that can be left."""

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Status(NamedTuple):
    """A stat result."""

    st_ino: int
    st_mode: int
    st_dev: int
    st_size: int
    st_mtime_ns: int
    st_ctime_ns: int
    st_nlink: int
    st_uid: int
    st_gid: int

    @property
    def st_blocks(self) -> int:
        """In units of 512 bytes."""
        return -(-self.st_size // 4096) * 8


def _status(inode: Inode) -> Status:
    row = inode.ino, inode.mode, inode.dev, len(inode.data), inode.written_ns, inode.changed_ns, 1, 0, 0
    return tuple.__new__(Status, row)  # four times as fast as Status(…), and called 80 times a turn


class Space:
    """A statvfs result."""

    f_frsize = 4096
    f_blocks = CAPACITY_BYTES // 4096
    f_files = f_favail = 0
    """As of file systems that make inodes as they are wanted."""

    def __init__(self, used_bytes: int) -> None:
        self.f_bavail = self.f_bfree = max(0, self.f_blocks - used_bytes // 4096)


def _error(code: int, path: object) -> OSError:
    return OSError(code, os.strerror(code), str(path))


class Kernel:
    """Disks below /sim, one for each name there; `actor` makes the calls: ckptd, trainer or judge."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0
        self.wall_offset_seconds = EPOCH_SECONDS
        self.calls = 0
        self.history: list[str] = []
        self.disks: dict[str, Disk] = {}
        self.fds: dict[int, Opened] = {}
        self.next_fd = FIRST_FD
        self.actor = "ckptd"
        self.is_dead = False
        self.can_clone = True
        self.ends_at: int | None = None
        """The number of the call at which the daemon's process is killed."""
        self.hooks: dict[int, Callable[[], None]] = {}
        self.before_rename: Callable[[str, str], None] | None = None
        """Called with both paths before ckptd renames anything."""
        """What somebody else does at that call."""
        self.on_removal: Callable[[Inode, str], None] = lambda _inode, _path: None
        self.on_move: Callable[[Inode, str, str], None] = lambda _inode, _from, _to: None
        self.on_write: Callable[[Inode, str], None] = lambda _inode, _path: None
        self.fate: Callable[[str, str, bool], None] = lambda _call, _path, _after: None
        """Raises what a broken share says to a call on its disk, before or after its effect."""
        self._ticks = 0

    def add_disk(self, name: str) -> Disk:
        """A file system mounted at /sim/<name>."""
        disk = self.disks[name] = Disk(dev=10_000_000 + len(self.disks), now_ns=self.now_ns())
        return disk

    def now_ns(self) -> int:
        """Wall clock; no two calls are told the same."""
        self._ticks += 1
        return int((self.now_seconds + self.wall_offset_seconds) * 1000) * 1_000_000 + self._ticks % 1_000_000

    # --- one call --------------------------------------------------------------------------------------

    def call(self, name: str, path: str) -> None:
        """Every call that changes anything passes here: the place to die, or for others to act."""
        if self.actor != "ckptd":
            self.history.append(f"{self.actor} {name} {path}")
            return
        if self.is_dead:
            raise Killed(name)
        self.calls += 1
        hook = self.hooks.pop(self.calls, None)
        if hook is not None:
            hook()
        if self.ends_at is not None and self.calls >= self.ends_at:
            self.is_dead = True
            self.history.append(f"killed at {self.calls} {name} {path}")
            raise Killed(name)
        self.history.append(f"{name} {path}")

    def _effect(self, name: str, path: str) -> None:
        """Before a change: it counts, and the share may refuse it."""
        self.call(name, path)
        self.fate(name, path, False)

    # --- names -----------------------------------------------------------------------------------------

    def is_ours(self, path: object, dir_fd: int | None = None) -> bool:
        """Whether a call belongs to the simulation."""
        if isinstance(path, int):
            return path >= FIRST_FD
        text = path if type(path) is str else os.fspath(path)  # type: ignore[call-overload]
        if dir_fd is not None and text[:1] != "/":
            return dir_fd >= FIRST_FD
        return bool(text.startswith(_BELOW) or text == ROOT)

    def _place(self, path: object, dir_fd: int | None) -> tuple[Disk, Inode, str, str]:
        """(disk, folder, last name, whole path); the name is "." for a root."""
        text = path if type(path) is str else str(os.fspath(path))  # type: ignore[call-overload]
        if not text:
            raise _error(errno.ENOENT, text)
        if dir_fd is not None and "/" not in text and text not in (".", ".."):
            opened = self._fd(dir_fd)
            return opened.inode.disk, opened.inode, text, f"{opened.path}/{text}"
        if text.startswith("/"):
            parts = text.split("/")[2:]
            if not parts or parts[0] not in self.disks:
                raise _error(errno.ENOENT, text)
            disk, parts = self.disks[parts[0]], [p for p in parts[1:] if p]
            here, shown = disk.root, "/".join(text.split("/")[:3])
        else:
            assert dir_fd is not None
            opened = self._fd(dir_fd)
            disk = opened.inode.disk
            here, shown = opened.inode, opened.path
            parts = [p for p in text.split("/") if p]
        for part in parts[:-1]:
            here, shown = self._enter(here, shown, part, text)
        last = parts[-1] if parts else "."
        return disk, here, last, shown if last == "." else f"{shown}/{last}"

    def _enter(self, here: Inode, shown: str, part: str, text: str) -> tuple[Inode, str]:
        if part == "..":
            return here.parent or here, shown.rpartition("/")[0]
        child = here.entries.get(part) if part != "." else here
        if child is None:
            raise _error(errno.ENOENT, text)
        if not child.is_folder:
            raise _error(errno.ENOTDIR, text)
        return child, shown if part == "." else f"{shown}/{part}"

    def _find(self, path: object, dir_fd: int | None) -> tuple[Inode, str]:
        _, folder, name, shown = self._place(path, dir_fd)
        inode = folder if name == "." else folder.entries.get(name)
        if inode is None:
            raise _error(errno.ENOENT, shown)
        return inode, shown

    def _fd(self, fd: int) -> Opened:
        opened = self.fds.get(fd)
        if opened is None:
            raise _error(errno.EBADF, fd)
        return opened

    # --- descriptors -----------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not self.is_ours(path, dir_fd):
            return os.open(path, flags, mode, dir_fd=dir_fd)
        disk, folder, name, shown = self._place(path, dir_fd)
        self.fate("open", shown, False)
        inode = folder if name == "." else folder.entries.get(name)
        if inode is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, shown)
            self._effect("create", shown)
            inode = disk.make(stat.S_IFREG | (mode & 0o777), self.now_ns())
            disk.change((folder, name, inode), moved=(inode,))
            self.on_write(folder, shown)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, shown)
        if flags & os.O_DIRECTORY and not inode.is_folder:
            raise _error(errno.ENOTDIR, shown)
        if inode.is_folder and flags & os.O_ACCMODE != os.O_RDONLY:
            raise _error(errno.EISDIR, shown)
        if flags & os.O_TRUNC and inode.data:
            self._effect("truncate", shown)
            self._touch(inode, shown)
            del inode.data[:]
        return self._new_fd(Opened(inode, flags, shown, self.actor))

    def _new_fd(self, opened: Opened) -> int:
        fd, self.next_fd = self.next_fd, self.next_fd + 1
        self.fds[fd] = opened
        return fd

    def dup(self, fd: int) -> int:
        if fd < FIRST_FD:
            return os.dup(fd)
        opened = self._fd(fd)
        return self._new_fd(Opened(opened.inode, opened.flags, opened.path, self.actor))

    def close(self, fd: int) -> None:
        if fd < FIRST_FD:
            os.close(fd)
            return
        opened = self.fds.pop(fd, None)
        if opened is not None and opened.inode.lock == fd:
            opened.inode.lock = None

    def read(self, fd: int, count: int) -> bytes:
        if fd < FIRST_FD:
            return os.read(fd, count)
        opened = self._fd(fd)
        data = bytes(opened.inode.data[opened.at : opened.at + count])
        opened.at += len(data)
        return data

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        if fd < FIRST_FD:
            return os.pread(fd, count, offset)
        opened = self._fd(fd)
        self.fate("read", opened.path, False)
        return bytes(opened.inode.data[offset : offset + count])

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if fd < FIRST_FD:
            return os.preadv(fd, buffers, offset)
        total = 0
        for buffer in buffers:
            data = self.pread(fd, len(buffer), offset + total)
            buffer[: len(data)] = data
            total += len(data)
        return total

    def _touch(self, inode: Inode, path: str) -> None:
        if inode.saved is not None and self.actor == "ckptd":
            self.on_write(inode, path)
        inode.is_dirty = True
        inode.written_ns = inode.changed_ns = self.now_ns()

    def write(self, fd: int, data: Any) -> int:
        if fd < FIRST_FD:
            return os.write(fd, data)
        opened = self._fd(fd)
        at = len(opened.inode.data) if opened.flags & os.O_APPEND else opened.at
        opened.at = at + self.pwrite(fd, data, at)
        return opened.at - at

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if fd < FIRST_FD:
            return os.pwrite(fd, data, offset)
        opened = self._fd(fd)
        self._effect("write", opened.path)
        content = opened.inode.data
        if len(content) < offset:
            content += bytes(offset - len(content))
        content[offset : offset + len(data)] = data
        self._touch(opened.inode, opened.path)
        return len(data)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        self.pwrite(fd, bytes(length), offset)

    def ftruncate(self, fd: int, length: int) -> None:
        if fd < FIRST_FD:
            os.ftruncate(fd, length)
            return
        opened = self._fd(fd)
        self._effect("truncate", opened.path)
        del opened.inode.data[length:]
        self._touch(opened.inode, opened.path)

    def lseek(self, fd: int, offset: int, how: int) -> int:
        opened = self._fd(fd)
        opened.at = offset if how == os.SEEK_SET else opened.at + offset
        return opened.at

    def fsync(self, fd: int) -> None:
        if fd < FIRST_FD:
            os.fsync(fd)
            return
        opened = self._fd(fd)
        self._effect("fsync", opened.path)
        if opened.inode.is_folder:
            opened.inode.disk.flush_folder(opened.inode)
        else:
            opened.inode.disk.flush_file(opened.inode)

    fdatasync = fsync

    # --- looking ---------------------------------------------------------------------------------------

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        if isinstance(path, int):
            return self.fstat(path)
        if not self.is_ours(path, dir_fd):
            return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        return _status(self._find(path, dir_fd)[0])

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> Any:
        return self.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> Any:
        return os.fstat(fd) if fd < FIRST_FD else _status(self._fd(fd).inode)

    def _names(self, path: Any) -> list[str]:
        inode, shown = (self._fd(path).inode, "") if isinstance(path, int) else self._find(path, None)
        if not inode.is_folder:
            raise _error(errno.ENOTDIR, shown)
        return list(inode.entries)

    def listdir(self, path: Any = ".") -> list[str]:
        return self._names(path) if self.is_ours(path) else os.listdir(path)

    def scandir(self, path: Any = ".") -> Any:
        return Entries(map(Entry, self._names(path))) if self.is_ours(path) else os.scandir(path)

    def access(self, path: Any, mode: int, **more: Any) -> bool:
        if self.is_ours(path, more.get("dir_fd")):
            try:
                self._find(path, more.get("dir_fd"))
            except OSError:
                return False
            return True
        return os.access(path, mode, **more)

    def readlink(self, path: Any, *, dir_fd: int | None = None) -> str:
        text = str(os.fspath(path))
        if text.startswith("/proc/self/fd/") and int(text.rpartition("/")[2]) >= FIRST_FD:
            return self._fd(int(text.rpartition("/")[2])).path
        return str(os.readlink(path, dir_fd=dir_fd))

    def fstatvfs(self, fd: int) -> Any:
        return os.fstatvfs(fd) if fd < FIRST_FD else Space(0)

    # --- changing names --------------------------------------------------------------------------------

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if not self.is_ours(path, dir_fd):
            os.mkdir(path, mode, dir_fd=dir_fd)
            return
        disk, folder, name, shown = self._place(path, dir_fd)
        if name == "." or name in folder.entries:
            raise _error(errno.EEXIST, shown)
        self._effect("mkdir", shown)
        made = disk.make(stat.S_IFDIR | (mode & 0o777), self.now_ns())
        disk.change((folder, name, made), moved=(made,))
        self.on_write(folder, shown)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        if not self.is_ours(path, dir_fd):
            os.unlink(path, dir_fd=dir_fd)
            return
        disk, folder, name, shown = self._place(path, dir_fd)
        inode = folder.entries.get(name)
        if inode is None:
            raise _error(errno.ENOENT, shown)
        if inode.is_folder:
            raise _error(errno.EISDIR, shown)
        self._effect("unlink", shown)
        if inode.saved is not None and self.actor == "ckptd":
            self.on_removal(inode, shown)
        disk.change((folder, name, None), moved=(inode,))

    remove = unlink

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        if not self.is_ours(path, dir_fd):
            os.rmdir(path, dir_fd=dir_fd)
            return
        disk, folder, name, shown = self._place(path, dir_fd)
        inode = folder.entries.get(name)
        if inode is None:
            raise _error(errno.ENOENT, shown)
        if inode.entries:
            raise _error(errno.ENOTEMPTY, shown)
        self._effect("rmdir", shown)
        disk.change((folder, name, None), moved=(inode,))

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        if not self.is_ours(src, src_dir_fd):
            os.link(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
            return
        inode, _ = self._find(src, src_dir_fd)
        disk, folder, name, shown = self._place(dst, dst_dir_fd)
        if name in folder.entries:
            raise _error(errno.EEXIST, shown)
        self._effect("link", shown)
        disk.change((folder, name, inode), moved=(inode,))
        self.fate("link", shown, True)

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        if not self.is_ours(src, src_dir_fd):
            os.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        self.renameat(src_dir_fd, src, dst_dir_fd, dst, 0)

    replace = rename

    def renameat(self, src_fd: int | None, src: Any, dst_fd: int | None, dst: Any, flags: int) -> None:
        """renameat2: 1 never replaces, 2 swaps."""
        disk, folder, name, shown = self._place(src, src_fd)
        _, other, new_name, target = self._place(dst, dst_fd)
        inode, there = folder.entries.get(name), other.entries.get(new_name)
        if inode is None:
            raise _error(errno.ENOENT, shown)
        if there is not None and (flags == 1 or there.entries):
            raise _error(errno.EEXIST if flags == 1 else errno.ENOTEMPTY, target)
        if self.before_rename is not None and self.actor == "ckptd":
            self.before_rename(shown, target)
        self._effect("rename", f"{shown} -> {target}")
        if self.actor == "ckptd":
            self.on_move(inode, shown, target)
        disk.change((folder, name, None), (other, new_name, inode), moved=(inode,))
        self.fate("rename", target, True)

    # --- the rest --------------------------------------------------------------------------------------

    def fchmod(self, fd: int, mode: int) -> None:
        inode = self._fd(fd).inode
        inode.mode = stat.S_IFMT(inode.mode) | mode

    def fchown(self, fd: int, uid: int, gid: int) -> None:
        self._fd(fd)

    def posix_fadvise(self, fd: int, offset: int, length: int, advice: int) -> None:
        if fd < FIRST_FD:
            os.posix_fadvise(fd, offset, length, advice)

    def clone(self, src_fd: int, dst_fd: int) -> bool:
        """FICLONE: the content of a whole file, where the disk can."""
        if not self.can_clone:
            return False
        source, target = self._fd(src_fd).inode, self._fd(dst_fd)
        self._effect("clone", target.path)
        target.inode.data[:] = source.data
        self._touch(target.inode, target.path)
        return True

    def clone_range(self, src_fd: int, src_offset: int, dst_fd: int, dst_offset: int, length: int) -> bool:
        """FICLONERANGE: a range of a file, where the disk can."""
        if not self.can_clone:
            return False
        source, target = self._fd(src_fd).inode, self._fd(dst_fd)
        self._effect("clone", target.path)
        target.inode.data[dst_offset : dst_offset + length] = source.data[src_offset : src_offset + length]
        self._touch(target.inode, target.path)
        return True

    def flock(self, fd: int, how: int) -> None:
        """One holder; `how` 8 gives it back."""
        inode = self._fd(fd).inode
        if how == 8:
            inode.lock = None
        elif inode.lock not in (None, fd):
            raise BlockingIOError(errno.EAGAIN, "locked")
        else:
            inode.lock = fd

    def open_stream(self, path: Any, mode: str = "r", *more: Any, **others: Any) -> Any:
        """`io.open` for reading, as pathlib calls it."""
        if not self.is_ours(path):
            return io.open(path, mode, *more, **others)  # noqa: UP020
        data = self.content_of(str(path))
        return io.BytesIO(data) if "b" in mode else io.StringIO(data.decode())

    def content_of(self, path: str) -> bytes:
        """The content of a file as every reader sees it."""
        return bytes(self._find(path, None)[0].data)

    def exists(self, path: Any) -> bool:
        """As `os.path.lexists`."""
        try:
            self.lstat(path)
        except OSError:
            return False
        return True

    def inode_of(self, path: str) -> Inode:
        """What a path names."""
        return self._find(path, None)[0]

    def flush_name(self, disk: Disk, inode: Inode) -> None:
        """The name of a file becomes durable."""
        for change in disk.pending:
            if inode in change.moved:
                disk.flush_folder(change.changes[0][0])
                return

    def monotonic(self) -> float:
        """Never the same twice, as on a real machine."""
        self.now_seconds += 1e-6
        return self.now_seconds

    def wall(self) -> float:
        """Unix seconds, which may jump."""
        return self.now_seconds + self.wall_offset_seconds

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now_seconds += seconds

    def forget_processes(self) -> None:
        """All of the daemon's processes are gone: their descriptors and locks with them."""
        for fd in [fd for fd, opened in self.fds.items() if opened.owner == "ckptd"]:
            self.fds.pop(fd).inode.lock = None
        self.is_dead = False
        self.ends_at = None
        self.hooks.clear()
        self.before_rename = None
