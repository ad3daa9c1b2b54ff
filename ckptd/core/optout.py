"""Which checkpoints may go before they are committed, where the job file says so (P1, docs/adr/0095).

Everything else that P5 protects stays protected; what each may rest on is said here once, for keeping,
pruning and shipping alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.permit import CommitRef
from ckptd.core.view import ZERO

if TYPE_CHECKING:
    from ckptd.core.retention import RetentionPolicy
    from ckptd.core.save import Order
    from ckptd.core.view import JobView, RemoteCommit, SaveView


def newer_commits(view: JobView, save: SaveView) -> tuple[CommitRef, ...]:
    """COMMITs of the newest later save of its branch that every required remote was seen to hold; () if none.

    By what the remotes showed, not by what lies here: the trainer may have removed the newer one.
    """
    required = [remote for remote in view.remotes if remote.is_required]
    if not required:
        return ()
    held: list[dict[tuple[str, Order], RemoteCommit]] = [
        {(c.tag, c.order): c for c in remote.commits if _is_later(c, save)} for remote in required
    ]
    common = set.intersection(*(set(one) for one in held))
    if not common:
        return ()
    newest = max(common, key=lambda key: key[1])
    return tuple(
        CommitRef(remote=remote.name, key=one[newest].key, sha256=one[newest].sha256)
        for remote, one in zip(required, held, strict=True)
    )


def _is_later(commit: RemoteCommit, save: SaveView) -> bool:
    return (
        commit.form == ZERO
        and commit.is_model_only == save.is_model_only
        and commit.branch == save.save.branch
        and commit.order > save.save.order
    )


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
    policy = view.local_retention.model_copy(update={"ladder": ()})
    if view.unuploaded == "thin" and view.disk.is_short and policy.save_total_limit is not None:
        return policy.model_copy(update={"save_total_limit": 0})
    return policy
