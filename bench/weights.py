"""`python -m bench.weights`: weights as safetensors against zero_to_fp32 and against writing the output.

Takes the checkpoints of `bench.convert`, runs the tools in turn with what they read in the page cache,
flushed, and writes the table of docs/performance.md. `--tiny` tries the benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import recipe
from bench.convert import ENVIRONMENT, on_ext4
from bench.measure import Run, make_warm, measure, touch_memory
from bench.pictures import replace_part
from bench.report import machine
from tests.support.real import REPOSITORY

CKPTD = [sys.executable, "-m", "ckptd", "convert"]
STOCK = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32"]
OF_THE_WRITE = 1.3
"""Times that a conversion may take of what writing its output takes."""
CHILD_MIB = 128


def commands(source: Path, place: Path) -> dict[str, list[str]]:
    """By name; the two `cp` write again what ckptd made, which is what the output costs by itself."""
    out = str(place / "out")
    found = {}
    for dtype in ("fp32", "bf16"):
        form = ["--form", f"weights-{dtype}", "--json"]
        found[f"ckptd {dtype}"] = [*CKPTD, str(source), str(place / dtype), *form]
        found[f"cp of the {dtype} output"] = ["cp", "-r", str(place / dtype), out]
    save_dir, tag = str(source.parent), source.name
    found["zero_to_fp32"] = [*STOCK, save_dir, out, "-t", tag, "--safe_serialization"]
    return found


def compare(source: Path, runs: int) -> dict[str, list[Run]]:
    """Interleave the tools `runs` times."""
    place = source.parent.parent / "weights-out"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    files = [p for p in source.iterdir() if p.is_file()]
    size_bytes = sum(p.stat().st_size for p in files)
    found: dict[str, list[Run]] = {}
    for number in range(runs):
        for name, command in commands(source, place).items():
            shutil.rmtree(place / "out", ignore_errors=True)
            if name.startswith("ckptd"):
                shutil.rmtree(place / name.split()[1], ignore_errors=True)
            subprocess.run(["sync", "-f", str(place)], check=True)
            make_warm(list(place.rglob("*.safetensors")) if name.startswith("cp") else files)
            touch_memory(size_bytes)
            time.sleep(1.0)
            run = measure(command, cwd=REPOSITORY, env=ENVIRONMENT, flush=place)
            found.setdefault(name, []).append(run)
            print(f"{number + 1}/{runs} {name}: {run.wall_seconds:.2f} s", file=sys.stderr, flush=True)
    shutil.rmtree(place)
    return found


def child_mib(runs: list[Run]) -> int:
    """Return the largest resident set of a converting child."""
    return max(int(json.loads(run.stdout)["peak_rss_bytes"]) for run in runs) >> 20


def render(title: str, found: dict[str, list[Run]]) -> str:
    """Render one checkpoint's table (wall, CPU, memory of the tree, the largest child), and its limits."""
    text = [title, "", "| tool | wall s | CPU s | peak RSS of the tree MiB | largest child MiB |"]
    text.append("|---|---|---|---|---|")
    for name, runs in found.items():
        walls = [run.wall_seconds for run in runs]
        wall = f"{statistics.median(walls):.2f} ({min(walls):.2f} – {max(walls):.2f})"
        cpu = statistics.median(run.cpu_seconds for run in runs)
        tree = max(run.peak_rss_bytes for run in runs) >> 20
        child = child_mib(runs) if name.startswith("ckptd") else "–"
        text.append(f"| {name} | {wall} | {cpu:.1f} | {tree} | {child} |")
    text.append("")
    for dtype in ("fp32", "bf16"):
        ours, cp = (
            statistics.median(run.wall_seconds for run in found[name])
            for name in (f"ckptd {dtype}", f"cp of the {dtype} output")
        )
        word = "reached" if ours <= OF_THE_WRITE * cp else "NOT reached"
        text.append(f"* {dtype}, at most {OF_THE_WRITE} × writing the output: {ours / cp:.2f} ({word})")
    most = max(child_mib(runs) for name, runs in found.items() if name.startswith("ckptd"))
    text.append(
        f"* a child, at most {CHILD_MIB} MiB: {most} MiB ({'' if most <= CHILD_MIB else 'NOT '}reached)"
    )
    return "\n".join([*text, ""])


def main() -> None:
    """Run, and write the page unless it was tiny or of other checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--tiny", action="store_true", help="small checkpoints: tries the benchmark")
    parser.add_argument("--source", type=Path, nargs="*", help="tag folders to take instead")
    given = parser.parse_args()
    chosen = recipe.TINY if given.tiny else recipe.LARGE
    if given.source:
        found = {source.parent.parent.name: source for source in given.source}
    else:
        found = {f"ZeRO stage {stage}": recipe.checkpoint(chosen[stage]) for stage in given.stages}
    texts = [f"Machine: {machine()}.", ""]
    for name, source in found.items():
        size = sum(p.stat().st_size for p in source.iterdir())
        title = (
            f"**{name}, {size / 1e9:.2f} GB**, {given.runs} interleaved runs each, median (least – greatest):"
        )
        with on_ext4(source) as copied:
            texts.append(render(title, compare(copied, given.runs)))
    if given.tiny or given.source:
        print("\n".join(texts))
    else:
        replace_part("\n".join(texts), "weights")


if __name__ == "__main__":
    main()
