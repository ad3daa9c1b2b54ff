"""A shard that was uploaded before its save was whole saves time, and decides nothing (P3, P4)."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.base import extents, files
from ckptd.core.model.heartbeat import Heartbeat
from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import Commit, parse
from ckptd.errors import CkptdError, RefusedError, SourceChanged
from ckptd.storage.remote.early import delete_early, upload_early
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.messages import DeleteEarly, EarlyRequest, UploadFile
from ckptd.storage.remote.observe import manifests_of
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.rate_limit import Cancelled
from tests.stores import servers
from tests.stores.memory import MemoryStore
from tests.stores.proxy import proxy
from tests.stores.scene import JOB_ID, OPTIM, Node, archive
from tests.stores.sshd import needs_sshd, sshd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.remote.messages import UploadResult
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.stores.base import Store
    from tests.stores.sshd import Sshd

SHARD = OPTIM.format(d=0)
KEY = f"global_step5/{SHARD}"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path / "save")
    node.write_all()
    return node


def _store(kind: str, folder: Path, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Store:
    if kind == "memory":
        return MemoryStore()
    if kind == "directory":
        folder.mkdir()
        return DirectoryStore(str(folder), owner="id-n0", window_bytes=1 << 20)
    if kind == "sftp":
        server: Sshd = request.getfixturevalue("running")
        patch.setenv("HOME", str(server.home))
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        return open_store(server.url(secrets.token_hex(4)), access=Access(credentials="env"), owner="id-n0")
    return _bucket(request.getfixturevalue("moto").endpoint, patch)


def _bucket(endpoint: str, patch: pytest.MonkeyPatch) -> Store:
    for name, value in servers.environment().items():
        patch.setenv(name, value)
    access = servers.access(endpoint, part_size_bytes=5 << 20)
    return open_store(f"s3://{servers.BUCKET}/{secrets.token_hex(4)}", access=access)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


ON_SERVERS = (
    pytest.param("s3", marks=pytest.mark.stores),
    pytest.param("sftp", marks=[pytest.mark.stores, needs_sshd]),
)


@pytest.fixture(params=["memory", "directory", *ON_SERVERS])
def there(
    request: pytest.FixtureRequest, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AttachedRemote:
    return node.attached(_store(request.param, tmp_path / "nas", request, monkeypatch))


def early(node: Node, name: str = SHARD) -> EarlyRequest:
    """What the daemon asks for, of the file as it is now."""
    identity = files.identity_of((node.save_dir / node.tag / name).stat())
    file = UploadFile(
        path=name,
        key=f"{node.tag}/{name}",
        source=f"{node.tag}/{name}",
        identity=identity,
        bytes=identity.size_bytes,
        role=Role.OPTIM,
        fingerprint="",
    )
    return EarlyRequest(root=str(node.save_dir), file=file, node_id=f"id-{node.name}")


def held(there: AttachedRemote, key: str = KEY) -> bytes | None:
    info = there.store.stat(key)
    return None if info is None else b"".join(there.store.stream(key, 0, info.bytes))


def is_committed_as_written(node: Node, there: AttachedRemote, result: UploadResult) -> bool:
    """Every object is the file, and proved to be."""
    assert result.commit is not None
    (manifest,) = manifests_of(
        there.store, parse(Commit, result.commit.commit.model_dump_json().encode(), "")
    )
    for file in manifest.files:
        data = (node.save_dir / node.tag / file.path).read_bytes()
        assert held(there, file.key) == data, file.key
        assert (file.checksums.crc64nvme, file.proof) == (to_hex(crc64(data)), file.proof)
        assert file.proof != "none"
    return result.outcome == "committed"


def test_what_came_early_is_not_sent_again_and_is_proved_all_the_same(
    node: Node, there: AttachedRemote
) -> None:
    upload_early(there, early(node), node.control())
    assert held(there) == (node.save_dir / KEY).read_bytes()
    assert [event.proof for event in node.uploaded()] == ["none"]
    result = node.upload(there, node.order(node.sealed()))
    assert result.bytes_skipped == (node.save_dir / KEY).stat().st_size
    assert is_committed_as_written(node, there, result)


@pytest.mark.stores
@pytest.mark.parametrize("size", [2000, 120_000])
def test_of_s3_what_came_early_is_proved_by_its_etag_and_not_read(
    node: Node, moto: servers.Server, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """In one part and in two: sent once, and looked at when the save is whole; the first answer is old."""
    node.rewrite(SHARD, archive(SHARD.encode() * size))
    with proxy(moto.port) as between:
        there = node.attached(_bucket(between.endpoint, monkeypatch))
        upload_early(there, early(node), node.control())
        sent, between.requests = between.requests, []
        result = node.upload(there, node.order(node.sealed()))
        asked = [line for line in between.requests if KEY in line]
        assert is_committed_as_written(node, there, result)
    assert sum(line.startswith("PUT") for line in sent if KEY in line) == 1 + (size > 2000)
    assert {line.partition(" ")[0] for line in asked} == {"HEAD"}


@pytest.mark.stores
def test_of_s3_an_answer_is_no_proof_of_what_lies_there_later(
    node: Node, moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = node.attached(_bucket(moto.endpoint, monkeypatch))
    upload_early(there, early(node), node.control())
    there.store.put(KEY, bytes((node.save_dir / KEY).stat().st_size))
    assert is_committed_as_written(node, there, node.upload(there, node.order(node.sealed())))


@pytest.mark.parametrize("size", [2000, 1999])
def test_a_shard_that_was_written_again_is_sent_again(node: Node, there: AttachedRemote, size: int) -> None:
    """Of the same size, so that its bytes alone tell, and of another."""
    upload_early(there, early(node), node.control())
    node.rewrite(SHARD, archive((SHARD.encode() + b"2") * size))
    result = node.upload(there, node.order(node.sealed()))
    assert result.bytes_skipped == 0
    assert is_committed_as_written(node, there, result)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_remote_without_proofs_takes_no_object_of_a_save_before(
    node: Node, tmp_path: Path, is_early: bool
) -> None:
    """`verify = "none"`: an object of the same size, early or of an upload that was cut, may be another's."""
    (tmp_path / "nas").mkdir()
    there = node.attached(DirectoryStore(str(tmp_path / "nas"), owner="id-n0", read_back=False))
    if is_early:
        upload_early(there, early(node), node.control())
    else:
        there.store.put(KEY, (node.save_dir / KEY).read_bytes())
    node.rewrite(SHARD, archive((SHARD.encode() + b"2") * 2000))
    assert (node.save_dir / KEY).stat().st_size == len(held(there) or b"")
    assert node.upload(there, node.order(node.sealed())).outcome == "committed"
    assert held(there) == (node.save_dir / KEY).read_bytes()


