"""Describe a conversion as data: a text file of JSON lines, written by one child, executed by another.

Lines: header, identities, one per output file, trailer. Printable, testable, read line by line, so that
neither side holds it in memory (docs/design.md §4). The digest covers everything but the identities: the
same save at another place gives the same plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ckptd.base.files import check_relative
from ckptd.conversion.parts import FLOAT_BYTES, Part, decode, encode, ranges_of
from ckptd.errors import DamagedError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FORMAT = 4
ARCHIVES = "archives"
"""Asks the planning child for no plan, but for the archives that make up a folder of torch's."""
MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to make: its path below the output folder, its parts in order."""

    path: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class OutputLink:
    """A second name of an output file of ours."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Two lists of parts that must be the same bytes: copies of a parameter on several tensor ranks.

    `rounding` (from, to): `one` has elements of the first type, which as the second are the bytes of `other`:
    the masters of a parameter, and the model's own copy of it.
    """

    what: str
    one: tuple[Part, ...]
    other: tuple[Part, ...]
    rounding: tuple[str, str] | None = None

    @property
    def elements(self) -> int:
        """Elements that are compared with the model's; 0 for copies."""
        return sum(p.nbytes for p in self.one) // FLOAT_BYTES[self.rounding[0]] if self.rounding else 0


Output = OutputFile | OutputLink | OutputCheck


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read: relative path, size, fingerprint (docs/design.md §3)."""

    path: str
    bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Header:
    """Describe the source and the form of a plan."""

    form: str
    layout: str
    block_bytes: int
    """Clone granularity that the file offsets were laid out for; 0 = none."""
    stage: int
    dp: int
    ds_version: str
    step: int | None
    parameters: int
    sources: tuple[SourceFile, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trailer:
    """Totals, and the digest (SHA-256 hex) of header and files."""

    files: int
    bytes: int
    sha256: str
    tensors: int = 0
    """Tensors whose masters must round to the model's own weights, and their elements."""
    elements: int = 0
    uncompared: tuple[str, ...] = ()
    """Trained tensors that are not compared: how many of them, and why."""


class PlanWriter:
    """Writes a plan and checks each file before it is on the line (docs/design.md §4)."""

    def __init__(self, out: IO[bytes], header: Header, identities: Iterable[tuple[int, ...]]) -> None:
        self._out = out
        self._digest = hashlib.sha256()
        self._sizes = [source.bytes for source in header.sources]
        self._paths: set[str] = set()
        self._bytes = self._tensors = self._elements = 0
        sources = [[s.path, s.bytes, s.fingerprint] for s in header.sources]
        named = {k: getattr(header, k) for k in header.__slots__ if k != "sources"}
        self._line({"ckptd_plan": FORMAT, **named, "sources": sources})
        out.write(_encode({"identities": [list(i) for i in identities]}))

    def add(self, output: Output) -> None:
        """Append one output.

        Raises:
            DamagedError: a range leaves its source, or a path comes twice.
        """
        if isinstance(output, OutputCheck):
            self._check_bounds(output.what, (*output.one, *output.other))
            sides = [[encode(p) for p in side] for side in (output.one, output.other)]
            line = {"c": output.what, "p": sides}
            if output.rounding is None:
                self._line(line)
            else:  # no part of what is made, which is the same from a source that nobody compares
                self._out.write(_encode(line | {"r": output.rounding}))
                self._tensors += 1
                self._elements += output.elements
            return
        check_relative(output.path)
        if output.path in self._paths:
            raise DamagedError(f"two parameters would both be written to {output.path}")
        self._paths.add(output.path)
        if isinstance(output, OutputLink):
            self._line({"l": output.path, "t": output.target})
            return
        self._check_bounds(output.path, output.parts)
        self._bytes += output.nbytes
        self._line({"f": output.path, "n": output.nbytes, "p": [encode(p) for p in output.parts]})

    def _check_bounds(self, what: str, parts: Iterable[Part]) -> None:
        for part in parts:
            for r in ranges_of(part):
                if r.offset < 0 or r.nbytes < 0 or r.offset + r.nbytes > self._sizes[r.source]:
                    raise DamagedError(f"a range of {what} leaves its source file")

    def finish(self, uncompared: tuple[str, ...] = ()) -> Trailer:
        """Write the trailer."""
        totals = len(self._paths), self._bytes, self._digest.hexdigest(), self._tensors, self._elements
        self._out.write(_encode({"end": [*totals, uncompared]}))
        self._out.flush()
        return Trailer(*totals, uncompared)

    def _line(self, value: dict[str, Any]) -> None:
        data = _encode(value)
        if len(data) > MAX_LINE_BYTES:
            what = value.get("f") or value.get("c") or "the list of source files"
            raise RefusedError(
                f"{what} falls into more pieces than a plan can hold",
                hint="for weights a smaller --max-shard-size",
            )
        self._digest.update(data)
        self._out.write(data)


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


