"""Upload the outputs of a plan straight into a store: the bytes are made while they are uploaded.

Nothing of them is written on this machine. The folder counts once `ckptd.json` is in it, which is created
last; until then a note names the plan, so that the next attempt of the same one goes on.
"""

from __future__ import annotations

import contextlib
import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ckptd.base.names import DESCRIPTION
from ckptd.conversion.parts import Literal, Part, Range
from ckptd.conversion.reader import blocks_of, pieces, refuse_unequal
from ckptd.errors import CkptdError, RemoteUnreachable, SourceChanged, TargetExists, VerifyError
from ckptd.storage.stores.base import HeldRange
from ckptd.storage.stores.open import is_s3, is_same_server
from ckptd.storage.stores.retrying import briefly
from ckptd.storage.stores.sources import crc64_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckptd.conversion.engine.writer import Counters
    from ckptd.conversion.plan import OutputCheck, OutputFile
    from ckptd.conversion.reader import Ranges
    from ckptd.storage.stores.access import Access
    from ckptd.storage.stores.base import Progress, Store

NOTE = "ckptd-partial.json"
PIECE_BYTES = 4 << 20
MOST_CURSORS = 6


@dataclass(frozen=True, slots=True)
class HeldSources:
    """Say which objects of a target's server hold the sources of a plan, by number."""

    keys: Mapping[int, str]
    bucket: str = ""
    """Bucket in which `keys` are whole keys; "": they are keys of the target's store."""

    def ranges_of(self, parts: Iterable[Part], begin: int = 0) -> tuple[HeldRange, ...]:
        """Return what of an output, whose bytes from `begin` on these parts make, lies in them."""
        found, at = [], begin
        for part in parts:
            if isinstance(part, Range) and (key := self.keys.get(part.source)):
                one = HeldRange(
                    offset=at, length=part.nbytes, key=key, key_offset=part.offset, bucket=self.bucket
                )
                found.append(one)
            at += part.nbytes
        return tuple(found)


def held_sources(
    source: tuple[str, Access], target: tuple[str, Access], keys: Mapping[int, str]
) -> HeldSources | None:
    """Return the sources as objects that the target's server can copy; None: it does not hold them.

    `source`, `target`: URL and access of a store; `keys`: of the sources, in their store.
    """
    if not is_same_server(source, target):
        return None
    parts = urlsplit(source[0])
    above = f"{parts.path.strip('/')}/"
    return HeldSources({number: above + key for number, key in keys.items()}, parts.netloc)


@dataclass(slots=True)
class _Cursor:
    """One reader's place: blocks to come, and what is left of the last."""

    blocks: Iterator[bytes]
    rest: memoryview


