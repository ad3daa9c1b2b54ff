"""Real saves with `exclude_frozen_parameters=True`, as PEFT makes them, at stages 2 and 3.

Two ranks of `python -m tests.support.make_excluded OUT` (tests/support/ranks.py) write
OUT/z2/step and OUT/z3/step, and into OUT/whole-z… the same with everything.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from examples.demo.ending import leave
from tests.support.make_ckpt import batch_for, build, ds_config
from tests.support.real import Recipe


def main() -> None:
    """One step each, two saves of it."""
    import deepspeed  # after make_ckpt, which chooses the accelerator
    import deepspeed.comm as dist

    deepspeed.init_distributed()
    out = Path(sys.argv[1])
    for stage in (2, 3):
        recipe = asdict(Recipe(stage=stage, world_size=2, freeze=True))
        engine = build(recipe, ds_config(recipe, 2, universal=False), 7)
        ids, labels = batch_for(recipe["vocab"], 0, 4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        engine.backward(engine(ids, labels))
        engine.step()
        engine.save_checkpoint(str(out / f"z{stage}"), tag="step", exclude_frozen_parameters=True)
        engine.save_checkpoint(str(out / f"whole-z{stage}"), tag="step")
        engine.destroy()
    leave()


if __name__ == "__main__":
    main()
