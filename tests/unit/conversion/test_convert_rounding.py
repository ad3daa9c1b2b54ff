"""Casts to 16 bits against torch and against the rules written out: every bit but the payload of NaNs."""

from __future__ import annotations

import importlib.util
import math
import struct
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.conversion.dtypes import cast, numpy_folder
from ckptd.conversion.parts import Cast, Mean, Range, decode, encode, ranges_of
from ckptd.errors import RefusedError, UsageError

TYPES = {"float64": "d", "float32": "f", "float16": "e"}
BITS32 = st.integers(0, 2**32 - 1) | st.builds(
    lambda high, low: (high << 16) | low,
    st.integers(0, 0xFFFF),
    st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0xFFF, 0x1001, 0x3000]),
)
"""Any float32, and those that lie on, just below and just above the middle of two bfloat16 or float16."""


def bfloat16_by_rule(bits: int) -> int:
    """Nearest by distance, the even one of two; written as arithmetic on neighbours, not as bit tricks."""
    low, rest = bits >> 16, bits & 0xFFFF
    up = rest > 0x8000 or (rest == 0x8000 and low & 1 == 1)
    return low + up


def is_nan16(bits: int, target: str) -> bool:
    return (bits & 0x7FFF) > (0x7F80 if target == "bfloat16" else 0x7C00)


@given(st.lists(BITS32, min_size=1, max_size=50))
def test_bfloat16_is_the_nearest_even(values: list[int]) -> None:
    data = struct.pack(f"<{len(values)}I", *values)
    for bits, made in zip(
        values, struct.unpack(f"<{len(values)}H", cast(data, "float32", "bfloat16")), strict=True
    ):
        if math.isnan(struct.unpack("<f", struct.pack("<I", bits))[0]):
            assert is_nan16(made, "bfloat16")
            assert made >> 15 == bits >> 31
        else:
            assert made == bfloat16_by_rule(bits)


@given(st.lists(BITS32, min_size=1, max_size=50))
def test_float16_is_what_struct_packs(values: list[int]) -> None:
    data = struct.pack(f"<{len(values)}I", *values)
    for bits, made in zip(
        values, struct.unpack(f"<{len(values)}H", cast(data, "float32", "float16")), strict=True
    ):
        (value,) = struct.unpack("<f", struct.pack("<I", bits))
        if math.isnan(value):
            assert is_nan16(made, "float16")
            continue
        try:
            (expected,) = struct.unpack("<H", struct.pack("<e", value))
        except OverflowError:
            expected = 0xFC00 if value < 0 else 0x7C00
        assert made == expected


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16", "float16"])
def test_a_million_elements_as_torch_casts_them(source: str, target: str) -> None:
    if source == target:
        return
    generator = torch.Generator().manual_seed(5)
    wide = {"float64": torch.int64, "float32": torch.int32}.get(source, torch.int16)
    limits = torch.iinfo(wide)
    bits = torch.randint(limits.min, limits.max, (1 << 20,), generator=generator, dtype=wide)
    if wide == torch.int16:
        bits[: 1 << 16] = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    values = bits.view(getattr(torch, source))
    if source == "float64":  # random doubles lie beyond everything: half of them between 2**-30 and 2**30
        values[::2] = torch.exp2(60 * torch.rand(1 << 19, generator=generator, dtype=torch.float64) - 30)
    expected = values.to(getattr(torch, target))
    raw = cast(values.view(torch.uint8).numpy().tobytes(), source, target)
    made = torch.frombuffer(bytearray(raw), dtype=getattr(torch, target))
    nans = torch.isnan(values)
    assert torch.equal(torch.isnan(made), nans)
    kind = torch.int32 if target == "float32" else torch.int16
    assert torch.equal(made.view(kind)[~nans], expected.view(kind)[~nans])


def test_a_cast_part_survives_the_plan() -> None:
    ranges = (Range(1, 40, 8), Range(2, 0, 4))
    for part in (
        Cast(ranges, 3, "float32", "bfloat16"),
        Cast((Mean((ranges, ranges), 3),), 3, "float32", "float16"),
    ):
        assert decode(encode(part)) == part
        assert part.nbytes == 6
        assert set(ranges_of(part)) == set(ranges)


def test_types_that_cannot_be_cast_are_refused() -> None:
    with pytest.raises(RefusedError, match="int64"):
        cast(b"\0" * 8, "int64", "bfloat16")


def test_without_numpy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'ckptd\[weights\]'"):
        numpy_folder()


def test_the_folder_of_numpy_is_where_it_is_imported_from() -> None:
    import numpy as np

    assert np.__file__.startswith(numpy_folder())
    assert numpy_folder() in sys.path
