"""Notices of the clouds, from HTTP servers that behave as the documented ones do, also when they do not."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from ckptd.daemon.actions.control import Control
from ckptd.daemon.health import termination
from ckptd.daemon.health.termination import Notice, TerminationWatch, Told
from ckptd.errors import CkptdError
from tests.support.metadata import Metadata, metadata

SPOT = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
EVENTS = "/metadata/scheduledevents"
SOON = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
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
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(termination, "TIMEOUT_SECONDS", 0.5)


@pytest.fixture(params=CLOUDS)
def service(request: pytest.FixtureRequest) -> Iterator[Metadata]:
    with metadata(request.param) as made:
        quiet(made)
        yield made


class Heard:
    """A watch, and what it posted."""

    def __init__(self, service: Metadata, which: str = "") -> None:
        self.posted: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self.watch = TerminationWatch(which or service.cloud, service.url, self.posted.put)

    def next(self, seconds: float = 20.0) -> Told:
        return self.posted.get(timeout=seconds)


@pytest.fixture
def heard(service: Metadata) -> Iterator[Heard]:
    made = Heard(service)
    yield made
    made.watch.close()


def notice_of(told: Told) -> Notice:
    assert told[0] is not None, told
    return told[0]


def test_silent_until_the_notice_then_once(service: Metadata, heard: Heard) -> None:
    with pytest.raises(queue.Empty):
        heard.next(1.0)
    assert {status for *_, status in service.requests} <= {200, 404}
    give_notice(service)
    began = time.time()
    notice = notice_of(heard.next())
    expected = SOON.timestamp() if service.cloud != "gcp" else began + 30
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


@pytest.mark.parametrize("fault", ["hang", "500", "malformed"])
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
    told = heard.next()
    assert told[0] == notice
    assert told[1] is not None


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


@only("gcp")
@pytest.mark.parametrize(
    ("value", "is_told"), [("TERMINATE_ON_HOST_MAINTENANCE", True), ("MIGRATE_ON_HOST_MAINTENANCE", False)]
)
def test_a_host_maintenance(service: Metadata, heard: Heard, *, value: str, is_told: bool) -> None:
    service.say(MAINTENANCE, value)
    if is_told:
        assert notice_of(heard.next()).text == f"GCP: {value}"
    else:
        with pytest.raises(queue.Empty):
            heard.next(1.0)


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


def test_a_drain_under_way_ends_no_later() -> None:
    control = Control()
    control.begin_drain(600.0)
    assert control.drain is not None
    asked_at = control.drain.asked_at_unix
    control.drain_by(time.time() + 120)
    assert abs(control.drain.deadline_unix - time.time() - 120) < 2
    assert control.drain.asked_at_unix == asked_at
    control.drain_by(time.time() + 300)
    assert abs(control.drain.deadline_unix - time.time() - 120) < 2


@pytest.mark.parametrize(("seconds", "left"), [(-5000, 30), (120, 120), (36000, 900)])
def test_a_clock_that_differs_makes_no_drain_of_none_and_none_of_hours(seconds: float, left: float) -> None:
    control = Control()
    control.drain_by(time.time() + seconds)
    assert control.drain is not None
    assert abs(control.drain.deadline_unix - time.time() - left) < 2
