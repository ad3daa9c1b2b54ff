"""Uploads to S3 in parts: streamed, resumed by list_parts, joined once, aborted only if ours (P7; adr/0041).

One part at a time and a buffer of 1 MiB: memory does not grow with the file or its parts. The id of an upload
travels with its progress into the journal, so that a restart sends at most one part again.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.errors import RefusedError, TargetExists
from ckptd.remote import s3_client as sc
from ckptd.remote.checksums import crc64
from ckptd.remote.s3_body import STEP_BYTES, SourceStopped
from ckptd.remote.s3_etags import CHANGED, changed, guard, joined, send_part
from ckptd.remote.store import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.remote.s3 import S3Store
    from ckptd.remote.store import Resume, Source

MIN_PART_BYTES = 16 << 20
MAX_PART_BYTES = 5 << 30
MAX_PARTS = 10_000
_SPARE_PARTS = 9_000
_MIB = 1 << 20


def part_size(size_bytes: int, wanted_bytes: int | None) -> int:
    """Bytes per part: what was asked for, or 16 MiB, more where a file would need over 10,000 parts.

    Raises:
        RefusedError: even parts of 5 GiB are too many.
    """
    least = -(-size_bytes // (_SPARE_PARTS if wanted_bytes is None else MAX_PARTS))
    least = -(-least // _MIB) * _MIB
    chosen = max(wanted_bytes or MIN_PART_BYTES, least)
    if chosen > MAX_PART_BYTES:
        msg = f"{size_bytes} bytes are more than {MAX_PARTS} parts of 5 GiB, the most that S3 takes"
        raise RefusedError(msg, hint="save in more shards (more ranks)")
    return chosen


@dataclass(slots=True)
class _Open:
    """A multipart upload of ours: its id, part size, and the parts that the server holds, by number."""

    upload_id: str
    part_bytes: int
    etags: dict[int, str]
    done_bytes: int = 0
    crc: int = 0
    md5s: dict[int, bytes] = field(default_factory=dict)
    """Of the parts that this process sent."""

    @property
    def token(self) -> str:
        """What a restart needs to find it again."""
        return f"{self.part_bytes}:{self.upload_id}"


class S3Uploads:
    """The uploads of one store; remembers the ids that it may abort."""

    def __init__(self, store: S3Store, part_size_bytes: int | None) -> None:
        self._store = store
        self._wanted_bytes = part_size_bytes
        self._ours: dict[str, str] = {}
        self._expected: dict[str, tuple[int, str]] = {}

    def upload(
        self, key: str, source: Source, resume: Resume | None, on_progress: Callable[[Progress], None]
    ) -> int:
        """Send the object; returns the CRC64NVME of the bytes as read.

        Raises:
            TargetExists: the key is there already.
            RefusedError: too many parts, said before a byte is sent.
        """
        chosen = part_size(source.size_bytes, self._wanted_bytes)
        self._refuse_if_there(key)
        if source.size_bytes <= chosen and not (resume and resume.token):
            return self._whole(key, source, on_progress)
        current = self._continued(key, source, resume) if resume else None
        if current is None:
            current = self._begin(key, chosen)
        self._ours[key] = current.upload_id
        on_progress(_progress(current))
        while current.done_bytes < source.size_bytes:
            self._part(key, source, current, on_progress)
        self._join(key, source.size_bytes, current)
        if len(current.md5s) == len(current.etags):
            self._expected[key] = current.crc, joined(current.md5s[n] for n in sorted(current.md5s))
        del self._ours[key]
        return current.crc

    def discard(self, key: str, token: str = "") -> None:
        """Abort the uploads of that key that are ours: this process's, and the one that `token` names."""
        for upload_id in {self._ours.pop(key, ""), token.partition(":")[2]} - {""}:
            self._abort(key, upload_id)

    def expected_etag(self, key: str, crc: int) -> str | None:
        """The ETag that the object with this CRC must have; None: it was not sent whole by this process."""
        sent_crc, etag = self._expected.pop(key, (None, None))
        return etag if sent_crc == crc else None

    # --- inside ----------------------------------------------------------------------------------------

    def _refuse_if_there(self, key: str) -> None:
        if self._store.head(key) is not None:
            raise _taken(key)

    def _whole(self, key: str, source: Source, on_progress: Callable[[Progress], None]) -> int:
        """A small object in one request."""
        store, size = self._store, source.size_bytes
        body = store.body(source, 0, size, 0)
        condition = {"IfNoneMatch": "*"} if store.abilities.create_only else {}
        with store.asking(f"writing {key}"):
            try:
                more = condition | store.access.for_data | guard(store.abilities, body)
                store.client.put_object(**store.place(key), Body=body if size else b"", **more)
            except SourceStopped as stopped:
                raise stopped.error from None
            except store.client.exceptions.ClientError as error:
                if sc.code_of(error) in sc.TAKEN:
                    raise _taken(key) from error
                if sc.code_of(error) in CHANGED:
                    raise changed(key) from error
                raise
        source.drop(0, size)
        crc = body.crc if body.is_whole or not size else _crc_of(source, 0, size, 0)
        if body.md5 is not None:
            self._expected[key] = crc, body.md5.hex()
        on_progress(Progress(done_bytes=size, flushed_bytes=size, crc64=crc))
        return crc

    def _begin(self, key: str, part_bytes: int) -> _Open:
        store = self._store
        checksum: dict[str, str] = {}
        if store.abilities.checksum:
            checksum = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        with store.asking(f"beginning {key}"):
            answer = store.client.create_multipart_upload(
                **store.place(key), **store.access.for_data, **checksum
            )
        return _Open(upload_id=answer["UploadId"], part_bytes=part_bytes, etags={})

    def _continued(self, key: str, source: Source, resume: Resume) -> _Open | None:
        """The upload that an earlier attempt began, as far as the server holds it; None: begin anew."""
        size, _, upload_id = resume.token.partition(":")
        if not upload_id or not size.isdecimal():
            return None
        found = _Open(upload_id=upload_id, part_bytes=int(size), etags={})
        if not self._list_parts(key, found, source.size_bytes):
            return None
        # parts that were sent after the last note in the journal are hashed from the source, not sent again
        begin = min(resume.flushed_bytes, found.done_bytes)
        crc = resume.crc64 if begin == resume.flushed_bytes else 0
        begin = begin if begin == resume.flushed_bytes else 0
        found.crc = _crc_of(source, begin, found.done_bytes - begin, crc)
        return found

    def _list_parts(self, key: str, found: _Open, size_bytes: int) -> bool:
        """Fill in the whole parts from the first one on; False when the server does not know the upload."""
        store = self._store
        with store.asking(f"asking for the parts of {key}"):
            try:
                pages = store.client.get_paginator("list_parts").paginate(
                    **store.place(key), UploadId=found.upload_id
                )
                parts = {p["PartNumber"]: p for page in pages for p in page.get("Parts", ())}
            except store.client.exceptions.ClientError as error:
                if sc.code_of(error) in sc.NOT_OFFERED:
                    # a server that cannot list: the upload starts over, and what it holds must not stay
                    self._abort(key, found.upload_id)
                elif sc.code_of(error) not in sc.ABSENT | {"NoSuchUpload"}:
                    raise
                return False
        while (part := parts.get(len(found.etags) + 1)) is not None:
            wanted = min(found.part_bytes, size_bytes - found.done_bytes)
            if part["Size"] != wanted or wanted == 0:
                break
            found.etags[len(found.etags) + 1] = part["ETag"]
            found.done_bytes += wanted
        return True

    def _part(
        self, key: str, source: Source, current: _Open, on_progress: Callable[[Progress], None]
    ) -> None:
        store, number = self._store, len(current.etags) + 1
        begin = current.done_bytes
        length = min(current.part_bytes, source.size_bytes - begin)
        told = _Telling(source, current, on_progress)
        request = {**store.place(key), "UploadId": current.upload_id}
        body, current.etags[number] = send_part(
            store, key, number, lambda: store.body(told, begin, length, current.crc), request
        )
        if body.md5 is not None:
            current.md5s[number] = body.md5
        current.crc = body.crc if body.is_whole else _crc_of(source, begin, length, current.crc)
        current.done_bytes += length
        source.drop(begin, length)
        on_progress(_progress(current))

    def _join(self, key: str, size_bytes: int, current: _Open) -> None:
        """Complete; an answer that was lost is resolved by looking (docs/design.md §5)."""
        store = self._store
        more: dict[str, str] = {}
        if store.abilities.complete_only_absent:
            more["IfNoneMatch"] = "*"
        else:
            self._refuse_if_there(key)
        if store.abilities.checksum:
            more["ChecksumCRC64NVME"] = base64.b64encode(current.crc.to_bytes(8)).decode()
            more["ChecksumType"] = "FULL_OBJECT"
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in sorted(current.etags.items())]
        with store.asking(f"joining the parts of {key}"):
            try:
                store.client.complete_multipart_upload(
                    **store.place(key),
                    UploadId=current.upload_id,
                    MultipartUpload={"Parts": parts},
                    **more,
                )
            except store.client.exceptions.ClientError as error:
                again = error.response["ResponseMetadata"].get("RetryAttempts", 0)
                is_ours = sc.code_of(error) == "NoSuchUpload" or (sc.code_of(error) in sc.TAKEN and again)
                head = store.head(key) if is_ours else None
                if head is not None and head["ContentLength"] == size_bytes:
                    return
                if sc.code_of(error) in sc.TAKEN:
                    self.discard(key)
                    raise _taken(key) from error
                if sc.code_of(error) == "NoSuchUpload":
                    self._ours.pop(key, None)
                raise

    def _abort(self, key: str, upload_id: str) -> None:
        store = self._store
        with store.asking(f"giving up the parts of {key}"):
            try:
                store.client.abort_multipart_upload(**store.place(key), UploadId=upload_id)
            except store.client.exceptions.ClientError as error:
                if sc.code_of(error) not in sc.ABSENT | {"NoSuchUpload"}:
                    raise


