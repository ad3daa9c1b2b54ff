"""Describe a parameter as ranges of source files, for all stages alike (docs/formats.md §4)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` bytes at `offset` of source file `source`."""

    source: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StateRanges:
    """One state of one parameter: its pieces in order make the flattened full tensor."""

    name: str
    dtype: str
    item_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A full parameter: name, real shape, states (fp32 first), scalar states (the step) as they are.

    `scalar_source` is the index of the file that scalar tensors lie in. `experts` > 0: that many
    expert-parallel ranks' tensors, each of `shape`, follow one another in the pieces (docs/formats.md §7.1).
    """

    name: str
    shape: tuple[int, ...]
    states: tuple[StateRanges, ...]
    scalars: dict[str, Any]
    scalar_source: int
    experts: int = 0

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return max(1, self.experts) * prod(self.shape)
