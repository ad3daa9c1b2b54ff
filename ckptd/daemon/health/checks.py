"""Check each turn for vanished saves and standing problems, and whether anything is left to do (P17: people
learn of each problem).

Reads the job's memory only; raises and clears problems, decides nothing about data.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

from ckptd.base.humanize import size_of
from ckptd.config.commands import command_for, with_typed_commands
from ckptd.config.remote_names import shown_remote
from ckptd.core.completeness.judge import PIPELINE_0, State
from ckptd.core.model.layouts import Trainer
from ckptd.core.model.other_layouts import words_of
from ckptd.core.model.records import SETTLED, ZERO, DerivedState, UploadState
from ckptd.core.model.save import Order
from ckptd.core.model.unprotected import KNOWN_ALONE
from ckptd.core.policy import actions as a
from ckptd.core.policy.blockers import tried_again
from ckptd.core.policy.derived_forms import MAX_CONVERSION_TRIES
from ckptd.core.policy.leases import gets_nothing
from ckptd.core.policy.local import is_committed
from ckptd.core.policy.safety import is_to_upload, newest_safe
from ckptd.daemon.health.capacity import FREES_FILES, see_outlook, shortage, to_adopt
from ckptd.daemon.health.stalls import (
    REMOVES,
    removal,
    removal_of_hold,
    report_alarms,
    report_differing_nodes,
    report_stalls,
    report_waiting,
    unfinished,
    waits_for_alarm,
    way_out,
    what_reads_it,
)
from ckptd.observe.logs import line_fields

if TYPE_CHECKING:
    from ckptd.core.completeness.judge import Verdict
    from ckptd.core.model.records import SaveRow
    from ckptd.core.policy.view import JobView, RemoteCommit
    from ckptd.daemon.health.watched_job import WatchedJob
    from ckptd.daemon.intake.inspection import LateFiles
    from ckptd.daemon.state.problems import Problems
    from ckptd.daemon.state.state import JobState

log = logging.getLogger("ckptd.job")

_VANISHED = ("vanished-uncommitted", "vanished-kept")
NEXT_STEP_VANISHED = "raise the trainer's own save limit, or save less often"


def notice_gone(job: WatchedJob, state: JobState) -> None:
    """Saves whose folder vanished without us: the trainer's right; an alarm if it was not safe."""
    assert state.folders.listing is not None
    folders = {f.tag for f in state.folders.listing.folders}
    pruning = {row.save_id for row in state.journal.open_deletions()}
    for row in list(state.saves.rows.values()):
        tag = row.save.tag
        if row.state != "present" or tag in folders or row.id in pruning or state.saves.busy[row.id]:
            continue
        is_lost = _is_lost(job, state, tag)
        state.journal.end_save(row.id, "vanished")
        if tag in state.folders.listing.loose:
            log.info(
                "%s is no checkpoint of this job: trainer.save_model wrote it",
                tag,
                extra=line_fields("vanish", tag),
            )
            state.reload(row.id)
            continue
        verdict = state.plan.local_verdicts.get(row.id) if state.plan else None
        kept = ", ".join(verdict.keeps if verdict else ()) or "no more"
        text = "%s was removed by somebody else; here it was kept: %s"
        log.info(text, tag, kept, extra=line_fields("vanish", tag))
        if is_lost:
            job.problems.put(
                "vanished-uncommitted",
                tag,
                f"{tag} was removed before it was committed",
                NEXT_STEP_VANISHED,
            )
        elif (why := _why_wanted(job, state, row)) is not None:
            text = f"{tag} was removed here by somebody else: {why}; the remote holds it"
            back = command_for(job.config, "restore", tag, "--to", "DIR")
            job.problems.put("vanished-kept", tag, text, back)
        state.reload(row.id)


