"""Parse DeepSpeed's file names: which shard a name is, and which names a grid demands (docs/formats.md §1).

Names only *raise* an expectation, they never prove one: the grid comes from metadata inside the shards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from ckptd.base.identity import Model
from ckptd.base.names import DESCRIPTION

if TYPE_CHECKING:
    from collections.abc import Iterable


class Role(StrEnum):
    """Name the purpose of a file of a checkpoint."""

    OPTIM = "optim"
    MODEL = "model"
    LAYER = "layer"
    EXPERT = "expert"
    UNIVERSAL = "universal"
    WEIGHTS = "weights"
    SIDE = "side"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKey:
    """Identify a shard: d = ZeRO data-parallel rank, mm = model-parallel rank, layer, expert (global id).

    `None` where the name says nothing of it: `mp_rank_00_model_states.pt` has no d.
    """

    d: int | None = None
    mm: int | None = None
    layer: int | None = None
    expert: int | None = None


class NamedShard(Model):
    """A file name read as a shard."""

    role: Role
    shard: ShardKey
    is_expert_optimizer: bool = False
    """Optimizer states of an expert-parallel rank, whose number is `shard.expert`: no expert's weights."""


_PATTERNS: tuple[tuple[re.Pattern[str], Role], ...] = (
    (
        re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(?P<d>\d+)_mp_rank_(?P<mm>\d+)_?optim_states\.pt$"),
        Role.OPTIM,
    ),
    (re.compile(r"^zero_pp_rank_(?P<d>\d+)_mp_rank_(?P<mm>\d+)_model_states\.pt$"), Role.MODEL),
    (re.compile(r"^mp_rank_(?P<mm>\d+)_model_states\.pt$"), Role.MODEL),
    (
        re.compile(
            r"^(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mm>\d+)_model_states\.pt$"
        ),
        Role.EXPERT,
    ),
    (re.compile(r"^layer_(?P<layer>\d+)(?:-model_(?P<mm>\d+))?-model_states\.pt$"), Role.LAYER),
    (re.compile(r"^expp_rank_(?P<expert>\d+)_mp_rank_(?P<mm>\d+)_optim_states\.pt$"), Role.EXPERT),
)
_EXPERT_OPTIMIZER = "expp_rank_"


@lru_cache(maxsize=4096)
def parse_shard_name(name: str) -> NamedShard | None:
    """Read a base name as a DeepSpeed shard; None when it is none.

    >>> parse_shard_name("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").shard.d
    3
    """
    for pattern, role in _PATTERNS:
        match = pattern.match(name)
        if match:
            numbers = {k: int(v) for k, v in match.groupdict().items() if v is not None}
            is_optimizer = name.startswith(_EXPERT_OPTIMIZER)
            return NamedShard(role=role, shard=ShardKey(**numbers), is_expert_optimizer=is_optimizer)
    return None


class Grid(Model):
    """The grid of a save, as metadata proves it: dp × mm_count optimizer shards (docs/formats.md §1.1).

    `mm_count` = tensor × pipeline ranks; `layers` = pipeline layers; `experts` = experts per MoE layer.
    """

    dp: int
    mm_count: int
    tp: int | None = None
    pp: int | None = None
    sp: int | None = None
    ep: int | None = None
    zero_stage: int
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    stage_experts: tuple[tuple[int, ...], ...] = ()
    """With tensor or pipeline parallelism: the experts per MoE layer of each pipeline stage."""
    experts_split: bool = False
    """Every tensor rank has a part of each expert; otherwise one of them has the whole of it."""
    proof: str = ""
    layout: str = ""
    """The layout of a checkpoint without ZeRO shards (dp 0), by its name in core/model/other_layouts.py."""

    @property
    def is_model_only(self) -> bool:
        """No rank saved anything: weights alone, committed and kept, never resumed from (ADR 0050)."""
        return self.dp == 0 and not self.layout

    @property
    def has_shards(self) -> bool:
        """Tell whether ZeRO shards make it up, of which other forms can be made."""
        return self.dp > 0


def absent_ranks(grid: Grid, present: frozenset[NamedShard]) -> tuple[NamedShard, ...]:
    """Return the optimizer shards, and those of model states, that `grid` demands and `present` lacks."""
    of_ranks = [(Role.OPTIM, True)] + (
        [(Role.MODEL, True)] if grid.zero_stage >= 3 else [(Role.MODEL, False)]
    )
    wanted = [
        NamedShard(role=role, shard=ShardKey(d=d, mm=mm) if is_ranked else ShardKey(mm=mm))
        for role, is_ranked in of_ranks
        for mm in range(grid.mm_count)
        for d in (range(grid.dp) if is_ranked else (0,))
    ]
    return tuple(shard for shard in wanted if shard not in present)