class _Telling:
    """A source that reports each step that is read; what is durable stays at the last whole part."""

    def __init__(self, inner: Source, current: _Open, on_progress: Callable[[Progress], None]) -> None:
        self._inner = inner
        self._current = current
        self._on_progress = on_progress
        self.size_bytes: int = inner.size_bytes
        self.mode: int = inner.mode
        self.folder_mode: int = inner.folder_mode
        self.gid: int | None = inner.gid

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read, then tell."""
        count = self._inner.read_into(offset, buffer)
        self._on_progress(_progress(self._current, offset + count))
        return count

    def peek_into(self, offset: int, buffer: memoryview) -> int:
        """Read what will be read, and told, again."""
        read_into: Callable[[int, memoryview], int] = getattr(self._inner, "peek_into", self._inner.read_into)
        return read_into(offset, buffer)

    def drop(self, offset: int, length: int) -> None:
        """As the inner source."""
        self._inner.drop(offset, length)


def _progress(current: _Open, done_bytes: int | None = None) -> Progress:
    return Progress(
        done_bytes=current.done_bytes if done_bytes is None else done_bytes,
        flushed_bytes=current.done_bytes,
        crc64=current.crc,
        token=current.token,
    )


def _crc_of(source: Source, offset: int, length: int, crc: int) -> int:
    """Hash a range of the source without sending it."""
    view = memoryview(bytearray(min(STEP_BYTES, max(length, 1))))
    end = offset + length
    while offset < end:
        count = source.read_into(offset, view[: min(len(view), end - offset)])
        if count == 0:
            break
        crc = crc64(view[:count], crc)
        offset += count
    return crc


def _taken(key: str) -> TargetExists:
    return TargetExists(f"{key} appeared while it was sent", hint="another node shipped it; ckptd compares")
