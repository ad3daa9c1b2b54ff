"""What the deciding thread remembers and the journal does not: when something may be tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.view import ZERO, ShipRecord, ShipState
from ckptd.daemon.problems import Problems
from ckptd.daemon.state import JobState
from ckptd.journal import Journal
from tests.unit.core_views import sealed

if TYPE_CHECKING:
    from pathlib import Path


def test_a_backoff_outlives_reading_the_journal_again(tmp_path: Path) -> None:
    state = JobState(journal=Journal(tmp_path / "journal.db"), problems=Problems())
    save_id = state.journal.add_save(sealed(1), found_first=False, adopted=True, seen_at=0.0)
    state.load()
    failed = ShipRecord(remote="nas", form=ZERO, state=ShipState.FAILED, tries=2, retry_at_seconds=1e9)
    state.put_ship(save_id, failed)
    state.load()
    assert state.ship(save_id, "nas", ZERO) == failed
    state.put_ship(save_id, failed.model_copy(update={"state": ShipState.SHIPPING, "retry_at_seconds": 0.0}))
    state.load()
    assert state.ship(save_id, "nas", ZERO).retry_at_seconds == 0.0
    state.journal.close()
