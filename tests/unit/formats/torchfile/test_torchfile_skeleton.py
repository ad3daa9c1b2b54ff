"""Headers around copied payloads: every archive is one our reader and the zip format accept."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.formats.torchfile.archive import read_directory
from ckptd.formats.torchfile.skeleton import BLOCK_BYTES, Skeleton, Slot, skeleton
from tests.support.reading import load


def fill(laid: Skeleton, payloads: list[bytes]) -> bytes:
    """The finished file."""
    return b"".join(chunk + payload for chunk, payload in zip(laid.chunks, [*payloads, b""], strict=True))


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9000), st.none() | st.integers(0, BLOCK_BYTES - 1)), max_size=5),
    pickle=st.binary(min_size=1, max_size=300),
)
def test_payloads_lie_where_they_were_wanted(
    tmp_path_factory: object, sizes: list[tuple[int, int | None]], pickle: bytes
) -> None:
    slots = [Slot(str(i), size, wanted) for i, (size, wanted) in enumerate(sizes)]
    laid = skeleton(pickle, slots)
    data = fill(laid, [bytes([i + 1]) * size for i, (size, _) in enumerate(sizes)])
    assert len(data) == laid.size
    path = Path(tmp_path_factory.mktemp("s")) / "x.pt"  # type: ignore[attr-defined]
    path.write_bytes(data)
    with path.open("rb") as stream:
        directory = read_directory(stream.fileno(), "x.pt")
    assert data[directory.records["data.pkl"].offset :].startswith(pickle)
    for i, (size, wanted) in enumerate(sizes):
        record = directory.records[f"data/{i}"]
        assert record.size == size
        assert record.crc == 0
        assert data[record.offset : record.offset + size] == bytes([i + 1]) * size
        modulus = 64 if wanted is None else BLOCK_BYTES
        assert record.offset % modulus == (wanted or 0) % modulus


def test_records_beyond_four_gigabytes_get_zip64_sizes(tmp_path: Path) -> None:
    big = (4 << 30) + 12
    laid = skeleton(b"\x80\x02N.", [Slot("0", big), Slot("1", 8)])
    path = tmp_path / "big.pt"
    with path.open("wb") as out:  # sparse: only headers are written
        out.write(laid.chunks[0])
        out.seek(big, 1)
        out.write(laid.chunks[1] + b"12345678" + laid.chunks[2])
    assert path.stat().st_size == laid.size
    with path.open("rb") as stream:
        directory = read_directory(stream.fileno(), "big.pt")
    assert directory.records["data/0"].size == big
    assert directory.records["data/1"].offset > big
    local = path.open("rb").read(4096)
    assert struct.pack("<2H2Q", 1, 16, big, big) in local


def test_the_smallest_archive_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(fill(skeleton(b"\x80\x02K\x07.", []), []))
    assert load(path)[0] == 7
