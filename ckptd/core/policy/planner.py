"""Plan the next actions of one job: a pure function from a view to a list of actions (docs/design.md §3, §5).

Permits to delete are made in `ckptd.core.policy.deletion` alone. The daemon executes the actions; a plan that
is not executed changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.records import UNIVERSAL, WEIGHTS, ZERO, DerivedState, UploadState
from ckptd.core.policy.actions import (
    Action,
    CancelUpload,
    Convert,
    DeleteRemote,
    Describe,
    Drained,
    DropDerived,
    Hold,
    Plan,
    PointUniversal,
    ReleaseHold,
    StopConverting,
    Upload,
    UploadLateFiles,
)
from ckptd.core.policy.deletion import deletable_saves, delete_local
from ckptd.core.policy.derived_forms import (
    PRESSURE,
    is_converted_on_the_fly,
    is_open,
    keep_derived,
    kept_until_converted,
    next_to_evict,
    to_derive,
    worth_creating,
)
from ckptd.core.policy.drain import plan_drain
from ckptd.core.policy.leases import is_committed_elsewhere, on_shared
from ckptd.core.policy.local import is_committed, keep_local, was_committed
from ckptd.core.policy.permit import unobserved_remotes
from ckptd.core.policy.remote import commits_to_delete, keep_remote
from ckptd.core.policy.removal import judge_removal, removal_actions, without_removed
from ckptd.core.policy.safety import is_to_upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.policy.drain import DrainSchedule
    from ckptd.core.policy.local import LocalVerdicts
    from ckptd.core.policy.retention import RetentionVerdict
    from ckptd.core.policy.view import Drain, JobView, RemoteCommit, RemoteView, SaveView

_COMMITTED = "committed"


def plan(view: JobView) -> Plan:
    """Decide one turn."""
    local = keep_local(view)
    remote_fates = keep_remote(view)
    actions: list[Action] = []
    drained: Drained | None = None
    removal = judge_removal(view, local)
    asked = removal_actions(view, removal)
    if view.drain is not None:
        drained, actions = _drain(view, view.drain)
        actions = [*_rest(view, local), *actions]
    elif view.is_paused:
        actions = _rest(view, local)
        actions += [
            CancelUpload(remote=r.name, reason="paused") for r in view.remotes if r.uploading is not None
        ]
    elif view.removal is not None and view.removal.is_alone:
        actions = [*_rest(view, local), *_released(view), *asked]
    else:
        loose = deletable_uncommitted(view, local.zero)
        actions += _holds(view, loose, is_enough=next_to_evict(view, local) is not None)
        due = [action for remote in view.remotes for action in _uploads(view, remote, loose)]
        moves = without_removed(view, removal, due)
        # a remote does one thing at a time: a new ZeRO form comes before what removes, all else after it, so
        # that a link which is never idle, or a remote that is full, still loses what is due
        first = {m.remote for m in moves if isinstance(m, Upload) and _comes_before_removals(view, m)}
        removals = [x for x in _all_remote_deletions(view, remote_fates, asked) if x.remote not in first]
        removing = {action.remote for action in removals}
        actions += [action for action in asked if not isinstance(action, DeleteRemote)]
        actions += [
            m for m in moves if not (isinstance(m, Upload | UploadLateFiles) and m.remote in removing)
        ]
        actions += _convert(view, local)
        actions += [action for action in keep_derived(view, local) if not _is_dropped(action, asked)]
        actions += delete_local(view, local.zero)
        actions += removals
    actions = on_shared(actions, view.lease)
    return Plan(
        actions=tuple(actions),
        local_verdicts=local.zero,
        remote_verdicts=remote_fates,
        drained=drained,
        removal=removal,
    )


def _released(view: JobView) -> list[Action]:
    """Return the releases of holds that nobody needs: a checkpoint that is held is not deleted."""
    return [
        ReleaseHold(save_id=s.id, reason=_COMMITTED)
        for s in view.saves
        if s.is_held and not s.is_busy and _was_committed(view, s) and not view.disk.is_short
    ]


def _is_dropped(action: Action, asked: Sequence[Action]) -> bool:
    """Tell whether a person's `ckptd rm` drops that universal form already."""
    drops = {one.save_id for one in asked if isinstance(one, DropDerived)}
    return isinstance(action, DropDerived) and action.save_id in drops