def _why_wanted(job: WatchedJob, state: JobState, row: SaveRow) -> str | None:
    """Say why a safe checkpoint is still wanted here, by our own records, which know a COMMIT at once; None:
    it is not."""
    if row.save.tag in job.known_saves.pins:
        return "it is pinned"
    required = [r.name for r in job.config.remotes if r.required]
    safe = [
        one.save.order
        for one in state.saves.rows.values()
        if all(state.uploads.record(one.id, name, ZERO).state is UploadState.COMMITTED for name in required)
    ]
    is_newest = bool(required) and row.save.order == max(safe, default=None)
    return "it is the newest that is safe" if is_newest else None


def _forget_vanished(job: WatchedJob, state: JobState) -> None:
    """A newer one is safe: what vanished is no loss any more, unless somebody wanted just that one kept."""
    safe = newest_safe(job.view) if job.view is not None else None
    here = max(
        (r.save.order for r in state.saves.rows.values() if r.state == "present"), default=Order(0, 0, 0)
    )
    for problem in job.problems.all():
        is_back = problem.code == "vanished-kept" and state.saves.of_tag(problem.about) is not None
        is_pinned = problem.about in job.known_saves.pins
        if problem.code not in _VANISHED or (is_pinned and not is_back):
            continue
        orders = [row.save.order for row in state.saves.rows.values() if row.save.tag == problem.about]
        if is_back or (safe is not None and _is_newer(safe, orders, problem.since)):
            job.problems.clear(problem.code, problem.about)
        elif problem.code == "vanished-kept" and orders and here > max(orders):
            # a trainer that keeps one removes the newest safe one at each save: no alarm beside a newer
            job.problems.put(problem.code, problem.about, problem.text, problem.next_step, severity="note")


def _is_newer(safe: RemoteCommit, orders: list[Order], vanished_at: float) -> bool:
    """Than what vanished; a journal that knows nothing of that goes by the time."""
    if orders:
        return safe.order > max(orders)
    return safe.committed_at_seconds is not None and safe.committed_at_seconds > vanished_at


def report_problems(job: WatchedJob, state: JobState) -> None:
    """Problems that hold for as long as each turn sees them."""
    _forget_vanished(job, state)
    see = job.problems
    see.begin_turn()
    _report_verdicts(job, state)
    report_conversions(see, state)
    if job.view is not None:
        report_unused_remotes(see, job.view)
    unsealed = [
        t
        for t, v in state.folders.verdicts.items()
        if v.state is State.COMPLETE and not state.saves.of_tag(t)
    ]
    if unsealed and not job.known_saves.has_heard_all and not job.known_saves.is_rebuilt:
        text = f"{unsealed[0]} waits: a new journal asks every remote what it holds already"
        see.see("waiting-for-remote", "journal", text, "it asks by itself; bring back one that is away")
    if job.view is not None and (short := shortage(job.view.disk)):
        frees = _what_frees(job, state) if job.view.disk.is_short else FREES_FILES
        see.see("disk-low", "disk", short, frees)
    for session in job.sessions.values():
        if session.observation is not None and session.observation.damaged:
            text = f"{session.name}: {session.observation.damaged[0]}"
            see.see(
                "remote-damaged", session.name, text, "what it lists counts as not committed; see ckptd list"
            )
        elif session.observation is None:  # as it was said when it could not be looked at for that
            see.stays("remote-damaged", session.name)
        if (alone := session.backed_off) is not None:
            text = f"{shown_remote(session.name, session.settings.url)} is {alone}"
            see.see(
                "remote-left-alone",
                session.name,
                text,
                "nothing to do but to mend the reason; tried by itself",
            )
    waiting = (
        [
            s.save.tag
            for s in job.view.saves
            if s.is_intact and is_to_upload(job.view, s) and not is_committed(job.view, s)
        ]
        if job.view
        else []
    )
    if len(waiting) > 1 and not state.holds.can_clone and job.config.remotes and _may_rotate(state):
        text = f"{len(waiting)} checkpoints wait and cannot be held: the trainer may outrun the upload"
        see.see(
            "trainer-may-outrun", "holds", text, "raise the trainer's own limit, or use XFS or btrfs (clones)"
        )
    _see_failures(see, state, job.sealer.late)
    report_stalls(job, state)
    see_outlook(job, state)
    report_alarms(job, state)
    report_waiting(job, state)
    report_differing_nodes(job)
    job.runs.see_problems(see)
    if job.watcher is not None and job.watcher.problem:
        see.see("no-file-events", "inotify", job.watcher.problem, "nothing to do")
    see.end_turn()


