"""Extent cloning on a real XFS: the same bytes, almost no new disk, nothing copied but headers and edges."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckptd.base import extents, files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from tests.support.synthetic import Shapes, write_stage3, write_stage12
from tests.support.weights import large_save, read_folder
from tests.unit.conversion.test_convert_children import tree
from tests.unit.formats.zero.test_zero_ranges import check

pytestmark = pytest.mark.root
GROUPS: list[Shapes] = [{f"w{i}": (512, 256) for i in range(8)}, {"norm": (1000,), "odd": (7,)}]


def used_bytes(mounted: Path) -> int:
    os.sync()
    status = os.statvfs(mounted)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.mark.parametrize("stage", [2, 3])
def test_conversion_clones_extents(xfs: Path, tmp_path: Path, stage: int) -> None:
    write = write_stage3 if stage == 3 else write_stage12
    made = write(xfs / "save", GROUPS, 2)
    for path in made.folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    before = used_bytes(xfs)
    report = convert(made.folder, xfs / "universal", ConvertOptions(compat="superset", verify=True))
    grown = used_bytes(xfs) - before
    check(made, xfs / "universal", GROUPS, bare=False)
    assert report.bytes_cloned > 0.9 * report.bytes
    assert grown < 0.2 * report.bytes
    with files.opened_dir(xfs / "universal") as fd:
        assert files.stat_beneath(fd, "ckptd.json") is not None
    again = convert(made.folder, xfs / "again", ConvertOptions(compat="superset"))
    assert tree(xfs / "again") == tree(xfs / "universal"), "bytes are a function of plan and alignment"
    assert again.plan_sha256 == report.plan_sha256
    copied = convert(_copy(made.folder, tmp_path / "save"), tmp_path / "universal", ConvertOptions())
    assert copied.bytes_cloned == 0 or _clones(tmp_path)
    check(made, tmp_path / "universal", GROUPS, bare=False)


def test_fp32_weights_clone_where_offsets_meet(xfs: Path, tmp_path: Path) -> None:
    """safetensors allows no gaps, so where the data begins is chosen for most bytes."""
    large_save(xfs / "save", 1_000_000, 6)
    os.sync()
    before = used_bytes(xfs)
    options = ConvertOptions(form="weights", verify=True)
    report = convert(xfs / "save", xfs / "w", options)
    assert report.bytes_cloned > 0.9 * report.bytes
    assert used_bytes(xfs) - before < 0.2 * report.bytes
    copied = convert(_copy(xfs / "save", tmp_path / "save"), tmp_path / "w", options)
    assert copied.bytes_cloned == 0 or _clones(tmp_path)
    assert read_folder(xfs / "w") == read_folder(tmp_path / "w")


def _copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def _clones(folder: Path) -> bool:
    one, two = folder / "probe1", folder / "probe2"
    one.write_bytes(bytes(8192))
    with one.open("rb") as source, two.open("wb") as target:
        return extents.clone_file(source.fileno(), target.fileno())


def test_the_reserve_does_not_stop_a_clone(xfs: Path) -> None:
    """Clones cost almost nothing, so P13's reserve is measured against what is really written."""
    groups: list[Shapes] = [{f"w{i}": (512, 512) for i in range(8)}]
    slack = 12 << 20  # XFS preallocates behind each file being written
    made = write_stage12(xfs / "save", groups, 2)
    os.sync()
    with files.opened_dir(xfs) as fd:
        free = extents.free_bytes(fd)
    report = convert(made.folder, xfs / "universal", ConvertOptions(reserve_bytes=free - slack))
    assert report.bytes_cloned > slack
