"""The zip reader: what a torch archive is, and every way in which it can be none."""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CkptdError, DamagedError, RefusedError, TornArchiveError
from ckptd.formats.torchfile.archive import Directory, Framing, Limits, frame, read_directory
from ckptd.formats.torchfile.fingerprint import check_crcs, fingerprint, has_crc, tensor_fingerprint
from tests.support.synthetic import drop_crcs, write_archive

RECORDS = {
    "data.pkl": b"\x80\x02}.",
    "byteorder": b"little",
    "data/0": bytes(range(256)) * 8,
    "version": b"3\n",
}


def directory_of(path: Path, limits: Limits | None = None) -> Directory:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_directory(fd, path.name, limits or Limits())
    finally:
        os.close(fd)


def framing_of(path: Path, *, expected: bool) -> Framing:
    fd = os.open(path, os.O_RDONLY)
    try:
        return frame(fd, expected=expected)
    finally:
        os.close(fd)


def fingerprints_of(path: Path) -> tuple[str, str, bool]:
    fd = os.open(path, os.O_RDONLY)
    try:
        directory = read_directory(fd, path.name)
        return fingerprint(fd, directory), tensor_fingerprint(fd, directory), has_crc(directory)
    finally:
        os.close(fd)


@contextmanager
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The size of each read of this process meanwhile."""
    read: list[int] = []
    pread = os.pread

    def noted(fd: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(fd, size, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", noted)
        yield read


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "shard.pt"
    write_archive(path, RECORDS)
    return path


def test_records_are_found_by_name_whatever_the_prefix(tmp_path: Path) -> None:
    for prefix in ("archive", "bf16_zero_pp_rank_0_mp_rank_00_optim_states"):
        path = tmp_path / f"{prefix}.pt"
        write_archive(path, RECORDS, prefix)
        directory = directory_of(path)
        assert directory.prefix == prefix
        data = path.read_bytes()
        for name, content in RECORDS.items():
            record = directory.records[name]
            assert data[record.offset : record.offset + record.size] == content


def test_a_file_cut_anywhere_is_torn(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    cut = tmp_path / "cut.pt"
    for length in range(1, len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(TornArchiveError):
            directory_of(cut)


def test_a_file_whose_end_is_zeros_from_anywhere_is_torn(archive: Path, tmp_path: Path) -> None:
    """As a power cut leaves it: an end record without its fields named no records at all, and the file was
    refused as the zip of something else (simulated life 800595)."""
    whole = archive.read_bytes()
    zeroed = tmp_path / "zeroed.pt"
    for length in range(2, len(whole.rstrip(b"\0"))):
        zeroed.write_bytes(whole[:length] + bytes(len(whole) - length))
        with pytest.raises(TornArchiveError):
            directory_of(zeroed)


def test_a_bit_of_where_the_directory_lies_is_never_the_zip_of_something_else(archive: Path) -> None:
    """As the limits stand, a larger length was refused, and the file sent without a look at its CRCs."""
    whole = archive.read_bytes()
    for byte in range(len(whole) - 10, len(whole) - 2):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[byte] ^= 1 << bit
            archive.write_bytes(bytes(flipped))
            with pytest.raises(TornArchiveError):
                directory_of(archive)


def test_the_framing_follows_the_first_bytes(archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert framing_of(archive, expected=True) is Framing.ZIP
    other.write_bytes(b"")
    assert framing_of(other, expected=True) is Framing.EMPTY
    other.write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + b"x" * 10)
    assert framing_of(other, expected=True) is Framing.LEGACY
    other.write_bytes(b"\0" * 64)
    assert framing_of(other, expected=True) is Framing.TORN
    assert framing_of(other, expected=False) is Framing.OTHER


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_one_changed_byte_never_escapes_the_error_tree(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    path = tmp_path_factory.mktemp("flip") / "shard.pt"
    write_archive(path, RECORDS)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = value
    path.write_bytes(bytes(data))
    try:
        directory = directory_of(path)
    except CkptdError:
        return
    for record in directory.records.values():
        assert 0 <= record.offset <= record.offset + record.size <= len(data)


def test_compressed_and_encrypted_records_are_refused(tmp_path: Path, archive: Path) -> None:
    squeezed = tmp_path / "squeezed.pt"
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", b"x" * 1000)
    with pytest.raises(RefusedError, match="compressed"):
        directory_of(squeezed)
    data = bytearray(archive.read_bytes())
    central = data.index(b"PK\x01\x02")
    data[central + 8] |= 1
    archive.write_bytes(bytes(data))
    with pytest.raises(RefusedError, match="encrypted"):
        directory_of(archive)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [(42, 0x7FFFFFFF, "outside the file"), (24, 1 << 20, "compressed|leaves"), (42, 1, "no local header")],
)
def test_lying_directories_are_torn(archive: Path, field: int, value: int, words: str) -> None:
    data = bytearray(archive.read_bytes())
    central = data.index(b"PK\x01\x02")
    struct.pack_into("<L", data, central + field, value)
    archive.write_bytes(bytes(data))
    with pytest.raises(CkptdError, match=words):
        directory_of(archive)


def test_a_size_that_leaves_the_file_is_torn(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    central = data.index(b"PK\x01\x02", data.index(b"archive/data/0", data.index(b"PK\x01\x02")) - 60)
    struct.pack_into("<2L", data, central + 20, 1 << 20, 1 << 20)
    archive.write_bytes(bytes(data))
    with pytest.raises(TornArchiveError, match=r"leaves the file|overlapping"):
        directory_of(archive)


def test_overlapping_records_are_torn(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    central = data.index(b"PK\x01\x02")
    struct.pack_into("<2L", data, central + 20, 200, 200)  # data.pkl now reaches into what follows it
    archive.write_bytes(bytes(data))
    with pytest.raises(TornArchiveError, match="overlapping"):
        directory_of(archive)


def test_a_record_listed_twice_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt"
    with zipfile.ZipFile(path, "w") as out, pytest.warns(UserWarning, match="Duplicate"):
        out.writestr("archive/data.pkl", b"a")
        out.writestr("archive/version", b"3")
        out.writestr("archive/version", b"3")
    with pytest.raises(TornArchiveError, match="twice"):
        directory_of(path)


def test_a_zip_without_data_pkl_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.zip"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("readme", b"hello")
    with pytest.raises(RefusedError, match=r"data\.pkl"):
        directory_of(path)


def test_absurd_directories_are_refused_by_limits(archive: Path) -> None:
    with pytest.raises(RefusedError, match="records"):
        directory_of(archive, Limits(records=2))
    with pytest.raises(RefusedError, match="bytes"):
        directory_of(archive, Limits(directory_bytes=10))


def test_fingerprints_tell_contents_apart_and_know_replicas(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.pt" for i in range(4)]
    write_archive(paths[0], RECORDS)
    write_archive(paths[1], RECORDS)
    write_archive(paths[2], {**RECORDS, "data.pkl": b"\x80\x02]."})
    write_archive(paths[3], {**RECORDS, "data/0": bytes(2048)})
    prints = [fingerprints_of(p) for p in paths]
    assert prints[0] == prints[1]
    assert prints[0][0] != prints[2][0]
    assert prints[0][1] == prints[2][1], "replicas whose pickles differ have one tensor fingerprint"
    assert len({p[1] for p in prints}) == 2
    assert all(p[2] for p in prints)


def test_without_crcs_small_records_count_to_the_last_bit(archive: Path, tmp_path: Path) -> None:
    drop_crcs(archive)
    data = bytearray(archive.read_bytes())
    first = fingerprints_of(archive)
    assert not first[2]
    payload = data.index(bytes(range(256)))
    data[payload + 5] ^= 1
    archive.write_bytes(bytes(data))
    second = fingerprints_of(archive)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_without_crcs_little_of_a_large_archive_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shard.pt"
    write_archive(path, {**RECORDS, "data/1": bytes(64 << 20), "data/2": b"2" * 4096})
    drop_crcs(path)
    fd = os.open(path, os.O_RDONLY)
    directory = read_directory(fd, path.name)
    with bytes_read(monkeypatch) as read:
        first = fingerprint(fd, directory), tensor_fingerprint(fd, directory)
    assert sum(read) < 6 << 20
    data = bytearray(path.read_bytes())
    # a training step changes all of it: a thousandth of it is found
    at = directory.records["data/1"].offset + (30 << 20)
    data[at : at + (256 << 10)] = b"\1" * (256 << 10)
    path.write_bytes(bytes(data))
    second = fingerprint(fd, directory), tensor_fingerprint(fd, directory)
    assert first[0] != second[0]
    assert first[1] != second[1]
    os.close(fd)


def test_zips_one_behind_another_are_known_by_their_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `.distcp` files are, of any size."""
    for name, payload in (("a", b"a"), ("b", b"b")):
        write_archive(tmp_path / name, {**RECORDS, "data/0": payload * (8 << 20)})
    one, other = (tmp_path / name for name in ("a", "b"))
    shards = {}
    for name, parts in {"ab": (one, other), "ba": (other, one), "aa": (one, one)}.items():
        path = tmp_path / f"__{name}_0.distcp"
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
        fd = os.open(path, os.O_RDONLY)
        with bytes_read(monkeypatch) as read:
            shards[name] = fingerprint(fd, None)
        assert sum(read) < 1 << 20
        os.close(fd)
    assert len(set(shards.values())) == 3
    torn = tmp_path / "torn.distcp"
    torn.write_bytes(b"PK" + (tmp_path / "__ab_0.distcp").read_bytes())
    fd = os.open(torn, os.O_RDONLY)
    assert fingerprint(fd, None) == hashlib.sha256(torn.read_bytes()).hexdigest()
    os.close(fd)


def test_a_flipped_payload_bit_fails_the_crc(archive: Path) -> None:
    fd = os.open(archive, os.O_RDONLY)
    assert check_crcs(fd, directory_of(archive), "shard") == sum(map(len, RECORDS.values()))
    os.close(fd)
    data = bytearray(archive.read_bytes())
    data[data.index(bytes(range(256))) + 9] ^= 1
    archive.write_bytes(bytes(data))
    fd = os.open(archive, os.O_RDONLY)
    with pytest.raises(DamagedError, match="data/0"):
        check_crcs(fd, directory_of(archive), "shard")
    os.close(fd)
