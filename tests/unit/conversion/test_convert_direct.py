"""Writing past the page cache gives the same bytes, whatever the pieces, and gives way where it cannot."""

from __future__ import annotations

import errno
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
from ckptd.conversion.engine.writer import DirectWriter
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.parts import Literal, Range
from ckptd.conversion.plan import Header, OutputCheck, OutputFile, OutputLink, PlanReader, PlanWriter
from ckptd.conversion.reader import SourceFiles
from ckptd.errors import NoSpaceError, SourceChanged
from tests.unit.conversion.test_convert_children import tree


def _write(tmp_path: Path, seed: int) -> tuple[bytes, bytes]:
    """A random sequence of literals and source ranges: what was meant, what is on disk."""
    generator = random.Random(seed)
    source = generator.randbytes(100_000)
    (tmp_path / "source").write_bytes(source)
    meant = b""
    with (tmp_path / "source").open("rb") as stream, (tmp_path / "out").open("w+b") as out:
        writer = DirectWriter(20_000)  # 16384: four blocks
        pieces = [
            (generator.random() < 0.3, generator.randrange(99_000), generator.randrange(40_000))
            for _ in range(generator.randrange(1, 12))
        ]
        sizes = [n if literal else min(n, 100_000 - at) for literal, at, n in pieces]
        direct = writer.begin(out.fileno(), sum(sizes))
        if not direct:
            pytest.skip("no O_DIRECT here")
        for (literal, at, _), n in zip(pieces, sizes, strict=True):
            if literal:
                writer.put(b"L" * n)
                meant += b"L" * n
                continue
            done = 0
            while done < n:
                step = min(writer.room(), n - done)
                writer.take(stream.fileno(), at + done, step)
                done += step
            meant += source[at : at + n]
        writer.finish()
    return meant, (tmp_path / "out").read_bytes()


@pytest.mark.parametrize("seed", range(12))
def test_any_pieces(tmp_path: Path, seed: int) -> None:
    meant, written = _write(tmp_path, seed)
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
        writer = DirectWriter(8192)
        writer.begin(out.fileno(), 100)
        with pytest.raises(SourceChanged, match="90 bytes early"):
            writer.take(source.fileno(), 0, 100)


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


def test_what_is_read_from_disk_is_dropped_again(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shapes = {"a": (2048, 1024), "b": (1500, 1000), "c": (9,)}
    sparse.write(source, sparse.Model("m", shapes, 2, 2), sparse.random_fill(5))
    paths = list(source.iterdir())
    if make_cold(paths) > 0:
        pytest.skip("pages cannot be dropped here")
    convert(source, tmp_path / "u", ConvertOptions())
    assert resident_share(paths) < 0.2


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
