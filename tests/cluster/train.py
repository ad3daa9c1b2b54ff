"""One node's part of a real DeepSpeed run over several: run by each of its ranks.

`train.py JOBS.json` (tests/support/ranks.py, or torchrun with --nnodes): jobs as tests/support/make_ckpt.py
takes them;
`{node}` in `out` is the node's rank: every node saves into, and loads from, a directory of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch

from examples.demo.ending import leave
from tests.support import make_ckpt as single

_CONFIG = single.ds_config


def main() -> None:
    """Run every job of the list; rank 0 writes the losses."""
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        own = job | {"out": job["out"].format(node=os.environ["GROUP_RANK"])}

        def config(*given: Any, is_local: bool = job["node_local"], **more: Any) -> dict[str, Any]:
            made = _CONFIG(*given, **more)
            made["checkpoint"] |= {"use_node_local_storage": is_local}
            return made

        single.ds_config = config
        losses, _ = single.run(own)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(job["losses"]).write_text(json.dumps(losses))
    leave()


if __name__ == "__main__":
    main()
