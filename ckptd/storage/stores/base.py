"""Define the store contract: the few verbs that every remote offers, and what may be relied on.

A key is `/`-separated, relative to the remote's root. Verbs are idempotent; an operation whose answer was
lost is neither done nor failed and is resolved by reading. What a store cannot do is data (`Abilities`),
never an `if` on its kind (docs/design.md §5).
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptd.base import extents
from ckptd.errors import DocumentDamaged, SourceChanged, TargetExists, VerifyError
from ckptd.storage.stores.checksums import crc64 as crc64_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NOT_READ_BACK = "copies are not read back (verify = none)"
PARTIAL_PREFIX = ".ckptd-part-"
WINDOW_BYTES = 64 << 20
DOCUMENT_LIMIT_BYTES = 64 << 20
"""Limit of `get`: a document of a checkpoint of a million files is smaller."""
_FLUSH_BYTES = 4 << 20


def too_large(key: str) -> DocumentDamaged:
    """Return the error that `get` raises for a larger object: one bad object must not keep others unread."""
    return DocumentDamaged(f"{key} is no document: it holds more than {DOCUMENT_LIMIT_BYTES} bytes")


def taken(key: str) -> TargetExists:
    """Return the error for an object that appeared while it was sent."""
    return TargetExists(f"{key} appeared while it was sent", hint="another node uploaded it; ckptd compares")


def differs(key: str, url: str, found: tuple[int, int], sent: tuple[int, int]) -> VerifyError:
    """Return the error for a copy that is not what was sent; each as (bytes, CRC64NVME)."""
    msg = (
        f"{key}: the copy in {url} has {found[0]} bytes and CRC64 {found[1]:016x}, "
        f"sent were {sent[0]} and {sent[1]:016x}"
    )
    return VerifyError(msg, hint="ckptd sends it again")


def cut_short(left_bytes: int) -> SourceChanged:
    """Return the error for a source that ended before its size."""
    msg = f"the source ended {left_bytes} bytes early"
    return SourceChanged(msg, hint="the trainer cut it; the next turn looks again")


def partial_name(owner: str, key: str) -> str:
    """Name the partial file of an object, so that two nodes and two keys never share one."""
    digest = hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()
    return f"{PARTIAL_PREFIX}{digest[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object: key relative to the root, bytes, and mtime (unix nanoseconds, 0 unknown)."""

    key: str
    bytes: int
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Record what a store was seen to do when it was probed."""

    create_only: bool
    """`put_if_absent` is enforced by the store, also between two writers (P10)."""
    checksum: str | None
    """A checksum that the store keeps *and* enforces; None: uploads are read back."""
    resumable: bool
    rename: bool = False
    complete_only_absent: bool = False
    """Joining the parts of an upload over an object that appeared meanwhile is refused by the store."""
    part_etags: bool = False
    """The ETag of a part is the MD5 of what arrived: a part that changed on its way is found at once."""
    joined_etags: bool = False
    """So is that of a whole object, of joined parts the MD5 of their MD5s: a proof (adr/0089)."""
    trailers: bool = False
    """That checksum may stand behind the body and is compared there: each byte is read once."""
    content_md5: bool = False
    """A body that does not fit its Content-MD5 is refused."""
    copies: bool = False
    """Parts of an upload may be copied from objects that lie there (`HeldRange`)."""
    notes: tuple[str, ...] = ()

    @property
    def proof(self) -> str:
        """Name the means by which an upload is verified, as manifests spell it."""
        return "store-checksum" if self.checksum else "part-etags" if self.joined_etags else "read-back"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Record how far an earlier attempt at one object got: bytes flushed, and the CRC64NVME of those
    bytes."""

    flushed_bytes: int = 0
    crc64: int = 0
    token: str = ""
    """The store's own words for finding that attempt again (S3: part size and upload id)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRange:
    """Say that another object of the store holds the bytes of a range of an object that is to be written."""

    offset: int
    """First byte of the range in the object that is written."""
    length: int
    key: str
    key_offset: int
    bucket: str = ""
    """S3 bucket in which `key` is a whole key; "": `key` is one of the store's."""


class Source(Protocol):
    """Read the bytes of an upload: one file, sequentially, its identity checked by the caller before and
    after.
    """

    @property
    def size_bytes(self) -> int:
        """Return the size in bytes."""
        ...

    @property
    def mode(self) -> int:
        """Return the permission bits of the source: the copy never gets more (P15)."""
        ...

    @property
    def folder_mode(self) -> int:
        """Return the permission bits of the source's folder, for folders that are made for the copy."""
        ...

    @property
    def gid(self) -> int | None:
        """Group of the source; None: leave the store's own."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read at `offset` into `buffer`; may read less than fits; 0 at the end.

        Raises:
            DamagedError: the bytes are not those that were saved.
            SourceChanged: the transfer was cancelled or the source changed.
        """
        ...

    def drop(self, offset: int, length: int) -> None:
        """The range was uploaded: its cached pages are no longer needed (P12)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Called while an object moves: bytes of this object done so far, and how far they are durable."""

    done_bytes: int
    flushed_bytes: int
    crc64: int
    token: str = ""


