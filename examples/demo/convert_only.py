"""`python -m examples.demo --convert-only`: train, `ckptd convert`, resume with stock DeepSpeed on 1 and 4
ranks.

The short proof that a converted checkpoint is what DeepSpeed expects: each resumed run starts from other
initial weights, so equal losses can only come from the checkpoint.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ckptd.errors import CkptdError
from examples.demo.launch import child_environment, start_training
from examples.demo.plots import draw_losses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TOLERANCE = 1e-3
SAVE_AT, LAST_STEP = 6, 16
TIMEOUT_SECONDS = 240.0
OTHER_SEED = "99"


class QuickstartFailed(CkptdError):
    """A promise did not hold, or a step of the quickstart failed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """One resumed run, compared with the uninterrupted one."""

    world_size: int
    seconds: float
    losses: dict[int, float]
    largest_difference: float


def run_ckptd(
    arguments: Sequence[str],
    *,
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`ckptd ARGUMENTS` as a person would start it, with more environment; never raises for its exit code."""
    return subprocess.run(
        [sys.executable, "-m", "ckptd", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env=child_environment(environment),
        check=False,
    )


def convert_only(root: Path, out: Path, *, stage: int, world_size: int, console: Console) -> None:
    """Train on `world_size` ranks, convert, resume on 1 and 4; prints a table, draws `out`/losses.png.

    Raises:
        QuickstartFailed: the conversion failed, or losses differ by more than 1e-3.
    """
    save_dir, records = root / "nvme" / "gpt", root / "records"
    console.print(f"training on {world_size} ranks, ZeRO stage {stage} …")
    options = ["--last-step", str(LAST_STEP), "--save-every", str(SAVE_AT)]
    base = start_training("base", records, save_dir, stage=stage, world_size=world_size, options=options)
    base.wait(timeout_seconds=TIMEOUT_SECONDS)
    reference = {line["step"]: line["loss"] for line in base.lines("step")}
    source = save_dir / f"global_step{SAVE_AT}"
    size_bytes = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    seconds = _convert(source, save_dir / f"{source.name}_universal", console)
    console.print(f"{source.name} ({size_bytes / 1e6:.0f} MB) is universal after {seconds:.2f} s")
    resumed = []
    for ranks in (1, 4):
        console.print(f"stock DeepSpeed resumes on {ranks} {'rank' if ranks == 1 else 'ranks'} …")
        resumed.append(_resume(records, save_dir, stage, ranks, reference))
    _show(resumed, reference, console)
    runs = {"reference": reference} | {f"resumed, world size {r.world_size}": r.losses for r in resumed}
    out.mkdir(parents=True, exist_ok=True)
    draw_losses(out / "losses.png", runs, TOLERANCE)
    console.print(f"drawn: {out / 'losses.png'}")
    bad = [r for r in resumed if not r.largest_difference <= TOLERANCE]
    if bad:
        msg = f"losses on {bad[0].world_size} ranks differ by {bad[0].largest_difference:.2e}"
        raise QuickstartFailed(msg, hint=f"allowed is {TOLERANCE:g}; see {out / 'losses.png'}")


def _convert(source: Path, destination: Path, console: Console) -> float:
    begin = time.monotonic()
    done = run_ckptd(["convert", str(source), str(destination)])
    seconds = time.monotonic() - begin
    if done.returncode:
        msg = f"ckptd convert ended with {done.returncode}: {done.stderr.strip()}"
        raise QuickstartFailed(msg)
    console.print(done.stdout.rstrip())
    return seconds


def _resume(records: Path, save_dir: Path, stage: int, ranks: int, reference: dict[int, float]) -> Resumed:
    options = ["--last-step", str(LAST_STEP), "--load", "universal", "--init-seed", OTHER_SEED]
    begin = time.monotonic()
    run = start_training(f"world{ranks}", records, save_dir, stage=stage, world_size=ranks, options=options)
    run.wait(timeout_seconds=TIMEOUT_SECONDS)
    losses = {line["step"]: line["loss"] for line in run.lines("step")}
    expected = [step for step in reference if step > SAVE_AT]
    difference = max(abs(losses.get(step, float("inf")) - reference[step]) for step in expected)
    return Resumed(ranks, time.monotonic() - begin, losses, difference)


def _show(resumed: list[Resumed], reference: dict[int, float], console: Console) -> None:
    table = Table(title="losses after the resume (other initial weights)")
    table.add_column("step", justify="right")
    table.add_column("uninterrupted", justify="right")
    for run in resumed:
        table.add_column(f"{run.world_size} ranks" if run.world_size > 1 else "1 rank", justify="right")
    for step, loss in reference.items():
        if step > SAVE_AT:
            others = [f"{run.losses[step]:.6f}" if step in run.losses else "-" for run in resumed]
            table.add_row(str(step), f"{loss:.6f}", *others)
    table.add_section()
    table.add_row("max |Δ|", f"≤ {TOLERANCE:g}", *(f"{run.largest_difference:.1e}" for run in resumed))
    console.print(table)
