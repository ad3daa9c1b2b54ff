"""How large the parts of an upload are: at most 10,000 of them, each at most 5 GiB (the limits of S3)."""

from __future__ import annotations

import pytest

from ckptd.errors import RefusedError
from ckptd.storage.stores.s3.uploads import MAX_PART_BYTES, MAX_PARTS, MIN_PART_BYTES, part_size

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
SIZES = [
    *(0, 1, 5 * MIB, 5 * MIB * MAX_PARTS, 5 * MIB * MAX_PARTS + 1, 16 * MIB * 9_000 + 1),
    *(16 * MIB * MAX_PARTS, 16 * MIB * MAX_PARTS + 1, 400 * GIB, 5 * TIB, 40 * TIB),
]
MOST = MAX_PARTS * MAX_PART_BYTES


@pytest.mark.parametrize("wanted", [None, 5 * MIB, 16 * MIB, 100 * MIB, GIB, MAX_PART_BYTES])
@pytest.mark.parametrize("size", SIZES)
def test_never_more_than_ten_thousand_parts(size: int, wanted: int | None) -> None:
    chosen = part_size(size, wanted)
    assert -(-size // chosen) <= MAX_PARTS
    assert (wanted or MIN_PART_BYTES) <= chosen <= MAX_PART_BYTES
    if chosen > (wanted or MIN_PART_BYTES):
        # larger only as far as it must be
        assert chosen % MIB == 0
        assert size > (wanted or MIN_PART_BYTES) * 9_000


def test_what_was_asked_for_holds_as_long_as_it_can() -> None:
    assert part_size(5 * MIB * MAX_PARTS, 5 * MIB) == 5 * MIB
    assert part_size(5 * MIB * MAX_PARTS + 1, 5 * MIB) == 6 * MIB
    assert part_size(3 * TIB, None) > MIN_PART_BYTES


def test_too_large_for_s3_is_refused_in_words() -> None:
    with pytest.raises(RefusedError) as caught:
        part_size(MOST + 1, 5 * MIB)
    assert "10000 parts" in caught.value.message
    assert "shards" in caught.value.hint
    assert part_size(MOST, 5 * MIB) == MAX_PART_BYTES
