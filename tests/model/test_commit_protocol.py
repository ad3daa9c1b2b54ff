"""All interleavings of nodes that upload saves of a tag: no COMMIT over two, no whole save left (H1-H3, H12).

The real code runs (tests/model/commit_code.py); "left" means that no fair future commits it. Each world
prints how many states it has. Seeded protocols show that the search sees what it is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptd.core.model.generation import GenerationChoice, JoinGeneration
from ckptd.storage.remote import documents
from tests.model.commit_code import TWO_NODES, TWO_REPLICAS, Slot, choose, stepwise
from tests.model.commit_world import Rules, World
from tests.model.explorer import Search, Violation
from tests.stores.scene import MODEL, OPTIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.model.save import SealedSave
    from ckptd.storage.remote.messages import TagView

ONE_NODE = (Slot(("n0",), (OPTIM.format(d=0), OPTIM.format(d=1), MODEL)),)
RETIRE, ALSO, READ = Slot(("r0",), task="delete"), Slot(("r1",), task="delete"), Slot(("x",), task="read")
SUPERSEDED: dict[str, object] = {"before": (1,), "listed": (0,), "asleep": (0,)}
"""Save 1 is committed; of save 2 the second node's part is missing."""
BOTH_COMMITTED: dict[str, object] = {"before": (1,), "listed": (0, 1), "asleep": (0, 1)}


def explore(rules: Rules, *, is_pointing: bool = False, must_commit: bool = True) -> int:
    """All states; how many."""
    with stepwise(is_pointing=is_pointing):
        world = World(rules)
        search = Search(world.successors, world.wrong, world.is_good if must_commit else None)
        seen = search.run(world.start())
    print(f"\n{seen.states:,} states, {seen.transitions:,} steps")
    assert seen.is_complete
    return seen.states


def rules(**more: object) -> Rules:
    return Rules(**more)  # type: ignore[arg-type]


QUICK = {
    "two saves, one node ahead": (rules(listed=(0,), most_generations=1), False),
    "two saves, the other ahead": (rules(listed=(1,), most_generations=1), False),
    "crash": (rules(saves=1, crashes=(1, 0), listed=(1,)), False),
    "replaced": (rules(saves=1, is_replaced=True, listed=(0,)), False),
    "last request late": (rules(saves=1, crashes=(0, 1), has_strays=True, listed=(0,)), False),
    "replicas": (rules(saves=1, slots=TWO_REPLICAS, listed=(0,), crashes=(0, 1)), False),
    "superseded and retired under a reader": (
        rules(slots=(*TWO_NODES, RETIRE, READ), crashes=(0,) * 4, **SUPERSEDED),
        False,
    ),
    "retired by two, pointers step by step": (
        rules(slots=(*TWO_NODES, RETIRE, ALSO), crashes=(0,) * 4, **BOTH_COMMITTED),
        True,
    ),
}
FULL = {
    "two saves": (rules(most_generations=1), False),
    "crash of either": (rules(saves=1, crashes=(1, 1)), False),
    "replaced before anything is listed": (rules(saves=1, is_replaced=True), False),
    "replicas, nothing listed": (rules(saves=1, slots=TWO_REPLICAS), False),
    "last requests late": (rules(saves=1, crashes=(1, 1), has_strays=True, listed=(0,)), False),
    "two saves, replicas, one node ahead": (
        rules(slots=TWO_REPLICAS, listed=(0,), most_generations=1),
        False,
    ),
    "two saves, more generations": (rules(listed=(0,)), False),
    "two saves, crash": (rules(crashes=(1, 0), listed=(0,), most_generations=1), False),
    "two saves, other node's crash": (rules(crashes=(0, 1), listed=(0,), most_generations=1), False),
    "two saves, every reading a step": (
        rules(is_describing=True, listed=(1,), most_generations=1),
        False,
    ),
    "two saves, replaced": (rules(is_replaced=True, listed=(0,), most_generations=1), False),
    "three saves": (rules(saves=3, listed=(1,), most_generations=1), False),
    "superseded and retired under a reader, crash": (
        rules(slots=(*TWO_NODES, RETIRE, READ), crashes=(0, 0, 1, 0), **SUPERSEDED),
        False,
    ),
    "superseded and retired by two, crash": (
        rules(slots=(*TWO_NODES, RETIRE, ALSO), crashes=(0, 0, 1, 0), **SUPERSEDED),
        False,
    ),
    "retired by two, crash, pointers step by step": (
        rules(slots=(*TWO_NODES, RETIRE, ALSO), crashes=(0, 0, 1, 0), **BOTH_COMMITTED),
        True,
    ),
    "retired under a reader, crash, pointers step by step": (
        rules(slots=(*TWO_NODES, RETIRE, READ), crashes=(0, 0, 1, 0), **BOTH_COMMITTED),
        True,
    ),
}


