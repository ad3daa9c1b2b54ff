"""Run a pickle as data and nothing else: no import, no call, bounded work, since checkpoints may be hostile.

Python's own `pickle` is not used: with it, safety would rest on every hook being overridden, and a
single opcode may ask for 64 GB of memo. Here each opcode is ours; what a checkpoint names becomes an
inert stand-in (`ckptd.formats.torchfile.values`), and everything a file can inflate is counted.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError, TornArchiveError
from ckptd.formats.torchfile.archive import DEFAULT_LIMITS, Limits
from ckptd.formats.torchfile.rebuild import Rebuilder
from ckptd.formats.torchfile.values import Global, Inert, InertDict, Size, Storage, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.formats.torchfile.archive import Directory


# --- The opcodes: a table of small functions -------------------------------------------------------------
# Opcodes that are absent from the table (the extension registry, out-of-band buffers) are refused.


def _push(value: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        machine.stack.append(value(machine))

    return operation


def _text(length: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        machine.stack.append(str(machine.take(length(machine)), "utf-8", "surrogatepass"))

    return operation


def _binary(length: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        machine.stack.append(machine.take(length(machine)))

    return operation


def _collect(make: Callable[[Machine, list[Any]], Any]) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        items = machine.pop_mark()  # first: it changes which stack is on top
        machine.stack.append(make(machine, items))

    return operation


def _tuple_of(count: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError(count)
        stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]

    return operation


def _unsigned(size: int) -> Callable[[Machine], int]:
    return lambda machine: int.from_bytes(machine.take(size), "little")


def _signed(size: int) -> Callable[[Machine], int]:
    return lambda machine: int.from_bytes(machine.take(size), "little", signed=True)


def _mark(m: Machine) -> None:
    m.below.append(m.stack)
    m.stack = []


def _long(width: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        machine.stack.append(int.from_bytes(machine.take(_unsigned(width)(machine)), "little", signed=True))

    return operation


def _append(m: Machine) -> None:
    item = m.stack.pop()
    m.extend(m.stack[-1], [item])


def _appends(m: Machine) -> None:
    items = m.pop_mark()
    m.extend(m.stack[-1], items)


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


def _set_items(m: Machine) -> None:
    items = m.pop_mark()
    m.set_items(m.stack[-1], items)


def _add_items(m: Machine) -> None:
    items = m.pop_mark()
    if not isinstance(m.stack[-1], set):
        raise RefusedError(f"{m.name}: data.pkl adds items to a {type(m.stack[-1]).__name__}")
    m.stack[-1].update(m.key(item) for item in items)


def _dict(m: Machine) -> None:
    items, target = m.pop_mark(), dict[Any, Any]()
    m.set_items(target, items)
    m.stack.append(target)


def _reduce(m: Machine) -> None:
    arguments, function = m.stack.pop(), m.stack.pop()
    m.stack.append(m.rebuild.call(function, arguments))


def _new_object(m: Machine) -> None:
    arguments, cls = m.stack.pop(), m.stack.pop()
    m.stack.append(m.rebuild.new(cls, arguments))


def _new_object_ex(m: Machine) -> None:
    keywords, arguments, cls = m.stack.pop(), m.stack.pop(), m.stack.pop()
    made = m.rebuild.new(cls, arguments)
    if isinstance(made, Inert):
        made.lossy = bool(keywords)
    m.stack.append(made)


def _object(m: Machine) -> None:
    items = m.pop_mark()
    m.stack.append(m.rebuild.call(items[0], tuple(items[1:])))


def _instance(m: Machine) -> None:
    module, name = m.line().decode(), m.line().decode()
    items = m.pop_mark()
    m.stack.append(m.rebuild.call(Global(module, name), tuple(items)))


def _build(m: Machine) -> None:
    state = m.stack.pop()
    m.build(m.stack[-1], state)


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise RefusedError(f"{m.name}: data.pkl names a global by something that is no text")
    m.find(module, name)


def _persistent(m: Machine) -> None:
    m.stack.append(m.rebuild.storage(m.stack.pop()))


def _integer_line(m: Machine) -> None:
    text = m.line()
    m.stack.append(text == b"01" if text in (b"00", b"01") else int(text))


_OPERATIONS: dict[bytes, Callable[[Machine], Any]] = {
    b"\x80": lambda m: m.take(1),
    b"\x95": lambda m: m.take(8),
    b"(": _mark,
    b"0": lambda m: m.stack.pop() if m.stack else m.pop_mark(),
    b"1": lambda m: m.pop_mark(),
    b"2": lambda m: m.stack.append(m.stack[-1]),
    b"N": _push(lambda _: None),
    b"\x88": _push(lambda _: True),
    b"\x89": _push(lambda _: False),
    b"I": _integer_line,
    b"J": _push(_signed(4)),
    b"K": _push(_unsigned(1)),
    b"M": _push(_unsigned(2)),
    b"L": _push(lambda m: int(m.line().rstrip(b"L"))),
    b"\x8a": _long(1),
    b"\x8b": _long(4),
    b"F": _push(lambda m: float(m.line())),
    b"G": _push(lambda m: m.number(">d")),
    b"V": _push(lambda m: str(m.line(), "raw-unicode-escape")),
    b"X": _text(_unsigned(4)),
    b"\x8c": _text(_unsigned(1)),
    b"\x8d": _text(_unsigned(8)),
    b"T": _binary(_unsigned(4)),
    b"U": _binary(_unsigned(1)),
    b"B": _binary(_unsigned(4)),
    b"C": _binary(_unsigned(1)),
    b"\x8e": _binary(_unsigned(8)),
    b"]": _push(lambda _: []),
    b"}": _push(lambda _: {}),
    b")": _push(lambda _: ()),
    b"\x8f": _push(lambda _: set()),
    b"\x91": _collect(lambda m, items: frozenset(m.key(i) for i in items)),
    b"l": _collect(lambda _, items: items),
    b"t": _collect(lambda _, items: tuple(items)),
    b"d": _dict,
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": _set_items,
    b"\x90": _add_items,
    b"p": lambda m: m.put(int(m.line())),
    b"q": lambda m: m.put(m.take(1)[0]),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"g": lambda m: m.get(int(m.line())),
    b"h": lambda m: m.get(m.take(1)[0]),
    b"j": lambda m: m.get(m.number("<I")),
    b"c": lambda m: m.find(m.line().decode(), m.line().decode()),
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _new_object,
    b"\x92": _new_object_ex,
    b"o": _object,
    b"i": _instance,
    b"b": _build,
    b"Q": _persistent,
}
TABLE: list[Callable[[Machine], Any] | None] = [None] * 256
for _code, _operation in _OPERATIONS.items():
    TABLE[_code[0]] = _operation


# --- The machine -----------------------------------------------------------------------------------------

_PLAIN_KEYS = (str, int, float, bool, bytes, type(None), Global, Inert, Tensor, Storage)


def unpickle(data: bytes, name: str, directory: Directory, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Run the pickle `data` (the archive's `data.pkl`); `name` is only used in messages.

    Returns plain Python values, `InertDict`, `Size`, `Tensor`, `Storage`, `Global` and `Inert`.

    Raises:
        TornArchiveError: the pickle ends early or is garbled.
        RefusedError: an opcode that no `torch.save` writes, or work beyond `limits`.
    """
    return run_pickle(data, name, Rebuilder(name, directory, limits), limits)[0]


