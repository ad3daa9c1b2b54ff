"""Weights as safetensors, through the real children: what is in them, how they are divided, refusals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptd.base.files import opened_real
from ckptd.conversion.engine.staging import find_origin, list_source
from ckptd.conversion.engine.supervisor import convert, plan_request, write_plan
from ckptd.conversion.options import ConvertOptions, Dtype
from ckptd.conversion.outputs import Outputs
from ckptd.conversion.parts import Cast, Literal, Range
from ckptd.conversion.remote.source import look_at, make_mirror, of_commit
from ckptd.errors import BehindError, CkptdError, DamagedError, RefusedError, SourceChanged
from ckptd.maintenance.inspection import inspect_folder
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.directory import DirectoryStore
from tests.support.synthetic import Shapes, write_stage12
from tests.support.weights import (
    GROUPS,
    as_read,
    expected_masters,
    large_save,
    model_states,
    read_file,
    read_folder,
    stage_2,
    stage_3,
    trained_views,
)
from tests.unit.conversion.test_convert_children import _children_of, leftovers, tree

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = ConvertOptions(form="weights", low_priority=False)
FROZEN = {
    "base.w": torch.linspace(-3, 3, 35, dtype=torch.bfloat16).reshape(5, 7),
    "base.one": torch.tensor([2.5], dtype=torch.bfloat16),
}
BUFFERS = {
    "mean": torch.linspace(-1, 1, 5),
    "fine": torch.linspace(-1, 1, 3, dtype=torch.float64),
    "count": torch.tensor(12),
    "mask": torch.tensor([True, False]),
    "half": torch.linspace(-1, 1, 9, dtype=torch.bfloat16),
}


def cast_by_torch(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """As `model.to(dtype)` does: floating-point tensors alone."""
    return {n: as_read(t.to(dtype) if t.is_floating_point() else t) for n, t in tensors.items()}


def weights(dtype: Dtype = "fp32", **more: Any) -> ConvertOptions:
    return replace(WEIGHTS, dtype=dtype, **more)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stage_2_masters_frozen_and_buffers(tmp_path: Path, dtype: Dtype) -> None:
    made = stage_2(
        tmp_path / "in",
        {**FROZEN, **BUFFERS},
        buffer_names=[*BUFFERS],
        frozen_param_shapes={n: t.shape for n, t in FROZEN.items()},
        frozen_param_fragments=dict(FROZEN),
    )
    report = convert(made.folder, tmp_path / "w", weights(dtype, verify=True))
    expected = expected_masters(made, GROUPS, DTYPES[dtype])
    assert read_folder(tmp_path / "w") == expected | cast_by_torch({**FROZEN, **BUFFERS}, DTYPES[dtype])
    assert (report.form, report.layout, report.parameters) == (f"weights-{dtype}", "safetensors", 21)
    assert report.notes == ()
    manifest = json.loads((tmp_path / "w" / "ckptd.json").read_text())
    assert manifest["form"] == f"weights-{dtype}"
    assert manifest["plan_sha256"] == report.plan_sha256
    assert manifest["source"]["step"] == 7
    assert sorted(os.listdir(tmp_path / "w")) == ["ckptd.json", "model.safetensors"]


def planned(source: Path, options: ConvertOptions, tmp_path: Path, *, is_remote: bool) -> Outputs:
    """The plan of a form, as the child writes it."""
    folder = list_source(source)
    request = plan_request(folder, find_origin(folder), options, block=True)
    out = tempfile.TemporaryFile(dir=tmp_path)  # noqa: SIM115 (outputs are read from it)
    write_plan(request | {"partial": is_remote}, out)
    return Outputs(out)


def test_weights_of_the_models_own_type_are_its_copies(tmp_path: Path) -> None:
    """What file systems and stores can copy. The plan is the same where nobody compares."""
    made = stage_2(tmp_path / "in", {})
    plans = [planned(made.folder, weights("bf16"), tmp_path, is_remote=far) for far in (False, True)]
    assert plans[0].trailer.sha256 == plans[1].trailer.sha256
    header, *parts = plans[1].output("model.safetensors").parts
    assert isinstance(header, Literal)
    assert all(isinstance(part, Range) for part in parts)
    assert {plans[1].header.sources[part.source].path for part in parts if isinstance(part, Range)} == {
        "mp_rank_00_model_states.pt"
    }
    assert [len(list(plan.checks())) for plan in plans] == [14, 0]
    other = planned(made.folder, weights("fp16"), tmp_path, is_remote=False)
    assert all(isinstance(part, Cast) for part in other.output("model.safetensors").parts[1:])


def test_a_weight_that_lies_in_pieces_is_rounded(tmp_path: Path) -> None:
    """Each piece would be a range of the file's one line in the plan."""
    made = stage_2(tmp_path / "in", {})
    module = trained_views(made, GROUPS)
    module["blocks.3.w"] = module["blocks.3.w"].t().contiguous().t()
    torch.save(model_states(GROUPS, 3, 2, module), made.folder / "mp_rank_00_model_states.pt")
    plan = planned(made.folder, weights("bf16"), tmp_path, is_remote=False)
    assert sum(isinstance(part, Cast) for part in plan.output("model.safetensors").parts) == 1
    assert convert(made.folder, tmp_path / "w", weights("bf16")).compared_tensors == 14
    assert read_folder(tmp_path / "w") == expected_masters(made, GROUPS, torch.bfloat16)


