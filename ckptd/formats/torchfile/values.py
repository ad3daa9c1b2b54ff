"""Stand in for unpickled objects: inert values and byte ranges, which can run no code of a checkpoint.

The restricted unpickler yields them: a global is a pair of strings, an object is its arguments,
a tensor is a place in a file. docs/formats.md §2.4 lists the classes that occur.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
STORAGE_DTYPES: dict[str, str] = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
DTYPE_STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items() if name != "UntypedStorage"}


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle mentions; never imported."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Inert:
    """An object that was never made: what it would have been called with, and its state."""

    origin: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    made_by_new: bool = False
    """NEWOBJ rather than REDUCE: matters only for writing it again."""
    lossy: bool = False
    """It swallowed items or keyword arguments: it cannot be written again."""

    def field(self, name: str) -> Any:
        """Return an attribute of the pickled object's `__dict__` state; None when absent."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class InertDict(dict[Any, Any]):
    """A dictionary subclass (OrderedDict, defaultdict); `origin` names the class."""

    __slots__ = ("args", "origin")

    def __init__(self, origin: Global, args: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.origin = origin
        self.args = args


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A storage record: `numel` elements of `dtype` at `[offset, offset + nbytes)` of the file."""

    dtype: str
    key: str
    offset: int
    nbytes: int
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A view into a storage; offset and strides in elements. Bounds were checked when it was made."""

    storage: Storage
    dtype: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    ds_id: str = ""
    """Name that DeepSpeed gave it, of tensors that its NVMe offload swaps out."""

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.item_bytes

    @property
    def byte_offset(self) -> int:
        """Return the offset of element 0 in the file."""
        return self.storage.offset + self.start * self.item_bytes

    @property
    def contiguous(self) -> bool:
        """Tell whether the elements lie one after another in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True
