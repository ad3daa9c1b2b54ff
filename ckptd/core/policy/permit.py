"""Permit the deletion of one checkpoint from the node; only the planner makes permits.

A permit names the folder by device and inode and every file by identity, and expires after sixty seconds of
monotonic time. `ckptd.storage.local.fs` executes it and checks everything again. There are two kinds: one
rests on verified COMMITs of the very files, the other on a line of the job file that a person wrote (ADR
0095).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.policy.retention import Unuploaded
from ckptd.core.policy.view import CommitRef

if TYPE_CHECKING:
    from ckptd.base.identity import FolderIdentity
    from ckptd.core.model.save import Order, SealedFile
    from ckptd.core.policy.retention import RetentionPolicy
    from ckptd.core.policy.view import JobView, RemoteView, SaveView

VALID_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePermit:
    """Permission to remove the listed files of one folder, and the folder if nothing else is in it."""

    tag: str
    generation: int
    folder: FolderIdentity
    files: tuple[SealedFile, ...]
    commits: tuple[CommitRef, ...]
    issued_at_seconds: float
    """Monotonic."""
    reason: str
    until_seconds: float | None = None
    """Monotonic; of a shared directory, when the lease must have been read again."""

    @property
    def is_grounded(self) -> bool:
        """Tell whether the permit rests on COMMITs."""
        return bool(self.commits)

    def is_valid_at(self, now_seconds: float) -> bool:
        """Within its sixty seconds."""
        is_young = 0 <= now_seconds - self.issued_at_seconds <= VALID_SECONDS
        return is_young and (self.until_seconds is None or now_seconds <= self.until_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptOutPermit(DeletePermit):
    """Permission to remove a checkpoint that is not committed, because the job file says so.

    With "thin" `commits` are those of the newer checkpoint that is safe; with "delete" there may be none.
    """

    unuploaded: Unuploaded

    @property
    def is_grounded(self) -> bool:
        """Tell whether the job file allows it; `thin` only beside a newer committed save."""
        return self.unuploaded == "delete" or (self.unuploaded == "thin" and bool(self.commits))


# --- Deletion of uncommitted checkpoints, where the job file allows it (ADR 0095) ------------------------
# The newest checkpoint and all else that retention protects stay protected. The rule stands here once, for
# local retention, deletion and uploads alike.


def unobserved_remotes(view: JobView) -> list[str]:
    """Return the required remotes not observed since the start: pins recorded there are not known yet.

    While there are any, nothing is deleted by the job file's word alone (ADR 0165).
    """
    return [remote.name for remote in view.remotes if remote.is_required and not remote.was_heard]


def newer_commits(view: JobView, save: SaveView) -> tuple[CommitRef, ...]:
    """Return the COMMITs of the newest later save of its branch on every required remote, or ().

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
    recorded: dict[tuple[str, Order], CommitRef] = {}
    for other in view.saves:
        record = other.upload(remote.name, ZERO)
        is_same_kind = other.is_model_only == save.is_model_only and other.save.branch == save.save.branch
        if is_same_kind and other.order > after and record.state is UploadState.COMMITTED:
            ref = CommitRef(
                remote=remote.name, key=record.commit_key or "", sha256=record.commit_sha256 or ""
            )
            recorded[other.save.tag, other.order] = ref
    seen = {
        (c.tag, c.order): CommitRef(remote=remote.name, key=c.key, sha256=c.sha256)
        for c in remote.commits
        if c.form == ZERO
        and c.is_model_only == save.is_model_only
        and c.branch == save.save.branch
        and c.order > after
    }
    return recorded | seen


def may_go_uncommitted(view: JobView, save: SaveView) -> bool:
    """Tell whether the job file allows to delete it uncommitted; other protections are checked elsewhere."""
    if view.unuploaded == "delete":
        return True
    return view.unuploaded == "thin" and bool(newer_commits(view, save))


def uncommitted_policy(view: JobView) -> RetentionPolicy:
    """Return the policy for uncommitted saves that may be deleted.

    The limits count commits; under disk pressure (`thin`) they protect none. Without pressure a save within
    them stays, since its upload may still succeed. No ladder: a save that was never committed does not age.
    """
    policy = view.local_retention.model_copy(update={"ladder": ()})
    if view.unuploaded == "thin" and view.disk.is_short and policy.has_limit:
        return policy.model_copy(update={"save_total_limit": 0})
    return policy
