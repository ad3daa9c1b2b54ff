"""Reading and writing past the page cache gives the same bytes, whatever the pieces, and gives way where it
cannot.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import random
from pathlib import Path

import pytest

from bench import sparse
from bench.measure import make_cold, make_warm, resident_share
from ckptd.base.extents import identity_of
from ckptd.conversion import outputs
from ckptd.conversion.engine.executor_child import without_cold_copies
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.engine.writer import MIN_FILE_BYTES, BufferedWriter, DirectReader
from ckptd.conversion.options import ConvertOptions, Form
from ckptd.conversion.parts import Literal, Range
from ckptd.conversion.plan import Header, OutputCheck, OutputFile, OutputLink, PlanReader, PlanWriter
from ckptd.conversion.reader import SourceFiles
from ckptd.errors import NoSpaceError, SourceChanged
from tests.unit.conversion.test_convert_children import tree


def _write(tmp_path: Path, seed: int, *, is_direct: bool = False) -> tuple[bytes, bytes]:
    """A random sequence of literals and source ranges: what was meant, what is on disk."""
    generator = random.Random(seed)
    source = generator.randbytes(100_000)
    (tmp_path / "source").write_bytes(source)
    meant = b""
    flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
    with (
        open(os.open(tmp_path / "source", flags), "rb", buffering=0) as stream,
        (tmp_path / "out").open("w+b") as out,
    ):
        writer = BufferedWriter(20_000)  # 16384: four blocks
        reader = DirectReader(9_000)  # two blocks
        pieces = [
            (generator.random() < 0.3, generator.randrange(99_000), generator.randrange(40_000))
            for _ in range(generator.randrange(1, 12))
        ]
        sizes = [n if literal else min(n, 100_000 - at) for literal, at, n in pieces]
        is_large = generator.random() < 0.8
        if not writer.begin(out.fileno(), MIN_FILE_BYTES if is_large else sum(sizes)):
            pytest.skip("no O_DIRECT here")
        for (literal, at, _), n in zip(pieces, sizes, strict=True):
            if literal:
                writer.put(b"L" * n)
                meant += b"L" * n
                continue
            done = 0
            reader.begin(stream.fileno(), at, n)
            while done < n:
                step = min(writer.room(), n - done)
                writer.take(reader if is_direct else stream.fileno(), at + done, step)
                done += step
            meant += source[at : at + n]
        writer.finish()
    return meant, (tmp_path / "out").read_bytes()[: len(meant) if is_large else None]


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_pieces(tmp_path: Path, seed: int, is_direct: bool) -> None:
    meant, written = _write(tmp_path, seed, is_direct=is_direct)
    assert written == meant


def test_a_file_system_that_refuses_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another thread has just found that out, and took the flag away."""
    real, refused = os.preadv, 0

    def refusing(fd: int, views: list[memoryview], at: int) -> int:
        nonlocal refused
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused += 1
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDONLY)
            raise OSError(errno.EINVAL, "alignment")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", refusing)
    meant, written = _write(tmp_path, 3, is_direct=True)
    assert refused == 1
    assert written == meant


