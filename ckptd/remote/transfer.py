"""The byte part of an order: every file read once, sent, verified, its identity watched (P2, P4).

What an earlier attempt finished is skipped, what it left half done goes on, what lies in the remote already
is compared instead of sent; nothing that any manifest lists is ever replaced. Large files go in order, each
verified behind the next upload; small ones beside them in lanes, as many as the store likes (adr/0088).
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from ckptd.core.layouts import Role
from ckptd.core.manifest import sha256_of
from ckptd.core.swapped import BY_LOCAL_RANK, is_state
from ckptd.errors import CommitConflict, DamagedError, SourceChanged, TargetExists, VerifyError
from ckptd.remote.checksums import crc64, from_hex, to_hex
from ckptd.remote.extras import inline, read_whole
from ckptd.remote.flights import FLYING_LANES, TINY_BYTES, Fleet, begin, flights, is_small, next_of, overlap
from ckptd.remote.listed import as_listed
from ckptd.remote.messages import Shipped
from ckptd.remote.pacing import Cancelled
from ckptd.remote.ranges import Lanes
from ckptd.remote.source import CheckedSource, PacedSource, crc64_of
from ckptd.remote.store import Progress, Resume, settled

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from ckptd.core.manifest import ManifestFile, Proof
    from ckptd.remote.flights import Started
    from ckptd.remote.listed import Listed
    from ckptd.remote.messages import PartlyShipped, Planned, ShipFile
    from ckptd.remote.origin import Origin
    from ckptd.remote.pacing import Pacer
    from ckptd.remote.store import Source, Store

_BESIDE = (Role.SIDE, Role.EXTRA)
_AGAIN = "this attempt is dropped; the next turn looks again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """How a transfer is steered and what it reports to.

    `check` raises `Cancelled` to stop; `on_moving(key, total_bytes, progress)`, `on_done(object)` and
    `on_planned(what)` tell.
    """

    pacer: Pacer
    check: Callable[[], None]
    on_moving: Callable[[str, int, Progress], None]
    on_done: Callable[[Shipped], None]
    on_planned: Callable[[Planned], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The files as they lie in the remote, verified, in the order given; bytes sent and not sent."""

    files: tuple[ManifestFile, ...]
    bytes_sent: int
    bytes_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    file: ShipFile
    bytes: int
    crc: int
    fingerprint: str


