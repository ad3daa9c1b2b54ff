"""Read the model's state besides the optimizer's master weights: frozen parameters, buffers, second names.

Exported weights need it (docs/formats.md §2.3, §8); resuming does not. Names are those of the trainer's
state dictionary; a pipeline has none, so there they are `<layer>.<name>` as in its optimizer files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.torchfile.values import ITEM_BYTES, Tensor
from ckptd.formats.zero.experts import ExpertNames
from ckptd.formats.zero.facts import as_dict, numel
from ckptd.formats.zero.shards import Parameter, Piece, StateRanges

if TYPE_CHECKING:
    from ckptd.formats.zero.save import ModelRank, Save

MAX_RUNS = 1 << 16
"""Pieces that a tensor with gaps between its rows may fall into."""
_ADAPTER = re.compile(r"(?:^|\.)(?:lora|ia3|oft|boft|vera|hada|lokr|randlora)_\w+(?:\.|$)")
_BASE_LAYER = re.compile(r"(?:^|\.)base_layer\.")
"""PEFT's names: what it adds to a layer, and the layer that it adds to."""
STORED = "stored"
"""Name of the one state of such a tensor."""


@dataclass(slots=True)
class Contents:
    """`tensors[name][tp]`: what no optimizer holds, one shard per tensor rank; `aliases`: name → stored name.

    `buffers`: which of the names are buffers; `skipped`: entries of the state dictionary that hold no data.
    """

    tensors: dict[str, dict[int, Parameter]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)
    leaves_frozen_out: bool = False
    """Saved with `exclude_frozen_parameters`."""
    lacks_base: bool = False
    """Adapters of PEFT without a weight of the model that they adapt."""

    def add(self, name: str, tp: int, parameter: Parameter) -> None:
        """The first holder counts (layers of one tied module hold the same)."""
        self.tensors.setdefault(name, {}).setdefault(tp, parameter)


def contents(save: Save) -> Contents:
    """Everything of a save that was surveyed with `contents=True`.

    Raises:
        RefusedError, DamagedError: tensor ranks or layers that contradict each other, or are missing.
    """
    found = Contents()
    trained = save.trained_shapes
    for model in save.models:
        names = model.root.get("buffer_names")
        found.buffers.update(n for n in names if isinstance(n, str)) if isinstance(names, list) else None
    if any(isinstance(model.root.get("module"), dict) for model in save.models):
        for row in save.model_ranks:
            for model_rank in row:
                _Module(save, model_rank, trained, found).read()
    else:
        _read_layers(save, trained, found)
    _read_experts(save, trained, found)
    for name, ranks in found.tensors.items():
        if len(ranks) != save.tp:
            missing = next(tp for tp in range(save.tp) if tp not in ranks)
            raise RefusedError(f"{name} is not on tensor rank {missing}, but on others")
    found.lacks_base = not found.leaves_frozen_out and _lacks_base(trained, found)
    return found


def _lacks_base(trained: dict[str, tuple[int, ...]], found: Contents) -> bool:
    """Tell whether only adapters of PEFT were saved.

    At stage 1 DeepSpeed writes no list of frozen parameters, so that a save with `exclude_frozen_parameters`
    does not say what it leaves out; but adapters have a base, and it is frozen or trained.
    """
    are_adapters = any(_ADAPTER.search(name) for name in trained)
    others = (found.tensors.keys() | found.aliases.keys()) - found.buffers
    return are_adapters and not others and not any(_BASE_LAYER.search(name) for name in trained)


class _Module:
    """The state dictionary of one model-parallel rank."""

    def __init__(
        self, save: Save, model_rank: ModelRank, trained: dict[str, tuple[int, ...]], found: Contents
    ) -> None:
        self.model_rank, self.trained, self.found = model_rank, trained, found
        root = model_rank.model.root
        self.partitioned = save.stage >= 3
        self.module = as_dict(root.get("module"))
        self.shared = {k: v for k, v in as_dict(root.get("shared_params")).items() if isinstance(v, str)}
        self.frozen = {str(k): v for k, v in as_dict(root.get("frozen_param_shapes")).items()}
        excluded = save.stage >= 2 and root.get("frozen_param_shapes", {}) is None
        found.leaves_frozen_out = found.leaves_frozen_out or excluded

    def read(self) -> None:
        """Tensors of the dictionary, then frozen parameters that only fragments hold."""
        places: dict[Any, str] = {}
        for name in (*self.trained, *self.frozen):
            tensor = self.module.get(name)
            if isinstance(tensor, Tensor) and tensor.numel:
                places.setdefault(_place(tensor), name)
        for name, tensor in self.module.items():
            if not isinstance(tensor, Tensor):
                self.found.skipped.append(str(name))
            elif name not in self.trained:
                self._one(name, tensor, places)
        for name, shape in self.frozen.items():
            if name not in self.shared and name not in self.trained and name not in self.found.aliases:
                self._frozen(name, shape)

    def _one(self, name: str, tensor: Tensor, places: dict[Any, str]) -> None:
        if name in self.shared:
            self.found.aliases[name] = self.shared[name]
            return
        if self.partitioned and name in self.frozen:
            return
        if self.partitioned and tensor.numel == 0 and name not in self.found.buffers:
            self.found.skipped.append(name)
            return
        owner = places.setdefault(_place(tensor), name) if tensor.numel else name
        if owner != name:
            self.found.aliases[name] = owner
        else:
            self.found.add(
                name, self.model_rank.tp, of_tensor(name, tensor, self.model_rank.model.source.index)
            )

    def _frozen(self, name: str, shape: Any) -> None:
        """Stage 3: `ceil(numel / ranks)` elements on each rank; before: the whole on the first."""
        total = numel(shape)
        if total is None:
            raise RefusedError(
                f"{self.model_rank.model.source.path} names a frozen {name} of shape {shape!r}"
            )
        if self.model_rank.tp in self.found.tensors.get(name, {}):
            return
        pieces: list[Piece] = []
        left, dtype = total, ""
        for rank in self.model_rank.frozen:
            if name not in rank.pieces:
                raise DamagedError(f"the frozen parameter {name} is not in every model-states file")
            offset, count, dtype_here = rank.pieces[name]
            if dtype not in ("", dtype_here):
                raise RefusedError(f"the frozen parameter {name} has other types on some ranks")
            dtype, count = dtype_here, min(count, left)
            left -= count
            if count:
                pieces.append(Piece(rank.source, offset, count * ITEM_BYTES[dtype]))
        if left or not dtype:
            raise DamagedError(f"the ranks hold {total - left} of {total} elements of the frozen {name}")
        self.found.add(name, self.model_rank.tp, _parameter(name, tuple(shape), dtype, pieces))


