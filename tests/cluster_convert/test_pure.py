"""What a task is made of, without a cluster: groups, extents, addresses, the example for Slurm."""

from __future__ import annotations

import importlib.util
import io
import itertools
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.conversion.cluster import pool
from ckptd.conversion.cluster.extents import Extents, spans_of
from ckptd.conversion.cluster.grouping import (
    ANYWHERE,
    CutLayout,
    Index,
    TaskOutput,
    clipped,
    index_of,
    tasks_of,
    without_links,
)
from ckptd.conversion.cluster.messages import TaskSource
from ckptd.conversion.parts import Literal, Part, Range, Stream, Widen, Woven
from ckptd.conversion.plan import Header, OutputCheck, OutputFile, OutputLink, PlanWriter, SourceFile
from ckptd.conversion.reader import Ranges, blocks_of
from ckptd.errors import SourceChanged, UsageError
from ckptd.storage.stores.checksums import crc64, from_hex
from tests.support.real import REPOSITORY

MIB = 1 << 20
HEADER = Header("universal", "strict", 0, 2, 2, "0.19", 7, 3, (SourceFile("a.pt", 64 * MIB, "x"),))


def plan(*outputs: OutputFile | OutputLink | OutputCheck) -> io.BytesIO:
    """A plan of one source of 64 MiB."""
    stream = io.BytesIO()
    writer = PlanWriter(stream, HEADER, [(1, 2, 3, 4, 5)])
    for output in outputs:
        writer.add(output)
    writer.finish()
    stream.seek(0)
    return stream


def tasks(
    index: Index,
    *,
    task_bytes: int,
    done: Collection[str] = (),
    part_bytes: int | None = None,
    missing: dict[str, list[int]] | None = None,
) -> list[list[TaskOutput]]:
    """What tasks make where nobody holds anything."""
    layout = CutLayout(None if part_bytes is None else lambda _: part_bytes)
    found = tasks_of(index, set(done), layout, task_bytes=task_bytes, missing=missing or {})
    return [batch for home, batch in found if home == ANYWHERE]


def test_neighbours_go_together_and_every_name_once() -> None:
    files = [OutputFile(f"{n}.pt", (Literal(b"h"), Range(0, n * MIB, MIB))) for n in range(20)]
    index = index_of(plan(*files, OutputLink("again.pt", "3.pt")))
    made = tasks(index, task_bytes=4 * MIB, done={"5.pt"})
    names = [one.name for batch in made for one in batch]
    assert sorted(names) == sorted({f"{n}.pt" for n in range(20)} - {"5.pt"} | {"again.pt"})
    assert [len(batch) for batch in made] == [5, 4, 4, 4, 3]
    assert all(item.names for item in index.items)
    assert sum(len(item.names) for item in without_links(index).items) == 20


def test_what_reads_the_same_bytes_is_one_task() -> None:
    """A comparison and an output far behind it that reads what it read; small overlaps tie nothing."""
    first = OutputCheck("w", (Range(0, 0, 2 * MIB),), (Range(0, 30 * MIB, 2 * MIB),))
    files = [OutputFile(f"{n}.pt", (Range(0, (n + 4) * MIB, MIB + 1000),)) for n in range(10)]
    last = OutputFile("w.pt", (Range(0, 30 * MIB, 2 * MIB),))
    index = index_of(plan(first, *files, last))
    made = tasks(index, task_bytes=MIB)
    assert [one.name for one in made[0]] == ["", "w.pt"]
    assert [len(batch) for batch in made[1:]] == [1] * 10


def test_parts_of_large_outputs() -> None:
    """Runs of parts that make a task; of an upload that was begun only those that lack."""
    index = index_of(
        plan(OutputFile("a", (Range(0, 0, 33 * MIB),)), OutputFile("b", (Range(0, 0, 5 * MIB),)))
    )
    made = tasks(index, task_bytes=10 * MIB, part_bytes=5 * MIB)
    assert [(one.name, one.parts) for batch in made for one in batch] == [("a", (1, 7)), ("b", None)]
    alone = index_of(plan(OutputFile("a", (Range(0, 0, 33 * MIB),))))
    made = tasks(alone, task_bytes=10 * MIB, part_bytes=5 * MIB)
    assert [one.parts for batch in made for one in batch] == [(1, 2), (3, 2), (5, 2), (7, 1)]
    made = tasks(alone, task_bytes=10 * MIB, part_bytes=5 * MIB, missing={"a": [2, 5, 6, 7]})
    assert [one.parts for batch in made for one in batch] == [(2, 1), (5, 2), (7, 1)]


def test_large_outputs_are_begun_first() -> None:
    """The largest is joined and read back while others are made; small ones stay in the plan's order."""
    sizes = {"a": 2, "b": 33, "c": 5, "d": 40, "e": 1}
    files = [OutputFile(name, (Literal(bytes(size * MIB)),)) for name, size in sizes.items()]
    made = tasks(index_of(plan(*files)), task_bytes=MIB)
    assert [one.name for batch in made for one in batch] == ["d", "b", "a", "c", "e"]


