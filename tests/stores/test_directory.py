"""A directory passes the conformance suite on a real disk, and on shares that fill, vanish or refuse."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from ckptd.base import extents, files
from ckptd.errors import (
    NoSpaceError,
    NotPermitted,
    RefusedError,
    RemoteUnreachable,
    StorageError,
    VerifyError,
)
from ckptd.storage.stores.base import PARTIAL_PREFIX, Progress, ResumePoint
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.sources import MemorySource
from tests.stores.conformance import DATA, WINDOW_BYTES, Meter, Stopped, StoreConformance, send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root (mounts)")


def mounted(point: Path, *arguments: str) -> Iterator[Path]:
    point.mkdir()
    subprocess.run(["mount", *arguments, str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False)


def loop(folder: Path, kind: str, size: str = "400M") -> Iterator[Path]:
    make = shutil.which(f"mkfs.{kind}")
    if make is None:
        pytest.skip(f"needs mkfs.{kind} (apt install xfsprogs e2fsprogs)")
    image = folder / f"{kind}.img"
    subprocess.run(["truncate", "-s", size, str(image)], check=True)
    subprocess.run([make, "-q", str(image)], check=True)
    yield from mounted(folder / f"{kind}-mount", "-o", "loop", str(image))


class TestDirectory(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> DirectoryStore:
        (tmp_path / "nas").mkdir()
        return DirectoryStore(str(tmp_path / "nas"), owner="n0", window_bytes=WINDOW_BYTES)


@needs_root
@pytest.mark.root
class TestTmpfs(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[DirectoryStore]:
        for point in mounted(tmp_path / "nas", "-t", "tmpfs", "-o", "size=64m", "none"):
            yield DirectoryStore(str(point), owner="n0", window_bytes=WINDOW_BYTES)


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
class TestLoop:
    def test_upload_verify_list_delete(self, tmp_path: Path, kind: str) -> None:
        for point in loop(tmp_path, kind):
            root = point / "remote"
            root.mkdir()
            store = DirectoryStore(str(root), owner="n0", window_bytes=WINDOW_BYTES)
            assert store.probe().create_only
            crc = send(store, "t/x", DATA)
            assert store.verify("t/x", len(DATA), crc, lambda done: None) == "read-back"
            store.delete("t/x")
            assert list(root.iterdir()) == [root / "_ckptd"]


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    (tmp_path / "nas").mkdir()
    return tmp_path / "nas"


def test_two_owners_do_not_share_a_partial(nas: Path) -> None:
    for owner in ("a", "b"):
        store = DirectoryStore(str(nas), owner=owner, window_bytes=WINDOW_BYTES)
        with pytest.raises(Stopped):
            store.upload("t/x", Meter(DATA, 1 << 20), resume=None, on_progress=lambda progress: None)
    partials = [p.name for p in (nas / "t").iterdir()]
    assert len(partials) == 2
    assert all(name.startswith(PARTIAL_PREFIX) for name in partials)


def test_rights_are_the_source_s_never_wider(nas: Path) -> None:
    store = DirectoryStore(str(nas))
    for mode, folder_mode in ((0o600, 0o700), (0o644, 0o755), (0o660, 0o770)):
        source = MemorySource(b"x", mode=mode, folder_mode=folder_mode, gid=os.getgid())
        store.upload(f"t{mode:o}/x", source, resume=None, on_progress=lambda progress: None)
        assert stat.S_IMODE((nas / f"t{mode:o}" / "x").stat().st_mode) == mode
        assert stat.S_IMODE((nas / f"t{mode:o}").stat().st_mode) == folder_mode


def test_without_the_group_its_rights_are_dropped(nas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "fchown", refuse)
    source = MemorySource(b"x", mode=0o640, folder_mode=0o750, gid=os.getgid() + 4711)
    DirectoryStore(str(nas)).upload("t/x", source, resume=None, on_progress=lambda progress: None)
    assert stat.S_IMODE((nas / "t" / "x").stat().st_mode) == 0o600
    assert stat.S_IMODE((nas / "t").stat().st_mode) == 0o700


def test_symlinks_below_the_root_are_not_followed(nas: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (nas / "t").symlink_to(tmp_path / "elsewhere")
    store = DirectoryStore(str(nas))
    with pytest.raises(RefusedError):
        send(store, "t/x", b"1")
    with pytest.raises(RefusedError):
        store.put("t/y", b"1")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (nas / "u").mkdir()
    (nas / "u" / "x").symlink_to(tmp_path / "secret")
    assert store.stat("u/x") is None
    assert list(store.list("u/")) == []


def test_a_root_that_is_gone_or_another_one(nas: Path) -> None:
    store = DirectoryStore(str(nas))
    store.put("a", b"1")
    nas.rename(nas.with_name("away"))
    with pytest.raises(RemoteUnreachable, match="is not there"):
        store.get("a")
    nas.mkdir()
    with pytest.raises(RemoteUnreachable, match="another directory"):
        store.put("a", b"1")
    assert list(nas.iterdir()) == []


def test_a_bit_that_flips_on_the_share_is_found(nas: Path) -> None:
    store = DirectoryStore(str(nas), window_bytes=WINDOW_BYTES)
    crc = send(store, "t/x", DATA)
    with (nas / "t" / "x").open("r+b") as stream:
        stream.seek(12345)
        byte = stream.read(1)[0]
        stream.seek(12345)
        stream.write(bytes([byte ^ 4]))
    with pytest.raises(VerifyError, match="CRC64"):
        store.verify("t/x", len(DATA), crc, lambda done: None)
    assert (nas / "t" / "x").exists(), "it may be another node's"


def test_reading_back_leaves_nothing_in_the_page_cache(nas: Path) -> None:
    """Large pages (ext4: up to 2 MiB) go too, which a step of the reading covers in part alone."""
    store = DirectoryStore(str(nas), owner="a")
    data = os.urandom(96 << 20)
    crc = send(store, "big", data)
    assert store.verify("big", len(data), crc, lambda _: None) == "read-back"
    fd = os.open(nas / "big", os.O_RDONLY)
    try:
        assert extents.cached_runs(fd, len(data)) == ()
    finally:
        os.close(fd)


def test_verify_none_says_so(nas: Path) -> None:
    store = DirectoryStore(str(nas), read_back=False)
    crc = send(store, "t/x", DATA)
    assert store.verify("t/x", len(DATA), crc, lambda done: None) == "none"
    assert "not read back" in store.probe().notes[0]


def test_a_partial_that_a_hung_transfer_holds_is_not_touched(nas: Path) -> None:
    store = DirectoryStore(str(nas), owner="n0", window_bytes=WINDOW_BYTES)
    with pytest.raises(Stopped):
        store.upload("t/x", Meter(DATA, 2 << 20), resume=None, on_progress=lambda progress: None)
    partial = next((nas / "t").iterdir())
    with partial.open("r+b") as hung:
        fcntl.flock(hung, fcntl.LOCK_EX)
        inode = os.fstat(hung.fileno()).st_ino
        resume = ResumePoint(flushed_bytes=1 << 20, crc64=crc64(DATA[: 1 << 20]))
        store.upload("t/x", Meter(DATA), resume=resume, on_progress=lambda progress: None)
        hung.write(b"late bytes of the hung one")
    assert (nas / "t" / "x").stat().st_ino != inode
    assert (nas / "t" / "x").read_bytes() == DATA


def test_directories_that_cannot_be_synced_are_tolerated(nas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "cannot")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = DirectoryStore(str(nas))
    send(store, "t/x", b"1")
    assert store.put_if_absent("u/y", b"1")
    assert store.get("t/x") == b"1"


def test_a_file_that_cannot_be_synced_is_not_tolerated(nas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a folder may lack, a file may not; and EIO of a folder is no lack."""
    real = os.fsync
    fails: Callable[[int], bool]
    for number, (code, fails) in enumerate(((errno.EINVAL, stat.S_ISREG), (errno.EIO, stat.S_ISDIR))):

        def fsync(fd: int, code: int = code, fails: Callable[[int], bool] = fails) -> None:
            if fails(os.fstat(fd).st_mode):
                raise OSError(code, os.strerror(code))
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError, match="writing t"):
            send(DirectoryStore(str(nas)), f"t{number}/x", b"1")


