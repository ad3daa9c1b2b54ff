"""What is sent when the node is about to go: a rule over links, bytes and the seconds left (docs/adr/0108).

A committed older checkpoint is worth more than most of a newer one: what fits comes first, newest first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.core.policy.view import WEIGHTS, ZERO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptd.core.policy.view import JobView, RemoteView, SaveView

COMMIT_SECONDS = 2.0
"""Manifest, COMMIT and pointer after the last byte."""
BEGUN_FACTOR = 1.25
"""What is under way stays while it would be late by no more than this: an estimate wanders."""
WEIGHTS_SHARE = {"weights-fp32": 1 / 3, "weights-bf16": 1 / 6, "weights-fp16": 1 / 6}
"""Bytes of a model beside those of its ZeRO form, at most: masters and two moments in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """What the planner sees of a drain."""

    seconds_left: float
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Remote → bytes per second, as last measured; a remote of which nothing is known is missing."""
    left_bytes: Mapping[tuple[int, str, str], int] = field(default_factory=dict)
    """(save id, remote, form) → bytes that are still to be sent, where it was begun."""

    def needs_seconds(self, remote: RemoteView, save: SaveView, form: str) -> float:
        """At the speed of the link, which must be known; what is under way is given some patience."""
        whole = save.save.total_bytes * WEIGHTS_SHARE.get(form, 1.0)
        seconds = self.left_bytes.get((save.id, remote.name, form), whole) / self.speeds[remote.name]
        is_begun = (remote.ships_save, remote.ships) == (save.id, form)
        return seconds / BEGUN_FACTOR if is_begun else seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """For one remote: what to send, in this order, and what will not make it."""

    order: tuple[tuple[SaveView, str], ...] = ()
    """(save, form)."""
    late: tuple[SaveView, ...] = ()
    """At the speed of the link; tried last all the same, for what is durable is not sent again."""


def course(view: JobView, drain: Drain, remote: RemoteView, waiting: Sequence[SaveView]) -> Course:
    """The course of one remote over the saves that are to be committed there, newest first.

    `waiting`: complete, with their bytes here, and their ZeRO form not yet committed on that remote.
    """
    if not drain.speeds.get(remote.name):
        return Course(order=tuple((save, ZERO) for save in waiting))
    left_seconds = max(0.0, drain.seconds_left - COMMIT_SECONDS)
    fits: list[tuple[SaveView, str]] = []
    late: list[SaveView] = []
    for save in waiting:
        needs_seconds = drain.needs_seconds(remote, save, ZERO)
        if needs_seconds <= left_seconds:
            fits.append((save, ZERO))
            left_seconds -= needs_seconds
        else:
            late.append(save)
    if late and late[0] is waiting[0] and _may_be_made(view, remote, late[0]):
        forms = [form for form in WEIGHTS if form in remote.forms]
        least = (form for form in forms if drain.needs_seconds(remote, late[0], form) <= left_seconds)
        fits += [(late[0], form) for form in least][:1]
    return Course(order=(*fits, *((save, ZERO) for save in late)), late=tuple(late))


def _may_be_made(view: JobView, remote: RemoteView, save: SaveView) -> bool:
    """The newest checkpoint's model alone, of its shards."""
    is_free = not view.is_save_in_flight or remote.ships_save == save.id
    return save.is_intact and save.is_convertible and is_free
