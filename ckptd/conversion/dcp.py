"""Plan a folder of torch.distributed.checkpoint: model and optimizer as FSDP2 and torchtitan load them.

The source is a ZeRO folder, or a universal one. Model values are the fp32 masters, moments are as the
optimizer keeps them (docs/formats.md §9). Planned like the universal form: each tensor is a `torch.save`
archive of a header of ours and ranges of the source, many of them in one `.distcp` file; `.metadata` names
them. A name costs a row there and no bytes, so a tensor goes by every name that a loader asks for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.conversion.archives import archive_parts, placeholder, ranges_in
from ckptd.conversion.parts import Literal, Part, Range
from ckptd.conversion.plan import MAX_LINE_BYTES, Output, OutputFile
from ckptd.conversion.tp_join import model_checks
from ckptd.errors import RefusedError
from ckptd.formats.torchfile.sharded import (
    METADATA,
    SUFFIX,
    Chunk,
    Entry,
    Item,
    ShardedTensor,
    write_metadata,
)
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero.contents import contents
from ckptd.formats.zero.facts import as_dict
from ckptd.formats.zero.round_robin import restore_addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.conversion.plan import OutputCheck
    from ckptd.formats.zero.save import Save
    from ckptd.formats.zero.shards import Parameter, StateRanges

LAYOUT = "torch.distributed.checkpoint"
MODEL, OPTIMIZER = "model", "optimizer"
PREFIX = "module."
ADAM = {"exp_avg", "exp_avg_sq"}
ADAM_SETTINGS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Settings of torch's Adam and AdamW that DeepSpeed's own do not have; a loader asks for each."""
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Value:
    """Hold the content of one archive, with its names and its places in a state dictionary."""

    paths: tuple[Path, ...]
    value: Any
    parts: tuple[Part, ...] | None
    """The elements of a tensor; None: a value whose tensors, if any, lie in `source`."""
    source: int = 0
    checks: tuple[OutputCheck, ...] = ()