def test_masters_are_rounded_where_the_model_is_none_of_theirs(tmp_path: Path) -> None:
    """A trainer that changes its model after the last step (EMA)."""
    made = stage_2(tmp_path / "in", {"norm": torch.zeros(33, dtype=torch.bfloat16)})
    convert(made.folder, tmp_path / "w", weights("bf16", compare_masters=False))
    assert read_folder(tmp_path / "w") == expected_masters(made, GROUPS, torch.bfloat16)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stage_3_frozen_parameters_come_from_every_rank(tmp_path: Path, dtype: Dtype, dp: int) -> None:
    made = stage_3(tmp_path / "in", dict(BUFFERS), FROZEN, dp, buffer_names=[*BUFFERS])
    convert(made.folder, tmp_path / "w", weights(dtype, verify=True))
    expected = expected_masters(made, GROUPS, DTYPES[dtype])
    assert read_folder(tmp_path / "w") == expected | cast_by_torch({**FROZEN, **BUFFERS}, DTYPES[dtype])


def test_a_frozen_fragment_that_is_missing_is_damage(tmp_path: Path) -> None:
    made = stage_3(tmp_path / "in", {}, FROZEN, 2)
    path = made.folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    root = torch.load(path, weights_only=False)
    del root["frozen_param_fragments"]["base.w"]
    torch.save(root, path)
    with pytest.raises(DamagedError, match=r"base\.w is not in every"):
        convert(made.folder, tmp_path / "w", WEIGHTS)
    root["frozen_param_fragments"]["base.w"] = torch.zeros(3, dtype=torch.bfloat16)
    torch.save(root, path)
    with pytest.raises(DamagedError, match=r"21 of 35 elements of the frozen base\.w"):
        convert(made.folder, tmp_path / "w", WEIGHTS)
    assert leftovers(tmp_path) == []


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    """By the save's own list, and by lying in one place; equal bytes elsewhere are no tie."""
    twin = torch.arange(6.0).bfloat16()
    made = write_stage12(tmp_path / "in", GROUPS, 2)
    trained = trained_views(made, GROUPS)
    module = {
        **trained,
        "head": trained["blocks.0.w"],
        "listed": torch.zeros(1),
        "a.frozen": twin,
        "b.frozen": twin,
        "c.frozen": twin.clone(),
        "view": twin[:3],
        "none.a": torch.zeros(0),
        "none.b": torch.zeros(0),
    }
    root = model_states(GROUPS, 2, 2, module, shared_params={"listed": "norm"})
    torch.save(root, made.folder / "mp_rank_00_model_states.pt")
    report = convert(made.folder, tmp_path / "w", WEIGHTS)
    found = read_folder(tmp_path / "w")
    others = {"a.frozen", "c.frozen", "view", "none.a", "none.b"}
    assert set(found) == {n for shapes in GROUPS for n in shapes} | others
    assert found["view"] == as_read(twin[:3].float())
    assert report.notes == (
        "stored once under another name: b.frozen = a.frozen, head = blocks.0.w, listed = norm",
    )


