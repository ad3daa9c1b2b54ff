"""Pickles in good order whose values lie: absurd numbers and names cost nothing and end in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import CkptdError
from ckptd.formats.torchfile.values import Global, Inert
from tests.attacks.hostile import OPTIM
from tests.support.synthetic import Shapes, ordered, write_stage12

GROUPS: list[Shapes] = [{"w": (16, 8), "b": (8,)}]
MODEL = "mp_rank_00_model_states.pt"
ENDLESS = 1 << 200_000
"""More digits than Python prints."""
LIES: dict[str, dict[str, Any]] = {
    "2^40 tensor ranks": {
        "mp_world_size": 1 << 40,
        "checkpoint_parallel_dimensions": {"tp_degree": 1 << 40, "pp_degree": 1},
    },
    "2^40 stages": {"checkpoint_parallel_dimensions": {"tp_degree": 1, "pp_degree": 1 << 40}},
    "no ranks": {"dp_world_size": 0},
    "negative ranks": {"dp_world_size": -2},
    "2^62 ranks": {"dp_world_size": 1 << 62},
    "a world of endless digits": {"mp_world_size": ENDLESS, "dp_world_size": ENDLESS},
    "a parameter of endless digits": {"param_shapes": [ordered({"w": (ENDLESS,)})]},
    "a parameter called by an endless number": {"param_shapes": [{ENDLESS: (1,)}]},
    "a layer of endless digits": {"module": None, "param_shapes": [{ENDLESS: (1,), "9" * 5000 + ".w": (1,)}]},
    "a parameter that leads out": {"param_shapes": [ordered({"../../etc": (16, 8), "b": (8,)})]},
    "a parameter with a line break": {"param_shapes": [ordered({"w\nw": (16, 8), "b": (8,)})]},
    "a version of two lines": {"ds_version": "0.19.8\nTraceback"},
}
UNKNOWN = ("a world of endless digits",)
"""No contradiction: what is no number of 64 bits is not known, and the optimizer shards say it too."""


@pytest.mark.parametrize("lie", list(LIES))
def test_lying_model_states(tmp_path: Path, lie: str) -> None:
    write_stage12(tmp_path / "tag", GROUPS, 2, change_model=lambda root: root.update(LIES[lie]))
    (found,) = inspect_files(tmp_path / "tag", [MODEL], timeout_seconds=30)
    assert found.facts is not None, found.reason
    if lie in UNKNOWN:
        convert(tmp_path / "tag", tmp_path / "out", ConvertOptions())
        return
    with pytest.raises(CkptdError) as caught:
        convert(tmp_path / "tag", tmp_path / "out", ConvertOptions())
    assert caught.value.exit_code == 65
    assert (
        MODEL in caught.value.message or OPTIM in caught.value.message or "optim_states" in str(caught.value)
    )
    assert "\n" not in caught.value.message
    assert "exit status" not in caught.value.message
    assert len(caught.value.message) < 400
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tag"]


OPTIM_LIES: dict[str, dict[str, Any]] = {
    "endless partition counts": {"partition_count": [ENDLESS]},
    "endless settings of the loss scaler": {
        "loss_scaler": Inert(
            Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"), (), {"cur_iter": ENDLESS}, True
        ),
        "partition_count": [3],
    },
    "another version, of two lines": {"ds_version": "0\n1"},
    "param_groups of endless numbers": {
        "base_optimizer_state": {"state": {}, "param_groups": [{"lr": ENDLESS, "params": [0]}]}
    },
    "states under a name that leads out": {
        "base_optimizer_state": {"state": {0: {"../x": [1]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    },
}


@pytest.mark.parametrize("lie", list(OPTIM_LIES))
def test_lying_optimizer_shards(tmp_path: Path, lie: str) -> None:
    def change(rank: int, inner: dict[str, Any]) -> None:
        if rank == 1:
            inner.update(OPTIM_LIES[lie])

    write_stage12(tmp_path / "tag", GROUPS, 2, change=change)
    name = OPTIM.replace("rank_0", "rank_1", 1)
    (found,) = inspect_files(tmp_path / "tag", [name], timeout_seconds=30)
    assert found.facts is not None, found.reason
    if lie == "another version, of two lines":
        return  # the root's word comes first
    with pytest.raises(CkptdError) as caught:
        convert(tmp_path / "tag", tmp_path / "out", ConvertOptions())
    assert caught.value.exit_code == 65
    assert name in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
