"""Outputs into the destination from one worker: whole files, or parts of an upload that several share.

Whatever was done before under the same name is recognised by its bytes, so that a task may be done twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckptd.conversion.cluster.grouping import clipped, parts_of
from ckptd.conversion.cluster.memory import HELD_BYTES
from ckptd.conversion.cluster.messages import DoneOutput, Parts, SentPart, UploadPiece
from ckptd.conversion.remote.uploader import PartsSource, held_sources
from ckptd.errors import (
    RemoteUnreachable,
    SourceChanged,
    StorageError,
    TargetExists,
    VerifyError,
)
from ckptd.storage.stores.checksums import crc64_combined, from_hex, to_hex
from ckptd.storage.stores.parallel import FailFastPool, crc_of
from ckptd.storage.stores.retrying import briefly
from ckptd.storage.stores.s3.parts import PartCopier, held_parts, send_range
from ckptd.storage.stores.s3.store import S3Store
from ckptd.storage.stores.s3.uploads import shared_upload
from ckptd.storage.stores.sources import WrappedSource, crc64_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ckptd.conversion.cluster.messages import ClusterJob, Join, OutputProof, TaskSource
    from ckptd.conversion.parts import Part
    from ckptd.conversion.reader import Ranges
    from ckptd.conversion.remote.uploader import HeldSources
    from ckptd.storage.stores.base import Store
    from ckptd.storage.stores.s3.parts import MultipartUpload, SentRange


def upload_of(token: str, nbytes: int) -> MultipartUpload:
    """Return the upload that a token means, of an output of `nbytes` bytes.

    Raises:
        StorageError: it is no token.
    """
    upload = shared_upload(token, nbytes)
    if upload is None:
        raise StorageError(f"{token!r} is no upload of {nbytes} bytes", hint="convert again")
    return upload


def shares_uploads(store: Store) -> S3Store | None:
    """Return the store, where parts from several processes become one object."""
    return store if isinstance(store, S3Store) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Hold what is made once: an output, or one part (`number`) of it; `begin` and `end` in the output."""

    pieces: tuple[UploadPiece, ...]
    """The output under each of its names."""
    number: int
    begin: int
    end: int
    parts: tuple[Part, ...]
    skip: int
    """Bytes that `parts` make before `begin`."""


def units_of(pieces: Iterable[UploadPiece]) -> list[Unit]:
    """Split pieces into the units that they are uploaded as; names of one output share theirs."""
    named: dict[tuple[str, int, int, int], list[UploadPiece]] = {}
    for piece in pieces:
        spans = [(0, 0, piece.nbytes)]
        if piece.token:
            cuts = upload_of(piece.token, piece.nbytes).cuts
            spans = [(n, begin, begin + length) for n in piece.parts for begin, length in [cuts.range_of(n)]]
        for span in spans:
            named.setdefault((piece.line, *span), []).append(piece)
    found = []
    for (line, number, begin, end), ones in named.items():
        parts, skip = clipped(parts_of(line), begin, end)
        found.append(Unit(pieces=tuple(ones), number=number, begin=begin, end=end, parts=parts, skip=skip))
    return found


