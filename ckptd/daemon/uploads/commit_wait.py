"""Explain why a part of a save is not committed yet: which ranks are missing, and where they were last
(P17).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.config.commands import command_for
from ckptd.core.completeness.missing import UncommittedSave, late
from ckptd.core.model.records import ShipState
from ckptd.core.model.swapped_tensors import BY_LOCAL_RANK, is_state
from ckptd.daemon.state.remote_sync import open_parts
from ckptd.daemon.state.state import CommitWait

if TYPE_CHECKING:
    from ckptd.core.completeness.missing import MissingShards
    from ckptd.core.model.records import SaveRow, ShipRecord
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.job_record import JobRecord
    from ckptd.storage.remote.messages import Observation, ShipResult


def waiting_on(before: CommitWait | None, answer: ShipResult, first_seconds: float) -> CommitWait:
    """Return the record of a commit attempt that lacked something, counting on from the attempt before."""
    reason = answer.reason or ""
    attempts = before.attempts + 1 if before is not None and before.reason == reason else 1
    return CommitWait(
        reason=reason,
        hint=answer.hint or "see the other nodes",
        missing=answer.missing,
        parts=before.parts if before is not None else (),
        attempts=attempts,
        first_seconds=first_seconds,
        is_whole=before is not None and before.is_whole,
    )


def note_parts(
    waiting: CommitWait, retry_at_seconds: float, *, is_whole: bool, now_seconds: float
) -> tuple[CommitWait, float]:
    """Return the record updated with what other nodes' manifests show, and when to try again now.

    The node with the last part commits. If it dies before, the others try again after the first wait, however
    long they had waited, but not at once: of a thousand nodes each would read a thousand manifests.
    """
    if is_whole and not waiting.is_whole:
        retry_at_seconds = min(retry_at_seconds, now_seconds + waiting.first_seconds)
    return replace(waiting, is_whole=is_whole), retry_at_seconds


def hear_of_parts(state: JobState, remote: str, seen: Observation | None) -> None:
    """Let who waits for other parts ask sooner, once the names of manifests tell that none is missing."""
    for key, waiting in list(state.waiting.items()):
        row, record = state.rows.get(key[0]), state.ship(*key)
        if seen is None or row is None or key[1] != remote or record.state is not ShipState.WAITING:
            continue
        is_whole = (row.save.tag, record.generation, record.form) in seen.listed_whole
        before = record.retry_at_seconds
        told, again_at = note_parts(waiting, before, is_whole=is_whole, now_seconds=time.monotonic())
        state.waiting[key] = told
        if again_at != before:
            state.put_ship(row.id, record.model_copy(update={"retry_at_seconds": again_at}))


def report_waiting(job: JobRecord, state: JobState) -> None:
    """Raise `commit-waiting`, or `commit-incomplete` once the other nodes had their time."""
    for key, before in list(state.waiting.items()):
        row = state.rows.get(key[0])
        record = state.ship(*key)
        if row is None or record.state not in (ShipState.WAITING, ShipState.SHIPPING):
            del state.waiting[key]
            continue
        # also while the next attempt is under way: what it asked of the tag is forgotten when it ends
        waiting = state.waiting[key] = _told(job, row, key[1], before)
        if record.state is not ShipState.WAITING:
            continue
        about = f"{row.save.tag} → {key[1]}"
        lost = late(_open_save(row, record, waiting), job.nodes.others)
        if lost is None:
            job.problems.see("commit-waiting", about, f"{about}: {waiting.reason}", waiting.hint)
        else:
            job.problems.see("commit-incomplete", about, f"{about}: {lost.text}", _cure(job, lost, row))


def _told(job: JobRecord, row: SaveRow, remote: str, waiting: CommitWait) -> CommitWait:
    """With what the last look at the tag told; it is asked anew after each attempt."""
    view = job.links[remote].tag_views.get(row.save.tag) if remote in job.links else None
    if view is None:
        return waiting
    return replace(waiting, parts=tuple(part for part in open_parts(view) if part.node != job.node))


def _open_save(row: SaveRow, record: ShipRecord, waiting: CommitWait) -> UncommittedSave:
    return UncommittedSave(
        missing=waiting.missing,
        branch=row.save.branch,
        step=row.save.step,
        generation=record.generation or 0,
        mm_count=row.save.grid.mm_count,
        age_seconds=time.time() - row.sealed_at,
        parts=waiting.parts,
    )


def _cure(job: JobRecord, lost: MissingShards, row: SaveRow) -> str:
    back = "bring that node's daemon back, or train on: the next save is not concerned"
    if lost.apart and any(is_state(file.path) for file in row.save.files):
        back = (
            f"{BY_LOCAL_RANK}, so no save of several nodes can be committed: "
            "save without it, which names them by global rank, or offload the optimizer to the CPU"
        )
    elif lost.apart:
        back = f"save again: what {', '.join(lost.apart[:3])} uploaded is of another save of this tag"
    return f"{back}; what is committed: {command_for(job.config, 'list')}"


def report_differing_nodes(job: JobRecord) -> None:
    """Nodes that were told something else of what is kept."""
    differing = job.nodes.differing()
    if differing:
        text = f"the configuration of {', '.join(differing)} is another than this node's: nothing is deleted"
        cure = "give every node the same job file (retention, forms, remotes), then: ckptd reload"
        job.problems.see("config-differs", "nodes", text, cure)
