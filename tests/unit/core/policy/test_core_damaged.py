"""What rotted counts for no deletion: it stays, and takes no sound checkpoint's place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.core.model.save import Order
from ckptd.core.policy.local import keep_local
from ckptd.core.policy.remote import keep_remote
from ckptd.core.policy.retention import Age, Ephemeral, PolicyItem, RetentionPolicy, ages_of, keep_reasons
from ckptd.core.policy.view import HERE, JobView
from tests.support.core_views import NAS, job_view, key_of, save_view, sealed

POLICIES = [
    RetentionPolicy(save_total_limit=2),
    RetentionPolicy(keep_bytes=200),
    RetentionPolicy(save_total_limit=2, keep_every_steps=1000),
    RetentionPolicy(keep_best=2),
    RetentionPolicy(ephemeral=Ephemeral(every_steps=1000, keep=2)),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_sound_ones_are_kept_as_if_the_damaged_were_not_there(policy: RetentionPolicy) -> None:
    items = [PolicyItem(key=str(n), order=Order(1, n, n), bytes=100, score=float(n)) for n in range(1, 6)]
    for damaged in range(1, 6):
        marked = [replace(item, is_damaged=item.key == str(damaged)) for item in items]
        sound = [item for item in items if item.key != str(damaged)]
        found = keep_reasons(marked, policy)
        assert found.pop(str(damaged)) == ("a copy of it is damaged",)
        assert found == keep_reasons(sound, policy)


def test_no_tier_is_reached_by_what_is_damaged() -> None:
    """Two newer ones of which one is rotten are one newer."""
    items = [PolicyItem(key=str(n), order=Order(1, n, n)) for n in (1, 2, 3)]
    assert ages_of(items)["1"] == Age(2, None)
    from ckptd.core.policy.retention import PolicyFacts, Tier, apply_policy

    policy = RetentionPolicy(save_total_limit=1, ladder=(Tier(form="gone", after_newer=2),))
    forms = frozenset({ZERO})
    for is_damaged, keeps in ((False, False), (True, True)):
        marked = [replace(item, is_damaged=is_damaged and item.key == "2") for item in items]
        held = [PolicyFacts(item=item, forms=forms, standing=forms) for item in marked]
        assert bool(apply_policy(held, policy)["1"][ZERO].keeps) is keeps


def _view(*damaged: tuple[str, str, str]) -> JobView:
    saves = [save_view(n, sealed(n)) for n in (1, 2, 3)]
    view = job_view(saves, damaged=frozenset(damaged), local_retention=RetentionPolicy(save_total_limit=2))
    kept = RetentionPolicy(save_total_limit=2)
    return replace(view, remotes=tuple(replace(remote, retention=kept) for remote in view.remotes))


@pytest.mark.parametrize("form", [ZERO, UNIVERSAL])
def test_a_damaged_copy_here_keeps_an_older_one_here(form: str) -> None:
    """Of three with a limit of two the oldest goes; with the middle one rotten it stays."""
    assert not keep_local(_view()).zero[1].keeps
    assert keep_local(_view((NAS, "s2b1", form))).zero[1].keeps == ()
    assert keep_local(_view((HERE, "s2b1", form))).zero[1].keeps
    assert "a copy of it is damaged" in keep_local(_view((HERE, "s2b1", form))).zero[2].keeps


@pytest.mark.parametrize("place", [HERE, NAS])
def test_retention_deletes_no_copy_of_what_is_damaged_and_says_why(place: str) -> None:
    """It is not called pinned: `ckptd pin JOB TAG --remove` would not help."""
    view = _view((place, "s1b1", ZERO))
    assert keep_local(view).zero[1].keeps == ("a copy of it is damaged",)
    there = keep_remote(replace(view, saves=()))[NAS, key_of(sealed(1))]
    assert there.keeps == ("a copy of it is damaged",)


def test_a_damaged_copy_in_a_remote_keeps_an_older_one_there() -> None:
    """Each place by its own copies."""
    gone = replace(_view(), saves=())
    key = (NAS, key_of(sealed(1)))
    assert not keep_remote(gone)[key].keeps
    assert not keep_remote(replace(gone, damaged=frozenset({(HERE, "s2b1", ZERO)})))[key].keeps
    assert keep_remote(replace(gone, damaged=frozenset({(NAS, "s2b1", ZERO)})))[key].keeps
