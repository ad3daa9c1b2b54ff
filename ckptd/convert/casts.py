"""Widening 16-bit and integer elements to float32 without numpy or torch, block by block.

Only the strict layout needs it, for the float32 copies of buffers and frozen parameters that the stock
converter of 0.19.8 writes and no loader reads (docs/formats.md §5).
"""

from __future__ import annotations

import sys
from array import array
from functools import cache

_CODES = {"float64": "d", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B", "bool": "B"}


def widen(data: bytes, dtype: str) -> bytes:
    """Little-endian elements of `dtype` as little-endian float32, bit-identical to `tensor.float()`."""
    if dtype == "bfloat16":
        out = bytearray(2 * len(data))
        out[2::4] = data[0::2]
        out[3::4] = data[1::2]
        return bytes(out)
    if dtype == "float16":
        table = _half_table()
        return _little(array("I", (table[int(h)] for h in _read("H", data))))
    return _little(array("f", (clamped(v) for v in _read(_CODES[dtype], data))))


def clamped(value: float) -> float:
    """array("f") raises on doubles beyond float32; torch gives an infinity."""
    if -3.4028235677973362e38 < value < 3.4028235677973362e38 or value != value:
        return value
    return float("inf") if value > 0 else float("-inf")


def _read(code: str, data: bytes) -> array[int] | array[float]:
    values: array[int] | array[float] = array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _little(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


@cache
def _half_table() -> tuple[int, ...]:
    """float32 bits of every float16, payloads of NaNs kept."""
    return tuple(_half_bits(h) for h in range(1 << 16))


def _half_bits(h: int) -> int:
    sign, exponent, mantissa = (h & 0x8000) << 16, (h >> 10) & 31, h & 0x3FF
    if exponent == 31:
        quiet = 0x400000 if mantissa else 0
        return sign | 0x7F800000 | quiet | (mantissa << 13)
    if exponent == 0:
        if mantissa == 0:
            return sign
        shift = 11 - mantissa.bit_length()
        return sign | ((113 - shift) << 23) | (((mantissa << shift) & 0x3FF) << 13)
    return sign | ((exponent + 112) << 23) | (mantissa << 13)
