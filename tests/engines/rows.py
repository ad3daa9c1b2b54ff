"""The engines and options of DeepSpeed that `make engines` tries: what is trained, and with which setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.real import Recipe

AIO = {"block_size": 262144, "queue_depth": 4, "intra_op_parallelism": 1}
SWAP_BUFFERS = 300
"""Gathering the states of a live engine takes a buffer for each that DeepSpeed gives back late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine or option; `loads` and `resumes`: why DeepSpeed cannot, where it cannot."""

    name: str
    recipe: Recipe
    setting: dict[str, Any] = field(default_factory=dict)
    has_held: bool = True
    """DeepSpeed can gather the states of the live engine; of the same run without the setting, where not."""
    universal: str = ""
    """Words of the refusal, where there is no universal form."""
    loads: str = ""
    """Why the stock loader does not read the universal form."""
    into: tuple[int, ...] = ()
    """ZeRO stages that it is loaded in, each on one rank and on two; none: as saved, on one."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of the recipe (make_engines.py)."""
    loads_as: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe that differ where the universal form is loaded."""
    load_ranks: int = 1
    """Ranks that load the universal form."""

    def resuming(self, work: Path) -> dict[str, Any]:
        """Return the setting to go on from the save with: a writer's engine of 0.19.8 loads no shard at all,
        since it leaves torch.load's weights_only as it is."""
        return {} if "writer" in str(self.setting) else self.setting_for(work)

    def setting_for(self, work: Path) -> dict[str, Any]:
        """Return the setting with a swap folder of its own."""
        placed: dict[str, Any] = placed_in(self.setting, str(work / "swap"))
        return placed

    @property
    def loading(self) -> dict[str, Any]:
        """Return the setting to load a universal form with: NVMe offload reads none."""
        return {} if "nvme" in str(self.setting) else self.setting


def placed_in(value: Any, swap: str) -> Any:
    """Return a setting with a swap folder in it."""
    if isinstance(value, dict):
        return {key: swap if key == "nvme_path" else placed_in(inner, swap) for key, inner in value.items()}
    return value


def nvme(**more: Any) -> dict[str, Any]:
    """Return the setting of an optimizer on NVMe."""
    offload = {"device": "nvme", "nvme_path": "", "buffer_count": SWAP_BUFFERS, **more}
    return {"zero_optimization": {"offload_optimizer": offload}, "aio": AIO}


def writer(kind: str, **more: Any) -> dict[str, Any]:
    """Return the setting of a checkpoint writer."""
    return {"checkpoint": {"writer": {"type": kind, "io_buffer_size": 1 << 20, **more}}, "aio": AIO}


def two(stage: int, **more: Any) -> Recipe:
    """Return a recipe of two ranks."""
    return Recipe(stage=stage, world_size=2, **more)


LARGE: dict[str, Any] = {"hidden": 208}
"""Partitions beyond 1 MiB, below which DeepSpeed swaps nothing out."""
SHUFFLED = {"zero_optimization": {"reduce_scatter": False}}
TIED: dict[str, Any] = {"two_groups": True, "tie": True}
EVERY = (1, 2, 3)
"""Stages; 3's loader gives the first group's settings to all (formats.md §5.1)."""
NO_SCALE = {"fp16": {"loss_scale": 1}}
UNSCALED = "it divided gradients by a loss scale that it had not multiplied by (formats.md §2.7)"
PARTIAL = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.5}}}
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1, "update_interval": 1}
MOMENTUM = "the loader wants exp_avg"

EXTRA: dict[str, Any] = {"split": False, "expert_tp": False, "in_blocks": False, "auto": 0}
"""Keys of every recipe that make_engines.py has beside make_ckpt.py's."""
MPU: dict[str, Any] = {"split": True}
ALONE: dict[str, Any] = {"tp": 0, "sp": 0}
"""Without tensor parallelism."""

SHARED = "experts that the tensor ranks share"

