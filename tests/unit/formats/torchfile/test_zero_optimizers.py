"""Optimizers with other states than Adam's: carried under their own names, or refused in one sentence."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero.optimizers import stage3_loader_word
from ckptd.maintenance.inspection import inspect_folder
from tests.support.reading import load, tensor_bytes
from tests.support.synthetic import Shapes, Shard, full_bytes, write_stage3, write_stage12
from tests.support.weights import read_folder

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


def elastic(inner: dict[str, Any]) -> None:
    inner["base_optimizer_state"] = [inner["base_optimizer_state"]["state"]]


def listed(inner: dict[str, Any]) -> None:
    states_of(inner)[0]["exp_avg"] = [1, 2]


def on_some_ranks(rank: int, inner: dict[str, Any]) -> None:
    if rank == 1:
        forget_group(inner)


STRANGE: dict[str, Change] = {
    "not one value per parameter element": lambda _, inner: listed(inner),
    "other optimizer states": on_some_ranks,
    "elastic": lambda _, inner: elastic(inner),
}


@pytest.mark.parametrize(
    ("stage", "words"), [(s, w) for s in (1, 2, 3) for w in STRANGE if (s, w) != (3, "elastic")]
)
def test_weights_need_the_masters_alone(tmp_path: Path, stage: int, words: str) -> None:
    """What has no universal form, by reason of the optimizer's own states, has weights all the same."""
    written(stage, tmp_path / "tag", STRANGE[words])
    with pytest.raises(RefusedError, match=words):
        convert(tmp_path / "tag", tmp_path / "u", ConvertOptions())
    convert(tmp_path / "tag", tmp_path / "w", ConvertOptions(form="weights", verify=True))
    found = {name: read.data for name, read in read_folder(tmp_path / "w").items()}
    shapes = {**GROUPS[0], **GROUPS[1]}
    assert found == {name: full_bytes("fp32", name, shape) for name, shape in shapes.items()}


