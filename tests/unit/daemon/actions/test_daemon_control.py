"""Requests as files: what a daemon makes of them when it looks, also after a restart (docs/adr/0108)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.cli.daemon.drain import parse_drain
from ckptd.config.loader import load_daemon, load_jobs
from ckptd.daemon.actions.control import DRAIN, PAUSE, Control, DrainFile, PauseFile, write_control
from ckptd.daemon.health.drain import drain_code, drain_status, is_drained, is_settled
from ckptd.daemon.loop import Daemon
from ckptd.daemon.state.problems import Problems
from ckptd.errors import UsageError
from ckptd.observe.status import rfc3339
from tests.support.descriptors import no_free_descriptor
from tests.support.synthetic import write_stage12


def paused(state_dir: Path, *, is_paused: bool = True) -> None:
    """What `ckptd pause` or `pause --off` writes."""
    write_control(state_dir, PAUSE, PauseFile(is_paused=is_paused, by="alice", at_unix_seconds=5.0))


def test_a_pause_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
    one = Control()
    assert not one.refresh(tmp_path)
    paused(tmp_path)
    assert one.refresh(tmp_path)
    assert not one.refresh(tmp_path)
    said = one.pause_status()
    assert said is not None
    assert (said.by, said.since, one.is_resting) == ("alice", "1970-01-01T00:00:05.000Z", True)
    after_a_restart = Control()
    assert after_a_restart.refresh(tmp_path)
    assert after_a_restart.is_resting
    paused(tmp_path, is_paused=False)
    assert one.refresh(tmp_path)
    assert (one.pause_status(), one.is_resting) == (None, False)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"is_paused": "who knows"}', b"\xff\xfe", b"x" * 100_000]
)
def test_what_cannot_be_read_asks_for_nothing(tmp_path: Path, data: bytes) -> None:
    """And takes back nothing that was asked before."""
    one = Control()
    paused(tmp_path)
    one.refresh(tmp_path)
    for name in (PAUSE, DRAIN):
        (tmp_path / "control" / name).write_bytes(data)
    assert one.refresh(tmp_path)
    assert one.pause is not None
    assert not one.is_draining


def test_a_request_that_cannot_be_read_now_is_obeyed_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process without free descriptors reads nothing; the same file counts once there are some."""
    paused(tmp_path)
    write_control(tmp_path, DRAIN, DrainFile(asked_at_unix_seconds=time.time(), seconds=30.0))
    one = Control()
    with no_free_descriptor(), caplog.at_level("WARNING", logger="ckptd.control"):
        assert not one.refresh(tmp_path)
        assert not one.refresh(tmp_path)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the request in control/pause.json cannot be read",
        "the request in control/drain.json cannot be read",
    ]
    assert (one.pause, one.is_draining, one.seconds_to_next) == (None, False, 1.0)
    assert one.refresh(tmp_path)
    assert one.pause is not None
    assert one.is_draining


def test_a_drain_without_end_is_refused(tmp_path: Path) -> None:
    """By the command, and from the file of whoever wrote it otherwise."""
    assert parse_drain("7d", "--deadline") == 7 * 86_400
    for text in ("500000w", "169h"):
        with pytest.raises(UsageError, match=f"--deadline {text}: a drain lasts at most 7d"):
            parse_drain(text, "--deadline")
    one = Control()
    (tmp_path / "control").mkdir()
    for seconds in ("302400000000.0", "Infinity", "NaN", "-1.0"):
        text = f'{{"asked_at_unix_seconds": {time.time()}, "seconds": {seconds}}}'
        (tmp_path / "control" / DRAIN).write_text(text)
        assert one.refresh(tmp_path)
        assert not one.is_draining


def test_a_time_that_no_calendar_has_breaks_no_status(tmp_path: Path) -> None:
    write_control(tmp_path, PAUSE, PauseFile(is_paused=True, by="alice", at_unix_seconds=1e300))
    one = Control()
    one.refresh(tmp_path)
    said = one.pause_status()
    assert said is not None
    assert said.since == "9999-12-31T23:59:59.000Z"
    assert {rfc3339(at)[:4] for at in (float("nan"), float("-inf"), -1e300)} == {"0001"}


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Whoever may write in save_dir leads the daemon nowhere else (P15)."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    paused(elsewhere)
    state_dir = tmp_path / "_ckptd" / "state"
    state_dir.mkdir(parents=True)
    (state_dir / "control").symlink_to(elsewhere / "control")
    one = Control()
    one.refresh(state_dir)
    assert one.pause is None


def is_over(one: Control) -> bool:
    return not one.is_draining


