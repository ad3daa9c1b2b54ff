"""Shipping one save to a real directory: what lands there, what is skipped, what is refused (P2, P3, P4)."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.base import files
from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import Commit, NodeManifest, manifest_key, parse, sha256_of, to_bytes
from ckptd.core.model.save import SealedFile
from ckptd.errors import (
    DamagedError,
    DocumentDamaged,
    RefusedError,
    RemoteError,
    RemoteNotOurs,
    SourceChanged,
    VerifyError,
)
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.messages import UploadedObject
from ckptd.storage.remote.observe import live_commits, manifests_of, read_remote
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.directory import DirectoryStore
from tests.stores.memory import MemoryStore
from tests.stores.scene import JOB_ID, MODEL, OPTIM, Node, archive
from tests.support import observing as observe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.stores.base import ObjectInfo


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path / "save")
    node.write_all()
    return node


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    (tmp_path / "nas").mkdir()
    return tmp_path / "nas"


@pytest.fixture
def ground(node: Node, nas: Path) -> AttachedRemote:
    return node.attached(DirectoryStore(str(nas), owner="id-n0", window_bytes=1 << 20))


def test_a_save_lands_as_the_trainer_wrote_it_and_is_committed(
    node: Node, nas: Path, ground: AttachedRemote
) -> None:
    (node.save_dir / "tokenizer.json").write_bytes(b"{}")
    result = node.upload(ground, node.order(node.sealed(), extras=("tokenizer.json",)))
    assert result.outcome == "committed"
    for path in (node.save_dir / node.tag).iterdir():
        copy = nas / node.tag / path.name
        assert copy.read_bytes() == path.read_bytes()
        assert copy.stat().st_mode == path.stat().st_mode
    assert (nas / node.tag / "_extra" / "tokenizer.json").read_bytes() == b"{}"
    assert (nas / "latest").read_bytes() == node.tag.encode()
    data = (nas / "_ckptd/commits/global_step5~g1~zero.json").read_bytes()
    commit = parse(Commit, data, "")
    assert (commit.files, commit.step, commit.folder) == (5, 5, node.tag)
    (manifest,) = manifests_of(ground.store, commit)
    for file in manifest.files:
        content = (nas / file.key).read_bytes()
        assert (file.bytes, file.checksums.crc64nvme) == (len(content), to_hex(crc64(content)))
        assert file.proof == "read-back"
    assert result.commit is not None
    assert result.commit.sha256 == sha256_of(data)


class ReadBackLate(MemoryStore):
    """Reads the first object back only when the second is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.is_second_sent = threading.Event()

    def upload(self, key: str, *arguments: Any, **more: Any) -> int:
        self.order.append(key)
        if len(self.order) == 2:
            self.is_second_sent.set()
        return super().upload(key, *arguments, **more)

    def verify(self, key: str, *arguments: Any, **more: Any) -> str:
        if key == self.order[0]:
            assert self.is_second_sent.wait(200), "the next one waits for this one to be read back"
        return super().verify(key, *arguments, **more)


def test_one_is_read_back_while_the_next_is_sent(node: Node) -> None:
    """By the order of events: who reads back before it sends on would wait for itself."""
    store = ReadBackLate()
    assert node.upload(node.attached(store), node.order(node.sealed())).outcome == "committed"
    assert store.is_second_sent.is_set()


class GivesBackAnother(MemoryStore):
    """Says that it created a COMMIT, and holds what somebody else wrote a moment later."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        is_commit = key.startswith("_ckptd/commits/")
        return super().put_if_absent(key, data.replace(b'"n0"', b'"n9"') if is_commit else data)


def test_a_commit_that_is_not_given_back_as_created_is_none(node: Node) -> None:
    """P3: nobody rests on it, so nothing local goes for it."""
    store = GivesBackAnother()
    with pytest.raises(RemoteError, match="does not give back _ckptd/commits/") as caught:
        node.upload(node.attached(store), node.order(node.sealed()))
    assert "ckptd check" in caught.value.hint


class TakesLateRequests(MemoryStore):
    """Right after our manifest comes one of this node's dead daemon, of objects that ours have replaced."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        made = super().put_if_absent(key, data)
        if key.startswith("_ckptd/nodes/"):
            manifest = parse(NodeManifest, data, key)
            files = tuple(file.model_copy(update={"fingerprint": "f" * 64}) for file in manifest.files)
            late = manifest.model_copy(update={"revision": manifest.revision + 5, "files": files})
            told = to_bytes(late)
            super().put_if_absent(manifest_key(late, sha256_of(told)), told)
        return made


