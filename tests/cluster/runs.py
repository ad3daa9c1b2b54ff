"""Real DeepSpeed saves of two nodes with two ranks each, made once and kept under `.build/ckpts`.

Each node's save_dir holds what that node's ranks wrote and nothing else, as on machines of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import ranks
from tests.support.real import CACHE, START_SECONDS, Recipe, locked

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE = "tests.cluster.train"
SCRIPT = Path(__file__).with_name("train.py")
RANKS = 2
"""Per node."""
STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run over `nodes` nodes; `is_local`: DeepSpeed's use_node_local_storage."""

    stage: int
    nodes: int = 2
    is_local: bool = True
    seed: int = 7
    pipe: int = 0
    """Pipeline stages: as many as nodes, each node is one."""
    save_at: tuple[int, ...] = (2, 4)

    @property
    def recipe(self) -> Recipe:
        """What is trained."""
        return Recipe(stage=self.stage, world_size=self.nodes * RANKS, pipe=self.pipe)

    @property
    def key(self) -> str:
        """Name of the cached folder."""
        fields = {name: value for name, value in asdict(self).items() if value or name != "pipe"}
        text = json.dumps([fields, self.recipe.key, SCRIPT.read_text()], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"nodes{self.nodes}-z{self.stage}-{'local' if self.is_local else 'apart'}-{digest}"

    def save_dir(self, node: int) -> Path:
        """Where a node's ranks saved; never write into it."""
        return CACHE / self.key / f"node{node}"

    @property
    def losses(self) -> dict[int, float]:
        """Losses of the uninterrupted run, by step."""
        return losses_at(CACHE / self.key / "losses.json")


LOCAL_2, LOCAL_3, APART_2 = Run(stage=2), Run(stage=3), Run(stage=2, is_local=False)
LOCAL_1 = Run(stage=1)
OTHER_2 = Run(stage=2, seed=11)
"""The same grid, trained from elsewhere: the second save of a tag."""
STAGES = Run(stage=1, pipe=2)
"""Two pipeline stages, a node each: both have data-parallel ranks 0 and 1."""
RUNS = (LOCAL_2, LOCAL_3, APART_2, LOCAL_1, OTHER_2)


def prepare(runs: Sequence[Run] = RUNS) -> None:
    """Make what is not cached yet; one start for all with the same process groups."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked():
        missing = [run for run in runs if not (CACHE / run.key / "done").exists()]
        for nodes, pipe in sorted({(run.nodes, run.pipe) for run in missing}):
            _make(nodes, [run for run in missing if (run.nodes, run.pipe) == (nodes, pipe)])


def _make(nodes: int, runs: Sequence[Run]) -> None:
    work = CACHE / f"making-nodes-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    jobs = []
    for run in runs:
        (work / run.key).mkdir(parents=True)
        jobs.append(
            job_of(run, str(work / run.key / "node{node}"), work / run.key / "losses.json", steps=STEPS)
            | {"load": None, "tag": None, "save_at": run.save_at, "init_seed": run.seed}
        )
    try:
        launch(nodes, jobs, work)
        for run in runs:
            shutil.rmtree(CACHE / run.key, ignore_errors=True)
            (work / run.key / "done").touch()
            (work / run.key).rename(CACHE / run.key)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def job_of(run: Run, out: str, losses: Path, *, steps: int) -> dict[str, Any]:
    """One entry of JOBS.json."""
    return {
        "out": out,
        "recipe": asdict(run.recipe),
        "load_optimizer_states": True,
        "steps": steps,
        "save_at": (),
        "init_seed": 99,
        "losses": str(losses),
        "node_local": run.is_local,
    }


def launch(nodes: int, jobs: list[dict[str, Any]], work: Path, per_node: int = RANKS) -> None:
    """One start of `nodes` nodes, all on this machine."""
    listed = work / "jobs.json"
    listed.write_text(json.dumps(jobs))
    ranks.train(MODULE, [str(listed)], work, nodes=nodes, ranks=per_node, seconds=START_SECONDS)


def losses_at(path: Path) -> dict[int, float]:
    """{step: loss} as rank 0 wrote it."""
    return {int(step): float(loss) for step, loss in json.loads(path.read_text()).items()}
