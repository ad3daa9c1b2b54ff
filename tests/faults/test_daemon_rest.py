"""A job at rest, and one that seems so: what must be noticed all the same, and `--once` with slow remotes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import RUN, Node, made_before, node

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.faults]

SLOW_LOOKS = """
import sys, time
if "ckptd.storage.child.child" in sys.orig_argv:
    import ckptd.storage.child.service as service
    at_once = service.observe
    def slowly(*arguments):
        time.sleep(1.5)
        return at_once(*arguments)
    service.observe = slowly
"""
LONG_REST = """
import sys
if "run" in sys.orig_argv:
    import ckptd.daemon.idle as rest
    rest.RESCAN_SECONDS, rest.REST_AFTER_SECONDS, rest.REST_SECONDS = 1.0, 1.0, 600.0
"""
"""Other times for the daemon: nothing else tells minutes of rest apart in a test of seconds."""


real_saves = made_before(RUN)


def start_with(here: Node, code: str) -> None:
    """Every process of ckptd begins with this."""
    folder = here.root / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    here.environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.getcwd()])


def test_once_does_not_end_before_it_has_looked_at_a_slow_remote(tmp_path: Path) -> None:
    """What an earlier run sealed and did not send is found out only by the first look."""
    with node(tmp_path, local="", remote='forms = ["zero"]\nbandwidth = "20kB/s"') as here:
        here.start()
        here.save(1)
        here.wait("sealed", lambda: "(zero) to nas" in here.log.read_text())
        here.kill()
        assert not here.commits()
        here.write_job(remote='forms = ["zero"]')
        start_with(here, SLOW_LOOKS)
        assert here.once() == 0
        assert set(here.commits()) == {"global_step1~g1"}


def test_once_does_what_the_look_after_its_upload_shows(tmp_path: Path) -> None:
    """Retention in the remote rests on an observation of the new COMMIT."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]\nkeep_last = 1') as here:
        here.save(1)
        assert here.once() == 0
        here.save(2)
        (here.save_dir / "global_step1").rename(here.root / "gone")
        start_with(here, SLOW_LOOKS)
        assert here.once() == 0
        assert set(here.commits()) == {"global_step2~g1"}


@pytest.mark.full
def test_an_upload_that_failed_is_tried_again_soon(tmp_path: Path) -> None:
    """A job whose remote backs off has work to do: it is not at rest."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        in_the_way = here.nas / "global_step2"
        in_the_way.write_text("")
        here.save(2)
        here.wait("a failure", lambda: "global_step2 → nas (zero): " in here.log.read_text())
        in_the_way.unlink()
        here.wait_committed("global_step2~g1", 40)


def test_a_save_dir_replaced_during_a_long_rest_is_noticed(tmp_path: Path) -> None:
    """No file event tells that save_dir was renamed and made anew; the trainer saves into the new one."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        here.state = tmp_path / "state" / "run"
        here.environment["CKPTD_STATE_DIR"] = str(tmp_path / "state")
        start_with(here, LONG_REST)
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        # a few looks at the folders, a second apart, find nothing new: from then on only every 600 s
        time.sleep(8)
        here.save_dir.rename(tmp_path / "old")
        here.save_dir.mkdir()
        here.save(2)
        here.wait_committed("global_step2~g1", 40)
