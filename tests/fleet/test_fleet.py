"""Histories of many nodes: one COMMIT per whole save, none mixed, nothing deleted early, all agree (H1, H12).

`python -m tests.fleet` tells many more; a seed that breaks a promise is replayed with its timeline.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from ckptd.core.model.records import UploadState
from tests.fleet import directed, node
from tests.fleet.__main__ import shape_of
from tests.fleet.cost import measure
from tests.fleet.defects import DEFECTS, planted
from tests.fleet.directed import PLAYS, Directed, Play, act
from tests.fleet.judge import Committed
from tests.fleet.node import Daemon
from tests.fleet.story import Told, lived, staged, tell

ROOT = Path(__file__).resolve().parents[2]
FULL = bool(os.environ.get("CKPTD_FULL"))
SEEDS = range(600 if FULL else 20)
FREQUENT = (
    "saves not compared",
    "generations skipped",
    "retired by local view",
    "other configurations not noticed here",
    "other configurations not noticed there",
)
"""Defects that one of a few random histories shows, whatever the code: the others only in a play."""


def test_no_history_breaks_a_promise() -> None:
    sums: Counter[str] = Counter()
    with staged():
        for seed in SEEDS:
            told = tell(seed, shape_of(seed, None, None))
            assert told.broken is None, f"{told.broken}: python -m tests.fleet {seed}"
            sums.update(saves=told.saves, commits=told.commits, deaths=told.deaths, replaced=told.replaced)
            sums.update(deletions=told.deletions)
    # histories in which nothing happens show nothing
    assert sums["commits"] > len(SEEDS)
    assert all(sums[name] >= 5 for name in ("deaths", "replaced", "deletions"))


def two_runs(seed: int) -> Told:
    """A history in which another job of that name, on nodes of its own, saves into the same remote."""
    return tell(seed, replace(shape_of(seed, None, None), runs=2))


def test_two_runs_of_one_name_leave_each_other_alone() -> None:
    """Both at once, with equal tags: no COMMIT mixes them, and the policy of each is of its own COMMITs."""
    commits = deletions = 0
    with staged():
        for seed in range(300 if FULL else 12):
            told = two_runs(seed)
            assert told.broken is None, f"{told.broken}: history {seed} of two runs"
            commits, deletions = commits + told.commits, deletions + told.deletions
    assert min(commits, deletions) > 12


def test_another_runs_commits_that_count_are_noticed() -> None:
    with staged(), mock.patch.object(node, "of_run", lambda seen, _run_id: seen):
        assert any("though the policy keeps it" in (two_runs(seed).broken or "") for seed in range(40))


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_noticed(name: str) -> None:
    """In a history that brings about what it needs, and in which nothing is wrong without it."""
    with staged():
        sound = act(PLAYS[name])
        with planted(name):
            broken = act(PLAYS[name])
    assert sound.broken is None
    assert sound.commits > 0
    assert DEFECTS[name][1] in (broken.broken or "nothing")


def _asked_all_the_while(fleet: Directed) -> None:
    for step in (10, 20, 30):
        fleet.save(step)
    fleet.delete(10, (0,))
    while not fleet.judge.let_go:
        fleet.wait(0.01)
    for _ in range(9000):
        fleet.wait(0.01)
        fleet.judged_now()


def _asked_of_a_journal_that_forgot(fleet: Directed) -> None:
    for step in (10, 20, 30):
        fleet.save(step)
    for machine in fleet.machines:
        for row in machine.rows:
            row.record = row.record.model_copy(update={"state": UploadState.NEW})
    fleet.judged_now()


def test_a_history_may_end_while_something_is_removed() -> None:
    """Who has seen a COMMIT go, and not yet why, takes its save for a new one until it asks; minutes later it
    must know."""
    with staged():
        sound = lived(Directed(Play(script=_asked_all_the_while, remote_limit=2)))
        forgot = lived(Directed(Play(script=_asked_of_a_journal_that_forgot, remote_limit=2)))
    assert (sound.broken, sound.commits) == (None, 3)
    assert "does not know that save" in (forgot.broken or "nothing")


def test_what_is_the_best_again_since_a_moment_not_every_node_knows() -> None:
    """Saves of a later branch are committed late, in any order: whoever looked in between goes by one that is
    the newest no more (seed 50011 of 64 nodes)."""
    judge = Directed(Play(script=_asked_all_the_while)).judge
    clock = [0.0]
    judge.clock = lambda: clock[0]
    judge.best_seconds = 600.0

    def committed(at: float, number: int, order: tuple[int, int, int], best: str) -> None:
        clock[0], judge.words[number] = at, best
        one = Committed(f"commit {number}", number, order, frozenset(), "", "")
        judge.live[one.key], judge.came[one.key] = one, at
        judge.hear()

    committed(0.0, 25, (2, 140, 17), "global_step140")
    clock[0] = 700.0
    assert judge.best() == "global_step140"
    committed(1000.0, 20, (3, 100, 8), "global_step50")
    committed(1020.0, 44, (7, 160, 2), "global_step140")
    assert judge.best() is None
    clock[0] = 1621.0
    assert judge.best() == "global_step140"


def test_one_limit_here_and_there_leaves_nothing_on_the_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes look at different moments; whoever lets a COMMIT go leaves the others time to go by it (P1)."""
    left: list[int] = []

    def script(fleet: Directed) -> None:
        for step in range(10, 160, 10):
            fleet.save(step, directed.ALL, seconds=120.0)
        left.extend(len(machine.disk) for machine in fleet.machines)

    rest = Daemon._rest_seconds
    monkeypatch.setattr(directed, "NODES", 4)
    monkeypatch.setattr(directed, "ALL", (0, 1, 2, 3))
    monkeypatch.setattr(Daemon, "_rest_seconds", lambda self: rest(self) * (0.3 + self.chance.random()))
    with staged():
        told = lived(Directed(Play(script=script, local_limit=2, remote_limit=2)))
    assert (told.broken, told.commits) == (None, 15)
    assert max(left) <= 3, left


@pytest.mark.full
@pytest.mark.parametrize("name", FREQUENT)
def test_a_planted_defect_is_noticed_in_random_histories(name: str) -> None:
    words, seeds = DEFECTS[name][1], range(200)
    with staged(), planted(name):
        told = (tell(seed, shape_of(seed, None, None)).broken for seed in seeds)
        assert any(words in reason for reason in told if reason is not None)


def test_a_history_follows_from_its_seed() -> None:
    """In another process too: nothing of the machine enters it."""
    with staged():
        here = tell(12, shape_of(12, None, None), is_loud=True).lines
    told = subprocess.run(
        [sys.executable, "-m", "tests.fleet", "12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert told.stdout.splitlines()[:-1] == here
    assert len(here) > 20


def test_naps_change_nothing() -> None:
    """A history is the same, request by request, whether turns that nothing can come of are lived or not."""
    with staged():
        for seed in SEEDS[: 200 if FULL else 6]:
            shape = shape_of(seed, None, None)
            naps = tell(seed, shape, is_loud=True)
            lives = tell(seed, replace(shape, naps=False), is_loud=True)
            assert (naps.lines, naps.per_node) == (lives.lines, lives.per_node), seed
            assert naps.lines


def test_what_a_node_asks_does_not_grow_with_their_number() -> None:
    """But for pages of listings, and for the documents that one node reads for the COMMIT (ADR 0105)."""
    few, many = measure(10), measure(30 if not FULL else 256)
    assert many.gets_mean < 2 * few.gets_mean + 5
    assert many.requests_mean < 2 * few.requests_mean + 10
