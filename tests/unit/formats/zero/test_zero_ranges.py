"""Which bytes make which parameter: any shapes, any number of ranks, every stage, without torch."""

from __future__ import annotations

import io
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.base import files
from ckptd.conversion.parts import Literal, Range
from ckptd.conversion.plan import (
    Header,
    OutputCheck,
    OutputFile,
    OutputLink,
    PlanReader,
    PlanWriter,
    SourceFile,
)
from ckptd.conversion.universal import UniversalLayout, choose_layout
from ckptd.core.model.layouts import parse_shard_name
from ckptd.errors import CkptdError, DamagedError, RefusedError
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero.save import Save, notes
from ckptd.formats.zero.shards import SourceShard
from ckptd.formats.zero.survey import Surveyor
from tests.support.reading import load, tensor_bytes
from tests.support.synthetic import STATES, Made, Shapes, Shard, fragment_address, write_stage3, write_stage12

SHAPE = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
GROUPS = st.lists(
    st.dictionaries(st.sampled_from([f"layer.{i}.w" for i in range(12)]), SHAPE, min_size=1, max_size=5),
    min_size=1,
    max_size=3,
)


def survey(folder: Path) -> Save:
    listed = []
    for path in sorted(folder.iterdir()):
        shard = parse_shard_name(path.name)
        if shard is not None:
            listed.append(SourceShard(0, path.name, shard.role.value, shard.shard.d, shard.shard.mm))
    with files.opened_dir(folder) as fd:
        return Surveyor(lambda path: files.reading(fd, path), listed, []).survey()


def convert_here(folder: Path, out: Path, layout: str, *, block: bool = False) -> Save:
    """Plan and execute in this process, naively: what the children must come to as well."""
    save = survey(folder)
    stream = io.BytesIO()
    sources = tuple(SourceFile(r.path, r.size_bytes, r.fingerprint) for r in save.reads)
    header = Header("universal", layout, 4096 * block, save.stage, save.dp, save.ds_version, 7, 1, sources)
    writer = PlanWriter(stream, header, [r.identity for r in save.reads])
    for output in UniversalLayout(save, layout, block=block, strict=True).outputs():
        writer.add(output)
    writer.finish()
    stream.seek(0)
    plan = PlanReader(stream)
    contents = [(folder / s.path).read_bytes() for s in plan.header.sources]
    for output in plan:
        if isinstance(output, OutputCheck):
            continue
        path = out / output.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(output, OutputLink):
            path.hardlink_to(out / output.target)
            continue
        assert isinstance(output, OutputFile)
        with path.open("wb") as made:
            for part in output.parts:
                if isinstance(part, Literal):
                    made.write(part.data)
                else:
                    assert isinstance(part, Range)
                    made.write(contents[part.source][part.offset : part.offset + part.nbytes])
        assert path.stat().st_size == output.nbytes
    return save


def check(made: Made, out: Path, groups: list[Shapes], *, bare: bool) -> None:
    for shapes in groups:
        for name, shape in shapes.items():
            for state in STATES:
                value, _, data = load(out / "zero" / name / f"{state}.pt")
                tensor = value if bare else value["param"]
                assert isinstance(tensor, Tensor)
                assert tensor.shape == ((prod(shape),) if bare else shape)
                assert tensor_bytes(tensor, data) == made.expected[name, state]
                if not bare:
                    assert value["cat_dim"] == 0
            assert (out / "zero" / name / "step.pt").exists() is not bare


def unique(groups: list[Shapes]) -> list[Shapes]:
    """Parameter names differ between groups."""
    return [{f"g{i}.{name}": shape for name, shape in shapes.items()} for i, shapes in enumerate(groups)]


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, dp=st.integers(1, 5), align=st.integers(1, 4), bf16=st.booleans(), block=st.booleans())
def test_stage_1_and_2(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[Shapes],
    dp: int,
    align: int,
    bf16: bool,
    block: bool,
) -> None:
    folder, out = tmp_path_factory.mktemp("in"), tmp_path_factory.mktemp("out")
    groups = unique(groups)
    made = write_stage12(folder, groups, dp, stage=2 - bf16, align=align, bf16_optimizer=bf16)
    save = convert_here(folder, out, "strict", block=block)
    assert save.stage == (1 if bf16 else 2)
    check(made, out, groups, bare=False)


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, dp=st.integers(1, 5), superset=st.booleans())
def test_stage_3(
    tmp_path_factory: pytest.TempPathFactory, groups: list[Shapes], dp: int, superset: bool
) -> None:
    folder, out = tmp_path_factory.mktemp("in"), tmp_path_factory.mktemp("out")
    groups = unique(groups)
    made = write_stage3(folder, groups, dp)
    convert_here(folder, out, "superset" if superset else "strict")
    check(made, out, groups, bare=not superset)


