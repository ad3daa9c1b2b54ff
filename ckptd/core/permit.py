"""The right to remove one checkpoint from the node, made by the planner alone (P1, H10).

A permit names the folder by device and inode and every file by identity; it is valid for sixty seconds of
monotonic time. `local/fs.py` executes it and checks everything again. Two kinds: one rests on verified
COMMITs of the very files, the other on a line of the job file that a person wrote (docs/adr/0095).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ckptd.core.identity import FolderIdentity
    from ckptd.core.save import SealedFile

VALID_SECONDS = 60.0

Unuploaded = Literal["keep", "thin", "delete"]
"""What may become of a checkpoint that is not committed: nothing; it goes once a newer one of its branch is
committed; the limit applies to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRef:
    """A COMMIT that a permit rests on, freshly read from `remote`."""

    remote: str
    key: str
    sha256: str


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
        """It rests on COMMITs."""
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
        """The job file lets it go; thin only beside a newer one that is committed."""
        return self.unuploaded == "delete" or (self.unuploaded == "thin" and bool(self.commits))
