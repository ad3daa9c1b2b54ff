"""`ckptd rm` with real daemons and remotes: what a person names is deleted, what is protected stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import RUN, Node, made_before, node
from tests.e2e.s3_node import s3_node
from tests.stores import servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.faults, pytest.mark.timeout(600)]

ZERO_ONLY = 'forms = ["zero"]'

real_saves = made_before(RUN)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    """Three checkpoints, committed with a universal form; no limit deletes any."""
    with node(tmp_path, local="save_total_limit = 9") as made:
        three(made)
        yield made


def three(here: Node) -> None:
    here.start()
    for step in (1, 2, 3):
        here.save(step)
        here.wait_committed(f"global_step{step}~g1")
    pointer = here.save_dir / "latest_universal"
    here.wait("converted", lambda: pointer.exists() and pointer.read_text().endswith("/global_step3"))


def objects(here: Node, tag: str) -> list[str]:
    """Files of a checkpoint in the remote, in any form."""
    return sorted(p.name for p in here.nas.glob(f"{tag}*/**/*") if p.is_file())


def steps(here: Node) -> set[str]:
    return {name.partition("~")[0] for name in here.commits()}


def test_a_daemon_deletes_what_a_person_names_here_and_there(here: Node) -> None:
    """Asked first what would go; then both copies, by the COMMIT's proof and behind a tombstone."""
    dry = here.ckptd("rm", here.job_file, "global_step1", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "would delete global_step1 here (" in dry.stdout
    assert "would delete global_step1 in nas (zero" in dry.stdout
    asked = here.ckptd("rm", here.job_file, "global_step1")
    assert (asked.returncode, "nobody can be asked here" in asked.stderr) == (2, True)
    assert here.local_tags() == {"global_step1", "global_step2", "global_step3"}

    done = here.ckptd("rm", here.job_file, "global_step1", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deleted global_step1 here" in done.stdout
    assert "deleted global_step1 in nas" in done.stdout
    assert here.local_tags() == {"global_step2", "global_step3"}
    assert steps(here) == {"global_step2", "global_step3"}
    assert objects(here, "global_step1") == []
    assert (here.nas / "_ckptd" / "retired" / "global_step1~g1~zero.json").exists()
    reasons = [row["reason"] for kind in ("prune", "retire") for row in here.audit(kind)]
    assert {reason.partition(" by ")[0] for reason in reasons} == {"ckptd rm"}
    again = here.ckptd("rm", here.job_file, "global_step1", "--yes")
    assert (again.returncode, "no checkpoint global_step1 in" in again.stderr) == (66, True)


def test_what_is_protected_stays_and_the_way_out_is_named(here: Node) -> None:
    """The newest, a pin, half a save, a COMMIT that a copy here rests on, one that the person did not see."""
    assert here.ckptd("pin", here.job_file, "global_step2").returncode == 0
    said = here.ckptd("rm", here.job_file, "global_step2", "global_step3", "--yes")
    assert said.returncode == 65, said.stdout + said.stderr
    assert "stays: global_step2 here" in said.stderr
    assert f"ckptd pin {here.job_file} global_step2 --remove" in said.stderr
    assert "stays: global_step3 in nas (zero" in said.stderr
    assert "newest" in said.stderr
    here.save(4, shards=1)
    torn = here.ckptd("rm", here.job_file, "global_step4", "--local", "--yes")
    assert (torn.returncode, "--incomplete global_step4" in torn.stderr) == (65, True), torn.stderr
    url = here.ckptd("rm", here.nas, "global_step1", "--yes")
    assert (url.returncode, "on the node that uploads to it" in url.stderr) == (2, True), url.stderr
    first = here.ckptd("rm", here.job_file, "global_step1", "--remote", "nas", "--yes")
    assert (first.returncode, "its copy on this node rests on it" in first.stderr) == (65, True), first.stderr
    ask_for_another_save(here)
    here.wait("answered", lambda: (here.status().get("removal") or {}).get("rows"))
    assert {row["verdict"] for row in here.status()["removal"]["rows"]} == {"keep"}
    assert here.local_tags() == {f"global_step{step}" for step in (1, 2, 3, 4)}
    assert len(steps(here)) == 3


def ask_for_another_save(here: Node) -> None:
    """A person agreed to a COMMIT, and the tag was committed again since."""
    request = {
        "asked_at_unix_seconds": time.time(),
        "seconds": 600,
        "tags": ["global_step1"],
        "is_here": True,
        "remotes": ["nas"],
        "agreed": ["0" * 64],
    }
    (here.state / "control" / "remove.json").write_text(json.dumps(request))
    here.processes[-1].send_signal(signal.SIGUSR1)


def test_without_a_daemon_the_command_does_it_itself(here: Node) -> None:
    """Under the daemon's lock, and nothing else: a complete save that waits is not uploaded."""
    assert here.stop() == 0
    here.save(4)
    for place in (["--local"], ["--remote", "nas"]):
        done = here.ckptd("rm", here.job_file, "global_step1", *place, "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "global_step1" not in here.local_tags()
        assert ("global_step1" in steps(here)) == (place == ["--local"])
    assert here.local_tags() == {"global_step2", "global_step3", "global_step4"}
    assert steps(here) == {"global_step2", "global_step3"}
    assert not json.loads((here.state / "status.json").read_bytes())["daemon"]["alive"]


@pytest.mark.parametrize("alone", [pytest.param(False, marks=pytest.mark.full), True])
def test_killed_in_the_middle_and_typed_again(here: Node, alone: bool) -> None:
    """kill -9 while it deletes: nothing is half there, and the same words finish it (P7)."""
    if alone:
        assert here.stop() == 0
    command = [
        sys.executable,
        "-m",
        "ckptd",
        "rm",
        str(here.job_file),
        "global_step1",
        "global_step2",
        "--yes",
    ]
    for after_seconds in (1.2, 2.4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(after_seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not alone:
            here.kill()
            here.start()
    for step in (1, 2):
        last = here.ckptd("rm", here.job_file, f"global_step{step}", "--yes")
        assert last.returncode in (0, 66), last.stdout + last.stderr
    assert here.local_tags() == {"global_step3"}
    assert steps(here) == {"global_step3"}
    if not alone:
        assert here.stop() == 0
    # a universal form that was given up half way, for a newer one, is in no COMMIT
    assert here.ckptd("gc", here.job_file).returncode == 0
    assert objects(here, "global_step1") + objects(here, "global_step2") == []
    assert here.ckptd("verify", here.nas).returncode == 0


@pytest.mark.stores
def test_from_s3(tmp_path: Path, moto: servers.Server) -> None:
    with s3_node(tmp_path, moto, remote=ZERO_ONLY, local="save_total_limit = 9") as here:
        here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        done = here.ckptd("rm", here.job_file, "global_step1", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert here.local_tags() == {"global_step2"}
        assert set(here.commits()) == {"global_step2~g1"}
        assert here.objects("global_step1") == {}
