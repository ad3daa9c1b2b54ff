"""Plan consolidated weights as safetensors: what zero_to_fp32 makes, and of saves that it refuses (ADR 0082).

Every trained parameter from its fp32 master or, in the model's own type, from the model (ADR 0225); whatever
else the model's state dictionary holds as it is, each tensor once; adapters of PEFT in files of their own, as
its `save_pretrained` writes them. Planned like the universal form: outputs are headers of ours and ranges of
the source.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from ckptd.conversion.parts import FLOAT_BYTES, Cast, Literal, Mean, Part, Range, Woven
from ckptd.conversion.plan import Output, OutputFile
from ckptd.conversion.tp_join import Shard, join_as, join_states, model_checks, patterns_of
from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.torchfile.skeleton import BLOCK_BYTES
from ckptd.formats.torchfile.values import ITEM_BYTES
from ckptd.formats.zero.contents import contents, expert_names
from ckptd.formats.zero.round_robin import restore_addresses
from ckptd.formats.zero.shards import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.conversion.plan import OutputCheck
    from ckptd.conversion.tp_join import JoinedState
    from ckptd.formats.zero.save import Read, Save
    from ckptd.formats.zero.shards import Parameter, StateRanges


# --- names of PEFT's adapters -------------------------------------------------------------------------
# In a model's state dictionary the adapter's name follows the tuner's part, `….lora_A.default.weight`; in
# `adapter_model.safetensors` it is left out, since PEFT puts in the name that the adapter is loaded under
# (docs/formats.md §8).

ADAPTER_FILE = "adapter_model.safetensors"
DEFAULT = "default"
"""The adapter that `save_pretrained` writes into the folder itself; every other has a folder of its name."""
_TUNER = re.compile(
    r"(?P<head>base_model\..+?)\.(?P<part>(?:lora|ia3|oft|boft|vera|hada|lokr|randlora|trainable_tokens)_\w+)"
    r"\.(?P<adapter>[^.]+)(?P<rest>\..+)?"
)
_COPY = re.compile(r"(?P<head>base_model\..+?)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_MAGNITUDE = "lora_magnitude_vector"


def adapter_place(name: str) -> tuple[str, str] | None:
    """Return the file and the name in it of an adapter's parameter; None: it is the base model's."""
    if copied := _COPY.fullmatch(name):
        return _file_of(copied["adapter"]), f"{copied['head']}.{copied['rest']}"
    found = _TUNER.fullmatch(name)
    if found is None:
        return None
    # DoRA's vector became a module with a weight; PEFT keeps the older name in files
    rest = "" if found["part"] == _MAGNITUDE else found["rest"] or ""
    return _file_of(found["adapter"]), f"{found['head']}.{found['part']}{rest}"


def _file_of(adapter: str) -> str:
    return ADAPTER_FILE if adapter == DEFAULT else f"{adapter}/{ADAPTER_FILE}"


# --- The safetensors file format: a length, a JSON header, tensors without gaps --------------------------
# It is written here by hand because the tensors are byte ranges of other files and never pass through
# memory (docs/formats.md §8). Within a file tensors are ordered by the size of their elements, then by
# name, as the library does.

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors library reads."""
ALIGNMENT_BYTES = 8
CLONE_WORTH_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor: row-major elements of `dtype` (torch's name), made by `parts`; checks of its copies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    checks: tuple[OutputCheck, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(part.nbytes for part in self.parts)


def file_parts(entries: Sequence[TensorEntry], *, block: bool) -> tuple[Part, ...]:
    """The parts of a file that holds `entries`; `block`: place the data so that most of it can be cloned.

    Raises:
        RefusedError: a type that the format does not have, or a header beyond its limit.
    """
    ordered = sorted(entries, key=lambda e: (-ITEM_BYTES[e.dtype], e.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in ordered:
        if entry.dtype not in DTYPES:
            raise RefusedError(f"{entry.name} is of type {entry.dtype}, which safetensors does not have")
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    parts = [part for entry in ordered for part in entry.parts]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    length = 8 + len(text)
    if block and (wanted := _congruence(parts)) is not None:
        length += (wanted - length) % BLOCK_BYTES
    length += -length % ALIGNMENT_BYTES
    if length - 8 > MAX_HEADER_BYTES:
        raise RefusedError(
            "its header would be larger than safetensors allows", hint="a smaller --max-shard-size"
        )
    return (Literal(struct.pack("<Q", length - 8) + text.ljust(length - 8)), *parts)


def _congruence(parts: Sequence[Part]) -> int | None:
    """Return the offset modulo the block at which most bytes can be cloned; None: none can."""
    gains: dict[int, int] = {}
    at = 0
    for part in parts:
        if isinstance(part, Range) and part.nbytes >= CLONE_WORTH_BYTES:
            place = (part.offset - at) % BLOCK_BYTES
            if place % ALIGNMENT_BYTES == 0:
                gains[place] = gains.get(place, 0) + part.nbytes
        at += part.nbytes
    return max(gains, key=lambda place: gains[place]) if gains else None


def read_names(fd: int, path: str) -> list[str]:
    """Names of the tensors in the file open at `fd`, whose header must account for every byte.

    Raises:
        DamagedError: truncated, or a header that is none or leaves gaps.
    """
    size = os.fstat(fd).st_size
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little") if len(head) == 8 else size
    if 8 + length > size or length > MAX_HEADER_BYTES:
        raise DamagedError(f"{path} ends inside its header")
    try:
        header = json.loads(os.pread(fd, length, 8))
        header.pop("__metadata__", None)
        spans = sorted(tuple(int(n) for n in entry["data_offsets"]) for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} has no safetensors header") from error
    at = 0
    for begin, end in spans:
        if begin != at or end < begin:
            raise DamagedError(f"{path} has a gap or an overlap at byte {at} of its data")
        at = end
    if 8 + length + at != size:
        raise DamagedError(f"{path} holds {size} bytes instead of {8 + length + at}")
    return [str(name) for name in header]


# --- The layout of the output files ----------------------------------------------------------------------

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LAYOUT = "safetensors"
COMPANION = "companion"
"""Role of the small files that are copied beside the weights."""
PREFIX = "module."
NAMED = 5
"""Names that a note lists before it says how many more there are."""


class WeightsLayout:
    """Yields the outputs of one save; `dtype` fp32, bf16 or fp16; sizes in bytes."""

    def __init__(self, save: Save, dtype: str, *, max_shard_bytes: int, block: bool, strict: bool) -> None:
        restore_addresses(save)
        self.save = save
        self.target = TORCH_NAMES[dtype]
        self.max_shard_bytes = max_shard_bytes
        self.block = block
        self.patterns = patterns_of(save, strict=strict)
        self.contents = contents(save)
        self.names = expert_names(save)
        self.files = self._divide()

    @property
    def tensor_count(self) -> int:
        """Tensors in all files."""
        return sum(len(names) for _, names, _ in self.files)

    @property
    def folders(self) -> set[str]:
        """Names of the adapters that have a folder."""
        return {place.rpartition("/")[0] for place, _, _ in self.files if "/" in place}

    def notes(self) -> tuple[str, ...]:
        """Return notes for the reader of the summary."""
        found: list[str] = []
        if self.contents.leaves_frozen_out:
            found.append(
                "the save leaves frozen parameters out (exclude_frozen_parameters): they are not here"
            )
        if self.contents.lacks_base:
            found.append(
                "adapters alone: the save holds no weight of the model that they adapt "
                "(exclude_frozen_parameters); load that one from its own files"
            )
        if self.contents.aliases:
            tied = [f"{name} = {stored}" for name, stored in sorted(self.contents.aliases.items())]
            found.append(f"stored once under another name: {_listed(tied)}")
        if self.contents.skipped:
            found.append(f"no tensor data in the save: {_listed(self.contents.skipped)}")
        if self.save.layers:
            found.append("names are the pipeline's own, <layer>.<name>: the save knows no others")
        return tuple(found)

    def outputs(self) -> Iterator[Output]:
        """Return the weights file by file, and the index of the model's when there are several."""
        names = list(self._names())
        entries = self._placed()
        where: dict[str, str] = {}
        for (place, members, _), file in zip(self.files, names, strict=True):
            held = [next(entries)[1] for _ in members]
            for entry in held:
                yield from entry.checks
            if not place:
                where.update(dict.fromkeys((e.name for e in held), file))
            yield OutputFile(file, file_parts(held, block=self.block))
        sizes = [size for place, _, size in self.files if not place]
        if len(sizes) > 1:
            total = sum(sizes)
            index = {"metadata": {"total_size": total}, "weight_map": where}
            text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            yield OutputFile("model.safetensors.index.json", (Literal(text.encode()),))

    def _names(self) -> Iterator[str]:
        count, number = sum(not place for place, _, _ in self.files), 0
        for place, _, _ in self.files:
            number += not place
            one = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            yield place or one

    def _divide(self) -> list[tuple[str, list[str], int]]:
        """(adapter's file or "", names, bytes) of each file: the model's filled in order, an adapter whole.

        A tensor beyond the limit lies alone.
        """
        files: list[tuple[str, list[str], int]] = []
        seen: set[tuple[str, str]] = set()
        for place, entry in self._placed():
            if (place, entry.name) in seen or entry.name == "__metadata__":
                raise RefusedError(f"two tensors would be called {entry.name}")
            seen.add((place, entry.name))
            is_open = bool(files) and files[-1][0] == place
            if is_open and (place or files[-1][2] + entry.nbytes <= self.max_shard_bytes):
                _, names, size = files[-1]
                names.append(entry.name)
                files[-1] = (place, names, size + entry.nbytes)
            else:
                files.append((place, [entry.name], entry.nbytes))
        return files or [("", [], 0)]

    def _placed(self) -> Iterator[tuple[str, TensorEntry]]:
        """Entries with their adapter's file: the model's own ("") first, then each adapter's."""
        adapters: dict[str, list[TensorEntry]] = {}
        for entry in self._entries():
            found = adapter_place(entry.name)
            if found is None:
                yield "", entry
            else:
                adapters.setdefault(found[0], []).append(replace(entry, name=found[1]))
        for place, held in sorted(adapters.items()):
            yield from ((place, entry) for entry in held)

    def _entries(self) -> Iterator[TensorEntry]:
        """Trained parameters in the optimizer's order, then what only the model's state dictionary holds."""
        strip = self._has_prefix()
        for ranks in self.save.parameters("fp32"):
            yield from self._trained(ranks, strip)
        for name, by_rank in self.contents.tensors.items():
            ranks = [by_rank[tp] for tp in range(self.save.tp)]
            shapes = [rank.shape for rank in ranks]
            if self.save.tp > 1 and name in self.contents.buffers and not self.patterns.knows(name):
                join = self.patterns.replicated(name, shapes)
            else:
                join = self.patterns.join(name, shapes)
            yield self._entry(ranks, join_as(join, ranks)[1][0], strip)

    def _trained(self, ranks: list[Parameter], strip: bool) -> Iterator[TensorEntry]:
        """Yield one tensor; of experts that several ranks share one a rank, by their global numbers."""
        name = ranks[0].name
        if not ranks[0].experts or self.save.experts.automatic or self.names.globally(name, 0) is None:
            yield self._entry(ranks, self._wanted(ranks), strip)
            return
        for rank in range(self.save.experts.ep):
            own = [_of_expert_rank(one, rank) for one in ranks]
            joined = replace(self._wanted(own), parameter=self.names.globally(name, rank) or name)
            yield self._entry(own, joined, strip)

    def _wanted(self, ranks: list[Parameter]) -> JoinedState:
        """Return the masters, or the model's own copies where those have the type that is wanted."""
        join, (masters,) = join_states(ranks, self.patterns)
        copies = [rank.weight for rank in ranks if rank.weight is not None]
        is_rounded = all(copy.dtype == self.target for copy in copies) and masters.dtype != self.target
        is_scattered = any(len(copy.pieces) > 1 for copy in copies)  # transposed: thousands of pieces
        if join.averaged or len(copies) < len(ranks) or not is_rounded or is_scattered:
            return masters
        held = [replace(rank, states=(copy,)) for rank, copy in zip(ranks, copies, strict=True)]
        copied = join_states(held, self.patterns)[1][0]
        return replace(copied, checks=(*masters.checks, *copied.checks))

    def _has_prefix(self) -> bool:
        return all(n.startswith(PREFIX) for n in (*self.save.trained_shapes, *self.contents.tensors))

    def _entry(self, ranks: list[Parameter], state: JoinedState, strip: bool) -> TensorEntry:
        dtype, parts = state.dtype, state.parts
        if dtype in FLOAT_BYTES and dtype != self.target:
            dtype, parts = self.target, (self._cast(state),) if prod(state.shape) else ()
        return TensorEntry(
            name=state.parameter.removeprefix(PREFIX) if strip else state.parameter,
            dtype=dtype,
            shape=_real_shape(ranks, state.shape),
            parts=parts,
            checks=(*state.checks, *model_checks(ranks)),
        )

    def _cast(self, state: JoinedState) -> Part:
        inner = tuple(part for part in state.parts if isinstance(part, Range | Woven | Mean))
        return Cast(inner, prod(state.shape), state.dtype, self.target)


def _of_expert_rank(parameter: Parameter, rank: int) -> Parameter:
    """Return the tensor of one of the expert-parallel ranks whose tensors follow one another."""

    def own(state: StateRanges) -> StateRanges:
        nbytes = prod(parameter.shape) * state.item_bytes
        cut = Shard(state).cut(rank * nbytes, nbytes)
        return replace(state, pieces=tuple(Piece(r.source, r.offset, r.nbytes) for r in cut))

    (state,), weight = parameter.states, parameter.weight
    return replace(parameter, states=(own(state),), weight=weight and own(weight), experts=0)


def _real_shape(ranks: list[Parameter], joined: tuple[int, ...]) -> tuple[int, ...]:
    """The parameter's own shape where its description by sub-parameters is a view with other dimensions."""
    first = ranks[0].shape
    if len(ranks) == 1 and prod(first) == prod(joined):
        return first
    if len(first) == len(joined) or not first or prod(first[1:]) == 0:
        return joined
    grown = (prod(joined) // prod(first[1:]), *first[1:])
    return grown if prod(grown) == prod(joined) else joined


def companion_files(reads: list[Read], folders: set[str]) -> Iterator[OutputFile]:
    """Copies of the small files that a loader wants beside the weights; their reads follow the shards'.

    `folders`: of the adapters that have one; a configuration in another folder is no adapter's of this save.
    """
    for number, read in enumerate(reads):
        if read.role == COMPANION and read.path.rpartition("/")[0] in {"", *folders}:
            yield OutputFile(read.path, (Range(number, 0, read.size_bytes),))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
