"""Define the messages through a scheduler: descriptors as JSON, never data, never a secret.

A `Job` is what all tasks of an attempt share, a `Task` what one of them makes, a `Result` what came of it.
"""

from __future__ import annotations

from ckptd.base.identity import Model
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.base import Abilities


class ClusterJob(Model):
    """One attempt at one destination; sizes in bytes."""

    version: str
    """Version of ckptd; a worker with another one does nothing."""
    attempt: str
    source_root: str
    """A folder that every worker sees; empty: `source_url`."""
    source_url: str
    source_access: Access
    target_url: str
    target_access: Access
    target_name: str
    note_key: str
    """Key of the note that says whose attempt owns the destination now."""
    abilities: Abilities | None
    """Abilities of an S3 destination, found out once for all tasks; None: another store."""
    file_mode: int
    folder_mode: int
    gid: int | None
    memory_budget_bytes: int
    rounds: bool
    """Weights are rounded: with numpy."""


class TaskSource(Model):
    """A source file by its number in the plan: its path below the root, or its key in the store."""

    number: int
    name: str
    bytes: int
    mtime_ns: int
    fingerprint: str = ""
    crc64: str = ""
    """Checksum in the manifest; what is read of the file is hashed for it."""
    local: str = ""
    """Path of the shard below the save_dir of the node that saved it."""


class Question(Model):
    """Ask a worker which of these files it has on its own disk."""

    sources: tuple[TaskSource, ...]


class Claims(Model):
    """Answer a `Question` by the numbers of sources; `error`: what is wrong with the worker's settings."""

    numbers: tuple[int, ...] = ()
    error: str = ""
    hint: str = ""


class SentPart(Model):
    """A part of an upload, as the store holds it."""

    number: int
    etag: str
    crc64: str
    md5: str = ""


class UploadPiece(Model):
    """An output to send whole, or (`token`) parts of one."""

    path: str
    nbytes: int
    line: str
    """Line of the plan."""
    token: str = ""
    parts: tuple[int, ...] = ()
    is_there: bool = False
    """An earlier attempt sent something under this name and did not get to note it."""


class Join(Model):
    """An upload all of whose parts are there."""

    path: str
    nbytes: int
    token: str
    parts: tuple[SentPart, ...]


class OutputProof(Model):
    """An output to be read back."""

    path: str
    nbytes: int
    crc64: str


class Task(Model):
    """One task: done twice, it leaves what it left the first time."""

    number: int
    sources: tuple[TaskSource, ...] = ()
    checks: tuple[str, ...] = ()
    """Lines of the plan: copies that must be equal."""
    pieces: tuple[UploadPiece, ...] = ()
    joins: tuple[Join, ...] = ()
    proofs: tuple[OutputProof, ...] = ()
    crc32s: tuple[int, ...] = ()
    """Sources whose own checksums are compared."""
    copies: bool = True
    """Parts may be copied by the server."""
    nbytes: int = 0


class DoneOutput(Model):
    """An output that is in its place, proven."""

    path: str
    nbytes: int
    crc64: str
    resumed: bool = False


class Parts(Model):
    """Parts of one output that arrived."""

    path: str
    parts: tuple[SentPart, ...]


class Extent(Model):
    """Report the CRC64 of a range that was read of a source."""

    source: int
    offset: int
    nbytes: int
    crc64: str


class Result(Model):
    """Report the result of a task; `error`: a class of `ckptd.errors`."""

    number: int
    worker: str
    done: tuple[DoneOutput, ...] = ()
    parts: tuple[Parts, ...] = ()
    undone: tuple[str, ...] = ()
    """Outputs that came to other bytes when their parts were joined, and were removed."""
    extents: tuple[Extent, ...] = ()
    read_bytes: int = 0
    local_bytes: int = 0
    """Part of `read_bytes`: from this worker's own disk."""
    needed_bytes: int = 0
    peak_rss_bytes: int = 0
    error: str = ""
    message: str = ""
    hint: str = ""