class PlanReader:
    """Reads a plan file from its start; checks nothing that the writer's digest does not cover."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        raw = self._read()
        if raw.get("ckptd_plan") != FORMAT:
            raise RefusedError("not a plan of this version of ckptd")
        with _saying_so():
            self.header = Header(
                **{k: raw[k] for k in Header.__slots__ if k not in ("sources", "notes")},
                notes=tuple(raw["notes"]),
                sources=tuple(SourceFile(*entry) for entry in raw["sources"]),
            )
            self.identities = [tuple(i) for i in self._read()["identities"]]
        self.trailer: Trailer | None = None

    def __iter__(self) -> Iterator[Output]:
        """Outputs in order; afterwards `trailer` is set."""
        while self.trailer is None:
            raw = self._read()
            if "f" in raw or "l" in raw or "c" in raw:
                yield _output(raw)
            else:
                self.trailer = trailer_of(raw)

    def _read(self) -> dict[str, Any]:
        line = self._stream.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise DamagedError("the plan ends early", hint="convert again; nothing was published")
        return _object(line)


def read_trailer(stream: IO[bytes]) -> Trailer:
    """Return the trailer, from the last 4 KiB of a plan file.

    Raises:
        DamagedError: the plan was not finished.
    """
    stream.seek(0, 2)
    stream.seek(max(0, stream.tell() - 4096))
    last = stream.read().rstrip(b"\n").rpartition(b"\n")[2]
    if not last.startswith(b'{"end":'):
        raise DamagedError("the plan ends early", hint="convert again; nothing was published")
    return trailer_of(_object(last))


def _object(line: bytes) -> dict[str, Any]:
    with _saying_so():
        value = json.loads(line)
        if not isinstance(value, dict):
            raise TypeError(value)
        return value


def _output(raw: dict[str, Any]) -> Output:
    with _saying_so():
        if "f" in raw:
            return OutputFile(raw["f"], tuple(decode(p) for p in raw["p"]))
        if "l" in raw:
            return OutputLink(raw["l"], raw["t"])
        return check_of(raw)


def check_of(raw: dict[str, Any]) -> OutputCheck:
    """Return the comparison that a line of a plan holds."""
    one, other = (tuple(decode(part) for part in side) for side in raw["p"])
    source, target = raw.get("r", (None, None))
    return OutputCheck(raw["c"], one, other, (str(source), str(target)) if source else None)


def trailer_of(raw: dict[str, Any]) -> Trailer:
    """Return the totals that the last line of a plan holds."""
    with _saying_so():
        count, size, sha256, tensors, elements, uncompared = raw["end"]
        return Trailer(
            int(count), int(size), str(sha256), int(tensors), int(elements), tuple(map(str, uncompared))
        )


@contextlib.contextmanager
def _saying_so() -> Iterator[None]:
    """Turn any error in reading a plan into DamagedError: the child that wrote it is not trusted."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise DamagedError("the plan is no plan", hint="convert again; nothing was published") from error
