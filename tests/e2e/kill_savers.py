"""Kill real savers of other layouts at random moments: what is called complete must load in its own library.

`python -m tests.e2e.kill_savers [--kills N] [--seed N] [LAYOUT …]`: a process saves as fast as it can, is
killed (SIGKILL), and every checkpoint that it left is judged and, where it is judged complete, loaded. It
keeps four and deletes older ones, as trainers do: the newest and the oldest may be cut, any other that is not
complete counts as lost. Each saver is a fork of this process, which has imported the libraries.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from ckptd.base import files
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, Verdict, judge
from ckptd.core.model.other_layouts import DeclaredSave, below
from ckptd.storage.local.scan import scan
from tests.support.other_trainers import MARKER, TAG_OF, batch, huggingface, lightning, model

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


def _script(save_dir: str) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(1, FOREVER):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        torch.save(_state(net, optimizer, step), f"{save_dir}/model_{step}.pt")
        Path(f"{save_dir}/model_{step - KEPT}.pt").unlink(missing_ok=True)


def _lightning(save_dir: str) -> None:
    lightning(save_dir, FOREVER, None, every_n_train_steps=1, save_top_k=KEPT, monitor="step", mode="max")


def _declared(save_dir: str) -> None:
    """Files of no known format in a folder, then the marker; the marker is deleted first."""
    net = model()
    for step in range(1, FOREVER):
        folder = Path(save_dir, f"ckpt_{step}")
        folder.mkdir()
        for number, weights in enumerate(net.parameters()):
            numpy.save(folder / f"{number}.npy", weights.detach().numpy() + step)
        (folder / MARKER).touch()
        old = Path(save_dir, f"ckpt_{step - KEPT}")
        (old / MARKER).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


def _state(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def _huggingface(save_dir: str) -> None:
    huggingface(save_dir, FOREVER, None, save_steps=1, save_total_limit=KEPT)


SAVERS = {
    "huggingface": _huggingface,
    "accelerate": _accelerate,
    "torch": _torch,
    "lightning": _lightning,
    "torch-file": _script,
    "declared": _declared,
}
TAGS = TAG_OF | {"declared": "ckpt_{}"}
IMPORTS = {
    "huggingface": ("transformers.trainer", "accelerate"),
    "accelerate": ("accelerate",),
    "torch": ("torch.distributed.checkpoint",),
    "lightning": ("pytorch_lightning",),
}
"""What each saver would import in every life."""


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
    if layout == "declared":
        step = int(folder.name.removeprefix("ckpt_"))
        for number, weights in enumerate(model().parameters()):
            saved = numpy.load(folder / f"{number}.npy")
            assert numpy.allclose(saved, weights.detach().numpy() + step)
        return
    if folder.is_file():
        state = torch.load(folder, weights_only=False)
        assert TAGS[layout].format(state["step" if layout == "torch-file" else "global_step"]) == folder.name
        return
    load_file(folder / "model.safetensors")
    for path in folder.iterdir():
        if path.suffix in (".pt", ".pth", ".pkl", ".bin"):
            torch.load(path, weights_only=False)
    if layout == "huggingface":
        state = json.loads((folder / "trainer_state.json").read_text())
        assert f"checkpoint-{state['global_step']}" == folder.name


def kill_one(layout: str, save_dir: Path, seconds: float) -> None:
    """Fork a saver, wait for its first checkpoint, kill it a while later."""
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
    while not any(save_dir.glob(TAGS[layout].format("*"))) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def verdicts(save_dir: Path, declared: DeclaredSave) -> dict[str, Verdict]:
    """Judge all that lies in a save_dir, as the daemon does, with one inspecting child for all of it.

    `declared`: as [layout] of a job file.
    """
    with files.opened_dir(save_dir) as fd:
        listing = scan(fd, declared=declared)
    paths = [below(one.tag, file.path) for one in listing.folders for file in one.files]
    facts = {fact.path: fact for fact in inspect_files(save_dir, paths)}
    for one in listing.folders if declared.manifest else ():  # whose names are those of its folder
        found = inspect_files(save_dir / one.place, [declared.manifest], manifest=declared.manifest)
        facts[below(one.tag, declared.manifest)] = found[0]
    return {
        one.tag: judge(
            one,
            {f.path: facts[below(one.tag, f.path)].model_copy(update={"path": f.path}) for f in one.files},
            None,
            Context(save_spread_seconds=60.0, is_to_send=False),
        )
        for one in listing.folders
    }


def count(tally: Tally, save_dir: Path) -> None:
    """Count what was left."""
    numbered = re.compile(re.escape(TAGS[tally.layout]).replace(r"\{\}", r"(\d+)"))
    found = ((match, path) for path in save_dir.iterdir() if (match := numbered.fullmatch(path.name)))
    folders = [path for _, path in sorted((int(match[1]), path) for match, path in found)]
    seen = verdicts(save_dir, DeclaredSave(files="model_*.pt", marker=MARKER))
    for folder in folders:
        verdict = seen.get(folder.name)
        if verdict is None or verdict.state is not State.COMPLETE:
            tally.torn += 1
            if folder not in (folders[0], folders[-1]):
                tally.lost += 1
                print(f"{folder}: not complete: {verdict}", file=sys.stderr)
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
    for name in IMPORTS.get(layout, ()):
        importlib.import_module(name)
    for _ in range(kills):
        with tempfile.TemporaryDirectory(prefix="ckptd-kills-") as root:
            save_dir = Path(root) / "out"
            save_dir.mkdir()
            kill_one(layout, save_dir, chance.random() * LONGEST_SECONDS)
            count(tally, save_dir)
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
