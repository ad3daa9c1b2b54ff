"""Report uploads and deletions that make no progress, and why a checkpoint left this node (P17: people learn
of each problem).

Reads the job's memory only. A problem ends once its subject was tried with success, is not wanted any more,
or no longer exists.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.base.humanize import user_in_words
from ckptd.base.owned_dirs import path_of
from ckptd.config.commands import command_for
from ckptd.core.completeness.judge import State
from ckptd.core.completeness.missing import UncommittedSave, late
from ckptd.core.model.records import SETTLED, ZERO, UploadState
from ckptd.core.model.swap_paths import BY_LOCAL_RANK, is_state
from ckptd.core.policy.blockers import blocked, blocked_there
from ckptd.core.policy.remote import is_configured_otherwise
from ckptd.daemon.state.remote_sync import open_parts
from ckptd.daemon.uploads.requests import hold_name
from ckptd.daemon.uploads.session import NEXT_STEP, STILL_SECONDS
from ckptd.daemon.uploads.shared_dir import report_other_host
from ckptd.storage.local import fs

if TYPE_CHECKING:
    from ckptd.config.schema import RemoteConfig
    from ckptd.core.completeness.judge import Verdict
    from ckptd.core.completeness.missing import MissingShards
    from ckptd.core.model.records import SaveRow, UploadRecord
    from ckptd.core.policy.actions import Plan
    from ckptd.core.policy.view import JobView
    from ckptd.daemon.health.watched_job import WatchedJob
    from ckptd.daemon.state.problems import Problems, Severity
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.state.upload_records import CommitWait


# --- Unfinished saves ------------------------------------------------------------------------------------
# They will never be safe as they are and are never deleted automatically, since they may be the last copy:
# people must see what they cost, and the command for each.

REMOVES = "removes it"
_CUT_SHORT = (State.INCOMPLETE, State.TORN_RESAVE, State.SUSPECT)


def unfinished(state: JobState) -> dict[str, int]:
    """Tag → bytes in its folder, of incomplete, torn, doubtful and damaged saves, the largest first."""
    tags = {tag for tag, verdict in state.folders.verdicts.items() if verdict.state in _CUT_SHORT}
    tags |= {row.save.tag for row in state.saves.rows.values() if damage(state, row) is not None}
    folders = state.folders.listing.folders if state.folders.listing else ()
    sizes = dict.fromkeys(tags, 0) | {f.tag: f.total_bytes for f in folders if f.tag in tags}
    return dict(sorted(sizes.items(), key=lambda row: (-row[1], row[0])))


def damage(state: JobState, row: SaveRow) -> str | None:
    """Return what is wrong with the bytes of a save that lies here; None: nothing known."""
    records = state.uploads.of(row.id).values() if row.state == "present" else ()
    wrong = (r for r in records if r.form == ZERO and (r.is_damaged or is_proven_damaged(r)))
    return next((r.reason or "damaged" for r in wrong), None)


def is_proven_damaged(record: UploadRecord) -> bool:
    """Tell whether an upload was refused for damage: nothing else refuses a ZeRO form, and earlier releases
    wrote no more."""
    return record.form == ZERO and record.state is UploadState.REFUSED


def way_out(job: WatchedJob, state: JobState, tag: str) -> tuple[str, str]:
    """The command for a folder that will never be safe as it is, and what that does."""
    verdict, row = state.folders.verdicts.get(tag), state.saves.of_tag(tag)
    if verdict is not None and verdict.state is State.SUSPECT:
        return command_for(job.config, "accept", tag), "takes it as one save"
    records = state.uploads.of(row.id).values() if row is not None else ()
    if any(r.form == ZERO and r.state is UploadState.COMMITTED for r in records):
        return command_for(job.config, "verify", tag, "--repair"), "puts it right"
    return removal(job, tag), REMOVES


def removal(job: WatchedJob, tag: str) -> str:
    """The command for a person who has given it up."""
    return command_for(job.config, "gc", "--incomplete", tag)


def what_reads_it(reason: str) -> str:
    """Say what to do about a checkpoint that could not be read: the disk refused, or the reader was
    killed."""
    me = user_in_words(os.geteuid())
    is_denied = any(os.strerror(code) in reason for code in (errno.EACCES, errno.EPERM))
    mend = (
        f"give {me}, as whom ckptd runs, the right to read it"
        if is_denied
        else "see to this node's disk and memory"
    )
    return f"{mend}; tried again by itself, and not uploaded until it can be read"


def removal_of_hold(job: WatchedJob, name: str) -> str:
    """Return the command that deletes a hold which belongs to no known save."""
    place = path_of(job.config.save_dir, f"{fs.HOLD}/{name}")
    return f"rm -r {shlex.quote(str(place))}"


# --- Uploads and deletions that make no progress ---------------------------------------------------------

MANY_TRIES = 3
_REBUILT = "nothing to do: it was rebuilt from disk and remote"
_TRIED_AGAIN = (UploadState.NEW, UploadState.UPLOADING)


def report_stalls(job: WatchedJob, state: JobState) -> None:
    """Report everything that does not leave this node or a remote although it should."""
    report_uploads(job, state)
    _see_late(job, state)
    report_deletions(job.problems, state)
    _see_deletions(job, state)
    _see_holds(job, state)
    _see_still(job)
    _forget_stalls(job, state)
    aside = state.journal.set_aside
    if aside is not None and os.path.exists(aside):
        text = f"an unreadable journal lies in {aside}"
        job.problems.see("journal-set-aside", str(aside), text, _REBUILT)


def report_uploads(job: WatchedJob, state: JobState) -> None:
    """Report damaged files and repeatedly failed uploads of checkpoints that are here or held."""
    remotes = {remote.name: remote for remote in job.config.remotes}
    for save_id, records in state.uploads.records.items():
        row = state.saves.rows.get(save_id)
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
            elif record.tries >= MANY_TRIES and record.state is UploadState.FAILED:
                job.problems.see("upload-failed", about, text, record.hint)
            elif record.tries >= MANY_TRIES and record.state in _TRIED_AGAIN:
                job.problems.stays("upload-failed", about)


def _see_late(job: WatchedJob, state: JobState) -> None:
    """Report late files that failed to upload, until they are committed or they or their save are deleted."""
    saves = (
        {save.id: save for save in job.view.saves}
        if state.uploads.failed_late and job.view is not None
        else {}
    )
    for (save_id, remote), unsent in list(state.uploads.failed_late.items()):
        save = saves.get(save_id)
        if save is not None and save.lacking.get(remote):
            job.problems.see("upload-failed", f"{unsent.about} (late)", unsent.text, unsent.hint)
        else:
            state.uploads.forget_late_failed(save_id, remote)


def _is_past(state: JobState, remote: RemoteConfig, row: SaveRow, record: UploadRecord) -> bool:
    """Committed, by whomever; or a form that nothing will try again, since that remote has a newer save."""
    if record.state in (UploadState.COMMITTED, UploadState.DELETED):
        return True
    if record.form == ZERO or record.state is not UploadState.WAITING or remote.policy.has_rung(record.form):
        return False
    newer = (
        r
        for r in state.saves.rows.values()
        if r.save.order > row.save.order and not r.save.grid.is_model_only
    )
    return any(
        state.uploads.record(one.id, record.remote, ZERO).state is UploadState.COMMITTED for one in newer
    )


def _cure(job: WatchedJob, state: JobState, row: SaveRow, record: UploadRecord) -> str:
    if record.form != ZERO:
        return record.hint
    if row.state != "present":
        return f"ckptd never removes its last copy: {removal_of_hold(job, hold_name(row))}"
    command, what = way_out(job, state, row.save.tag)
    return f"{record.hint}; {command} {what}".removeprefix("; ")


def report_deletions(problems: Problems, state: JobState) -> None:
    """Report deletions that were permitted and failed, unless the save is kept by now."""
    for save_id, stays in list(state.deletions.blocked.items()):
        row = state.saves.rows.get(save_id)
        verdict = state.plan.local_verdicts.get(save_id) if state.plan is not None else None
        if row is None or row.state != "present" or (verdict is not None and verdict.keeps):
            state.deletions.forget_blocked(save_id)
            continue
        severity: Severity | None = "note" if stays.is_brief else None
        tag = row.save.tag
        problems.see("prune-blocked", tag, f"{tag} stays: {stays.text}", stays.hint, severity=severity)


def _see_deletions(job: WatchedJob, state: JobState) -> None:
    for (remote, sha256), refusal in list(state.deletions.refused.items()):
        if _is_wanted_gone(job, state, remote, sha256):
            severity: Severity | None = "note" if refusal.is_read else None
            job.problems.see("retire-blocked", refusal.about, refusal.text, refusal.hint, severity=severity)
        else:
            state.deletions.forget_refused(remote, sha256)


def _is_wanted_gone(job: WatchedJob, state: JobState, remote: str, sha256: str) -> bool:
    """The remote still holds it, and nothing keeps it there; as long as it is away, nobody knows."""
    session = job.sessions.get(remote)
    seen = session.observation if session is not None else None
    if seen is None:
        return session is not None
    for stone in seen.retired:
        if stone.commit_sha256 == sha256 and (stone.tag, stone.generation, stone.form) in seen.retiring:
            return True
    verdicts = state.plan.remote_verdicts if state.plan is not None else {}
    found = [verdicts.get((remote, view.key)) for view in seen.commits if view.sha256 == sha256]
    return any(verdict is None or not verdict.keeps for verdict in found)


def _see_holds(job: WatchedJob, state: JobState) -> None:
    """Report saves that lost their hold until they are committed; once deleted, `vanished-uncommitted`
    reports them.
    """
    for save_id, text in list(state.holds.released.items()):
        row = state.saves.rows.get(save_id)
        required = [remote.name for remote in job.config.remotes if remote.required]
        is_safe = all(state.uploads.record(save_id, name, ZERO).state in SETTLED for name in required)
        if row is None or row.state != "present" or row.held or is_safe:
            state.holds.forget_released(save_id)
        else:
            job.problems.see("hold-released", row.save.tag, text, "free space, or save less often")


def _see_still(job: WatchedJob) -> None:
    """Note an upload of which no byte moves, before it is cut (session.py): a flush may last so long."""
    cut = {problem.about for problem in job.problems.all() if problem.code == "transfer-stalled"}
    for session in job.sessions.values():
        if session.name not in cut and (seconds := session.idle_seconds) >= STILL_SECONDS:
            waits = f"has not answered for {seconds // 10 * 10:.0f} s"
            text = f"remote {session.name} {waits}: no byte of what is under way has moved"
            job.problems.see(
                "transfer-stalled", f"{session.name} (under way)", text, NEXT_STEP, severity="note"
            )


def _forget_stalls(job: WatchedJob, state: JobState) -> None:
    """An upload that was cut goes on; where nothing is left to send or remove, no byte will ever move."""
    busy = {
        record.remote
        for row in state.saves.rows.values()
        if row.state == "present" or row.held
        for record in state.uploads.of(row.id).values()
        if record.state in (UploadState.FAILED, *_TRIED_AGAIN)
    }
    busy |= {getattr(action, "remote", "") for action in state.plan.actions} if state.plan else set()
    for session in job.sessions.values():
        if not session.is_transferring and session.name not in busy:
            job.problems.clear("transfer-stalled", session.name)


# --- Early alarms: missing shards, blocked retention -----------------------------------------------------
# Reads the job's memory only; raises problems, decides nothing. What needs patience is timed by our own
# monotonic clock.

LEAST_QUIET_SECONDS = 10.0
_NOT_LATE = (State.LEFTOVER, State.COMPLETE)
_NAME = re.compile(r"\((\S+\.pt)\)")


def report_alarms(job: WatchedJob, state: JobState) -> None:
    """Report early alarms: missing shards, blocked retention, another host on this directory, other
    configurations.
    """
    for tag, verdict in state.folders.verdicts.items():
        left = _patience_left_seconds(job, state, tag, verdict)
        if left is not None and left <= 0:
            _see_missing(job, state, tag, verdict)
    _see_blocked(job, state)
    report_other_host(job.problems, str(job.config.save_dir), state)
    if job.view is not None:
        _see_other_configurations(job, job.view)
        _report_blocked_retention(job, job.view, state.plan)


def _see_other_configurations(job: WatchedJob, view: JobView) -> None:
    for remote in view.remotes:
        if is_configured_otherwise(view, remote):
            text = f"{remote.name}: nodes of this job are configured differently; this one deletes nothing"
            cure = "give all nodes one job file; it ends with the next COMMIT of nodes that agree"
            job.problems.see("config-differs", remote.name, text, cure)


def _report_blocked_retention(job: WatchedJob, view: JobView, plan: Plan | None) -> None:
    """A note: it goes on by itself."""
    if plan is None:
        return
    for remote in view.remotes:
        if (found := blocked_there(view, remote, plan.remote_verdicts)) is not None:
            job.problems.see("retention-blocked", remote.name, found.text, found.next_step, severity="note")


def waits_for_alarm(job: WatchedJob, state: JobState) -> bool:
    """Time alone will raise one: such a job is not at rest."""
    lefts = (_patience_left_seconds(job, state, tag, v) for tag, v in state.folders.verdicts.items())
    return state.deletions.is_blocked or any(left is not None and left > 0 for left in lefts)


def _patience_left_seconds(job: WatchedJob, state: JobState, tag: str, verdict: Verdict) -> float | None:
    """Return the seconds until missing shards are called late: no write for longer than ranks ever lay apart.

    None: no shard is missing, or a later save is whole.
    """
    if not verdict.missing or verdict.state in _NOT_LATE or state.folders.listing is None:
        return None
    folder, quiet = (
        next((f for f in state.folders.listing.folders if f.tag == tag), None),
        state.folders.quiet.get(tag),
    )
    if folder is None or quiet is None:
        return None
    written_ns = max((f.identity.mtime_ns for f in folder.shards), default=0)
    if any(row.save.window.last > written_ns for row in state.saves.rows.values()):
        return None
    patience = max(LEAST_QUIET_SECONDS, 3 * job.config.settle_seconds, 2 * state.saves.widest_save_seconds)
    return patience - (time.monotonic() - quiet.since_seconds)


def _see_missing(job: WatchedJob, state: JobState, tag: str, verdict: Verdict) -> None:
    first, more = verdict.missing[0], len(verdict.missing) - 1
    text = f"{tag}: {first} is missing" + (f", and {more} more" if more else "")
    where = _last_place(job, state, first)
    same = [t for t, v in state.folders.verdicts.items() if t != tag and v.missing == verdict.missing]
    if same:
        text += f", as in {same[-1]}: it is never written"
        cure = "with node-local storage and tensor parallelism DeepSpeed leaves shards out: check its config"
    else:
        cure = "does that rank hang, or is its disk full? it is not committed before it is whole"
    job.problems.see("shard-missing", tag, f"{text}; {where}" if where else text, cure)


def _last_place(job: WatchedJob, state: JobState, missing: str) -> str:
    """Return the node that wrote that shard in the newest save that is whole here."""
    name = _NAME.search(missing)
    rows = [row for row in state.saves.rows.values() if row.state == "present"]
    newest = max(rows, key=lambda row: row.save.order, default=None)
    if name is None or newest is None:
        return ""
    is_ours = any(file.path.rpartition("/")[2].endswith(name[1]) for file in newest.save.files)
    return (
        f"in {newest.save.tag} node {job.node} wrote it" if is_ours else "no node is known to have written it"
    )


def _see_blocked(job: WatchedJob, state: JobState) -> None:
    """Report what keeps retention from deleting, once it has lasted for its patience."""
    found = blocked(job.view, state.plan.local_verdicts) if job.view is not None and state.plan else None
    if found is None or state.is_first_scan:
        state.deletions.seconds_blocked_by(None)
    elif state.deletions.seconds_blocked_by(found.what) >= found.patience_seconds:
        job.problems.see("retention-blocked", "retention", found.text, found.next_step)
    elif found.is_told_at_once:
        job.problems.see("retention-blocked", "retention", found.text, found.next_step, severity="note")


# --- Parts that wait for other nodes' shards --------------------------------------------------------------


def report_waiting(job: WatchedJob, state: JobState) -> None:
    """Raise `commit-waiting`, or `commit-incomplete` once the other nodes had their time."""
    for key, before in list(state.uploads.waiting.items()):
        row = state.saves.rows.get(key[0])
        record = state.uploads.record(*key)
        if row is None or record.state not in (UploadState.WAITING, UploadState.UPLOADING):
            state.uploads.end_wait(key)
            continue
        # also while the next attempt is under way: what it asked of the tag is forgotten when it ends
        waiting = state.uploads.wait(key, _with_parts(job, row, key[1], before))
        if record.state is not UploadState.WAITING:
            continue
        about = f"{row.save.tag} → {key[1]}"
        lost = late(_open_save(row, record, waiting), job.peers.others)
        if lost is None:
            job.problems.see("commit-waiting", about, f"{about}: {waiting.reason}", waiting.hint)
        else:
            job.problems.see(
                "commit-incomplete", about, f"{about}: {lost.text}", _cure_missing(job, lost, row)
            )


def _with_parts(job: WatchedJob, row: SaveRow, remote: str, waiting: CommitWait) -> CommitWait:
    """Add what the last look at the tag told of other nodes; it is asked anew after each attempt."""
    view = job.sessions[remote].tag_views.get(row.save.tag) if remote in job.sessions else None
    if view is None:
        return waiting
    return replace(waiting, parts=tuple(part for part in open_parts(view) if part.node != job.node))


def _open_save(row: SaveRow, record: UploadRecord, waiting: CommitWait) -> UncommittedSave:
    return UncommittedSave(
        missing=waiting.missing,
        branch=row.save.branch,
        step=row.save.step,
        generation=record.generation or 0,
        mm_count=row.save.grid.mm_count,
        age_seconds=time.time() - row.sealed_at,
        parts=waiting.parts,
    )


def _cure_missing(job: WatchedJob, lost: MissingShards, row: SaveRow) -> str:
    back = "bring that node's daemon back, or train on: the next save is not concerned"
    if lost.apart and any(is_state(file.path) for file in row.save.files):
        back = (
            f"{BY_LOCAL_RANK}, so no save of several nodes can be committed: "
            "save without it, which names them by global rank, or offload the optimizer to the CPU"
        )
    elif lost.apart:
        back = f"save again: what {', '.join(lost.apart[:3])} uploaded is of another save of this tag"
    return f"{back}; what is committed: {command_for(job.config, 'list')}"


def report_differing_nodes(job: WatchedJob) -> None:
    """Nodes that were told something else of what is kept."""
    differing = job.peers.differing()
    if differing:
        text = f"the configuration of {', '.join(differing)} is another than this node's: nothing is deleted"
        cure = "give every node the same job file (retention, forms, remotes), then: ckptd reload"
        job.problems.see("config-differs", "nodes", text, cure)


# --- Reasons of finished deletions -----------------------------------------------------------------------


def why_gone(state: JobState, row: SaveRow) -> str | None:
    """Say why a checkpoint is gone; None: it is here, was saved again, or the journal that knew is lost."""
    if row.state == "vanished":
        return "removed by somebody else"
    if row.state != "pruned":
        return None
    return state.saves.deletion_reason(row.id)
