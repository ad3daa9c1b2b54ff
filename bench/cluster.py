"""`python -m bench.cluster`: a conversion from bucket to bucket by 1, 2, 4 workers; for docs/performance.md.

The server (rclone) stands behind a proxy that gives each connection the same share: more workers are more
connections, as on machines of their own. The last row's workers have the shards on their own disks, as on two
nodes that saved them. `--small` tries the benchmark itself and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench import saves
from bench.limited import Limited, limited
from bench.pictures import replace_part
from bench.report import machine
from ckptd.core.model.layouts import parse_shard_name
from tests.cluster_convert import scene
from tests.stores import servers
from tests.support.real import REPOSITORY

WORK = REPOSITORY / ".build" / "bench-cluster"
RAW = WORK / "runs.json"
RATE = 6e6
"""Bytes per second of a connection, each way: so slow that the cores of one machine are not the bound."""
BUDGET = "512MiB"
THREADS = 4
"""Of each worker, as `local:N` starts them."""
WORKERS = (1, 2, 4)
NODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One conversion; bytes on the wire as the proxy saw them."""

    workers: int
    wall_seconds: float
    bytes: int
    parameters: int
    """Elements, not tensors."""
    placed: bool = False
    """The workers have the shards on their own disks."""
    source_bytes: int
    """Read of the shards in the bucket by workers, as they count; the rest of `down_bytes` is outputs read
    back."""
    tasks_again: int
    up_bytes: int
    down_bytes: int
    peak_rss_bytes: int
    busy_share: float
    """Of all cores of this machine, the server's and the proxy's work among it: 1.0 is a bound of its own."""
    plan_sha256: str


@contextmanager
def _scene(save: saves.Save, rate: float) -> Iterator[tuple[Limited, Path]]:
    """The server with the committed checkpoint in its bucket, behind the proxy; the folder of the bucket."""
    shutil.rmtree(WORK / "server", ignore_errors=True)
    shutil.rmtree(WORK / "nodes", ignore_errors=True)
    (WORK / "server").mkdir(parents=True)
    with servers.rclone(WORK / "server") as server, limited(server.port, rate) as line:
        own = WORK / "nodes" / "all"
        _link(save.files, own)
        command = ["run", str(own), f"s3://{servers.BUCKET}/run", "--once"]
        _ckptd(command, servers.environment(server, CKPTD_SETTLE="1s"))
        for number in range(NODES):
            _link([path for path in save.files if _node_of(path) == number], WORK / "nodes" / str(number))
        yield line, WORK / "server" / "objects" / servers.BUCKET


def _node_of(path: Path) -> int:
    """Whose disk a shard lies on: a rank a node, the model's states with the first."""
    named = parse_shard_name(path.name)
    return (named.shard.d or 0) % NODES if named else 0


def _link(files: list[Path], save_dir: Path) -> None:
    (save_dir / saves.TAG).mkdir(parents=True)
    for path in files:
        os.link(path, save_dir / saves.TAG / path.name)


def _ckptd(words: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "ckptd", *words]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


@contextmanager
def _placed(workers: int, line: Limited) -> Iterator[str]:
    """That many workers with their nodes' save_dirs; the scheduler's address."""
    own = [{"CKPTD_SAVE_DIR": str(WORK / "nodes" / str(number % NODES))} for number in range(workers)]
    places = [servers.environment(None, AWS_ENDPOINT_URL=line.endpoint, **one) for one in own]
    with scene.own_cluster(WORK / "nodes", *places, threads=THREADS) as (address, _):
        scene.ready(address, workers)
        yield address


