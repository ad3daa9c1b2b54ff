"""Who sends, deletes and converts in a directory that hosts share: the pure rules, and their documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.base.identity import FolderIdentity
from ckptd.core.model.heartbeat import Heartbeat, SeenNode
from ckptd.core.policy import actions as a
from ckptd.core.policy.leases import (
    LEASE,
    LeaseTerm,
    judge_lease,
    living,
    next_members,
    number_of,
    numbered,
    on_shared,
    owner_of,
    share_of,
    term_seconds,
)
from ckptd.core.policy.permit import DeletePermit
from ckptd.core.policy.view import LeaseStatus
from ckptd.errors import RefusedError
from ckptd.storage.remote.shares import hold_lease
from ckptd.storage.stores.directory import DirectoryStore

PATHS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(400)]
HOSTS = ("a", "b", "c", "d")


def seen(node: str, seconds_ago: float | None, state: str = "ok", *, is_store_time: bool = True) -> SeenNode:
    """A heartbeat as it was found."""
    said = Heartbeat(
        job_id="job", job="run", node=node, node_id=f"id-{node}", config_digest="", ckptd_version="0",
        as_of="2026-01-01T00:00:00Z", state=state,
    )  # fmt: skip
    return SeenNode(node=node, seconds_ago=seconds_ago, is_store_time=is_store_time, heartbeat=said)


# --- the division ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_file_falls_to_exactly_one_member(count: int) -> None:
    shares = [share_of("t", PATHS, HOSTS[:count], host) for host in HOSTS[:count]]
    assert sorted(path for share in shares for path in share) == sorted(PATHS)
    assert all(len(share) > len(PATHS) / count / 2 for share in shares)


def test_who_is_no_member_sends_nothing() -> None:
    assert share_of("t", PATHS, HOSTS, "e") == frozenset()


def test_only_the_files_of_who_is_gone_move() -> None:
    before = {path: owner_of(path, HOSTS) for path in PATHS}
    after = {path: owner_of(path, ("a", "b", "d")) for path in PATHS}
    assert {before[path] for path in PATHS if before[path] != after[path]} == {"c"}


def test_the_order_of_members_is_nothing() -> None:
    assert share_of("t", PATHS, HOSTS, "b") == share_of("t", PATHS, HOSTS[::-1], "b")


def test_nobody_joins_a_division_while_a_member_lives() -> None:
    assert next_members(("a", "b"), {"b", "c"}) == ("b",)
    assert next_members(("a", "b"), {"c", "d"}) == ("c", "d")


def test_who_lives() -> None:
    others = [seen("b", 29.0), seen("c", 31.0), seen("d", None), seen("e", 1.0, "paused")]
    assert living("a", others, 30.0) == {"a", "b"}


# --- the lease -------------------------------------------------------------------------------------------

TERM = LeaseTerm(job_id="job", number=3, node="b", node_id="id-b")


@pytest.mark.parametrize(
    ("term", "node", "node_id", "silent_seconds", "verdict"),
    [
        (None, "a", "id-a", 1.0, "take"),
        (TERM, "a", "id-a", 1.0, "theirs"),
        (TERM, "a", "id-a", 31.0, "take"),
        (TERM, "a", "id-a", None, "take"),
        (TERM, "b", "id-b", 1.0, "ours"),
        (TERM, "b", "another-id", 1.0, "take"),
    ],
)
def test_whose_the_lease_is(
    term: LeaseTerm | None, node: str, node_id: str, silent_seconds: float | None, verdict: str
) -> None:
    others = [seen("b", silent_seconds)] if node != "b" else []
    assert judge_lease(term, node, node_id, others, 30.0) == verdict


def test_a_holder_stops_long_before_another_begins() -> None:
    assert term_seconds(30.0) == 15.0


def test_numbers_of_a_row() -> None:
    assert number_of(LEASE, numbered(LEASE, 12)) == 12
    assert number_of(LEASE, f"{LEASE}12.json") == 0
    assert number_of(LEASE, f"{LEASE}notes.txt") == 0


def test_the_lease_in_a_real_store_goes_on_and_over(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    first = hold_lease(store, "job", "a", "id-a", [], 30.0)
    assert (first.epoch, first.node, first.is_ours) == (1, "a", True)
    assert hold_lease(store, "job", "a", "id-a", [seen("b", 1.0)], 30.0) == first
    theirs = hold_lease(store, "job", "b", "id-b", [seen("a", 29.0)], 30.0)
    assert (theirs.epoch, theirs.node, theirs.is_ours) == (1, "a", False)
    over = hold_lease(store, "job", "b", "id-b", [seen("a", 31.0)], 30.0)
    assert (over.epoch, over.node, over.is_ours) == (2, "b", True)
    back = hold_lease(store, "job", "a", "id-a", [seen("b", 2.0)], 30.0)
    assert (back.epoch, back.node, back.is_ours) == (2, "b", False)
    assert [number_of(LEASE, info.key) for info in store.list(LEASE)] == [2]


def test_a_store_without_times_gives_no_lease(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="keeps no times"):
        hold_lease(
            DirectoryStore(str(tmp_path)), "job", "a", "id-a", [seen("b", 1.0, is_store_time=False)], 30.0
        )


# --- the plan --------------------------------------------------------------------------------------------


def upload(form: str) -> a.Upload:
    return a.Upload(save_id=1, remote="nas", form=form, generation=1, attempt=1)


def permit(until_seconds: float | None = None) -> DeletePermit:
    return DeletePermit(
        tag="t", generation=1, folder=FolderIdentity(dev=1, ino=2), files=(), commits=(),
        issued_at_seconds=100.0, reason="", until_seconds=until_seconds,
    )  # fmt: skip


PLAN: list[a.Action] = [
    upload("zero"),
    upload("universal"),
    a.Convert(save_id=1),
    a.Hold(save_id=1),
    a.DeleteLocal(save_id=1, permit=permit()),
    a.ConfirmCommits(save_id=1, commits=()),
]


def test_a_plan_of_a_directory_of_ones_own_stays_as_it_is() -> None:
    assert on_shared(PLAN, None) == PLAN


def test_without_the_lease_a_host_sends_its_share_and_no_more() -> None:
    assert on_shared(PLAN, LeaseStatus(holds_lease=False)) == [upload("zero")]


def test_the_holder_does_all_but_hold() -> None:
    assert on_shared(PLAN, LeaseStatus(holds_lease=True)) == [x for x in PLAN if not isinstance(x, a.Hold)]


def test_a_permit_ends_with_the_lease_that_it_was_made_under() -> None:
    assert permit().is_valid_at(159.0)
    assert permit(until_seconds=120.0).is_valid_at(120.0)
    assert not permit(until_seconds=120.0).is_valid_at(121.0)
