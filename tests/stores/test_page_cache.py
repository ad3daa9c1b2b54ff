"""What reading for an upload leaves in the page cache: what was there before, nothing more (P12)."""

from __future__ import annotations

import os
import secrets
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from ckptd.base import extents
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.open import open_store
from tests.stores import servers
from tests.stores.scene import MODEL, OPTIM, Node, archive

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.stores.base import Store

pytestmark = pytest.mark.stores

MIB = 1 << 20
CACHED, HALF, NOT = OPTIM.format(d=0), OPTIM.format(d=1), MODEL


def runs_of(path: Path) -> tuple[tuple[int, int], ...]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return extents.cached_runs(fd, path.stat().st_size)
    finally:
        os.close(fd)


def pages_of(runs: tuple[tuple[int, int], ...]) -> set[int]:
    return {page for begin, end in runs for page in range(begin // 4096, -(-end // 4096))}


def forget(path: Path, offset: int = 0) -> None:
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, offset, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path / "save")
    data = os.urandom(10 * MIB)
    node.write({name: archive(data, records=2) for name in (CACHED, HALF, NOT)})
    node.write({"cached.json": data[:70_000], "not.json": data[:70_000]})
    folder = node.save_dir / node.tag
    for path in folder.iterdir():
        forget(path)
    if runs_of(folder / NOT):
        pytest.skip("the file system of the tests keeps its pages")
    for name in (CACHED, "cached.json"):
        (folder / name).read_bytes()
    with (folder / HALF).open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        stream.seek(4 * MIB)
        stream.read(3 * MIB)
    return node


def uploaded_leaves_the_cache_as_it_was(node: Node, store: Store) -> None:
    folder = node.save_dir / node.tag
    order = node.order(node.sealed())
    # sealing reads the files to name them; what a trainer's reading left is set up again
    for name in (NOT, "not.json"):
        forget(folder / name)
    forget(folder / HALF, 7 * MIB)
    with (folder / HALF).open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 4 * MIB, os.POSIX_FADV_DONTNEED)
    before = {path.name: runs_of(path) for path in folder.iterdir()}
    whole = (folder / CACHED).stat().st_size
    assert before[CACHED][0][0] == 0
    assert before[CACHED][-1][1] >= whole
    assert before[NOT] == before["not.json"] == ()
    assert 2 * MIB <= sum(end - begin for begin, end in before[HALF]) <= 5 * MIB
    assert node.upload(node.attached(store), order).outcome == "committed"
    after = {path.name: pages_of(runs_of(path)) for path in folder.iterdir()}
    for name, runs in before.items():
        assert after[name] <= pages_of(runs), f"{name}: pages were left behind"
        # the kernel itself may take a page at any time
        assert len(after[name]) >= 0.9 * len(pages_of(runs)), f"{name}: the trainer's pages were dropped"


def test_a_directory(node: Node, tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    store = DirectoryStore(str(tmp_path / "nas"), owner="id-n0", window_bytes=4 * MIB)
    uploaded_leaves_the_cache_as_it_was(node, store)
    for path in (tmp_path / "nas" / node.tag).iterdir():
        assert runs_of(path) == (), path


def test_s3(node: Node, moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    access = Access(endpoint_url=moto.endpoint, part_size_bytes=5 * MIB)
    store = open_store(f"s3://{servers.BUCKET}/{secrets.token_hex(4)}", access=access)
    uploaded_leaves_the_cache_as_it_was(node, store)


def test_runs_agree_with_the_kernels_count(tmp_path: Path) -> None:
    """`mincore` by runs against `cachestat`, where the kernel has it."""
    path = tmp_path / "f"
    path.write_bytes(os.urandom(9 * MIB + 123))
    forget(path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for offset in (0, 3 * MIB, 3 * MIB + 40_000, 9 * MIB + 100):
        os.pread(fd, 10_000, offset)
    runs = extents.cached_runs(fd, path.stat().st_size)
    counted = extents.cached_bytes(fd)
    assert all(begin < end for begin, end in runs)
    assert all(a[1] < b[0] for a, b in pairwise(runs))
    if counted is not None:
        assert sum(end - begin for begin, end in runs) == counted
    extents.drop_pages_but(fd, runs[:1], 1, path.stat().st_size - 1)
    assert extents.cached_runs(fd, path.stat().st_size) == runs[:1]
    extents.drop_pages_but(fd, (), 0, path.stat().st_size)
    assert extents.cached_runs(fd, path.stat().st_size) == ()
    os.close(fd)
