"""A sample of the points of a life; `make faults-full` takes all of them.

In a process of its own: the calls of the whole interpreter are wrapped there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.killpoints import defects, points, real, standins
from tests.killpoints.defects import DEFECTS
from tests.killpoints.life import Place
from tests.killpoints.points import Point, errors, errors_in, every, pairs, sites_of

pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[2]
FULL = bool(os.environ.get("CKPTD_FULL"))


def run(*arguments: object) -> tuple[dict[str, Any], str]:
    """The last line, and all that was printed."""
    command = [sys.executable, "-m", "tests.killpoints", "--jobs", "2", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("{"), done.stderr[-3000:]
    return json.loads(lines[-1]), done.stdout


CALLS = {"directory": [[], ["open", "write", "fsync"], ["unlink"] * 90, ["write"] * 60, ["rename"] * 2]}


def test_every_point_is_taken_once_or_once_more_alone() -> None:
    """No call is left out, no life dies twice for one save, and a name brings its life back."""
    lives = every(CALLS, 3)
    assert [Point.parse(life.name).fates for life in lives] == [life.fates for life in lives]
    taken = [fate for life in lives for fate in life.fates]
    assert len(taken) == len({(f.save, f.at, f.side) for f in taken}) == 2 * (3 + 90 + 60 + 2) + 61
    assert {(f.save, f.at) for f in taken} == {
        (save, at + 1) for save, part in enumerate(CALLS["directory"]) for at in range(len(part))
    }
    assert all(len({f.save for f in life.fates}) == len(life.fates) for life in lives)
    assert {len(life.fates) for life in lives} >= {1, 2, 3}


def test_pairs_are_two_kills_for_one_save() -> None:
    """The second counts from the start of the process that recovers."""
    for life in pairs(CALLS, 3, 40):
        assert [fate.save for fate in life.fates] == [1, 1, 2, 2, 3, 3, 4, 4]


SITED = {
    "directory": [["open @ a:1"], ["pread @ b:2"] * 50 + ["fsync @ c:3"], ["fsync @ c:3", "unlink @ d:4"]],
    "objects": [[], ["listdir @ e:5"]],
}


def test_errors_go_through_every_site_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each errno that a call can meet, once and lasting; no life is hurt twice for one save."""
    monkeypatch.setattr(points, "AT_RANDOM", 0)
    sites = sites_of(SITED)
    lives = errors(sites, 3)
    assert [Point.parse(life.name).fates for life in lives] == [life.fates for life in lives]
    assert all(len({fate.save for fate in life.fates}) == len(life.fates) for life in lives)
    taken = [(life.scenario, fate) for life in lives for fate in life.fates]
    met = [(SITED[name][fate.save or 0][fate.at - 1], fate.code, fate.often) for name, fate in taken]
    every_one, ways = errors_in(sites)
    assert len(set(met)) == len(met) == ways
    assert {call for call, _, _ in met} == set(sites)
    assert every_one == ways + 49 * 6 + 15


@pytest.mark.parametrize(
    ("kind", "scenario", "number"),
    [
        ("kill", "directory", 5),
        ("kill", "objects-constant", 2),
        ("pairs", "directory", 2),
        ("errors", "directory-zero", 3),
        ("journal", "directory", 60),
    ],
)
def test_a_sample_of_points(kind: str, scenario: str, number: int) -> None:
    """Killed or hurt there, gone on with, judged by bytes: no promise is broken."""
    figure, printed = run("--only", kind, "--scenario", scenario, "--sample", number * (20 if FULL else 1))
    assert figure["violations"] == 0, printed
    assert figure["runs"] >= number
    assert figure["crashes"] + figure["hits"] >= (1 if kind == "journal" else number // 2)


def test_what_needs_clones_is_named_where_there_are_none(tmp_path: Path) -> None:
    """A run of everything goes on without; one that asks for it has not run."""
    (tmp_path / "git").symlink_to(shutil.which("git") or "/nowhere")
    poor = os.environ | {"PATH": str(tmp_path)}  # no mkfs.xfs, root or not

    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.killpoints", "--sample", "1", *words]
        return subprocess.run(
            command, cwd=ROOT, env=poor, capture_output=True, text=True, check=False, timeout=250
        )

    line = "not run: clones, clones-constant-eager ("
    for words in (("--scenario", "clones"), ("clones", "1/before:1")):
        done = asked(*words)
        assert done.returncode == 2, done.stderr[-3000:]
        assert done.stdout.startswith("not run: clones (")
    for words in (("--scenario", "neverland"), ("neverland", "1/before:1")):
        done = asked(*words)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr[-3000:]
        assert "neverland" in done.stderr.splitlines()[-1]
    done = asked("--only", "journal")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(line)


READ = {
    "what lies in save_dir": " < storage/local/scan.py:scan:",
    "which files lie in a folder": " < storage/local/scan.py:_walk:",
    "a shard while it is sealed": "pread @ conversion/engine/inspect_child.py:_facts:",
    "a shard while it is uploaded": "preadv @ storage/stores/sources.py:read_into:",
    "a shard while it is converted": "preadv @ conversion/engine/writer.py:take:",
}


def test_a_disk_that_cannot_be_read() -> None:
    """EIO at these reads, once, for five minutes there, for five minutes everywhere: said, tried again."""
    figure, printed = run("--scenario", "directory", "--only", "errors", "--sites", ",".join(READ.values()))
    assert figure["violations"] == 0, printed
    met = " ".join(figure["met"])
    assert [what for what, where in READ.items() if where not in met] == []


def test_defects_are_called_as_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that lacks a new parameter stops every life, and is found for that alone."""
    monkeypatch.setattr(defects, "put", standins.check_call)
    for defect in DEFECTS.values():
        defect.apply()
    with pytest.raises(TypeError):
        standins.check_call(standins, "put", lambda owner, name: None)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("forgotten_prunes", "flushed_again") else pytest.mark.full)
        for name in DEFECTS
    ],
)
def test_a_defect_that_is_put_in_is_found(name: str) -> None:
    """The harness can fail, and says what is wrong."""
    figure, printed = run("--scenario", "directory-zero", "--defect", name)
    assert figure["violations"] >= 1
    assert DEFECTS[name].shows in printed


def test_processes_of_the_real_daemon_die_where_they_are_told(tmp_path: Path) -> None:
    """One life of `python -m tests.killpoints.real`, so that it cannot rot: both kinds of victim die."""
    place = Place(tmp_path, real.SCENARIO)
    place.make()
    outcome = real.live(place, (real.Victim("daemon", 1, "before", 20), real.Victim("remote", 2, "after", 5)))
    assert outcome.died == ("daemon", "remote")
    assert outcome.wrong == ()