def test_tensors_with_gaps_are_packed(tmp_path: Path) -> None:
    square = torch.arange(24.0).reshape(4, 6)
    gaps = {"columns": square[:, 1:3], "turned": square.t(), "wide": torch.tensor([[7.0]]).expand(3, 2)}
    made = stage_2(tmp_path / "in", gaps)
    for dtype in DTYPES:
        convert(made.folder, tmp_path / dtype, weights(dtype))
        found = read_folder(tmp_path / dtype)
        assert {n: found[n] for n in gaps} == cast_by_torch(gaps, DTYPES[dtype])
    too_many = {"turned": torch.zeros(300, 300).t()}
    with pytest.raises(RefusedError, match="turned is stored transposed"):
        convert(stage_2(tmp_path / "many", too_many).folder, tmp_path / "w", WEIGHTS)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_save_leaves_out_is_said(tmp_path: Path, stage: int) -> None:
    left_out: dict[str, Any] = {"frozen_param_shapes": None, "frozen_param_fragments": None}
    if stage == 2:
        made = stage_2(tmp_path / "in", {"extra": None}, **left_out)
    else:
        made = stage_3(tmp_path / "in", {"extra": None}, {}, 2, **left_out)
    report = convert(made.folder, tmp_path / "w", WEIGHTS)
    assert read_folder(tmp_path / "w") == expected_masters(made, GROUPS, torch.float32)
    assert "exclude_frozen_parameters" in report.notes[0]
    assert report.notes[1:] == ("no tensor data in the save: extra",)


@pytest.mark.parametrize(
    ("base", "names_of_it", "is_said"),
    [
        ({}, {}, True),
        ({"model.q.base_layer.weight": torch.ones(2)}, {}, False),
        ({"model.q.running": torch.ones(2)}, {"buffer_names": ["model.q.running"]}, True),
    ],
    ids=["adapters alone", "with the base", "with a buffer"],
)
def test_adapters_without_their_base_are_named_at_stage_1(
    tmp_path: Path, base: dict[str, Any], names_of_it: dict[str, Any], is_said: bool
) -> None:
    """DeepSpeed writes no list of frozen parameters there; LoRA's names show what is not in the save."""
    groups: list[Shapes] = [
        {"model.q.lora_A.default.weight": (2, 8), "model.q.lora_B.default.weight": (8, 2)}
    ]
    made = write_stage12(tmp_path / "in", groups, 2, stage=1)
    module = {**trained_views(made, groups), **base}
    torch.save(model_states(groups, 2, 1, module, **names_of_it), made.folder / "mp_rank_00_model_states.pt")
    report = convert(made.folder, tmp_path / "w", WEIGHTS)
    assert [note for note in report.notes if "adapters alone" in note] == [*report.notes]
    assert bool(report.notes) is is_said


def test_a_common_prefix_is_dropped_and_a_partial_one_kept(tmp_path: Path) -> None:
    groups: list[Shapes] = [{"module.a": (3,), "module.b": (2, 2)}]
    made = write_stage12(tmp_path / "in", groups, 1)
    convert(made.folder, tmp_path / "w", WEIGHTS)
    assert set(read_folder(tmp_path / "w")) == {"a", "b"}
    root = model_states(groups, 1, 2, {"other": torch.zeros(2)})
    torch.save(root, made.folder / "mp_rank_00_model_states.pt")
    convert(made.folder, tmp_path / "v", WEIGHTS)
    assert set(read_folder(tmp_path / "v")) == {"module.a", "module.b", "other"}