def _may_rotate(state: JobState) -> bool:
    """Tell whether the trainer removes checkpoints by itself: it did, or it is one that can.

    DeepSpeed alone never does; what Hugging Face's Trainer, Accelerate and Lightning were told to keep
    stands in no file that can be read without running code.
    """
    folders = state.folders.listing.folders if state.folders.listing is not None else ()
    can = any(folder.trainer is not Trainer.DEEPSPEED for folder in folders)
    return can or any(row.state == "vanished" for row in state.saves.rows.values())


def _what_frees(job: WatchedJob, state: JobState) -> str:
    """Say what a person can do to free space, the cheapest first: ckptd deletes nothing uncommitted by
    itself."""
    ways = ((way_out(job, state, tag), size) for tag, size in unfinished(state).items())
    frees = (f"{command} frees {size_of(size)}; " for (command, what), size in ways if what == REMOVES)
    return f"{next(frees, '')}{to_adopt(job)}nothing uncommitted is deleted; free space or save less often"


def _report_verdicts(job: WatchedJob, state: JobState) -> None:
    """Report what is wrong with checkpoints here; the log says each once, as it says which are complete."""
    known = {(problem.code, problem.about) for problem in job.problems.all()}
    _see_verdicts(job, state)
    for problem in job.problems.all():
        if (problem.code, problem.about) not in known:
            typed = with_typed_commands(job.config, problem.next_step)
            log.warning("%s; %s", problem.text, typed, extra=line_fields("doubt", problem.about))


def _see_verdicts(job: WatchedJob, state: JobState) -> None:
    see = job.problems
    for name in state.folders.listing.nameless if state.folders.listing is not None else ():
        see.see(
            "tag-refused", name, f"{name}: this name is no text (not UTF-8)", "rename the folder to upload it"
        )
    for name in state.folders.listing.closed if state.folders.listing is not None else ():
        reason = f"{name}: {os.strerror(errno.EACCES)} to enter this folder of another user"
        see.see("incomplete-save", name, reason, f"if it is a checkpoint: {what_reads_it(reason)}")
    for name, why in state.holds.stray.items():
        if why:
            see.see("incomplete-save", name, why, f"ckptd never removes it: {removal_of_hold(job, name)}")
    cut_short = unfinished(state)
    for tag, verdict in state.folders.verdicts.items():
        reason = f"{tag}: {verdict.reason}"
        costs = f"{reason} ({size_of(cut_short.get(tag, 0))})"
        if verdict.state is State.TORN_RESAVE:
            see.see("torn-save", tag, costs, f"{_aside(job, tag, verdict)}; an older checkpoint is used")
        elif verdict.state is State.INCOMPLETE:
            see.see("incomplete-save", tag, costs, _aside(job, tag, verdict))
        elif verdict.state is State.SUSPECT:
            accept, _ = way_out(job, state, tag)
            see.see(
                "suspect-save", tag, costs, f"if it is one save: {accept}; else ckptd resume moves it aside"
            )
        elif verdict.state is State.LEFTOVER and _is_lost(job, state, tag):
            text = f"{tag} is being removed before it was committed"
            see.see("vanished-uncommitted", f"{tag} (in part)", text, NEXT_STEP_VANISHED)
        elif verdict.state is State.REFUSED:
            _see_refused(see, tag, verdict.reason)
    _see_forms(job, state)


def _aside(job: WatchedJob, tag: str, verdict: Verdict) -> str:
    if verdict.is_unread:
        return what_reads_it(f"{tag}: {verdict.reason}")
    return f"ckptd resume moves it aside, {removal(job, tag)} removes it"


