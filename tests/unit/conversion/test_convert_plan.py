"""Plans are data: they read back as they were written, and name no byte twice or outside a source."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.conversion.dtypes import widen
from ckptd.conversion.parts import Literal, Part, Range, Widen
from ckptd.conversion.plan import (
    Header,
    OutputFile,
    OutputLink,
    PlanReader,
    PlanWriter,
    SourceFile,
    read_trailer,
)
from ckptd.errors import CkptdError, DamagedError, RefusedError

SOURCES = (SourceFile("a.pt", 1000, "f0"), SourceFile("b.pt", 500, "f1"))
HEADER = Header("universal", "strict", 0, 2, 2, "0.19.8", 7, 3, SOURCES)
PARTS = st.lists(
    st.one_of(
        st.binary(max_size=50).map(Literal),
        st.builds(Range, st.integers(0, 1), st.integers(0, 250), st.integers(0, 250)),
        st.builds(Widen, st.integers(0, 1), st.integers(0, 100), st.integers(0, 50), st.just("bfloat16")),
    ),
    max_size=6,
).map(tuple)


def written(outputs: list[OutputFile | OutputLink], identity: int = 1) -> io.BytesIO:
    stream = io.BytesIO()
    writer = PlanWriter(stream, HEADER, [(identity, 2, 3, 4, 5), (6, 7, 8, 9, 10)])
    for output in outputs:
        writer.add(output)
    writer.finish()
    stream.seek(0)
    return stream


@given(parts=st.lists(PARTS, max_size=5))
def test_a_plan_reads_back(parts: list[tuple[Part, ...]]) -> None:
    outputs: list[OutputFile | OutputLink] = [
        OutputFile(f"zero/p{i}/fp32.pt", p) for i, p in enumerate(parts)
    ]
    outputs.append(OutputLink("x_model_states.pt", "mp_rank_00_model_states.pt"))
    stream = written(outputs)
    plan = PlanReader(stream)
    assert plan.header == HEADER
    assert plan.identities[0] == (1, 2, 3, 4, 5)
    assert list(plan) == outputs
    assert plan.trailer is not None
    assert plan.trailer == read_trailer(stream)
    assert plan.trailer.bytes == sum(o.nbytes for o in outputs if isinstance(o, OutputFile))


def test_the_digest_is_of_contents_not_of_identities() -> None:
    one = read_trailer(written([OutputFile("f", (Literal(b"x"),))], identity=1)).sha256
    other_place = read_trailer(written([OutputFile("f", (Literal(b"x"),))], identity=99)).sha256
    other_bytes = read_trailer(written([OutputFile("f", (Literal(b"y"),))], identity=1)).sha256
    assert one == other_place
    assert one != other_bytes


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (OutputFile("f", (Range(0, 990, 11),)), DamagedError),
        (OutputFile("f", (Range(1, -1, 5),)), DamagedError),
        (OutputFile("f", (Widen(1, 480, 11, "bfloat16"),)), DamagedError),
        (OutputFile("../f", ()), RefusedError),
        (OutputFile("/etc/f", ()), RefusedError),
        (OutputLink("a/../../f", "x"), RefusedError),
    ],
)
def test_bad_outputs_never_reach_the_plan(output: OutputFile | OutputLink, error: type[CkptdError]) -> None:
    with pytest.raises(error):
        written([output])


def test_one_path_comes_once() -> None:
    with pytest.raises(DamagedError, match="two parameters"):
        written([OutputFile("f", ()), OutputFile("f", ())])


def test_a_plan_cut_short_is_noticed() -> None:
    data = written([OutputFile(f"f{i}", (Literal(b"abc"),)) for i in range(20)]).getvalue()
    for length in range(len(data) - 1):
        with pytest.raises((CkptdError, ValueError)):
            list(PlanReader(io.BytesIO(data[:length])))
        with pytest.raises((CkptdError, ValueError)):
            read_trailer(io.BytesIO(data[:length]))


@given(st.lists(st.floats(width=16, allow_nan=False), max_size=40))
def test_half_precision_widens_exactly(values: list[float]) -> None:
    raw = struct.pack(f"<{len(values)}e", *values)
    assert widen(raw, "float16") == struct.pack(f"<{len(values)}f", *values)


@given(st.lists(st.integers(-(1 << 24), 1 << 24), max_size=40))
def test_integers_widen_exactly(values: list[int]) -> None:
    raw = struct.pack(f"<{len(values)}q", *values)
    assert widen(raw, "int64") == struct.pack(f"<{len(values)}f", *values)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_bfloat16_is_the_upper_half(values: list[float]) -> None:
    full = struct.pack(f"<{len(values)}f", *values)
    upper = b"".join(full[i + 2 : i + 4] for i in range(0, len(full), 4))
    assert widen(upper, "bfloat16") == b"".join(b"\0\0" + full[i + 2 : i + 4] for i in range(0, len(full), 4))


def test_a_file_of_more_pieces_than_a_plan_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes lines of a bounded length: a longer one is refused when it is written."""
    monkeypatch.setattr("ckptd.conversion.plan.MAX_LINE_BYTES", 2000)
    header = Header(
        form="universal", layout="strict", block_bytes=0, stage=1, dp=1, ds_version="", step=1,
        parameters=1, sources=(SourceFile("a", 1000, "0"),),
    )  # fmt: skip
    writer = PlanWriter(io.BytesIO(), header, [(1, 2, 3, 4, 5)])
    writer.add(OutputFile("zero/w/fp32.pt", (Range(0, 0, 1),) * 10))
    with pytest.raises(RefusedError, match=r"zero/w/step.pt falls into more pieces"):
        writer.add(OutputFile("zero/w/step.pt", (Range(0, 0, 1),) * 1000))
