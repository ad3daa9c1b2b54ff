"""Elastic resume in three experiments: train, convert with ckptd, go on with other ranks and micro-steps.

    python examples/elastic_resume/run.py [--steps 60] [--stage 2] [--out DIR] [--plot FILE.png]

Prints a table and exits 1 when a run leaves its bound. On four GPUs where a machine has them, else on CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().with_name("train.py")
START_SECONDS = 900
BOUND = 0.005
"""Other ranks and micro-steps add gradients in another order, and bf16 rounds every sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    name: str
    experiment: int
    """0: what the others are compared with."""
    ranks: int
    accumulation: int = 1
    load: str | None = None
    is_exact: bool = False
    saves: bool = False


STRAIGHT = Run(name="uninterrupted, 4 ranks", experiment=0, ranks=4, saves=True)
RUNS = (
    STRAIGHT,
    Run(name="resumed from ZeRO, 4 ranks", experiment=1, ranks=4, load="zero", is_exact=True),
    Run(name="resumed from universal, 4 ranks", experiment=1, ranks=4, load="universal", is_exact=True),
    Run(name="4 ranks, 2 micro-steps", experiment=2, ranks=4, accumulation=2),
    Run(name="4 ranks, 4 micro-steps", experiment=2, ranks=4, accumulation=4),
    Run(name="2 ranks, 2 micro-steps", experiment=2, ranks=2, accumulation=2),
    Run(
        name="resumed from universal, 2 ranks, 2 micro-steps",
        experiment=3,
        ranks=2,
        accumulation=2,
        load="universal",
    ),
)


