"""Kill real savers of other layouts at random moments: what is called complete must load in its own library.

`python -m tests.e2e.kill_savers [--kills N] [--seed N] [LAYOUT …]`: a process saves as fast as it can, is
killed (SIGKILL), and every folder that it left is judged and, where it is judged complete, loaded. It
keeps four and deletes older ones, as trainers do: the newest and the oldest may be cut, any other that is not
complete counts as lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptd.errors import NotFoundError
from ckptd.maintenance.inspection import inspect_folder
from tests.support.other_trainers import FOLDER_OF, batch, huggingface, model

FOREVER = 1_000_000
LONGEST_SECONDS = 0.6
KEPT = 4


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the kills of one layout left; all but the first four must be zero."""

    layout: str
    kills: int = 0
    complete: int = 0
    torn: int = 0
    false_complete: int = 0
    lost: int = 0


def _accelerate(save_dir: str) -> None:
    from accelerate import Accelerator

    at = Accelerator(cpu=True)
    net = model()
    net, optimizer = at.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    for step in range(1, FOREVER):
        at.backward(net(batch(step)).square().mean())
        optimizer.step()
        at.save_state(f"{save_dir}/step_{step}")
        shutil.rmtree(f"{save_dir}/step_{step - KEPT}", ignore_errors=True)


def _torch(save_dir: str) -> None:
    from torch.distributed import checkpoint

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(1, FOREVER):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        place = f"{save_dir}/step-{step}"
        writer = checkpoint.FileSystemWriter(place, single_file_per_rank=False, sync_files=False)
        checkpoint.save(_state(net, optimizer, step), storage_writer=writer, no_dist=True)
        shutil.rmtree(f"{save_dir}/step-{step - KEPT}", ignore_errors=True)


def _state(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def _huggingface(save_dir: str) -> None:
    huggingface(save_dir, FOREVER, None, save_steps=1, save_total_limit=KEPT)


SAVERS = {"huggingface": _huggingface, "accelerate": _accelerate, "torch": _torch}


def loads(layout: str, folder: Path) -> None:
    """Load a folder as its library does; raises what that raises."""
    from safetensors.torch import load_file

    if layout == "torch":
        from torch.distributed import checkpoint

        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        net(batch(0)).square().mean().backward()
        optimizer.step()
        state = _state(net, optimizer, 0)
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
        assert f"step-{state['step']}" == folder.name
        return
    load_file(folder / "model.safetensors")
    for path in folder.iterdir():
        if path.suffix in (".pt", ".pth", ".pkl", ".bin"):
            torch.load(path, weights_only=False)
    if layout == "huggingface":
        state = json.loads((folder / "trainer_state.json").read_text())
        assert f"checkpoint-{state['global_step']}" == folder.name


def kill_one(layout: str, save_dir: Path, seconds: float) -> None:
    """Fork a saver, wait for its first folder, kill it a while later."""
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            SAVERS[layout](str(save_dir))
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not any(save_dir.glob(f"{FOLDER_OF[layout]}*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def judge(tally: Tally, save_dir: Path) -> None:
    """Count what was left."""
    prefix = FOLDER_OF[tally.layout]
    folders = sorted(save_dir.glob(f"{prefix}*"), key=lambda p: int(p.name.removeprefix(prefix)))
    try:
        seen = {one.tag: one for one in inspect_folder(save_dir).checkpoints}
    except NotFoundError:
        seen = {}
    for folder in folders:
        is_complete = folder.name in seen and seen[folder.name].is_complete
        if not is_complete:
            tally.torn += 1
            if folder not in (folders[0], folders[-1]):
                tally.lost += 1
                print(f"{folder}: not complete: {seen.get(folder.name)}", file=sys.stderr)
            continue
        tally.complete += 1
        try:
            loads(tally.layout, folder)
        except Exception as error:
            tally.false_complete += 1
            print(f"{folder}: complete, and does not load: {error!r}", file=sys.stderr)


def run(layout: str, kills: int, seed: int) -> Tally:
    """Kill so many savers of one layout."""
    chance = random.Random(seed)
    tally = Tally(layout=layout)
    torch.set_num_threads(1)
    for _ in range(kills):
        with tempfile.TemporaryDirectory(prefix="ckptd-kills-") as root:
            save_dir = Path(root) / "out"
            save_dir.mkdir()
            kill_one(layout, save_dir, chance.random() * LONGEST_SECONDS)
            judge(tally, save_dir)
            tally.kills += 1
            if tally.false_complete or tally.lost:
                shutil.copytree(save_dir, Path(tempfile.mkdtemp(prefix="ckptd-kept-")) / "out")
                break
    return tally


def main() -> int:
    """Print one line for each layout; 1 if any was judged wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="*", default=list(SAVERS))
    parser.add_argument("--kills", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    is_wrong = False
    for layout in arguments.layouts:
        tally = run(layout, arguments.kills, arguments.seed)
        print(tally, flush=True)
        is_wrong |= bool(tally.false_complete or tally.lost)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
