"""Explain to people why nothing is deleted on the node although it should be, or although the disk is short.

A pure function beside the planner: it decides nothing, and reports what blocked the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState, UploadState
from ckptd.core.policy.deletion import deletable_saves
from ckptd.core.policy.derived_forms import is_converted_on_the_fly, is_open, kept_until_converted, to_derive
from ckptd.core.policy.local import is_committed
from ckptd.core.policy.permit import unobserved_remotes
from ckptd.core.policy.planner import deletable_uncommitted
from ckptd.core.policy.remote import commits_to_delete, is_configured_otherwise
from ckptd.core.policy.retention import DAMAGED, GONE
from ckptd.core.policy.safety import is_to_upload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized

    from ckptd.base.identity import FileIdentity
    from ckptd.core.model.listing import FolderListing, ListedFile
    from ckptd.core.model.records import UploadRecord
    from ckptd.core.model.save import SealedFile, SealedSave
    from ckptd.core.policy.retention import RetentionVerdict
    from ckptd.core.policy.view import JobView, RemoteView, SaveView

SOON_SECONDS = 120.0
LONG_SECONDS = 900.0
"""Longer than any save takes: the trainer hangs in it, or something else writes in its folder."""
_NO_ROOM = "whole because there is no room to make the universal form that the ladder leaves instead"
_NO_FORM = "whole because the ladder leaves a universal form instead, and it has none"
_GOES_ON = "nothing to do; if this was meant, it goes on within the hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionBlocker:
    """Describe what blocks retention; it is reported once it has lasted `patience_seconds`."""

    what: str
    """Stays the same while the same thing is in the way."""
    text: str
    next_step: str
    patience_seconds: float
    is_told_at_once: bool = False
    """Say as a note that more lies here than the policy keeps, until that patience is over."""


def blocked(view: JobView, verdicts: dict[int, RetentionVerdict]) -> RetentionBlocker | None:
    """Return the first obstacle to allowed deletions; else, on a short disk, why none is allowed."""
    if view.lease is not None and not view.lease.holds_lease:
        return None  # another host's business (adr/0110)
    may_go = deletable_saves(view, verdicts)
    if not may_go:
        return _all_kept(view, verdicts) if view.disk.is_short else None
    due = [save for save in may_go if save.id not in view.not_to_delete]
    if not due:
        return None  # each has a `prune-blocked` of its own
    names = f"{due[0].save.tag} may be deleted and stays{_with(due)}"
    for is_so, what, next_step, patience in _obstacles(view, due[0]):
        if is_so:
            return RetentionBlocker(
                what=what,
                text=f"{names}: {what}",
                next_step=next_step,
                patience_seconds=patience,
                # one that waits for the end of a save is what every save brings
                is_told_at_once=patience == LONG_SECONDS and len(due) > 1,
            )
    return None


def blocked_there(
    view: JobView, remote: RemoteView, verdicts: Mapping[tuple[str, str], RetentionVerdict]
) -> RetentionBlocker | None:
    """Return the deletion rate limit of a remote, once it has delayed deletions there for a while."""
    rests = view.is_first_scan or not view.may_delete or not remote.is_attached
    if rests or remote.deletions_left > 0:
        return None
    begin = view.now_seconds - SOON_SECONDS
    due = [
        c
        for c in commits_to_delete(view, remote, verdicts)
        if view.due_since_seconds.get((remote.name, c.key), view.now_seconds) <= begin
    ]
    if not due:
        return None
    first = min(due, key=lambda c: c.order)
    what = "as many as are allowed in an hour were removed there"
    return RetentionBlocker(
        what=what,
        text=f"{first.tag} may be deleted from {remote.name} and stays{_with(due)}: {what}",
        next_step=_GOES_ON,
        patience_seconds=0.0,
    )


def _with(due: Sized) -> str:
    return f" (with {len(due) - 1} more)" if len(due) > 1 else ""


def _obstacles(view: JobView, first: SaveView) -> list[tuple[bool, str, str, float]]:
    """Yield obstacles in the planner's order; missing rights and a changed device have codes of their own."""
    away = [r.name for r in view.remotes if r.is_required and not r.is_attached]
    silent = unobserved_remotes(view)
    needs_remote = bool(away) and view.unuploaded != "delete"
    needs_commit = view.unuploaded != "delete" or (not away and is_committed(view, first))
    return [
        (view.is_paused, "the job is paused", "`ckptd pause --off`", SOON_SECONDS),
        (not view.may_delete, "ckptd may not delete here", "see the other problems", SOON_SECONDS),
        (
            any(is_configured_otherwise(view, remote) for remote in view.remotes),
            "the nodes of this job are configured differently",
            "give all of them one job file; see config-differs",
            SOON_SECONDS,
        ),
        (
            view.is_save_in_flight,
            "a save is in flight, and nothing is removed during one",
            "they are deleted in the next pause between saves (save less often); or does the trainer hang?",
            LONG_SECONDS,
        ),
        (
            view.deletions_left <= 0,
            "as many as are allowed in an hour were removed",
            _GOES_ON,
            SOON_SECONDS,
        ),
        (
            needs_remote,
            f"required remote {', '.join(away)} is not attached, and its COMMIT is read before a removal",
            "bring the remote back",
            SOON_SECONDS,
        ),
        (
            bool(silent) and not needs_remote,
            f"required remote {', '.join(silent)} did not answer since the start, so its pins are not known",
            "bring the remote back",
            SOON_SECONDS,
        ),
        (
            needs_commit and first.id not in view.confirmations,
            "its COMMIT is not confirmed by every required remote",
            "`ckptd verify` shows what the remote holds; `ckptd logs JOB` says more",
            SOON_SECONDS,
        ),
    ]