class Example:
    """The three experiments in one folder."""

    def __init__(self, out: Path, *, steps: int, stage: int, device: str) -> None:
        self.out, self.steps, self.stage, self.device = out, steps, stage, device
        self.middle = steps // 2
        self.save_dir = out / "save"
        self.tag = f"global_step{self.middle}"
        self.losses: dict[str, dict[int, float]] = {}

    def perform(self) -> None:
        """Train and save on 4 ranks, convert, then everything else: one start per number of ranks."""
        self._start(4, [run for run in RUNS if run.saves])
        self._convert()
        self._start(4, [run for run in RUNS if run.ranks == 4 and not run.saves])
        self._start(2, [run for run in RUNS if run.ranks == 2])

    def _convert(self) -> None:
        source, target = self.save_dir / self.tag, self.save_dir / f"{self.tag}_universal"
        command = [sys.executable, "-m", "ckptd", "convert", str(source), str(target)]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"ckptd convert failed:\n{done.stderr}")
        print(f"ckptd convert {self.tag} {target.name}: {time.monotonic() - began:.1f} s")

    def _start(self, ranks: int, runs: list[Run]) -> None:
        listed, places = self.out / f"runs{ranks}.json", {}
        for run in runs:
            places[run.name] = self.out / f"losses{RUNS.index(run)}.json"
        listed.write_text(json.dumps([self._job(run, places[run.name]) for run in runs]))
        environment = dict(os.environ)
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        if self.device == "cpu":
            environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        done = subprocess.run(
            [*torchrun, str(ranks), str(SCRIPT), str(listed)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"training on {ranks} ranks failed:\n{done.stderr[-4000:]}")
        for name, place in places.items():
            self.losses[name] = {int(step): loss for step, loss in json.loads(place.read_text()).items()}

    def _job(self, run: Run, losses: Path) -> dict[str, Any]:
        return {
            "name": run.name,
            "load": run.load,
            "tag": f"{self.tag}_universal" if run.load == "universal" else self.tag,
            "save_at": self.middle if run.saves else 0,
            "steps": self.steps,
            "accumulation": run.accumulation,
            "stage": self.stage,
            "save_dir": str(self.save_dir),
            "losses": str(losses),
        }

    def difference(self, run: Run) -> float:
        """The largest distance to the uninterrupted run's loss at any step."""
        straight = self.losses[STRAIGHT.name]
        return max(abs(loss - straight[step]) for step, loss in self.losses[run.name].items())

    def is_good(self, run: Run) -> bool:
        """Within its bound, with every step that it should have."""
        first = self.middle + 1 if run.load else 1
        whole = set(self.losses[run.name]) == set(range(first, self.steps + 1))
        return whole and self.difference(run) <= (0.0 if run.is_exact else BOUND)

    def table(self) -> str:
        """One line per run, as Markdown."""
        lines = [
            "| run | steps | last loss | largest difference | allowed | verdict |",
            "|---|---|---|---|---|---|",
        ]
        for run in RUNS:
            losses = self.losses[run.name]
            steps = f"{min(losses)}-{max(losses)}"
            allowed = "0" if run.is_exact or run is STRAIGHT else f"{BOUND}"
            verdict = "good" if self.is_good(run) else "DEVIATES"
            figures = f"{losses[self.steps]:.4f} | {self.difference(run):.1e}"
            lines.append(f"| {run.name} | {steps} | {figures} | {allowed} | {verdict} |")
        return "\n".join(lines)

    def plot(self, file: Path) -> None:
        """Plot the losses of all runs by step, and below them how far each is from the uninterrupted run."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5.6), layout="constrained", sharex=True)
        straight = self.losses[STRAIGHT.name]
        above.plot(list(straight), list(straight.values()), color="#9aa0a6", linewidth=5, label=STRAIGHT.name)
        for number, run in enumerate(run for run in RUNS if run is not STRAIGHT):
            losses, style = self.losses[run.name], {"color": f"C{number}", "linewidth": 1.2}
            above.plot(list(losses), list(losses.values()), **style)
            away = [abs(loss - straight[step]) for step, loss in losses.items()]
            below.plot(list(losses), away, label=f"{run.experiment}: {run.name}", **style)
        below.axhline(BOUND, color="black", linestyle=":", label=f"allowed: {BOUND}")
        below.set_yscale("symlog", linthresh=1e-6)
        below.set_ylim(bottom=-3e-7)
        for axis, words in ((above, "loss"), (below, "difference of losses")):
            axis.axvline(self.middle, color="black", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_ylabel(words)
        above.legend(frameon=False)
        below.set_xlabel(f"step (saved and resumed at {self.middle})")
        exact = max(self.difference(run) for run in RUNS if run.is_exact)
        other = max(self.difference(run) for run in RUNS if not run.is_exact and run is not STRAIGHT)
        title = f"Resumed on the same ranks, losses differ by {exact:.1g};\n"
        figure.suptitle(f"{title}with other ranks or micro-steps by at most {other:.1e}", fontweight="bold")
        handles, labels = below.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        figure.savefig(file, dpi=200)
        pyplot.close(figure)


def best_device() -> str:
    """cuda with a GPU for each of the four ranks, else cpu."""
    import torch

    return "cuda" if torch.cuda.device_count() >= max(run.ranks for run in RUNS) else "cpu"


def main() -> int:
    """Run, print, plot; 1 when a run left its bound."""
    parser = argparse.ArgumentParser(description="elastic resume with ckptd and DeepSpeed")
    parser.add_argument("--steps", type=int, default=60, help="saved and converted at half of them")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--out", type=Path, default=Path("elastic-resume-out"))
    parser.add_argument("--plot", type=Path, help="default: OUT/elastic-resume.png")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    given = parser.parse_args()
    if (given.out / "save").exists():
        raise SystemExit(f"{given.out} holds an earlier run: choose another --out")
    given.out.mkdir(parents=True, exist_ok=True)
    device = best_device() if given.device == "auto" else given.device
    example = Example(given.out.resolve(), steps=given.steps, stage=given.stage, device=device)
    print(f"{given.steps} steps, ZeRO stage {given.stage}, on {device}")
    example.perform()
    print(example.table())
    plot = given.plot or given.out / "elastic-resume.png"
    example.plot(plot)
    print(f"plots: {plot}")
    shutil.rmtree(example.save_dir)
    return 0 if all(example.is_good(run) for run in RUNS) else 1


if __name__ == "__main__":
    sys.exit(main())
