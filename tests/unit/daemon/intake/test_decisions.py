"""What people decided on other nodes is mirrored: it holds while their remotes are away (P8)."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.core.model.decision import Decision
from ckptd.daemon.intake.decisions import DECISIONS, Decisions, read_decisions, write_decision
from ckptd.storage.journal.journal import Journal
from tests.support.descriptors import no_free_descriptor

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


def test_a_pin_that_a_remote_cannot_read_counts_and_is_told_to_no_other(
    tmp_path: Path, journal: Journal
) -> None:
    """Its name does not say who pinned it, and when: the journal's word is the one that others get."""
    decisions = Decisions(journal, tmp_path)
    named = Decision(kind="pin", tag="global_step1", serial=9)
    decisions.refresh([], [named])
    assert decisions.pins == PINNED
    assert not decisions.words
    decisions.refresh([])
    assert decisions.pins == NONE
    said = named.model_copy(update={"by": "a", "at": "2026-01-01T00:00:00Z"})
    decisions.refresh([said])
    decisions.refresh([], [named])
    assert decisions.pins == PINNED
    assert decisions.words == (said,)


def test_what_lets_something_go_is_mirrored_by_nobody(tmp_path: Path, journal: Journal) -> None:
    """Whoever accepted a damaged save, or adopted a found one, is asked where it can be read."""
    accept = Decision(kind="accept", tag="global_step1", serial=7, fingerprints=(("a.pt", "f1"),))
    decisions = Decisions(journal, tmp_path)
    decisions.refresh([accept])
    assert decisions.accepted == {accept.fingerprints}
    decisions.refresh([])
    assert decisions.accepted == frozenset()


ACCEPT = Decision(kind="accept", tag="global_step2", serial=7, fingerprints=(("a.pt", "f1"),))


@contextlib.contextmanager
def refused(folder: Path) -> Iterator[None]:
    """The kernel lists the folder and refuses to read a file of it (EISDIR); its time stays as it was."""
    at = folder.stat().st_mtime_ns
    held = {path: path.read_bytes() for path in folder.iterdir()}
    for path in held:
        path.unlink()
        path.mkdir()
    os.utime(folder, ns=(at, at))
    try:
        yield
    finally:
        for path, data in held.items():
            path.rmdir()
            path.write_bytes(data)
        os.utime(folder, ns=(at, at))


def said_long_ago(state_dir: Path, *decisions: Decision) -> Path:
    """Their folder, at rest for so long that it is read but once."""
    for decision in decisions:
        write_decision(state_dir, decision)
    folder = state_dir / DECISIONS
    os.utime(folder, (time.time() - 60, time.time() - 60))
    return folder


def test_without_a_free_descriptor_every_checkpoint_counts_as_pinned(
    tmp_path: Path, journal: Journal
) -> None:
    """A worker that is about to remove something cannot tell; a turn begins again (patience.py)."""
    said_long_ago(tmp_path, PIN)
    decisions = Decisions(journal, tmp_path)
    with no_free_descriptor():
        assert decisions.is_pinned("global_step1")
        assert decisions.is_pinned("global_step9")
        with pytest.raises(OSError, match="Too many open files") as raised:
            decisions.refresh([])
    assert raised.value.errno == errno.EMFILE
    decisions.refresh([])
    assert decisions.pins == PINNED
    assert not decisions.is_pinned("global_step9")


def test_what_could_not_be_read_once_is_read_again(tmp_path: Path, journal: Journal) -> None:
    """The folder does not change meanwhile: its time alone would say that all of it is known."""
    folder = said_long_ago(tmp_path, PIN, ACCEPT)
    decisions = Decisions(journal, tmp_path)
    with refused(folder):
        decisions.refresh([])
        assert decisions.pins == PINNED, "the name of a pin says so"
        assert decisions.is_pinned("global_step1")
        assert not decisions.is_pinned("global_step9")
        assert decisions.accepted == frozenset()
        assert decisions.words == (), "a name does not say who pinned it, and when"
    decisions.refresh([])
    assert decisions.accepted == {ACCEPT.fingerprints}
    assert set(decisions.words) == {PIN, ACCEPT}
    os.utime(folder, (time.time() - 30, time.time() - 30))
    with refused(folder):
        decisions.refresh([])
        assert set(decisions.words) == {PIN, ACCEPT}, "no decision's file changes"


def test_a_pin_that_is_damaged_counts_by_its_name_until_it_is_taken_back(
    tmp_path: Path, journal: Journal
) -> None:
    tag = "a/b ~c"
    write_decision(tmp_path, PIN.model_copy(update={"tag": tag}))
    (path,) = (tmp_path / DECISIONS).iterdir()
    path.write_bytes(b"\0" * 40)
    decisions = Decisions(journal, tmp_path)
    decisions.refresh([])
    assert decisions.pins == {tag}
    assert decisions.is_pinned(tag)
    write_decision(tmp_path, UNPIN.model_copy(update={"tag": tag}))
    decisions.refresh([])
    assert decisions.pins == NONE
    assert not decisions.is_pinned(tag)


def test_only_what_is_asked_for_must_be_readable(tmp_path: Path) -> None:
    """`unpin` and `gc` need the pins, a first start what was adopted; what is needed is never left out."""
    folder = said_long_ago(tmp_path, PIN, UNPIN, ACCEPT)
    with refused(folder):
        assert [d.tag for d in read_decisions(tmp_path, ("pin",))] == ["global_step1"]
        for kinds in (None, ("unpin",), ("accept",)):
            with pytest.raises(OSError, match="Is a directory"):
                read_decisions(tmp_path, kinds)
        assert read_decisions(tmp_path, ("adopt",)) == []
