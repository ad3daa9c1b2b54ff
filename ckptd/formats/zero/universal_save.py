"""Read a universal folder as a save: every file below `zero/` holds one state of a whole parameter.

The stock converter, ckptd and DeepSpeed's own tools write it (docs/formats.md §5 to §7). Shapes, groups and
what no optimizer holds come from the model states beside it, as they do for shards.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckptd.base.extents import identity_of
from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.torchfile.fingerprint import fingerprint
from ckptd.formats.torchfile.legacy import read_archive
from ckptd.formats.torchfile.unpickler import unpickle
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero.contents import of_tensor
from ckptd.formats.zero.facts import as_dict, as_int, shown, states_of
from ckptd.formats.zero.save import ModelRank, Read, Save
from ckptd.formats.zero.shards import Parameter, StateRanges, open_shard
from ckptd.formats.zero.survey import frozen_of, shapes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ckptd.formats.zero.shards import OpenedShard, SourceShard
    from ckptd.formats.zero.stage12 import Shapes

ROLE = "universal"
OPTIMIZER_STATE = "zero/optimizer_state.pt"
RANKED = "zero_pp_rank_0_mp_rank_00_model_states.pt"
AGAIN = "convert the ZeRO folder to dcp, or make the universal form of it again"


def is_universal(sources: list[SourceShard]) -> bool:
    """Tell whether the listed files are those of a universal folder."""
    return any(source.role == ROLE for source in sources)


@dataclass(slots=True)
class UniversalSave(Save):
    """Hold the whole parameters of a universal folder, as the one rank of a save would hold them."""

    held: dict[str, Parameter] = field(default_factory=dict)

    @property
    def state_names(self) -> list[str]:
        """Names of all optimizer states, "fp32" first."""
        names = {state.name for parameter in self.held.values() for state in parameter.states}
        return ["fp32", *sorted(names - {"fp32"})]

    def parameters(self, only: str | None = None) -> Iterator[list[Parameter]]:
        """Yield each parameter as its only tensor rank's; `only`: just that state's ranges."""
        for parameter in self.held.values():
            found = replace(parameter, states=tuple(s for s in parameter.states if only in (None, s.name)))
            yield [found if self.prove is None else self.prove(self.model_ranks[0][0], found)]

    @property
    def param_groups(self) -> Any:
        """Settings of the optimizer's groups, as they were saved."""
        return self.rank0_optim.root.get("param_groups")


