"""What `resume` and `restore` read of a remote with many checkpoints: the newest, and what is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptd.recover.select.choose import NEWEST_READ, Candidates, SavesWanted, choose, committed_saves
from ckptd.recover.select.copies import Nodes
from ckptd.recover.select.inventory import NodeMemory, RemoteInventory
from ckptd.storage.remote.observe import live_commits, read_remote
from tests.stores.counting import CountingStore
from tests.stores.scene import Node

if TYPE_CHECKING:
    from pathlib import Path

NONE: frozenset[tuple[str, str]] = frozenset()
COUNT = 20


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Objects of a remote with twenty COMMITs."""
    node, store = Node(tmp_path_factory.mktemp("run") / "save"), CountingStore()
    ground = node.attached(store)
    for step in range(1, COUNT + 1):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode(), size=20)
        assert node.upload(ground, node.order(node.sealed(step=step))).commit is not None
    return store.objects


@pytest.fixture
def store(filled: dict[str, bytes], tmp_path: Path) -> CountingStore:
    return CountingStore(objects=dict(filled))


def inventory(store: CountingStore, name: str = "nas") -> RemoteInventory:
    """The remote as it is; reads are counted from here on."""
    seen = read_remote(store)
    store.count()
    return RemoteInventory(
        name=name, url="memory:", store=store, observation=seen, commits=live_commits(seen)
    )


def damage(store: CountingStore, step: int) -> None:
    """Its manifest says something else than its name."""
    key = next(key for key in store.objects if key.startswith(f"_ckptd/nodes/global_step{step}~"))
    store.objects[key] = store.objects[key].replace(b'"step"', b'"stop"')


def test_the_newest_are_read_not_all(store: CountingStore) -> None:
    choice = choose([], [inventory(store)], NodeMemory(), Nodes())
    assert [c.tag for c in choice.candidates] == [f"global_step{COUNT - i}" for i in range(NEWEST_READ)]
    assert store.count() == NEWEST_READ


def test_older_ones_are_read_where_newer_ones_are_damaged(store: CountingStore) -> None:
    for step in range(3, COUNT + 1):
        damage(store, step)
    choice = choose([], [inventory(store)], NodeMemory(), Nodes())
    assert [c.tag for c in choice.candidates] == ["global_step2", "global_step1"]
    assert len(choice.notes) == COUNT - 2


def test_of_a_tag_that_is_asked_for_or_lies_here_all_is_read(store: CountingStore) -> None:
    wanted = SavesWanted(most=1, tags=frozenset({"global_step3"}))
    remotes = [inventory(store), inventory(store, "s3")]
    found = committed_saves(remotes, Nodes(), NONE, Candidates(), wanted)
    assert [(c.tag, len(c.copies)) for c in found] == [(f"global_step{COUNT}", 2), ("global_step3", 2)]
    assert store.count() == 4


def test_what_is_of_no_use_does_not_count(store: CountingStore) -> None:
    wanted = SavesWanted(most=1, is_usable=lambda c: c.order.step < COUNT - 1)
    found = committed_saves([inventory(store)], Nodes(), NONE, Candidates(), wanted)
    assert [c.order.step for c in found] == [COUNT, COUNT - 1, COUNT - 2]
