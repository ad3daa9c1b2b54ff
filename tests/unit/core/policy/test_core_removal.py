"""What `ckptd rm` may delete, over plain views: a person's word replaces the retention keys, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState
from ckptd.core.policy import actions as a
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.core.policy.view import HERE, Drain, LeaseStatus, RemoteView, RemovalRequest, SaveView
from tests.support.core_views import (
    NAS,
    confirmation,
    job_view,
    remote_commit,
    save_view,
    sealed,
)

if TYPE_CHECKING:
    from ckptd.core.policy.view import JobView

KEEP_ALL = RetentionPolicy(save_total_limit=None)
FIRST, LAST = "s10b1", "s30b1"


def removal(*tags: str, **changes: Any) -> RemovalRequest:
    """Of both places, and agreed to."""
    agreed = frozenset(f"sha-{tag}-{ZERO}" for tag in tags)
    return replace(
        RemovalRequest(tags=tags, is_here=True, remotes=frozenset({NAS}), agreed=agreed, by="me"), **changes
    )


def view_of(*tags: str, saves: list[SaveView] | None = None, asked: Any = None, **changes: Any) -> JobView:
    """Steps 10, 20 and 30, committed; nothing is over any limit."""
    three = [save_view(n, sealed(n * 10)) for n in (1, 2, 3)] if saves is None else saves
    word = removal(*tags, **(asked or {}))
    return job_view(three, local_retention=KEEP_ALL, removal=word, **changes)


def said(view: JobView) -> dict[str, tuple[str, str]]:
    """Place and tag → verdict and why."""
    return {f"{row.remote or 'here'} {row.tag}": (row.verdict, row.why) for row in plan(view).removal}


def deletions(view: JobView) -> list[str]:
    words = []
    for action in plan(view).actions:
        match action:
            case a.DeleteLocal(save_id=save_id, permit=permit):
                words.append(f"here {save_id}: {permit.reason}")
            case a.DeleteRemote(remote=remote, commit=commit):
                words.append(f"{remote} {commit.tag} {commit.form}")
            case a.ConfirmCommits(save_id=save_id):
                words.append(f"confirm {save_id}")
            case a.DropDerived(save_id=save_id, reason=reason):
                words.append(f"drop {save_id}: {reason}")
            case _:
                pass
    return words


def test_the_copy_here_goes_first_and_by_a_fresh_confirmation() -> None:
    view = view_of(FIRST)
    assert said(view) == {f"here {FIRST}": ("delete", ""), f"nas {FIRST}": ("delete", "")}
    assert deletions(view) == ["here 1: ckptd rm by me"]
    assert deletions(replace(view, confirmations={})) == ["confirm 1"]
    stale = {1: confirmation(sealed(10), at_seconds=10.0)}
    assert deletions(replace(view, confirmations=stale)) == ["confirm 1"]


def test_the_remotes_goes_when_the_copy_here_is_gone_derived_forms_first() -> None:
    first, rest = sealed(10), [save_view(n, sealed(n * 10)) for n in (2, 3)]
    commits = [remote_commit(first, UNIVERSAL), *(remote_commit(sealed(n * 10)) for n in (1, 2, 3))]
    held = replace(job_view(rest).remotes[0], commits=tuple(commits))
    view = view_of(FIRST, saves=rest, remotes=(held,))
    assert deletions(view) == [f"nas {FIRST} universal"]
    zero_alone = replace(held, commits=tuple(commits[1:]))
    assert deletions(replace(view, remotes=(zero_alone,))) == [f"nas {FIRST} zero"]
    busy = replace(held, is_busy=True)
    assert deletions(replace(view, remotes=(busy,))) == []


def test_nothing_goes_before_a_person_agreed_or_by_another_commit_than_he_saw() -> None:
    only_asked = view_of(FIRST, asked={"agreed": None})
    assert set(said(only_asked).values()) == {("delete", "")}
    assert deletions(only_asked) == []
    other = view_of(FIRST, asked={"agreed": frozenset({"another"})})
    assert {verdict for verdict, _ in said(other).values()} == {"keep"}
    assert deletions(other) == []


def test_neither_a_limit_nor_the_hours_count_holds_it_up() -> None:
    """A person's word is not retention gone wrong."""
    assert deletions(view_of(FIRST, deletions_left=0)) == ["here 1: ckptd rm by me"]


PROTECTED: dict[str, dict[str, Any]] = {
    "latest names it": {"latest": FIRST},
    "pinned": {"pinned_tags": frozenset({FIRST})},
    "the job is paused, or another host works on this directory": {"is_paused": True},
    "the job is being drained": {"drain": Drain(seconds_left=9.0)},
    "deletions rest": {"may_delete": False},
    "another host of this directory deletes": {"lease": LeaseStatus(holds_lease=False)},
}


