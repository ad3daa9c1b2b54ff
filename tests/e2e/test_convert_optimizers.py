"""Real checkpoints by other optimizers: every state byte is where the stock converter would have put it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import RefusedError
from ckptd.maintenance.inspection import inspect_folder
from tests.support import consolidated, ranks, stock
from tests.support.disguise import disguise
from tests.support.real import CACHE, START_SECONDS, TAG, Recipe, expect, locked, prepare, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

OTHERS = {
    "Lion, stage 2": (Recipe(stage=2, world_size=2, optimizer="lion"), {}),
    "Lion, stage 3": (Recipe(stage=3, world_size=2, optimizer="lion"), {}),
    "SGD, stage 2": (Recipe(stage=2, world_size=2, optimizer="sgd"), {"momentum_buffer": "exp_avg"}),
    "SGD, stage 3": (Recipe(stage=3, world_size=2, optimizer="sgd"), {"momentum_buffer": "exp_avg"}),
    "Adagrad, stage 1": (Recipe(stage=1, world_size=2, optimizer="adagrad"), {"sum": "exp_avg"}),
}
if os.environ.get("CKPTD_FULL"):  # compiled for half a minute
    OTHERS["DeepSpeedCPUAdagrad, stage 3"] = (Recipe(stage=3, world_size=2, optimizer="cpu_adagrad"), {})
"""The stock converter reads these under the names of Adam's states (Adams: test_convert_real.py)."""
expect(*(recipe for recipe, _ in OTHERS.values()))
STAGE_3_LACKS = "loads in stages 1 and 2"


def test_other_states_lie_where_adams_would(tmp_path: Path) -> None:
    prepare([recipe for recipe, _ in OTHERS.values()])
    pairs = []
    for i, (recipe, _) in enumerate(OTHERS.values()):
        report = convert(save_dir_of(recipe) / TAG, tmp_path / f"ours{i}", ConvertOptions(compat="strict"))
        assert STAGE_3_LACKS in report.notes[0]
        pairs.append((tmp_path / f"ours{i}", save_dir_of(recipe) / TAG))
    jobs = [
        (source, tmp_path / f"adam{i}", names, True)
        for i, ((_, source), (_, names)) in enumerate(zip(pairs, OTHERS.values(), strict=True))
    ]
    disguise(jobs)
    stock.convert([(tmp_path / f"adam{i}", tmp_path / f"stock{i}") for i in range(len(jobs))])
    for i, (_, names) in enumerate(OTHERS.values()):
        as_adam(tmp_path / f"ours{i}" / "zero", names)
    found = stock.differences([(tmp_path / f"stock{i}", tmp_path / f"ours{i}") for i in range(len(jobs))])
    for name, differences in zip(OTHERS, found, strict=True):
        states = [d for d in differences if d.startswith("zero/") and "optimizer_state.pt" not in d]
        assert states == [], name
        assert {d.rpartition("/")[2] for d in differences if d.startswith("only")} <= {
            "exp_avg.pt",
            "exp_avg_sq.pt",
        }, name
        assert not [d for d in differences if d.startswith("only ckptd")], name


@pytest.fixture(scope="module")
def unlike_adam() -> Path:
    folder = CACHE / "blockwise-2"
    folder.mkdir(parents=True, exist_ok=True)
    with locked():
        if not (folder / "done").exists():
            ranks.train("tests.support.make_blockwise", [str(folder)], folder, ranks=2, seconds=START_SECONDS)
            (folder / "done").touch()
    return folder


def test_weights_of_an_8_bit_optimizer_are_zero_to_fp32s(unlike_adam: Path, tmp_path: Path) -> None:
    """Its states are not one value per element, so they have no universal form; the masters are there."""
    cases = []
    for stage in (2, 3):
        source, out = unlike_adam / f"z{stage}" / "step", tmp_path / f"w{stage}"
        with pytest.raises(RefusedError, match="not one value per parameter element"):
            convert(source, tmp_path / "u", ConvertOptions())
        report = convert(source, out, ConvertOptions(form="weights", verify=True))
        assert report.parameters == 31
        cases.append((str(source.parent), "step", str(out)))
    assert consolidated.differences("fp32", cases) == [[], []]


@pytest.mark.parametrize(
    ("name", "states"), [("transformers1", {"exp_avg", "exp_avg_sq"}), ("torch2", {"variance"})]
)
def test_adafactor_keeps_one_value_an_element_of_flat_partitions(
    name: str, states: set[str], unlike_adam: Path, tmp_path: Path
) -> None:
    """ZeRO 1 and 2 hand it vectors, which it does not factor."""
    source = unlike_adam / name / "step"
    report = convert(source, tmp_path / "u", ConvertOptions(verify=True))
    word = "RMS (one number per group) begins anew" if name == "transformers1" else "stages 1 and 2"
    assert any(word in note for note in report.notes), report.notes
    wanted: dict[tuple[str, str], list[torch.Tensor]] = {}
    for path in sorted(source.glob("*_optim_states.pt")):
        inner = torch.load(path, weights_only=False)["optimizer_state_dict"]
        for g, mapping in enumerate(inner["param_slice_mappings"]):
            held = inner["base_optimizer_state"]["state"][g]
            assert {k for k, v in held.items() if torch.is_tensor(v) and v.dim()} == states
            for parameter, at in mapping.items():
                for state in states:
                    piece = held[state][at.start : at.start + at.numel]
                    wanted.setdefault((parameter, state), []).append(piece)
    assert len(wanted) == 28 * len(states)
    for (parameter, state), pieces in wanted.items():
        made = torch.load(tmp_path / "u" / "zero" / parameter / f"{state}.pt", weights_only=False)["param"]
        assert torch.equal(made.flatten(), torch.cat(pieces)), (parameter, state)


@pytest.mark.parametrize("name", ["transformers0", "torch0"])
def test_adafactor_without_zero_factors_and_is_refused(name: str, unlike_adam: Path, tmp_path: Path) -> None:
    source = unlike_adam / name / "step"
    with pytest.raises(RefusedError, match="not one value per parameter element"):
        convert(source, tmp_path / "u")
    convert(source, tmp_path / "w", ConvertOptions(form="weights", verify=True))
    held = load_file(tmp_path / "w" / "model.safetensors")
    saved = torch.load(source / "mp_rank_00_model_states.pt", weights_only=False)
    master = saved["optimizer"]["fp32_groups"][0][0]
    assert torch.equal(held["embed.tok.weight"], master)
    assert all(torch.equal(held[n].to(w.dtype), w) for n, w in saved["module"].items())


def as_adam(zero: Path, names: dict[str, str]) -> None:
    """Our folder under the disguise's names."""
    for old, new in names.items():
        found = list(zero.rglob(f"{old}.pt"))
        assert found
        for path in found:
            path.rename(path.with_name(f"{new}.pt"))


def test_inspect_says_what_loads_it(tmp_path: Path) -> None:
    recipe = OTHERS["Lion, stage 2"][0]
    prepare([recipe])
    source = save_dir_of(recipe) / TAG
    convert(source, tmp_path / "u", ConvertOptions(compat="superset"))
    for folder in (source, tmp_path / "u"):
        (seen,) = inspect_folder(folder).checkpoints
        notes = seen.notes if seen.conversion is None else seen.conversion.notes
        assert any(STAGE_3_LACKS in note and "exp_avg_sq" in note for note in notes)
        assert seen.is_complete
