"""Optimizers with other states than Adam's: carried under their own names, or refused in one sentence."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.convert.supervise import ConvertOptions, convert
from ckptd.errors import RefusedError
from ckptd.torchfile.values import Tensor
from tests.unit.reading import load, tensor_bytes
from tests.unit.synthetic import Shapes, Shard, full_bytes, write_stage3, write_stage12

GROUPS: list[Shapes] = [{"w": (5, 3), "b": (1,)}, {"late": (9,), "none": (0, 4)}]
Change = Callable[[int, dict[str, Any]], None]


def states_of(inner: dict[str, Any]) -> dict[int, dict[str, Any]]:
    base = inner.get("base_optimizer_state") or inner["optimizer_state_dict"]
    found: dict[int, dict[str, Any]] = base["state"]
    return found


def renamed(**names: str | None) -> Change:
    """Adam's states under other names; None drops one."""

    def change(rank: int, inner: dict[str, Any]) -> None:
        for state in states_of(inner).values():
            for old, new in names.items():
                value = state.pop(old)
                if new is not None:
                    state[new] = value

    return change


KINDS: dict[str, tuple[Change, set[str], str | None]] = {
    "Lion": (renamed(exp_avg_sq=None), {"exp_avg"}, "exp_avg_sq"),
    "SGD with momentum": (
        renamed(exp_avg="momentum_buffer", exp_avg_sq=None, step=None),
        {"momentum_buffer"},
        "exp_avg, exp_avg_sq, step",
    ),
    "Adagrad": (renamed(exp_avg="sum", exp_avg_sq=None), {"sum"}, "exp_avg, exp_avg_sq"),
    "an optimizer without a step": (renamed(step=None), {"exp_avg", "exp_avg_sq"}, "wants step"),
    "Adam": (renamed(), {"exp_avg", "exp_avg_sq"}, None),
}
WRITERS = {1: write_stage12, 2: write_stage12, 3: write_stage3}


def written(stage: int, folder: Path, change: Change) -> None:
    options: dict[str, Any] = {} if stage == 3 else {"stage": stage}
    WRITERS[stage](folder, GROUPS, 3, change=change, **options)


