"""Train the models of make_ckpt.py with FSDP2, from and to folders of torch.distributed.checkpoint.

Every rank runs `make_dcp.py JOBS.json`: JOBS is a list of {"recipe", "load", "save", "style", "first",
"steps", "losses"}. `style` is how a trainer names its state: "nested" and "flat" after torch's
documentation of get_state_dict, "titan" as torchtitan does. Data and schedule are those of make_ckpt.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples.demo.ending import leave
from tests.support.make_ckpt import BATCH, batch_for, network
from tests.support.make_optimizers import LEARNING_RATES, client_optimizer


def state_of(
    style: str, net: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], Any, Any]:
    """What is saved or loaded, and the two dictionaries of get_state_dict in it."""
    options = StateDictOptions(flatten_optimizer_state_dict=style != "nested")
    weights, states = get_state_dict(net, optimizer, options=options)
    state = {"optimizer": states}
    return (state | weights if style == "titan" else state | {"model": weights}), weights, states


def load(style: str, net: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load as a trainer of that style does."""
    state, weights, states = state_of(style, net, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    if style == "titan":  # what was loaded stands at the top
        weights = {name: state[name] for name in weights}
    options = StateDictOptions(flatten_optimizer_state_dict=style != "nested")
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


def groups_of(r: dict[str, Any], net: torch.nn.Module) -> Any:
    """What make_ckpt.py trains, in its groups."""
    wanted = [p for p in net.parameters() if p.requires_grad]
    if not r["two_groups"]:
        return wanted
    return [
        {"params": [p for p in wanted if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in wanted if p.dim() <= 1], "weight_decay": 0.0},
    ]


def run(job: dict[str, Any]) -> dict[int, float]:
    """Losses by step."""
    r, world, rank = job["recipe"], dist.get_world_size(), dist.get_rank()
    torch.manual_seed(99)
    net = network(r)
    for block in net.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = client_optimizer(r["optimizer"], groups_of(r, net))
    assert optimizer is not None
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_max_lr=LEARNING_RATES[r["optimizer"]])
    load(job["style"], net, optimizer, job["load"])  # last: the schedule sets the rate of step 0
    schedule.load_state_dict({"last_batch_iteration": job["first"] - 1})
    losses: dict[int, float] = {}
    per = BATCH // world
    for step in range(job["first"], job["first"] + job["steps"]):
        loss = net(*batch_for(r["vocab"], step, rank * per, (rank + 1) * per))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses[step + 1] = mean.item() / world
    if job["save"]:
        checkpoint.save(state_of(job["style"], net, optimizer)[0], checkpoint_id=job["save"])
    return losses


def read_folder(folder: str) -> dict[str, Any]:
    """Read everything that a folder of torch.distributed.checkpoint holds, as torch does."""
    found: dict[str, Any] = {}
    checkpoint.state_dict_loader._load_state_dict(
        found,
        storage_reader=checkpoint.FileSystemReader(folder),
        planner=checkpoint.default_planner._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return found


def differences(folder: str, universal: str) -> list[str]:
    """Names whose value in a dcp folder, as torch reads it, is not that of a universal one of stock's."""
    found = read_folder(folder)
    wrong: list[str] = []
    zero = Path(universal, "zero")
    for name, states in found["optimizer"]["state"].items():
        held = {"fp32": found["model"][name], **states}
        for state, value in held.items():
            stock = torch.load(zero / name / f"{state}.pt", weights_only=False) if state != "step" else value
            stock = stock["param"] if isinstance(stock, dict) else stock
            if not torch.equal(stock.reshape(-1), value.reshape(-1)) or value.dtype != stock.dtype:
                wrong.append(f"{name} {state}")
        if not torch.equal(found[name], held["fp32"]):
            wrong.append(name)
    # stock writes what no optimizer trains as fp32 too, at stages 1 and 2
    for name in sorted(set(os.listdir(zero)) - set(found["optimizer"]["state"]) - {"optimizer_state.pt"}):
        stock = torch.load(zero / name / "fp32.pt", weights_only=False)["param"]
        kept = found["model"].get(name)
        if kept is None:
            wrong.append(f"{name} is missing")
        elif not torch.equal(stock.reshape(-1), kept.float().reshape(-1)):
            wrong.append(f"{name}: {stock.dtype} {stock.tolist()}, {kept.dtype} {kept.tolist()}"[:200])
    return wrong


def main() -> None:
    """Run every job of the list; rank 0 writes the losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        losses = run(job)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(job["losses"]).write_text(json.dumps(losses))
    leave()


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        print(json.dumps([differences(a, b) for a, b in json.loads(sys.argv[2])]))
    else:
        main()
