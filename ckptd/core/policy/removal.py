"""Decide what `ckptd rm` may delete, here and in remotes: a pure function of the view (docs/adr/0199).

A person's word stands in place of the retention keys and of the hourly limit alone. Every other reason to
keep a checkpoint holds, and each deletion is executed as retention's are: here with a permit that rests on
verified COMMITs, in a remote behind a tombstone.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState
from ckptd.core.policy.actions import CancelUpload, DeleteRemote, DropDerived, RemovalRow, Upload
from ckptd.core.policy.deletion import delete_one
from ckptd.core.policy.local import BEING_READ, best_here, best_there, is_committed, resumed_tag
from ckptd.core.policy.remote import generations_of, is_configured_otherwise
from ckptd.core.policy.view import HERE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.policy.actions import Action
    from ckptd.core.policy.remote import Generation
    from ckptd.core.policy.retention import LocalVerdicts
    from ckptd.core.policy.view import JobView, RemoteView, RemovalRequest, SaveView

_STATUS = "`ckptd status JOB` says why"
_POINTED = "latest_universal names it"
_NEWER_UNIVERSAL = "it may be deleted once the universal form of a newer one is made"
_LATER = "it may be deleted once a newer one is committed"


def judge_removal(view: JobView, local: LocalVerdicts) -> tuple[RemovalRow, ...]:
    """Say of each checkpoint that a person named what becomes of it in each place that holds it."""
    removal = view.removal
    if removal is None:
        return ()
    rows: list[RemovalRow] = []
    for tag in dict.fromkeys(removal.tags):
        here = _judge_here(view, local, removal, tag)
        if removal.is_here and here is not None:
            rows.append(here)
        for remote in view.remotes:
            if remote.name in removal.remotes:
                there = _judge_there(view, remote, removal, tag, here)
                rows += [there] if there is not None else []
    return _with_damaged(view, rows)


def removal_actions(view: JobView, rows: Iterable[RemovalRow]) -> list[Action]:
    """Return the deletions that a person agreed to and that may begin now.

    The copy here goes first, for its permit rests on the COMMITs; of a remote one COMMIT a turn, derived
    forms before the ZeRO form.
    """
    removal = view.removal
    if removal is None or removal.agreed is None:
        return []
    actions: list[Action] = []
    busy: set[str] = set()
    for row in rows:
        if row.verdict != "delete":
            continue
        if row.remote is None:
            actions += _delete_here(view, removal, row.tag)
        elif row.remote not in busy and not _needs_commits(view, row.remote, row.tag):
            action = _delete_there(view, removal, row)
            if action is not None:
                busy.add(row.remote)
                actions.append(action)
    return actions


def without_removed(view: JobView, rows: Iterable[RemovalRow], moves: Iterable[Action]) -> list[Action]:
    """Return uploads but for those of checkpoints that are being deleted."""
    if view.removal is None or view.removal.agreed is None:
        return list(moves)
    tags = {row.tag for row in rows if row.verdict in ("delete", "wait")}
    gone = {save.id for save in view.saves if save.save.tag in tags}
    return [move for move in moves if not (isinstance(move, Upload) and move.save_id in gone)]


# --- this node -------------------------------------------------------------------------------------------


def _judge_here(view: JobView, local: LocalVerdicts, removal: RemovalRequest, tag: str) -> RemovalRow | None:
    save, made = _present(view, tag), _made_of(view, tag)
    if save is None and tag in view.unsealed_tags:
        why = "it is not a complete checkpoint that ckptd knows"
        way = f"`ckptd gc JOB --incomplete {shlex.quote(tag)}` deletes an interrupted one"
        return RemovalRow(tag=tag, remote=None, verdict="keep", why=why, next_step=way)
    if save is None:
        return _judge_made(view, tag, made) if made is not None else _being_deleted(view, tag)
    digests = _digests(view, save)
    row = RemovalRow(
        tag=tag,
        remote=None,
        verdict="delete",
        forms=(ZERO, UNIVERSAL) if made is not None else (ZERO,),
        bytes=save.save.total_bytes,
        commits=digests,
    )
    if (obstacle := _obstacle(view, row, [r for r in view.remotes if r.is_required])) is not None:
        return obstacle
    if reasons := [text for text in local.forbidden[save.id] if text != BEING_READ]:
        return _row(row, "keep", "; ".join(reasons), _way_out(view, save))
    if made is not None and _is_pointed_at(view, tag):
        return _row(row, "keep", _POINTED, _NEWER_UNIVERSAL)
    if removal.agreed is not None and not set(digests) <= removal.agreed:
        return _row(row, "keep", "it was saved or committed again meanwhile", "type it again")
    if view.is_save_in_flight:
        return _row(row, "wait", "a save is being written")
    if save.is_busy or save.is_held:
        return _row(row, "wait", BEING_READ)
    if save.id in view.not_to_delete:
        return _row(row, "wait", "deleting it failed and is tried again", _STATUS)
    return row


def _being_deleted(view: JobView, tag: str) -> RemovalRow | None:
    """Return a row while the folder lies in the trash: its deletion is not noted as done yet."""
    if not any(s.save.tag == tag and s.is_pruned and not s.is_present and not s.is_held for s in view.saves):
        return None
    return RemovalRow(tag=tag, remote=None, verdict="wait", why="its files are being removed")


def _judge_made(view: JobView, tag: str, made: SaveView) -> RemovalRow | None:
    """Judge a universal form of a checkpoint whose folder is gone from here."""
    row = RemovalRow(tag=tag, remote=None, verdict="delete", forms=(UNIVERSAL,))
    if (obstacle := _obstacle(view, row, [r for r in view.remotes if r.is_required])) is not None:
        return obstacle
    if made.is_pinned:
        return _row(row, "keep", "pinned", _unpin(tag))
    if _is_pointed_at(view, tag):
        return _row(row, "keep", _POINTED, _NEWER_UNIVERSAL)
    if not any(c.tag == tag and c.order == made.order for remote in view.remotes for c in remote.commits):
        return _row(row, "keep", "no remote holds it: this is its last copy", "`ckptd status JOB` lists it")
    return _row(row, "wait", BEING_READ) if made.is_busy else row


def _delete_here(view: JobView, removal: RemovalRequest, tag: str) -> list[Action]:
    save, made = _present(view, tag), _made_of(view, tag)
    if save is not None:
        action = delete_one(view, save, _reason(removal))
        return [action] if action is not None else []
    if made is not None and not made.is_busy and not _is_pointed_at(view, tag):
        return [DropDerived(save_id=made.id, reason=_reason(removal))]
    return []


def _present(view: JobView, tag: str) -> SaveView | None:
    return next((s for s in view.saves if s.save.tag == tag and s.is_present), None)


def _made_of(view: JobView, tag: str) -> SaveView | None:
    """Return the save of that tag whose universal form lies here."""
    made = (s for s in view.saves if s.save.tag == tag and s.universal.state is DerivedState.READY)
    return next(made, None)


def _is_pointed_at(view: JobView, tag: str) -> bool:
    return (view.latest_universal or "").rpartition("/")[2] == tag


def _digests(view: JobView, save: SaveView) -> tuple[str, ...]:
    found = (save.upload(r.name, ZERO).commit_sha256 for r in view.remotes if r.is_required)
    return tuple(sha256 for sha256 in found if sha256)


def _way_out(view: JobView, save: SaveView) -> str:
    """Say what a person would do first to have it deleted all the same."""
    tag = shlex.quote(save.save.tag)
    if save.is_pinned:
        return _unpin(save.save.tag)
    if not save.is_adopted:
        return f"`ckptd accept JOB --existing {tag}` uploads it and puts it under the same rules as any other"
    if not is_committed(view, save):
        return "only what a verified COMMIT lists is deleted here: `ckptd drain JOB` uploads it"
    return _STATUS if save.has_unlisted else _LATER


def _unpin(tag: str) -> str:
    return f"`ckptd pin JOB {shlex.quote(tag)} --remove` first"


# --- a remote --------------------------------------------------------------------------------------------


def _judge_there(
    view: JobView, remote: RemoteView, removal: RemovalRequest, tag: str, here: RemovalRow | None
) -> RemovalRow | None:
    generations = generations_of(remote)
    mine = [g for g in generations if g.leader.tag == tag]
    forms = tuple(dict.fromkeys(form for g in mine for form in sorted(g.commits, key=lambda f: f != ZERO)))
    digests = tuple(g.leader.sha256 for g in mine)
    row = RemovalRow(tag=tag, remote=remote.name, verdict="delete", forms=forms, commits=digests)
    if not remote.is_attached or not remote.was_heard:
        return _row(row, "unknown", f"{remote.name} has not answered", _STATUS)
    if not mine:
        is_begun = tag in remote.deleting_tags
        return _row(row, "wait", "its deletion is being finished") if is_begun else None
    required = [r for r in view.remotes if r.is_required]
    if (obstacle := _obstacle(view, row, [*required, remote])) is not None:
        return obstacle
    if (kept := _kept_there(view, remote, removal, mine, generations)) is not None:
        return _row(row, "keep", *kept)
    if remote.is_required and _present(view, tag) is not None:
        if not removal.is_here:
            both = f"`ckptd rm JOB {shlex.quote(tag)}` deletes both"
            return _row(row, "keep", "its copy on this node rests on it", both)
        if here is not None and here.verdict == "keep":
            return _row(row, "keep", "its copy on this node stays and rests on it")
    if removal.agreed is not None and not set(digests) <= removal.agreed:
        return _row(row, "keep", "it was committed again meanwhile", "type it again")
    if any((remote.name, c.sha256) in view.not_to_delete_remotely for g in mine for c in g.commits.values()):
        return _row(row, "wait", f"{remote.name} did not delete it a short while ago", _STATUS)
    return row


def _kept_there(
    view: JobView,
    remote: RemoteView,
    removal: RemovalRequest,
    mine: list[Generation],
    all_there: list[Generation],
) -> tuple[str, str] | None:
    """Return why nobody may delete it from the remote, and what to do; None: nothing forbids it."""
    lead = mine[-1].leader
    tag = lead.tag
    if tag in view.pinned_tags:
        return "pinned", _unpin(tag)
    tops = [max(g.order for g in all_there if g.leader.is_model_only == kind) for kind in _kinds(mine)]
    if any(g.order in tops for g in mine):
        return "the newest that is committed there", _LATER
    if tag in (best_here(view), best_there(remote)):
        return "best_model_checkpoint", "it may be deleted once a later one is the best"
    if tag == view.latest:
        return "latest names it", _LATER
    if tag == resumed_tag(view):
        return "resumed from, and nothing saved since is committed", _LATER
    if tag in view.unsealed_tags:
        return "a checkpoint of that name lies here that is not judged yet", "type it again in a while"
    others = sorted({node for g in mine for c in g.commits.values() for node in c.nodes} - {view.node})
    if others and view.lease is None and not removal.is_remote_named:
        quoted = shlex.quote(tag)
        way = (
            f"there `ckptd rm JOB {quoted} --local`, then here `ckptd rm JOB {quoted} --remote {remote.name}`"
        )
        return f"the copies of other nodes rest on it ({', '.join(others[:3])})", way
    return None


def _kinds(generations: list[Generation]) -> set[bool]:
    return {g.leader.is_model_only for g in generations}


def _delete_there(view: JobView, removal: RemovalRequest, row: RemovalRow) -> Action | None:
    remote = next(r for r in view.remotes if r.name == row.remote)
    if remote.is_busy:
        sent = next((s.save.tag for s in view.saves if s.id == remote.uploading_save_id), None)
        is_in_the_way = sent == row.tag and remote.uploading not in (None, ZERO)
        return CancelUpload(remote=remote.name, reason=_reason(removal)) if is_in_the_way else None
    generations = generations_of(remote)
    mine = next(g for g in generations if g.leader.tag == row.tag)
    commit = min(mine.commits.values(), key=lambda c: (c.form == ZERO, c.form))
    newer = tuple(c.sha256 for g in generations if g.order > mine.order for c in g.commits.values())
    return DeleteRemote(remote=remote.name, commit=commit, reason=_reason(removal), counted=newer)


def _needs_commits(view: JobView, name: str, tag: str) -> bool:
    """Tell whether the copy here, which goes first, still rests on that remote's COMMIT."""
    is_required = any(r.name == name and r.is_required for r in view.remotes)
    return is_required and _present(view, tag) is not None


