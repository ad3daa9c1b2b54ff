"""Removals from a remote and the hourly limit: what a remote refuses uses it up once, not at each try."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.config.loader import job_from_arguments
from ckptd.core.model.records import UNIVERSAL
from ckptd.core.policy.actions import DeleteRemote
from ckptd.daemon.state import view_builder
from ckptd.daemon.state.state import JobState
from ckptd.daemon.uploads.remote_deletion import RemoteDeleter
from ckptd.observe.audit import Audit
from ckptd.storage.journal.journal import Journal
from tests.support.core_views import remote_commit, sealed
from tests.support.states import job_state

if TYPE_CHECKING:
    from pathlib import Path


def state_in(place: Path) -> JobState:
    return job_state(Journal(place / "journal.db"))


def test_tries_of_one_removal_count_once_and_outlive_a_start(tmp_path: Path) -> None:
    """A remote that was full refused one nine times: the others could not go for an hour. A daemon that is
    started again and again has one belt."""
    state = state_in(tmp_path)
    ordered: list[Any] = []

    def order(message: object, _: object) -> int:
        ordered.append(message)
        return len(ordered)

    link: Any = SimpleNamespace(start_transfer=order)
    (tmp_path / "run").mkdir()
    job = job_from_arguments(str(tmp_path / "run"), str(tmp_path / "nas"), check_paths=False)
    (remote,) = (config.name for config in job.remotes)
    retiring = RemoteDeleter(job, state, {remote: link}, Audit(tmp_path / "audit.jsonl"), lambda: None)
    for step in (1, 1, 1, 2):
        retiring.delete(
            DeleteRemote(remote=remote, commit=remote_commit(sealed(step)), reason="save_total_limit 2")
        )
    assert len(ordered) == 4
    assert len(state.deletions.remote_at) == 2
    state.journal.close()
    again = state_in(tmp_path)
    again.deletions.restore_rate_limit()
    assert again.deletions.remote_at.keys() == state.deletions.remote_at.keys(), (
        "each start had a belt of its own"
    )
    assert all(abs(again.deletions.remote_at[key] - at) < 60 for key, at in state.deletions.remote_at.items())
    again.journal.close()


def test_each_remote_has_a_belt_of_its_own_and_its_own_limit(tmp_path: Path) -> None:
    """Each save brings a removal to each remote. One belt for all let go for one of them: with two, what went
    beyond the policy grew without end, and byte-identical COMMITs of both counted as one."""
    (tmp_path / "run").mkdir()
    job = job_from_arguments(str(tmp_path / "run"), str(tmp_path / "nas"), check_paths=False)
    state = state_in(tmp_path)
    links: Any = {n: SimpleNamespace(start_transfer=lambda *_: None) for n in ("nas", "other")}
    remotes = {
        name: SimpleNamespace(name=name, policy=SimpleNamespace(save_total_limit=limit))
        for name, limit in (("nas", None), ("other", 2))
    }
    config: Any = SimpleNamespace(remotes=tuple(remotes.values()))

    def left(state: JobState) -> list[int]:
        return [view_builder._remote_deletions_left(config, state, one) for one in config.remotes]

    retiring = RemoteDeleter(job, state, links, Audit(tmp_path / "audit.jsonl"), lambda: None)
    assert left(state) == [3, 4]
    for remote, step in (("nas", 1), ("nas", 2), ("nas", 3), ("other", 1)):
        retiring.delete(
            DeleteRemote(remote=remote, commit=remote_commit(sealed(step)), reason="save_total_limit")
        )
    assert left(state) == [0, 3]
    state.deletions.completed_at.append(time.monotonic())
    assert left(state) == [1, 4], "a save of this hour lets one more go from each"
    state.journal.close()
    again = state_in(tmp_path)
    again.deletions.restore_rate_limit()
    assert left(again) == [0, 3]
    remotes["nas"].name = "renamed"
    assert left(again) == [0, 0], "another name is no new belt"
    again.journal.close()


def test_what_goes_from_a_remote_without_the_zero_form_uses_up_its_belt(tmp_path: Path) -> None:
    """It holds nothing else. Elsewhere a derived form goes with the ZeRO form that is counted."""
    (tmp_path / "run").mkdir()
    job = job_from_arguments(str(tmp_path / "run"), str(tmp_path / "nas"), check_paths=False)
    (nas,) = job.remotes
    farm = nas.model_copy(update={"name": "farm", "forms": (UNIVERSAL,)})
    job = job.model_copy(update={"remotes": (nas, farm)})
    state = state_in(tmp_path)
    links: Any = {one.name: SimpleNamespace(start_transfer=lambda *_: None) for one in job.remotes}
    retiring = RemoteDeleter(job, state, links, Audit(tmp_path / "audit.jsonl"), lambda: None)
    before = [view_builder._remote_deletions_left(job, state, one) for one in job.remotes]
    for remote in job.remotes:
        commit = remote_commit(sealed(1), UNIVERSAL)
        retiring.delete(DeleteRemote(remote=remote.name, commit=commit, reason="save_total_limit 2"))
    left = [view_builder._remote_deletions_left(job, state, one) for one in job.remotes]
    assert [was - now for was, now in zip(before, left, strict=True)] == [0, 1]
    state.journal.close()


def test_a_belt_of_an_older_journal_counts_for_every_remote(tmp_path: Path) -> None:
    """It was written without names."""
    state = state_in(tmp_path)
    state.journal.set_meta("retired-lately", json.dumps({"sha-s1b1-zero": time.time() - 60.0}))
    state.deletions.restore_rate_limit()
    names = ("nas", "other")
    remotes = tuple(SimpleNamespace(name=n, policy=SimpleNamespace(save_total_limit=None)) for n in names)
    config: Any = SimpleNamespace(remotes=remotes)
    assert [view_builder._remote_deletions_left(config, state, one) for one in config.remotes] == [2, 2]
    ((_, at),) = state.deletions.remote_at.items()
    assert 0 < time.monotonic() - at < 120
    state.journal.close()


def test_a_clock_that_went_back_lets_no_more_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that the journal has from later than now were completed at no known time: they allow nothing."""
    state = state_in(tmp_path)
    unix = time.time()
    monkeypatch.setattr(time, "time", lambda: unix + 7200.0)
    for step in range(1, 6):
        state.journal.add_save(sealed(step), found_first=False, adopted=True, seen_at=0.0)
    monkeypatch.setattr(time, "time", lambda: unix)
    state.deletions.restore_rate_limit()
    assert state.deletions.local_left(1) == 3
    state.journal.close()
