"""Files that come back in ranges, several at a time: whole under their name, or not there (P12, P18)."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import pytest

from ckptd.errors import DamagedError, RemoteUnreachable
from ckptd.recover import fetch
from ckptd.recover.fetch import Fetcher, read_through
from ckptd.recover.select.copies import Copy
from ckptd.recover.select.inventory import RemoteInventory
from ckptd.storage.remote.observe import live_commits, manifests_of, read_remote
from ckptd.storage.stores.checksums import crc64
from tests.stores.memory import MemoryStore
from tests.stores.scene import Node, archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LANES = 5


@dataclass
class Served(MemoryStore):
    """Gives ranges in chunks of 100 bytes, in no order; `fail(key, offset)` may raise in the middle."""

    lane_count: int = LANES
    fail: Callable[[str, int], None] = lambda key, offset: None
    chance: Random = field(default_factory=lambda: Random(1))
    gate: threading.Barrier | None = None
    running: int = 0
    most: int = 0
    asked: list[str] = field(default_factory=list)

    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.asked.append(key)
            wait = self.chance.random() * 0.002
        try:
            threading.Event().wait(wait)
            data = self.read_at(key, offset, length)
            for at in range(0, len(data), 100):
                self.fail(key, offset + at)
                yield data[at : at + 100]
        finally:
            with self.lock:
                self.running -= 1


@dataclass
class Place:
    """A committed checkpoint in memory, and a staging folder."""

    store: Served
    copy: Copy
    staging: Path

    def run(self) -> Fetcher:
        self.staging.mkdir(exist_ok=True)
        fd = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fetcher = Fetcher(self.copy, fd)
            fetcher.run()
        finally:
            os.close(fd)
        return fetcher

    @property
    def names(self) -> set[str]:
        return {str(path.relative_to(self.staging)) for path in self.staging.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(fetch, "RANGE_BYTES", 700)
    node = Node(tmp_path / "save")
    node.write_all(size=100)
    # no noise that begins as an archive does
    node.write({f"s{n:02}": (b"s" + os.urandom(n * 60))[: n * 60] for n in range(40)})
    node.write({"exactly": b"e" + os.urandom(1399), "empty": b"", "big.pt": archive(os.urandom(9000))})
    store = Served()
    assert node.upload(node.attached(store), node.order(node.sealed())).outcome == "committed"
    seen = read_remote(store)
    (view,) = live_commits(seen)
    manifests = tuple(manifests_of(store, view))
    inventory = RemoteInventory(name="nas", url="memory:", store=store, observation=seen, commits=(view,))
    copy = Copy(remote=inventory, view=view, manifests=manifests, files=manifests[0].files)
    return Place(store=store, copy=copy, staging=tmp_path / "staging")


def test_every_file_whole_with_its_rights_and_times(place: Place) -> None:
    place.run()
    assert place.names == {file.path for file in place.copy.files}
    for file in place.copy.files:
        path = place.staging / file.path
        assert path.read_bytes() == place.store.objects[file.key]
        assert path.stat().st_mode & 0o777 == file.mode & 0o777
        assert path.stat().st_mtime_ns == file.mtime_ns
    assert 2 <= place.store.most <= LANES
    ranges = sum(max(-(-file.bytes // 700), 1) for file in place.copy.files)
    assert len(place.store.asked) == ranges


@pytest.mark.parametrize("seed", range(6))
def test_what_was_interrupted_has_no_name_and_goes_on(place: Place, seed: int) -> None:
    """A range in the middle of some file fails: holes never get a name, what is whole stays."""
    chance = Random(seed)
    victim = chance.choice([file for file in place.copy.files if file.bytes > 1500])
    at = chance.randrange(0, victim.bytes - 100)

    def fail(key: str, offset: int) -> None:
        if key == victim.key and offset >= at:
            msg = "the server went away"
            raise RemoteUnreachable(msg)

    place.store.fail = fail
    before = set(threading.enumerate())
    with pytest.raises(RemoteUnreachable, match="went away"):
        place.run()
    assert place.store.running == 0
    assert set(threading.enumerate()) <= before
    names = place.names
    assert victim.path not in names
    assert names <= {file.path for file in place.copy.files}
    for name in names:
        assert (place.staging / name).read_bytes() == place.store.objects[f"global_step5/{name}"]
    place.store.fail = lambda key, offset: None
    place.store.asked.clear()
    place.run()
    assert not names & {key.removeprefix("global_step5/") for key in place.store.asked}
    assert place.names == {file.path for file in place.copy.files}


def test_what_a_kill_left_half_written_is_written_anew(place: Place) -> None:
    """An allocated file with holes has the right size under a name of ours: it is not looked at."""
    big = next(file for file in place.copy.files if file.path == "big.pt")
    place.staging.mkdir()
    (place.staging / ".ckptd-tmp-big.pt").write_bytes(bytes(big.bytes))
    place.run()
    assert (place.staging / "big.pt").read_bytes() == place.store.objects[big.key]
    assert ".ckptd-tmp-big.pt" not in place.names


@pytest.mark.parametrize("change", ["flip", "short", "long", "gone"])
def test_other_bytes_are_damage(place: Place, change: str) -> None:
    key = next(file.key for file in place.copy.files if file.path == "big.pt")
    data = place.store.objects[key]
    changed = {"flip": bytes([data[0] ^ 1]) + data[1:], "short": data[:5000], "long": data + b"!"}
    if change == "gone":
        del place.store.objects[key]
    else:
        place.store.objects[key] = changed[change]
    with pytest.raises(DamagedError, match=r"big\.pt"):
        place.run()
    assert not {name for name in place.names if "big" in name}


def test_reading_through_says_how_far_it_came(place: Place) -> None:
    file = next(file for file in place.copy.files if file.path == "big.pt")
    data = place.store.objects[file.key]
    told: list[int] = []
    stop = threading.Event()
    assert read_through(place.store, file, told.append, stop) == (len(data), crc64(data))
    assert sum(told) == len(data)
    for cut in (0, 699, 700, 701, 5000):
        place.store.objects[file.key] = data[:cut]
        assert read_through(place.store, file, told.append, stop) == (cut, crc64(data[:cut]))
    nothing = file.model_copy(update={"bytes": 0})
    assert read_through(place.store, nothing, told.append, stop) == (0, 0)
