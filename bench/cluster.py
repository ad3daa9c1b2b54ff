"""`python -m bench.cluster`: a conversion from bucket to bucket by 1, 2, 4 workers; for docs/performance.md.

The server (rclone) stands behind a proxy that gives each connection the same share: more workers are more
connections, as on machines of their own. *Placed* workers have the shards on their own disks, as on two nodes
that saved them; in the last row the server (Ceph's gateway, `make rgw-packages`) copies what an output shares
with a shard. `--small` tries the benchmark itself and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import saves
from bench.limited import Limited, limited
from bench.pictures import replace_part
from bench.report import machine
from ckptd.core.model.layouts import parse_shard_name
from tests.cluster_convert import scene
from tests.stores import rgw, servers
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
    copied: bool = False
    """The server copies parts."""
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
def _scene(
    save: saves.Save, rate: float, start: Callable[[Path], AbstractContextManager[servers.Server]]
) -> Iterator[tuple[Limited, Any]]:
    """A server with the committed checkpoint in its bucket, behind the proxy; a client past the proxy."""
    shutil.rmtree(WORK / "server", ignore_errors=True)
    shutil.rmtree(WORK / "nodes", ignore_errors=True)
    (WORK / "server").mkdir(parents=True)
    with start(WORK / "server") as server, limited(server.port, rate) as line:
        own = WORK / "nodes" / "all"
        _link(save.files, own)
        command = ["run", str(own), f"s3://{servers.BUCKET}/run", "--once"]
        _ckptd(command, servers.environment(server, CKPTD_SETTLE="1s"))
        for number in range(NODES):
            _link([path for path in save.files if _node_of(path) == number], WORK / "nodes" / str(number))
        yield line, server.client()
    shutil.rmtree(WORK / "server")
    shutil.rmtree(WORK / "nodes")


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


def _parameters(client: Any, prefix: str) -> int:
    """Elements of the universal form below a prefix."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=servers.BUCKET, Prefix=f"{prefix}/zero/")
    found = [one for page in pages for one in page.get("Contents", ())]
    return sum(int(one["Size"]) for one in found if one["Key"].endswith("/fp32.pt")) // 4


def _run(workers: int, line: Limited, client: Any, cluster: str = "", *, copied: bool = False) -> Run:
    """One conversion; `cluster`: workers that are there, on the nodes."""
    name = f"out-{workers}{'-placed' if cluster else ''}"
    ends = [f"s3://{servers.BUCKET}/run/{saves.TAG}", f"s3://{servers.BUCKET}/made/{name}"]
    command = ["convert", *ends, "--json", "--memory-budget", BUDGET]
    command += ["--cluster", cluster or f"local:{workers}"]
    line.reset()
    psutil.cpu_percent()
    report = json.loads(_ckptd(command, servers.environment(None, AWS_ENDPOINT_URL=line.endpoint)))
    busy_share = psutil.cpu_percent() / 100
    seen = report["cluster"]
    return Run(
        workers=workers,
        wall_seconds=report["seconds"],
        bytes=report["bytes"],
        parameters=_parameters(client, f"made/{name}"),
        placed=bool(cluster),
        copied=copied,
        source_bytes=seen["bytes_read"] - seen["bytes_local"],
        tasks_again=seen["tasks_again"],
        up_bytes=line.up_bytes,
        down_bytes=line.down_bytes,
        peak_rss_bytes=report["peak_rss_bytes"],
        busy_share=busy_share,
        plan_sha256=report["plan_sha256"],
    )


def _name(run: Run) -> str:
    return f"{run.workers}{', placed' * run.placed}{', copied' * run.copied}"


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
    ranged = [run for run in runs if not run.placed and not run.copied]
    most = ranged[-1]
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
    for run in runs:
        if run.placed:
            source = run.source_bytes / run.parameters
            words = (
                "workers on the nodes of the shards read below 0.1 bytes per parameter of the bucket's shards"
            )
            lines.append(f"* {words}: {source:.3f} ({_reached(source < 0.1)})")
        elif run.copied:
            up = run.up_bytes / run.parameters
            words = "a server that copies parts is sent at most 12 bytes per parameter"
            lines.append(f"* {words}: {up:.2f} ({_reached(up <= 12)})")
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
    rate, counts = (50e6, (1, 2)) if small else (RATE, WORKERS)
    with _scene(save, rate, servers.rclone) as (line, client):
        runs = [_run(workers, line, client) for workers in counts]
        with _placed(counts[-1], line) as address:
            runs.append(_run(counts[-1], line, client, address))
    with _scene(save, rate, servers.moto if small else rgw.rgw) as (line, client):
        runs.append(_run(counts[-1], line, client, copied=True))
    if len({run.plan_sha256 for run in runs}) != 1:
        sys.exit("the plans differ")
    raw = WORK / "small.json" if small else RAW
    raw.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    text = render(runs)
    print(text)
    if not small:
        replace_part(text, "cluster")


if __name__ == "__main__":
    main()
