"""`python -m bench.convert`: conversion against `ds_to_universal` and against `cp -r` on the same disk.

Makes a real checkpoint once (minutes), then runs the tools in turn, cold and warm, flushed, and writes
docs/performance.md and docs/conversion.png. `--tiny` tries the benchmark itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench import loop, recipe, report
from bench.measure import Run, make_cold, make_warm, measure, touch_memory
from bench.pictures import replace_part
from tests.support.real import REPOSITORY

ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
CLONES = "ckptd, XFS clones"
CACHES: dict[str, Callable[[list[Path]], float]] = {"cold": make_cold, "warm": make_warm}


@dataclass(slots=True)
class Series:
    """All runs of one tool in one state of the page cache."""

    tool: str
    cache: str
    runs: list[Run] = field(default_factory=list)
    child_rss_bytes: list[int] = field(default_factory=list)
    cloned_bytes: int = 0

    def median(self, what: str) -> float:
        """Median of a field of the runs."""
        return float(statistics.median(getattr(run, what) for run in self.runs))

    def spread(self, what: str) -> tuple[float, float]:
        """Least and greatest."""
        values = [getattr(run, what) for run in self.runs]
        return min(values), max(values)


def commands(source: Path, out: Path) -> dict[str, list[str]]:
    """The tools with their defaults; `read` is what the disk needs to deliver the source, the floor."""
    stock = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    stock += ["--input_folder", str(source), "--output_folder", str(out)]
    ours = [sys.executable, "-m", "ckptd", "convert", str(source), str(out), "--compat", "strict", "--json"]
    return {
        "read": ["sh", "-c", 'cat "$0"/* > /dev/null', str(source)],
        "cp": ["cp", "-r", str(source), str(out)],
        "ckptd": ours,
        "ckptd verify": [*ours, "--verify"],
        "stock 1": [*stock, "--num_extract_workers", "1", "--num_merge_workers", "1"],
        "stock 4": [*stock, "--num_extract_workers", "4", "--num_merge_workers", "4"],
    }


@contextlib.contextmanager
def on_ext4(source: Path) -> Iterator[Path]:
    """Copy a tag folder to an ext4 with a journal on a loop device; itself where that cannot be made."""
    if not loop.available("ext4"):
        yield source
        return
    size_bytes = sum(p.stat().st_size for p in source.iterdir())
    with loop.mounted(recipe.CACHE, max(512 << 20, 4 * size_bytes), "ext4") as mounted:
        yield shutil.copytree(source, mounted / source.parent.parent.name / "save" / source.name)


def compare(source: Path, runs: int, tools: list[str]) -> list[Series]:
    """Interleave tools and caches `runs` times."""
    place = source.parent.parent / "out"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    files = [p for p in source.iterdir() if p.is_file()]
    size_bytes = sum(p.stat().st_size for p in files)
    found = {(tool, cache): Series(tool, cache) for cache in CACHES for tool in tools}
    for number in range(runs):
        for cache, prepare in CACHES.items():
            for tool in tools:
                out = place / "converted"
                shutil.rmtree(out, ignore_errors=True)
                subprocess.run(["sync", "-f", str(place)], check=True)
                share = prepare(files)
                touch_memory(2 * size_bytes)
                time.sleep(1.0)
                run = measure(commands(source, out)[tool], cwd=REPOSITORY, env=ENVIRONMENT, flush=place)
                record(source, tool, cache, run)
                series = found[tool, cache]
                series.runs.append(run)
                if tool.startswith("ckptd"):
                    series.child_rss_bytes.append(json.loads(run.stdout)["peak_rss_bytes"])
                    series.cloned_bytes = json.loads(run.stdout)["bytes_cloned"]
                print(
                    f"{number + 1}/{runs} {cache} ({share:.0%} resident) {tool}: {run.wall_seconds:.2f} s",
                    flush=True,
                )
    shutil.rmtree(place)
    return list(found.values())


def record(source: Path, tool: str, cache: str, run: Run) -> None:
    """Keep each run as a JSON line beside the checkpoints: a series that is cut short is not lost."""
    line = {"source": source.parent.parent.name, "tool": tool, "cache": cache, **asdict(run)}
    line |= {"stdout": "", "load": os.getloadavg()[0]}
    if tool.startswith("ckptd"):
        line["child_rss_bytes"] = json.loads(run.stdout)["peak_rss_bytes"]
    with (recipe.CACHE / "runs.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def recorded(source: Path, tools: list[str]) -> list[Series]:
    """What earlier rounds of that checkpoint left: rounds of several days count as much as one long one."""
    name = source.parent.parent.name
    lines = [json.loads(line) for line in (recipe.CACHE / "runs.jsonl").read_text().splitlines()]
    found: dict[tuple[str, str], Series] = {}
    for line in lines:
        if line["source"] == name and line["tool"] in (*tools, CLONES):
            series = found.setdefault((line["tool"], line["cache"]), Series(line["tool"], line["cache"]))
            series.runs.append(Run(**{key: line[key] for key in Run.__dataclass_fields__}))
            if line.get("child_rss_bytes"):
                series.child_rss_bytes.append(line["child_rss_bytes"])
    order = [(tool, cache) for cache in CACHES for tool in tools] + [(CLONES, "cold")]
    return [found[key] for key in order if key in found]


def cloning(source: Path, runs: int) -> list[Series]:
    """The same conversion on a loop-mounted XFS, where extents are cloned; nothing without the rights."""
    if not loop.available():
        return []
    size = sum(p.stat().st_size for p in source.iterdir())
    series = Series(CLONES, "cold")
    with loop.mounted(recipe.CACHE, max(512 << 20, 2 * size)) as mounted:
        copied, place = mounted / "save" / source.name, mounted / "out"
        place.mkdir()
        shutil.copytree(source, copied)
        for _ in range(runs):
            subprocess.run(["sync", "-f", str(mounted)], check=True)
            make_cold([p for p in copied.iterdir() if p.is_file()])
            used = _used(mounted)
            command = commands(copied, place / "converted")["ckptd"]
            run = measure(command, cwd=REPOSITORY, env=ENVIRONMENT, flush=place)
            run = replace(run, peak_disk_bytes=_used(mounted) - used)
            record(source, series.tool, "cold", run)
            series.runs.append(run)
            series.child_rss_bytes.append(json.loads(run.stdout)["peak_rss_bytes"])
            series.cloned_bytes = json.loads(run.stdout)["bytes_cloned"]
            shutil.rmtree(place / "converted")
    return [series]


def _used(place: Path) -> int:
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def start_up(arguments: list[str], runs: int = 10) -> float:
    """Median seconds of a short command."""
    taken = []
    for _ in range(runs):
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "ckptd", *arguments], cwd=REPOSITORY, capture_output=True, check=False
        )
        taken.append(time.monotonic() - started)
    return statistics.median(taken)


def main() -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3])
    parser.add_argument(
        "--tiny", action="store_true", help="small checkpoints, no report: tries the benchmark"
    )
    parser.add_argument("--without-stock", action="store_true")
    parser.add_argument(
        "--recorded", action="store_true", help="run nothing: the table of all rounds that were recorded"
    )
    given = parser.parse_args()
    stock = () if given.without_stock else ("stock 1", "stock 4")
    tools = ["read", "cp", "ckptd", "ckptd verify", *stock]
    stages: list[report.Stage] = []
    for stage in given.stages:
        chosen = (recipe.TINY if given.tiny else recipe.LARGE)[stage]
        source = recipe.checkpoint(chosen)
        size = sum(p.stat().st_size for p in source.iterdir())
        print(f"stage {stage}: {source}, {size / 1e9:.2f} GB", flush=True)
        if given.recorded:
            series = recorded(source, tools)
        else:
            with on_ext4(source) as copied:
                series = compare(copied, given.runs, tools)
            series += cloning(source, given.runs)
        stages.append(report.Stage(stage, chosen.world_size, size, series))
    first = recipe.checkpoint((recipe.TINY if given.tiny else recipe.LARGE)[given.stages[0]])
    latencies = {
        "ckptd --version": start_up(["--version"]),
        "ckptd status (no job there)": start_up(["status", "/nonexistent"]),
        "ckptd inspect (a whole checkpoint)": start_up(["inspect", str(first)]),
    }
    text = report.render(stages, latencies)
    if given.tiny or given.without_stock:
        print(text)
        return
    replace_part(text, "conversion")


if __name__ == "__main__":
    main()
