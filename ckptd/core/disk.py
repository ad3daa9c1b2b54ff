"""The file system of save_dir as the planner sees it (docs/design.md P13)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system of save_dir, in bytes; `reserve_bytes` = next save × 1.1 + min_free (P13)."""

    free_bytes: int
    reserve_bytes: int
    can_clone: bool
    min_free_bytes: int = 0
    free_files: int | None = None
    """Inodes that are left; None: this file system has no such limit (btrfs)."""
    reserve_files: int = 0
    """Those of the next save."""

    @property
    def lacks_files(self) -> bool:
        """The files of the next save would not fit, however many bytes are free."""
        return self.free_files is not None and self.free_files < self.reserve_files

    @property
    def is_short(self) -> bool:
        """The next save would not fit beside `min_free`: what is ours makes room (P13)."""
        return self.free_bytes < self.reserve_bytes

    @property
    def is_full(self) -> bool:
        """A save in flight is larger than all before it, or others write here: half work of ours goes too."""
        return self.free_bytes < self.min_free_bytes
