"""What status calls safe: in a COMMIT on *every* required remote, and the newest of those (P17, P2)."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.policy.safety import exposed, newest_safe, steps_at_risk
from tests.support.core_views import job_view, remote_commit, save_view, sealed


def test_safe_is_what_every_required_remote_holds() -> None:
    saves = [save_view(step, sealed(step)) for step in (1, 2)]
    view = job_view(saves)
    other = replace(view.remotes[0], name="other", commits=(remote_commit(sealed(1)),))
    both = newest_safe(replace(view, remotes=(*view.remotes, other)))
    assert both is not None
    assert both.tag == "s1b1"
    optional = newest_safe(replace(view, remotes=(*view.remotes, replace(other, is_required=False))))
    assert optional is not None
    assert optional.tag == "s2b1"


def test_nothing_is_safe_without_a_commit_or_a_required_remote() -> None:
    view = job_view([save_view(1, sealed(1))])
    assert newest_safe(replace(view, remotes=())) is None
    assert newest_safe(replace(view, remotes=(replace(view.remotes[0], commits=()),))) is None


def test_a_step_that_was_saved_again_is_exposed_until_its_newest_save_is_committed() -> None:
    """Its step and branch are those of the safe one; its weights are not."""
    older, first, again = (sealed(200), sealed(300, save_seq=1), sealed(300, save_seq=2, tag="s300b1"))
    rows = [
        save_view(1, older),
        save_view(2, first, is_present=False, is_intact=False),
        save_view(3, again, committed=False),
    ]
    view = job_view(rows)
    safe = newest_safe(view)
    assert safe is not None
    assert safe.order == first.order
    lost = exposed(view, safe)
    assert lost is not None
    assert (lost.id, steps_at_risk(view, lost)) == (3, 100)
    alone = replace(view, remotes=(replace(view.remotes[0], commits=(remote_commit(first),)),))
    assert steps_at_risk(alone, lost) == 300
    gone = replace(rows[2], is_intact=False, is_present=False)
    for sent_yet in (replace(gone, is_held=True), replace(gone, is_busy=True)):
        assert exposed(replace(view, saves=(*rows[:2], sent_yet)), safe) == sent_yet
    done = job_view([*rows[:2], save_view(3, again)])
    assert exposed(done, newest_safe(done)) is None


def test_a_commit_that_another_node_made_of_a_save_is_of_this_nodes_too() -> None:
    """Nodes count the saves of a step each for itself: whose COMMIT it was is on record here."""
    mine, theirs = sealed(300, save_seq=2, tag="s300b1"), sealed(300, save_seq=1, tag="s300b1")
    view = job_view([save_view(1, mine)])
    view = replace(view, remotes=(replace(view.remotes[0], commits=(remote_commit(theirs),)),))
    assert exposed(view, newest_safe(view)) is None
    later = replace(view, saves=(*view.saves, save_view(2, sealed(400), committed=False)))
    lost = exposed(later, newest_safe(later))
    assert lost is not None
    assert (lost.id, steps_at_risk(later, lost)) == (2, 100)
