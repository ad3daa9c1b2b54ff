"""The trainer of bench.interference: real DeepSpeed on CPU that steps and saves when told, and times it.

`torchrun … interference_train.py RECIPE.json ORDERS ANSWERS`: ORDERS and ANSWERS are FIFOs. An order is a
line of JSON {"save_dir", "saves", "steps", "luggage_bytes"}: some steps that nobody counts, then so many
times a save (with that much client state) and its share of the steps. Its answer: {"steps": seconds of each
step, "saves": seconds of each save} and of each step of rank 0, all threads together, {"cpu": CPU seconds,
"queued": seconds without a core, "disk": seconds of waiting for a disk, "taken": times that a core was taken
away}. An empty line ends all.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch

from examples.demo.ending import leave
from tests.support import make_ckpt

UNCOUNTED_STEPS = 4
"""After a pause of any length: caches and clocks are as in the middle of training again."""


def step(engine: Any, recipe: dict[str, Any], number: int) -> float:
    """One global step on one sample a rank; seconds."""
    rank = dist.get_rank()
    ids, labels = make_ckpt.batch_for(recipe["vocab"], number, rank, rank + 1)
    began = time.perf_counter()
    make_ckpt.loss_of(engine, recipe, ids, labels, 0)
    return time.perf_counter() - began


def save(engine: Any, save_dir: str, client_state: dict[str, Any]) -> float:
    """One save by all ranks; seconds that training stood still for it."""
    began = time.perf_counter()
    engine.save_checkpoint(save_dir, client_state=client_state)
    return time.perf_counter() - began


ACCOUNT = ("cpu", "queued", "disk", "taken")


def account() -> tuple[float, ...]:
    """What this process had since it began, as ACCOUNT names it; disk: 0 where `task_delayacct` is off."""
    queued = disk = taken = 0.0
    for thread in Path("/proc/self/task").iterdir():
        queued += int((thread / "schedstat").read_text().split()[1]) / 1e9
        disk += int((thread / "stat").read_text().rpartition(")")[2].split()[39]) / os.sysconf("SC_CLK_TCK")
        taken += int((thread / "status").read_text().rpartition("nonvoluntary_ctxt_switches:")[2])
    return time.process_time(), queued, disk, taken


def segment(
    engine: Any, recipe: dict[str, Any], order: dict[str, Any], client_state: dict[str, Any]
) -> dict[str, list[float]]:
    """Run what one order asks for; `client_state` keeps its memory for the next one."""
    gc.collect()
    for _ in range(UNCOUNTED_STEPS):
        step(engine, recipe, engine.global_steps)
    if order["luggage_bytes"] and "luggage" not in client_state:
        client_state["luggage"] = torch.ones(order["luggage_bytes"], dtype=torch.uint8)
    answer: dict[str, list[float]] = {name: [] for name in ("steps", "saves", *ACCOUNT)}
    for _ in range(order["saves"]):
        answer["saves"].append(save(engine, order["save_dir"], client_state))
        for _ in range(order["steps"] // order["saves"]):
            before = account()
            answer["steps"].append(step(engine, recipe, engine.global_steps))
            for name, then, now in zip(ACCOUNT, before, account(), strict=True):
                answer[name].append(now - then)
    return answer


def pin(rank: int) -> None:
    """One of the trainer's cores for this rank, so that ranks do not push each other around."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def main() -> None:
    """Rank 0 reads orders for all and answers for all."""
    pin(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    gc.disable()  # a collection in one segment and not in its neighbour would be taken for ckptd's doing
    recipe = json.loads(Path(sys.argv[1]).read_text())
    world = dist.get_world_size()
    config = make_ckpt.ds_config(recipe, world, universal=False)
    config |= {"train_micro_batch_size_per_gpu": 1, "train_batch_size": world}
    engine = make_ckpt.build(recipe, config, init_seed=7)
    client_state: dict[str, Any] = {make_ckpt.UC_KEY: {"universal_checkpoint_version": 0.2}}
    is_first = dist.get_rank() == 0
    # every rank holds both open, which nobody minds; only the first reads and writes
    with Path(sys.argv[2]).open() as orders, Path(sys.argv[3]).open("a", buffering=1) as answers:
        while True:
            box = [orders.readline().strip() if is_first else None]
            torch.distributed.broadcast_object_list(box, src=0)
            if not box[0]:
                break
            answer = segment(engine, recipe, json.loads(box[0]), client_state)
            if is_first:
                answers.write(json.dumps(answer) + "\n")
    leave()


if __name__ == "__main__":
    main()
