"""Ranges of remote objects and outputs made while they are sent, without a server."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench import sparse
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions, ConvertReport
from ckptd.conversion.parts import Cast, Literal, Mean, Part, Range, Stream, Widen, Woven
from ckptd.conversion.reader import Ranges, blocks_of, pieces
from ckptd.conversion.remote import reader
from ckptd.conversion.remote.convert import RemoteConversion
from ckptd.conversion.remote.reader import RemoteRanges
from ckptd.conversion.remote.source import RemoteFile, RemoteSource
from ckptd.conversion.remote.uploader import PartsSource
from ckptd.errors import BehindError, DamagedError, SourceChanged
from ckptd.formats.torchfile import skeleton
from ckptd.formats.torchfile.archive import Record, read_directory
from ckptd.formats.torchfile.fingerprint import fingerprint
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.open import open_store
from tests.support import recover_scene
from tests.support.synthetic import write_stage3

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (3_000_001, 700_000, 0, 65_536)


def nothing() -> None:
    """Go on."""


@pytest.fixture
def files(tmp_path: Path) -> list[RemoteFile]:
    """Random bytes of `SIZES`."""
    random.seed(5)
    found = []
    for number, size in enumerate(SIZES):
        data = random.randbytes(size)
        (tmp_path / str(number)).write_bytes(data)
        found.append(RemoteFile(path=f"{number}", key=f"{number}", bytes=size, crc64=to_hex(crc64(data))))
    return found


def ranges_of(tmp_path: Path, files: list[RemoteFile], cache_bytes: int = 4 << 20) -> RemoteRanges:
    """A reader of them."""
    return RemoteRanges(open_store(str(tmp_path)), files, cache_bytes=cache_bytes, check_stop=nothing)


@pytest.mark.parametrize(
    ("read_at", "damaged_at", "is_seen"),
    [(1000, 400_000, True), (1000, 500_001, False), (600_000, 10, True), (600_000, None, False)],
    ids=["same-record", "another-record", "outside-any-record", "sound"],
)
def test_of_a_file_read_in_part_its_records_prove_what_was_read(
    tmp_path: Path, files: list[RemoteFile], read_at: int, damaged_at: int | None, is_seen: bool
) -> None:
    """What no record covers: the whole file does, and is read for it."""
    data = bytearray((tmp_path / "0").read_bytes())
    places = ((0, 500_000), (500_000, 100_000), (700_000, 2_000_000))
    records = [
        Record(name=str(at), offset=at, size=size, crc=zlib.crc32(data[at : at + size]))
        for at, size in places
    ]
    if damaged_at is not None:
        data[damaged_at] ^= 1
    (tmp_path / "0").write_bytes(data)
    store = open_store(str(tmp_path))
    by_path = {files[0].path: records}
    ranges = RemoteRanges(
        store, files[:1], cache_bytes=1 << 18, check_stop=nothing, most_block_bytes=1 << 16, records=by_path
    )
    ranges.read(0, read_at, 5000)
    assert ranges.fetched_bytes < 200_000
    if is_seen:
        with pytest.raises(DamagedError, match="is damaged: "):
            ranges.prove(everything=False)
    else:
        ranges.prove(everything=False)
        most = 3_000_001 if read_at == 600_000 else 600_000
        assert ranges.fetched_bytes <= most + 200_000


def test_any_range_by_any_thread_is_the_file(tmp_path: Path, files: list[RemoteFile]) -> None:
    """A cache far smaller than the files; then all of each file is proven, whatever was read twice."""
    ranges = ranges_of(tmp_path, files, 1 << 20)
    whole = [(tmp_path / file.path).read_bytes() for file in files]
    rolls = random.Random(7)
    wanted = [(n, rolls.randrange(SIZES[n]), rolls.randrange(400_000)) for n in (0, 1, 3) for _ in range(60)]

    def same(one: tuple[int, int, int]) -> bool:
        number, offset, count = one
        return ranges.read(number, offset, count) == whole[number][offset : offset + count]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(same, wanted))
    assert ranges.prove(everything=True).compared == len(SIZES)


def test_forwards_each_byte_crosses_once(tmp_path: Path, files: list[RemoteFile]) -> None:
    """Four threads that read neighbouring pieces of one file fetch each block once."""
    ranges = ranges_of(tmp_path, files)
    places = [(0, offset, 10_000) for offset in range(0, SIZES[0], 10_000)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda place: ranges.read(*place), places))
    assert ranges.fetched_bytes == SIZES[0]


def test_what_is_known_of_blocks_does_not_grow_with_their_number(tmp_path: Path) -> None:
    """Terabytes are millions of blocks; the memory of a remote's child is a contract (P12)."""
    blocks, size = 1024, reader.LEAST_BLOCK_BYTES
    with (tmp_path / "0").open("wb") as file:
        file.truncate(blocks * size)
    checked = RemoteFile(path="0", key="0", bytes=blocks * size, crc64=to_hex(crc64(bytes(blocks * size))))
    ranges = ranges_of(tmp_path, [checked], 2 * size)
    held = []
    tracemalloc.start()
    try:
        for number in range(blocks):
            ranges.read(0, number * size, size)
            if number in (64, blocks - 1):
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] - held[0] < 32_000
    assert ranges.prove(everything=False).compared == 1
    assert ranges.fetched_bytes == blocks * size


