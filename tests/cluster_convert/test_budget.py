"""A worker's --memory-budget: how it is divided, what is held of it, and what a worker really took (P12)."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.conversion.cluster.conversion import Clustered
from ckptd.conversion.cluster.extents import GAP_BYTES, Extents, cut_blocks, spans_of
from ckptd.conversion.cluster.memory import LEAST_BUDGET_BYTES, shares_of
from ckptd.conversion.cluster.messages import TaskSource
from ckptd.conversion.cluster.pool import parse
from ckptd.conversion.parts import Range
from ckptd.conversion.remote.uploader import PartsSource
from ckptd.errors import UsageError
from tests.cluster_convert import scene
from tests.cluster_convert.scene import MIB, OPTIONS, url
from tests.stores import servers


class Zeros:
    """Sources of nothing but zeros that count what is fetched."""

    local_bytes = 0

    def __init__(self) -> None:
        self.fetched_bytes = 0

    def fetch(self, source: TaskSource, offset: int, nbytes: int) -> bytes:
        """A range."""
        del source, offset
        self.fetched_bytes += nbytes
        return bytes(nbytes)


def extents_of(place: Zeros, ranges: list[Range], cache_bytes: int) -> Extents:
    """Of sources that no manifest knows."""
    numbers = {r.source for r in ranges}
    sources = {n: TaskSource(number=n, name=f"{n}", bytes=1 << 40, mtime_ns=0) for n in numbers}
    return Extents(place, sources, spans_of(ranges), cache_bytes=cache_bytes, check_stop=lambda: None)


@given(st.integers(LEAST_BUDGET_BYTES, 1 << 34))
def test_shares_fit_into_the_budget(budget_bytes: int) -> None:
    shares = shares_of(budget_bytes)
    assert shares.bytes <= budget_bytes
    assert min(shares.tasks, shares.lanes) >= 1


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 3000)), min_size=1, max_size=9))
def test_blocks_hold_every_range_once(found: list[tuple[int, int]]) -> None:
    """In order, apart, none too large, no gap larger than one that is worth no request."""
    kib, size = 1 << 10, 512 << 10
    spans = sorted((begin * kib, (begin + count) * kib) for begin, count in found)
    blocks = cut_blocks(spans, size)
    assert all(0 < end - begin <= size * 3 // 2 for begin, end in blocks)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(blocks))
    covered = sum(end - begin for begin, end in blocks)
    for begin, end in spans:
        assert sum(max(0, min(end, b) - max(begin, a)) for a, b in blocks) == end - begin
    union = len({at for begin, end in spans for at in range(begin // kib, end // kib)}) * kib
    assert union <= covered <= union + len(spans) * GAP_BYTES


def test_lanes_share_no_block() -> None:
    """Three lanes each read their own of six long neighbours: the next one's first block is not theirs."""
    long_bytes = 4 * MIB + 300_000
    ranges = [Range(0, 777 + n * long_bytes, long_bytes) for n in range(6)]
    place = Zeros()
    extents = extents_of(place, ranges, cache_bytes=5 * MIB)
    for three in (ranges[:3], ranges[3:]):
        for done in range(0, long_bytes, 256 << 10):
            for r in three:
                extents.read(0, r.offset + done, min(256 << 10, r.nbytes - done))
    assert place.fetched_bytes == extents.needed_bytes == 6 * long_bytes


def test_many_sources_do_not_burst_the_cache() -> None:
    """An output of a thousand ranks: a block of each is more than the cache may be."""
    ranges = [Range(number, 4096, 200_000) for number in range(1000)]
    extents = extents_of(Zeros(), ranges, cache_bytes=8 * MIB)
    for r in ranges:
        extents.read(r.source, r.offset, 1000)
    assert 7 * MIB < extents.most_kept_bytes <= 8 * MIB


def test_what_was_sent_is_let_go_of_without_a_collection() -> None:
    """A source that was read to its end is in no circle: with it, a task's blocks would outlive the task."""
    ranges = [Range(0, 0, 300_000)]
    source = PartsSource(tuple(ranges), extents_of(Zeros(), ranges, 8 * MIB), 0o600, 0o700, lambda _: None)
    view, at = memoryview(bytearray(100_000)), 0
    while at < source.size_bytes:
        at += source.read_into(at, view)
    left = weakref.ref(source)
    gc.disable()
    try:
        del source
        assert left() is None
    finally:
        gc.enable()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[servers.Server]:
    """rclone, and variables that lead there."""
    (tmp_path / "rclone").mkdir()
    with servers.rclone(tmp_path / "rclone") as found, pytest.MonkeyPatch.context() as patch:
        for name, value in servers.environment(found).items():
            patch.setenv(name, value)
        yield found


@pytest.mark.stores
@pytest.mark.faults
def test_a_worker_stays_below_its_budget(server: servers.Server, tmp_path: Path) -> None:
    """From bucket to bucket, more than the budget goes through one worker: the kernel's high-water mark."""
    source = scene.checkpoint(tmp_path / "global_step1", stage=2, layers=3, hidden=640, fill=None)
    scene.put(server.client(), source, "run/in")
    ends = url("run/in"), url("run/out")
    done = scene.cli(*ends, "--cluster", "local:1", "--memory-budget", "192MiB", "--json", timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bytes"] > 192 * MIB
    assert 0 < report["peak_rss_bytes"] < 192 * MIB, report
    assert report["cluster"]["bytes_read"] <= 1.01 * report["cluster"]["bytes_needed"]
    with pytest.raises(UsageError):
        Clustered(
            *(*ends, replace(OPTIONS, memory_budget_bytes=LEAST_BUDGET_BYTES - 1), {}),
            address=parse("local:1"),
        )
