"""Events between two statuses, and which of them are told: once, again when they last, never a flood."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.config.loader import job_from_arguments
from ckptd.config.schema import DaemonConfig, NotifyConfig
from ckptd.daemon import publisher as publishing
from ckptd.daemon.health.exporter import Exporter
from ckptd.daemon.health.notify import Notifier
from ckptd.daemon.health.status import job_status
from ckptd.daemon.job import Job
from ckptd.daemon.publisher import Invalid, Publisher, Reloaded
from ckptd.daemon.resources.limits import HostLimits
from ckptd.daemon.resources.workers import Workers
from ckptd.errors import ConfigError
from ckptd.observe.events import MOST_IN_AN_HOUR, Event, EventReporter, NotifyRules, events_between
from ckptd.observe.status import (
    CheckpointStatus,
    FormStatus,
    JobStatus,
    LocalStatus,
    PauseStatus,
    ProblemStatus,
)

RULES = NotifyRules(severity="attention", repeat_seconds=3600.0, not_safe_after_seconds=600.0)


def checkpoint(
    tag: str = "global_step1", *, zero: str = "waiting", universal: str = "none", state: str = "complete"
) -> CheckpointStatus:
    return CheckpointStatus(
        tag=tag,
        generation=1,
        branch=0,
        step=1,
        state=state,
        bytes=1,
        local=LocalStatus(present=True, universal=universal, held=False, complete_at="2026-01-01T00:00:00Z"),
        remotes={"nas": {"zero": FormStatus(state=zero)}},
    )


def job(
    *checkpoints: CheckpointStatus, problems: tuple[ProblemStatus, ...] = (), **more: object
) -> JobStatus:
    return JobStatus(
        name="llama",
        job_id="1",
        save_dir="/n",
        state="ok",
        checkpoints=checkpoints,
        problems=problems,
        **more,  # type: ignore[arg-type]
    )


def problem(code: str = "no-rights", about: str = "", severity: Any = "attention") -> ProblemStatus:
    return ProblemStatus(
        code=code, severity=severity, since="2026", text=f"{code} {about}", next_step="do", about=about
    )


def kinds(events: tuple[Event, ...]) -> list[str]:
    return [event.kind for event in events]


def test_a_paused_job_is_not_safe_all_the_same() -> None:
    """Whoever paused it may have forgotten (docs/adr/0108)."""
    paused = PauseStatus(since="2026", by="alice")
    told = EventReporter(RULES).see(replace(job(), state="paused", paused=paused, seconds_at_risk=601.0), 0.0)
    assert [event.kind for event in told.messages] == ["not-safe"]


def test_a_life_in_events() -> None:
    steps = [
        job(),
        job(checkpoint()),
        job(checkpoint(zero="committed")),
        job(checkpoint(zero="committed", universal="ready")),
        job(checkpoint(zero="committed", universal="ready", state="pruned")),
    ]
    told = [kinds(events_between(a, b)) for a, b in itertools.pairwise(steps)]
    assert told == [["complete"], ["committed"], ["converted"], ["pruned"]]
    assert kinds(events_between(None, steps[-1])) == []
    (left,) = events_between(*steps[-2:])
    assert left.text == "global_step1 left this node; it is committed on nas"
    # unuploaded = "delete": what was never committed is not said to be
    (left,) = events_between(job(checkpoint()), job(checkpoint(state="pruned")))
    assert left.text == "global_step1 left this node; no remote holds it"
    # all at once, when nobody looked in between
    assert kinds(events_between(steps[0], steps[3])) == ["complete", "committed", "converted"]


def test_what_was_there_at_a_start_is_no_event() -> None:
    """A status before the first look has no checkpoints, and neither has one whose save_dir is away."""
    desk, there = EventReporter(RULES), job(checkpoint(zero="committed"))
    told = [
        kinds(desk.see(status, 0.0, is_scanned=is_scanned).events)
        for status, is_scanned in (
            (job(), False),
            (there, True),
            (job(checkpoint("global_step2"), *there.checkpoints), True),
            (job(problems=(problem(),)), False),
            (there, True),
        )
    ]
    assert told == [[], [], ["complete"], ["problem"], ["solved"]]


def test_a_second_save_of_the_same_tag_is_another() -> None:
    again = checkpoint()
    again = replace(again, local=replace(again.local, complete_at="2026-01-02T00:00:00Z"))
    assert kinds(events_between(job(checkpoint()), job(again, checkpoint()))) == ["complete"]


def test_a_problem_that_flaps_is_told_once_and_one_that_lasts_again() -> None:
    desk = EventReporter(RULES)
    told = [kinds(desk.see(job(problems=p), at).messages) for at, p in ((0.0, (problem(),)), (1.0, ()))]
    assert told == [["problem"], ["solved"]]
    assert kinds(desk.see(job(problems=(problem(),)), 2.0).messages) == []
    assert kinds(desk.see(job(problems=(problem(),)), 3599.0).messages) == []
    assert kinds(desk.see(job(problems=(problem(),)), 3601.0).messages) == ["problem"]
    # another remote's is another
    assert kinds(desk.see(job(problems=(problem(), problem(about="s3"))), 3602.0).messages) == ["problem"]
    # one that did not heal is told when it needs a person
    slow = EventReporter(RULES)
    assert slow.see(job(problems=(problem("torn-save", severity="note"),)), 0.0).messages == ()
    assert kinds(slow.see(job(problems=(problem("torn-save"),)), 60.0).messages) == ["problem"]
    assert kinds(slow.see(job(problems=(problem("torn-save"),)), 61.0).events) == []
    assert kinds(slow.see(job(), 62.0).messages) == ["solved"]
    # what nobody was told of is not told to be over
    quiet = EventReporter(RULES)
    quiet.see(job(problems=(problem("link-slow", severity="note"),)), 0.0)
    told_of = quiet.see(job(), 1.0)
    assert kinds(told_of.events) == ["solved"]
    assert told_of.messages == ()


def test_not_safe_is_told_once_and_that_it_is_over() -> None:
    desk = EventReporter(RULES)
    assert desk.see(job(seconds_at_risk=599.0), 0.0).messages == ()
    assert desk.is_well()
    (message,) = desk.see(job(seconds_at_risk=601.0), 1.0).messages
    assert message.kind == "not-safe"
    assert message.text == "10 min of training would be lost with this node; nothing is safe"
    assert not desk.is_well()
    assert desk.see(job(seconds_at_risk=900.0), 2.0).messages == ()
    assert kinds(desk.see(job(seconds_at_risk=4600.0), 3700.0).messages) == ["not-safe"]
    assert kinds(desk.see(job(seconds_at_risk=5.0), 3701.0).messages) == ["safe-again"]
    assert desk.see(job(seconds_at_risk=5.0), 3702.0).messages == ()


@given(
    st.lists(st.tuples(st.floats(0, 900), st.sets(st.sampled_from([str(n) for n in range(30)]))), max_size=40)
)
def test_never_a_flood_and_nothing_forgotten(turns: list[tuple[float, set[str]]]) -> None:
    desk, now, times = EventReporter(RULES), 0.0, []
    for pause, names in turns:
        now += pause
        messages = desk.see(job(problems=tuple(problem(about=n) for n in sorted(names))), now).messages
        times += [now] * len([m for m in messages if "held back" not in m.text])
    for at in times:
        assert len([t for t in times if at - 3600.0 <= t <= at]) <= MOST_IN_AN_HOUR


def test_what_was_not_delivered_is_said_until_the_next_one_is(tmp_path: Path) -> None:
    program = tmp_path / "program"
    config = NotifyConfig.model_validate({"on_complete": [str(program)], "on_committed": ["/bin/true"]})
    notifier = Notifier(config, "node-0")
    notifier.see(job())
    notifier.see(job(checkpoint()))
    wait_for(lambda: f"starting {program}" in (notifier.failed or ""))
    notifier.see(job(checkpoint(zero="committed")))
    wait_for(lambda: notifier.failed is None)
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    notifier.see(job())
    notifier.see(job(checkpoint(zero="committed")))
    wait_for(lambda: notifier.failed is None)
    notifier.see(job(checkpoint(), checkpoint("global_step2")))
    wait_for(lambda: notifier.failed == f"{program} ended with 3")
    notifier.close()


def test_a_job_that_does_not_run_is_told_of(tmp_path: Path) -> None:
    """Its file is wrong, or its daemon gave it up: no turn of it comes that would tell."""
    program, seen = tmp_path / "program", tmp_path / "seen"
    program.write_text(f"#!/bin/sh\ncat >> {seen}\necho >> {seen}\n")
    program.chmod(0o755)
    notifier = Notifier(NotifyConfig.model_validate({"command": [str(program)]}), "node-0")
    publisher = Publisher(notifier, Exporter(None))
    wrong = Invalid("llama", "/etc/llama.toml", ConfigError("save_dri is no key", hint="save_dir"), 0.0)
    for since in (0.0, 1.0):  # as after a reload
        publisher.publish([], [replace(wrong, since_unix_seconds=since)], Reloaded(), 1)
    publisher.publish([], [], Reloaded(), 1)
    notifier.close(60)
    told = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [one["kind"] for one in told] == ["problem", "solved"]
    assert (told[0]["job"], told[0]["code"], told[0]["next_step"]) == ("llama", "config-invalid", "save_dir")


def test_a_defect_in_what_is_said_of_one_job_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the daemon, and with it the watch over every other job."""
    told: list[JobStatus] = []
    desk: Any = SimpleNamespace(see=lambda one, **_: told.append(one), turn=lambda _: None, failed=None)
    publisher = Publisher(desk, Exporter(None))
    limits = HostLimits(DaemonConfig(), list, lambda: 0, remotes=list)
    posts: list[Callable[[], None]] = []
    jobs = []
    for name in ("llama", "qwen"):
        (tmp_path / name).mkdir()
        config = job_from_arguments(str(tmp_path / name), str(tmp_path / "nas"), check_paths=False)
        config = config.model_copy(update={"name": name})
        place = tmp_path / f"{name}-state"
        jobs.append(Job(config, DaemonConfig(), place, limits, Workers(posts.append), posts.append))

    def status(one: Job, unended: frozenset[tuple[str, str | None]]) -> JobStatus:
        if one.config.name == "llama":
            raise ZeroDivisionError("division by zero")
        return job_status(one, unended)

    publisher.publish(jobs, [], Reloaded(), 1)
    monkeypatch.setattr(publishing, "job_status", status)
    assert publisher.publish(jobs, [], Reloaded(), 1, is_urgent=True) == "llama: attention; qwen: waiting"
    assert [p.code for p in told[-2].problems] == ["internal"]
    document = json.loads((tmp_path / "llama-state" / "status.json").read_bytes())
    assert document["jobs"][0]["problems"][0]["text"].endswith("ZeroDivisionError: division by zero")


def test_a_wrong_file_with_the_name_of_a_job_that_runs_is_no_flapping() -> None:
    desk = EventReporter(RULES)
    wrong = replace(job(problems=(problem("config-invalid"),)), save_dir="/etc/llama.toml", state="invalid")
    told = [kinds(desk.see(status, at).messages) for at in (0.0, 1.0) for status in (job(), wrong)]
    assert told == [[], ["problem"], [], []]
    assert not desk.is_well()
    desk.forget_others([job()])
    assert desk.is_well()


def test_the_environments_proxy_is_used_but_for_whom_it_bypasses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    port = server.server_address[1]
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for url in ("http://nowhere.invalid/hook", f"http://127.0.0.1:{port}/hook"):
        config = NotifyConfig.model_validate({"webhook": url, "severity": "note"})
        notifier = Notifier(config, "node-0")
        notifier.see(job(problems=(problem(),)))
        notifier.close(60)
        assert notifier.failed is None
    server.shutdown()
    server.server_close()
    assert asked == ["http://nowhere.invalid/hook", "/hook"]


def wait_for(done: Callable[[], bool], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)