class NoCommit(MemoryStore):
    """The connection breaks whenever a COMMIT is to be made."""

    is_broken = True

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.is_broken and "/commits/" in key:
            msg = "the network went"
            raise RemoteError(msg)
        return super().put_if_absent(key, data)


def test_a_side_file_that_changed_between_manifest_and_commit_is_not_called_committed(node: Node) -> None:
    """The COMMIT lists the earlier one, which is never replaced: what lies here now is in none, and stays."""
    node.write({"trainer_notes.json": b"one", "same.json": b"same"})
    store = NoCommit()
    ground = node.attached(store)
    with pytest.raises(RemoteError):
        node.upload(ground, node.order(node.sealed()))
    store.is_broken = False
    node.write({"trainer_notes.json": b"two, longer"})
    result = node.upload(ground, node.order(node.sealed(save_seq=1)))
    assert (result.outcome, result.unlisted) == ("committed", ("trainer_notes.json",))


def test_a_node_whose_side_file_is_not_the_one_that_is_listed_says_so(tmp_path: Path, nas: Path) -> None:
    """Each has its own under one name; the first that came is in the COMMIT."""
    results = []
    for rank, name in enumerate(("n0", "n1")):
        one = Node(tmp_path / name, name=name)
        one.write({OPTIM.format(d=rank): archive(b"%d" % rank * 500), MODEL: archive(b"m" * 500)})
        one.write({"note.txt": f"of {name}".encode(), "same.txt": b"of both"})
        store = DirectoryStore(str(nas), owner=f"id-{name}", window_bytes=1 << 20)
        results.append(one.upload(one.attached(store), one.order(one.sealed())))
    assert [result.outcome for result in results] == ["waiting", "committed"]
    assert results[1].unlisted == ("note.txt",)


def test_a_manifest_of_a_dead_daemon_that_comes_late_is_not_committed(node: Node) -> None:
    """P4: it has the higher revision, and what it lists lies there no more."""
    store = TakesLateRequests()
    outcome = node.upload(node.attached(store), node.order(node.sealed()))
    assert outcome.outcome == "conflict", outcome
    assert "came between" in (outcome.reason or "")
    assert not live_commits(read_remote(store))


def test_shipping_again_sends_nothing(node: Node, ground: AttachedRemote) -> None:
    order = node.order(node.sealed())
    first = node.upload(ground, order)
    again = node.upload(ground, order)
    assert (again.outcome, again.bytes_sent) == ("committed", 0)
    assert again.manifest_sha256 == first.manifest_sha256


def test_what_lies_there_already_is_compared_not_sent(node: Node, nas: Path, ground: AttachedRemote) -> None:
    order = node.order(node.sealed())
    (nas / node.tag).mkdir()
    for name in (MODEL, OPTIM.format(d=0)):
        (nas / node.tag / name).write_bytes((node.save_dir / node.tag / name).read_bytes())
    torn = (node.save_dir / node.tag / OPTIM.format(d=1)).read_bytes()
    (nas / node.tag / OPTIM.format(d=1)).write_bytes(bytes([torn[0] ^ 1]) + torn[1:])
    result = node.upload(ground, order)
    assert result.outcome == "committed"
    assert (nas / node.tag / OPTIM.format(d=1)).read_bytes() == torn
    side = len(b"print()")
    assert result.bytes_sent == len(torn) + side


