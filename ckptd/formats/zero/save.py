"""Model a complete, consistent save: its grid of model-parallel ranks, and its parameters across them.

A model rank is a pipeline stage × tensor rank, with the optimizer shards of all its
data-parallel ranks; a parameter belongs to one stage and has one shard per tensor rank (docs/formats.md §1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero import stage3, stage12
from ckptd.formats.zero.experts import NO_EXPERTS, Experts
from ckptd.formats.zero.facts import as_dict, as_int
from ckptd.formats.zero.optimizers import (
    DRIFT_THERE,
    MUON,
    NVME,
    STAGE3_READS,
    TENSOR_STAGE_3,
    stage3_loader_word,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.formats.zero.shards import OpenedShard, OptimShard, Parameter, SourceShard


@dataclass(frozen=True, slots=True)
class Read:
    """A source file as it was when it was read; `identity` = dev, ino, size, mtime_ns, ctime_ns."""

    path: str
    role: str
    size_bytes: int
    identity: tuple[int, int, int, int, int]
    fingerprint: str


@dataclass(slots=True)
class ModelRank:
    """One model-parallel rank; `shards` in ascending data-parallel rank, `model` of the lowest of them.

    `frozen`: pieces of the frozen parameters, per data-parallel rank at stage 3 (for weights alone).
    """

    pp: int
    tp: int
    model: OpenedShard
    shapes: stage12.Shapes
    shards: list[OptimShard]
    frozen: list[Fragments] = field(default_factory=list)
    experts: Experts = NO_EXPERTS


@dataclass(frozen=True, slots=True)
class Fragments:
    """One rank's pieces of all frozen parameters, name → (byte offset, elements, dtype)."""

    source: int
    pieces: dict[str, tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class Layer:
    """State dictionary of pipeline layer `number` on tensor rank `tp`, or of one expert (no number)."""

    number: int | None
    tp: int
    opened: OpenedShard


@dataclass(slots=True)
class Save:
    """Everything that conversion needs of a save. `model_ranks[pp][tp]`; degrees by what metadata say."""

    stage: int
    dp: int
    ds_version: str
    global_steps: int | None
    optimizer_step: int | None
    model_ranks: list[list[ModelRank]]
    rank0_optim: OpenedShard
    model_sources: list[SourceShard]
    reads: list[Read] = field(default_factory=list)
    experts: Experts = NO_EXPERTS
    layers: list[Layer] = field(default_factory=list)
    remarks: tuple[str, ...] = ()
    """Notes of the survey for whoever resumes from the form."""
    prove: Callable[[ModelRank, Parameter], Parameter] | None = None
    """Looks at each parameter that is read."""

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.model_ranks)

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return len(self.model_ranks[0])

    @property
    def rank0_model(self) -> OpenedShard:
        """Model states of the first rank."""
        return self.model_ranks[0][0].model

    @property
    def models(self) -> list[OpenedShard]:
        """Model states of every model-parallel rank, in the order of their number."""
        return [model_rank.model for row in self.model_ranks for model_rank in row]

    @property
    def universal_info(self) -> dict[Any, Any] | None:
        """`universal_checkpoint_info` of the model states; None when the trainer wrote none."""
        info = self.rank0_model.root.get("universal_checkpoint_info")
        return info if isinstance(info, dict) else None

    @property
    def is_autotp(self) -> bool:
        """Tell whether DeepSpeed itself split the parameters over the tensor ranks."""
        config = as_dict(self.rank0_model.root.get("ds_config"))
        return (as_int(as_dict(config.get("tensor_parallel")).get("autotp_size")) or 0) > 1

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter that is trained, by name."""
        ranks = (model_rank for row in self.model_ranks for model_rank in row)
        return {name: shape for rank in ranks for group in rank.shapes for name, shape in group.items()}

    @property
    def state_names(self) -> list[str]:
        """Names of all optimizer states, "fp32" first."""
        names: dict[str, None] = {}
        for row in self.model_ranks:
            for model_rank in row:
                names |= dict.fromkeys(stage12.state_names(model_rank.shards))
        return list(names)

    @property
    def param_groups(self) -> Any:
        """Settings of the optimizer's groups, as they were saved."""
        inner = as_dict(self.rank0_optim.root["optimizer_state_dict"])
        base = inner["optimizer_state_dict" if self.stage >= 3 else "base_optimizer_state"]
        return as_dict(base).get("param_groups")

    def parameters(self, only: str | None = None) -> Iterator[list[Parameter]]:
        """Return each parameter's shards, one per tensor rank; `only`: just that state's ranges.

        A parameter that several pipeline stages hold (tied, replicated) comes from the first of them.

        Raises:
            DamagedError, RefusedError: the shards do not cover the parameters, or contradict each other.
        """
        seen: dict[str, list[tuple[int, ...]]] = {}
        for row in self.model_ranks:
            for ranks in _together([self._read(model_rank, only) for model_rank in row]):
                name, shapes = ranks[0].name, [rank.shape for rank in ranks]
                if self.pp > 1:
                    if seen.setdefault(name, shapes) != shapes:
                        raise RefusedError(f"{name} has other shapes on a later pipeline stage")
                    if seen[name] is not shapes:
                        continue
                yield ranks

    def _read(self, model_rank: ModelRank, only: str | None) -> Iterator[Parameter]:
        parameters = stage3.parameters if self.stage >= 3 else stage12.parameters
        for parameter in parameters(model_rank.shards, model_rank.shapes, only, self.experts):
            yield parameter if self.prove is None else self.prove(model_rank, parameter)


