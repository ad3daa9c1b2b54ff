"""`unuploaded = "thin" | "delete"`: what goes before its COMMIT, on what that rests, what stays (P1, P5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.model.layouts import Grid, ShardKey
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.model.save import SealedSave
from ckptd.core.policy.actions import ConfirmCommits, DeleteLocal, Hold, ReleaseHold, Upload
from ckptd.core.policy.permit import DeletePermit, OptOutPermit
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import Ephemeral, RetentionPolicy
from ckptd.core.policy.view import CommitRef, Confirmation, Disk, JobView, SaveView
from tests.support.core_views import NAS, committed_record, job_view, key_of, remote_commit, save_view, sealed

SHORT = Disk(free_bytes=10, reserve_bytes=1000, can_clone=False)


def of(view: JobView, kind: type[Any]) -> list[Any]:
    return [a for a in plan(view).actions if isinstance(a, kind)]


def pruned(view: JobView) -> list[str]:
    return [a.permit.tag for a in of(view, DeleteLocal)]


def saves(committed: set[int], newest: int = 6, **changes: Any) -> list[SaveView]:
    return [save_view(n, sealed(n), committed=n in committed, **changes) for n in range(1, newest + 1)]


def commit_of(step: int) -> Confirmation:
    """The newer save's COMMIT, read afresh."""
    save = sealed(step)
    ref = CommitRef(remote=NAS, key=key_of(save), sha256=f"sha-{save.tag}-zero")
    return Confirmation(commits=(ref,), at_seconds=99.0)


def loose(committed: set[int], how: str, *, limit: int | None = 1, **changes: Any) -> JobView:
    """Six saves of a job with that opt-out; every question about a COMMIT was answered well."""
    held = saves(committed, **changes.pop("saves", {}))
    answers = {s.id: commit_of(max(committed)) if committed else commit_of(9) for s in held}
    answers |= {s.id: commit_of(s.id) for s in held if s.id in committed}
    policy = RetentionPolicy(save_total_limit=limit)
    return job_view(
        held, **({"unuploaded": how, "confirmations": answers, "local_retention": policy} | changes)
    )


def test_thin_lets_go_what_is_older_than_a_committed_one() -> None:
    """4 is committed: 1 to 3 go, each by a permit that rests on the COMMIT of 4; 5 and 6 stay."""
    actions = of(loose({4}, "thin"), DeleteLocal)
    assert [a.permit.tag for a in actions] == ["s1b1", "s2b1", "s3b1"]
    for action in actions:
        assert isinstance(action.permit, OptOutPermit)
        assert action.permit.commits == commit_of(4).commits
        assert action.permit.reason.startswith('unuploaded = "thin"')


def test_keep_lets_nothing_uncommitted_go() -> None:
    assert pruned(loose({4}, "keep")) == []
    assert pruned(loose({4}, "keep", disk=SHORT)) == []


def test_thin_without_any_commit_lets_nothing_go() -> None:
    assert pruned(loose(set(), "thin", disk=SHORT)) == []


def test_thin_asks_for_the_newer_commit_first_and_waits_for_a_remote_that_is_away() -> None:
    view = loose({4}, "thin", confirmations={})
    asked = of(view, ConfirmCommits)
    assert [a.commits for a in asked] == [commit_of(4).commits] * 3
    away = replace(view, remotes=tuple(replace(r, is_attached=False) for r in view.remotes))
    assert of(away, ConfirmCommits) == []
    assert pruned(away) == []


def test_thin_knows_of_a_commit_before_the_next_look_at_the_remote() -> None:
    """Else the next older one would be sent in between."""
    view = loose({4}, "thin")
    unseen = replace(view, remotes=tuple(replace(r, commits=()) for r in view.remotes))
    assert pruned(unseen) == ["s1b1", "s2b1", "s3b1"]


def test_thin_lets_nothing_go_on_a_model_alone() -> None:
    """A remote shows its COMMIT, and nothing can be resumed from that."""
    model = replace(remote_commit(sealed(9)), is_model_only=True)
    view = loose(set(), "thin", disk=SHORT)
    view = replace(view, remotes=tuple(replace(r, commits=(model,)) for r in view.remotes))
    assert pruned(view) == []
    resumable = replace(model, is_model_only=False)
    view = replace(view, remotes=tuple(replace(r, commits=(resumable,)) for r in view.remotes))
    assert pruned(view) != []


