"""Checkpoints of trainers without DeepSpeed: seen, proved whole, uploaded, restored, resumed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.core.completeness.judge import State, Verdict
from ckptd.core.model.other_layouts import NOTHING_DECLARED, DeclaredSave, other_layout_of
from ckptd.errors import NotFoundError
from ckptd.maintenance.inspection import InspectedCheckpoint, inspect_folder
from tests.e2e.harness import Node, node
from tests.e2e.kill_savers import verdicts
from tests.stores.servers import free_port
from tests.support.other_trainers import MANIFEST, MARKER, TAG_OF
from tests.support.real import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

STEPS = 4
LAYOUTS = ("huggingface", "accelerate", "torch", "torch-file")
"""Those of every run; `make trainers` takes all of TAG_OF."""
DECLARED = {
    "torch-file": DeclaredSave(files="model_*.pt"),
    "declared-marker": DeclaredSave(marker=MARKER),
    "declared-manifest": DeclaredSave(manifest=MANIFEST),
    "declared-quiet": DeclaredSave(files="state_*.blob", quiet_seconds=2.0),
}
JOBS = {
    "torch-file": '[layout]\nfiles = "model_*.pt"',
    "declared-marker": f'[layout]\ncomplete_when = "marker {MARKER}"',
    "declared-manifest": f'[layout]\ncomplete_when = "manifest {MANIFEST}"',
    "declared-quiet": '[layout]\nfiles = "state_*.blob"\ncomplete_when = "quiet 2s"',
}
"""What a job file says of checkpoints that are a script's own."""
ON_ONE = ("accelerate", "torch", "lightning", *DECLARED)
"""Resumed on one rank where two saved."""
CLOSE = 1e-3


def python_of(layout: str) -> Path:
    """Return the interpreter that has the trainer: torchtitan's is that of `make trainers`."""
    if layout == "torchtitan":
        return REPOSITORY / ".build" / "frameworks" / "bin" / "python"
    return Path(sys.executable)


