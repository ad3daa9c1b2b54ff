"""What lay in save_dir before us: when this daemon first looked, and when the first one did (H20, adr/0157).

The first start is settled once every remote has answered. That may take days and restarts; what was saved
meanwhile was not found.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.journal_tables import AT_BEGIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.journal import Journal


@dataclass(frozen=True, slots=True)
class Beginning:
    """Tags, with and without a complete checkpoint below them."""

    now: frozenset[str]
    """There when this daemon first looked."""
    first: frozenset[str]
    """There when the journal was begun over this very directory."""


def beginning(journal: Journal, save_dir: str, inode: int, now: frozenset[str]) -> Beginning:
    """What the journal noted; else what is noted now: a new journal, one of a release that noted nothing, or
    another directory than before, of which nothing is known.
    """
    text = journal.meta(AT_BEGIN)
    known: Mapping[str, object] = json.loads(text) if text is not None else {}
    where = {"save_dir": save_dir, "inode": inode}
    tags = known.get("tags")
    if not isinstance(tags, list) or any(known.get(key) != value for key, value in where.items()):
        journal.set_meta(AT_BEGIN, json.dumps(where | {"tags": sorted(now)}))
        return Beginning(now, now)
    return Beginning(now, frozenset(tags))
