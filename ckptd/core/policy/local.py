"""Decide which checkpoints stay on the node, each with its reasons (docs/design.md §5).

The policy's keeps are joined with everything that must never be deleted, whatever the policy says; what is
left without a reason is for the planner to delete, with a permit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from ckptd.core.model.manifest import cells_of
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState, UploadState
from ckptd.core.model.save import best_named
from ckptd.core.policy.derived_forms import not_to_stay
from ckptd.core.policy.permit import may_go_uncommitted, uncommitted_policy
from ckptd.core.policy.retention import (
    LocalVerdicts,
    PolicyFacts,
    PolicyItem,
    RetentionVerdict,
    apply_policy,
)
from ckptd.core.policy.view import HERE, CommitRef

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckptd.core.model.records import UploadRecord
    from ckptd.core.model.save import Best, Order
    from ckptd.core.policy.view import JobView, RemoteView, SaveView


BEING_READ = "being read"
_ALONE = frozenset({UNIVERSAL})
NEWEST = "newest committed"
"""Reason that the policy gives for the newest that it is shown; for an uncommitted one it would be wrong."""


def newest(
    view: JobView, *, is_model_only: bool = False, leaves_out: Collection[int] = ()
) -> SaveView | None:
    """Return the newest intact save in (branch, step, save_seq); models alone are ranked among themselves."""
    known = (s for s in view.intact[is_model_only] if s.id not in leaves_out)
    return next(known, None)


def is_committed(view: JobView, save: SaveView) -> bool:
    """Tell whether a save is committed on every required remote, of which there must be at least one."""
    required = [r.name for r in view.remotes if r.is_required]
    return bool(required) and all(save.upload(r, ZERO).state is UploadState.COMMITTED for r in required)


def was_committed(uploads: Mapping[tuple[str, str], UploadRecord], required: Sequence[str]) -> bool:
    """Tell whether every required remote committed the save, even if its retention deleted it since.

    Such a save needs no hold.
    """
    done = (UploadState.COMMITTED, UploadState.DELETED)
    zero = [uploads.get((name, ZERO)) for name in required]
    return bool(zero) and all(record is not None and record.state in done for record in zero)


def keep_local(view: JobView) -> LocalVerdicts:
    """Return the reasons to keep each save on the node: the policy's, and those that forbid any deletion."""
    zero: dict[int, RetentionVerdict] = {}
    universal: dict[int, RetentionVerdict] = {}
    forbidden: dict[int, tuple[str, ...]] = {}
    for is_model_only in (False, True):
        kind = [s for s in view.saves if s.is_model_only == is_model_only]
        if not kind:
            continue
        present = [s for s in kind if s.is_present]
        safe = {s.id for s in present if is_committed(view, s)}
        committed = [s for s in present if s.id in safe and s.is_intact]
        stepped = [s for s in kind if not s.is_present and s.is_pruned and _is_ready(s)]
        unproven = _unproven_parts(view, present)
        whole = [s for s in present if s.is_intact and s.id not in safe | unproven]
        droppable = {s.id: s for s in whole if may_go_uncommitted(view, s)}
        by_policy = _by_policy(view, [*committed, *stepped], list(droppable.values()))
        top, proven = (newest(view, is_model_only=is_model_only, leaves_out=out) for out in ((), unproven))
        facts = _Facts(
            top=top,
            newest=frozenset(one.id for one in (top, proven) if one is not None),
            unproven=unproven,
            newest_committed=max((s.order for s in committed), default=None),
            latest=view.latest,
            resumed=resumed_tag(view),
            best=frozenset({best_here(view), *(best_there(r) for r in view.remotes if r.is_required)}),
            unread=_unread(view, present),
            intact=view.intact[is_model_only],
        )
        for save in present:
            verdict = by_policy.get(str(save.id), {}).get(ZERO) or RetentionVerdict()
            is_safe, is_droppable = save.id in safe, save.id in droppable
            zero[save.id] = verdict.kept_for(
                *_protection(save, facts, is_committed=is_safe, is_droppable=is_droppable)
            )
            strict = (
                _protection(save, facts, is_committed=is_safe, is_droppable=False) if view.removal else ()
            )
            forbidden[save.id] = (*(("pinned",) if save.is_pinned else ()), *strict)
        for save in (*present, *stepped) if view.local_retention.has_rung(UNIVERSAL) else ():
            verdict = by_policy.get(str(save.id), {}).get(UNIVERSAL) or RetentionVerdict()
            if not verdict.keeps and save.id in zero:  # what stays whole may yet have to leave it instead
                verdict = verdict.kept_for(*zero[save.id].keeps)
            universal[save.id] = verdict
    return LocalVerdicts(zero=zero, universal=universal, forbidden=forbidden)


