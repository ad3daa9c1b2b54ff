"""What other retention keys would delete: the planner's own verdicts, and nothing that is protected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.model.records import ZERO, DerivedRecord
from ckptd.core.policy.foresight import ForeseenPlace, foresee
from ckptd.core.policy.local import keep_local
from ckptd.core.policy.retention import RemoteKeys, RetentionKeys, RetentionPolicy
from ckptd.core.policy.view import JobView
from ckptd.errors import BehindError
from tests.support.core_views import NAS, job_view, remote_commit, save_view, sealed

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES = st.builds(
    RetentionPolicy,
    save_total_limit=st.none() | st.integers(1, 4),
    keep_bytes=st.none() | st.integers(100, 700),
    keep_every_steps=st.none() | st.integers(2, 3),
)


def job(steps: int, pinned: frozenset[int] = frozenset()) -> JobView:
    """So many committed saves of 100 bytes, here and in the NAS; no key deletes any."""
    saves = [
        save_view(n, sealed(n), universal=DerivedRecord(), is_pinned=n in pinned) for n in range(1, steps + 1)
    ]
    commits = tuple(replace(remote_commit(save.save), bytes=100) for save in saves)
    view = job_view(saves, local_forms=(), local_retention=RetentionPolicy(), confirmations={})
    nas = replace(view.remotes[0], forms=(ZERO,), commits=commits)
    return replace(view, remotes=(nas,), pinned_tags=frozenset(f"s{n}b1" for n in pinned))


def keys_of(local: RetentionPolicy, remote: RetentionPolicy, **others: RemoteKeys) -> RetentionKeys:
    """Those of a job with the NAS, which is required, and other remotes."""
    nas = RemoteKeys(retention=remote, is_required=True, forms=(ZERO,))
    return RetentionKeys(local=local, local_forms=(), remotes={NAS: nas, **others}, existing="newest")


def gone(place: ForeseenPlace, saves: int) -> set[str]:
    return {one.tag for one in place.deletions if one.after_saves <= saves}


@given(st.integers(1, 9), POLICIES, POLICIES, st.frozensets(st.integers(1, 9), max_size=2))
def test_what_goes_at_once_is_what_the_planner_lets_go(
    steps: int, local: RetentionPolicy, remote: RetentionPolicy, pinned: frozenset[int]
) -> None:
    """Here by its verdicts under these keys; nothing pinned, never the newest, and the sums are right."""
    view = job(steps, pinned)
    here, there = foresee(view, keys_of(local, remote), 3)
    verdicts = keep_local(replace(view, local_retention=local)).zero
    assert gone(here, 0) == {s.save.tag for s in view.saves if not verdicts[s.id].keeps}
    for place in (here, there):
        assert not gone(place, 3) & {f"s{n}b1" for n in pinned}
        assert f"s{steps}b1" not in gone(place, 0)
        assert place.before == (steps, 100 * steps)
        assert place.held[0] == (steps - len(gone(place, 0)), 100 * (steps - len(gone(place, 0))))
        assert len(place.held) == 4
    if not (local.deletes or remote.deletes):
        assert [one[0] for one in there.held] == [steps, steps + 1, steps + 2, steps + 3]


def test_the_next_saves_push_out_the_oldest_and_nothing_is_changed() -> None:
    """Two by number here, three by bytes there; by what delays the daemon nothing is hidden."""
    view = replace(job(4), is_paused=True, deletions_left=0, is_save_in_flight=True, is_first_scan=True)
    before = repr(view)
    keys = keys_of(RetentionPolicy(save_total_limit=2), RetentionPolicy(keep_bytes=350))
    here, there = foresee(view, keys, 3)
    assert {one.tag: one.after_saves for one in here.deletions} == {
        "s1b1": 0,
        "s2b1": 0,
        "s3b1": 1,
        "s4b1": 2,
    }
    assert {one.tag: one.after_saves for one in there.deletions} == {
        "s1b1": 0,
        "s2b1": 1,
        "s3b1": 2,
        "s4b1": 3,
    }
    assert there.held == ((3, 300),) * 4
    assert {one.why for one in there.deletions} == {"keep_bytes 350 B"}
    assert repr(view) == before


def test_a_remote_that_was_not_read_is_not_known_and_deletes_nothing() -> None:
    """What rests on its COMMITs stays as well."""
    view = job(4)
    view = replace(view, remotes=(replace(view.remotes[0], was_heard=False, commits=()),))
    limit = RetentionPolicy(save_total_limit=1)
    here, there = foresee(view, keys_of(limit, limit), 2)
    assert (here.is_known, there.is_known) == (True, False)
    assert here.deletions == there.deletions == ()


def test_another_remote_counts_as_these_keys_say_not_as_the_view_does() -> None:
    """Required, away and empty it keeps all; dropped or not required any more nothing; new it fills first."""
    limit, none = RetentionPolicy(save_total_limit=1), RetentionPolicy()
    view = job(4)
    away = replace(view.remotes[0], name="far", was_heard=False, commits=())
    with_far = replace(view, remotes=(*view.remotes, away))
    required = RemoteKeys(retention=none, is_required=True, forms=(ZERO,))
    wanted = RemoteKeys(retention=none, is_required=False, forms=(ZERO,))
    three = {"s1b1", "s2b1", "s3b1"}
    for keys, deleted, known in (
        (keys_of(limit, none, far=required), set(), {None: True, NAS: True, "far": False}),
        (keys_of(limit, none, far=wanted), three, {None: True, NAS: True, "far": False}),
        (keys_of(limit, none), three, {None: True, NAS: True}),
    ):
        places = foresee(with_far, keys, 0)
        assert gone(places[0], 0) == deleted
        assert {one.remote: one.is_known for one in places} == known
    here, _, new = foresee(view, keys_of(limit, none, far=required), 0)
    assert (gone(here, 0), new.before, new.held) == (three, (0, 0), ((4, 400),))


def test_a_part_whose_rest_no_other_node_can_hold_is_not_committed() -> None:
    """As a save that a death cut short: it waits for the shards of others, as long as it lies here."""
    view = job(2)
    part = sealed(1).model_copy(update={"is_part": True})
    view = replace(view, saves=(save_view(1, part, committed=False), *view.saves[1:]))
    view = replace(view, remotes=(replace(view.remotes[0], commits=view.remotes[0].commits[1:]),))
    keys = keys_of(RetentionPolicy(), RetentionPolicy())
    for is_spread, held in ((False, (1, 2)), (True, (2, 3))):
        _, there = foresee(replace(view, is_spread=is_spread), keys, 1)
        assert tuple(count for count, _ in there.held) == held


def test_what_was_there_before_is_deleted_once_existing_says_all() -> None:
    """Until then it stays, though it is committed."""
    limit = RetentionPolicy(save_total_limit=1)
    view = job(3)
    found = tuple(replace(save, is_adopted=False, was_found_first=True) for save in view.saves)
    keys = keys_of(limit, RetentionPolicy())
    for existing, deleted in (("newest", set()), ("all", {"s1b1", "s2b1"})):
        places = foresee(replace(view, saves=found), keys.model_copy(update={"existing": existing}), 0)
        assert gone(places[0], 0) == deleted


def test_when_the_time_is_up_it_says_how_far_it_came() -> None:
    """Whole saves alone: no deletion of one that was not planned to its end; before the first, an error."""
    limit = RetentionPolicy(save_total_limit=2)
    whole = foresee(job(4), keys_of(limit, limit), 3)
    lengths: set[int] = set()

    def for_so_many(plans: int) -> Callable[[], bool]:
        left = iter(range(plans))
        return lambda: next(left, None) is not None

    for plans in range(1, 60):
        try:
            cut = foresee(job(4), keys_of(limit, limit), 3, may_go_on=for_so_many(plans))
        except BehindError:
            assert not lengths
            continue
        planned = len(cut[0].held)
        lengths.add(planned)
        for one, of_all in zip(cut, whole, strict=True):
            assert one.held == of_all.held[:planned]
            assert gone(one, 3) == gone(of_all, planned - 1)
    assert lengths == {1, 2, 3, 4}
