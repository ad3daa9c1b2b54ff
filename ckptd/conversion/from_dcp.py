"""Plan the universal form from a folder of torch.distributed.checkpoint, as FSDP2 or ckptd wrote it.

`.metadata` says which archive of which `.distcp` file holds which box of a tensor; a box is a block of the
full parameter, so that the geometry of tensor ranks puts any sharding together (docs/formats.md §9).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from ckptd.base.extents import identity_of
from ckptd.conversion.archives import archive_parts, placeholder
from ckptd.conversion.dcp import OPTIMIZER
from ckptd.conversion.parts import Literal, Part
from ckptd.conversion.plan import Output, OutputFile, OutputLink
from ckptd.conversion.tp_join import Shard, parts_of_steps
from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.torchfile.archive import read_directory
from ckptd.formats.torchfile.fingerprint import raw_fingerprint
from ckptd.formats.torchfile.sharded import METADATA, Chunk, Item, ShardedTensor, read_metadata
from ckptd.formats.torchfile.skeleton import MirrorFd, fill
from ckptd.formats.torchfile.unpickler import unpickle
from ckptd.formats.torchfile.values import ITEM_BYTES, Size, Tensor
from ckptd.formats.zero.blocks import Block, dense, sequence
from ckptd.formats.zero.contents import of_tensor
from ckptd.formats.zero.facts import scalar, shown
from ckptd.formats.zero.save import Read
from ckptd.formats.zero.survey import refuse_folder_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.formats.torchfile.sharded import Entry

Opening = Callable[[str], AbstractContextManager[int]]
READ_BY = "0.19.4"
"""The first DeepSpeed whose loaders of all stages read the layout that is written."""
_GROUPS = ".param_groups."
_OF_THE_TRAINER = ("dataloader.", "lr_scheduler.", "train_state.")
"""State of torchtitan beside the model, whose names stand at the top too."""
_NUMBERED = re.compile(r"(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """A tensor of the folder: row-major elements of `dtype`, made by `parts`."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Sharded:
    """The folder, opened file by file; `reads` are the sources of the plan.

    Raises:
        TornArchiveError, RefusedError, DamagedError: its `.metadata` or a part is no such file.
    """

    def __init__(self, opening: Opening, names: list[str]) -> None:
        self.opening = opening
        self.reads: list[Read] = []
        if METADATA not in names:
            raise DamagedError(
                "there are *.distcp files without .metadata, which torch writes last: the save is not whole",
                hint="copy every file of the save here, or use an older checkpoint",
            )
        with opening(METADATA) as fd:
            self._read(METADATA, fd)
            data = os.pread(fd, self.reads[0].size_bytes, 0)
        self.entries: dict[str, Entry] = read_metadata(data, METADATA)
        self.numbers: dict[str, int] = {}
        items = [item for entry in self.entries.values() for item in items_of(entry)]
        for path in sorted({item.path for item in items}):
            if path not in names:
                raise DamagedError(
                    f"{path}, which .metadata names, is missing", hint="copy every file of the save here"
                )
            self.numbers[path] = len(self.reads)
            with opening(path) as fd:
                self._read(path, fd)
        for item in items:
            size_bytes = self.reads[self.numbers[item.path]].size_bytes
            if item.offset < 0 or item.nbytes < 0 or item.offset + item.nbytes > size_bytes:
                raise DamagedError(f"{item.path} has {size_bytes} bytes, .metadata tells of more")
        self._values: dict[Item, Any] = {}

    def _read(self, path: str, fd: int) -> None:
        status = os.fstat(fd)
        mark = raw_fingerprint(fd)
        self.reads.append(Read(path, "part", status.st_size, identity_of(status), mark))

    def tensor(self, name: str) -> FolderTensor:
        """Return a tensor, its chunks put together.

        Raises:
            DamagedError, RefusedError: a chunk is not what `.metadata` says, or the chunks do not cover it.
        """
        entry = self.entries.get(name)
        if not isinstance(entry, ShardedTensor):
            raise DamagedError(f"{METADATA} names no tensor {name}")
        shape, strides = entry.shape, dense(entry.shape)
        chunks = [chunk for chunk in entry.chunks if prod(chunk.sizes)]
        blocks = [
            Block(
                rank,
                chunk.sizes,
                sum(at * step for at, step in zip(chunk.offsets, strides, strict=True)),
                strides,
                0,
                dense(chunk.sizes),
            )
            for rank, chunk in enumerate(chunks)
        ]
        if any(o + n > whole for c in chunks for o, n, whole in zip(c.offsets, c.sizes, shape, strict=True)):
            raise DamagedError(f"{name}: a chunk lies outside its tensor")
        shards = [Shard(self._chunk(name, entry.dtype, chunk)) for chunk in chunks]
        try:
            steps = sequence(blocks, prod(shape))
            parts = tuple(parts_of_steps(steps, shards, ITEM_BYTES[entry.dtype]))
        except RefusedError as error:
            raise RefusedError(f"{name}: {error.message}".replace("tensor-parallel ", "")) from error
        return FolderTensor(entry.dtype, shape, parts)

    def _chunk(self, name: str, dtype: str, chunk: Chunk) -> Any:
        """Return one chunk as ranges of its file."""
        item = chunk.item
        with self._archive(item) as fd:
            value = self._unpickled(fd, item)
        if not isinstance(value, Tensor) or (value.dtype, value.shape) != (dtype, chunk.sizes):
            raise DamagedError(f"{name}: a chunk in {item.path} is not what .metadata says")
        storage = replace(value.storage, offset=value.storage.offset + item.offset)
        return of_tensor(name, replace(value, storage=storage), self.numbers[item.path]).states[0]

    def value(self, name: str) -> Any:
        """Return a plain value, or the number in a tensor of one element."""
        entry = self.entries[name]
        if isinstance(entry, ShardedTensor):
            if len(entry.chunks) != 1:
                raise DamagedError(f"{name} is no single number")
            entry = entry.chunks[0].item
        if entry not in self._values:
            with self._archive(entry) as fd:
                self._values[entry] = _plain(self._unpickled(fd, entry), fd)
        return self._values[entry]

    @contextmanager
    def _archive(self, item: Item) -> Iterator[int]:
        """Open a mirror in memory of one archive of a file: what planning reads, elsewhere holes."""
        name = f"{item.path} at {item.offset}"
        mirror = os.memfd_create("archive", os.MFD_CLOEXEC)
        try:
            os.ftruncate(mirror, item.nbytes)
            with self.opening(item.path) as fd:
                fill(
                    mirror, name, lambda at, nbytes: os.pread(fd, nbytes, item.offset + at), needs_crcs=False
                )
            yield MirrorFd(mirror)  # a number in a tensor that was not read is no 0
        finally:
            os.close(mirror)

    @staticmethod
    def _unpickled(fd: int, item: Item) -> Any:
        name = f"{item.path} at {item.offset}"
        directory = read_directory(fd, name)
        record = directory.records["data.pkl"]
        return unpickle(os.pread(fd, record.size, record.offset), name, directory)


