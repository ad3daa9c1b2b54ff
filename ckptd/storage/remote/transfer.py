"""Upload the files of an order: each is read once, sent, verified, its identity watched.

What an earlier attempt finished is skipped, what it left half done goes on, what lies in the remote already
is compared instead of sent; nothing that any manifest lists is ever replaced. Large files go in order, each
verified behind the next upload; small ones beside them in lanes, as many as the store likes.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol, cast

from ckptd.base import extents, files
from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import sha256_of
from ckptd.core.model.swap_paths import BY_LOCAL_RANK, is_state
from ckptd.errors import (
    CommitConflict,
    DamagedError,
    RefusedError,
    SourceChanged,
    SourceUnreadable,
    StorageError,
    TargetExists,
    VerifyError,
)
from ckptd.storage.remote.manifest_index import manifest_entry
from ckptd.storage.remote.messages import UploadedObject
from ckptd.storage.stores.base import Progress, ResumePoint
from ckptd.storage.stores.checksums import crc64, from_hex, to_hex
from ckptd.storage.stores.parallel import FailFastPool
from ckptd.storage.stores.rate_limit import Cancelled
from ckptd.storage.stores.sources import (
    CheckedSource,
    FileSource,
    MemorySource,
    RateLimitedSource,
    crc64_of,
    records_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from ckptd.base.identity import FileIdentity
    from ckptd.core.model.manifest import ManifestFile, Proof
    from ckptd.storage.remote.held_objects import HeldObjects
    from ckptd.storage.remote.manifest_index import ManifestIndex
    from ckptd.storage.remote.messages import PartlyUploaded, Planned, UploadFile, UploadRequest
    from ckptd.storage.stores.base import HeldRange, PendingPut, Source, Store
    from ckptd.storage.stores.rate_limit import RateLimiter


# --- small files beside a checkpoint ---------------------------------------------------------------------
# Tokenizers and configurations are read whole, the same before and after. They are not sealed like shards, so
# their content alone decides what was uploaded.

EXTRA_LIMIT_BYTES = 16 << 20


def read_whole(root: int, file: UploadFile) -> tuple[bytes, MemorySource]:
    """Return a small file beside the checkpoint, whole, the same before and after it was read.

    Raises:
        SourceChanged: it is gone or being written.
        RefusedError: it is larger than 16 MiB.
    """
    with _told(file.path), files.reading(root, file.source) as fd:
        before = os.fstat(fd)
        cached = extents.cached_runs(fd, before.st_size)
        data = files.pread_all(fd, limit_bytes=EXTRA_LIMIT_BYTES)
        extents.drop_pages_but(fd, cached, 0, len(data))
        after = os.fstat(fd)
    if files.identity_of(before) != files.identity_of(after) or len(data) != after.st_size:
        msg = f"{file.path} is being written"
        raise SourceChanged(msg, hint="the next turn looks again")
    mode = stat.S_IMODE(after.st_mode)
    return data, MemorySource(data, mode=mode, folder_mode=folder_mode(root, file.source), gid=after.st_gid)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Raise SourceUnreadable for what this node's disk refuses."""
    try:
        yield
    except OSError as error:
        raise SourceUnreadable(f"reading {name}: {error.strerror or error}") from error


def inline(file: UploadFile) -> tuple[bytes, MemorySource]:
    data = (file.inline or "").encode()
    return data, MemorySource(data, mode=file.mode, folder_mode=0o755, gid=None)


def folder_mode(root: int, source: str) -> int:
    """Return the permission bits of the folder that `source` lies in."""
    return mode_of_folder(root, source.rpartition("/")[0])


def mode_of_folder(root: int, parent: str) -> int:
    """Return the permission bits of a folder below `root`; "": of the root itself."""
    status = files.stat_beneath(root, parent) if parent else os.fstat(root)
    return stat.S_IMODE(status.st_mode) if status is not None else 0o700


# --- pipelined uploads of small files --------------------------------------------------------------------
# A lane that waits for each answer costs a thread per file under way, and threads of Python stand in each
# other's way. So a lane has several under way and waits for their answers in order. What a
# store offers for it (`pending_puts`, `begin`) is optional; without it lanes upload one file after another.

