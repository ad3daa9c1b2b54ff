"""Real runs of transformers.Trainer and of Accelerate with DeepSpeed on CPU (docs/formats.md §1.2).

`prepare` trains whole trees, kept under `.build/ckpts` as in tests/support/real.py; `start` trains live
into a save_dir that a daemon watches.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support import ranks
from tests.support.real import CACHE, locked

HERE = Path(__file__).resolve().parent
SCRIPTS = {name: HERE / f"{name}.py" for name in ("hf_train", "accelerate_train")}
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")
START_SECONDS = 500.0
ranks.expect(
    "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "transformers.integrations.deepspeed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What both trainers are told; the total batch is 8 whatever the number of processes."""

    stage: int = 2
    processes: int = 2
    steps: int = 8
    save_steps: int = 2
    limit: int = 0
    """The trainer's own limit of checkpoints."""
    slow_seconds: float = 0.0
    """Between the parts of a save."""
    pause_seconds: float = 0.0
    """After each save."""
    resume: Path | None = None
    universal: bool = False
    init_seed: int = 7
    hidden: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HfRun(_Run):
    """One run of the Trainer."""

    save_only_model: bool = False
    gather: bool = False
    """stage3_gather_16bit_weights_on_model_save: no second writing of the shards."""
    waits_for_hold: bool = False
    """After each save, until ckptd holds it: a busy machine takes its time."""
    best: bool = False
    """load_best_model_at_end, the metric such that the first checkpoint stays the best."""
    final_save: bool = False
    """`trainer.save_model()` into output_dir at the end, as the example scripts do."""
    deepspeed: bool = True
    """Without it the Trainer saves by itself: no ZeRO shards."""

    @property
    def script(self) -> str:
        """Module below tests/."""
        return "hf_train"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateRun(_Run):
    """One loop with `accelerator.save_state`; with `name` always into save_dir/<name>, else automatic naming.

    With automatic naming save_dir is `<project>/checkpoints`, which Accelerate makes.
    """

    steps: int = 6
    name: str | None = "state"
    waits_for: Path | None = None
    """COMMITs of a directory remote: after each save, until its own is there, however busy the machine."""

    @property
    def script(self) -> str:
        """Module below tests/."""
        return "accelerate_train"


Run = HfRun | AccelerateRun


@dataclass
class Training:
    """A run in the background."""

    ranks: ranks.Ranks
    losses: Path

    def finish(self, seconds: float = START_SECONDS) -> dict[int, float]:
        """Wait for its end; loss by step."""
        self.ranks.wait(seconds)
        return read_losses(self.losses)

    def kill(self) -> None:
        """SIGKILL to every process of it at once: the node goes down."""
        self.ranks.kill()


def start(run: Run, out: Path, work: Path, *, name: str = "run", notes: Path | None = None) -> Training:
    """Train live into `out`; losses go to `work`, jobs and logs to its new folder `name`."""
    losses = work / f"{name}.losses.json"
    job = _job(run, out, losses, notes)
    place = work / name
    place.mkdir()
    (place / "jobs.json").write_text(json.dumps([job]))
    command = (f"tests.support.{run.script}", [str(place / "jobs.json")], place)
    return Training(ranks.start(*command, ranks=run.processes), losses)


def train(
    run: Run, out: Path, work: Path, *, name: str = "run", notes: Path | None = None
) -> dict[int, float]:
    """Train to the end; loss by step."""
    return start(run, out, work, name=name, notes=notes).finish()


def prepare(runs: Sequence[Run]) -> None:
    """Make the trees that are not cached yet, one start for those of a script and a number of processes."""
    if not _missing(runs):
        return  # nobody who trains meanwhile is waited for
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked():
        batches: dict[tuple[str, int], list[Run]] = {}
        for run in _missing(runs):
            batches.setdefault((run.script, run.processes), []).append(run)
        for batch in batches.values():
            _make(batch)


def _missing(runs: Sequence[Run]) -> list[Run]:
    return [run for run in dict.fromkeys(runs) if not (CACHE / key_of(run) / "done").exists()]


def tree_of(run: Run) -> Path:
    """save_dir of a whole run, prepared if need be; never write into it."""
    prepare([run])
    return CACHE / key_of(run) / "save"


def losses_of(run: Run) -> dict[int, float]:
    """Losses of the whole run."""
    prepare([run])
    return read_losses(CACHE / key_of(run) / "losses.json")


def key_of(run: Run) -> str:
    """Name of the cached folder: what is trained, by which versions and scripts."""
    versions = [importlib.metadata.version(package) for package in PACKAGES]
    texts = [path.read_text() for path in SCRIPTS.values()]
    text = json.dumps([asdict(run), run.script, versions, texts], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{run.script.removesuffix('_train')}-z{run.stage}-{run.processes}-{digest}"


def copy_checkpoint(tree: Path, tag: str, save_dir: Path) -> Path:
    """One checkpoint of a cached tree, its files in the order of their last write, as if saved now."""
    source, folder = tree / tag, save_dir / tag
    for path in sorted((p for p in source.rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


HF_TREES = (
    HfRun(stage=2),
    HfRun(stage=3),
    HfRun(stage=3, steps=2, save_only_model=True),
    HfRun(stage=3, steps=2, save_only_model=True, gather=True),
)
ACCELERATE_TREES = (
    AccelerateRun(stage=2),
    AccelerateRun(stage=3),
    AccelerateRun(stage=2, steps=4, save_steps=4),
    AccelerateRun(stage=3, steps=4, save_steps=4),
)
"""What the end-to-end tests take from the cache: one start each, because the start costs most."""


def read_losses(path: Path) -> dict[int, float]:
    """Loss by step."""
    return {int(step): float(loss) for step, loss in json.loads(path.read_text()).items()}


def _job(run: Run, out: Path, losses: Path, notes: Path | None) -> dict[str, object]:
    fields = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(run).items()}
    return fields | {"out": str(out), "losses": str(losses), "notes": str(notes) if notes else None}


def _make(batch: list[Run]) -> None:
    work = CACHE / f"making-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        jobs = []
        for run in batch:
            place = work / key_of(run)
            place.mkdir()
            jobs.append(_job(run, place / "save", place / "losses.json", place / "notes"))
        (work / "jobs.json").write_text(json.dumps(jobs))
        module, seconds = f"tests.support.{batch[0].script}", START_SECONDS + 30 * len(batch)
        ranks.train(module, [str(work / "jobs.json")], work, ranks=batch[0].processes, seconds=seconds)
        for run in batch:
            shutil.rmtree(CACHE / key_of(run), ignore_errors=True)
            (work / key_of(run) / "done").touch()
            (work / key_of(run)).rename(CACHE / key_of(run))
    finally:
        shutil.rmtree(work, ignore_errors=True)
