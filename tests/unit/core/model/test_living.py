"""Another node writes to a remote under our job's name: said at the first start, and by `check` (H6)."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from ckptd.config.loader import load_job
from ckptd.config.schema import DaemonConfig
from ckptd.core.model.heartbeat import DEAD_SECONDS, Heartbeat, NewestSave, heartbeat_key
from ckptd.daemon.state.problems import Problems
from ckptd.daemon.uploads.attachment import on_attached
from ckptd.maintenance.check import check_job
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote.attach import attach
from ckptd.storage.remote.heartbeats import NEXT_STEP, Heartbeats
from ckptd.storage.stores.open import open_store
from tests.stores.scene import Node

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.remote.messages import Attached


class Remote:
    """One of job `job`, with heartbeats."""

    def __init__(self, root: Path) -> None:
        (root / "save").mkdir()
        self.root, self.nas, self.node = root, root / "nas", Node(root / "save")
        self.attach()

    def attach(self, **more: object) -> Attached:
        settings = self.node.settings(self.nas, node="here", node_id="id-here", **more)
        return attach(open_store(settings.url), settings)

    def beat(self, node: str, *, seconds_ago: float = 0.0, ended: bool = False, node_id: str = "") -> None:
        newest = NewestSave(tag="global_step1020", branch=1, step=1020, written_seconds_ago=3)
        said = Heartbeat(
            job_id="j", job="job", node=node, node_id=node_id or f"id-{node}", config_digest="d",
            ckptd_version="1", as_of="2026-01-01T00:00:00Z", state="ok", newest=newest, ended=ended,
        )  # fmt: skip
        Heartbeats(open_store(str(self.nas))).put(said)
        at = time.time() - seconds_ago
        os.utime(self.nas / heartbeat_key(node), (at, at))


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


def test_who_writes_there_is_told_once_the_last_heard_of_first(remote: Remote) -> None:
    assert remote.attach().living == (), "there are no heartbeats"
    remote.beat("far", seconds_ago=200)
    remote.beat("near", seconds_ago=20)
    found = remote.attach().living
    assert [seen.node for seen in found] == ["near", "far"]
    assert 195 <= (found[1].seconds_ago or 0) <= 260, "by the store's present, though it is the only one"
    known = remote.attach().identity
    again = remote.attach(job_id=known.job_id, remote_id=known.remote_id)
    assert again.living == (), "this node was here before"
    assert not list((remote.nas / "_ckptd").glob("probe*"))


@pytest.mark.parametrize("how", ["dead", "ended", "own name", "own id"])
def test_of_nodes_that_are_gone_and_of_this_one_nothing_is_said(remote: Remote, how: str) -> None:
    """A node that lost its state, or came back under another name, and one that was stopped."""
    if how == "dead":
        remote.beat("other", seconds_ago=DEAD_SECONDS + 30)
    elif how == "ended":
        remote.beat("other", ended=True)
    else:
        remote.beat("here" if how == "own name" else "other", node_id="id-here" if how == "own id" else "")
    assert remote.attach().living == ()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_daemon_says_it_at_its_first_start(remote: Remote, is_shared: bool) -> None:
    remote.beat("other")
    journal = Journal(remote.root / "journal.db")
    problems = Problems()
    session = SimpleNamespace(set_duplicate=lambda **_: None, settings=SimpleNamespace(url=str(remote.root)))
    state = cast("JobState", SimpleNamespace(journal=journal, problems=problems))
    heard = on_attached(
        "nas",
        {"nas": cast("RemoteSession", session)},
        state,
        is_shared=is_shared,
        learn_job_id=lambda _: None,
        wake=lambda: None,
    )
    heard(remote.attach())
    journal.close()
    found = [(p.code, p.severity, p.next_step) for p in problems.all()]
    assert found == ([] if is_shared else [("name-shared", "note", NEXT_STEP)])
    if found:
        text = problems.all()[0].text
        assert text.startswith("node other writes to nas under this name, too: heard of ")
        assert "its newest step 1020" in text


def test_check_says_it_before(remote: Remote) -> None:
    remote.beat("other")
    path = remote.root / "job.toml"
    path.write_text(
        f'name = "job"\nsave_dir = "{remote.root}/save"\n[[remote]]\nname = "nas"\nurl = "{remote.nas}"\n'
        "same_filesystem = true\n"
    )
    rows = [f for f in check_job(load_job(path), DaemonConfig(), os.environ) if f.hint == NEXT_STEP]
    assert [(f.what, f.verdict) for f in rows] == [("remote nas", "note")]
    assert "node other writes to" in rows[0].text
