"""A trainer of four saves in DeepSpeed's format and order; the same bytes in every life.

What it wrote is the truth that the judge compares disk and remote with.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from tests.support.known_saves import Save, make_save, write_save
from tests.support.synthetic import Shapes, element

GROUPS: list[Shapes] = [{"embed": (64, 40), "w": (30, 31)}, {"bias": (17,)}]
STEPS = (10, 20, 30, 40)
_pause = time.sleep


@cache
def saves() -> tuple[Save, ...]:
    """All of them; every element of every tensor tells which save it is of."""

    def of(step: int) -> Save:
        return make_save(GROUPS, step, lambda state, name, index: element(state, name, index) | step << 12)

    return tuple(of(step) for step in STEPS)


def tag_of(step: int, *, is_constant: bool) -> str:
    """How the folder is called."""
    return "last-checkpoint" if is_constant else f"global_step{step}"


def write(save_dir: Path, save: Save, *, is_constant: bool) -> None:
    """Model states, optimizer states, then `latest`; in place where the name is there already.

    The pause keeps two saves apart by more than the clock of the file system, as any real training does.
    """
    _pause(0.006)
    folder = save_dir / tag_of(save.step, is_constant=is_constant)
    write_save(folder, save)
    (save_dir / "latest").write_text(folder.name)
