"""Saves of several model-parallel ranks that are odd, mixed or hostile: whole bytes or one sentence.

Written by `tests.support.tp_saves` in DeepSpeed's format and changed file by file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.conversion.engine import children
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.parts import Literal
from ckptd.conversion.plan import Header, OutputFile, PlanWriter
from ckptd.errors import CkptdError
from tests.e2e.test_convert_tensor_parallel import PIPELINE, TIED
from tests.support.real import TAG, Recipe, prepare, save_dir_of
from tests.support.tp_saves import Param, TpSave, along, megatron, replicated, write

pytestmark = pytest.mark.timeout(300)
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grids")
    for name, save in {"tp2": megatron(2), "tp2-pp2": megatron(2, pp=2), "tp1": megatron(1)}.items():
        write(save, folder / name)
    return folder


def changed(source: Path, folder: Path, pattern: str, change: Change) -> Path:
    """A copy whose files of `pattern` were loaded, changed and saved again."""
    shutil.copytree(source, folder)
    for path in sorted(folder.glob(pattern)):
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
    return folder


def states_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every state file of a universal folder."""
    found = {
        str(p.relative_to(folder)): torch.load(p, weights_only=False)
        for p in sorted(folder.glob("zero/*/[!s]*.pt"))
    }
    return {name: value["param"] for name, value in found.items()}


def refused(source: Path, words: str) -> CkptdError:
    """One sentence, exit 65, nothing left; soon."""
    started = time.monotonic()
    (source.parent / "out").mkdir()
    with pytest.raises(CkptdError, match=words) as caught:
        convert(source, source.parent / "out" / "u")
    assert caught.value.exit_code == 65
    assert len(caught.value.message) < 400
    assert list((source.parent / "out").iterdir()) == []
    assert time.monotonic() - started < 15
    return caught.value


def without_zero(state: dict[str, Any]) -> None:
    """As a pipeline of bf16 without ZeRO: BF16_Optimizer names no stage, the settings name 0."""
    state["ds_config"]["zero_optimization"] = {"stage": 0}
    if "optimizer_state_dict" in state:
        del state["optimizer_state_dict"]["zero_stage"]


