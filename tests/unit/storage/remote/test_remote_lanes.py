"""Small files beside each other: as many as the store likes, one fate, no question that a listing answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from ckptd.core.model.manifest import NodeManifest, parse
from ckptd.errors import RemoteNotOurs, SourceChanged, StorageError, VerifyError
from ckptd.storage.remote.attach import take_over
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.observe import live_commits, manifests_of
from ckptd.storage.remote.transfer import SMALL_BYTES
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.parallel import FailFastPool, OrderedTurns
from ckptd.storage.stores.rate_limit import Cancelled
from tests.stores.conformance import source_of
from tests.stores.memory import MemoryStore
from tests.stores.scene import OPTIM, Node, archive
from tests.support.observing import observe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckptd.storage.remote.messages import UploadedObject, UploadResult
    from ckptd.storage.stores.base import HeldRange, ObjectInfo, Progress, ResumePoint, Source

LANES = 6
COUNT = 60


@dataclass
class Watched(MemoryStore):
    """Counts what is asked and how much happens at once; `before(key)` runs as an upload begins."""

    lane_count: int = LANES
    before: Callable[[str], None] = lambda key: None
    begun: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    verifying: int = 0
    running: int = 0
    most: int = 0

    def stat(self, key: str) -> ObjectInfo | None:
        self.asked.append(key)
        return super().stat(key)

    def upload(
        self,
        key: str,
        source: Source,
        *,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> int:
        with self.lock:
            self.begun.append(key)
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            self.before(key)
            time.sleep(0.002)
            return super().upload(key, source, resume=resume, on_progress=on_progress, held=held)
        finally:
            with self.lock:
                self.running -= 1


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path / "save")
    node.write_all()
    node.write({f"side{n:02}.json": f"{n}".encode() * 40 for n in range(COUNT)})
    return node


def uploaded_by(node: Node, store: MemoryStore, **more: object) -> UploadResult:
    ground = node.attached(store)
    return upload_form(ground, node.order(node.sealed()), replace(node.control(), **more))  # type: ignore[arg-type]


def test_many_at_once_each_once_and_listed_in_order(node: Node) -> None:
    store = Watched()
    assert uploaded_by(node, store).outcome == "committed"
    names = [path.name for path in sorted((node.save_dir / node.tag).iterdir())]
    assert sorted(store.begun) == [f"{node.tag}/{name}" for name in names]
    assert LANES // 2 <= store.most <= LANES
    assert store.asked == []
    assert {event.key for event in node.uploaded()} == set(store.begun)
    (key,) = [key for key in store.objects if "/nodes/" in key and node.tag in key]
    manifest = parse(NodeManifest, store.objects[key], "")
    assert [file.path for file in manifest.files] == names
    assert not store.partial


def test_large_files_keep_their_order_beside(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.storage.remote.transfer.SMALL_BYTES", 1000)
    store = Watched()
    assert uploaded_by(node, store).outcome == "committed"
    large = [key for key in store.begun if key.endswith(".pt")]
    assert large == sorted(large)
    assert len(large) == 3
    assert store.most > 2


@dataclass
class Overlapping(Watched):
    """A store that has two large objects under way; who reads of the first waits until the second began."""

    lane_count: int = 1
    overlap: int = 2
    second: threading.Event = field(default_factory=threading.Event)


def test_the_next_large_file_begins_before_the_one_before_it_ends(node: Node) -> None:
    def begins(key: str) -> None:
        if len(store.begun) > 1:
            store.second.set()
        assert store.second.wait(200), f"nothing began beside {key}"

    store = Overlapping(before=begins)
    assert uploaded_by(node, store).outcome == "committed"
    assert store.most == 2
    assert len(store.begun) == len(set(store.begun)) > COUNT


def test_the_error_of_one_large_file_ends_the_other(node: Node) -> None:
    def broken(key: str) -> None:
        if len(store.begun) > 1:
            store.second.set()
        store.second.wait(200)
        if key == store.begun[0]:
            msg = "the disk over there fails"
            raise StorageError(msg)

    store = Overlapping(before=broken)
    with pytest.raises(StorageError, match="over there fails"):
        uploaded_by(node, store)
    assert store.running == 0
    assert len(store.begun) < COUNT
    assert not [key for key in store.objects if "/commits/" in key]


def test_who_has_the_least_number_comes_first() -> None:
    turns, came = OrderedTurns(1), []

    def wait(number: int) -> None:
        with turns.place(number):
            came.append(number)

    with ThreadPoolExecutor(5) as pool:
        with turns.place(9):
            waiting = [pool.submit(wait, number) for number in (4, 2, 7, 2, 0)]
            end = time.monotonic() + 200
            while turns.waiting < len(waiting) and time.monotonic() < end:
                time.sleep(0.001)
        for one in waiting:
            one.result(200)
    assert came == [0, 2, 2, 4, 7]


@pytest.mark.parametrize("at", [0, 7, COUNT - 1])
def test_the_error_of_one_lane_ends_all_and_is_the_one_that_is_raised(
    node: Node, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    bad, made = f"side{at:02}.json", list[FailFastPool]()

    class Kept(FailFastPool):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    def broken(key: str) -> None:
        """Who begins after the one that fails goes on only once its failure is known."""
        if key.endswith(bad):
            msg = "the disk over there fails"
            raise StorageError(msg)
        if any(begun.endswith(bad) for begun in list(store.begun)):
            end = time.monotonic() + 200
            while not any(lanes._failure for lanes in made) and time.monotonic() < end:
                time.sleep(0.001)

    monkeypatch.setattr("ckptd.storage.remote.transfer.FailFastPool", Kept)
    store = Watched(before=broken)
    before = set(threading.enumerate())
    with pytest.raises(StorageError, match="over there fails"):
        uploaded_by(node, store)
    assert store.running == 0
    assert set(threading.enumerate()) <= before
    index = next(n for n, key in enumerate(store.begun) if key.endswith(bad))
    assert len(store.begun) - index <= LANES + 1
    assert not store.partial
    assert not [key for key in store.objects if "/commits/" in key]
    store.before = lambda key: None
    again = upload_form(
        node.attached(store),
        node.order(node.sealed(), uploaded=node.uploaded()),
        node.control(),
    )
    assert again.outcome == "committed"
    assert len(set(store.begun)) == COUNT + 4


def test_cancelling_is_heard_by_every_lane(node: Node) -> None:
    store = Watched(window_bytes=64)
    done: list[object] = []

    def check() -> None:
        if len(done) >= 9:
            msg = "enough"
            raise Cancelled(msg)

    with pytest.raises(Cancelled, match="enough"):
        uploaded_by(node, store, check=check, on_done=done.append)
    assert len(done) <= 9 + LANES
    assert not store.partial


def test_a_copy_that_differs_in_one_lane_ends_the_attempt(node: Node) -> None:
    store = Watched()

    def rot(key: str) -> None:
        if key.endswith("side30.json"):
            store.verify = rotten  # type: ignore[method-assign]

    def rotten(key: str, size_bytes: int, crc64: int, on_progress: Callable[[int], None]) -> str:
        msg = f"{key} differs"
        raise VerifyError(msg)

    store.before = rot
    with pytest.raises(VerifyError, match="differs"):
        uploaded_by(node, store)
    assert not [key for key in store.objects if "/commits/" in key]


def test_a_file_that_changes_while_lanes_run_stops_everything(node: Node) -> None:
    name = "side40.json"

    def rewrite(key: str) -> None:
        if key.endswith(name):
            node.rewrite(name, b"41" * 40)

    store = Watched(before=rewrite)
    with pytest.raises(SourceChanged, match=name):
        uploaded_by(node, store)
    assert not [key for key in store.objects if "/nodes/" in key and node.tag in key]
    assert not store.partial


def test_what_came_after_the_listing_is_compared_not_replaced(node: Node) -> None:
    """Another node puts its replica there while this one is about to send."""
    same, other = "side20.json", "side21.json"

    def meanwhile(key: str) -> None:
        for name in (same, other):
            if key.endswith(name) and key not in store.objects:
                data = (node.save_dir / node.tag / name).read_bytes()
                store.objects[key] = data if name == same else b"?" + data[1:]

    store = Watched(before=meanwhile)
    # the first attempt finds bytes that no manifest lists and that are not the file's; the next replaces them
    with pytest.raises(Exception, match="appeared"):
        uploaded_by(node, store)
    assert store.objects[f"{node.tag}/{same}"] == (node.save_dir / node.tag / same).read_bytes()
    store.before = lambda key: None
    assert uploaded_by(node, store).outcome == "committed"
    for name in (same, other):
        assert store.objects[f"{node.tag}/{name}"] == (node.save_dir / node.tag / name).read_bytes()


def test_a_folder_is_not_removed_as_empty_under_another_lane(tmp_path: Path) -> None:
    """One lane gives its partial file up, and prunes, while others make the same folder and begin in it."""
    store = DirectoryStore(str(tmp_path))
    end = time.monotonic() + 1

    def work(number: int) -> None:
        key = f"a/b/{number}"
        while time.monotonic() < end:
            store.upload(key, source_of(b"x" * 10), resume=None, on_progress=lambda _: None)
            store.discard(f"a/b/other{number}")
            store.delete(key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert list(tmp_path.iterdir()) == []


def test_small_is_what_a_restart_may_send_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file leaves no half row in the journal, a large one does."""
    monkeypatch.setattr("ckptd.storage.remote.transfer.SMALL_BYTES", 3000)
    assert SMALL_BYTES <= 16 << 20
    node.write({OPTIM.format(d=0): archive(b"x" * 9000), OPTIM.format(d=1): archive(b"y" * 100)})
    flushed: dict[str, int] = {}

    def moving(key: str, _total: int, progress: Progress) -> None:
        flushed[key] = max(flushed.get(key, 0), progress.flushed_bytes)

    assert uploaded_by(node, Watched(), on_moving=moving).outcome == "committed"
    assert flushed[f"{node.tag}/{OPTIM.format(d=0)}"] > 9000
    assert flushed[f"{node.tag}/{OPTIM.format(d=1)}"] == 0


