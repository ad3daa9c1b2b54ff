"""What only large checkpoints ask for: descriptors, holes, a forecast, progress for programs."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from bench import sparse
from ckptd.base import extents, files
from ckptd.base.extents import identity_of
from ckptd.conversion import reader
from ckptd.conversion.engine.executor import Tally, interior
from ckptd.conversion.engine.supervisor import convert, forecast
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.parts import Literal, Range
from ckptd.conversion.plan import OutputFile
from ckptd.conversion.reader import SourceFiles, descriptors
from ckptd.errors import DamagedError, RefusedError, SourceChanged, TargetExists
from ckptd.formats.torchfile.unpickler import unpickle
from ckptd.formats.zero import shards
from ckptd.maintenance.inspection import inspect_folder
from tests.support.real import REPOSITORY
from tests.support.synthetic import Shapes, write_stage3, write_stage12
from tests.unit.formats.zero.test_zero_ranges import convert_here

GROUPS: list[Shapes] = [{f"blocks.{i}.w": (40, 30) for i in range(6)}]
STAGE1 = sparse.Model("a", sparse.gpt(48, 2, 131), 1, 3)
STAGE3 = sparse.Model("b", sparse.llama(48, 2, 131, 96, 16), 3, 3)


def _numbered(folder: Path, count: int) -> tuple[list[str], list[tuple[int, ...]]]:
    names = [f"s{i}" for i in range(count)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(bytes([i]) * 10)
    return names, [identity_of((folder / name).stat()) for name in names]


def _opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_few_sources_are_open_at_once_and_those_in_use_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, identities = _numbered(tmp_path, 60)
    monkeypatch.setattr(reader, "descriptors", lambda: 0)
    before = _opened()
    with files.opened_dir(tmp_path) as fd:
        opened = SourceFiles(fd, names, identities)
        held = opened[0]
        for i in range(60):
            assert os.pread(opened[i], 10, 0) == bytes([i]) * 10
        assert os.pread(held, 10, 0) == bytes(10)
        assert _opened() <= before + 1 + 16 + 1
        assert [os.pread(f, 1, 0) for f in opened[58:60]] == [b"\x3a", b"\x3b"]
        del held, opened
    assert _opened() == before


def test_a_source_written_after_the_plan_is_noticed_at_once_and_when_opened(tmp_path: Path) -> None:
    names, identities = _numbered(tmp_path, 3)
    with files.opened_dir(tmp_path) as fd:
        opened = SourceFiles(fd, names, identities)
        (tmp_path / "s2").write_bytes(b"x" * 10)
        assert os.pread(opened[1], 1, 0) == b"\x01"
        with pytest.raises(SourceChanged, match="s2"):
            opened[2]
        with pytest.raises(SourceChanged, match="s2"):
            SourceFiles(fd, names, identities)
        (tmp_path / "s0").unlink()
        with pytest.raises(SourceChanged, match="s0"):
            SourceFiles(fd, names, identities)


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 700));"
        "from ckptd.conversion.reader import descriptors; print(descriptors(),"
        " resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert done.stdout.split("\n")[0] == "700 (700, 700)"
    assert descriptors() <= resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_more_ranks_than_descriptors_convert(tmp_path: Path) -> None:
    made = write_stage12(tmp_path / "in", GROUPS, 150, align=1)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100));"
        "from ckptd.cli.main import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "convert", str(made.folder), str(tmp_path / "few")]
    subprocess.run(command, check=True, capture_output=True, cwd=REPOSITORY)
    convert(made.folder, tmp_path / "many", ConvertOptions())
    for path in (tmp_path / "many").rglob("*.pt"):
        assert path.read_bytes() == (tmp_path / "few" / path.relative_to(tmp_path / "many")).read_bytes()


def test_holes_and_data_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as out:
        out.truncate(1 << 20)
        out.seek(1 << 18)
        out.write(b"x" * 4096)
    with path.open("rb") as stream:
        fd = stream.fileno()
        if path.stat().st_blocks * 512 >= 1 << 20:
            pytest.skip("this file system keeps no holes")
        assert extents.extent_at(fd, 100, 1 << 19) == (True, (1 << 18) - 100)
        assert extents.extent_at(fd, 100, 50) == (True, 50)
        assert extents.extent_at(fd, (1 << 18) + 10, 1 << 19) == (False, 4086)
        assert extents.extent_at(fd, 1 << 19, 1 << 19) == (True, 1 << 19)


@pytest.mark.parametrize("model", [STAGE1, STAGE3], ids=["stage1", "stage3"])
def test_sparse_checkpoints_are_like_real_ones(tmp_path: Path, model: sparse.Model) -> None:
    """bench.sparse: true CRCs (--verify reads them), holes instead of zeros, same plan as a filled one."""
    sparse.write(tmp_path / "holes", model)
    sparse.write(tmp_path / "filled", model, sparse.random_fill(3))
    report = convert(tmp_path / "holes", tmp_path / "u", ConvertOptions(verify=True))
    assert report.verified
    assert report.parameters == len(model.shapes)
    seen = forecast(tmp_path / "filled", tmp_path / "v")
    filled = convert(tmp_path / "filled", tmp_path / "v")
    assert (seen.files, seen.bytes, seen.parameters) == (filled.files, filled.bytes, filled.parameters)
    states = [
        {str(p.relative_to(tmp_path / to)): p.stat().st_size for p in (tmp_path / to / "zero").rglob("*.pt")}
        for to in "uv"
    ]
    assert states[0] == states[1]  # the models differ in type: random masters are not compared with any
    for count in (0, 1, 1000, 70_001):
        assert sparse.crc_of_zeros(count) == zlib.crc32(bytes(count))


def test_one_rule_says_what_clones() -> None:
    assert interior(0, 1 << 20, 4096) == (0, 1 << 20)
    assert interior(100, 1 << 20, 100 + 8192) == (4096, 1 << 20)
    assert interior(100, 1 << 20, 0) is None
    assert interior(0, 4096, 0) is None
    tally = Tally()
    tally.add(OutputFile("x", (Literal(b"h" * 4096), Range(0, 8192, 1 << 20), Range(1, 7, 1 << 20))))
    assert (tally.clonable, tally.misplaced) == (1 << 20, 1 << 20)


def test_a_forecast_is_what_the_conversion_does_and_writes_nothing(tmp_path: Path) -> None:
    made = write_stage3(tmp_path / "save" / "in", GROUPS, 2)
    seen = forecast(made.folder, tmp_path / "save" / "u")
    assert [p.name for p in (tmp_path / "save").iterdir()] == ["in"]
    report = convert(made.folder, tmp_path / "save" / "u", ConvertOptions())
    assert (seen.layout, seen.files, seen.bytes) == (report.layout, report.files, report.bytes)
    assert (seen.step, seen.parameters, seen.ranks, seen.zero_stage) == (7, 6, 2, 3)
    assert seen.plan_sha256 == report.plan_sha256
    assert seen.bytes_cloned + seen.bytes_copied == seen.bytes
    with pytest.raises(TargetExists):
        forecast(made.folder, tmp_path / "save" / "u")


def test_inspect_says_beforehand_whether_it_converts(tmp_path: Path) -> None:
    made = write_stage12(tmp_path / "in", GROUPS, 2)
    ahead = inspect_folder(made.folder).checkpoints[0].conversion
    assert ahead is not None
    assert ahead.converts
    report = convert(made.folder, tmp_path / "u", ConvertOptions())
    assert (ahead.bytes, ahead.files, ahead.layout) == (report.bytes, report.files, report.layout)
    (made.folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    refused = inspect_folder(made.folder).checkpoints[0].conversion
    assert refused is not None
    assert not refused.converts
    with pytest.raises(DamagedError) as error:
        convert(made.folder, tmp_path / "v", ConvertOptions())
    assert refused.reason == error.value.message


def _command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)


def test_progress_for_programs(tmp_path: Path) -> None:
    made = write_stage12(tmp_path / "in", GROUPS, 2)
    dry = _command("convert", made.folder, tmp_path / "u", "--dry-run", "--json")
    assert not (tmp_path / "u").exists()
    done = _command("convert", made.folder, tmp_path / "u", "--json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    keys = "phase bytes_done bytes_total files_done files_total bytes_cloned seconds eta_seconds"
    assert {tuple(line) for line in lines} == {tuple(keys.split())}
    assert lines[0]["phase"] == "planning"
    assert lines[-1]["phase"] == "publishing"
    report = json.loads(done.stdout)
    assert lines[-1]["bytes_done"] == lines[-1]["bytes_total"] == report["bytes"]
    assert lines[-1]["files_done"] == report["files"] == json.loads(dry.stdout)["files"]
    quiet = _command("convert", made.folder, tmp_path / "v")
    assert quiet.stderr == ""
    (made.folder / "mp_rank_00_model_states.pt").unlink()
    assert _command("convert", made.folder, tmp_path / "w", "--dry-run").returncode == 65


def test_a_random_plan_of_extents_is_copied_exactly(tmp_path: Path) -> None:
    """Holes, data and ends in any order: what `extent_at` says covers the range without a gap."""
    generator = random.Random(1)
    path = tmp_path / "f"
    with path.open("wb") as out:
        out.truncate(300_000)
        for _ in range(12):
            out.seek(generator.randrange(290_000))
            out.write(generator.randbytes(generator.randrange(1, 9000)))
    content = path.read_bytes()
    with path.open("rb") as stream:
        for _ in range(200):
            begin = generator.randrange(299_000)
            end = begin + generator.randrange(1, 300_001 - begin)
            at, seen = begin, b""
            while at < end:
                hole, length = extents.extent_at(stream.fileno(), at, end - at)
                assert length > 0
                seen += bytes(length) if hole else os.pread(stream.fileno(), length, at)
                at += length
            assert seen == content[begin:end]


def test_model_states_that_say_the_same_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal pickles of stage 3 ranks share one value; one rank that differs is still found."""
    read: list[str] = []

    def counting(data: bytes, name: str, *rest: Any) -> Any:
        read.append(name)
        return unpickle(data, name, *rest)

    monkeypatch.setattr(shards, "unpickle", counting)
    sparse.write(tmp_path / "in", sparse.Model("m", {"a": (5, 4), "b": (3,)}, 3, 6))
    convert_here(tmp_path / "in", tmp_path / "u", "superset")
    assert sum("model_states" in name for name in read) == 1
    assert sum("optim_states" in name for name in read) == 6
    sparse.write(tmp_path / "other", sparse.Model("m", {"a": (5, 4), "b": (4,)}, 3, 6))
    name = "zero_pp_rank_4_mp_rank_00_model_states.pt"
    (tmp_path / "other" / name).rename(tmp_path / "in" / name)
    with pytest.raises(RefusedError, match=r"rank_4.*two saves"):
        convert_here(tmp_path / "in", tmp_path / "v", "superset")
