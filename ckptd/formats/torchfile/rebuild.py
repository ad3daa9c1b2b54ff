"""Build as data what the calls in a `torch.save` pickle make: tensors, storages, dictionaries.

Everything else that a pickle would call becomes an `Inert`. docs/formats.md §2.4, §3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError, TornArchiveError
from ckptd.formats.torchfile.values import (
    ITEM_BYTES,
    STORAGE_DTYPES,
    Global,
    Inert,
    InertDict,
    Size,
    Storage,
    Tensor,
)

if TYPE_CHECKING:
    from ckptd.formats.torchfile.archive import Directory, Limits

_UNKNOWN = Global("", "<call of a non-global>")
_DICTIONARIES = {("collections", "OrderedDict"), ("collections", "defaultdict")}
_PASS_THROUGH = {"_rebuild_parameter", "_rebuild_parameter_with_state"}
_MAX_ELEMENTS = 1 << 56
_GETATTR = {("builtins", "getattr"), ("__builtin__", "getattr")}
_ZERO_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
"""Python 3.11.0 to 3.11.3 pickle an enum member as `getattr(class, name)`, later ones as `class(value)`."""


class Rebuilder:
    """Turns REDUCE, NEWOBJ and persistent ids into values; checks every bound against the directory."""

    def __init__(self, name: str, directory: Directory, limits: Limits) -> None:
        self.name = name
        self.directory = directory
        self.limits = limits
        self._storages: dict[tuple[str, str], Storage] = {}

    def call(self, function: Any, arguments: Any) -> Any:
        """REDUCE."""
        if not isinstance(arguments, tuple):
            raise RefusedError(f"{self.name}: data.pkl calls something with no argument tuple")
        if not isinstance(function, Global):
            return Inert(_UNKNOWN, (function, *arguments))
        if function.module == "torch._tensor" and function.name == "_rebuild_from_type_v2":
            inner = arguments[0] if arguments else None
            if len(arguments) == 4 and isinstance(inner, Global) and inner != function:
                return _named(self._known(inner, arguments[2]), arguments[3])
        return self._known(function, arguments)

    def _known(self, function: Global, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            raise RefusedError(f"{self.name}: data.pkl rebuilds a tensor with no argument tuple")
        key = (function.module, function.name)
        if key in _DICTIONARIES:
            return self._dictionary(function, arguments)
        if key in _GETATTR and len(arguments) == 2 and arguments[0] == _ZERO_STAGE:
            stage = _ZERO_STAGES.get(arguments[1]) if isinstance(arguments[1], str) else None
            return Inert(function, arguments) if stage is None else Inert(_ZERO_STAGE, (stage,))
        if key == ("torch", "Size"):
            return Size(self._integers(arguments[0] if len(arguments) == 1 else None))
        if function.module == "torch._utils":
            if function.name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
                return self._tensor(function.name, arguments)
            if function.name in _PASS_THROUGH and arguments and isinstance(arguments[0], Tensor):
                return arguments[0]
        return Inert(function, arguments)

    def new(self, cls: Any, arguments: Any) -> Any:
        """NEWOBJ, NEWOBJ_EX, OBJ and INST."""
        if not isinstance(arguments, tuple):
            raise RefusedError(f"{self.name}: data.pkl makes an object with no argument tuple")
        if not isinstance(cls, Global):
            return Inert(_UNKNOWN, (cls, *arguments), lossy=True)
        if (cls.module, cls.name) in _DICTIONARIES or (cls.module, cls.name) == ("torch", "Size"):
            return self._known(cls, arguments)
        return Inert(cls, arguments, made_by_new=True)

    def storage(self, pid: Any) -> Any:
        """A persistent id: `('storage', type, key, location, numel)`.

        Legacy files add a sixth item: None, or (key, start, elements) of a view into that storage.
        """
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Global):
            return pid[1]  # legacy files put a class's source beside its name
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] not in ("storage", b"storage"):
            raise RefusedError(f"{self.name}: data.pkl has a persistent id that is no storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        dtype = STORAGE_DTYPES.get(kind.name) if isinstance(kind, Global) else None
        if dtype is None or not isinstance(key, str) or not _is_count(numel):
            raise RefusedError(f"{self.name}: data.pkl describes a storage of unknown type")
        known = self._storages.get((key, dtype))
        if known is None or known.numel != numel:
            known = Storage(dtype, key, self.place(key, dtype, numel), numel * ITEM_BYTES[dtype], numel)
            self._storages[key, dtype] = known
        return known if len(pid) < 6 or pid[5] is None else self._view(known, pid[5])

    def place(self, key: str, dtype: str, numel: int) -> int:
        """Return the offset in the file at which a storage begins."""
        record = self.directory.records.get(f"data/{key}")
        if record is None:
            raise TornArchiveError(f"{self.name} lacks the record of storage {key}")
        nbytes = numel * ITEM_BYTES[dtype]
        if nbytes > record.size:
            raise TornArchiveError(
                f"{self.name}: storage {key} claims {nbytes} bytes, its record holds {record.size}"
            )
        return record.offset

    def _view(self, root: Storage, view: Any) -> Storage:
        """Return a part of a storage, as torch before 1.0 shared memory."""
        if not isinstance(view, tuple) or len(view) != 3 or not all(_is_count(n) for n in view[1:]):
            raise RefusedError(f"{self.name}: data.pkl describes a storage's view that is none")
        start, numel = view[1:]
        if start + numel > root.numel:
            raise TornArchiveError(f"{self.name}: a view leaves its storage {root.key}")
        item = ITEM_BYTES[root.dtype]
        return Storage(root.dtype, str(view[0]), root.offset + start * item, numel * item, numel)

    def _dictionary(self, origin: Global, arguments: tuple[Any, ...]) -> InertDict:
        pairs = arguments[-1] if arguments and isinstance(arguments[-1], list) else []
        made = InertDict(origin, arguments[:-1] if pairs else arguments)
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str | int):
                raise RefusedError(
                    f"{self.name}: data.pkl fills an OrderedDict with something that is no pair"
                )
            made[pair[0]] = pair[1]
        return made

    def _integers(self, values: Any) -> tuple[int, ...]:
        if not isinstance(values, list | tuple) or len(values) > self.limits.dimensions:
            raise RefusedError(f"{self.name}: data.pkl gives a tensor a shape that is none")
        if not all(_is_count(v) for v in values):
            raise RefusedError(f"{self.name}: data.pkl gives a tensor a negative or absurd size")
        return tuple(values)

    def _tensor(self, how: str, arguments: tuple[Any, ...]) -> Tensor:
        if len(arguments) < 4 or not isinstance(arguments[0], Storage):
            raise RefusedError(f"{self.name}: data.pkl rebuilds a tensor without a storage")
        storage, start = arguments[0], arguments[1]
        shape, stride = self._integers(arguments[2]), self._integers(arguments[3])
        dtype = storage.dtype
        if how == "_rebuild_tensor_v3":
            last = arguments[6] if len(arguments) > 6 else None
            dtype = last.name if isinstance(last, Global) and last.module == "torch" else ""
        if dtype not in ITEM_BYTES or not _is_count(start) or len(shape) != len(stride):
            raise RefusedError(f"{self.name}: data.pkl rebuilds a tensor of unknown type")
        tensor = Tensor(storage, dtype, start, shape, stride)
        if tensor.numel:
            last_element = start + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            if tensor.numel > _MAX_ELEMENTS or (last_element + 1) * ITEM_BYTES[dtype] > storage.nbytes:
                raise TornArchiveError(f"{self.name}: a tensor leaves its storage {storage.key}")
        return tensor


def _named(value: Any, attributes: Any) -> Any:
    """A tensor with the name that DeepSpeed gave it, where its attributes hold one."""
    name = attributes.get("ds_id") if isinstance(attributes, dict) else None
    return replace(value, ds_id=name) if isinstance(value, Tensor) and isinstance(name, str) else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ELEMENTS
