"""Writing inert values back as a protocol 2 pickle that `torch.load` understands.

Needed for what is not a byte copy: the small `optimizer_state.pt` with DeepSpeed's own classes, and the
headers of parameter files. Classes are named by GLOBAL opcodes, never imported (docs/formats.md §2.4).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from ckptd.errors import RefusedError
from ckptd.formats.torchfile.values import DTYPE_STORAGES, Global, Inert, InertDict, Size, Tensor

_MAX_DEPTH = 200
WRITABLE = frozenset(
    Global(module, name)
    for module, names in {
        "builtins": ("set", "frozenset", "complex", "int", "float", "list", "dict", "tuple"),
        "__builtin__": ("set", "frozenset", "complex", "int", "float", "list", "dict", "tuple"),
        "_codecs": ("encode",),
        "collections": ("OrderedDict", "defaultdict"),
        "torch": ("Size", "device", *DTYPE_STORAGES, *DTYPE_STORAGES.values()),
        "torch._utils": ("_rebuild_tensor_v2",),
        "numpy": ("dtype", "ndarray"),
        "numpy.core.multiarray": ("scalar", "_reconstruct"),
        "numpy._core.multiarray": ("scalar", "_reconstruct"),
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
        "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
        "deepspeed.checkpoint.universal_checkpoint": ("SubparamShape",),
    }.items()
    for name in names
)
"""Names that hold data. A name outside is refused, or a hostile shard would run its code through our file."""


def _long4(nbytes: int) -> bytes:
    return b"\x8b" + struct.pack("<i", nbytes)


@dataclass(slots=True)
class Pickled:
    """`data` is the pickle; `tensors[i]` is the payload of storage key `str(i)`."""

    data: bytes
    tensors: list[Tensor] = field(default_factory=list)


def repickle(
    value: Any, name: str, *, spans: dict[int, int] | None = None, writable: frozenset[Global] = WRITABLE
) -> Pickled:
    """Pickle plain values, `Inert`, `InertDict`, `Size`, `Global` and contiguous `Tensor`s.

    `name` is only used in messages; `spans` gives the storage length in elements of the i-th tensor where
    it is not its number of elements, and permits it to be strided.

    Raises:
        RefusedError: a value that cannot be written faithfully.
    """
    writer = _Writer(name, spans or {}, writable)
    writer.out += b"\x80\x02"
    writer.write(value, 0)
    writer.out += b"."
    return Pickled(bytes(writer.out), writer.tensors)


class _Writer:
    """One pickle being written; containers are memoized, so sharing and cycles survive."""

    def __init__(self, name: str, spans: dict[int, int], writable: frozenset[Global]) -> None:
        self.name = name
        self.writable = writable
        self.spans = spans
        self.out = bytearray()
        self.tensors: list[Tensor] = []
        self.memo: dict[int, int] = {}
        self.alive: list[Any] = []

    def write(self, value: Any, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise RefusedError(f"{self.name}: the optimizer's state nests deeper than {_MAX_DEPTH} levels")
        if id(value) in self.memo:
            self.out += b"j" + struct.pack("<I", self.memo[id(value)])
        elif value is None or isinstance(value, bool | int | float | str | bytes):
            self._plain(value)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, Global):
            self._global(value)
        else:
            self._container(value, depth + 1)

    def _remember(self, value: Any) -> None:
        self.memo[id(value)] = len(self.memo)
        self.alive.append(value)
        self.out += b"r" + struct.pack("<I", self.memo[id(value)])

    def _plain(self, value: Any) -> None:
        if value is None or isinstance(value, bool):
            self.out += b"N" if value is None else b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            if -(1 << 31) <= value < 1 << 31:
                self.out += b"J" + struct.pack("<i", value)
            else:
                raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
                # `torch.load(weights_only=True)` reads the short form alone
                self.out += (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else _long4(len(raw))) + raw
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(raw)) + raw
        else:  # bytes, as protocol 2 writes them
            self._global(Global("_codecs", "encode"))
            self._plain(value.decode("latin-1"))
            self._plain("latin1")
            self.out += b"\x86R"

    def _global(self, value: Global) -> None:
        if value not in self.writable:
            raise RefusedError(
                f"{self.name}: the optimizer's state names {value.module}.{value.name}, not known to be data",
                hint="ckptd writes no pickle that could run code; the ZeRO form is safe all the same",
            )
        self.out += b"c" + f"{value.module}\n{value.name}\n".encode()

    def _tensor(self, value: Tensor) -> None:
        storage_type = DTYPE_STORAGES.get(value.dtype)
        span = self.spans.get(len(self.tensors))
        if storage_type is None or (span is None and not value.contiguous):
            raise RefusedError(
                f"{self.name}: the optimizer's state holds a {value.dtype} tensor that is no plain range"
            )
        self._global(Global("torch._utils", "_rebuild_tensor_v2"))
        self.out += b"(("
        self._plain("storage")
        self._global(Global("torch", storage_type))
        self._plain(str(len(self.tensors)))
        self._plain("cpu")
        self._plain(value.numel if span is None else span)
        self.out += b"tQ"
        self._plain(0)
        self.write(tuple(value.shape), 0)
        self.write(tuple(value.stride), 0)
        self._plain(False)
        self._global(Global("collections", "OrderedDict"))
        self.out += b")RtR"
        self.tensors.append(value)
        self._remember(value)

    def _container(self, value: Any, depth: int) -> None:
        if isinstance(value, Size):
            self._global(Global("torch", "Size"))
            self.write(tuple(value), depth)
            self.out += b"\x85R"
        elif isinstance(value, tuple):
            self.out += b"("
            for item in value:
                self.write(item, depth)
            self.out += b"t"
            self._remember(value)
        elif isinstance(value, list):
            self.out += b"]"
            self._remember(value)
            self._items(value, depth, b"e")
        elif isinstance(value, InertDict):
            self._global(value.origin)
            self.write(value.args, depth)
            self.out += b"R"
            self._remember(value)
            self._items([x for pair in value.items() for x in pair], depth, b"u")
        elif isinstance(value, dict):
            self.out += b"}"
            self._remember(value)
            self._items([x for pair in value.items() for x in pair], depth, b"u")
        elif isinstance(value, set | frozenset):
            self._global(Global("builtins", type(value).__name__))
            self.write(list(value), depth)
            self.out += b"\x85R"
        elif isinstance(value, Inert):
            self._inert(value, depth)
        else:
            raise RefusedError(f"{self.name}: the optimizer's state holds a {type(value).__name__}")

    def _items(self, values: list[Any], depth: int, closing: bytes) -> None:
        if values:
            self.out += b"("
            for item in values:
                self.write(item, depth)
            self.out += closing

    def _inert(self, value: Inert, depth: int) -> None:
        if value.lossy:
            kind = f"{value.origin.module}.{value.origin.name}"
            raise RefusedError(
                f"{self.name}: the optimizer's state holds a {kind}, which cannot be written again"
            )
        self._global(value.origin)
        self.write(value.args, depth)
        self.out += b"\x81" if value.made_by_new else b"R"
        self._remember(value)
        if value.state is not None:
            self.write(value.state, depth)
            self.out += b"b"