def test_a_file_system_that_refuses_in_the_midst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwrite, 0

    def refusing(fd: int, data: bytes, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EINVAL, "alignment")
        return real(fd, bytes(data)[: max(1, len(data) // 2)], at) if calls == 3 else real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", refusing)
    meant, written = _write(tmp_path, 3)
    assert calls > 3
    assert written == meant


def test_a_source_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"x" * 10)
    with (tmp_path / "s").open("rb") as source, (tmp_path / "o").open("w+b") as out:
        writer = BufferedWriter(8192)
        writer.begin(out.fileno(), 100)
        with pytest.raises(SourceChanged, match="90 bytes early"):
            writer.take(source.fileno(), 0, 100)
        reader = DirectReader(8192)
        reader.begin(source.fileno(), 5, 100)
        writer.begin(out.fileno(), 100)
        with pytest.raises(SourceChanged, match="95 bytes early"):
            writer.take(reader, 5, 100)


def test_large_odd_parameters_are_exact(tmp_path: Path) -> None:
    """Above 1 MiB and cached: the outputs are compared with the plan, byte by byte, and with a cold run's."""
    shapes = {"a": (1001, 333), "b": (7,), "c": (613, 1117), "d": (3,)}
    for stage in (2, 3):
        source = tmp_path / f"in{stage}"
        sparse.write(source, sparse.Model("m", shapes, stage, 3), sparse.random_fill(stage))
        for path in source.iterdir():
            path.read_bytes()
        assert convert(source, tmp_path / f"warm{stage}", ConvertOptions(verify=True)).verified
        for path in source.iterdir():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        convert(source, tmp_path / f"cold{stage}", ConvertOptions())
        assert tree(tmp_path / f"warm{stage}") == tree(tmp_path / f"cold{stage}")


@pytest.mark.parametrize("form", ["universal", "weights"])
@pytest.mark.parametrize("fill", [None, sparse.random_fill(5)], ids=["compared", "random"])
def test_what_is_read_from_disk_is_dropped_again(
    tmp_path: Path, fill: sparse.Fill | None, form: Form
) -> None:
    """Masters that are compared go through the page cache, all else past it."""
    source = tmp_path / "in"
    shapes = {"a": (2048, 1024), "b": (1500, 1000), "c": (9,)}
    sparse.write(source, sparse.Model("m", shapes, 2, 2), fill)
    paths = list(source.iterdir())
    if make_cold(paths) > 0:
        pytest.skip("pages cannot be dropped here")
    convert(source, tmp_path / "u", ConvertOptions(form=form, dtype="bf16" if form == "weights" else "fp32"))
    assert resident_share(paths) < 0.02


def test_a_cold_file_that_is_copied_whole_comes_last(tmp_path: Path) -> None:
    """Its weights are compared first, and copied from the page cache."""
    path = tmp_path / "model.pt"
    path.write_bytes(bytes(1 << 20))
    if make_cold([path]) > 0:
        pytest.skip("pages cannot be dropped here")
    whole, begin = OutputFile(path.name, (Range(0, 0, 1 << 20),)), OutputFile("b", (Range(0, 0, 9),))
    plan = (whole, begin, OutputLink("l", path.name))
    for kept in ([whole], []):
        fd = os.open(tmp_path, os.O_RDONLY)
        last: list[OutputFile] = []
        local = SourceFiles(fd, [path.name], [identity_of(path.stat())])
        assert [*without_cold_copies(plan, local, last), *last] == [*plan[len(kept) :], *kept]
        assert last == kept
        os.close(fd)
        make_warm([path])


def test_the_largest_come_first_and_all_come_once() -> None:
    header = Header("universal", "strict", 0, 2, 1, "", None, 0, ())
    sizes = [10, 500, 3, 900, 500, 20]
    out = io.BytesIO()
    writer = PlanWriter(out, header, [])
    for i, size in enumerate(sizes):
        writer.add(OutputFile(f'w"{i}","n":9999,"p":', (Literal(b"x" * size),)))
    writer.add(OutputLink("l", "w"))
    writer.add(OutputCheck("c", (), ()))
    trailer = writer.finish()
    out.seek(0)
    plan = PlanReader(out)
    found = list(outputs.large_first(out, plan, 500))
    assert [o.nbytes for o in found if isinstance(o, OutputFile)] == [900, 500, 500, 10, 3, 20]
    assert [type(o) for o in found[6:]] == [OutputLink, OutputCheck]
    assert plan.trailer == trailer


def test_no_room_is_said_before_writing(tmp_path: Path) -> None:
    sparse.write(tmp_path / "in", sparse.Model("m", {"a": (1024, 1024)}, 2, 2), sparse.random_fill(1))
    with pytest.raises(NoSpaceError):
        convert(tmp_path / "in", tmp_path / "u", ConvertOptions(reserve_bytes=1 << 60))
