"""A hold is a copy: trainers rewrite their files in place, and a hard link would change with them (H14)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd.base.files import identity_of
from ckptd.core.model.layouts import Role
from ckptd.core.model.save import SealedFile
from ckptd.storage.local import clones

if TYPE_CHECKING:
    from pathlib import Path


def test_a_hold_keeps_what_the_trainer_writes_over(xfs: Path) -> None:
    folder = xfs / "global_step1"
    folder.mkdir()
    (folder / "shard.pt").write_bytes(b"one" * 9000)
    sealed = SealedFile(
        path="shard.pt", identity=identity_of((folder / "shard.pt").stat()), fingerprint="", role=Role.OPTIM
    )
    fd = os.open(xfs, os.O_RDONLY)
    try:
        clones.make(fd, "global_step1", "global_step1.1", (sealed,), b"{}")
    finally:
        os.close(fd)
    with (folder / "shard.pt").open("r+b") as shard:
        shard.write(b"two" * 9000)
    held = xfs / "_ckptd" / "hold" / "global_step1.1" / "shard.pt"
    assert held.read_bytes() == b"one" * 9000
    assert held.stat().st_nlink == (folder / "shard.pt").stat().st_nlink == 1
