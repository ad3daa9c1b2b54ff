"""The records of a job that no daemon runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ckptd.daemon.state.problems import Problems
from ckptd.daemon.state.state import JobState
from ckptd.observe.audit import Audit

if TYPE_CHECKING:
    from ckptd.storage.journal.journal import Journal


def job_state(
    journal: Journal,
    *,
    required: tuple[str, ...] = (),
    problems: Problems | None = None,
    audit: Audit | None = None,
) -> JobState:
    """Make them over a journal, with an audit file beside it unless one is given."""
    return JobState(
        journal,
        config_digest="",
        required=required,
        problems=problems or Problems(),
        audit=audit or Audit(journal._path.with_name("audit.jsonl")),
        is_shared=False,
    )


class _OneRun:
    """Runs of a save_dir that is known to be of one run."""

    def is_settled(self, _ready: Any, *, has_heard_all: bool) -> bool:
        return True

    def turn(self, *, has_heard_all: bool) -> None:
        """Claim nothing."""


ONE_RUN = cast("Any", _OneRun())