def test_bytes_that_turned_are_found_also_where_none_was_needed(
    tmp_path: Path, files: list[RemoteFile]
) -> None:
    """Of file 0 most was read: the rest is read too. Of file 1 little was: it is left unless asked for."""
    for number in (0, 1):
        data = bytearray((tmp_path / str(number)).read_bytes())
        data[-1] ^= 1
        (tmp_path / str(number)).write_bytes(data)
    ranges = ranges_of(tmp_path, files, 1 << 20)
    ranges.read(1, 0, 1000)
    assert ranges.prove(everything=False).in_part == 3
    with pytest.raises(DamagedError, match="CRC64"):
        ranges.prove(everything=True)
    for offset in range(0, 2_000_000, 500_000):
        ranges.read(0, offset, 500_000)
    with pytest.raises(DamagedError, match=r"^0 in .* is damaged"):
        ranges.prove(everything=False)


def test_objects_that_change_are_noticed(tmp_path: Path, files: list[RemoteFile]) -> None:
    """Shorter, gone, or of another time than when it was listed (P4)."""
    ranges = ranges_of(tmp_path, files)
    ranges.recheck()
    (tmp_path / "1").write_bytes(b"short")
    with pytest.raises(SourceChanged):
        ranges.read(1, 600_000, 10)
    with pytest.raises(SourceChanged):
        ranges.recheck()
    (tmp_path / "1").unlink()
    with pytest.raises(SourceChanged):
        ranges_of(tmp_path, files).read(1, 0, 10)
    listed = next(i for i in open_store(str(tmp_path)).list("") if i.key == "3")
    later = RemoteFile(path="3", key="3", bytes=listed.bytes, mtime_ns=listed.mtime_ns - 5_000_000_000)
    with pytest.raises(SourceChanged):
        ranges_of(tmp_path, [later]).recheck()


def test_many_sources_share_the_cache() -> None:
    """Stage 3 reads all ranks at once: blocks are smaller, so that all of them fit."""
    store = open_store("/tmp")
    files = [RemoteFile(path=str(n), key=str(n), bytes=1) for n in range(300)]
    ranges = RemoteRanges(store, files, cache_bytes=24 << 20, check_stop=nothing)
    assert ranges.block_bytes == reader.LEAST_BLOCK_BYTES
    assert RemoteRanges(store, files[:2], cache_bytes=24 << 20, check_stop=nothing).block_bytes == 512 << 10


MEAN = Mean(((Range(0, 0, 4000),), (Range(0, 4000, 4000),)), 1000)
PARTS: tuple[Part, ...] = (
    Literal(b"header" * 40),
    Range(0, 17, 1_500_000),
    Woven(
        100,
        (Stream((Range(1, 0, 40_000),), 400), Stream((Range(1, 40_000, 40_000),), 400)),
        ((0, 0, 400), (1, 0, 400)),
    ),
    MEAN,
    Widen(1, 8, 3000, "int8"),
    Literal(b"end"),
)


