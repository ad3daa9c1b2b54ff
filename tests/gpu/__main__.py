"""Show that ckptd takes what a GPU saves: `python -m tests.gpu [--place DIR]` (one GPU; a few GB in DIR).

Real DeepSpeed trains each recipe on the GPU and saves; `ckptd run --once` commits the checkpoint and makes
its universal form; its strict form must equal the stock converter's bit for bit; a new training on the GPU
that starts from the universal form must show the losses of the one that was never interrupted. One line a
recipe, exit status 0 when all hold. `DS_ACCELERATOR=cpu` rehearses it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from tests.e2e.harness import Node
from tests.stores.servers import free_port
from tests.support import stock
from tests.support.real import REPOSITORY, SAVED_AT, STEPS, TAG, Recipe

RECIPES = {
    "stage 1, bf16": Recipe(stage=1, world_size=1),
    "stage 1, BF16_Optimizer": Recipe(stage=1, world_size=1, grad_accum_dtype="fp32"),
    "stage 2, fp16": Recipe(stage=2, world_size=1, dtype="fp16", odd=True),
    "stage 2, fp32": Recipe(stage=2, world_size=1, dtype="fp32", two_groups=True),
    "stage 3, bf16": Recipe(stage=3, world_size=1, odd=True),
    "stage 3, fp16": Recipe(stage=3, world_size=1, dtype="fp16"),
    "stage 2, FusedAdam": Recipe(stage=2, world_size=1, optimizer="fused_adam"),
    "stage 3, FusedAdam, sub-groups": Recipe(
        stage=3, world_size=1, optimizer="fused_adam", sub_group_size=20_000
    ),
    "stage 2, states in CPU memory": Recipe(stage=2, world_size=1, optimizer="cpu_adam"),
    "stage 3, states in CPU memory": Recipe(stage=3, world_size=1, optimizer="cpu_adam"),
}
LARGE = {
    "stage 2, 0.4 billion parameters": Recipe(
        stage=2, world_size=1, hidden=1536, layers=12, heads=16, vocab=32_000
    )
}
"""Compared by its losses alone: the stock converter would take longer than everything else together."""
CLOSE = 2e-3
"""Relative: sums on a GPU are not of one order."""


def main() -> int:
    """Run all recipes."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--place", type=Path, default=REPOSITORY / ".build" / "gpu")
    parser.add_argument("--small", action="store_true", help="without the model of 0.4 billion parameters")
    asked = parser.parse_args()
    recipes = RECIPES | ({} if asked.small else LARGE)
    asked.place.mkdir(parents=True)
    nodes = {name: Node(asked.place / f"{number:02}") for number, name in enumerate(recipes)}
    train([job(nodes[name], recipe) for name, recipe in recipes.items()], asked.place)
    refused = {name: protect(node) for name, node in nodes.items()}
    whole = {name: node for name, node in nodes.items() if not refused[name]}
    differing = compare({name: node for name, node in whole.items() if name in RECIPES})
    train([job(node, recipes[name], universal_of(node)) for name, node in whole.items()], asked.place)
    is_good = True
    for name, node in nodes.items():
        found = refused[name] or "; ".join(differing.get(name, [])) or other_losses(node)
        is_good = is_good and not found
        print(f"{name}: {found or 'held'}")
    return 0 if is_good else 1


def job(node: Node, recipe: Recipe, tag: str | None = None) -> dict[str, Any]:
    """Describe a training for make_ckpt: from the start with a save, or from a universal form to the end."""
    return {
        "out": str(node.save_dir),
        "recipe": asdict(recipe),
        "load": "universal" if tag else None,
        "tag": tag,
        "steps": STEPS - SAVED_AT if tag else STEPS,
        "save_at": [] if tag else [SAVED_AT],
        "init_seed": 99 if tag else 7,
        "losses": str(node.root / ("resumed.json" if tag else "losses.json")),
    }


def train(jobs: list[dict[str, Any]], place: Path) -> None:
    """Run trainings one after another in one process on the GPU."""
    listed = place / "jobs.json"
    listed.write_text(json.dumps(jobs))
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    subprocess.run(
        [sys.executable, "-m", "tests.gpu.train", str(listed)],
        cwd=REPOSITORY,
        env=os.environ | environment | {"MASTER_PORT": str(free_port())},
        check=True,
    )


def protect(node: Node) -> str:
    """Commit and convert what was saved; return what went wrong."""
    started = time.monotonic()
    status = node.once(600)
    size = sum(path.stat().st_size for path in (node.save_dir / TAG).iterdir())
    print(f"{size / 1e6:.0f} MB committed and converted in {time.monotonic() - started:.1f} s", flush=True)
    if status:
        return f"ckptd run --once: exit status {status}: {node.log.read_text()[-1500:]}"
    commits = {path.name for path in (node.nas / "_ckptd" / "commits").iterdir()}
    missing = {f"{TAG}~g1~zero.json", f"{TAG}~g1~universal.json"} - commits
    return f"not committed: {sorted(missing)}" if missing else ""


def universal_of(node: Node) -> str:
    """Return the tag of the newest universal form, as DeepSpeed reads it."""
    return (node.save_dir / "latest_universal").read_text().strip()


def compare(nodes: dict[str, Node]) -> dict[str, list[str]]:
    """Return where the strict universal form of each node's save differs from the stock converter's."""
    stocks = {name: node.root / "stock" for name, node in nodes.items()}
    stock.convert([(node.save_dir / TAG, stocks[name]) for name, node in nodes.items()])
    for node in nodes.values():
        convert(node.save_dir / TAG, node.root / "strict", ConvertOptions(compat="strict", verify=True))
    pairs = [(stocks[name], node.root / "strict") for name, node in nodes.items()]
    return dict(zip(nodes, stock.differences(pairs), strict=True))


def other_losses(node: Node) -> str:
    """Return the first step whose loss is another one than without interruption."""
    expected, resumed = (
        json.loads((node.root / f"{name}.json").read_text()) for name in ("losses", "resumed")
    )
    for step, loss in resumed.items():
        if abs(loss - expected[step]) > CLOSE * abs(expected[step]):
            return f"step {step}: loss {loss}, without interruption {expected[step]}"
    return "" if len(resumed) == STEPS - SAVED_AT else f"resumed for {len(resumed)} steps"


if __name__ == "__main__":
    sys.exit(main())
