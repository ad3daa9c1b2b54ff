"""What a run was resumed from, where no `latest` of the trainer names it: it stays until the run has gone on.

`resume` leaves the word before it does anything else; what is no such word says nothing (docs/adr/0154).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptd.core.listing import OURS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.listing import FolderListing
    from ckptd.core.save import SealedSave

RESUMED = "resumed.json"
RESUMED_PATH = f"{OURS}/{RESUMED}"


class Resumed(BaseModel):
    """The checkpoint, and what lay beside it then."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    tag: str
    written_ns: dict[str, int]
    """Tag → greatest mtime of its shards: tells which folder it was, never which is newer (P9)."""

    def is_later(self, save: SealedSave) -> bool:
        """Whether a save was not there yet: the run has gone on."""
        known = self.written_ns.get(save.tag)
        return save.tag != self.tag and all(file.identity.mtime_ns != known for file in save.files)


def word_of(tag: str, folders: Iterable[FolderListing]) -> Resumed:
    """The word for `tag`; `folders`: all that lie in save_dir, whole or not."""
    newest = {f.tag: max((s.identity.mtime_ns for s in f.shards), default=0) for f in folders}
    return Resumed(tag=tag, written_ns=newest)


@functools.lru_cache(maxsize=64)
def read_word(text: str | None) -> Resumed | None:
    """None: nothing was resumed from, or somebody else wrote that."""
    try:
        return None if text is None else Resumed.model_validate_json(text)
    except ValidationError:
        return None