def missing_shards(grid: Grid, present: frozenset[NamedShard]) -> tuple[str, ...]:
    """Name the shards that `grid` demands and `present` lacks, in file-name words, sorted by rank."""
    missing = [
        f"optimizer shard of rank {d} (zero_pp_rank_{d}_mp_rank_{mm:02d}_optim_states.pt)"
        for mm in range(grid.mm_count)
        for d in range(grid.dp)
        if NamedShard(role=Role.OPTIM, shard=ShardKey(d=d, mm=mm)) not in present
    ]
    if grid.zero_stage >= 3:
        missing += [
            f"model shard of rank {d} (zero_pp_rank_{d}_mp_rank_{mm:02d}_model_states.pt)"
            for mm in range(grid.mm_count)
            for d in range(grid.dp)
            if NamedShard(role=Role.MODEL, shard=ShardKey(d=d, mm=mm)) not in present
        ]
    else:
        missing += [
            f"model states mp_rank_{mm:02d}_model_states.pt"
            for mm in range(grid.mm_count)
            if NamedShard(role=Role.MODEL, shard=ShardKey(mm=mm)) not in present
        ]
    missing += _missing_layers(grid, present)
    if any(grid.experts):
        experts = [n for n in present if n.role is Role.EXPERT]
        missing += _missing_experts(grid, {n.shard for n in experts if not n.is_expert_optimizer})
        if grid.zero_stage == 0:  # with ZeRO these files hold nothing, and DeepSpeed does not read them
            ranks = {n.shard.expert or 0 for n in experts if n.is_expert_optimizer}
            missing += [
                f"optimizer states expp_rank_{e}_mp_rank_00_optim_states.pt"
                for e in range(max(ranks, default=0) + 1)
                if e not in ranks
            ]
    return tuple(missing)


def _missing_layers(grid: Grid, present: frozenset[NamedShard]) -> list[str]:
    """Name the files of pipeline layers that lack; with tensor parallelism each of its ranks writes one."""
    held = {(n.shard.layer, n.shard.mm) for n in present if n.role is Role.LAYER}
    ranks = {mm for _, mm in held if mm is not None}
    if (grid.tp or 1) > 1 and ranks:
        ranks |= set(range(grid.tp or 1))
    return [
        f"layer file layer_{n:02d}" + (f"-model_{mm:02d}" if mm is not None else "")
        for n in grid.layers
        for mm in sorted(ranks) or (None,)
        if (n, mm) not in held and (n, None) not in held
    ]


def _missing_experts(grid: Grid, held: set[ShardKey]) -> list[str]:
    """Name the experts whose model states lack: each on one model-parallel rank of its pipeline stage, or a
    part of it on every tensor rank.
    """
    stages = grid.stage_experts or (grid.experts,)
    tp = grid.mm_count // len(stages) if grid.stage_experts else grid.mm_count
    found: list[str] = []
    for stage, counts in enumerate(stages):
        ranks = range(stage * tp, (stage + 1) * tp)
        of: dict[tuple[int, int], set[int]] = {}
        for key in held:
            for layer in range(len(counts)) if key.layer is None else (key.layer,):
                if (key.mm or 0) in ranks:
                    of.setdefault((layer, key.expert or 0), set()).add(key.mm or 0)
        # what has been seen raises the expectation, where nothing tells how the experts lie
        wanted = tp if grid.experts_split else max((len(mms) for mms in of.values()), default=1)
        for layer, count in enumerate(counts):
            for expert in range(count):
                lacks = wanted - len(of.get((layer, expert), ()))
                where = f" of pipeline stage {stage}" * (len(stages) > 1)
                more = f" ({lacks} of {wanted} tensor ranks)" if wanted > 1 else ""
                found += [f"expert {expert} of MoE layer {layer}{where}{more}"] * (lacks > 0)
    return found


# --- Layouts of trainers on top of DeepSpeed (docs/formats.md §1.2) --------------------------------------
# DeepSpeed's shards lie in the checkpoint folder itself; Hugging Face's Trainer, Accelerate and Lightning
# put them one level deeper, beside files of their own. Names only raise an expectation.


TRAINER_STATE = "trainer_state.json"
ADAPTER_CONFIG = "adapter_config.json"
TORCH_FILES = (".pt", ".pth", ".bin", ".pkl")
"""Endings of files that `torch.save` writes."""
LATEST_UNIVERSAL = "latest_universal"
POINTERS = frozenset({"latest", LATEST_UNIVERSAL})
"""Files beside the checkpoints that name one."""
LATE = "_late"
"""Folder, in a checkpoint's on a remote, of files whose own place is another object's."""
_HF_TAG = re.compile(r"^checkpoint-(\d+)$")
_HF_ROOT = re.compile(r"^global_step(\d+)$")
_WEIGHTS = re.compile(
    r"^(?P<stem>model|adapter_model|pytorch_model)(-\d{5}-of-(?P<of>\d{5}))?\.(?P<end>safetensors|bin)$"
)
_ACCELERATE_ROOT = re.compile(r"^pytorch_model(_\d+)?$")
_LIGHTNING_ROOT = "checkpoint"


class Trainer(StrEnum):
    """Names the trainer that writes a save_dir."""

    DEEPSPEED = "deepspeed"
    HUGGINGFACE = "huggingface"
    ACCELERATE = "accelerate"
    LIGHTNING = "lightning"
    TORCH = "torch"
    SCRIPT = "script"
    """A script of one's own, whose checkpoints the job file describes."""