def train(
    layout: str, save_dir: Path, steps: int, ranks: int = 2, resume_from: Path | None = None
) -> dict[int, float]:
    """Losses by step, from the trainer itself."""
    command = [
        *(str(python_of(layout)), "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)),
        *("--master_port", str(free_port()), "-m", "tests.support.other_trainers"),
        *(layout, str(save_dir), str(steps), *([str(resume_from)] if resume_from else [])),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = re.findall(r"step:? +(\d+) +loss:? +([\d.]+)", done.stdout)
    return {int(step): float(loss) for step, loss in told}


def tag_of(layout: str, step: int) -> str:
    return TAG_OF[layout].format(step)


def complete_in(save_dir: Path, layout: str) -> list[InspectedCheckpoint | Verdict]:
    if layout.startswith("declared"):  # no folder tells that: the daemon's own verdict, by the job file
        found = verdicts(save_dir, DECLARED[layout]).values()
        return [verdict for verdict in found if verdict.state is State.COMPLETE]
    # of a pattern that a job file names, inspect is given the file
    place = next(save_dir.glob("model_*.pt"), save_dir)
    try:
        return [seen for seen in inspect_folder(place).checkpoints if seen.is_complete]
    except NotFoundError:  # without that file it is no checkpoint at all
        return []


def bytes_of(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def copied(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True)
        shutil.copy2(source, target)
    else:
        shutil.copytree(source, target)


def removed(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


COLUMNS = ("seen", "whole proved", "torn refused", "uploaded", "restored byte-equal", "resumed")
"""What is shown of each layout, in this order (docs/trainers.md)."""


def round_trip(
    layout: str, source: Path, losses: dict[int, float], here: Node, tmp_path: Path
) -> Iterator[str]:
    """Commit, lose the node, restore, and resume in the trainer itself; yield each column that is shown."""
    if layout in JOBS:
        here.write_job(job=JOBS[layout])
    shutil.copytree(source, here.save_dir, dirs_exist_ok=True)
    assert here.once() == 0, here.log.read_text()[-2000:]
    newest = tag_of(layout, STEPS)
    assert f"{newest}~g1" in here.commits()
    yield "uploaded"
    wanted = bytes_of(here.save_dir / newest)
    shutil.rmtree(here.save_dir)
    here.save_dir.mkdir()
    back = here.ckptd("restore", here.job_file, newest, "--to", tmp_path / "restored")
    assert back.returncode == 0, back.stderr
    assert bytes_of(tmp_path / "restored" / newest) == wanted
    yield "restored byte-equal"
    resumed = here.ckptd("resume", here.job_file, "--world-size", "1")
    assert resumed.returncode == 0, resumed.stderr
    path = Path(resumed.stdout.strip())
    assert bytes_of(path) == wanted
    again = train(layout, here.save_dir, STEPS + 2, 1 if layout in ON_ONE else 2, path)
    assert sorted(again) == [STEPS + 1, STEPS + 2]
    assert all(abs(again[step] - losses[step]) <= CLOSE for step in again), (again, losses)
    refused = here.ckptd("restore", here.job_file, newest, "--form", "universal", "--to", tmp_path / "form")
    assert (refused.returncode, "there is no universal form of it" in refused.stderr) == (65, True), refused
    yield "resumed"


def check_torn(layout: str, source: Path, tmp_path: Path) -> None:
    """Cut each file of the state at its end, in half, to nothing, or leave it out: it is never complete.

    A marker says that its writer ended well: what it left before has none.
    """
    kind = other_layout_of(source.name, frozenset(bytes_of(source)), DECLARED.get(layout, NOTHING_DECLARED))
    assert kind is not None
    names = [name for name in bytes_of(source) if kind.is_state(name) or "random_states" in name]
    names += [MANIFEST] if layout == "declared-manifest" else []
    assert len(names) >= (1 if source.is_file() else 3)
    for number, name in enumerate(names):
        for damage in ("last byte", "half", "empty", "missing"):
            folder = tmp_path / f"{number}-{damage.replace(' ', '-')}" / source.name
            copied(source, folder)
            if layout == "declared-marker":
                assert complete_in(folder.parent, layout)
                if damage == "missing" or not name.endswith(".pt"):  # else the archive tells it
                    (folder / MARKER).unlink()
            file = folder if source.is_file() else folder / name
            data = file.read_bytes()
            if damage == "missing":
                file.unlink()
            else:
                kept = {"last byte": len(data) - 1, "half": len(data) // 2, "empty": 0}[damage]
                file.write_bytes(data[:kept])
            found = complete_in(folder.parent, layout)
            # FSDP resumes from its own file, beside which the Trainer puts the model once more
            is_twice = name == "model.safetensors" and (source / "pytorch_model_fsdp.bin").exists()
            is_optional = is_twice or name.startswith(("scheduler", "rng_state", "random_states"))
            is_optional &= damage == "missing"
            is_optional |= (name, damage) == (MANIFEST, "last byte")  # the end of a line
            assert not found or is_optional, f"{name}, {damage}: {found[0].state}"


def check_inspected(layout: str, save_dir: Path) -> None:
    """Let `ckptd inspect` say what it is, and that it is whole; of what only a job file tells, the daemon."""
    if layout.startswith("declared"):
        found = verdicts(save_dir, DECLARED[layout])[tag_of(layout, STEPS)]
        assert (found.state, found.step) == (State.COMPLETE, STEPS), found.reason
        assert found.grid is not None
        assert found.grid.layout == "declared"
        return
    place = save_dir / tag_of(layout, STEPS) if layout == "torch-file" else save_dir
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "inspect", str(place), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = {one["tag"]: one for one in json.loads(done.stdout)["checkpoints"]}
    one = seen[tag_of(layout, STEPS)]
    name = "torch" if layout in ("lightning-fsdp", "torchtitan") else layout.partition("-fsdp")[0]
    assert (one["state"], one["step"], one["grid"]["layout"]) == ("complete", STEPS, name)


def trained_further(layout: str, root: Path) -> tuple[Path, dict[int, float]]:
    """Return a save_dir with two checkpoints, and the losses of a run that went on to STEPS + 2."""
    losses = train(layout, root / "whole", STEPS + 2)
    for name in (tag_of(layout, STEPS + 2), "last.ckpt"):  # both of that step
        removed(root / "whole" / name)
    return root / "whole", losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, dict[int, float]]]]:
    """Of each layout a save_dir with two checkpoints, and the losses of a run that went on to STEPS + 2."""
    yield {layout: trained_further(layout, tmp_path_factory.mktemp(layout)) for layout in LAYOUTS}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, local="save_total_limit = 2") as made:
        yield made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_the_trainer_to_the_remote_and_back(
    layout: str, here: Node, trained: dict[str, tuple[Path, dict[int, float]]], tmp_path: Path
) -> None:
    source, losses = trained[layout]
    assert list(round_trip(layout, source, losses, here, tmp_path)) == list(COLUMNS[-3:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_torn_one_is_never_complete(
    layout: str, trained: dict[str, tuple[Path, dict[int, float]]], tmp_path: Path
) -> None:
    check_torn(layout, trained[layout][0] / tag_of(layout, STEPS), tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_explains_it(layout: str, trained: dict[str, tuple[Path, dict[int, float]]]) -> None:
    check_inspected(layout, trained[layout][0])


@pytest.mark.faults
def test_a_saver_that_is_killed_leaves_no_false_complete_one() -> None:
    """Some of the kills of `python -m tests.e2e.kill_savers`."""
    killed = (*LAYOUTS, "declared")
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.kill_savers", "--kills", "6", "--seed", "1", *killed],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("false_complete=0, lost=0") == len(killed), done.stdout