class _Slice(WrappedSource):
    """The bytes of a unit, at their place in the output; at most `HELD_BYTES` are made once and kept."""

    def __init__(self, made: PartsSource, unit: Unit, *, is_held: bool) -> None:
        super().__init__(made)
        self._shift = unit.begin - unit.skip
        self._begin, self._end = unit.begin, unit.end
        self.size_bytes: int = unit.pieces[0].nbytes
        self._data: bytearray | None = None
        self.is_held = is_held
        if is_held:
            # servers that check a checksum on arrival want it first: bytes from afar would be fetched twice
            data, done = bytearray(unit.end - unit.begin), 0
            with memoryview(data) as view:
                while done < len(data):
                    done += self.read_into(unit.begin + done, view[done:])
            self._data = data

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Bytes at `offset` of the output."""
        count = min(len(buffer), self._end - offset)
        if self._data is not None:
            begin = offset - self._begin
            buffer[:count] = self._data[begin : begin + count]
            return count
        if count <= 0:
            return 0
        made = self.inner.read_into(offset - self._shift, buffer[:count])
        if made == 0:
            raise SourceChanged("the plan makes fewer bytes than its output has", hint="convert again")
        return made

    peek_into = read_into


def _crc_of(unit: Unit, source: _Slice) -> int:
    return crc64_of(source, unit.begin, unit.end - unit.begin)


def held_for(job: ClusterJob, store: Store, sources: Mapping[int, TaskSource]) -> HeldSources | None:
    """Return the sources of a job as objects that the server of its target copies; None: it does not."""
    if not isinstance(store, S3Store) or not store.copies:
        return None
    source, target = (job.source_url, job.source_access), (job.target_url, job.target_access)
    return held_sources(source, target, {number: one.name for number, one in sources.items()})


class PieceUploader:
    """One task's outputs; its methods may run side by side."""

    def __init__(
        self,
        job: ClusterJob,
        store: Store,
        ranges: Ranges,
        sources: Mapping[int, TaskSource],
        check_stop: Callable[[], None],
    ) -> None:
        self._job = job
        self._store = store
        self._ranges = ranges
        self._command = check_stop
        self._held = held_for(job, store, sources)
        self._copier = PartCopier(store) if isinstance(store, S3Store) else None
        self.lanes = FailFastPool()
        self.done: list[DoneOutput] = []
        self.parts: list[Parts] = []
        self.undone: list[str] = []

    def _check_stop(self) -> None:
        self._command()
        self.lanes.check()

    def send(self, unit: Unit) -> None:
        """Send an output whole, or one part of it, under each of its names; it is made once if it is held."""
        source = self._source(unit)
        send = partial(self._send_part if unit.number else self._send_whole, unit, source)
        FailFastPool().run(len(unit.pieces) if source.is_held else 1, unit.pieces, send, name="name")

    def _source(self, unit: Unit) -> _Slice:
        modes = self._job.file_mode, self._job.folder_mode
        made = PartsSource(unit.parts, self._ranges, *modes, lambda _: self._check_stop())
        made.gid = self._job.gid
        is_held = shares_uploads(self._store) is not None and unit.end - unit.begin <= HELD_BYTES
        return _Slice(made, unit, is_held=is_held)

    def _send_whole(self, unit: Unit, source: _Slice, piece: UploadPiece) -> None:
        key = f"{self._job.target_name}/{piece.path}"
        crc = _crc_of(unit, source) if piece.is_there else 0
        resumed = piece.is_there and self._is_there(key, piece.nbytes, crc)
        if not resumed:
            crc = self._send_new(key, unit, source)
        self.done.append(DoneOutput(path=piece.path, nbytes=piece.nbytes, crc64=to_hex(crc), resumed=resumed))

    def _send_new(self, key: str, unit: Unit, source: _Slice) -> int:
        store, nbytes = self._store, source.size_bytes

        def send() -> int:
            self._check_stop()
            try:
                crc = store.upload(key, source, resume=None, on_progress=lambda _: self._check_stop())
                store.verify(key, nbytes, crc, lambda _: self._check_stop())
            except TargetExists:
                # this task was begun elsewhere before, or an answer was lost: these bytes, or none of ours
                crc = _crc_of(unit, source)
                if not self._is_there(key, nbytes, crc):
                    store.delete(key)
                    raise
            except (VerifyError, RemoteUnreachable):
                store.discard(key)
                raise
            return crc

        return briefly(send, VerifyError, RemoteUnreachable, TargetExists)()

    def _is_there(self, key: str, nbytes: int, crc: int) -> bool:
        try:
            self._store.verify(key, nbytes, crc, lambda _: self._check_stop())
        except VerifyError:
            return False
        return True

    def _send_part(self, unit: Unit, source: _Slice, piece: UploadPiece) -> None:
        store, copier = shares_uploads(self._store), self._copier
        if store is None or copier is None:
            raise StorageError(f"{self._store.url} joins no parts")
        self._check_stop()
        key = f"{self._job.target_name}/{piece.path}"
        request = {"UploadId": upload_of(piece.token, piece.nbytes).upload_id, "PartNumber": unit.number}
        span = unit.begin, unit.end - unit.begin
        ranges = self._held.ranges_of(unit.parts, unit.begin - unit.skip) if self._held is not None else ()
        held = held_parts(ranges, piece.nbytes)

        def put() -> SentRange:
            sent = copier.copy(key, source, span, request, held)
            return sent if sent is not None else send_range(store, key, source, span, request)

        answer = briefly(put, RemoteUnreachable)()
        md5 = answer.md5.hex() if answer.md5 is not None else ""
        sent = SentPart(number=unit.number, etag=answer.etag, crc64=to_hex(answer.crc), md5=md5)
        self.parts.append(Parts(path=piece.path, parts=(sent,)))

    def join(self, join: Join) -> None:
        """Make an upload an object, and prove it; one of other bytes is removed and named in `undone`."""
        store, key = shares_uploads(self._store), f"{self._job.target_name}/{join.path}"
        if store is None:
            raise StorageError(f"{self._store.url} joins no parts")
        upload = upload_of(join.token, join.nbytes)
        for part in sorted(join.parts, key=lambda part: part.number):
            _, length = upload.cuts.range_of(part.number)
            upload.etags[part.number] = part.etag
            upload.crc = crc64_combined(upload.crc, from_hex(part.crc64), length)
            if part.md5:
                upload.md5s[part.number] = bytes.fromhex(part.md5)
        try:
            try:
                store.uploads.join_shared(key, upload)
            except TargetExists:
                if not self._is_there(key, join.nbytes, upload.crc):
                    raise
            store.verify(key, join.nbytes, upload.crc, lambda _: self._check_stop())
        except VerifyError:
            store.discard(key, join.token)
            store.delete(key)
            self.undone.append(join.path)
        else:
            self.done.append(DoneOutput(path=join.path, nbytes=join.nbytes, crc64=to_hex(upload.crc)))

    def prove(self, proof: OutputProof) -> None:
        """Read an output back."""
        key = f"{self._job.target_name}/{proof.path}"
        # a byte more than was sent: nothing may follow
        stream = partial(self._store.stream, key)
        done, crc = crc_of(stream, proof.nbytes + 1, lambda _: self._check_stop(), at_once=1)
        if (done, to_hex(crc)) != (proof.nbytes, proof.crc64):
            raise VerifyError(f"{key} in {self._store.url} is not what was sent")
        self.done.append(DoneOutput(path=proof.path, nbytes=proof.nbytes, crc64=proof.crc64))