class PendingPut(Protocol):
    """An object on its way."""

    def end(self, on_progress: Callable[[Progress], None]) -> int:
        """Finish the upload as `Store.upload` does and return its CRC64NVME."""
        ...

    def abandon(self) -> None:
        """Stop waiting for it; whoever uploads the file again finds out whether it arrived."""
        ...


class Store(Protocol):
    """One remote root: verbs that every store has, then what only some offer, with what holds for the others.

    Every method raises `RemoteUnreachable` when the remote does not answer, `NotPermitted` for rights or
    credentials, `NoSpaceError` when it is full, `StorageError` when it fails; anything else is a bug. All
    may be called from several threads.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Return the URL as configured, for messages; never with credentials."""

    @property
    @abstractmethod
    def lanes(self) -> int:
        """Return how many small objects may move at a time; 1: in order, in the thread that asked."""

    @abstractmethod
    def probe(self) -> Abilities:
        """Find out what the store can do, by doing it with a small object of ours that is removed again."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return a small object, whole; None when absent. Always a fresh read."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Create or replace a small object; durable when it returns; never half visible."""

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create a small object; False when it exists, which is never changed (P3)."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield objects whose key starts with `prefix` (a folder, ends with `/`), unordered, recursive."""

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo | None:
        """Return the size of an object; None when absent."""

    @abstractmethod
    def read_at(self, key: str, offset: int, length: int) -> bytes:
        """Return a range of an object, fresh from the store if possible; FileNotFoundError when absent."""

    @abstractmethod
    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        """Read a range as `read_at` does, in chunks of a few MiB at most; FileNotFoundError at the first."""

    @abstractmethod
    def upload(
        self,
        key: str,
        source: Source,
        *,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> int:
        """Move one object; durable when it returns; returns the CRC64NVME of the bytes *as read*.

        Not verified yet: that is `verify`. `on_progress` and the source may raise to stop; what is flushed
        can be resumed, or given up with `discard`. A store that `copies` makes the ranges `held` of what it
        holds, where it can, and reads them from the source all the same, for the CRC.

        Raises:
            TargetExists: the key appeared meanwhile (another node's replica); nothing was replaced.
        """

    @abstractmethod
    def verify(self, key: str, size_bytes: int, crc64: int, on_progress: Callable[[int], None]) -> str:
        """Prove that the store holds those bytes (P2); returns the proof's name for the manifest.

        Raises:
            VerifyError: it does not. Nothing was changed: what lies there may be another node's.
        """

    @abstractmethod
    def discard(self, key: str, token: str = "") -> None:
        """Give up a partial upload of ours of that key, none is fine; forget what an answer to one proved.
        Never touches the object itself.

        `token`: of an attempt of an earlier process, as its progress told.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; gone already is fine."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the room that the store reports; None where it cannot tell."""

    # --- what only some stores offer --------------------------------------------------------------------

    @property
    def overlap(self) -> int:
        """Return how many large objects may be under way at a time, the parts of the first before the
        others'.
        """
        return 1

    @property
    def pending_puts(self) -> int:
        """Return how many small objects one lane may have on their way by `begin`; 0: none now."""
        return 0

    @property
    def copies(self) -> bool:
        """Whether it makes ranges of an object of others that it holds (`upload`), and proves the result."""
        return False

    def begin(self, key: str, source: Source) -> PendingPut | None:  # noqa: ARG002
        """Send a small object whose answer is waited for later; None: `upload` it."""
        return None

    def flush_name(self, key: str) -> None:  # noqa: ARG002
        """Make an object that was found, not written just now, as durable as if it had been written now.

        Whoever wrote it may have been killed before its name was flushed. Only directories know a difference.
        """
        return

    def write_range(
        self, key: str, offset: int, length: int, out: int, told: Callable[[int], None]
    ) -> tuple[int, int]:
        """Write a range of an object into an open file, at the same offset; return its bytes and CRC64NVME.

        What is written is flushed and dropped from the page cache soon after: a few MiB are dirty at a time.
        `told(count)` is called after each chunk and may raise to stop. A store of another process writes it
        there: no byte passes between the two.
        """
        at = flushed = started = offset
        crc = 0
        for data in self.stream(key, offset, length):
            extents.write_at(out, data, at)
            crc = crc64_of(data, crc)
            at += len(data)
            told(len(data))
            if at - started >= _FLUSH_BYTES:
                extents.start_flush(out, started, at - started)
                if started > flushed:
                    # waits for the stretch before, so that what is dirty stays small
                    extents.flush_range(out, flushed, started - flushed)
                    extents.drop_pages(out, flushed, started - flushed)
                flushed, started = started, at
        return at - offset, crc

    def partial_bytes(self, key: str) -> int:  # noqa: ARG002
        """Return the bytes that a partial upload of ours of that key takes; 0: none, or it cannot tell."""
        return 0

    def left_temporaries(self) -> tuple[ObjectInfo, ...]:
        """Return the temporaries of documents that bear the owner's id: of writes under way, or of processes
        that were killed. Only directories have any.
        """
        return ()

    def now_seconds(self) -> float | None:
        """Return the Unix time as the store's answers carry it; None: they carry none.

        Ages of a store's objects are by its clock where it tells one, never by a reader's.
        """
        return None
