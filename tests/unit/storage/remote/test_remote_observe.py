"""Looks at a remote: what is kept between two of them, and what counts as news."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.conversion.remote.source import look_at
from ckptd.core.model.manifest import Tombstone, commit_key, side_key, stem, to_bytes
from ckptd.storage.child.service import Service
from ckptd.storage.remote.documents import DocumentCache
from ckptd.storage.remote.messages import Attach, Attached, Observation, Observe, Unchanged
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.open import open_store
from tests.stores.counting import CountingStore
from tests.stores.scene import Node
from tests.support.observing import describe, observe

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from ckptd.storage.remote.messages import Answer


def test_what_was_retired_is_not_remembered(tmp_path: Path) -> None:
    """A daemon that runs for months sees thousands of COMMITs come and go (P12)."""
    node = Node(tmp_path / "save")
    store = open_store(str(tmp_path / "nas"))
    ground = node.attached(store)
    for step in (10, 20, 30):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode(), size=20)
        node.upload(ground, node.order(node.sealed(step=step)))
    cache = DocumentCache()
    assert len(observe(store, cache=cache).commits) == 3
    assert len(cache) == 3
    store.delete(commit_key("global_step10", 1, "zero"))
    assert len(observe(store, cache=cache).commits) == 2
    assert len(cache) == 2


def test_only_what_lasts_is_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space of a share changes with whatever else is written there; a COMMIT that goes is said."""
    node = Node(tmp_path / "save")
    node.write_all()
    nas = tmp_path / "nas"
    node.upload(node.attached(open_store(str(nas))), node.order(node.sealed()))
    heard: list[Answer] = []
    service = Service(lambda _, answer: heard.append(answer))
    settings = node.settings(nas)
    service.expect(settings)
    service.carry_out(1, Attach(settings=settings))
    service.carry_out(2, Observe())
    monkeypatch.setattr(DirectoryStore, "free_bytes", lambda _: 12345)
    service.carry_out(3, Observe(only_changed=True))
    (nas / commit_key(node.tag, 1, "zero")).unlink()
    service.carry_out(4, Observe(only_changed=True))
    assert [type(answer) for answer in heard] == [Attached, Observation, Unchanged, Observation]
    last = heard[-1]
    assert isinstance(last, Observation)
    assert last.commits == ()


def test_a_pointer_that_a_late_put_left_behind_is_put_right(tmp_path: Path) -> None:
    """By whoever looks twice: a COMMIT that was made a moment ago is pointed at by its maker."""
    node, nas = Node(tmp_path / "save"), tmp_path / "nas"
    store = open_store(str(nas))
    ground = node.attached(store)
    for step in (10, 20):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode(), size=20)
        node.upload(ground, node.order(node.sealed(step=step)))
    heard: list[Answer] = []
    service = Service(lambda _, answer: heard.append(answer))
    service.expect(node.settings(nas))
    service.carry_out(1, Attach(settings=node.settings(nas)))
    store.put("latest", b"global_step10")  # of a process that died long ago
    service.carry_out(2, Observe(only_changed=True))
    assert (nas / "latest").read_bytes() == b"global_step10"
    service.carry_out(3, Observe(only_changed=True))
    assert (nas / "latest").read_bytes() == b"global_step20"
    service.carry_out(4, Observe(only_changed=True))
    assert [type(answer) for answer in heard] == [Attached, Observation, Unchanged, Observation]


def test_no_reader_is_misled_by_a_pointer(tmp_path: Path) -> None:
    """What counts in a remote is what its COMMITs say."""
    node, nas = Node(tmp_path / "save"), tmp_path / "nas"
    store = open_store(str(nas))
    ground = node.attached(store)
    for step in (10, 20):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode(), size=20)
        node.upload(ground, node.order(node.sealed(step=step)))
    store.put("latest", b"global_step10")
    assert look_at(str(nas), {}).name == "global_step20"


def entomb(store: CountingStore, step: int, *, files: int = 65) -> None:
    """A tombstone as retention leaves it, long after."""
    stone = Tombstone(
        tag=f"old_step{step}",
        generation=1,
        form="zero",
        branch=1,
        step=step,
        save_seq=step,
        reason="keep_last = 3",
        commit_sha256=f"{step:064x}",
        fingerprints=tuple(
            (f"zero_pp_rank_{i}_mp_rank_00_optim_states.pt", f"{i:064x}") for i in range(files)
        ),
    )
    store.put(side_key("retired", stem(stone.tag, 1, "zero")), to_bytes(stone))


def test_what_was_retired_costs_a_name(tmp_path: Path) -> None:
    """Neither reads nor the line through the pipe grow with what every tombstone lists."""
    node, store = Node(tmp_path / "save"), CountingStore()
    node.write_all()
    node.upload(node.attached(store), node.order(node.sealed()))
    store.count()
    observe(store)
    alone = store.count()
    for step in range(300):
        entomb(store, step)
    cache = DocumentCache()
    seen = observe(store, cache=cache)
    assert store.count() == alone
    assert len(cache) == 1
    assert len(seen.retired_tags) == 300
    assert len(seen.model_dump_json()) < 300 * 40 + 4000
    node.upload(node.attached(store), node.order(node.sealed(step=20)))
    assert not [key for key in store.gets if "/retired/old_" in key]
    store.count()
    (stone,) = describe(store, "old_step7").retired
    assert len(stone.fingerprints) == 65
    assert store.count() < 10


def test_tombstones_that_matter_are_read(tmp_path: Path) -> None:
    """Of removals that are under way, of disputed COMMITs, and all of them where nothing counts any more."""
    node, store = Node(tmp_path / "save"), CountingStore()
    node.write_all()
    node.upload(node.attached(store), node.order(node.sealed()))
    for step in range(5):
        entomb(store, step)
    assert observe(store).retired == ()
    store.put(side_key("disputes", stem("old_step4", 1, "zero")), b"{}")
    seen = observe(store)
    assert ([stone.step for stone in seen.retired], seen.retiring) == ([4], ())
    manifests = [key for key in store.objects if key.startswith("_ckptd/nodes/")]
    store.put(manifests[0].replace(node.tag, "old_step2"), store.objects[manifests[0]])
    seen = observe(store)
    assert [(s.step, s.reason) for s in seen.retired] == [(2, "keep_last = 3"), (4, "keep_last = 3")]
    assert seen.retiring == (("old_step2", 1, "zero"),)
    store.delete(commit_key(node.tag, 1, "zero"))
    assert [stone.step for stone in observe(store).retired] == [0, 1, 2, 3, 4]
