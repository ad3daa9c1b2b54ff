"""A remote read by the programs that people have: transformers, safetensors, torch, by fsspec paths alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.support.hf import HfRun, prepare, tree_of
from tests.support.restore_scene import RestoreScene

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RUN = HfRun(stage=2)
TAG = "checkpoint-8"
SHARD = "global_step8/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> RestoreScene:
    """A real Trainer's checkpoint, committed as it is and as weights."""
    prepare([RUN])
    made = RestoreScene(tmp_path_factory.mktemp("scene"))
    shutil.copytree(tree_of(RUN) / TAG, made.save_dir / TAG)
    (made.save_dir / "tokenizer.json").write_text("{}")
    assert made.commit(TAG, 8).outcome == "committed"
    assert made.commit_weights(TAG, 8, root="global_step8").outcome == "committed"
    return made


def test_from_pretrained_reads_the_weights(scene: RestoreScene, tmp_path: Path) -> None:
    there = fsspec.filesystem("ckptd", url=str(scene.nas))
    there.get(f"{TAG}_weights-fp32", str(tmp_path / "model"), recursive=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - no mapping
            assert torch.equal(model.state_dict()[name], weights.get_tensor(name)), name


def test_torch_maps_a_shard_and_safetensors_opens_weights(scene: RestoreScene, tmp_path: Path) -> None:
    """Both want a file of this machine: fsspec's own cache fetches it, compared on the way."""
    cache = {"simplecache": {"cache_storage": str(tmp_path)}}
    tail = f"::file://{scene.nas}"
    shard = fsspec.open_local(f"simplecache::ckptd://{TAG}/{SHARD}{tail}", **cache)
    mapped = torch.load(shard, mmap=True, weights_only=False)
    with fsspec.open(f"ckptd://{TAG}/{SHARD}{tail}") as stream:
        read = torch.load(stream, weights_only=False)
    mine, same = (one["optimizer_state_dict"]["single_partition_of_fp32_groups"] for one in (mapped, read))
    assert all(torch.equal(a, b) for a, b in zip(mine, same, strict=True))
    path = fsspec.open_local(f"simplecache::ckptd://{TAG}_weights-fp32/model.safetensors{tail}", **cache)
    with safe_open(path, "pt") as weights:
        assert weights.keys()