def test_thin_counts_a_commit_of_another_branch_for_nothing() -> None:
    held = [save_view(1, sealed(1)), save_view(2, sealed(2, branch=2), committed=False)]
    held.append(save_view(3, sealed(3, branch=2), committed=False))
    view = job_view(held, unuploaded="thin", disk=SHORT)
    assert "s2b2" not in pruned(view)
    assert plan(view).local_verdicts[2].keeps == (
        "not committed on every required remote",
        "newer than the newest committed",
    )


def test_thin_needs_the_newer_one_on_every_required_remote() -> None:
    view = loose({4}, "thin", disk=SHORT)
    second = replace(view.remotes[0], name="s3", commits=())
    assert pruned(replace(view, remotes=(*view.remotes, second))) == []


def test_thin_keeps_within_the_limit_until_the_disk_is_short() -> None:
    """The link may still take them; under pressure the limit, which counts commits, protects them no more."""
    assert pruned(loose({4}, "thin", limit=3)) == ["s1b1"]
    assert pruned(loose({4}, "thin", limit=3, disk=SHORT)) == ["s1b1", "s2b1", "s3b1"]


def test_thin_takes_no_committed_one_beyond_the_policy_however_short_the_disk() -> None:
    view = loose({2, 3, 4}, "thin", limit=3, disk=SHORT)
    assert pruned(view) == ["s1b1"]


@pytest.mark.parametrize(
    "policy",
    [
        RetentionPolicy(save_total_limit=1, keep_every_steps=2),
        RetentionPolicy(save_total_limit=1, keep_steps=(2,)),
        RetentionPolicy(ephemeral=Ephemeral(every_steps=2, keep=1)),
    ],
)
def test_thin_keeps_what_another_key_wants(policy: RetentionPolicy) -> None:
    assert "s2b1" not in pruned(loose({4}, "thin", local_retention=policy, disk=SHORT))
    assert "s1b1" in pruned(loose({4}, "thin", local_retention=policy, disk=SHORT))


def test_delete_lets_the_limit_count_all() -> None:
    """Limit 2: 5 and 6 stay, committed or not; the rest goes, what is committed by a permit on its COMMIT."""
    actions = of(loose({2, 4}, "delete", limit=2), DeleteLocal)
    assert [a.permit.tag for a in actions] == ["s1b1", "s2b1", "s3b1", "s4b1"]
    assert [isinstance(a.permit, OptOutPermit) for a in actions] == [True, False, True, False]
    assert actions[0].permit.commits == ()


def test_delete_works_while_the_remote_is_away() -> None:
    view = loose({2, 4}, "delete", limit=2)
    away = replace(view, remotes=tuple(replace(r, is_attached=False) for r in view.remotes))
    actions = of(away, DeleteLocal)
    assert [a.permit.tag for a in actions] == ["s1b1", "s2b1", "s3b1", "s4b1"]
    assert all(isinstance(a.permit, OptOutPermit) for a in actions)


def test_delete_without_any_commit_keeps_the_newest_of_the_limit() -> None:
    assert pruned(loose(set(), "delete", limit=2)) == ["s1b1", "s2b1", "s3b1", "s4b1"]
    verdicts = plan(loose(set(), "delete", limit=2)).local_verdicts
    assert verdicts[6].keeps == ("save_total_limit: 1 of 2", "newest complete")
    assert verdicts[5].keeps == ("save_total_limit: 2 of 2",)


@pytest.mark.parametrize("how", ["thin", "delete"])
@pytest.mark.parametrize(
    "change",
    [
        {"is_pinned": True},
        {"is_busy": True},
        {"is_adopted": False},
        {"is_intact": False},
        {"has_unlisted": ("notes.txt",)},
        {"is_present": False},
    ],
)
def test_each_protection_of_a_save_holds_under_both(how: str, change: dict[str, Any]) -> None:
    """The rest of P5: pinned, being read, found first, changed, with unlisted files, gone."""
    view = loose({4}, how, disk=SHORT)
    assert "s2b1" in pruned(view)
    kept = tuple(replace(s, **change) if s.id == 2 else s for s in view.saves)
    assert "s2b1" not in pruned(replace(view, saves=kept))