# --- both ------------------------------------------------------------------------------------------------


def _with_damaged(view: JobView, rows: list[RemovalRow]) -> tuple[RemovalRow, ...]:
    """Keep a copy that may repair a damaged one elsewhere, unless the damaged one goes as well."""
    there = {(remote.name, commit.tag) for remote in view.remotes for commit in remote.commits}
    there |= {(HERE, save.save.tag) for save in view.saves if save.is_present}
    going = {(row.remote or HERE, row.tag) for row in rows if row.verdict in ("delete", "wait")}
    staying = {(place, tag) for place, tag, _ in view.damaged} & there - going
    places = {tag: place for place, tag in staying}
    return tuple(
        _for_repair(row, places[row.tag]) if row.verdict == "delete" and row.tag in places else row
        for row in rows
    )


def _for_repair(row: RemovalRow, place: str) -> RemovalRow:
    where = "here" if place == HERE else f"on {place}"
    way = f"`ckptd rm JOB {shlex.quote(row.tag)}` deletes both"
    return _row(row, "keep", f"it may repair the copy {where}, which is damaged", way)


def _obstacle(view: JobView, row: RemovalRow, remotes: list[RemoteView]) -> RemovalRow | None:
    """Return the row with what keeps this job from deleting anything; None: nothing does."""
    if view.drain is not None:
        return _row(row, "keep", "the job is being drained", "type it again when the drain is over")
    if view.is_paused:
        why = "the job is paused, or another host works on this directory"
        return _row(row, "keep", why, "`ckptd pause JOB --off`")
    if view.is_first_scan:
        return _row(row, "unknown", "the job has just started")
    if silent := [r.name for r in remotes if not r.is_attached or not r.was_heard]:
        return _row(row, "unknown", f"{silent[0]} has not answered", _STATUS)
    if not view.may_delete:
        return _row(row, "keep", "deletions rest", _STATUS)
    if view.lease is not None and not view.lease.holds_lease:
        return _row(row, "keep", "another host of this directory deletes", "type it there")
    if any(is_configured_otherwise(view, remote) for remote in view.remotes):
        return _row(row, "keep", "the job's nodes are configured otherwise", _STATUS)
    return None


def _row(
    row: RemovalRow, verdict: Literal["unknown", "wait", "keep"], why: str, next_step: str = ""
) -> RemovalRow:
    return replace(row, verdict=verdict, why=why, next_step=next_step)


def _reason(removal: RemovalRequest) -> str:
    return f"ckptd rm by {removal.by}" if removal.by else "ckptd rm"
