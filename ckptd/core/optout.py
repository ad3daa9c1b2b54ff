"""Which checkpoints may go before they are committed, where the job file says so (P1, docs/adr/0095).

Everything else that P5 protects stays protected; what each may rest on is said here once, for keeping,
pruning and shipping alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.permit import CommitRef
from ckptd.core.view import ZERO, ShipState

if TYPE_CHECKING:
    from ckptd.core.permit import Unuploaded
    from ckptd.core.retention import RetentionPolicy
    from ckptd.core.save import Order
    from ckptd.core.view import JobView, RemoteView, SaveView


def unheard(view: JobView) -> list[str]:
    """Required remotes that were not observed since the start: what is pinned there is not known (P8).

    While there are any, nothing goes that the job file alone lets go (adr/0129).
    """
    return [remote.name for remote in view.remotes if remote.is_required and not remote.was_heard]


def newer_commits(view: JobView, save: SaveView) -> tuple[CommitRef, ...]:
    """COMMITs of the newest later save of its branch that every required remote holds; () if there is none.

    By what the remotes showed and by what was committed since; the trainer may have removed the newer one.
    """
    required = [remote for remote in view.remotes if remote.is_required]
    if not required:
        return ()
    held = [_later(view, remote, save) for remote in required]
    common = set.intersection(*(set(one) for one in held))
    if not common:
        return ()
    newest = max(common, key=lambda key: key[1])
    return tuple(one[newest] for one in held)


def _later(view: JobView, remote: RemoteView, save: SaveView) -> dict[tuple[str, Order], CommitRef]:
    """COMMITs of later saves on one remote, by tag and order."""
    after = save.order
    told: dict[tuple[str, Order], CommitRef] = {}
    for other in view.saves:
        record = other.ship(remote.name, ZERO)
        is_same_kind = other.is_model_only == save.is_model_only and other.save.branch == save.save.branch
        if is_same_kind and other.order > after and record.state is ShipState.COMMITTED:
            ref = CommitRef(
                remote=remote.name, key=record.commit_key or "", sha256=record.commit_sha256 or ""
            )
            told[other.save.tag, other.order] = ref
    seen = {
        (c.tag, c.order): CommitRef(remote=remote.name, key=c.key, sha256=c.sha256)
        for c in remote.commits
        if c.form == ZERO
        and c.is_model_only == save.is_model_only
        and c.branch == save.save.branch
        and c.order > after
    }
    return told | seen


def may_go_uncommitted(view: JobView, save: SaveView) -> bool:
    """The job file lets it go although it is not committed; P5 is not asked here."""
    if view.unuploaded == "delete":
        return True
    return view.unuploaded == "thin" and bool(newer_commits(view, save))


def loose_policy(view: JobView) -> RetentionPolicy:
    """What keeps an uncommitted one that may go: under disk pressure not the limit, which counts commits.

    Without pressure it stays within the limit for as long as the link may still take it. No ladder: what was
    never committed does not age.
    """
    return loose_under(view.local_retention, view.unuploaded, is_short=view.disk.is_short)


def loose_under(policy: RetentionPolicy, unuploaded: Unuploaded, *, is_short: bool) -> RetentionPolicy:
    """The same of a disk that is only thought of."""
    policy = policy.model_copy(update={"ladder": ()})
    if unuploaded == "thin" and is_short and policy.save_total_limit is not None:
        return policy.model_copy(update={"save_total_limit": 0})
    return policy
