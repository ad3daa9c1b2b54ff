"""A store in memory that counts what is asked of it: what a look costs must not grow with a run's age."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.stores.base import ObjectInfo


@dataclass
class CountingStore(MemoryStore):
    """`gets`: reads by key. Objects have times, as everywhere but in memory, so that they are cached."""

    gets: Counter[str] = field(default_factory=Counter)

    def get(self, key: str) -> bytes | None:
        self.gets[key] += 1
        return super().get(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in super().list(prefix):
            yield replace(info, mtime_ns=1 + hash(self.objects[info.key]) % 10**9)

    def count(self) -> int:
        """Reads since the last call."""
        found = sum(self.gets.values())
        self.gets.clear()
        return found
