"""The planner on a ladder: what goes, what stays instead, what is made for it; rewinds, pins, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState, UploadState
from ckptd.core.policy.actions import DeleteLocal, DeleteRemote, DropDerived, Upload
from ckptd.core.policy.derived_forms import to_derive
from ckptd.core.policy.retention import Ephemeral, RetentionPolicy, Tier
from ckptd.core.policy.view import JobView, RemoteView
from tests.support.core_views import NAS, committed_record, job_view, remote_commit, save_view, sealed
from tests.unit.core.policy.test_core_planner import of

READY = DerivedRecord(state=DerivedState.READY, is_source_verified=True)


def aged_remote(policy: RetentionPolicy, count: int, *forms: str) -> JobView:
    """A remote that holds saves 1 … count in these forms; the node has the newest."""
    here = save_view(count, sealed(count))
    commits = tuple(remote_commit(sealed(n), form) for n in range(1, count + 1) for form in forms)
    view = job_view([here], local_retention=RetentionPolicy())
    return replace(view, remotes=(replace(view.remotes[0], commits=commits, retention=policy),))


def test_a_step_down_names_what_stays_and_an_audit_can_tell_why() -> None:
    """Oldest first, one COMMIT a turn; without the universal form the ZeRO form stays."""
    rungs = (Tier(form="universal", after_newer=1), Tier(form="gone", after_newer=3))
    policy = RetentionPolicy(save_total_limit=1, ladder=rungs)
    (action,) = of(aged_remote(policy, 3, ZERO, UNIVERSAL), DeleteRemote)
    assert (action.commit.tag, action.commit.form) == ("s1b1", ZERO)
    assert action.instead is not None
    assert (action.instead.tag, action.instead.form) == ("s1b1", UNIVERSAL)
    assert action.reason == "ladder: universal after 1 newer of nas"
    assert of(aged_remote(policy, 3, ZERO), DeleteRemote) == []
    (action,) = of(aged_remote(policy, 4, ZERO), DeleteRemote)
    assert (action.commit.tag, action.instead) == ("s1b1", None)


def test_a_universal_form_beside_a_trainers_files_takes_nothings_place() -> None:
    """Hugging Face's lies in the ZeRO form's own folder: the checkpoint stays whole."""
    policy = RetentionPolicy(save_total_limit=1, ladder=(Tier(form="universal", after_newer=1),))
    view = aged_remote(policy, 2, ZERO, UNIVERSAL)
    nas = view.remotes[0]
    beside = tuple(replace(c, is_self_contained=c.form == ZERO) for c in nas.commits)
    assert of(replace(view, remotes=(replace(nas, commits=beside),)), DeleteRemote) == []


def test_a_pin_holds_in_a_remote_when_the_save_is_long_gone_here() -> None:
    """P8: pins are of tags; without it the remote would refuse the same removal turn after turn."""
    view = aged_remote(RetentionPolicy(save_total_limit=1), 2, ZERO)
    assert [a.commit.tag for a in of(view, DeleteRemote)] == ["s1b1"]
    assert of(replace(view, pinned_tags=frozenset({"s1b1"})), DeleteRemote) == []


def test_what_a_remote_refused_is_left_alone_and_others_go_on() -> None:
    """The digest of the COMMIT that would not go; the next one's turn."""
    view = aged_remote(RetentionPolicy(save_total_limit=1), 3, ZERO)
    refused = frozenset({(view.remotes[0].name, f"sha-s1b1-{ZERO}")})
    assert [a.commit.tag for a in of(replace(view, not_to_delete_remotely=refused), DeleteRemote)] == ["s2b1"]