def test_bf16_without_zero_is_converted_where_shapes_are_saved(saves: Path, tmp_path: Path) -> None:
    """DeepSpeed before 0.19 saved param_shapes for it, as for stage 1; the stock converter takes it too."""
    source = changed(saves / "tp2-pp2", tmp_path / "in", "*.pt", without_zero)
    convert(source, tmp_path / "u")
    convert(saves / "tp2-pp2", tmp_path / "plain")
    found, expected = states_of(tmp_path / "u"), states_of(tmp_path / "plain")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bf16_without_zero_and_shapes_is_refused_for_that(saves: Path, tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        without_zero(state)
        if "param_shapes" in state:
            state["param_shapes"] = None

    error = refused(changed(saves / "tp2-pp2", tmp_path / "in", "*.pt", change), "has no param_shapes")
    assert "stage 1" in error.hint


@pytest.mark.parametrize("recipe", [PIPELINE, TIED], ids=["plain", "tied"])
def test_a_bf16_pipeline_without_zero_has_the_shapes_of_its_layers(recipe: Recipe, tmp_path: Path) -> None:
    """DeepSpeed 0.18.9 and newer save no param_shapes for it; the shards name parameters, layers shapes."""
    prepare([recipe])

    def change(state: dict[str, Any]) -> None:
        without_zero(state)
        if "param_shapes" in state:
            state["param_shapes"] = None

    source = changed(save_dir_of(recipe) / TAG, tmp_path / "in", "*mp_rank*", change)
    convert(source, tmp_path / "u")
    convert(save_dir_of(recipe) / TAG, tmp_path / "plain")
    found, expected = states_of(tmp_path / "u"), states_of(tmp_path / "plain")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (source / "layer_01-model_states.pt").unlink()
    with pytest.raises(CkptdError, match=r"1\..*whose shape no layer_\*-model_states.pt tells"):
        convert(source, tmp_path / "again")


def test_a_stage_of_zero_that_differs_is_still_two_saves(saves: Path, tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["ds_config"]["zero_optimization"] = {"stage": 2}

    refused(changed(saves / "tp2", tmp_path / "in", "mp_rank_*", change), "two saves in one folder")


def lower_rate(state: dict[str, Any]) -> None:
    inner = state["optimizer_state_dict"]["base_optimizer_state"]
    inner["param_groups"] = [{**group, "lr": 0.05} for group in inner["param_groups"]]


def of_more_ranks(state: dict[str, Any]) -> None:
    state["optimizer_state_dict"]["partition_count"] = [4, 4]


MIXED: dict[str, tuple[str, str, Change, str]] = {
    "another step on one rank of tensor rank 1": (
        "tp2",
        "zero_pp_rank_1_mp_rank_01*",
        lower_rate,
        r"rank_1_mp_rank_01.* has param_groups\[0\] lr 0.05.*shards of two saves",
    ),
    "another step on tensor rank 1": ("tp2", "zero_*_mp_rank_01*", lower_rate, "shards of two saves"),
    "another step on one rank of stage 1": ("tp2-pp2", "*_1_mp_rank_03*", lower_rate, "shards of two saves"),
    "other ranks on tensor rank 1": (
        "tp2",
        "zero_*_mp_rank_01*",
        of_more_ranks,
        r"has partition_count \(4, 4\).*shards of two saves",
    ),
    "other ranks on stage 1": ("tp2-pp2", "*_1_mp_rank_03*", of_more_ranks, "partition_count"),
    "model states of another version": (
        "tp2",
        "mp_rank_*",
        lambda s: s.update(ds_version="0.19.7"),
        "mp_rank_00_model_states.pt has ds_version 0.19.7, .* has 0.19.8: shards of two saves",
    ),
}


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_shards_of_two_saves_are_refused(saves: Path, tmp_path: Path, case: str) -> None:
    name, pattern, change, words = MIXED[case]
    refused(changed(saves / name, tmp_path / "in", pattern, change), words)


def test_a_tensor_rank_with_no_element_of_a_parameter(tmp_path: Path) -> None:
    """Uneven AutoTP, and moments of 16 bits: the empty shard has no type of its own."""
    save = TpSave(
        params={"few": Param(shape=(1, 4), cut=along(0)), "norm": Param(shape=(6,), cut=replicated)},
        info={"universal_checkpoint_version": 0.4, "tp_replicated_parameter_patterns": ["norm"]},
        tp=2,
        dp=2,
    )
    write(save, tmp_path / "once")

    def change(state: dict[str, Any]) -> None:
        if "optimizer_state_dict" in state:
            inner = state["optimizer_state_dict"]
            of_group = inner["base_optimizer_state"]["state"]
            names = [*inner["param_slice_mappings"][0], *inner["param_slice_mappings"][1]]
            inner["param_slice_mappings"] = [
                OrderedDict((k, a) for m in inner["param_slice_mappings"] for k, a in _shifted(m, inner))
            ]
            assert len(inner["param_slice_mappings"][0]) == len(names)
            merged = {s: torch.cat([of_group[g][s] for g in (0, 1)]) for s in ("exp_avg", "exp_avg_sq")}
            inner["base_optimizer_state"]["state"] = {
                0: {"step": of_group[0]["step"], **{s: t.bfloat16() for s, t in merged.items()}}
            }
            inner["single_partition_of_fp32_groups"] = [torch.cat(inner["single_partition_of_fp32_groups"])]
            inner["partition_count"] = [2]
            inner["group_paddings"] = [sum(inner["group_paddings"])]
        else:
            first, second = state["param_shapes"]
            state["param_shapes"] = [OrderedDict([*first.items(), *second.items()])]

    source = changed(tmp_path / "once", tmp_path / "in", "*.pt", change)
    convert(source, tmp_path / "u")
    convert(tmp_path / "once", tmp_path / "plain")
    found, expected = states_of(tmp_path / "u"), states_of(tmp_path / "plain")
    assert found["zero/few/exp_avg.pt"].dtype is torch.bfloat16
    for name, value in expected.items():
        assert torch.equal(found[name], value if "fp32" in name else value.bfloat16()), name


def _shifted(mapping: Any, inner: dict[str, Any]) -> Any:
    """Addresses of group 1 after group 0's elements; no group of this save has padding inside."""
    from deepspeed.utils.tensor_fragment import fragment_address

    before = inner["single_partition_of_fp32_groups"][0].numel()
    assert inner["base_optimizer_state"]["state"][0]["exp_avg"].numel() == before
    for name, address in mapping.items():
        shift = before if name == "norm" else 0
        yield name, fragment_address(numel=address.numel, start=address.start + shift)


def renamed(new: str) -> Change:
    def change(state: dict[str, Any]) -> None:
        groups = state.get("param_shapes") or state["optimizer_state_dict"]["param_slice_mappings"]
        for g, group in enumerate(groups):
            groups[g] = OrderedDict((new if name == "up.weight" else name, v) for name, v in group.items())

    return change


@pytest.mark.parametrize(
    ("name", "words"),
    [("up.\ud800weight", "can be no parameter"), ("optimizer_state.pt", "a file of optimizer state")],
    ids=ascii,
)
def test_names_that_can_be_no_folder_are_refused(saves: Path, tmp_path: Path, name: str, words: str) -> None:
    refused(changed(saves / "tp2", tmp_path / "in", "*.pt", renamed(name)), words)


def huge_grid(state: dict[str, Any]) -> None:
    if "param_shapes" in state:
        state["dp_world_size"] = state["mp_world_size"] = 1 << 20
        state["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 1 << 20}
    else:
        state["optimizer_state_dict"]["partition_count"] = []


def many_experts(state: dict[str, Any]) -> None:
    if "param_shapes" in state:
        state["num_experts"] = [1 << 40] * 1000


def no_groups(state: dict[str, Any]) -> None:
    if "param_shapes" in state:
        state["param_shapes"] = []
    else:
        inner = state["optimizer_state_dict"]
        inner |= {"param_slice_mappings": [], "single_partition_of_fp32_groups": [], "group_paddings": []}
        inner["base_optimizer_state"]["state"] = {}
        inner["partition_count"] = []


def said(**values: Any) -> Change:
    def change(state: dict[str, Any]) -> None:
        state.get("universal_checkpoint_info", {}).update(values)

    return change


def big_step(state: dict[str, Any]) -> None:
    if "optimizer_state_dict" in state:
        state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = 10**5000


def big_key(state: dict[str, Any]) -> None:
    if "optimizer_state_dict" in state:
        state["optimizer_state_dict"]["base_optimizer_state"]["state"][0][10**5000] = 1.0


HOSTILE: dict[str, tuple[str, Change, str]] = {
    "a grid of a million by a million ranks": (
        "tp2",
        huge_grid,
        "lacks zero_pp_rank_2.* and 1099512676343 more",
    ),
    "more experts than memory": ("tp1", many_experts, "lacks layer_0_expert_0_mp_rank_00.* and more"),
    "no group of parameters": ("tp2", no_groups, "holds no parameters"),
    "a pattern that cannot be counted": (
        "tp2",
        said(tp_replicated_parameter_patterns=["a{99999999999999999999}"]),
        "metadata .* cannot be read",
    ),
    "a step of thousands of digits": ("tp2", big_step, "metadata .* cannot be read"),
    "a key of thousands of digits": ("tp2", big_key, "metadata .* cannot be read"),
    "marks that are none": (
        "tp2",
        said(autotp_unsupported_parameter_patterns=5),
        "metadata .* cannot be read",
    ),
}


@pytest.mark.parametrize("case", HOSTILE, ids=str)
def test_hostile_metadata_end_in_a_sentence(saves: Path, tmp_path: Path, case: str) -> None:
    name, change, words = HOSTILE[case]
    refused(changed(saves / name, tmp_path / "in", "*.pt", change), words)


@pytest.mark.parametrize("bad", [1, 9])
def test_a_file_that_cannot_be_made_is_never_left_out_in_silence(tmp_path: Path, bad: int) -> None:
    """One thread that dies of it once left its file out; as many as there are threads hung for ever."""
    work = tmp_path / "work"
    for name in ("out", "tmp"):
        (work / name).mkdir(parents=True)
    header = Header(
        form="universal", layout="strict", block_bytes=0, stage=1, dp=1, ds_version="", step=1,
        parameters=1, sources=(),
    )  # fmt: skip
    with (work / "plan.jsonl").open("wb") as stream:
        writer = PlanWriter(stream, header, ())
        for i in range(bad):
            writer.add(OutputFile(f"zero/\ud800{i}/fp32.pt", (Literal(b"a"),)))
        writer.add(OutputFile("zero/good/fp32.pt", (Literal(b"a"),)))
        writer.finish()
    request = {
        "source": str(tmp_path), "work": str(work), "files": [], "memory_budget_bytes": 256 << 20,
        "reserve_bytes": 0, "threads": 4, "clone": False, "file_mode": 0o600, "folder_mode": 0o700,
        "gid": tmp_path.stat().st_gid, "verify": False, "low_priority": False, "manifest": {},
        "is_striped": False, "numpy_folder": "",
    }  # fmt: skip
    child = children.start("executor_child", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, words = child.communicate(json.dumps(request).encode(), timeout=200)
    finally:
        child.kill()
    assert child.returncode not in (0, None)
    assert json.loads(words.splitlines()[-1])["error"] == "StorageError"
    assert not (work / "out" / "ckptd.json").exists()


def test_the_command_says_one_sentence(saves: Path, tmp_path: Path) -> None:
    source = changed(saves / "tp2", tmp_path / "in", "*.pt", big_step)
    command = [sys.executable, "-m", "ckptd", "convert", str(source), str(tmp_path / "u")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 65
    assert "Traceback" not in done.stderr + done.stdout
