"""Read the affine map that AutoTP records from DeepSpeed 0.19.8 on: pieces by offset and strides.

See docs/formats.md §2.5. A map overrides every pattern for the parameters that it names. A piece that several
ranks hold is taken from the first and compared with the others; a scaled piece is refused, since moments
would have to be rescaled and the optimizer's settings with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptd.errors import RefusedError
from ckptd.formats.zero.blocks import Block, sequence
from ckptd.formats.zero.facts import as_dict, as_int

VERSION = 1
_MAX_PIECES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """One parameter's map: full shape, shard shapes by rank, pieces."""

    shape: tuple[int, ...]
    shards: dict[int, tuple[int, ...]]
    pieces: tuple[Block, ...]

    def blocks(self, shapes: list[tuple[int, ...]]) -> tuple[list[Block], list[tuple[Block, Block]]]:
        """Pieces to use, and pairs of pieces that hold the same elements.

        Raises:
            RefusedError: the map is of other shards, or does not use each element of them once.
        """
        held = {rank: _count(shape) for rank, shape in self.shards.items()}
        if held != {rank: _count(shape) for rank, shape in enumerate(shapes)}:
            raise RefusedError(f"its affine map is of shards {self.shards}, the shards are {shapes}")
        for rank, count in held.items():
            sequence([_turned(piece) for piece in self.pieces if piece.rank == rank], count)
        first: dict[tuple[Any, ...], Block] = {}
        copies: list[tuple[Block, Block]] = []
        for piece in sorted(self.pieces, key=lambda piece: piece.rank):
            place = (piece.out, piece.shape, piece.out_strides)
            if place in first and _count(piece.shape):
                copies.append((first[place], piece))
            else:
                first.setdefault(place, piece)
        return list(first.values()), copies


def _count(shape: tuple[int, ...]) -> int:
    return prod(shape)


def _turned(piece: Block) -> Block:
    """Return the block of the same elements with shard and full parameter swapped."""
    return Block(piece.rank, piece.shape, piece.at, piece.strides, piece.out, piece.out_strides)


class Maps:
    """All maps of a checkpoint, read when a parameter asks."""

    def __init__(self, value: Any) -> None:
        info = as_dict(value)
        version = info.get("version", VERSION)
        if not isinstance(version, int) or version > VERSION:
            raise RefusedError(
                f"the checkpoint's affine map is of format {version}, ckptd knows {VERSION}",
                hint="the ZeRO form is safe all the same; update ckptd",
            )
        try:
            self._params = [(re.compile(str(p)), entry) for p, entry in as_dict(info.get("params")).items()]
        except re.error as error:
            raise RefusedError(f"the affine map holds an invalid pattern ({error})") from error

    def __bool__(self) -> bool:
        return bool(self._params)

    def find(self, name: str) -> Map | None:
        """Return the map of a parameter.

        Raises:
            RefusedError: two match, or it cannot be read.
        """
        found = [entry for pattern, entry in self._params if pattern.match(name)]
        if len(found) > 1:
            raise RefusedError("it matches more than one affine map")
        return _map(as_dict(found[0])) if found else None


def _map(entry: dict[Any, Any]) -> Map:
    shards: dict[int, tuple[int, ...]] = {}
    pieces: list[Block] = []
    for key, value in as_dict(entry.get("ranks")).items():
        rank = int(key) if isinstance(key, str) and key.isdecimal() else as_int(key)
        listed = as_dict(value).get("pieces")
        if rank is None or not isinstance(listed, list) or len(pieces) + len(listed) > _MAX_PIECES:
            raise RefusedError("its affine map is unreadable")
        shards[rank] = _integers(as_dict(value).get("shard_shape"))
        pieces += [_piece(rank, as_dict(piece)) for piece in listed]
    return Map(shape=_integers(entry.get("logical_shape")), shards=shards, pieces=tuple(pieces))


def _piece(rank: int, piece: dict[Any, Any]) -> Block:
    if piece.get("scale", 1.0) != 1.0:
        raise RefusedError(
            "its shards are scaled (a pre-divided bias of a row-parallel layer), and so would be its moments",
            hint="the stock converter refuses it too; the ZeRO form is safe all the same",
        )
    shape = _integers(piece.get("shape"))
    (out, out_strides), (at, strides) = _place(piece.get("source")), _place(piece.get("dest"))
    if len(shape) != len(out_strides) or len(shape) != len(strides):
        raise RefusedError("its affine map has a piece of contradicting dimensions")
    return Block(rank, shape, out, out_strides, at, strides)


def _place(value: Any) -> tuple[int, tuple[int, ...]]:
    if not isinstance(value, list | tuple) or len(value) != 2 or (as_int(value[0]) or 0) < 0:
        raise RefusedError("its affine map has an unreadable piece")
    return as_int(value[0]) or 0, _integers(value[1])


def _integers(value: Any) -> tuple[int, ...]:
    numbers = [as_int(v) for v in value] if isinstance(value, list | tuple) else [None]
    if any(n is None or n < 0 for n in numbers):
        raise RefusedError("its affine map holds a shape or strides that are unreadable")
    return tuple(n for n in numbers if n is not None)