def test_one_remote_whose_belt_or_refusal_holds_a_commit_holds_no_other_up() -> None:
    """Both hold the same bytes."""
    view = aged_remote(RetentionPolicy(save_total_limit=1), 3, ZERO)
    (here,) = view.saves
    both = {(name, ZERO): committed_record(here.save, name) for name in (NAS, "other")}
    view = replace(view, saves=(replace(here, uploads=both),))
    (nas,) = view.remotes
    other = replace(nas, name="other")

    def gone(*remotes: RemoteView, **changes: Any) -> list[tuple[str, str]]:
        actions = of(replace(view, remotes=remotes, **changes), DeleteRemote)
        return [(a.remote, a.commit.tag) for a in actions]

    assert gone(nas, other) == [("nas", "s1b1"), ("other", "s1b1")]
    assert gone(replace(nas, deletions_left=0), other) == [("other", "s1b1")]
    refused = frozenset({("nas", f"sha-s1b1-{ZERO}")})
    assert gone(nas, other, not_to_delete_remotely=refused) == [("nas", "s2b1"), ("other", "s1b1")]


def test_a_remote_without_zero_forms_follows_its_keys() -> None:
    """Derived copies alone (required = false): the limit counts them, the newest stays."""
    view = aged_remote(RetentionPolicy(save_total_limit=1), 2, UNIVERSAL)
    assert [(a.commit.tag, a.commit.form) for a in of(view, DeleteRemote)] == [("s1b1", UNIVERSAL)]


def test_a_rewound_run_fills_the_policy_before_the_branch_it_left_goes() -> None:
    """Abandoned higher steps stay in a remote until the new branch has as many as the limit (§3 *Order*)."""
    here = save_view(9, sealed(6, 2))
    commits = [remote_commit(sealed(step, branch)) for step, branch in ((7, 1), (8, 1), (5, 2), (6, 2))]
    view = job_view([here], local_retention=RetentionPolicy())
    policy = RetentionPolicy(save_total_limit=3)
    remote = replace(view.remotes[0], commits=tuple(commits), retention=policy)
    assert [a.commit.tag for a in of(replace(view, remotes=(remote,)), DeleteRemote)] == ["s7b1"]


def test_the_node_keeps_a_universal_form_for_its_ladder() -> None:
    """The folder goes once the form is ready; that stays until its own rung, or a new save of the tag."""
    rungs = (Tier(form="universal", after_newer=1), Tier(form="gone", after_newer=2))
    policy = RetentionPolicy(save_total_limit=1, ladder=rungs)
    saves = [save_view(n, sealed(n), universal=READY) for n in (1, 2)]
    common = {"local_retention": policy, "local_forms": (UNIVERSAL,)}
    (prune,) = of(job_view(saves, **common), DeleteLocal)
    assert prune.permit.reason == "ladder: universal after 1 newer"
    assert of(job_view([replace(saves[0], universal=DerivedRecord()), saves[1]], **common), DeleteLocal) == []
    gone = replace(saves[0], is_present=False, is_intact=False, is_pruned=True)
    assert of(job_view([gone, saves[1]], **common), DropDerived) == []
    third = save_view(3, sealed(3), universal=READY)
    (drop,) = of(job_view([gone, saves[1], third], **common), DropDerived)
    assert (drop.save_id, drop.reason) == (1, "ladder: gone after 2 newer")
    again = save_view(4, sealed(4, tag="s1b1"), universal=DerivedRecord())
    (drop,) = of(job_view([gone, again], **common), DropDerived)
    assert drop.reason == "its tag was saved again"


def test_a_remotes_ladder_gets_the_forms_it_needs() -> None:
    """Universal forms of older saves too, kept here until they are there; weights of older saves too."""
    rungs = (Tier(form="universal", after_newer=1), Tier(form="weights-fp32", after_newer=2))
    policy = RetentionPolicy(save_total_limit=1, ladder=rungs)
    saves = [save_view(n, sealed(n), universal=READY) for n in (1, 2)]
    done = {(NAS, UNIVERSAL): committed_record(saves[1].save, form=UNIVERSAL)}
    saves[1] = replace(saves[1], uploads={**saves[1].uploads, **done})
    view = job_view(saves, local_retention=RetentionPolicy())
    fp32 = "weights-fp32"
    for ladder in (policy, RetentionPolicy(save_total_limit=1)):
        nas = replace(view.remotes[0], retention=ladder, forms=(ZERO, UNIVERSAL, fp32))
        now = replace(view, remotes=(nas,))
        wanted = (1, UNIVERSAL) if ladder is policy else (2, fp32)
        assert [(a.save_id, a.form) for a in of(now, Upload)] == [wanted]
        assert len(of(now, DropDerived)) == (0 if ladder is policy else 1)
        whole = replace(saves[1], weights={fp32: DerivedRecord(state=DerivedState.REFUSED)})
        there = {(NAS, UNIVERSAL): committed_record(saves[0].save, form=UNIVERSAL)}
        first = replace(saves[0], uploads={**saves[0].uploads, **there})
        weights = of(replace(now, saves=(first, whole)), Upload)
        assert [(a.save_id, a.form) for a in weights] == ([(1, fp32)] if ladder is policy else [])


