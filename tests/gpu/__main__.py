"""Show that ckptd takes what a GPU saves: `python -m tests.gpu [--place DIR]` (one GPU; a few GB in DIR).

Real DeepSpeed trains each recipe on the GPU and saves; `ckptd run --once` commits the checkpoint and makes
its universal form; its strict form must equal the stock converter's bit for bit, also by way of `--form dcp`;
a new training on the GPU that starts from the universal form must show the losses of the one that was never
interrupted. Engines that need a GPU go on from what was restored as well. One line a recipe, exit status 0
when all hold. `DS_ACCELERATOR=cpu` rehearses it without a GPU and without these engines.
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
from tests.engines.rows import placed_in
from tests.stores.servers import free_port
from tests.support import stock
from tests.support.real import REPOSITORY, SAVED_AT, STEPS, TAG, Recipe, run_module

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


def offload(**more: Any) -> dict[str, Any]:
    """Return the setting of an optimizer whose states lie elsewhere than on the GPU."""
    return {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True, **more}}}


ENGINES = {
    "stage 3, SuperOffload": (
        Recipe(stage=3, world_size=1, optimizer="cpu_adam", sub_group_size=20_000),
        offload(super_offload=True),
    ),
    "stage 3, half of the states in CPU memory": (
        Recipe(stage=3, world_size=1, optimizer="cpu_adam", sub_group_size=20_000),
        offload(ratio=0.5),
    ),
    "stage 3, states on NVMe": (
        Recipe(stage=3, world_size=1, hidden=208),
        offload(device="nvme", nvme_path="", buffer_count=300),
    ),
}
"""With the part of DeepSpeed's configuration that makes each."""
LONGEST_SECONDS = 240
"""Of one process that trains; compiling Adam takes the most."""
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
    done = train([job(nodes[name], recipe) for name, recipe in recipes.items()], asked.place)
    done.check_returncode()
    refused = {name: protect(node) for name, node in nodes.items()}
    whole = {name: node for name, node in nodes.items() if not refused[name]}
    differing = compare({name: node for name, node in whole.items() if name in RECIPES})
    done = train([job(node, recipes[name], universal_of(node)) for name, node in whole.items()], asked.place)
    done.check_returncode()
    is_good = True
    for name, node in nodes.items():
        found = refused[name] or "; ".join(differing.get(name, [])) or other_losses(node)
        is_good = is_good and not found
        print(f"{name}: {found or 'held'}")
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        for number, (name, (recipe, setting)) in enumerate(ENGINES.items(), len(recipes)):
            found = tried(Node(asked.place / f"{number:02}"), recipe, setting)
            is_good = is_good and found.startswith("held")
            print(f"{name}: {found}", flush=True)
    return 0 if is_good else 1


def tried(node: Node, recipe: Recipe, setting: dict[str, Any]) -> str:
    """Train, commit, restore and resume with one engine; "held" and how, or what went wrong.

    DeepSpeed goes on from the restored files as from its own, which need not be as the uninterrupted run did.
    """
    placed = placed_in(setting, str(node.root / "swap"))
    done = train([job(node, recipe, setting=placed)], node.root)
    if done.returncode:
        return f"DeepSpeed cannot train or save it: {last_error(done)}"
    node.once(600)
    commits = {path.name for path in (node.nas / "_ckptd" / "commits").glob("*")}
    if f"{TAG}~g1~zero.json" not in commits:
        return f"not committed: {node.log.read_text()[-1500:]}"
    back = node.ckptd("restore", node.job_file, TAG, "--to", node.root / "restored")
    if back.returncode:
        return f"not restored: {back.stderr}"
    losses = {}
    for place in (node.save_dir, node.root / "restored"):
        given = job(node, recipe, TAG, setting=placed, load="zero") | {"out": str(place)}
        done = train([given], node.root)
        if done.returncode:
            return f"DeepSpeed does not load {place.name}: {last_error(done)}"
        losses[place] = json.loads((node.root / "resumed.json").read_text())
    own, restored = losses.values()
    if own != restored:
        return f"other losses from the restored files: {restored}, from the saved ones {own}"
    how = f"from the restored files {other_losses(node) or 'as without interruption'}"
    if f"{TAG}~g1~universal.json" not in commits:
        refusal = node.ckptd("convert", node.save_dir / TAG, node.root / "u", "--form", "universal")
        return f"held; {how}; no universal form: {refusal.stderr.strip()}"
    is_nvme = "nvme" in str(setting)
    given = job(node, recipe, universal_of(node), setting={} if is_nvme else placed)
    done = train([given], node.root)
    if done.returncode:
        return f"DeepSpeed does not load the universal form: {last_error(done)}"
    found = other_losses(node)
    return f"from the universal form: {found}; {how}" if found else f"held, universal too; {how}"


def last_error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines that a training printed."""
    if done.returncode == 124:
        return f"it had not ended after {LONGEST_SECONDS} s"
    return " | ".join(done.stdout.strip().splitlines()[-6:])[-800:]


def job(
    node: Node,
    recipe: Recipe,
    tag: str | None = None,
    *,
    setting: dict[str, Any] | None = None,
    load: str = "universal",
) -> dict[str, Any]:
    """Describe a training for make_ckpt: from the start with a save, or from a checkpoint to the end."""
    return {
        "out": str(node.save_dir),
        "recipe": asdict(recipe),
        "setting": setting or {},
        "load": load if tag else None,
        "tag": tag,
        "steps": STEPS - SAVED_AT if tag else STEPS,
        "save_at": [] if tag else [SAVED_AT],
        "init_seed": 99 if tag else 7,
        "losses": str(node.root / ("resumed.json" if tag else "losses.json")),
    }


def train(jobs: list[dict[str, Any]], place: Path) -> subprocess.CompletedProcess[str]:
    """Run trainings one after another in one process on the GPU."""
    listed = place / "jobs.json"
    listed.write_text(json.dumps(jobs))
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    log = (place / "train.log").open("w+")
    done = subprocess.run(
        ["timeout", str(LONGEST_SECONDS), sys.executable, "-m", "tests.gpu.train", str(listed)],
        cwd=REPOSITORY,
        env=os.environ | environment | {"MASTER_PORT": str(free_port())},
        stdout=log,
        stderr=log,
        text=True,
        check=False,
    )
    log.seek(0)
    done.stdout = log.read()
    log.close()
    print(*(line for line in done.stdout.splitlines() if line.startswith("saved in ")), sep="\n", flush=True)
    return done


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
        convert(node.save_dir / TAG, node.root / "dcp", ConvertOptions(form="dcp", verify=True))
        convert(node.root / "dcp", node.root / "back", ConvertOptions(verify=True))
    pairs = [(stocks[name], node.root / "strict") for name, node in nodes.items()]
    found = dict(zip(nodes, stock.differences(pairs), strict=True))
    ways = [
        (str(n.root / "dcp"), str(n.root / other)) for n in nodes.values() for other in ("strict", "back")
    ]
    said = json.loads(run_module("tests.support.make_dcp", "compare", json.dumps(ways)).splitlines()[-1])
    for name, strict, back in zip(nodes, said[::2], said[1::2], strict=True):
        found[name] += [f"by way of dcp: {text}" for text in strict + back]
    return found


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
