"""A checkpoint is data: no pickle runs code, stalls a batch or eats the machine (P14)."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.core.model.facts import Archive
from ckptd.errors import CkptdError
from ckptd.formats.torchfile.values import Global, Inert
from tests.attacks.hostile import OPTIM, pickles, write_hostile
from tests.support.synthetic import Shapes, Shard, model_root, write_stage12

NAMES = list(pickles(Path("/nowhere")))
RUN = [
    "os.system",
    "os.system beside data",
    "subprocess",
    "eval",
    "exec",
    "inst",
    "obj",
    "stack global",
]
"""Those whose code runs in whoever unpickles them with plain pickle; the others stall, lie or fail there."""
ONE: list[Shapes] = [{"w": (8,)}]


@pytest.mark.parametrize("name", RUN)
def test_the_canary_shows_code_that_runs(tmp_path: Path, name: str) -> None:
    """Plain pickle falls for it: that nothing of it is seen elsewhere means something."""
    canary = tmp_path / "canary"
    (tmp_path / "hostile").write_bytes(pickles(canary)[name])
    script = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "hostile")], check=False, timeout=60)
    assert canary.exists()


@pytest.mark.parametrize("name", NAMES)
def test_inspection_survives(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    folder = tmp_path / "tag"
    write_hostile(folder, pickles(canary)[name])
    Shard().save(folder / "mp_rank_00_model_states.pt", model_root(ONE, 1, 2, 7))
    started = time.monotonic()
    hostile, innocent = inspect_files(folder, [OPTIM, "mp_rank_00_model_states.pt"], timeout_seconds=60)
    assert time.monotonic() - started < 60
    assert hostile.archive is Archive.ZIP, "its zip is whole, so it ships raw"
    assert hostile.fingerprint
    assert hostile.facts is None or hostile.facts.optimizer_step is None
    assert innocent.facts is not None
    assert innocent.facts.global_steps == 7, "the batch goes on behind it"
    assert not canary.exists()


@pytest.mark.parametrize("name", NAMES)
def test_conversion_refuses(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    folder = tmp_path / "tag"
    write_hostile(folder, pickles(canary)[name])
    Shard().save(folder / "mp_rank_00_model_states.pt", model_root(ONE, 1, 2, 7))
    with pytest.raises(CkptdError) as caught:
        convert(folder, tmp_path / "out", ConvertOptions())
    assert caught.value.exit_code == 65
    assert caught.value.message
    assert "Traceback" not in str(caught.value)
    assert not canary.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tag"]


def test_code_is_not_passed_on_inside_a_valid_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss scaler that is a call would run when the trainer loads our optimizer_state.pt."""
    hostile = Global("torch.hub", "load")

    def change(rank: int, inner: dict[str, Any]) -> None:
        inner["loss_scaler"] = Inert(hostile, ("somewhere",))

    monkeypatch.setattr(Shard, "writable", Shard.writable | {hostile})
    write_stage12(tmp_path / "tag", ONE, 1, change=change)
    with pytest.raises(CkptdError, match=r"torch\.hub\.load"):
        convert(tmp_path / "tag", tmp_path / "out", ConvertOptions())
    assert not (tmp_path / "out").exists()


def test_a_pickle_that_stalls_costs_only_itself(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    write_hostile(folder, b"\x80\x02" + b"N0" * (30 << 20) + b"N.")
    Shard().save(folder / "mp_rank_00_model_states.pt", model_root(ONE, 1, 2, 7))
    hostile, innocent = inspect_files(folder, [OPTIM, "mp_rank_00_model_states.pt"], timeout_seconds=3)
    assert hostile.archive is Archive.ZIP
    assert hostile.reason
    assert hostile.facts is None
    assert innocent.facts is not None


def test_memory_stays_inside_the_limit(tmp_path: Path) -> None:
    """Every opcode makes an object of 64 bytes and more; the child is bounded, the parent untouched."""
    folder = tmp_path / "tag"
    write_hostile(folder, b"\x80\x04" + b"\x8f" * (60 << 20) + b".")
    before = _own_rss_bytes()
    (found,) = inspect_files(folder, [OPTIM], timeout_seconds=60)
    assert found.facts is None
    assert found.reason
    assert _own_rss_bytes() - before < 256 << 20


def _own_rss_bytes() -> int:
    pages = int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_nothing_but_the_folder_is_written(tmp_path: Path) -> None:
    """The child cannot write a file even if it wanted to: RLIMIT_FSIZE is 0 there."""
    folder = tmp_path / "tag"
    write_hostile(folder, pickle.dumps({"x": struct.pack("<q", 1)}, 3))
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    inspect_files(folder, [OPTIM])
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