def _see_refused(see: Problems, tag: str, why: str | None) -> None:
    if why == PIPELINE_0:
        see.see("unprotected-save", tag, f"{tag} is {why}: it is not uploaded", KNOWN_ALONE)
    else:
        rename = "rename the folder, or choose another tag in the trainer"
        see.see("tag-refused", tag, f"{tag}: {why}", rename)


def _see_forms(job: WatchedJob, state: JobState) -> None:
    """Report checkpoints without ZeRO shards that a remote takes only in forms which they do not have."""
    alone = [r.name for r in job.config.remotes if r.required and ZERO not in r.forms]
    for tag, verdict in state.folders.verdicts.items() if alone else ():
        if verdict.state is State.COMPLETE and verdict.grid is not None and verdict.grid.layout:
            text = f"{tag} is {words_of(verdict.grid.layout)}: {alone[0]} takes other forms alone"
            job.problems.see("unprotected-save", tag, text, f'add "zero" to the forms of {alone[0]}')


def _is_lost(job: WatchedJob, state: JobState, tag: str) -> bool:
    """Neither committed everywhere nor held, and not known to be damaged."""
    row = state.saves.of_tag(tag)
    required = [r.name for r in job.config.remotes if r.required]
    return (
        row is not None
        and not row.held
        and any(state.uploads.record(row.id, name, ZERO).state not in SETTLED for name in required)
    )


def _see_failures(see: Problems, state: JobState, late: LateFiles) -> None:
    """Report recent failures of this node's own disk; each is tried again."""
    state.failures.forget_old()
    for what, failure in state.failures.all().items():
        next_step = failure.hint or "tried again by itself; if it lasts, see to this node's disk"
        see.see("local-failed", what, failure.text, next_step)
    for tag, why in late.refused.items():
        text = f"{tag}: what came late is not uploaded: {why}"
        see.see("local-failed", f"{tag} (late)", text, what_reads_it(why), severity="note")


def _see_weights(see: Problems, row: SaveRow) -> None:
    for form, record in row.weights.items():
        about = f"{row.save.tag} ({form})"
        if record.state is DerivedState.FAILED and (record.tries or record.retry_at_seconds):
            text = f"converting {about}: {record.reason}"
            see.see(
                "conversion-failed", about, text, record.hint or "tried again; `ckptd logs JOB` says more"
            )
        elif record.state is DerivedState.REFUSED:
            text = f"{row.save.tag} has no {form}: {record.reason}"
            see.see("conversion-refused", about, text, record.hint or "the ZeRO form is safe all the same")


def report_conversions(see: Problems, state: JobState) -> None:
    """Report saves without a universal form, once per reason; a failure only until a newer save has its
    form.
    """
    rows = sorted((r for r in state.saves.rows.values() if r.state == "present"), key=lambda r: r.save.order)
    ready = [r.save.order for r in rows if r.derived.state is DerivedState.READY]
    refused: dict[str, list[SaveRow]] = {}
    for row in rows:
        derived, tag = row.derived, row.save.tag
        if derived.state is DerivedState.REFUSED:
            refused.setdefault(derived.reason or "", []).append(row)
        has_failed = derived.state is DerivedState.FAILED and (derived.tries or derived.retry_at_seconds)
        if derived.state is DerivedState.CONVERTING:
            see.stays("conversion-failed", tag)
        if has_failed and not (ready and row.save.order < ready[-1]):
            text = f"converting {tag}: {derived.reason}"
            see.see("conversion-failed", tag, text, derived.hint or "tried again; `ckptd logs JOB` says more")
    for row in rows[-1:]:
        _see_weights(see, row)
    for reason, alike in refused.items():
        more = f" (nor have {len(alike) - 1} older ones)" if len(alike) > 1 else ""
        text = f"{alike[-1].save.tag} has no universal form: {reason}{more}"
        next_step = alike[-1].derived.hint or "the ZeRO form is safe all the same"
        see.see("conversion-refused", alike[-1].save.tag, text, next_step)