class UniversalFromDcp:
    """Yields the outputs of one folder, in the superset layout of the universal form.

    Raises:
        RefusedError: it holds no optimizer, or names parameters in a way that has no universal form.
    """

    def __init__(self, held: Sharded, *, block: bool) -> None:
        self.held = held
        self.block = block
        self.head = self._head()
        self.states = self._states()
        self.prefix = self._prefix()
        self.step = self._step()
        self.groups = self._groups()
        for name in self.states:
            refuse_folder_name(name, METADATA)

    @property
    def parameter_count(self) -> int:
        """Parameters that the optimizer trains."""
        return len(self.states)

    def notes(self) -> tuple[str, ...]:
        """Return notes for the reader of the summary."""
        found = [
            "DeepSpeed's scheduler goes on at this step; its own settings are those of the new run",
            "stage 3 with several sub-groups counts each step once per sub-group (docs/formats.md §5.1)",
        ]
        if self.others:
            found.append(
                "frozen parameters and buffers are kept, but DeepSpeed does not read them from a universal "
                "form: load them from the base model"
            )
        return tuple(found)

    @property
    def others(self) -> list[str]:
        """Names of the model's tensors that the optimizer does not train."""
        beside = (f"{self.head}.", *(() if self.prefix else _OF_THE_TRAINER))
        return [
            key.removeprefix(self.prefix)
            for key, entry in self.held.entries.items()
            if key.startswith(self.prefix)
            and not key.startswith(beside)
            and isinstance(entry, ShardedTensor)
            and key.removeprefix(self.prefix) not in self.states
        ]

    def outputs(self) -> Iterator[Output]:
        """Yield the files of the form; a step is a tensor, as torch's optimizers keep it."""
        names = {state: None for states in self.states.values() for state in states if state != "step"}
        for state in (*names, "fp32"):
            for fqn, states in self.states.items():
                if state == "fp32" or state in states:
                    key = f"{self.prefix}{fqn}" if state == "fp32" else f"{self.head}.state.{fqn}.{state}"
                    yield self._state_file(fqn, state, self.held.tensor(key))
        for fqn, states in self.states.items():
            if "step" in states:
                step = FolderTensor("float32", (), (_step_part(self._steps_of(fqn)),))
                yield self._archive(f"zero/{fqn}/step.pt", lambda tensor: tensor, {"": step})
        yield self._optimizer_file()
        yield from self._model_files()

    def _state_file(self, fqn: str, state: str, made: FolderTensor) -> OutputFile:
        return self._archive(
            f"zero/{fqn}/{state}.pt", lambda tensor: {"cat_dim": 0, "param": tensor}, {"": made}
        )

    def _optimizer_file(self) -> OutputFile:
        groups = [{**group, "params": [number]} for number, (group, _) in enumerate(self.groups)]
        step = FolderTensor("float32", (), (_step_part(self.step),))

        def value(tensor: Tensor) -> Any:
            return {
                "zero_stage": 1,
                "ds_version": READ_BY,
                "param_groups": groups,
                "optimizer_state_dict": {"state": {0: {"step": tensor}}, "param_groups": groups},
            }

        return self._archive("zero/optimizer_state.pt", value, {"": step})

    def _model_files(self) -> Iterator[Output]:
        """Yield the model states by both names that the loaders of the stages look for."""
        shapes = [{name: Size(self._shape(name)) for name in names} for _, names in self.groups]
        held = {name: self.held.tensor(f"{self.prefix}{name}") for name in self.others}

        def value(*tensors: Tensor) -> Any:
            return {
                "module": dict(zip(held, tensors, strict=True)),
                "buffer_names": [],
                "optimizer": None,
                "param_shapes": shapes,
                "lr_scheduler": _schedule(self.step),
                "sparse_tensor_module_names": [],
                "skipped_steps": 0,
                "global_steps": self.step,
                "dp_world_size": 1,
                "mp_world_size": 1,
                "ds_version": READ_BY,
            }

        yield self._archive("mp_rank_00_model_states.pt", value, held)
        yield OutputLink("zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")

    def _archive(self, path: str, value: Callable[..., Any], held: dict[str, FolderTensor]) -> OutputFile:
        """Return an archive of what `value` makes of a tensor for each of `held`, in their order."""
        tensors = [placeholder(one.dtype, one.shape) for one in held.values()]
        parts = {id(tensor): one.parts for tensor, one in zip(tensors, held.values(), strict=True)}
        made = archive_parts(value(*tensors), path, lambda tensor: parts[id(tensor)], block=self.block)
        return OutputFile(path, made)

    # --- names -------------------------------------------------------------------------------------------

    def _head(self) -> str:
        """Return what the optimizer's names begin with (`optimizer`, `optim`, `app.optim`)."""
        heads = {key.partition(_GROUPS)[0] for key in self.held.entries if _GROUPS in key}
        if len(heads) != 1:
            found = (
                f"{len(heads)} optimizers ({', '.join(sorted(map(shown, heads))[:3])})"
                if heads
                else "no optimizer"
            )
            raise RefusedError(
                f"this folder of torch.distributed.checkpoint holds {found}; the universal form is of one",
                hint=f'save {{"model": …, "{OPTIMIZER}": …}} of get_state_dict in one folder',
            )
        return heads.pop()

    def _states(self) -> dict[str, list[str]]:
        """Return the names of each trained parameter's states, by the parameter's name."""
        head = f"{self.head}.state."
        found: dict[str, list[str]] = {}
        for key in self.held.entries:
            if key.startswith(head):
                fqn, _, state = key[len(head) :].rpartition(".")
                found.setdefault(fqn, []).append(state)
        if not found:
            raise RefusedError(
                "the optimizer keeps no state of any parameter: there is nothing to resume from",
                hint="the model loads as it is with torch.distributed.checkpoint.load",
            )
        if any(not fqn or fqn.isdecimal() for fqn in found):
            raise RefusedError(
                "the optimizer names its parameters by numbers, which do not say which they are",
                hint="save what torch.distributed.checkpoint.state_dict.get_state_dict returns",
            )
        return found

    def _prefix(self) -> str:
        """Return what the model's names begin with: `model.`, or nothing (torchtitan)."""
        first = next(iter(self.states))
        keys = [key for key in self.held.entries if not key.startswith(f"{self.head}.")]
        for key in keys:
            prefix = key.removesuffix(first)
            is_one = key.endswith(first) and (not prefix or prefix.endswith("."))
            if is_one and all(f"{prefix}{n}" in self.held.entries for n in self.states):
                return prefix
        alone = next((n for n in self.states if not any(f".{key}".endswith(f".{n}") for key in keys)), first)
        raise RefusedError(
            f"the optimizer has states of {shown(alone)}, and no model in this folder has that parameter",
            hint=f'save {{"model": …, "{OPTIMIZER}": …}} of get_state_dict in one folder; a trainer whose '
            "optimizer has other names (torchtitan 0.3: wqkv for wq, wk, wv) resumes from its own folder",
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        entry = self.held.entries[f"{self.prefix}{name}"]
        return entry.shape if isinstance(entry, ShardedTensor) else ()

    # --- numbers -----------------------------------------------------------------------------------------

    def _steps_of(self, fqn: str) -> int:
        step = self.held.value(f"{self.head}.state.{fqn}.step")
        if isinstance(step, bool) or not isinstance(step, int | float) or not isfinite(step):
            raise DamagedError(f"the step of {fqn} is no number")
        return int(step)

    def _step(self) -> int:
        """Return the optimizer's step; parameters that were not always trained may have fewer."""
        return max(
            (self._steps_of(fqn) for fqn, states in self.states.items() if "step" in states), default=0
        )

    def _groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Return (settings, parameters) of each group; a flattened optimizer's by equal settings."""
        head = f"{self.head}{_GROUPS}"
        by_name: dict[str, dict[str, Any]] = {}
        for key in self.held.entries:
            if key.startswith(head):
                numbered = _NUMBERED.fullmatch(key[len(head) :])
                name, setting = numbered.groups() if numbered else _split(key[len(head) :])
                by_name.setdefault(name, {})[setting] = key
        listed = {n: keys for n, keys in by_name.items() if n.isdecimal() and "params" in keys}
        if listed:
            return [self._listed_group(listed[n]) for n in sorted(listed, key=int)]
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name in self.states:
            settings = {k: self.held.value(key) for k, key in by_name.get(name, {}).items()}
            groups.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(name)
        return list(groups.values())

    def _listed_group(self, keys: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
        settings = {k: self.held.value(key) for k, key in keys.items()}
        names = settings.pop("params")
        if not isinstance(names, list):
            raise DamagedError(f"{keys['params']} is no list of parameters")
        return settings, [name for name in names if name in self.states]


def _split(text: str) -> tuple[str, str]:
    name, _, setting = text.rpartition(".")
    return name, setting


def items_of(entry: Entry) -> list[Item]:
    """Return the archives that a name's value lies in."""
    return [chunk.item for chunk in entry.chunks] if isinstance(entry, ShardedTensor) else [entry]


def _plain(value: Any, fd: int) -> Any:
    """Return a value with the tensors of one element in it as numbers; `fd` is open on its archive."""
    if isinstance(value, Tensor):
        return scalar(value, fd)
    if isinstance(value, tuple | list) and not isinstance(value, Size):
        return type(value)(_plain(one, fd) for one in value)
    return value


def _schedule(step: int) -> dict[str, int]:
    """Return the state of a scheduler after `step` steps, by DeepSpeed's name for it and torch's."""
    return {"last_batch_iteration": step - 1, "last_epoch": step, "_step_count": step + 1}


def _step_part(step: int) -> Literal:
    return Literal(struct.pack("<f", step))