def _all_remote_deletions(
    view: JobView, verdicts: dict[tuple[str, str], RetentionVerdict], asked: Sequence[Action]
) -> list[DeleteRemote]:
    """Return what a person asked for, and retention's of the other remotes: one COMMIT a remote and turn."""
    named = [action for action in asked if isinstance(action, DeleteRemote)]
    taken = {action.remote for action in named}
    return [*named, *(one for one in _remote_deletions(view, verdicts) if one.remote not in taken)]


def _comes_before_removals(view: JobView, move: Upload) -> bool:
    if move.form != ZERO:
        return False
    save = next(s for s in view.saves if s.id == move.save_id)
    return save.upload(move.remote, ZERO).state is not UploadState.FAILED


def _rest(view: JobView, local: LocalVerdicts) -> list[Action]:
    """Plan the actions that go on while transfers, conversions and deletions rest: holds, freeing space."""
    here = _holds(view, frozenset(), is_enough=next_to_evict(view, local) is not None)
    makes_room = (PRESSURE, _COMMITTED) if view.disk.is_short else ()
    holds = [x for x in here if not isinstance(x, ReleaseHold) or x.reason in makes_room]
    derived = keep_derived(view, local)
    drops = [x for x in derived if isinstance(x, DropDerived) and x.reason == PRESSURE]
    points = [x for x in derived if isinstance(x, PointUniversal) and drops]
    return [*holds, *points, *drops]


def _drain(view: JobView, drain: Drain) -> tuple[Drained, list[Action]]:
    """Required remotes first, each on its course; others only when nothing is missing there (adr/0108)."""
    counts = _counting(view)
    others = [r for r in view.remotes if r not in counts]
    courses = {r.name: _course(view, drain, r) for r in view.remotes}
    missing = open_saves(view)
    late = {s.id for r in counts for s in courses[r.name].late}
    actions: list[Action] = []
    for remote in (*counts, *others):
        may_upload = remote in counts or not missing
        order = courses[remote.name].order if may_upload else ()
        actions += _on_course(view, remote, order)
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


def _course(view: JobView, drain: Drain, remote: RemoteView) -> DrainSchedule:
    willing = [s for s in _open(view, remote) if s.upload(remote.name, ZERO).state is not UploadState.REFUSED]
    return plan_drain(view, drain, remote, willing)


def _on_course(view: JobView, remote: RemoteView, order: Sequence[tuple[SaveView, str]]) -> list[Action]:
    """Go on with what is first, or cancel what is under way for it."""
    if not remote.is_attached:
        return []
    first = next(((s, form) for s, form in order if _is_under_way_or_due(view, s, remote, form)), None)
    if remote.uploading is not None:
        is_right = first is not None and (first[0].id, first[1]) == (
            remote.uploading_save_id,
            remote.uploading,
        )
        return [] if is_right else [CancelUpload(remote=remote.name, reason="draining")]
    if remote.is_busy or first is None:
        return []
    return [_upload_or_describe(view, first[0], remote, first[1], is_streamed=first[1] != ZERO)]


def _is_under_way_or_due(view: JobView, save: SaveView, remote: RemoteView, form: str) -> bool:
    if (remote.uploading_save_id, remote.uploading) == (save.id, form):
        return True
    may_be_made = form == ZERO or (is_converted_on_the_fly(view, save, form) and ZERO in remote.forms)
    return may_be_made and _is_due(view, save, remote, form)