def _together(streams: list[Iterator[Parameter]]) -> Iterator[list[Parameter]]:
    """Shards of one parameter from every tensor rank, in the first rank's order."""
    waiting: list[dict[str, Parameter]] = [{} for _ in streams]
    for first in streams[0]:
        ranks = [first]
        for tp in range(1, len(streams)):
            while first.name not in waiting[tp]:
                other = next(streams[tp], None)
                if other is None:
                    raise RefusedError(f"{first.name} is on tensor rank 0 and not on rank {tp}")
                waiting[tp][other.name] = other
            ranks.append(waiting[tp].pop(first.name))
        yield ranks
    for tp in range(1, len(streams)):
        left = next(iter(waiting[tp]), None) or next((p.name for p in streams[tp]), None)
        if left is not None:
            raise RefusedError(f"{left} is on tensor rank {tp} and not on rank 0")


def notes(save: Save) -> tuple[str, ...]:
    """Sentences about what a resumed run will find; empty for a whole save of Adam and its like."""
    found = list(save.remarks)
    groups = [
        group for row in save.model_ranks for model_rank in row for group in model_rank.shards[0].groups
    ]
    lacking = sorted({name for group in groups for name in STAGE3_READS if name not in group.states})
    stepless = not any("step" in group.scalars for group in groups)
    if lacking or stepless:
        words = [*lacking, *(["step"] if stepless else [])]
        found.append(
            f"loads in stages 1 and 2; DeepSpeed's stage 3 loader wants {', '.join(words)} "
            "of every parameter, which this optimizer does not keep"
        )
    if any(group.whole for group in groups):
        found.append(MUON)
    if save.stage >= 3 and save.rank0_optim.facts.is_offloaded:
        found.append(NVME)
    if save.stage >= 3 and save.tp > 1 and not save.is_autotp:
        found.append(TENSOR_STAGE_3)
    others = sorted({name for group in groups for name in group.states} - {"fp32", *STAGE3_READS})
    if others and not (lacking or stepless):
        found.append(f"DeepSpeed's stage 3 loader leaves {', '.join(others)} unread")
    numbers = sorted({name for group in groups for name in group.scalars} - {"step"})
    if numbers:
        found.append(
            f"{', '.join(numbers)} (one number per group) begins anew: DeepSpeed's loaders take none but step"
        )
    steps = [group.scalars.get("step") for group in save.model_ranks[0][0].shards[0].groups]
    unread = stage3_loader_word(save.ds_version, len(steps)) if save.stage >= 3 else None
    drifts = save.stage >= 3 and len(steps) > 1 and all(isinstance(step, Tensor) for step in steps)
    if unread is not None:
        found.append(unread + (DRIFT_THERE if drifts else ""))
    elif drifts:
        found.append(
            f"saved in {len(steps)} sub-groups: DeepSpeed's stage 3 loader counts each step of a torch "
            "optimizer once per sub-group; one parameter group and a larger sub_group_size, FusedAdam, "
            "CPUAdam and stages 1 and 2 go on rightly (docs/formats.md §5.1)"
        )
    if save.stage >= 3 and save.dp > 1 and len(save.model_sources) == save.pp * save.tp:
        found.append(
            "model states of rank 0 alone were saved, which suffices to resume from the universal form in "
            "DeepSpeed since PR 7599"
        )
        if save.rank0_model.facts.frozen_parameters:
            found.append(
                "frozen parameters of the other ranks are not in this save: load them from the base model"
            )
    return tuple(found)