def test_the_superset_serves_every_stage(tmp_path: Path) -> None:
    groups: list[Shapes] = [{"a": (3, 5), "b": (7,)}]
    for stage, write in ((2, write_stage12), (3, write_stage3)):
        out = tmp_path / f"out{stage}"
        write(tmp_path / f"in{stage}", groups, 2)
        convert_here(tmp_path / f"in{stage}", out, "superset")
        assert (out / "mp_rank_00_model_states.pt").exists()
        assert (out / "zero_pp_rank_0_mp_rank_00_model_states.pt").exists()
        state, _, _ = load(out / "zero" / "optimizer_state.pt")
        assert {"param_groups", "optimizer_state_dict", "ds_version", "partition_count"} <= set(state)
        assert isinstance(state["optimizer_state_dict"]["state"][0]["step"], Tensor)
        assert "fp32_flat_groups" not in state
        assert (out / "zero" / "optimizer_state.pt").stat().st_size < 4096, "slim"


def test_vocabulary_padding_and_patterns_change_headers_only(tmp_path: Path) -> None:
    def info(model: dict[str, Any]) -> None:
        model["universal_checkpoint_info"] = {
            "vocabulary_parameter_patterns": ["emb.*"],
            "original_vocab_size": 5,
            "tp_replicated_parameter_patterns": ["norm"],
            "parameter_with_row_parallelism_patterns": ["row"],
            "parameter_with_2_sub_params_cat_dim_0": ["glu"],
        }

    groups: list[Shapes] = [{"emb.w": (8, 3), "norm": (4,), "row": (2, 2), "glu": (4, 2)}]
    made = write_stage12(tmp_path / "in", groups, 2, change_model=info)
    convert_here(tmp_path / "in", tmp_path / "out", "strict")
    values = {n: load(tmp_path / "out" / "zero" / n / "fp32.pt") for n in groups[0]}
    embedding, _, data = values["emb.w"]
    assert embedding["vocab_tensor"] is True
    assert embedding["param"].shape == (5, 3)
    assert tensor_bytes(embedding["param"], data) == made.expected["emb.w", "fp32"][: 4 * 15]
    assert list(values["norm"][0]) == ["param"]
    assert values["row"][0]["cat_dim"] == 1
    assert values["glu"][0]["param_n_sub_params"] == 2


def spoil(key: str, value: object) -> Any:
    def change(rank: int, inner: dict[str, Any]) -> None:
        if rank == 1:
            inner[key] = value

    return change


def overlapping(rank: int, inner: dict[str, Any]) -> None:
    mapping = inner["param_slice_mappings"][0]
    first, second = list(mapping)[:2]
    mapping[second] = fragment_address(mapping[second].state["numel"], mapping[first].state["start"])


def losing(rank: int, inner: dict[str, Any]) -> None:
    mapping = inner["param_slice_mappings"][0]
    name = next(iter(mapping))
    mapping[name] = fragment_address(mapping[name].state["numel"] - 1, mapping[name].state["start"])


def leaving(rank: int, inner: dict[str, Any]) -> None:
    mapping = inner["param_slice_mappings"][0]
    name = list(mapping)[-1]
    mapping[name] = fragment_address(mapping[name].state["numel"], mapping[name].state["start"] + 40)


def unknown(rank: int, inner: dict[str, Any]) -> None:
    inner["param_slice_mappings"][0]["stranger"] = fragment_address(0, 0)


def elastic(rank: int, inner: dict[str, Any]) -> None:
    inner["base_optimizer_state"] = [inner["base_optimizer_state"]]


def no_moment(rank: int, inner: dict[str, Any]) -> None:
    if rank == 1:
        del inner["base_optimizer_state"]["state"][0]["exp_avg"]


TWO: list[Shapes] = [{"a": (6,), "b": (6,), "c": (5,)}]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (overlapping, DamagedError, "overlaps|belong to no parameter|the shards hold"),
        (losing, DamagedError, "belong to no parameter"),
        (leaving, DamagedError, "leave the|belong to no parameter"),
        (unknown, DamagedError, "stranger"),
        (elastic, RefusedError, "elastic"),
        (no_moment, RefusedError, "other optimizer states"),
        (spoil("partition_count", [3]), RefusedError, "two saves"),
        (spoil("param_slice_mappings", None), RefusedError, "lacks"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, change: Any, error: type[CkptdError], words: str) -> None:
    write_stage12(tmp_path / "in", TWO, 2, change=change)
    with pytest.raises(error, match=words):
        convert_here(tmp_path / "in", tmp_path / "out", "strict")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_stage12(tmp_path / "in", TWO, 3)
    (tmp_path / "in" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(DamagedError, match=r"bf16_zero_pp_rank_1_mp_rank_00_optim_states\.pt"):
        survey(tmp_path / "in")
    write_stage3(tmp_path / "in3", TWO, 3)
    (tmp_path / "in3" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(DamagedError, match=r"zero_pp_rank_1_mp_rank_00_model_states\.pt"):
        survey(tmp_path / "in3")


def test_shards_of_two_saves_are_refused(tmp_path: Path) -> None:
    write_stage12(tmp_path / "old", TWO, 2, step=6)
    write_stage12(tmp_path / "new", TWO, 2, step=8)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "old" / name).rename(tmp_path / "new" / name)
    with pytest.raises(RefusedError, match="optimizer_step 6"):
        survey(tmp_path / "new")


def test_stale_shards_of_a_larger_world_are_left_out(tmp_path: Path) -> None:
    made = write_stage12(tmp_path / "in", TWO, 2)
    write_stage12(tmp_path / "larger", TWO, 4)
    stale = "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    (tmp_path / "larger" / stale).rename(tmp_path / "in" / stale)
    convert_here(tmp_path / "in", tmp_path / "out", "strict")
    check(made, tmp_path / "out", TWO, bare=False)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("mp_world_size", 2, "contradicts itself"),
        ("dp_world_size", 4, "of 2 ranks"),
    ],
)
def test_what_is_not_supported_says_what_it_is(tmp_path: Path, key: str, value: object, words: str) -> None:
    def change(model: dict[str, Any]) -> None:
        model[key] = value

    write_stage12(tmp_path / "in", TWO, 2, change_model=change)
    with pytest.raises(RefusedError, match=words) as caught:
        survey(tmp_path / "in")
    assert caught.value.exit_code == 65


