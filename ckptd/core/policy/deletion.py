"""Plan local deletions, each under a permit: the second half of local retention (docs/design.md §5 *Permit*).

`ckptd.core.policy.local` decides what stays, `ckptd.core.policy.planner` orders the turn. A permit is made
only from a recent confirmation of the remote; without one the plan asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.records import ZERO
from ckptd.core.policy.actions import Action, ConfirmCommits, DeleteLocal
from ckptd.core.policy.local import commits_of, is_committed
from ckptd.core.policy.permit import DeletePermit, OptOutPermit, newer_commits, unobserved_remotes
from ckptd.core.policy.remote import is_configured_otherwise

if TYPE_CHECKING:
    from ckptd.core.policy.retention import RetentionVerdict
    from ckptd.core.policy.view import CommitRef, JobView, SaveView

CONFIRMATION_SECONDS = 20.0
"""A confirmation older than this is asked for again, so that a permit made from it is young."""


def deletable_saves(view: JobView, verdicts: dict[int, RetentionVerdict]) -> list[SaveView]:
    """Return the saves on this node that nothing keeps, oldest first."""
    deletable = (s for s in view.saves if s.is_present and not verdicts[s.id].keeps)
    return sorted(deletable, key=lambda s: s.order)


def delete_local(view: JobView, verdicts: dict[int, RetentionVerdict]) -> list[Action]:
    """Oldest first, as many as the hourly limit allows; a hold goes before what it would keep alive."""
    if view.is_first_scan or view.is_save_in_flight or not view.may_delete or view.deletions_left <= 0:
        return []
    if any(is_configured_otherwise(view, remote) for remote in view.remotes):
        return []
    first = [s for s in deletable_saves(view, verdicts) if s.id not in view.not_to_delete][
        : view.deletions_left
    ]
    due = [delete_one(view, save, verdicts[save.id].goes) for save in first if not save.is_held]
    return [action for action in due if action is not None]


def delete_one(view: JobView, save: SaveView, reason: str) -> Action | None:
    """Delete it, ask for what the permit would rest on, or wait for a remote that is away."""
    is_uncommitted = not is_committed(view, save)
    commits = newer_commits(view, save) if is_uncommitted else commits_of(view, save)
    are_there = all(r.is_attached for r in view.remotes if r.is_required)
    if view.unuploaded == "delete" and (is_uncommitted or not are_there):
        return (
            None
            if unobserved_remotes(view)
            else DeleteLocal(save_id=save.id, permit=_by_opt_out(view, save, commits=()))
        )
    confirmed = view.confirmations.get(save.id)
    is_young = confirmed is not None and view.now_seconds - confirmed.at_seconds <= CONFIRMATION_SECONDS
    if confirmed is None or not is_young or confirmed.commits != commits:
        return ConfirmCommits(save_id=save.id, commits=commits) if are_there else None
    if is_uncommitted:
        return DeleteLocal(save_id=save.id, permit=_by_opt_out(view, save, commits))
    permit = DeletePermit(
        tag=save.save.tag,
        generation=_generation(save),
        folder=save.save.folder,
        files=save.save.files + save.added + save.late,
        commits=commits,
        issued_at_seconds=view.now_seconds,
        until_seconds=view.lease.until_seconds if view.lease is not None else None,
        reason=reason,
    )
    return DeleteLocal(save_id=save.id, permit=permit)


def _by_opt_out(view: JobView, save: SaveView, commits: tuple[CommitRef, ...]) -> OptOutPermit:
    keys = ", ".join(dict.fromkeys(ref.key for ref in commits))
    why = f"{keys} is newer" if commits else "no retention key keeps it, committed or not"
    return OptOutPermit(
        tag=save.save.tag,
        generation=_generation(save),
        folder=save.save.folder,
        files=save.save.files + save.added + save.late,
        commits=commits,
        issued_at_seconds=view.now_seconds,
        until_seconds=view.lease.until_seconds if view.lease is not None else None,
        reason=f'unuploaded = "{view.unuploaded}": {why}',
        unuploaded=view.unuploaded,
    )


def _generation(save: SaveView) -> int:
    return max((r.generation or 1 for r in save.uploads.values() if r.form == ZERO), default=1)
