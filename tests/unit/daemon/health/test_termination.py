"""Notices of the clouds, from HTTP servers that behave as the documented ones do, also when they do not."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from ckptd.config.schema import DaemonConfig
from ckptd.daemon.actions.control import DRAIN, Control, DrainFile, drain_before_end, write_control
from ckptd.daemon.health import cloud_notices, termination
from ckptd.daemon.health.cloud_notices import Notice
from ckptd.daemon.health.termination import Reading, TerminationNotices, TerminationWatch
from ckptd.daemon.state.problems import Problems
from ckptd.errors import CkptdError
from tests.support.metadata import Metadata, metadata

SPOT = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
EVENTS = "/metadata/scheduledevents"
SOON = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
"""As a clock that is behind reads AWS's notice, which names two minutes."""
LEFT_SECONDS = {"aws": 120, "gcp": 30}
CLOUDS = ("aws", "gcp", "azure")


def quiet(service: Metadata) -> None:
    """What a node is told that nobody wants to end."""
    if service.cloud == "gcp":
        service.say(PREEMPTED, "FALSE")
        service.say(MAINTENANCE, "NONE")
        service.say("/computeMetadata/v1/instance/id", "42")
    if service.cloud == "azure":
        service.say("/metadata/instance/compute/name", "gpu_3")
        service.say(EVENTS, {"DocumentIncarnation": 1, "Events": []})


def azure_event(**fields: Any) -> dict[str, Any]:
    event = {"EventId": "A1", "EventStatus": "Scheduled", "EventType": "Preempt", "Resources": ["gpu_3"]}
    at = format_datetime(SOON, usegmt=True)
    return {"DocumentIncarnation": 2, "Events": [event | {"NotBefore": at} | fields]}


