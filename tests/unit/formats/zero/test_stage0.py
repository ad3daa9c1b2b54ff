"""Saves without ZeRO: which state is of which parameter, by value, by name, by order; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import RefusedError

SHAPES = {
    "embed.weight": (40, 6),
    "a.weight": (6, 6),
    "a.bias": (6,),
    "b.weight": (6, 6),
    "b.bias": (6,),
    "norm.weight": (6,),
}
MATRICES, VECTORS = ["embed.weight", "a.weight", "b.weight"], ["a.bias", "b.bias", "norm.weight"]
States = dict[str, dict[str, torch.Tensor]]


def states_of(constant: tuple[str, ...] = ()) -> States:
    """Masters and moments; of `constant` the masters are all ones."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: {
            "fp32": torch.ones(shape) if name in constant else torch.randn(shape, generator=generator),
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
        }
        for name, shape in SHAPES.items()
    }


def save(
    folder: Path,
    states: States,
    groups: list[list[str]],
    kind: str = "unfused",
    dtype: torch.dtype = torch.bfloat16,
    names: bool = False,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write the model states that DeepSpeed writes at stage 0; `groups`: names in the optimizer's order."""
    module = {
        name: state["fp32"].to(torch.float32 if kind == "plain" else dtype) for name, state in states.items()
    }
    if kind == "flat":
        for group in groups:
            flat = torch.cat([module[name].flatten() for name in group])
            for name, part in zip(group, flat.split([module[n].numel() for n in group]), strict=True):
                module[name] = part.view(SHAPES[name])
    module["counts"] = torch.arange(6.0).to(dtype)
    per = (
        [[[name] for name in group] for group in groups] if kind != "flat" else [[group] for group in groups]
    )
    numbered = [held for group in per for held in group]
    base: dict[str, Any] = {
        "state": {
            i: {"step": torch.tensor(5.0)}
            | {
                key: states[held[0]][key]
                if kind != "flat"
                else torch.cat([states[name][key].flatten() for name in held])
                for key in ("exp_avg", "exp_avg_sq")
            }
            for i, held in enumerate(numbered)
        },
        "param_groups": [],
    }
    at = 0
    for each in per:
        made = {"lr": 0.1, "betas": (0.9, 0.999), "params": list(range(at, at + len(each)))}
        base["param_groups"].append(made | ({"param_names": [held[0] for held in each]} if names else {}))
        at += len(each)
    optimizer = base
    if kind == "unfused":
        masters = [[states[name]["fp32"] for name in group] for group in groups]
        optimizer = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 5}
        optimizer |= {"optimizer_state_dict": base, "fp32_groups": masters}
    elif kind == "flat":
        flats = [torch.cat([states[name]["fp32"].flatten() for name in group]) for group in groups]
        optimizer = {"optimizer_state_dict": base, "fp32_groups_flat": flats, "clip_grad": 1.0}
    root: dict[str, Any] = {
        "module": module,
        "buffer_names": ["counts"],
        "optimizer": optimizer,
        "param_shapes": None,
    }
    root |= {"global_steps": 5, "dp_world_size": 2, "mp_world_size": 1, "ds_version": "0.19.8"}
    root |= {"ds_config": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": kind != "plain"}}}
    folder.mkdir()
    torch.save(root | (more or {}), folder / "mp_rank_00_model_states.pt")
    return folder


def wrong(made: Path, states: States) -> list[str]:
    """Name the states that the universal form does not have as they were."""
    return [
        f"{name} {key}"
        for name, state in states.items()
        for key, value in state.items()
        if not torch.equal(torch.load(made / "zero" / name / f"{key}.pt")["param"], value)
    ]


@pytest.mark.parametrize(
    ("kind", "dtype", "groups"),
    [
        ("unfused", torch.bfloat16, [list(SHAPES)]),
        ("unfused", torch.float16, [MATRICES, VECTORS]),
        ("unfused", torch.bfloat16, [list(reversed(SHAPES))]),
        ("unfused", torch.bfloat16, [["b.weight", "a.bias"], ["a.weight", "b.bias"]]),
        ("flat", torch.float16, [list(reversed(SHAPES))]),
        ("flat", torch.bfloat16, [["b.weight", "a.bias"], ["a.weight", "b.bias"]]),
    ],
)
def test_a_master_is_of_the_weight_that_it_rounds_to(
    kind: str, dtype: torch.dtype, groups: list[list[str]], tmp_path: Path
) -> None:
    states = {name: state for name, state in states_of().items() if any(name in group for group in groups)}
    source = save(tmp_path / "s", states, groups, kind, dtype)
    report = convert(source, tmp_path / "u", ConvertOptions(verify=True))
    assert wrong(tmp_path / "u", states) == []
    assert any("stage 1, 2 or 3" in note for note in report.notes)
    convert(source, tmp_path / "w", ConvertOptions(form="weights"))
    held = load_file(tmp_path / "w" / "model.safetensors")
    assert {name for name, state in states.items() if not torch.equal(held[name], state["fp32"])} == set()
    left = torch.load(tmp_path / "u" / "mp_rank_00_model_states.pt", weights_only=False)
    assert left["optimizer"] is None
    assert {name for group in left["param_shapes"] for name in group} == set(states)


def test_equal_weights_are_told_apart_by_their_order(tmp_path: Path) -> None:
    """Norms and biases that 16 bits round back to their first values."""
    states = states_of(constant=("a.bias", "b.bias", "norm.weight"))
    convert(save(tmp_path / "s", states, [MATRICES, VECTORS]), tmp_path / "u")
    assert wrong(tmp_path / "u", states) == []


def test_equal_weights_in_two_groups_are_refused(tmp_path: Path) -> None:
    states = states_of(constant=("a.bias", "b.bias"))
    groups = [["b.bias", *MATRICES], ["a.bias", "norm.weight"]]
    with pytest.raises(RefusedError, match="fits several parameters"):
        convert(save(tmp_path / "s", states, groups), tmp_path / "u")
    convert(save(tmp_path / "n", states, groups, names=True), tmp_path / "u")
    assert wrong(tmp_path / "u", states) == []


def test_masters_of_another_model_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "s", states_of(), [MATRICES, VECTORS])
    path = source / "mp_rank_00_model_states.pt"
    root = torch.load(path, weights_only=False)
    root["module"]["a.weight"] = root["module"]["a.weight"] + 1
    torch.save(root, path)
    for form in ("universal", "weights"):
        with pytest.raises(RefusedError, match="rounds to no weight"):
            convert(source, tmp_path / form, ConvertOptions(form=form))


