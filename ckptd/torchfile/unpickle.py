"""A pickle machine that builds data and nothing else: no import, no call, bounded work (P14).

Python's own `pickle` is not used: with it, safety would rest on every hook being overridden, and a
single opcode may ask for 64 GB of memo. Here each opcode is ours; what a checkpoint names becomes an
inert stand-in (`ckptd.torchfile.values`), and everything a file can inflate is counted.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError, TornArchiveError
from ckptd.torchfile.limits import DEFAULT_LIMITS, Limits
from ckptd.torchfile.opcodes import TABLE
from ckptd.torchfile.rebuild import Rebuilder
from ckptd.torchfile.values import Global, Inert, InertDict, Size, Storage, Tensor

if TYPE_CHECKING:
    from ckptd.torchfile.archive import Directory

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
    """(value, bytes used) of the pickle that `data` begins with; raises as `unpickle` does."""
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
        """The next `length` bytes."""
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
        """The items above the topmost mark."""
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
        """A value usable as a dictionary key without unbounded hashing."""
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
