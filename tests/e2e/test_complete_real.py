"""What makes a real save whole beside the names of its shards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.core.completeness.judge import State
from ckptd.core.model.other_layouts import NOTHING_DECLARED
from tests.e2e.harness import Node
from tests.e2e.kill_savers import verdicts
from tests.support.real import MODULE, TAG, Recipe, copy_of, expect, launch, prepare, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
EXPERTS = Recipe(stage=2, world_size=2, moe=4, ep=2)
TWO, THREE = Recipe(stage=2, world_size=2), Recipe(stage=3, world_size=2)
STAGE_0 = Recipe(stage=0, world_size=2)
expect(THREE, EXPERTS, STAGE_0)
SWITCHES = {
    "2 to 3": (TWO, THREE),
    "3 to 2": (THREE, TWO),
    "bf16 to fp32": (TWO, Recipe(stage=2, world_size=2, dtype="fp32")),
    "bf16 stage 2 to fp32 stage 3": (TWO, Recipe(stage=3, world_size=2, dtype="fp32")),
}


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that were repeated into the folder of another layout's run, under the same tag."""
    work = tmp_path_factory.mktemp("switched")
    jobs: list[dict[str, Any]] = []
    for at in (0, 1):  # one run after the other
        for name, recipes in SWITCHES.items():
            jobs.append(
                {
                    "out": str(work / name),
                    "recipe": asdict(recipes[at]),
                    "load": None,
                    "load_optimizer_states": True,
                    "tag": None,
                    "steps": 2,
                    "save_at": (2,),
                    "init_seed": 7 + at,
                    "losses": str(work / f"{name}.{at}.json"),
                }
            )
    launch(2, jobs, work, MODULE)
    return work


def ckptd(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptd", *map(str, arguments)]
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=wide)


def node_of(save_dir: Path, root: Path) -> Node:
    """A node on which this was saved."""
    shutil.copytree(save_dir, root / "nvme" / "run")
    return Node(root)


def resume(here: Node) -> str:
    done = ckptd("resume", here.job_file)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def inspect(path: Path) -> tuple[int, dict[str, Any]]:
    done = ckptd("inspect", path, "--json")
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)["checkpoints"][0]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_run_repeated_with_another_layout_is_uploaded_and_resumed(
    name: str, switched: Path, tmp_path: Path
) -> None:
    save_dir = copy_of(switched / name, tmp_path / "save")
    last = SWITCHES[name][1]
    code, seen = inspect(save_dir / TAG)
    assert (code, seen["state"]) == (0, "complete")
    assert (seen["zero_stage"], seen["dtype"]) == (last.stage, last.dtype)
    assert any("stale" in note for note in seen["notes"])

    assert ckptd("convert", save_dir / TAG, tmp_path / "made").returncode == 0
    alone = tmp_path / "alone"
    shutil.copytree(save_dir / TAG, alone)
    for path in alone.iterdir():
        is_new = path.stat().st_mtime_ns > written_until(switched / f"{name}.0.json")
        if not is_new:
            path.unlink()
    assert ckptd("convert", alone, tmp_path / "expected").returncode == 0
    assert contents(tmp_path / "made") == contents(tmp_path / "expected")

    here = node_of(save_dir, tmp_path / "node")
    assert here.comes_to_rest(), here.log.read_text()[-2000:]
    files = sorted(p.name for p in (save_dir / TAG).iterdir())
    shutil.rmtree(here.save_dir)
    assert resume(here) == str(here.save_dir / TAG)
    assert sorted(p.name for p in (here.save_dir / TAG).iterdir()) == files
    assert inspect(here.save_dir / TAG)[1]["zero_stage"] == last.stage


def written_until(path: Path) -> int:
    return path.stat().st_mtime_ns


