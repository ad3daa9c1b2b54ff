"""`python -m tests.engines.saver OUT NAME`: a rank that saves through one of kills.ENGINES until killed.

After each save that is in its place this rank says so in OUT/returned<rank>: one line, layout and tag. The
decoupled engine writes in a process of its own, and waits for it in the step after the save.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch

from tests.engines.kills import ENGINES, RECIPE
from tests.engines.rows import EXTRA
from tests.support import make_engines
from tests.support.make_ckpt import BATCH, UC_KEY, batch_for, build

SAVES = 80


def main() -> None:
    """Save until killed, or so often."""
    multiprocessing.set_start_method("fork", force=True)  # the writer's process, else imports take seconds
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    make_engines.patch()
    out, name = Path(sys.argv[1]), sys.argv[2]
    recipe = asdict(RECIPE) | EXTRA
    make_engines.setting.update(ENGINES[name])
    rank, world = dist.get_rank(), dist.get_world_size()
    config = make_engines.ds_config(recipe, world, universal=False)
    engine = build(recipe, config, 7)
    said = os.open(out / f"returned{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    per, is_decoupled = BATCH // world, engine.checkpoint_engine.is_decoupled()
    for step in range(1, SAVES + 1):
        ids, labels = batch_for(recipe["vocab"], step, rank * per, (rank + 1) * per)
        engine.backward(engine(ids, labels))
        engine.step()
        if is_decoupled and step > 1:
            os.write(said, f"{name} global_step{step - 1}\n".encode())
        client = {UC_KEY: {"universal_checkpoint_version": 0.2}}
        engine.save_checkpoint(str(out / name), tag=f"global_step{step}", client_state=client)
        if not is_decoupled:
            os.write(said, f"{name} global_step{step}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
