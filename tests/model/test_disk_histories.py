"""Simulated disks: no save finds too little room where legal removals could have made it (P13).

Histories are drawn from seeds: growing saves, slow links, outages, pins, trainers that rotate, file systems
with and without clones, all three words of `unuploaded`. At a full disk a judge who has seen the whole
history counts what could have gone in time (tests/model/disk.py); the real planner decides, turn by turn.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.policy import derived_forms, planner
from ckptd.core.policy import local as keeping
from ckptd.core.policy.actions import StopConverting
from tests.model.disk import Ending, drawn, live

BLOCK = 200
BLOCKS = 25 if os.environ.get("CKPTD_FULL") else 1


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_disk_is_full_that_could_have_had_room(block: int) -> None:
    """And the histories are hard: many end on a disk that nothing legal could have kept from filling."""
    seeds = range(BLOCK * block, BLOCK * (block + 1))
    endings: dict[int, Ending] = {seed: live(drawn(seed)) for seed in seeds}
    avoidable = {seed: end for seed, end in endings.items() if end.was_avoidable}
    assert avoidable == {}
    full = Counter(drawn(seed).unuploaded for seed, end in endings.items() if end.is_full)
    spared = Counter(drawn(seed).unuploaded for seed, end in endings.items() if not end.is_full)
    assert min(spared.values()) >= 15, spared
    assert full["keep"] >= 20, full


@pytest.mark.parametrize("seed", range(1000, 1000 + 40 * BLOCKS))
def test_delete_never_fills_a_disk_that_holds_the_limit(seed: int) -> None:
    """The limit, the one being sent, the one in flight and the next: more is never needed."""
    scenario = drawn(seed)
    limit, most = scenario.limit or 2, max(scenario.sizes)
    room = (limit + 3) * most + scenario.min_free
    careful = replace(
        scenario, unuploaded="delete", limit=limit, capacity=room, pinned=frozenset(), trainer_limit=None
    )
    assert not live(careful).is_full


def test_thin_spares_a_disk_that_keep_fills() -> None:
    """A link that takes a third of what is saved: kept, it fills; thinned, the run goes on."""
    scenario = replace(
        drawn(0),
        sizes=(96,) * 14,
        pause=6,
        link=96 / 14 / 3,
        away=range(0),
        limit=1,
        capacity=9 * 96,
        trainer_limit=None,
        pinned=frozenset(),
    )
    assert live(replace(scenario, unuploaded="keep")).is_full
    assert not live(replace(scenario, unuploaded="thin")).is_full


def _nothing(*_: object, **__: object) -> list[Any]:
    return []


def _never_stops(convert: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda *of: [a for a in convert(*of) if not isinstance(a, StopConverting)]


def _holds_for_ever(holds: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def kept(view: Any, *rest: Any, **more: Any) -> list[Any]:
        roomy = replace(view, disk=replace(view.disk, reserve_bytes=0))
        return holds(roomy, *rest, **more)

    return kept


THIN: dict[str, Any] = {"unuploaded": "thin", "limit": 3, "trainer_limit": None, "away": range(0)}
DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "derived forms stay": (planner, "keep_derived", _nothing),
    "derived forms stay under pressure": (derived_forms, "next_to_evict", lambda view, local: None),
    "nothing is pruned": (planner, "delete_local", _nothing),
    "holds stay": (planner, "_holds", _holds_for_ever(planner._holds)),
    "half conversions stay": (planner, "_convert", _never_stops(planner._convert)),
    "opt-outs are ignored": (keeping, "may_go_uncommitted", lambda view, save: False),
    "the limit counts under pressure": (keeping, "uncommitted_policy", lambda view: view.local_retention),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_the_judge_sees_a_planner_that_wastes_room(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each means of making room, taken out by hand, fills a disk that had room within these histories."""
    module, name, broken = DEFECTS[what]
    monkeypatch.setattr(module, name, broken)
    changes = THIN if broken is DEFECTS["the limit counts under pressure"][2] else {}
    assert any(live(replace(drawn(seed), **changes)).was_avoidable for seed in range(100))
