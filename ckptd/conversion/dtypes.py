"""Convert elements block by block: widen to float32 in pure Python, round to 16 bits with numpy.

Only the strict universal layout widens, for the float32 copies of buffers and frozen parameters that the
stock converter of 0.19.8 writes and no loader reads (docs/formats.md §5).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import struct
import sys
from array import array
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from ckptd.conversion.parts import FLOAT_BYTES
from ckptd.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

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


# --- Comparing masters with the 16-bit weights that they round to -----------------------------------------
# Every conversion compares, so this works without numpy too: integers of many digits round 65,536 elements
# to bfloat16 at once, 8 ns each, of float16 one takes 60 ns. With numpy it is 1.3 and 6 ns.

_HALF_END = 65520.0
"""The least number that float16 rounds to infinity."""


def first_unequal(masters: bytes, weights: bytes, source: str, target: str) -> int | None:
    """Return the number of the first element that as type `target` is not the weight; None: there is none.

    `masters`: of type `source`, float32 unless the types are one. Where they are rounded, any NaN is equal to
    any other.
    """
    count = len(masters) // FLOAT_BYTES[source]
    if len(weights) != count * FLOAT_BYTES[target]:
        return min(count, len(weights) // FLOAT_BYTES[target])
    if source == target:
        if masters == weights:
            return None
        item = FLOAT_BYTES[source]
        return next(i for i in range(count) if masters[i * item :][:item] != weights[i * item :][:item])
    infinite = 0x7F80 if target == "bfloat16" else 0x7C00
    if _has_numpy():
        if target == "bfloat16":
            return _first_not_bfloat16(masters, weights)
        return _first_differing(cast(masters, "float32", target), weights, infinite)
    rounded = _rounded(masters, target)
    if rounded == weights:
        return None
    halves = _read("H", weights)
    doubtful = range(count) if rounded is None else _differing(_read("H", rounded), halves)
    bits, exact = _read("I", masters), _bf16_of if target == "bfloat16" else _half_of
    for number in doubtful:
        master, weight = int(bits[number]), int(halves[number])
        is_nan = master & 0x7FFFFFFF > 0x7F800000
        if weight & 0x7FFF <= infinite if is_nan else exact(master) != weight:
            return number
    return None


def _first_not_bfloat16(masters: bytes, weights: bytes) -> int | None:
    """Round only the masters that lie half a step or more from their weight, or may be NaN: few, or all of
    a wrong tensor.
    """
    np = _numpy()
    bits, halves = np.frombuffer(masters, dtype="<u4"), np.frombuffer(weights, dtype="<u2")
    apart = halves.astype("<u4")
    apart <<= np.uint32(16)
    np.subtract(bits, apart, out=apart)
    apart += np.uint32(0x7FFF)
    if not apart.size or (apart.max() < 0xFFFF and not np.isnan(bits.view("<f4").max())):
        return None
    doubtful = np.flatnonzero((apart >= np.uint32(0xFFFF)) | np.isnan(bits.view("<f4")))
    rounded = cast(bits[doubtful].tobytes(), "float32", "bfloat16")
    found = _first_differing(rounded, halves[doubtful].tobytes(), 0x7F80)
    return None if found is None else int(doubtful[found])


def _first_differing(rounded: bytes, weights: bytes, infinite: int) -> int | None:
    np = _numpy()
    one, other = np.frombuffer(rounded, dtype="<u2"), np.frombuffer(weights, dtype="<u2")
    if not (differ := one != other).any():
        return None
    differ &= ((one & 0x7FFF) <= infinite) | ((other & 0x7FFF) <= infinite)
    return int(differ.argmax()) if differ.any() else None


def _differing(one: array[int] | array[float], other: array[int] | array[float]) -> Iterator[int]:
    return (number for number, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def _rounded(masters: bytes, target: str) -> bytes | None:
    """Round float32 to 16 bits without numpy; None: bfloat16 of what holds an infinity or a NaN, for their
    lanes may run over.
    """
    if target == "bfloat16":
        of = functools.partial(_lanes, len(masters) // 4)
        bits = int.from_bytes(masters, "little")
        if ((bits & of(0x7F800000)) + of(0x00800000)) & of(0x80000000):
            return None
        bits += of(0x7FFF) + ((bits >> 16) & of(1))
        return _little(_read("H", bits.to_bytes(len(masters), "little"))[1::2])
    values = _read("f", masters)
    with contextlib.suppress(OverflowError):
        return struct.pack(f"<{len(values)}e", *values)
    return struct.pack(f"<{len(values)}e", *(v if abs(v) < _HALF_END else v * math.inf for v in values))


@cache
def _has_numpy() -> bool:
    """Tell whether numpy can be imported; one that breaks while it is does without."""
    with contextlib.suppress(UsageError, RuntimeError, AttributeError, OSError):
        return bool(_numpy())
    return False


@lru_cache(maxsize=10)
def _lanes(count: int, value: int) -> int:
    """Return `count` times the same 32 bits as one number."""
    return int.from_bytes(value.to_bytes(4, "little") * count, "little")


def _bf16_of(bits: int) -> int:
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _half_of(bits: int) -> int:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    with contextlib.suppress(OverflowError):
        (half,) = struct.unpack("<H", struct.pack("<e", value))
        return int(half)
    return 0x7C00 | bits >> 16 & 0x8000


# --- Rounding to bfloat16 and float16 with numpy, at the speed of memory (ADR 0082) ----------------------
# Only this part of ckptd uses numpy: pure Python would take minutes where writing takes seconds. The
# executor child imports it, when 16-bit weights are made or compared; the extra is `ckptd[weights]`.

ROUNDED = ("bfloat16", "float16")
FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Element types that a cast reads."""


