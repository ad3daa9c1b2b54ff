"""Limit the cost of reading a shard: every count and size that a hostile file could inflate.

They stand in one place, so that the reader, the unpickler and the tests speak of the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds; a file beyond one of them is refused with a sentence, not read further."""

    directory_bytes: int = 64 << 20
    """Central directory of the zip."""
    records: int = 500_000
    name_bytes: int = 4096
    pickle_bytes: int = 64 << 20
    """`data.pkl`: kilobytes for a shard, some megabytes with a large client_state."""
    operations: int = 8_000_000
    """Pickle opcodes executed."""
    memo_entries: int = 4_000_000
    key_depth: int = 6
    """Nesting of tuples used as dictionary keys (a deeper one could hash for ever)."""
    key_items: int = 1_000_000
    """Items of all tuples used as keys: few nested ones that share their items hash for ever, too."""
    dimensions: int = 64
    line_bytes: int = 4096
    """Text-mode opcodes (protocol 0) end at a newline within this."""


DEFAULT_LIMITS = Limits()
