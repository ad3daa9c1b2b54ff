"""Retention as a pure function: properties over generated histories (docs/design.md §5)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState
from ckptd.core.model.save import Order
from ckptd.core.policy.local import keep_local
from ckptd.core.policy.remote import keep_remote
from ckptd.core.policy.retention import Ephemeral, PolicyItem, RetentionPolicy, keep_reasons
from tests.support.core_views import NAS, committed_record, job_view, remote_commit, save_view, sealed

ITEMS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 50), st.booleans()), min_size=1, max_size=12, unique=True
).map(
    lambda rows: [
        PolicyItem(key=str(n), order=Order(branch, step, n), pinned=pinned)
        for n, (branch, step, pinned) in enumerate(rows)
    ]
)


def kept(items: list[PolicyItem], policy: RetentionPolicy) -> set[str]:
    return {key for key, why in keep_reasons(items, policy).items() if why}


@given(ITEMS, st.integers(1, 12), st.randoms())
def test_never_empties_keeps_pinned_and_ignores_the_order_of_its_input(
    items: list[PolicyItem], limit: int, random: object
) -> None:
    """The newest and every pinned item stay, and exactly the limit; a permutation changes nothing."""
    policy = RetentionPolicy(save_total_limit=limit)
    result = kept(items, policy)
    newest = max(items, key=lambda item: item.order)
    assert newest.key in result
    assert {item.key for item in items if item.pinned} <= result
    plain = [replace(item, pinned=False) for item in items]
    assert len(kept(plain, policy)) == min(limit, len(items))
    assert kept(items[::-1], policy) == result


@given(ITEMS, st.integers(1, 11))
def test_raising_the_limit_never_deletes_more(items: list[PolicyItem], limit: int) -> None:
    """Monotone in the limit, and adding a key never removes a keep."""
    low = kept(items, RetentionPolicy(save_total_limit=limit))
    assert low <= kept(items, RetentionPolicy(save_total_limit=limit + 1))
    assert low <= kept(items, RetentionPolicy(save_total_limit=limit, keep_every_steps=5))
    assert low <= kept(items, RetentionPolicy(save_total_limit=limit, keep_steps=(3, 7)))


SIZED = st.tuples(ITEMS, st.lists(st.integers(1, 9), min_size=12, max_size=12)).map(
    lambda both: [replace(item, bytes=size) for item, size in zip(*both, strict=False)]
)


@given(SIZED, st.integers(1, 40), st.booleans())
def test_keep_bytes_is_kept_and_deletes_nothing_that_is_protected(
    items: list[PolicyItem], most_bytes: int, with_steps: bool
) -> None:
    """What stays fits, unless what is protected alone is more; the newest ones fill the rest."""
    protected = {max(items, key=lambda item: item.order).key} | {i.key for i in items if i.pinned}
    protected |= {i.key for i in items if with_steps and i.order.step % 5 == 0}
    policy = RetentionPolicy(keep_bytes=most_bytes, keep_every_steps=5 if with_steps else None)
    result = kept(items, policy)
    assert protected <= result
    size = {item.key: item.bytes for item in items}
    total, least = sum(size[key] for key in result), sum(size[key] for key in protected)
    assert total <= max(most_bytes, least)
    gone = sorted((i for i in items if i.key not in result), key=lambda i: i.order, reverse=True)
    assert not gone or total + gone[0].bytes > most_bytes, "the newest of those that go would have fitted"
    assert not gone or all(i.key in protected for i in items if i.key in result and i.order < gone[0].order)
    assert result <= kept(items, policy.model_copy(update={"keep_bytes": most_bytes + 1}))


@given(SIZED, st.integers(1, 40), st.integers(1, 12))
def test_of_two_limits_both_hold(items: list[PolicyItem], most_bytes: int, limit: int) -> None:
    """A number and bytes: what stays would stay by each of them, and nothing else goes."""
    plain = [replace(item, pinned=False) for item in items]
    count, size = RetentionPolicy(save_total_limit=limit), RetentionPolicy(keep_bytes=most_bytes)
    both = RetentionPolicy(save_total_limit=limit, keep_bytes=most_bytes)
    assert kept(plain, both) == kept(plain, count) & kept(plain, size)


def test_keep_bytes_counts_all_forms_in_a_place() -> None:
    """100 bytes each here; in the remote with a universal form of 100 beside, so that half as many fit."""
    saves = [save_view(n, sealed(n)) for n in range(1, 7)]
    forms = [replace(remote_commit(s.save, form), bytes=100) for s in saves for form in (ZERO, UNIVERSAL)]
    policy = RetentionPolicy(keep_bytes=400)
    view = job_view(saves, local_retention=policy)
    assert [n for n, verdict in keep_local(view).zero.items() if verdict.keeps] == [3, 4, 5, 6]
    there = replace(view.remotes[0], commits=tuple(forms), retention=policy)
    verdicts = keep_remote(replace(view, saves=(), remotes=(there,)))
    assert {c.step for c in forms if verdicts[NAS, c.key].keeps} == {5, 6}
    made = DerivedRecord(state=DerivedState.READY, bytes=100, is_source_verified=True)
    beside = [*saves[:5], replace(saves[5], universal=made)]
    view = job_view(beside, local_retention=policy)
    assert [n for n, verdict in keep_local(view).zero.items() if verdict.keeps] == [4, 5, 6]


@given(ITEMS)
def test_without_a_key_nothing_goes(items: list[PolicyItem]) -> None:
    """No retention key: every item is kept, and says why."""
    assert kept(items, RetentionPolicy()) == {item.key for item in items}


HOUR = 3600.0


def hourly(count: int, *, every_hours: float = 1.0, branch: int = 1) -> list[PolicyItem]:
    """Committed one after another at steps 100, 200, …"""
    return [
        PolicyItem(
            key=f"{branch}.{n}", order=Order(branch, n * 100, n), committed_at_seconds=n * every_hours * HOUR
        )
        for n in range(1, count + 1)
    ]


def lived(items: list[PolicyItem], policy: RetentionPolicy) -> list[PolicyItem]:
    """What is left when the policy is applied after each COMMIT, as a daemon does."""
    left: list[PolicyItem] = []
    for item in items:
        left.append(item)
        stay = kept(left, policy)
        left = [i for i in left if i.key in stay]
    return left


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=40), st.floats(0.5, 24))
def test_keep_every_leaves_no_longer_gap_than_asked(gaps: list[float], span_hours: float) -> None:
    """Applied as checkpoints come: each that went has an older kept one less than the span before it."""
    at, items = 0.0, []
    for n, gap in enumerate(gaps, start=1):
        at += gap * HOUR
        items.append(PolicyItem(key=str(n), order=Order(1, n, n), committed_at_seconds=at))
    left = lived(items, RetentionPolicy(keep_every_seconds=span_hours * HOUR))
    times = [i.committed_at_seconds or 0.0 for i in left]
    for item in items:
        at = item.committed_at_seconds or 0.0
        assert any(0 <= at - t < span_hours * HOUR for t in times)
    spaced = times[:-1]
    assert all(later - earlier >= span_hours * HOUR for earlier, later in itertools.pairwise(spaced))


def test_a_checkpoint_with_an_odd_date_stays() -> None:
    """keep_every: a COMMIT dated a year ahead and the one after it; no date at all."""
    policy = RetentionPolicy(keep_every_seconds=4 * HOUR)
    items = hourly(9)
    assert kept(items, policy) == {"1.1", "1.5", "1.9"}
    ahead = [items[0], replace(items[1], committed_at_seconds=9000 * HOUR), *items[2:]]
    assert kept(ahead, policy) == {"1.1", "1.2", "1.3", "1.7", "1.9"}
    dateless = [replace(items[0], committed_at_seconds=None), *items[1:]]
    assert "1.1" in kept(dateless, RetentionPolicy(keep_within_seconds=2 * HOUR))
    assert "1.1" in kept(dateless, policy)


def test_keep_within_counts_from_the_newest_commit() -> None:
    """Not from a clock: a run that rests for a month loses nothing."""
    assert kept(hourly(9), RetentionPolicy(keep_within_seconds=2 * HOUR)) == {"1.7", "1.8", "1.9"}


def test_a_clock_that_jumps_lets_nothing_go() -> None:
    """P9: the newest COMMITs dated a year ahead, one of the middle, a run that went on after a month."""
    policy = RetentionPolicy(keep_within_seconds=12 * HOUR)
    items = hourly(9)
    for first in (8, 6, 4, 1):
        ahead = [
            replace(i, committed_at_seconds=(i.committed_at_seconds or 0) + 9000 * HOUR)
            for i in items[first:]
        ]
        assert len(kept([*items[:first], *ahead], policy)) == 9
    one = [*items[:4], replace(items[4], committed_at_seconds=9000 * HOUR), *items[5:]]
    assert len(kept(one, policy)) == 9
    assert len(kept(hourly(40), policy)) == 13


def test_ephemeral_ones_have_a_limit_of_their_own() -> None:
    """Every 500 permanent; of the others the newest two; save_total_limit counts permanent ones."""
    items, throw = hourly(12), Ephemeral(every_steps=500, keep=2)
    assert kept(items, RetentionPolicy(ephemeral=throw)) == {"1.5", "1.10", "1.11", "1.12"}
    assert kept(items, RetentionPolicy(ephemeral=throw, save_total_limit=1)) == {"1.10", "1.11", "1.12"}
    none = Ephemeral(every_steps=500, keep=0)
    assert kept(items, RetentionPolicy(ephemeral=none, save_total_limit=1)) == {"1.10", "1.12"}
    assert kept(items, RetentionPolicy(ephemeral=none, keep_steps=(300,))) == {"1.3", "1.12"}


def test_what_goes_says_which_limit_was_its_own() -> None:
    policy = RetentionPolicy(ephemeral=Ephemeral(every_steps=500, keep=2), save_total_limit=1)
    assert policy.why_deleted(600) == "ephemeral: the newest 2 stay"
    assert policy.why_deleted(1000) == "save_total_limit 1"
    assert RetentionPolicy(keep_every_steps=500).why_deleted(600) == "kept by no retention key"


@pytest.mark.parametrize("step", range(0, 2100, 100))
def test_what_a_step_alone_keeps(step: int) -> None:
    """As the keys do it: a multiple of both where the others are ephemeral."""
    for throw in (None, Ephemeral(every_steps=500, keep=0)):
        policy = RetentionPolicy(keep_every_steps=200, keep_steps=(300,), ephemeral=throw)
        item = PolicyItem(key="it", order=Order(1, step, 1))
        newer = PolicyItem(key="newer", order=Order(1, 9999, 2))
        is_multiple = step % 200 == 0 and not policy.is_ephemeral(step)
        assert ("it" in kept([item, newer], policy)) is (is_multiple or step == 300)


@pytest.mark.parametrize(
    ("policy", "reasons"),
    [
        ({"save_total_limit": 2}, {5: "save_total_limit: 2 of 2", 6: "save_total_limit: 1 of 2"}),
        ({"keep_every_steps": 300}, {3: "keep_every_steps 300", 6: "keep_every_steps 300"}),
        ({"keep_within_seconds": 1.5 * HOUR}, {5: "keep_within 90m", 6: "keep_within 90m"}),
        ({"keep_best": 1}, {2: "keep_best: 1 of 1", 6: ""}),
        ({"keep_steps": (400, 7)}, {4: "keep_steps 400", 6: ""}),
        (
            {"keep_steps": (400,), "keep_best": 1, "save_total_limit": 1},
            {2: "keep_best", 4: "keep_steps", 6: ""},
        ),
    ],
)
def test_each_key_keeps_what_it_names_and_says_so(policy: dict[str, Any], reasons: dict[int, str]) -> None:
    """Of six an hour apart, the second scored best; the newest stays under all of them."""
    scored = [replace(item, score=float(item.key == "1.2")) for item in hourly(6)]
    found = {key: why for key, why in keep_reasons(scored, RetentionPolicy(**policy)).items() if why}
    assert set(found) == {f"1.{number}" for number in reasons}
    for number, reason in reasons.items():
        assert any(why.startswith(reason) for why in found[f"1.{number}"]), found
    assert "newest committed" in found["1.6"]


@given(ITEMS, st.integers(1, 6), st.integers(0, 6))
def test_keys_join_by_union(items: list[PolicyItem], limit: int, keep: int) -> None:
    """A further key never lets go what the others keep; pins and the newest stay under all of them."""
    dated = [replace(i, committed_at_seconds=float(n)) for n, i in enumerate(items)]
    throw = Ephemeral(every_steps=3, keep=keep)
    base = RetentionPolicy(save_total_limit=limit, ephemeral=throw)
    low = kept(dated, base)
    for more in ({"keep_every_seconds": 3.0}, {"keep_within_seconds": 2.0}, {"keep_every_steps": 7}):
        assert low <= kept(dated, base.model_copy(update=more))
    assert {i.key for i in dated if i.pinned} <= low
    assert max(dated, key=lambda i: i.order).key in low


@given(ITEMS, st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=12, max_size=12), st.integers(1, 5))
def test_keep_best_keeps_the_best_and_no_others(
    items: list[PolicyItem], scores: list[float | None], count: int
) -> None:
    """Beside the newest and the pinned; what has no value is passed over, and counts for nobody."""
    scored = [replace(i, score=s) for i, s in zip(items, scores, strict=False)]
    stay = kept(scored, RetentionPolicy(keep_best=count))
    always = {i.key for i in scored if i.pinned} | {max(scored, key=lambda i: i.order).key}
    known = sorted((i.score for i in scored if i.score is not None), reverse=True)
    for item in scored:
        if item.score is not None and len(known) > count and item.score < known[count - 1]:
            assert item.key not in stay - always
        if item.score is not None and item.score > ([*known, -9.0][min(count, len(known))]):
            assert item.key in stay
        if item.score is None:
            assert item.key not in stay - always


def test_a_save_on_the_node_is_dated_by_the_last_of_its_commits() -> None:
    """Until a second required remote has it, it is at risk: that is when its age begins."""
    saves = []
    for step in range(5):
        save = sealed(step)
        uploads = {(name, ZERO): committed_record(save, name) for name in (NAS, "cloud")}
        saves.append(save_view(step, save, uploads=uploads))
    view = job_view(saves, local_retention=RetentionPolicy(keep_within_seconds=2 * HOUR))

    def kept_here(cloud_hours: float) -> tuple[str, ...]:
        """Saved each hour; on the second remote the second one is committed at that hour."""
        remotes = []
        for name, second in ((NAS, 1.0), ("cloud", cloud_hours)):
            hours = (0.0, second, 2.0, 3.0, 4.0)
            commits = tuple(
                replace(remote_commit(s.save), committed_at_seconds=at * HOUR)
                for s, at in zip(saves, hours, strict=True)
            )
            remotes.append(replace(view.remotes[0], name=name, commits=commits))
        return keep_local(replace(view, remotes=tuple(remotes))).zero[1].keeps

    assert kept_here(1.0) == ()
    assert kept_here(2.0) == ("keep_within 2h",)


def test_a_form_that_was_made_late_makes_its_save_no_younger() -> None:
    """A remote's age of a save is its ZeRO form's: else each conversion would keep it for another span."""
    dated = [(step, ZERO, step) for step in range(5)] + [(1, UNIVERSAL, 4)]
    commits = tuple(
        replace(remote_commit(sealed(step), form), committed_at_seconds=hours * HOUR)
        for step, form, hours in dated
    )
    view = job_view([])
    policy = RetentionPolicy(keep_within_seconds=2 * HOUR)
    remote = replace(view.remotes[0], commits=commits, retention=policy)
    kept_there = keep_remote(replace(view, remotes=(remote,)))
    assert {c.step for c in commits if kept_there[NAS, c.key].keeps} == {2, 3, 4}
