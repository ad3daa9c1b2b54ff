"""Read the outputs of a plan by name, each from the plan file when it is wanted.

A caller that makes files in another order, or some of them again, holds only names, sizes and offsets in
memory.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import ckptd
from ckptd.conversion.parts import decode
from ckptd.conversion.plan import (
    MAX_LINE_BYTES,
    Output,
    OutputCheck,
    OutputFile,
    PlanReader,
    Trailer,
    check_of,
    trailer_of,
)
from ckptd.core.model.swap_paths import is_state
from ckptd.errors import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptd.conversion.plan import Header


# --- Order of work: the few largest files first, the rest as planned -------------------------------------
# A file is written by one thread: a large one at the end of the plan (model states, `optimizer_state.pt`)
# would be written alone while the other threads wait. The plan's own order reads cold sources forwards.

FILE = re.compile(rb'\{"f":("(?:[^"\\]|\\.)*"),"n":(\d+),"p":')
"""Begin of the line of an output file: its path as JSON, its bytes."""


def large_first(stream: IO[bytes], plan: PlanReader, large_bytes: int) -> Iterator[Output]:
    """Outputs of `plan`, which reads `stream` and is at its first output; it has its trailer at the end."""
    first = stream.tell()
    lines: list[tuple[int, bytes]] = []
    while line := stream.readline(MAX_LINE_BYTES):
        found = FILE.match(line)
        if found and int(found[2]) >= large_bytes:
            lines.append((int(found[2]), line))
    stream.seek(first)
    for _, line in sorted(lines, key=lambda entry: -entry[0]):
        raw = json.loads(line)
        yield OutputFile(raw["f"], tuple(decode(p) for p in raw["p"]))
    for output in plan:
        if not (isinstance(output, OutputFile) and output.nbytes >= large_bytes):
            yield output


# --- Outputs by name -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """An output: its bytes, and where its line begins in the plan file."""

    nbytes: int
    offset: int


class Outputs:
    """A plan in an open file that can be sought in; safe for several threads."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._checks: list[int] = []
        self.files: dict[str, PlannedOutput] = {}
        """Path → output, second names included."""
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
                self.files[json.loads(found[1])] = PlannedOutput(int(found[2]), at)
            elif line.startswith(b'{"c":'):
                self._checks.append(at)
            else:
                raw = json.loads(line)
                if "end" in raw:
                    self.files |= {path: self.files[target] for path, target in links}
                    return trailer_of(raw)
                links.append((raw["l"], raw["t"]))
            at += len(line)
        raise DamagedError("the plan ends early", hint="convert again; nothing was published")

    def output(self, path: str) -> OutputFile:
        """One output, under whichever of its names."""
        raw = self._line(self.files[path].offset)
        return OutputFile(path, tuple(decode(part) for part in raw["p"]))

    def checks(self) -> Iterator[OutputCheck]:
        """Yield the pairs of parts that must be equal before anything is made of them."""
        for offset in self._checks:
            yield check_of(self._line(offset))

    def _line(self, offset: int) -> dict[str, Any]:
        with self._lock:
            self._stream.seek(offset)
            line = self._stream.readline(MAX_LINE_BYTES)
        found: dict[str, Any] = json.loads(line)
        return found


# --- ckptd.json: what a form is made of, at its root --------------------------------------------------

MADE_BY: Mapping[str, Any] = {"format": "1.0", "ckptd_version": ckptd.__version__}


def description_of(header: Header, trailer: Trailer, made_by: Mapping[str, Any] = MADE_BY) -> bytes:
    """Return the content of `ckptd.json`."""
    text = {
        **made_by,
        "form": header.form,
        "layout": header.layout,
        "alignment": header.block_bytes,
        "plan_sha256": trailer.sha256,
        "source": {
            "step": header.step,
            "zero_stage": header.stage,
            "ds_version": header.ds_version,
            "dp": header.dp,
            # the shards say which save it is; swapped tensors are beside them
            "fingerprints": {s.path: s.fingerprint for s in header.sources if not is_state(s.path)},
        },
    }
    return json.dumps(text, indent=1, sort_keys=True).encode() + b"\n"
