"""Find what proves the addresses of a parameter: the model's own copy of it, and its other states' places.

After a step DeepSpeed copies the masters to the model, so a save holds each weight twice, written from
other memory and under other addresses: a master at the right address rounds to the model's weight. Moments
have no copy, but lie at the same elements of their buffers. Parameters lie in the order of the model states.
What cannot be compared is counted, with its reason.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptd.errors import RefusedError
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero import round_robin
from ckptd.formats.zero.contents import expert_names, layer_prefixes, of_tensor
from ckptd.formats.zero.experts import ExpertNames
from ckptd.formats.zero.facts import as_dict, numel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.formats.zero.save import ModelRank, Save
    from ckptd.formats.zero.shards import Parameter, StateRanges

FLOATS = ("float32", "bfloat16", "float16")
COMPARED = {("float32", to) for to in FLOATS} | {(same, same) for same in FLOATS}
"""Types of a master and of a weight that it rounds to."""
ELSEWHERE = "the model states hold no weight of that name"
PARTITIONED = "ZeRO stage 3 saves no weights but the masters"
ITSELF = "the weight is the master"
OTHER = "the weight is of another shape, type or order"

Buffers = dict[int, list[tuple[int, int, int, int, int]]]
"""Number of a file → (offset, end, bytes of an element, rank, group) of each buffer in it, ascending."""
Held = dict[tuple[int, str], tuple[Tensor, int]]
"""(tensor rank, name) → a tensor of the model, and the number of its file."""


@dataclass(slots=True)
class Proof:
    """Gives parameters of a save their copies; `why_none`: the reason why there are none, `why_unread`: why
    none is compared.

    `left_out`: reason → (name, pipeline stage, tensor rank) without one.
    """

    save: Save
    why_none: str = ""
    why_unread: str = ""
    is_wanted: bool = True
    """False: nothing is checked at all (`--no-strict`, `compare_masters = false`)."""
    left_out: dict[str, set[tuple[str, int, int]]] = field(default_factory=dict)
    _layers: Held | None = None
    _names: ExpertNames | None = None
    _buffers: dict[tuple[int, int, str], Buffers] = field(default_factory=dict)
    """(pipeline stage, tensor rank, state) → its buffers."""
    _places: dict[tuple[str, int, int], tuple[str, int]] = field(default_factory=dict)
    """(name, pipeline stage, tensor rank) → the first state, and a hash of the elements that it lies at."""

    def __call__(self, model_rank: ModelRank, parameter: Parameter) -> Parameter:
        """Check a parameter's addresses; with its masters return the model's copy of it.

        Raises:
            RefusedError: see `check_places`.
        """
        if self.is_wanted:
            self.check_places(model_rank, parameter)
        has_masters = bool(parameter.states) and parameter.states[0].name == "fp32" and parameter.numel
        return self.attach(model_rank, parameter) if has_masters else parameter

    def check_places(self, model_rank: ModelRank, parameter: Parameter) -> None:
        """Refuse a state that lies at other elements of its buffers than the parameter's other states.

        Raises:
            RefusedError: it does, or leaves its buffer.
        """
        for state in parameter.states:
            if (place := (model_rank.pp, model_rank.tp, state.name)) not in self._buffers:
                self._buffers[place] = _buffers_of(model_rank, state.name)
            if not (buffers := self._buffers[place]):
                continue
            key, found = (
                (parameter.name, model_rank.pp, model_rank.tp),
                hash(tuple(_elements(parameter.name, state, buffers))),
            )
            first, wanted = self._places.setdefault(key, (state.name, found))
            if found != wanted:
                raise RefusedError(f"{state.name} of {parameter.name} lies at other elements than {first}")

    def finish(self) -> tuple[str, ...]:
        """Return what was not compared, when all parameters were read, and check their order.

        Tensors of one shape whose masters round alike (new biases) are told apart by nothing else.

        Raises:
            RefusedError: they lie in another order than the model states list them, and not by
                round_robin_gradients.
        """
        if self.is_wanted and self.save.stage < 3 and not round_robin.is_shuffled(self.save):
            for model_rank in (
                model_rank for row in self.save.model_ranks for model_rank in row if model_rank.shards
            ):
                self._check_order(model_rank)
        return tuple(f"{len(names)} tensors: {reason}" for reason, names in sorted(self.left_out.items()))

    def _check_order(self, model_rank: ModelRank) -> None:
        for g, shapes in enumerate(model_rank.shapes):
            wanted = [name for name, shape in shapes.items() if numel(shape)]
            for ranks in self.save.experts.owners(g, len(model_rank.shards)):
                held = (
                    (d, start, name)
                    for d in ranks
                    for name, start, n in model_rank.shards[d].groups[g].mapping
                    if n
                )
                found = dict.fromkeys(name for _, _, name in sorted(held))
                for name, other in zip(found, wanted, strict=False):
                    if name != other:
                        raise RefusedError(
                            f"{model_rank.shards[ranks[0]].source.path}: {name} of group {g} lies where "
                            f"{model_rank.model.source.path} lists {other}",
                            hint="shards may be of two saves; the ZeRO form is kept as it is",
                        )

    def attach(self, model_rank: ModelRank, parameter: Parameter) -> Parameter:
        """Return the parameter with the model's copy of it, where there is one to compare with."""
        found = self.why_none or self._find(model_rank, parameter)
        if why := self.why_none or self.why_unread or (found if isinstance(found, str) else ""):
            self.left_out.setdefault(why, set()).add((parameter.name, model_rank.pp, model_rank.tp))
        if isinstance(found, str):
            return parameter
        return replace(parameter, weight=found, is_compared=not why)

    def _find(self, model_rank: ModelRank, parameter: Parameter) -> StateRanges | str:
        tensors = self._tensors(model_rank, parameter)
        if not tensors:
            return ELSEWHERE
        master, dtype = parameter.states[0], tensors[0][0].dtype
        if self.save.stage >= 3 and all(tensor.numel == 0 for tensor, _ in tensors):
            return PARTITIONED
        if any(tensor.shape != parameter.shape or tensor.dtype != dtype for tensor, _ in tensors):
            return OTHER
        # a forward that casts its weight in place leaves it rounded and of float32
        is_cast = dtype == "float32" and model_rank.model.facts.dtype in ("bf16", "fp16")
        if (master.dtype, dtype) not in COMPARED or is_cast:
            return OTHER
        try:
            found = [of_tensor(parameter.name, *held).states[0] for held in tensors]
        except RefusedError:
            return OTHER
        copy = replace(found[0], pieces=tuple(piece for one in found for piece in one.pieces))
        return ITSELF if copy.pieces == master.pieces else copy

    def _tensors(self, model_rank: ModelRank, parameter: Parameter) -> list[tuple[Tensor, int]]:
        """Return the tensor of the model; of experts one for each expert-parallel rank; or none."""
        if self._layers is None:
            self._layers = _of_layers(self.save)
        module, name = as_dict(model_rank.model.root.get("module")), parameter.name
        if not parameter.experts:
            tensor = module.get(name)
            if isinstance(tensor, Tensor):
                return [(tensor, model_rank.model.source.index)]
            return [self._layers[model_rank.tp, name]] if (model_rank.tp, name) in self._layers else []
        if self.save.experts.automatic:
            return []
        if self._names is None:
            self._names = expert_names(self.save)
        known = [self._names.globally(name, rank) for rank in range(parameter.experts)]
        held = [self._layers.get((model_rank.tp, one or "")) for one in known]
        return [one for one in held if one is not None] if None not in held else []


