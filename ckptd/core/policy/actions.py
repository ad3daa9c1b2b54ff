"""Define the actions of a plan: plain data, executed by the daemon, shown by dry runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ckptd.core.model.listing import ListedFile
    from ckptd.core.model.save import SealedFile
    from ckptd.core.policy.permit import DeletePermit
    from ckptd.core.policy.retention import RetentionVerdict
    from ckptd.core.policy.view import CommitRef, RemoteCommit


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Read what the remote knows of a tag before choosing a generation."""

    remote: str
    tag: str
    save_id: int
    form: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Upload one form of a save to a remote, as generation g."""

    save_id: int
    remote: str
    form: str
    generation: int
    attempt: int
    is_streamed: bool = False
    """A form that lies nowhere here: made of the shards while it is sent (docs/adr/0093)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLateFiles:
    """Upload files that appeared in a folder after its COMMIT, and commit them beside it."""

    save_id: int
    remote: str
    files: tuple[SealedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadEarly:
    """Upload one shard of a save that is still being written; only its own upload proves it (adr/0220)."""

    remote: str
    tag: str
    file: ListedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelUpload:
    """Cancel the upload under way; what is durable of it is not sent again."""

    remote: str
    reason: str = "a ZeRO form waits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """Make the universal form of a save on this node."""

    save_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConverting:
    """Give up the conversion under way, with what it has written: the trainer needs the disk space."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Clone the files of a complete save into `_ckptd/hold` until it is committed."""

    save_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseHold:
    """Remove the clones of a save."""

    save_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropDerived:
    """Remove the universal form of a save from this node."""

    save_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PointUniversal:
    """Let `latest_universal` in save_dir name the universal form of a save, or remove it (None)."""

    tag: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmCommits:
    """Read the COMMITs of a save afresh on every required remote."""

    save_id: int
    commits: tuple[CommitRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteLocal:
    """Remove a checkpoint from the node."""

    save_id: int
    permit: DeletePermit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRemote:
    """Remove a COMMIT and what only it lists from a remote."""

    remote: str
    commit: RemoteCommit
    reason: str
    instead: RemoteCommit | None = None
    """The form of the same save that must be whole there before this one goes."""
    counted: tuple[str, ...] = ()
    """Digests of the COMMITs that stay there: with one of them disputed this one may have to stay too."""


ActionHere = Convert | StopConverting | Hold | ReleaseHold | DropDerived | PointUniversal | DeleteLocal
"""Actions on this node, run by workers."""
ActionThere = Describe | Upload | UploadLateFiles | UploadEarly | CancelUpload | ConfirmCommits | DeleteRemote
"""Actions in remotes, requested of their children."""
Action = ActionHere | ActionThere


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Report how far a drain is: tags, newest first."""

    missing: tuple[str, ...] = ()
    """Complete here and not committed on every required remote."""
    late: tuple[str, ...] = ()
    """Those that will not be uploaded in time at the speed of the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalRow:
    """Say what becomes of one checkpoint in one place that `ckptd rm` named."""

    tag: str
    remote: str | None
    """None: this node's disk."""
    verdict: Literal["unknown", "delete", "wait", "keep"]
    """unknown: not enough was read yet; wait: it is deleted as soon as `why` is over."""
    forms: tuple[str, ...] = ()
    bytes: int = 0
    """Describe a checkpoint on this node."""
    why: str = ""
    next_step: str = ""
    commits: tuple[str, ...] = ()
    """Digests of the COMMITs of its ZeRO form: what a person agrees to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Actions in order, and for everything there is why it stays or goes."""

    actions: tuple[Action, ...]
    local_verdicts: dict[int, RetentionVerdict]
    """Save on the node → what becomes of its folder."""
    remote_verdicts: dict[tuple[str, str], RetentionVerdict]
    """(remote, COMMIT key) → what becomes of it."""
    drained: Drained | None = None
    """State of the drain; None: the job does not drain."""
    removal: tuple[RemovalRow, ...] = ()
    """While a person's `ckptd rm` lasts: what is left of it in each place."""
