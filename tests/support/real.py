"""Real DeepSpeed checkpoints for tests: made once per recipe and version, kept under `.build/ckpts`.

A checkpoint's folder is keyed by recipe, versions and the script that makes it, so a second test run
starts no training. Recipes of one world size share one start of the ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support import ranks

REPOSITORY = ranks.REPOSITORY
CACHE = ranks.BUILD / "ckpts"
MODULE = "tests.support.make_ckpt"
SCRIPTS = tuple(Path(__file__).with_name(name) for name in ("make_ckpt.py", "make_optimizers.py"))
SAVED_AT = 2
STEPS = 6
TAG = f"global_step{SAVED_AT}"
START_SECONDS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is trained; saved after step 2, run on to step 6 for the losses."""

    stage: int
    world_size: int
    dtype: str = "bf16"
    grad_accum_dtype: str | None = None
    """fp32 with bf16 and stage 1 selects BF16_Optimizer."""
    two_groups: bool = False
    tie: bool = False
    freeze: bool = False
    odd: bool = False
    sub_group_size: int = 0
    round_robin: bool = False
    universal_info: bool = True
    optimizer: str = "adamw"
    """A key of make_optimizers.LEARNING_RATES; `cpu_adam` brings its offload."""
    offload: bool = False
    """The optimizer's states in CPU memory, as `offload_optimizer` keeps them."""
    bf16_optimizer_states: bool = False
    """Master weights and moments in 16 bits."""
    pipe: int = 0
    """Pipeline stages; the other ranks are data parallel (stage 1 alone)."""
    pipe_tied: bool = False
    """First and last layer share one TiedLayerSpec."""
    moe: int = 0
    ep: int = 1
    tp: int = 0
    """AutoTP over a tiny Llama; the other ranks are data parallel."""
    sp: int = 0
    """Ulysses sequence parallelism; the other ranks are data parallel."""
    llama: bool = False
    """The model of `tp` without tensor parallelism."""
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    vocab: int = 131
    save_at: tuple[int, ...] = (SAVED_AT,)

    @property
    def key(self) -> str:
        """Name of the cached folder."""
        versions = [importlib.metadata.version(p) for p in ("torch", "deepspeed")]
        text = json.dumps([asdict(self), versions, *(s.read_text() for s in SCRIPTS)], sort_keys=True)
        return (
            f"z{self.stage}-{self.dtype}-{self.world_size}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A run of `recipe` that starts from a universal (or ZeRO) checkpoint in `save_dir`."""

    recipe: Recipe
    save_dir: Path
    tag: str | None
    load: str = "universal"
    steps: int = STEPS - SAVED_AT
    save_at: tuple[int, ...] = ()
    load_optimizer_states: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What came of a `Resume`."""

    losses: dict[int, float]
    """By global step."""
    optimizer: dict[str, Any]
    """Right after loading: steps (sorted, distinct), states (names), param_groups (values as text)."""


EXPECTED: dict[Recipe, None] = {}
"""What test modules said they will ask for, in order."""


def save_dir_of(recipe: Recipe) -> Path:
    """Where a prepared recipe lies."""
    return CACHE / recipe.key / "save"


def losses_of(recipe: Recipe) -> dict[int, float]:
    """Losses of the uninterrupted run, by step."""
    return _losses(CACHE / recipe.key / "losses.json")


def facts_of(recipe: Recipe) -> dict[str, Any]:
    """What the optimizer held when it was saved: `saved2` → steps, states, param_groups."""
    return _facts(CACHE / recipe.key / "losses.json")


def expect(*recipes: Recipe) -> None:
    """Said by a test module at its import: it will ask for these.

    The first `prepare` that has to start ranks makes them in the same start, whoever asked for them.
    """
    EXPECTED.update(dict.fromkeys(recipes))


def prepare(recipes: Sequence[Recipe]) -> None:
    """Make what is not cached yet, one start per world size and process groups."""
    if not _missing(recipes):
        return  # nobody who trains meanwhile is waited for
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked():
        starts = {_start(recipe) for recipe in _missing(recipes)}
        for start in sorted(starts):
            _make(start[0], [r for r in _missing([*recipes, *EXPECTED]) if _start(r) == start])


def _missing(recipes: Iterable[Recipe]) -> list[Recipe]:
    return [r for r in dict.fromkeys(recipes) if not (CACHE / r.key / "done").exists()]


def _start(recipe: Recipe) -> tuple[int, ...]:
    """World size, and what DeepSpeed keeps in globals: runs that differ here cannot share a start."""
    return (recipe.world_size, recipe.pipe, recipe.moe and recipe.ep, recipe.tp, recipe.sp)


def resume(world_size: int, resumes: Sequence[Resume], work: Path) -> list[dict[int, float]]:
    """Losses of several resumed runs, all in one start; other initial weights than the saved run's."""
    return [run.losses for run in resumed(world_size, resumes, work)]


def resumed(world_size: int, resumes: Sequence[Resume], work: Path) -> list[Resumed]:
    """The same with what each optimizer held right after it was loaded."""
    jobs = [
        {
            "out": str(r.save_dir),
            "recipe": asdict(r.recipe),
            "load": r.load,
            "load_optimizer_states": r.load_optimizer_states,
            "tag": r.tag,
            "steps": r.steps,
            "save_at": r.save_at,
            "init_seed": 99,
            "losses": str(work / f"losses{i}.json"),
        }
        for i, r in enumerate(resumes)
    ]
    launch(world_size, jobs, work, MODULE)
    files = [work / f"losses{i}.json" for i in range(len(resumes))]
    return [Resumed(losses=_losses(f), optimizer=_facts(f).get("loaded", {})) for f in files]


def launch(world_size: int, jobs: list[dict[str, Any]], work: Path, module: str) -> None:
    """One start of `world_size` ranks over `jobs`."""
    listed = work / "jobs.json"
    listed.write_text(json.dumps(jobs))
    seconds = START_SECONDS + 10 * len(jobs)
    ranks.train(module, [str(listed)], work, ranks=world_size, seconds=seconds)


def _make(world_size: int, batch: list[Recipe]) -> None:
    work = CACHE / f"making-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        jobs = []
        for recipe in batch:
            place = work / recipe.key
            place.mkdir()
            jobs.append(
                {
                    "out": str(place / "save"),
                    "recipe": asdict(recipe),
                    "load": None,
                    "load_optimizer_states": True,
                    "tag": None,
                    "steps": max(STEPS, *recipe.save_at),
                    "save_at": recipe.save_at,
                    "init_seed": 7,
                    "losses": str(place / "losses.json"),
                }
            )
        launch(world_size, jobs, work, MODULE)
    finally:
        # what was made before a failure is not made again by the next who asks
        for recipe in (r for r in batch if (work / r.key / "losses.facts.json").exists()):
            shutil.rmtree(CACHE / recipe.key, ignore_errors=True)
            (work / recipe.key / "done").touch()
            (work / recipe.key).rename(CACHE / recipe.key)
        shutil.rmtree(work, ignore_errors=True)


def _losses(path: Path) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in json.loads(path.read_text()).items()}


def _facts(losses: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(losses.with_suffix(".facts.json").read_text())
    return found


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One maker at a time, whoever runs the tests."""
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def copy_of(save_dir: Path, destination: Path) -> Path:
    """A private copy of a cached save_dir, for tests that write; returns `destination`."""
    shutil.copytree(save_dir, destination)
    return destination


def run_module(module: str, *arguments: str) -> str:
    """`python -m MODULE ARGUMENTS` in a child that may use torch and DeepSpeed; what it printed."""
    with tempfile.TemporaryDirectory(prefix="ckptd-module-") as folder:
        return ranks.run_module(module, *arguments, log=Path(folder) / "said", seconds=START_SECONDS)