def _run(workers: int, line: Limited, bucket: Path, cluster: str = "") -> Run:
    """One conversion; `cluster`: workers that are there, on the nodes."""
    name = f"out-{workers}{'-placed' if cluster else ''}"
    ends = [f"s3://{servers.BUCKET}/run/{saves.TAG}", f"s3://{servers.BUCKET}/made/{name}"]
    command = ["convert", *ends, "--json", "--memory-budget", BUDGET]
    command += ["--cluster", cluster or f"local:{workers}"]
    line.reset()
    psutil.cpu_percent()
    report = json.loads(_ckptd(command, servers.environment(None, AWS_ENDPOINT_URL=line.endpoint)))
    busy_share = psutil.cpu_percent() / 100
    made, seen = bucket / "made" / name, report["cluster"]
    run = Run(
        workers=workers,
        wall_seconds=report["seconds"],
        bytes=report["bytes"],
        parameters=sum(path.stat().st_size for path in made.glob("zero/*/fp32.pt")) // 4,
        placed=bool(cluster),
        source_bytes=seen["bytes_read"] - seen["bytes_local"],
        tasks_again=seen["tasks_again"],
        up_bytes=line.up_bytes,
        down_bytes=line.down_bytes,
        peak_rss_bytes=report["peak_rss_bytes"],
        busy_share=busy_share,
        plan_sha256=report["plan_sha256"],
    )
    shutil.rmtree(made)
    return run


def _name(run: Run) -> str:
    return f"{run.workers}, placed" if run.placed else str(run.workers)


def render(runs: list[Run]) -> str:
    """The measured part of the page."""
    one = next(run for run in runs if run.workers == 1)
    lines = [
        f"Machine: {machine()}; all processes on it, {RATE / 1e6:.0f} MB/s per connection.",
        "",
        "| workers | wall s | MB/s | speed-up | read, of it sources | sent | RSS, MiB | cores busy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        down, up = run.down_bytes / run.parameters, run.up_bytes / run.parameters
        rate, faster = run.bytes / 1e6 / run.wall_seconds, one.wall_seconds / run.wall_seconds
        lines.append(
            f"| {_name(run)} | {run.wall_seconds:.1f} | {rate:.0f} | {faster:.2f} "
            f"| {down:.2f}, {run.source_bytes / run.parameters:.2f} | {up:.2f} "
            f"| {run.peak_rss_bytes / 2**20:.0f} | {100 * run.busy_share:.0f} % |"
        )
    ranged = [run for run in runs if not run.placed]
    most, placed = ranged[-1], runs[-1]
    speed = one.wall_seconds / most.wall_seconds
    share = max(run.down_bytes for run in ranged) / min(run.down_bytes for run in ranged)
    budget = max(run.peak_rss_bytes for run in runs) / 2**20
    wanted = 0.8 * most.workers
    words = f"* {most.workers} workers against one, at least {wanted:.1f} times as fast: {speed:.2f}"
    lines += [
        "",
        f"{words} ({_reached(speed >= wanted)})",
        f"* more workers read no more, at most 1.02 times the least: {share:.3f} ({_reached(share <= 1.02)})",
        f"* a worker stays below --memory-budget {BUDGET}: {budget:.0f} MiB ({_reached(budget <= 512)})",
    ]
    if placed.placed:
        source = placed.source_bytes / placed.parameters
        words = "workers on the nodes of the shards read below 0.1 bytes per parameter of the bucket's shards"
        lines.append(f"* {words}: {source:.3f} ({_reached(source < 0.1)})")
    return "\n".join(lines) + "\n"


def _reached(is_so: bool) -> str:
    return "reached" if is_so else "NOT reached"


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="try the benchmark; writes nothing in docs/")
    small = parser.parse_args().small
    save = saves.shards("cluster-small", 2, 2, hidden=256) if small else saves.shards("cluster-2gb", 11, 2)
    WORK.mkdir(parents=True, exist_ok=True)
    with _scene(save, 50e6 if small else RATE) as (line, bucket):
        counts = (1, 2) if small else WORKERS
        runs = [_run(workers, line, bucket) for workers in counts]
        with _placed(counts[-1], line) as address:
            runs.append(_run(counts[-1], line, bucket, address))
    if len({run.plan_sha256 for run in runs}) != 1:
        sys.exit("the plans differ")
    raw = WORK / "small.json" if small else RAW
    raw.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    text = render(runs)
    print(text)
    if not small:
        replace_part(text, "cluster")
    shutil.rmtree(WORK / "server")
    shutil.rmtree(WORK / "nodes")


if __name__ == "__main__":
    main()
