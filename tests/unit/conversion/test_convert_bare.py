"""Shards with nothing but what the stock converter reads, as DeepSpeed's own tests of AutoTP write them.

No partition count, no `ds_config`, no release; the optimizer's state is a list of the groups' dictionaries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import RefusedError

STATES = {"fp32": 1, "exp_avg": 10, "exp_avg_sq": 100}
NO_RULES: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [],
    "tp_replicated_parameter_patterns": [],
    "vocabulary_parameter_patterns": [],
    "parameter_with_sub_params": [],
}


def write(folder: Path, shards: list[torch.Tensor], info: dict[str, Any], *, dp: int = 2) -> None:
    """A save of stage 3: `shards` of one weight by tensor-parallel rank, each divided among `dp` ranks."""
    folder.mkdir()
    for tp, shard in enumerate(shards):
        for d, piece in enumerate(shard.reshape(-1).chunk(dp)):
            states = [{name: piece * by for name, by in STATES.items() if name != "fp32"}]
            inner = {
                "optimizer_state_dict": {"state": states, "param_groups": [{}]},
                "fp32_flat_groups": [piece.clone()],
                "zero_stage": 3,
            }
            stem = f"zero_pp_rank_{d}_mp_rank_{tp:02d}"
            shapes = [{"fc.weight": list(shard.shape)}]
            model = {"param_shapes": shapes, "universal_checkpoint_info": info}
            torch.save(model, folder / f"{stem}_model_states.pt")
            torch.save({"optimizer_state_dict": inner}, folder / f"{stem}_optim_states.pt")


def made(folder: Path, name: str) -> Any:
    return torch.load(folder / "zero" / "fc.weight" / f"{name}.pt", weights_only=False)


@pytest.mark.parametrize("rows", [(2, 2), (3, 2)], ids=["even", "uneven"])
def test_tensor_parallel_shards_of_stage_3_join(tmp_path: Path, rows: tuple[int, int]) -> None:
    """With every state of the optimizer; without any rule only where `--no-strict` asks for it."""
    whole = torch.arange(4.0 * sum(rows)).reshape(-1, 4)
    write(tmp_path / "in", list(whole.split(rows)), NO_RULES)
    with pytest.raises(RefusedError, match="says nothing of how the 2 tensor-parallel ranks join"):
        convert(tmp_path / "in", tmp_path / "refused", ConvertOptions(compat="strict"))
    convert(tmp_path / "in", tmp_path / "out", ConvertOptions(compat="strict", strict=False, verify=True))
    for name, by in STATES.items():
        found = made(tmp_path / "out", name)
        assert found["cat_dim"] == 0
        assert torch.equal(found["param"], whole * by)


def test_a_description_that_names_all_says_with_empty_lists_that_there_is_none(tmp_path: Path) -> None:
    """AutoTP's of a model whose every parameter is cut along dimension 0; not one that lacks the lists."""
    whole = torch.arange(20.0).reshape(5, 4)
    named = NO_RULES | {"universal_checkpoint_version": 0.4}
    write(tmp_path / "in", list(whole.split((3, 2))), named)
    convert(tmp_path / "in", tmp_path / "out", ConvertOptions(compat="strict", verify=True))
    for name, by in STATES.items():
        assert torch.equal(made(tmp_path / "out", name)["param"], whole * by)
    for missing in ("tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns"):
        info = {key: value for key, value in named.items() if key != missing}
        write(tmp_path / missing, list(whole.split((3, 2))), info)
        with pytest.raises(RefusedError, match="says nothing of how the 2 tensor-parallel ranks join"):
            convert(tmp_path / missing, tmp_path / "refused", ConvertOptions(compat="strict"))


def test_stage_3_without_tensor_parallelism_stays_flat(tmp_path: Path) -> None:
    whole = torch.arange(8.0).reshape(2, 4)
    write(tmp_path / "in", [whole], {})
    convert(tmp_path / "in", tmp_path / "out", ConvertOptions(compat="strict", verify=True))
    for name, by in STATES.items():
        assert torch.equal(made(tmp_path / "out", name), whole.reshape(-1) * by)


def test_states_of_an_unknown_form_are_refused_not_left_out(tmp_path: Path) -> None:
    """A run that goes on without its moments trains on, and worse: nobody would look for the cause here."""
    write(tmp_path / "in", [torch.arange(8.0)], {})
    for path in (tmp_path / "in").glob("*_optim_states.pt"):
        root = torch.load(path, weights_only=False)
        root["optimizer_state_dict"]["optimizer_state_dict"]["state"] = "elsewhere"
        torch.save(root, path)
    with pytest.raises(RefusedError, match="in a form that ckptd does not know"):
        convert(tmp_path / "in", tmp_path / "out", ConvertOptions(compat="strict"))
    convert(tmp_path / "in", tmp_path / "weights", ConvertOptions(form="weights"))
