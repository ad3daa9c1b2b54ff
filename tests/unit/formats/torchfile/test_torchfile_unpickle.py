"""The pickle machine: plain data survive every protocol, everything else becomes inert."""

from __future__ import annotations

import collections
import contextlib
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CkptdError, RefusedError, TornArchiveError
from ckptd.formats.torchfile.archive import Directory, Limits, Record
from ckptd.formats.torchfile.repickle import WRITABLE, repickle
from ckptd.formats.torchfile.unpickler import unpickle
from ckptd.formats.torchfile.values import Global, Inert, InertDict, Tensor

EMPTY = Directory("archive", {})
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def run(data: bytes, directory: Directory = EMPTY, limits: Limits | None = None) -> Any:
    return unpickle(data, "shard.pt", directory, limits or Limits())


@settings(max_examples=300, deadline=None)
@given(value=PLAIN, protocol=st.integers(0, 5))
def test_plain_data_survive_every_protocol(value: Any, protocol: int) -> None:
    if protocol < 3:
        value = without_bytes(value)
    assert run(pickle.dumps(value, protocol)) == value


@settings(max_examples=300, deadline=None)
@given(value=PLAIN)
def test_what_we_write_python_reads_alike(value: Any) -> None:
    assert pickle.loads(repickle(value, "x").data) == value


def without_bytes(value: Any) -> Any:
    """Protocols 0 to 2 write bytes as a call, which is inert here."""
    if isinstance(value, bytes):
        return None
    if isinstance(value, list | tuple):
        return type(value)(without_bytes(v) for v in value)
    return {k: without_bytes(v) for k, v in value.items()} if isinstance(value, dict) else value


@settings(max_examples=500, deadline=None)
@given(data=st.binary(max_size=60))
def test_garbage_stays_inside_the_error_tree(data: bytes) -> None:
    with contextlib.suppress(CkptdError):
        run(b"\x80\x02" + data)


def test_sharing_and_cycles_survive_a_round_trip() -> None:
    shared: list[Any] = [1]
    value: dict[str, Any] = {"a": shared, "b": shared}
    value["self"] = value
    again = run(repickle(run(pickle.dumps(value, 2)), "x").data)
    assert again["a"] is again["b"]
    assert again["self"] is again


class Weird:
    """Stands for any user's class."""

    def __init__(self) -> None:
        self.depth = 3


def test_objects_become_inert_and_keep_their_state() -> None:
    value = run(pickle.dumps({"o": Weird(), "d": collections.OrderedDict(a=1), "s": {1, 2}}, 2))
    assert isinstance(value["o"], Inert)
    assert value["o"].field("depth") == 3
    assert isinstance(value["d"], InertDict)
    assert value["d"] == {"a": 1}


def test_inert_objects_are_written_back_as_they_were() -> None:
    value = run(pickle.dumps([Weird(), collections.OrderedDict(a=1)], 2))
    ours = Global(Weird.__module__, "Weird")
    restored = pickle.loads(repickle(value, "x", writable=WRITABLE | {ours}).data)
    assert isinstance(restored[0], Weird)
    assert restored[0].depth == 3
    assert restored[1] == collections.OrderedDict(a=1)


def storage_pickle(numel: object, key: object = "0", kind: bytes = b"FloatStorage") -> bytes:
    """A tensor over one storage, opcode by opcode."""
    out = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
    out += _short("storage") + b"ctorch\n" + kind + b"\n" + _value(key) + _short("cpu") + _value(numel)
    return out + b"tQ" + b"K\x01(K\x02K\x03t(K\x03K\x01t" + b"\x89ccollections\nOrderedDict\n)RtR."


def _short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _value(value: object) -> bytes:
    return pickle.dumps(value, 2)[2:-1].replace(b"q\x00", b"")


ONE_STORAGE = Directory("archive", {"data/0": Record("data/0", 1000, 40, 1)})


