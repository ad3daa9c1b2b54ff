"""What does not leave this node, and what may not leave it or a remote: seen anew by each turn (P17).

Apart from checks.py. Reads the job's memory only; a problem is over once what it was about is tried with
success, is not wanted any more, or is gone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd.core.view import SETTLED, ZERO, ShipState
from ckptd.daemon.orders import hold_name
from ckptd.daemon.standstill import NEXT_STEP, STILL_SECONDS
from ckptd.daemon.unfinished import is_proven_damaged, removal_of_hold, way_out

if TYPE_CHECKING:
    from ckptd.config_model import RemoteConfig
    from ckptd.core.rows import SaveRow
    from ckptd.core.view import ShipRecord
    from ckptd.daemon.job import Job
    from ckptd.daemon.problems import Problems, Severity
    from ckptd.daemon.state import JobState

MANY_TRIES = 3
_REBUILT = "nothing to do: it was rebuilt from disk and remote"
_TRIED_AGAIN = (ShipState.NEW, ShipState.SHIPPING)


def see_stuck(job: Job, state: JobState) -> None:
    """For as long as each turn sees them."""
    see_uploads(job, state)
    _see_late(job, state)
    see_prunes(job.problems, state)
    _see_retirements(job, state)
    _see_holds(job, state)
    _see_still(job)
    _forget_stalls(job, state)
    aside = state.journal.set_aside
    if aside is not None and os.path.exists(aside):
        text = f"an unreadable journal lies in {aside}"
        job.problems.see("journal-set-aside", str(aside), text, _REBUILT)


def see_uploads(job: Job, state: JobState) -> None:
    """Of checkpoints that are here or held: what is damaged, and what failed again and again."""
    remotes = {remote.name: remote for remote in job.config.remotes}
    for save_id, records in state.ships.items():
        row = state.rows.get(save_id)
        if row is None or not (row.state == "present" or row.held):
            continue
        for record in records.values():
            remote = remotes.get(record.remote)
            if remote is None or record.form not in remote.forms or _is_past(state, remote, row, record):
                continue
            about = f"{row.save.tag} → {record.remote}"
            text = f"{about}: {record.reason}"
            is_damaged = record.is_damaged or is_proven_damaged(record)
            if is_damaged and record.state in _TRIED_AGAIN:
                job.problems.stays("source-damaged", about)
            elif is_damaged:
                job.problems.see("source-damaged", about, text, _cure(job, state, row, record))
            elif record.tries >= MANY_TRIES and record.state is ShipState.FAILED:
                job.problems.see("upload-failed", about, text, record.hint)
            elif record.tries >= MANY_TRIES and record.state in _TRIED_AGAIN:
                job.problems.stays("upload-failed", about)


def _see_late(job: Job, state: JobState) -> None:
    """Until they are committed or gone, or their save is."""
    saves = {save.id: save for save in job.view.saves} if state.late_unsent and job.view is not None else {}
    for (save_id, remote), unsent in list(state.late_unsent.items()):
        save = saves.get(save_id)
        if save is not None and save.lacking.get(remote):
            job.problems.see("upload-failed", f"{unsent.about} (late)", unsent.text, unsent.hint)
        else:
            del state.late_unsent[save_id, remote]


def _is_past(state: JobState, remote: RemoteConfig, row: SaveRow, record: ShipRecord) -> bool:
    """Committed, by whomever; or a form that nothing will try again, since that remote has a newer save."""
    if record.state in (ShipState.COMMITTED, ShipState.RETIRED):
        return True
    if record.form == ZERO or record.state is not ShipState.WAITING or remote.policy.has_rung(record.form):
        return False
    newer = (
        r for r in state.rows.values() if r.save.order > row.save.order and not r.save.grid.is_model_only
    )
    return any(state.ship(one.id, record.remote, ZERO).state is ShipState.COMMITTED for one in newer)


def _cure(job: Job, state: JobState, row: SaveRow, record: ShipRecord) -> str:
    if record.form != ZERO:
        return record.hint
    if row.state != "present":
        return f"ckptd never removes its last copy: {removal_of_hold(job, hold_name(row))}"
    command, what = way_out(job, state, row.save.tag)
    return f"{record.hint}; {command} {what}".removeprefix("; ")


def see_prunes(problems: Problems, state: JobState) -> None:
    """What may go and could not, unless somebody keeps it by now."""
    for save_id, stays in list(state.prune_blocked.items()):
        row = state.rows.get(save_id)
        fate = state.plan.local_fates.get(save_id) if state.plan is not None else None
        if row is None or row.state != "present" or (fate is not None and fate.keeps):
            del state.prune_blocked[save_id]
            continue
        severity: Severity | None = "note" if stays.is_brief else None
        tag = row.save.tag
        problems.see("prune-blocked", tag, f"{tag} stays: {stays.text}", stays.hint, severity=severity)


def _see_retirements(job: Job, state: JobState) -> None:
    for (remote, sha256), refusal in list(state.retire_refused.items()):
        if _is_wanted_gone(job, state, remote, sha256):
            job.problems.see("retire-blocked", refusal.about, refusal.text, refusal.hint)
        else:
            del state.retire_refused[remote, sha256]


def _is_wanted_gone(job: Job, state: JobState, remote: str, sha256: str) -> bool:
    """The remote still holds it, and nothing keeps it there; as long as it is away, nobody knows."""
    link = job.links.get(remote)
    seen = link.observation if link is not None else None
    if seen is None:
        return link is not None
    for stone in seen.retired:
        if stone.commit_sha256 == sha256 and (stone.tag, stone.generation, stone.form) in seen.retiring:
            return True
    fates = state.plan.remote_fates if state.plan is not None else {}
    found = [fates.get((remote, view.key)) for view in seen.commits if view.sha256 == sha256]
    return any(fate is None or not fate.keeps for fate in found)


def _see_holds(job: Job, state: JobState) -> None:
    """Until what lost its hold is committed, or gone: then `vanished-uncommitted` tells."""
    for save_id, text in list(state.holds_released.items()):
        row = state.rows.get(save_id)
        required = [remote.name for remote in job.config.remotes if remote.required]
        is_safe = all(state.ship(save_id, name, ZERO).state in SETTLED for name in required)
        if row is None or row.state != "present" or row.held or is_safe:
            del state.holds_released[save_id]
        else:
            job.problems.see("hold-released", row.save.tag, text, "free space, or save less often")


def _see_still(job: Job) -> None:
    """Before it is cut (links.py): a note, for a flush may last so long."""
    cut = {problem.about for problem in job.problems.all() if problem.code == "transfer-stalled"}
    for link in job.links.values():
        if link.name not in cut and (seconds := link.still_seconds) >= STILL_SECONDS:
            waits = f"has not answered for {seconds // 10 * 10:.0f} s"
            text = f"remote {link.name} {waits}: no byte of what is under way has moved"
            job.problems.see("transfer-stalled", f"{link.name} (under way)", text, NEXT_STEP, severity="note")


def _forget_stalls(job: Job, state: JobState) -> None:
    """An upload that was cut goes on; where nothing is left to send or remove, no byte will ever move."""
    busy = {
        record.remote
        for row in state.rows.values()
        if row.state == "present" or row.held
        for record in state.ships.get(row.id, {}).values()
        if record.state in (ShipState.FAILED, *_TRIED_AGAIN)
    }
    busy |= {getattr(action, "remote", "") for action in state.plan.actions} if state.plan else set()
    for link in job.links.values():
        if not link.is_shipping and link.name not in busy:
            job.problems.clear("transfer-stalled", link.name)
