"""A trainer of four saves in DeepSpeed's format and order; the same bytes in every life.

What it wrote is the truth that the judge compares disk and remote with.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from tests.support import synthetic
from tests.support.synthetic import Shapes, write_stage12

GROUPS: list[Shapes] = [{"embed": (64, 40), "w": (30, 31)}, {"bias": (17,)}]
STEPS = (10, 20, 30, 40)
_pause = time.sleep
Bytes = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Save:
    """One save: its files, and what each (parameter, state) of it must become."""

    step: int
    files: Bytes
    expected: dict[tuple[str, str], bytes]


@cache
def saves() -> tuple[Save, ...]:
    """All of them; every element of every tensor tells which save it is of."""
    made = []
    element = synthetic.element
    for step in STEPS:
        with (
            TemporaryDirectory() as folder,
            mock.patch.object(
                synthetic, "element", lambda state, name, i, step=step: element(state, name, i) | step << 12
            ),
        ):
            path = Path(folder) / "save"
            expected = write_stage12(path, GROUPS, 2, step=step).expected
            contents = {p.name: p.read_bytes() for p in path.iterdir()}
            contents["note.txt"] = f"saved at {step}\n".encode()
        made.append(Save(step, contents, expected))
    return tuple(made)


def tag_of(step: int, *, is_constant: bool) -> str:
    """How the folder is called."""
    return "last-checkpoint" if is_constant else f"global_step{step}"


def write(save_dir: Path, save: Save, *, is_constant: bool) -> None:
    """Model states, optimizer states, then `latest`; in place where the name is there already.

    The pause keeps two saves apart by more than the clock of the file system, as any real training does.
    """
    _pause(0.006)
    folder = save_dir / tag_of(save.step, is_constant=is_constant)
    folder.mkdir(exist_ok=True)
    for name in sorted(save.files, key=lambda name: ("optim" in name, name)):
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with open(fd, "wb") as out:
            out.write(save.files[name])
    (save_dir / "latest").write_text(folder.name)
