"""Looks at a remote: what is kept between two of them, and what counts as news."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.manifest import commit_key
from ckptd.remote.directory import DirectoryStore
from ckptd.remote.documents import DocumentCache
from ckptd.remote.messages import Attach, Attached, Observation, Observe, Unchanged
from ckptd.remote.observe import observe
from ckptd.remote.open import open_store
from ckptd.remote.service import Service
from tests.stores.scene import Node

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from ckptd.remote.messages import Answer


def test_what_was_retired_is_not_remembered(tmp_path: Path) -> None:
    """A daemon that runs for months sees thousands of COMMITs come and go (P12)."""
    node = Node(tmp_path / "save")
    store = open_store(str(tmp_path / "nas"))
    ground = node.attached(store)
    for step in (10, 20, 30):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode(), size=20)
        node.ship(ground, node.order(node.sealed(step=step)))
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
    node.ship(node.attached(open_store(str(nas))), node.order(node.sealed()))
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