def test_what_a_remote_has_half_is_sent_whole() -> None:
    """Nobody would remove that half: the form stays here, source or not, and goes before a newer one."""
    saves = [save_view(n, sealed(n), universal=READY) for n in (1, 2)]
    half = committed_record(saves[0].save, form=UNIVERSAL).model_copy(update={"state": UploadState.FAILED})
    for old in (saves[0], replace(saves[0], is_present=False, is_intact=False, is_pruned=True)):
        begun = replace(old, uploads={**old.uploads, (NAS, UNIVERSAL): half})
        view = job_view([begun, saves[1]], local_forms=(UNIVERSAL,))
        nas = replace(view.remotes[0], forms=(ZERO, UNIVERSAL))
        view = replace(view, remotes=(nas,))
        assert of(view, DropDerived) == []
        assert [a.save_id for a in of(view, Upload)] == [1]
        later = half.model_copy(update={"retry_at_seconds": view.now_seconds + 9})
        waits = replace(begun, uploads={**old.uploads, (NAS, UNIVERSAL): later})
        assert [a.save_id for a in of(replace(view, saves=(waits, saves[1])), Upload)] == [2]
        done = half.model_copy(update={"state": UploadState.COMMITTED})
        whole = replace(begun, uploads={**old.uploads, (NAS, UNIVERSAL): done})
        assert [a.save_id for a in of(replace(view, saves=(whole, saves[1])), DropDerived)] == [1]


def test_forms_of_what_is_ephemeral_are_made_of_the_newest_alone() -> None:
    """A rung leaves nothing of the others, so a form of them would be made and sent for nothing."""
    rungs = (Tier(form="universal", after_newer=1),)
    keys = {"save_total_limit": 1, "ladder": rungs}
    saves = [save_view(n, sealed(n * 100)) for n in (1, 2, 3, 4)]
    for ephemeral, wanted in ((None, [4, 3, 2, 1]), (Ephemeral(every_steps=200, keep=1), [4, 2])):
        view = job_view(saves)
        policy = RetentionPolicy.model_validate(keys | {"ephemeral": ephemeral})
        remote = replace(view.remotes[0], retention=policy)
        found = to_derive(replace(view, remotes=(remote,)), remote, UNIVERSAL)
        assert [save.id for save in found] == wanted


def test_a_form_of_what_is_ephemeral_is_not_kept_here_for_a_remote() -> None:
    """None is sent of it, so it would wait here for ever."""
    update = {"save_total_limit": 2, "ladder": (Tier(form="universal", after_newer=1),)}
    newest = save_view(2, sealed(200), universal=READY)
    uploads = {**newest.uploads, (NAS, UNIVERSAL): committed_record(newest.save, NAS, UNIVERSAL)}
    view = job_view([save_view(1, sealed(100), universal=READY), replace(newest, uploads=uploads)])
    for ephemeral, dropped in ((None, []), (Ephemeral(every_steps=1000, keep=3), [1])):
        policy = RetentionPolicy.model_validate(update | {"ephemeral": ephemeral})
        remotes = (replace(view.remotes[0], retention=policy),)
        assert [a.save_id for a in of(replace(view, remotes=remotes), DropDerived)] == dropped
