"""Why a checkpoint is no longer on this node, in the words of whatever removed it (P17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.daemon.state import JobState
    from ckptd.journal import SaveRow


def why_gone(state: JobState, row: SaveRow) -> str | None:
    """None: it is here, was saved again, or the journal that knew is lost."""
    if row.state == "vanished":
        return "removed by somebody else"
    if row.state != "pruned":
        return None
    # the journal's row names every file of the save: it is read once
    if row.id not in state.why_pruned and (why := state.journal.why_pruned(row.id)) is not None:
        state.why_pruned[row.id] = why
    return state.why_pruned.get(row.id)