def test_records_of_an_earlier_attempt_are_used_while_the_object_is_there(
    node: Node, nas: Path, ground: AttachedRemote
) -> None:
    order = node.order(node.sealed())
    node.upload(ground, order)
    uploaded = node.uploaded()
    (nas / "_ckptd/commits/global_step5~g1~zero.json").unlink()
    (nas / node.tag / MODEL).unlink()
    result = node.upload(ground, order.model_copy(update={"uploaded": uploaded}))
    assert result.outcome == "committed"
    assert result.bytes_sent == (node.save_dir / node.tag / MODEL).stat().st_size


def test_a_file_written_since_it_was_sealed_stops_everything(
    node: Node, nas: Path, ground: AttachedRemote
) -> None:
    save = node.sealed()
    node.rewrite(OPTIM.format(d=1), archive(b"other"))
    with pytest.raises(SourceChanged, match="written since"):
        node.upload(ground, node.order(save))
    assert not list((nas / "_ckptd").glob("commits/*"))
    assert not list((nas / "_ckptd").glob("nodes/*/*"))


def test_a_file_written_while_the_last_one_is_sent_stops_the_commit(
    node: Node, nas: Path, ground: AttachedRemote
) -> None:
    order = node.order(node.sealed())
    node.write({MODEL: archive(b"again" * 2000)})
    first = order.files[0].path
    with pytest.raises(SourceChanged):
        node.upload(ground, order)

    node.write_all()
    shutil.rmtree(nas / node.tag, ignore_errors=True)
    order, control = node.order(node.sealed()), node.control()
    done: list[str] = []

    def on_done(event: UploadedObject) -> None:
        done.append(event.key)
        if len(done) == len(order.files):
            node.rewrite(first, archive(b"later"))

    with pytest.raises(SourceChanged, match=first):
        upload_form(ground, order, replace(control, on_done=on_done))
    assert not list((nas / "_ckptd").glob("nodes/*/*"))


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_bit_that_flipped_since_the_save_is_found_and_nothing_of_the_file_is_uploaded(
    node: Node, nas: Path, ground: AttachedRemote, at: float
) -> None:
    name = OPTIM.format(d=0)
    node.write({name: archive(os.urandom(300_000), records=8)})
    path = node.save_dir / node.tag / name
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 16
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=rf"{name}: record data/\d has CRC"):
        node.upload(ground, node.order(node.sealed()))
    assert not (nas / node.tag / name).exists()
    assert not list((nas / node.tag).glob(".ckptd-part-*")) if (nas / node.tag).exists() else True


