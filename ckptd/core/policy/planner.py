"""Plan the next actions of one job: a pure function from a view to a list of actions (docs/design.md §3, §5).

Permits to delete are made in `ckptd.core.policy.deletion` alone. The daemon executes the actions; a plan that
is not executed changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.records import UNIVERSAL, ZERO, UploadState
from ckptd.core.policy.actions import (
    Action,
    CancelUpload,
    Convert,
    DeleteRemote,
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
    is_open,
    keep_derived,
    kept_until_converted,
    next_to_evict,
    worth_creating,
)
from ckptd.core.policy.drain import drain_actions
from ckptd.core.policy.leases import on_shared
from ckptd.core.policy.local import is_committed, keep_local, was_committed
from ckptd.core.policy.permit import unobserved_remotes
from ckptd.core.policy.remote import commits_to_delete, keep_remote
from ckptd.core.policy.removal import judge_removal, removal_actions, without_removed
from ckptd.core.policy.safety import is_to_upload
from ckptd.core.policy.uploads import early_uploads, next_upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.policy.retention import LocalVerdicts, RetentionVerdict
    from ckptd.core.policy.view import JobView, RemoteCommit, SaveView

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
        drained, actions = drain_actions(view, view.drain)
        actions = [*_rest(view, local), *actions]
    elif view.is_paused:
        actions = _rest(view, local)
        actions += [
            CancelUpload(remote=r.name, reason="paused") for r in view.remotes if r.uploading is not None
        ]
    elif view.removal is not None and view.removal.is_alone:
        actions = [*_rest(view, local), *_released(view), *asked]
    else:
        deletable = deletable_uncommitted(view, local.zero)
        actions += _holds(view, deletable, is_enough=next_to_evict(view, local) is not None)
        due = [action for remote in view.remotes for action in next_upload(view, remote, deletable)]
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
        actions += early_uploads(view, (*actions, *due))
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


def deletable_uncommitted(view: JobView, verdicts: dict[int, RetentionVerdict]) -> frozenset[int]:
    """Uncommitted ones that are about to be removed (`unuploaded`): neither held nor sent any more."""
    if view.unuploaded == "keep" or not view.may_delete or unobserved_remotes(view):
        return frozenset()
    return frozenset(s.id for s in deletable_saves(view, verdicts) if not is_committed(view, s))


def _holds(view: JobView, deletable: frozenset[int], *, is_enough: bool) -> list[Action]:
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
        if s.id in deletable and not s.is_busy
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
        and s.id not in deletable
    ]


def _is_open(view: JobView, save: SaveView) -> bool:
    return not is_committed(view, save) and not save.is_busy


def _was_committed(view: JobView, save: SaveView) -> bool:
    required = [r.name for r in view.remotes if r.is_required]
    return was_committed(save.uploads, required)


def _convert(view: JobView, local: LocalVerdicts) -> list[Action]:
    """Plan one local conversion: newest first; every save if extents clone, else only the newest and those
    that a tier waits for.

    Forms that only remotes take are never made on disk (see `next_upload`).
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
        candidates = commits_to_delete(view, remote, verdicts)
        if not candidates:
            continue
        first = min(candidates, key=lambda c: (c.branch, c.step, c.save_seq, c.form == ZERO))
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