class Whole(Ranges):
    """Sources in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def path(self, source: int) -> str:
        """Its number."""
        return str(source)

    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """A range."""
        return self.data[offset : offset + nbytes]


class Counted:
    """The same as a place; counts what is fetched."""

    local_bytes = 0

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.fetched: list[tuple[int, int]] = []

    def fetch(self, source: TaskSource, offset: int, nbytes: int) -> bytes:
        """A range."""
        self.fetched.append((offset, nbytes))
        return self.data[offset : offset + nbytes]


DATA = random.Random(3).randbytes(3 * MIB)
PARTS: tuple[Part, ...] = (
    Literal(b"header" * 11),
    Range(0, 4096, 1_700_000),
    Widen(0, 2_000_000, 300_000, "bfloat16"),
    Woven(
        100,
        (Stream((Range(0, 100, 3000),), 30), Stream((Range(0, 9000, 3000),), 30)),
        ((1, 0, 30), (0, 0, 30)),
    ),
    Literal(b"tail" * 7),
)
EXPECTED = b"".join(block for part in PARTS for block in blocks_of(part, Whole(DATA)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(EXPECTED)), st.integers(0, len(EXPECTED)))
def test_any_slice_of_an_output(one: int, other: int) -> None:
    """Of whatever parts it is made; what is read for a slice of a range is that slice."""
    begin, end = min(one, other), max(one, other)
    parts, skip = clipped(PARTS, begin, end)
    made = b"".join(block for part in parts for block in blocks_of(part, Whole(DATA)))
    assert made[skip : skip + end - begin] == EXPECTED[begin:end]
    (inside,), _ = clipped(PARTS[1:2], 10_000, 20_000)
    assert inside == Range(0, 14_096, 10_000)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * MIB - 1), st.integers(1, 400_000)), min_size=1, max_size=12))
def test_extents_fetch_each_byte_once(found: list[tuple[int, int]]) -> None:
    """Every range reads right; nothing is fetched twice, and nothing but what is needed and small gaps."""
    ranges = [Range(0, offset, min(count, 3 * MIB - offset)) for offset, count in found]
    place, source = Counted(DATA), TaskSource(number=0, name="a", bytes=len(DATA), mtime_ns=0, crc64="x")
    extents = Extents(place, {0: source}, spans_of(ranges), cache_bytes=8 * MIB, check_stop=lambda: None)
    for r in ranges:
        assert extents.read(0, r.offset, r.nbytes) == DATA[r.offset : r.offset + r.nbytes]
    assert sum(count for _, count in place.fetched) == extents.read_bytes == extents.needed_bytes
    spans = sorted(place.fetched)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    for extent in extents.hashed():
        assert from_hex(extent.crc64) == crc64(DATA[extent.offset : extent.offset + extent.nbytes])
    with pytest.raises((SourceChanged, IndexError, KeyError)):
        extents.read(1, 0, 1)


@pytest.mark.parametrize(
    "text", ["", "local", "local:0", "local:x", "slurm:", "http://a:1", "tcp://a", "tcp://a:b"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        pool.parse(text)
    assert caught.value.exit_code == 2
    assert "local:4" in caught.value.hint


def test_addresses() -> None:
    assert pool.parse("local:3") == pool.Address(kind="local", count=3)
    assert pool.parse("slurm:64") == pool.Address(kind="slurm", count=64)
    assert pool.parse("slurm").count == 1
    assert pool.parse("tls://[::1]:8786").url == "tls://[::1]:8786"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 2 and the line to type."""
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in ("distributed", "dask_jobqueue") else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    for text in ("local:2", "tcp://a:1", "slurm"):
        with pytest.raises(UsageError) as caught:
            pool.parse(text)
        assert caught.value.hint == "pip install 'ckptd[cluster]'"


def test_the_example_for_slurm() -> None:
    """dask-jobqueue reads it, and asks Slurm for what it says."""
    import dask.config
    import dask_jobqueue
    from dask_jobqueue.slurm import SLURMJob

    found = dask.config.collect(paths=[str(REPOSITORY / "config" / "jobqueue.yaml")], env={})
    assert set(found["jobqueue"]) == {"slurm"}
    own = Path(dask_jobqueue.__file__).with_name("jobqueue.yaml")
    defaults = dask.config.collect(paths=[str(own)], env={})
    with dask.config.set(dask.config.merge(defaults, found)):
        job = SLURMJob(scheduler="tcp://10.0.0.1:8786", name="ckptd")
    script = job.job_script()
    for line in ("#SBATCH --cpus-per-task=4", "#SBATCH --mem=2G", "#SBATCH -t 04:00:00", "--nthreads 4"):
        assert line in script, script
    assert "tcp://10.0.0.1:8786" in script
    assert not any(
        word in Path(REPOSITORY / "config" / "jobqueue.yaml").read_text() for word in ("SECRET", "KEY=")
    )
