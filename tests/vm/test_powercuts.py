"""A disk loses what no flush covered, and the rig of power cuts finds a flush that is left out."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.known_saves import is_no_universal
from tests.vm.defects import DEFECTS, plant
from tests.vm.disks import BLOCK_BYTES, Disk
from tests.vm.image import ROOT
from tests.vm.trainer import save_of


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Sixty-four empty blocks."""
    path = tmp_path / "image"
    path.write_bytes(bytes(64 * BLOCK_BYTES))
    return path


def test_a_disk_reads_what_was_written_last_and_a_cut_keeps_what_was_flushed(image: Path) -> None:
    """Unaligned writes too."""
    disk = Disk(image)
    disk.write(BLOCK_BYTES - 3, b"across")
    assert disk.read(BLOCK_BYTES - 5, 10) == b"\0\0across\0\0"
    assert not any(image.read_bytes())
    disk.flush()
    disk.write(BLOCK_BYTES - 1, b"!")
    assert disk.read(BLOCK_BYTES - 3, 6) == b"ac!oss"
    disk.cut(random.Random(1), 0.0)
    assert image.read_bytes()[BLOCK_BYTES - 3 :][:6] in (b"across", b"ac!oss")
    assert disk.read(60 * BLOCK_BYTES, 10**9) == bytes(4 * BLOCK_BYTES)


def test_a_cut_loses_keeps_and_tears_blocks(image: Path) -> None:
    """Each block by itself, in one of its versions."""
    seen = set()
    torn = 0
    for seed in range(40):
        disk = Disk(image)
        for number in range(64):
            for version in (b"1", b"2"):
                disk.write(number * BLOCK_BYTES, version * BLOCK_BYTES)
        lost = disk.cut(random.Random(seed), 0.02)
        assert lost.lost + lost.kept == 64
        torn += lost.torn
        data = image.read_bytes()
        seen |= {data[n * BLOCK_BYTES :][:1] for n in range(64)}
        image.write_bytes(bytes(len(data)))
    assert seen == {b"\0", b"1", b"2"}
    assert torn > 0


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_each_defect_still_fits(name: str, tmp_path: Path) -> None:
    """A text that ckptd no longer has would be noticed by the next run of hours only."""
    planted = plant(name, tmp_path / "defect") / "ckptd"
    for file, _ in DEFECTS[name]:
        assert (planted / file).read_bytes() != (ROOT / "ckptd" / file).read_bytes()


@pytest.mark.parametrize("torn", [b"", bytes(100_000)])
def test_a_universal_form_whose_bytes_were_lost_is_none(torn: bytes) -> None:
    """As a power cut leaves a file: without its bytes, or with zeros in their place."""
    save = save_of(1, 1)
    contents = {f"zero/{name}/{state}.pt": torn for name, state in save.expected}
    assert is_no_universal(contents, save)


def cuts(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A short run."""
    command = [sys.executable, "-m", "tests.vm.powercuts", "--minutes", "8", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=700)


@pytest.mark.full
@pytest.mark.root
@pytest.mark.faults
def test_documents_that_are_not_flushed_are_found() -> None:
    """COMMITs without bytes, seen right after a cut; with every flush in its place nothing is wrong."""
    done = cuts("--seed", "5", "--cuts", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    done = cuts("--seed", "5", "--cuts", "12", "--defect", "documents")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VIOLATION" in done.stdout
