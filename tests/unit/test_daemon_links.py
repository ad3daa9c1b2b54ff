"""A remote as the deciding thread sees it: looks that come too late, what "unchanged" means, idleness."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ckptd.core.manifest import RemoteIdentity
from ckptd.daemon.links import RemoteLink
from ckptd.daemon.problems import Problems
from ckptd.remote import messages as m
from ckptd.remote.store import Abilities

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.remote.client import RemoteClient

IDENTITY = RemoteIdentity(format="1.0", remote_id="r", job_id="j", job="job", created="")
BEFORE = m.Observation(identity=IDENTITY, commits=())
AFTER = m.Observation(identity=IDENTITY, commits=(), latest="global_step1")


class Line:
    """In the client's place: remembers orders; the test answers them."""

    stalled_seconds = 0.0

    def __init__(self) -> None:
        self.orders: list[m.Order] = []

    def submit(self, order: m.Order) -> int:
        self.orders.append(order)
        return len(self.orders)


class Scene:
    """A link that is attached and has observed `BEFORE`."""

    def __init__(self, tmp_path: Path) -> None:
        settings = m.RemoteSettings(
            name="nas", url=str(tmp_path), job="job", save_dir="/x", node="n", node_id="i"
        )
        self.wakes = 0
        self.line = Line()
        self.link = RemoteLink(settings, Problems(), lambda call: call(), lambda _: None, self.wake)
        self.link._client = cast("RemoteClient", self.line)
        self.link.turn(1e6)
        self.answer(
            m.Attached(
                identity=IDENTITY, abilities=Abilities(create_only=True, checksum=None, resumable=True)
            )
        )
        assert self.link.open_orders == 1, "the first look is work: without it nothing is decided"
        self.answer(BEFORE)

    def wake(self) -> None:
        self.wakes += 1

    def answer(self, answer: m.Answer, to: int | None = None) -> None:
        """To the newest order, or that one."""
        self.link._deliver(to or len(self.line.orders), answer)

    @property
    def asked(self) -> m.Order:
        return self.line.orders[-1]


def test_a_look_that_came_too_late_is_asked_for_in_full_again(tmp_path: Path) -> None:
    """It was thrown away, so the child's "nothing new since then" would hide the COMMIT for ever."""
    scene = Scene(tmp_path)
    scene.link.ship_order = ship = scene.link.order(m.Point(), lambda _: None)
    scene.link.observe()
    look = len(scene.line.orders)
    assert scene.asked == m.Observe(only_changed=True)
    scene.answer(m.Done(), ship)
    scene.answer(AFTER, look)
    assert scene.link.observation == BEFORE, "asked before our change: out of date"
    assert scene.asked == m.Observe(only_changed=False)
    scene.answer(AFTER)
    assert scene.link.observation == AFTER
    scene.link.observe()
    assert scene.asked == m.Observe(only_changed=True)


def test_unchanged_that_was_asked_before_our_change_is_asked_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.link.ship_order = ship = scene.link.order(m.Point(), lambda _: None)
    scene.link.observe()
    look = len(scene.line.orders)
    scene.answer(m.Done(), ship)
    scene.answer(m.Unchanged(), look)
    assert len(scene.line.orders) == look + 1
    scene.answer(AFTER)
    assert scene.link.observation == AFTER


def test_only_the_regular_look_is_no_work(tmp_path: Path) -> None:
    """A look for what we changed ourselves is: retention rests on it, and `--once` must not end before."""
    scene = Scene(tmp_path)
    scene.link.turn(1e9)
    assert scene.asked == m.Observe(only_changed=True)
    assert scene.link.open_orders == 0
    scene.answer(m.Unchanged())
    scene.link.observe()
    assert scene.link.open_orders == 1
    scene.answer(m.Unchanged())
    scene.link.turn(2e9)
    look = len(scene.line.orders)
    scene.link.ship_order = ship = scene.link.order(m.Point(), lambda _: None)
    scene.answer(m.Done(), ship)
    assert scene.link.open_orders == 1, "the regular one under way will be asked again"
    scene.answer(m.Unchanged(), look)
    assert scene.link.open_orders == 1


def test_trouble_makes_the_job_plan_again(tmp_path: Path) -> None:
    """What status calls safe rests on the observation that is gone now."""
    scene = Scene(tmp_path)
    before = scene.wakes
    scene.link.observe()
    scene.answer(m.Failed(error="RemoteUnreachable", message="gone"))
    assert scene.link.observation is None
    assert scene.wakes > before