def deletable_uncommitted(view: JobView, verdicts: dict[int, RetentionVerdict]) -> frozenset[int]:
    """Uncommitted ones that are about to be removed (`unuploaded`): neither held nor sent any more."""
    if view.unuploaded == "keep" or not view.may_delete or unobserved_remotes(view):
        return frozenset()
    return frozenset(s.id for s in deletable_saves(view, verdicts) if not is_committed(view, s))


def _holds(view: JobView, loose: frozenset[int], *, is_enough: bool) -> list[Action]:
    """Hold complete, uncommitted saves where extents clone; release them under disk pressure, oldest first.

    `is_enough`: a form that can be made again is deleted first; so is a hold that nobody needs any more.
    """
    held = sorted((s for s in view.saves if s.is_held), key=lambda s: s.order)
    done: list[Action] = [
        ReleaseHold(save_id=s.id, reason=_COMMITTED)
        for s in held
        if _was_committed(view, s) and not s.is_busy
    ]
    done += [
        ReleaseHold(save_id=s.id, reason=f'unuploaded = "{view.unuploaded}"')
        for s in held
        if s.id in loose and not s.is_busy
    ]
    done += [
        ReleaseHold(save_id=s.id, reason="it was there before ckptd and is not to be uploaded")
        for s in held
        if s.is_intact and not s.is_busy and not is_to_upload(view, s) and not _was_committed(view, s)
    ]
    if view.disk.is_short:
        last = None if done or is_enough else next((s for s in held if _is_open(view, s)), None)
        return [*done, *([ReleaseHold(save_id=last.id, reason=PRESSURE)] if last else [])]
    if not view.disk.can_clone or not view.remotes:
        return done
    return done + [
        Hold(save_id=s.id)
        for s in view.saves
        if s.is_intact
        and not s.is_held
        and not s.is_busy
        and not _was_committed(view, s)
        and is_to_upload(view, s)
        and s.id not in loose
    ]


def _is_open(view: JobView, save: SaveView) -> bool:
    return not is_committed(view, save) and not save.is_busy


def _was_committed(view: JobView, save: SaveView) -> bool:
    required = [r.name for r in view.remotes if r.is_required]
    return was_committed(save.uploads, required)


def _uploads(view: JobView, remote: RemoteView, loose: frozenset[int]) -> list[Action]:
    """Choose at most one upload: the newest save's zero form first; derived forms only when no zero form
    waits."""
    if not remote.is_attached:
        return []
    newest_first = sorted(view.saves, key=lambda s: s.order, reverse=True)
    waiting = (s for s in newest_first if s.id not in loose and _is_zero_due(view, s, remote))
    zero = next(waiting, None)
    if remote.is_busy:
        if zero is not None and remote.uploading not in (None, ZERO):
            return [CancelUpload(remote=remote.name)]
        if is_committed_elsewhere(view, remote):
            return [CancelUpload(remote=remote.name, reason="another node was faster")]
        return []
    if zero is not None:
        return [_upload_or_describe(view, zero, remote, ZERO)]
    whole = (s for s in newest_first if s.is_intact and not s.is_busy)
    late = (
        s for s in whole if s.lacking.get(remote.name) and (s.id, remote.name) not in view.not_to_upload_late
    )
    if (save := next(late, None)) is not None:
        return [UploadLateFiles(save_id=save.id, remote=remote.name, files=save.lacking[remote.name])]
    for form in (UNIVERSAL, *WEIGHTS):
        for save in to_derive(view, remote, form) if form in remote.forms else ():
            is_here = save.derived(form).state is DerivedState.READY
            if _is_due(view, save, remote, form) and (is_here or is_converted_on_the_fly(view, save, form)):
                return [_upload_or_describe(view, save, remote, form, is_streamed=not is_here)]
    return []


def _is_zero_due(view: JobView, save: SaveView, remote: RemoteView) -> bool:
    has_source = save.is_intact or save.is_held
    return has_source and _is_due(view, save, remote, ZERO) and is_to_upload(view, save)


