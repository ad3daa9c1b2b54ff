"""Drain, pause and wait with real daemons over a slow link: what is committed when the window closes.

The windows of real preemptions (30 s, 2 min) run with CKPTD_FULL=1; a few seconds in every run (adr/0108).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.slurm import below
from tests.e2e.harness import RUN, made_before, node
from tests.e2e.s3_node import BIG_RUN
from tests.support.real import Recipe, prepare, save_dir_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Node

pytestmark = [pytest.mark.real, pytest.mark.faults, pytest.mark.timeout(600)]

FULL = pytest.mark.full
WINDOWS = (8, 30, 120)
ZERO_ONLY = 'forms = ["zero"]'


real_saves = made_before(RUN)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, local="forms = []", remote=ZERO_ONLY) as made:
        yield made


def save_bytes(run: Recipe) -> int:
    folder = save_dir_of(run) / "global_step1"
    return sum(path.stat().st_size for path in folder.iterdir())


def throttle(here: Node, seconds: float, forms: str = ZERO_ONLY, run: Recipe = RUN) -> None:
    """A link that takes so long for one save."""
    here.write_job(remote=f'bandwidth = "{int(save_bytes(run) / seconds)}B/s"\n{forms}')


def arrived(here: Node) -> int:
    """Bytes of checkpoints in the remote, finished or not."""
    return sum(p.stat().st_size for p in here.nas.rglob("*") if p.is_file() and "_ckptd" not in p.parts)


def three_sealed(here: Node, seconds: float, forms: str = ZERO_ONLY) -> None:
    """Steps 2, 3 and 4 are complete behind a link that takes so long for each; nothing is sent yet."""
    here.start()
    here.save(1)
    here.wait_committed("global_step1~g1")
    assert here.ckptd("pause", here.job_file).returncode == 0
    throttle(here, seconds, forms)
    assert here.ckptd("reload", here.job_file).returncode == 0
    for step in (2, 3, 4):
        here.save(step)
    here.wait("all sealed", lambda: len(sealed(here)) == 4)


def sealed(here: Node) -> list[dict[str, object]]:
    return [c for c in here.status().get("checkpoints", ()) if c["local"]["complete_at"]]


# --- drain ---------------------------------------------------------------------------------------------


def test_the_newest_that_fits_is_committed_and_what_does_not_is_said_at_once(here: Node) -> None:
    """A big one is on its way and needs minutes: it makes way, and is named."""
    prepare([BIG_RUN])
    throttle(here, 3.0)
    here.start()
    here.save(2, BIG_RUN)
    here.wait("on its way", lambda: _shipping(here))
    here.save(3)
    here.wait("both sealed", lambda: len(sealed(here)) == 2)
    with asking(here, "60s") as process:
        here.wait_committed("global_step3~g1", 60)
        assert process.stderr is not None
        said = process.stderr.readline()
    assert "run: global_step2 will not make it at the speed of the link" in said
    assert list(here.commits()) == ["global_step3~g1"]


@contextlib.contextmanager
def asking(here: Node, deadline: str) -> Iterator[subprocess.Popen[str]]:
    """`ckptd drain`, while it waits."""
    command = [sys.executable, "-m", "ckptd", "drain", str(here.job_file), "--deadline", deadline]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=200)


@FULL
@pytest.mark.parametrize("window", WINDOWS)
def test_what_fits_is_committed_and_what_will_not_make_it_is_said_at_once(here: Node, window: int) -> None:
    """Three saves of half a window each: the newest is committed, the oldest is named early; 3."""
    three_sealed(here, 0.5 * window)
    began = time.monotonic()
    done = here.ckptd("drain", here.job_file, "--deadline", f"{window}s", timeout_seconds=window + 60)
    took, commits = time.monotonic() - began, set(here.commits())
    assert done.returncode == 3, done.stdout + done.stderr
    assert "global_step4~g1" in commits, here.log.read_text()[-3000:]
    assert "global_step2~g1" not in commits
    assert "run: global_step2 will not make it at the speed of the link" in done.stderr
    assert re.fullmatch(r"run: not committed: (global_step3, )?global_step2\n", done.stdout)
    assert took > window
    first = here.ckptd("status", here.job_file).stdout.splitlines()[0]
    assert "the drain's deadline passed, not committed: " in first
    assert "● PAUSED  step 4" in first


@FULL
@pytest.mark.parametrize("window", WINDOWS)
def test_the_models_weights_where_nothing_else_fits(tmp_path: Path, window: int) -> None:
    """The whole save takes three windows; its weights, which the remote lists, are committed in one."""
    prepare([BIG_RUN])
    forms = 'forms = ["zero", "weights-bf16"]'
    with node(tmp_path, local="forms = []", remote=forms) as here:
        throttle(here, 3.0 * window, forms, BIG_RUN)
        here.start()
        here.save(1, BIG_RUN)
        here.wait("sealed", lambda: sealed(here))
        done = here.ckptd("drain", here.job_file, "--deadline", f"{window}s", timeout_seconds=window + 60)
        assert done.returncode == 3, done.stdout + done.stderr
        assert list(here.commits("weights-bf16")) == ["global_step1~g1"], here.log.read_text()[-3000:]
        assert here.commits() == {}
        here.write_job(remote=forms)
        assert here.ckptd("reload", here.job_file).returncode == 0
        here.wait_committed("global_step1~g1", 60)


@FULL
def test_all_of_it_is_committed_and_nothing_else_is_begun(tmp_path: Path) -> None:
    """0 as soon as that is so; the universal form, which was on its way, waits until the window is over."""
    forms = 'forms = ["zero", "universal"]'
    with node(tmp_path, local="forms = []", remote=forms) as here:
        throttle(here, 1.5, forms)
        here.start()
        here.save(1)
        here.wait("the universal form under way", lambda: "universal" in _shipping(here), 60)
        here.save(2)
        done = here.ckptd("drain", here.job_file, "--deadline", "40s")
        assert (done.returncode, "drained, all that is complete here is committed" in done.stdout) == (
            0,
            True,
        )
        assert set(here.commits()) == {"global_step1~g1", "global_step2~g1"}
        assert here.commits("universal") == {}
        here.wait("its first line", lambda: (here.status().get("drain") or {}).get("is_done"))
        assert "● SAFE  step 2" in here.ckptd("status", here.job_file).stdout


def test_a_save_that_is_being_written_is_waited_for(here: Node) -> None:
    """Nothing else is missing: `ckptd drain` asks, and stays until the save is whole and committed."""
    here.start()
    here.save(1)
    here.wait_committed("global_step1~g1")
    here.save(2, shards=2)
    with asking(here, "60s") as command:
        here.wait("it drains", lambda: here.status().get("drain"))
        time.sleep(1.0)
        here.save(2)
        out, said = command.communicate(timeout=200)
    assert (command.returncode, "run: drained" in out) == (0, True), out + said
    assert list(here.commits()) == ["global_step1~g1", "global_step2~g1"]


def _shipping(here: Node) -> set[str]:
    return {
        form
        for checkpoint in here.status().get("checkpoints", ())
        for forms in checkpoint["remotes"].values()
        for form, state in forms.items()
        if state["state"] == "shipping"
    }


def test_without_a_daemon_it_works_by_itself(here: Node) -> None:
    """One that was never started before."""
    here.save(1)
    done = here.ckptd("drain", here.job_file, "--deadline", "60s", timeout_seconds=90)
    assert (done.returncode, "run: drained" in done.stdout) == (0, True), done.stdout + done.stderr
    assert list(here.commits()) == ["global_step1~g1"]
    # what status tells of this drain is no answer to a later one
    process = here.start()
    assert here.ckptd("drain", here.job_file, "--deadline", "60s", timeout_seconds=90).returncode == 0
    process.send_signal(signal.SIGSTOP)
    here.save(2)
    done = here.ckptd("drain", here.job_file, "--deadline", "0.2s", timeout_seconds=90)
    process.send_signal(signal.SIGCONT)
    assert (done.returncode, "gave no answer" in done.stdout) == (3, True), done.stdout + done.stderr


@FULL
def test_after_a_kill_it_goes_on(here: Node) -> None:
    here.save(1)
    assert here.once() == 0
    throttle(here, 6.0)
    here.start()
    here.save(2)
    here.wait("on its way", lambda: _shipping(here))
    here.kill()
    done = here.ckptd("drain", here.job_file, "--deadline", "60s", timeout_seconds=90)
    assert (done.returncode, len(here.commits())) == (0, 2), done.stdout + done.stderr


@FULL
def test_a_daemon_that_goes_meanwhile_is_replaced(here: Node) -> None:
    throttle(here, 10.0)
    process = here.start()
    here.save(1)
    here.wait("on its way", lambda: _shipping(here))
    with asking(here, "60s") as command:
        here.wait("it drains", lambda: here.status().get("drain"))
        process.kill()
        process.wait(10)
        out, said = command.communicate(timeout=200)
    assert (command.returncode, "its daemon has gone" in said) == (0, True), out + said
    assert list(here.commits()) == ["global_step1~g1"]


def test_sigterm_drains(here: Node) -> None:
    throttle(here, 2.0)
    process = here.start("--drain", "60s")
    here.save(1)
    here.wait("on its way", lambda: _shipping(here) or here.commits())
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 0, here.log.read_text()[-2000:]
    assert list(here.commits()) == ["global_step1~g1"]


def test_sigterm_to_every_process_of_a_step_drains(here: Node) -> None:
    """What Slurm's scancel does, at a time limit twice: daemon and children carry on until it has drained."""
    throttle(here, 3.0)
    process = here.start("--drain", "60s")
    here.save(1)
    here.wait("on its way", lambda: _shipping(here) or here.commits())
    children = below(process.pid)
    assert children
    for pid in (process.pid, *children, process.pid):
        with contextlib.suppress(ProcessLookupError):  # one that has just ended by itself
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
    assert process.wait(200) == 0, here.log.read_text()[-2000:]
    assert list(here.commits()) == ["global_step1~g1"]
    assert "its process ended" not in here.log.read_text()


