"""Divide the --memory-budget of a worker process, and keep to it (docs/internals/conversion.md).

Every buffer is counted: what does not fit is not begun. What is freed goes back to the kernel at once, for a
heap that keeps it breaks the promise as well as one that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.base.process import limit_malloc

MIB = 1 << 20
BASE_BYTES = 128 * MIB
"""A dask worker with ckptd, numpy and a client of S3."""
LANE_BYTES = 24 * MIB
"""An output, or a part of one, on its way."""
HELD_BYTES = 16 * MIB
"""Bytes that a lane holds: what is sent is made once, and held up to this size. The rest of the lane is a
block on its way in, one on its way out, and the streams in which an output is read back."""
LEAST_CACHE_BYTES = 8 * MIB
MOST_CACHE_BYTES = 24 * MIB
MOST_LANES = 3
MOST_TASKS = 4
TASK_BYTES = MOST_CACHE_BYTES + MOST_LANES * LANE_BYTES
LEAST_BUDGET_BYTES = BASE_BYTES + LEAST_CACHE_BYTES + LANE_BYTES

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = {_M_ARENA_MAX: 2, _M_MMAP_THRESHOLD: 256 << 10, _M_TRIM_THRESHOLD: 1 * MIB}


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Divide a memory budget: `tasks` at a time, each with `lanes` and a cache of blocks."""

    tasks: int
    lanes: int
    cache_bytes: int

    @property
    def bytes(self) -> int:
        """Return the memory of all tasks and of the process that runs them."""
        return BASE_BYTES + self.tasks * (self.cache_bytes + self.lanes * LANE_BYTES)


def shares_of(budget_bytes: int) -> MemoryShares:
    """Divide a budget of `LEAST_BUDGET_BYTES` or more: first among tasks, then lanes, then the cache."""
    room = budget_bytes - BASE_BYTES
    tasks = max(1, min(MOST_TASKS, room // TASK_BYTES))
    share = room // tasks
    lanes = max(1, min(MOST_LANES, (share - LEAST_CACHE_BYTES) // LANE_BYTES))
    cache = max(LEAST_CACHE_BYTES, min(MOST_CACHE_BYTES, share - lanes * LANE_BYTES))
    return MemoryShares(tasks, lanes, cache)


def keep_small() -> None:
    """Few arenas, and large blocks mapped one by one: glibc would keep those of every thread (glibc alone).

    Fixed, the threshold does not rise with each block that is freed, up to 32 MiB, as it would by itself.
    """
    limit_malloc(_SETTINGS)