def test_what_another_node_committed_meanwhile_is_not_taken_for_nobodys(tmp_path: Path) -> None:
    """P3: a file of the same name and size that differs; its owner lists it while our order is under way."""
    first, second = Node(tmp_path / "a"), Node(tmp_path / "b", name="n1")
    for node, mark in ((first, b"1"), (second, b"2")):
        node.write_all()
        node.write({"notes.json": mark * 40})
    store = Watched()
    key = f"{first.tag}/notes.json"
    ground = second.attached(store)
    order = second.order(second.sealed())
    keys = {file.key for file in order.files}

    def overtaken(begun: str) -> None:
        if begun == key and key not in store.objects:
            # for what our other lanes still send the owner would rightly wait
            end = time.monotonic() + 200
            while not (keys <= set(store.begun) and store.running == 1) and time.monotonic() < end:
                time.sleep(0.001)
            store.before = lambda _: None
            assert uploaded_by(first, store).outcome == "committed"

    store.before = overtaken
    again = upload_form(ground, order, second.control())
    assert again.outcome == "committed"
    assert store.objects[key] == b"1" * 40


def test_nothing_is_committed_over_what_another_node_is_replacing(tmp_path: Path) -> None:
    """P2: both have a file of one name that differs; the second replaces the first's before that is listed,
    and dies."""
    first, second = Node(tmp_path / "a"), Node(tmp_path / "b", name="n1")
    for node, mark in ((first, b"1"), (second, b"2")):
        node.write_all()
        node.write({"notes.json": mark * 40})
    store = MemoryStore()
    ground = second.attached(store)
    key = f"{first.tag}/notes.json"
    done: list[str] = []

    def dies(event: UploadedObject) -> None:
        if event.key == key:
            msg = "enough"
            raise Cancelled(msg)

    def replaced(event: UploadedObject) -> None:
        done.append(event.key)
        if event.key == key and done.count(key) == 1:
            with pytest.raises(Cancelled):
                upload_form(ground, second.order(second.sealed()), replace(second.control(), on_done=dies))
            assert store.objects[key] == b"2" * 40

    outcome = upload_form(ground, first.order(first.sealed()), replace(first.control(), on_done=replaced))
    assert_true(store)
    assert outcome.outcome == "waiting"
    assert "n1" in (outcome.reason or "")
    for node in (second, first):
        outcome = upload_form(ground, node.order(node.sealed()), node.control())
        assert_true(store)
    assert outcome.outcome == "committed"
    assert not [name for name in store.objects if "/leases/" in name]