@FULL
def test_ctrl_c_while_it_drains_stops_at_once(here: Node) -> None:
    throttle(here, 60.0)
    process = here.start("--drain", "60s")
    here.save(2)
    here.wait("on its way", lambda: _shipping(here))
    process.send_signal(signal.SIGTERM)
    here.wait("it drains", lambda: here.status().get("drain"))
    process.send_signal(signal.SIGINT)
    assert process.wait(200) == 3
    assert "global_step2~g1" not in here.commits()


@FULL
def test_a_drain_that_came_too_late_says_what_is_missing(here: Node) -> None:
    throttle(here, 60.0)
    process = here.start("--drain", "2s")
    here.save(1)
    here.wait("on its way", lambda: _shipping(here))
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 3
    assert "the drain deadline passed; not committed: global_step1" in here.log.read_text()


# --- pause ---------------------------------------------------------------------------------------------


def test_a_pause_holds_within_a_second_and_over_a_restart(here: Node) -> None:
    throttle(here, 30.0)
    here.start()
    here.save(1)
    here.wait("on its way", lambda: arrived(here) > 0)
    done = here.ckptd("pause", here.job_file)
    assert (done.returncode, done.stdout) == (0, "run: paused\n"), done.stderr
    time.sleep(1.0)
    before = arrived(here)
    time.sleep(1.5)
    assert arrived(here) == before
    shown = here.ckptd("status", here.job_file)
    assert (shown.returncode, "run  ● PAUSED  nothing is committed yet" in shown.stdout) == (3, True)
    here.kill()
    here.start()
    here.save(2)
    here.wait("still watching", lambda: len(sealed(here)) == 2)
    assert here.status()["state"] == "paused"
    time.sleep(1.0)
    assert arrived(here) == before
    assert here.commits() == {}
    assert here.ckptd("pause", here.job_file, "--off").returncode == 0
    here.write_job(remote=ZERO_ONLY)
    assert here.ckptd("reload", here.job_file).returncode == 0
    here.wait_committed("global_step1~g1", 60)
    here.wait_committed("global_step2~g1", 60)