def test_a_drain_ends_at_its_deadline_whatever_the_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monotonic, unix = [100.0], [1_000_000.0]
    monkeypatch.setattr("ckptd.daemon.actions.control.time.monotonic", lambda: monotonic[0])
    monkeypatch.setattr("ckptd.daemon.actions.control.time.time", lambda: unix[0])
    write_control(tmp_path, DRAIN, DrainFile(asked_at_unix_seconds=unix[0], seconds=30.0))
    one = Control()
    one.refresh(tmp_path)
    assert one.is_draining
    unix[0] += 86_400
    monotonic[0] += 29
    assert one.is_draining
    monotonic[0] += 2
    assert is_over(one)
    # a daemon that starts a second after the request has that much less; one that starts a day later none
    unix[0] = 1_000_001.0
    again = Control()
    again.refresh(tmp_path)
    monotonic[0] += 28.5
    assert again.is_draining
    monotonic[0] += 1
    assert is_over(again)
    unix[0] += 86_400
    late = Control()
    late.refresh(tmp_path)
    assert not late.is_draining


def test_a_drain_that_ended_is_not_told_after_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then status tells how it ended: the node may have been spared, and somebody wants to know."""
    monotonic, unix = [100.0], [1_000_000.0]
    monkeypatch.setattr("ckptd.daemon.actions.control.time.monotonic", lambda: monotonic[0])
    monkeypatch.setattr("ckptd.daemon.actions.control.time.time", lambda: unix[0])
    one = Control()
    one.begin_drain(30.0)
    seen_at = [unix[0] - 60.0]
    job: Any = SimpleNamespace(view=None, state=None, turns=2, unseen="", problems=Problems(), control=one)
    state: Any = SimpleNamespace(plan=None, saves=SimpleNamespace(rows={}), folders=SimpleNamespace(quiet={}))

    def told() -> bool:
        state.saves.rows = {n: SimpleNamespace(seen_at=at) for n, at in enumerate(seen_at)}
        return drain_status(job, state) is not None

    assert told()
    seen_at.append(unix[0] + 20.0)
    assert told(), "saved while it went on"
    monotonic[0] += 40.0
    unix[0] += 40.0
    assert told(), "it is over, and nothing was saved since"
    seen_at.append(unix[0] + 1.0)
    assert not told()


def test_a_save_is_waited_for_while_a_file_of_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may pause for longer than a drain's patience; once nobody has it open it is named."""
    monkeypatch.setattr("ckptd.daemon.health.drain.PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr("ckptd.storage.local.scan.WALK_SECONDS", 0.1)
    monkeypatch.setattr("ckptd.storage.local.scan.WALK_SPARES", 1)
    save_dir, job_file = tmp_path / "run", tmp_path / "run.toml"
    (tmp_path / "nas").mkdir()
    job_file.write_text(
        f'save_dir = "{save_dir}"\nsettle = "0.1s"\n'
        f'[[remote]]\nname = "nas"\nurl = "{tmp_path}/nas"\nsame_filesystem = true\n'
    )
    write_stage12(save_dir / "global_step1", [{"a.weight": (4, 4)}], 2, step=1)
    shards = sorted((save_dir / "global_step1").iterdir())
    rest = shards[0].read_bytes()[1000:]
    os.truncate(shards[0], 1000)
    daemon = Daemon(load_jobs([job_file], load_daemon(None, {}), {}), {})
    daemon._open_jobs()
    (job,) = daemon.jobs

    def until(done: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            daemon._wait()
            job.wake()
            daemon._turn(job, time.monotonic())
            job.sleep()
        return done()

    def is_over() -> bool:
        return is_settled(job)

    try:
        job.control.begin_drain(600.0)
        with shards[0].open("ab", buffering=0) as writer:
            assert not until(is_over, 3.0)
            assert job.state is not None
            assert job.state.folders.verdicts["global_step1"].state in ("saving", "resaving")
        assert until(is_over, 200.0)
        assert (is_drained(job), drain_code([job])) == (False, 3)
        told = drain_status(job, job.state)
        assert told is not None
        assert (told.is_done, told.missing, told.unfinished) == (False, ("global_step1",), ("global_step1",))
        with shards[0].open("ab", buffering=0) as writer:
            writer.write(rest)
        assert until(lambda: is_drained(job), 200.0)
        assert drain_code([job]) == 0
    finally:
        job.close()
        daemon._workers.stop()


def test_a_file_replaced_within_a_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    """By its inode, where two writes have one time."""
    one = Control()
    paused(tmp_path)
    one.refresh(tmp_path)
    path = tmp_path / "control" / PAUSE
    status = path.stat()
    paused(tmp_path, is_paused=False)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert one.refresh(tmp_path)
    assert one.pause is None
