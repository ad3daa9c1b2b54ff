"""What every store must do, in one class: each store's test file derives from it (docs/design.md §5)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ckptd.errors import CkptdError, TargetExists, VerifyError
from ckptd.storage.stores.base import Progress, ResumePoint
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.sources import MemorySource

if TYPE_CHECKING:
    from ckptd.storage.stores.base import Store

WINDOW_BYTES = 1 << 20
DATA = bytes(range(256)) * 16 * 1024 + b"tail"


def source_of(data: bytes) -> MemorySource:
    return MemorySource(data, mode=0o640, folder_mode=0o750, gid=None)


class Stopped(Exception):
    """The caller had enough."""


class Meter:
    """Counts what a source is asked for, and stops after some bytes."""

    def __init__(self, data: bytes, stop_after: int | None = None) -> None:
        self._inner = source_of(data)
        self._stop_after = stop_after
        self.asked = 0
        self.longest_bytes = 0
        self._lock = threading.Lock()
        self.size_bytes = len(data)
        self.mode, self.folder_mode = 0o640, 0o750
        self.gid: int | None = None

    def read_into(self, offset: int, buffer: memoryview) -> int:
        if self._stop_after is not None and self.asked >= self._stop_after:
            raise Stopped
        count = self._inner.read_into(offset, buffer[: 256 << 10])
        with self._lock:
            self.longest_bytes = max(self.longest_bytes, len(buffer))
            self.asked += count
        return count

    def drop(self, offset: int, length: int) -> None:
        pass


def send(store: Store, key: str, data: bytes) -> int:
    return store.upload(key, source_of(data), resume=None, on_progress=lambda progress: None)


class StoreConformance:
    """Derive, and give a fixture `store` with windows (S3: parts) of `window_bytes`."""

    window_bytes = WINDOW_BYTES
    data = DATA
    """More than four windows and a ragged end."""
    is_create_only = True
    proof = "read-back"
    """What verifies an upload that one process sent whole; one that was continued is always read back."""
    is_resumable = True
    at_once = 1
    """Windows of one object in flight: so many may be lost when it is cut short."""

    def test_probe_says_what_it_can_do_and_leaves_nothing(self, store: Store) -> None:
        abilities = store.probe()
        assert abilities.create_only is self.is_create_only
        assert list(store.list("")) == []

    def test_absent_is_none(self, store: Store) -> None:
        assert store.get("a/b") is None
        assert store.stat("a/b") is None
        assert list(store.list("a/")) == []
        store.delete("a/b")
        store.discard("a/b")
        with pytest.raises(FileNotFoundError):
            store.read_at("a/b", 0, 1)

    def test_put_replaces(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.put("a/b", b"two")
        assert store.get("a/b") == b"two"
        info = store.stat("a/b")
        assert info is not None
        assert (info.key, info.bytes) == ("a/b", 3)

    def test_put_if_absent_never_replaces(self, store: Store) -> None:
        assert store.put_if_absent("a/b", b"1")
        assert not store.put_if_absent("a/b", b"2")
        assert store.get("a/b") == b"1"

    def test_sixteen_create_one_key_and_one_wins(self, store: Store) -> None:
        if not self.is_create_only:
            return
        won: list[int] = []
        gate = threading.Barrier(16)

        def create(number: int) -> None:
            gate.wait()
            if store.put_if_absent("_ckptd/commits/x.json", f"{number}".encode()):
                won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get("_ckptd/commits/x.json") == f"{won[0]}".encode()

    def test_list_is_recursive_and_by_folder(self, store: Store) -> None:
        for key in ("t/a", "t/b/c", "t.g2/a", "u"):
            store.put(key, key.encode())
        assert {info.key: info.bytes for info in store.list("t/")} == {"t/a": 3, "t/b/c": 5}
        assert len(list(store.list(""))) == 4

    def test_upload_gives_crc_and_bytes(self, store: Store) -> None:
        seen: list[Progress] = []
        crc = store.upload("t/big", source_of(self.data), resume=None, on_progress=seen.append)
        assert crc == crc64(self.data)
        assert replace(seen[-1], token="") == Progress(
            done_bytes=len(self.data), flushed_bytes=len(self.data), crc64=crc
        )
        assert all(crc64(self.data[: p.flushed_bytes]) == p.crc64 for p in seen)
        assert store.read_at("t/big", 100, 50) == self.data[100:150]
        assert store.read_at("t/big", len(self.data) - 2, 50) == self.data[-2:]
        assert store.verify("t/big", len(self.data), crc, lambda done: None) == self.proof
        assert store.verify("t/big", len(self.data), crc, lambda done: None) == "read-back"

    def test_upload_of_nothing(self, store: Store) -> None:
        crc = send(store, "t/empty", b"")
        assert store.verify("t/empty", 0, crc, lambda done: None) in (self.proof, "read-back")
        assert store.get("t/empty") == b""

    def test_a_key_that_is_there_is_not_replaced_by_upload(self, store: Store) -> None:
        store.put("t/x", b"other")
        with pytest.raises(TargetExists):
            send(store, "t/x", b"mine")
        assert store.get("t/x") == b"other"

    def test_half_an_upload_is_invisible_and_goes_on_at_the_last_window(self, store: Store) -> None:
        seen: list[Progress] = []
        with pytest.raises(Stopped):
            store.upload("t/x", Meter(self.data, 3 * self.window_bytes), resume=None, on_progress=seen.append)
        assert store.stat("t/x") is None
        assert list(store.list("")) == []
        last = seen[-1]
        if not self.is_resumable:
            assert last.flushed_bytes == 0
            assert send(store, "t/x", self.data) == crc64(self.data)
            return
        assert last.flushed_bytes >= (3 - self.at_once) * self.window_bytes
        meter = Meter(self.data)
        resume = ResumePoint(flushed_bytes=last.flushed_bytes, crc64=last.crc64, token=last.token)
        crc = store.upload("t/x", meter, resume=resume, on_progress=seen.append)
        assert crc == crc64(self.data)
        assert meter.asked == len(self.data) - last.flushed_bytes
        # with several parts in flight none may have ended before the stop
        wanted = {"read-back"} if self.at_once == 1 else {"read-back", self.proof}
        assert store.verify("t/x", len(self.data), crc, lambda done: None) in wanted

    def test_resume_without_the_partial_starts_over(self, store: Store) -> None:
        first = self.window_bytes
        resume = ResumePoint(flushed_bytes=first, crc64=crc64(self.data[:first]))
        crc = store.upload("t/x", source_of(self.data), resume=resume, on_progress=lambda progress: None)
        assert crc == crc64(self.data)
        assert store.get("t/x") == self.data

    def test_discarded_partials_are_not_continued(self, store: Store) -> None:
        first = self.window_bytes
        seen: list[Progress] = []
        with pytest.raises(Stopped):
            store.upload("t/x", Meter(self.data, 2 * self.window_bytes), resume=None, on_progress=seen.append)
        store.discard("t/x")
        meter = Meter(self.data)
        resume = ResumePoint(flushed_bytes=first, crc64=crc64(self.data[:first]), token=seen[-1].token)
        store.upload("t/x", meter, resume=resume, on_progress=lambda progress: None)
        assert meter.asked == len(self.data)

    def test_verify_finds_other_bytes_and_changes_nothing(self, store: Store) -> None:
        crc = send(store, "t/x", DATA)
        with pytest.raises(VerifyError):
            store.verify("t/x", len(DATA), crc ^ 1, lambda done: None)
        assert store.verify("t/x", len(DATA), crc, lambda done: None)
        with pytest.raises(VerifyError):
            store.verify("t/gone", 1, 1, lambda done: None)

    def test_a_range_comes_in_chunks(self, store: Store) -> None:
        send(store, "t/x", self.data)
        size = len(self.data)
        for offset, length in ((0, size), (1, 3 << 20), (size - 5, 5), (size - 5, 50), (size, 7), (9, 0)):
            chunks = list(store.stream("t/x", offset, length))
            assert b"".join(chunks) == self.data[offset : offset + length], (offset, length)
            assert all(len(chunk) <= 8 << 20 for chunk in chunks)
        with pytest.raises(FileNotFoundError):
            list(store.stream("t/gone", 0, 9))

    def test_as_many_small_objects_at_once_as_it_says(self, store: Store) -> None:
        contents = {f"t/{n % 3}/{n:02}": f"{n}".encode() * 4000 for n in range(3 * store.lanes)}

        def upload(key: str) -> None:
            crc = send(store, key, contents[key])
            assert store.verify(key, len(contents[key]), crc, lambda done: None)

        with ThreadPoolExecutor(store.lanes) as pool:
            list(pool.map(upload, contents))
        assert {info.key: info.bytes for info in store.list("t/")} == {k: len(v) for k, v in contents.items()}
        assert all(store.get(key) == data for key, data in list(contents.items())[::7])

    def test_delete_leaves_neighbours(self, store: Store) -> None:
        store.put("t/a", b"1")
        store.put("t/b", b"2")
        store.delete("t/a")
        store.delete("t/a")
        assert [info.key for info in store.list("")] == ["t/b"]

    def test_unsafe_keys_are_refused(self, store: Store) -> None:
        for key in ("../x", "/x", "a//b", "a/./b", ""):
            with pytest.raises(CkptdError):
                store.put(key, b"1")