def test_a_copy_that_differs_is_removed_and_not_committed(
    node: Node, nas: Path, ground: AttachedRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptd.storage.stores.directory import publish

    def rotten(folder: int, partial: str, name: str, key: str) -> None:
        publish(folder, partial, name, key)
        path = nas / key
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr("ckptd.storage.stores.directory.publish", rotten)
    with pytest.raises(VerifyError):
        node.upload(ground, node.order(node.sealed()))
    assert not list((nas / "_ckptd").glob("commits/*"))


def test_a_remote_that_lost_its_identity_gets_nothing(node: Node, nas: Path, ground: AttachedRemote) -> None:
    (nas / "_ckptd/remote.json").unlink()
    with pytest.raises(RemoteNotOurs, match=r"remote\.json"):
        node.upload(ground, node.order(node.sealed()))
    assert not (nas / node.tag).exists()


@pytest.mark.parametrize("cut", [b"", b'{"format":"1.0"'])
def test_a_commit_that_cannot_be_read_stays_as_it_is(
    node: Node, nas: Path, ground: AttachedRemote, cut: bytes
) -> None:
    """That says nothing of the save that is sent, and its generation is nobody's any more."""
    order = node.order(node.sealed())
    assert node.upload(ground, order).outcome == "committed"
    commit = nas / "_ckptd/commits/global_step5~g1~zero.json"
    commit.write_bytes(cut)
    with pytest.raises(DocumentDamaged, match=commit.name):
        node.upload(ground, order)
    assert commit.read_bytes() == cut
    where = (node.tag, 1, "zero")
    view = observe.describe(ground.store, node.tag, node="n0")
    assert (view.unreadable, view.commits) == ((where,), ())
    assert observe.observe(ground.store).unreadable == (where,)
    assert node.upload(ground, node.order(node.sealed(), generation=2)).outcome == "committed"


def test_a_tombstone_that_cannot_be_read_keeps_its_generation(
    node: Node, nas: Path, ground: AttachedRemote
) -> None:
    stone = nas / "_ckptd/retired/global_step5~g3~zero.json"
    stone.parent.mkdir(parents=True, exist_ok=True)
    stone.write_bytes(b"{")
    view = observe.describe(ground.store, node.tag)
    assert (view.unreadable, view.retired) == (((node.tag, 3, "zero"),), ())


def test_an_identity_that_cannot_be_read_says_nothing_of_the_save(
    node: Node, nas: Path, ground: AttachedRemote
) -> None:
    (nas / "_ckptd/remote.json").write_bytes(b"")
    with pytest.raises(DocumentDamaged, match=r"remote\.json"):
        node.upload(ground, node.order(node.sealed()))
    assert not (nas / node.tag).exists()


def test_a_remote_that_changed_hands_while_files_were_sent_gets_no_manifest(
    node: Node, nas: Path, ground: AttachedRemote
) -> None:
    """Hours go by between the first look and the manifest: another share may be mounted there then (P2)."""
    identity, other = nas / "_ckptd/remote.json", nas / "other"
    other.write_bytes(identity.read_bytes().replace(JOB_ID.encode(), b"k" * 32))
    order, control = node.order(node.sealed()), node.control()

    def on_done(event: UploadedObject) -> None:
        if event.key.endswith(MODEL) and other.exists():
            os.replace(other, identity)

    with pytest.raises(RemoteNotOurs, match="was made again"):
        upload_form(ground, order, replace(control, on_done=on_done))
    assert not list((nas / "_ckptd").glob("nodes/*/*"))


def test_two_nodes_cover_the_grid_and_the_second_commits(tmp_path: Path, nas: Path) -> None:
    nodes = [Node(tmp_path / name, name) for name in ("a", "b")]
    nodes[0].write({MODEL: archive(b"m" * 999), OPTIM.format(d=0): archive(b"0" * 999)})
    nodes[1].write({MODEL: archive(b"m" * 999), OPTIM.format(d=1): archive(b"1" * 999)})
    grounds = [n.attached(DirectoryStore(str(nas), owner=n.name)) for n in nodes]
    first = nodes[0].upload(grounds[0], nodes[0].order(nodes[0].sealed()))
    assert first.outcome == "waiting"
    assert "rank 1" in (first.reason or "")
    assert "so far only a uploaded its part" in (first.reason or "")
    assert observe.observe(grounds[0].store).uncommitted == (("global_step5", 1, "zero"),)
    assert not (nas / "latest").exists(), "it names only what is committed (P6)"
    second = nodes[1].upload(grounds[1], nodes[1].order(nodes[1].sealed()))
    assert second.outcome == "committed"
    assert second.commit is not None
    assert len(second.commit.commit.manifests) == 2
    assert second.commit.commit.files == 3
    again = nodes[0].upload(grounds[0], nodes[0].order(nodes[0].sealed()))
    assert (again.outcome, again.commit) == ("committed", second.commit)


SWAPPED = "offloaded_tensors/rank00/0_28.tensor.swp"


@pytest.mark.parametrize("second_swaps", [True, False])
def test_swapped_tensors_of_two_nodes_under_one_name_are_not_one_save(
    tmp_path: Path, nas: Path, second_swaps: bool
) -> None:
    """With node-local storage DeepSpeed names them by local rank: one's would be taken for the other's."""
    results = []
    for rank, name in enumerate(("a", "b")):
        one = Node(tmp_path / name, name)
        one.write({MODEL: archive(b"m" * 999), OPTIM.format(d=rank): archive(b"%d" % rank * 999)})
        save = one.sealed()
        folder = one.save_dir / one.tag / SWAPPED
        folder.parent.mkdir(parents=True)
        if rank == 0 or second_swaps:
            folder.write_bytes(b"%d" % rank * 400)
            identity = files.identity_of(folder.stat())
            row = SealedFile(path=SWAPPED, identity=identity, fingerprint=f"f{rank}", role=Role.SIDE)
            save = save.model_copy(update={"files": (*save.files, row)})
        order = one.order(save)
        if rank == 1 and not second_swaps:
            empty = order.manifest.model_copy(update={"empty_folders": ("offloaded_tensors/rank00",)})
            order = order.model_copy(update={"manifest": empty})
        ground = one.attached(DirectoryStore(str(nas), owner=name))
        results.append(one.upload(ground, order))
    assert [result.outcome for result in results] == ["waiting", "conflict"]
    assert "local rank" in (results[1].reason or "")
    assert not list((nas / "_ckptd").glob("commits/*"))


class ListsLate(MemoryStore):
    """A listing does not show node manifests yet; each is there by its key."""

    is_late = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        hidden = "_ckptd/nodes/" if self.is_late else "/"
        return (info for info in super().list(prefix) if not info.key.startswith(hidden))


@pytest.mark.parametrize("nodes", [2, 12])
def test_a_commit_names_its_manifests_where_a_listing_does_not_yet(tmp_path: Path, nodes: int) -> None:
    """Else the node believes that its part is not in it, and sends it again as another generation."""
    store = ListsLate()
    names = [f"n{d}" for d in range(nodes)]
    grounds, orders, results = [], [], []
    for d, name in enumerate(names):
        node = Node(tmp_path / name, name, dp=nodes)
        model = {MODEL: archive(b"m" * 999)} if d == 0 else {}
        node.write(model | {OPTIM.format(d=d): archive(str(d).encode() * 999)})
        grounds.append(node.attached(store))
        orders.append(node.order(node.sealed()))
        results.append(node.upload(grounds[-1], orders[-1]))
    assert results[-1].outcome == "committed"
    store.is_late = True
    for name, ground, order in zip(names, grounds, orders, strict=True):
        again = Node(tmp_path / name, name).upload(ground, order)
        assert (again.outcome, again.commit) == ("committed", results[-1].commit), again.reason
        view = observe.describe(store, "global_step5", node=name)
        listed = [seen.manifest.node for seen in view.manifests if seen.committed]
        assert name in listed
        assert len(listed) == (nodes if nodes == 2 else 1), "of many it reads its own"


def test_a_replica_is_sent_by_whoever_has_it(tmp_path: Path, nas: Path) -> None:
    """The holder of rank 0 is lost with its node before it sent anything; its shard is elsewhere (H29)."""
    b, c = (Node(tmp_path / name, name) for name in ("b", "c"))
    b.write({MODEL: archive(b"m" * 999), OPTIM.format(d=1): archive(b"1" * 999)})
    c.write({OPTIM.format(d=0): archive(b"0" * 999)})
    first = b.upload(b.attached(DirectoryStore(str(nas), owner="b")), b.order(b.sealed()))
    assert first.outcome == "waiting"
    assert (nas / b.tag / MODEL).read_bytes() == archive(b"m" * 999)
    second = c.upload(c.attached(DirectoryStore(str(nas), owner="c")), c.order(c.sealed()))
    assert second.outcome == "committed", second.reason
    assert second.commit is not None
    assert second.commit.commit.files == 3


def test_another_save_in_the_generation_is_a_conflict(tmp_path: Path, nas: Path) -> None:
    a, b = Node(tmp_path / "a", "a"), Node(tmp_path / "b", "b")
    a.write({MODEL: archive(b"m" * 999), OPTIM.format(d=0): archive(b"0" * 999)})
    b.write({OPTIM.format(d=1): archive(b"1" * 999)})
    ground = a.attached(DirectoryStore(str(nas)))
    a.upload(ground, a.order(a.sealed(seconds=0)))
    late = b.upload(ground, b.order(b.sealed(seconds=1000)))
    assert late.outcome == "conflict"
    assert "1000 s apart" in (late.reason or "")
    other_step = b.upload(ground, b.order(b.sealed(step=6)))
    assert other_step.outcome == "conflict"
    assert not (nas / "_ckptd/commits").exists() or not list((nas / "_ckptd/commits").iterdir())
    assert not (nas / a.tag / OPTIM.format(d=1)).exists()


def test_a_node_whose_files_changed_before_the_others_joined_disputes(tmp_path: Path, nas: Path) -> None:
    a, b = Node(tmp_path / "a", "a"), Node(tmp_path / "b", "b")
    a.write({MODEL: archive(b"m" * 999), OPTIM.format(d=0): archive(b"0" * 999)})
    b.write({OPTIM.format(d=1): archive(b"1" * 999)})
    ground = a.attached(DirectoryStore(str(nas)))
    order = a.order(a.sealed())
    a.upload(ground, order)
    a.rewrite(OPTIM.format(d=0), archive(b"second save"))
    committed = b.upload(ground, b.order(b.sealed()))
    assert committed.outcome == "committed"
    result = a.upload(ground, order)
    assert result.outcome == "conflict"
    seen = read_remote(ground.store)
    assert [view.disputed for view in seen.commits] == [True]
    assert live_commits(seen) == ()
    assert seen.latest is None
    assert committed.commit is not None
    answer = observe.confirm(ground.store, ((committed.commit.key, committed.commit.sha256),))
    assert not answer.ok
    assert "disputed" in (answer.reason or "")


def test_a_second_node_commits_nothing_on_a_store_without_create_only(tmp_path: Path) -> None:
    store = MemoryStore(create_only=False)
    a, b = Node(tmp_path / "a", "a"), Node(tmp_path / "b", "b")
    a.write_all()
    b.write_all()
    assert a.upload(a.attached(store), a.order(a.sealed())).outcome == "committed"
    order = b.order(b.sealed(), generation=2)
    with pytest.raises(RefusedError, match="node a writes there too") as caught:
        b.upload(b.attached(store), order)
    # what a requeue under another host name needs, and nobody else should do
    assert 'node_name = "a"' in caught.value.hint
    as_told = order.manifest.model_copy(update={"node": "a"})
    assert b.upload(b.attached(store), order.model_copy(update={"manifest": as_told})).outcome == "committed"


def test_extras_that_are_too_large_are_refused(node: Node, ground: AttachedRemote) -> None:
    (node.save_dir / "big").write_bytes(b"x" * ((16 << 20) + 1))
    with pytest.raises(RefusedError):
        node.upload(ground, node.order(node.sealed(), extras=("big",)))


def test_an_extra_that_changed_between_attempts_is_sent_anew(
    node: Node, nas: Path, ground: AttachedRemote
) -> None:
    (node.save_dir / "t.json").write_bytes(b"one")
    save = node.sealed()
    order = node.order(save, extras=("t.json",))
    node.upload(ground, order)
    for path in (nas / "_ckptd").rglob("global_step5~g1~zero*/*.json"):
        path.unlink()
    (nas / "_ckptd/commits/global_step5~g1~zero.json").unlink()
    (node.save_dir / "t.json").write_bytes(b"two!")
    order = node.order(save, extras=("t.json",), uploaded=node.uploaded())
    result = node.upload(ground, order)
    assert result.outcome == "committed"
    assert (nas / node.tag / "_extra/t.json").read_bytes() == b"two!"
    assert result.manifest_key is not None
    manifest = parse(NodeManifest, (nas / result.manifest_key).read_bytes(), "")
    extra = next(f for f in manifest.files if f.path == "t.json")
    assert extra.fingerprint == sha256_of(b"two!")