class PartsSource:
    """An output as what an upload reads: by several threads, each forwards from where its part begins."""

    gid: int | None = None

    def __init__(
        self,
        parts: tuple[Part, ...],
        ranges: Ranges,
        mode: int,
        folder_mode: int,
        tell: Callable[[int], None],
    ) -> None:
        self._parts = [piece for part in parts for piece in pieces(part, PIECE_BYTES)]
        self._ends = list(accumulate(part.nbytes for part in self._parts))
        self._ranges = ranges
        self._tell = tell
        self._told = 0
        self._made = 0
        self._cursors: OrderedDict[int, _Cursor] = OrderedDict()
        """Offset → the cursor that stands there."""
        self._lock = threading.Lock()
        self.size_bytes: int = self._ends[-1] if self._ends else 0
        self.mode = mode
        self.folder_mode = folder_mode

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Make the bytes at `offset`; fewer than fit are normal, 0 is the end."""
        count = self.peek_into(offset, buffer)
        with self._lock:
            self._made += count
            news = min(self._made, self.size_bytes) - self._told
            self._told += max(0, news)
        self._tell(max(0, news))
        return count

    def peek_into(self, offset: int, buffer: memoryview) -> int:
        """Read bytes again that are uploaded again, without counting them as progress."""
        if offset >= self.size_bytes:
            return 0
        with self._lock:
            cursor = self._cursors.pop(offset, None)
        if cursor is None:
            cursor = _Cursor(self._from(offset), memoryview(b""))
        while not cursor.rest:
            block = next(cursor.blocks, None)
            if block is None:
                raise SourceChanged("a source ended early while it was read")
            cursor.rest = memoryview(block)
        count = min(len(cursor.rest), len(buffer))
        buffer[:count] = cursor.rest[:count]
        cursor.rest = cursor.rest[count:] if count < len(cursor.rest) else memoryview(b"")
        if offset + count >= self.size_bytes:
            # its iterator knows this source: kept, neither would go before a collection of garbage
            return count
        with self._lock:
            self._cursors[offset + count] = cursor
            while len(self._cursors) > MOST_CURSORS:
                self._cursors.popitem(last=False)
        return count

    def drop(self, offset: int, length: int) -> None:
        """Do nothing: no pages are kept."""

    def _from(self, offset: int) -> Iterator[bytes]:
        """Blocks from `offset` on; what is arranged is made anew from the beginning of its piece."""
        first = bisect_right(self._ends, offset)
        skip = offset - (self._ends[first - 1] if first else 0)
        for part in self._parts[first:]:
            if skip and isinstance(part, Range):
                part, skip = Range(part.source, part.offset + skip, part.nbytes - skip), 0  # noqa: PLW2901
            elif skip and isinstance(part, Literal):
                part, skip = Literal(part.data[skip:]), 0  # noqa: PLW2901
            for block in blocks_of(part, self._ranges):
                if skip >= len(block):
                    skip -= len(block)
                    continue
                yield block[skip:]
                skip = 0


class Target:
    """The folder `name` in a store that is written."""

    def __init__(self, store: Store, name: str, *, mode: int, folder_mode: int) -> None:
        self.store = store
        self.name = name
        self.mode = mode
        self.folder_mode = folder_mode
        self.copies = True
        """Whether its server may copy parts: not once what it made was other bytes."""
        self.made: set[str] = set()
        self.there: dict[str, int] = {}
        self._plan_sha256 = ""
        self._uploads: dict[str, str] = {}
        """Path → the store's token of an unfinished upload in parts."""
        self._lock = threading.Lock()

    def begin(self, plan_sha256: str) -> None:
        """Take the folder: it is empty, or an attempt of this very plan ended in it.

        Raises:
            TargetExists: it holds anything else.
        """
        if is_s3(self.store.url):  # what it keeps its word on; elsewhere trying would leave a folder behind
            self.store.probe()
        self._plan_sha256 = plan_sha256
        head = f"{self.name}/"
        self.there = {info.key[len(head) :]: info.bytes for info in self.store.list(head)}
        note = read_note(self.store, head + NOTE) if self.there else None
        if self.there and (DESCRIPTION in self.there or note is None or note.plan_sha256 != plan_sha256):
            raise target_exists(f"{self.store.url}/{self.name}", DESCRIPTION in self.there)
        for path, token in note.uploads.items() if note is not None else ():
            # a killed attempt's: its parts lie there unseen, and are paid for, until somebody gives them up
            self.store.discard(head + path, token)
        if note is None or note.uploads:
            self._write_note()
        self.there.pop(NOTE, None)

    def began(self, path: str, token: str) -> None:
        """An upload in parts has begun: noted before its first part is sent."""
        with self._lock:
            if self._uploads.get(path) != token:
                self._uploads[path] = token
                self._write_note()

    def ended(self, path: str) -> None:
        """Forget an upload that was joined or given up; the note says so when it is written next."""
        with self._lock:
            self._uploads.pop(path, None)

    def _write_note(self) -> None:
        note = UploadNote(plan_sha256=self._plan_sha256, uploads=self._uploads)
        write_note(self.store, f"{self.name}/{NOTE}", note)

    def publish(self, description: bytes, *, pointer: str | None) -> None:
        """ckptd.json makes it count; then the pointer beside it names it.

        Raises:
            TargetExists: somebody else's appeared meanwhile.
        """
        publish_in_store(self.store, self.name, description, pointer)

    def give_up(self) -> None:
        """Remove what this attempt made; what cannot be removed stays without ckptd.json."""
        for path in sorted(self.made):
            with contextlib.suppress(CkptdError):
                self.store.discard(f"{self.name}/{path}")
                self.store.delete(f"{self.name}/{path}")
        if not self.there:
            with contextlib.suppress(CkptdError):
                self.store.delete(f"{self.name}/{NOTE}")


