"""Mixtures of experts: any grid against tensors stacked by hand, and every condition refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import CkptdError, DamagedError, RefusedError
from ckptd.formats.torchfile.values import Tensor
from tests.support.reading import load, tensor_bytes
from tests.support.synthetic import STATES, Made, Shapes
from tests.support.synthetic_experts import Mixture, write_mixture
from tests.unit.formats.zero.test_zero_ranges import convert_here, survey

SIDE = st.integers(1, 6)
SHAPE = st.lists(SIDE, min_size=1, max_size=3).map(tuple)
GROUP = st.dictionaries(st.sampled_from([f"w{i}" for i in range(9)]), SHAPE, min_size=1, max_size=5)
GRIDS = st.sampled_from([(2, 2), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4)])
EXPERT = "mlp.deepspeed_moe.experts.deepspeed_experts.0.w"
PLAIN = Mixture(dense=[{"a": (3, 5)}], experts=[{EXPERT: (4, 3)}], dp=4, ep=2)
AUTO = "layers.0.mlp.experts"


def check(made: Made, out: Path, mixture: Mixture) -> None:
    for g, shapes in enumerate(mixture.groups):
        for name, shape in shapes.items():
            for state in STATES:
                value, _, data = load(out / "zero" / name / f"{state}.pt")
                tensor = value.pop("param")
                assert isinstance(tensor, Tensor)
                assert tensor_bytes(tensor, data) == made.expected[name, state]
                if g < len(mixture.dense):
                    assert (tensor.shape, value) == (shape, {"cat_dim": 0})
                else:
                    rows = mixture.ep * shape[0]
                    marks = {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": rows}
                    assert (tensor.shape, value) == ((rows, *shape[1:]), marks)
            assert (out / "zero" / name / "step.pt").exists()


def apart(groups: list[Shapes], prefix: str) -> list[Shapes]:
    return [{f"{prefix}{i}.{name}": shape for name, shape in g.items()} for i, g in enumerate(groups)]


@settings(max_examples=60, deadline=None)
@given(
    dense=st.lists(GROUP, min_size=0, max_size=2),
    experts=st.lists(GROUP, min_size=1, max_size=2),
    grid=GRIDS,
    in_blocks=st.booleans(),
    align=st.integers(1, 4),
    local=st.integers(1, 3),
    superset=st.booleans(),
)
def test_any_grid_against_tensors_stacked_by_hand(
    tmp_path_factory: pytest.TempPathFactory,
    dense: list[Shapes],
    experts: list[Shapes],
    grid: tuple[int, int],
    in_blocks: bool,
    align: int,
    local: int,
    superset: bool,
) -> None:
    folder, out = tmp_path_factory.mktemp("in"), tmp_path_factory.mktemp("out")
    mixture = Mixture(
        dense=apart(dense, "dense"),
        experts=apart(experts, "expert"),
        dp=grid[0],
        ep=grid[1],
        in_blocks=in_blocks,
        align=align,
        layers=[grid[1] * local],
    )
    made = write_mixture(folder, mixture)
    save = convert_here(folder, out, "superset" if superset else "strict")
    assert (save.dp, save.experts.ep, save.experts.in_blocks) == (*grid, in_blocks)
    check(made, out, mixture)


def test_experts_that_every_rank_holds_are_parameters_like_others(tmp_path: Path) -> None:
    mixture = replace(PLAIN, ep=1)
    made = write_mixture(tmp_path / "in", mixture)
    save = convert_here(tmp_path / "in", tmp_path / "out", "strict")
    assert not save.experts.groups
    check(made, tmp_path / "out", replace(mixture, dense=mixture.groups, experts=[]))


def test_a_conversion_says_what_a_resume_must_hold_to(tmp_path: Path) -> None:
    write_mixture(tmp_path / "in", PLAIN)
    report = convert(tmp_path / "in", tmp_path / "out", ConvertOptions(verify=True))
    (note,) = report.notes
    assert "ep_size 2" in note
    assert "0.19.2" in note
    assert not list((tmp_path / "out").glob("*expert*"))


def of_group(**changes: Any) -> Callable[[int, dict[str, Any]], None]:
    """Spoil what the optimizer says of the expert group, on every rank."""

    def change(_: int, inner: dict[str, Any]) -> None:
        inner["base_optimizer_state"]["param_groups"][1] |= changes

    return change


def counts(*values: int) -> Callable[[int, dict[str, Any]], None]:
    def change(_: int, inner: dict[str, Any]) -> None:
        inner["partition_count"] = list(values)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_group(moe=False), "group 1 over 2 of 4 ranks, and nothing says that it holds experts"),
        (of_group(name="all"), "nothing says that it holds experts"),
        (of_group(name="ep_size_4"), "but calls it ep_size_4"),
        (counts(4, 3), "over 3 of 4 ranks, which no expert parallelism does"),
        (counts(4, 0), "over 0 of 4 ranks, which no expert parallelism does"),
        (counts(4, 4), "but calls it ep_size_2"),
        (counts(3, 2), r"of 3 ranks, mp_rank_00_model_states.pt of 4"),
    ],
)
def test_optimizers_that_contradict_expert_parallelism(
    tmp_path: Path, change: Callable[[int, dict[str, Any]], None], words: str
) -> None:
    write_mixture(tmp_path / "in", PLAIN, change=change)
    with pytest.raises(RefusedError, match=words) as caught:
        survey(tmp_path / "in")
    assert caught.value.exit_code == 65


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": [3]}, "3 experts in a layer, which 2 ranks cannot share"),
        ({"checkpoint_parallel_dimensions": {"ep_degree": 4}}, "ep_degree 4, .* among 2 ranks"),
        ({"ds_config": {"use_data_before_expert_parallelism": "x"}}, "parallelism is 'x'"),
    ],
)
def test_model_states_that_contradict_expert_parallelism(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_mixture(tmp_path / "in", PLAIN, change_model=lambda model: model.update(changes))
    with pytest.raises(RefusedError, match=words):
        survey(tmp_path / "in")


def test_two_expert_parallel_sizes_are_refused(tmp_path: Path) -> None:
    """As a model has whose layers have different numbers of experts and ranks for them."""
    mixture = replace(PLAIN, experts=[{EXPERT: (4, 3)}, {"other": (4,)}])

    def change(_: int, inner: dict[str, Any]) -> None:
        inner["partition_count"] = [4, 2, 1]
        inner["base_optimizer_state"]["param_groups"][2]["name"] = "ep_size_4"

    write_mixture(tmp_path / "in", mixture, change=change)
    with pytest.raises(RefusedError, match="some layers are shared by 2 ranks, of others by 4"):
        survey(tmp_path / "in")


def test_the_wrong_order_of_ranks_is_noticed(tmp_path: Path) -> None:
    """Ranks 0 and 1 hold the halves of one tensor; read as rank 0 and 2 they make no whole one."""
    mixture = replace(PLAIN, experts=[{EXPERT: (4, 3), "expert.b": (2,)}], in_blocks=True)

    def change(model: dict[str, Any]) -> None:
        model["ds_config"].pop("use_data_before_expert_parallelism")

    write_mixture(tmp_path / "in", mixture, change_model=change)
    with pytest.raises(DamagedError, match="expert-parallel rank 0 hold"):
        convert_here(tmp_path / "in", tmp_path / "out", "strict")


def test_a_missing_expert_file_is_named(tmp_path: Path) -> None:
    write_mixture(tmp_path / "in", PLAIN)
    (tmp_path / "in" / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(DamagedError, match=r"lacks layer_0_expert_2_mp_rank_00_model_states.pt") as caught:
        survey(tmp_path / "in")
    assert caught.value.exit_code == 65


def test_a_missing_rank_of_experts_is_named(tmp_path: Path) -> None:
    write_mixture(tmp_path / "in", PLAIN)
    (tmp_path / "in" / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(DamagedError, match="save of 4 ranks lacks bf16_zero_pp_rank_3_mp"):
        survey(tmp_path / "in")


def test_an_expert_without_dimensions_is_refused(tmp_path: Path) -> None:
    mixture = replace(PLAIN, dp=2, experts=[{EXPERT: (4, 3), "expert.scale": ()}])
    write_mixture(tmp_path / "in", mixture)
    with pytest.raises(RefusedError, match=r"expert.scale: .* without dimensions"):
        convert_here(tmp_path / "in", tmp_path / "out", "strict")


SPLIT = replace(PLAIN, tp=2)


def test_parts_of_tensor_ranks_follow_one_another_in_each_expert(tmp_path: Path) -> None:
    mixture = replace(SPLIT, dense=[{"a": (3, 5)}], experts=[{EXPERT: (4, 3)}])
    made = write_mixture(tmp_path / "in", mixture)
    convert_here(tmp_path / "in", tmp_path / "out", "strict")
    whole: Shapes = {EXPERT: (8, 3)}
    check(made, tmp_path / "out", replace(mixture, dense=[{"a": (6, 5)}], experts=[whole]))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_tensor_ranks_part_of_an_expert_is_wanted(tmp_path: Path, rank: int) -> None:
    write_mixture(tmp_path / "in", SPLIT)
    name = f"layer_0_expert_1_mp_rank_{rank:02d}_model_states.pt"
    (tmp_path / "in" / name).unlink()
    with pytest.raises(DamagedError, match=f"lacks {name}"):
        survey(tmp_path / "in")


def test_experts_that_tensor_ranks_share_are_refused(tmp_path: Path) -> None:
    """4 × 2 ranks, two of which hold each expert: without expert tensor parallelism all ranks share them."""
    write_mixture(tmp_path / "in", SPLIT, change=of_group(name="ep_size_4"))
    with pytest.raises(RefusedError, match=r"experts that the tensor ranks share \(group 1, ep_size_4\)"):
        survey(tmp_path / "in")


@pytest.mark.parametrize("version", ["0.19.1", "0.18.0", "x"])
def test_versions_that_could_not_load_it_are_refused_until_a_layout_is_named(
    tmp_path: Path, version: str
) -> None:
    write_mixture(tmp_path / "in", replace(PLAIN, version=version))
    with pytest.raises(CkptdError, match=f"saved by DeepSpeed {version} .* 0.19.2") as caught:
        convert(tmp_path / "in", tmp_path / "out")
    assert "--compat superset" in caught.value.hint
    assert caught.value.exit_code == 65
    assert convert(tmp_path / "in", tmp_path / "out", ConvertOptions(compat="strict")).notes


def auto_layer(**changes: Any) -> dict[str, Any]:
    ranks = [{"rank": 0, "experts": [0, 1]}, {"rank": 1, "experts": [2, 3]}]
    placement = {"version": 1, "num_experts": 4, "ep_size": 2, "ranks": ranks}
    layer = {"module_path": "layers.0.mlp", "num_experts": 4, "num_local_experts": 2, "ep_size": 2}
    return {**layer, "expert_placement": placement, "expert_key_prefix": AUTO, **changes}


AUTOEP = replace(PLAIN, experts=[{f"{AUTO}.w{i}": (2, 3, 4) for i in (1, 2, 3)}])


@pytest.mark.parametrize("ep", [1, 2])
def test_autoep_layers_are_whole_and_of_no_size(tmp_path: Path, ep: int) -> None:
    mixture = replace(AUTOEP, ep=ep, experts=[{f"{AUTO}.w{i}": (4 // ep, 3, 4) for i in (1, 2, 3)}])
    layer = auto_layer(ep_size=ep, expert_placement=None)
    made = write_mixture(tmp_path / "in", mixture, change_model=lambda m: m.update(ds_autoep_layers=[layer]))
    save = convert_here(tmp_path / "in", tmp_path / "out", "superset")
    check(made, tmp_path / "out", mixture)
    assert save.experts.notes() == ()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (auto_layer(expert_placement={"ranks": [{"rank": 0, "experts": [0, 2]}]}), "order of their own"),
        (auto_layer(expert_key_prefix="elsewhere.experts"), "elsewhere.experts.w1 of shape None"),
        (auto_layer(expert_key_prefix=None), "does not say which parameters"),
        (auto_layer(num_experts=6), "order of their own"),
        (
            auto_layer(num_experts=6, expert_placement=None),
            r"w1 of shape \(2, 3, 4\) is no part of 6 experts",
        ),
        (auto_layer(ep_size=4), "is for 4 ranks, the shards for 2"),
        ("nonsense", "does not say which parameters"),
    ],
)
def test_autoep_that_stacking_would_not_make_whole(tmp_path: Path, layer: Any, words: str) -> None:
    write_mixture(tmp_path / "in", AUTOEP, change_model=lambda model: model.update(ds_autoep_layers=[layer]))
    with pytest.raises(RefusedError, match=words):
        survey(tmp_path / "in")


def test_autoep_beside_other_experts_is_refused(tmp_path: Path) -> None:
    mixture = replace(AUTOEP, experts=[*AUTOEP.experts, {EXPERT: (2, 3)}])
    write_mixture(
        tmp_path / "in", mixture, change_model=lambda model: model.update(ds_autoep_layers=[auto_layer()])
    )
    with pytest.raises(RefusedError, match="of no AutoEP layer"):
        survey(tmp_path / "in")
