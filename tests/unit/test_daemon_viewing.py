"""What the planner sees of a save whose folder has gone."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from ckptd.core.rows import SaveState
from ckptd.core.view import DerivedRecord
from ckptd.daemon import viewing
from tests.unit.core_views import sealed


def test_a_folder_that_a_worker_still_removes_counts_as_pruned() -> None:
    """Its name goes first, the row is ended when all has gone: a turn between them dropped the universal form
    that a ladder leaves in its place."""

    def is_pruned(state: SaveState) -> bool:
        row: Any = SimpleNamespace(
            id=1, save=sealed(1), state=state, adopted=True, found_first=False, held=False, weights={}
        )
        row.derived = DerivedRecord()
        job: Any = SimpleNamespace(backfill="all", remotes=())
        daemon: Any = SimpleNamespace(ships={}, busy=Counter())
        return viewing._fresh(job, daemon, row, None, frozenset()).is_pruned

    assert [is_pruned(state) for state in ("present", "pruned", "vanished", "superseded")] == [
        True,
        True,
        False,
        False,
    ]
