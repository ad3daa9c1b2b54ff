"""Hosts over one directory upload to a real remote: each file once, whoever dies or comes back (adr/0110)."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from ckptd.core.model.heartbeat import Heartbeat, heartbeat_key
from ckptd.core.model.manifest import stem
from ckptd.core.policy.leases import Shares, numbered, shares_folder
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.messages import DeleteCommit
from ckptd.storage.remote.observe import manifests_of, read_remote
from ckptd.storage.stores.directory import DirectoryStore
from tests.stores.scene import JOB_ID, Node

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.remote.messages import UploadResult
    from ckptd.storage.remote.observe import AttachedRemote

TAKEOVER_SECONDS = 30.0
NAMES = ("n0", "n1", "n2")


class Shared:
    """Three hosts, one directory, one remote."""

    def __init__(self, root: Path) -> None:
        (root / "nas").mkdir()
        self.nas = root / "nas"
        self.hosts = {name: Node(root / "save", name=name, dp=8) for name in NAMES}
        first = self.hosts["n0"]
        first.write_all()
        self.tag = first.tag
        self.files = {path.name: path.stat().st_size for path in (first.save_dir / first.tag).iterdir()}
        self.grounds: dict[str, AttachedRemote] = {
            name: host.attached(DirectoryStore(str(self.nas), owner=f"id-{name}", window_bytes=1 << 20))
            for name, host in self.hosts.items()
        }
        for name in NAMES:
            self.beat(name)

    def beat(self, name: str, *, seconds_ago: float = 0.0, state: str = "ok") -> None:
        """Its heartbeat, as old by the store's time as that."""
        said = Heartbeat(
            job_id=JOB_ID, job="job", node=name, node_id=f"id-{name}", config_digest="", ckptd_version="0",
            as_of="2026-01-01T00:00:00Z", state=state,
        )  # fmt: skip
        Heartbeats(self.grounds[name].store).put(said)
        at = time.time() - seconds_ago
        os.utime(self.nas / heartbeat_key(name), (at, at))

    def upload(self, name: str) -> UploadResult:
        """That host's order, with what it knows of earlier attempts."""
        host = self.hosts[name]
        order = host.order(host.sealed())
        more = {"takeover_seconds": TAKEOVER_SECONDS, "uploaded": host.uploaded()}
        return host.upload(self.grounds[name], order.model_copy(update=more))

    def division(self, number: int) -> Shares:
        """As it lies in the remote."""
        folder = shares_folder(self.tag, 1, "zero")
        return Shares.model_validate_json((self.nas / numbered(folder, number)).read_bytes())

    def listed(self) -> Counter[str]:
        """Path → how many manifests of the COMMIT list it."""
        (commit,) = read_remote(self.grounds["n0"].store).commits
        members = manifests_of(self.grounds["n0"].store, commit.commit)
        return Counter(file.path for known in members for file in known.files)


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_three_hosts_send_each_file_once_and_the_last_commits(shared: Shared) -> None:
    results = [shared.upload(name) for name in NAMES]
    assert [r.outcome for r in results] == ["waiting", "waiting", "committed"]
    assert sum(r.bytes_sent for r in results) == sum(shared.files.values())
    assert all(r.bytes_sent for r in results)
    assert shared.listed() == Counter(dict.fromkeys(shared.files, 1))
    again = [shared.upload(name) for name in NAMES]
    assert [(r.outcome, r.bytes_sent, r.unlisted) for r in again] == [("committed", 0, ())] * 3


def test_what_a_dead_host_did_not_send_is_sent_by_the_others(shared: Shared) -> None:
    sent = [shared.upload("n0"), shared.upload("n1")]
    assert shared.division(1).members == NAMES
    shared.beat("n2", seconds_ago=TAKEOVER_SECONDS + 1)
    sent += [shared.upload("n0"), shared.upload("n1")]
    assert sent[-1].outcome == "committed"
    assert shared.division(2).members == ("n0", "n1")
    assert sum(r.bytes_sent for r in sent) == sum(shared.files.values())
    shared.beat("n2")
    late = shared.upload("n2")
    assert (late.outcome, late.bytes_sent) == ("committed", 0)


def test_one_that_was_paused_is_left_out(shared: Shared) -> None:
    shared.beat("n2", state="paused")
    assert [shared.upload(name).outcome for name in ("n0", "n1")] == ["waiting", "committed"]
    assert shared.division(1).members == ("n0", "n1")


def test_what_a_host_listed_before_it_was_taken_for_dead_stays_in_its_manifest(shared: Shared) -> None:
    first = shared.upload("n1")
    shared.beat("n1", seconds_ago=TAKEOVER_SECONDS + 1)
    second = shared.upload("n0")
    assert shared.division(2).members == ("n0", "n2")
    shared.beat("n1")
    back = shared.upload("n1")
    assert (back.outcome, back.bytes_sent) == ("waiting", 0)
    third = shared.upload("n2")
    assert third.outcome == "committed"
    assert shared.listed() == Counter(dict.fromkeys(shared.files, 1))
    assert sum(r.bytes_sent for r in (first, second, third)) == sum(shared.files.values())


def test_one_without_a_share_commits_what_the_dead_had_listed(shared: Shared) -> None:
    """Both members listed all and died before either made the COMMIT."""
    shared.beat("n2", seconds_ago=TAKEOVER_SECONDS + 1)
    for name in ("n0", "n1"):
        shared.upload(name)
    commit = shared.nas / "_ckptd/commits" / f"{stem(shared.tag, 1, 'zero')}.json"
    commit.unlink()
    for name in ("n0", "n1"):
        shared.beat(name, seconds_ago=TAKEOVER_SECONDS + 1)
    shared.beat("n2")
    last = shared.upload("n2")
    assert (last.outcome, last.bytes_sent) == ("committed", 0)
    assert shared.listed() == Counter(dict.fromkeys(shared.files, 1))


def test_one_that_came_later_waits_without_a_word(shared: Shared) -> None:
    shared.beat("n2", seconds_ago=TAKEOVER_SECONDS + 1)
    shared.upload("n0")
    shared.beat("n2")
    result = shared.upload("n2")
    assert (result.outcome, result.manifest_key) == ("waiting", None)
    assert shared.upload("n1").outcome == "committed"


def test_a_division_goes_with_its_checkpoint(shared: Shared) -> None:
    result = [shared.upload(name) for name in NAMES][-1]
    assert result.commit is not None
    order = DeleteCommit(
        tag=shared.tag, generation=1, form="zero", reason="test", commit_sha256=result.commit.sha256
    )
    host = shared.hosts["n0"]
    newer = Node(host.save_dir, name="n0", dp=8, tag="global_step9")
    newer.write_all()
    assert newer.upload(shared.grounds["n0"], newer.order(newer.sealed(step=9))).outcome == "committed"
    delete_commit(shared.grounds["n0"], order, lambda: None)
    assert not list(shared.grounds["n0"].store.list(shares_folder(shared.tag, 1, "zero")))