def names_in(folder: Path) -> set[str]:
    return {p.stem for p in folder.iterdir()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", list(KINDS))
def test_states_keep_their_own_names(tmp_path: Path, stage: int, kind: str) -> None:
    change, wanted, words = KINDS[kind]
    written(stage, tmp_path / "tag", change)
    report = convert(tmp_path / "tag", tmp_path / "u", ConvertOptions(compat="superset", verify=True))
    has_step = "without a step" not in kind and "momentum" not in kind
    for name, shape in {**GROUPS[0], **GROUPS[1]}.items():
        folder = tmp_path / "u" / "zero" / name
        assert names_in(folder) == wanted | {"fp32"} | ({"step"} if has_step else set())
        key = "exp_avg_sq" if wanted == {"exp_avg_sq"} else "exp_avg"
        value, _, data = load(folder / f"{'exp_avg' if 'exp_avg' in wanted else min(wanted)}.pt")
        assert tensor_bytes(value["param"], data) == full_bytes(key, name, shape)
    value, _, _ = load(tmp_path / "u" / "zero" / "optimizer_state.pt")
    assert ("step" in value["optimizer_state_dict"]["state"][0]) is has_step, "no step is invented"
    said = [note for note in report.notes if "sub-groups" not in note]
    assert (words is None) == (said == [])
    assert words is None or words in " ".join(said)


def forget_group(inner: dict[str, Any]) -> None:
    states_of(inner)[1] = {}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_that_never_had_a_gradient_has_no_state_and_gets_none(tmp_path: Path, stage: int) -> None:
    written(stage, tmp_path / "tag", lambda _, inner: forget_group(inner))
    report = convert(tmp_path / "tag", tmp_path / "u", ConvertOptions(compat="superset"))
    assert names_in(tmp_path / "u" / "zero" / "w") == {"fp32", "exp_avg", "exp_avg_sq", "step"}
    assert names_in(tmp_path / "u" / "zero" / "late") == {"fp32"}
    assert "exp_avg, exp_avg_sq" in report.notes[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_first_group_may_be_the_one_without_state(tmp_path: Path, stage: int) -> None:
    def change(_: int, inner: dict[str, Any]) -> None:
        states_of(inner)[0] = {}

    written(stage, tmp_path / "tag", change)
    convert(tmp_path / "tag", tmp_path / "u", ConvertOptions(compat="superset"))
    value, _, _ = load(tmp_path / "u" / "zero" / "optimizer_state.pt")
    assert isinstance(value["optimizer_state_dict"]["state"][0]["step"], Tensor)
    assert names_in(tmp_path / "u" / "zero" / "w") == {"fp32"}


@pytest.mark.parametrize("stage", [2, 3])
def test_state_on_some_ranks_alone_is_refused(tmp_path: Path, stage: int) -> None:
    written(stage, tmp_path / "tag", lambda rank, inner: forget_group(inner) if rank == 1 else None)
    with pytest.raises(RefusedError, match="other optimizer states"):
        convert(tmp_path / "tag", tmp_path / "u", ConvertOptions())
    assert [p.name for p in tmp_path.iterdir()] == ["tag"]


def adding(group: int, name: str, numel: Callable[[int], int]) -> Change:
    def change(_: int, inner: dict[str, Any]) -> None:
        state = states_of(inner)[group]
        count = numel(state["exp_avg"].numel)
        state[name] = KEPT.tensor(struct.pack(f"<{count}f", *range(count)), (count,))

    return change


class KeptTensors(Shard):
    """Tensors that `change` adds go into whichever shard is being written."""


KEPT = KeptTensors()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("name", "numel"),
    [("row_var", lambda n: 3), ("worker_error", lambda n: n + 64), ("server_error", lambda n: n // 2 + 1)],
)
def test_states_that_are_not_one_value_per_element_are_refused(
    tmp_path: Path, stage: int, name: str, numel: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_payloads(monkeypatch)
    written(stage, tmp_path / "tag", adding(0, name, numel))
    with pytest.raises(RefusedError, match=f"state {name} is not one value per parameter element"):
        convert(tmp_path / "tag", tmp_path / "u", ConvertOptions())
    assert [p.name for p in tmp_path.iterdir()] == ["tag"]


def keep_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shard finds the payloads of `KEPT` beside its own."""
    original = Shard.__init__

    def made(self: Shard) -> None:
        original(self)
        self.payloads = KEPT.payloads

    monkeypatch.setattr(Shard, "__init__", made)


@pytest.mark.parametrize("stage", [2, 3])
def test_numbers_per_group_are_kept_and_told_of(tmp_path: Path, stage: int) -> None:
    """NAdam's mu_product: no file in a parameter's folder (the loader would open it), but not lost either."""

    def change(_: int, inner: dict[str, Any]) -> None:
        for state in states_of(inner).values():
            state["mu_product"] = 0.25

    written(stage, tmp_path / "tag", change)
    report = convert(tmp_path / "tag", tmp_path / "u", ConvertOptions(compat="superset"))
    assert "mu_product" in " ".join(report.notes)
    assert not list((tmp_path / "u").rglob("mu_product.pt"))
    value, _, _ = load(tmp_path / "u" / "zero" / "optimizer_state.pt")
    assert value["optimizer_state_dict"]["state"][0]["mu_product"] == 0.25


@pytest.mark.parametrize("stage", [2, 3])
def test_moments_of_16_bits_stay_so(tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_payloads(monkeypatch)

    def change(_: int, inner: dict[str, Any]) -> None:
        for state in states_of(inner).values():
            count = state["exp_avg"].numel
            data = struct.pack(f"<{count}H", *range(count))
            state["exp_avg"] = KEPT.tensor(data, (count,), "bfloat16")

    written(stage, tmp_path / "tag", change)
    convert(tmp_path / "tag", tmp_path / "u", ConvertOptions(compat="superset"))
    value, _, data = load(tmp_path / "u" / "zero" / "w" / "exp_avg.pt")
    assert value["param"].dtype == "bfloat16"
    assert tensor_bytes(value["param"], data)[:6] == struct.pack("<3H", 0, 1, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_is_refused(tmp_path: Path, stage: int) -> None:
    """Its momentum may have the length of the partition by chance: the length alone is no proof."""

    def change(_: int, inner: dict[str, Any]) -> None:
        base = inner.get("base_optimizer_state") or inner["optimizer_state_dict"]
        base["param_groups"][0]["use_muon"] = True

    written(stage, tmp_path / "tag", change)
    with pytest.raises(RefusedError, match="Muon") as caught:
        convert(tmp_path / "tag", tmp_path / "u", ConvertOptions())
    assert caught.value.exit_code == 65
    assert [p.name for p in tmp_path.iterdir()] == ["tag"]
