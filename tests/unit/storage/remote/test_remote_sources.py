"""Sources of an upload: record CRCs checked in the same pass, pace kept, cancelling heard (P2, P11)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import DamagedError, TornArchiveError
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.rate_limit import Cancelled, RateLimiter
from ckptd.storage.stores.sources import (
    CheckedSource,
    FileSource,
    MemorySource,
    RateLimitedSource,
    crc64_of,
    records_of,
)
from tests.stores.scene import archive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from ckptd.storage.stores.base import Source


def in_memory(data: bytes) -> MemorySource:
    return MemorySource(data, mode=0o644, folder_mode=0o755, gid=None)


def drain(source: Source, start: int, step: int) -> bytes:
    out = bytearray()
    buffer = memoryview(bytearray(step))
    while count := source.read_into(start + len(out), buffer):
        out += buffer[:count]
    return bytes(out)


def checked(folder: Path, data: bytes) -> CheckedSource:
    path = folder / "shard.pt"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return CheckedSource(in_memory(data), records_of(fd, "shard.pt", is_shard=True), "shard.pt")
    finally:
        os.close(fd)


@settings(deadline=None)
@given(st.integers(1, 5000), st.floats(0, 1))
def test_whole_archives_pass_whatever_the_steps_and_the_start(
    tmp_path_factory: pytest.TempPathFactory, step: int, at: float
) -> None:
    data = archive(os.urandom(997), records=5)
    source = checked(tmp_path_factory.mktemp("a"), data)
    start = int(len(data) * at)
    assert drain(source, start, step) == data[start:]
    assert drain(source, 0, step) == data


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 4), st.integers(0, 996), st.integers(0, 7))
def test_every_flipped_bit_of_a_record_is_named(
    tmp_path_factory: pytest.TempPathFactory, step: int, record: int, at: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("a")
    data = bytearray(archive(os.urandom(997), records=5))
    path = folder / "shard.pt"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    records = records_of(fd, "shard.pt", is_shard=True)
    os.close(fd)
    place = next(r for r in records if r.name == f"data/{record}").offset + at
    data[place] ^= 1 << bit
    with pytest.raises(DamagedError, match=f"record data/{record} has CRC"):
        drain(CheckedSource(in_memory(bytes(data)), records, "shard.pt"), 0, step)
    # a transfer that goes on behind the place in the same record reads its beginning again
    source = CheckedSource(in_memory(bytes(data)), records, "shard.pt")
    start = place + 1 if at < 996 else place
    with pytest.raises(DamagedError, match=f"record data/{record} has CRC"):
        source.go_on(start)
        drain(source, start, step)


@settings(deadline=None)
@given(st.integers(100, 5000), st.randoms(use_true_random=False), st.integers(0, 4), st.integers(0, 996))
def test_ranges_in_any_order_twice_and_by_several_threads_prove_the_same(
    tmp_path_factory: pytest.TempPathFactory, step: int, chance: Random, record: int, at: int
) -> None:
    """Parts of an upload are read beside each other, and again when they are sent again."""
    folder = tmp_path_factory.mktemp("a")
    data = archive(os.urandom(997), records=5)
    (folder / "shard.pt").write_bytes(data)
    fd = os.open(folder / "shard.pt", os.O_RDONLY)
    records = records_of(fd, "shard.pt", is_shard=True)
    os.close(fd)
    place = next(r for r in records if r.name == f"data/{record}").offset + at
    ranges = [(begin, min(begin + step, len(data))) for begin in range(0, len(data), step)]
    ranges += [(max(begin - 99, 0), end) for begin, end in chance.sample(ranges, len(ranges) // 2)]
    chance.shuffle(ranges)

    def read_all(source: CheckedSource) -> None:
        def read(span: tuple[int, int]) -> None:
            buffer = memoryview(bytearray(span[1] - span[0]))
            assert source.read_into(span[0], buffer) == len(buffer)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(read, ranges))

    read_all(CheckedSource(in_memory(data), records, "shard.pt"))
    flipped = bytearray(data)
    flipped[place] ^= 1
    with pytest.raises(DamagedError, match=f"record data/{record} has CRC"):
        read_all(CheckedSource(in_memory(bytes(flipped)), records, "shard.pt"))


def test_what_is_no_archive_has_no_records(tmp_path: Path) -> None:
    for name, data in (("a", b""), ("b", b"text"), ("c", archive(b"x" * 2000)[:-30])):
        path = tmp_path / name
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        try:
            assert records_of(fd, name, is_shard=False) == []
            if name == "c":
                with pytest.raises(TornArchiveError):
                    records_of(fd, name, is_shard=True)
        finally:
            os.close(fd)


def test_a_file_by_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 10_000)
    path.chmod(0o600)
    fd = os.open(path, os.O_RDONLY)
    source = FileSource(fd, "f")
    assert (source.size_bytes, source.mode, source.gid) == (10_000, 0o600, path.stat().st_gid)
    assert drain(source, 0, 333) == b"x" * 10_000
    os.close(fd)


class Clock:
    """Time that passes only by sleeping or working."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def pacer_and_clock(rate: int | None) -> tuple[RateLimiter, Clock]:
    clock = Clock()
    return RateLimiter(rate, clock=clock, sleep=clock.sleep), clock