class DcpLayout:
    """Yields the outputs of one save; sizes in bytes.

    Raises:
        RefusedError: experts, tensor or pipeline parallelism.
    """

    def __init__(self, save: Save, *, max_shard_bytes: int, block: bool) -> None:
        _refuse(save)
        restore_addresses(save)
        self.save = save
        self.max_shard_bytes = max_shard_bytes
        self.block = block
        self.model_rank = save.model_ranks[0][0]
        self.contents = contents(save)
        trained = [name for group in self.model_rank.shapes for name in group]
        self.strip = all(n.startswith(PREFIX) for n in (*trained, *self.contents.tensors))
        names = {self._short(n) for n in (*trained, *self.contents.tensors, *self.contents.aliases)}
        heads = tuple(f"{name}." for name in (MODEL, OPTIMIZER))
        self.is_bare = not any(n.startswith(heads) and n.partition(".")[2] in names for n in names)
        """Model names stand without `model.` too, as torchtitan asks for them."""
        self.groups = self._groups()
        self.group_numbers = self._group_numbers()

    def notes(self) -> tuple[str, ...]:
        """Return notes for the reader of the summary."""
        found = [
            "the schedule of the learning rate and the data's position are not in it: the trainer sets them"
        ]
        if self.contents.leaves_frozen_out or self.contents.lacks_base:
            found.append(
                "the save leaves frozen parameters out (exclude_frozen_parameters): they are not here"
            )
        if not self.is_bare:
            found.append(
                "names of the model repeat each other under `model.`: torchtitan's own names are left out"
            )
        if any("decoupled_weight_decay" not in group for group in self._raw_groups()) and self._is_adam():
            decay = "AdamW" if self._is_decoupled() else "Adam"
            found.append(f"the optimizer is taken for {decay} by its configuration")
        return tuple(found)

    def outputs(self) -> Iterator[Output]:
        """Yield the `.distcp` files, then `.metadata`."""
        entries: dict[str, Entry] = {}
        paths: dict[str, Path] = {}
        parts: list[Part] = []
        number = at = line_bytes = 0
        for held in self._values():
            yield from held.checks
            made = self._archive(held, at)
            is_full = at + _nbytes(made) > self.max_shard_bytes or line_bytes > MAX_LINE_BYTES // 4
            if parts and is_full:
                yield OutputFile(_file(number), tuple(parts))
                parts, number, at, line_bytes = [], number + 1, 0, 0
                made = self._archive(held, at)
            entry = _entry(held, Item(_file(number), at, _nbytes(made)))
            for path in held.paths:
                name = ".".join(map(str, path))
                if name in entries:
                    raise RefusedError(f"two values would be called {name}")
                entries[name], paths[name] = entry, path
            parts += made
            at += _nbytes(made)
            line_bytes += sum(2 * len(part.data) if isinstance(part, Literal) else 64 for part in made)
        yield OutputFile(_file(number), tuple(parts))
        metadata = write_metadata(entries, paths)
        if len(metadata) > MAX_LINE_BYTES // 2:
            raise RefusedError(f"its .metadata of {len(entries)} names would be larger than ckptd writes")
        yield OutputFile(METADATA, (Literal(metadata),))

    def _archive(self, held: _Value, at: int) -> tuple[Part, ...]:
        parts = held.parts
        ranges = ranges_in(held.source) if parts is None else lambda _: parts
        return archive_parts(held.value, METADATA, ranges, block=self.block, at=at)

    # --- what there is ---------------------------------------------------------------------------------

    def _values(self) -> Iterator[_Value]:
        """Yield everything state by state in source order, so that a cold source is read forwards."""
        names = self.save.state_names
        for state in names:
            for ranks in self.save.parameters(state):
                for ranges in ranks[0].states:
                    yield self._state(ranks[0], ranges)
        for by_rank in self.contents.tensors.values():
            yield self._state(by_rank[0], by_rank[0].states[0])
        for ranks in self.save.parameters(names[0]):
            yield from self._scalars(ranks[0])
        yield from self._settings()

    def _state(self, parameter: Parameter, ranges: StateRanges) -> _Value:
        parts = tuple(Range(p.source, p.offset, p.nbytes) for p in ranges.pieces)
        name = self._short(parameter.name)
        if ranges.name not in ("fp32", "stored"):
            paths: tuple[Path, ...] = ((OPTIMIZER, "state", name, ranges.name),)
        else:
            paths = tuple(path for n in self._names(parameter.name) for path in self._model_paths(n))
        checks = model_checks([parameter]) if ranges.name == "fp32" else ()
        return _Value(paths, placeholder(ranges.dtype, parameter.shape), parts, checks=checks)

    def _names(self, stored: str) -> list[str]:
        """Return every name of the state dictionary under which a tensor is known (tied parameters)."""
        aliases = self.contents.aliases
        return [self._short(n) for n in (stored, *(a for a, target in aliases.items() if target == stored))]

    def _model_paths(self, name: str) -> list[Path]:
        return [(MODEL, name), (name,)] if self.is_bare else [(MODEL, name)]

    def _scalars(self, parameter: Parameter) -> Iterator[_Value]:
        """Yield the optimizer's numbers of a parameter; torch keeps a step as a float tensor."""
        name = self._short(parameter.name)
        found = dict(parameter.scalars)
        group = self.groups[self.group_numbers[parameter.name]]
        if "step" not in found and "step" in group:
            found["step"] = group["step"]
        for key, value in found.items():
            path: tuple[Path, ...] = ((OPTIMIZER, "state", name, key),)
            if isinstance(value, Tensor):
                part = Range(parameter.scalar_source, value.byte_offset, value.item_bytes)
                yield _Value(path, placeholder(value.dtype, ()), (part,))
            elif key == "step":
                yield _Value(path, placeholder("float32", ()), (Literal(struct.pack("<f", value)),))
            else:
                yield _Value(path, value, None)

    def _settings(self) -> Iterator[_Value]:
        """Yield the groups' settings, by group and (for a flattened optimizer) by parameter."""
        source = self.save.rank0_optim.source.index
        members: list[list[str]] = [[] for _ in self.groups]
        for shapes in self.model_rank.shapes:
            for name in shapes:
                members[self.group_numbers[name]].append(self._short(name))
        for number, (group, names) in enumerate(zip(self.groups, members, strict=True)):
            head = (OPTIMIZER, "param_groups", number)
            yield _Value(((*head, "params"),), names, None)
            for key, value in group.items():
                flat = tuple((OPTIMIZER, f"param_groups.{name}.{key}") for name in names)
                yield _Value(((*head, key), *flat), value, None, source)

    # --- the optimizer's groups --------------------------------------------------------------------------

    def _raw_groups(self) -> list[dict[Any, Any]]:
        groups = self.save.param_groups
        if not isinstance(groups, list) or not groups:
            raise RefusedError(f"{self.save.rank0_optim.source.path} has no param_groups")
        return [as_dict(group) for group in groups]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the settings of each group, with those that torch's own optimizer would ask for."""
        more: dict[str, Any] = {}
        if self._is_adam():
            more = {**ADAM_SETTINGS, "decoupled_weight_decay": self._is_decoupled()}
        found = []
        for group in self._raw_groups():
            kept = {str(k): v for k, v in group.items() if k != "params"}
            found.append({**more, **kept, "initial_lr": kept.get("initial_lr", kept.get("lr"))})
        return found

    def _is_adam(self) -> bool:
        return set(self.save.state_names) >= ADAM

    def _is_decoupled(self) -> bool:
        """Tell whether DeepSpeed's Adam decays weights apart from the gradient, its default."""
        config = self.save.rank0_optim.root.get("ds_config") or self.save.rank0_model.root.get("ds_config")
        optimizer = as_dict(as_dict(config).get("optimizer"))
        is_adam = str(optimizer.get("type")).lower() == "adam"
        return not (is_adam and as_dict(optimizer.get("params")).get("adam_w_mode") is False)

    def _group_numbers(self) -> dict[str, int]:
        """Return the number of each parameter's group; stage 3 divides groups, and numbers the pieces."""
        raw = self._raw_groups()
        numbers = {piece: g for g, group in enumerate(raw) for piece in _integers(group.get("params"))}
        if any(piece not in numbers for piece in range(len(self.model_rank.shapes))):
            if len(raw) not in (1, len(self.model_rank.shapes)):
                path = self.save.rank0_optim.source.path
                raise RefusedError(
                    f"{path} does not say which parameters are in which of its {len(raw)} groups"
                )
            numbers = {piece: min(piece, len(raw) - 1) for piece in range(len(self.model_rank.shapes))}
        return {
            name: numbers[piece] for piece, shapes in enumerate(self.model_rank.shapes) for name in shapes
        }

    def _short(self, name: str) -> str:
        return name.removeprefix(PREFIX) if self.strip else name


def _refuse(save: Save) -> None:
    """Refuse what has no rule here yet.

    Raises:
        RefusedError: with what it is, and a form that there is.
    """
    kinds = {
        "experts": bool(save.experts.groups) or any(layer.number is None for layer in save.layers),
        "tensor parallelism": save.tp > 1,
        "pipeline parallelism": save.pp > 1 or bool(save.layers),
    }
    for kind, is_used in kinds.items():
        if is_used:
            raise RefusedError(
                f"a save with {kind} is not converted to dcp yet",
                hint="--form weights-fp32 exports the model, --form universal resumes in DeepSpeed",
            )


def _integers(value: Any) -> list[int]:
    return [n for n in value if isinstance(n, int)] if isinstance(value, list) else []


def _nbytes(parts: tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in parts)


def _file(number: int) -> str:
    """Return a part's name, as torch's first rank writes it."""
    return f"__0_{number}{SUFFIX}"


def _entry(held: _Value, item: Item) -> Entry:
    if held.parts is None:
        return item
    shape = held.value.shape
    return ShardedTensor(held.value.dtype, shape, (Chunk((0,) * len(shape), shape, item),))
