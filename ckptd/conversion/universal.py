"""Plan the universal layout as output files: strict as the stock converter writes, or the superset.

docs/formats.md §5, §6 (strict) and §7.2 (superset, loads in stages 1, 2 and 3). Every file is a header of
ours and ranges of the source; nothing of ours lies in a parameter folder.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ckptd.conversion.archives import archive_parts, placeholder, ranges_in
from ckptd.conversion.parts import SOURCE_ITEM_BYTES, Part, Range, Widen
from ckptd.conversion.plan import Output, OutputFile, OutputLink
from ckptd.conversion.tp_join import JoinedState, join_states, model_checks, patterns_of
from ckptd.errors import RefusedError
from ckptd.formats.torchfile.values import Global, Inert, Size, Storage, Tensor
from ckptd.formats.zero import stage12
from ckptd.formats.zero.facts import as_dict, states_of
from ckptd.formats.zero.optimizers import numbers_of, version_tuple
from ckptd.formats.zero.survey import refuse_folder_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.conversion.archives import Ranges
    from ckptd.formats.zero.patterns import JoinedParameter
    from ckptd.formats.zero.save import ModelRank, Save
    from ckptd.formats.zero.shards import OpenedShard, Parameter

FP32_COPIES_SINCE = (0, 19, 8)
"""First version whose converter writes fp32.pt for buffers, frozen parameters and aliases."""
EXPERTS_SINCE = (0, 19, 2)
"""First version whose stage 1/2 loader takes its part of a stacked parameter (DeepSpeed PR 7938)."""
SUPERSET_SINCE = (0, 19, 4)
"""First version whose stage 3 loader reads dictionaries (DeepSpeed PR 8168)."""


def choose_layout(compat: str, ds_version: str) -> str:
    """ "auto" follows the version recorded in the shards: superset where its stage 3 loader reads it."""
    if compat != "auto":
        return compat
    return "superset" if version_tuple(ds_version) >= SUPERSET_SINCE else "strict"


def refuse_unread(save: Save) -> None:
    """Refuse experts in a save of a version whose own loader could not read them back.

    Raises:
        RefusedError: with what to do; naming a layout converts all the same.
    """
    if save.experts.groups and version_tuple(save.ds_version) < EXPERTS_SINCE:
        raise RefusedError(
            f"experts saved by DeepSpeed {save.ds_version or '(version unknown)'} have no universal form "
            "that it could load; 0.19.2 and newer can",
            hint="upgrade the trainer, or convert for a newer one with --compat superset; "
            "the ZeRO form is safe all the same",
        )


class UniversalLayout:
    """Yields the outputs of one save."""

    def __init__(self, save: Save, layout: str, *, block: bool, strict: bool) -> None:
        self.save = save
        self.superset = layout == "superset"
        self.block = block
        self.strict = strict
        self.patterns = patterns_of(save, strict=strict)
        self.written: set[str] = set()

    def outputs(self) -> Iterator[Output]:
        """All files, state by state in source order, so that a cold source is read forwards."""
        for model_rank in (model_rank for row in self.save.model_ranks for model_rank in row):
            for parameter in (name for group in model_rank.shapes for name in group):
                refuse_folder_name(parameter, model_rank.model.source.path)
        names = self.save.state_names
        for name in (*names[1:], names[0]):
            for ranks in self.save.parameters(name):
                yield from model_checks(ranks)  # first: the file's bytes are in memory then
                join, states = join_states(ranks, self.patterns)
                for state in states:
                    yield self._state_file(join, state)
                    yield from state.checks
        if self.superset or self.save.stage < 3:
            for ranks in self.save.parameters(names[0]):
                if "step" in ranks[0].scalars:
                    yield self._step_file(ranks[0])
        unmatched = self.patterns.unmatched()
        if self.strict and unmatched:
            raise RefusedError(
                f"patterns of universal_checkpoint_info match no parameter: {unmatched[:5]}",
                hint="convert with --no-strict if that is meant",
            )
        yield self._optimizer_file()
        yield from self._model_files()
        if not self.superset and self.save.stage < 3:
            for model in self.save.models:
                yield from self._fp32_copies(model)

    def _state_file(self, join: JoinedParameter, state: JoinedState) -> OutputFile:
        if state.name == "fp32":
            self.written.add(state.parameter)
        is_flat = self.save.stage >= 3 and self.save.tp == 1 and not self.superset
        if is_flat and join.experts is None:
            value: Any = placeholder(state.dtype, (prod(state.shape),))
        else:
            value = _entry(join, placeholder(state.dtype, state.shape))
        return self._file(f"zero/{state.parameter}/{state.name}.pt", value, lambda _: state.parts)

    def _step_file(self, parameter: Parameter) -> OutputFile:
        path = f"zero/{parameter.name}/step.pt"
        return self._file(path, parameter.scalars["step"], ranges_in(parameter.scalar_source))

    def _optimizer_file(self) -> OutputFile:
        inner = as_dict(self.save.rank0_optim.root["optimizer_state_dict"])
        stage_3 = self.save.stage >= 3
        base = as_dict(inner["optimizer_state_dict" if stage_3 else "base_optimizer_state"])
        groups = self.save.param_groups
        if not isinstance(groups, list):
            raise RefusedError(f"{self.save.rank0_optim.source.path} has no param_groups")
        sharded = {"fp32_flat_groups"} if stage_3 else set(stage12.SHARDED_KEYS)
        if stage_3 and not self.superset:
            value = {**inner, "param_groups": groups}
        else:
            value = {k: v for k, v in inner.items() if k not in sharded}
            value["param_groups"] = groups
        if value.get("group_paddings"):
            # no padding is left where parameters are whole; only the last rank's shard counts any
            value["group_paddings"] = [0] * len(value["group_paddings"])
        if self.superset:
            value["ds_version"] = inner.get("ds_version") or self.save.ds_version
            numbers = numbers_of(states_of(base), self.save.model_ranks[0][0].shards[0])
            value["optimizer_state_dict"] = {"state": {0: numbers}, "param_groups": groups}
        return self._file("zero/optimizer_state.pt", value, ranges_in(self.save.rank0_optim.source.index))

    def _model_files(self) -> Iterator[Output]:
        """Byte copies of the trainer's model states; never a link to a trainer's file.

        Without ZeRO the optimizer lies in them too, and is left out.
        """
        if self.save.stage == 0:
            for model_rank in self.save.model_ranks[0]:
                yield self._without_optimizer(model_rank)
        for source in self.save.model_sources if self.save.stage > 0 else ():
            size = self.save.reads[source.index].size_bytes
            yield OutputFile(source.path, (Range(source.index, 0, size),))
        if self.superset:
            for model in self.save.models:
                mm = f"mp_rank_{model.source.mm or 0:02d}_model_states.pt"
                other = mm if self.save.stage >= 3 else f"zero_pp_rank_0_{mm}"
                yield OutputLink(other, model.source.path)

    def _without_optimizer(self, model_rank: ModelRank) -> OutputFile:
        """Model states of stage 0 as those of stage 1 are; whole where the trainer's own state is no data."""
        source = model_rank.model.source
        shapes = [{name: Size(shape) for name, shape in group.items()} for group in model_rank.shapes]
        value = {**model_rank.model.root, "optimizer": None, "param_shapes": shapes}
        try:
            return self._file(source.path, value, ranges_in(source.index))
        except RefusedError:
            size = self.save.reads[source.index].size_bytes
            return OutputFile(source.path, (Range(source.index, 0, size),))

    def _fp32_copies(self, model: OpenedShard) -> Iterator[OutputFile]:
        """Yield files that 0.19.8 writes for names of `module` in no optimizer; no loader reads them."""
        if version_tuple(self.save.ds_version) < FP32_COPIES_SINCE:
            return
        for name, tensor in as_dict(model.root.get("module")).items():
            if name in self.written or not isinstance(tensor, Tensor):
                continue
            self.written.add(name)
            refuse_folder_name(str(name), model.source.path)
            if tensor.dtype != "float32" and tensor.dtype not in SOURCE_ITEM_BYTES:
                raise RefusedError(
                    f"{model.source.path}: {name} of type {tensor.dtype} has no float32 copy here",
                    hint="convert with --compat superset, which needs none",
                )
            yield self._fp32_copy(name, tensor, model.source.index)

    def _fp32_copy(self, name: str, tensor: Tensor, source: int) -> OutputFile:
        span = _span(tensor)
        part: Part = Range(source, tensor.byte_offset, 4 * span)
        if tensor.dtype != "float32":
            part = Widen(source, tensor.byte_offset, span, tensor.dtype)
        shown = Tensor(Storage("float32", "0", 0, 4 * span, span), "float32", 0, tensor.shape, tensor.stride)
        return self._file(f"zero/{name}/fp32.pt", {"param": shown}, lambda _: (part,), span=span)

    def _file(self, path: str, value: Any, ranges: Ranges, *, span: int | None = None) -> OutputFile:
        return OutputFile(path, archive_parts(value, path, ranges, block=self.block, span=span))


def _entry(join: JoinedParameter, tensor: Tensor) -> dict[str, Any]:
    """Return the dictionary of a state file, keys in the stock converter's order."""
    entry: dict[str, Any] = {}
    if join.cat_dim is not None:
        entry["cat_dim"] = join.cat_dim
    if join.two_sub_params:
        entry["param_n_sub_params"] = 2
    if join.sub_params is not None:
        origin = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
        marks = {
            "patterns": join.sub_params.patterns,
            "shape": join.sub_params.shape,
            "partition_dim": join.sub_params.partition_dim,
        }
        entry["sub_param_shape"] = Inert(origin, (), marks, made_by_new=True)
    if join.vocabulary:
        entry["vocab_tensor"] = True
    if join.experts is not None:
        return {"param": tensor, **entry, "is_expert_param": True, "ep_num_experts": join.experts}
    return {**entry, "param": tensor}


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last of a strided tensor."""
    if tensor.numel == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
