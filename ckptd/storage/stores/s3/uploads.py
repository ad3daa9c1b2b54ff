"""Upload to S3 in parts: streamed, resumed by list_parts, joined once, aborted only if ours.

A few parts in flight, a buffer of 1 MiB each: memory does not grow with the file or its parts. The id of an
upload travels with its progress into the journal, so that a restart sends again what was in flight at most
(docs/internals/stores.md).
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from ckptd.errors import CkptdError, RefusedError, VerifyError
from ckptd.storage.stores.base import Progress, taken
from ckptd.storage.stores.parallel import OrderedTurns
from ckptd.storage.stores.s3 import client as sc
from ckptd.storage.stores.s3.body import STEP_BYTES
from ckptd.storage.stores.s3.parts import (
    PARTS_AT_ONCE,
    ROOM,
    MultipartUpload,
    PartLayout,
    Sending,
    SentRange,
    arguments_of,
    encoded,
    held_of,
    held_parts,
    layout_with,
    parse_layout,
    send_held,
    send_range,
)
from ckptd.storage.stores.s3.proof import CHANGED, bare, changed, joined
from ckptd.storage.stores.sources import crc64_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.storage.stores.base import HeldRange, ResumePoint, Source
    from ckptd.storage.stores.s3.body import BufferedBody
    from ckptd.storage.stores.s3.bucket import S3Bucket
    from ckptd.storage.stores.s3.direct import Flight

MIN_PART_BYTES = 16 << 20
COPIED_PART_BYTES = 64 << 20
"""Least size of the parts of an upload of which the server copies some: each costs a request."""
MAX_PART_BYTES = 5 << 30
MAX_PARTS = 10_000
_SPARE_PARTS = 9_000
_UNJOINABLE = {"InvalidPart", "InvalidPartOrder", "EntityTooSmall"}
"""Codes with which servers refuse to join parts that they hold: no later attempt will join them."""
_MIB = 1 << 20


def part_size(size_bytes: int, wanted_bytes: int | None) -> int:
    """Return the bytes per part: what was asked for, or 16 MiB, more where a file would need over 10,000
    parts.

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


def shared_upload(token: str, size_bytes: int) -> MultipartUpload | None:
    """Return the upload that a token means; None: it is no token of an upload of that size."""
    text, _, upload_id = token.partition(":")
    cuts = parse_layout(text, size_bytes)
    return MultipartUpload(upload_id=upload_id, cuts=cuts) if cuts is not None and upload_id else None


class Started:
    """A small object on its way, in memory until the answer came."""

    def __init__(
        self,
        uploads: S3Uploads,
        key: str,
        held: BufferedBody,
        arguments: dict[str, str],
        flight: Flight | None,
    ) -> None:
        self._uploads = uploads
        self._flight = flight
        self.key = key
        self.held = held
        self.arguments = arguments

    def end(self, on_progress: Callable[[Progress], None]) -> int:
        """Finish the upload as `Store.upload` does and return the CRC64NVME of what was read."""
        return self._uploads.ended(self, self._flight, on_progress)

    def abandon(self) -> None:
        """Wait for it no more; whoever sends it again finds out whether it arrived."""
        if self._flight is not None:
            self._flight.abandon()


