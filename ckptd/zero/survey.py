"""One save, proven whole and single before anything is planned (docs/design.md §3, §4).

Reads every shard of the proven grid, cuts it to offsets, and refuses what is missing, mixed from two
saves, contradictory, or of a kind that has no range-copy form here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from ckptd.errors import DamagedError, RefusedError
from ckptd.zero import stage3, stage12
from ckptd.zero.facts import RawFacts, as_dict, numel
from ckptd.zero.shards import Opened, OptimShard, Source, open_shard

Opening = Callable[[str], AbstractContextManager[int]]
SAFE = "the ZeRO form is safe all the same"


@dataclass(frozen=True, slots=True)
class Read:
    """A source file as it was when it was read; `identity` = dev, ino, size, mtime_ns, ctime_ns."""

    path: str
    role: str
    size_bytes: int
    identity: tuple[int, int, int, int, int]
    fingerprint: str


@dataclass(slots=True)
class Save:
    """A complete, consistent save of one tensor-parallel rank."""

    stage: int
    dp: int
    ds_version: str
    global_steps: int | None
    optimizer_step: int | None
    shapes: stage12.Shapes
    shards: list[OptimShard]
    rank0_optim: Opened
    rank0_model: Opened
    model_sources: list[Source]
    reads: list[Read] = field(default_factory=list)

    @property
    def universal_info(self) -> dict[Any, Any] | None:
        """`universal_checkpoint_info` of the model states; None when the trainer wrote none."""
        info = self.rank0_model.root.get("universal_checkpoint_info")
        return info if isinstance(info, dict) else None


class Surveyor:
    """Opens shards one by one and compares them; `opening(path)` gives a descriptor for a while."""

    def __init__(self, opening: Opening, sources: list[Source], folders: list[str]) -> None:
        self.opening = opening
        self.sources = sources
        self.folders = folders
        self.reads: list[Read] = []

    def survey(self) -> Save:
        """Read everything.

        Raises:
            RefusedError, DamagedError, TornArchiveError, SourceChanged: with the file and the reason.
        """
        self._refuse_by_name()
        optim = self._by_rank("optim")
        first = self._open(optim[min(optim)])
        stage = first.facts.zero_stage or 1
        models = self._models(stage)
        model0 = self._open(models[min(models)])
        self._refuse_by_facts(model0, first)
        dp = self._degree(model0, first)
        self._expect(optim, models, dp, stage)
        shapes = _shapes(model0)
        shards = [
            self._cut(first if d == min(optim) else self._open(optim[d]), first, stage) for d in range(dp)
        ]
        model_sources = [model0.source]
        for d in sorted(models)[1:] if stage >= 3 else []:
            if d < dp:
                other = self._open(models[d])
                _agree_models(other, model0)
                model_sources.append(other.source)
        return Save(
            stage=stage,
            dp=dp,
            ds_version=first.facts.ds_version or model0.facts.ds_version or "",
            global_steps=model0.facts.global_steps,
            optimizer_step=first.facts.optimizer_step,
            shapes=shapes,
            shards=shards,
            rank0_optim=first,
            rank0_model=model0,
            model_sources=model_sources,
            reads=self.reads,
        )

    def _look(self, source: Source) -> Opened:
        with self.opening(source.path) as fd:
            return open_shard(fd, source)

    def _open(self, source: Source) -> Opened:
        """Open a shard and give it its number in the plan."""
        opened = self._look(replace(source, index=len(self.reads)))
        self.reads.append(
            Read(source.path, source.role, opened.size_bytes, opened.identity, opened.fingerprint)
        )
        return opened

    def _cut(self, opened: Opened, first: Opened, stage: int) -> OptimShard:
        _agree_optims(opened, first)
        return stage3.cut(opened) if stage >= 3 else stage12.cut(opened)

    def _refuse_by_name(self) -> None:
        roles = {s.role for s in self.sources}
        if "offloaded_tensors" in self.folders:
            raise RefusedError("the optimizer state was offloaded to NVMe (offloaded_tensors/)", hint=SAFE)
        if "expert" in roles:
            raise RefusedError("a native mixture-of-experts checkpoint is not converted yet", hint=SAFE)
        if "optim" not in roles:
            self._refuse_without_optimizer()
        ranks = {s.mm for s in self.sources if s.role in ("optim", "model")}
        if "layer" in roles or ranks - {0}:
            self._refuse_model_parallel(len(ranks), pipeline="layer" in roles)

    def _refuse_without_optimizer(self) -> None:
        model = next((s for s in self.sources if s.role == "model"), None)
        if model is None:
            raise RefusedError("there is no DeepSpeed checkpoint in this folder (no *_optim_states.pt)")
        facts = self._look(model).facts
        if facts.zero_stage == 0:
            raise RefusedError("a checkpoint without ZeRO (stage 0) has no universal form", hint=SAFE)
        raise DamagedError("no optimizer shard is here (*_optim_states.pt), only model states")

    def _refuse_model_parallel(self, ranks: int, *, pipeline: bool) -> None:
        model = next((s for s in self.sources if s.role == "model"), None)
        facts = self._look(model).facts if model else RawFacts()
        tp, pp = facts.tp or (1 if pipeline else ranks), facts.pp or (ranks if pipeline else 1)
        what = f"pipeline parallel degree {pp}" if pp > 1 else f"tensor parallel degree {tp}"
        if pp > 1 and tp > 1:
            what += f" and tensor parallel degree {tp}"
        raise RefusedError(f"a checkpoint of {what} is not supported yet", hint=SAFE)

    def _by_rank(self, role: str) -> dict[int, Source]:
        found: dict[int, Source] = {}
        for source in self.sources:
            if source.role == role and source.d is not None:
                if source.d in found:
                    raise RefusedError(
                        f"{found[source.d].path} and {source.path} are both rank {source.d}: two saves here"
                    )
                found[source.d] = source
        return found

    def _models(self, stage: int) -> dict[int, Source]:
        if stage >= 3:
            models = self._by_rank("model")
        else:
            models = dict(enumerate(s for s in self.sources if s.role == "model" and s.d is None))
        if not models:
            name = "zero_pp_rank_0_mp_rank_00" if stage >= 3 else "mp_rank_00"
            raise DamagedError(f"{name}_model_states.pt is missing")
        return models

    @staticmethod
    def _refuse_by_facts(model: Opened, optim: Opened) -> None:
        if any(n > 0 for n in model.facts.num_experts):
            raise RefusedError("a native mixture-of-experts checkpoint is not converted yet", hint=SAFE)
        if model.root.get("ds_autoep_layers") or model.root.get("autoep_layers"):
            raise RefusedError("an AutoEP checkpoint is not converted yet", hint=SAFE)
        for what, degree in (("tensor", model.facts.tp or 1), ("pipeline", model.facts.pp or 1)):
            if degree > 1:
                raise RefusedError(
                    f"a checkpoint of {what} parallel degree {degree} is not supported yet", hint=SAFE
                )
        if (model.facts.mp_world_size or 1) > 1:
            raise RefusedError(
                f"a checkpoint of model parallel degree {model.facts.mp_world_size} is not supported yet",
                hint=SAFE,
            )
        stages = {optim.facts.zero_stage, model.facts.zero_stage} - {None}
        if len(stages) > 1:
            raise RefusedError(
                f"{optim.source.path} is of ZeRO stage {optim.facts.zero_stage}, "
                f"{model.source.path} of stage {model.facts.zero_stage}: two saves in one folder"
            )

    @staticmethod
    def _degree(model: Opened, optim: Opened) -> int:
        """The data-parallel degree that metadata proves."""
        counts = set(optim.facts.partition_count)
        if len(counts) > 1:
            raise RefusedError(
                f"{optim.source.path} partitions its groups over {sorted(counts)} ranks (expert parallelism)",
                hint=SAFE,
            )
        said = counts.pop() if counts else None
        world = model.facts.dp_world_size
        if said is not None and world is not None and said != world:
            raise RefusedError(
                f"{optim.source.path} is of {said} ranks, {model.source.path} of {world}: two saves here"
            )
        dp = said or world
        if not dp or dp > 1 << 20:
            raise RefusedError(f"{optim.source.path} does not say how many ranks there are")
        return dp

    def _expect(self, optim: dict[int, Source], models: dict[int, Source], dp: int, stage: int) -> None:
        prefix = "bf16_" if optim[min(optim)].path.startswith("bf16_") else ""
        missing = [
            f"{prefix}zero_pp_rank_{d}_mp_rank_00_optim_states.pt" for d in range(dp) if d not in optim
        ]
        if stage >= 3:
            missing += [f"zero_pp_rank_{d}_mp_rank_00_model_states.pt" for d in range(dp) if d not in models]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise DamagedError(
                f"the save of {dp} ranks lacks {', '.join(missing[:3])}{more}",
                hint="gather the shards of all nodes in one folder, or use an older checkpoint",
            )


def _differs(what: str, one: Opened, mine: Any, other: Opened, theirs: Any) -> RefusedError:
    return RefusedError(
        f"{one.source.path} has {what} {mine}, {other.source.path} has {theirs}: shards of two saves",
        hint="mixing saves trains wrongly without a warning, so nothing was converted",
    )


def _agree_optims(shard: Opened, first: Opened) -> None:
    for what in ("ds_version", "zero_stage", "partition_count", "optimizer_step"):
        mine, theirs = getattr(shard.facts, what), getattr(first.facts, what)
        if mine != theirs and not (what == "optimizer_step" and None in (mine, theirs)):
            raise _differs(what, shard, mine, first, theirs)


def _agree_models(shard: Opened, first: Opened) -> None:
    for what in ("ds_version", "dp_world_size", "global_steps"):
        mine, theirs = getattr(shard.facts, what), getattr(first.facts, what)
        if mine != theirs:
            raise _differs(what, shard, mine, first, theirs)
    if _shape_digest(shard) != _shape_digest(first):
        raise _differs("param_shapes of digest", shard, _shape_digest(shard), first, _shape_digest(first))


def _shapes(model: Opened) -> stage12.Shapes:
    shapes = model.root.get("param_shapes")
    if not isinstance(shapes, list):
        raise RefusedError(f"{model.source.path} has no param_shapes")
    checked: stage12.Shapes = []
    seen: set[str] = set()
    for group in shapes:
        current: dict[str, tuple[int, ...]] = {}
        for name, shape in as_dict(group).items():
            if numel(shape) is None or not is_folder_name(name):
                raise RefusedError(f"{model.source.path} names a parameter {name!r} of shape {shape!r}")
            if name in seen:
                raise RefusedError(f"{model.source.path} lists {name} twice in param_shapes")
            seen.add(name)
            current[name] = tuple(shape)
        checked.append(current)
    return checked


def is_folder_name(name: Any) -> bool:
    """True when a parameter's name can be one directory component (P15)."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(c in name for c in "/\0\n")
        and len(name.encode("utf-8", "surrogatepass")) <= 255
    )


def _shape_digest(model: Opened) -> str:
    return hashlib.sha256(repr(_shapes(model)).encode("utf-8", "surrogatepass")).hexdigest()[:12]
