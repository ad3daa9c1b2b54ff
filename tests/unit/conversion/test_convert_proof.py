"""Masters are compared with the model's own weights before anything is published, and the form says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.conversion import dtypes
from ckptd.conversion.dtypes import first_unequal
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import RefusedError, UsageError
from ckptd.formats.torchfile.values import InertDict
from ckptd.formats.zero import stage12
from ckptd.formats.zero.experts import ExpertNames
from ckptd.formats.zero.proof import Proof
from tests.support.synthetic import Shapes, write_stage12
from tests.support.weights import model_states, read_folder, trained_views
from tests.unit.formats.zero.test_zero_ranges import survey

GROUPS: list[Shapes] = [{"a": (300, 7), "b": (300, 7)}, {"c": (11,)}]
FORMS = (ConvertOptions(), ConvertOptions(form="weights"), ConvertOptions(form="dcp"))
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def saved(folder: Path, change: Any = None, **more: Any) -> Path:
    """A save of two ranks whose model is its masters rounded; `change(module)` before it is written.

    `more` replaces keys of its model states.
    """
    made = write_stage12(folder, GROUPS, 2)
    module: dict[str, Any] = dict(trained_views(made, GROUPS))
    if change is not None:
        change(module)
    torch.save(model_states(GROUPS, 2, 2, module, **more), folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize("options", FORMS, ids=lambda options: options.form)
def test_a_form_says_what_was_compared(tmp_path: Path, options: ConvertOptions) -> None:
    report = convert(saved(tmp_path / "in", lambda module: module.pop("c")), tmp_path / "out", options)
    assert (report.compared_tensors, report.compared_elements) == (2, 4200)
    assert report.not_compared == ("1 tensors: the model states hold no weight of that name",)


@pytest.mark.parametrize("options", FORMS, ids=lambda options: options.form)
def test_a_master_that_is_not_the_weight_is_refused(tmp_path: Path, options: ConvertOptions) -> None:
    """With tensor, rank and byte; nothing is left, and the save is as it was."""

    def change(module: dict[str, torch.Tensor]) -> None:
        module["b"] = module["b"].clone()
        module["b"].view(torch.int16)[299, 6] ^= 1

    source = saved(tmp_path / "in", change)
    with pytest.raises(RefusedError) as caught:
        convert(source, tmp_path / "out", options)
    words = caught.value.message
    assert words.startswith("b is not the weight of the model: element 2099, byte ")
    assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt" in words
    assert "mp_rank_00_model_states.pt" in words
    assert caught.value.exit_code == 65
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_person_may_want_the_masters_as_they_are(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", lambda module: module.update(a=module["b"]))
    with pytest.raises(RefusedError, match="a is not the weight of the model: element 0, "):
        convert(source, tmp_path / "out")
    report = convert(source, tmp_path / "out", ConvertOptions(compare_masters=False))
    reason = "3 tensors: not asked for (--no-strict, or compare_masters = false)"
    assert (report.compared_tensors, report.not_compared) == (0, (reason,))


CHANGING: dict[str, dict[str, Any]] = {
    "ZenFlow": {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
    "quantized": {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
    "hybrid engine": {"hybrid_engine": {"enabled": True}},
}
"""Configurations in which DeepSpeed itself changes weights after the step of their masters."""


@pytest.mark.parametrize("name", CHANGING)
def test_weights_that_deepspeed_changes_are_not_compared(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "in", lambda module: module.update(a=module["b"]), ds_config=CHANGING[name])
    report = convert(source, tmp_path / "out")
    (reason,) = report.not_compared
    assert report.compared_tensors == 0
    assert reason.startswith("3 tensors: ")
    assert name in reason
    convert(source, tmp_path / "weights", ConvertOptions(form="weights", dtype="bf16"))
    held = read_folder(tmp_path / "weights")
    assert held["a"] != held["b"], "the masters, not the copies"


def test_a_weight_that_a_forward_made_float32_is_not_compared(tmp_path: Path) -> None:
    report = convert(saved(tmp_path / "in", lambda m: m.update(a=m["a"].float())), tmp_path / "out")
    assert (report.compared_tensors, len(report.not_compared)) == (2, 1)


def test_experts_of_which_some_are_frozen_have_their_own_names() -> None:
    """The optimizer of a rank knows one of its two; the files of experts hold all four."""
    layer = "moe.deepspeed_moe.experts.deepspeed_experts."
    names = ExpertNames([f"{layer}0.w"], [f"{layer}{n}.w" for n in range(4)], ep=2)
    assert names.globally(f"{layer}0.w", 1) == f"{layer}2.w"
    assert ExpertNames([f"{layer}0.w"]).globally(f"{layer}0.w", 1) == f"{layer}1.w"


def test_another_order_than_the_model_states_is_refused(tmp_path: Path) -> None:
    """Weights that round alike do not tell two new tensors of one shape apart; their order does."""

    def change(_: int, inner: dict[str, Any]) -> None:
        mapping = inner["param_slice_mappings"][0]
        swapped = InertDict(mapping.origin)
        swapped.update({"a" if n == "b" else "b": v for n, v in mapping.items() if n in ("a", "b")})
        inner["param_slice_mappings"][0] = swapped

    groups: list[Shapes] = [{"a": (4,), "b": (4,)}]
    write_stage12(tmp_path / "in", groups, 1, change=change)
    with pytest.raises(RefusedError, match="b of group 0 lies where mp_rank_00_model_states"):
        convert(tmp_path / "in", tmp_path / "out")
    convert(tmp_path / "in", tmp_path / "out", ConvertOptions(compare_masters=False))


def test_a_moment_lies_where_its_master_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = survey(saved(tmp_path / "in"))
    save.prove = Proof(save)
    assert len(list(save.parameters())) == 3
    address = stage12.parameters

    def parameters(*given: Any) -> Any:
        a, b, *others = address(*given)
        yield replace(a, states=(a.states[0], b.states[1], *a.states[2:]))
        yield from (b, *others)

    monkeypatch.setattr(stage12, "parameters", parameters)
    with pytest.raises(RefusedError, match="exp_avg of a lies at other elements than fp32"):
        list(save.parameters())


@pytest.mark.parametrize("has_numpy", [True, False])
@pytest.mark.parametrize("target", KINDS)
def test_rounding_is_compared_to_the_bit(
    target: str, has_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of bits, as torch rounds them; any NaN is as good as another."""

    def none() -> None:
        raise UsageError("no numpy here")

    dtypes._has_numpy.cache_clear()
    monkeypatch.setattr(dtypes, "_numpy", dtypes._numpy if has_numpy else none)
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), generator=generator).to(torch.int32)
    odd = [0.0, -0.0, float("inf"), float("nan"), 65504.0, 65519.0, 65520.0, -65520.0, 5.96e-8, 3e-8, -3.4e38]
    ties = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32)[:, None] * 65536 + torch.tensor(
        [0x7FFF, 0x8000, 0x8001], dtype=torch.int32
    )
    bits = torch.cat([ties.flatten(), bits])
    masters = torch.cat([torch.tensor(odd), bits.view(torch.float32)])
    for chosen in (masters, masters[masters.abs() < 60_000]):  # the second needs no second look
        weights = chosen.to(KINDS[target]).view(torch.int16)
        data = bytes(chosen.numpy().tobytes())
        assert first_unequal(data, bytes(weights.numpy().tobytes()), "float32", target) is None
        for number in range(4, len(weights), 997):
            if not torch.isnan(chosen[number]):
                other = weights.clone()
                other[number] ^= 1
                assert first_unequal(data, bytes(other.numpy().tobytes()), "float32", target) == number
                other[number] -= 2
                assert first_unequal(data, bytes(other.numpy().tobytes()), "float32", target) == number
    # what a page of 0xFF holds is no master of weights that are 0
    for word in (0xFFFFFFFF, 0x7FFFFFFF, 0x7FFF8000, 0x7F800001):
        assert first_unequal(word.to_bytes(4, "little") + bytes(4), bytes(4), "float32", target) == 0
    nans = torch.full((300,), float("nan")).numpy().tobytes()
    assert first_unequal(nans, b"\xff\x7f" * 300, "float32", target) is None
    assert first_unequal(nans, b"\xff\x7f" * 299 + b"\0\0", "float32", target) == 299
    dtypes._has_numpy.cache_clear()
    assert first_unequal(b"abcd", b"abcd", "float32", "float32") is None
    assert first_unequal(b"aaaabbbb", b"aaaabbbc", "float32", "float32") == 1
    assert first_unequal(b"aaaabbbb", b"aa", "float32", target) == 1
