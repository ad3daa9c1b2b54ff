"""The outputs of a plan by name, each read from the plan file when it is wanted (P12).

Whoever makes files in an order of their own, or some of them again, holds names, sizes and offsets alone.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ckptd.convert.order import FILE
from ckptd.convert.parts import decode
from ckptd.convert.plan import MAX_LINE_BYTES, OutputCheck, OutputFile, PlanReader, Trailer
from ckptd.errors import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Entry:
    """An output: its bytes, and where its line begins in the plan file."""

    nbytes: int
    offset: int


class Outputs:
    """A plan in an open file that can be sought in; safe for several threads."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._checks: list[int] = []
        self.files: dict[str, Entry] = {}
        """By path, second names among them."""
        stream.seek(0)
        reader = PlanReader(stream)
        self.header = reader.header
        self.identities = reader.identities
        self.trailer = self._index()

    def _index(self) -> Trailer:
        stream = self._stream
        links: list[tuple[str, str]] = []
        at = stream.tell()
        while line := stream.readline(MAX_LINE_BYTES):
            if found := FILE.match(line):
                self.files[json.loads(found[1])] = Entry(int(found[2]), at)
            elif line.startswith(b'{"c":'):
                self._checks.append(at)
            else:
                raw = json.loads(line)
                if "end" in raw:
                    self.files |= {path: self.files[target] for path, target in links}
                    return Trailer(*raw["end"])
                links.append((raw["l"], raw["t"]))
            at += len(line)
        raise DamagedError("the plan ends early", hint="convert again; nothing was published")

    def output(self, path: str) -> OutputFile:
        """One output, under whichever of its names."""
        raw = self._line(self.files[path].offset)
        return OutputFile(path, tuple(decode(part) for part in raw["p"]))

    def checks(self) -> Iterator[OutputCheck]:
        """What must be equal before anything is made of it."""
        for offset in self._checks:
            raw = self._line(offset)
            one, other = (tuple(decode(part) for part in side) for side in raw["p"])
            yield OutputCheck(raw["c"], one, other)

    def _line(self, offset: int) -> dict[str, Any]:
        with self._lock:
            self._stream.seek(offset)
            line = self._stream.readline(MAX_LINE_BYTES)
        found: dict[str, Any] = json.loads(line)
        return found
