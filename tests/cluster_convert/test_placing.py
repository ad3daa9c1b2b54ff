"""Who sends which piece, and what of a disk is believed: without a cluster."""

from __future__ import annotations

import io
import os
import random
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.conversion.cluster.extents import LocalPlace, LocalShards, save_dirs
from ckptd.conversion.cluster.grouping import (
    ANYWHERE,
    CutLayout,
    Home,
    PlanLine,
    Run,
    borders_of,
    chosen,
    index_of,
    parts_of,
    tasks_of,
    totals_of,
)
from ckptd.conversion.cluster.messages import TaskSource
from ckptd.conversion.parts import Literal, Part, Range
from ckptd.conversion.plan import Header, OutputFile, PlanWriter, SourceFile
from ckptd.errors import NotFoundError
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.s3.parts import LEAST_PART_BYTES, PartLayout, parse_layout

MIB = 1 << 20
A, B = frozenset({"tcp://a:1"}), frozenset({"tcp://b:1", "tcp://b:2"})
NEVER = frozenset({"x"})
steps = st.lists(st.integers(LEAST_PART_BYTES, 90 * MIB), max_size=5)


@given(steps, st.integers(1, 90 * MIB), st.integers(LEAST_PART_BYTES, 64 * MIB))
def test_parts_never_cross_a_border(stretches: list[int], tail: int, part_bytes: int) -> None:
    """They cover everything in order, none but the last is too small, and a token says them again."""
    borders = tuple(sum(stretches[: n + 1]) for n in range(len(stretches)))
    cuts = PartLayout(sum(stretches) + tail, part_bytes, borders)
    spans = [cuts.range_of(number) for number in range(1, cuts.parts + 1)]
    ends = [begin + length for begin, length in spans]
    assert spans[0][0] == 0
    assert ends[-1] == cuts.size_bytes
    assert all(end == begin for end, (begin, _) in zip(ends, spans[1:], strict=False))
    assert all(length >= LEAST_PART_BYTES for _, length in spans[:-1])
    assert all(length <= max(part_bytes, 2 * LEAST_PART_BYTES) for _, length in spans)
    assert set(borders) <= set(ends)
    assert parse_layout(cuts.text, cuts.size_bytes) == cuts


@pytest.mark.parametrize("text", ["", "0", "x", "5@", "5@9,3", "5@x", "5@20"])
def test_what_is_no_token(text: str) -> None:
    found = parse_layout(text, 20)
    assert found is None or found == PartLayout(20, 5)


def foreign_of(runs: list[Run], borders: tuple[int, ...]) -> int:
    """Bytes that cross the network for stretches between borders."""
    ends = (0, *borders, sum(run.nbytes for run in runs))
    return sum(chosen(totals_of(runs, one, other)).foreign_bytes for one, other in pairwise(ends))


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([A, B, ANYWHERE, None])), min_size=1, max_size=7)
)
def test_no_other_borders_cost_less(drawn: list[tuple[int, Home | None]]) -> None:
    """Against every set of borders between homes with stretches of four bytes or more."""
    apart = [one for one, before in zip(drawn, [(0, NEVER), *drawn], strict=False) if one[1] != before[1]]
    runs = [Run(n, () if home is None else ((home, n),)) for n, home in apart]
    ends = [sum(run.nbytes for run in runs[: n + 1]) for n in range(len(runs) - 1)]
    whole = sum(run.nbytes for run in runs)
    allowed = [
        borders
        for count in range(len(ends) + 1)
        for borders in combinations(ends, count)
        if all(b - a >= 4 for a, b in pairwise((0, *borders)))
    ]
    found = borders_of(runs, 4)
    assert found in allowed
    assert foreign_of(runs, found) == min(foreign_of(runs, borders) for borders in allowed)
    assert whole not in found


