"""What a node at rest asks of a remote in a minute, counted, and what `check` says that it costs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.base.names import ROOT
from ckptd.core.model.heartbeat import Heartbeat, heartbeat_key
from ckptd.core.model.manifest import to_bytes
from ckptd.maintenance.check import requests_at_rest, requests_row
from ckptd.storage.child.service import Service
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.heartbeats import READ_AGAIN_SECONDS
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.base import ObjectInfo
from ckptd.storage.stores.directory import DirectoryStore

PAGE = 1000
MINUTES = 10
"""In which every other node's heartbeat is read once more."""


def heartbeat(node: str) -> Heartbeat:
    """Of a node over a directory of its own host."""
    return Heartbeat(
        job_id="j",
        job="j",
        node=node,
        node_id=f"id-{node}",
        config_digest="c",
        ckptd_version="1",
        as_of="2026-01-01T00:00:00Z",
        state="idle",
        run_id="j",
        host=node,
        save_dir="/save",
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests by verb, as an object store would get them: a listing is one for each thousand keys."""
    counts: Counter[str] = Counter()
    real = {verb: getattr(DirectoryStore, verb) for verb in ("get", "put", "stat", "list", "put_if_absent")}

    def counted(verb: str) -> Any:
        def ask(store: DirectoryStore, *arguments: Any) -> Any:
            counts[verb] += 1
            return real[verb](store, *arguments)

        return ask

    def listed(store: DirectoryStore, prefix: str) -> Iterator[ObjectInfo]:
        found = list(real["list"](store, prefix))
        counts["list"] += max(1, -(-len(found) // PAGE))
        return iter(found)

    for verb in real:
        monkeypatch.setattr(DirectoryStore, verb, listed if verb == "list" else counted(verb))
    return counts


@pytest.mark.parametrize("nodes", [1, 64, 1000])
def test_a_node_at_rest_asks_what_check_says(
    nodes: int, asked: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real child at a directory, its clock a minute on at each look; each other node beats each minute."""
    now = [1e6]
    monkeypatch.setattr("ckptd.storage.remote.heartbeats.time.monotonic", lambda: now[0])
    answers: list[m.Answer] = []
    service = Service(lambda _order_id, answer: answers.append(answer), window_bytes=1 << 20)
    place = tmp_path / "nas"
    place.mkdir()
    settings = m.RemoteSettings(
        name="nas", url=str(place), job="j", save_dir="/save", node="n0", node_id="id-n0",
        same_filesystem=True, may_initialise=True,
    )  # fmt: skip
    service.expect(settings)
    service.carry_out(1, m.Attach(settings=settings))
    assert isinstance(answers[-1], m.Attached)
    others = [f"n{number}" for number in range(1, nodes)]
    for one in others:
        path = place / heartbeat_key(one)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_bytes(heartbeat(one)))
    strangers = place / ROOT / "nodes" / "odd"
    strangers.mkdir(parents=True)
    for number in range(6 * nodes):
        (strangers / f"{number}.json").touch()

    def minute() -> None:
        now[0] += 60.0
        for one in others:
            os.utime(place / heartbeat_key(one))
        service.carry_out(2, m.Observe(only_changed=True))
        service.carry_out(3, m.Beat(heartbeat=heartbeat("n0"), node="n0"))
        assert isinstance(answers[-1], m.Beats)

    minute()
    now[0] += READ_AGAIN_SECONDS
    asked.clear()
    for _ in range(MINUTES):
        minute()
    puts = asked["put"] + asked["list"] + asked["put_if_absent"]
    gets = asked["get"] + asked["stat"]
    said = requests_at_rest(nodes, 7 * nodes + 1)
    assert (puts / MINUTES, gets / MINUTES) == pytest.approx(said, rel=0.07), asked


def test_check_prices_what_is_paid_for() -> None:
    remote: Any = type("Remote", (), {"url": "s3://bucket/j"})
    ((key, value),) = requests_row(remote, Access())
    assert key == "requests"
    assert "1 USD a month for 1 node, " in value
    assert requests_row(remote, Access(endpoint_url="http://127.0.0.1:9000")) == ()
    remote.url = "/nas/j"
    assert requests_row(remote, Access()) == ()
