"""Choose the uploads of a node that is about to end, by speed, bytes and the seconds left (ADR 0108).

A committed older checkpoint is worth more than most of a newer one: what fits comes first, newest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.records import WEIGHTS, ZERO
from ckptd.core.policy.view import Drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.policy.view import JobView, RemoteView, SaveView

COMMIT_SECONDS = 2.0
"""Manifest, COMMIT and pointer after the last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSchedule:
    """Schedule the uploads to one remote, in this order, and name what will not be done in time."""

    order: tuple[tuple[SaveView, str], ...] = ()
    """(save, form)."""
    late: tuple[SaveView, ...] = ()
    """Saves that will not be uploaded in time at the speed of the link; tried last, since what is durable
    stays so."""


def plan_drain(view: JobView, drain: Drain, remote: RemoteView, waiting: Sequence[SaveView]) -> DrainSchedule:
    """Plan the drain of one remote over the saves that are to be committed there, newest first.

    `waiting`: complete, with their bytes here, and their ZeRO form not yet committed on that remote.
    """
    if not drain.speeds.get(remote.name):
        return DrainSchedule(order=tuple((save, ZERO) for save in waiting))
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
    return DrainSchedule(order=(*fits, *((save, ZERO) for save in late)), late=tuple(late))


def _may_be_made(view: JobView, remote: RemoteView, save: SaveView) -> bool:
    """Tell whether the shards allow to make the newest checkpoint's model alone now."""
    is_free = not view.is_save_in_flight or remote.uploading_save_id == save.id
    return save.is_intact and save.is_convertible and is_free