def _by_policy(
    view: JobView, committed: list[SaveView], droppable: list[SaveView]
) -> dict[str, dict[str, RetentionVerdict]]:
    """Return the policy's verdicts; uncommitted saves count only where they may be deleted."""
    dates = dates_of(view)
    required = [remote.name for remote in view.remotes if remote.is_required]
    # what the same turn drops is no reason to delete a checkpoint
    leaving = not_to_stay(view) if view.local_retention.keep_bytes is not None else frozenset()
    held = [_held(view, save, required, dates, leaving) for save in committed]
    by_policy = apply_policy(held, view.local_retention)
    if not droppable:
        return by_policy
    everything = [*held, *(_held(view, save, required, dates, leaving) for save in droppable)]
    among_all = apply_policy(everything, uncommitted_policy(view))
    mine = {str(save.id): {ZERO: _uncommitted(among_all[str(save.id)][ZERO])} for save in droppable}
    return (
        apply_policy(everything, view.local_retention) if view.unuploaded == "delete" else by_policy
    ) | mine


def _uncommitted(verdict: RetentionVerdict) -> RetentionVerdict:
    return replace(verdict, keeps=tuple(why for why in verdict.keeps if why != NEWEST))


def _is_ready(save: SaveView) -> bool:
    return save.universal.state is DerivedState.READY


Dates = dict[tuple[str, str], float | None]
"""(remote, key of a COMMIT) → when it was made; None: it carries no time."""


def dates_of(view: JobView) -> Dates:
    """Return the times of COMMITs by (remote, key): the same key may be another save's on another remote."""
    return {
        (remote.name, commit.key): commit.committed_at_seconds
        for remote in view.remotes
        if remote.is_required
        for commit in remote.commits
    }


def _held(
    view: JobView, save: SaveView, required: Sequence[str], dates: Dates, leaving: Collection[int]
) -> PolicyFacts:
    """Return the facts of a save for the policy, dated by the last of its COMMITs on required remotes.

    `leaving`: saves whose universal form is not counted.
    """
    is_ready = _is_ready(save)
    keys = ((name, save.upload(name, ZERO).commit_key or "") for name in required)
    times = [dates[key] for key in keys if key in dates]
    known = [at for at in times if at is not None]
    forms = {ZERO} if save.is_present else set()
    return PolicyFacts(
        item=PolicyItem(
            key=str(save.id),
            order=save.order,
            bytes=bytes_here(save, has_universal=save.id not in leaving),
            pinned=save.is_pinned,
            is_damaged=any((HERE, save.save.tag, form) in view.damaged for form in (ZERO, UNIVERSAL)),
            has_damaged_copy=save.save.tag in view.damaged_tags,
            committed_at_seconds=max(known) if known and len(known) == len(times) else None,
            score=score_of(view, save.save.best),
        ),
        forms=frozenset(forms | ({UNIVERSAL} if is_ready else set())),
        standing=_ALONE if is_ready and save.is_self_contained else frozenset(),
    )


def bytes_here(save: SaveView, *, has_universal: bool = True) -> int:
    """Return the bytes of a save's forms on this node; a clone takes none of its own."""
    is_counted = has_universal and _is_ready(save) and not save.universal.is_cloned
    made = save.universal.bytes if is_counted else 0
    return made + (save.save.total_bytes if save.is_present else 0)


def score_of(view: JobView, best: Best | None) -> float | None:
    """Higher is better; None: no value of the job's metric is known."""
    if best is None or best.metric != view.metric:
        return None
    return best.value if view.is_higher_better else -best.value


@dataclass(frozen=True, slots=True)
class _Facts:
    """Hold the facts that each save is compared with."""

    top: SaveView | None
    newest: frozenset[int]
    """`top`, and the newest that is no unproven part."""
    unproven: frozenset[int]
    newest_committed: Order | None
    latest: str | None
    resumed: str | None
    """The tag that the trainer goes on from, until something that it saved since is committed."""
    best: frozenset[str | None]
    unread: frozenset[int]
    intact: tuple[SaveView, ...]
    """Newest first."""