def test_a_missing_tensor_rank_is_named(tmp_path: Path) -> None:
    def change(model: dict[str, Any]) -> None:
        model["checkpoint_parallel_dimensions"] = {"tp_degree": 2, "pp_degree": 1}
        model["mp_world_size"] = 2

    write_stage12(tmp_path / "in", TWO, 2, change_model=change)
    with pytest.raises(DamagedError, match=r"2 × 2 ranks lacks .*zero_pp_rank_0_mp_rank_01_optim_states.pt"):
        survey(tmp_path / "in")


def test_parameter_names_never_leave_their_folder(tmp_path: Path) -> None:
    write_stage12(tmp_path / "in", [{"../../escape": (2,)}], 1)
    with pytest.raises(RefusedError, match="escape"):
        convert_here(tmp_path / "in", tmp_path / "out", "superset")
    assert [path.name for path in tmp_path.iterdir() if path.name != "out"] == ["in"]


def test_other_optimizers_keep_their_own_state_names(tmp_path: Path) -> None:
    def lion(rank: int, inner: dict[str, Any]) -> None:
        for state in inner["base_optimizer_state"]["state"].values():
            del state["exp_avg_sq"], state["step"]

    write_stage12(tmp_path / "in", TWO, 2, change=lion)
    convert_here(tmp_path / "in", tmp_path / "out", "superset")
    assert {p.name for p in (tmp_path / "out" / "zero" / "a").iterdir()} == {"fp32.pt", "exp_avg.pt"}


def test_auto_follows_the_recorded_version() -> None:
    assert choose_layout("auto", "0.19.8+abc") == "superset"
    assert choose_layout("auto", "0.18.0") == "strict"
    assert choose_layout("auto", "") == "strict"
    assert choose_layout("strict", "0.19.8") == "strict"


def test_several_sub_groups_of_stage_3_are_told(tmp_path: Path) -> None:
    """DeepSpeed's loader gives them one step tensor, which each of them counts up (docs/formats.md §5.1)."""
    write_stage3(tmp_path / "one", [{"a": (3,)}], 2)
    write_stage3(tmp_path / "two", [{"a": (3,)}, {"b": (4,)}], 2)
    write_stage12(tmp_path / "two12", [{"a": (3,)}, {"b": (4,)}], 2)
    assert notes(survey(tmp_path / "one")) == notes(survey(tmp_path / "two12")) == ()
    (said,) = notes(survey(tmp_path / "two"))
    assert said.startswith("saved in 2 sub-groups")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_save_that_names_no_degree_is_as_wide_as_its_files(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ds_to_universal takes shards without `partition_count`; a rank that lacks is found by its elements."""
    original = Shard.save

    def save(self: Shard, path: Path, root: Any) -> None:
        root.pop("dp_world_size", None)
        root.get("optimizer_state_dict", {}).pop("partition_count", None)
        original(self, path, root)

    monkeypatch.setattr(Shard, "save", save)
    groups: list[Shapes] = [{"a": (30,), "b": (5, 3)}]
    made = (write_stage3 if stage == 3 else write_stage12)(tmp_path / "in", groups, 3)
    convert_here(tmp_path / "in", tmp_path / "out", "superset")
    value, _, data = load(tmp_path / "out" / "zero" / "b" / "fp32.pt")
    assert tensor_bytes(value["param"], data) == made.expected["b", "fp32"]
    for path in (tmp_path / "in").glob("*zero_pp_rank_2_*"):
        path.unlink()
    with pytest.raises(DamagedError, match="elements"):
        convert_here(tmp_path / "in", tmp_path / "short", "superset")
