"""The real daemon and its real time limits: a hang of a minute, an outage, a timetable (CKPTD_FULL=1).

What the rig of test_transfer_faults.py plays with short limits, seen in status.json of a daemon.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import RUN, made_before, node
from tests.e2e.s3_node import BIG_RUN, S3Node, s3_node
from tests.stores.proxy import Fault, proxy

if TYPE_CHECKING:
    from tests.e2e.harness import Node
    from tests.stores import servers

pytestmark = [pytest.mark.real, pytest.mark.faults, pytest.mark.stores, pytest.mark.timeout(600)]

OF_REMOTES = {"remote-unreachable", "remote-left-alone", "transfer-stalled", "upload-failed"}
BIG = "global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


real_saves = made_before(RUN, BIG_RUN)


def beside(root: Path) -> str:
    """The S3 remote's keys, and a directory as second remote."""
    (root / "other").mkdir()
    return (
        f'forms = ["zero"]\n[[remote]]\nname = "other"\nurl = "{root}/other/run"\nsame_filesystem = true\n'
        'forms = ["zero"]\nrequired = false\n'
    )


def other_has(here: S3Node, step: int) -> bool:
    return (here.root / "other/run/_ckptd/commits" / f"global_step{step}~g1~zero.json").exists()


def problem(here: Node, code: str) -> dict[str, Any]:
    found = [p for p in here.status().get("problems", ()) if p["code"] == code]
    return found[0] if found else {}


def test_no_byte_for_a_minute_is_said_within_ninety_seconds(tmp_path: Path, moto: servers.Server) -> None:
    """F12: cut after 60 s; the other remote has it meanwhile; heals by itself, one COMMIT, one part again."""
    with (
        proxy(moto.port) as between,
        s3_node(tmp_path, moto, between.endpoint, remote=beside(tmp_path)) as here,
    ):
        fault = Fault("deaf", rf"PUT .*{BIG}.*partNumber=3", times=1)
        between.faults.append(fault)
        here.start()
        here.save(1, BIG_RUN)
        here.wait("the hang", lambda: fault.hits, 30)
        hung_at = time.monotonic()
        here.wait("the other remote", lambda: other_has(here, 1), 30)
        assert not here.problems() & OF_REMOTES
        said = "no byte moved for 60 s"
        here.wait("said", lambda: said in problem(here, "transfer-stalled").get("text", ""), 90)
        assert 55 < time.monotonic() - hung_at < 90
        here.wait_committed("global_step1~g1", 60)
        here.wait("well again", lambda: not here.problems() & OF_REMOTES, 30)
        assert here.holds("global_step1", BIG_RUN, 1)
        assert between.parts()[f"/training/run/{BIG}", 3] == 2
        assert max(count for part, count in between.parts().items() if part[1] != 3) == 1


def test_a_remote_that_keeps_failing_is_left_alone(tmp_path: Path, moto: servers.Server) -> None:
    """F14: an outage; few orders meanwhile, the reason and the time in status; the other goes on; heals."""
    with (
        proxy(moto.port) as between,
        s3_node(tmp_path, moto, between.endpoint, remote=beside(tmp_path)) as here,
    ):
        here.start()
        here.save(1, BIG_RUN)
        here.wait_committed("global_step1~g1", 60)
        between.away = True
        between.cut()
        here.save(2, BIG_RUN)
        here.wait("the other remote", lambda: other_has(here, 2), 60)
        here.wait("left alone", lambda: problem(here, "remote-left-alone"), 300)
        text = problem(here, "remote-left-alone")["text"]
        assert re.match(r"remote nas is left alone until \d\d:\d\d:\d\d after \d+ failures: ", text), text
        assert "nothing answers" in text or "connection was lost" in text
        between.away = False
        here.wait_committed("global_step2~g1", 120)
        here.wait("well again", lambda: not here.problems() & OF_REMOTES, 30)


def test_a_timetable_is_followed_without_a_restart(tmp_path: Path) -> None:
    """Slow until a full minute, then without a limit."""
    flips_at = ((time.time() + 25) // 60 + 1) * 60
    slow, fast = (time.strftime("%H:%M", time.localtime(flips_at + shift)) for shift in (-120, 0))
    table = f'"{slow},10kB/s {fast},none"'
    with node(tmp_path, local="", remote=f'forms = ["zero"]\nbandwidth = {table}') as here:
        shown = " ".join(here.ckptd("check", "--init-remote", here.job_file).stdout.split())
        assert "now 10 kB/s" in shown, shown
        daemon = here.start()
        here.save(1)
        here.wait("bytes", lambda: here.checkpoint("global_step1")["remotes"]["nas"]["zero"]["bytes_done"])
        assert not here.commits()
        here.wait_committed("global_step1~g1", flips_at - time.time() + 30)
        assert time.time() > flips_at
        assert daemon.poll() is None
        assert "now none" in " ".join(here.ckptd("check", here.job_file).stdout.split())