class Dropping(Meter):
    """Notes what may leave the page cache of the source."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.dropped: list[tuple[int, int]] = []

    def drop(self, offset: int, length: int) -> None:
        self.dropped.append((offset, length))


def test_each_flushed_window_leaves_both_page_caches(nas: Path) -> None:
    """While the upload is under way: a shard of 100 GB must not push out what the trainer reads (P12)."""
    store = DirectoryStore(str(nas), owner="n0", window_bytes=WINDOW_BYTES)
    source, seen = Dropping(DATA), []

    def progress(done: Progress) -> None:
        (partial,) = (nas / "t").glob(f"{PARTIAL_PREFIX}*")
        with partial.open("rb") as stream:
            runs = extents.cached_runs(stream.fileno(), partial.stat().st_size)
        seen.append((done.flushed_bytes, min((begin for begin, _ in runs), default=done.done_bytes)))

    store.upload("t/x", source, resume=None, on_progress=progress)
    steps = range(0, len(DATA), WINDOW_BYTES)
    assert source.dropped == [(at, min(WINDOW_BYTES, len(DATA) - at)) for at in steps]
    assert len({flushed for flushed, _ in seen}) > len(steps)
    assert all(cached >= flushed for flushed, cached in seen), seen


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EIO, StorageError),
        (errno.ESTALE, StorageError),
        (errno.EDQUOT, NoSpaceError),
        (errno.ENOSPC, NoSpaceError),
        (errno.EROFS, NotPermitted),
        (errno.EACCES, NotPermitted),
        (errno.ETIMEDOUT, RemoteUnreachable),
    ],
)
def test_errors_of_the_share_are_named(
    nas: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(kind, match="t/x"):
        send(DirectoryStore(str(nas)), "t/x", DATA)
    assert not (nas / "t" / "x").exists()


def test_file_systems_without_links_or_noreplace(nas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*arguments: object, **more: object) -> None:
        raise OSError(errno.EINVAL, "cannot")

    monkeypatch.setattr(files, "rename_noreplace", cannot)
    store = DirectoryStore(str(nas))
    send(store, "t/x", b"1")
    monkeypatch.setattr(os, "link", cannot)
    send(store, "t/y", b"2")
    assert store.put_if_absent("c", b"3")
    assert not store.put_if_absent("c", b"4")
    assert (store.get("t/x"), store.get("t/y"), store.get("c")) == (b"1", b"2", b"3")
    assert sorted(p.name for p in (nas / "t").iterdir()) == ["x", "y"]


@needs_root
@pytest.mark.root
def test_a_full_share_is_named_and_keeps_no_half_object(tmp_path: Path) -> None:
    """What cannot end gives its room back, is not begun again in vain, and is sent when there is room."""
    for point in mounted(tmp_path / "nas", "-t", "tmpfs", "-o", "size=4m", "none"):
        store = DirectoryStore(str(point), owner="n0", window_bytes=WINDOW_BYTES)
        filler = point / "filler"
        filler.write_bytes(b"x" * (2 << 20))
        seen: list[Progress] = []
        with pytest.raises(NoSpaceError):
            store.upload("t/x", Meter(DATA), resume=None, on_progress=seen.append)
        assert not list(point.rglob(f"{PARTIAL_PREFIX}*")), "room for tombstones and probes"
        assert store.probe().create_only
        again = Meter(DATA)
        with pytest.raises(NoSpaceError):
            store.upload("t/x", again, resume=None, on_progress=lambda _: None)
        assert again.asked == 0
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=16m", str(point)], check=True)
        resume = ResumePoint(flushed_bytes=seen[-1].flushed_bytes, crc64=seen[-1].crc64)
        meter = Meter(DATA)
        store.upload("t/x", meter, resume=resume, on_progress=seen.append)
        assert store.get("t/x") == DATA


@needs_root
@pytest.mark.root
def test_a_share_that_became_read_only_is_named(tmp_path: Path) -> None:
    for point in mounted(tmp_path / "nas", "-t", "tmpfs", "-o", "size=16m", "none"):
        store = DirectoryStore(str(point))
        store.put("a", b"1")
        subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
        with pytest.raises(NotPermitted, match="read-only"):
            send(store, "t/x", DATA)
        assert store.get("a") == b"1"


def test_sixteen_processes_create_one_commit_and_one_wins(nas: Path) -> None:
    script = (
        "import sys, time; from ckptd.storage.stores.directory import DirectoryStore;"
        "store = DirectoryStore(sys.argv[1]);"
        "time.sleep(max(0, float(sys.argv[3]) - time.time()));"
        "print(store.put_if_absent('_ckptd/commits/t~g1~zero.json', sys.argv[2].encode() * 1000))"
    )
    start = str(time.time() + 3)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(nas), f"{number:02d}", start],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(16)
    ]
    won = [number for number, child in enumerate(children) if child.communicate()[0].strip() == "True"]
    assert len(won) == 1
    data = (nas / "_ckptd" / "commits" / "t~g1~zero.json").read_bytes()
    assert data == f"{won[0]:02d}".encode() * 1000
    assert [p.name for p in (nas / "_ckptd" / "commits").iterdir()] == ["t~g1~zero.json"]


def test_a_new_folder_that_has_the_inode_of_a_removed_one_is_flushed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention frees inodes: whether a folder's name was flushed is not to be told by its inode alone."""
    flushed: list[tuple[int, int]] = []
    fsync_dir = files.fsync_dir

    def spy(fd: int) -> None:
        status = os.fstat(fd)
        flushed.append((status.st_dev, status.st_ino))
        fsync_dir(fd)

    monkeypatch.setattr(files, "fsync_dir", spy)
    store, root = DirectoryStore(str(tmp_path)), tmp_path.stat()
    for step in range(4):
        flushed.clear()
        key = f"global_step{step}/a.pt"
        source = MemorySource(b"x", mode=0o644, folder_mode=0o755, gid=None)
        store.upload(key, source, resume=None, on_progress=lambda _: None)
        assert (root.st_dev, root.st_ino) in flushed
        store.delete(key)


