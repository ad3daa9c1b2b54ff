"""What a run that is to end waits for: failed uploads that are wanted still, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState, UploadRecord, UploadState
from ckptd.core.policy.blockers import tried_again
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.core.policy.view import JobView
from tests.support.core_views import NAS, committed_record, job_view, save_view, sealed

FAILED = UploadRecord(remote=NAS, form=ZERO, state=UploadState.FAILED, tries=2, retry_at_seconds=1e9)


def waiting(view: JobView) -> list[UploadRecord]:
    return tried_again(view, plan(view).local_verdicts)


@pytest.mark.parametrize(
    ("changes", "is_wanted"),
    [
        ({}, True),
        ({"is_intact": False}, False),
        ({"is_intact": False, "is_held": True}, True),
        ({"is_adopted": False, "was_found_first": True}, False),
    ],
)
def test_a_failed_upload_counts_while_its_save_is_wanted(changes: dict[str, Any], is_wanted: bool) -> None:
    """Life 1203116: found at the first start, failed while it was the newest, and no newest any more."""
    old = save_view(1, sealed(1), committed=False, uploads={(NAS, ZERO): FAILED}, **changes)
    found = {"is_adopted": False, "was_found_first": True}
    view = job_view([old, save_view(2, sealed(2), **found)], existing="newest")
    assert waiting(view) == ([FAILED] if is_wanted else [])
    away = replace(view, remotes=(replace(view.remotes[0], is_attached=False),))
    assert waiting(away) == []


def test_a_universal_form_that_a_newer_one_replaced_is_not_waited_for() -> None:
    failed = FAILED.model_copy(update={"form": UNIVERSAL})
    ready = DerivedRecord(state=DerivedState.READY, is_source_verified=True)
    saves = [
        save_view(
            step,
            sealed(step),
            universal=ready,
            uploads={(NAS, ZERO): committed_record(sealed(step)), (NAS, UNIVERSAL): failed},
        )
        for step in (1, 2)
    ]
    assert len(waiting(job_view(saves[1:]))) == 1
    assert len(waiting(job_view(saves))) == 1
    refused = replace(saves[1], universal=DerivedRecord(state=DerivedState.REFUSED))
    assert waiting(job_view([refused])) == []


def test_what_is_about_to_go_unsent_is_not_waited_for() -> None:
    """`unuploaded = "delete"`: the hourly limit may hold it here for an hour."""
    old = save_view(1, sealed(1), committed=False, uploads={(NAS, ZERO): FAILED})
    saves = [old, *(save_view(step, sealed(step)) for step in (2, 3))]
    view = job_view(saves, unuploaded="delete", local_retention=RetentionPolicy(save_total_limit=1))
    assert waiting(replace(view, deletions_left=0)) == []
    assert waiting(replace(view, unuploaded="keep")) == [FAILED]
