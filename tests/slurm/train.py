"""Trains with real DeepSpeed, one rank a task of Slurm: `train.py PLACE --steps N --save-every N …`.

PLACE/NODE/nvme/run is the node's save_dir; of a task of an array PLACE is its own folder below. It goes on
from what CKPTD_CHOICE says, saves once more on TERM, and writes for the judge: PLACE/sums/TAG.RANK (SHA-256
of each file that its node holds of a save), PLACE/losses (a line a step), PLACE/starts, PLACE/told (signals).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch

from examples.demo.ending import leave
from tests.support import make_ckpt
from tests.support.real import Recipe

RANK = int(os.environ["SLURM_PROCID"])
TASK = os.environ.get("SLURM_ARRAY_TASK_ID", "")


def main() -> None:
    """Train; end with 7 after a TERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--crash", metavar="STEP.RANK", default="")
    given = parser.parse_args()
    place: Path = given.place / TASK
    told: list[int] = []

    def tell(number: int, _frame: object) -> None:
        told.append(number)
        append(place / "told", f"rank {RANK} {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, tell)
    save_dir = place / os.environ["SLURMD_NODENAME"] / "nvme" / "run"
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + int(TASK or 0)),
    }
    os.environ |= meeting | {"RANK": str(RANK), "WORLD_SIZE": os.environ["SLURM_NTASKS"], "LOCAL_RANK": "0"}
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    world = dist.get_world_size()
    recipe = asdict(Recipe(stage=2, world_size=world))
    config = make_ckpt.ds_config(recipe, world, universal=False)
    config["checkpoint"]["use_node_local_storage"] = True
    engine = make_ckpt.build(recipe, config, init_seed=7)
    word, _, tag = os.environ["CKPTD_CHOICE"].partition(" ")
    if word == "resume":
        path, _ = engine.load_checkpoint(str(save_dir), tag=tag)
        assert path is not None, f"{tag} was not loaded"
    if RANK == 0:
        append(place / "starts", f"{word} {engine.global_steps}")
    is_told = False
    while engine.global_steps < given.steps and not is_told:
        step, per = engine.global_steps, make_ckpt.BATCH // world
        ids, labels = make_ckpt.batch_for(recipe["vocab"], step, RANK * per, (RANK + 1) * per)
        loss = make_ckpt.loss_of(engine, recipe, ids, labels, 0).detach().float().clone()
        time.sleep(given.step_seconds)
        if given.crash == f"{step + 1}.{RANK}":
            os.kill(os.getpid(), signal.SIGKILL)
        heard = torch.tensor([loss.item(), float(bool(told))])
        dist.all_reduce(heard)
        is_told = heard[1].item() > 0
        if RANK == 0:
            append(place / "losses", json.dumps([step + 1, heard[0].item() / world]))
        if is_told or (step + 1) % given.save_every == 0:
            save(engine, save_dir, place / "sums")  # ends with a barrier
    if is_told:
        os._exit(7)
    leave()


def save(engine: deepspeed.DeepSpeedEngine, save_dir: Path, sums: Path) -> None:
    """Save, then write down what the files are."""
    engine.save_checkpoint(str(save_dir))
    dist.barrier()
    folder = save_dir / f"global_step{engine.global_steps}"
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    sums.mkdir(exist_ok=True)
    (sums / f"{folder.name}.{RANK}").write_text(json.dumps(found))
    dist.barrier()


def append(path: Path, line: str) -> None:
    """One line."""
    with path.open("a") as stream:
        stream.write(line + "\n")


if __name__ == "__main__":
    main()
