"""Upload the parts of one object, several in flight: each streamed and hashed by itself, reported in order.

Reported as durable are the parts from the first one on without a gap, so that the journal needs one number
and one CRC; parts that were done out of order are found again by list_parts (docs/internals/stores.md).
"""

from __future__ import annotations

import base64
import bisect
import hashlib
import threading
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ckptd.errors import RemoteUnreachable
from ckptd.storage.stores.base import Progress, taken
from ckptd.storage.stores.checksums import crc64_combined
from ckptd.storage.stores.parallel import FailFastPool
from ckptd.storage.stores.s3 import client as sc
from ckptd.storage.stores.s3.body import STEP_BYTES, Body, BufferedBody, SourceStopped
from ckptd.storage.stores.s3.proof import CHANGED, bare, changed, guard
from ckptd.storage.stores.sources import WrappedSource, crc64_of, read_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptd.storage.stores.base import HeldRange, Source
    from ckptd.storage.stores.parallel import OrderedTurns
    from ckptd.storage.stores.s3.bucket import S3Bucket


# --- layout of parts -------------------------------------------------------------------------------------
# Without borders all parts but the last have one size. With borders each range between two of them is cut by
# itself, so that a part never holds bytes from both sides of one (docs/internals/conversion.md). Pure.

LEAST_PART_BYTES = 5 << 20
"""Least size of every part but the last, as S3 demands."""
_MOST_HELD = 400
"""Two borders each, so that no upload comes near 10,000 parts."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The parts of an upload of `size_bytes`, numbered from 1."""

    size_bytes: int
    part_bytes: int
    borders: tuple[int, ...] = ()
    """Ascending, at least `LEAST_PART_BYTES` apart."""

    @property
    def parts(self) -> int:
        """Return how many there are."""
        return len(_ends(self)) if self.borders else -(-self.size_bytes // self.part_bytes)

    def range_of(self, number: int) -> tuple[int, int]:
        """Return the offset and length of a part."""
        if self.borders:
            ends = _ends(self)
            begin = ends[number - 2] if number > 1 else 0
            return begin, ends[number - 1] - begin
        begin = (number - 1) * self.part_bytes
        return begin, min(self.part_bytes, self.size_bytes - begin)

    def parts_until(self, end_bytes: int) -> int:
        """Return how many parts lie before `end_bytes`; 0 where none ends there."""
        if not self.borders:
            whole, rest = divmod(end_bytes, self.part_bytes)
            return self.parts if end_bytes == self.size_bytes else 0 if rest else whole
        ends = _ends(self)
        at = bisect.bisect_left(ends, end_bytes)
        return at + 1 if at < len(ends) and ends[at] == end_bytes else 0

    @property
    def text(self) -> str:
        """Return it as a part of a token, without a colon."""
        return f"{self.part_bytes}" + (f"@{','.join(map(str, self.borders))}" if self.borders else "")


def parse_layout(text: str, size_bytes: int) -> PartLayout | None:
    """Parse `Cuts.text` for an object of `size_bytes`; None: it does not describe that size."""
    size, _, rest = text.partition("@")
    words = rest.split(",") if rest else []
    if not size.isdecimal() or int(size) == 0 or not all(word.isdecimal() for word in words):
        return None
    borders = tuple(map(int, words))
    stretches = list(pairwise((0, *borders, size_bytes)))
    return (
        PartLayout(size_bytes, int(size), borders) if all(a < b for a, b in stretches) or not words else None
    )


@lru_cache(maxsize=256)
def _ends(cuts: PartLayout) -> tuple[int, ...]:
    found: list[int] = []
    for begin, end in pairwise((0, *cuts.borders, cuts.size_bytes)):
        length = end - begin
        count = max(1, min(-(-length // cuts.part_bytes), length // LEAST_PART_BYTES))
        found += [begin + length * n // count for n in range(1, count + 1)]
    return tuple(found)


def held_parts(held: Iterable[HeldRange], size_bytes: int) -> tuple[HeldRange, ...]:
    """Return the ranges that a server can copy as parts, by offset, at most 400.

    Adjoining ones are joined; each, and what lies between two of them, is `LEAST_PART_BYTES` long at least.
    """
    joined: list[HeldRange] = []
    for one in sorted(held, key=lambda one: one.offset):
        last = joined[-1] if joined else None
        if last is not None and _ends_at(last) == (one.offset, one.bucket, one.key, one.key_offset):
            joined[-1] = replace(last, length=last.length + one.length)
        elif one.length > 0:
            joined.append(one)
    if len(joined) > _MOST_HELD:
        longest = sorted(joined, key=lambda one: one.length)[-_MOST_HELD:]
        joined = sorted(longest, key=lambda one: one.offset)
    found: list[HeldRange] = []
    end = 0
    for one in joined:
        begin = one.offset if one.offset == end else max(one.offset, end + LEAST_PART_BYTES)
        length = min(one.offset + one.length, size_bytes) - begin
        if length >= LEAST_PART_BYTES:
            key_offset = one.key_offset + begin - one.offset
            found.append(replace(one, offset=begin, length=length, key_offset=key_offset))
            end = begin + length
    return tuple(found)


def _ends_at(one: HeldRange) -> tuple[int, str, str, int]:
    return one.offset + one.length, one.bucket, one.key, one.key_offset + one.length


def layout_with(held: Sequence[HeldRange], size_bytes: int, part_bytes: int) -> PartLayout:
    """Return a layout whose parts each lie within one of these ranges or outside of all."""
    edges = {edge for one in held for edge in (one.offset, one.offset + one.length)}
    return PartLayout(size_bytes, part_bytes, tuple(sorted(edges - {0, size_bytes})))


# --- sending parts ---------------------------------------------------------------------------------------

PARTS_AT_ONCE = 4
"""Parts in flight on one remote; those of the object that was begun first go first."""
ROOM = 8
"""Parts, and whole objects of more than 1 MiB, in flight on one remote: what bounds the memory."""
_TRIES = 3


@dataclass(slots=True)
class MultipartUpload:
    """A multipart upload of ours: its id and sizes, the parts that the server holds, by number.

    `crcs`: of the parts behind the first gap; `done_bytes` and `crc`: all parts before it.
    """

    upload_id: str
    cuts: PartLayout
    """Layout of its parts."""
    etags: dict[int, str] = field(default_factory=dict)
    crcs: dict[int, int] = field(default_factory=dict)
    md5s: dict[int, bytes] = field(default_factory=dict)
    """Number → MD5 of the parts that this process sent."""
    done_parts: int = 0
    done_bytes: int = 0
    crc: int = 0

    @property
    def token(self) -> str:
        """Return the text by which a restart finds this upload again."""
        return f"{self.cuts.text}:{self.upload_id}"

    def close_gap(self) -> None:
        """Count the parts that follow without a gap."""
        while (crc := self.crcs.pop(self.done_parts + 1, None)) is not None:
            self.done_parts += 1
            _, length = self.cuts.range_of(self.done_parts)
            self.crc = crc64_combined(self.crc, crc, length)
            self.done_bytes += length

    def progress(self, moving_bytes: int = 0) -> Progress:
        """Return how many bytes are durable, and how many moved: whole parts, and those under way."""
        held = sum(self.cuts.range_of(number)[1] for number in self.crcs)
        return Progress(
            done_bytes=self.done_bytes + held + moving_bytes,
            flushed_bytes=self.done_bytes,
            crc64=self.crc,
            token=self.token,
        )


class Sending:
    """Sends what the server does not hold of one upload."""

    def __init__(
        self,
        store: S3Bucket,
        key: str,
        source: Source,
        upload: MultipartUpload,
        room: threading.Semaphore,
        turns: OrderedTurns,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> None:
        self._store = store
        self._key = key
        self._source = source
        self._upload = upload
        self._held = held
        self._copier = PartCopier(store)
        self._room = room
        self._place = turns.following()
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._lanes = FailFastPool()
        self._moving: dict[int, int] = {}

    def run(self) -> None:
        """All parts, the first ones first.

        Raises:
            BaseException: what the first part that failed raised; the others have stopped by then.
        """
        upload = self._upload
        missing = [n for n in range(1, upload.cuts.parts + 1) if n not in upload.etags]
        self._lanes.run(min(PARTS_AT_ONCE, len(missing)), missing, self._send, name="part")

    def _send(self, number: int) -> None:
        begin, length = self._upload.cuts.range_of(number)
        counted = _CountedSource(self._source, lambda end: self._moved(number, end - begin))
        request = {"UploadId": self._upload.upload_id, "PartNumber": number}
        with self._place(), self._room:
            sent = self._copier.copy(self._key, self._source, (begin, length), request, self._held)
            if sent is None:
                sent = send_range(self._store, self._key, counted, (begin, length), request)
        self._source.drop(begin, length)
        with self._lock:
            upload = self._upload
            self._moving.pop(number, None)
            upload.etags[number], upload.crcs[number] = sent.etag, sent.crc
            if sent.md5 is not None:
                upload.md5s[number] = sent.md5
            upload.close_gap()
            self._tell()

    def _moved(self, number: int, count: int) -> None:
        self._lanes.check()
        with self._lock:
            self._moving[number] = count
            self._tell()

    def _tell(self) -> None:
        """The lock is held: what is told as durable never goes back."""
        self._on_progress(self._upload.progress(sum(self._moving.values())))


class PartCopier:
    """Lets the server copy parts from objects that it holds, until it takes none or fails three times.

    Safe for several threads.
    """

    def __init__(self, store: S3Bucket) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._failures = 0
        self._is_over = False

    def copy(
        self,
        key: str,
        source: Source,
        span: tuple[int, int],
        request: dict[str, Any],
        held: Sequence[HeldRange],
    ) -> SentRange | None:
        """Copy (offset, length) as the part that `request` names; None: it is to be sent.

        `held`: what the server holds of the object that is written. The part is read here all the same: its
        checksums say whether the server copied the same bytes.
        """
        begin, length = span
        end = begin + length
        one = next((h for h in held if h.offset <= begin and end <= h.offset + h.length), None)
        if one is None or self._is_over:
            return None
        store, number = self._store, request["PartNumber"]
        md5 = hashlib.md5(usedforsecurity=False) if store.wants_md5 else None
        crc = crc64_of(source, begin, length, drops=True, also=md5.update if md5 else None)
        first = one.key_offset + begin - one.offset
        origin = {"Bucket": one.bucket, "Key": one.key} if one.bucket else store.place(one.key)
        words = store.place(key) | request | {"CopySource": origin}
        words["CopySourceRange"] = f"bytes={first}-{first + length - 1}"
        try:
            with store.asking(f"copying part {number} of {key}"):
                answer = self._asked(words)
        except RemoteUnreachable:
            self._count_failure()
            return None
        if answer is None:
            return None
        sent = SentRange(answer=answer, crc=crc, md5=md5.digest() if md5 else None)
        is_same = answer.get("ChecksumCRC64NVME") in (None, encoded(crc))
        return sent if is_same and _is_intact(store, sent, number) else None

    def _asked(self, words: dict[str, Any]) -> dict[str, Any] | None:
        """Return what the server says of the copy; None: it made none."""
        client = self._store.client
        try:
            answer: dict[str, Any] = client.upload_part_copy(**words)["CopyPartResult"]
        except client.exceptions.ClientError as error:
            # if the server takes nothing at all, sending the part says so
            self._count_failure(is_last=sc.is_refused(error))
            return None
        return answer

    def _count_failure(self, *, is_last: bool = False) -> None:
        with self._lock:
            self._failures += 1
            if is_last or self._failures >= _TRIES:
                self._is_over = True


class _CountedSource(WrappedSource):
    """A source that reports where each step that was read ended."""

    def __init__(self, inner: Source, tell: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._tell = tell

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read, then tell."""
        count = self.inner.read_into(offset, buffer)
        self._tell(offset + count)
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRange:
    """Hold the result of sending a range: the server's answer, CRC64 and, where an ETag may prove it, MD5."""

    answer: dict[str, Any]
    crc: int
    md5: bytes | None

    @property
    def etag(self) -> str:
        """Return the server's name for what arrived."""
        return str(self.answer.get("ETag", ""))


def send_range(
    store: S3Bucket, key: str, source: Source, span: tuple[int, int], request: dict[str, Any]
) -> SentRange:
    """Send (offset, length) of the source as a part (`PartNumber` in the request) or as the whole object.

    Where the server enforces a checksum it gets one behind the body; where it takes none there, in the
    header, for which the range is hashed first. At most 1 MiB goes from memory: for a file botocore asks
    the server first whether it will take it, a round trip more.

    Raises:
        VerifyError: it arrived changed; a part three times.
        TargetExists: the object is there already.
    """
    offset, length = span
    if length <= STEP_BYTES:
        return send_held(store, key, held_of(store, source, offset, length), request)
    sent = _send_once_read(store, key, source, span, request)
    if sent is not None:
        return sent
    number, can = request.get("PartNumber"), store.abilities
    inner = source.inner if isinstance(source, _CountedSource) else source
    known = crc64_of(inner, offset, length, is_read_again=True) if can.checksum else None
    checked = {"ChecksumCRC64NVME": encoded(known)} if known is not None else {}
    for _ in range(_TRIES if number else 1):
        body = Body(source, offset, length, known, wants_md5=store.wants_md5)
        try:
            answer = _ask(store, key, body, request | checked | guard(can, body.content_md5))
        except SourceStopped as stopped:
            raise stopped.error from None
        if answer is None:
            continue
        sent = _sent(answer, body, inner, span)
        if _is_intact(store, sent, number):
            return sent
    raise changed(_name(key, number), f" {_TRIES} times" if number else "")


def held_of(store: S3Bucket, source: Source, offset: int, length: int) -> BufferedBody:
    """Return a small range in memory, hashed."""
    return BufferedBody(read_range(source, offset, length), wants_md5=store.wants_md5)


def send_held(store: S3Bucket, key: str, held: BufferedBody, request: dict[str, Any]) -> SentRange:
    """Send bytes that lie in memory, as `send` does a range of a source."""
    number = request.get("PartNumber")
    arguments = request | arguments_of(store, held)
    known = _told_directly(store, key, held, arguments)
    if known is not None and _is_intact(store, known, number):
        return known
    for _ in range(_TRIES if number else 1):
        answer = _ask(store, key, held, arguments)
        if answer is None:
            continue
        sent = SentRange(answer=answer, crc=held.crc, md5=held.md5)
        if _is_intact(store, sent, number):
            return sent
    raise changed(_name(key, number), f" {_TRIES} times" if number else "")


def _told_directly(
    store: S3Bucket, key: str, held: BufferedBody, arguments: dict[str, Any]
) -> SentRange | None:
    """The short way; None: the other one."""
    if store.direct is None:
        return None
    with store.asking(f"writing {_name(key, arguments.get('PartNumber'))}"):
        flight = store.direct.begin(key, arguments, held.data)
        answer = flight.end() if flight is not None else None
    return None if answer is None else SentRange(answer=answer, crc=held.crc, md5=held.md5)


def arguments_of(store: S3Bucket, held: BufferedBody) -> dict[str, str]:
    """Return the checksum that goes along with a small range."""
    checked = {"ChecksumCRC64NVME": encoded(held.crc)} if store.abilities.checksum else {}
    return checked | guard(store.abilities, held.content_md5)


def _send_once_read(
    store: S3Bucket, key: str, source: Source, span: tuple[int, int], request: dict[str, Any]
) -> SentRange | None:
    """The short way, on which the range is read once; None: it is to be sent the other way.

    A server that enforces a checksum compares it with what arrived, wherever it stands.
    """
    can, direct = store.abilities, store.direct
    offset, length = span
    is_guarded = can.content_md5 and not can.checksum and not can.part_etags
    if direct is None or not direct.streams or is_guarded or (can.checksum and not can.trailers):
        return None
    body = Body(source, offset, length, wants_md5=store.wants_md5)
    number = request.get("PartNumber")
    with store.asking(f"writing {_name(key, number)}"):
        try:
            answer = direct.stream(key, request, body, with_trailer=can.checksum is not None)
        except SourceStopped as stopped:
            raise stopped.error from None
    if answer is None or not body.is_whole:
        return None
    sent = SentRange(answer=answer, crc=body.crc, md5=body.md5)
    checksum = answer.get("ChecksumCRC64NVME")
    is_same = checksum is None or not can.checksum or checksum == encoded(sent.crc)
    return sent if is_same and _is_intact(store, sent, number) else None


def _ask(
    store: S3Bucket, key: str, body: Body | BufferedBody, arguments: dict[str, Any]
) -> dict[str, Any] | None:
    """Send a body by botocore's client, which tries again; None: the server received other bytes."""
    number = arguments.get("PartNumber")
    with store.asking(f"writing {_name(key, number)}"):
        try:
            send = store.client.upload_part if number else store.client.put_object
            content = body if isinstance(body, Body) else body.data
            return dict(send(**store.place(key), **arguments, Body=content))
        except store.client.exceptions.ClientError as error:
            if sc.code_of(error) in sc.TAKEN:
                raise taken(key) from error
            if sc.code_of(error) not in CHANGED:
                raise
            return None


def _sent(answer: dict[str, Any], body: Body, inner: Source, span: tuple[int, int]) -> SentRange:
    crc = body.crc if body.is_whole else crc64_of(inner, *span)
    return SentRange(answer=answer, crc=crc, md5=body.md5)


def _is_intact(store: S3Bucket, sent: SentRange, number: int | None) -> bool:
    """Whether a part arrived as it was read, where ETags are MD5s; an object is looked at as a whole."""
    is_shown = bool(number) and store.abilities.part_etags and sent.md5 is not None
    return not is_shown or bare(sent.etag) == (sent.md5 or b"").hex()


def _name(key: str, number: int | None) -> str:
    return f"part {number} of {key}" if number else key


def encoded(crc: int) -> str:
    """Encode a CRC64 as S3's headers carry it."""
    return base64.b64encode(crc.to_bytes(8)).decode()