def test_states_that_partial_offload_leaves_out_are_refused(tmp_path: Path) -> None:
    """`offload_optimizer.ratio` below 1: DeepSpeed saves no state of the sub-groups that stay on the GPU."""
    written(3, tmp_path / "whole", lambda _, inner: None)
    for folder, ratio in (("whole", 0.5), ("partial", 0.5)):
        if folder == "partial":
            written(3, tmp_path / folder, lambda _, inner: forget_group(inner))
        for path in (tmp_path / folder).glob("*optim_states.pt"):
            root = torch.load(path, weights_only=False)
            root["ds_config"] = {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": ratio}}}
            torch.save(root, path)
    convert(tmp_path / "whole", tmp_path / "u", ConvertOptions())
    with pytest.raises(RefusedError, match=r"no optimizer state of 1 of its 2 sub-groups: .*ratio 0.5"):
        convert(tmp_path / "partial", tmp_path / "p", ConvertOptions())
    convert(tmp_path / "partial", tmp_path / "w", ConvertOptions(form="weights", verify=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_slash_in_a_name_is_a_folder_and_weights_take_any_name(tmp_path: Path, stage: int) -> None:
    """As the stock converter does; a name that no folder can have is refused by its length."""
    shapes: Shapes = {"pd.a/b": (5, 3), "plain": (4,)}
    options: dict[str, Any] = {} if stage == 3 else {"stage": stage}
    WRITERS[stage](tmp_path / "tag", [shapes], 2, **options)
    convert(tmp_path / "tag", tmp_path / "u", ConvertOptions())
    value, _, data = load(tmp_path / "u" / "zero" / "pd.a" / "b" / "fp32.pt")
    tensor = value["param"] if isinstance(value, dict) else value
    assert tensor_bytes(tensor, data) == full_bytes("fp32", "pd.a/b", (5, 3))
    seen = inspect_folder(tmp_path / "u").checkpoints[0]
    assert (seen.is_complete, seen.tensors, seen.parameters) == (True, 2, 19)
    assert inspect_folder(tmp_path / "tag").checkpoints[0].parameters == 19
    convert(tmp_path / "tag", tmp_path / "w", ConvertOptions(form="weights"))
    assert set(read_folder(tmp_path / "w")) == set(shapes)

    long: Shapes = {"x" * 256: (3,), "plain": (4,)}
    WRITERS[stage](tmp_path / "long", [long], 2, **options)
    with pytest.raises(RefusedError, match="longer than a folder's name may be"):
        convert(tmp_path / "long", tmp_path / "u2", ConvertOptions())
    convert(tmp_path / "long", tmp_path / "w2", ConvertOptions(form="weights"))
    assert set(read_folder(tmp_path / "w2")) == set(long)


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a//b", "a/../../b", "a/./b", "a/fp32.pt", "a\nb"])
def test_no_name_leads_out_of_the_universal_form(tmp_path: Path, name: str) -> None:
    write_stage12(tmp_path / "tag", [{name: (3,), "plain": (4,)}], 2, stage=2)
    with pytest.raises(RefusedError, match="has no place in a universal form"):
        convert(tmp_path / "tag", tmp_path / "u", ConvertOptions())
    assert [p.name for p in tmp_path.iterdir()] == ["tag"]


@pytest.mark.parametrize(
    ("version", "groups", "words"),
    [
        ("0.14.4", 1, "cannot load a universal form in stage 3: load it with 0.18.3 or newer"),
        ("0.14.4", 2, "cannot load a universal form in stage 3: load it with 0.18.3 or newer"),
        ("0.16.9", 1, None),
        ("0.16.9", 2, "of 2 sub-groups: load it with 0.18.3 or newer"),
        ("0.17.6", None, "of several parameter groups or sub-groups: load it with 0.18.3 or newer"),
        ("0.18.0", 2, None),
        ("0.18.3", 2, None),
        ("0.19.8+abc", 2, None),
        (None, 1, "(unknown), cannot load"),
    ],
)
def test_what_the_saving_release_cannot_load(
    version: str | None, groups: int | None, words: str | None
) -> None:
    said = stage3_loader_word(version, groups)
    assert (said is None) if words is None else (words in str(said))


@pytest.mark.parametrize("version", ["0.14.4", "0.16.9", "0.17.6", "0.19.8"])
def test_converting_says_what_the_saving_release_cannot_load(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_version(monkeypatch, version)
    written(3, tmp_path / "tag", lambda _, inner: None)
    report = convert(tmp_path / "tag", tmp_path / "u", ConvertOptions())
    said = [note for note in report.notes if "cannot load" in note]
    assert len(said) == (version != "0.19.8"), report.notes
    assert all(version in note and "0.18.3" in note for note in said)
    advised = [note for note in report.notes if "sub_group_size" in note]
    assert len(advised) == (version == "0.19.8"), "a larger sub_group_size helps no loader that reads none"
    assert all("FusedAdam, CPUAdam or one sub-group" in note for note in said)


def keep_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Every shard is of that DeepSpeed."""
    original = Shard.save

    def save(self: Shard, path: Path, root: Any) -> None:
        original(self, path, {**root, "ds_version": version})

    monkeypatch.setattr(Shard, "save", save)


MATRICES: list[Shapes] = [{"first": (5, 3), "second": (4, 2), "third": (3, 3)}]


def muon(inner: dict[str, Any], spare: int = 0) -> None:
    """Stages 1 and 2: a rank has the whole momentum of every matrix of which it has a piece."""
    inner["base_optimizer_state"]["param_groups"][0]["use_muon"] = True
    places = inner["param_slice_mappings"][0].items()
    names = [name for name, _ in sorted(places, key=lambda row: int(row[1].field("start")))]
    data = b"".join(full_bytes("exp_avg", name, MATRICES[0][name]) for name in names)
    count = len(data) // 4 + spare
    states_of(inner)[0] = {"momentum_buffer": KEPT.tensor(data + bytes(4 * spare), (count,))}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dp", [1, 3])
def test_muons_momentum_is_of_whole_matrices(
    tmp_path: Path, stage: int, dp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real saves are `make engines`."""
    keep_payloads(monkeypatch)
    write_stage12(tmp_path / "tag", MATRICES, dp, stage=stage, change=lambda _, inner: muon(inner))
    report = convert(tmp_path / "tag", tmp_path / "u", ConvertOptions(compat="superset", verify=True))
    assert "whole matrices" in " ".join(report.notes)
    for name, shape in MATRICES[0].items():
        assert names_in(tmp_path / "u" / "zero" / name) == {"fp32", "momentum_buffer"}
        value, _, data = load(tmp_path / "u" / "zero" / name / "momentum_buffer.pt")
        assert value["param"].shape == shape
        assert tensor_bytes(value["param"], data) == full_bytes("exp_avg", name, shape)


def test_a_momentum_of_other_matrices_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_payloads(monkeypatch)
    write_stage12(
        tmp_path / "tag", MATRICES, 3, stage=2, change=lambda rank, inner: muon(inner, int(rank == 1))
    )
    with pytest.raises(DamagedError, match="its matrices have") as caught:
        convert(tmp_path / "tag", tmp_path / "u", ConvertOptions())
    assert caught.value.exit_code == 65
    assert [p.name for p in tmp_path.iterdir()] == ["tag"]