SMALL_BYTES = 8 << 20
"""Size up to which files are sent beside others; larger ones go in order, one after the other."""
_SMALL_EXTRA_BYTES = 1 << 20
"""The same for a file that is held in memory."""
PENDING_LANES = 2
TINY_BYTES = 1 << 20
"""Size up to which a lane begins the next file before this one is answered."""
_MOST_BYTES = 4 << 20
"""Held by one lane: a file stays in memory until its answer came."""


def is_small(file: UploadFile) -> bool:
    """Whether it goes beside others."""
    return file.bytes <= (_SMALL_EXTRA_BYTES if file.is_extra and file.inline is None else SMALL_BYTES)


def next_of(files: deque[UploadFile]) -> UploadFile | None:
    """Return the next of what several threads share; None: there is none."""
    try:
        return files.popleft()
    except IndexError:
        return None


# --- the transfer ----------------------------------------------------------------------------------------

_BESIDE = (Role.SIDE, Role.EXTRA)
_AGAIN = "this attempt is dropped; the next turn looks again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferControl:
    """Steer a transfer and take its reports.

    `check` raises `Cancelled` to stop; `on_moving(key, total_bytes, progress)`, `on_done(object)` and
    `on_planned(what)` tell.
    """

    pacer: RateLimiter
    check: Callable[[], None]
    on_moving: Callable[[str, int, Progress], None]
    on_done: Callable[[UploadedObject], None]
    on_planned: Callable[[Planned], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The files as they lie in the remote, verified, in the order given; bytes sent and not sent."""

    files: tuple[ManifestFile, ...]
    bytes_sent: int
    bytes_skipped: int
    bytes_copied: int = 0
    """Made by the store from objects that it held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    file: UploadFile
    bytes: int
    crc: int
    fingerprint: str
    copied_bytes: int = 0
    """Bytes that the store copied of what it holds."""


class Transfer:
    """One order's objects on one store; `listed`: what the generation's manifests say of them already."""

    def __init__(
        self,
        store: Store,
        origin: Origin,
        root: int,
        listed: ManifestIndex,
        control: TransferControl,
        elsewhere: HeldObjects,
    ) -> None:
        self._store = store
        self._elsewhere = elsewhere
        self._origin = origin
        self._order = order = origin.order
        self._root = root
        self._control = control
        self._uploaded = {entry.key: entry for entry in order.uploaded}
        self._partly: dict[str, PartlyUploaded] = {entry.key: entry for entry in order.partly}
        self._listed = listed
        self._results: dict[str, ManifestFile] = {}
        self._held: dict[str, int] | None = None
        self._lanes = FailFastPool()
        self._lock = threading.Lock()
        self._sent = 0
        self._skipped = 0
        self._copied = 0

    def run(self) -> Carried:
        """Upload and verify every file.

        Raises:
            SourceChanged: a file is not the one that was sealed (P4), or the order was cancelled.
            DamagedError: a record's CRC32 is not what `torch.save` wrote; nothing of the file was uploaded.
            VerifyError: the remote holds other bytes than were sent.
            CommitConflict: another save's object lies under that key and a manifest lists it.
        """
        lanes = min(self._store.lanes, self._origin.most_lanes)
        beside = self._store.lanes > 1
        small = [file for file in self._order.files if beside and is_small(file)]
        large = deque(file for file in self._order.files if not (beside and is_small(file)))
        if len(small) > 1:
            folder = f"{self._order.manifest.folder}/"
            self._held = {info.key: info.bytes for info in self._store.list(folder)}
        pending = deque(file for file in small if self._may_pend(file))
        if pending:
            keys = {file.key for file in pending}
            small, lanes = [file for file in small if file.key not in keys], max(1, lanes - PENDING_LANES)
        ways = min(self._store.overlap, self._origin.most_lanes, len(large))
        with ThreadPoolExecutor(lanes + PENDING_LANES + ways, "lane") as pool:
            for _ in range(PENDING_LANES if pending else 0):
                pool.submit(self._lanes.begin([pending], self._upload_pending))
            lane = self._lanes.begin(small, self._upload_beside)
            for _ in range(min(lanes, len(small))):
                pool.submit(lane)
            for _ in range(ways - 1):
                pool.submit(self._lanes.begin([large], self._upload_in_order))
            self._lanes.begin([large], self._upload_in_order)()
        self._lanes.settle()
        return Carried(
            files=tuple(self._results[file.key] for file in self._order.files),
            bytes_sent=self._sent,
            bytes_skipped=self._skipped,
            bytes_copied=self._copied,
        )

    def _upload_in_order(self, files: deque[UploadFile]) -> None:
        """Upload in order from `files`, which may be shared with another thread, until there is none."""
        with ThreadPoolExecutor(1, "verify") as verifier:
            waiting: Future[None] | None = None
            while (file := next_of(files)) is not None:
                self._check()
                sent = self._upload_one(file)
                # one copy is read back while the next is sent; never more, so that memory stays flat
                if waiting is not None:
                    waiting.result()
                waiting = verifier.submit(self._verify, sent) if sent is not None else None
            if waiting is not None:
                waiting.result()

    def _upload_beside(self, file: UploadFile) -> None:
        self._check()
        sent = self._upload_one(file)
        if sent is not None:
            self._verify(sent)

    def _may_pend(self, file: UploadFile) -> bool:
        """Whether it is a small sealed file that no earlier attempt began and of which nothing lies there."""
        is_begun = file.key in self._uploaded or file.key in self._partly
        if file.is_extra or is_begun or file.bytes > TINY_BYTES or self._origin.most_lanes < PENDING_LANES:
            return False
        is_absent = self._held is not None and self._held_bytes(file) is None
        return is_absent and self._store.pending_puts > 0

    def _upload_pending(self, files: deque[UploadFile]) -> None:
        """Upload as one lane: take from `files`, which other lanes share, until there is none."""
        under_way: deque[tuple[UploadFile, PendingPut]] = deque()
        held_bytes, most = 0, self._store.pending_puts
        try:
            while (file := next_of(files)) is not None:
                started = self._begin(file)
                if started is None:
                    self._upload_beside(file)
                    continue
                under_way.append((file, started))
                held_bytes += file.bytes
                while len(under_way) > most or held_bytes > _MOST_BYTES:
                    oldest = under_way.popleft()
                    held_bytes -= oldest[0].bytes
                    self._end(*oldest)
            while under_way:
                self._end(*under_way.popleft())
        finally:
            for _file, started in under_way:
                started.abandon()

    def _begin(self, file: UploadFile) -> PendingPut | None:
        """Read and send; None: it is to be sent the usual way."""
        self._check()
        with self._origin.opened(file) as source:
            paced = RateLimitedSource(source, self._control.pacer, self._check)
            started = self._store.begin(file.key, paced)
        with self._lock:
            self._sent += paced.read_bytes
        if started is not None and self._origin.why_changed(file) is not None:
            started.abandon()
            raise SourceChanged(f"{file.path} was written while it was uploaded", hint=_AGAIN)
        return started

    def _end(self, file: UploadFile, started: PendingPut) -> None:
        """Wait for its answer; what another put there meanwhile is compared."""
        try:
            crc = started.end(lambda done: self._tell_whole(file, file.bytes, done))
        except TargetExists:
            self._upload_beside(file)
            return
        self._verify(_Sent(file=file, bytes=file.bytes, crc=crc, fingerprint=file.fingerprint))

    def _check(self) -> None:
        """Raise when another lane failed, or the daemon wants an end."""
        self._lanes.check()
        self._control.check()

    # --- one file ---------------------------------------------------------------------------------------

    def _upload_one(self, file: UploadFile) -> _Sent | None:
        """Send one file; None when it lies there already, verified."""
        if file.is_extra:
            return self._upload_extra(file)
        if self._take_record(file, None, file.fingerprint):
            return None
        with self._origin.opened(file) as source:
            sent = self._settle(file, source, file.fingerprint)
        if self._origin.why_changed(file) is not None:
            self._store.discard(file.key)
            msg = f"{file.path} was written while it was uploaded"
            raise SourceChanged(msg, hint=_AGAIN)
        return sent

    def _upload_extra(self, file: UploadFile) -> _Sent | None:
        data, source = inline(file) if file.inline is not None else read_whole(self._root, file)
        fingerprint = sha256_of(data)
        if self._take_record(file, crc64(data), fingerprint):
            return None
        return self._settle(file, source, fingerprint)

    def _take_record(self, file: UploadFile, crc: int | None, fingerprint: str) -> bool:
        """Use what an earlier attempt finished, if it is still there with that size (and CRC, when known)."""
        record = self._uploaded.get(file.key)
        if record is None or (crc is not None and from_hex(record.crc64nvme) != crc):
            return False
        if self._held_bytes(file) != record.bytes or (crc is None and record.bytes != file.bytes):
            return False
        self._keep(file, record.bytes, record.crc64nvme, record.proof, fingerprint)
        self._skip(record.bytes)
        return True

    def _held_bytes(self, file: UploadFile) -> int | None:
        """Return the size of what lies under the key; of small files as it was when the order began.

        Should another object have come since, the upload of a small one refuses to replace it.
        """
        folder = f"{self._order.manifest.folder}/"
        if self._held is not None and is_small(file) and file.key.startswith(folder):
            return self._held.get(file.key)
        info = self._store.stat(file.key)
        return None if info is None else info.bytes

    def _settle(self, file: UploadFile, source: Source, fingerprint: str) -> _Sent | None:
        """Compare what lies under the key, else send."""
        held = self._held_bytes(file)
        if held is not None:
            if self._compare(file, source, fingerprint, held):
                return None
            if self._origin.why_changed(file) is not None:
                raise SourceChanged(f"{file.path} was written while it was compared", hint=_AGAIN)
            # comparing may take hours: what another node listed meanwhile is never removed
            if self._listed.find(file.key) is not None and self._compare(file, source, fingerprint, held):
                return None
            self._store.delete(file.key)
        try:
            if self._make_from_held(file, source, fingerprint):
                return None
            return self._upload(file, source, fingerprint)
        except TargetExists:
            info = self._store.stat(file.key)
            if info is not None and self._compare(file, source, fingerprint, info.bytes):
                return None
            raise

    def _compare(self, file: UploadFile, source: Source, fingerprint: str, held_bytes: int) -> bool:
        """Whether the object under the key is this file, or another node's replica of it.

        Raises:
            CommitConflict: a manifest lists that object and it is neither.
        """
        listed = self._listed.find(file.key)
        crc: int | None = None
        if held_bytes == source.size_bytes:
            paced = RateLimitedSource(source, self._control.pacer, self._check)
            crc = crc64_of(paced, 0, source.size_bytes, drops=True)
        if listed is None:
            return crc is not None and self._verified_in_place(file, source, crc, fingerprint)
        known, entry = listed
        if crc is not None and to_hex(crc) == entry.checksums.crc64nvme:
            self._keep(file, entry.bytes, entry.checksums.crc64nvme, entry.proof, fingerprint)
        elif is_state(file.path):
            msg = f"{file.key} holds other tensors, which {known.manifest.node} listed: {BY_LOCAL_RANK}"
            raise CommitConflict(msg, hint="what DeepSpeed saves so can be committed of one node alone")
        elif file.role in _BESIDE or file.tensor_fingerprint in {entry.tensor_fingerprint} - {None}:
            owner = known.manifest.node
            is_own = known.manifest.node_id == self._order.manifest.node_id
            replica_of = entry.replica_of or (None if is_own else owner)
            self._results[file.key] = entry.model_copy(update={"replica_of": replica_of})
        else:
            msg = f"{file.key} holds another save's bytes, listed by {known.key}"
            raise CommitConflict(msg, hint="the next attempt takes the next generation")
        self._skip(held_bytes)
        return True

    def _verified_in_place(self, file: UploadFile, source: Source, crc: int, fingerprint: str) -> bool:
        try:
            proof = self._store.verify(file.key, source.size_bytes, crc, self._while_verifying)
            self._store.flush_name(file.key)
        except (VerifyError, StorageError):
            return False  # other bytes, or they cannot be read
        if proof == "none":
            return False  # a size alone says nothing of what an earlier save left there
        self._keep(file, source.size_bytes, to_hex(crc), proof, fingerprint)
        self._skip(source.size_bytes)
        return True

    def _make_from_held(self, file: UploadFile, source: Source, fingerprint: str) -> bool:
        """Let the store make the object, as far as it can, of bytes that it holds; False: it is to be sent.

        Proved at once, so that it can be sent whole if the store made something else.
        """
        if is_small(file) or file.is_extra or not self._store.copies:
            return False
        held = self._origin.held(file) if file.is_made else self._elsewhere.ranges_of(file, source)
        if not held:
            return False
        try:
            sent = self._upload(file, source, fingerprint, held)
        except VerifyError:
            return False
        try:
            self._verify(sent)
        except (VerifyError, StorageError):
            return False
        with self._lock:
            self._copied += sent.copied_bytes
        return True

    def _upload(
        self, file: UploadFile, source: Source, fingerprint: str, held: tuple[HeldRange, ...] = ()
    ) -> _Sent:
        partly = self._partly.pop(file.key, None)
        resume = (
            ResumePoint(flushed_bytes=partly.flushed_bytes, crc64=partly.crc64, token=partly.token)
            if partly
            else None
        )
        if resume is not None and isinstance(source, CheckedSource):
            source.go_on(resume.flushed_bytes, self._check)
        pacer, is_afar = self._control.pacer, file.is_made and self._origin.is_afar
        paced = RateLimitedSource(source, pacer, self._check, is_afar=is_afar)
        is_whole = self._store.lanes > 1 and is_small(file)
        is_noted = resume is not None

        def moving(progress: Progress) -> None:
            nonlocal is_noted
            if is_whole and not progress.token:
                self._tell_whole(file, source.size_bytes, progress)
                return
            is_noted = is_noted or progress.flushed_bytes > 0 or progress.token != ""
            self._control.on_moving(file.key, source.size_bytes, progress)

        try:
            crc = self._store.upload(file.key, paced, resume=resume, on_progress=moving, held=held)
        except (DamagedError, SourceChanged) as error:
            # what the journal notes is gone on with when it is ordered again
            if not (isinstance(error, Cancelled) and is_noted):
                self._store.discard(file.key)
            raise
        finally:
            with self._lock:
                self._sent += paced.read_bytes
        size = source.size_bytes
        before_bytes = resume.flushed_bytes if resume is not None else 0
        copied = max(size - before_bytes - paced.read_bytes, 0) if held else 0
        return _Sent(file=file, bytes=size, crc=crc, fingerprint=fingerprint, copied_bytes=copied)

    def _tell_whole(self, file: UploadFile, size_bytes: int, progress: Progress) -> None:
        """Report a small file as moved without a row in the journal: uploading it again takes a moment."""
        self._control.on_moving(file.key, size_bytes, replace(progress, flushed_bytes=0, crc64=0))

    def _verify(self, sent: _Sent) -> None:
        file = sent.file
        try:
            proof = self._store.verify(file.key, sent.bytes, sent.crc, self._while_verifying)
        except (VerifyError, StorageError):
            # another save of another node may have taken the key and listed it
            if self._listed.find(file.key) is None:
                self._store.delete(file.key)
            raise
        self._keep(file, sent.bytes, to_hex(sent.crc), proof, sent.fingerprint)

    def _while_verifying(self, _done_bytes: int) -> None:
        self._control.pacer.breathe(self._check)

    def _skip(self, count_bytes: int) -> None:
        with self._lock:
            self._skipped += count_bytes

    def _keep(self, file: UploadFile, size: int, crc: str, proof: str, fingerprint: str) -> None:
        entry = manifest_entry(file, size, crc, fingerprint, cast("Proof", proof))
        self._results[file.key] = entry
        self._control.on_done(UploadedObject(key=file.key, bytes=size, crc64nvme=crc, proof=entry.proof))


# --- sources of an order's bytes -------------------------------------------------------------------------
# They are sealed files of this node, or a form that is made while it is uploaded. A transfer knows origins
# alone: what makes a derived form out of shards belongs to a higher layer (`ckptd.conversion.remote.derive`,
# docs/adr/0093) and is handed in.

_FOLDERS = 64
_SHARDS = (Role.OPTIM, Role.MODEL, Role.LAYER, Role.EXPERT)


class CannotBeMade(RefusedError):
    """The form does not exist for this save: no attempt will make it, and its ZeRO form is none the worse."""


class Origin(Protocol):
    """The source of one order."""

    @property
    def order(self) -> UploadRequest:
        """Return the order with all its files: of a form that is made they are known once it is planned."""

    @property
    def most_lanes(self) -> int:
        """Return how many of them may be read at a time (P12)."""

    @property
    def is_afar(self) -> bool:
        """Tell whether files that are made are read over the network."""

    def opened(self, file: UploadFile) -> AbstractContextManager[Source]:
        """Return one of these files, to be read."""

    def held(self, file: UploadFile) -> tuple[HeldRange, ...]:
        """Return the ranges of a file that is made which objects of the remote most likely hold."""

    def why_changed(self, file: UploadFile) -> str | None:
        """Return why it is not what it was when the order was given; None when it is."""

    def recheck(self) -> None:
        """Check that all that was read is what it was.

        Raises:
            SourceChanged: something is not (P4).
        """


if TYPE_CHECKING:
    OpenOrigin = Callable[[UploadRequest, int, TransferControl, Store], AbstractContextManager[Origin]]
    """From an order and the open folder that its sources are relative to, or the store that holds them."""


class SealedFiles:
    """Files as they were sealed: opened by identity, the CRC32s of records compared while they are read."""

    most_lanes = 64
    is_afar = False

    def __init__(self, order: UploadRequest, root: int) -> None:
        self.order = order
        self._root = root
        # thousands of small files have few folders, and each look walks down to one
        self._mode_of_folder = lru_cache(_FOLDERS)(partial(mode_of_folder, root))

    @contextmanager
    def opened(self, file: UploadFile) -> Iterator[Source]:
        """See `Origin`."""
        with open_source(file, self._root, self._mode_of_folder) as source:
            yield source

    def held(self, _file: UploadFile) -> tuple[HeldRange, ...]:
        """See `Origin`."""
        return ()

    def why_changed(self, file: UploadFile) -> str | None:
        """See `Origin`."""
        return changed(self._root, file.source, file.identity, file.path)

    def recheck(self) -> None:
        """See `Origin`."""
        for file in self.order.files:
            reason = self.why_changed(file)
            if reason is not None:
                raise SourceChanged(reason, hint="this attempt is dropped; the next turn looks again")


@contextmanager
def open_source(file: UploadFile, root: int, mode_of: Callable[[str], int]) -> Iterator[Source]:
    """Open a file by its identity; `mode_of`: the permission bits of its folder."""
    with ExitStack() as stack:
        with _told(file.path):
            fd = stack.enter_context(files.reading(root, file.source, file.identity))
            inner = FileSource(fd, file.path, folder_mode=mode_of(file.source.rpartition("/")[0]))
            is_shard = file.role in _SHARDS
            records = records_of(fd, file.path, is_shard=is_shard) if file.check_zip_crc else []
        try:
            yield CheckedSource(inner, records, file.path) if records else inner
        finally:
            inner.drop_all()


@contextmanager
def sealed(order: UploadRequest, root: int, _control: TransferControl, _store: Store) -> Iterator[Origin]:
    """Yield the origin of an order whose files lie here."""
    if order.making is not None:
        msg = f"this process makes no {order.manifest.form} forms"
        raise RefusedError(msg, hint="a defect of ckptd: it sends what lies here")
    yield SealedFiles(order, root)


def changed(root: int, source: str, identity: FileIdentity | None, name: str) -> str | None:
    """Return why a file is not the sealed one any more; None when it is (and of extras, which are not
    sealed).
    """
    if identity is None:
        return None
    with _told(name):
        status = files.stat_beneath(root, source)
    if status is None:
        return f"{name} vanished"
    if files.identity_of(status) != identity:
        return f"{name} was written since it was sealed"
    return None