def _buffers_of(model_rank: ModelRank, state: str) -> Buffers:
    """Return the buffers of a state by file; none of a state that has whole parameters (Muon's)."""
    found: Buffers = {}
    for rank, shard in enumerate(model_rank.shards):
        for g, group in enumerate(shard.groups):
            if state in group.whole:
                return {}
            if (flat := group.states.get(state)) is not None:
                end = flat.offset + flat.numel * flat.item_bytes
                found.setdefault(flat.source, []).append((flat.offset, end, flat.item_bytes, rank, g))
    return {source: sorted(rows) for source, rows in found.items()}


def _elements(name: str, state: StateRanges, buffers: Buffers) -> Iterator[tuple[int, int, int, int]]:
    """Yield (rank, group, first element, elements) of each piece."""
    for piece in state.pieces:
        rows = buffers.get(piece.source, [])
        number = bisect_right(rows, (piece.offset + 1,)) - 1
        begin, end, item, rank, group = rows[number] if number >= 0 else (0, 0, 1, 0, 0)
        if piece.offset + piece.nbytes > end or (piece.offset - begin) % item:
            raise RefusedError(f"{state.name} of {name} lies outside its buffers, at byte {piece.offset}")
        yield rank, group, (piece.offset - begin) // item, piece.nbytes // item


def _of_layers(save: Save) -> Held:
    """Return the tensors in a pipeline's layer files and in the files of native experts.

    Without tied modules: which one a layer is, only its shapes tell.
    """
    prefixes = layer_prefixes(save)
    found: Held = {}
    for layer in save.layers:
        prefix = "" if layer.number is None else prefixes[layer.number]
        if prefix.startswith("tied_modules."):
            continue
        for name, tensor in layer.opened.root.items():
            if isinstance(tensor, Tensor):
                found.setdefault((layer.tp, f"{prefix}{name}"), (tensor, layer.opened.source.index))
    return found