class Plain(Ranges):
    """Files by `open`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lock = threading.Lock()

    def path(self, source: int) -> str:
        """Its number."""
        return str(source)

    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """A slice."""
        return (self._folder / str(source)).read_bytes()[offset : offset + nbytes]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("nbytes", [1, 700, 4096, 100_000])
def test_pieces_of_a_part_are_the_part(tmp_path: Path, nbytes: int) -> None:
    """Each made by itself, one after another; none larger than asked for, but for rows."""
    ranges = Plain(tmp_path)
    for part in (*PARTS[1:], Cast((Range(0, 0, 8000), MEAN), 3000, "float32", "bfloat16")):
        if part.nbytes // nbytes > 5000:
            continue
        cut = list(pieces(part, nbytes))
        made = [b"".join(blocks_of(piece, ranges)) for piece in cut]
        assert b"".join(made) == b"".join(blocks_of(part, ranges))
        assert [len(data) for data in made] == [piece.nbytes for piece in cut]
        assert isinstance(part, Literal) or max(map(len, made)) <= max(nbytes, 800)


@pytest.mark.usefixtures("files")
def test_an_output_can_be_read_again_from_anywhere(tmp_path: Path) -> None:
    """A store sends a part again after a break: the same bytes, whatever kind of part they are in."""
    ranges = Plain(tmp_path)
    expected = b"".join(block for part in PARTS for block in blocks_of(part, ranges))
    told: list[int] = []
    source = PartsSource(PARTS, ranges, 0o644, 0o755, told.append)
    assert source.size_bytes == len(expected)

    def read(begin: int, end: int) -> bytes:
        found = bytearray()
        while begin + len(found) < end:
            view = memoryview(bytearray(min(65_536, end - begin - len(found))))
            count = source.read_into(begin + len(found), view)
            found += view[:count]
        return bytes(found)

    rolls = random.Random(3)
    for _ in range(40):
        begin = rolls.randrange(len(expected))
        end = min(len(expected), begin + rolls.randrange(1, 300_000))
        assert read(begin, end) == expected[begin:end]
    places = [(begin, min(len(expected), begin + 200_000)) for begin in range(0, len(expected), 200_000)]
    with ThreadPoolExecutor(4) as pool:  # parts of an upload, several at once
        assert b"".join(pool.map(lambda place: read(*place), places)) == expected
    assert sum(told) == len(expected)
    assert source.read_into(len(expected), memoryview(bytearray(8))) == 0


def test_a_mirror_holds_what_planning_reads(tmp_path: Path) -> None:
    """A file of 64 MB: less than one is fetched, and directory and fingerprint are those of the original."""
    sparse.write(tmp_path / "in", sparse.Model("m", {f"p{n}": (1000, 1000) for n in range(4)}, 2, 1))
    path = next((tmp_path / "in").glob("*optim*"))
    asked: list[int] = []

    def fetch(offset: int, nbytes: int) -> bytes:
        asked.append(nbytes)
        with path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(nbytes)

    with (tmp_path / "mirror").open("w+b") as copy, path.open("rb") as original:
        copy.truncate(path.stat().st_size)
        skeleton.fill(copy.fileno(), "x", fetch)
        found, true = (read_directory(stream.fileno(), "x") for stream in (copy, original))
        assert found == true
        assert fingerprint(copy.fileno(), found) == fingerprint(original.fileno(), true)
    assert sum(asked) < 1 << 20 < path.stat().st_size
    assert (tmp_path / "mirror").stat().st_blocks * 512 < 1 << 20


def test_stopped_in_the_middle_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    """From a store into a folder here: nothing is to be seen before the end, the next attempt finishes."""
    write_stage3(tmp_path / "in" / "tag", [{f"p{n}": (40, 30) for n in range(12)}], dp=3)
    convert(tmp_path / "in" / "tag", tmp_path / "local")
    store = open_store(str(tmp_path / "in"))
    found = [RemoteFile(path=info.key, key=info.key, bytes=info.bytes) for info in store.list("tag/")]
    source = RemoteSource(
        url=store.url, access=Access(), store=store, name="tag", files=tuple(found), folders=()
    )
    plan = tmp_path / ".u.ckptd-partial" / "plan.jsonl"

    def run(should_stop: Callable[[], bool]) -> ConvertReport:
        return RemoteConversion(source, tmp_path / "u", ConvertOptions(), {}, should_stop=should_stop).run()

    with pytest.raises(BehindError):
        run(plan.exists)
    assert not (tmp_path / "u").exists()
    assert plan.exists()
    run(lambda: False)
    made = {p.relative_to(tmp_path / "u"): p.read_bytes() for p in (tmp_path / "u").rglob("*.pt")}
    assert made == {
        p.relative_to(tmp_path / "local"): p.read_bytes() for p in (tmp_path / "local").rglob("*.pt")
    }
    assert not (tmp_path / ".u.ckptd-partial").exists()


def test_what_is_gone_on_with_is_compared_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged object that the attempt that was stopped had read: the next one finds it all the same."""
    monkeypatch.setattr(recover_scene, "SHAPES", [{f"p{n}": (60, 80) for n in range(700)}])
    scene = recover_scene.Scene(tmp_path)
    tag = scene.save(100)
    scene.commit(tag, 100)
    scene.turn_a_byte(tag)
    partial = tmp_path / ".u.ckptd-partial" / "out"

    def run(should_stop: Callable[[], bool]) -> ConvertReport:
        url = f"file://{scene.nas / tag}"
        return RemoteConversion(
            url, tmp_path / "u", ConvertOptions(), os.environ, should_stop=should_stop
        ).run()

    with pytest.raises(BehindError):
        run(lambda: partial.exists() and sum(len(names) for _, _, names in os.walk(partial)) > 1800)
    with pytest.raises(DamagedError, match="rank_0"):
        run(lambda: False)
    assert not (tmp_path / "u").exists()
