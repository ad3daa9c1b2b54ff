"""A node that announced a replacement and is gone for good: said, compared, out of the way."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.conversion.remote.uploader import NOTE
from ckptd.core.model.manifest import Lease, lease_key, to_bytes
from ckptd.errors import RefusedError, RemoteUnreachable
from ckptd.maintenance.gc import Collector
from ckptd.recover.select.inventory import RemoteInventory
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.observe import AttachedRemote, live_commits, read_remote
from ckptd.storage.remote.repair import compare, lapse, leases_of
from ckptd.storage.stores.rate_limit import Cancelled
from tests.stores.memory import MemoryStore
from tests.stores.scene import MODEL, OPTIM, Node, archive
from tests.support.repair_scene import RepairScene, bare, built, run_here, scene
from tests.unit.storage.remote.test_remote_lanes import assert_true

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptd.storage.remote.messages import UploadedObject, UploadResult

__all__ = ["bare", "built", "scene"]


class Pair:
    """Two nodes, one file of another content on each; the second replaced the first's and died."""

    def __init__(self, folder: Path) -> None:
        self.first, second = Node(folder / "a"), Node(folder / "b", name="n1")
        for node, mark in ((self.first, b"1"), (second, b"2")):
            node.write_all()
            node.write({"notes.json": mark * 40})
        self.key = f"{self.first.tag}/notes.json"
        self.store = MemoryStore()
        self.ground: AttachedRemote = second.attached(self.store)
        self.done: list[str] = []

        def dies(event: UploadedObject) -> None:
            if event.key == self.key:
                msg = "enough"
                raise Cancelled(msg)

        def replaced(event: UploadedObject) -> None:
            self.first.events.append(event)
            self.done.append(event.key)
            if event.key == self.key and self.done.count(self.key) == 1:
                with pytest.raises(Cancelled):
                    upload_form(
                        self.ground, second.order(second.sealed()), replace(second.control(), on_done=dies)
                    )

        self.outcome = upload_form(
            self.ground,
            self.first.order(self.first.sealed()),
            replace(self.first.control(), on_done=replaced),
        )

    def again(self) -> UploadResult:
        """The first node's next attempt, with what its journal holds."""
        order = self.first.order(self.first.sealed(), uploaded=self.first.uploaded())
        return upload_form(self.ground, order, self.first.control())

    def gone(self, node: str = "n1", *, dry_run: bool = False) -> list[str]:
        """What `gc --gone` removes."""
        observation = read_remote(self.store)
        inventory = RemoteInventory(
            name="r",
            url="memory",
            store=self.store,
            observation=observation,
            commits=live_commits(observation),
        )
        collector = Collector(None, lambda _: None, dry_run=dry_run)
        collector.gone(inventory, node)
        return [row.what for row in collector.removed]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_who_waits_is_told_for_whom_and_what_to_do(pair: Pair) -> None:
    assert pair.outcome.outcome == "waiting"
    assert "node n1 replaces" in (pair.outcome.reason or "")
    assert "ckptd gc JOB --gone n1" in pair.outcome.hint


def test_what_it_was_replacing_is_compared_before_anything_rests_on_it(pair: Pair) -> None:
    """P2: the journal of the first knows its file as verified; what lies there now is the other's."""
    assert pair.store.objects[pair.key] == b"2" * 40
    assert pair.gone(dry_run=True) == [pair.key]
    assert pair.store.objects[pair.key] == b"2" * 40
    assert pair.gone() == [pair.key]
    assert pair.again().outcome == "waiting"
    (lease,) = pair.gone()
    assert "/leases/" in lease
    assert pair.again().outcome == "committed"
    assert_true(pair.store)
    assert pair.store.objects[pair.key] == b"1" * 40
    assert pair.gone() == []


def test_a_lease_by_itself_would_let_a_wrong_commit_through(pair: Pair) -> None:
    """What the comparing is for: removing the file by hand alone commits the other's bytes."""
    (name,) = [name for name in pair.store.objects if "/leases/" in name]
    del pair.store.objects[name]
    assert pair.again().outcome == "committed"
    with pytest.raises(AssertionError):
        assert_true(pair.store)


def test_leases_of_other_nodes_and_of_what_is_over_stay(pair: Pair) -> None:
    before = dict(pair.store.objects)
    assert pair.gone("n7") == []
    assert pair.store.objects == before
    pair.gone()
    pair.again()
    pair.gone()
    assert pair.again().outcome == "committed"
    late = pair.first.order(pair.first.sealed()).manifest
    pair.store.objects[lease_key(late)] = to_bytes(
        Lease(tag=late.tag, generation=1, form="zero", node="n1", node_id="x")
    )
    assert leases_of(pair.store, "n1") == []