@pytest.mark.parametrize("name", QUICK)
def test_no_mixed_commit_and_no_whole_save_left(name: str) -> None:
    world, is_pointing = QUICK[name]
    assert explore(world, is_pointing=is_pointing) > 1000


@pytest.mark.parametrize("name", ["two saves, the other ahead", "crash", "replicas"])
def test_the_same_where_names_tell_of_manifests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many nodes: what cannot cover the grid is not read (ADR 0105)."""
    monkeypatch.setattr(documents, "FEW", 0)
    assert explore(QUICK[name][0]) > 1000


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FULL)
def test_many_in_larger_worlds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "FEW", 0)
    world, is_pointing = FULL[name]
    assert explore(world, is_pointing=is_pointing) > 1000


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FULL)
def test_the_same_in_larger_worlds(name: str) -> None:
    world, is_pointing = FULL[name]
    assert explore(world, is_pointing=is_pointing) > 1000


# --- stores that enforce no create-only write (P10) -------------------------------------------------------


def test_one_writing_node_needs_no_create_only_store() -> None:
    explore(rules(slots=ONE_NODE, crashes=(2,), is_create_only=False, most_generations=3))


def test_nor_when_its_last_request_comes_late() -> None:
    late = rules(slots=ONE_NODE, crashes=(1,), is_create_only=False, has_strays=True)
    explore(late)


def test_two_writing_nodes_commit_nothing_there() -> None:
    """However they meet; without the second look both created COMMIT, one over the other's."""
    both = rules(saves=1, is_create_only=False)
    explore(both, must_commit=False)
    with pytest.raises(Violation, match="never good again"):
        explore(both)


# --- seeded protocols: the search sees what it is for -----------------------------------------------------


def fixed(save: SealedSave, view: TagView) -> GenerationChoice:
    """Without generations."""
    del save, view
    return JoinGeneration(generation=1)


def highest(save: SealedSave, view: TagView) -> GenerationChoice:
    """The highest generation or the one after it, as it once was: two saves pass each other for ever."""
    found = choose(save, view)
    newest = max((m.manifest.generation for m in view.manifests), default=1)
    return (
        JoinGeneration(generation=newest + 1)
        if isinstance(found, JoinGeneration) and found.generation < newest
        else found
    )


@pytest.mark.parametrize(
    ("chooser", "reason"), [(fixed, "never good again"), (highest, "sent save 1 as generation 1 and as 3")]
)
def test_without_generations_a_whole_save_is_left(
    chooser: Callable[..., GenerationChoice], reason: str
) -> None:
    with pytest.raises(Violation, match=reason):
        explore(rules(chooser=chooser, listed=(1,)))


def test_with_fixed_keys_and_saves_not_compared_commits_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first design was."""
    monkeypatch.setattr("ckptd.core.model.generation.differs", lambda a, b, save_spread_seconds: None)
    with pytest.raises(Violation, match="mixes saves"):
        explore(rules(chooser=fixed))


# --- limits -----------------------------------------------------------------------------------------------

LOST = rules(saves=1, crashes=(0, 1), is_replaced=True, listed=(0,))


def test_but_the_generation_that_it_announced_to_replace_in_is_left() -> None:
    """Its lease (ADR 0083) stays, and nobody may commit beside it: the next save has a generation anew."""
    with pytest.raises(Violation, match="never good again"):
        explore(LOST)


@pytest.mark.full
def test_lost_nodes_leave_nothing_wrong() -> None:
    explore(LOST, must_commit=False)
    more = {"saves": 1, "crashes": (0, 1), "is_replaced": True, "listed": (0,)}
    explore(rules(slots=TWO_REPLICAS, **more), must_commit=False)
    explore(rules(has_strays=True, **more), must_commit=False)
