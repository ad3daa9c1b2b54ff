"""Load a checkpoint by DeepSpeed's own code in a restricted child, and say what arrived (docs/adr/0217).

Nothing is taken from the trainer: the model is empty parameters with the names and shapes that the save
lists.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.base.humanize import in_columns, printable
from ckptd.base.process import spawn
from ckptd.conversion.engine import children
from ckptd.core.model.layouts import Role, parse_shard_name
from ckptd.errors import DamagedError, UsageError, error_named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Loaded:
    """Report what DeepSpeed held after the load, when every value had been compared."""

    name: str
    deepspeed: str
    torch: str
    """Versions."""
    stage: int
    ranks: int
    step: int
    tensors: int
    elements: int
    states: tuple[str, ...]
    """Names of the optimizer's states, as its files have them."""
    compared: tuple[str, ...]
    """Copies that the engine's values were compared with, in words; empty: nothing else has them."""

    def __repr__(self) -> str:
        """Show it as `ckptd verify --load` does."""
        by = f"DeepSpeed {self.deepspeed}, torch {self.torch}; ZeRO stage {self.stage}, ranks: {self.ranks}"
        rows = [
            ("loaded by", by),
            ("step", str(self.step)),
            ("parameters", f"{self.tensors} tensors, {self.elements:,} elements"),
            ("optimizer", ", ".join(self.states) or "no states"),
            ("equal", "; ".join(self.compared) or "not compared: the save holds every value once"),
        ]
        return "\n".join([printable(self.name), *in_columns(rows)])


def is_checkpoint(folder: Path) -> bool:
    """Tell whether a folder holds shards or a universal form itself."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return False
    return any(parse_shard_name(name) is not None for name in names) or (folder / "zero").is_dir()


def load(folder: Path, say: Callable[[str], None]) -> Loaded:
    """Load a ZeRO checkpoint, or its universal form, on as many processes as it has data-parallel ranks.

    Raises:
        UsageError: torch or DeepSpeed is not installed.
        RefusedError: a save that only its model's own code loads.
        DamagedError: DeepSpeed refuses it, or holds other values afterwards. NoSpaceError: too little memory.
    """
    missing = [name for name in ("torch", "deepspeed") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"--load needs {' and '.join(missing)}", hint="pip install 'ckptd[deepspeed]'")
    ranks = 1 if (folder / "zero").is_dir() else max(1, len(_optimizer_shards(folder)))
    say(f"DeepSpeed loads {folder} in {ranks} process{'es' if ranks > 1 else ''}")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ckptd-load-") as scratch:
        watched = children.watch(
            _start(scratch),
            json.dumps({"folder": str(folder.resolve()), "ranks": ranks}).encode(),
            on_line=lines.append,
            should_stop=None,
            should_pause=None,
            timeout_seconds=None,
        )
    for line in lines:
        if "error" in line:
            raise error_named(line["error"], line["message"], line["hint"], otherwise=DamagedError)
    if not lines:
        ended = children.died_of(watched.status)
        raise DamagedError(f"loading {folder.name} ended the child ({ended})", hint="is memory short?")
    words: Any = {name: tuple(v) if type(v) is list else v for name, v in lines[0].items()}
    return Loaded(**words)


def _optimizer_shards(folder: Path) -> list[str]:
    named = ((path.name, parse_shard_name(path.name)) for path in folder.iterdir())
    return [name for name, shard in named if shard is not None and shard.role is Role.OPTIM]


def _start(scratch: str) -> subprocess.Popen[bytes]:
    """Start the child with site-packages, and no word of this process's environment."""
    return spawn(
        [sys.executable, "-E", "-s", "-X", "utf8", "-m", "ckptd.maintenance.deepspeed_load_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=children.PACKAGE_PARENT,
        env={"PATH": os.defpath, "TMPDIR": scratch, "HOME": scratch},
        close_fds=True,
        start_new_session=True,
    )
