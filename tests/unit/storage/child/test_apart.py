"""A directory through a process of its own: a range that is written there, and what may go wrong with it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.errors import StorageError
from ckptd.storage.child.apart import open_apart
from ckptd.storage.stores.base import Store
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.parallel import LaneStopped

DATA = os.urandom((9 << 20) + 7)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    root = tmp_path / "nas"
    root.mkdir()
    (root / "object").write_bytes(DATA)
    return open_apart("nas", str(root))


@pytest.fixture
def out(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def ignore(_: int) -> None:
    """Take note of nothing."""


@pytest.mark.parametrize(("begin", "length"), [(0, len(DATA)), (4 << 20, 5 << 20), (len(DATA) - 1, 1)])
def test_a_range_is_written_at_its_place(store: Store, out: int, begin: int, length: int) -> None:
    told: list[int] = []
    part = DATA[begin : begin + length]
    assert store.write_range("object", begin, length, out, told.append) == (length, crc64(part))
    assert sum(told) == length
    assert os.pread(out, length + 1, begin) == part
    assert os.fstat(out).st_size == begin + length


def test_an_object_that_ends_early_says_how_far_it_came(store: Store, out: int) -> None:
    found = store.write_range("object", 4 << 20, len(DATA), out, ignore)
    assert found == (len(DATA) - (4 << 20), crc64(DATA[4 << 20 :]))


def test_an_absent_object_is_absent(store: Store, out: int) -> None:
    with pytest.raises(FileNotFoundError):
        store.write_range("nothing", 0, 1, out, ignore)
    # the same thread's socket serves the next call
    assert store.write_range("object", 0, 1, out, ignore) == (1, crc64(DATA[:1]))


def test_a_target_that_takes_no_more_is_no_fault_of_the_remote(store: Store, tmp_path: Path) -> None:
    """A limit on the size of files, which a child inherits, stands for a quota of the local disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    fd = os.open(tmp_path / "small", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as caught:
            store.write_range("object", 0, len(DATA), fd, ignore)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(fd)
    assert caught.value.errno == errno.EFBIG
    assert not isinstance(caught.value, StorageError)


def test_who_is_told_may_stop_it(store: Store, out: int) -> None:
    def stop(_: int) -> None:
        raise LaneStopped("enough")

    moved: Callable[[int], None] = stop
    with pytest.raises(LaneStopped):
        store.write_range("object", 0, len(DATA), out, moved)
    assert store.write_range("object", 0, 1, out, ignore) == (1, crc64(DATA[:1]))