def test_a_root_that_refuses_to_remove_a_folder_is_left_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try, at every attempt to attach, left another one; the next that may removes it."""
    store = DirectoryStore(str(tmp_path))
    with monkeypatch.context() as patch:

        def refuses(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "rmdir", refuses)
        for _ in range(3):
            with pytest.raises(StorageError):
                store.probe()
        assert len(list(tmp_path.iterdir())) == 1
    store.probe()
    assert not [path for path in tmp_path.iterdir() if path.name != "_ckptd"]


@pytest.mark.parametrize(
    ("call", "begun"),
    [("fstat", False), ("fsync", False), ("fchmod", False), ("fsync", True), ("ftruncate", True)],
)
def test_a_disk_that_fails_is_not_held_open(
    nas: Path, call: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each such call of an upload fails once: who repairs the disk has to unmount it first."""
    real, failures, left = getattr(os, call), 0, 0

    def refuse(*arguments: int) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    for number in range(1, 100):
        store = DirectoryStore(str(nas), owner="a", window_bytes=WINDOW_BYTES)
        if begun:
            with pytest.raises(Stopped):
                store.upload(f"t{number}/x", Meter(DATA, 2 << 20), resume=None, on_progress=lambda _: None)
            store = DirectoryStore(str(nas), owner="a", window_bytes=WINDOW_BYTES)
        resume = ResumePoint(flushed_bytes=1 << 20, crc64=crc64(DATA[: 1 << 20])) if begun else None
        before, left = sorted(os.listdir("/proc/self/fd")), number
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            try:
                store.upload(f"t{number}/x", Meter(DATA), resume=resume, on_progress=lambda _: None)
            except StorageError:
                failures += 1
        assert sorted(os.listdir("/proc/self/fd")) == before, f"{call} {number}"
        if left > 0:
            break
    assert failures
