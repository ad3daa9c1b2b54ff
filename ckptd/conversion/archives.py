"""Plan a `torch.save` archive whose tensors are parts of source files: header, payloads, tail."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from ckptd.conversion.parts import Literal, Part, Range
from ckptd.formats.torchfile.repickle import repickle
from ckptd.formats.torchfile.skeleton import BLOCK_BYTES, Slot, skeleton
from ckptd.formats.torchfile.values import ITEM_BYTES, Storage, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

CLONE_WORTH_BYTES = 64 << 10
Ranges = Callable[[Tensor], "tuple[Part, ...]"]
"""The parts that fill a tensor's storage."""


def archive_parts(
    value: Any, name: str, ranges: Ranges, *, block: bool, at: int = 0, span: int | None = None
) -> tuple[Part, ...]:
    """Return the parts of an archive of `value` at byte `at` of a file.

    Args:
        name: only for messages.
        block: place storages so that their largest range can be cloned.
        span: elements of the one storage whose tensor is strided.

    Raises:
        RefusedError: `value` holds what cannot be written as data.
    """
    pickled = repickle(value, name, spans={0: span} if span is not None else None)
    filled = [ranges(tensor) for tensor in pickled.tensors]
    slots = [
        Slot(
            str(i), sum(p.nbytes for p in parts), _congruence(parts, tensor.item_bytes, at) if block else None
        )
        for i, (parts, tensor) in enumerate(zip(filled, pickled.tensors, strict=True))
    ]
    laid = skeleton(pickled.data, slots)
    made: list[Part] = []
    for chunk, payload in zip(laid.chunks, [*filled, ()], strict=True):
        made.append(Literal(chunk))
        made.extend(payload)
    return tuple(made)


def _congruence(parts: Sequence[Part], item_bytes: int, at: int) -> int | None:
    """Return the offset in the archive modulo the block at which a storage's largest range can be cloned.

    Never between two elements' natural places: in a legacy file a storage may begin at any byte.
    """
    into, best, wanted = 0, CLONE_WORTH_BYTES, None
    for part in parts:
        aligned = isinstance(part, Range) and (part.offset - into) % item_bytes == 0
        if isinstance(part, Range) and aligned and part.nbytes >= best:
            best, wanted = part.nbytes, (part.offset - into - at) % BLOCK_BYTES
        into += part.nbytes
    return wanted


def ranges_in(source: int) -> Ranges:
    """Return the rule for tensors that lie in one source file as they are."""
    return lambda tensor: (Range(source, tensor.byte_offset, tensor.nbytes),)


def placeholder(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor value that only the header needs."""
    numel = prod(shape)
    storage = Storage(dtype, "0", 0, numel * ITEM_BYTES[dtype], numel)
    stride = tuple(prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(storage, dtype, 0, shape, stride)
