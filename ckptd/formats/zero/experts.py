"""Join the shards of a mixture of experts: which ranks hold which experts, and one parameter of them.

On every expert-parallel rank the experts have the same local names, and their optimizer groups are
partitioned over fewer ranks than the others. The universal form stacks the ranks' tensors of one name along
dimension 0 (docs/formats.md §7.1, docs/internals/conversion.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.zero.blocks import BlockCopy, Step, Weave
from ckptd.formats.zero.facts import EXPERT_GROUP, as_dict, as_int, numel, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptd.formats.zero.patterns import JoinedParameter
    from ckptd.formats.zero.shards import OpenedShard, SourceShard


# --- AutoEP: DeepSpeed itself spreads the experts over ranks ---------------------------------------------
# Each layer and weight is one tensor of rows. The trainer's metadata say which parameters they are and
# which rank has which rows. If every rank has the next equal run of rows, stacking the ranks gives the
# whole layer, which loads with any expert-parallel size; any other placement is refused (docs/formats.md
# §7.1, docs/internals/conversion.md).

SAFE = "the ZeRO form is safe all the same"
_WEIGHTS = ("w1", "w2", "w3")


def layers(model: OpenedShard) -> list[dict[Any, Any]]:
    """Return the metadata of each AutoEP layer in the model states; empty when there is none."""
    found = model.root.get("ds_autoep_layers") or model.root.get("autoep_layers") or []
    return [as_dict(layer) for layer in found] if isinstance(found, list) else [{}]


def check(model: OpenedShard, ep: int, groups: Iterable[int]) -> None:
    """Refuse what stacking the `ep` ranks of the expert `groups` would not make whole.

    Raises:
        RefusedError: metadata that contradict the shards, rows placed otherwise, or experts of another kind.
    """
    shapes = model.root.get("param_shapes")
    held: dict[str, Any] = {}
    for g in groups:
        held |= as_dict(shapes[g]) if isinstance(shapes, list) and g < len(shapes) else {}
    for layer in layers(model):
        prefix, count = layer.get("expert_key_prefix"), as_int(layer.get("num_experts"))
        where = f"{model.source.path}: AutoEP layer {shown(layer.get('module_path') or prefix or '?')}"
        if not isinstance(prefix, str) or not count:
            raise RefusedError(
                f"{where} does not say which parameters it has, or how many experts", hint=SAFE
            )
        if as_int(layer.get("ep_size")) != ep or count % ep:
            raise RefusedError(
                f"{where} of {count} experts is for {shown(layer.get('ep_size'))} ranks, the shards for {ep}"
            )
        _check_placement(where, layer.get("expert_placement"), count, ep)
        for name in (f"{prefix}.{weight}" for weight in _WEIGHTS):
            shape = held.pop(name, None)
            if numel(shape) is None or not shape or shape[0] * ep != count:
                raise RefusedError(f"{where}: {name} of shape {shown(shape)} is no part of {count} experts")
    if held:
        raise RefusedError(f"{next(iter(held))} is an expert's parameter and of no AutoEP layer", hint=SAFE)


def find_partitioned(models: list[OpenedShard], sharing: list[list[tuple[int, ...]]]) -> Experts:
    """Find AutoEP's experts at stage 3, which are cut over fewer ranks than other parameters.

    `models`: of every data-parallel rank; `sharing`: of each sub-group, the ranks that share a tensor.

    Raises:
        RefusedError: metadata that contradict the shards, or rows placed otherwise.
    """
    first = models[0]
    prefixes = {layer.get("expert_key_prefix") for layer in layers(first)}
    names = {f"{prefix}.{weight}" for prefix in prefixes for weight in _WEIGHTS}
    shapes = first.root.get("param_shapes")
    listed = [as_dict(group) for group in shapes] if isinstance(shapes, list) else []
    groups = frozenset(s for s, group in enumerate(listed) if not names.isdisjoint(group))
    sizes = {len(ranks) for s, ranks in enumerate(sharing) if s in groups}
    odd = next((s for s, ranks in enumerate(sharing) if len(ranks) > 1 and s not in groups), None)
    if odd is not None or len(sizes) > 1:
        raise RefusedError(f"{first.source.path}: its AutoEP layers do not say who shares which experts")
    if not groups:
        return NO_EXPERTS
    ep = sizes.pop()
    check(first, ep, groups)
    for ranks in (sharing[s] for s in sorted(groups)):
        for expert_rank, members in enumerate(ranks):
            for d in members:
                said = (
                    [as_int(layer.get("ep_rank")) for layer in layers(models[d])] if d < len(models) else []
                )
                if not said or any(number != expert_rank for number in said):
                    raise RefusedError(
                        f"the model states of rank {d} do not say that it is expert-parallel rank "
                        f"{expert_rank}, as its optimizer shard does",
                        hint=SAFE,
                    )
    return Experts(ep=ep, groups=groups, automatic=True)


def _check_placement(where: str, placement: Any, count: int, ep: int) -> None:
    """Rank r must have the r-th run of `count / ep` experts; older versions say nothing and do that."""
    if placement is None:
        return
    share = count // ep
    ranks = as_dict(placement).get("ranks")
    given = [as_dict(rank) for rank in ranks] if isinstance(ranks, list) else []
    as_wanted = len(given) == ep and all(
        rank.get("rank") == r and _is_run(rank.get("experts"), r * share, share)
        for r, rank in enumerate(given)
    )
    if not as_wanted:
        raise RefusedError(
            f"{where} has its experts on ranks in an order of their own, which is not converted",
            hint="DeepSpeed's own converter may know the order; " + SAFE,
        )


def _is_run(values: Any, begin: int, count: int) -> bool:
    """True for a list of `count` numbers in order from `begin`."""
    if not isinstance(values, list | tuple) or len(values) != count:
        return False
    return all(value == begin + i for i, value in enumerate(values))


# --- Native experts --------------------------------------------------------------------------------------

_FILE_NAME = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_\d+_model_states\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`ep` expert-parallel ranks share the experts; the optimizer groups that hold them.

    `in_blocks`: neighbouring data-parallel ranks hold the same experts (use_data_before_expert_parallelism).
    """

    ep: int = 1
    groups: frozenset[int] = frozenset()
    in_blocks: bool = False
    automatic: bool = False
    """AutoEP: a stacked parameter is a whole layer, of no particular expert-parallel size."""

    def owners(self, group: int, dp: int) -> list[range]:
        """Data-parallel ranks of each expert-parallel rank, in the order of their pieces.

        One range of all ranks for a group without experts. Source: deepspeed/utils/groups.py.
        """
        if group not in self.groups:
            return [range(dp)]
        share = dp // self.ep
        if self.in_blocks:
            return [range(rank * share, (rank + 1) * share) for rank in range(self.ep)]
        return [range(rank, dp, self.ep) for rank in range(self.ep)]

    def notes(self) -> tuple[str, ...]:
        """Return the conditions that a resumed run must meet."""
        if not self.groups or self.automatic:
            return ()
        said = f"experts are shared by {self.ep} ranks: resume with ep_size {self.ep}"
        return (f"{said}, in ZeRO stage 1 or 2, with DeepSpeed 0.19.2 or newer",)