def test_nothing_that_has_the_key_is_replaced_early(node: Node, there: AttachedRemote) -> None:
    before = (node.save_dir / KEY).read_bytes()
    upload_early(there, early(node), node.control())
    node.rewrite(SHARD, archive((SHARD.encode() + b"2") * 2000))
    upload_early(there, early(node), node.control())
    assert held(there) == before
    assert len(node.uploaded()) == 1


def test_a_shard_without_its_end_is_not_sent(node: Node, there: AttachedRemote) -> None:
    whole = (node.save_dir / KEY).read_bytes()
    for data in (whole[:-10], b"", b"no archive" * 1000):
        node.rewrite(SHARD, data)
        try:
            upload_early(there, early(node), node.control())
        except CkptdError as error:
            assert SHARD in str(error)
        assert held(there) is None


def test_one_that_is_written_again_while_it_is_sent_leaves_nothing_half_done(
    node: Node, there: AttachedRemote
) -> None:
    """What a later upload could go on with would be of two writes."""
    order = early(node)
    node.rewrite(SHARD, archive((SHARD.encode() + b"2") * 2000))
    with pytest.raises(SourceChanged):
        upload_early(there, order, node.control())
    assert held(there) is None


def test_a_cancelled_one_is_given_up(node: Node, tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    there = node.attached(DirectoryStore(str(tmp_path / "nas"), owner="id-n0", window_bytes=4096))
    moved: list[object] = []

    def check() -> None:
        if moved:
            raise Cancelled("now")

    control = replace(node.control(), check=check, on_moving=lambda *what: moved.append(what))
    with pytest.raises(SourceChanged):
        upload_early(there, early(node), control)
    assert moved
    assert held(there) is None
    assert there.store.partial_bytes(KEY) == 0


def test_the_disk_is_not_read_for_it(node: Node, tmp_path: Path) -> None:
    """P11: a shard that left the page cache is left to the upload of its save."""
    path = node.save_dir / KEY
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        extents.drop_pages(stream.fileno())
        if extents.cached_runs(stream.fileno(), path.stat().st_size):
            pytest.fail(f"{tmp_path} lies on a file system that keeps what it is told to drop")
    there = node.attached(MemoryStore())
    upload_early(there, early(node), node.control())
    assert held(there) is None


def back(node: Node) -> DeleteEarly:
    return DeleteEarly(uploads=((KEY, ""),), objects=(KEY,), node_id=f"id-{node.name}")


def test_what_no_save_came_of_is_removed_and_what_is_listed_stays(node: Node, there: AttachedRemote) -> None:
    upload_early(there, early(node), node.control())
    delete_early(there, back(node), lambda: None)
    assert held(there) is None
    delete_early(there, back(node), lambda: None)
    result = node.upload(there, node.order(node.sealed()))
    delete_early(there, back(node), lambda: None)
    assert is_committed_as_written(node, there, result)


def test_what_is_committed_stays_though_a_listing_is_of_before_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Life 10003095: another run committed under the key of an early upload that was cut."""
    there = node.attached(MemoryStore())
    result = node.upload(there, node.order(node.sealed()))
    with monkeypatch.context() as patch:
        patch.setattr(there.store, "list", lambda _prefix: iter(()))
        delete_early(there, back(node), lambda: None)
    assert is_committed_as_written(node, there, result)
    extra = f"{node.tag}/{OPTIM.format(d=7)}"
    there.store.put(extra, b"of a save with more ranks")
    delete_early(there, back(node).model_copy(update={"objects": (extra,)}), lambda: None)
    assert held(there, extra) is None


def test_where_another_node_writes_nothing_is_sent_early_nor_removed(
    node: Node, there: AttachedRemote
) -> None:
    """It may take what nobody lists for its own, and list it a moment later."""
    upload_early(there, early(node), node.control())
    said = Heartbeat(
        job_id=JOB_ID,
        job="job",
        node="n1",
        node_id="id-n1",
        config_digest="",
        ckptd_version="0",
        as_of="2026-01-01T00:00:00Z",
        state="ok",
    )
    Heartbeats(there.store).put(said)
    with pytest.raises(RefusedError, match="n1"):
        delete_early(there, back(node), lambda: None)
    assert held(there) is not None
    other = OPTIM.format(d=1)
    upload_early(there, early(node, other), node.control())
    assert held(there, f"{node.tag}/{other}") is None


def test_nothing_is_sent_early_into_a_generation_that_somebody_lists(
    node: Node, there: AttachedRemote
) -> None:
    (node.save_dir / KEY).rename(node.save_dir / "aside")
    node.upload(there, node.order(node.sealed()))
    (node.save_dir / "aside").rename(node.save_dir / KEY)
    upload_early(there, early(node), node.control())
    assert held(there) is None
