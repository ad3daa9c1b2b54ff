"""A directory to restore into, beside the node and NAS of `recover_scene`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.recover.plan import RecoveryOptions
from ckptd.recover.recovery import Recovered
from ckptd.recover.restore import Restore
from ckptd.recover.select.copies import Nodes
from ckptd.recover.select.sources import Where, where_of
from tests.support.recover_scene import Scene

TAG = "global_step10"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


@dataclass
class RestoreScene(Scene):
    """`root/elsewhere/dir` is DIR."""

    def __post_init__(self) -> None:
        Scene.__post_init__(self)
        self.dir.parent.mkdir(exist_ok=True)

    @property
    def dir(self) -> Path:
        """DIR."""
        return self.root / "elsewhere" / "dir"

    @property
    def derived(self) -> Path:
        """The universal form of TAG in DIR."""
        return self.dir / "_ckptd" / "derived" / "universal" / TAG

    def two(self) -> None:
        """global_step5 and global_step10, committed."""
        for step in (5, 10):
            self.save(step)
            self.commit(f"global_step{step}", step)

    def restore(
        self,
        tag: str | None = None,
        *,
        to: Path | None = None,
        where: Where | None = None,
        dry_run: bool = False,
        nodes: Nodes | None = None,
        **wish: Any,
    ) -> Recovered:
        """`ckptd restore`."""
        self.said.clear()
        options = RecoveryOptions(tag=tag, nodes=nodes or Nodes(), dry_run=dry_run, **wish)
        source = where or where_of(str(self.nas), {})
        return Restore(source, to or self.dir, options, self.said.append).run()

    def got(self, tag: str) -> dict[str, bytes]:
        """Files of one checkpoint in DIR."""
        return {p.name: p.read_bytes() for p in (self.dir / tag).iterdir() if p.is_file()}

    def everything(self) -> dict[str, bytes]:
        """Every file in DIR, by relative name."""
        return {str(p.relative_to(self.dir)): p.read_bytes() for p in self.dir.rglob("*") if p.is_file()}

    def named(self, pointer: str = "latest") -> str | None:
        """Content of a pointer in DIR."""
        path = self.dir / pointer
        return path.read_text() if path.exists() else None

    def flip(self, path: Path, at: int = -200) -> None:
        """One bit of a file turns; size and times stay."""
        import os

        status = path.stat()
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def scene(tmp_path: Path) -> RestoreScene:
    """An empty node, NAS and place to restore to."""
    return RestoreScene(tmp_path)