def _read_layers(save: Save, trained: dict[str, tuple[int, ...]], found: Contents) -> None:
    """A pipeline's layer files; what the optimizer holds is skipped, tied layers go by their common name."""
    here = {(layer.number, layer.tp) for layer in save.layers}
    numbers = {int(head) for head in (n.partition(".")[0] for n in trained) if head.isdecimal()}
    for number, tp in product(sorted(numbers), range(save.tp)):
        if (number, tp) not in here:
            raise DamagedError(
                f"layer_{number:02d}-…model_states.pt of tensor rank {tp} is missing",
                hint="it would hold buffers and frozen parameters; gather the shards of all nodes",
            )
    prefixes = layer_prefixes(save)
    for layer in save.layers:
        if layer.number is None:
            continue
        tensors = {str(k): v for k, v in layer.opened.root.items() if isinstance(v, Tensor)}
        for local, tensor in tensors.items():
            name = prefixes[layer.number] + local
            if name not in trained:
                found.add(name, layer.tp, of_tensor(name, tensor, layer.opened.source.index))


def layer_prefixes(save: Save) -> dict[int, str]:
    """Return what the names in each layer file of a pipeline begin with in the optimizer's."""
    trained = save.trained_shapes
    numbers = {int(head) for head in (n.partition(".")[0] for n in trained) if head.isdecimal()}
    found: dict[int, str] = {}
    for layer in save.layers:
        if layer.number is not None and layer.number not in found:
            root = layer.opened.root
            shapes = {str(k): v.shape for k, v in root.items() if isinstance(v, Tensor)}
            is_own = layer.number in numbers
            found[layer.number] = f"{layer.number}." if is_own else _tied(layer.number, shapes, trained)
    return found


def expert_names(save: Save) -> ExpertNames:
    """Return the names of a save's native experts.

    By the files of experts too: of those that a rank holds some may be frozen.
    """
    held = (str(name) for layer in save.layers if layer.number is None for name in layer.opened.root)
    return ExpertNames(save.trained_shapes, held, save.experts.ep)


def _read_experts(save: Save, trained: dict[str, tuple[int, ...]], found: Contents) -> None:
    """Frozen tensors of native experts, which lie in files of their own; an AutoEP layer is one parameter."""
    if save.experts.automatic:
        return
    names = expert_names(save)
    known = {names.globally(name, rank) for name in trained for rank in range(save.experts.ep)}
    for layer in save.layers:
        for name, tensor in layer.opened.root.items() if layer.number is None else ():
            if isinstance(tensor, Tensor) and name not in known:
                found.add(str(name), layer.tp, of_tensor(str(name), tensor, layer.opened.source.index))


def _tied(number: int, shapes: dict[str, tuple[int, ...]], trained: dict[str, tuple[int, ...]]) -> str:
    """The prefix of a layer without trained parameters of its own: of the tied module that it looks like."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in trained.items():
        head, _, rest = name.partition(".")
        key, _, local = rest.partition(".")
        if head == "tied_modules":
            modules.setdefault(key, {})[local] = shape
    for key, members in modules.items():
        if all(shapes.get(local) == shape for local, shape in members.items()):
            return f"tied_modules.{key}."
    return f"{number}."


def of_tensor(name: str, tensor: Tensor, source: int) -> Parameter:
    """Return a saved tensor as byte ranges in row-major order of its shape.

    Raises:
        RefusedError: its rows lie too scattered.
    """
    if tensor.contiguous:
        pieces = [Piece(source, tensor.byte_offset, tensor.nbytes)] if tensor.numel else []
        return _parameter(name, tensor.shape, tensor.dtype, pieces)
    width, dims = 1, list(zip(tensor.shape, tensor.stride, strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] == width):
        width *= dims.pop()[0]
    if prod(size for size, _ in dims) > MAX_RUNS:
        raise RefusedError(f"{name} is stored transposed, in more than {MAX_RUNS} pieces")
    item = tensor.item_bytes
    pieces = [
        Piece(
            source,
            tensor.byte_offset + item * sum(i * stride for i, (_, stride) in zip(index, dims, strict=True)),
            width * item,
        )
        for index in product(*(range(size) for size, _ in dims))
    ]
    return _parameter(name, tensor.shape, tensor.dtype, pieces)


def _parameter(name: str, shape: tuple[int, ...], dtype: str, pieces: list[Piece]) -> Parameter:
    state = StateRanges(STORED, dtype, ITEM_BYTES[dtype], tuple(pieces))
    return Parameter(name, shape, (state,), {}, pieces[0].source if pieces else 0)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.storage.key, tensor.start, tensor.dtype, tensor.shape, tensor.stride)
