"""What people decided on other nodes is mirrored: it holds while their remotes are away (P8)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.core.decision import Decision
from ckptd.daemon.decisions import Decisions, write_decision
from ckptd.journal import Journal

PIN = Decision(kind="pin", tag="global_step1", serial=5)
UNPIN = Decision(kind="unpin", tag="global_step1", serial=6)
PINNED, NONE = frozenset({"global_step1"}), frozenset[str]()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal.db")
    yield made
    made.close()


def test_a_pin_that_a_remote_showed_once_holds_while_it_is_away(tmp_path: Path, journal: Journal) -> None:
    """In this life and in the next, in turns as in a worker that is about to remove something."""
    decisions = Decisions(journal, tmp_path)
    decisions.refresh([PIN])
    decisions.refresh([])
    again = Decisions(journal, tmp_path)
    again.refresh([])
    for one in (decisions, again):
        assert one.known == ()
        assert one.pins == PINNED
        assert one.is_pinned("global_step1")


def test_an_unpin_that_a_remote_showed_once_holds_as_well(tmp_path: Path, journal: Journal) -> None:
    decisions = Decisions(journal, tmp_path)
    for seen in ([PIN], [UNPIN], []):
        decisions.refresh(seen)
    assert decisions.pins == NONE
    assert Decisions(journal, tmp_path).pins == NONE


def test_the_mirror_alone_ends_no_pin(tmp_path: Path, journal: Journal) -> None:
    """A remote that was made anew counts its serials from lower ones, and so does an older file here."""
    Decisions(journal, tmp_path).refresh([UNPIN])
    decisions = Decisions(journal, tmp_path)
    early = PIN.model_copy(update={"serial": 1})
    decisions.refresh([early])
    assert decisions.pins == PINNED
    decisions.refresh([])
    assert decisions.pins == NONE, "the mirror keeps the newest word that it was told"
    write_decision(tmp_path, early)
    decisions.refresh([])
    assert decisions.pins == PINNED


def test_what_lets_something_go_is_mirrored_by_nobody(tmp_path: Path, journal: Journal) -> None:
    """Whoever accepted a damaged save, or adopted a found one, is asked where it can be read."""
    accept = Decision(kind="accept", tag="global_step1", serial=7, fingerprints=(("a.pt", "f1"),))
    decisions = Decisions(journal, tmp_path)
    decisions.refresh([accept])
    assert decisions.accepted == {accept.fingerprints}
    decisions.refresh([])
    assert decisions.accepted == frozenset()
