"""A trainer of known bytes: `python -m tests.vm.trainer SAVE_DIR FIRST COUNT SERIAL [--every SECONDS] …`.

It writes COUNT saves from step FIRST on as DeepSpeed does, flushing nothing; each has a serial number, from
which its bytes follow. Lines on standard output say what it does, before it does it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
import zlib
from functools import lru_cache
from pathlib import Path

from tests.support.known_saves import Save, make_save, write_save
from tests.support.synthetic import Shapes

GROUPS: list[Shapes] = [{"embed": (300, 400), "w": (100, 150)}, {"bias": (17,)}]
KEPT = 2
"""Newest saves that the trainer itself never removes."""


@lru_cache(maxsize=64)
def save_of(step: int, serial: int) -> Save:
    """Return the save of a step that has this number: 1.6 MB of archives, no two of them alike.

    Nothing without CRCs is in it: of a file that was never flushed nobody could say that it is torn.
    """

    def element(state: str, name: str, index: int) -> int:
        return (zlib.crc32(f"{serial}/{state}/{name}".encode()) & 0x3FFFFFFF) + index

    made = make_save(GROUPS, step, element)
    archives = {name: data for name, data in made.files.items() if name.endswith(".pt")}
    return Save(step, archives, made.expected)


def part_of(save: Save, rank: int) -> Save:
    """Return what one of two ranks writes on a node of its own: its optimizer shard, and the model states."""
    other = f"rank_{1 - rank}_mp"
    return Save(save.step, {name: data for name, data in save.files.items() if other not in name}, {})


def tag_of(step: int) -> str:
    """Return a save's folder."""
    return f"global_step{step}"


def step_of(tag: str) -> int:
    """Return the step of a save's folder."""
    return int(tag.removeprefix("global_step"))


def saves_in(save_dir: Path) -> list[Path]:
    """Return the folders of saves, by step."""
    return sorted(save_dir.glob("global_step*"), key=lambda folder: step_of(folder.name))


def say(verb: str, tag: str, serial: int = 0) -> None:
    """Tell what follows."""
    line = json.dumps({"trainer": verb, "tag": tag, "serial": serial})
    sys.stdout.write(f"{line}\n")  # at once: the daemon writes into the same file
    sys.stdout.flush()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(prog="python -m tests.vm.trainer")
    parser.add_argument("save_dir", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("serial", type=int)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--pause", type=float, default=0.02, metavar="SECONDS", help="after each 256 KiB")
    parser.add_argument(
        "--removes", type=float, default=0.0, metavar="SHARE", help="of saves after which the oldest goes"
    )
    parser.add_argument("--rank", type=int, help="write what this rank of two writes on a node of its own")
    args = parser.parse_args()
    rng = random.Random(args.serial)
    for number in range(args.count):
        step, serial = args.first + number, args.serial + number
        save = save_of(step, serial)
        if args.rank is not None:
            save = part_of(save, args.rank)
        say("writes", tag_of(step), serial)
        write_save(args.save_dir / tag_of(step), save, pause_seconds=args.pause)
        (args.save_dir / "latest").write_text(tag_of(step))
        say("wrote", tag_of(step), serial)
        old = saves_in(args.save_dir)[:-KEPT]
        if old and rng.random() < args.removes:
            say("removes", old[0].name)
            shutil.rmtree(old[0], ignore_errors=True)
        time.sleep(args.every)


if __name__ == "__main__":
    main()