@pytest.mark.parametrize("how", ["thin", "delete"])
@pytest.mark.parametrize(
    "change",
    [
        {"latest": "s2b1"},
        {"is_save_in_flight": True},
        {"is_first_scan": True},
        {"may_delete": False},
        {"deletions_left": 0},
        {"is_paused": True},
    ],
)
def test_each_protection_of_the_job_holds_under_both(how: str, change: dict[str, Any]) -> None:
    """`latest`, a save in flight, the first scan, rights, the hourly limit, a pause."""
    view = replace(loose({4}, how, disk=SHORT), **change)
    assert "s2b1" not in pruned(view)


@pytest.mark.parametrize("how", ["thin", "delete"])
def test_the_best_and_what_is_ahead_of_the_newest_stay(how: str) -> None:
    view = loose({4}, how, disk=SHORT)
    best = tuple(
        replace(s, save=s.save.model_copy(update={"best_checkpoint": "s2b1"})) if s.id == 6 else s
        for s in view.saves
    )
    assert "s2b1" not in pruned(replace(view, saves=best))
    rewound = save_view(7, sealed(2, branch=2), committed=False)
    ahead = replace(view, saves=(*view.saves, rewound))
    assert {"s2b1", "s3b1", "s5b1"} & set(pruned(ahead)) == set()


@pytest.mark.parametrize("how", ["thin", "delete"])
def test_what_goes_is_neither_held_nor_sent(how: str) -> None:
    """Its hold would keep its bytes: that goes first, and the folder a turn later."""
    view = loose({4}, how, disk=Disk(free_bytes=10_000, reserve_bytes=1000, can_clone=True))
    held = replace(view, saves=tuple(replace(s, is_held=s.id < 4) for s in view.saves))
    assert [a.save_id for a in of(held, ReleaseHold)] == [1, 2, 3]
    assert {"s1b1", "s2b1", "s3b1"} & set(pruned(held)) == set()
    assert {a.save_id for a in of(view, Hold)} & {1, 2, 3} == set()
    only_old = replace(view, saves=tuple(s for s in view.saves if s.id <= 4))
    assert [a for a in of(only_old, Upload) if a.form == "zero"] == []


def test_delete_waits_for_the_pins_of_a_remote_that_was_not_heard_since_the_start() -> None:
    """Another node may have pinned one of them while this daemon was down. Heard once, it may be away."""

    def view(*, was_heard: bool, is_required: bool = True) -> JobView:
        held = loose({4}, "delete", disk=Disk(free_bytes=10_000, reserve_bytes=1000, can_clone=True))
        nas = replace(held.remotes[0], is_attached=False, was_heard=was_heard)
        other = replace(nas, name="other", is_required=False, was_heard=is_required or was_heard)
        kept = tuple(replace(s, is_held=s.id == 1) for s in held.saves)
        nas = nas if is_required else replace(nas, was_heard=True)
        return replace(held, remotes=(nas, other), saves=kept)

    assert pruned(view(was_heard=True)) == ["s2b1", "s3b1", "s4b1", "s5b1"]
    assert [a.save_id for a in of(view(was_heard=True), ReleaseHold)] == [1]
    assert pruned(view(was_heard=False)) == []
    assert of(view(was_heard=False), ReleaseHold) == [], "its hold neither"
    assert pruned(view(was_heard=False, is_required=False)) != []


def test_without_the_right_to_delete_the_older_ones_are_uploaded() -> None:
    view = loose({4}, "thin", may_delete=False)
    only_old = replace(view, saves=tuple(s for s in view.saves if s.id <= 4))
    assert [a.save_id for a in of(only_old, Upload)] == [3]


