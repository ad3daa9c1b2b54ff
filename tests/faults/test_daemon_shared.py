"""Two hosts over one directory: the real daemon finds the other's manifests of its own files, and stands by.

The other host is the shipping code of this process: flock would keep a second daemon of this machine out.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, Node, made_before, node
from tests.support.recover_scene import Scene

pytestmark = [pytest.mark.real, pytest.mark.faults]
FIRST, LAST = "0" * 16, "z" * 16


real_saves = made_before(RUN)


def watching(here: Node, node_id: str) -> None:
    """A daemon with that id, which has committed one save."""
    here.save(1)
    here.state.mkdir(parents=True)
    (here.state / "node_id").write_text(node_id)
    here.start()
    here.wait_committed("global_step1~g1")


def other_ships(here: Node, step: int) -> None:
    """The other host is faster with the next save."""
    daemon = here.processes[-1]
    daemon.send_signal(signal.SIGSTOP)
    try:
        tag = here.save(step)
        other = Scene(here.root, node="other-host")
        (here.save_dir / "tokenizer.json").write_text("{}")
        assert other.commit(tag, step, save_seq=step).outcome == "committed"
    finally:
        daemon.send_signal(signal.SIGCONT)


def alarm(here: Node) -> str:
    found = [p["text"] for p in here.status().get("problems", ()) if p["code"] == "save-dir-shared"]
    return found[0] if found else ""


def test_the_host_of_the_higher_id_stands_by(tmp_path: Path) -> None:
    """It deletes nothing from then on, whatever its limit; after a restart a person has seen to it."""
    with node(tmp_path, local="save_total_limit = 1\nforms = []", remote='forms = ["zero"]') as here:
        watching(here, LAST)
        other_ships(here, 2)
        here.wait("the alarm", lambda: "other-host uploads" in alarm(here), 60)
        assert "stands by" in alarm(here)
        here.save(3)
        here.wait("sealed", lambda: here.checkpoint("global_step3")["state"] == "complete", 60)
        assert set(here.commits()) == {"global_step1~g1", "global_step2~g1"}
        assert {"global_step2", "global_step3"} <= here.local_tags()
        assert here.stop() == 0
        here.start()
        here.wait_committed("global_step3~g1", 60)


@pytest.mark.full
def test_that_of_the_lower_goes_on_and_says_so(tmp_path: Path) -> None:
    with node(tmp_path, local="save_total_limit = 1\nforms = []", remote='forms = ["zero"]') as here:
        watching(here, FIRST)
        other_ships(here, 2)
        here.wait("the alarm", lambda: "other-host uploads" in alarm(here), 60)
        assert "stands by" not in alarm(here)
        here.save(3)
        here.wait_committed("global_step3~g1", 60)


@pytest.mark.full
def test_a_directory_that_was_found_is_nobodys(tmp_path: Path) -> None:
    """It moved here with its job: what another host uploaded before is no second host."""
    with node(tmp_path, local="forms = []", job='existing = "all"', remote='forms = ["zero"]') as here:
        tag = here.save(1)
        (here.save_dir / "tokenizer.json").write_text("{}")
        assert Scene(here.root, node="other-host").commit(tag, 1).outcome == "committed"
        here.start()
        here.save(2)
        here.wait_committed("global_step2~g1", 60)
        assert not alarm(here)