@pytest.mark.parametrize("groups", [[list(SHAPES)], [MATRICES, VECTORS]])
def test_in_fp32_shape_and_order_tell(groups: list[list[str]], tmp_path: Path) -> None:
    states = states_of()
    report = convert(save(tmp_path / "s", states, groups, "plain"), tmp_path / "u")
    assert wrong(tmp_path / "u", states) == []
    assert any("names no parameter" in note for note in report.notes)


def test_in_fp32_two_groups_of_one_shape_are_refused(tmp_path: Path) -> None:
    states, groups = (
        states_of(),
        [["b.weight", "b.bias"], ["embed.weight", "a.weight", "a.bias", "norm.weight"]],
    )
    source = save(tmp_path / "s", states, groups, "plain")
    with pytest.raises(RefusedError, match="fits several parameters"):
        convert(source, tmp_path / "u")
    convert(source, tmp_path / "w", ConvertOptions(form="weights"))
    held = load_file(tmp_path / "w" / "model.safetensors")
    assert all(torch.equal(held[name], state["fp32"]) for name, state in states.items())
    report = convert(save(tmp_path / "n", states, groups, "plain", names=True), tmp_path / "u")
    assert wrong(tmp_path / "u", states) == []
    assert not any("names no parameter" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["unfused", "plain"])
def test_factored_states_are_refused_and_weights_are_not(kind: str, tmp_path: Path) -> None:
    """A column of a matrix of one row is as long as the matrix, and is no value per element."""
    states = states_of() | {
        "row": {"fp32": torch.randn(1, 7), "exp_avg": torch.randn(7), "exp_avg_sq": torch.randn(7)}
    }
    source = save(tmp_path / "s", states, [list(states)], kind)
    with pytest.raises(RefusedError, match=r"exp_avg of .* is not one value per parameter element"):
        convert(source, tmp_path / "u")
    convert(source, tmp_path / "w", ConvertOptions(form="weights"))
    held = load_file(tmp_path / "w" / "model.safetensors")
    assert all(torch.equal(held[name], state["fp32"]) for name, state in states.items())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"module": None}, "pipeline without ZeRO"),
        ({"num_experts": [4]}, "experts without ZeRO"),
        ({"optimizer": None}, "holds no optimizer"),
        ({"optimizer": {"master": 1}}, "form that ckptd does not know"),
        (
            {"checkpoint_parallel_dimensions": {"tp_degree": 2, "pp_degree": 1}, "mp_world_size": 2},
            "is missing",
        ),
    ],
)
def test_what_is_not_converted_says_why(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = save(tmp_path / "s", states_of(), [list(SHAPES)], more=more)
    with pytest.raises(Exception, match=words):
        convert(source, tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_parameters_without_state_are_kept_as_weights(tmp_path: Path) -> None:
    """Frozen ones that were given to torch's own optimizer all the same."""
    states = states_of()
    source = save(tmp_path / "s", states, [list(SHAPES)], "plain")
    path = source / "mp_rank_00_model_states.pt"
    root = torch.load(path, weights_only=False)
    for number in (0, 3):
        del root["optimizer"]["state"][number]
    torch.save(root, path)
    report = convert(source, tmp_path / "u")
    frozen = {"embed.weight", "b.weight"}
    assert wrong(tmp_path / "u", {n: s for n, s in states.items() if n not in frozen}) == []
    assert not any((tmp_path / "u" / "zero" / name).exists() for name in frozen)
    assert any("2 parameters of the optimizer have no state" in note for note in report.notes)
