"""`ckptd plan` and `reload --dry-run`, with a real daemon and without: nothing is done, and it comes so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import PATIENCE_SECONDS, RUN, Node, made_before, node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.faults, pytest.mark.timeout(600)]

ZERO_ONLY = 'forms = ["zero"]'

real_saves = made_before(RUN)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    """Four checkpoints, committed; no limit deletes any."""
    with node(tmp_path, local="forms = []", remote=ZERO_ONLY) as made:
        made.start()
        for step in (1, 2, 3, 4):
            made.save(step)
            made.wait_committed(f"global_step{step}~g1")
        yield made


def all_there(here: Node) -> tuple[set[str], set[str], int]:
    return here.local_tags(), set(here.commits()), len(here.audit("prune")) + len(here.audit("retire"))


def told(here: Node, *changes: object) -> dict[str | None, dict[str, int]]:
    """Place → what would be deleted there, and after how many saves."""
    options = [word for change in changes for word in ("--with", str(change))]
    done = here.ckptd("plan", here.job_file, *options, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    places = json.loads(done.stdout)["places"]
    return {one["remote"]: {d["tag"]: d["after_saves"] for d in one["deletions"]} for one in places}


def test_what_a_plan_tells_is_what_the_reload_brings(here: Node) -> None:
    """By a running daemon: a number here, bytes there; `reload --dry-run` says the same of the file."""
    before = all_there(here)
    assert told(here) == {None: {}, "nas": {}}
    size = here.checkpoint("global_step4")["bytes"]
    changes = ("local.keep_last=2", f"nas.keep_bytes={3 * size + size // 2}B")
    gone = told(here, *changes)
    assert gone[None] == {"global_step1": 0, "global_step2": 0, "global_step3": 1, "global_step4": 2}
    assert gone["nas"] == {"global_step1": 0, "global_step2": 1, "global_step3": 2, "global_step4": 3}
    assert all_there(here) == before, "a plan did something"

    here.write_job(
        local="forms = []\nkeep_last = 2", remote=f'{ZERO_ONLY}\nkeep_bytes = "{3 * size + size // 2}B"'
    )
    assert told(here) == gone
    dry = here.ckptd("reload", here.job_file, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    rows = [line.split()[:2] for line in dry.stdout.splitlines() if " now " in line]
    assert rows == [["here", "global_step1"], ["here", "global_step2"], ["nas", "global_step1"]]
    assert all_there(here) == before, "a dry run did something"

    assert here.ckptd("reload", here.job_file).returncode == 0
    here.wait("deleted", lambda: len(here.commits()) == 3 and len(here.local_tags()) == 2)
    assert here.local_tags() == before[0] - {tag for tag, after in gone[None].items() if after == 0}
    here.save(5)
    here.wait_committed("global_step5~g1")
    here.wait("deleted", lambda: len(here.commits()) == 3 and len(here.local_tags()) == 2)
    assert here.local_tags() == {"global_step4", "global_step5"}
    assert {key.partition("~")[0] for key in here.commits()} == {f"global_step{step}" for step in (3, 4, 5)}


def test_without_a_daemon_it_is_asked_under_the_jobs_lock_and_nothing_is_done(here: Node) -> None:
    """Also with a job file that would delete at once; what is no setting is named."""
    here.stop()
    here.write_job(local="forms = []\nkeep_last = 1", remote=f"{ZERO_ONLY}\nkeep_last = 1")
    before = all_there(here)
    gone = told(here)
    assert {tag for tag, after in gone["nas"].items() if after == 0} == {
        "global_step1",
        "global_step2",
        "global_step3",
    }
    assert told(here, "keep_last=4") == {
        place: {f"global_step{n}": n for n in (1, 2, 3)} for place in (None, "nas")
    }
    other = here.root / "lr=1" / "other.toml"
    other.parent.mkdir()
    other.write_text(here.job_file.read_text().replace("keep_last = 1", "keep_last = 4"))
    assert told(here, other) == told(here, "keep_last=4")
    assert all_there(here) == before
    for wrong, code, words in (
        ("keep_lats=4", 2, "keep_last"),
        ("lacal.keep_last=4", 2, "it has local, nas"),
        ("keep_bytes=2", 78, "keep_bytes"),
        ("nothing", 2, "neither a job file nor a setting"),
        ("keep_best=3", 78, "keep_best compares a metric"),
        ("keep_last=" + "[" * 3000, 78, "a valid integer"),
        (here.root / "a=b.toml", 2, "no retention key"),
    ):
        done = here.ckptd("plan", here.job_file, "--with", wrong)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
    assert here.once() == 0
    assert here.local_tags() == {"global_step4"}


def test_a_remote_that_the_file_drops_or_no_longer_requires_holds_nothing_back(here: Node) -> None:
    """While `far` is away and required all stay; the dry run of either edit says what the reload deletes."""
    here.write_job(local="forms = []\nkeep_last = 1")
    alone = here.job_file.read_text()
    far = f'[[remote]]\nname = "far"\nurl = "{here.root / "away" / "run"}"\n{ZERO_ONLY}\n'
    here.job_file.write_text(alone + far)
    assert here.ckptd("reload", here.job_file).returncode == 0
    here.wait("active", lambda: len(here.status().get("checkpoints", ())) == 4)
    gone = [["here", f"global_step{step}"] for step in (1, 2, 3)]
    for edit, code, note, deleted in (
        (alone + far, 69, "far did not answer", []),
        (alone + far + "required = false\n", 69, "far did not answer", gone),
        (alone, 0, "has no remote far: what it holds stays", gone),
    ):
        here.job_file.write_text(edit)
        dry = here.ckptd("reload", here.job_file, "--dry-run")
        assert (dry.returncode, note in dry.stderr) == (code, True), dry.stderr
        assert [line.split()[:2] for line in dry.stdout.splitlines() if " now " in line] == deleted
    assert len(here.local_tags()) == 4, "a dry run did something"
    assert here.ckptd("reload", here.job_file).returncode == 0
    here.wait("deleted", lambda: here.local_tags() == {"global_step4"})


def test_what_ends_a_plan_without_a_daemon_is_said(here: Node) -> None:
    """Ctrl-C is no word on checkpoints; that there is none is said only where there is none."""
    here.stop()
    here.nas.rename(here.root / "gone")
    asked = here.state / "control" / "plan.json"
    plan = subprocess.Popen(
        [sys.executable, "-m", "ckptd", "plan", str(here.job_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    here.processes.append(plan)  # type: ignore[arg-type]
    here.wait("asked", asked.exists)
    here.wait("begun", lambda: f'"pid": {plan.pid}' in (here.state / "status.json").read_text())
    plan.send_signal(signal.SIGINT)
    out, error = plan.communicate(timeout=PATIENCE_SECONDS)
    assert (plan.returncode, out) == (130, "")
    assert "no checkpoint" not in error

    settings = here.root / "conf"
    (settings / "jobs.d").mkdir(parents=True)
    (settings / "ckptd.toml").write_text(f'state_dir = "{here.root / "states"}"\n')
    save_dir = here.root / "nvme" / "empty"  # the trainer has yet to make it
    text = here.job_file.read_text().replace(str(here.save_dir), str(save_dir))
    (settings / "jobs.d" / "empty.toml").write_text(text.replace(str(here.nas), str(here.root / "nas" / "e")))
    (here.root / "states" / "empty").mkdir(parents=True)
    none = here.ckptd("plan", "empty", "--config-dir", settings)
    assert (none.returncode, f"{save_dir} has no checkpoint yet" in none.stderr) == (66, True), none.stderr

    # a state directory outside of save_dir begins with the daemon, not with the first checkpoint
    save_dir.mkdir()
    daemon = [sys.executable, "-m", "ckptd", "run", "--config-dir", str(settings)]
    begun = subprocess.Popen(daemon, stderr=subprocess.DEVNULL)
    here.processes.append(begun)
    status = here.root / "states" / "empty" / "status.json"
    here.wait("begun", lambda: status.exists() and f'"pid": {begun.pid},' in status.read_text())
    for state in ("runs", "has ended"):
        none = here.ckptd("plan", "empty", "--config-dir", settings)
        assert (none.returncode, none.stdout) == (66, ""), (state, none)
        here.stop()
    told = here.ckptd("reload", "empty", "--dry-run", "--config-dir", settings)
    assert (told.returncode, told.stdout.splitlines()[1:]) == (66, [f"{save_dir} has no checkpoint yet"]), (
        told
    )