def _is_due(view: JobView, save: SaveView, remote: RemoteView, form: str) -> bool:
    if form not in remote.forms:
        return False
    record = save.upload(remote.name, form)
    is_open = record.state in (UploadState.NEW, UploadState.FAILED, UploadState.WAITING)
    return is_open and view.now_seconds >= record.retry_at_seconds


def _upload_or_describe(
    view: JobView, save: SaveView, remote: RemoteView, form: str, *, is_streamed: bool = False
) -> Action:
    answer = view.generations.get((save.id, remote.name, form))
    record = save.upload(remote.name, form)
    attempt = answer.attempt if answer else record.attempt
    if form != ZERO and ZERO in remote.forms:
        zero = view.generations.get((save.id, remote.name, ZERO))
        known = save.upload(remote.name, ZERO).generation or (zero.generation if zero else None)
        if known is None and save.save.tag in remote.known_tags:
            return Describe(remote=remote.name, tag=save.save.tag, save_id=save.id, form=ZERO)
        generation = known or 1
    elif answer is None and save.save.tag in remote.known_tags:
        return Describe(remote=remote.name, tag=save.save.tag, save_id=save.id, form=form)
    else:
        generation = answer.generation if answer else 1
    return Upload(
        save_id=save.id,
        remote=remote.name,
        form=form,
        generation=generation,
        attempt=attempt,
        is_streamed=is_streamed,
    )


def _convert(view: JobView, local: LocalVerdicts) -> list[Action]:
    """Plan one local conversion: newest first; every save if extents clone, else only the newest and those
    that a tier waits for.

    Forms that only remotes take are never made on disk (see `_uploads`).
    """
    if view.is_converting and view.disk.is_full:
        return [StopConverting(reason=PRESSURE)]
    if view.is_converting or view.is_save_in_flight or UNIVERSAL not in view.local_forms:
        return []
    whole = (s for s in view.saves if s.is_intact and s.is_convertible)
    candidates = sorted(whole, key=lambda s: s.order, reverse=True)
    candidates = [s for s in candidates if s.is_adopted or not s.was_found_first or s is candidates[0]]
    if not view.disk.can_clone:
        newest, verdicts = candidates[:1], local.zero
        candidates = newest + [s for s in candidates[1:] if kept_until_converted(s, verdicts.get(s.id))]
    due = [s for s in candidates if is_open(s.universal, view.now_seconds)]
    for save in worth_creating(view, local, due) if due else ():
        cost_bytes = 0 if view.disk.can_clone else save.save.total_bytes
        if view.disk.free_bytes - cost_bytes < view.disk.reserve_bytes:
            return []
        return [Convert(save_id=save.id)]
    return []


def _remote_deletions(view: JobView, verdicts: dict[tuple[str, str], RetentionVerdict]) -> list[DeleteRemote]:
    """Remote retention, one COMMIT per remote and turn: derived forms of what goes, then the zero form."""
    if view.is_first_scan or not view.may_delete:
        return []
    actions: list[DeleteRemote] = []
    for remote in view.remotes:
        if not remote.is_attached or remote.is_busy or remote.deletions_left <= 0:
            continue
        willing = commits_to_delete(view, remote, verdicts)
        if not willing:
            continue
        first = min(willing, key=lambda c: (c.branch, c.step, c.save_seq, c.form == ZERO))
        verdict = verdicts[remote.name, first.key]
        instead = next((c for c in remote.commits if _stays_instead(first, c, verdict.instead)), None)
        if instead is None and verdict.instead is not None:
            continue
        reason = f"{verdict.goes} of {remote.name}"
        counted = tuple(c.sha256 for c in remote.commits if verdicts[remote.name, c.key].keeps)
        actions.append(
            DeleteRemote(remote=remote.name, commit=first, reason=reason, instead=instead, counted=counted)
        )
    return actions


def _stays_instead(gone: RemoteCommit, other: RemoteCommit, form: str | None) -> bool:
    return (other.tag, other.generation, other.form) == (gone.tag, gone.generation, form)
