"""Know which save a run was resumed from: `ckptd resume` writes it before it does anything else.

It protects the save where no `latest` of the trainer names it, until the run has committed a newer one. A
file that cannot be parsed protects nothing.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptd.core.model.listing import OURS, FolderListing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.model.save import SealedSave

RESUMED = "resumed.json"
RESUMED_PATH = f"{OURS}/{RESUMED}"


class ResumeMarker(BaseModel):
    """The checkpoint, and what lay beside it then."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    tag: str
    written_ns: dict[str, int]
    """Tag → greatest mtime of its shards: tells which folder it was, never which is newer (P9)."""

    def is_later(self, save: SealedSave) -> bool:
        """Tell whether a save was not there yet: the run has gone on."""
        known = self.written_ns.get(save.tag)
        return save.tag != self.tag and all(file.identity.mtime_ns != known for file in save.files)


def resume_marker_of(tag: str, folders: Iterable[FolderListing]) -> ResumeMarker:
    """Return the resume marker of `tag`; `folders`: all in save_dir, whole or not."""
    newest = {f.tag: max((s.identity.mtime_ns for s in f.shards), default=0) for f in folders}
    return ResumeMarker(tag=tag, written_ns=newest)


@functools.lru_cache(maxsize=64)
def read_resume_marker(text: str | None) -> ResumeMarker | None:
    """Read what `resume` wrote; None: nothing was resumed from, or somebody else wrote that file."""
    try:
        return None if text is None else ResumeMarker.model_validate_json(text)
    except ValidationError:
        return None
