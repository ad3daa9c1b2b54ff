"""A disk that loses, tears and reorders what was not flushed, as ALICE and CrashMonkey do.

A file's content is durable after fsync, a name after fsync of its folder; until then a power cut may keep any
part of it. It exists so that recovery is judged on every state that a kernel may leave, not on the kind ones.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

BLOCK_BYTES = 4096


class Inode:
    """A file or a folder; `saved`: which of the trainer's files it is, as (save, path)."""

    __slots__ = (
        "changed_ns", "data", "dev", "disk", "durable", "entries", "flushed", "ino", "is_dirty", "is_folder",
        "lock", "mode", "parent", "saved", "written_ns",
    )  # fmt: skip

    def __init__(self, disk: Disk, ino: int, mode: int, now_ns: int) -> None:
        self.disk = disk
        self.dev = disk.dev
        self.ino = ino
        self.mode = mode
        self.is_folder = stat.S_ISDIR(mode)
        """A folder, not a file."""
        self.written_ns = self.changed_ns = now_ns
        self.data = bytearray()
        self.flushed: tuple[bytes, int, int] = (b"", now_ns, now_ns)
        """What fsync made durable: content, mtime, ctime."""
        self.is_dirty = False
        self.entries: dict[str, Inode] = {}
        self.durable: dict[str, Inode] = {}
        """A folder's names as a power cut leaves them at least."""
        self.parent: Inode | None = None
        self.lock: int | None = None
        self.saved: tuple[int, str] | None = None


@dataclass(slots=True, kw_only=True)
class NameChange:
    """One call that changed names: done as a whole or not at all; (folder, name, what it names then)."""

    changes: tuple[tuple[Inode, str, Inode | None], ...]
    moved: tuple[Inode, ...]


@dataclass(slots=True)
class Disk:
    """One file system; `pending` are the names that no fsync has made durable yet, in order."""

    dev: int
    now_ns: int
    pending: list[NameChange] = field(default_factory=list)
    next_ino: int = 2
    root: Inode = field(init=False)

    def __post_init__(self) -> None:
        self.root = Inode(self, 1, stat.S_IFDIR | 0o755, self.now_ns)

    def mount_at(self, dev: int) -> None:
        """Another device number, before anything lies here."""
        self.dev = self.root.dev = dev

    def make(self, mode: int, now_ns: int) -> Inode:
        """A new inode without a name."""
        made = Inode(self, self.next_ino, mode, now_ns)
        self.next_ino += 1
        return made

    def change(self, *changes: tuple[Inode, str, Inode | None], moved: tuple[Inode, ...]) -> None:
        """Names change for every reader now, and durably some time later."""
        for folder, name, inode in changes:
            if inode is None:
                del folder.entries[name]
            else:
                folder.entries[name] = inode
                if inode.is_folder:
                    inode.parent = folder
        self.pending.append(NameChange(changes=changes, moved=moved))

    def flush_file(self, inode: Inode) -> None:
        """fsync of a file: its content, not its name."""
        if inode.is_dirty:
            inode.flushed = (bytes(inode.data), inode.written_ns, inode.changed_ns)
            inode.is_dirty = False

    def flush_folder(self, folder: Inode) -> None:
        """fsync of a folder: its names, and whatever had to happen before to the same inodes."""
        needed: list[NameChange] = []
        touched: set[int] = set()
        for change in reversed(self.pending):
            is_here = any(place is folder for place, _, _ in change.changes)
            if is_here or any(id(inode) in touched for inode in change.moved):
                needed.append(change)
                touched.update(id(inode) for inode in change.moved)
        for change in reversed(needed):
            _apply(change)
        kept = {id(change) for change in needed}
        self.pending = [change for change in self.pending if id(change) not in kept]

    def lose_power(self, rng: random.Random) -> None:
        """Names not flushed are kept or lost one by one; contents are old, new, cut, zeroed or mixed."""
        keep = rng.choice((0.0, 0.5, 0.8, 1.0))
        broken: set[int] = set()
        for change in self.pending:
            is_possible = not any(id(inode) in broken for inode in change.moved)
            if is_possible and rng.random() < keep:
                _apply(change)
            else:
                broken.update(id(inode) for inode in change.moved)
        self.pending = []
        for inode in self.walk(durable=True):
            inode.lock = None
            if inode.is_folder:
                inode.entries = dict(inode.durable)
                for child in inode.entries.values():
                    if child.is_folder:
                        child.parent = inode
            elif inode.is_dirty:
                _tear(inode, rng)

    def walk(self, *, durable: bool = False) -> Iterator[Inode]:
        """Every inode that has a name."""
        seen: set[int] = set()
        stack = [self.root]
        while stack:
            inode = stack.pop()
            if inode.ino not in seen:
                seen.add(inode.ino)
                yield inode
                stack += (inode.durable if durable else inode.entries).values()


def _apply(change: NameChange) -> None:
    for folder, name, inode in change.changes:
        if inode is None:
            folder.durable.pop(name, None)
        else:
            folder.durable[name] = inode


def _tear(inode: Inode, rng: random.Random) -> None:
    """What a power cut may leave of a file that was not flushed: all old, else the new times and any part.

    What was flushed and then appended to is not written again: it stays.
    """
    old, old_written_ns, old_changed_ns = inode.flushed
    new = bytes(inode.data)
    kind = rng.choice(("old", "new", "cut", "zeros", "blocks"))
    stays = len(old) if new.startswith(old) else 0
    cut = max(stays, rng.randint(0, len(new)))
    if kind == "old":
        inode.data = bytearray(old)
        inode.written_ns, inode.changed_ns = old_written_ns, old_changed_ns
    elif kind == "cut":
        inode.data = bytearray(new[:cut])
    elif kind == "zeros":
        inode.data = bytearray(new[:cut] + bytes(len(new) - cut))
    elif kind == "blocks":
        starts = range(0, len(new), BLOCK_BYTES)
        parts = [new[at : at + BLOCK_BYTES] for at in starts]
        torn = b"".join(p if rng.random() < 0.5 else bytes(len(p)) for p in parts)
        inode.data = bytearray(new[:stays] + torn[stays:])
    inode.flushed = (bytes(inode.data), inode.written_ns, inode.changed_ns)
    inode.is_dirty = False
