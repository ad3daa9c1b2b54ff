"""`python -m tests.releases.saver OUT LAYOUTS`: a rank that saves several layouts in turn until it is killed.

LAYOUTS are names of `kills.LAYOUTS`, joined by commas. After each save has returned, this rank says so in
OUT/returned<rank>: one line, layout and tag.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.releases.kills import LAYOUTS, SAVES
from tests.support.make_ckpt import BATCH, UC_KEY, batch_for, build, ds_config


def main() -> None:
    """Save until killed, or so often."""
    import deepspeed  # after make_ckpt, which chooses the accelerator
    import deepspeed.comm as dist
    import torch

    deepspeed.init_distributed()
    torch.set_num_threads(1)
    out, names = Path(sys.argv[1]), sys.argv[2].split(",")
    rank, world = dist.get_rank(), dist.get_world_size()
    recipes = {name: asdict(LAYOUTS[name]) for name in names}
    engines = {name: build(r, ds_config(r, world, universal=False), 7) for name, r in recipes.items()}
    said = os.open(out / f"returned{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    per = BATCH // world
    for step in range(1, SAVES + 1):
        for name, engine in engines.items():
            ids, labels = batch_for(recipes[name]["vocab"], step, rank * per, (rank + 1) * per)
            engine.backward(engine(ids, labels))
            engine.step()
            client = {} if recipes[name]["moe"] else {UC_KEY: {"universal_checkpoint_version": 0.2}}
            engine.save_checkpoint(str(out / name), tag=f"global_step{step}", client_state=client)
            os.write(said, f"{name} global_step{step}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