WRITES_AS = {"megatron": Trainer.DEEPSPEED}
"""Trainers of a job file whose folders are those of another one: Megatron-DeepSpeed saves by DeepSpeed."""

BY_NAME = (Trainer.ACCELERATE, Trainer.LIGHTNING)
"""Their loaders open the shard root by name: a universal form lies under that name in a folder of ours."""


def shard_roots_of(tag: str, paths: Iterable[str]) -> tuple[Trainer, tuple[str, ...]]:
    """Return the trainer that a folder's names suggest, and its shard roots ("" = the folder itself).

    Of several `global_step*` in one checkpoint-N the highest is meant: the others are older.
    """
    roots: set[str] = set()
    for path in paths:
        head, _, name = path.rpartition("/")
        if parse_shard_name(name) is None:
            continue
        if not head:
            return Trainer.DEEPSPEED, ("",)
        roots.add(head)
    steps = {int(match[1]): root for root in roots if (match := _HF_ROOT.match(root))}
    if _HF_TAG.match(tag) and steps:
        return Trainer.HUGGINGFACE, (steps[max(steps)],)
    models = sorted(root for root in roots if _ACCELERATE_ROOT.match(root))
    if models:
        return Trainer.ACCELERATE, tuple(models)
    if _LIGHTNING_ROOT in roots:
        return Trainer.LIGHTNING, (_LIGHTNING_ROOT,)
    return Trainer.DEEPSPEED, ("",)


def is_shard_root(folder: str, name: str) -> bool:
    """Whether `name`, in a checkpoint's `folder`, is where a trainer on top of DeepSpeed puts the shards."""
    if _HF_TAG.match(folder):
        return _HF_ROOT.match(name) is not None
    return _ACCELERATE_ROOT.match(name) is not None or name == _LIGHTNING_ROOT


def is_weights(path: str) -> bool:
    """A file of the model's weights, as `save_pretrained` names it."""
    return _WEIGHTS.match(path) is not None


def missing_weights(paths: Iterable[str]) -> str | None:
    """The first one absent that others' names tell of: `model-00002-of-00003.safetensors`, or the index."""
    names = frozenset(paths)
    for match in sorted((m for n in names if (m := _WEIGHTS.match(n)) and m["of"]), key=lambda m: m.string):
        end = match["end"]
        wanted = [f"{match['stem']}-{i:05d}-of-{match['of']}.{end}" for i in range(1, int(match["of"]) + 1)]
        absent = [n for n in (*wanted, f"{match['stem']}.{end}.index.json") if n not in names]
        if absent:
            return absent[0]
    return None


def step_of_folder(tag: str) -> int | None:
    """N of a Hugging Face `checkpoint-N`."""
    match = _HF_TAG.match(tag)
    return int(match[1]) if match else None


def wanted_marks(trainer: Trainer, names: frozenset[str], processes: int) -> tuple[str, ...]:
    """Files of random states that a whole save of so many processes has; () where none are to be expected.

    Hugging Face writes none with save_only_model; rank 0 writes its own before trainer_state.json, so one
    that is there promises the others (H25). Accelerate always writes them.
    """
    if trainer is Trainer.ACCELERATE:
        return tuple(f"random_states_{rank}.pkl" for rank in range(processes))
    if trainer is Trainer.HUGGINGFACE and any(name.startswith("rng_state") for name in names):
        if processes == 1:
            return ("rng_state.pth",)
        return tuple(f"rng_state_{rank}.pth" for rank in range(processes))
    return ()


def added_by_us(paths: Iterable[str], roots: tuple[str, ...]) -> frozenset[str]:
    """Return the files that `ckptd resume` put beside the shards: marked universal forms, their pointer."""
    listed = frozenset(paths)
    ours = tuple(
        f"{universal_name(r)}/" for r in roots if r and f"{universal_name(r)}/{DESCRIPTION}" in listed
    )
    found = frozenset(path for path in listed if ours and path.startswith(ours))
    return found | ({LATEST_UNIVERSAL} & listed) if found else found


def is_in_roots(path: str, roots: tuple[str, ...]) -> bool:
    """Tell whether a file lies where the engine's own lie; of a model alone (no roots) any does."""
    return not roots or path.rpartition("/")[0] in roots


def universal_name(root: str) -> str:
    """Return the folder name of the universal form beside a shard root: loaders look for exactly this."""
    return f"{root}_universal"


def is_in_form(path: str) -> bool:
    """Tell whether a file in a trainer's folder lies where a universal form, or the pointer to it, does."""
    head, inside, _ = path.partition("/")
    return path == LATEST_UNIVERSAL or (bool(inside) and head.endswith(universal_name("")))


def place_of(folder: str, path: str, fingerprint: str, size_bytes: int, *, is_taken: bool = False) -> str:
    """Key of a file of a ZeRO form: by its own name, unless something else lies, or will lie, there.

    Beside shards our universal form lies under the very names that a form of somebody else's has here.
    """
    if is_taken or is_in_form(path):
        return f"{folder}/{LATE}/{fingerprint[:12]}{size_bytes}/{path}"
    return f"{folder}/{path}"
