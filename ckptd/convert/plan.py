"""A conversion as data: a text file of one JSON value per line, written by one child, executed by another.

Lines: header, identities, one per output file, trailer. Printable, testable, read line by line, so that
neither side holds it in memory (docs/design.md §4). The digest covers everything but the identities: the
same save at another place gives the same plan.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ckptd.errors import DamagedError, RefusedError
from ckptd.files import check_relative

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FORMAT = 1
MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes of ours."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Length in the output."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Range:
    """`nbytes` bytes at `offset` of source file number `source`."""

    source: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Widen:
    """`count` elements of type `dtype` at `offset` of a source, written as float32."""

    source: int
    offset: int
    count: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Length in the output."""
        return 4 * self.count


Part = Literal | Range | Widen
SOURCE_ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Element types that can be widened to float32."""


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
class SourceFile:
    """A file that is read: relative path, size, fingerprint (docs/design.md §3)."""

    path: str
    bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Header:
    """What the plan is of."""

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


class PlanWriter:
    """Writes a plan and checks each file before it is on the line (docs/design.md §4)."""

    def __init__(self, out: IO[bytes], header: Header, identities: Iterable[tuple[int, ...]]) -> None:
        self._out = out
        self._digest = hashlib.sha256()
        self._sizes = [source.bytes for source in header.sources]
        self._paths: set[str] = set()
        self._bytes = 0
        sources = [[s.path, s.bytes, s.fingerprint] for s in header.sources]
        named = {k: getattr(header, k) for k in header.__slots__ if k != "sources"}
        self._line({"ckptd_plan": FORMAT, **named, "sources": sources})
        out.write(_encode({"identities": [list(i) for i in identities]}))

    def add(self, output: OutputFile | OutputLink) -> None:
        """Append one output.

        Raises:
            DamagedError: a range leaves its source, or a path comes twice.
        """
        check_relative(output.path)
        if output.path in self._paths:
            raise DamagedError(f"two parameters would both be written to {output.path}")
        self._paths.add(output.path)
        if isinstance(output, OutputLink):
            self._line({"l": output.path, "t": output.target})
            return
        for part in output.parts:
            if not isinstance(part, Literal):
                item = SOURCE_ITEM_BYTES[part.dtype] if isinstance(part, Widen) else 1
                length = part.count * item if isinstance(part, Widen) else part.nbytes
                if part.offset < 0 or length < 0 or part.offset + length > self._sizes[part.source]:
                    raise DamagedError(f"a range of {output.path} leaves its source file")
        self._bytes += output.nbytes
        self._line({"f": output.path, "n": output.nbytes, "p": [_part_out(p) for p in output.parts]})

    def finish(self) -> Trailer:
        """Write the trailer."""
        trailer = Trailer(len(self._paths), self._bytes, self._digest.hexdigest())
        self._out.write(_encode({"end": [trailer.files, trailer.bytes, trailer.sha256]}))
        self._out.flush()
        return trailer

    def _line(self, value: dict[str, Any]) -> None:
        data = _encode(value)
        self._digest.update(data)
        self._out.write(data)


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _part_out(part: Part) -> list[Any]:
    if isinstance(part, Literal):
        return ["b", base64.b64encode(part.data).decode()]
    if isinstance(part, Range):
        return ["r", part.source, part.offset, part.nbytes]
    return ["w", part.source, part.offset, part.count, part.dtype]


def _part_in(raw: list[Any]) -> Part:
    if raw[0] == "b":
        return Literal(base64.b64decode(raw[1], validate=True))
    if raw[0] == "r":
        return Range(int(raw[1]), int(raw[2]), int(raw[3]))
    return Widen(int(raw[1]), int(raw[2]), int(raw[3]), str(raw[4]))


class PlanReader:
    """Reads a plan file from its start; checks nothing that the writer's digest does not cover."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        raw = self._read()
        if raw.get("ckptd_plan") != FORMAT:
            raise RefusedError("not a plan of this version of ckptd")
        self.header = Header(
            **{k: raw[k] for k in Header.__slots__ if k not in ("sources", "notes")},
            notes=tuple(raw["notes"]),
            sources=tuple(SourceFile(*entry) for entry in raw["sources"]),
        )
        self.identities = [tuple(i) for i in self._read()["identities"]]
        self.trailer: Trailer | None = None

    def __iter__(self) -> Iterator[OutputFile | OutputLink]:
        """Outputs in order; afterwards `trailer` is set."""
        while self.trailer is None:
            raw = self._read()
            if "f" in raw:
                yield OutputFile(raw["f"], tuple(_part_in(p) for p in raw["p"]))
            elif "l" in raw:
                yield OutputLink(raw["l"], raw["t"])
            else:
                self.trailer = Trailer(*raw["end"])

    def _read(self) -> dict[str, Any]:
        line = self._stream.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise DamagedError("the plan ends early", hint="convert again; nothing was published")
        value = json.loads(line)
        assert isinstance(value, dict)
        return value


def read_trailer(stream: IO[bytes]) -> Trailer:
    """The trailer, from the last 4 KiB of a plan file.

    Raises:
        DamagedError: the plan was not finished.
    """
    stream.seek(0, 2)
    stream.seek(max(0, stream.tell() - 4096))
    last = stream.read().rstrip(b"\n").rpartition(b"\n")[2]
    if not last.startswith(b'{"end":'):
        raise DamagedError("the plan ends early", hint="convert again; nothing was published")
    return Trailer(*json.loads(last)["end"])