def test_files_are_filled_up_to_the_limit_and_indexed(tmp_path: Path) -> None:
    big = torch.linspace(0, 1, 1000)
    made = stage_2(tmp_path / "in", {"big": big, "after": torch.zeros(2)}, buffer_names=["big", "after"])
    convert(made.folder, tmp_path / "one", WEIGHTS)
    convert(made.folder, tmp_path / "w", weights(max_shard_bytes=1000))
    assert read_folder(tmp_path / "w") == read_folder(tmp_path / "one")
    sizes = {
        p.name: sum(len(r.data) for r in read_file(p).values())
        for p in sorted((tmp_path / "w").glob("*.safetensors"))
    }
    assert list(sizes) == [f"model-{i:05d}-of-{len(sizes):05d}.safetensors" for i in range(1, len(sizes) + 1)]
    assert list(sizes.values()) == [960] * 6 + [136, 4000, 8]
    halves = convert(made.folder, tmp_path / "half", weights("bf16", max_shard_bytes=1000))
    assert halves.files == 7


def test_the_library_reads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    mixed = {"a": torch.tensor([True]), "b": torch.arange(3), "é": torch.zeros(2), "z": torch.tensor(1.5)}
    made = stage_2(tmp_path / "in", mixed, buffer_names=[*mixed])
    for dtype in DTYPES:
        convert(made.folder, tmp_path / dtype, weights(dtype))
        with safetensors.safe_open(tmp_path / dtype / "model.safetensors", "pt") as opened:
            found = {name: as_read(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
            assert opened.metadata() == {"format": "pt"}
        assert found == read_folder(tmp_path / dtype)


def test_inspect_knows_exported_weights_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    made = stage_2(tmp_path / "save" / "global_step7", {})
    out = tmp_path / "save" / "w"
    convert(made.folder, out, weights("bf16", max_shard_bytes=1000))
    seen = inspect_folder(out)
    checkpoint = seen.checkpoints[0]
    assert (seen.kind, seen.is_sound) == ("weights", True)
    assert (checkpoint.dtype, checkpoint.step, checkpoint.zero_stage) == ("bf16", 7, 2)
    assert (checkpoint.tensors, checkpoint.layout) == (14, "safetensors")
    assert [c.kind for c in inspect_folder(tmp_path / "save").checkpoints] == ["zero", "weights"]
    first = next(out.glob("model-00001*"))
    whole = first.read_bytes()
    for spoiled, words in (
        (whole[:-1], "instead of"),
        (whole[:40], "ends inside its header"),
        (whole[:8] + b"[" + whole[9:], "no safetensors header"),
        (whole.replace(b"[0,240]", b"[8,240]"), "a gap"),
    ):
        first.write_bytes(spoiled)
        assert words in str(inspect_folder(out).checkpoints[0].reason)
    first.write_bytes(whole)
    first.rename(out / "model-other.safetensors")
    assert inspect_folder(out).checkpoints[0].reason == f"{first.name} is missing"
    (out / "model.safetensors.index.json").unlink()
    assert "index.json is missing" in str(inspect_folder(out).checkpoints[0].reason)


def test_complex_tensors_beyond_the_format_are_refused(tmp_path: Path) -> None:
    made = stage_2(tmp_path / "in", {"phase": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(RefusedError, match="phase is of type complex128"):
        convert(made.folder, tmp_path / "w", WEIGHTS)


SIDE = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "merges.txt")


def test_configuration_and_tokenizer_are_taken_along(tmp_path: Path) -> None:
    """From the folder above when it is the trainer's; never from a folder that only happens to be there."""
    above = tmp_path / "checkpoint-7"
    made = stage_2(above / "global_step7", {})
    for name in (*SIDE, "training_args.bin", "trainer_state.json", "optimizer.json"):
        (above / name).write_text(name)
    (above / "special_tokens_map.json").symlink_to(above / "config.json")
    report = convert(made.folder, tmp_path / "w", weights("bf16", verify=True))
    found = set(os.listdir(tmp_path / "w"))
    assert found == {*SIDE, "ckptd.json", "model.safetensors"}
    assert all((tmp_path / "w" / name).read_text() == name for name in SIDE)
    manifest = json.loads((tmp_path / "w" / "ckptd.json").read_text())
    assert {"config.json", "global_step7/mp_rank_00_model_states.pt"} <= set(
        manifest["source"]["fingerprints"]
    )
    assert report.files == len(SIDE) + 1
    (above / "trainer_state.json").unlink()
    convert(made.folder, tmp_path / "v", WEIGHTS)
    assert set(os.listdir(tmp_path / "v")) == {"ckptd.json", "model.safetensors"}


LORA = "base_model.model.layers.0.q"
ADAPTERS: list[Shapes] = [
    {
        f"{LORA}.lora_A.default.weight": (4, 30),
        f"{LORA}.lora_B.default.weight": (30, 4),
        f"{LORA}.lora_magnitude_vector.default.weight": (33,),
        "base_model.model.embed.lora_embedding_A.default": (4, 7),
        "base_model.model.embed.token_adapter.trainable_tokens_delta.default": (2, 5),
        "base_model.model.score.modules_to_save.default.weight": (3, 8),
        f"{LORA}.lora_A.other.weight": (2, 30),
    }
]
SAVED = {
    f"{LORA}.lora_A.weight": (4, 30),
    f"{LORA}.lora_B.weight": (30, 4),
    f"{LORA}.lora_magnitude_vector": (33,),
    "base_model.model.embed.lora_embedding_A": (4, 7),
    "base_model.model.embed.token_adapter.trainable_tokens_delta": (2, 5),
    "base_model.model.score.weight": (3, 8),
}
BASE = {
    f"{LORA}.base_layer.weight": torch.linspace(-2, 2, 900, dtype=torch.bfloat16).reshape(30, 30),
    "base_model.model.score.original_module.weight": torch.ones(3, 8, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("limit", [2_000_000, 1_000])
def test_adapters_are_files_that_peft_loads(tmp_path: Path, has_base: bool, limit: int) -> None:
    """PEFT's names without the adapter's, whole whatever the limit, the configuration beside them."""
    above = tmp_path / "checkpoint-7"
    made = write_stage12(above / "global_step7", ADAPTERS, 3, stage=2)
    module = {**trained_views(made, ADAPTERS), **(BASE if has_base else {})}
    root = model_states(ADAPTERS, 3, 2, module, frozen_param_shapes=None)
    torch.save(root, made.folder / "mp_rank_00_model_states.pt")
    (above / "trainer_state.json").touch()
    (above / "adapter_config.json").write_text("{}")
    for name in ("other", "stranger"):
        (above / name).mkdir()
        (above / name / "adapter_config.json").write_text(f'{{"of": "{name}"}}')
    convert(made.folder, tmp_path / "w", weights(verify=True, max_shard_bytes=limit))
    adapter = read_file(tmp_path / "w" / "adapter_model.safetensors")
    assert {name: read.shape for name, read in adapter.items()} == SAVED
    masters = expected_masters(made, ADAPTERS, torch.float32)
    assert adapter[f"{LORA}.lora_A.weight"] == masters[f"{LORA}.lora_A.default.weight"]
    other = read_file(tmp_path / "w" / "other" / "adapter_model.safetensors")
    assert other == {f"{LORA}.lora_A.weight": masters[f"{LORA}.lora_A.other.weight"]}
    base = {f"{name}" for name in os.listdir(tmp_path / "w") if name.startswith("model")}
    assert bool(base) == has_base
    if has_base:
        assert set(read_folder(tmp_path / "w")) == set(BASE)
    assert (tmp_path / "w" / "adapter_config.json").read_text() == "{}"
    assert (tmp_path / "w" / "other" / "adapter_config.json").read_text() == '{"of": "other"}'
    assert not (tmp_path / "w" / "stranger").exists()
    seen = inspect_folder(tmp_path / "w")
    assert seen.checkpoints[0].is_complete, seen.checkpoints[0].reason


def test_an_adapter_of_another_name_alone_has_its_configuration(tmp_path: Path) -> None:
    """Nothing but `policy/adapter_config.json` says that the folder above the shards is the trainer's."""
    above = tmp_path / "checkpoint-7"
    shapes: list[Shapes] = [{f"{LORA}.lora_A.policy.weight": (2, 30)}]
    made = write_stage12(above / "global_step7", shapes, 2, stage=2)
    root = model_states(shapes, 2, 2, {**trained_views(made, shapes), **BASE}, frozen_param_shapes=None)
    torch.save(root, made.folder / "mp_rank_00_model_states.pt")
    (above / "trainer_state.json").touch()
    (above / "policy").mkdir()
    (above / "policy" / "adapter_config.json").write_text("{}")
    (above / "linked").symlink_to("policy")
    convert(made.folder, tmp_path / "w", weights(verify=True))
    found = {str(path.relative_to(tmp_path / "w")) for path in (tmp_path / "w").rglob("*.*")}
    assert found == {
        *("policy/adapter_config.json", "policy/adapter_model.safetensors"),
        *("ckptd.json", "model.safetensors"),
    }


def test_the_configuration_of_an_adapter_comes_along_from_a_remote(tmp_path: Path) -> None:
    above = tmp_path / "nas" / "checkpoint-7"
    shapes: list[Shapes] = [{f"{LORA}.lora_A.policy.weight": (2, 30)}]
    write_stage12(above / "global_step7", shapes, 2, stage=2)
    for name in ("trainer_state.json", "policy/adapter_config.json", "policy/optimizer.json", "config.json"):
        (above / name).parent.mkdir(exist_ok=True)
        (above / name).write_text("{}")
    listed: list[Any] = [
        SimpleNamespace(
            path=str(path.relative_to(above)),
            key=str(path.relative_to(tmp_path / "nas")),
            bytes=path.stat().st_size,
            checksums=SimpleNamespace(crc64nvme=None),
            mode=0o644,
            fingerprint="",
        )
        for path in above.rglob("*")
        if path.is_file()
    ]
    store = DirectoryStore(str(tmp_path / "nas"))
    source = of_commit(str(tmp_path / "nas"), Access(), store, "checkpoint-7", "checkpoint-7", listed)
    place = tmp_path / "mirror"
    place.mkdir()
    with opened_real(str(place)) as fd:
        make_mirror(source, fd, companions=True)
    beside = {str(path.relative_to(place)) for path in place.rglob("*.json")}
    assert beside == {"config.json", "policy/adapter_config.json"}
    origin = find_origin(list_source(place / "global_step7"))
    assert set(origin.companions) == beside


@pytest.mark.parametrize("named", ["global_step7", "latest"])
def test_the_configuration_of_an_adapter_comes_along_from_a_folder_without_a_commit(
    tmp_path: Path, named: str
) -> None:
    """A copy of a trainer's folder on a share: named by the folder of the shards, or by the one above."""
    above = tmp_path / "share" / "run"
    shapes: list[Shapes] = [{f"{LORA}.lora_A.policy.weight": (2, 30)}]
    write_stage12(above / "global_step7", shapes, 2, stage=2)
    (above / "latest").write_text("global_step7")
    for name in ("policy/adapter_config.json", "policy/optimizer.json"):
        (above / name).parent.mkdir(exist_ok=True)
        (above / name).write_text("{}")
    source = look_at(str(above if named == "latest" else above / named), {})
    place = tmp_path / "mirror"
    place.mkdir()
    with opened_real(str(place)) as fd:
        make_mirror(source, fd, companions=True)
    assert {str(path.relative_to(place)) for path in place.rglob("*.json")} == {"policy/adapter_config.json"}
    assert find_origin(list_source(place / "global_step7")).companions == ("policy/adapter_config.json",)


def test_latest_universal_is_not_for_weights(tmp_path: Path) -> None:
    made = stage_2(tmp_path / "in", {})
    convert(made.folder, tmp_path / "w", weights(write_latest=True))
    assert not (tmp_path / "latest_universal").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "in"
    large_save(folder, 6_000_000, 10)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_does_not_follow_the_size(large: Path, tmp_path: Path, dtype: Dtype) -> None:
    """240 MB of masters in one file, made in stripes by several threads."""
    report = convert(large, tmp_path / "w", weights(dtype))
    assert report.peak_rss_bytes <= 128 << 20
    raw = torch.load(large / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False, mmap=True)[
        "optimizer_state_dict"
    ]["single_partition_of_fp32_groups"][0]
    found = read_file(tmp_path / "w" / "model.safetensors")
    for i in range(10):
        part = raw[i * 6_000_000 : (i + 1) * 6_000_000].reshape(6000, 1000)
        assert found[f"blocks.{i}.w"] == as_read(part.to(DTYPES[dtype]))


def _kill_executor_after(pattern: str, count: int, partial: Path, over: threading.Event) -> None:
    while not over.wait(0.001):
        if len(list(partial.glob(pattern))) >= count:
            pids = _children_of(os.getpid())  # none yet while it is planned again
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if pids:
                return


@pytest.mark.faults
def test_killed_in_the_middle_and_run_again_gives_the_same_bytes(large: Path, tmp_path: Path) -> None:
    options = weights("bf16", max_shard_bytes=30_000_000)
    convert(large, tmp_path / "whole", options)
    place = tmp_path / ".w.ckptd-partial"
    kills = 0
    for pattern, count in (("tmp/*", 1), ("out/*.safetensors", 1), ("out/*.safetensors", 3)) * 3:
        over = threading.Event()
        killer = threading.Thread(target=_kill_executor_after, args=(pattern, count, place, over))
        killer.start()
        try:
            convert(large, tmp_path / "w", options)
        except BehindError:
            kills += 1
            if kills == 3:
                break
        else:
            if kills >= 2:
                break
            kills = 0  # on a busy machine the killer came too late
            shutil.rmtree(tmp_path / "w")
        finally:
            over.set()
            killer.join()
    assert kills >= 2
    if not (tmp_path / "w").exists():
        assert convert(large, tmp_path / "w", options).resumed_files >= 1
    assert tree(tmp_path / "w") == tree(tmp_path / "whole")
    assert leftovers(tmp_path) == []


def test_a_source_that_changes_meanwhile_publishes_nothing(large: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for path in large.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    planned = tmp_path / ".w.ckptd-partial" / "plan.jsonl"

    def touch() -> bool:
        """Asked every tenth of a second; the plan has its name just before the executor starts."""
        if planned.exists():
            os.utime(source / "mp_rank_00_model_states.pt")
        return False

    with pytest.raises(SourceChanged):
        convert(source, tmp_path / "w", weights("bf16"), should_pause=touch)
    assert not (tmp_path / "w").exists()


def test_a_pipeline_without_its_layers_is_damage(tmp_path: Path) -> None:
    groups: list[Shapes] = [{"0.w": (3,), "1.w": (2,)}]
    made = write_stage12(tmp_path / "in", groups, 1, stage=1)
    root = {**model_states(groups, 1, 1, {}), "module": None}
    torch.save(root, made.folder / "mp_rank_00_model_states.pt")
    trained = trained_views(made, groups)
    torch.save({"w": trained["0.w"], "b": torch.ones(2)}, made.folder / "layer_00-model_states.pt")
    with pytest.raises(CkptdError, match="layer_01") as caught:
        convert(made.folder, tmp_path / "w", WEIGHTS)
    assert caught.value.exit_code == 65
    torch.save({"w": trained["1.w"]}, made.folder / "layer_01-model_states.pt")
    report = convert(made.folder, tmp_path / "w", WEIGHTS)
    found = read_folder(tmp_path / "w")
    assert found == expected_masters(made, groups, torch.float32) | {"0.b": as_read(torch.ones(2))}
    assert "pipeline" in report.notes[0]
