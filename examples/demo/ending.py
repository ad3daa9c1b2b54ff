"""How a rank of torch on CPU ends: at once.

torch's threads may abort an interpreter that takes itself apart while its neighbour is a moment behind (seen
on two busy cores), which would make a training that reached its end look failed.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """Wait for the other ranks, close the process group, flush, and end with 0; nothing runs afterwards."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
