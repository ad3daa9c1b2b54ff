"""What each pickle opcode does to the machine of `ckptd.torchfile.unpickle`: a table of small functions.

Opcodes that are absent (the extension registry, out-of-band buffers) are refused there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError
from ckptd.torchfile.values import Global, Inert

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.torchfile.unpickle import Machine


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
