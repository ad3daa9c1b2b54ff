"""The right to remove one checkpoint from the node, made by the planner from verified commits (P1, H10).

A permit names the folder by device and inode, every file by identity, and the COMMITs that list them; it is
valid for sixty seconds of monotonic time. `local/fs.py` executes it and checks everything again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.core.identity import FolderIdentity
    from ckptd.core.save import SealedFile

VALID_SECONDS = 60.0


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

    def is_valid_at(self, now_seconds: float) -> bool:
        """Within its sixty seconds."""
        return 0 <= now_seconds - self.issued_at_seconds <= VALID_SECONDS
