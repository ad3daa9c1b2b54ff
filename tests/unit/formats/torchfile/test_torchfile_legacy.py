"""Files of before zip archives give the same records, tensors and conversions; nothing of them is guessed."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import Compat, ConvertOptions
from ckptd.core.model.facts import Archive
from ckptd.errors import RefusedError, TornArchiveError
from ckptd.formats.torchfile.archive import DEFAULT_LIMITS, Directory, Limits
from ckptd.formats.torchfile.fingerprint import fingerprint, has_crc, tensor_fingerprint
from ckptd.formats.torchfile.legacy import read_archive, read_legacy
from ckptd.formats.torchfile.unpickler import unpickle
from tests.support.legacy_files import LITTLE, as_legacy, legacy_bytes, parts_of
from tests.support.reading import load, tensor_bytes
from tests.support.synthetic import Shapes, write_stage3, write_stage12

GROUPS: list[Shapes] = [{"w": (16, 8), "b": (7,), "none": (0,)}, {"late": (30,)}]
WRITERS = {1: write_stage12, 2: write_stage12, 3: write_stage3}


def written(folder: Path, stage: int = 2) -> Path:
    options: dict[str, Any] = {} if stage == 3 else {"stage": stage}
    WRITERS[stage](folder, GROUPS, 2, **options)
    for path in folder.iterdir():
        as_legacy(path)
    return folder


def shard_in(folder: Path) -> Path:
    return min(folder.glob("*optim_states.pt"))


def directory_of(path: Path, limits: Limits = DEFAULT_LIMITS) -> Directory:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_archive(fd, path.name, limits)
    finally:
        os.close(fd)


def prints(path: Path) -> tuple[str, str, bool]:
    fd = os.open(path, os.O_RDONLY)
    try:
        directory = read_legacy(fd, path.name)
        assert fingerprint(fd, directory) == fingerprint(fd, None), "whoever may not unpickle sees the same"
        return fingerprint(fd, directory), tensor_fingerprint(fd, directory), has_crc(directory)
    finally:
        os.close(fd)


def test_records_are_found_where_they_lie(tmp_path: Path) -> None:
    path = shard_in(written(tmp_path / "tag"))
    directory, data = directory_of(path), path.read_bytes()
    last = max(directory.storages(), key=lambda r: r.offset)
    assert last.offset + last.size == len(data)
    record = directory.records["data.pkl"]
    root = unpickle(data[record.offset : record.offset + record.size], path.name, directory)
    step = root["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"]
    assert struct.unpack("<f", tensor_bytes(step, data)) == (7.0,)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_conversion_gives_the_bytes_of_the_zip(tmp_path: Path, stage: int) -> None:
    options: dict[str, Any] = {} if stage == 3 else {"stage": stage}
    made = WRITERS[stage](tmp_path / "zip", GROUPS, 2, **options)
    layouts: tuple[Compat, ...] = ("strict", "superset")
    for compat in layouts:
        one, other = tmp_path / f"one-{compat}", tmp_path / f"other-{compat}"
        convert(made.folder, one, ConvertOptions(compat=compat))
        convert(
            written(tmp_path / f"legacy-{compat}", stage), other, ConvertOptions(compat=compat, verify=True)
        )
        names = {p.relative_to(one) for p in (one / "zero").rglob("*.pt")}
        assert names == {p.relative_to(other) for p in (other / "zero").rglob("*.pt")}
        assert {n for n in names if (one / n).read_bytes() != (other / n).read_bytes()} == set()


def test_inspection_reads_facts_and_completeness(tmp_path: Path) -> None:
    folder = written(tmp_path / "tag")
    for fact in inspect_files(folder, sorted(p.name for p in folder.iterdir())):
        assert fact.archive is Archive.LEGACY
        assert fact.reason is None
        assert fact.facts is not None
        assert fact.facts.zero_stage == 2
        assert fact.fingerprint
        assert fact.tensor_fingerprint
        assert not fact.has_crc


def test_every_truncation_is_torn(tmp_path: Path) -> None:
    path = shard_in(written(tmp_path / "tag"))
    whole, cut = path.read_bytes(), tmp_path / "cut.pt"
    bounds = {place for r in directory_of(path).records.values() for place in (r.offset, r.offset + r.size)}
    near = {b + i for b in bounds for i in (-9, -8, -1, 0, 1)} - {len(whole), len(whole) + 1}
    for length in sorted(near | set(range(0, len(whole), 7))):
        cut.write_bytes(whole[:length])
        with pytest.raises(TornArchiveError):
            directory_of(cut)


def test_a_truncated_shard_is_torn_and_has_no_fingerprint(tmp_path: Path) -> None:
    folder = written(tmp_path / "tag")
    path = shard_in(folder)
    os.truncate(path, path.stat().st_size - 1)
    (fact,) = inspect_files(folder, [path.name])
    assert fact.archive is Archive.TORN
    assert "1 too early" in (fact.reason or "")
    assert fact.fingerprint == ""
    assert fact.facts is None


def test_pickles_longer_than_the_first_read_are_read_on(tmp_path: Path) -> None:
    path = tmp_path / "long.pt"
    path.write_bytes(legacy_bytes(pickle.dumps({"text": "x" * (3 << 20)}, 2), []))
    assert directory_of(path).records["data.pkl"].size > 3 << 20
    with pytest.raises(RefusedError, match="beyond the limit"):
        directory_of(path, Limits(pickle_bytes=2 << 20))


def test_other_machines_and_protocols_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    lies: list[dict[str, Any]] = [
        {"machine": LITTLE | {"little_endian": False}},
        {"protocol": 1002},
        {"machine": []},
    ]
    for lie in lies:
        path.write_bytes(legacy_bytes(b"\x80\x02}.", [], **lie))
        with pytest.raises(RefusedError):
            directory_of(path)


def test_views_of_old_storages(tmp_path: Path) -> None:
    """Torch before 1.0 pickled a part of a storage as (key, start, elements)."""
    path = tmp_path / "x.pt"

    def pickled(start: int, count: int) -> bytes:
        pid = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00rX\x03\x00\x00\x00cpuK\x08"
        view = b"X\x01\x00\x00\x00v" + b"K" + bytes([start]) + b"K" + bytes([count]) + b"\x87tQ"
        return b"\x80\x02ctorch._utils\n_rebuild_tensor\n(" + pid + view + b"K\x00K\x02\x85K\x01\x85tR."

    values = struct.pack("<8f", *range(8))
    path.write_bytes(legacy_bytes(pickled(3, 4), [("r", 8, values)]))
    directory, data = directory_of(path), path.read_bytes()
    record = directory.records["data.pkl"]
    tensor = unpickle(data[record.offset : record.offset + record.size], "x.pt", directory)
    assert struct.unpack("<2f", tensor_bytes(tensor, data)) == (3.0, 4.0)
    path.write_bytes(legacy_bytes(pickled(6, 4), [("r", 8, values)]))
    with pytest.raises(TornArchiveError, match="view leaves its storage"):
        directory_of(path)


def test_fingerprints_tell_saves_apart_and_replicas_not(tmp_path: Path) -> None:
    path = shard_in(written(tmp_path / "tag"))
    first = prints(path)
    assert first[2] is False, "a legacy file has no CRCs, however small its records"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert prints(path)[0] != first[0]
    assert prints(path)[1] != first[1]


def test_the_keys_of_another_process_change_no_tensor_fingerprint(tmp_path: Path) -> None:
    write_stage12(tmp_path / "tag", GROUPS, 2)
    path = shard_in(tmp_path / "tag")
    pickled, storages = parts_of(path)
    path.write_bytes(legacy_bytes(pickled, storages))
    one = prints(path)
    path.write_bytes(legacy_bytes(pickled, storages[::-1]))
    other = prints(path)
    assert one[0] != other[0]
    assert one[1] == other[1]


def test_a_large_file_is_sampled_from_end_to_end(tmp_path: Path) -> None:
    """What changes everywhere is seen, one byte between samples may not be (docs/internals/conversion.md)."""
    path = tmp_path / "large.pt"
    count = 8 << 20
    pickled = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x00kX\x03\x00\x00\x00cpu"
        b"J" + struct.pack("<i", count) + b"NtQK\x00J" + struct.pack("<i", count) + b"\x85K\x01\x85\x89}tR."
    )
    raw = legacy_bytes(pickled, [("k", count, b"")])
    path.write_bytes(raw)
    os.truncate(path, len(raw) + 4 * count)
    first = prints(path)
    for place in (len(raw), len(raw) + 2 * count, len(raw) + 4 * count - (1 << 15)):
        with path.open("r+b") as out:
            out.seek(place)
            out.write(b"\x01" * (1 << 15))
        changed = prints(path)
        assert changed[0] != first[0]
        first = changed


def test_the_model_states_are_copied_as_they_are(tmp_path: Path) -> None:
    folder = written(tmp_path / "tag")
    convert(folder, tmp_path / "u", ConvertOptions(compat="strict"))
    name = "mp_rank_00_model_states.pt"
    assert (tmp_path / "u" / name).read_bytes() == (folder / name).read_bytes()
    value, _, data = load(tmp_path / "u" / "zero" / "w" / "fp32.pt")
    assert len(tensor_bytes(value["param"], data)) == 4 * 16 * 8