def test_the_bandwidth_is_kept() -> None:
    pacer, clock = pacer_and_clock(1 << 20)
    source = RateLimitedSource(in_memory(b"x" * (10 << 20)), pacer, lambda: None)
    drain(source, 0, 4 << 20)
    assert 9 < clock.now < 10.5
    assert source.read_bytes == 10 << 20


@pytest.mark.parametrize(("is_afar", "seconds"), [(False, 0), (True, 9)])
def test_what_is_hashed_alone_costs_bandwidth_where_it_comes_over_the_network(
    is_afar: bool, seconds: int
) -> None:
    """The server copies it, and what it is made of is read there."""
    pacer, clock = pacer_and_clock(1 << 20)
    source = RateLimitedSource(in_memory(b"x" * (10 << 20)), pacer, lambda: None, is_afar=is_afar)
    assert crc64_of(source, 0, 10 << 20) == crc64(b"x" * (10 << 20))
    assert seconds <= clock.now < seconds + 1.5
    assert source.read_bytes == 0


def test_what_a_source_reads_short_is_no_part_of_the_bandwidth() -> None:
    """Forms made on the way come in pieces of 128 KiB and less; each was charged as a quarter of a second."""

    class Short(MemorySource):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            return super().read_into(offset, buffer[:1000])

    pacer, clock = pacer_and_clock(1 << 20)
    source = Short(b"x" * (10 << 20), mode=0o644, folder_mode=0o755, gid=None)
    drain(RateLimitedSource(source, pacer, lambda: None), 0, 4 << 20)
    assert 9 < clock.now < 10.5


def test_a_limit_that_ends_lets_go_who_waits_for_it() -> None:
    """By a timetable or a reload: who waited went on waiting for ever, and looked alive."""
    pacer, clock = pacer_and_clock(1000)
    pacer.take(1 << 20, lambda: None)

    def check() -> None:
        if clock.now > 30:
            pacer.set_rate(None)
        assert clock.now < 40

    pacer.take(1 << 20, check)
    assert 30 < clock.now < 31


def test_a_fraction_counts_at_once_and_zero_pauses() -> None:
    pacer, clock = pacer_and_clock(1 << 20)
    pacer.set_fraction(0.1)
    drain(RateLimitedSource(in_memory(b"x" * (1 << 20)), pacer, lambda: None), 0, 4 << 20)
    assert 8.5 < clock.now < 10.5
    pacer.set_fraction(0)
    waited = clock.now

    def check() -> None:
        if clock.now > waited + 5:
            pacer.set_fraction(1)

    drain(RateLimitedSource(in_memory(b"x" * 1000), pacer, check), 0, 1000)
    assert clock.now > waited + 5


def test_without_a_limit_a_fraction_is_a_share_of_the_time() -> None:
    pacer, clock = pacer_and_clock(None)
    pacer.set_fraction(0.25)
    for _ in range(10):
        pacer.take(1000, lambda: None)
        clock.now += 0.1
    assert 3 < clock.now < 5


def test_cancelling_is_heard_while_waiting() -> None:
    pacer, clock = pacer_and_clock(1)

    def check() -> None:
        if clock.now > 1:
            msg = "enough"
            raise Cancelled(msg)

    source = RateLimitedSource(in_memory(b"x" * (1 << 20)), pacer, check)
    with pytest.raises(Cancelled):
        drain(source, 0, 1 << 20)
    assert clock.now < 2


def test_reading_back_breathes_too() -> None:
    pacer, clock = pacer_and_clock(1 << 20)
    seen: list[float] = []
    note: Callable[[], None] = lambda: seen.append(clock.now)  # noqa: E731
    pacer.breathe(note)
    assert (clock.now, len(seen)) == (0.0, 1)
