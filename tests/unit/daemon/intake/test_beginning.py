"""The first daemon that looked settles what the first start found, however late remotes answer (H20)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptd.core.model.records import ZERO
from ckptd.daemon.intake.decisions import read_decisions
from ckptd.daemon.intake.initial_scan import PreexistingSaves, beginning
from ckptd.daemon.intake.known_saves import KnownSaves
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local.run_file import place_of
from ckptd.storage.remote import messages as m
from tests.support.states import ONE_RUN, job_state
from tests.unit.daemon.state.test_daemon_links import IDENTITY, Scene

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OLD = frozenset({"a"})
LATER = frozenset({"a", "b"})


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.db")
    yield journal
    journal.close()


HERE = place_of("/nvme/run", 7)


def test_what_came_after_the_journal_was_begun_was_not_found(journal: Journal) -> None:
    assert beginning(journal, "/nvme/run", 7, OLD) == PreexistingSaves(OLD, OLD, HERE)
    assert beginning(journal, "/nvme/run", 7, LATER) == PreexistingSaves(LATER, OLD, HERE)
    assert beginning(journal, "/nvme/run", 7, frozenset()) == PreexistingSaves(frozenset(), OLD, HERE)


@pytest.mark.parametrize(("save_dir", "inode"), [("/nvme/other", 7), ("/nvme/run", 8)])
def test_of_another_directory_nothing_is_known(journal: Journal, save_dir: str, inode: int) -> None:
    """Another save_dir in the job file, or one that was not mounted when the journal was begun."""
    beginning(journal, "/nvme/run", 7, frozenset())
    there = place_of(save_dir, inode)
    assert beginning(journal, save_dir, inode, OLD) == PreexistingSaves(OLD, OLD, there)
    assert beginning(journal, save_dir, inode, LATER) == PreexistingSaves(LATER, OLD, there)


def test_a_journal_of_an_older_release_begins_with_what_is_here_now(journal: Journal) -> None:
    journal.set_meta("found", "{}")
    assert beginning(journal, "/nvme/run", 7, LATER) == PreexistingSaves(LATER, LATER, HERE)


def test_all_remotes_answer_before_the_first_start_is_noted(tmp_path: Path, journal: Journal) -> None:
    """After a restart, with one of two attached, nothing is noted; with both, what the first daemon saw."""
    near, far = Scene(tmp_path / "near").session, Scene(tmp_path / "far").session
    beginning(journal, "/nvme/run", 7, OLD)
    state = job_state(journal)
    state.load()
    found = beginning(journal, "/nvme/run", 7, LATER)
    sessions = {"near": near, "far": far}
    forms = dict.fromkeys(sessions, (ZERO,))
    known_saves = KnownSaves(state, tmp_path, sessions, "n0", found, 60.0, forms, lambda: None, ONE_RUN)
    far.observation = None
    near.observation = m.Observation(identity=IDENTITY, commits=())
    assert known_saves.found_first() is None
    far.observation = near.observation
    assert known_saves.found_first() == OLD
    assert [d.tags for d in read_decisions(tmp_path)] == [("a",)]