class UniversalReader:
    """Opens the files of a universal folder one by one; `opening(path)` gives a descriptor for a while."""

    def __init__(
        self, opening: Callable[[str], AbstractContextManager[int]], sources: list[SourceShard]
    ) -> None:
        self.opening = opening
        self.sources = {source.path: source for source in sources}
        self.reads: list[Read] = []
        self.states: dict[str, list[str]] = {}
        """Names of the state files of each parameter, the master first."""
        for path in sorted(self.sources, key=lambda path: (not path.endswith("/fp32.pt"), path)):
            head, _, state = path.removeprefix("zero/").rpartition("/")
            if path.startswith("zero/") and head:
                self.states.setdefault(head, []).append(state)

    def read(self) -> UniversalSave:
        """Read everything.

        Raises:
            RefusedError: experts, tensor or pipeline parallelism; or the stock converter mixed parameters up.
            DamagedError, TornArchiveError: a file is missing, or is not what the model states say.
        """
        if any(source.mm or source.role == "layer" for source in self.sources.values()):
            raise _refused("tensor or pipeline parallelism")
        optim = self._shard(OPTIMIZER_STATE)
        stage = as_int(optim.root.get("zero_stage")) or 1
        models = [self._shard(path) for path in self._model_states(stage)]
        model = models[0]
        if any(model.facts.num_experts) or model.facts.autoep:
            raise _refused("experts")
        self._refuse_mixed_up(model, stage)
        shapes = shapes_of(model)
        self._refuse_incomplete(shapes)
        numbers = states_of(optim.root.get("optimizer_state_dict"))
        held = {
            name: self._parameter(name, shape, as_dict(numbers.get(piece, numbers.get(0))), optim)
            for piece, group in enumerate(shapes)
            for name, shape in group.items()
        }
        return UniversalSave(
            stage=stage,
            dp=model.facts.dp_world_size or 1,
            ds_version=model.facts.ds_version or "",
            global_steps=model.facts.global_steps,
            optimizer_step=None,
            model_ranks=[[ModelRank(0, 0, model, shapes, [], [frozen_of(one) for one in models])]],
            rank0_optim=optim,
            model_sources=[one.source for one in models],
            reads=self.reads,
            held=held,
        )

    def _model_states(self, stage: int) -> list[str]:
        """Return the model states that the stage's loader reads; at stage 3 all hold frozen parts."""
        name = "mp_rank_00_model_states.pt" if stage < 3 else RANKED
        if name not in self.sources:
            raise DamagedError(f"{name} is missing", hint=AGAIN)
        if stage < 3:
            return [name]
        ranked = [(s.d, s.path) for s in self.sources.values() if s.role == "model" and s.d is not None]
        return [path for _, path in sorted(ranked)]

    def _refuse_mixed_up(self, model: OpenedShard, stage: int) -> None:
        """Refuse what the stock converter made of a save whose mappings name other parameters (ADR 0087)."""
        config = as_dict(as_dict(model.root.get("ds_config")).get("zero_optimization"))
        shuffles = config.get("round_robin_gradients") is True and (model.facts.dp_world_size or 1) > 1
        if shuffles and stage < 3 and RANKED not in self.sources:  # ckptd's own, where they are right, has it
            raise RefusedError(
                "it was trained with round_robin_gradients, and this universal form has parameters under "
                "each other's names, as the stock converter writes it",
                hint=AGAIN,
            )

    def _refuse_incomplete(self, shapes: Shapes) -> None:
        """Refuse a folder in which one parameter of a group has fewer states than another."""
        for group in shapes:
            most = max(group, key=lambda name: len(self.states.get(name, ())), default="")
            wanted = ["fp32.pt", *self.states.get(most, ())]
            for name, state in ((name, state) for name in group for state in wanted):
                if state not in self.states.get(name, ()):
                    of = f", which {most} has" if state in self.states.get(most, ()) else ""
                    raise DamagedError(f"zero/{name}/{state} is missing{of}", hint=AGAIN)

    def _parameter(
        self, name: str, shape: tuple[int, ...], numbers: dict[Any, Any], optim: OpenedShard
    ) -> Parameter:
        states: list[StateRanges] = []
        scalars, scalar_source = {k: numbers[k] for k in ("step",) if k in numbers}, optim.source.index
        for file in self.states[name]:
            value, source = self._value(f"zero/{name}/{file}")
            if file == "step.pt":
                scalars, scalar_source = {"step": value}, source
            else:
                states.append(self._state(f"zero/{name}/{file}", shape, value, source))
        return Parameter(name, shape, tuple(states), scalars, scalar_source)

    @staticmethod
    def _state(path: str, shape: tuple[int, ...], value: Any, source: int) -> StateRanges:
        """Return the state that a file holds: a flat tensor (stage 3's strict layout), or a dictionary."""
        if as_dict(value).get("is_expert_param"):
            raise _refused("experts")
        tensor = value["param"] if isinstance(value, dict) else value
        if not isinstance(tensor, Tensor) or tensor.shape not in (shape, (prod(shape),)):
            of = f"shape {shown(tensor.shape)}" if isinstance(tensor, Tensor) else "another kind"
            raise DamagedError(f"{path} is of {of}, the model states say {shown(shape)}", hint=AGAIN)
        found = of_tensor(path, tensor, source).states[0]
        return replace(found, name=path.rpartition("/")[2].removesuffix(".pt"))

    def _shard(self, path: str) -> OpenedShard:
        if path not in self.sources:
            raise DamagedError(f"{path} is missing", hint=AGAIN)
        with self.opening(path) as fd:
            opened = open_shard(fd, replace(self.sources[path], index=len(self.reads)))
        self.reads.append(Read(path, ROLE, opened.size_bytes, opened.identity, opened.fingerprint))
        return opened

    def _value(self, path: str) -> tuple[Any, int]:
        """Return what a file of one state holds, and its number in the plan."""
        with self.opening(path) as fd:
            status, directory = os.fstat(fd), read_archive(fd, path)
            record = directory.records["data.pkl"]
            value = unpickle(os.pread(fd, record.size, record.offset), path, directory)
            mark = fingerprint(fd, directory)
        self.reads.append(Read(path, ROLE, status.st_size, identity_of(status), mark))
        return value, len(self.reads) - 1


def _refused(kind: str) -> RefusedError:
    return RefusedError(
        f"a universal form of a save with {kind} is not converted to dcp yet",
        hint="it resumes in DeepSpeed as it is; --form weights-fp32 of the ZeRO folder exports the model",
    )