def contents(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*.pt") if "model_states" not in p.name)
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    """A save of stage 3 as NVMe offload leaves it: the states lie beside the shards."""
    prepare([THREE])
    folder = copy_of(save_dir_of(THREE), tmp_path / "save") / TAG
    for rank, path in enumerate(optimizer_shards(folder)):
        shard = torch.load(path, weights_only=False)
        inner, place = shard["optimizer_state_dict"], folder / "offloaded_tensors" / f"rank{rank:02d}"
        states = inner["optimizer_state_dict"]["state"]
        place.mkdir(parents=True)
        offload(shard)
        for i, tensor in enumerate(inner["fp32_flat_groups"]):
            inner["fp32_flat_groups"][i] = swap_out(tensor, place / f"{i}_28.tensor.swp")
            for key in ("exp_avg", "exp_avg_sq"):
                states[i][key] = swap_out(states[i][key], place / f"{key}-{i}_28.tensor.swp")
        rewrite(shard, path)
    return folder


def optimizer_shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*optim_states.pt"))


def rewrite(shard: dict[str, Any], path: Path) -> None:
    """In the time of its save: shards that were written far apart look like two saves."""
    before = path.stat()
    torch.save(shard, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def offload(shard: dict[str, Any]) -> None:
    zero = shard["ds_config"]["zero_optimization"]
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": "/nvme"}


def swap_out(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    raw = tensor.detach().contiguous().numpy().tobytes()
    path.write_bytes(raw + bytes(-len(raw) % 1024))
    left = torch.empty(0)
    left.ds_id = path.name.removesuffix(".tensor.swp")
    return left


def test_swapped_tensors_are_part_of_a_save(swapped: Path) -> None:
    assert inspect(swapped)[1]["state"] == "complete"
    ranks = [swapped / "offloaded_tensors" / f"rank{d:02d}" for d in (0, 1)]
    cut = ranks[1] / "exp_avg-0_28.tensor.swp"
    os.truncate(cut, 100)
    assert f"{cut.relative_to(swapped)} has 100 bytes" in reason(swapped)
    cut.unlink()
    assert "offloaded_tensors/rank01 lacks exp_avg-0_28.tensor.swp" in reason(swapped)
    shutil.rmtree(ranks[1])
    assert "offloaded_tensors/rank01 is not there" in reason(swapped)
    assert "rank_1_mp_rank_00_optim_states.pt holds 0 of " in reason(swapped)
    shutil.rmtree(swapped / "offloaded_tensors")
    assert "offloaded_tensors/rank00 is not there" in reason(swapped)


def test_swapped_tensors_are_converted(swapped: Path, tmp_path: Path) -> None:
    """From the disk and from a remote, as if they lay in the shards: the real saves are `make engines`."""
    for form in ("universal", "weights"):
        made, expected = tmp_path / form, tmp_path / f"{form} of shards"
        assert ckptd("convert", "--verify", "--form", form, swapped, made).returncode == 0
        assert ckptd("convert", "--form", form, save_dir_of(THREE) / TAG, expected).returncode == 0
        assert contents(made) == contents(expected)
        assert forms(made) == forms(expected)
    lost = swapped / "offloaded_tensors" / "rank01" / "exp_avg-0_28.tensor.swp"
    said = lost.read_bytes()
    lost.unlink()
    refused = ckptd("convert", swapped, tmp_path / "u")
    assert (refused.returncode, str(lost.relative_to(swapped)) in refused.stderr) == (65, True)
    lost.write_bytes(said)

    here = node_of(swapped.parent, tmp_path / "node")
    assert here.comes_to_rest(), here.log.read_text()[-2000:]
    done = ckptd("convert", here.nas.as_uri(), tmp_path / "from the remote")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "from the remote") == contents(tmp_path / "universal")


def forms(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


def test_a_save_without_its_swapped_tensors_is_not_committed(swapped: Path, tmp_path: Path) -> None:
    shutil.rmtree(swapped / "offloaded_tensors")
    here = node_of(swapped.parent, tmp_path / "node")
    here.once()
    assert here.commits() == {}
    assert not list(here.nas.rglob("*optim_states.pt"))


def reason(folder: Path) -> str:
    code, seen = inspect(folder)
    assert (code, seen["is_complete"]) == (65, False)
    return str(seen["reason"])


def test_empty_folders_of_ranks_with_nothing_to_swap_are_restored(tmp_path: Path) -> None:
    """Partitions under 1 MiB stay in the shards; DeepSpeed loads no save without the rank's folder."""
    prepare([THREE])
    folder = copy_of(save_dir_of(THREE), tmp_path / "save") / TAG
    for path in optimizer_shards(folder):
        shard = torch.load(path, weights_only=False)
        offload(shard)
        rewrite(shard, path)
    assert "offloaded_tensors/rank00 is not there" in reason(folder)
    ranks = [folder / "offloaded_tensors" / f"rank{d:02d}" for d in (0, 1)]
    for rank in ranks:
        rank.mkdir(parents=True)
    assert inspect(folder)[1]["state"] == "complete"
    assert ckptd("convert", folder, tmp_path / "made").returncode == 0
    assert ckptd("convert", "--form", "weights", folder, tmp_path / "weights").returncode == 0

    here = node_of(folder.parent, tmp_path / "node")
    assert here.comes_to_rest(), here.log.read_text()[-2000:]
    again = tmp_path / "again"
    restored = ckptd("restore", here.job_file, "--to", again)
    assert restored.returncode == 0, restored.stderr
    assert all((again / rank.relative_to(folder.parent)).is_dir() for rank in ranks)
    shutil.rmtree(here.save_dir)
    given = [Path(resume(here)) / rank.relative_to(folder) for rank in ranks]
    assert all(rank.is_dir() for rank in given)
    # a folder that lacks one is not given out as it is
    given[1].rmdir()
    resume(here)
    assert all(rank.is_dir() for rank in given)


def test_experts_of_releases_whose_model_states_do_not_tell_the_stage(tmp_path: Path) -> None:
    """DeepSpeed 0.12.6 to 0.19.1: their model states have no ds_config, ds_version or param_shapes."""
    prepare([EXPERTS])
    folder = copy_of(save_dir_of(EXPERTS), tmp_path / "save") / TAG
    for path in folder.glob("mp_rank_*_model_states.pt"):
        shard = torch.load(path, weights_only=False)
        for key in ("ds_config", "ds_version", "param_shapes"):
            shard.pop(key, None)
        rewrite(shard, path)
    code, seen = inspect(folder)
    assert (code, seen["state"], seen["zero_stage"]) == (0, "complete", 2)
    refused = ckptd("convert", folder, tmp_path / "made")
    assert refused.returncode == 65
    assert "has no param_shapes" in refused.stderr
    assert "The ZeRO form is safe" in refused.stderr
    here = node_of(folder.parent, tmp_path / "node")
    assert here.comes_to_rest(), here.log.read_text()[-2000:]
    shutil.rmtree(here.save_dir)
    assert inspect(Path(resume(here)))[1]["state"] == "complete"


def test_a_save_that_is_written_in_the_background_is_complete_with_its_last_byte(tmp_path: Path) -> None:
    """As the decoupled engine's: file after file, each in blocks, `latest` still at the save before."""
    prepare([THREE])
    whole, save_dir = save_dir_of(THREE) / TAG, tmp_path / "save"
    (save_dir / TAG).mkdir(parents=True)
    (save_dir / "latest").write_text("global_step1")
    paths = sorted(whole.iterdir(), key=lambda path: (path.name.split("_")[3], "optim" in path.name))
    for path in paths:
        data = path.read_bytes()
        for length in (0, len(data) // 2, len(data) - 1, len(data)):
            (save_dir / TAG / path.name).write_bytes(data[:length])
            is_last = path == paths[-1] and length == len(data)
            verdict = verdicts(save_dir, NOTHING_DECLARED).get(TAG)
            assert (verdict is not None and verdict.state is State.COMPLETE) is is_last, (path.name, length)


def test_a_save_without_zero_is_protected_and_has_no_universal_form(tmp_path: Path) -> None:
    """Stage 0 keeps the optimizer in the model states, which any number of data-parallel ranks loads."""
    prepare([STAGE_0])
    here = node_of(save_dir_of(STAGE_0), tmp_path / "node")
    assert here.once() == 0, here.log.read_text()[-2000:]
    assert any(name.startswith(f"{TAG}~") for name in here.commits())
    code, seen = inspect(here.save_dir / TAG)
    assert (code, seen["state"], seen["grid"]["layout"]) == (0, "complete", "deepspeed-stage-0")
    wanted = (here.save_dir / TAG / "mp_rank_00_model_states.pt").read_bytes()
    torn = tmp_path / "torn" / TAG
    shutil.copytree(here.save_dir / TAG, torn)
    os.truncate(torn / "mp_rank_00_model_states.pt", len(wanted) - 1)
    assert not inspect(torn)[1]["is_complete"]
    shutil.rmtree(here.save_dir)
    path = Path(resume(here))
    assert (path / "mp_rank_00_model_states.pt").read_bytes() == wanted
    assert (here.save_dir / "latest").read_text() == TAG
    refused = ckptd("restore", here.job_file, TAG, "--form", "universal", "--to", tmp_path / "form")
    assert (refused.returncode, "without ZeRO (stage 0)" in refused.stderr) == (65, True), refused
