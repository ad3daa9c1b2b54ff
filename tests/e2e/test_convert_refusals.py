"""What has no universal form, or is no single whole save: one sentence, exit 65, nothing left behind.

All on real checkpoints, spoiled byte by byte where training never makes the defect.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import CkptdError
from tests.e2e.test_convert_legacy import saved_with
from tests.support import stock
from tests.support.real import REPOSITORY, TAG, Recipe, copy_of, expect, prepare, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

STAGE_2 = Recipe(stage=2, world_size=2)
STAGE_3 = Recipe(stage=3, world_size=2)
LONGER = Recipe(stage=2, world_size=2, save_at=(2, 3))
SGD = Recipe(stage=2, world_size=2, optimizer="sgd", save_at=(2, 3))
expect(LONGER, SGD)
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module", autouse=True)
def saves() -> None:
    prepare([STAGE_2, STAGE_3, LONGER, SGD])


def refused(folder: Path, *words: str) -> None:
    """`ckptd convert` says so in one sentence, and leaves its working folder's parent as it was."""
    before = sorted(p.name for p in folder.parent.iterdir())
    with pytest.raises(CkptdError) as caught:
        convert(folder, folder.parent / "u", ConvertOptions(low_priority=False))
    assert caught.value.exit_code == 65
    for word in words:
        assert word in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert sorted(p.name for p in folder.parent.iterdir()) == before


def tag_of(recipe: Recipe, tmp_path: Path) -> Path:
    return copy_of(save_dir_of(recipe) / TAG, tmp_path / "tag")


def edit(path: Path, after: bytes, old: bytes, new: bytes) -> None:
    """Replace the first `old` that follows `after` with as many other bytes."""
    data = bytearray(path.read_bytes())
    at = data.index(after)
    place = data.index(old, at + len(after))
    assert place - at < 200
    assert len(new) == len(old)
    data[place : place + len(old)] = new
    path.write_bytes(data)


def rank_lost(folder: Path) -> None:
    (folder / OPTIM.format(1)).unlink()


def rank_0_lost(folder: Path) -> None:
    (folder / OPTIM.format(0)).unlink()


def model_lost(folder: Path) -> None:
    (folder / MODEL).unlink()


def other_version(folder: Path) -> None:
    edit(folder / OPTIM.format(1), b"ds_version", b"0.19.8", b"0.19.7")


def other_world(folder: Path) -> None:
    edit(folder / OPTIM.format(1), b"partition_count", b"K\x02", b"K\x04")


def model_of_another_world(folder: Path) -> None:
    edit(folder / MODEL, b"dp_world_size", b"K\x02", b"K\x04")


def names_of_more_ranks(folder: Path) -> None:
    """Shards of ranks 0 and 2: the names, not the metadata, are wrong."""
    (folder / OPTIM.format(1)).rename(folder / OPTIM.format(2))


def mapping_beyond(folder: Path) -> None:
    edit(folder / OPTIM.format(1), b"start", b"K\x00", b"K\x09")


def parameter_unknown(folder: Path) -> None:
    edit(folder / OPTIM.format(0), b"param_slice_mappings", b"embed.tok.weight", b"embed.t0k.weight")


def parameter_without_shard(folder: Path) -> None:
    edit(folder / MODEL, b"param_shapes", b"embed.tok.weight", b"embed.t0k.weight")


DEFECTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a rank is missing": (rank_lost, (OPTIM.format(1),)),
    "rank 0 is missing": (rank_0_lost, (OPTIM.format(0),)),
    "no model states": (model_lost, (MODEL, "missing")),
    "another DeepSpeed": (other_version, ("0.19.7", "0.19.8", "two saves")),
    "another world size": (other_world, ("partition_count", "two saves")),
    "the model says another world size": (model_of_another_world, ("2 ranks", "of 4")),
    "file names of other ranks": (names_of_more_ranks, (OPTIM.format(1),)),
    "a mapping leaves its buffer": (mapping_beyond, (OPTIM.format(1),)),
    "a mapped parameter without a shape": (parameter_unknown, ("embed.t0k.weight", "param_shapes")),
    "a parameter that no shard maps": (parameter_without_shard, ("param_shapes",)),
}


@pytest.mark.parametrize("defect", list(DEFECTS))
def test_defects_are_named(tmp_path: Path, defect: str) -> None:
    spoil, words = DEFECTS[defect]
    folder = tag_of(STAGE_2, tmp_path)
    spoil(folder)
    refused(folder, *words)


@pytest.mark.parametrize("recipe", [LONGER, SGD], ids=["the step", "no step: the learning rate"])
def test_a_tag_saved_twice_of_which_one_shard_is_older(tmp_path: Path, recipe: Recipe) -> None:
    folder = copy_of(save_dir_of(recipe) / "global_step3", tmp_path / "tag")
    shutil.copyfile(save_dir_of(recipe) / TAG / OPTIM.format(1), folder / OPTIM.format(1))
    refused(folder, OPTIM.format(1), "two saves")


