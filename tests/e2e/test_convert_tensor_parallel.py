"""Tensor- and pipeline-parallel saves: the stock converter's bytes, rule by rule, and what is refused.

AutoTP saves are real training on CPU; Megatron-style metadata that CPU training cannot make is written in
DeepSpeed's own format (`tests.support.tp_saves`), random elements, so that one in a wrong place is seen.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions, Dtype
from ckptd.core.model.records import UNIVERSAL
from ckptd.errors import CkptdError
from tests.support import stock
from tests.support.real import (
    REPOSITORY,
    TAG,
    Recipe,
    Resume,
    expect,
    losses_of,
    prepare,
    resume,
    save_dir_of,
)
from tests.unit.storage.remote.test_making import Scene

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TP_1, TP_3 = (Recipe(stage=stage, world_size=4, tp=2, universal_info=False) for stage in (1, 3))
"""AutoTP describes the parameters itself, where client_state says nothing."""
PIPELINE = Recipe(stage=1, world_size=4, pipe=2)
TIED = Recipe(stage=1, world_size=4, pipe=2, pipe_tied=True)
expect(TP_1, TP_3, PIPELINE, TIED)
RESUMES: list[tuple[int, list[tuple[Recipe, Recipe]]]] = [
    (4, [(TP_1, replace(TP_1, tp=4))]),
    (2, [(TP_3, replace(TP_3, tp=0, llama=True)), (PIPELINE, PIPELINE), (TIED, TIED)]),
]
FULL: list[tuple[int, list[tuple[Recipe, Recipe]]]] = [
    (4, [(TP_1, replace(TP_1, stage=3)), (TP_3, replace(TP_3, stage=1))]),
    (4, [(TP_1, replace(TP_1, tp=0, llama=True)), (TP_3, replace(TP_3, tp=0, llama=True))]),
    (2, [(TP_1, TP_1), (TP_3, TP_3)]),
    (4, [(PIPELINE, PIPELINE), (TIED, TIED)]),
]
"""World size, [(source, what loads it)] of one start: DeepSpeed's groups allow one tensor degree in each."""
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tp")
    subprocess.run(
        [sys.executable, "-m", "tests.support.tp_saves", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        check=True,
        capture_output=True,
        timeout=280,
    )
    return folder


def test_every_rule_equals_the_stock_converter(saves: Path, tmp_path: Path) -> None:
    prepare([TP_1, TP_3])
    sources = {path.name: path for path in sorted(saves.iterdir())}
    sources |= {f"AutoTP, stage {r.stage}": save_dir_of(r) / TAG for r in (TP_1, TP_3)}
    pairs = []
    for i, source in enumerate(sources.values()):
        convert(source, tmp_path / f"ours{i}", ConvertOptions(compat="strict", verify=True))
        pairs.append((source, tmp_path / f"stock{i}"))
    stock.convert(pairs)
    found = stock.differences([(tmp_path / f"stock{i}", tmp_path / f"ours{i}") for i in range(len(pairs))])
    assert dict(zip(sources, found, strict=True)) == {name: [] for name in sources}


def test_resumed_on_other_grids(tmp_path: Path) -> None:
    """Losses go on within 1e-3, and exactly where no rank's share of the work changed."""
    prepare([TP_1, TP_3, PIPELINE, TIED])
    sources = [TP_1, TP_3, PIPELINE, TIED]
    for i, source in enumerate(sources):
        convert(save_dir_of(source) / TAG, tmp_path / f"u{i}", ConvertOptions(compat="superset"))
    for i, (world_size, loads) in enumerate(RESUMES + (FULL if os.environ.get("CKPTD_FULL") else [])):
        work = tmp_path / f"start{i}"
        work.mkdir()
        resumes = [
            Resume(recipe=loading, save_dir=tmp_path, tag=f"u{sources.index(source)}")
            for source, loading in loads
        ]
        for (source, loading), losses in zip(loads, resume(world_size, resumes, work), strict=True):
            expected = losses_of(source)
            assert set(losses) == {3, 4, 5, 6}
            apart = max(abs(loss - expected[step]) for step, loss in losses.items())
            same_grid = world_size == source.world_size and loading.tp == source.tp
            assert apart <= (0 if same_grid else 1e-3), f"{source} as {loading} on {world_size} ranks"


def changed(saves: Path, name: str, folder: Path, change: Change, pattern: str = "mp_rank_*") -> Path:
    """A copy of a save whose files of `pattern` were loaded, changed and saved again."""
    import torch

    shutil.copytree(saves / name, folder)
    for path in sorted(folder.glob(pattern)):
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
    return folder


def info(**values: Any) -> Change:
    """Set keys of universal_checkpoint_info; None removes one."""

    def change(state: dict[str, Any]) -> None:
        for key, value in values.items():
            state["universal_checkpoint_info"].pop(key, None)
            if value is not None:
                state["universal_checkpoint_info"][key] = value

    return change


def drift(state: dict[str, Any]) -> None:
    inner = state["optimizer_state_dict"]
    for group, mapping in enumerate(inner["param_slice_mappings"]):
        if "norm.weight" in mapping:
            inner["base_optimizer_state"]["state"][group]["exp_avg"][mapping["norm.weight"].start] += 1


def scaled(state: dict[str, Any]) -> None:
    whole = state["universal_checkpoint_info"]["affine_map"]["params"]["whole\\.weight$"]
    for rank in whole["ranks"].values():
        rank["pieces"][0]["scale"] = 0.5


def holed(state: dict[str, Any]) -> None:
    fused = state["universal_checkpoint_info"]["affine_map"]["params"]["fused\\.weight$"]
    fused["ranks"][0]["pieces"][0]["source"][0] += 1


def doubled(state: dict[str, Any]) -> None:
    fused = state["universal_checkpoint_info"]["affine_map"]["params"]["fused\\.weight$"]
    first, *others = fused["ranks"][0]["pieces"]
    others[0]["dest"] = first["dest"]


def forget(state: dict[str, Any]) -> None:
    del state["universal_checkpoint_info"]


REFUSED: dict[str, tuple[str, Change, str, str]] = {
    "no description": (
        "tp2",
        forget,
        "mp_rank_*",
        "is missing and says nothing of how the 2 tensor-parallel ranks join",
    ),
    "drifted copies": (
        "tp2",
        drift,
        "zero_pp_rank_*_mp_rank_01*",
        r"hold different copies of norm.weight \(exp_avg\)",
    ),
    "widths that do not add up": (
        "tp2-widths",
        info(sub_param_shard_widths={"qkv": [[6, 6]] * 3, "uneven": [[5, 4], [2, 2], [1, 3]]}),
        "mp_rank_*",
        "uneven.weight: its recorded widths",
    ),
    "no widths": ("tp2-widths", info(sub_param_shard_widths=None), "mp_rank_*", "records no widths"),
    "cut unevenly before widths were recorded": (
        "tp2-widths",
        info(
            universal_checkpoint_version=0.2,
            parameter_with_sub_params=[
                {"patterns": ["qkv"], "shape": ((12, 12, 12), 4), "partition_dim": 0},
                {"patterns": ["uneven"], "shape": (-1, (7, 5, 4)), "partition_dim": 1},
            ],
        ),
        "mp_rank_*",
        r"sizes \[7, 5\] were cut over 2 tensor ranks",
    ),
    "a description that says nothing of tensor ranks": (
        "tp2",
        lambda s: s.update(universal_checkpoint_info={"universal_checkpoint_version": 0.2}),
        "mp_rank_*",
        "says nothing of how the 2 tensor-parallel ranks join",
    ),
    "a pattern too many": (
        "tp2",
        info(tp_replicated_parameter_patterns=["norm.weight", "nothing"]),
        "mp_rank_*",
        "match no parameter.*nothing",
    ),
    "two patterns of a list": (
        "tp2",
        info(parameter_with_row_parallelism_patterns=["down", "tall", ".*weight"]),
        "mp_rank_*",
        "matches more than one of",
    ),
    "shards that do not fit": (
        "tp2",
        info(parameter_with_row_parallelism_patterns=["down", "tall", r"up\.bias"]),
        "mp_rank_*",
        "up.bias: shapes .* cannot be joined along dimension 1",
    ),
    "no vocabulary size": ("tp2", info(original_vocab_size=None), "mp_rank_*", "original_vocab_size"),
    "a newer map": (
        "affine",
        lambda s: s["universal_checkpoint_info"]["affine_map"].update(version=2),
        "mp_rank_*",
        "format 2, ckptd knows 1",
    ),
    "scaled shards": ("affine", scaled, "mp_rank_*", "whole.weight: its shards are scaled"),
    "a map with a hole": ("affine", holed, "mp_rank_*", "fused.weight: its tensor-parallel layout"),
    "a map that takes elements twice": (
        "affine",
        doubled,
        "mp_rank_*",
        "fused.weight: its tensor-parallel layout",
    ),
    "marked by the trainer": (
        "tp2",
        info(autotp_unsupported_parameter_patterns={"qkv": "no head counts"}),
        "mp_rank_*",
        r"qkv \(no head counts\)",
    ),
    "an invalid pattern": (
        "tp2",
        info(tp_replicated_parameter_patterns=["norm.weight", "("]),
        "mp_rank_*",
        "invalid pattern",
    ),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_be_right_is_refused(saves: Path, tmp_path: Path, case: str) -> None:
    name, change, pattern, words = REFUSED[case]
    source = changed(saves, name, tmp_path / "in", change, pattern)
    (tmp_path / "out").mkdir()
    with pytest.raises(CkptdError, match=words) as caught:
        convert(source, tmp_path / "out" / "u")
    assert caught.value.exit_code == 65
    assert list((tmp_path / "out").iterdir()) == [], "no partial output"


def drift_below_rounding(state: dict[str, Any]) -> None:
    """In a bit of a master that its bf16 copy does not show."""
    import torch

    inner = state["optimizer_state_dict"]
    for group, mapping in enumerate(inner["param_slice_mappings"]):
        if "norm.weight" in mapping:
            bits = inner["single_partition_of_fp32_groups"][group].view(torch.int32)
            bits[mapping["norm.weight"].start] ^= 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_drifted_masters_are_seen_in_weights_of_every_type(saves: Path, tmp_path: Path, dtype: Dtype) -> None:
    """Also where the file is made of the model's copies, which still are the same."""
    options = ConvertOptions(form="weights", dtype=dtype)
    assert convert(saves / "tp2", tmp_path / "whole", options).compared_tensors
    source = changed(saves, "tp2", tmp_path / "in", drift_below_rounding, "zero_pp_rank_*_mp_rank_01*")
    with pytest.raises(CkptdError, match=r"hold different copies of norm.weight \(fp32\)"):
        convert(source, tmp_path / "out", options)


def test_drifted_copies_are_seen_before_anything_is_sent(saves: Path, tmp_path: Path) -> None:
    """By the process that makes a form while it sends it (adr/0093)."""
    name, change, pattern, words = REFUSED["drifted copies"]
    scene = Scene(tmp_path / "n", changed(saves, name, tmp_path / "in", change, pattern))
    result = scene.upload(scene.order(UNIVERSAL))
    assert (result.outcome, scene.objects(UNIVERSAL)) == ("refused", {})
    assert re.search(words, result.reason or "")
    good = Scene(tmp_path / "m", saves / name)
    assert good.upload(good.order(UNIVERSAL)).outcome == "committed"


def test_who_brings_the_tensor_parallelism_at_stage_3_is_told_where_it_loads(
    saves: Path, tmp_path: Path
) -> None:
    """DeepSpeed's stage 3 loader takes a tensor rank's part of AutoTP's parameters and of no others."""
    prepare([TP_3])
    said = convert(saves / "stage3-tp2", tmp_path / "mpu").notes
    assert any("where an mpu brings the tensor parallelism, resume in stage 1 or 2" in note for note in said)
    assert not any("mpu" in note for note in convert(save_dir_of(TP_3) / TAG, tmp_path / "auto").notes)


def test_a_missing_tensor_rank_is_named(saves: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(saves / "tp2", source)
    (source / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CkptdError, match=r"2 × 2 ranks lacks zero_pp_rank_1_mp_rank_01_optim"):
        convert(source, tmp_path / "u")


def test_no_strict_allows_a_pattern_too_many(saves: Path, tmp_path: Path) -> None:
    source = changed(
        saves, "tp2", tmp_path / "in", info(tp_replicated_parameter_patterns=["norm.w", "nothing"])
    )
    assert convert(source, tmp_path / "u", ConvertOptions(strict=False)).files > 0


def test_the_superset_has_the_same_tensors(saves: Path, tmp_path: Path) -> None:
    """Whole shapes at stage 3 as well, model states under both names of every rank."""
    for name in ("tp2-pp2-dp2", "stage3-tp2"):
        convert(saves / name, tmp_path / f"{name}-strict", ConvertOptions(compat="strict"))
        convert(saves / name, tmp_path / f"{name}-superset", ConvertOptions(compat="superset"))
        strict, superset = (
            {p.relative_to(root): p.read_bytes() for p in root.rglob("zero/*/[!s]*.pt")}
            for root in (tmp_path / f"{name}-strict", tmp_path / f"{name}-superset")
        )
        assert superset
        assert {n: b for n, b in strict.items() if n in superset} == superset
        models = sorted(p.name for p in (tmp_path / f"{name}-superset").glob("*model_states.pt"))
        ranks = 4 if "pp2" in name else 2
        assert len([m for m in models if m.startswith("mp_rank_")]) == ranks
        assert len([m for m in models if m.startswith("zero_pp_rank_0_")]) == ranks
