"""A ladder as a pure function: nothing is left without a form before "gone", limits stay monotone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.model.save import Order
from ckptd.core.policy.retention import (
    GONE,
    Ephemeral,
    PolicyFacts,
    PolicyItem,
    RetentionPolicy,
    Tier,
    apply_policy,
    fullness,
)

if TYPE_CHECKING:
    from ckptd.core.policy.retention import RetentionVerdict, RungForm

HOUR = 3600.0
FORMS = ("zero", "universal", "weights-fp32", "weights-bf16")
RUNGS: tuple[RungForm, ...] = ("universal", "weights-fp32", "weights-bf16", "gone")
UNIVERSAL, WEIGHTS, NOTHING = (
    Tier(form="universal", after_newer=2),
    Tier(form="weights-bf16", after_newer=4),
    Tier(form="gone", after_newer=6),
)


@st.composite
def ladders(draw: st.DrawFn) -> tuple[Tier, ...]:
    """Any ladder that a job file may hold."""
    forms = draw(st.lists(st.sampled_from(RUNGS), unique=True, min_size=1))
    forms.sort(key=fullness, reverse=True)
    afters = draw(st.lists(st.integers(0, 9), unique=True, min_size=len(forms), max_size=len(forms)))
    by_span = draw(st.booleans())
    return tuple(
        Tier(form=form, after_seconds=after * HOUR) if by_span else Tier(form=form, after_newer=after)
        for form, after in zip(forms, sorted(afters), strict=True)
    )


@st.composite
def tiers(draw: st.DrawFn) -> list[PolicyFacts]:
    """What a remote may hold: whole ones, some that stepped down, forms that do not stand alone, rewinds."""
    held = []
    for n in range(draw(st.integers(1, 12))):
        forms = draw(st.sets(st.sampled_from(FORMS), min_size=1))
        dated = draw(st.one_of(st.none(), st.floats(0, 12)))
        item = PolicyItem(
            key=str(n),
            order=Order(draw(st.integers(1, 3)), draw(st.integers(1, 20)), n),
            pinned=draw(st.integers(0, 9)) == 0,
            committed_at_seconds=None if dated is None else dated * HOUR,
        )
        standing = forms - ({"universal"} if draw(st.integers(0, 4)) == 0 else set())
        held.append(PolicyFacts(item=item, forms=frozenset(forms), standing=frozenset(standing)))
    return held


def stays(found: dict[str, dict[str, RetentionVerdict]]) -> set[tuple[str, str]]:
    """(key, form) of all that stays."""
    return {(key, form) for key, forms in found.items() for form, verdict in forms.items() if verdict.keeps}


@settings(max_examples=150)
@given(tiers(), ladders(), st.integers(1, 5))
def test_a_ladder_never_leaves_nothing_before_gone(
    held: list[PolicyFacts], ladder: tuple[Tier, ...], limit: int
) -> None:
    """What goes names the form that stays instead, which is there, stands alone and is less; the newest whole
    one, the pinned and the limit's stay as they are."""
    policy = RetentionPolicy(save_total_limit=limit, ladder=ladder)
    found = apply_policy(held, policy)
    for one in held:
        mine = found[one.item.key]
        gone = {form for form, verdict in mine.items() if not verdict.keeps}
        for form in gone:
            assert mine[form].goes.startswith("ladder: ")
            instead = mine[form].instead
            if instead is None:
                assert gone == one.forms
                assert ladder[-1].form == GONE
            else:
                assert instead in one.standing
                assert mine[instead].keeps
                assert fullness(instead) < fullness(form)
        assert not (one.item.pinned and gone)
    whole = sorted((h for h in held if "zero" in h.forms), key=lambda h: h.item.order, reverse=True)
    for one in whole[:limit]:
        assert all(verdict.keeps for verdict in found[one.item.key].values())
    assert apply_policy(held[::-1], policy) == found


@settings(max_examples=150)
@given(tiers(), ladders(), st.integers(1, 5))
def test_more_is_never_less(held: list[PolicyFacts], ladder: tuple[Tier, ...], limit: int) -> None:
    """Raising the limit, adding a key, adding the ladder itself, later rungs: nothing goes that stayed."""
    policy = RetentionPolicy(save_total_limit=limit, ladder=ladder)
    low = stays(apply_policy(held, policy))
    more: list[dict[str, Any]] = [
        {"save_total_limit": limit + 1},
        {"keep_every_steps": 5},
        {"keep_steps": (3, 7)},
        {"keep_within_seconds": 2 * HOUR},
        {"ladder": ladder[:-1]} if ladder[-1].form == GONE and ladder[1:] else {},
        {"ladder": tuple(_later(rung) for rung in ladder)},
    ]
    for update in more:
        assert low <= stays(apply_policy(held, policy.model_copy(update=update)))
    assert stays(apply_policy(held, policy.model_copy(update={"ladder": ()}))) <= low


def _later(rung: Tier) -> Tier:
    if rung.after_newer is not None:
        return rung.model_copy(update={"after_newer": rung.after_newer + 1})
    return rung.model_copy(update={"after_seconds": (rung.after_seconds or 0.0) + HOUR})


