"""`python -m examples.demo`: the play, then the judge in a process of its own, tables and drawings.

Exit 0 only if the judge found every promise checked and held.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from examples.demo.convert_only import QuickstartFailed
from examples.demo.evidence import load, read_lines
from examples.demo.launch import child_environment
from examples.demo.play import Play
from examples.demo.plots import draw_losses, draw_timeline
from examples.demo.progress import Progress
from examples.demo.report import checkpoint_table, promise_table
from examples.demo.scene import TOLERANCE, Scene

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


def quickstart(scene: Scene, out: Path, console: Console) -> None:
    """Play, judge, show; drawings go to `out`. The scene's remote is open, and still is afterwards.

    Raises:
        QuickstartFailed: an act did not come to its end, or the judge found a promise broken.
    """
    with Progress(scene, console) as progress:
        Play(scene, progress).run()
        progress.say(
            "the judge reads records, observations, audit.jsonl and every byte " + scene.remote.where
        )
    judged = subprocess.run(
        [sys.executable, "-m", "examples.demo.judge", str(scene.root)],
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )
    evidence = load(scene.root)
    statuses = read_lines(scene.records / "status.jsonl")
    console.print(checkpoint_table(evidence, statuses))
    verdict = scene.root / "verdict.json"
    if verdict.exists():
        console.print(promise_table(json.loads(verdict.read_text())))
    out.mkdir(parents=True, exist_ok=True)
    draw_losses(out / "losses.png", evidence.losses, TOLERANCE)
    draw_timeline(out / "timeline.png", evidence, statuses)
    console.print(f"drawn: {out / 'losses.png'}, {out / 'timeline.png'}", soft_wrap=True)
    if judged.returncode:
        console.print(judged.stdout + judged.stderr)
        msg = "not every promise held"
        raise QuickstartFailed(msg, hint="the list above says which; --keep DIR keeps everything to look at")
