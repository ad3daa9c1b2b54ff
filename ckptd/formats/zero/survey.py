"""Prove that a save is whole and single before anything is planned (docs/design.md §3, §4).

Reads every shard of the proven grid, cuts it to offsets, and refuses what is missing, mixed from two
saves, contradictory, or of a kind that has no range-copy form here.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from ckptd.base.extents import identity_of
from ckptd.core.completeness.stale_files import WrittenShard, stale_layout
from ckptd.core.model.swap_paths import BY_LOCAL_RANK, FOLDER, path_of
from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.torchfile.fingerprint import raw_fingerprint
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero import experts as autoep
from ckptd.formats.zero import stage0, stage3, stage12
from ckptd.formats.zero.experts import NO_EXPERTS, Experts, check_files, find, find_partitioned
from ckptd.formats.zero.facts import as_dict, numel, shown
from ckptd.formats.zero.optimizers import stray_setting
from ckptd.formats.zero.save import Fragments, Layer, ModelRank, Read, Save
from ckptd.formats.zero.shards import OpenedShard, OptimShard, SourceShard, flat, open_shard

if TYPE_CHECKING:
    from ckptd.formats.zero.stage12 import Shapes


# --- Checks that all shards are of one save, and the shapes in its model states --------------------------

MOST_NAME_BYTES = 255


def differs(what: str, one: OpenedShard, mine: Any, other: OpenedShard, theirs: Any) -> RefusedError:
    """Return the refusal of shards that say different things."""
    return RefusedError(
        f"{one.source.path} has {what} {shown(mine)}, {other.source.path} has {shown(theirs)}: "
        "shards of two saves",
        hint="mixing saves trains wrongly without a warning, so nothing was converted",
    )


def agree_optims(shard: OpenedShard, first: OpenedShard, *, same_rank: bool, same_stage: bool) -> None:
    """Refuse optimizer shards of two saves; a pipeline's stages may have other groups, not other ranks.

    Raises:
        RefusedError: version, stage, step, settings or partitioning differ.
    """
    if same_stage and (other := stray_setting(shard.root, first.root)) is not None:
        raise differs(other[0], shard, other[1], first, other[2])
    for what in ("ds_version", "zero_stage", "optimizer_step"):
        mine, theirs = getattr(shard.facts, what), getattr(first.facts, what)
        if mine != theirs and not (what == "optimizer_step" and None in (mine, theirs)):
            raise differs(what, shard, mine, first, theirs)
    counts, of_first = shard.facts.partition_count, first.facts.partition_count
    if (counts != of_first) if same_rank else max(counts, default=0) != max(of_first, default=0):
        raise differs("partition_count", shard, counts, first, of_first)


def agree_models(shard: OpenedShard, first: OpenedShard, *, same_rank: bool) -> None:
    """Refuse model states of two saves; shapes are compared within one model-parallel rank.

    Raises:
        RefusedError: version, grid, step or shapes differ.
    """
    for what in ("ds_version", "dp_world_size", "global_steps", "tp", "pp"):
        mine, theirs = getattr(shard.facts, what), getattr(first.facts, what)
        if mine != theirs:
            raise differs(what, shard, mine, first, theirs)
    if same_rank and shard.root is not first.root and _shape_digest(shard) != _shape_digest(first):
        raise differs("param_shapes of digest", shard, _shape_digest(shard), first, _shape_digest(first))


def shapes_of(model: OpenedShard) -> Shapes:
    """Return `param_shapes`, checked: real shapes, names that are text, each once.

    Raises:
        RefusedError: otherwise.
    """
    shapes = model.root.get("param_shapes")
    if not isinstance(shapes, list):
        raise RefusedError(
            f"{model.source.path} has no param_shapes, which say how large each parameter is "
            "(DeepSpeed writes them for native MoE since 0.19.4)",
            hint="bf16 without ZeRO (stage 0) saves none; train with stage 1. "
            "The ZeRO form is safe all the same: DeepSpeed loads it with the same number of ranks",
        )
    checked: Shapes = []
    seen: set[str] = set()
    for group in shapes:
        current: dict[str, tuple[int, ...]] = {}
        for name, shape in as_dict(group).items():
            if numel(shape) is None or not _is_text(name):
                raise RefusedError(f"{model.source.path} names {shown(name)}, which can be no parameter")
            if name in seen:
                raise RefusedError(f"{model.source.path} lists {name} twice in param_shapes")
            seen.add(name)
            current[name] = tuple(shape)
        checked.append(current)
    return checked


def _is_text(name: Any) -> bool:
    return isinstance(name, str) and name != "" and not any("\ud800" <= c <= "\udfff" for c in name)


def refuse_folder_name(name: str, path: str) -> None:
    """Refuse a tensor's name that cannot be a folder below `zero/`; `a/b` is two nested ones, as in stock.

    Raises:
        RefusedError: it would lead out of `zero/` (P15), or no file system takes it.
    """
    parts = name.split("/")
    reason = None
    if any(part in ("", ".", "..") for part in parts):
        reason = "which is no path below zero/"
    elif any(c in name for c in "\0\n") or any("\ud800" <= c <= "\udfff" for c in name):
        reason = "which can be no folder"
    elif any(len(part.encode()) > MOST_NAME_BYTES for part in parts):
        reason = f"longer than a folder's name may be ({MOST_NAME_BYTES} bytes)"
    elif parts[0] == "optimizer_state.pt" or any(".pt" in part for part in parts[1:]):
        reason = "which the loader would take for a file of optimizer state"
    if reason is not None:
        raise RefusedError(
            f"{path} names a tensor {shown(name)}, {reason}: it has no place in a universal form",
            hint="--form weights-fp32 exports it; the ZeRO form is safe all the same",
        )


def _shape_digest(model: OpenedShard) -> str:
    return hashlib.sha256(repr(shapes_of(model)).encode("utf-8", "surrogatepass")).hexdigest()[:12]


# --- The survey ------------------------------------------------------------------------------------------

Opening = Callable[[str], AbstractContextManager[int]]
MAX_RANKS = 1 << 20
"""Most ranks of a grid: limits what a hostile number may cost."""
SAFE = "the ZeRO form is safe all the same"
SWAPPED = "side"
"""Role of tensors that NVMe offload swapped out, with the rank of their folder."""


Listed = dict[tuple[int, int], SourceShard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The grid: data-parallel ranks, tensor ranks, pipeline stages."""

    dp: int
    tp: int
    pp: int
    stage: int

    def number(self, pp: int, tp: int) -> int:
        """Return the model-parallel number in file names (pipeline-major, docs/formats.md §1)."""
        return pp * self.tp + tp