def test_the_optimizer_is_of_another_stage(tmp_path: Path) -> None:
    folder = tag_of(STAGE_3, tmp_path)
    for d in range(2):
        shutil.copyfile(save_dir_of(STAGE_2) / TAG / OPTIM.format(d), folder / OPTIM.format(d))
    refused(folder, "missing")
    shutil.copyfile(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", folder / MODEL)
    refused(folder, "stage 2", "stage 3")


def test_elastic_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = {"zero_optimization": {"elastic_checkpoint": True}}
    (source,) = saved_with(setting, [STAGE_2], monkeypatch)
    refused(copy_of(source, tmp_path / "tag"), "elastic checkpoint")


def test_only_swap_files_remain(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    (folder / "offloaded_tensors" / "rank00").mkdir(parents=True)
    (folder / "offloaded_tensors" / "rank00" / "0_exp_avg.tensor.swp").write_bytes(bytes(4096))
    refused(folder, "NVMe")
    done = ckptd(folder, tmp_path / "u")
    assert done.returncode == 65, done.stderr
    assert "NVMe" in done.stderr


def test_patterns_that_match_nothing(tmp_path: Path) -> None:
    """DeepSpeed's own information, one pattern edited; --no-strict converts it all the same."""
    folder = tag_of(STAGE_2, tmp_path)
    module = folder / MODEL
    script = (
        "import sys, torch; p = sys.argv[1]; d = torch.load(p, weights_only=False); "
        "d['universal_checkpoint_info']['tp_replicated_parameter_patterns'] = ['.*norm_of_old.*']; "
        "torch.save(d, p)"
    )
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", script, str(module)], check=True, env=environment, timeout=120)
    refused(folder, "norm_of_old")
    convert(folder, tmp_path / "u", ConvertOptions(strict=False))


def ckptd(*arguments: str | Path | bytes) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "convert", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize(
    "name", [b"run+1", b"with spaces", b"line\nbreak", b"caf\xe9", b"[a-z]*(x)?", "größe".encode(), b"-x"]
)
def test_output_paths_may_have_any_characters(tmp_path: Path, name: bytes) -> None:
    """The stock converter fails on `+` and writes `latest_universal` inside with a trailing slash."""
    parent = os.fsencode(tmp_path) + b"/" + name
    os.mkdir(parent)
    slash = b"/" if len(name) % 2 else b""
    done = ckptd(save_dir_of(STAGE_2) / TAG, parent + b"/" + name + slash)
    assert done.returncode == 0, done.stderr
    assert set(os.listdir(parent)) == {b"latest_universal", name}
    with open(parent + b"/latest_universal", "rb") as pointer:
        assert pointer.read() == name
    assert os.path.isfile(parent + b"/" + name + b"/zero/embed.tok.weight/fp32.pt")


@pytest.mark.parametrize("inside", ["u", "deep/er/u"])
def test_no_output_inside_the_source(tmp_path: Path, inside: str) -> None:
    folder = tag_of(STAGE_2, tmp_path)
    (folder / inside).parent.mkdir(parents=True, exist_ok=True)
    before = sorted(folder.rglob("*"))
    done = ckptd(folder, folder / inside)
    assert done.returncode == 2, done.stderr
    assert "inside" in done.stderr
    assert sorted(folder.rglob("*")) == before


def rank_0_alone(tmp_path: Path) -> Path:
    """What DeepSpeed of issue 7546 wrote: every optimizer shard, model states of rank 0."""
    folder = tag_of(STAGE_3, tmp_path)
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    return folder


def test_stage_3_with_model_states_of_rank_0_alone(tmp_path: Path) -> None:
    folder = rank_0_alone(tmp_path)
    whole = save_dir_of(STAGE_3) / TAG
    stock.convert([(whole, tmp_path / "stock")])
    (tmp_path / "stock" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    report = convert(folder, tmp_path / "strict", ConvertOptions(compat="strict", verify=True))
    assert "rank 0 alone" in " ".join(report.notes)
    assert stock.differences([(tmp_path / "stock", tmp_path / "strict")]) == [[]]
    convert(folder, tmp_path / "superset", ConvertOptions(compat="superset"))
    convert(whole, tmp_path / "other", ConvertOptions(compat="superset"))
    for path in (tmp_path / "other" / "zero").rglob("*.pt"):
        name = path.relative_to(tmp_path / "other")
        assert (tmp_path / "superset" / name).read_bytes() == path.read_bytes()


def test_such_a_save_still_needs_every_optimizer_shard(tmp_path: Path) -> None:
    folder = rank_0_alone(tmp_path)
    (folder / OPTIM.format(1)).unlink()
    refused(folder, OPTIM.format(1))


def test_the_daemon_still_calls_it_incomplete(tmp_path: Path) -> None:
    """Nothing in such a save tells a file that was never written from one that was lost."""
    folder = rank_0_alone(tmp_path)
    command = [sys.executable, "-m", "ckptd", "inspect", str(folder), "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 65
    (seen,) = json.loads(done.stdout)["checkpoints"]
    assert seen["state"] == "incomplete"
    assert "model shard of rank 1" in seen["reason"]
