"""Plan the uploads of a node that is about to end, by speed, bytes and the seconds left (ADR 0108).

A committed older checkpoint is worth more than most of a newer one: what fits comes first, newest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.records import WEIGHTS, ZERO, UploadState
from ckptd.core.policy.actions import Action, CancelUpload, Drained
from ckptd.core.policy.derived_forms import is_converted_on_the_fly
from ckptd.core.policy.safety import is_to_upload
from ckptd.core.policy.uploads import is_due, is_early_file, upload_or_describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.policy.view import Drain, JobView, RemoteView, SaveView

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


def drain_actions(view: JobView, drain: Drain) -> tuple[Drained, list[Action]]:
    """Required remotes first, each by its schedule; others only when nothing is missing there (adr/0108)."""
    counts = _counting(view)
    others = [r for r in view.remotes if r not in counts]
    schedules = {r.name: _schedule(view, drain, r) for r in view.remotes}
    missing = open_saves(view)
    late = {s.id for r in counts for s in schedules[r.name].late}
    actions: list[Action] = []
    for remote in (*counts, *others):
        may_upload = remote in counts or not missing
        order = schedules[remote.name].order if may_upload else ()
        actions += _follow(view, remote, order)
    tags = tuple(s.save.tag for s in missing)
    return Drained(missing=tags, late=tuple(s.save.tag for s in missing if s.id in late)), actions


def open_saves(view: JobView) -> list[SaveView]:
    """Complete here and not committed on every required remote, newest first."""
    found = {s.id: s for remote in _counting(view) for s in _open(view, remote)}
    return sorted(found.values(), key=lambda s: s.order, reverse=True)


def _counting(view: JobView) -> list[RemoteView]:
    return [r for r in view.remotes if r.is_required] or list(view.remotes)


def _open(view: JobView, remote: RemoteView) -> list[SaveView]:
    """Complete here and not committed there, newest first: also what nothing can be done about."""
    done = (UploadState.COMMITTED, UploadState.DELETED)
    return [
        s
        for s in sorted(view.saves, key=lambda s: s.order, reverse=True)
        if ZERO in remote.forms
        and (s.is_intact or s.is_held)
        and s.upload(remote.name, ZERO).state not in done
        and is_to_upload(view, s)
    ]


def _follow(view: JobView, remote: RemoteView, order: Sequence[tuple[SaveView, str]]) -> list[Action]:
    """Go on with what is first, or cancel what is under way for it."""
    if not remote.is_attached:
        return []
    first = next(((s, form) for s, form in order if _is_under_way_or_due(view, s, remote, form)), None)
    if remote.uploading is not None:
        now = remote.uploading_save_id, remote.uploading
        is_right = first is not None and ((first[0].id, first[1]) == now or is_early_file(first[0], remote))
        return [] if is_right else [CancelUpload(remote=remote.name, reason="draining")]
    if remote.is_busy or first is None:
        return []
    return [upload_or_describe(view, first[0], remote, first[1], is_streamed=first[1] != ZERO)]


def _is_under_way_or_due(view: JobView, save: SaveView, remote: RemoteView, form: str) -> bool:
    if (remote.uploading_save_id, remote.uploading) == (save.id, form):
        return True
    may_be_made = form == ZERO or (is_converted_on_the_fly(view, save, form) and ZERO in remote.forms)
    return may_be_made and is_due(view, save, remote, form)


def _schedule(view: JobView, drain: Drain, remote: RemoteView) -> DrainSchedule:
    """Schedule the saves that are to be committed on one remote, newest first."""
    waiting = [s for s in _open(view, remote) if s.upload(remote.name, ZERO).state is not UploadState.REFUSED]
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