ROWS = (
    Row(name="CPU offload, stage 2", recipe=two(2, offload=True)),
    Row(name="CPU offload, stage 3", recipe=two(3, offload=True)),
    *(
        Row(
            name=f"ZenFlow, stage {stage}",
            recipe=two(stage, optimizer="cpu_adam"),
            setting={"zero_optimization": {"zenflow": ZENFLOW}},
        )
        for stage in (1, 2)
    ),
    Row(name="NVMe offload, stage 3", recipe=two(3, **LARGE), setting=nvme()),
    Row(
        name="NVMe offload, stage 3, pipelined, sub-groups",
        recipe=two(3, sub_group_size=300_000, **LARGE),
        setting=nvme(pipeline_read=True, pipeline_write=True),
        has_held=False,
        loads="it counts each step once per sub-group (formats.md §5.1)",
    ),
    Row(name="NVMe offload, stage 3, partitions below 1 MiB", recipe=two(3), setting=nvme()),
    Row(
        name="CPU offload of half the sub-groups (ratio 0.5), stage 3",
        recipe=two(3, optimizer="cpu_adam", sub_group_size=20_000),
        setting=PARTIAL,
        universal="ratio 0.5 keeps it on the GPU",
    ),
    Row(
        name="writer python, data_parallel replica, stage 2",
        recipe=two(2),
        setting=writer("python", data_parallel="replica"),
    ),
    Row(
        name="writer python, data_parallel socket, stage 1",
        recipe=two(1),
        setting=writer("python", data_parallel="socket"),
    ),
    Row(
        name="writer python, data_parallel machine, stage 2",
        recipe=two(2),
        setting=writer("python", data_parallel="machine"),
    ),
    Row(name="writer fast, stage 3", recipe=two(3), setting=writer("fast")),
    Row(name="writer python, decoupled, stage 3", recipe=two(3), setting=writer("python", decoupled=True)),
    Row(
        name="node-local storage, stage 3",
        recipe=two(3),
        setting={"checkpoint": {"use_node_local_storage": True}},
    ),
    Row(name="Muon, stage 1", recipe=two(1, optimizer="muon"), setting=SHUFFLED),
    Row(name="Muon, stage 2", recipe=two(2, optimizer="muon"), setting=SHUFFLED),
    Row(name="Muon, stage 3", recipe=two(3, optimizer="muon"), setting=SHUFFLED, loads=MOMENTUM),
    Row(name="stage 0, bf16", recipe=two(0), into=EVERY),
    Row(name="stage 0, bf16, FusedAdam", recipe=two(0, optimizer="fused_adam"), into=EVERY),
    Row(name="stage 0, bf16, two groups", recipe=two(0, two_groups=True), into=EVERY[:2]),
    Row(name="stage 0, fp16", recipe=two(0, dtype="fp16"), loads=UNSCALED),
    Row(name="stage 0, fp16, loss scale 1", recipe=two(0, dtype="fp16"), setting=NO_SCALE, into=EVERY),
    Row(name="stage 0, fp32", recipe=two(0, dtype="fp32"), into=EVERY),
    Row(name="stage 0, fp32, two groups, tied", recipe=two(0, dtype="fp32", **TIED), into=EVERY[:2]),
    Row(
        name="NVMe offload with tensor parallelism by mpu, stage 3",
        recipe=Recipe(stage=3, world_size=4, tp=2, sp=2, layers=4, hidden=208),
        more=MPU,
        setting=nvme(),
        loads_as=ALONE | {"llama": True},
    ),
    Row(
        name="NVMe offload with tensor parallelism by AutoTP, stage 3",
        recipe=Recipe(stage=3, world_size=4, tp=2, hidden=208, universal_info=False),
        loads_as=ALONE | {"llama": True},
        setting=nvme(),
    ),
    Row(
        name="tensor parallelism by mpu, stage 3",
        recipe=Recipe(stage=3, world_size=4, tp=2, sp=2),
        more=MPU,
        loads_as=ALONE | {"llama": True},
    ),
    Row(
        name="tensor parallelism by AutoTP, stage 3",
        recipe=Recipe(stage=3, world_size=4, tp=2, universal_info=False),
        loads_as=ALONE | {"llama": True},
    ),
    Row(name="experts, stage 1", recipe=two(1, moe=4, ep=2, llama=True), more=MPU, load_ranks=2),
    Row(name="experts, stage 2", recipe=two(2, moe=4, ep=2, llama=True), more=MPU, load_ranks=2),
    *(
        Row(
            name=f"experts {how} tensor parallelism, stage {stage}",
            recipe=Recipe(stage=stage, world_size=4, tp=2, sp=2, moe=4, ep=2),
            more=MPU | {"expert_tp": how == "split by"},
            universal="" if how == "split by" else SHARED,
            load_ranks=4,
        )
        for how in ("beside", "split by")
        for stage in (1, 2)
    ),
    Row(
        name="experts over all ranks beside tensor parallelism, stage 2",
        universal=SHARED,
        recipe=Recipe(stage=2, world_size=4, tp=2, sp=2, moe=4, ep=4),
        more=MPU,
        load_ranks=4,
    ),
    Row(
        name="experts in a pipeline, stage 1",
        recipe=Recipe(stage=1, world_size=4, pipe=2, moe=4, ep=2, layers=4),
        more=MPU,
        load_ranks=4,
    ),
    *(
        Row(
            name=f"AutoEP, stage {stage}",
            recipe=Recipe(
                stage=stage, world_size=4, llama=True, optimizer="fused_adam", universal_info=False
            ),
            more={"auto": 2},
            load_ranks=2,
        )
        for stage in (1, 2, 3)
    ),
    *(
        Row(
            name=f"AutoEP with AutoTP, stage {stage}",
            recipe=Recipe(stage=stage, world_size=4, tp=2, optimizer="fused_adam", universal_info=False),
            more={"auto": 2},
            universal=SHARED,
            setting={"tensor_parallel": {"preset_model": "mixtral"}},
            load_ranks=4,
        )
        for stage in (1, 2, 3)
    ),
)
