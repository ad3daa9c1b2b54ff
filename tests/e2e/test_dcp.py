"""From ZeRO to FSDP2 and back: folders of torch.distributed.checkpoint, loaded and written by torch."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

import ckptd
from ckptd.errors import CkptdError, DamagedError, RefusedError, UsageError
from ckptd.formats.torchfile.sharded import Chunk, Entry, Item, ShardedTensor, write_metadata
from tests.support import cgroup
from tests.support.ranks import train
from tests.support.real import (
    REPOSITORY,
    SAVED_AT,
    STEPS,
    TAG,
    Recipe,
    Resume,
    expect,
    launch,
    losses_of,
    prepare,
    resume,
    run_module,
    save_dir_of,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CLOSE = 1e-3
MIDDLE = SAVED_AT + 2
"""FSDP2 trains until here; then DeepSpeed goes on."""
LIMIT_BYTES = 256 << 20
FULL = bool(os.environ.get("CKPTD_FULL"))
PLAIN = Recipe(stage=3, world_size=4, dtype="fp32", tie=True, sub_group_size=20_000)
GROUPS = replace(PLAIN, two_groups=True)
ODD = replace(GROUPS, stage=2, odd=True)
ROUND_TRIPS = [
    (recipe, style, ranks, replace(recipe, stage=stage, world_size=world, sub_group_size=0))
    for recipe, style, ranks, stage, world in (
        (PLAIN, "titan", 2, 1, 3),
        (PLAIN, "nested", 1, 3, 2),
        (PLAIN, "flat", 4, 2, 1),
        (GROUPS, "titan", 2, 1, 3),
        (replace(PLAIN, stage=1, world_size=3), "titan", 3, 3, 4),
        (ODD, "flat", 2, 1, 2),
        (replace(PLAIN, optimizer="cpu_adam", stage=2, world_size=2), "nested", 2, 2, 3),
        (replace(PLAIN, optimizer="fused_adam", stage=1, world_size=2), "titan", 2, 1, 1),
    )
][: None if FULL else 1]
"""What was trained, how FSDP2 names its state and on how many ranks, what DeepSpeed goes on with."""
VALUES = [
    PLAIN,
    *(
        Recipe(stage=stage, world_size=world, dtype=dtype, two_groups=True, tie=True, freeze=True, odd=True)
        for stage in (1, 2, 3)
        for dtype, world in (("bf16", 2), ("fp16", 3), ("fp32", 1))
    ),
    *(
        Recipe(stage=stage, world_size=2, optimizer=o)
        for stage in (1, 3)
        for o in ("sgd", "lion", "cpu_lion")
    ),
    Recipe(stage=2, world_size=2, bf16_optimizer_states=True),
    Recipe(stage=2, world_size=2, round_robin=True, odd=True),
][: None if FULL else 1]
LIVE = [
    Recipe(stage=1, world_size=2, dtype="fp16", optimizer="sgd", two_groups=True, freeze=True),
    Recipe(stage=1, world_size=2, grad_accum_dtype="fp32", tie=True, freeze=True),
    Recipe(stage=2, world_size=2, dtype="fp32", optimizer="lion", tie=True, two_groups=True),
    Recipe(stage=3, world_size=2, optimizer="plain_sgd", freeze=True, odd=True),
    *(
        Recipe(stage=1, world_size=2, grad_accum_dtype="fp32", optimizer=optimizer, two_groups=True)
        for optimizer in ("sgd", "plain_sgd", "lion", "fused_adam")
    ),
    *(
        Recipe(
            stage=stage,
            world_size=2,
            dtype=dtype,
            optimizer=optimizer,
            two_groups=(stage + i + j) % 2 == 0,
            tie=(stage + j) % 2 == 0,
            freeze=i % 2 == 0,
            odd=j % 3 == 0,
        )
        for stage in (1, 2, 3)
        for i, dtype in enumerate(("fp32", "bf16", "fp16"))
        for j, optimizer in enumerate(("adamw", "sgd", "plain_sgd", "lion", "fused_adam", "cpu_adam"))
    ),
][: None if FULL else 4]
"""With BF16_Optimizer (`grad_accum_dtype`), frozen and tied parameters, groups, every kind of state."""
expect(*(trip[0] for trip in ROUND_TRIPS), *VALUES)


def convert(source: Path, destination: Path, form: str) -> None:
    """The command line, in a cgroup that the kernel keeps to 256 MiB where there is one."""
    command = [sys.executable, "-m", "ckptd", "convert", str(source), str(destination), "--form", form]
    command += ["--memory-budget", "128MiB", "--verify"]
    if cgroup.why_not() is None:
        done = cgroup.run_confined(command, LIMIT_BYTES, cwd=REPOSITORY, timeout=120)
        assert (done.status, done.killed) == (0, 0), done.stderr[-2000:]
    else:
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)


def with_fsdp2(recipe: Recipe, style: str, ranks: int, source: Path, saved: Path) -> dict[int, float]:
    """Losses of two steps of FSDP2, which loads `source` and saves `saved`."""
    job: dict[str, Any] = {
        "recipe": {**asdict(recipe), "optimizer": "adamw"},
        "load": str(source),
        "save": str(saved),
        "style": style,
        "first": SAVED_AT,
        "steps": MIDDLE - SAVED_AT,
        "losses": str(saved.parent / "losses.json"),
    }
    listed = saved.parent / "jobs.json"
    listed.write_text(json.dumps([job]))
    train("tests.support.make_dcp", [str(listed)], saved.parent, ranks=ranks, seconds=300)
    return {int(k): v for k, v in json.loads(Path(job["losses"]).read_text()).items()}


def round_trip(recipe: Recipe, style: str, ranks: int, after: Recipe, work: Path) -> dict[int, float]:
    """Losses of FSDP2 and of DeepSpeed after it, from the checkpoint of `recipe` on."""
    prepare([recipe])
    (work / "there").mkdir()
    (work / "back").mkdir()
    convert(save_dir_of(recipe) / TAG, work / "there" / "dcp", "dcp")
    losses = with_fsdp2(recipe, style, ranks, work / "there" / "dcp", work / "there" / "saved")
    convert(work / "there" / "saved", work / "back" / "universal", "universal")
    goes_on = Resume(recipe=after, save_dir=work / "back", tag=None, steps=STEPS - MIDDLE)
    return losses | resume(after.world_size, [goes_on], work)[0]


@pytest.mark.parametrize(
    "trip", ROUND_TRIPS, ids=lambda t: f"z{t[0].stage}-{t[0].optimizer}-{t[1]}-{t[2]}-z{t[3].stage}"
)
def test_a_training_goes_on_in_fsdp2_and_then_in_deepspeed(
    trip: tuple[Recipe, str, int, Recipe], tmp_path: Path
) -> None:
    """The first: ZeRO-3 on 4 ranks, FSDP2 on 2, ZeRO-1 on 3. Losses are those of a run without any change."""
    losses = round_trip(*trip, tmp_path)
    wanted = {step: loss for step, loss in losses_of(trip[0]).items() if step > SAVED_AT}
    assert losses == pytest.approx(wanted, abs=CLOSE)


def test_values_are_those_of_the_stock_converter(tmp_path: Path) -> None:
    """Masters and moments, there and back, bit by bit (the strict form is proved to be stock's elsewhere).

    The universal forms give the same folder as the shards, which gives back the same states.
    """
    prepare(VALUES)
    pairs: list[tuple[str, str]] = []
    for number, recipe in enumerate(VALUES):
        source, work = save_dir_of(recipe) / TAG, tmp_path / str(number)
        work.mkdir()
        ckptd.convert(source, work / "dcp", form="dcp")
        ckptd.convert(source, work / "strict", compat="strict")
        ckptd.convert(work / "dcp", work / "back")
        ckptd.convert(source, work / "superset", compat="superset")
        for layout in ("strict", "superset"):
            if layout == "strict" and recipe.round_robin:
                with pytest.raises(RefusedError, match="under each other's names"):
                    ckptd.convert(work / layout, work / "no", form="dcp")
                continue
            ckptd.convert(work / layout, work / f"of-{layout}", form="dcp")
            if clones(work / "dcp") or clones(work / layout):  # then headers are padded for blocks
                continue
            assert contents(work / f"of-{layout}") == contents(work / "dcp")
            assert layout == "strict" or states(work / "back") == states(work / layout)
        right = "superset" if recipe.round_robin else "strict"  # stock's own has parameters mixed up
        pairs += [(str(work / "dcp"), str(work / name)) for name in (right, "back")]
    said = run_module("tests.support.make_dcp", "compare", json.dumps(pairs))
    assert json.loads(said.splitlines()[-1]) == [[]] * len(pairs)


def test_values_are_those_of_the_live_engine(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint reads is what DeepSpeed's own calls give, bit by bit."""
    jobs, pairs = [], []
    for number, recipe in enumerate(LIVE):
        work = tmp_path / str(number)
        work.mkdir()
        jobs.append(
            {
                "out": str(work / "save"),
                "recipe": asdict(recipe),
                "load": None,
                "tag": None,
                "steps": SAVED_AT,
                "save_at": (SAVED_AT,),
                "init_seed": 7,
                "losses": str(work / "losses.json"),
            }
        )
        pairs.append((str(work / "save" / "live.pt"), str(work / "dcp")))
    launch(2, jobs, tmp_path, "tests.support.make_live")
    for job, (_, made) in zip(jobs, pairs, strict=True):
        ckptd.convert(Path(str(job["out"])) / TAG, made, form="dcp")
    said = run_module("tests.support.make_live", "compare", json.dumps(pairs))
    assert json.loads(said.splitlines()[-1]) == [[]] * len(pairs)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that torch reads."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "ckptd.json"}


def clones(folder: Path) -> bool:
    """Whether extents of the source are shared with what was made of it."""
    return bool(json.loads((folder / "ckptd.json").read_text())["alignment"])


def states(universal: Path) -> dict[str, bytes]:
    """Every state of every parameter; a step, which torch keeps in a tensor, goes by value elsewhere."""
    found = universal.glob("zero/**/*.pt")
    names = ("step.pt", "optimizer_state.pt")
    return {str(path.relative_to(universal)): path.read_bytes() for path in found if path.name not in names}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare([PLAIN])
    ckptd.convert(save_dir_of(PLAIN) / TAG, tmp_path / "step-2", form="dcp")
    return tmp_path / "step-2"


def test_a_folder_is_inspected_and_forecast(folder: Path) -> None:
    (seen,) = ckptd.inspect(folder).checkpoints
    assert (seen.kind, seen.is_complete, seen.step) == ("dcp", True, SAVED_AT)
    assert seen.conversion is not None
    assert (seen.conversion.converts, seen.conversion.parameters) == (True, 28)


def test_what_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    """A part that is missing, cut off or another's; names of the file are said."""
    part = folder / "__0_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match=r"__0_0\.distcp has"):
        ckptd.convert(folder, tmp_path / "u")
    (seen,) = ckptd.inspect(folder).checkpoints
    assert (seen.is_complete, str(seen.reason)[:16]) == (False, "__0_0.distcp has")
    part.write_bytes(bytes(len(whole)))
    with pytest.raises(CkptdError, match=r"__0_0\.distcp at"):
        ckptd.convert(folder, tmp_path / "u")
    (seen,) = ckptd.inspect(folder).checkpoints
    assert (seen.is_complete, seen.state) == (True, "complete")  # as torch: sizes are what it proves
    part.unlink()
    with pytest.raises(DamagedError, match=r"__0_0\.distcp, which \.metadata names, is missing"):
        ckptd.convert(folder, tmp_path / "u")
    (seen,) = ckptd.inspect(folder).checkpoints
    assert (seen.is_complete, seen.reason) == (False, "missing: __0_0.distcp")
    (folder / ".metadata").unlink()
    part.write_bytes(whole)
    with pytest.raises(DamagedError, match=r"without \.metadata"):
        ckptd.convert(folder, tmp_path / "u")
    assert not (tmp_path / "u").exists()


BOXES = {
    "rows": ((slice(0, 3), slice(0, 6)), (slice(3, 6), slice(0, 6)), (slice(6, 7), slice(0, 6))),
    "columns": ((slice(0, 7), slice(0, 4)), (slice(0, 7), slice(4, 6))),
    "both": tuple((slice(r, r + 4), slice(c, c + 3)) for c in (3, 0) for r in (0, 4)),
}
"""How 7 x 6 elements are divided; `slice` cuts the last one off at the edge."""


def sharded(folder: Path, tensors: dict[str, torch.Tensor], values: dict[str, Any], how: str) -> None:
    """Write a folder as ranks of which each has one box of every tensor, the last rank first."""
    entries: dict[str, Entry] = {}
    folder.mkdir()
    files = [io.BytesIO() for _ in BOXES[how]]

    def added(rank: int, value: Any) -> Item:
        archive, at = io.BytesIO(), files[rank].tell()
        torch.save(value, archive)
        files[rank].write(archive.getvalue())
        return Item(f"__{rank}_0.distcp", at, len(archive.getvalue()))

    for name, tensor in tensors.items():
        chunks = []
        for rank, box in reversed(list(enumerate(BOXES[how]))):
            part = tensor[box].clone()
            offsets = tuple(one.start for one in box)
            chunks.append(Chunk(offsets, tuple(part.shape), added(rank, part)))
        entries[name] = ShardedTensor("float32", tuple(tensor.shape), tuple(chunks))
    entries |= {name: added(0, value) for name, value in values.items()}
    for rank, written in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(written.getvalue())
    paths: dict[str, tuple[str | int, ...]] = {name: (name,) for name in entries}
    (folder / ".metadata").write_bytes(write_metadata(entries, paths))


@pytest.mark.parametrize("how", BOXES)
def test_chunks_may_lie_along_any_dimension(how: str, tmp_path: Path) -> None:
    """Ranks' boxes in any order make the tensor that torch itself reads."""
    names = ("model.w", "optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq")
    tensors = {name: torch.rand(7, 6) for name in names}
    groups = {"optimizer.param_groups.0.params": ["w"], "optimizer.param_groups.0.lr": 0.1}
    sharded(tmp_path / "step-3", tensors, groups | {"optimizer.state.w.step": torch.tensor(3.0)}, how)
    read = {name: torch.zeros(7, 6) for name in names}
    checkpoint.load(read, checkpoint_id=tmp_path / "step-3", no_dist=True)
    assert all(torch.equal(read[name], tensors[name]) for name in names)
    ckptd.convert(tmp_path / "step-3", tmp_path / "universal")
    for name in names:
        state = "fp32" if name == "model.w" else name.rpartition(".")[2]
        made = torch.load(tmp_path / "universal" / "zero" / "w" / f"{state}.pt", weights_only=True)
        assert torch.equal(made["param"], tensors[name])


def test_what_there_is_no_way_for_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="universal form alone"):
        ckptd.convert(folder, tmp_path / "w", form="weights-fp32")
    with pytest.raises(RefusedError, match=r"torch\.distributed\.checkpoint already"):
        ckptd.convert(folder, tmp_path / "w", form="dcp")
    with pytest.raises(UsageError, match="cluster"):
        ckptd.convert(save_dir_of(PLAIN) / TAG, tmp_path / "d", form="dcp", cluster="local:1")


