"""What commands print into a pipe or a file: lines end with their last word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("verb", ["check", "list", "inspect", "verify", "gc"])
def test_no_line_is_filled_up_with_blanks(scene: Scene, verb: str, columns: str) -> None:
    scene.commit(scene.save(8), 8)
    scene.commit(scene.save(16), 16)
    place = [str(scene.save_dir), str(scene.nas)]
    words = {"check": [*place, "--same-filesystem"], "gc": [place[1], "--dry-run"]}.get(verb, place[1:])
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", verb, *words],
        env={**os.environ, "COLUMNS": columns, "CKPTD_CONFIG_DIR": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
    if verb in ("list", "inspect", "verify"):
        assert "global_step16" in done.stdout