def numpy_folder() -> str:
    """Return the folder to import numpy from, for a child that starts without site-packages.

    Raises:
        UsageError: numpy is not installed.
    """
    found = importlib.util.find_spec("numpy")
    if found is None or found.origin is None:
        raise UsageError(
            "rounding weights to 16 bits needs numpy",
            hint="pip install 'ckptd[weights]', or --form weights-fp32, which needs none",
        )
    return os.path.dirname(os.path.dirname(found.origin))


def use_numpy_of(folder: str) -> None:
    """Let this process import numpy from `folder` when it rounds, without its linear algebra's threads."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    _numpy_folders.append(folder)


_numpy_folders: list[str] = []
"""Folders that are on the path while numpy is imported: this process has no site-packages."""


@cache
def _numpy() -> ModuleType:
    before = list(sys.path)
    sys.path += _numpy_folders
    try:
        import numpy
    except ImportError as error:
        raise UsageError(
            f"numpy cannot be loaded ({error})", hint="pip install 'ckptd[weights]', or --form weights-fp32"
        ) from error
    finally:
        sys.path[:] = before
    return numpy


def cast(data: bytes, source: str, target: str) -> bytes:
    """Little-endian elements of type `source` as `target` (torch's names), as `tensor.to()` gives them.

    Rounds to nearest, ties to even; beyond the largest number comes infinity; a NaN stays a NaN of its
    sign (its payload torch chooses by CPU). float64 goes through float32, as in torch.
    """
    if source == target:
        return data
    if target == "float32":
        return widen(data, source)
    if target not in ROUNDED or source not in FLOATS:
        raise RefusedError(f"there is no cast from {source} to {target}")
    np = _numpy()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = _as_float32(np, data, source)
        rounded = _bfloat16(np, values) if target == "bfloat16" else _float16(np, values)
    return rounded.tobytes()  # type: ignore[no-any-return]


def _as_float32(np: Any, data: bytes, source: str) -> Any:
    if source == "float32":
        return np.frombuffer(data, dtype="<f4")
    if source == "float64":
        return np.frombuffer(data, dtype="<f8").astype("<f4")
    return np.frombuffer(widen(data, source), dtype="<f4")


def _bfloat16(np: Any, values: Any) -> Any:
    """Return the upper halves, after half a step and the lowest kept bit were added."""
    bits = values.view("<u4")
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    upper = rounded.view("<u2")[1::2]
    _keep_nans(np, values, upper, lambda nans: (nans >> np.uint32(16)) | np.uint32(0x40))
    return upper


def _float16(np: Any, values: Any) -> Any:
    rounded = values.astype("<f2").view("<u2")

    def quiet(nans: Any) -> Any:
        sign = (nans >> np.uint32(16)) & np.uint32(0x8000)
        return sign | np.uint32(0x7E00) | ((nans >> np.uint32(13)) & np.uint32(0x3FF))

    _keep_nans(np, values, rounded, quiet)
    return rounded


def _keep_nans(np: Any, values: Any, rounded: Any, quiet: Any) -> None:
    nans = np.isnan(values)
    if nans.any():
        rounded[nans] = quiet(values.view("<u4")[nans]).astype("<u2")
