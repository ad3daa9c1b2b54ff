"""Legacy files that lie: one clear sentence, exit 65, nothing run, nothing written (P14)."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.core.model.facts import Archive
from ckptd.errors import CkptdError
from ckptd.formats.torchfile.archive import LEGACY_MAGIC
from tests.attacks.hostile import OPTIM, pickles
from tests.support.legacy_files import LITTLE, as_legacy, legacy_bytes, parts_of
from tests.support.synthetic import Made, Shapes, write_stage12

GROUPS: list[Shapes] = [{"w": (16, 8), "b": (8,)}]
Storages = list[tuple[str, int, bytes]]
Lie = Callable[[bytes, Storages], bytes]


def count_of(place: int, count: int) -> Lie:
    """One storage says that it holds `count` elements."""

    def lie(pickled: bytes, storages: Storages) -> bytes:
        key, _, raw = storages[place]
        return legacy_bytes(pickled, [*storages[:place], (key, count, raw), *storages[place + 1 :]])

    return lie


def keys_of(change: Callable[[list[str]], object]) -> Lie:
    return lambda pickled, storages: legacy_bytes(pickled, storages, keys=change([k for k, _, _ in storages]))


def claiming(numel: int) -> Lie:
    """Pickle and count agree on a storage that the file cannot hold."""

    def lie(pickled: bytes, storages: Storages) -> bytes:
        pid = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00kX\x03\x00\x00\x00cpu\x8a\x08"
        return legacy_bytes(b"\x80\x02" + pid + struct.pack("<q", numel) + b"NtQ.", [("k", numel, b"xxxx")])

    return lie


TWO_WAYS = (
    b"\x80\x02]((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00kX\x03\x00\x00\x00cpuK\x04NtQ"
    b"(X\x07\x00\x00\x00storagectorch\nDoubleStorage\nX\x01\x00\x00\x00kX\x03\x00\x00\x00cpuK\x04NtQe."
)
LIES: dict[str, Lie] = {
    "one element more": count_of(0, 1 << 10),
    "one element less": count_of(1, 1),
    "a negative count": count_of(0, -1),
    "the most negative count": count_of(2, -(1 << 63)),
    "a count of 2^62": count_of(0, 1 << 62),
    "both agree on 2^50 elements": claiming(1 << 50),
    "both agree on a negative size": claiming(-4),
    "a key is missing": keys_of(lambda keys: keys[1:]),
    "a key comes twice": keys_of(lambda keys: [*keys, keys[0]]),
    "a key that nothing refers to": keys_of(lambda keys: [*keys, "140000"]),
    "keys exchanged": keys_of(lambda keys: [keys[1], keys[0], *keys[2:]]),
    "keys that are numbers": keys_of(lambda keys: list(range(len(keys)))),
    "keys that are lists": keys_of(lambda keys: [[k] for k in keys]),
    "keys are a dictionary": keys_of(lambda keys: dict.fromkeys(keys)),
    "keys are nothing": keys_of(lambda keys: b"N."),
    "a list of a million keys": keys_of(lambda keys: ["k"] * 1_000_000),
    "a list that never ends": keys_of(lambda keys: b"\x80\x02]" + b"2" * (9 << 20)),
    "keys by a call": keys_of(lambda keys: b"\x80\x02cbuiltins\nlist\n)R."),
    "one storage in two ways": lambda p, s: legacy_bytes(TWO_WAYS, [("k", 4, bytes(32))]),
    "bytes after the end": lambda p, s: legacy_bytes(p, s) + b"\0",
    "two files in one": lambda p, s: 2 * legacy_bytes(p, s),
    "big-endian": lambda p, s: legacy_bytes(p, s, machine=LITTLE | {"little_endian": False}),
    "no word on the machine": lambda p, s: legacy_bytes(p, s, machine="little"),
    "another protocol": lambda p, s: legacy_bytes(p, s, protocol=1000),
    "a protocol of 10^6 digits": lambda p, s: legacy_bytes(p, s, protocol=1 << 4_000_000),
    "magic alone": lambda p, s: LEGACY_MAGIC,
    "magic for ever": lambda p, s: LEGACY_MAGIC * 100_000,
    "a zip after the magic": lambda p, s: LEGACY_MAGIC + b"PK\x03\x04" * 100,
    "persistent id of too few items": lambda p, s: legacy_bytes(b"\x80\x02K\x01K\x02\x86Q.", s),
    "a class's source is code": lambda p, s: legacy_bytes(
        b"\x80\x02(X\x06\x00\x00\x00moduleX\x01\x00\x00\x00aNNtQ.", s
    ),
}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return write_stage12(tmp_path / "tag", GROUPS, 2)


@pytest.mark.parametrize("lie", list(LIES))
def test_lying_legacy_files_are_refused_in_one_sentence(made: Made, tmp_path: Path, lie: str) -> None:
    path = made.folder / OPTIM
    path.write_bytes(LIES[lie](*parts_of(path)))
    (found,) = inspect_files(made.folder, [OPTIM], timeout_seconds=60)
    assert found.reason
    assert found.facts is None
    with pytest.raises(CkptdError) as caught:
        convert(made.folder, tmp_path / "out", ConvertOptions())
    assert caught.value.exit_code == 65
    assert OPTIM in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tag"]


SOME = ("os.system", "eval", "inst", "stack global", "setstate", "memo bomb", "bytes of 2^62", "deep tuples")


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("place", ["object", "keys", "machine"])
def test_no_pickle_of_a_legacy_file_runs_anything(tmp_path: Path, kind: str, place: str) -> None:
    """The object's pickle, the list of keys and the facts of the machine go through one machine."""
    canary = tmp_path / "canary"
    hostile = pickles(canary)[kind]
    empty = b"\x80\x02}."
    head = LEGACY_MAGIC + pickle.dumps(1001, 2)
    data = {
        "object": legacy_bytes(hostile, []),
        "keys": legacy_bytes(empty, [], keys=hostile),
        "machine": head + hostile + empty + b"\x80\x02].",
    }[place]
    folder = tmp_path / "tag"
    folder.mkdir()
    (folder / OPTIM).write_bytes(data)
    (found,) = inspect_files(folder, [OPTIM], timeout_seconds=60)
    assert not canary.exists()
    assert found.archive in (Archive.LEGACY, Archive.TORN)
    assert found.facts is None or place == "object"


def test_a_pickle_that_ends_the_child_costs_its_own_facts_alone(tmp_path: Path) -> None:
    """Its framing and fingerprint stand, so that it can still upload raw; the file after it is read."""
    made = write_stage12(tmp_path / "tag", GROUPS, 2)
    other = OPTIM.replace("rank_0", "rank_1", 1)
    as_legacy(made.folder / other)
    (made.folder / OPTIM).write_bytes(legacy_bytes(b"\x80\x02" + b"]" * (60 << 20) + b".", []))
    first, second = inspect_files(made.folder, [OPTIM, other], timeout_seconds=60)
    assert (first.archive, bool(first.fingerprint), first.facts) == (Archive.LEGACY, True, None)
    assert first.reason
    assert second.facts is not None
