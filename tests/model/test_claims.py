"""All interleavings of places that claim a run: one whole place at a time writes to a remote (adr/0185).

`ckptd/storage/remote/runs.py` runs as it is; seeded protocols show that the search sees what it is
for.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from ckptd.core.model import runs as core
from tests.model.claims_world import Spec, World, stepwise
from tests.model.explorer import Search, Violation

A, B, C = (Spec(name=name, run_id=f"run-{name}") for name in "abc")
HALVES = replace(A, shards=((0, 0),)), replace(B, shards=((1, 0),))
WORLDS = {
    "two begin": World((replace(A, crashes=1, silences=1), replace(B, crashes=1, silences=1))),
    "three begin": World((A, B, C)),
    "two halves begin": World(tuple(replace(one, crashes=1, silences=1) for one in HALVES)),
    "two halves and a whole one begin": World((*HALVES, C)),
    "two halves and one of them again": World((*HALVES, replace(C, shards=((1, 0),)))),
    "one goes on, another begins": World((replace(A, silences=2), replace(B, crashes=1)), ((0, "j"),)),
    "one is resumed elsewhere": World(
        (replace(A, silences=1), replace(B, run_id="j", is_new=False, knows=1), C), ((0, "j"),)
    ),
}


def explore(world: World) -> int:
    """All states; how many."""
    with stepwise():
        seen = Search(world.successors, world.wrong, world.is_good).run(world.start())
    print(f"\n{seen.states:,} states, {seen.transitions:,} steps")
    assert seen.is_complete
    return seen.states


@pytest.mark.parametrize("name", WORLDS)
def test_one_whole_place_at_a_time(name: str) -> None:
    assert explore(WORLDS[name]) > 50


def test_a_claim_that_says_nothing_before_its_row_is_found() -> None:
    """The heartbeat that tells of the run came up to a minute later: who read the row took it for dead."""
    begun = World((replace(A, silences=1), B), is_beating=False)
    with pytest.raises(Violation, match="appended a row while a lived"):
        explore(begun)


def test_a_claim_that_asks_nobody_is_found() -> None:
    with (
        mock.patch.object(core, "_living", lambda *_: []),
        pytest.raises(Violation, match="appended a row while"),
    ):
        explore(World((A, B)))
