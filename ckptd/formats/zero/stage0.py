"""Locate parameters of a save without ZeRO, whose optimizer lies in the model states (formats.md §2.7).

It names no parameter: its states are numbered, and the 16-bit modes keep fp32 masters beside them. A master
is of that weight of the model which it rounds to; in fp32 the weights are the masters, and the states are
matched by shape and order. What fits more than one parameter is refused, never guessed.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckptd.errors import NeedsWholeFiles, RefusedError
from ckptd.formats.torchfile.skeleton import WHOLE, MirrorFd
from ckptd.formats.torchfile.values import Global, Inert, Tensor
from ckptd.formats.zero.facts import as_dict, as_int, shown, states_of
from ckptd.formats.zero.optimizers import version_tuple
from ckptd.formats.zero.shards import OptimShard, ShardGroup, flat, split_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.formats.zero.shards import Flat, OpenedShard
    from ckptd.formats.zero.stage12 import Shapes

SAFE = "the save itself is safe all the same, and loads on any number of data-parallel ranks"
ELSE = "train with ZeRO stage 1, which names its parameters; --form weights exports the model; " + SAFE
MATCHED_BY_ORDER = (
    "DeepSpeed names no parameter in an fp32 save without ZeRO: the optimizer's states were given to the "
    "parameters by shape and order, each group taken to list them in the model's order"
)
LOADED_BY = (
    "resume with ZeRO stage 1, 2 or 3: without ZeRO DeepSpeed loads no weight of a universal form, and goes "
    "on from initial ones without a word"
)
UNSCALED_SINCE = (0, 18, 9)
UNSCALED = (
    "fp16 without ZeRO: this DeepSpeed divided gradients by a loss scale that it had not multiplied the loss "
    "by, so moments are smaller by it; with ZeRO losses differ for some steps (docs/formats.md §2.7)"
)
_RUNS, _RUN_ELEMENTS = 16, 32
"""Elements by which a master and a weight are compared: runs spread over the tensor."""
_BITS16 = ("bfloat16", "float16")


@dataclass(slots=True)
class Unsharded:
    """The optimizer of one model-parallel rank, as a shard of one rank; `root` as a stage 1 shard has it."""

    shapes: Shapes
    shard: OptimShard
    root: dict[str, Any]
    stateless: int = 0
    """Parameters without any state: frozen, or never with a gradient."""
    is_matched_by_order: bool = False
    is_unscaled: bool = False
    """True where gradients were divided by a loss scale that the loss had not been multiplied by."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """A parameter as the optimizer holds it: `group` and number; `master` None: the weight itself."""

    group: int
    number: int
    shape: tuple[int, ...] | None
    master: Tensor | None
    state: dict[Any, Any]


class Unnamed:
    """Reads the optimizer in the model states that are open at `fd`.

    `masters_only`: for weights, of which an optimizer's own state is no matter.

    Raises:
        RefusedError: a form that is not known, or states that fit more than one parameter.
        NeedsWholeFiles: masters can only be compared with weights in whole files.
    """

    def __init__(self, opened: OpenedShard, fd: int, *, masters_only: bool) -> None:
        self.opened, self.fd, self.masters_only = opened, fd, masters_only
        self.path = opened.source.path
        self.weights = _weights(opened)
        self.optimizer = opened.root.get("optimizer")

    def read(self) -> Unsharded:
        """Return every parameter with its states."""
        held = as_dict(self.optimizer)
        if not isinstance(self.opened.root.get("module"), dict):
            raise RefusedError(
                f"{self.path} is of a pipeline without ZeRO, which is not converted", hint=ELSE
            )
        if self.opened.facts.num_experts and any(self.opened.facts.num_experts):
            raise RefusedError("experts without ZeRO (stage 0) are not converted", hint=ELSE)
        is_scaled = self.opened.facts.dtype == "fp16" and held.get("cur_scale", 1) != 1
        is_unscaled = is_scaled and version_tuple(self.opened.facts.ds_version or "") >= UNSCALED_SINCE
        if "fp32_groups_flat" in held:
            return replace(self._flattened(held), is_unscaled=is_unscaled)
        if "fp32_groups" in held:
            return replace(self._unfused(held), is_unscaled=is_unscaled)
        if "param_groups" in held or self.masters_only:
            return self._plain(held)
        what = "holds no optimizer" if not held else "keeps its optimizer in a form that ckptd does not know"
        raise RefusedError(f"{self.path} {what}, so there is no universal form of it", hint=ELSE)

    # --- the three forms of DeepSpeed's optimizers ------------------------------------------------------

    def _plain(self, held: dict[Any, Any]) -> Unsharded:
        """The trainer's own optimizer, which trains the weights themselves."""
        if self.masters_only:  # whatever the optimizer is: the weights are there
            return Unsharded([], OptimShard(self.opened.source, []), {})
        slots = self._slots(held, None)
        stateless = [slot for slot in slots if not slot.state]
        places = self._placed(slots)
        if len(stateless) < len(slots):  # all: an optimizer without states, as SGD without momentum
            places = {slot: name for slot, name in places.items() if slot.state}
        made = self._by_parameter(held, held, places)
        made.stateless = len(slots) - len(places)
        made.is_matched_by_order = any(slot.state for slot in slots) and not _are_named(held)
        return made

    def _unfused(self, held: dict[Any, Any]) -> Unsharded:
        """FP16_UnfusedOptimizer: a master for each parameter, in fp16 and bf16 alike."""
        masters = held.get("fp32_groups")
        if not isinstance(masters, list) or not all(isinstance(group, list) for group in masters):
            raise RefusedError(f"{self.path}: fp32_groups are no lists of tensors", hint=ELSE)
        base = as_dict(held.get("optimizer_state_dict"))
        slots = self._slots(base, masters)
        return self._by_parameter(held, base, self._placed(slots))

    def _flattened(self, held: dict[Any, Any]) -> Unsharded:
        """FP16_Optimizer (FusedAdam): one flat master a group, of which the 16-bit weights are laid out."""
        masters = held.get("fp32_groups_flat")
        if not isinstance(masters, list):
            raise RefusedError(f"{self.path}: fp32_groups_flat are no tensors", hint=ELSE)
        base = as_dict(held.get("optimizer_state_dict"))
        states, numbers = states_of(base), _numbers(base)
        buffers: dict[str, list[tuple[str, Tensor]]] = {}
        for name, tensor in self.weights.items():
            if tensor.dtype in _BITS16 and tensor.contiguous:
                buffers.setdefault(tensor.storage.key, []).append((name, tensor))
        laid = [sorted(rows, key=lambda row: row[1].start) for rows in buffers.values()]
        laid = [rows for rows in laid if _is_dense(rows)]
        shapes: Shapes = []
        groups: list[ShardGroup] = []
        for g, value in enumerate(masters):
            fp32 = self._flat(value, f"the master of group {g}")
            fit = [
                rows
                for rows in laid
                if sum(tensor.numel for _, tensor in rows) == fp32.numel
                and all(
                    self._sample(tensor, tensor.dtype) == self._sample(_part(value, tensor), tensor.dtype)
                    for _, tensor in rows
                )
            ]
            if len(fit) != 1:
                raise self._no_weight(f"the master of group {g}", len(fit))
            laid.remove(fit[0])
            number = numbers[g][0] if g < len(numbers) and numbers[g] else g
            mine = {} if self.masters_only else as_dict(states.get(number))
            states_here, scalars = split_state(mine, fp32, self.opened.source, f"group {g}")
            mapping = [(name, tensor.start, tensor.numel) for name, tensor in fit[0]]
            groups.append(ShardGroup(states_here, scalars, mapping))
            shapes.append({name: tensor.shape for name, tensor in fit[0]})
        return Unsharded(shapes, OptimShard(self.opened.source, groups), self._root(held, base))

    def _by_parameter(
        self, held: dict[Any, Any], base: dict[Any, Any], places: dict[_Slot, str]
    ) -> Unsharded:
        """Each parameter as a group of its own."""
        groups: list[ShardGroup] = []
        for slot, name in places.items():
            weight = self.weights[name]
            fp32 = self._flat(slot.master or weight, f"the master of {name}")
            for key, value in {} if self.masters_only else slot.state.items():
                if isinstance(value, Tensor) and value.numel > 1 and value.shape != weight.shape:
                    raise self._not_elementwise(key, name)
            state = {} if self.masters_only else slot.state
            buffers, scalars = split_state(state, fp32, self.opened.source, name)
            groups.append(ShardGroup(buffers, scalars, [(name, 0, fp32.numel)]))
        shapes = [{name: self.weights[name].shape} for name in places.values()]
        return Unsharded(shapes, OptimShard(self.opened.source, groups), self._root(held, base))

    def _flat(self, value: Any, what: str) -> Flat:
        if not isinstance(value, Tensor) or not value.contiguous:
            raise RefusedError(f"{self.path}: {what} is no contiguous tensor", hint=ELSE)
        return flat(value, self.opened.source, what)

    def _root(self, held: dict[Any, Any], base: dict[Any, Any]) -> dict[str, Any]:
        """Return the optimizer as a shard of stage 1 would hold it."""
        config = as_dict(self.opened.root.get("ds_config"))
        inner: dict[str, Any] = {
            "base_optimizer_state": base,
            "zero_stage": 0,
            "overflow": False,
            "ds_version": self.opened.facts.ds_version,
        }
        if "clip_grad" in held:
            inner["clip_grad"] = held["clip_grad"]
        if held.get("dynamic_loss_scale") is True:
            inner["dynamic_loss_scale"] = True
            inner["loss_scaler"] = _scaler(held, as_dict(config.get("fp16")))
        return {"optimizer_state_dict": inner, "ds_config": config}

    # --- which state is of which parameter --------------------------------------------------------------

    def _slots(self, base: dict[Any, Any], masters: list[list[Any]] | None) -> list[_Slot]:
        """Return the optimizer's parameters; those of no elements are left out."""
        states, slots = states_of(base), []
        for g, numbers in enumerate(_numbers(base)):
            held = masters[g] if masters is not None and g < len(masters) else None
            if masters is not None and (held is None or len(held) != len(numbers)):
                raise RefusedError(f"{self.path}: group {g} has other masters than parameters", hint=ELSE)
            for i, number in enumerate(numbers):
                state, master = as_dict(states.get(number)), held[i] if held is not None else None
                if master is not None and not isinstance(master, Tensor):
                    raise RefusedError(f"{self.path}: a master of group {g} is no tensor", hint=ELSE)
                shape = master.shape if master is not None else self._shape_of(g, state)
                if master is None or master.numel:
                    slots.append(_Slot(g, number, shape, master, state))
        if not slots:
            raise RefusedError(f"{self.path}: its optimizer trains no parameter", hint=ELSE)
        return slots

    def _shape_of(self, group: int, state: dict[Any, Any]) -> tuple[int, ...] | None:
        """Return the shape of a parameter by its states; None where none tells."""
        known = {tensor.shape for tensor in self.weights.values()}
        found: tuple[int, ...] | None = None
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel > 1:
                found = found or value.shape
                if value.shape != found or value.shape not in known:
                    raise self._not_elementwise(key, f"a parameter of group {group}")
        return found

    def _not_elementwise(self, key: Any, what: str) -> RefusedError:
        return RefusedError(
            f"{self.path}: optimizer state {shown(key)} of {what} is not one value per parameter element",
            hint="this optimizer's state has no universal form; --form weights exports the model; " + SAFE,
        )

    def _placed(self, slots: list[_Slot]) -> dict[_Slot, str]:
        """Return the name of each slot's parameter."""
        keys = {name: self._key(tensor) for name, tensor in self.weights.items() if tensor.numel}
        names_of: dict[Any, list[str]] = {}
        for name, key in keys.items():
            names_of.setdefault(key, []).append(name)
        wanted = {slot: self._slot_key(slot) for slot in slots}
        alike = Counter(wanted.values())
        found = self._named(slots)
        for slot in slots if any(slot.master for slot in slots) else ():
            fit = [name for key in wanted[slot] for name in names_of.get(key, [])]
            if not fit:
                raise self._no_weight(f"a master of group {slot.group}, of shape {shown(slot.shape)},", 0)
            if len(fit) == alike[wanted[slot]] == 1:
                found.setdefault(slot, fit[0])
        while True:
            count = len(found)
            for group in sorted({slot.group for slot in slots}):
                of_group = [slot for slot in slots if slot.group == group]
                found |= self._forced(of_group, list(keys), keys, wanted, found)
            if len(found) == len(slots):
                return {slot: found[slot] for slot in slots}
            if len(found) == count:
                slot = next(slot for slot in slots if slot not in found)
                raise self._no_weight(f"a state of group {slot.group}, of shape {shown(slot.shape)},", 2)

    def _forced(
        self,
        slots: list[_Slot],
        names: list[str],
        keys: dict[str, Any],
        wanted: dict[_Slot, Any],
        found: dict[_Slot, str],
    ) -> dict[_Slot, str]:
        """Return the slots of a group that have one place alone, where it lists them in the model's order."""
        taken = set(found.values())

        def first_fit(slots: Sequence[_Slot], names: Sequence[str]) -> dict[_Slot, str] | None:
            left, placed = iter(names), {}
            for slot in slots:
                for name in left:
                    is_free = found.get(slot) == name or (slot not in found and name not in taken)
                    if is_free and (not wanted[slot] or keys[name] in wanted[slot]):
                        placed[slot] = name
                        break
                else:
                    return None
            return placed

        ahead, back = first_fit(slots, names), first_fit(slots[::-1], names[::-1])
        if ahead is None or back is None:
            return {}
        return {slot: name for slot, name in ahead.items() if back[slot] == name}

    def _named(self, slots: list[_Slot]) -> dict[_Slot, str]:
        """Return names that the optimizer itself keeps: torch does for one made of named parameters."""
        optimizer = as_dict(self.optimizer)
        base = as_dict(optimizer.get("optimizer_state_dict") or optimizer)
        of_number: dict[int, Any] = {}
        for group, numbers in zip(base.get("param_groups", []), _numbers(base), strict=False):
            names = as_dict(group).get("param_names")
            if isinstance(names, list) and len(names) == len(numbers):
                of_number |= dict(zip(numbers, names, strict=True))
        return {
            slot: of_number[slot.number] for slot in slots if self._is_of(of_number.get(slot.number), slot)
        }

    def _is_of(self, name: Any, slot: _Slot) -> bool:
        weight = self.weights.get(name) if isinstance(name, str) else None
        return weight is not None and slot.shape in (None, weight.shape)

    def _no_weight(self, what: str, count: int) -> RefusedError:
        if count == 0:
            return RefusedError(
                f"{self.path}: {what} rounds to no weight of the model, so which one it is of is not known",
                hint="a save before the first step looks so; " + ELSE,
            )
        return RefusedError(
            f"{self.path}: {what} fits several parameters, and a save without ZeRO (stage 0) names none",
            hint="an optimizer made of model.named_parameters() keeps the names (torch 2.6 and newer); "
            + ELSE,
        )

    # --- values -----------------------------------------------------------------------------------------

    def _key(self, weight: Tensor) -> tuple[Any, ...]:
        has_masters = "fp32_groups" in as_dict(self.optimizer)
        return (weight.shape, weight.dtype, self._sample(weight, weight.dtype) if has_masters else b"")

    def _slot_key(self, slot: _Slot) -> tuple[tuple[Any, ...], ...]:
        """Return the keys of the weights that a slot fits; none: any weight."""
        dtypes = sorted({tensor.dtype for tensor in self.weights.values()})
        if slot.master is None:
            return () if slot.shape is None else tuple((slot.shape, dtype, b"") for dtype in dtypes)
        is_half = [dtype for dtype in dtypes if dtype in _BITS16 or dtype == "float32"]
        return tuple((slot.shape, dtype, self._sample(slot.master, dtype)) for dtype in is_half)

    def _sample(self, tensor: Tensor, dtype: str) -> bytes:
        """Return some elements of a tensor, spread over it, rounded to `dtype`."""
        if isinstance(self.fd, MirrorFd):
            raise NeedsWholeFiles(
                f"the weights in {self.path} tell which master is of which parameter, and are not read from "
                "a remote",
                hint=WHOLE,
            )
        count = tensor.numel
        step = max(_RUN_ELEMENTS, -(-count // _RUNS))
        data = b"".join(
            os.pread(
                self.fd,
                min(_RUN_ELEMENTS, count - at) * tensor.item_bytes,
                tensor.byte_offset + at * tensor.item_bytes,
            )
            for at in range(0, count if tensor.contiguous else 0, step)
        )
        return _rounded(data, tensor.dtype, dtype)


def shapes_of_pipeline(shards: list[OptimShard], layers: dict[int, dict[str, tuple[int, ...]]]) -> Shapes:
    """Return what `param_shapes` would say of one rank of a bf16 pipeline, whose shards name parameters.

    `layers`: the shapes in the layer files by number. A tied module is in those of the layers that share it.

    Raises:
        RefusedError: a parameter is in no layer file, or its layers disagree.
    """
    found: Shapes = []
    for g in range(len(shards[0].groups)):
        shapes: dict[str, tuple[int, ...]] = {}
        elements: Counter[str] = Counter()
        for name, _, length in (row for shard in shards for row in shard.groups[g].mapping):
            elements[name] += length
        for name, count in elements.items():
            head, _, local = name.partition(".")
            if head.isdecimal():
                holders = [layers.get(int(head), {})]
            else:  # tied_modules.<key>.<name>
                holders, local = list(layers.values()), local.partition(".")[2]
            fit = {held[local] for held in holders if local in held and prod(held[local]) == count}
            if len(fit) != 1:
                raise RefusedError(
                    f"{shards[0].source.path} trains {name}, whose shape no layer_*-model_states.pt tells",
                    hint="copy every file of the save here; " + ELSE,
                )
            shapes[name] = fit.pop()
        found.append(shapes)
    return found


def remarks(found: list[Unsharded]) -> tuple[str, ...]:
    """Return what whoever resumes should know."""
    said = [LOADED_BY]
    if any(one.is_matched_by_order for one in found):
        said.append(MATCHED_BY_ORDER)
    if any(one.is_unscaled for one in found):
        said.append(UNSCALED)
    count = found[0].stateless
    if count:
        said.append(
            f"{count} parameters of the optimizer have no state (frozen, or never with a gradient): they "
            "stay weights of the model"
        )
    return tuple(said)


def _weights(opened: OpenedShard) -> dict[str, Tensor]:
    """Return the model's parameters by name, those of a tied pair once; buffers are none."""
    names = opened.root.get("buffer_names")
    buffers = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
    found: dict[str, Tensor] = {}
    places: set[Any] = set()
    for name, tensor in as_dict(opened.root.get("module")).items():
        if isinstance(tensor, Tensor) and isinstance(name, str) and name not in buffers:
            place = (tensor.storage.key, tensor.start, tensor.shape, tensor.stride)
            if tensor.numel == 0 or place not in places:
                found[name] = tensor
            places.add(place)
    return found


def _numbers(base: dict[Any, Any]) -> list[list[int]]:
    """Return the numbers of the parameters of each group."""
    groups = base.get("param_groups")
    listed = [as_dict(group).get("params") for group in groups] if isinstance(groups, list) else []
    return [[n for n in map(as_int, one) if n is not None] if isinstance(one, list) else [] for one in listed]


def _are_named(base: dict[Any, Any]) -> bool:
    groups = base.get("param_groups")
    return isinstance(groups, list) and all(as_dict(group).get("param_names") for group in groups)


def _is_dense(rows: list[tuple[str, Tensor]]) -> bool:
    """Tell whether tensors of one storage follow one another from its start."""
    at = 0
    for _, tensor in rows:
        if tensor.start != at:
            return False
        at += tensor.numel
    return True


def _part(master: Tensor, weight: Tensor) -> Tensor:
    """Return the elements of a flat master that are those of a weight."""
    start = master.start + weight.start
    return Tensor(master.storage, master.dtype, start, (weight.numel,), (1,))


def _scaler(held: dict[Any, Any], config: dict[Any, Any]) -> Inert:
    """Return the loss scaler of the ZeRO optimizers, in the state that these keep in numbers."""
    shift = as_int(config.get("hysteresis"))
    state = {
        "cur_scale": held.get("cur_scale"),
        "cur_iter": held.get("cur_iter"),
        "last_overflow_iter": held.get("last_overflow_iter"),
        "scale_factor": held.get("scale_factor"),
        "scale_window": held.get("scale_window"),
        "min_scale": config.get("min_loss_scale", 1),
        "delayed_shift": 2 if shift is None else shift,
        "cur_hysteresis": 2 if shift is None else shift,
        "consecutive_hysteresis": config.get("consecutive_hysteresis") is True,
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": Global("torch", "float16"),
    }
    origin = Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
    return Inert(origin, (), state, made_by_new=True)


# --- rounding: of a few hundred elements, so without numpy -----------------------------------------------


def _rounded(data: bytes, source: str, target: str) -> bytes:
    """Return elements rounded to nearest, ties to even, every NaN as one."""
    if source == target:
        item = 2 if source in _BITS16 else 1
        return b"".join(_one_nan(data[i : i + item], source) for i in range(0, len(data), item))
    if source != "float32" or target not in _BITS16:
        return b"\0another type" + data
    whole = len(data) - len(data) % 4
    if target == "bfloat16":
        return b"".join(_to_bfloat16(bits) for (bits,) in struct.iter_unpack("<I", data[:whole]))
    return b"".join(_to_float16(value) for (value,) in struct.iter_unpack("<f", data[:whole]))


_NAN = b"\xff\x7f"


def _to_bfloat16(bits: int) -> bytes:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return _NAN
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF)


def _to_float16(value: float) -> bytes:
    if value != value:
        return _NAN
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", float("inf") if value > 0 else float("-inf"))


def _one_nan(data: bytes, dtype: str) -> bytes:
    if dtype not in _BITS16:
        return data
    infinity = 0x7F80 if dtype == "bfloat16" else 0x7C00
    return _NAN if struct.unpack("<H", data)[0] & 0x7FFF > infinity else data
