"""Removals from a remote and the seat belt: what a remote refuses uses it up once, not at each try."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ckptd.config import job_from_arguments
from ckptd.core.actions import Retire
from ckptd.daemon.problems import Problems
from ckptd.daemon.retiring import Retiring
from ckptd.daemon.state import JobState
from ckptd.journal import Journal
from ckptd.observe.audit import Audit
from tests.unit.core_views import remote_commit, sealed

if TYPE_CHECKING:
    from pathlib import Path


def test_tries_of_one_removal_count_once(tmp_path: Path) -> None:
    """A remote that was full refused one nine times: the others could not go for an hour."""
    state = JobState(journal=Journal(tmp_path / "journal.db"), problems=Problems())
    ordered: list[Any] = []

    def order(message: object, _: object) -> int:
        ordered.append(message)
        return len(ordered)

    link: Any = SimpleNamespace(order=order, ship_order=None)
    (tmp_path / "run").mkdir()
    job = job_from_arguments(str(tmp_path / "run"), str(tmp_path / "nas"), check_paths=False)
    (remote,) = (config.name for config in job.remotes)
    retiring = Retiring(job, state, {remote: link}, Audit(tmp_path / "audit.jsonl"), lambda: None)
    for step in (1, 1, 1, 2):
        retiring.retire(
            Retire(remote=remote, commit=remote_commit(sealed(step)), reason="save_total_limit 2")
        )
    assert len(ordered) == 4
    assert len(state.retired_at) == 2
    state.journal.close()