def report_unused_remotes(see: Problems, view: JobView) -> None:
    """Remotes that take no ZeRO form get nothing of saves that are spread over nodes."""
    for remote in view.remotes:
        save = gets_nothing(view, remote)
        if save is not None:
            forms = " and ".join(remote.forms)
            text = f"{remote.name} gets no {forms} of {save.save.tag}: no node has all its shards"
            see.see(
                "conversion-refused", remote.name, text, 'list "zero" among its forms: they are made of it'
            )


def is_idle(job: WatchedJob) -> bool:
    """Tell whether nothing is under way and nothing left to do but what a backoff or a person holds up."""
    state = job.state
    if state is None:
        return job.turns > 0 and not any(session.open_requests for session in job.sessions.values())
    if state.is_first_scan or job.needs_turn or state.plan is None:
        return False
    sessions = job.sessions.values()
    if (
        state.uploads.progress
        or state.saves.conversion
        or state.deletions.asking
        or job.workers.open
        or state.folders.in_flight
    ):
        return False
    if any(
        session.open_requests or (session.attached is None and not session.seconds_to_retry())
        for session in sessions
    ):
        return False
    ready = {session.name for session in sessions if session.is_ready and not session.seconds_to_transfer}
    # a new journal seals nothing before every remote was heard; one that is away holds nothing else up
    unsealed = len(ready) == len(sessions) and any(
        v.state in (State.SAVING, State.RESAVING, State.UNKNOWN)
        or (v.state is State.COMPLETE and state.saves.of_tag(tag) is None)
        for tag, v in state.folders.verdicts.items()
    )
    view = job.view
    tried = tried_again(view, state.plan.local_verdicts) if view and _has_failed(state, ready) else []
    waits = any(record.tries < 3 and record.remote in ready for record in tried)
    actions = [x for x in state.plan.actions if not isinstance(x, a.Describe)]
    return not unsealed and not actions and not waits and not job.sealer.late.is_waiting


def _has_failed(state: JobState, ready: set[str]) -> bool:
    uploads = (record for records in state.uploads.records.values() for record in records.values())
    return any(record.state is UploadState.FAILED and record.remote in ready for record in uploads)


def is_at_rest(job: WatchedJob) -> bool:
    """Idle, and the mere passing of time brings nothing to do: all is safe and nothing is tried again."""
    state = job.state
    if state is None or not is_idle(job) or _is_behind(job) or waits_for_alarm(job, state):
        return False
    if (
        job.sealer.metrics.is_put_off
        or state.failures.all()
        or state.deletions.blocked
        or job.deletion_rights.is_missing
    ):
        return False
    here = [row for row in state.saves.rows.values() if row.state == "present" or row.held]
    uploads = [record for row in here for record in state.uploads.of(row.id).values()]
    return not any(
        record.state in (UploadState.FAILED, UploadState.WAITING) and record.remote in job.sessions
        for record in uploads
    ) and not any(
        record.state is DerivedState.FAILED and record.tries < MAX_CONVERSION_TRIES
        for row in here
        for record in (row.derived, *row.weights.values())
    )


def exit_code(job: WatchedJob) -> int:
    """0 safe, 3 behind, 1 a person is needed (docs/contract.md)."""
    # a run that ends here does not wait for what may heal
    severities = {p.lasting for p in job.problems.all()}
    if "attention" in severities:
        return 1
    return 3 if "behind" in severities or _is_behind(job) else 0


def _is_behind(job: WatchedJob) -> bool:
    if job.view is None:
        return False
    required = [r.name for r in job.view.remotes if r.is_required]
    return any(
        s.is_intact and s.upload(r, ZERO).state not in (UploadState.COMMITTED, UploadState.DELETED)
        for s in job.view.saves
        for r in required
        if is_to_upload(job.view, s)
    )