def give_notice(service: Metadata) -> None:
    if service.cloud == "aws":
        service.say(SPOT, {"action": "terminate", "time": SOON.strftime("%Y-%m-%dT%H:%M:%SZ")})
    elif service.cloud == "gcp":
        service.say(PREEMPTED, "TRUE")
    else:
        service.say(EVENTS, azure_event())


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cloud_notices, "private_place", lambda _: tmp_path / "own")
    monkeypatch.setattr(termination, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(cloud_notices, "TIMEOUT_SECONDS", 0.5)
    for cloud in cloud_notices.CLOUDS.values():
        monkeypatch.setattr(cloud, "poll_seconds", 0.2)


@pytest.fixture(params=CLOUDS)
def service(request: pytest.FixtureRequest) -> Iterator[Metadata]:
    with metadata(request.param) as made:
        quiet(made)
        yield made


class Heard:
    """A watch, and what it posted."""

    def __init__(self, service: Metadata, which: str = "") -> None:
        self.posted: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self.watch = TerminationWatch(which or service.cloud, service.url, self.posted.put)

    def next(self, seconds: float = 20.0) -> Reading:
        return self.posted.get(timeout=seconds)


@pytest.fixture
def heard(service: Metadata) -> Iterator[Heard]:
    made = Heard(service)
    yield made
    made.watch.close()


def notice_of(reading: Reading) -> Notice:
    assert reading[0] is not None, reading
    return reading[0]


def test_silent_until_the_notice_then_once(service: Metadata, heard: Heard) -> None:
    with pytest.raises(queue.Empty):
        heard.next(1.0)
    assert {status for *_, status in service.requests} <= {200, 404}
    give_notice(service)
    began = time.time()
    notice = notice_of(heard.next())
    left = LEFT_SECONDS.get(service.cloud)
    expected = SOON.timestamp() if left is None else began + left
    assert abs(notice.deadline_unix - expected) < 3
    assert notice.text in ("AWS: spot/instance-action terminate", "GCP: preempted", "Azure: Preempt")
    with pytest.raises(queue.Empty):
        heard.next(1.0)


def test_it_asks_politely(service: Metadata, heard: Heard) -> None:
    """At most three requests an interval, and of AWS one token for all."""
    time.sleep(2.0)
    assert 4 <= len(service.requests) <= 3 * 2.0 / 0.2 + 5
    assert sum(method == "PUT" for method, *_ in service.requests) <= 1
    heard.watch.close()
    time.sleep(1.0)
    count = len(service.requests)
    time.sleep(0.6)
    assert len(service.requests) == count


@pytest.mark.parametrize("fault", ["hang", "500", "malformed", "trickle-head", "trickle-body"])
def test_a_service_out_of_order_is_told_and_asked_again(service: Metadata, fault: str) -> None:
    service.fault = fault
    heard = Heard(service)
    try:
        notice, error = heard.next()
        assert notice is None
        assert isinstance(error, CkptdError)
        assert "metadata service" in error.message
        service.fault = ""
        assert heard.next() == (None, None)
        give_notice(service)
        notice_of(heard.next())
    finally:
        heard.watch.close()


def test_a_notice_outlives_a_service_that_fails_after_it(service: Metadata, heard: Heard) -> None:
    give_notice(service)
    notice = notice_of(heard.next())
    service.fault = "500"
    reading = heard.next()
    assert reading[0] == notice
    assert reading[1] is not None


def test_auto_finds_the_cloud(service: Metadata) -> None:
    give_notice(service)
    heard = Heard(service, "auto")
    try:
        notice_of(heard.next())
    finally:
        heard.watch.close()


def test_auto_elsewhere_says_so() -> None:
    with metadata("none") as service:
        heard = Heard(service, "auto")
        try:
            notice, error = heard.next()
            assert notice is None
            assert "no metadata service" in str(error)
        finally:
            heard.watch.close()


def only(cloud: str) -> Any:
    return pytest.mark.parametrize("service", [cloud], indirect=True)


@only("aws")
def test_a_token_that_ended_is_renewed(service: Metadata, heard: Heard) -> None:
    while not service.tokens:
        time.sleep(0.05)
    service.tokens.clear()
    give_notice(service)
    notice_of(heard.next())


@only("aws")
def test_a_hop_limit_is_named(service: Metadata) -> None:
    service.fault = "drop-token"
    heard = Heard(service)
    try:
        error = heard.next()[1]
        assert error is not None
        assert "hop limit" in error.hint
    finally:
        heard.watch.close()


@only("aws")
@pytest.mark.parametrize(("age", "is_told"), [(10, True), (600, False)])
def test_a_rebalance_recommendation(service: Metadata, *, age: int, is_told: bool) -> None:
    at = datetime.now(UTC) - timedelta(seconds=age)
    service.say(REBALANCE, {"noticeTime": at.strftime("%Y-%m-%dT%H:%M:%SZ")})
    heard = Heard(service)
    try:
        if is_told:
            assert "rebalance" in notice_of(heard.next()).text
        else:
            with pytest.raises(queue.Empty):
                heard.next(1.0)
    finally:
        heard.watch.close()


@only("aws")
def test_a_clock_that_is_behind_moves_no_end_of_the_node(service: Metadata) -> None:
    """Two hours: what the cloud names by its own clock is two minutes after it was first seen at most."""
    ahead = datetime.now(UTC) + timedelta(hours=2)
    service.say(REBALANCE, {"noticeTime": ahead.strftime("%Y-%m-%dT%H:%M:%SZ")})
    heard = Heard(service)
    try:
        first = notice_of(heard.next())
        assert "rebalance" in first.text
        assert abs(first.deadline_unix - time.time() - 120) < 3
        ends = (ahead + timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%SZ")
        service.say(SPOT, {"action": "terminate", "time": ends})
        notice = notice_of(heard.next())
        assert "terminate" in notice.text
        assert abs(notice.deadline_unix - time.time() - 120) < 3
        with pytest.raises(queue.Empty):
            heard.next(1.0)
    finally:
        heard.watch.close()
    again = Heard(service)
    try:
        assert notice_of(again.next()) == notice, "a daemon that is started again goes on counting"
    finally:
        again.watch.close()


@only("gcp")
@pytest.mark.parametrize(
    ("value", "is_told"), [("TERMINATE_ON_HOST_MAINTENANCE", True), ("MIGRATE_ON_HOST_MAINTENANCE", False)]
)
def test_a_host_maintenance(service: Metadata, heard: Heard, *, value: str, is_told: bool) -> None:
    service.say(MAINTENANCE, value)
    if is_told:
        notice = notice_of(heard.next())
        assert notice.text == f"GCP: {value}"
        assert abs(notice.deadline_unix - time.time() - 3600) < 3
        with pytest.raises(queue.Empty):
            heard.next(1.0)
    else:
        with pytest.raises(queue.Empty):
            heard.next(1.0)


@only("gcp")
def test_a_daemon_that_is_started_again_goes_on_counting(service: Metadata, tmp_path: Path) -> None:
    """Until the notice is taken back, or the node was booted; it says the hour once, from its first sight."""

    def deadline() -> float:
        heard = Heard(service)
        try:
            return notice_of(heard.next()).deadline_unix
        finally:
            heard.watch.close()

    service.say(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    first = deadline()
    assert deadline() == first
    (counted,) = (tmp_path / "own").iterdir()
    for content, at in (("{}", time.time()), ("[", time.time()), (f'{{"GCP: x": {first}}}', 10**9)):
        counted.write_text(content)
        os.utime(counted, (at, at))
        assert deadline() > first
        assert "GCP: x" not in counted.read_text()
    service.say(MAINTENANCE, "NONE")
    heard = Heard(service)
    while counted.exists():
        time.sleep(0.05)
    heard.watch.close()


@only("azure")
@pytest.mark.parametrize(
    ("fields", "is_told"),
    [
        ({"Resources": ["gpu_4"]}, False),
        ({"EventType": "Freeze"}, False),
        ({"EventType": "Terminate"}, True),
        ({"NotBefore": "", "EventStatus": "Started"}, True),
    ],
)
def test_an_event_of_this_machine_alone(
    service: Metadata, heard: Heard, *, fields: dict[str, Any], is_told: bool
) -> None:
    service.say(EVENTS, azure_event(**fields))
    if is_told:
        assert notice_of(heard.next()).deadline_unix > time.time() + 20
        service.say(EVENTS, {"DocumentIncarnation": 3, "Events": []})
        assert heard.next() == (None, None)
    else:
        with pytest.raises(queue.Empty):
            heard.next(1.0)


@only("gcp")
def test_a_preemption_counts_where_maintenance_cannot_be_read(service: Metadata, heard: Heard) -> None:
    del service.documents[MAINTENANCE]
    assert "maintenance-event" in str(heard.next()[1])
    give_notice(service)
    began = time.time()
    reading = heard.next()
    assert reading[1] is None
    assert abs(notice_of(reading).deadline_unix - began - 30) < 3


@only("aws")
@pytest.mark.parametrize("path", [SPOT, REBALANCE])
def test_a_notice_without_a_readable_time_counts_from_now(service: Metadata, heard: Heard, path: str) -> None:
    service.say(path, {"action": "terminate", "time": "soon", "noticeTime": 5})
    notice = notice_of(heard.next())
    assert abs(notice.deadline_unix - time.time() - 120) < 3
    with pytest.raises(queue.Empty):
        heard.next(1.0)


@only("azure")
def test_an_event_without_a_readable_time_spoils_no_other(service: Metadata, heard: Heard) -> None:
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=10)
    bad = azure_event(NotBefore="soon")["Events"]
    good = azure_event(EventId="B2", NotBefore=format_datetime(soon, usegmt=True))["Events"]
    service.say(EVENTS, {"Events": bad + good})
    assert notice_of(heard.next()).deadline_unix == soon.timestamp()
    service.say(EVENTS, {"Events": bad})
    assert 15 < notice_of(heard.next()).deadline_unix - time.time() < 31
    with pytest.raises(queue.Empty):
        heard.next(1.0)


@only("azure")
def test_the_first_request_may_take_long(service: Metadata) -> None:
    """It enables the service."""
    service.delays[EVENTS] = 3.0
    give_notice(service)
    heard = Heard(service)
    try:
        assert heard.next()[1] is None
    finally:
        heard.watch.close()


# --- the drain of a notice -------------------------------------------------------------------------------


class Job:
    """What a notice changes."""

    def __init__(self) -> None:
        self.problems = Problems()
        self.control = Control()

    def wake(self) -> None:
        """Nothing: no turn is taken here."""

    @property
    def codes(self) -> set[str]:
        return {problem.code for problem in self.problems.all()}


def test_a_reload_takes_a_notice_back_from_every_job(service: Metadata) -> None:
    """Also from one that was kept; a job that is opened meanwhile is drained too."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    jobs = [Job()]
    config = DaemonConfig.model_validate({"termination": service.cloud, "termination_url": service.url})
    notices = TerminationNotices(config, calls.put, lambda: jobs)
    give_notice(service)
    calls.get(timeout=20)()
    late = Job()
    notices.apply_to(late)
    assert jobs[0].codes == late.codes == {"node-ending"}
    # an hour ahead it is said, and nothing rests yet
    assert jobs[0].control.is_draining == late.control.is_draining == (service.cloud != "azure")
    notices.change(DaemonConfig())
    assert jobs[0].codes == set()
    assert (jobs[0].control.drain, jobs[0].control.notice_drain) == (None, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed on both clocks."""
    passed, unix, monotonic = [0.0], time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: unix + passed[0])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic + passed[0])
    return passed