def test_each_part_goes_to_who_holds_it() -> None:
    """A large output of two nodes is cut between them; small ones go to whom most of them belongs."""
    header = Header(
        "universal",
        "strict",
        0,
        2,
        2,
        "0.19",
        7,
        3,
        tuple(SourceFile(n, 99 * MIB, n) for n in ("a", "b", "c")),
    )
    stream = io.BytesIO()
    writer = PlanWriter(stream, header, [(1, 2, 3, 4, 5)] * 3)
    big = (Literal(b"h" * 64), Range(0, 0, 40 * MIB), Range(1, 0, 23 * MIB), Literal(b"t"))
    writer.add(OutputFile("big", big))
    writer.add(OutputFile("half", (Range(0, 50 * MIB, 6 * MIB), Range(1, 50 * MIB, 7 * MIB))))
    writer.add(OutputFile("small", (Range(0, 60 * MIB, 1000), Range(1, 60 * MIB, 1001))))
    writer.add(OutputFile("free", (Range(2, 0, 1000),)))
    writer.finish()
    stream.seek(0)
    index = index_of(stream)

    def parts(item: PlanLine) -> tuple[Part, ...]:
        stream.seek(item.offset)
        return parts_of(stream.read(item.line_bytes))

    layout = CutLayout(lambda _: 16 * MIB, parts, {0: A, 1: B})
    made: dict[tuple[str, int], Home] = {}
    sizes: dict[Home, int] = {}
    for home, batch in tasks_of(index, set(), layout, task_bytes=64 * MIB, missing={}):
        for one in batch:
            first, count = one.parts or (0, 1)
            for number in range(first, first + count):
                assert (one.name, number) not in made
                made[one.name, number] = home
                nbytes = one.cuts.range_of(number)[1] if one.cuts else one.item.nbytes
                sizes[home] = sizes.get(home, 0) + nbytes
    assert {made["big", number] for number in (1, 2, 3)} == {A}
    assert {made["big", number] for number in (4, 5)} == {B}
    assert (made["half", 1], made["half", 2]) == (A, B)
    assert (made["small", 0], made["free", 0]) == (B, ANYWHERE)
    assert len(made) == 9
    assert sizes == {A: 46 * MIB + 64, B: 30 * MIB + 1 + 2001, ANYWHERE: 1000}


class Remote:
    """Counts what is read of it."""

    local_bytes = 0

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.fetched = 0

    def fetch(self, source: TaskSource, offset: int, nbytes: int) -> bytes:
        """A range."""
        self.fetched += nbytes
        return self.data[offset : offset + nbytes]


DATA = random.Random(9).randbytes(3 * MIB)
SOURCE = TaskSource(
    number=0, name="k", bytes=len(DATA), mtime_ns=0, crc64=to_hex(crc64(DATA)), local="global_step1/shard.pt"
)


def put(save_dir: Path, data: bytes) -> Path:
    """The shard."""
    path = save_dir / SOURCE.local
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_disk_is_believed_only_what_the_manifest_says(tmp_path: Path) -> None:
    """Read here while it is the committed file; from the remote once a bit, its size or kind is another."""
    path = put(tmp_path / "run", DATA)
    shelf, remote = LocalShards([str(tmp_path / "none"), str(tmp_path / "run")]), Remote(DATA)

    def read() -> tuple[int, int]:
        before = remote.fetched
        place = LocalPlace(shelf, remote, lambda: None)
        assert place.fetch(SOURCE, 1000, 5000) == DATA[1000:6000]
        place.close()
        return place.local_bytes, remote.fetched - before

    assert shelf.claims([SOURCE]) == (0,)
    assert read() == (5000, 0)
    assert read() == (5000, 0)
    status = path.stat()
    changed = bytearray(DATA)
    changed[2000] ^= 4
    path.write_bytes(changed)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert shelf.claims([SOURCE]) == (0,)
    assert read() == (0, 5000)
    path.write_bytes(DATA)
    assert read() == (5000, 0)
    path.write_bytes(DATA[:-1])
    assert shelf.claims([SOURCE]) == ()
    assert read() == (0, 5000)
    path.unlink()
    assert read() == (0, 5000)
    path.symlink_to(put(tmp_path / "other", DATA))
    assert shelf.claims([SOURCE]) == ()
    assert read() == (0, 5000)


def test_a_shard_that_changes_under_a_task(tmp_path: Path) -> None:
    """It was proven, then somebody wrote: what was read of it afterwards is not used."""
    path, remote = put(tmp_path, DATA), Remote(DATA)
    place = LocalPlace(LocalShards([str(tmp_path)]), remote, lambda: None)
    assert place.fetch(SOURCE, 0, 10) == DATA[:10]
    with path.open("r+b") as file:
        file.write(b"x" * 100)
    assert place.fetch(SOURCE, 0, 10) == DATA[:10]
    assert (place.local_bytes, remote.fetched) == (10, 10)
    place.close()


def test_where_a_worker_looks(tmp_path: Path) -> None:
    """What a daemon's environment says, a job file, else every job of this machine."""
    configured = tmp_path / "etc" / "jobs.d" / "one.toml"
    configured.parent.mkdir(parents=True)
    (tmp_path / "one").mkdir()
    configured.write_text(f'save_dir = "{tmp_path}/one"\n[[remote]]\nname = "n"\nurl = "s3://bucket/one"\n')
    plain = {"CKPTD_CONFIG_DIR": str(tmp_path / "etc")}
    assert save_dirs(plain) == (str(tmp_path / "one"),)
    assert save_dirs(plain | {"CKPTD_SAVE_DIR": str(tmp_path)}) == (str(tmp_path),)
    assert save_dirs(plain | {"CKPTD_JOB": str(configured)}) == (str(tmp_path / "one"),)
    assert save_dirs({"CKPTD_CONFIG_DIR": str(tmp_path / "none")}) == ()
    with pytest.raises(NotFoundError):
        save_dirs(plain | {"CKPTD_JOB": "another"})