class Transfer:
    """One order's objects on one store; `listed`: what the generation's manifests say of them already."""

    def __init__(self, store: Store, origin: Origin, root: int, listed: Listed, control: Control) -> None:
        self._store = store
        self._origin = origin
        self._order = order = origin.order
        self._root = root
        self._control = control
        self._shipped = {entry.key: entry for entry in order.shipped}
        self._partly: dict[str, PartlyShipped] = {entry.key: entry for entry in order.partly}
        self._listed = listed
        self._results: dict[str, ManifestFile] = {}
        self._held: dict[str, int] | None = None
        self._lanes = Lanes()
        self._lock = threading.Lock()
        self._sent = 0
        self._skipped = 0

    def run(self) -> Carried:
        """Ship and verify every file.

        Raises:
            SourceChanged: a file is not the one that was sealed (P4), or the order was cancelled.
            DamagedError: a record's CRC32 is not what `torch.save` wrote; nothing of the file was shipped.
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
        flying = deque(file for file in small if self._may_fly(file))
        if flying:
            keys = {file.key for file in flying}
            small, lanes = [file for file in small if file.key not in keys], max(1, lanes - FLYING_LANES)
        ways = min(overlap(self._store), self._origin.most_lanes, len(large))
        with ThreadPoolExecutor(lanes + FLYING_LANES + ways, "lane") as pool:
            fleet = Fleet(self._store, self._begin, self._end, self._ship_beside)
            for _ in range(FLYING_LANES if flying else 0):
                pool.submit(self._lanes.begin([flying], fleet.ship))
            lane = self._lanes.begin(small, self._ship_beside)
            for _ in range(min(lanes, len(small))):
                pool.submit(lane)
            for _ in range(ways - 1):
                pool.submit(self._lanes.begin([large], self._ship_in_order))
            self._lanes.begin([large], self._ship_in_order)()
        self._lanes.settle()
        return Carried(
            files=tuple(self._results[file.key] for file in self._order.files),
            bytes_sent=self._sent,
            bytes_skipped=self._skipped,
        )

    def _ship_in_order(self, files: deque[ShipFile]) -> None:
        """One way: takes from `files`, which it may share with another, until there is none."""
        with ThreadPoolExecutor(1, "verify") as verifier:
            waiting: Future[None] | None = None
            while (file := next_of(files)) is not None:
                self._check()
                sent = self._ship(file)
                # one copy is read back while the next is sent; never more, so that memory stays flat
                if waiting is not None:
                    waiting.result()
                waiting = verifier.submit(self._verify, sent) if sent is not None else None
            if waiting is not None:
                waiting.result()

    def _ship_beside(self, file: ShipFile) -> None:
        self._check()
        sent = self._ship(file)
        if sent is not None:
            self._verify(sent)

    def _may_fly(self, file: ShipFile) -> bool:
        """A small sealed file that no earlier attempt began and of which nothing lies there."""
        is_begun = file.key in self._shipped or file.key in self._partly
        if file.is_extra or is_begun or file.bytes > TINY_BYTES or self._origin.most_lanes < FLYING_LANES:
            return False
        return flights(self._store) > 0 and self._held is not None and self._held_bytes(file) is None

    def _begin(self, file: ShipFile) -> Started | None:
        """Read and send; None: it is to be sent the usual way."""
        self._check()
        with self._origin.opened(file) as source:
            paced = PacedSource(source, self._control.pacer, self._check)
            started = begin(self._store, file.key, paced)
        with self._lock:
            self._sent += paced.read_bytes
        if started is not None and self._origin.why_changed(file) is not None:
            started.abandon()
            raise SourceChanged(f"{file.path} was written while it was shipped", hint=_AGAIN)
        return started

    def _end(self, file: ShipFile, started: Started) -> None:
        """Wait for its answer; what another put there meanwhile is compared."""
        try:
            crc = started.end(lambda done: self._tell_whole(file, file.bytes, done))
        except TargetExists:
            self._ship_beside(file)
            return
        self._verify(_Sent(file=file, bytes=file.bytes, crc=crc, fingerprint=file.fingerprint))

    def _check(self) -> None:
        """Raise when another lane failed, or the daemon wants an end."""
        self._lanes.check()
        self._control.check()

    # --- one file ---------------------------------------------------------------------------------------

    def _ship(self, file: ShipFile) -> _Sent | None:
        """Send one file; None when it lies there already, verified."""
        if file.is_extra:
            return self._ship_extra(file)
        if self._take_record(file, None, file.fingerprint):
            return None
        with self._origin.opened(file) as source:
            sent = self._settle(file, source, file.fingerprint)
        if self._origin.why_changed(file) is not None:
            self._store.discard(file.key)
            msg = f"{file.path} was written while it was shipped"
            raise SourceChanged(msg, hint=_AGAIN)
        return sent

    def _ship_extra(self, file: ShipFile) -> _Sent | None:
        data, source = inline(file) if file.inline is not None else read_whole(self._root, file)
        fingerprint = sha256_of(data)
        if self._take_record(file, crc64(data), fingerprint):
            return None
        return self._settle(file, source, fingerprint)

    def _take_record(self, file: ShipFile, crc: int | None, fingerprint: str) -> bool:
        """Use what an earlier attempt finished, if it is still there with that size (and CRC, when known)."""
        record = self._shipped.get(file.key)
        if record is None or (crc is not None and from_hex(record.crc64nvme) != crc):
            return False
        if self._held_bytes(file) != record.bytes or (crc is None and record.bytes != file.bytes):
            return False
        self._keep(file, record.bytes, record.crc64nvme, record.proof, fingerprint)
        self._skip(record.bytes)
        return True

    def _held_bytes(self, file: ShipFile) -> int | None:
        """Size of what lies under the key; of small files as it was when the order began.

        Should another object have come since, the upload of a small one refuses to replace it.
        """
        folder = f"{self._order.manifest.folder}/"
        if self._held is not None and is_small(file) and file.key.startswith(folder):
            return self._held.get(file.key)
        info = self._store.stat(file.key)
        return None if info is None else info.bytes

    def _settle(self, file: ShipFile, source: Source, fingerprint: str) -> _Sent | None:
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
            return self._upload(file, source, fingerprint)
        except TargetExists:
            info = self._store.stat(file.key)
            if info is not None and self._compare(file, source, fingerprint, info.bytes):
                return None
            raise

    def _compare(self, file: ShipFile, source: Source, fingerprint: str, held_bytes: int) -> bool:
        """True when the object under the key is this file, or another node's replica of it.

        Raises:
            CommitConflict: a manifest lists that object and it is neither.
        """
        listed = self._listed.find(file.key)
        crc: int | None = None
        if held_bytes == source.size_bytes:
            paced = PacedSource(source, self._control.pacer, self._check)
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

    def _verified_in_place(self, file: ShipFile, source: Source, crc: int, fingerprint: str) -> bool:
        try:
            proof = self._store.verify(file.key, source.size_bytes, crc, self._while_verifying)
            settled(self._store, file.key)
        except VerifyError:
            return False
        self._keep(file, source.size_bytes, to_hex(crc), proof, fingerprint)
        self._skip(source.size_bytes)
        return True

    def _upload(self, file: ShipFile, source: Source, fingerprint: str) -> _Sent:
        partly = self._partly.pop(file.key, None)
        resume = (
            Resume(flushed_bytes=partly.flushed_bytes, crc64=partly.crc64, token=partly.token)
            if partly
            else None
        )
        if resume is not None and isinstance(source, CheckedSource):
            source.go_on(resume.flushed_bytes, self._check)
        paced = PacedSource(source, self._control.pacer, self._check)
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
            crc = self._store.upload(file.key, paced, resume=resume, on_progress=moving)
        except (DamagedError, SourceChanged) as error:
            # what the journal notes is gone on with when it is ordered again
            if not (isinstance(error, Cancelled) and is_noted):
                self._store.discard(file.key)
            raise
        finally:
            with self._lock:
                self._sent += paced.read_bytes
        return _Sent(file=file, bytes=source.size_bytes, crc=crc, fingerprint=fingerprint)

    def _tell_whole(self, file: ShipFile, size_bytes: int, progress: Progress) -> None:
        """What is sent again in a moment needs no row in the journal."""
        self._control.on_moving(file.key, size_bytes, replace(progress, flushed_bytes=0, crc64=0))

    def _verify(self, sent: _Sent) -> None:
        file = sent.file
        try:
            proof = self._store.verify(file.key, sent.bytes, sent.crc, self._while_verifying)
        except VerifyError:
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

    def _keep(self, file: ShipFile, size: int, crc: str, proof: str, fingerprint: str) -> None:
        entry = as_listed(file, size, crc, fingerprint, cast("Proof", proof))
        self._results[file.key] = entry
        self._control.on_done(Shipped(key=file.key, bytes=size, crc64nvme=crc, proof=entry.proof))
