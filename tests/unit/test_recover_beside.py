"""Files that a trainer keeps beside the shards, one per rank, are copied one at a time."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

from ckptd.recover.execute import Execution
from ckptd.recover.steps import CopyBeside

if TYPE_CHECKING:
    from pathlib import Path

_RANKS = 100
_TARGET = "_ckptd/derived/accelerate/checkpoint_1"


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    """Accelerate writes one `random_states_<rank>.pkl` per rank; the usual limit is 1,024 open files."""
    folder = tmp_path / "checkpoint_1"
    paths = tuple(f"states/random_states_{rank}.pkl" for rank in range(_RANKS))
    (folder / "states").mkdir(parents=True)
    for path in paths:
        (folder / path).write_text(path)
    fd = os.open(tmp_path, os.O_RDONLY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + _RANKS, limits[1]))
    try:
        execution = Execution(tmp_path, fd, reserve_bytes=0, memory_budget_bytes=1 << 28)
        execution.run([CopyBeside(tag="checkpoint_1", target=_TARGET, paths=paths)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(fd)
    assert all((tmp_path / _TARGET / path).read_text() == path for path in paths)