def test_a_universal_form_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """A file that lacks, is cut off or is another parameter's; what else it could be converted to is said."""
    prepare([PLAIN])
    ckptd.convert(save_dir_of(PLAIN) / TAG, tmp_path / "u")
    state = tmp_path / "u" / "zero" / "head.ln.weight"
    whole = {path.name: path.read_bytes() for path in state.iterdir()}
    state.joinpath("exp_avg.pt").write_bytes(whole["exp_avg.pt"][:-1])
    with pytest.raises(CkptdError, match=r"head\.ln\.weight/exp_avg\.pt"):
        ckptd.convert(tmp_path / "u", tmp_path / "d", form="dcp")
    other = (state.parent / "embed.tok.weight" / "exp_avg.pt").read_bytes()
    state.joinpath("exp_avg.pt").write_bytes(other)
    with pytest.raises(DamagedError, match=r"exp_avg\.pt is of shape \(131, 64\), .* say \(64\)"):
        ckptd.convert(tmp_path / "u", tmp_path / "d", form="dcp")
    state.joinpath("exp_avg.pt").unlink()
    with pytest.raises(DamagedError, match=r"head\.ln\.weight/exp_avg\.pt is missing, which \S+ has"):
        ckptd.convert(tmp_path / "u", tmp_path / "d", form="dcp")
    state.joinpath("exp_avg.pt").write_bytes(whole["exp_avg.pt"])
    state.joinpath("fp32.pt").unlink()
    with pytest.raises(DamagedError, match=r"zero/head\.ln\.weight/fp32\.pt is missing"):
        ckptd.convert(tmp_path / "u", tmp_path / "d", form="dcp")
    with pytest.raises(RefusedError, match="universal checkpoint already") as refused:
        ckptd.convert(tmp_path / "u", tmp_path / "d", form="weights-fp32")
    assert "--form dcp" in str(refused.value.hint)
    assert not (tmp_path / "d").exists()


def test_an_optimizer_of_other_parameters_than_the_models_is_refused_by_name(tmp_path: Path) -> None:
    """As torchtitan 0.3 writes: the optimizer has `wqkv`, the model `wq`, `wk` and `wv`."""
    names = {"norm.weight": "norm.weight", "wqkv.weight": "wq.weight"}
    state = {saved: torch.ones(4) for saved in names.values()}
    for trained in names:
        state |= {f"optimizer.state.{trained}.{one}": torch.ones(4) for one in ("exp_avg", "exp_avg_sq")}
        state |= {
            f"optimizer.state.{trained}.step": torch.ones(()),
            f"optimizer.param_groups.{trained}.lr": 0.1,
        }
    checkpoint.save(state, checkpoint_id=tmp_path / "step-4", no_dist=True)
    with pytest.raises(RefusedError, match=r"states of wqkv\.weight, and no model in this folder"):
        ckptd.convert(tmp_path / "step-4", tmp_path / "universal")
