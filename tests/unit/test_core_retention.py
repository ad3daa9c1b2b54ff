"""Retention as a pure function: properties over generated histories (docs/design.md §5)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.retention import Item, RetentionPolicy, keep_reasons
from ckptd.core.save import Order

ITEMS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 50), st.booleans()), min_size=1, max_size=12, unique=True
).map(
    lambda rows: [
        Item(key=str(n), order=Order(branch, step, n), pinned=pinned)
        for n, (branch, step, pinned) in enumerate(rows)
    ]
)


def kept(items: list[Item], policy: RetentionPolicy) -> set[str]:
    return {key for key, why in keep_reasons(items, policy).items() if why}


@given(ITEMS, st.integers(1, 12), st.randoms())
def test_never_empties_keeps_pinned_and_ignores_the_order_of_its_input(
    items: list[Item], limit: int, random: object
) -> None:
    """The newest and every pinned item stay, and exactly the limit; a permutation changes nothing."""
    policy = RetentionPolicy(save_total_limit=limit)
    result = kept(items, policy)
    newest = max(items, key=lambda item: item.order)
    assert newest.key in result
    assert {item.key for item in items if item.pinned} <= result
    plain = [item.model_copy(update={"pinned": False}) for item in items]
    assert len(kept(plain, policy)) == min(limit, len(items))
    assert kept(items[::-1], policy) == result


@given(ITEMS, st.integers(1, 11))
def test_raising_the_limit_never_deletes_more(items: list[Item], limit: int) -> None:
    """Monotone in the limit, and adding a key never removes a keep."""
    low = kept(items, RetentionPolicy(save_total_limit=limit))
    assert low <= kept(items, RetentionPolicy(save_total_limit=limit + 1))
    assert low <= kept(items, RetentionPolicy(save_total_limit=limit, keep_every_steps=5))
    assert low <= kept(items, RetentionPolicy(save_total_limit=limit, keep_steps=(3, 7)))


@given(ITEMS)
def test_without_a_key_nothing_goes(items: list[Item]) -> None:
    """No retention key: every item is kept, and says why."""
    assert kept(items, RetentionPolicy()) == {item.key for item in items}