@given(tiers(), ladders(), st.integers(1, 5))
def test_carried_out_it_comes_to_rest(held: list[PolicyFacts], ladder: tuple[Tier, ...], limit: int) -> None:
    """What is left after a step is judged again: it may go further down, never up, and it ends."""
    policy = RetentionPolicy(save_total_limit=limit, ladder=ladder)
    for _ in range(20):
        left = stays(apply_policy(held, policy))
        after = [
            replace(one, forms=forms, standing=one.standing & forms)
            for one in held
            if (forms := frozenset(form for key, form in left if key == one.item.key))
        ]
        if after == held:
            return
        assert after
        held = after
    pytest.fail("it never rests")


def line(count: int, *, forms: tuple[str, ...] = FORMS, hours: float = 1.0) -> list[PolicyFacts]:
    """Committed one after another."""
    every = frozenset(forms)
    return [
        PolicyFacts(
            item=PolicyItem(key=str(n), order=Order(1, n, n), committed_at_seconds=n * hours * HOUR),
            forms=every,
            standing=every,
        )
        for n in range(1, count + 1)
    ]


def left(held: list[PolicyFacts], policy: RetentionPolicy) -> dict[str, list[str]]:
    """Forms that stay, in words."""
    return {
        key: sorted(form for form, verdict in forms.items() if verdict.keeps)
        for key, forms in apply_policy(held, policy).items()
    }


def test_what_is_ephemeral_goes_by_its_own_limit() -> None:
    """Thrown away after the next few: no rung keeps a lesser form of it for years."""
    throw = Ephemeral(every_steps=4, keep=2)
    policy = RetentionPolicy(save_total_limit=1, ephemeral=throw, ladder=(UNIVERSAL, WEIGHTS))
    found = left(line(12), policy)
    assert {key for key, forms in found.items() if forms} == {"4", "8", "10", "11", "12"}
    gone = apply_policy(line(12), policy)["9"]
    assert {verdict.goes for verdict in gone.values()} == {"ephemeral: the newest 2 stay"}
    kept_step = left(line(12), policy.model_copy(update={"keep_steps": (9,)}))
    assert kept_step["9"] == sorted(FORMS)


def test_from_whole_to_gone() -> None:
    """By count, with four forms: each rung leaves its own form and what is less."""
    policy = RetentionPolicy(save_total_limit=2, ladder=(UNIVERSAL, WEIGHTS, NOTHING))
    assert left(line(8), policy) == {
        "8": sorted(FORMS),
        "7": sorted(FORMS),
        "6": ["universal", "weights-bf16", "weights-fp32"],
        "5": ["universal", "weights-bf16", "weights-fp32"],
        "4": ["weights-bf16"],
        "3": ["weights-bf16"],
        "2": [],
        "1": [],
    }


def test_the_form_that_is_missing_is_waited_for() -> None:
    """Without universal forms the whole stays until the weights' turn; without weights, until gone."""
    policy = RetentionPolicy(save_total_limit=1, ladder=(UNIVERSAL, WEIGHTS, NOTHING))
    found = left(line(8, forms=("zero", "weights-bf16")), policy)
    assert found["6"] == found["5"] == ["weights-bf16", "zero"]
    assert found["4"] == ["weights-bf16"]
    found = left(line(8, forms=("zero",)), policy)
    assert found["3"] == ["zero"]
    assert found["2"] == []
    verdict = apply_policy(line(8, forms=("zero",)), policy)["3"]["zero"]
    assert verdict.keeps == ("ladder: no weights-bf16 form is here instead",)


def test_a_span_is_counted_from_the_newest_commit() -> None:
    """Not from a clock; a COMMIT dated a year ahead ages all by four usual intervals at most (P9)."""
    held = line(6, forms=("zero", "universal"))

    def stepped(held: list[PolicyFacts], hours: float) -> list[str]:
        rung = Tier(form="universal", after_seconds=hours * HOUR)
        policy = RetentionPolicy(save_total_limit=1, ladder=(rung,))
        return [key for key, forms in left(held, policy).items() if forms == ["universal"]]

    assert stepped(held, 3) == ["1", "2", "3"]
    ahead = replace(held[-1].item, committed_at_seconds=9000 * HOUR)
    jumped = [*held[:-1], replace(held[-1], item=ahead)]
    assert stepped(jumped, 3) == ["1", "2", "3", "4", "5"]
    assert stepped(jumped, 9) == []


def undated(one: PolicyFacts) -> PolicyFacts:
    """Its COMMIT carries no time that can be read."""
    return replace(one, item=replace(one.item, committed_at_seconds=None))


def test_an_undated_one_is_as_old_as_the_one_after_it() -> None:
    """A ZeRO COMMIT that went took its date with it: what is left ages on."""
    span = Tier(form="gone", after_seconds=3 * HOUR)
    policy = RetentionPolicy(save_total_limit=1, ladder=(span,))
    held = line(6)
    held[1] = undated(held[1])
    assert left(held, policy)["2"] == []
    held[-1] = undated(held[-1])
    assert left(held[-1:], policy) == {"6": sorted(FORMS)}