def _protection(save: SaveView, facts: _Facts, *, is_committed: bool, is_droppable: bool) -> tuple[str, ...]:
    top, newest_committed = facts.top, facts.newest_committed
    is_newer = newest_committed is None or save.order > newest_committed
    why = (
        (not is_committed and not is_droppable, "not committed on every required remote"),
        (not save.is_intact, "changed since it was sealed"),
        (save.id in facts.newest, "newest complete"),
        (is_newer and not is_droppable, "newer than the newest committed"),
        (save.save.tag == facts.latest, "latest names it"),
        (not save.is_adopted, "there before ckptd (ckptd accept --existing)"),
        (save.is_busy, BEING_READ),
        (bool(save.has_unlisted), _unlisted(save) if save.has_unlisted else ""),
        (
            may_be_newest(save, facts.intact),
            "nothing proves that it is not the newest (the next save will)",
        ),
        (_is_ahead(save, top), _ahead(save, top)),
        (save.save.tag == facts.resumed, "resumed from, and nothing saved since is committed"),
        (save.save.tag in facts.best, "best_model_checkpoint"),
        (is_committed and save.id in facts.unread, "its COMMIT was not read yet, which names the best"),
        (save.id in facts.unproven, "no other node is known to hold the rest of it"),
    )
    return tuple(text for holds, text in why if holds)


def resumed_tag(view: JobView) -> str | None:
    """Return the tag that the trainer goes on from, until something that it saved since is committed."""
    word = view.resumed
    if word is None:
        return None
    later = (s for s in view.saves if s.is_intact and not s.is_model_only and word.is_later(s.save))
    return None if any(is_committed(view, save) for save in later) else word.tag


def _unlisted(save: SaveView) -> str:
    return f"holds files that no COMMIT lists: {', '.join(save.has_unlisted[:3])}"


def best_here(view: JobView) -> str | None:
    """Return the tag that the newest save here names as the best so far, without its path."""
    return best_named((s.order, s.save.best_checkpoint) for s in view.saves)


def best_there(remote: RemoteView) -> str | None:
    """Return the tag that the newest COMMIT names as the best: only one node has the trainer's record."""
    return best_named((c.order, c.best_tag) for c in remote.commits)


def _unread(view: JobView, present: Sequence[SaveView]) -> frozenset[int]:
    """Parts of saves over several nodes whose COMMITs were not read yet: these bring the trainer's word here.

    Not waited for where the job file has the limit apply whatever the remote does.
    """
    parts = [s for s in present if s.save.is_part]
    if not parts or view.unuploaded == "delete":
        return frozenset()
    read = {(r.name, c.key) for r in view.remotes if r.is_required for c in r.commits}
    names = [r.name for r in view.remotes if r.is_required]
    return frozenset(s.id for s in parts if not {(n, s.upload(n, ZERO).commit_key) for n in names} <= read)


def _unproven_parts(view: JobView, present: Sequence[SaveView]) -> frozenset[int]:
    """Return the parts that may be all that a trainer wrote before it died; only a COMMIT proves them whole.

    A part is sealed because another node was heard of, which may turn out to be of another run, and stays
    sealed. Without a COMMIT the job must still be known to run on several nodes, and no save here may have
    been written by more ranks of the same grid than this one.
    """
    done = (UploadState.COMMITTED, UploadState.DELETED)
    parts = [s for s in present if s.save.is_part and all(r.state not in done for r in s.uploads.values())]
    if not parts or not view.is_spread:
        return frozenset(s.id for s in parts)
    shares = {(_size_of(s), cells_of(s.save.files)) for s in present}
    return frozenset(
        s.id
        for s in parts
        if any(size == _size_of(s) and cells_of(s.save.files) < held for size, held in shares)
    )


def _size_of(save: SaveView) -> tuple[int, int]:
    return save.save.grid.dp, save.save.grid.mm_count


def may_be_newest(save: SaveView, newest_first: Sequence[SaveView]) -> bool:
    """Tell whether a save may be the newest: its order to all newer ones is in doubt."""
    newer = takewhile(lambda s: s.order > save.order, newest_first)
    doubts = (save.id in s.save.rivals or s.id in save.save.rivals for s in newer)
    return next(doubts, False) and all(doubts)


def _is_ahead(save: SaveView, top: SaveView | None) -> bool:
    """Tell whether a save is at or above the newest complete step: never deleted, whatever its branch."""
    return top is not None and save.id != top.id and save.save.step >= top.save.step


def _ahead(save: SaveView, top: SaveView | None) -> str:
    is_beside = top is not None and save.save.branch == top.save.branch
    return "of the newest's step" if is_beside else "abandoned branch, the new one has not passed it"


def commits_of(view: JobView, save: SaveView) -> tuple[CommitRef, ...]:
    """Return the COMMITs of its ZeRO form on every required remote, and the supplements beside them."""
    refs: list[CommitRef] = []
    for remote in view.remotes:
        record = save.upload(remote.name, ZERO)
        if remote.is_required and record.commit_key and record.commit_sha256:
            refs.append(CommitRef(remote=remote.name, key=record.commit_key, sha256=record.commit_sha256))
            refs += [CommitRef(remote=remote.name, key=s.key, sha256=s.sha256) for s in record.supplements]
    return tuple(refs)