def seconds_left(control: Control) -> float | None:
    """Until the drain that lasts is over; None: none lasts."""
    drain = control.drain
    return round(drain.deadline_seconds - time.monotonic()) if drain and control.is_draining else None


@pytest.mark.parametrize(
    ("ends_in", "begins_after", "lasts"), [(-5000, 0, 30), (120, 0, 120), (3600, 2700, 900)]
)
def test_the_last_minutes_of_a_node_are_a_drain(
    clock: list[float], ends_in: float, begins_after: float, lasts: float
) -> None:
    """By a clock that is ahead of the cloud's too; and after it all goes on as before."""
    control = Control()
    control.notice_drain = drain_before_end(time.time() + ends_in)
    if begins_after:
        clock[0] = begins_after - 1
        assert (control.drain, seconds_left(control)) == (None, None)
    clock[0] = begins_after + 1
    assert seconds_left(control) == lasts - 1
    assert control.drain is not None
    assert round(control.drain.asked_at_unix - time.time()) == -1
    clock[0] = begins_after + lasts + 1
    assert seconds_left(control) is None
    opened_now = Control()
    opened_now.notice_drain = control.notice_drain
    assert seconds_left(opened_now) is None


def test_a_person_moves_no_end_of_the_node(clock: list[float], tmp_path: Path) -> None:
    """The earlier deadline holds; a request of long ago takes nothing back."""
    control = Control()
    write_control(tmp_path, DRAIN, DrainFile(asked_at_unix_seconds=time.time() - 999, seconds=30))
    control.notice_drain = drain_before_end(time.time() + 120)
    control.refresh(tmp_path)
    assert seconds_left(control) == 120
    for seconds, left in ((600, 120), (60, 60)):
        asked_at = time.time()
        write_control(tmp_path, DRAIN, DrainFile(asked_at_unix_seconds=asked_at, seconds=seconds))
        control.refresh(tmp_path)
        assert seconds_left(control) == left
        assert control.drain is not None
        assert abs(control.drain.asked_at_unix - asked_at) < 0.1  # by which they know the answer
    clock[0] += 61
    assert seconds_left(control) == 59
    clock[0] += 60
    assert seconds_left(control) is None


def test_an_old_request_ends_no_drain_that_a_signal_began(tmp_path: Path) -> None:
    write_control(tmp_path, DRAIN, DrainFile(asked_at_unix_seconds=time.time() - 999, seconds=30))
    control = Control()
    control.begin_drain(600)
    control.refresh(tmp_path)
    assert seconds_left(control) == 600


def test_a_drain_that_begins_is_news_to_the_turn(clock: list[float], tmp_path: Path) -> None:
    """A job at rest plans anew, and so does one whose drain is over."""
    control = Control()
    control.notice_drain = drain_before_end(time.time() + 3600)
    news = []
    for clock[0] in (0, 2699, 2701, 2702, 3601, 3602):
        news.append(control.refresh(tmp_path))
    assert news == [False, False, True, False, True, False]