def publish_in_store(store: Store, name: str, description: bytes, pointer: str | None) -> None:
    """Make the folder `name` count by its ckptd.json; see `Target.publish`."""
    key = f"{name}/{DESCRIPTION}"
    if not store.put_if_absent(key, description) and store.get(key) != description:
        raise target_exists(f"{store.url}/{name}", is_whole=True)
    if store.get(key) != description:
        raise VerifyError(f"{key} in {store.url} is not what was written there")
    store.delete(f"{name}/{NOTE}")
    if pointer is not None:
        store.put(pointer, name.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadNote:
    """Describe an unpublished target folder: the plan it is of, and its open uploads."""

    plan_sha256: str
    uploads: dict[str, str]


def write_note(store: Store, key: str, note: UploadNote) -> None:
    """Say it."""
    store.put(key, json.dumps({"plan_sha256": note.plan_sha256, "uploads": note.uploads}).encode())


def read_note(store: Store, key: str) -> UploadNote | None:
    """Read the note of a conversion; None: there is none, or it cannot be read."""
    try:
        raw = json.loads(store.get(key) or b"")
        uploads = {str(path): str(token) for path, token in dict(raw.get("uploads", {})).items()}
        return UploadNote(plan_sha256=str(raw["plan_sha256"]), uploads=uploads)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def target_exists(where: str, is_whole: bool) -> TargetExists:
    """Return the error for a destination that holds content."""
    if is_whole:
        return TargetExists(f"{where} is there already", hint="choose another name")
    return TargetExists(
        f"{where} holds other files, or what a conversion of something else left when it was killed",
        hint="remove them, or choose another name",
    )


class Uploader:
    """One thread's worker: makes outputs in the target (`ckptd.conversion.engine.executor.Worker` of a
    store)."""

    def __init__(
        self,
        target: Target,
        ranges: Ranges,
        links: Mapping[str, tuple[str, ...]],
        counters: Counters,
        check_stop: Callable[[], None],
        held: HeldSources | None = None,
    ) -> None:
        """`held`: the sources, where the target's server holds them."""
        self._target = target
        self._ranges = ranges
        self._links = links
        self._counters = counters
        self._check_stop = check_stop
        self._held = held

    def make(self, output: OutputFile) -> None:
        """Send one output under each of its names, verified when it returns."""
        for number, path in enumerate((output.path, *self._links.get(output.path, ()))):
            resumed = self._target.there.get(path) == output.nbytes and self._is_whole(path, output)
            if not resumed:
                self._send(path, output, counts=number == 0)
            elif number == 0:
                self._counters.add(nbytes=output.nbytes)
            self._counters.add(files=1, resumed=int(resumed))

    def compare(self, check: OutputCheck) -> None:
        """Compare both sides of a check; raises RefusedError if they differ."""
        refuse_unequal(check, self._ranges, self._check_stop)

    def settle(self) -> None:
        """Every output is durable when it was made."""

    def abandon(self) -> None:
        """Do nothing: no output is open."""

    def _source(self, output: OutputFile, *, counts: bool) -> PartsSource:
        def tell(nbytes: int) -> None:
            self._check_stop()
            if counts:
                self._counters.add(nbytes=nbytes, copied=nbytes)

        target = self._target
        return PartsSource(output.parts, self._ranges, target.mode, target.folder_mode, tell)

    def _send(self, path: str, output: OutputFile, *, counts: bool) -> None:
        target, key = self._target, f"{self._target.name}/{path}"
        source = self._source(output, counts=counts)
        target.made.add(path)
        is_copied = target.copies and target.store.copies
        held = self._held.ranges_of(output.parts) if self._held is not None and is_copied else ()

        def moving(progress: Progress) -> None:
            self._check_stop()
            if progress.token:
                target.began(path, progress.token)

        def send() -> None:
            nonlocal held
            self._check_stop()
            try:
                crc = target.store.upload(key, source, resume=None, on_progress=moving, held=held)
                target.ended(path)
                target.store.verify(key, output.nbytes, crc, lambda _: self._check_stop())
            except (VerifyError, RemoteUnreachable) as error:
                target.store.discard(key)
                if held and isinstance(error, VerifyError):
                    # other bytes, or parts that it does not join: what it copies is sent from now on
                    target.copies, held = False, ()
                    target.store.delete(key)
                raise
            except TargetExists:
                # an answer that was lost, or an attempt that was killed: nobody else writes below our note
                target.store.delete(key)
                raise

        briefly(send, VerifyError, RemoteUnreachable, TargetExists)()

    def _is_whole(self, path: str, output: OutputFile) -> bool:
        """Tell whether a killed attempt already uploaded this output, by comparing it."""
        crc = crc64_of(self._source(output, counts=False), 0, output.nbytes)
        try:
            self._target.store.verify(
                f"{self._target.name}/{path}", output.nbytes, crc, lambda _: self._check_stop()
            )
        except VerifyError:
            return False
        return True
