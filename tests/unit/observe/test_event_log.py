"""Events in a state directory: at least once over restarts, torn lines and rotation; a loss is said."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files
from ckptd.observe import event_log
from ckptd.observe.event_log import EVENTS, KNOWN, OLD_EVENTS, EventLog, read_events
from ckptd.observe.status import CheckpointStatus, FormStatus, JobStatus, LocalStatus
from tests.support.status_gallery import problem


def checkpoint(tag: str, state: str = "committed") -> CheckpointStatus:
    local = LocalStatus(present=True, universal="none", held=False, complete_at="2026-01-01T00:00:00Z")
    remotes = {"nas": {"zero": FormStatus(state=state)}}
    step = int(tag.removeprefix("step"))
    return CheckpointStatus(
        tag=tag, generation=1, branch=0, step=step, state=state, bytes=step, local=local, remotes=remotes
    )


def job(*checkpoints: CheckpointStatus) -> JobStatus:
    return JobStatus(name="llama", job_id="1", save_dir="/nvme/llama", state="ok", checkpoints=checkpoints)


def brief(rows: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return [(row["kind"], row["tag"]) for row in rows]


def test_what_happens_while_no_daemon_runs_is_told_by_the_next(tmp_path: Path) -> None:
    EventLog(tmp_path).see(job(checkpoint("step1", "pending")))
    first = read_events(tmp_path)
    EventLog(tmp_path).see(job(checkpoint("step1"), checkpoint("step2", "pending")))
    assert brief(first) == [("complete", "step1")]
    assert brief(read_events(tmp_path, first[-1]["id"])) == [("committed", "step1"), ("complete", "step2")]
    EventLog(tmp_path).see(job(checkpoint("step1"), checkpoint("step2", "pending")))
    ids = [row["id"] for row in read_events(tmp_path)]
    assert len(ids) == 3
    assert ids == sorted(set(ids))


def test_a_crash_between_line_and_facts_tells_twice_not_never(tmp_path: Path) -> None:
    EventLog(tmp_path).see(job(checkpoint("step1", "pending")))
    before = (tmp_path / KNOWN).read_bytes()
    EventLog(tmp_path).see(job(checkpoint("step1")))
    (tmp_path / KNOWN).write_bytes(before)
    EventLog(tmp_path).see(job(checkpoint("step1")))
    rows = read_events(tmp_path)
    assert brief(rows)[1:] == [("committed", "step1")] * 2
    assert len({row["id"] for row in rows}) == 3


def test_a_torn_line_is_left_out_and_told_again(tmp_path: Path) -> None:
    EventLog(tmp_path).see(job(checkpoint("step1", "pending")))
    since = read_events(tmp_path)[-1]["id"]
    with open(tmp_path / EVENTS, "a") as log:
        log.write(json.dumps({"id": since + 1, "after": since, "kind": "committed"})[:-9])
    assert read_events(tmp_path, since) == []
    EventLog(tmp_path).see(job(checkpoint("step1")))
    assert brief(read_events(tmp_path, since)) == [("committed", "step1")]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_full_disk_delays_events_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_restarted: bool
) -> None:
    log = EventLog(tmp_path)
    log.see(job(checkpoint("step1", "pending")))
    with monkeypatch.context() as full:
        full.setattr(event_log, "write_all", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            log.see(job(checkpoint("step1")))
    (EventLog(tmp_path) if is_restarted else log).see(job(checkpoint("step1")))
    assert brief(read_events(tmp_path)) == [("complete", "step1"), ("committed", "step1")]


def test_facts_that_were_not_written_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would tell again what it finds."""
    log = EventLog(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(files, "write_atomic", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            log.see(job(checkpoint("step1")))
    log.see(job(checkpoint("step1")))
    EventLog(tmp_path).see(job(checkpoint("step1")))
    assert brief(read_events(tmp_path)) == [("complete", "step1"), ("committed", "step1")]


def test_a_problem_that_a_start_finds_again_was_never_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that it does not find within a minute was."""
    away = replace(job(), problems=(problem("remote-unreachable", "behind", "nas is away", "mount it"),))
    EventLog(tmp_path).see(away)
    log = EventLog(tmp_path)
    log.see(replace(away, problems=()))
    log.see(away)
    assert [row["kind"] for row in read_events(tmp_path)] == ["problem"]
    log.see(replace(away, problems=()))
    later = time.monotonic() + event_log.REAPPEARS_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    log.see(replace(away, problems=()))
    assert [row["kind"] for row in read_events(tmp_path)] == ["problem", "solved"]


def test_rotation_loses_nothing_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that look after each event get all of them; one that comes late is told that some are gone."""
    monkeypatch.setattr(event_log, "EVENTS_BYTES", 2000)
    log, since, seen = EventLog(tmp_path), 0, []
    for step in range(60):
        log.see(job(checkpoint(f"step{step}", "pending")))
        for row in read_events(tmp_path, since):
            seen.append(row)
            since = row["id"]
    assert brief(seen) == [("complete", f"step{step}") for step in range(60)]
    assert (tmp_path / OLD_EVENTS).stat().st_size < 4000
    late = read_events(tmp_path, seen[3]["id"])
    assert late[0]["kind"] == "gap"
    assert late[1:] == seen[-len(late) + 1 :]
    assert read_events(tmp_path, late[0]["id"]) == late[1:]


def test_lost_facts_are_a_gap_and_all_that_is_there(tmp_path: Path) -> None:
    EventLog(tmp_path).see(job(checkpoint("step1")))
    since = read_events(tmp_path)[-1]["id"]
    os.unlink(tmp_path / KNOWN)
    EventLog(tmp_path).see(job(checkpoint("step1"), checkpoint("step2")))
    told = read_events(tmp_path, since)
    assert told[0]["kind"] == "gap"
    assert {row["tag"] for row in told[1:]} == {"step1", "step2"}


def test_facts_that_cannot_be_read_now_are_not_lost(tmp_path: Path) -> None:
    """The next call reads them: nothing is told twice. What is no document is lost."""
    EventLog(tmp_path).see(job(checkpoint("step1", "pending")))
    since = read_events(tmp_path)[-1]["id"]
    (tmp_path / KNOWN).rename(tmp_path / "aside")
    (tmp_path / KNOWN).mkdir()
    log = EventLog(tmp_path)
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            log.see(job(checkpoint("step1")))
    (tmp_path / KNOWN).rmdir()
    (tmp_path / "aside").rename(tmp_path / KNOWN)
    log.see(job(checkpoint("step1")))
    assert brief(read_events(tmp_path, since)) == [("committed", "step1")]
    (tmp_path / KNOWN).write_text('{"id": 1, "jo')
    EventLog(tmp_path).see(job(checkpoint("step1")))
    assert [row["kind"] for row in read_events(tmp_path, since)][1:] == ["gap", "complete", "committed"]


@pytest.mark.parametrize("name", [EVENTS, OLD_EVENTS])
def test_events_that_cannot_be_read_now_are_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A follower that was told of a gap would go on after them, for ever."""
    EventLog(tmp_path).see(job(checkpoint("step1", "pending")))
    since = read_events(tmp_path)[-1]["id"]
    monkeypatch.setattr(event_log, "EVENTS_BYTES", 1)
    EventLog(tmp_path).see(job(checkpoint("step1")))
    monkeypatch.undo()
    EventLog(tmp_path).see(job(checkpoint("step1"), checkpoint("step2", "pending")))
    (tmp_path / name).rename(tmp_path / "aside")
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError):
        read_events(tmp_path, since)
    (tmp_path / name).rmdir()
    (tmp_path / "aside").rename(tmp_path / name)
    assert brief(read_events(tmp_path, since)) == [("committed", "step1"), ("complete", "step2")]


def test_a_save_that_comes_and_goes_between_two_looks_is_told_of(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.see(job(checkpoint("step1")))
    since = read_events(tmp_path)[-1]["id"]
    log.see(job(checkpoint("step1"), replace(checkpoint("step2"), state="pruned")))
    assert [row["kind"] for row in read_events(tmp_path, since)] == ["complete", "committed", "pruned"]


def test_lost_lines_give_no_id_twice(tmp_path: Path) -> None:
    EventLog(tmp_path).see(job(checkpoint("step1", "pending")))
    since = read_events(tmp_path)[-1]["id"]
    os.unlink(tmp_path / EVENTS)
    EventLog(tmp_path).see(job(checkpoint("step1")))
    assert brief(read_events(tmp_path, since)) == [("committed", "step1")]
    assert read_events(tmp_path, 5)[0]["kind"] == "gap"


@pytest.mark.parametrize("hours", [2, 0])
def test_events_that_began_anew_are_a_gap_and_all_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """The state was lost, and the clock may have been ahead before: a follower hears of both."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 60 + hours * 3600)
    EventLog(tmp_path).see(job(checkpoint("step1")))
    last = read_events(tmp_path)[-1]["id"]
    for path in tmp_path.iterdir():
        path.unlink()
    monkeypatch.setattr(time, "time", real)
    EventLog(tmp_path).see(job(checkpoint("step1"), checkpoint("step2")))
    rows = read_events(tmp_path)
    told = read_events(tmp_path, last)
    assert told[0]["kind"] == "gap"
    assert (told[1:], told[0]["after"]) == (rows, last)
    for at, row in enumerate(rows):
        assert read_events(tmp_path, row["id"]) == rows[at + 1 :]
    assert read_events(tmp_path, 0) == rows
    assert read_events(tmp_path, told[0]["id"]) == rows


def test_progress_alone_writes_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    one = checkpoint("step1", "uploading")
    log.see(job(one))
    before = (tmp_path / KNOWN).stat().st_mtime_ns
    moved = {"nas": {"zero": FormStatus(state="uploading", bytes_done=5, bytes_total=9)}}
    log.see(job(replace(one, remotes=moved, bytes=7)))
    assert (tmp_path / KNOWN).stat().st_mtime_ns == before
