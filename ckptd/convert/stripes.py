"""A large file made by several threads: its parts in stripes, each written and flushed by one thread.

Universal checkpoints are thousands of files, so there a thread per file is enough; weights are a few files of
gigabytes, of tensors between bytes and gigabytes. Stripes also bound what is dirty at a time (P12).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckptd.convert.parts import FLOAT_BYTES, Cast, Part, Range

STRIPE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Stripe:
    """Parts one after another from byte `at` of the output, about `STRIPE_BYTES` of them."""

    at: int
    nbytes: int
    parts: tuple[Part, ...]


def stripes(parts: Iterable[Part], *, divide_ranges: bool) -> Iterator[Stripe]:
    """Parts as stripes; ranges that will be cloned are left whole, for that costs nothing."""
    begin = at = 0
    held: list[Part] = []
    for part in parts:
        for piece in _pieces(part, divide_ranges=divide_ranges):
            held.append(piece)
            at += piece.nbytes
            if at - begin >= STRIPE_BYTES:
                yield Stripe(begin, at - begin, tuple(held))
                begin, held = at, []
    if held:
        yield Stripe(begin, at - begin, tuple(held))


def _pieces(part: Part, *, divide_ranges: bool) -> Iterator[Part]:
    """Ranges and casts of ranges can be cut anywhere; whatever else is arranged stays one."""
    if part.nbytes <= STRIPE_BYTES:
        yield part
    elif isinstance(part, Range) and divide_ranges:
        yield from _cut(part, STRIPE_BYTES)
    elif isinstance(part, Cast) and all(isinstance(inner, Range) for inner in part.inner):
        item = FLOAT_BYTES[part.source]
        for inner in part.inner:
            assert isinstance(inner, Range)
            for piece in _cut(inner, STRIPE_BYTES):
                yield Cast((piece,), piece.nbytes // item, part.source, part.target)
    else:
        yield part


def _cut(part: Range, length: int) -> Iterator[Range]:
    for first in range(0, part.nbytes, length):
        yield Range(part.source, part.offset + first, min(length, part.nbytes - first))


def write_stripes(found: Iterable[Stripe], write: Callable[[Stripe], None], threads: int) -> None:
    """Call `write` for every stripe, from several threads; the first failure ends all and is raised."""
    lock, failures = threading.Lock(), list[BaseException]()
    waiting = iter(found)

    def take() -> Stripe | None:
        with lock:
            return None if failures else next(waiting, None)

    def work() -> None:
        try:
            while (stripe := take()) is not None:
                write(stripe)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(error)

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