def test_a_tensor_is_a_place_in_the_file() -> None:
    tensor = run(storage_pickle(10), ONE_STORAGE)
    assert isinstance(tensor, Tensor)
    assert (tensor.dtype, tensor.shape, tensor.byte_offset, tensor.nbytes) == ("float32", (2, 3), 1004, 24)
    assert tensor.contiguous


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (storage_pickle(11), "its record holds 40"),
        (storage_pickle(6), "leaves its storage"),
        (storage_pickle(10, "9"), "lacks the record"),
        (storage_pickle(-1), "unknown type"),
        (storage_pickle(True), "unknown type"),
        (storage_pickle(10, kind=b"DoubleStorage"), "its record holds 40"),
        (storage_pickle(10, kind=b"QInt8Storage"), "unknown type"),
    ],
)
def test_storages_and_tensors_are_bounds_checked(data: bytes, words: str) -> None:
    with pytest.raises(CkptdError, match=words):
        run(data, ONE_STORAGE)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"\x80\x02}", TornArchiveError, "garbled"),
        (b"\x80\x02h\x05.", TornArchiveError, "memo"),
        (b"\x80\x02\x82\x01.", RefusedError, "opcode 0x82"),
        (b"\x80\x02]}s.", TornArchiveError, "garbled"),
        (b"\x80\x02K\x01K\x02K\x03s.", RefusedError, "sets items of a int"),
        (b"\x80\x02}]K\x01s.", RefusedError, "list as a key"),
        (b"\x80\x02K\x01)R.", TornArchiveError, "."),
        (b"\x80\x02K\x01}b.", RefusedError, "sets the state of a int"),
        (b"\x80\x02K\x01Q.", RefusedError, "persistent id"),
    ],
)
def test_garbled_and_strange_pickles(data: bytes, error: type[CkptdError], words: str) -> None:
    if b")R" in data:
        assert isinstance(run(data), Inert), "calling a number makes an inert value, nothing runs"
        return
    with pytest.raises(error, match=words):
        run(data)


def test_limits_are_counted() -> None:
    with pytest.raises(RefusedError, match="operations"):
        run(b"\x80\x02" + b"N0" * 100 + b"N.", limits=Limits(operations=50))
    with pytest.raises(RefusedError, match="memoizes"):
        run(
            b"\x80\x02" + b"".join(b"Nq" + bytes([i]) for i in range(20)) + b".",
            limits=Limits(memo_entries=10),
        )
    with pytest.raises(RefusedError, match="beyond the limit"):
        run(b"\x80\x02" + b"N" * 100, limits=Limits(pickle_bytes=50))


def test_globals_are_names_only() -> None:
    value = run(b"\x80\x02cos\nsystem\n.")
    assert value == Global("os", "system")


def test_only_names_that_hold_data_are_written() -> None:
    with pytest.raises(RefusedError, match=r"os\.system"):
        repickle([Inert(Global("os", "system"), ("true",))], "optimizer_state.pt")
    with pytest.raises(RefusedError, match="not known to be data"):
        repickle(Inert(Global("torch", "load"), ("x",)), "optimizer_state.pt")


@pytest.mark.parametrize("name", ["__builtin__", "builtins"])
@pytest.mark.parametrize(("member", "stage"), [("optimizer_states", 1), ("gradients", 2), ("weights", 3)])
def test_an_enum_pickled_by_name_is_the_same_stage(name: str, member: str, stage: int) -> None:
    """Python before 3.11.4 writes `getattr(ZeroStageEnum, name)`; any other getattr stays inert."""
    enum = "cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    size = len(member).to_bytes(4, "little")
    data = f"\x80\x02c{name}\ngetattr\n{enum}X".encode("latin1") + size + member.encode() + b"\x86R."
    read = run(data)
    assert (read.origin, read.args) == (Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))
    other = data.replace(member.encode(), b"x" * len(member))
    assert run(other).args[1] == "x" * len(member)
