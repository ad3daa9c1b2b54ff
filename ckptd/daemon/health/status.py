"""The status of one job, computed from memory after each turn; asks nobody and decides nothing (P17)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptd.config.commands import with_typed_commands
from ckptd.core.completeness.judge import State, Verdict
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState, UploadState
from ckptd.core.policy.local import is_committed
from ckptd.core.policy.local import newest as newest_save
from ckptd.core.policy.remote import generations_of, grouped
from ckptd.core.policy.retention import fullness
from ckptd.core.policy.safety import exposed, is_to_upload, newest_safe, steps_at_risk
from ckptd.core.policy.view import HERE
from ckptd.daemon.health.capacity import link_speed, outlook
from ckptd.daemon.health.checks import is_idle
from ckptd.daemon.health.drain import drain_status
from ckptd.daemon.health.removal import removal_status
from ckptd.daemon.health.stalls import damage, unfinished, way_out, why_gone
from ckptd.daemon.state.view_builder import as_planned, next_save_of
from ckptd.observe import status as st
from ckptd.observe.status import rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from ckptd.core.model.listing import FolderListing
    from ckptd.core.model.records import SaveRow, UploadRecord
    from ckptd.core.model.save import SealedSave
    from ckptd.core.policy.capacity import DiskForecast
    from ckptd.core.policy.view import RemoteCommit
    from ckptd.daemon.health.watched_job import WatchedJob
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.state.upload_records import UploadKey
    from ckptd.daemon.uploads.session import RemoteSession

    ShipTimes = Mapping[UploadKey, tuple[float | None, float | None]]

_LEFT = "there before ckptd: not uploaded; `ckptd accept --existing` uploads and rotates it"
_NEW = "it answers, and the first save makes it this job's remote"
SHOWN_ENDED = 20
"""Pruned and vanished saves that status still shows."""


def job_status(job: WatchedJob, unended: Set[tuple[str, str | None]] = frozenset()) -> st.JobStatus:
    """Build the status of one job as status.json publishes it.

    `unended`: tag and completion of checkpoints whose end is to be shown, however many there are.
    """
    severities = {p.severity for p in job.problems.all()}
    state: st.JobStateName = "ok"
    state = "attention" if "attention" in severities else "behind" if "behind" in severities else state
    paused = job.control.pause_status()
    if job.phase != "active":
        state = "waiting" if state == "ok" else state
    elif paused is not None and state != "attention":
        state = "paused"
    base = {
        "name": job.config.name,
        "job_id": job.job_id,
        "save_dir": str(job.config.save_dir),
        "as_of": rfc3339(time.time()),
        "opt_outs": job.config.opt_outs,
        "paused": paused,
        "remotes": tuple(_remote(job, session) for session in job.sessions.values()),
        "problems": problems_of(job),
    }
    if job.state is None or job.view is None:
        return st.JobStatus(**base, state=state)  # type: ignore[arg-type]
    commit, newest = newest_safe(job.view), newest_save(job.view)
    at_risk = exposed(job.view, commit)
    # what stands still is only a note, for a flush may last so long: it calls nobody, but all is not well
    is_waiting = is_idle(job) or any(p.code == "transfer-stalled" for p in job.problems.all())
    if at_risk is not None and state == "ok" and is_waiting:
        state = "behind"
    expected = outlook(job, job.state)
    return st.JobStatus(
        **base,  # type: ignore[arg-type]
        state=state,
        safe=_safe(job, commit) if commit is not None else None,
        newest_complete=newest.save.tag if newest else None,
        steps_at_risk=steps_at_risk(job.view, at_risk) if at_risk is not None else 0,
        seconds_at_risk=_seconds_at_risk(job.state, commit),
        exposed_seconds=_exposed_seconds(at_risk.save) if at_risk is not None else None,
        disk=_disk(job, job.state, expected),
        production_bytes_per_second=expected.production_bytes_per_second,
        link_bytes_per_second=link_speed(job, job.state),
        checkpoints=_checkpoints(job, job.state, unended),
        drain=drain_status(job, job.state),
        removal=removal_status(job),
        plan=job.control.plan_answer if job.control.plan is not None else None,
        making_way=job.slows_transfers,
        waits_for_memory=job.waits_for_memory,
        shared=_shared(job),
    )


def problems_of(job: WatchedJob) -> tuple[st.ProblemStatus, ...]:
    """Return the open problems of a job, with next steps that name the job."""
    return tuple(
        st.ProblemStatus(
            code=p.code,
            severity=p.severity,
            since=rfc3339(p.since),
            text=p.text,
            next_step=with_typed_commands(job.config, p.next_step),
            about=p.about,
        )
        for p in job.problems.all()
    )


def _shared(job: WatchedJob) -> st.SharedStatus | None:
    shared_lease = job.peers.shared_lease
    if shared_lease is None:
        return None
    lease = shared_lease.lease
    return st.SharedStatus(
        hosts=tuple(sorted(job.peers.hosts)),
        holds_lease=shared_lease.holds(),
        holder=lease.node if lease is not None else None,
        epoch=lease.epoch if lease is not None else 0,
    )


def _remote(job: WatchedJob, session: RemoteSession) -> st.RemoteStatus:
    """Build the status of one remote, with the abilities that its store showed when it was attached."""
    if session.attached is None:
        notes = (_NEW,) if session.is_new else ()
        return st.RemoteStatus(name=session.name, url=session.settings.url, attached=False, notes=notes)
    can = session.attached.abilities
    is_proved = session.settings.verify != "none" or can.checksum is not None
    return st.RemoteStatus(
        name=session.name,
        url=session.settings.url,
        attached=True,
        create_only=can.create_only,
        proof=can.proof if is_proved else "none",
        resumable=can.resumable,
        notes=can.notes,
        held=_held(job, session.name),
    )


def _held(job: WatchedJob, name: str) -> tuple[st.HeldStatus, ...]:
    """Every checkpoint of a remote with keep or delete, and why, as the last plan had it."""
    if job.state is None:
        return _seen(job.sessions[name])
    if job.state.plan is None or job.view is None:
        return ()
    remote = next(r for r in job.view.remotes if r.name == name)
    verdicts = job.state.plan.remote_verdicts
    found = []
    for generation in reversed(generations_of(remote)):
        mine = {form: verdicts[name, c.key] for form, c in generation.commits.items()}
        stay = [form for form, verdict in mine.items() if verdict.keeps]
        why = [text for verdict in mine.values() for text in (verdict.keeps or (verdict.goes,))]
        lead = generation.leader
        found.append(
            st.HeldStatus(
                tag=lead.tag,
                generation=lead.generation,
                branch=lead.branch,
                step=lead.step,
                forms=tuple(sorted(mine, key=fullness, reverse=True)),
                verdict="delete" if not stay else "keep" if len(stay) == len(mine) else "step-down",
                why=tuple(dict.fromkeys(why)),
                leaves=tuple(sorted(stay, key=fullness, reverse=True)),
                kind=generation.kind,
                bytes=lead.bytes,
            )
        )
    return tuple(found)


def _seen(session: RemoteSession) -> tuple[st.HeldStatus, ...]:
    """Every checkpoint of a remote, of a job that waits for its first one here: nothing is planned yet."""
    seen = session.observation
    commits = [as_planned(view) for view in seen.commits if not view.disputed] if seen is not None else []
    return tuple(
        st.HeldStatus(
            tag=one.leader.tag,
            generation=one.leader.generation,
            branch=one.leader.branch,
            step=one.leader.step,
            forms=tuple(sorted(one.commits, key=fullness, reverse=True)),
            verdict="keep",
            why=("nothing is deleted before a checkpoint lies here",),
            kind=one.kind,
            bytes=one.leader.bytes,
        )
        for one in reversed(grouped(commits))
    )


def _safe(job: WatchedJob, commit: RemoteCommit) -> st.SafeStatus:
    """The newest checkpoint that every required remote was last seen to hold (P17: never without P2)."""
    assert job.view is not None
    at = commit.committed_at_seconds
    seen = job.sessions[next(r.name for r in job.view.remotes if r.is_required)].observation
    said = {v.key: v.commit.committed_at for v in seen.commits} if seen and at is not None else {}
    return st.SafeStatus(
        tag=commit.tag,
        generation=commit.generation,
        branch=commit.branch,
        step=commit.step,
        committed_at=said.get(commit.key, ""),
        age_seconds=round(max(0.0, time.time() - at), 1) if at is not None else 0.0,
    )


def _seconds_at_risk(state: JobState, safe: RemoteCommit | None) -> float | None:
    """Training time since the safe save was written: what a lost node would cost."""
    if safe is None:
        return None
    rows = [
        r for r in state.saves.rows.values() if (r.save.tag, *r.save.order[:2]) == (safe.tag, *safe.order[:2])
    ]
    row = max(rows, key=lambda r: (r.save.order == safe.order, r.id), default=None)
    written_at = safe.committed_at_seconds if row is None else row.save.window.last / 1e9
    return None if written_at is None else round(max(0.0, time.time() - written_at), 1)


def _exposed_seconds(save: SealedSave) -> float:
    """Return the time since the last byte of a save was written."""
    written_ns = max((file.identity.mtime_ns for file in save.files), default=save.window.last)
    return round(max(0.0, time.time() - written_ns / 1e9), 1)


def _disk(job: WatchedJob, state: JobState, expected: DiskForecast) -> st.DiskStatus:
    assert job.view is not None
    return st.DiskStatus(
        free_bytes=job.view.disk.free_bytes,
        next_save_bytes=next_save_of(state),
        full_in_saves=expected.full_in_saves,
        full_in_seconds=None if expected.full_in_seconds is None else round(expected.full_in_seconds, 1),
        unfinished_bytes=sum(unfinished(state).values()),
    )


def _checkpoints(
    job: WatchedJob, state: JobState, unended: Set[tuple[str, str | None]]
) -> tuple[st.CheckpointStatus, ...]:
    rows = sorted(state.saves.rows.values(), key=lambda r: r.save.order, reverse=True)
    here = [r for r in rows if r.state == "present" or r.held]
    ended = [r for r in rows if not r.held and r.state in ("pruned", "vanished", "superseded")]
    older = [r for r in ended[SHOWN_ENDED:] if (r.save.tag, rfc3339(r.sealed_at)) in unended]
    shown = [*here, *ended[:SHOWN_ENDED], *older]
    times = state.journal.upload_times()
    assert job.view is not None
    view = job.view
    left = frozenset(s.id for s in view.saves if not is_to_upload(view, s) and not is_committed(view, s))
    sealed = [_sealed(job, state, row, times, row.id in left) for row in shown]
    sealed_tags = {r.save.tag for r in here}
    folders = {f.tag: f for f in state.folders.listing.folders} if state.folders.listing is not None else {}
    cut_short = unfinished(state)
    open_ones = [
        _unsealed(
            job, tag, verdict, folders.get(tag), way_out(job, state, tag)[0] if tag in cut_short else None
        )
        for tag, verdict in state.folders.verdicts.items()
        if verdict.state is not State.COMPLETE or tag not in sealed_tags
    ]
    return (*open_ones, *sealed)


def _unsealed(
    job: WatchedJob, tag: str, verdict: Verdict, folder: FolderListing | None, next_step: str | None
) -> st.CheckpointStatus:
    assert job.state is not None
    quiet = job.state.folders.quiet.get(tag)
    return st.CheckpointStatus(
        tag=tag,
        generation=None,
        branch=None,
        step=verdict.step,
        state="sealing" if verdict.state is State.COMPLETE else str(verdict.state),
        reason=verdict.reason,
        bytes=folder.total_bytes if folder else 0,
        next_step=next_step,
        local=st.LocalStatus(
            present=True,
            universal="none",
            held=False,
            seen_at=rfc3339(quiet.first_seen_unix) if quiet else None,
        ),
        keep=(f"{verdict.state}: never deleted",),
        kind="model-only" if folder is not None and folder.is_model_only else "resumable",
    )


def _sealed(
    job: WatchedJob, state: JobState, row: SaveRow, times: ShipTimes, is_left: bool
) -> st.CheckpointStatus:
    assert job.view is not None
    save = row.save
    records = state.uploads.of(row.id)
    remotes: dict[str, dict[str, st.FormStatus]] = {}
    for remote in job.view.remotes:
        remotes[remote.name] = {
            form: st.FormStatus(state="none")
            if is_left and (remote.name, form) not in records
            else _form(
                state,
                row,
                records.get((remote.name, form)),
                (row.id, remote.name, form),
                times,
                stands_still=job.sessions[remote.name].is_still,
            )
            for form in remote.forms
        }
    required = [r.name for r in job.view.remotes if r.is_required]
    zero = [state.uploads.record(row.id, name, ZERO) for name in required]
    verdict = state.plan.local_verdicts.get(row.id) if state.plan else None
    damaged = damage(state, row)
    return st.CheckpointStatus(
        tag=save.tag,
        generation=max((r.generation or 1 for r in zero), default=None),
        branch=save.branch,
        step=save.step,
        state=_state(row, zero),
        bytes=save.total_bytes,
        reason=damaged
        or (
            with_typed_commands(job.config, _LEFT)
            if is_left and row.state == "present"
            else why_gone(state, row)
        ),
        next_step=None if damaged is None else way_out(job, state, save.tag)[0],
        local=st.LocalStatus(
            present=row.state == "present",
            universal=str(row.derived.state),
            held=row.held,
            seen_at=rfc3339(row.seen_at),
            complete_at=rfc3339(row.sealed_at),
            ended_at=rfc3339(row.ended_at) if row.ended_at else None,
            damaged=row.state == "present" and (HERE, save.tag, ZERO) in job.view.damaged,
        ),
        remotes=remotes,
        comparisons={
            form: st.ComparisonStatus(**dict(compared))
            for form in (UNIVERSAL, *row.weights)
            if (compared := row.derived_of(form).comparison) is not None
        },
        keep=verdict.keeps if verdict is not None else (),
        goes=verdict.goes if verdict is not None and not verdict.keeps else None,
        pinned=save.tag in job.known_saves.pins,
        kind="model-only" if save.grid.is_model_only else "resumable",
        complete_for=_complete_for(row, records),
    )


def _complete_for(row: SaveRow, records: Mapping[tuple[str, str], UploadRecord]) -> str:
    """A part is complete for the job once a COMMIT covers it."""
    is_done = any(r.form == ZERO and r.state is UploadState.COMMITTED for r in records.values())
    return "node" if row.save.is_part and not is_done else "job"


def _state(row: SaveRow, zero: list[UploadRecord]) -> str:
    if row.state != "present":
        return row.state
    if zero and all(r.state is UploadState.COMMITTED for r in zero):
        return "committed"
    if any(r.state is UploadState.UPLOADING for r in zero):
        return "uploading"
    refused = [r for r in zero if r.state in (UploadState.REFUSED, UploadState.DELETED, UploadState.WAITING)]
    return str(refused[0].state) if refused else "complete"


def _form(
    state: JobState,
    row: SaveRow,
    record: UploadRecord | None,
    key: UploadKey,
    times: ShipTimes,
    *,
    stands_still: bool,
) -> st.FormStatus:
    is_here = row.state == "present" or row.held
    ready = is_here if key[2] == ZERO else row.derived_of(key[2]).state is DerivedState.READY
    # of what is gone nothing is tried again
    if record is None or (record.state is UploadState.FAILED and not (is_here or ready)):
        return st.FormStatus(state="waiting" if ready else "none")
    moving = state.uploads.progress.get(key)
    eta = None
    if moving and moving.done_bytes > moving.start_bytes and not stands_still:
        speed = (moving.done_bytes - moving.start_bytes) / max(
            1e-3, time.monotonic() - moving.started_seconds
        )
        eta = round((moving.total_bytes - moving.done_bytes) / speed, 1)
    started, ended = times.get(key, (None, None))
    return st.FormStatus(
        state=str(record.state),
        bytes_done=moving.done_bytes if moving else 0,
        bytes_total=moving.total_bytes if moving else 0,
        eta_seconds=eta,
        commit_sha256=record.commit_sha256,
        generation=record.generation,
        reason=record.reason,
        started_at=rfc3339(started) if started else None,
        ended_at=rfc3339(ended) if ended and record.state is UploadState.COMMITTED else None,
    )
