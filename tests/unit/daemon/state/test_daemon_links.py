"""A remote as the deciding thread sees it: looks that come too late, what "unchanged" means, idleness."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from ckptd.core.model.manifest import RemoteIdentity
from ckptd.daemon.state.problems import Problems
from ckptd.daemon.uploads.session import RemoteSession
from ckptd.errors import NoSpaceError, RemoteUnreachable
from ckptd.storage.remote import messages as m
from ckptd.storage.stores.base import Abilities

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.child.slots import RemoteProcess

IDENTITY = RemoteIdentity(format="1.0", remote_id="r", job_id="j", job="job", created="")
BEFORE = m.Observation(identity=IDENTITY, commits=())
AFTER = m.Observation(identity=IDENTITY, commits=(), latest="global_step1")


class Line:
    """In the client's place: remembers orders; the test answers them."""

    def __init__(self) -> None:
        self.orders: list[m.Request] = []
        self.idle = 0.0
        self.abandoned: list[str] = []

    def idle_seconds(self, order_id: int) -> float:
        return self.idle

    def silent_seconds(self, but: int | None) -> float:
        return 0.0

    def abandon(self, reason: str) -> None:
        self.abandoned.append(reason)

    def submit(self, order: m.Request) -> int:
        self.orders.append(order)
        return len(self.orders)

    def ended(self) -> None:
        """No second process here."""


class Scene:
    """A link that is attached and has observed `BEFORE`."""

    def __init__(self, tmp_path: Path, name: str = "nas") -> None:
        settings = m.RemoteSettings(
            name=name, url=str(tmp_path), job="job", save_dir="/x", node="n", node_id="i"
        )
        self.wakes = 0
        self.line = Line()
        self.problems = Problems()
        self.session = RemoteSession(settings, self.problems, lambda call: call(), lambda _: None, self.wake)
        self.session._client = cast("RemoteProcess", self.line)
        self.session.turn(1e6)
        self.answer(
            m.Attached(
                identity=IDENTITY, abilities=Abilities(create_only=True, checksum=None, resumable=True)
            )
        )
        assert self.session.open_requests == 1, "the first look is work: without it nothing is decided"
        self.answer(BEFORE)

    def wake(self) -> None:
        self.wakes += 1

    def answer(self, answer: m.Answer, to: int | None = None) -> None:
        """To the newest order, or that one."""
        self.session._deliver(to or len(self.line.orders), answer)

    @property
    def asked(self) -> m.Request:
        return self.line.orders[-1]


@pytest.mark.parametrize(
    ("name", "said"), [("nas", "remote nas: it is away"), ("remote", "{url}: it is away")]
)
def test_the_log_calls_a_remote_by_its_name_or_its_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, said: str
) -> None:
    """One that nobody named is called "remote": the log said "remote remote:"."""
    scene = Scene(tmp_path, name)
    scene.session.note_error(RemoteUnreachable("it is away", hint="wait"))
    (line,) = caplog.messages
    assert line.startswith(said.format(url=tmp_path))


def test_a_look_that_came_too_late_is_asked_for_in_full_again(tmp_path: Path) -> None:
    """It was thrown away, so the child's "nothing new since then" would hide the COMMIT for ever."""
    scene = Scene(tmp_path)
    scene.session.transfer = upload = scene.session.request(m.Point(), lambda _: None)
    scene.session.observe()
    look = len(scene.line.orders)
    assert scene.asked == m.Observe(only_changed=True)
    scene.answer(m.Done(), upload)
    scene.answer(AFTER, look)
    assert scene.session.observation == BEFORE, "asked before our change: out of date"
    assert scene.asked == m.Observe(only_changed=False)
    scene.answer(AFTER)
    assert scene.session.observation == AFTER
    scene.session.observe()
    assert scene.asked == m.Observe(only_changed=True)


def test_unchanged_that_was_asked_before_our_change_is_asked_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.session.transfer = upload = scene.session.request(m.Point(), lambda _: None)
    scene.session.observe()
    look = len(scene.line.orders)
    scene.answer(m.Done(), upload)
    scene.answer(m.Unchanged(), look)
    assert len(scene.line.orders) == look + 1
    scene.answer(AFTER)
    assert scene.session.observation == AFTER


def test_only_the_regular_look_is_no_work(tmp_path: Path) -> None:
    """A look for what we changed ourselves is: retention rests on it, and `--once` must not end before."""
    scene = Scene(tmp_path)
    scene.session.turn(1e9)
    assert scene.asked == m.Observe(only_changed=True)
    assert scene.session.open_requests == 0
    scene.answer(m.Unchanged())
    scene.session.observe()
    assert scene.session.open_requests == 1
    scene.answer(m.Unchanged())
    scene.session.turn(2e9)
    look = len(scene.line.orders)
    scene.session.transfer = upload = scene.session.request(m.Point(), lambda _: None)
    scene.answer(m.Done(), upload)
    assert scene.session.open_requests == 1, "the regular one under way will be asked again"
    scene.answer(m.Unchanged(), look)
    assert scene.session.open_requests == 1