def assert_true(store: MemoryStore) -> None:
    """Every COMMIT's objects are those that its manifests list."""
    for view in live_commits(observe(store)):
        for manifest in manifests_of(store, view.commit):
            for file in manifest.files:
                assert to_hex(crc64(store.objects[file.key])) == file.checksums.crc64nvme, file.key


def test_a_remote_that_is_taken_over_while_files_are_sent_gets_no_commit(node: Node) -> None:
    """P2: the job that a remote belonged to when the order began may not commit hours later."""
    store = Watched()
    ground = node.attached(store)

    def taken(_: str) -> None:
        store.before = lambda _: None
        take_over(store, ground.identity, "another")

    store.before = taken
    with pytest.raises(RemoteNotOurs):
        upload_form(ground, node.order(node.sealed()), node.control())
    assert not [key for key in store.objects if key.startswith(("_ckptd/commits/", "_ckptd/nodes/"))]


@pytest.mark.parametrize("during", [1, 2, 3, 8])
def test_no_lane_runs_any_more_when_ctrl_c_is_told(during: int) -> None:
    """Whoever called closes descriptors then, and another file may get their numbers. Ctrl-C comes while the
    first or the second thread is started, too.
    """
    begun: list[int] = []
    ended: list[int] = []

    def do(number: int) -> None:
        begun.append(number)
        if number == during:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        FailFastPool().run(2, range(1, 101), do, name="lane")
    assert sorted(ended) == sorted(begun)
    assert len(begun) < during + 10