class Surveyor:
    """Opens shards one by one and compares them; `opening(path)` gives a descriptor for a while.

    `contents`: for forms that hold the model. Keep what they need beyond the optimizer's shards (frozen
    parameters). `layers`: those of a pipeline, and experts, which masters are compared with.
    `masters_only`: for weights, of which an optimizer's own state is no matter.
    """

    def __init__(
        self,
        opening: Opening,
        sources: list[SourceShard],
        folders: list[str],
        *,
        contents: bool = False,
        masters_only: bool = False,
        layers: bool = True,
    ) -> None:
        self.opening = opening
        self.sources = sources
        self.folders = folders
        self.contents = contents
        self.masters_only = masters_only
        self.layers = layers
        self.reads: list[Read] = []
        self.swapped = {s.path: s.d for s in sources if s.role == SWAPPED}

    def survey(self) -> Save:
        """Read everything.

        Raises:
            RefusedError, DamagedError, TornArchiveError, SourceChanged: with the file and the reason.
        """
        if self._is_unsharded():
            return self._survey_unsharded()
        self._refuse_by_name()
        self._leave_out_stale()
        optim = self._by_rank("optim")
        if not optim:
            raise RefusedError("no optimizer shard here names its rank (zero_pp_rank_*_optim_states.pt)")
        first = self._open(optim[min(optim)])
        stage = first.facts.zero_stage or 1
        models = self._by_rank("model", named_by_rank=stage >= 3)
        if not models:
            name = "zero_pp_rank_0_mp_rank_00" if stage >= 3 else "mp_rank_00"
            raise DamagedError(f"{name}_model_states.pt is missing")
        model0 = self._open(models[min(models)])
        self._refuse_by_facts(model0, first)
        versions = model0.facts.ds_version, first.facts.ds_version
        if None not in versions and versions[0] != versions[1]:
            raise differs("ds_version", model0, versions[0], first, versions[1])
        grid = self._grid(model0, first, optim)
        self._expect(grid, optim, models)
        is_pipeline_0 = stage < 3 and self._needs_layers(model0)
        if not is_pipeline_0 and not any(shapes_of(model0)):
            raise RefusedError(f"{model0.source.path} holds no parameters", hint=SAFE)
        if grid.stage >= 3 and grid.tp * grid.pp > 1 and autoep.layers(model0):
            raise RefusedError(
                "experts that the tensor ranks share (AutoEP with AutoTP) are not converted",
                hint="DeepSpeed loads it on the same ranks; " + SAFE,
            )
        model_sources: list[SourceShard] = []
        model_ranks = [
            [
                self._model_rank(grid, (pp, tp), (first, model0), (optim, models), model_sources)
                for tp in range(grid.tp)
            ]
            for pp in range(grid.pp)
        ]
        experts = self._experts(grid, model_ranks, first)
        return Save(
            stage=stage,
            dp=grid.dp,
            ds_version=first.facts.ds_version or model0.facts.ds_version or "",
            global_steps=model0.facts.global_steps,
            optimizer_step=first.facts.optimizer_step,
            model_ranks=model_ranks,
            rank0_optim=first,
            model_sources=model_sources,
            reads=self.reads,
            experts=experts,
            layers=self._layers() if self.layers else [],
        )

    def _is_unsharded(self) -> bool:
        """Tell whether the optimizer lies in the model states: DeepSpeed without ZeRO (stage 0)."""
        if FOLDER in self.folders or any(s.role == "optim" and s.d is not None for s in self.sources):
            return False
        models = self._by_rank("model", named_by_rank=False)
        facts = self._look(models[min(models)]).facts if models else None
        return facts is not None and facts.zero_stage == 0 and "zero" not in self.folders

    def _survey_unsharded(self) -> Save:
        """Read a save without ZeRO: each model-parallel rank is one shard, in its model states."""
        models = self._by_rank("model", named_by_rank=False)
        first = self._open(models[min(models)])
        tp, pp = first.facts.tp, first.facts.pp
        if tp is None or pp is None:
            tp, pp = first.facts.mp_world_size or len(models), 1
        if pp != 1 or tp < 1 or tp > MAX_RANKS:
            raise RefusedError("a pipeline without ZeRO (stage 0) is not converted", hint=stage0.ELSE)
        if any((mm, 0) not in models for mm in range(tp)):
            absent = next(mm for mm in range(tp) if (mm, 0) not in models)
            raise DamagedError(f"mp_rank_{absent:02d}_model_states.pt is missing")
        row: list[ModelRank] = []
        found: list[stage0.Unsharded] = []
        for mm in range(tp):
            model = first if mm == 0 else self._open(models[mm, 0])
            agree_models(model, first, same_rank=mm == 0)
            with self.opening(model.source.path) as fd:
                found.append(stage0.Unnamed(model, fd, masters_only=self.masters_only).read())
            row.append(ModelRank(0, mm, model, found[-1].shapes, [found[-1].shard]))
        return Save(
            stage=0,
            dp=1,
            ds_version=first.facts.ds_version or "",
            global_steps=first.facts.global_steps,
            optimizer_step=None,
            model_ranks=[row],
            rank0_optim=replace(first, root=found[0].root),
            model_sources=[model_rank.model.source for model_rank in row],
            reads=self.reads,
            remarks=stage0.remarks(found),
        )

    def _layers(self) -> list[Layer]:
        """State dictionaries of a pipeline's layers, whose numbers only their names hold, and of experts."""
        found: list[Layer] = []
        for source in sorted(
            (s for s in self.sources if s.role in ("layer", "expert")), key=lambda s: s.path
        ):
            number = re.match(r"layer_(\d+)-", source.path)
            if number is not None or source.role == "expert":
                opened = self._open(source)
                found.append(Layer(int(number[1]) if number else None, source.mm or 0, opened))
        return found

    def _needs_layers(self, model: OpenedShard) -> bool:
        """Tell whether layer files say what `param_shapes` would: of a pipeline of bf16 without ZeRO."""
        has_shapes = isinstance(model.root.get("param_shapes"), list)
        return not has_shapes and any(s.role == "layer" for s in self.sources)

    def _tensors_of_layers(self, tp: int) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return the shapes in each layer file of a tensor rank, by the layer's number."""
        found: dict[int, dict[str, tuple[int, ...]]] = {}
        for source in (s for s in self.sources if s.role == "layer" and (s.mm or 0) == tp):
            if (number := re.match(r"layer_(\d+)-", source.path)) is not None:
                root = self._open(source).root
                found[int(number[1])] = {
                    str(name): value.shape for name, value in root.items() if isinstance(value, Tensor)
                }
        return found

    def _experts(self, grid: Degrees, model_ranks: list[list[ModelRank]], optim: OpenedShard) -> Experts:
        """Find the groups of experts, which are the same on every model-parallel rank."""
        if grid.stage >= 3:
            return model_ranks[0][0].experts
        models = [[model_rank.model for model_rank in row] for row in model_ranks]
        check_files(models, self.sources, are_split=grid.tp > 1 and optim.facts.ep is not None)
        experts = find(models[0][0], optim, grid.dp, grid.tp)
        for model_rank in (model_rank for row in model_ranks for model_rank in row):
            if model_rank.experts != experts:
                raise RefusedError(
                    f"{model_rank.model.source.path} has other groups of experts than the first rank",
                    hint=SAFE,
                )
        return experts

    def _model_rank(
        self,
        grid: Degrees,
        place: tuple[int, int],
        first: tuple[OpenedShard, OpenedShard],
        listed: tuple[Listed, Listed],
        model_sources: list[SourceShard],
    ) -> ModelRank:
        """Read one model-parallel rank; what was opened as the first is not opened again."""
        (pp, tp), (optim0, model0), (optim, models) = place, first, listed
        mm = grid.number(pp, tp)
        model = model0 if mm == 0 else self._open(models[mm, 0])
        agree_models(model, model0, same_rank=mm == 0)
        model_sources.append(model.source)
        head = optim0 if mm == 0 else self._open(optim[mm, 0])
        agree_optims(head, optim0, same_rank=mm == 0, same_stage=pp == 0)
        is_pipeline_0 = grid.stage < 3 and self._needs_layers(model)
        shapes = [] if is_pipeline_0 else shapes_of(model)
        shards = [self._cut(head, grid, shapes)]
        for d in range(1, grid.dp):
            shard = self._open(optim[mm, d])
            agree_optims(shard, head, same_rank=True, same_stage=True)
            shards.append(self._cut(shard, grid, shapes))
        if is_pipeline_0:
            shapes = stage0.shapes_of_pipeline(shards, self._tensors_of_layers(tp))
        frozen = [frozen_of(model)] if self.contents else []
        like, with_experts = model, [model]
        for d in _model_ranks(grid, models)[1:]:
            like = self._open(models[mm, d], like=like)
            agree_models(like, model, same_rank=True)
            model_sources.append(like.source)
            frozen += [frozen_of(like)] if self.contents else []
            with_experts += [like] if autoep.layers(model) else []
        if grid.stage < 3:
            experts = find(model, head, grid.dp, grid.tp)
        elif autoep.layers(model):
            sharing = [stage3.owners(shards, s) for s in range(len(shards[0].groups))]
            experts = find_partitioned(with_experts, sharing)
        else:
            experts = NO_EXPERTS
        return ModelRank(pp, tp, model, shapes, shards, frozen, experts)

    def _cut(self, opened: OpenedShard, grid: Degrees, shapes: Shapes) -> OptimShard:
        """Offsets of a rank's shard."""
        if grid.stage < 3:
            return stage12.cut(opened, masters_only=self.masters_only)
        source = opened.source
        rank = (source.d or 0) * grid.tp * grid.pp + (source.mm or 0)

        def swapped(ds_id: str, what: str) -> tuple[int, int]:
            return self._swapped(path_of(rank, ds_id), what, is_node_local=opened.facts.is_node_local)

        lengths = stage3.shares(shapes, grid.dp)
        return stage3.cut(opened, lengths, swapped, masters_only=self.masters_only)

    def _swapped(self, path: str, what: str, *, is_node_local: bool) -> tuple[int, int]:
        """Return the number and the bytes of the file that a tensor was swapped to."""
        if is_node_local and len(set(self.swapped.values())) < len(self._by_rank("optim")):
            raise RefusedError(f"{what} is in {path} of one of several nodes: {BY_LOCAL_RANK}", hint=SAFE)
        if path not in self.swapped:
            raise DamagedError(
                f"{what} is swapped to {path}, which is not there",
                hint="copy offloaded_tensors/ of every node here, or use an older checkpoint",
            )
        with self.opening(path) as fd:
            status = os.fstat(fd)
            read = Read(path, SWAPPED, status.st_size, identity_of(status), raw_fingerprint(fd))
        self.reads.append(read)
        return len(self.reads) - 1, status.st_size

    def _look(self, source: SourceShard, like: OpenedShard | None = None) -> OpenedShard:
        with self.opening(source.path) as fd:
            return open_shard(fd, source, like)

    def _open(self, source: SourceShard, like: OpenedShard | None = None) -> OpenedShard:
        """Open a shard and give it its number in the plan; `like`: see `open_shard`."""
        opened = self._look(replace(source, index=len(self.reads)), like)
        self.reads.append(
            Read(source.path, source.role, opened.size_bytes, opened.identity, opened.fingerprint)
        )
        return opened

    def _leave_out_stale(self) -> None:
        """Leave out what a run with another ZeRO stage or precision left, as the daemon's verdict does."""
        optim = [s for s in self.sources if s.role == "optim"]
        models = [s for s in self.sources if s.role == "model"]
        if len({_prefix(s) for s in optim}) < 2 and len({s.d is None for s in models}) < 2:
            return
        # the lowest rank of each layout tells: higher ones may be left by a larger world
        first: dict[object, SourceShard] = {}
        for source in sorted((*optim, *models), key=lambda s: (s.mm or 0, s.d or 0)):
            first.setdefault((source.role, _prefix(source), source.d is None), source)
        found = [self._look(source) for source in first.values()]
        kinds = stale_layout(
            WrittenShard(
                path=o.source.path,
                is_optimizer=o.source.role == "optim",
                is_ranked=o.source.d is not None,
                stage=o.facts.zero_stage,
                dtype=o.facts.dtype,
                written_ns=o.identity[3],
            )
            for o in found
        )
        stale = {kind for kind, source in first.items() if source.path in kinds}
        self.sources = [s for s in self.sources if (s.role, _prefix(s), s.d is None) not in stale]

    def _refuse_by_name(self) -> None:
        roles = {s.role for s in self.sources}
        if "optim" not in roles:
            self._refuse_without_optimizer()

    def _refuse_without_optimizer(self) -> None:
        if FOLDER in self.folders:
            raise RefusedError(
                "there are no *_optim_states.pt beside what was offloaded to NVMe (offloaded_tensors/)",
                hint=SAFE,
            )
        model = next((s for s in self.sources if s.role == "model"), None)
        if model is None:
            raise RefusedError("there is no DeepSpeed checkpoint in this folder (no *_optim_states.pt)")
        if "zero" in self.folders:
            raise RefusedError(
                "this is a universal checkpoint already",
                hint="it loads on any number of ranks as it is; --form dcp makes one for FSDP2 of it, "
                "other forms are made of the ZeRO folder",
            )
        hint = "was every rank's save copied here? for stages 1 to 3 each rank has a shard"
        raise DamagedError("no optimizer shard is here (*_optim_states.pt), only model states", hint=hint)

    def _by_rank(self, role: str, *, named_by_rank: bool = True) -> Listed:
        """Shards of a role by (model-parallel, data-parallel) rank; `mp_rank_*` model states have no d."""
        found: Listed = {}
        for source in self.sources:
            if source.role != role or (source.d is not None) != named_by_rank:
                continue
            place = (source.mm or 0, source.d or 0)
            if place in found:
                raise RefusedError(
                    f"{found[place].path} and {source.path} are both rank {place[1]}: two saves here"
                )
            found[place] = source
        return found

    @staticmethod
    def _refuse_by_facts(model: OpenedShard, optim: OpenedShard) -> None:
        stages = {optim.facts.zero_stage, model.facts.zero_stage} - {None}
        if _is_unzeroed_bf16(model, optim):
            return
        if len(stages) > 1:
            raise RefusedError(
                f"{optim.source.path} is of ZeRO stage {optim.facts.zero_stage}, "
                f"{model.source.path} of stage {model.facts.zero_stage}: two saves in one folder"
            )

    def _grid(self, model: OpenedShard, optim: OpenedShard, listed: Listed) -> Degrees:
        """Return the degrees that metadata prove; without them (before 0.19.5) what the names show."""
        world = model.facts.mp_world_size or 1
        layers = [s.mm or 0 for s in self.sources if s.role == "layer"]
        tp, pp = model.facts.tp, model.facts.pp
        if tp is None or pp is None:
            numbers = max(world, 1 + max(mm for mm, _ in listed))
            tp = 1 + max(layers) if layers else numbers
            pp = -(-numbers // tp)
        if tp < 1 or pp < 1 or tp * pp > MAX_RANKS or world not in (1, tp, tp * pp):
            raise RefusedError(
                f"{model.source.path} contradicts itself: mp_world_size {world}, "
                f"tensor parallel degree {tp}, pipeline parallel degree {pp}"
            )
        return Degrees(
            dp=_data_parallel(model, optim, listed), tp=tp, pp=pp, stage=optim.facts.zero_stage or 1
        )

    @staticmethod
    def _expect(grid: Degrees, optim: Listed, models: Listed) -> None:
        prefix = "bf16_" if next(iter(optim.values())).path.startswith("bf16_") else ""
        numbers, ranks_of_models = range(grid.tp * grid.pp), _model_ranks(grid, models)
        lacking = (
            f"{prefix}zero_pp_rank_{d}_mp_rank_{mm:02d}_optim_states.pt"
            for mm in numbers
            for d in range(grid.dp)
            if (mm, d) not in optim
        )
        lacking_models = (
            f"{f'zero_pp_rank_{d}_' if grid.stage >= 3 else ''}mp_rank_{mm:02d}_model_states.pt"
            for mm in numbers
            for d in ranks_of_models
            if (mm, d) not in models
        )
        missing = list(islice(chain(lacking, lacking_models), 3))
        if missing:  # counted, not listed: a hostile degree names more ranks than memory holds
            held = [sum(mm < len(numbers) and d < grid.dp for mm, d in optim)]
            held += [sum(mm < len(numbers) and d < len(ranks_of_models) for mm, d in models)]
            count = len(numbers) * (grid.dp + len(ranks_of_models)) - sum(held)
            more = f" and {count - 3} more" if count > 3 else ""
            ranks = f"{grid.dp} ranks" if len(numbers) == 1 else f"{grid.dp} × {len(numbers)} ranks"
            raise DamagedError(
                f"the save of {ranks} lacks {', '.join(missing)}{more}",
                hint="gather the shards of all nodes in one folder, or use an older checkpoint",
            )


def _prefix(source: SourceShard) -> str:
    return source.path.rpartition("/")[2].startswith("bf16_") * "bf16_"


def _is_unzeroed_bf16(model: OpenedShard, optim: OpenedShard) -> bool:
    """True for BF16_Optimizer without ZeRO: a pipeline of stage 0 saves shards, which name no stage."""
    said = as_dict(optim.root.get("optimizer_state_dict")).get("zero_stage")
    return model.facts.zero_stage == 0 and said is None


def _model_ranks(grid: Degrees, models: Listed) -> range:
    """Ranks whose model states are wanted.

    At stage 3 all of them, or rank 0's alone where no other rank wrote any (DeepSpeed issue 7546: saves of
    a run that was itself loaded from a universal checkpoint). What conversion needs is in the optimizer
    shards, which must all be there; some of the others' is a file that was lost, and refused.
    """
    return range(grid.dp if grid.stage >= 3 and any(d for _, d in models) else 1)


def _data_parallel(model: OpenedShard, optim: OpenedShard, listed: Listed) -> int:
    """Return the data-parallel degree that metadata proves; where none is recorded, what the names show.

    A rank that lacks by name is found later: then its parameters have fewer elements than their shapes.
    """
    said = max(optim.facts.partition_count, default=None)
    world = model.facts.dp_world_size
    if (
        said is not None
        and world is not None
        and said != world
        and not (model.facts.num_experts and said and world % said == 0)
    ):
        raise RefusedError(
            f"{optim.source.path} is of {said} ranks, {model.source.path} of {world}: two saves here"
        )
    dp = world or said
    if dp is None:
        dp = 1 + max(d for _, d in listed)
    if not 0 < dp <= MAX_RANKS:
        raise RefusedError(f"{optim.source.path} does not say how many ranks there are")
    return dp


def frozen_of(model: OpenedShard) -> Fragments:
    """Return the pieces of frozen parameters that one rank's model states hold (stage 3)."""
    pieces: dict[str, tuple[int, int, str]] = {}
    for name, tensor in as_dict(model.root.get("frozen_param_fragments")).items():
        found = flat(tensor, model.source, f"the frozen parameter {name}")
        pieces[sys.intern(str(name))] = (found.offset, found.numel, found.dtype)
    return Fragments(model.source.index, pieces)