def test_trouble_makes_the_job_plan_again(tmp_path: Path) -> None:
    """What status calls safe rests on the observation that is gone now."""
    scene = Scene(tmp_path)
    before = scene.wakes
    scene.session.observe()
    scene.answer(m.Failed(error="RemoteUnreachable", message="gone"))
    assert scene.session.observation is None
    assert scene.wakes > before


UNREACHABLE = m.Failed(error="RemoteUnreachable", message="nobody answers")


def test_an_upload_that_stands_still_is_cut_and_said_until_something_is_durable(tmp_path: Path) -> None:
    """What a socket's buffer took is no sign of health: only what is flushed there, or a whole object."""
    scene = Scene(tmp_path)

    def upload() -> int:
        scene.session.transfer = order = scene.session.request(m.Point(), lambda _: None)
        return order

    def moving(done: int, flushed: int) -> m.TransferProgress:
        return m.TransferProgress(key="a", done_bytes=done, total_bytes=99, flushed_bytes=flushed, crc64=0)

    def codes() -> set[str]:
        return {problem.code for problem in scene.problems.all()}

    first = upload()
    scene.line.idle = 59.0
    scene.session.turn(1e6)
    assert codes() == set()
    scene.line.idle = 61.0
    scene.session.turn(1e6)
    assert scene.line.abandoned == ["no byte moved for 60 s"]
    assert codes() == {"transfer-stalled"}
    text = scene.problems.all()[0].text
    assert "no byte moved for 60 s" in text
    scene.answer(UNREACHABLE, first)
    scene.line.idle = 0.0
    second = upload()
    scene.answer(moving(10, 5), second)
    scene.answer(moving(90, 5), second)
    scene.session.note_answer()
    assert "transfer-stalled" in codes()
    scene.answer(moving(91, 6), second)
    assert "transfer-stalled" not in codes()


def test_after_a_cut_it_counts_as_stalled_until_bytes_move_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.session.transfer = order = scene.session.request(m.Point(), lambda _: None)
    scene.line.idle = 61.0
    assert (scene.session.is_moving, scene.session.is_stalled, scene.session.idle_seconds) == (
        False,
        False,
        61.0,
    )
    still = [scene.session.is_still]
    scene.session.turn(1e6)
    scene.answer(UNREACHABLE, order)
    assert (scene.session.is_moving, scene.session.is_stalled, scene.session.idle_seconds) == (
        False,
        True,
        0.0,
    )
    still.append(scene.session.is_still)
    assert still == [True, False], "nothing is under way"
    scene.session.transfer = order = scene.session.request(m.Point(), lambda _: None)
    scene.line.idle = 1.0
    assert (scene.session.is_moving, scene.session.is_stalled) == (True, False)
    scene.line.idle = 11.0
    assert (scene.session.is_moving, scene.session.is_stalled) == (False, True)
    scene.answer(m.Done(), order)
    assert not scene.session.is_stalled


def test_what_is_slow_in_large_steps_is_not_cut_for_ever(tmp_path: Path) -> None:
    """A flush of 64 MiB over a slow link, a driver's block: each cut doubles the patience."""
    scene = Scene(tmp_path)
    for limit in (60, 120, 240, 480, 960, 960):
        scene.session.transfer = order = scene.session.request(m.Point(), lambda _: None)
        scene.line.idle = limit - 1.0
        scene.session.turn(1e6)
        scene.line.idle = limit + 1.0
        scene.session.turn(1e6)
        assert scene.line.abandoned.pop() == f"no byte moved for {limit} s"
        assert not scene.line.abandoned
        scene.answer(UNREACHABLE, order)
    scene.session.transfer = order = scene.session.request(m.Point(), lambda _: None)
    scene.answer(m.Done(), order)
    scene.session.transfer = scene.session.request(m.Point(), lambda _: None)
    scene.line.idle = 61.0
    scene.session.turn(1e6)
    assert scene.line.abandoned == ["no byte moved for 60 s"]


def test_a_remote_that_answers_and_takes_no_upload_is_left_alone_with_uploads(tmp_path: Path) -> None:
    """Looks go on, so that what is safe stays known; one upload at growing intervals probes it."""
    scene = Scene(tmp_path)
    error = NoSpaceError("it is full")
    for _ in range(6):
        assert not scene.session.seconds_to_transfer
        scene.session.note_transfer_failed(error)
        scene.session.note_answer()
    assert scene.session.is_ready
    assert 0 < scene.session.seconds_to_transfer <= 30
    assert "after 6 failures: it is full" in str(scene.session.backed_off)
    may_move = [scene.session.may_transfer]
    order = scene.session.request(m.Point(), lambda _: None)
    scene.session.transfer = order
    scene.answer(m.Done(), order)
    may_move.append(scene.session.may_transfer)
    assert may_move == [False, True]
    assert str(scene.session.backed_off) == "None"


def test_a_remote_that_never_answers_is_left_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for _ in range(6):
        scene.session.note_error(RemoteUnreachable("nobody answers"))
    orders = len(scene.line.orders)
    scene.session.turn(1e9)
    assert len(scene.line.orders) == orders
    assert 20 < scene.session.seconds_to_retry() <= 30
    assert "left alone until" in str(scene.session.backed_off)