NO_EXPERTS = Experts()


def find(model: OpenedShard, optim: OpenedShard, dp: int, tp: int) -> Experts:
    """Find the groups that hold experts, by their partition counts and by what the trainer called them.

    Raises:
        RefusedError: metadata contradict each other, or experts lie in a way that has no universal form.
    """
    base = as_dict(as_dict(optim.root.get("optimizer_state_dict")).get("base_optimizer_state"))
    named = base.get("param_groups")
    automatic = bool(layers(model))
    found: dict[int, int] = {}
    for g, count in enumerate(optim.facts.partition_count):
        group = as_dict(named[g]) if isinstance(named, list) and g < len(named) else {}
        ep = _expert_parallel(optim, g, group, count, dp, tp)
        if ep > 1 or (automatic and ep):
            found[g] = ep
    sizes = sorted(set(found.values()))
    if not sizes:
        return NO_EXPERTS
    if len(sizes) > 1:
        raise RefusedError(
            f"experts of some layers are shared by {sizes[0]} ranks, of others by {sizes[1]}: "
            "DeepSpeed's universal loader knows one ep_size",
            hint=SAFE,
        )
    ep = sizes[0]
    if model.facts.ep is not None and model.facts.ep != ep:
        raise RefusedError(
            f"{model.source.path} says ep_degree {model.facts.ep}, {optim.source.path} shares experts "
            f"among {ep} ranks: shards of two saves"
        )
    odd = next((n for n in model.facts.num_experts if n % ep), None)
    if odd is not None:
        raise RefusedError(f"{model.source.path} has {odd} experts in a layer, which {ep} ranks cannot share")
    ordered = as_dict(model.root.get("ds_config")).get("use_data_before_expert_parallelism", False)
    if not isinstance(ordered, bool):
        raise RefusedError(f"{model.source.path}: use_data_before_expert_parallelism is {ordered!r}")
    if automatic:
        check(model, ep, found)
    return Experts(ep=ep, groups=frozenset(found), in_blocks=ordered, automatic=automatic)


