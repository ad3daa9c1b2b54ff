"""A hundred checkpoints and no journal: how long until something is done, and nothing is sent again (P8)."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.attacks.figures import note
from tests.e2e.harness import node
from tests.support.synthetic import write_stage12

pytestmark = [pytest.mark.faults, pytest.mark.full]
COUNT = 100
MOST_SECONDS = 10.0
"""The target: status says that all are safe. The next COMMIT waits for its save to settle, and has none."""


def test_a_restart_without_its_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All hundred are recognised by their fingerprints; nothing is written twice."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        here.write_job(job='existing = "all"')
        staged = here.root / "staged"
        for step in range(1, COUNT + 2):
            write_stage12(staged / f"global_step{step}", [{"w": (16, 8), "b": (8,)}], 2, step=step)
        for step in range(1, COUNT + 1):
            shutil.copytree(staged / f"global_step{step}", here.save_dir / f"global_step{step}")
        here.start()
        here.wait("all of them", lambda: len(here.commits()) == COUNT, 240)
        here.stop()
        written = {p: p.stat().st_mtime_ns for p in here.nas.rglob("*.pt")}
        shutil.rmtree(here.state)
        (staged / f"global_step{COUNT + 1}").rename(here.save_dir / f"global_step{COUNT + 1}")
        began = time.monotonic()
        here.start()
        here.wait("safe", lambda: here.status().get("safe"), 60)
        seconds_to_safe = time.monotonic() - began
        here.wait_committed(f"global_step{COUNT + 1}~g1", 60)
        seconds_to_commit = time.monotonic() - began
        again = [p for p, at in written.items() if p.stat().st_mtime_ns != at]
        note(
            "restart-100",
            "F28: journal lost",
            said=f"{seconds_to_safe:.1f} s until all are safe (target: {MOST_SECONDS:.0f}), "
            f"{seconds_to_commit:.1f} s to the next COMMIT ({os.cpu_count()} cores, shared)",
            runs=COUNT,
            violations=len(again),
            seconds=seconds_to_commit,
        )
        with capsys.disabled():
            print(f"\n{seconds_to_safe:.1f} s to safe, {seconds_to_commit:.1f} s to the next COMMIT")
        assert not again, "sent again"
        assert seconds_to_safe <= MOST_SECONDS
        assert len(here.commits()) == COUNT + 1
