"""A job that goes to another node and comes back: what lay here meanwhile is no rewind (P9, adr/0152)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.recover_scene import Scene

HOUR_SECONDS = 3600


def look_once(scene: Scene, nas: Path) -> None:
    """A daemon comes, ships what is there, and goes."""
    job_file = scene.root / "run.toml"
    job_file.write_text(
        f'name = "run"\nsave_dir = "{scene.save_dir}"\nnode_name = "{scene.node}"\nsettle = "0.3s"\n'
        '[local]\nmin_free = "0%"\nforms = []\nsave_total_limit = 2\n'
        f'[[remote]]\nname = "nas"\nurl = "{nas}"\nforms = ["zero"]\nsame_filesystem = true\n'
        "save_total_limit = 1\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    command = [sys.executable, "-m", "ckptd", "run", "--job", str(job_file), "--once"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=200)


@pytest.mark.parametrize("is_sent_back", [False, True])
def test_the_newest_of_another_node_stays_the_newest(tmp_path: Path, is_sent_back: bool) -> None:
    """Node a dies before its daemon sees 550; b goes on from 400 to 900, and the job comes back to a.

    Sent back to 400 there it would write 550 after 900: the same but for the times.
    """
    a, b = Scene(tmp_path / "a", node="a"), Scene(tmp_path / "b", node="b")
    a.save(400)
    look_once(a, a.nas)
    a.save(550)
    tag = b.save(900)
    for path in (b.save_dir / tag).iterdir() if is_sent_back else ():
        written = path.stat().st_mtime - HOUR_SECONDS
        os.utime(path, (written, written))
    look_once(b, a.nas)
    assert (a.nas / "latest").read_text() == "global_step900"
    look_once(a, a.nas)
    look_once(a, a.nas)
    assert (a.nas / "latest").read_text() == f"global_step{550 if is_sent_back else 900}"
    assert (a.nas / "_ckptd/commits/global_step900~g1~zero.json").exists() is not is_sent_back
    assert a.resume().path.name == f"global_step{550 if is_sent_back else 900}"