@pytest.mark.parametrize("why", PROTECTED)
def test_what_forbids_it_in_both_places(why: str) -> None:
    saves = [save_view(n, sealed(n * 10), is_pinned=why == "pinned" and n == 1) for n in (1, 2, 3)]
    view = view_of(FIRST, saves=saves, **PROTECTED[why])
    assert {verdict for verdict, _ in said(view).values()} == {"keep"}
    assert all(text == why for _, text in said(view).values()), said(view)
    assert deletions(view) == []


@pytest.mark.parametrize("place", [HERE, NAS])
def test_what_is_damaged_goes_when_a_person_names_it(place: str) -> None:
    """Alone no sound copy does, which may repair the damaged one; nor where the damaged one stays."""
    damaged = frozenset({(place, FIRST, ZERO)})
    view = view_of(FIRST, damaged=damaged)
    assert set(said(view).values()) == {("delete", "")}
    assert deletions(view) == ["here 1: ckptd rm by me"]
    nowhere: dict[str, Any] = {"remotes": frozenset()}
    sound = nowhere if place == NAS else {"is_here": False}
    assert {verdict for verdict, _ in said(view_of(FIRST, damaged=damaged, asked=sound)).values()} == {"keep"}
    bad = nowhere if place == HERE else {}
    assert deletions(view_of(FIRST, damaged=damaged, asked=bad)) == ["here 1: ckptd rm by me"]
    word = said(view_of(FIRST, damaged=frozenset({(NAS, FIRST, ZERO)}), asked=nowhere))
    assert word[f"here {FIRST}"] == ("keep", "it may repair the copy on nas, which is damaged")


def test_the_newest_stays_in_each_place() -> None:
    found = said(view_of(LAST))
    assert "newest complete" in found[f"here {LAST}"][1]
    assert found[f"nas {LAST}"] == ("keep", "the newest that is committed there")
    assert deletions(view_of(LAST)) == []


def test_what_is_not_committed_or_not_accepted_stays() -> None:
    open_one = [save_view(1, sealed(10), committed=False), *(save_view(n, sealed(n * 10)) for n in (2, 3))]
    rows = plan(view_of(FIRST, saves=open_one)).removal
    assert [(row.verdict, "ckptd drain" in row.next_step) for row in rows] == [("keep", True)]
    found = [save_view(1, sealed(10), is_adopted=False), *(save_view(n, sealed(n * 10)) for n in (2, 3))]
    rows = plan(view_of(FIRST, saves=found)).removal
    assert rows[0].verdict == "keep"
    assert "ckptd accept JOB --existing s10b1" in rows[0].next_step
    # the remote's stays too: the copy here rests on it
    assert rows[1].verdict == "keep"
    half = plan(view_of("s40b1", unsealed_tags=frozenset({"s40b1"}))).removal
    assert (half[0].verdict, "gc JOB --incomplete" in half[0].next_step) == ("keep", True)


def test_a_save_under_way_and_a_reader_are_waited_for() -> None:
    writing = view_of(FIRST, is_save_in_flight=True)
    assert said(writing)[f"here {FIRST}"] == ("wait", "a save is being written")
    saves = [save_view(1, sealed(10), is_busy=True), *(save_view(n, sealed(n * 10)) for n in (2, 3))]
    reading = view_of(FIRST, saves=saves)
    assert said(reading)[f"here {FIRST}"] == ("wait", "being read")
    assert deletions(writing) == deletions(reading) == []


def test_a_remote_that_has_not_answered_may_know_of_a_pin() -> None:
    silent = replace(job_view([]).remotes[0], was_heard=False)
    view = view_of(FIRST, remotes=(silent,))
    assert {verdict for verdict, _ in said(view).values()} == {"unknown"}
    assert deletions(view) == []


def test_one_place_alone() -> None:
    local = view_of(FIRST, asked={"remotes": frozenset()})
    assert list(said(local)) == [f"here {FIRST}"]
    there = view_of(FIRST, asked={"is_here": False})
    assert said(there) == {f"nas {FIRST}": ("keep", "its copy on this node rests on it")}
    # no copy here rests on a remote that does not count
    other = RemoteView(
        name="s3",
        is_required=False,
        forms=(UNIVERSAL,),
        is_attached=True,
        is_busy=False,
        commits=tuple(remote_commit(sealed(n * 10)) for n in (1, 2, 3)),
    )
    both = replace(view_of(FIRST), remotes=(*view_of(FIRST).remotes, other))
    asked = removal(FIRST, is_here=False, remotes=frozenset({"s3"}))
    assert deletions(replace(both, removal=asked)) == [f"s3 {FIRST} zero"]


