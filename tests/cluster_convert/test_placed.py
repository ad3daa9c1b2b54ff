"""Two nodes that still have their shards: each worker reads its own disk and sends what it holds.

A save committed by two real daemons, dask workers with one node's folder each; the wire is counted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest

from bench import sparse
from bench.limited import limited
from ckptd.conversion.cluster import pool
from ckptd.conversion.cluster.conversion import Clustered
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertReport
from tests.cluster.harness import cluster
from tests.cluster_convert import scene
from tests.cluster_convert.scene import MIB, OPTIONS, InBackground, content, got, ready, until
from tests.stores import servers
from tests.stores.proxy import Fault, proxy

pytestmark = [pytest.mark.stores, pytest.mark.faults]
TAG = "global_step7"
SHAPES: dict[str, tuple[int, ...]] = {"big.weight": (2048, 2048), "big.bias": (2048,), "norm.weight": (2048,)}
"""Every rank of four holds 4 MiB of each big output, every node 8 MiB."""
PARAMETERS = sum(map(prod, SHAPES.values()))
NODES = ("a", "b")


@dataclass(frozen=True)
class Spread:
    """A committed save: each node's save_dir, and what one process makes of all shards."""

    server: servers.Server
    save_dirs: dict[str, Path]
    url: str
    expected: dict[str, bytes]


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.full)], ids=["z3", "z2"])
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    """Four ranks on two nodes; each node's daemon ships its part, and one of them commits."""
    root = tmp_path_factory.mktemp("spread")
    model = sparse.Model("placed", SHAPES, request.param, 4)
    whole = sparse.write(root / "whole" / TAG, model, sparse.random_fill(5))
    convert(whole, root / "universal", OPTIONS)
    with servers.moto(root) as server:
        with cluster(root, server) as here:
            for number, name in enumerate(NODES):
                here.add(name).start()
                folder = here.nodes[name].save_dir / TAG
                folder.mkdir()
                for path in whole.iterdir():
                    rank = (
                        int(path.name.partition("pp_rank_")[2].split("_")[0] or 0) if "pp" in path.name else 0
                    )
                    if "pp" not in path.name or rank // 2 == number:
                        shutil.copyfile(path, folder / path.name)
            here.wait_committed(f"{TAG}~g1", 200)
            save_dirs = {name: node.save_dir for name, node in here.nodes.items()}
            url = f"{here.url}/{TAG}"
        yield Spread(server, save_dirs, url, content(root / "universal"))


def environment(endpoint: str, **more: str) -> dict[str, str]:
    """Of a process that reaches the bucket through a proxy."""
    return servers.environment(None, AWS_ENDPOINT_URL=endpoint, **more)


def converted(spread: Spread, address: str, name: str, endpoint: str) -> ConvertReport:
    """By the workers of that scheduler, into the bucket."""
    environ: Any = {**os.environ, **environment(endpoint)}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environ.items():
            patch.setenv(key, value)
        target, where = scene.url(f"made/{name}"), pool.parse(address)
        return Clustered(spread.url, target, OPTIONS, environ, address=where).run()


def test_what_each_holds_crosses_once(spread: Spread, tmp_path: Path) -> None:
    """Nothing of the source comes over the wire; what goes out is the outputs, and little more."""
    with limited(spread.server.port, 1e9) as line:
        places = [environment(line.endpoint, CKPTD_SAVE_DIR=str(spread.save_dirs[name])) for name in NODES]
        with scene.own_cluster(tmp_path, *places) as (address, _):
            ready(address, 2)
            line.reset()
            report = converted(spread, address, "placed", line.endpoint)
            up, down = line.up_bytes, line.down_bytes
    assert got(spread.server.client(), "made/placed") == spread.expected
    seen = report.cluster
    assert seen is not None
    assert seen.bytes_local > 0.99 * 12 * PARAMETERS
    assert seen.bytes_read - seen.bytes_local < MIB
    assert down < MIB
    whole = sum(map(len, spread.expected.values()))
    assert whole <= up < 1.01 * whole + MIB


@pytest.mark.full
def test_a_shard_that_is_another_one(spread: Spread, tmp_path: Path) -> None:
    """One bit of a local shard differs, its size and time do not: the remote is read in its place."""
    own = tmp_path / "a"
    shutil.copytree(spread.save_dirs["a"], own)
    shard = sorted((own / TAG).glob("*optim_states.pt"))[0]
    before, raw = shard.stat(), bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    places = [{"CKPTD_SAVE_DIR": str(own)}, {"CKPTD_SAVE_DIR": str(spread.save_dirs["b"])}]
    endpoint = spread.server.endpoint
    with scene.own_cluster(tmp_path, *({**environment(endpoint), **one} for one in places)) as (address, _):
        ready(address, 2)
        report = converted(spread, address, "other", endpoint)
    assert got(spread.server.client(), "made/other") == spread.expected
    assert report.cluster is not None
    remote = report.cluster.bytes_read - report.cluster.bytes_local
    assert 0.9 * 3 * PARAMETERS < remote < 1.1 * len(raw) + MIB


def test_a_worker_that_dies_with_its_disk(spread: Spread, tmp_path: Path) -> None:
    """SIGKILL with a part on its way: the other worker reads the remote for what only the dead one had."""
    endpoint = spread.server.endpoint
    with proxy(spread.server.port) as line:
        fault = Fault("deaf", "^PUT .*partNumber")
        line.faults.append(fault)
        ends = zip(NODES, (line.endpoint, endpoint), strict=True)
        places = [environment(at, CKPTD_SAVE_DIR=str(spread.save_dirs[name])) for name, at in ends]
        with scene.own_cluster(tmp_path, *places) as (address, (_, first, _)):
            ready(address, 2)
            run = InBackground(lambda: converted(spread, address, "killed", endpoint))
            until(lambda: fault.hits or not run.is_alive(), "a part that is not answered")
            first.kill()
            report = run.end()
    client = spread.server.client()
    assert got(client, "made/killed") == spread.expected
    assert report.cluster.tasks_again > 0
    assert report.cluster.bytes_read > report.cluster.bytes_local > 0
    # a daemon that ended while it made its own form has one below run/, to go on with
    left = client.list_multipart_uploads(Bucket=servers.BUCKET, Prefix="made/killed")
    assert not left.get("Uploads")
