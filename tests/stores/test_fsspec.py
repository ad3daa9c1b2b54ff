"""SFTP on a real sshd and a driver of fsspec on a real S3 server pass the suite that every store passes.

And what only a server can do: die, hang, forget its sessions, show another host key, refuse ours.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.config import schemes
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.remote import derive
from ckptd.core.model.manifest import folder_name
from ckptd.core.model.records import UNIVERSAL
from ckptd.errors import (
    ConfigError,
    NoSpaceError,
    NotPermitted,
    RefusedError,
    RemoteNotOurs,
    RemoteUnreachable,
    VerifyError,
)
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.stores import sftp_session
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.base import HeldRange, Progress, ResumePoint
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.fsspec_protocol import open_files
from ckptd.storage.stores.fsspec_store import FilesStore
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.sources import MemorySource
from tests.stores import servers
from tests.stores.conformance import DATA, WINDOW_BYTES, Meter, StoreConformance, send
from tests.stores.sshd import Sshd, make_key, needs_sshd, sshd
from tests.stores.test_held_ranges import put, whole, write_large
from tests.unit.storage.remote.test_making import Scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.stores.base import Store

pytestmark = pytest.mark.stores


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="module")
def lesser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    denied = "hardlink,posix-rename,fsync,statvfs,copy-data"
    with sshd(tmp_path_factory.mktemp("lesser"), denied=denied) as server:
        yield server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Sshd]:
    """A server of this test alone, that it may kill."""
    with sshd(tmp_path / "sshd") as server:
        yield server


def store_at(
    server: Sshd, monkeypatch: pytest.MonkeyPatch, *, name: str = "", credentials: str = "env"
) -> FilesStore:
    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    url = server.url(name or secrets.token_hex(4))
    store = open_store(url, access=Access(credentials=credentials), owner="n0", window_bytes=WINDOW_BYTES)
    assert isinstance(store, FilesStore)
    return store


def a_form_is_made_while_it_is_sent(store: Store, tmp_path: Path) -> None:
    """No kind of remote needs it to lie here first (adr/0093)."""
    scene = Scene(tmp_path)
    convert(scene.shards, tmp_path / "made", ConvertOptions())
    ground = scene.node.attached(store)
    assert (
        upload_form(ground, scene.order(UNIVERSAL), scene.node.control(), derive.opened).outcome
        == "committed"
    )
    head = folder_name(scene.node.tag, 1, UNIVERSAL)
    for path in (p for p in (tmp_path / "made").rglob("*") if p.is_file()):
        data = path.read_bytes()
        assert store.read_at(f"{head}/{path.relative_to(tmp_path / 'made')}", 0, len(data) + 1) == data


@needs_sshd
class TestSftp(StoreConformance):
    @pytest.fixture
    def store(self, running: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[FilesStore]:
        opened = store_at(running, monkeypatch)
        yield opened
        opened.close()

    def test_a_form_is_made_while_it_is_sent(self, store: FilesStore, tmp_path: Path) -> None:
        a_form_is_made_while_it_is_sent(store, tmp_path)


@needs_sshd
class TestSftpWithoutExtensions(StoreConformance):
    """A server that knows no hard links, no replacing rename, no fsync, no statvfs."""

    @pytest.fixture
    def store(self, lesser: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[FilesStore]:
        opened = store_at(lesser, monkeypatch)
        yield opened
        opened.close()


MIB = 1 << 20
OLD = secrets.token_bytes(20 * MIB + 77)
"""More than the server is asked to copy at a time."""
NEW = OLD[: 4 * MIB] + secrets.token_bytes(3 * MIB) + OLD[7 * MIB :]
HELD = (
    HeldRange(offset=0, length=4 * MIB, key="a/old", key_offset=0),
    HeldRange(offset=7 * MIB, length=len(OLD) - 7 * MIB, key="a/old", key_offset=7 * MIB),
)


@needs_sshd
def test_what_the_server_holds_is_copied_there(running: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(running, monkeypatch)
    assert store.probe().copies
    assert store.copies
    put(store, "a/old", OLD)
    sent_bytes, proof = put(store, "b/new", NEW, *HELD)
    assert (sent_bytes, proof) == (3 * MIB, "read-back")
    assert whole(store, "b/new", len(NEW)) == NEW
    assert whole(store, "a/old", len(OLD)) == OLD


@needs_sshd
@pytest.mark.parametrize("is_gone", [False, True])
def test_what_the_server_does_not_copy_is_sent(
    running: Sshd, lesser: Sshd, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """It knows no such request, or the file that it was to copy from is gone."""
    store = store_at(running if is_gone else lesser, monkeypatch)
    store.probe()
    assert store.copies == is_gone
    if not is_gone:
        put(store, "a/old", OLD)
    sent_bytes, _ = put(store, "b/new", NEW, *HELD)
    assert sent_bytes == len(NEW)
    assert whole(store, "b/new", len(NEW)) == NEW


@needs_sshd
def test_an_upload_that_was_cut_while_the_server_copied_goes_on(
    running: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(running, monkeypatch)
    put(store, "a/old", OLD)
    told: list[Progress] = []

    def stop(progress: Progress) -> None:
        told.append(progress)
        if progress.flushed_bytes >= 10 * MIB:
            raise InterruptedError

    source = MemorySource(NEW, mode=0o644, folder_mode=0o755, gid=None)
    with pytest.raises(InterruptedError):
        store.upload("b/new", source, resume=None, on_progress=stop, held=HELD)
    resume = ResumePoint(flushed_bytes=told[-1].flushed_bytes, crc64=told[-1].crc64)
    sent_bytes, _ = put(store, "b/new", NEW, *HELD, resume=resume)
    assert sent_bytes == 0
    assert whole(store, "b/new", len(NEW)) == NEW


@needs_sshd
def test_a_copy_of_other_bytes_is_seen(running: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(running, monkeypatch)
    put(store, "a/old", OLD[:-1] + bytes([OLD[-1] ^ 1]))
    with pytest.raises(VerifyError):
        put(store, "b/new", NEW, *HELD)


@needs_sshd
@pytest.mark.parametrize("are_here", [True, False])
def test_a_form_is_made_of_shards_that_the_server_holds(
    running: Sshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, are_here: bool
) -> None:
    scene = Scene(tmp_path / "scene", write_large(tmp_path / "shards"))
    scene.ground = scene.node.attached(store_at(running, monkeypatch))
    scene.ground.store.probe()
    assert scene.node.upload(scene.ground, scene.node.order(scene.node.sealed())).outcome == "committed"
    result = scene.upload(scene.order(UNIVERSAL) if are_here else scene.order_from_remote(UNIVERSAL))
    assert result.outcome == "committed"
    assert (result.bytes_sent < MIB, result.bytes_copied) == (True, 48 * MIB)
    convert(tmp_path / "shards", tmp_path / "made", ConvertOptions())
    head = folder_name(scene.node.tag, 1, UNIVERSAL)
    for path in (p for p in (tmp_path / "made").rglob("*") if p.is_file()):
        data = path.read_bytes()
        key = f"{head}/{path.relative_to(tmp_path / 'made')}"
        assert whole(scene.ground.store, key, len(data)) == data


@needs_sshd
def test_abilities_say_what_the_server_lacks(
    running: Sshd, lesser: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = store_at(running, monkeypatch)
    assert full.probe().notes == ()
    less = store_at(lesser, monkeypatch)
    assert [note.split(":")[0] for note in less.probe().notes] == [
        "the server makes no hard links",
        "the server does not flush on request",
    ]
    assert (full.free_bytes() or 0) > 0
    assert less.free_bytes() is None


# --- the server goes away ----------------------------------------------------------------------------------


class _Killing(Meter):
    """Does something to the server in the middle of a file."""

    def __init__(self, data: bytes, at: int, act: object) -> None:
        super().__init__(data)
        self._at, self._act = at, act

    def read_into(self, offset: int, buffer: memoryview) -> int:
        if self.asked >= self._at and callable(self._act):
            self._act()
            self._act = None
        return super().read_into(offset, buffer)


@needs_sshd
def test_a_server_killed_in_the_middle_is_gone_on_with(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(own, monkeypatch, name="remote")
    seen: list[Progress] = []
    with pytest.raises(RemoteUnreachable):
        store.upload("t/x", _Killing(DATA, 3 << 20, own.kill), resume=None, on_progress=seen.append)
    with pytest.raises(RemoteUnreachable, match="Connection refused"):
        store.stat("t/x")
    own.start()
    assert store.stat("t/x") is None
    assert list(store.list("")) == []
    last = seen[-1]
    assert last.flushed_bytes >= 2 * WINDOW_BYTES
    meter = Meter(DATA)
    resume = ResumePoint(flushed_bytes=last.flushed_bytes, crc64=last.crc64)
    crc = store.upload("t/x", meter, resume=resume, on_progress=seen.append)
    assert meter.asked == len(DATA) - last.flushed_bytes
    assert store.verify("t/x", len(DATA), crc, lambda done: None) == "read-back"
    assert [p.name for p in (own.files / "remote" / "t").iterdir()] == ["x"]


@needs_sshd
def test_sessions_that_were_dropped_are_opened_again(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(own, monkeypatch)
    store.put("a", b"1")
    for verb in (
        lambda: store.get("a"),
        lambda: store.put("a", b"1"),
        lambda: store.put_if_absent("b", b"1"),
        lambda: [info.key for info in store.list("")],
        lambda: store.delete("b"),
    ):
        own.drop_sessions()
        verb()
    assert [info.key for info in store.list("")] == ["a"]


@needs_sshd
@pytest.mark.parametrize("is_connected", [True, False])
def test_a_server_that_hangs_is_an_error_in_time(
    own: Sshd, monkeypatch: pytest.MonkeyPatch, *, is_connected: bool
) -> None:
    # connecting, exchanging keys, logging in, opening a channel: each has its limit
    assert 4 * sftp_session.CONNECT_SECONDS < 60
    assert sftp_session.ANSWER_SECONDS < 60
    monkeypatch.setattr(sftp_session, "ANSWER_SECONDS", 5)
    monkeypatch.setattr(sftp_session, "CONNECT_SECONDS", 5)
    store = store_at(own, monkeypatch)
    if is_connected:
        store.put("a", b"1")
    own.stop_answering(is_stopped=True)
    with pytest.raises(RemoteUnreachable, match=r"no answer|does not answer|banner"):
        store.get("a")
    own.stop_answering(is_stopped=False)
    store.put("a", b"2")
    assert store.get("a") == b"2"


@needs_sshd
def test_a_server_that_hangs_in_the_middle_is_an_error_in_time(
    own: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sftp_session, "ANSWER_SECONDS", 10)
    store = store_at(own, monkeypatch)
    crc = send(store, "t/y", DATA)
    seen: list[Progress] = []
    hang = _Killing(DATA, 2 << 20, lambda: own.stop_answering(is_stopped=True))
    with pytest.raises(RemoteUnreachable, match="no answer"):
        store.upload("t/x", hang, resume=None, on_progress=seen.append)
    own.stop_answering(is_stopped=False)
    stopped: list[int] = []

    def stop(done: int) -> None:
        if not stopped:
            own.stop_answering(is_stopped=True)
        stopped.append(done)

    with pytest.raises(RemoteUnreachable, match="no answer"):
        store.verify("t/y", len(DATA), crc, stop)
    own.stop_answering(is_stopped=False)
    assert store.verify("t/y", len(DATA), crc, lambda done: None) == "read-back"


@needs_sshd
def test_nothing_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Sshd(root=tmp_path, port=servers.free_port())
    with pytest.raises(RemoteUnreachable, match=f"127.0.0.1:{nobody.port}"):
        store_at(nobody, monkeypatch).get("a")
    far = open_store("sftp://u@no-such-host.invalid/srv/x")
    with pytest.raises(RemoteUnreachable, match="no such host"):
        far.get("a")


# --- who is there ------------------------------------------------------------------------------------------


@needs_sshd
def test_an_unknown_host_is_refused(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    own.know("")
    with pytest.raises(RemoteNotOurs, match=rf"known_hosts does not name .*{own.port}.* run `ssh -p"):
        store_at(own, monkeypatch).get("a")
    assert (own.key.parent / "known_hosts").read_text() == ""
    assert list(own.files.iterdir()) == []


@needs_sshd
def test_another_host_key_is_refused(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    own.know(make_key(own.root / "other").with_suffix(".pub").read_text())
    with pytest.raises(RemoteNotOurs, match="another host key"):
        store_at(own, monkeypatch).put("a", b"1")
    assert list(own.files.iterdir()) == []


@needs_sshd
def test_keys_that_do_not_let_in(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = make_key(own.root / "wrong")
    with pytest.raises(NotPermitted, match="accepts no key of ours"):
        store_at(own, monkeypatch, credentials=f"file:{wrong}").get("a")
    with pytest.raises(NotPermitted, match="not there"):
        store_at(own, monkeypatch, credentials="file:/nowhere").get("a")
    locked = own.root / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True)
    with pytest.raises(NotPermitted, match="passphrase"):
        store_at(own, monkeypatch, credentials=f"file:{locked}").get("a")
    own.key.unlink()
    with pytest.raises(NotPermitted, match="accepts no key of ours"):
        store_at(own, monkeypatch).get("a")


@needs_sshd
def test_a_key_by_its_path(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = own.key.rename(own.root / "key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(own.root))
    store = store_at(own, monkeypatch, credentials="file:$CREDENTIALS_DIRECTORY/key")
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert moved.exists()


# --- what lies there ---------------------------------------------------------------------------------------


@needs_sshd
def test_many_writers_create_one_key_and_one_wins(running: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [store_at(running, monkeypatch, name="many") for _ in range(8)]
    won: list[int] = []
    gate = threading.Barrier(8)

    def create(number: int) -> None:
        stores[number].get("warm")
        gate.wait()
        if stores[number].put_if_absent("_ckptd/commits/x.json", f"{number}".encode() * 50_000):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert len(won) == 1
    folder = running.files / "many" / "_ckptd" / "commits"
    assert [p.name for p in folder.iterdir()] == ["x.json"]
    assert (folder / "x.json").read_bytes() == f"{won[0]}".encode() * 50_000


@needs_sshd
def test_rights_are_never_wider(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(own, monkeypatch, name="remote")
    send(store, "t/a", b"1")
    foreign = MemorySource(b"1", mode=0o664, folder_mode=0o750, gid=54321)
    store.upload("t/b", foreign, resume=None, on_progress=lambda progress: None)
    folder = own.files / "remote" / "t"
    modes = {p.name: p.stat().st_mode & 0o777 for p in (folder, *folder.iterdir())}
    assert modes == {"t": 0o750, "a": 0o640, "b": 0o604}


@needs_sshd
def test_symlinks_are_not_followed(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(own, monkeypatch, name="remote")
    store.put("a", b"1")
    outside = own.root / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"x")
    (own.files / "remote" / "t").symlink_to(outside)
    (own.files / "remote" / "f").symlink_to(outside / "x")
    assert [info.key for info in store.list("")] == ["a"]
    assert store.stat("f") is None
    with pytest.raises(RefusedError, match="symlink"):
        send(store, "t/sub/y", b"1")


@needs_sshd
def test_a_root_that_is_not_mounted_is_not_made(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteNotOurs, match="is its disk mounted"):
        store_at(own, monkeypatch, name="disk/remote").put_if_absent("a", b"1")
    store = store_at(own, monkeypatch, name="remote")
    store.put("a", b"1")
    shutil.rmtree(own.files / "remote")
    assert store.get("a") is None
    with pytest.raises(RemoteUnreachable, match="not there any more"):
        store.put("a", b"1")
    assert list(own.files.iterdir()) == []


@needs_sshd
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_named_and_gone_on_with(own: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(own.files)]
    subprocess.run(mount, check=True)
    try:
        store = store_at(own, monkeypatch, name="remote")
        seen: list[Progress] = []
        with pytest.raises(NoSpaceError):
            store.upload("t/x", Meter(DATA), resume=None, on_progress=seen.append)
        assert store.stat("t/x") is None
        subprocess.run(["mount", "-o", "remount,size=16m", str(own.files)], check=True)
        resume = ResumePoint(flushed_bytes=seen[-1].flushed_bytes, crc64=seen[-1].crc64)
        meter = Meter(DATA)
        store.upload("t/x", meter, resume=resume, on_progress=seen.append)
        assert 0 < meter.asked < len(DATA)
        assert store.get("t/x") == DATA
        store.close()
    finally:
        own.kill()
        subprocess.run(["umount", str(own.files)], check=True)


# --- drivers of fsspec -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    pytest.importorskip("s3fs", reason="s3fs stands for the drivers of fsspec: pip install s3fs")
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


class TestDriver(StoreConformance):
    """s3fs stands for every driver: what ckptd asks of them, on a real server."""

    is_create_only = False
    is_resumable = False
    creates_only = False

    @pytest.fixture
    def store(self, moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> FilesStore:
        for name, value in servers.environment(moto).items():
            monkeypatch.setenv(name, value)
        scheme = schemes.Scheme(package="s3fs", creates_only=self.creates_only)
        monkeypatch.setitem(schemes.SCHEMES, "s3", scheme)
        return open_files(
            f"s3://{servers.BUCKET}/{secrets.token_hex(4)}", Access(), window_bytes=WINDOW_BYTES
        )

    def test_a_form_is_made_while_it_is_sent(self, store: FilesStore, tmp_path: Path) -> None:
        a_form_is_made_while_it_is_sent(store, tmp_path)

    def test_discarded_partials_are_not_continued(self, store: Store) -> None:
        store.discard("t/x")
        resume = ResumePoint(flushed_bytes=WINDOW_BYTES, crc64=crc64(self.data[:WINDOW_BYTES]))
        meter = Meter(self.data)
        store.upload("t/x", meter, resume=resume, on_progress=lambda progress: None)
        assert meter.asked == len(self.data)


class TestDriverWithConditions(TestDriver):
    """A driver that sends a condition with a create, on a service that heeds it."""

    is_create_only = True
    creates_only = True


def test_a_driver_s_words(moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment(moto).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{servers.free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = open_files(f"s3://{servers.BUCKET}/x", Access())
    with pytest.raises(RemoteUnreachable, match="reading a"):
        store.get("a")


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [
        ("sftp://h/a/b", "paramiko", "ckptd[sftp]"),
        ("gs://bucket/run", "gcsfs", "gcsfs"),
        ("abfs://container@account.dfs.core.windows.net/run", "adlfs", "adlfs"),
        ("hf://datasets/me/run", "huggingface_hub", "huggingface_hub"),
    ],
)
def test_a_missing_package_is_named(
    url: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith(("ckptd.storage.stores.sftp", module))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_store(url)
    assert package in caught.value.hint


def test_urls_that_are_no_remotes() -> None:
    for url in ("sftp://u:secret@h/a", "memory://h/a", "http://h/a", "gs://b", "gs://b/x?sig=secret"):
        with pytest.raises(ConfigError) as caught:
            open_store(url)
        assert "secret@" not in str(caught.value)
        assert "=secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="means nothing to s3"):
        open_files("s3://bucket/x", Access(credentials="profile:x"))