def _expert_parallel(optim: OpenedShard, g: int, group: dict[Any, Any], count: int, dp: int, tp: int) -> int:
    """Return how many ranks share the experts of a group; 0 for a group of other parameters."""
    where = f"{optim.source.path} partitions group {g} over {count} of {dp} ranks"
    name = group.get("name")
    match = EXPERT_GROUP.fullmatch(name) if isinstance(name, str) and group.get("moe") is True else None
    if count == dp and match is None:
        return 0
    if match is not None and tp > 1 and int(match[1]) * count == dp * tp:
        raise RefusedError(
            f"{optim.source.path}: experts that the tensor ranks share (group {g}, {name}) are not "
            "converted; experts that each tensor rank has a part of are",
            hint="native experts with enable_expert_tensor_parallelism=True do; " + SAFE,
        )
    if count < 1 or dp % count:
        raise RefusedError(f"{where}, which no expert parallelism does")
    if match is None:
        raise RefusedError(f"{where}, and nothing says that it holds experts", hint=SAFE)
    if int(match[1]) * count != dp:
        raise RefusedError(f"{where}, but calls it {name}")
    return dp // count


def check_files(models: list[list[OpenedShard]], sources: Iterable[SourceShard], *, are_split: bool) -> None:
    """Every expert's model states must be there, though conversion reads none: the save is whole or not.

    `models`: of each pipeline stage its tensor ranks; each has a part of every expert if `are_split`.

    Raises:
        DamagedError: naming the first that is missing.
    """
    named = [(_FILE_NAME.fullmatch(s.path), s.mm or 0) for s in sources if s.role == "expert"]
    held = {(int(m[1]) if m[1] else None, int(m[2]), mm) for m, mm in named if m}
    missing = list(islice(_missing_files(models, held, are_split=are_split), 4))
    if missing:  # not all are listed: a hostile count names more than memory holds
        more = " and more" if len(missing) > 3 else ""
        raise DamagedError(
            f"the save lacks {', '.join(missing[:3])}{more}",
            hint="gather the files of all nodes in one folder, or use an older checkpoint",
        )


def _missing_files(
    models: list[list[OpenedShard]], held: set[tuple[int | None, int, int]], *, are_split: bool
) -> Iterator[str]:
    for stage, row in enumerate(models):
        counts, ranks = row[0].facts.num_experts, range(stage * len(row), (stage + 1) * len(row))
        experts = ((layer, e) for layer, count in enumerate(counts) for e in range(count))
        for layer, expert in experts if any(n > 1 for n in counts) else ():
            lacking = [
                mm for mm in ranks if (layer, expert, mm) not in held and (None, expert, mm) not in held
            ]
            for mm in lacking if are_split else lacking[: len(lacking) == len(ranks)]:
                yield f"layer_{layer}_expert_{expert}_mp_rank_{mm:02d}_model_states.pt"


def stacked(join: JoinedParameter, shapes: list[tuple[int, ...]], count: int) -> JoinedParameter:
    """`join` of one expert-parallel rank's tensors, for `count` of them one after another in each shard.

    `shapes`: one expert-parallel rank's tensor on each tensor-parallel rank.

    Raises:
        RefusedError: a tensor without dimensions, or rows of a vocabulary, cannot be stacked.
    """
    if not join.shape:
        raise RefusedError("an expert's parameter without dimensions cannot be stacked along one")
    if join.vocabulary:
        raise RefusedError("it is an expert's parameter and a vocabulary at once")
    lengths = [prod(shape) for shape in shapes]

    def repeated(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(_moved(step, e, lengths) for e in range(count) for step in steps)

    return replace(
        join,
        shape=(count * join.shape[0], *join.shape[1:]),
        steps=repeated(join.steps),
        equal=tuple((repeated(a), repeated(b)) for a, b in join.equal),
        experts=count * join.shape[0],
    )


def _moved(step: Step, by: int, lengths: list[int]) -> Step:
    """Return a step that reads the tensor of a later expert-parallel rank."""
    if isinstance(step, BlockCopy):
        return replace(step, at=step.at + by * lengths[step.rank])
    strands = tuple(replace(s, at=s.at + by * lengths[s.rank]) for s in step.strands)
    return Weave(step.rows, strands)


# --- Names of native experts: optimizer shards know them by local number, weights by global one ----------
# Every expert-parallel rank calls its experts 0, 1, … (docs/formats.md §7.1); the model-states files of
# experts and a model without expert parallelism count through: global = rank × experts per rank + local.

_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


class ExpertNames:
    """Knows how many experts of each layer a rank holds.

    From the global names in the files of experts, of `ep` ranks; from the local ones of a layer without.
    """

    def __init__(self, names: Iterable[str], held: Iterable[str] = (), ep: int = 1) -> None:
        counts = {layer: len(numbers) // ep for layer, numbers in _numbers(held).items()}
        self._counts = {layer: len(numbers) for layer, numbers in _numbers(names).items()} | counts

    def globally(self, name: str, rank: int) -> str | None:
        """The global name of expert-parallel rank `rank`'s parameter `name`; None: it is no expert's."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        return f"{match[1]}{rank * self._counts[match[1]] + int(match[2])}{match[3]}"


def _numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the experts of each layer."""
    found: dict[str, set[int]] = {}
    for match in (match for name in names if (match := _EXPERT.fullmatch(name))):
        found.setdefault(match[1], set()).add(int(match[2]))
    return found
