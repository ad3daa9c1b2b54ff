"""The daemon's own memory: what a burst of work took goes back, for the RAM is the trainer's (P12)."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_M_ARENA_MAX = -8
_ARENAS = 2


def keep_small() -> None:
    """Before the first thread: few arenas, else each keeps what its threads once needed (glibc alone)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Hand free pages back to the kernel (glibc alone)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, no search for cycles: a plan makes none, and with many records a search costs as much as it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def tree_bytes() -> int:
    """Resident bytes of this process and its children."""
    process = psutil.Process(os.getpid())
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
