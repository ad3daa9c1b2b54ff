"""In which order the outputs of a plan are made: the few largest first, the rest as planned.

A file is written by one thread: a large one that came last (model states, `optimizer_state.pt`) would be
written alone while the other threads wait. The plan's own order reads cold sources forwards.
"""

from __future__ import annotations

import json
import re
from typing import IO, TYPE_CHECKING

from ckptd.convert.parts import decode
from ckptd.convert.plan import MAX_LINE_BYTES, Output, OutputFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.convert.plan import PlanReader

FILE = re.compile(rb'\{"f":("(?:[^"\\]|\\.)*"),"n":(\d+),"p":')
"""How the line of an output file begins: its path as JSON, its bytes."""


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