def test_a_commit_of_several_nodes_goes_when_the_remote_was_named() -> None:
    rest = [save_view(n, sealed(n * 10)) for n in (2, 3)]
    nodes = frozenset({"me", "b"})
    commits = tuple(replace(remote_commit(sealed(n * 10)), nodes=nodes) for n in (1, 2, 3))
    held = replace(job_view(rest).remotes[0], commits=commits)
    view = view_of(FIRST, saves=rest, remotes=(held,), node="me")
    (row,) = plan(view).removal
    assert (row.verdict, row.why) == ("keep", "the copies of other nodes rest on it (b)")
    assert "ckptd rm JOB s10b1 --local" in row.next_step
    named = replace(view, removal=removal(FIRST, is_here=False, is_remote_named=True))
    assert deletions(named) == [f"nas {FIRST} zero"]


def test_a_universal_form_whose_folder_is_gone_goes_while_a_remote_holds_the_checkpoint() -> None:
    made = DerivedRecord(state=DerivedState.READY)
    left = save_view(1, sealed(10), is_present=False, is_pruned=True, is_intact=False, universal=made)
    saves = [left, *(save_view(n, sealed(n * 10)) for n in (2, 3))]
    assert deletions(view_of(FIRST, saves=saves))[:1] == ["drop 1: ckptd rm by me"]
    pointed = view_of(FIRST, saves=saves, latest_universal=f"_ckptd/derived/universal/{FIRST}")
    assert said(pointed)[f"here {FIRST}"] == ("keep", "latest_universal names it")
    whole = [save_view(1, sealed(10), universal=made), *saves[1:]]
    assert said(replace(pointed, saves=tuple(whole)))[f"here {FIRST}"] == (
        "keep",
        "latest_universal names it",
    )
    lone = replace(job_view(saves).remotes[0], commits=())
    assert said(view_of(FIRST, saves=saves, remotes=(lone,)))[f"here {FIRST}"][0] == "keep"


def test_its_forms_are_not_uploaded_any_more() -> None:
    """And what of it is on its way makes way."""
    saves = [
        save_view(n, sealed(n * 10), universal=DerivedRecord(state=DerivedState.READY)) for n in (1, 2, 3)
    ]
    sending = replace(job_view(saves).remotes[0], is_busy=True, uploading=UNIVERSAL, uploading_save_id=1)
    gone = [replace(saves[0], is_present=False, is_pruned=True, is_intact=False), *saves[1:]]
    view = view_of(FIRST, saves=gone, remotes=(sending,))
    assert a.CancelUpload(remote=NAS, reason="ckptd rm by me") in plan(view).actions


def test_where_no_daemon_runs_nothing_else_is_done() -> None:
    saves = [*(save_view(n, sealed(n * 10)) for n in (1, 2)), save_view(3, sealed(30), committed=False)]
    view = view_of(FIRST, saves=[*saves, save_view(4, sealed(40))])
    alone = view_of(FIRST, saves=[*saves, save_view(4, sealed(40))], asked={"is_alone": True})
    assert any(isinstance(action, a.Upload) for action in plan(view).actions)
    assert not any(isinstance(action, a.Upload | a.Convert) for action in plan(alone).actions)
    assert deletions(alone) == ["here 1: ckptd rm by me"]


@given(
    st.lists(st.sampled_from(["committed", "open", "pinned", "found", "changed"]), min_size=1, max_size=6),
    st.integers(0, 6),
    st.booleans(),
)
def test_whatever_is_named_the_newest_and_what_is_protected_stay(
    kinds: list[str], latest: int, is_here: bool
) -> None:
    """All tags are named at once: what goes is committed, older than the newest, and nobody's."""
    saves = [
        save_view(
            n,
            sealed(n * 10),
            committed=kind != "open",
            is_pinned=kind == "pinned",
            is_adopted=kind != "found",
            is_intact=kind != "changed",
        )
        for n, kind in enumerate(kinds, 1)
    ]
    tags = [save.save.tag for save in saves]
    pins = frozenset(save.save.tag for save in saves if save.is_pinned)
    view = view_of(*tags, saves=saves, latest=f"s{latest}0b1", pinned_tags=pins, asked={"is_here": is_here})
    for action in plan(view).actions:
        if isinstance(action, a.DeleteLocal):
            number = action.save_id
            assert kinds[number - 1] == "committed"
            assert number != latest
            assert number < max(n for n, kind in enumerate(kinds, 1) if kind != "changed")
            assert action.permit.commits
        if isinstance(action, a.DeleteRemote):
            assert action.commit.tag not in pins
            assert action.commit.order < max(c.order for c in view.remotes[0].commits)
            assert all(save.save.tag != action.commit.tag for save in saves)
