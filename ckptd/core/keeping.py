"""Which checkpoints stay, on the node and on each remote, each with its reasons (docs/design.md P1, P5, §5).

The policy's keeps are joined with everything that must never go, whatever the policy says; what is left
without a reason is for the planner to remove, with a permit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.permit import CommitRef
from ckptd.core.retention import Item, keep_reasons
from ckptd.core.view import ZERO, ShipState

if TYPE_CHECKING:
    from ckptd.core.manifest import Best
    from ckptd.core.save import Order
    from ckptd.core.view import JobView, SaveView


def newest(view: JobView, *, is_model_only: bool = False) -> SaveView | None:
    """The newest intact save in (branch, step, save_seq); models alone are ranked among themselves."""
    known = (s for s in view.saves if s.is_intact and s.is_model_only == is_model_only)
    return max(known, key=lambda s: s.save.order, default=None)


def is_committed(view: JobView, save: SaveView) -> bool:
    """Committed on every required remote, of which there must be at least one (P1)."""
    required = [r.name for r in view.remotes if r.is_required]
    return bool(required) and all(save.ship(r, ZERO).state is ShipState.COMMITTED for r in required)


def keep_local(view: JobView) -> dict[int, tuple[str, ...]]:
    """Reasons to keep each save on the node: the policy's, joined with everything P5 forbids to delete."""
    kept: dict[int, tuple[str, ...]] = {}
    for is_model_only in (False, True):
        present = [s for s in view.saves if s.is_present and s.is_model_only == is_model_only]
        committed = [s for s in present if is_committed(view, s) and s.is_intact]
        items = [_item(view, s) for s in committed]
        by_policy = keep_reasons(items, view.local_retention)
        ground = _Ground(
            top=newest(view, is_model_only=is_model_only),
            newest_committed=max((s.save.order for s in committed), default=None),
            latest=view.latest,
            best=best_tag(view),
        )
        kept |= {
            s.id: by_policy.get(str(s.id), ()) + _protection(s, ground, is_committed=is_committed(view, s))
            for s in present
        }
    return kept


def _item(view: JobView, save: SaveView) -> Item:
    """A save on the node as the policy sees it; dated by the last of its COMMITs on required remotes."""
    mine = {ref.key for ref in commits_of(view, save)}
    times = [
        c.committed_at_seconds for r in view.remotes if r.is_required for c in r.commits if c.key in mine
    ]
    known = [t for t in times if t is not None]
    is_dated = bool(known) and len(known) == len(times)
    return Item(
        key=str(save.id),
        order=save.save.order,
        pinned=save.is_pinned,
        committed_at_seconds=max(known) if is_dated else None,
        score=_score(view, save.save.best),
    )


def _score(view: JobView, best: Best | None) -> float | None:
    """Higher is better; None: no value of the job's metric is known."""
    if best is None or best.metric != view.metric:
        return None
    return best.value if view.is_higher_better else -best.value


@dataclass(frozen=True, slots=True)
class _Ground:
    """What each save is compared with."""

    top: SaveView | None
    newest_committed: Order | None
    latest: str | None
    best: str | None


def _protection(save: SaveView, ground: _Ground, *, is_committed: bool) -> tuple[str, ...]:
    top, newest_committed = ground.top, ground.newest_committed
    why = (
        (not is_committed, "not committed on every required remote"),
        (not save.is_intact, "changed since it was sealed"),
        (top is not None and save.id == top.id, "newest complete"),
        (newest_committed is None or save.save.order > newest_committed, "newer than the newest committed"),
        (save.save.tag == ground.latest, "latest names it"),
        (not save.is_adopted, "found at the first start (ckptd adopt)"),
        (save.is_busy, "being read"),
        (bool(save.has_unlisted), f"holds files that no COMMIT lists: {', '.join(save.has_unlisted[:3])}"),
        (_is_ahead(save, top), "abandoned branch, the new one has not passed it"),
        (save.save.tag == ground.best, "best_model_checkpoint"),
    )
    return tuple(text for holds, text in why if holds)


def best_tag(view: JobView) -> str | None:
    """What the newest save's trainer calls the best so far; its own folder name, whatever the path (H37)."""
    known = [s for s in view.saves if s.save.best_checkpoint is not None]
    return max(known, key=lambda s: s.save.order).save.best_checkpoint if known else None


def _is_ahead(save: SaveView, top: SaveView | None) -> bool:
    """At or above the newest complete step (H7, H10): never deleted, whatever its branch."""
    return top is not None and save.id != top.id and save.save.step >= top.save.step


def keep_remote(view: JobView) -> dict[tuple[str, str], tuple[str, ...]]:
    """Reasons to keep each zero COMMIT of each remote; local facts only add reasons (§5 *Retention*)."""
    reasons: dict[tuple[str, str], tuple[str, ...]] = {}
    here = {(s.save.tag, s.save.order): s for s in view.saves if s.is_present}
    pinned = {s.save.tag for s in view.saves if s.is_pinned}
    best = best_tag(view)
    for remote in view.remotes:
        commits = [c for c in remote.commits if c.form == ZERO]
        by_policy: dict[str, tuple[str, ...]] = {}
        for is_model_only in (False, True):
            mine = [c for c in commits if c.is_model_only == is_model_only]
            items = [
                Item(
                    key=c.key,
                    order=c.order,
                    pinned=c.tag in pinned,
                    committed_at_seconds=c.committed_at_seconds,
                    score=_score(view, c.best),
                )
                for c in mine
            ]
            by_policy |= keep_reasons(items, remote.retention)
        for commit in commits:
            kept = by_policy[commit.key]
            is_here = (commit.tag, commit.order) in here or commit.tag in view.unsealed_tags
            if is_here and remote.retention.deletes:
                kept += ("still on this node",)
            if commit.tag == best:
                kept += ("best_model_checkpoint",)
            reasons[remote.name, commit.key] = kept
    return reasons


def commits_of(view: JobView, save: SaveView) -> tuple[CommitRef, ...]:
    """The COMMITs of its zero form on every required remote."""
    refs: list[CommitRef] = []
    for remote in view.remotes:
        record = save.ship(remote.name, ZERO)
        if remote.is_required and record.commit_key and record.commit_sha256:
            refs.append(CommitRef(remote=remote.name, key=record.commit_key, sha256=record.commit_sha256))
    return tuple(refs)