def _all_kept(view: JobView, verdicts: dict[int, RetentionVerdict]) -> RetentionBlocker | None:
    here = [s for s in view.saves if s.is_present]
    if not here:
        return None
    why = {s.id: _strongest(view, s, verdicts[s.id]) for s in here}
    counted = ", ".join(f"{count} {reason}" for reason, count in Counter(why.values()).most_common())
    left = _left_by_a_ladder(view)
    beside = f", and {left} universal form{'s' if left > 1 else ''} that the ladder left" if left else ""
    others = "`ckptd status --retention` names each; remove a pin, lower the limit, or free space"
    ending = _ending(view, [s for s in here if why[s.id] == _NO_ROOM], left)
    return RetentionBlocker(
        what="all are kept",
        text=f"the disk is short, and every checkpoint here is kept: {counted}{beside}",
        next_step=f"{adopting(view)}{ending}{others}",
        patience_seconds=SOON_SECONDS,
    )


def _left_by_a_ladder(view: JobView) -> int:
    ready = (s for s in view.saves if s.is_pruned and s.universal.state is DerivedState.READY)
    return sum(1 for _ in ready) if view.local_retention.has_rung(UNIVERSAL) else 0


def _ending(view: JobView, waiting: list[SaveView], left: int) -> str:
    """Advise to end a ladder that keeps more than the disk holds; "" where it keeps nothing."""
    if not waiting and not left:
        return ""
    ends = view.local_retention.has_rung(GONE)
    word = 'lower `after` of its form "gone"' if ends else 'end it by { after = N, form = "gone" }'
    tenths = -(-_room_to_make(view, waiting) // 10**8)  # rounded up: so much is enough
    made = f", or free {tenths / 10:.1f} GB: then those forms are made" if waiting else ""
    return f"the ladder in [local] keeps more than this disk holds: {word}{made}; "


def _room_to_make(view: JobView, waiting: list[SaveView]) -> int:
    """Bytes to free before the first of these gets its form; the newest save gets its own before."""
    whole = (s for s in view.saves if s.is_intact and s.is_convertible)
    newest = max(whole, key=lambda s: s.order, default=None)
    is_first = newest is not None and is_open(newest.universal, view.now_seconds) and newest not in waiting
    wanted = [max((s.save.total_bytes for s in waiting), default=0)]
    wanted += [newest.save.total_bytes] if newest is not None and is_first else []
    return view.disk.reserve_bytes - view.disk.free_bytes + (0 if view.disk.can_clone else sum(wanted))


def unadopted(view: JobView) -> list[SaveView]:
    """Return saves from before the first start: neither a limit nor an opt-out ever deletes them."""
    return [s for s in view.saves if s.is_present and not s.is_adopted and not s.is_pinned]


def adopting(view: JobView) -> str:
    """Advise to adopt checkpoints where unadopted ones fill the disk, else ""."""
    count = len(unadopted(view)) if view.local_retention.deletes else 0
    return (
        f"`ckptd accept --existing` has the {count} that were there before ckptd uploaded and rotated; "
        if count
        else ""
    )


def _strongest(view: JobView, save: SaveView, verdict: RetentionVerdict) -> str:
    """Return the one reason that a person would have to change first."""
    if not save.is_adopted:
        return "there before ckptd"
    if not is_committed(view, save):
        return "not committed yet"
    if save.is_pinned:
        return "pinned"
    if save.save.tag in view.damaged_tags:
        return DAMAGED
    if save.has_unlisted:
        return "with files that no COMMIT lists"
    if verdict.awaits == UNIVERSAL and len(verdict.keeps) == 1:
        may_be_made = kept_until_converted(save, verdict) and UNIVERSAL in view.local_forms
        is_tried = save.universal.state in (DerivedState.NONE, DerivedState.CONVERTING)
        return _NO_ROOM if may_be_made and is_tried else _NO_FORM
    return "within the policy" if verdict.keeps else "free to be deleted"


# --- Failed uploads that are tried again: `run --once` waits for them ------------------------------------
# Uploads are not tried again if the save was deleted meanwhile, if nothing wants them uploaded any more, or
# if a newer universal form replaced theirs; a run that waited for those would never end.


def tried_again(view: JobView, verdicts: dict[int, RetentionVerdict]) -> list[UploadRecord]:
    """Failed uploads to attached remotes that are wanted still, whenever they are due."""
    deletable = deletable_uncommitted(view, verdicts)
    return [
        record
        for remote in view.remotes
        if remote.is_attached
        for form in remote.forms
        for save in _wanted(view, remote, form)
        if save.id not in deletable
        if (record := save.upload(remote.name, form)).state is UploadState.FAILED
    ]


def _wanted(view: JobView, remote: RemoteView, form: str) -> Iterator[SaveView]:
    if form != ZERO:
        # what is neither here nor made as it is sent waits for its conversion, not for a try
        for save in to_derive(view, remote, form):
            is_here = save.derived(form).state is DerivedState.READY
            if is_here or is_converted_on_the_fly(view, save, form, is_now=False):
                yield save
        return
    yield from (s for s in view.saves if (s.is_intact or s.is_held) and is_to_upload(view, s))


# --- Files that no COMMIT and no supplement lists --------------------------------------------------------
# They are uploaded as a supplement, or the folder stays: nothing is deleted that no remote has.


def late_now(save: SealedSave, now: Mapping[str, FileIdentity]) -> tuple[SealedFile, ...]:
    """Return the files that came after the save and are unchanged since they were made durable."""
    return tuple(file for file in save.late if now.get(file.path) == file.identity)


def newcomers(save: SealedSave, folder: FolderListing) -> tuple[ListedFile, ...]:
    """Return the files that are no part of the save and not durable yet; never one named like a shard."""
    known = {file.path for file in save.files}
    durable = {file.path: file.identity for file in save.late}
    shards = {file.path for file in folder.shards}
    return tuple(
        file
        for file in folder.own
        if file.path not in known and file.path not in shards and durable.get(file.path) != file.identity
    )


def lacking(save: SealedSave, record: UploadRecord, late: tuple[SealedFile, ...]) -> tuple[SealedFile, ...]:
    """Return the late files, and those missing from the COMMIT, that no supplement lists yet."""
    listed = {row for one in record.supplements for row in one.files}
    absent = [file for file in save.files if file.path in record.unlisted]
    return tuple(
        file
        for file in (*absent, *late)
        if (file.path, file.identity.size_bytes, file.fingerprint) not in listed
    )
