"""Kill a release's savers at random moments, and cut files of its saves: what ckptd calls complete is whole.

Every rank notes each save that has returned to it. A save that has returned everywhere must be complete (else
it counts as lost). Any other that is called complete must hold the files of a returned one, each of its size
and read back by torch (else it is a false "complete").
"""

from __future__ import annotations

import os
import random
import shutil
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptd.errors import NotFoundError
from ckptd.maintenance.inspection import InspectedCheckpoint, inspect_folder
from tests.support import ranks
from tests.support.real import Recipe

TINY = {"world_size": 2, "hidden": 16, "layers": 2, "heads": 2, "vocab": 31}
LAYOUTS = {
    "stage1": Recipe(stage=1, **TINY),  # type: ignore[arg-type]
    "stage2": Recipe(stage=2, freeze=True, **TINY),  # type: ignore[arg-type]
    "stage3": Recipe(stage=3, **TINY),  # type: ignore[arg-type]
    "bf16": Recipe(stage=1, grad_accum_dtype="fp32", **TINY),  # type: ignore[arg-type]
    "experts": Recipe(stage=2, moe=4, ep=2, **TINY),  # type: ignore[arg-type]
}
TOGETHER = (("stage1", "stage2", "stage3", "bf16"), ("experts",))
"""Layouts whose engines one process can hold."""
SAVES = 60
LONGEST_SECONDS = 2.0
START_SECONDS = 120.0
SLACK_BYTES = 512
"""Saves of one layout differ by the sizes of numbers in their pickles."""
CUTS = 6


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was judged; `false_complete` and `lost` must be zero."""

    kills: int = 0
    saves: int = 0
    torn: int = 0
    """Saves that a kill cut, and that ckptd does not call complete."""
    cut: int = 0
    """Copies of whole saves with a file cut short or missing."""
    false_complete: int = 0
    lost: int = 0
    wrong: list[str] | None = None
    """The first of what should be zero."""

    def add_wrong(self, text: str) -> None:
        """Keep the first few."""
        self.wrong = [*(self.wrong or []), text][:5]


def run(kills: int, seed: int, work: Path, layouts: Sequence[Sequence[str]] = TOGETHER) -> Tally:
    """Kill so many groups of savers; cut the files of what the first of each left."""
    chance = random.Random(seed)
    tally = Tally()
    for i in range(kills):
        for names in layouts:
            out = work / f"kill{i}-{names[0]}"
            _kill(out, names, chance)
            tally.kills += 1
            for name in names:
                whole = judge(tally, out, name)
                if whole is not None and i == 0:
                    cut(tally, whole, chance)
            shutil.rmtree(out)
    return tally


def _kill(out: Path, names: Sequence[str], chance: random.Random) -> None:
    """Start the ranks, let each layout be saved once, and kill one rank, then the other, soon after."""
    out.mkdir()
    (out / "logs").mkdir()
    saver = ranks.start("tests.releases.saver", [str(out), ",".join(names)], out / "logs", ranks=2)
    deadline = time.monotonic() + START_SECONDS
    while len(returned(out)) < len(names):
        if time.monotonic() > deadline or any(p.exitcode is not None for p in saver.processes):
            saver.kill()
            raise RuntimeError((out / "logs" / "rank0.log").read_text()[-2000:])
        time.sleep(0.005)
    time.sleep(chance.random() * LONGEST_SECONDS)
    first = chance.choice(saver.processes)
    first.kill()
    if chance.random() < 0.5:  # the other goes on until it waits for the dead one
        time.sleep(chance.random() * 0.1)
    saver.kill()


def returned(out: Path) -> set[tuple[str, str]]:
    """(layout, tag) of the saves that have returned to both ranks."""
    lines = [
        set((out / f"returned{rank}").read_text().splitlines())
        for rank in (0, 1)
        if (out / f"returned{rank}").exists()
    ]
    if len(lines) < 2:
        return set()
    pairs = (line.split() for line in lines[0] & lines[1])
    return {(pair[0], pair[1]) for pair in pairs if len(pair) == 2}


def judge(tally: Tally, out: Path, name: str) -> Path | None:
    """Judge every save of a layout; return one that is whole by the savers' own notes."""
    back = returned(out)
    folders = sorted((out / name).glob("global_step*"))
    whole = [folder for folder in folders if (name, folder.name) in back]
    if whole and not any(path for folder in whole for path in folder.glob("*optim_states.pt")):
        return None  # 0.17.6 to 0.18.3 save no optimizer of BF16_Optimizer: the cases say so
    seen = _seen(out / name)
    for folder in folders:
        tally.saves += 1
        found = seen.get(folder.name)
        is_complete = found is not None and found.is_complete
        if folder in whole and not is_complete:
            tally.lost += 1
            tally.add_wrong(f"{name}: returned, and {found.reason if found else 'not seen'}")
        elif folder not in whole:
            tally.torn += not is_complete
            if is_complete and (fault := fault_of(folder, whole[0])):
                tally.false_complete += 1
                tally.add_wrong(f"{name}: complete, and {fault}")
    return whole[0] if whole else None


def _seen(save_dir: Path) -> dict[str, InspectedCheckpoint]:
    """Return the verdicts of `ckptd inspect` by tag."""
    try:
        return {one.tag: one for one in inspect_folder(save_dir).checkpoints}
    except NotFoundError:
        return {}


def fault_of(folder: Path, whole: Path) -> str | None:
    """Return why a save is not what a whole one of its layout is."""
    import torch

    for path in sorted(whole.rglob("*.pt")):
        held = folder / path.relative_to(whole)
        if not held.exists():
            return f"{held.name} is not there"
        if abs(held.stat().st_size - path.stat().st_size) > SLACK_BYTES:
            return f"{held.name} is of another size"
        try:
            with zipfile.ZipFile(held) as archive:
                if (bad := archive.testzip()) is not None:
                    return f"{held.name}: {bad}"
            torch.load(held, weights_only=False)
        except Exception as error:
            return f"{held.name}: {error!r}"[:200]
    return None


def cut(tally: Tally, whole: Path, chance: random.Random) -> None:
    """Take each file of a whole save away, and cut it short, keeping its time."""
    alone = whole.parent.with_name("cut")
    shutil.copytree(whole, alone / whole.name)
    for path in sorted(alone.rglob("*.pt")):
        if path.name.startswith("expp_rank_"):
            continue  # with ZeRO it holds nothing, and DeepSpeed does not read it
        kept, stat = path.read_bytes(), path.stat()
        size = len(kept)
        for length in (None, 0, size // 2, size - 1, *(chance.randrange(size) for _ in range(CUTS - 3))):
            path.unlink(missing_ok=True)
            if length is not None:
                path.write_bytes(kept[:length])
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            tally.cut += 1
            if any(one.is_complete for one in _seen(alone).values()):
                tally.false_complete += 1
                tally.add_wrong(f"{path.name} of {size} bytes cut to {length}, and complete")
        path.write_bytes(kept)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    shutil.rmtree(alone)