@FULL
def test_a_pause_is_recorded_without_a_daemon(here: Node) -> None:
    """And refused before there is anything to pause."""
    assert here.ckptd("pause", here.job_file).returncode == 66
    here.save(1)
    assert here.once() == 0
    done = here.ckptd("pause", here.save_dir)
    assert (done.returncode, "none runs now" in done.stdout) == (0, True), done.stderr
    here.save(2)
    assert here.once() == 3
    assert list(here.commits()) == ["global_step1~g1"]
    assert here.ckptd("drain", here.job_file).returncode == 0
    assert len(here.commits()) == 2


# --- wait ----------------------------------------------------------------------------------------------


@FULL
def test_wait_for_a_step(here: Node) -> None:
    throttle(here, 3.0)
    here.start()
    here.save(1)
    done = here.ckptd("wait", here.job_file, "--step", 1, "--timeout", "60s")
    assert (done.returncode, done.stdout) == (0, "step 1 (global_step1) is committed\n"), done.stderr
    done = here.ckptd("wait", here.job_file, "--step", 7, "--timeout", "1s")
    assert (done.returncode, "step 7 is not committed after 1s" in done.stderr) == (3, True)
    here.save(5)
    here.wait_committed("global_step5~g1", 60)
    here.wait("safe", lambda: (here.status()["safe"] or {}).get("step") == 5)
    done = here.ckptd("wait", here.job_file, "--step", 3, "--timeout", "60s")
    assert (done.returncode, "no checkpoint of step 3 is known" in done.stderr) == (1, True)
