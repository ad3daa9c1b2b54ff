"""A store in memory: what the contract means with nothing around it, and the ground of the model tests."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.errors import SourceChanged, TargetExists, VerifyError
from ckptd.storage.stores.base import Abilities, ObjectInfo, Progress, Store
from ckptd.storage.stores.checksums import crc64 as crc64_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptd.storage.stores.base import HeldRange, ResumePoint, Source


@dataclass
class MemoryStore(Store):
    """Objects and partial uploads in two dictionaries; `window_bytes` as a directory's."""

    objects: dict[str, bytes] = field(default_factory=dict)
    partial: dict[str, bytes] = field(default_factory=dict)
    window_bytes: int = 1 << 20
    create_only: bool = True
    lane_count: int = 1
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def url(self) -> str:
        return "memory:"

    @property
    def lanes(self) -> int:
        return self.lane_count

    def probe(self) -> Abilities:
        return Abilities(create_only=self.create_only, checksum=None, resumable=True)

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self.lock:
            if self.create_only and key in self.objects:
                return False
            self.objects[key] = data
            return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for key, data in sorted(self.objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key=key, bytes=len(data))

    def stat(self, key: str) -> ObjectInfo | None:
        data = self.objects.get(key)
        return None if data is None else ObjectInfo(key=key, bytes=len(data))

    def read_at(self, key: str, offset: int, length: int) -> bytes:
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key][offset : offset + length]

    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        yield self.read_at(key, offset, length)

    def upload(
        self,
        key: str,
        source: Source,
        *,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> int:
        begun = self.partial.get(key, b"")
        start, crc = 0, 0
        if resume is not None and len(begun) >= resume.flushed_bytes:
            start, crc = resume.flushed_bytes, resume.crc64
        data = bytearray(begun[:start])
        buffer = memoryview(bytearray(self.window_bytes))
        while len(data) < source.size_bytes:
            count = source.read_into(len(data), buffer)
            if count == 0:
                msg = "the source ended early"
                raise SourceChanged(msg)
            crc = crc64_of(buffer[:count], crc)
            data += buffer[:count]
            self.partial[key] = bytes(data)
            on_progress(Progress(done_bytes=len(data), flushed_bytes=len(data), crc64=crc))
        with self.lock:
            self.partial.pop(key, None)
            if key in self.objects:
                msg = f"{key} appeared"
                raise TargetExists(msg)
            self.objects[key] = bytes(data)
        return crc

    def verify(self, key: str, size_bytes: int, crc64: int, on_progress: Callable[[int], None]) -> str:
        data = self.objects.get(key, b"")
        on_progress(len(data))
        if (len(data), crc64_of(data)) != (size_bytes, crc64):
            msg = f"{key} differs"
            raise VerifyError(msg)
        return "read-back"

    def discard(self, key: str, token: str = "") -> None:
        self.partial.pop(key, None)

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def free_bytes(self) -> int | None:
        return None