class S3Uploads:
    """The uploads of one store; remembers the ids that it may abort."""

    def __init__(self, store: S3Bucket, part_size_bytes: int | None) -> None:
        self._store = store
        self._wanted_bytes = part_size_bytes
        self._ours: dict[str, str] = {}
        self._proved: dict[str, tuple[int, int, str]] = {}
        self._expected: dict[str, tuple[int, str]] = {}
        self._room = threading.Semaphore(ROOM)
        self._turns = OrderedTurns(PARTS_AT_ONCE)

    def upload(
        self,
        key: str,
        source: Source,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> int:
        """Send the object, but for parts that the server copies; returns the CRC64NVME of the bytes as read.

        Raises:
            TargetExists: the key is there already.
            RefusedError: too many parts, said before a byte is sent.
        """
        chosen = part_size(source.size_bytes, self._wanted_bytes)
        held = held_parts(held, source.size_bytes)
        is_whole = source.size_bytes <= chosen and not (resume and resume.token) and not held
        if not (is_whole and self._store.abilities.create_only):
            self._refuse_if_there(key)
        if is_whole:
            return self._whole(key, source, on_progress)
        upload = self._continued(key, source, resume) if resume else None
        if upload is None:
            if held:  # each of their ends may take a part more
                chosen = max(chosen, part_size(source.size_bytes, None), COPIED_PART_BYTES)
            upload = self._begin(key, layout_with(held, source.size_bytes, chosen))
        self._ours[key] = upload.upload_id
        on_progress(upload.progress())
        try:
            Sending(self._store, key, source, upload, self._room, self._turns, on_progress, held).run()
        except VerifyError:
            # the server holds a part that arrived changed: nobody may go on with this upload
            with suppress(CkptdError):
                self.discard(key)
            raise
        self._join(key, source.size_bytes, upload)
        if len(upload.md5s) == len(upload.etags):
            self._expected[key] = upload.crc, joined(upload.md5s[n] for n in sorted(upload.md5s))
        del self._ours[key]
        return upload.crc

    def proved(self, key: str, size_bytes: int, crc: int) -> str | None:
        """Return the proof that the answer to an upload of this process held, once; None: look."""
        found = self._proved.pop(key, None)
        if found is None or found[:2] != (size_bytes, crc):
            return None
        self._expected.pop(key, None)
        return found[2]

    def expected_etag(self, key: str, crc: int) -> str | None:
        """Return the ETag that the object with this CRC must have; None: it was not sent whole by this
        process.
        """
        sent_crc, etag = self._expected.pop(key, (None, None))
        return etag if sent_crc == crc else None

    def discard(self, key: str, token: str = "") -> None:
        """Abort the uploads of that key that are ours: this process's, and the one that `token` names; forget
        what an answer proved.
        """
        self._proved.pop(key, None)
        for upload_id in {self._ours.pop(key, ""), token.partition(":")[2]} - {""}:
            self._abort(key, upload_id)

    # --- inside ----------------------------------------------------------------------------------------

    def _refuse_if_there(self, key: str) -> None:
        if self._store.head(key) is not None:
            raise taken(key)

    def _whole(self, key: str, source: Source, on_progress: Callable[[Progress], None]) -> int:
        """An object of one part in one request; what its answer shows is a proof, once."""
        store, size = self._store, source.size_bytes
        condition = {"IfNoneMatch": "*"} if store.abilities.create_only else {}
        with self._room if size > STEP_BYTES else nullcontext():
            sent = send_range(store, key, source, (0, size), condition | store.access.for_data)
        source.drop(0, size)
        return self._stored(key, size, sent, on_progress)

    def begin(self, key: str, source: Source) -> Started | None:
        """Read and send an object of at most 1 MiB; None: `upload` it. Its key is not looked at before.

        Raises:
            SourceChanged, DamagedError: as reading the source does.
        """
        store, size = self._store, source.size_bytes
        if size > STEP_BYTES or store.direct is None or not store.pending_puts:
            return None
        held = held_of(store, source, 0, size)
        arguments = {"IfNoneMatch": "*"} | store.access.for_data
        with store.asking(f"writing {key}"):
            flight = store.direct.begin(key, arguments | arguments_of(store, held), held.data)
        source.drop(0, size)
        return Started(self, key, held, arguments, flight)

    def ended(self, started: Started, flight: Flight | None, on_progress: Callable[[Progress], None]) -> int:
        """Wait for the answer; what was no success is sent again by botocore's client."""
        store, key, held = self._store, started.key, started.held
        answer = flight.end() if flight is not None else None
        if answer is None:
            sent = send_held(store, key, held, started.arguments)
        else:
            sent = SentRange(answer=answer, crc=held.crc, md5=held.md5)
        return self._stored(key, len(held.data), sent, on_progress)

    def _stored(self, key: str, size: int, sent: SentRange, on_progress: Callable[[Progress], None]) -> int:
        store = self._store
        if store.abilities.checksum and sent.answer.get("ChecksumCRC64NVME") == encoded(sent.crc):
            self._proved[key] = (size, sent.crc, "store-checksum")
        elif sent.md5 is not None:
            self._expected[key] = sent.crc, sent.md5.hex()
            if size <= STEP_BYTES and store.abilities.joined_etags and bare(sent.etag) == sent.md5.hex():
                self._proved[key] = (size, sent.crc, "part-etags")
        on_progress(Progress(done_bytes=size, flushed_bytes=size, crc64=sent.crc))
        return sent.crc

    def _begin(self, key: str, cuts: PartLayout) -> MultipartUpload:
        store = self._store
        checksum: dict[str, str] = {}
        if store.abilities.checksum:
            checksum = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        with store.asking(f"beginning {key}"):
            answer = store.client.create_multipart_upload(
                **store.place(key), **store.access.for_data, **checksum
            )
        return MultipartUpload(upload_id=answer["UploadId"], cuts=cuts)

    def _continued(self, key: str, source: Source, resume: ResumePoint) -> MultipartUpload | None:
        """Return the upload that an earlier attempt began, as the server holds it; None: begin anew."""
        found = shared_upload(resume.token, source.size_bytes)
        if found is None or not self._list_parts(key, found):
            return None
        # what the journal notes is taken over; parts behind that are hashed from the source, not sent again
        noted = found.cuts.parts_until(resume.flushed_bytes)
        if all(number in found.etags for number in range(1, noted + 1)):
            found.done_parts, found.done_bytes = noted, resume.flushed_bytes if noted else 0
            found.crc = resume.crc64 if noted else 0
        for number in sorted(found.etags):
            if number > found.done_parts:
                self._take_over(number, source, found)
        return found

    def _take_over(self, number: int, source: Source, found: MultipartUpload) -> None:
        """A part that nobody noted as good: one whose ETag shows that it arrived changed is sent again."""
        md5 = hashlib.md5(usedforsecurity=False) if self._store.abilities.part_etags else None
        also = None if md5 is None else md5.update
        crc = crc64_of(source, *found.cuts.range_of(number), drops=True, also=also)
        if md5 is not None and bare(found.etags[number]) != md5.hexdigest():
            del found.etags[number]
            return
        found.crcs[number] = crc
        found.close_gap()

    def _list_parts(self, key: str, found: MultipartUpload) -> bool:
        """Fill in the whole parts that the server holds; False when it does not know the upload."""
        store = self._store
        with store.asking(f"asking for the parts of {key}"):
            try:
                pages = store.client.get_paginator("list_parts").paginate(
                    **store.place(key), UploadId=found.upload_id
                )
                parts = [p for page in pages for p in page.get("Parts", ())]
            except store.client.exceptions.ClientError as error:
                if sc.code_of(error) in sc.NOT_OFFERED:
                    # a server that cannot list: the upload starts over, and what it holds must not stay
                    self._abort(key, found.upload_id)
                elif sc.code_of(error) not in sc.ABSENT | {"NoSuchUpload"}:
                    raise
                return False
        for part in parts:
            number = part["PartNumber"]
            if 1 <= number <= found.cuts.parts and part["Size"] == found.cuts.range_of(number)[1]:
                found.etags[number] = part["ETag"]
        return True

    def _join(self, key: str, size_bytes: int, current: MultipartUpload) -> None:
        """Complete; an answer that was lost is resolved by looking (docs/design.md §5)."""
        store = self._store
        more: dict[str, str] = {}
        if store.abilities.complete_only_absent:
            more["IfNoneMatch"] = "*"
        else:
            self._refuse_if_there(key)
        if store.abilities.checksum:
            more["ChecksumCRC64NVME"] = encoded(current.crc)
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
                    raise taken(key) from error
                if sc.code_of(error) in CHANGED:
                    self.discard(key)
                    raise changed(key) from error
                if sc.code_of(error) == "NoSuchUpload":
                    self._ours.pop(key, None)
                elif sc.code_of(error) in _UNJOINABLE:
                    self.discard(key)
                    msg = f"the server does not join the parts of {key}: {sc.code_of(error)}"
                    raise VerifyError(msg) from error
                raise

    def _abort(self, key: str, upload_id: str) -> None:
        store = self._store
        with store.asking(f"giving up the parts of {key}"):
            try:
                store.client.abort_multipart_upload(**store.place(key), UploadId=upload_id)
            except store.client.exceptions.ClientError as error:
                if sc.code_of(error) not in sc.ABSENT | {"NoSuchUpload"}:
                    raise

    # --- an upload whose parts are sent by several processes -------------------------------

    def begin_shared(self, key: str, cuts: PartLayout) -> MultipartUpload:
        """Begin one; its token is what the others need."""
        self._refuse_if_there(key)
        return self._begin(key, cuts)

    def held_shared(self, key: str, size_bytes: int, token: str) -> MultipartUpload | None:
        """Return one that was begun, with what the server holds of it; None: it is over."""
        found = shared_upload(token, size_bytes)
        return found if found is not None and self._list_parts(key, found) else None

    def join_shared(self, key: str, upload: MultipartUpload) -> None:
        """Join the parts, all of which `etags` and `crc` of the upload know; `verify` is asked next."""
        self._join(key, upload.cuts.size_bytes, upload)
        if upload.md5s and len(upload.md5s) == len(upload.etags):
            self._expected[key] = upload.crc, joined(upload.md5s[n] for n in sorted(upload.md5s))