def test_while_another_node_replaces_there_nothing_is_touched(pair: Pair) -> None:
    busy = pair.first.order(pair.first.sealed()).manifest.model_copy(update={"node": "n2", "node_id": "y"})
    pair.store.objects[lease_key(busy)] = to_bytes(
        Lease(tag=busy.tag, generation=1, form="zero", node="n2", node_id="y")
    )
    ((key, where),) = leases_of(pair.store, "n1")
    held = compare(pair.store, key, where, "n1")
    assert held.others == ("n2",)
    before = dict(pair.store.objects)
    with pytest.raises(RefusedError, match="n2"):
        lapse(pair.store, pair.ground.identity, held, lambda *_: None)
    assert pair.store.objects == before


def test_the_command(scene: RepairScene, capsys: pytest.CaptureFixture[str]) -> None:
    place = scene.nas / "_ckptd" / "leases" / "global_step77~g1~zero"
    place.mkdir(parents=True)
    lease = Lease(tag="global_step77", generation=1, form="zero", node="away", node_id="x")
    (place / "away~x.json").write_bytes(to_bytes(lease))
    dry = run_here(capsys, "gc", scene.nas, "--gone", "away", "--dry-run")
    assert (dry.returncode, "away is gone" in dry.stdout) == (0, True), dry.stderr
    assert (place / "away~x.json").exists()
    assert run_here(capsys, "gc", scene.nas, "--gone", "away").returncode == 0
    assert not place.exists() or not list(place.iterdir())
    again = run_here(capsys, "gc", scene.nas, "--gone", "away")
    assert "no lease of a node 'away'" in again.stderr


def test_what_a_killed_conversion_left_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder nothing is open; its files stay, for the same conversion goes on with them."""
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "x.pt").write_bytes(b"12345")
    (tmp_path / NOTE).write_text(json.dumps({"plan_sha256": "p", "uploads": {"zero/y.pt": "64:id"}}))
    done = run_here(capsys, "gc", f"file://{tmp_path}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "an upload of zero/y.pt" in done.stdout
    assert "1 objects (5 bytes)" in done.stderr
    assert "zero/y.pt" in (tmp_path / NOTE).read_text()
    assert run_here(capsys, "gc", f"file://{tmp_path}").returncode == 0
    assert "zero/y.pt" not in (tmp_path / NOTE).read_text()
    assert (tmp_path / "zero" / "x.pt").read_bytes() == b"12345"
    assert "nothing to remove" in run_here(capsys, "gc", f"file://{tmp_path}").stdout


class CutReplacement(MemoryStore):
    """The first node lists the object just before the second removes it, whose upload is then cut short."""

    def __init__(self, key: str, first_lists: Callable[[], object]) -> None:
        super().__init__()
        self.key, self.first_lists = key, first_lists
        self.is_removed = self.is_cut = False

    def delete(self, key: str) -> None:
        if key == self.key and not self.is_removed:
            self.is_removed = True
            self.first_lists()
        super().delete(key)

    def upload(self, key: str, *arguments: Any, **more: Any) -> int:
        if key == self.key and not self.is_cut:
            self.is_cut = True
            raise RemoteUnreachable("no answer")
        return super().upload(key, *arguments, **more)


def test_what_a_cut_replacement_removed_is_not_committed_as_another_node_listed_it(tmp_path: Path) -> None:
    """History 413074: its next attempt left the replica to the first node, took its lease away, and made a
    COMMIT that lists an object which is not there (P3)."""
    nodes = {name: Node(tmp_path / name, name) for name in ("n0", "n1")}
    for rank, node in enumerate(nodes.values()):
        node.write(
            {MODEL: archive(node.name.encode() * 999), OPTIM.format(d=rank): archive(b"%d" % rank * 9)}
        )

    def attempt(name: str, generation: int = 1) -> UploadResult:
        node = nodes[name]
        order = node.order(node.sealed(), generation=generation)
        is_replica = name == "n1"
        rows = tuple(
            f.model_copy(update={"tensor_fingerprint": "same", "is_replica": is_replica})
            if f.path == MODEL
            else f
            for f in order.files
        )
        order = order.model_copy(update={"files": rows, "steps_in": is_replica})
        return upload_form(node.attached(store), order, node.control())

    key = f"{nodes['n0'].tag}/{MODEL}"
    store = CutReplacement(key, lambda: attempt("n0"))
    store.objects[key] = archive(b"n0" * 999)  # its answer was lost, so that no manifest lists it yet
    with pytest.raises(RemoteUnreachable):
        attempt("n1")
    again = attempt("n1")
    assert (again.outcome, again.reason) == (
        "conflict",
        f"{key} is not what n0 listed: an attempt of this node replaced it and was cut short",
    )
    assert attempt("n0").outcome == "waiting", "the lease stays: nobody commits this generation"
    assert not [one for one in store.objects if "/commits/" in one]
    assert attempt("n1", 2).outcome == "waiting"
    assert attempt("n0", 2).outcome == "committed"
    assert_true(store)