def run_pickle(data: bytes, name: str, rebuild: Rebuilder, limits: Limits) -> tuple[Any, int]:
    """Return (value, bytes used) of the pickle that `data` begins with; raises as `unpickle` does."""
    if len(data) > limits.pickle_bytes:
        raise RefusedError(
            f"{name}: data.pkl of {len(data)} bytes is beyond the limit of {limits.pickle_bytes}"
        )
    machine = Machine(data, name, rebuild, limits)
    try:
        return machine.run(), machine.at
    except (IndexError, struct.error) as error:
        raise TornArchiveError(f"{name}: data.pkl is garbled at byte {machine.at}") from error
    except (MemoryError, RecursionError) as error:
        raise RefusedError(f"{name}: data.pkl asks for more memory than a shard may have") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise TornArchiveError(f"{name}: data.pkl is garbled at byte {machine.at} ({error})") from error


class Machine:
    """State of one run: input, stack, stacks below marks, memo."""

    def __init__(self, data: bytes, name: str, rebuild: Rebuilder, limits: Limits) -> None:
        self.data = data
        self.name = name
        self.rebuild = rebuild
        self.limits = limits
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.hashed = 0

    def run(self) -> Any:
        data, table = self.data, TABLE
        for _ in range(self.limits.operations):
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            operation = table[code]
            if operation is None:
                raise RefusedError(
                    f"{self.name}: data.pkl uses opcode 0x{code:02x}, which no torch.save writes"
                )
            operation(self)
        raise RefusedError(f"{self.name}: data.pkl runs more than {self.limits.operations} operations")

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        end = self.at + length
        if length < 0 or end > len(self.data):
            raise IndexError(end)
        chunk = self.data[self.at : end]
        self.at = end
        return chunk

    def number(self, form: str) -> Any:
        """One packed number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> bytes:
        """Text up to the next newline."""
        end = self.data.index(b"\n", self.at, self.at + self.limits.line_bytes)
        text = self.data[self.at : end]
        self.at = end + 1
        return text

    def pop_mark(self) -> list[Any]:
        """Return the items above the topmost mark."""
        items = self.stack
        self.stack = self.below.pop()
        return items

    def put(self, index: int) -> None:
        """Remember the top of the stack."""
        if len(self.memo) >= self.limits.memo_entries:
            raise RefusedError(f"{self.name}: data.pkl memoizes more than {self.limits.memo_entries} objects")
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        """Push a remembered object."""
        try:
            self.stack.append(self.memo[index])
        except KeyError as error:
            raise TornArchiveError(
                f"{self.name}: data.pkl refers to a memo entry that is not there"
            ) from error

    def find(self, module: str, name: str) -> None:
        """Push the stand-in of a global."""
        key = (module, name)
        found = self.globals.get(key)
        if found is None:
            found = self.globals[key] = Global(module, name)
        self.stack.append(found)

    def key(self, value: Any, depth: int = 0) -> Any:
        """Return a value usable as a dictionary key without unbounded hashing."""
        if isinstance(value, tuple):
            self.hashed += len(value)
            if depth >= self.limits.key_depth or len(value) > 256 or self.hashed > self.limits.key_items:
                raise RefusedError(f"{self.name}: data.pkl uses a deeply nested tuple as a key")
            for item in value:
                self.key(item, depth + 1)
        elif not isinstance(value, _PLAIN_KEYS):
            raise RefusedError(f"{self.name}: data.pkl uses a {type(value).__name__} as a key")
        return value

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Store alternating keys and values."""
        if isinstance(target, Inert):
            target.lossy = True
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise RefusedError(f"{self.name}: data.pkl sets items of a {type(target).__name__}")
        for at in range(0, len(items), 2):
            target[self.key(items[at])] = items[at + 1]

    def extend(self, target: Any, items: list[Any]) -> None:
        """Append to a list; a stand-in swallows the items."""
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Inert):
            target.lossy = True
        else:
            raise RefusedError(f"{self.name}: data.pkl appends to a {type(target).__name__}")

    def build(self, target: Any, state: Any) -> None:
        """Give an object its state: kept by stand-ins, dropped by dictionaries and tensors."""
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, InertDict | Tensor | Size):
            raise RefusedError(f"{self.name}: data.pkl sets the state of a {type(target).__name__}")
