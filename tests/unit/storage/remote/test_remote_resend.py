"""What a repair sends: an object of another store, read by the threads that send its parts."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ckptd.core.model.layouts import Role, ShardKey
from ckptd.core.model.manifest import Checksums, ManifestFile
from ckptd.storage.remote.repair import StoreSource
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.sources import crc64_of
from tests.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

PART_BYTES = 8 << 20


@dataclass
class Slow(MemoryStore):
    """Answers take a moment, and are counted."""

    reads: list[int] = field(default_factory=list)

    def read_at(self, key: str, offset: int, length: int) -> bytes:
        self.reads.append(offset)
        time.sleep(0.002)
        return super().read_at(key, offset, length)


@pytest.fixture
def _hasty() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def entry(key: str, data: bytes) -> ManifestFile:
    return ManifestFile(
        path=key,
        key=key,
        bytes=len(data),
        role=Role.SIDE,
        shard=ShardKey(),
        checksums=Checksums(crc64nvme=to_hex(crc64(data))),
        fingerprint="",
        tensor_fingerprint=None,
        proof="read-back",
    )


@pytest.mark.usefixtures("_hasty")
def test_parts_that_are_sent_side_by_side_are_read_right_and_once() -> None:
    data = b"".join(n.to_bytes(8) for n in range(PART_BYTES // 2))
    store = Slow(objects={"big": data})
    source = StoreSource(store, entry("big", data))
    with ThreadPoolExecutor(4) as pool:
        starts = range(0, len(data), PART_BYTES)
        found = list(pool.map(lambda at: crc64_of(source, at, PART_BYTES), starts))
    assert found == [crc64(data[at : at + PART_BYTES]) for at in starts]
    assert len(store.reads) == len(found)