def test_a_permit_must_rest_on_something() -> None:
    """None without COMMITs but that of "delete", and never with "keep"."""
    base: dict[str, Any] = {
        "tag": "t",
        "generation": 1,
        "folder": sealed(1).folder,
        "files": (),
        "issued_at_seconds": 0.0,
        "reason": "r",
    }
    ref = commit_of(4).commits
    assert not DeletePermit(**base, commits=()).is_grounded
    assert DeletePermit(**base, commits=ref).is_grounded
    assert not OptOutPermit(**base, commits=(), unuploaded="thin").is_grounded
    assert OptOutPermit(**base, commits=ref, unuploaded="thin").is_grounded
    assert OptOutPermit(**base, commits=(), unuploaded="delete").is_grounded
    assert not OptOutPermit(**base, commits=ref, unuploaded="keep").is_grounded


# --- A part that no COMMIT covers: perhaps all that the trainer wrote before it died ---------------------


def ranks(step: int, *held: int, is_part: bool = True) -> SealedSave:
    """A save of two ranks of which these lie here."""
    save = sealed(step)
    (file,) = save.files
    files = tuple(
        file.model_copy(update={"path": f"r{d}_optim_states.pt", "shard": ShardKey(d=d, mm=0)}) for d in held
    )
    grid = Grid(dp=2, mm_count=1, zero_stage=2)
    return save.model_copy(update={"grid": grid, "files": files, "is_part": is_part})


def spread(how: str, here: list[SaveView], *, is_spread: bool = True) -> JobView:
    """All that is here is confirmed by the COMMIT of 3."""
    answers = {s.id: commit_of(3) for s in here}
    return job_view(here, unuploaded=how, confirmations=answers, is_spread=is_spread, disk=SHORT)


@pytest.mark.parametrize("how", ["thin", "delete"])
def test_a_part_whose_rest_no_node_is_known_to_hold_stays(how: str) -> None:
    """Another node was heard of when it was sealed, and none of this run is known: nobody has the rest."""
    here = [
        save_view(1, ranks(1, 0), committed=False, is_held=True),
        save_view(2, ranks(2, 0), committed=False),
        save_view(3, ranks(3, 0, 1, is_part=False)),
        save_view(4, ranks(4, 0, 1, is_part=False), committed=how == "thin"),
    ]
    view = spread(how, here, is_spread=False)
    assert not {"s1b1", "s2b1"} & set(pruned(view))
    assert [a.reason for a in of(view, ReleaseHold)] == ["disk pressure"]
    assert "no other node is known to hold the rest of it" in plan(view).local_verdicts[1].keeps


@pytest.mark.parametrize("how", ["thin", "delete"])
def test_a_part_of_fewer_ranks_than_this_node_writes_stays(how: str) -> None:
    here = [save_view(1, ranks(1, 0), committed=False), save_view(3, ranks(3, 0, 1, is_part=False))]
    here.append(save_view(4, ranks(4, 0, 1, is_part=False), committed=False))
    assert "s1b1" not in pruned(spread(how, here))


@pytest.mark.parametrize("how", ["thin", "delete"])
def test_a_part_of_a_job_over_several_nodes_goes_by_the_job_files_word(how: str) -> None:
    """Also where this node wrote other ranks before."""
    here = [
        save_view(1, ranks(1, 1), committed=False),
        save_view(2, ranks(2, 0), committed=False),
        save_view(3, ranks(3, 0)),
        save_view(4, ranks(4, 0), committed=False),
    ]
    assert {"s1b1", "s2b1"} <= set(pruned(spread(how, here)))


def test_a_part_that_was_committed_is_whole_whoever_is_left() -> None:
    retired = committed_record(sealed(1)).model_copy(update={"state": UploadState.DELETED})
    first = save_view(1, ranks(1, 0), committed=False, uploads={(NAS, ZERO): retired})
    here = [first, *(save_view(n, ranks(n, 0, 1, is_part=False)) for n in (3, 4))]
    assert "s1b1" in pruned(spread("delete", here, is_spread=False))


def test_delete_counts_no_such_part_as_the_newest_complete_one() -> None:
    """Nor does it fill a place of the limit."""
    here = [save_view(n, ranks(n, 0, 1, is_part=False), committed=False) for n in (1, 2)]
    here.append(save_view(3, ranks(3, 0), committed=False))
    view = spread("delete", here, is_spread=False)
    assert pruned(view) == ["s1b1"]
    assert "newest complete" in plan(view).local_verdicts[2].keeps
