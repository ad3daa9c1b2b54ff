"""What the tests of conversions on a cluster share: a checkpoint with bytes in it, workers, a bucket."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import sparse
from ckptd.conversion.cluster.conversion import Clustered
from ckptd.conversion.cluster.pool import PROFILER, Address
from ckptd.conversion.options import ConvertOptions, ConvertProgress, ConvertReport
from tests.stores import servers
from tests.support.real import REPOSITORY

MIB = 1 << 20
PART_SIZE = "5MiB"
WAIT_SECONDS = 120.0
OPTIONS = ConvertOptions(write_latest=True)


FILL = sparse.random_fill(1)


def checkpoint(
    folder: Path, *, stage: int, layers: int = 1, hidden: int = 256, fill: sparse.Fill | None = FILL
) -> Path:
    """Shards of a GPT of two ranks; at the usual size about 50 MB of universal form."""
    model = sparse.Model(f"stage{stage}", sparse.gpt(hidden, layers, 8192), stage, 2)
    return sparse.write(folder, model, fill)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def put(client: Any, folder: Path, prefix: str) -> None:
    """A folder's files as objects."""
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder)}"
            client.put_object(Bucket=servers.BUCKET, Key=key, Body=path.read_bytes())


def got(client: Any, prefix: str) -> dict[str, bytes]:
    """Objects below a prefix."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=servers.BUCKET, Prefix=f"{prefix}/")
    return {
        one["Key"].removeprefix(f"{prefix}/"): client.get_object(Bucket=servers.BUCKET, Key=one["Key"])[
            "Body"
        ].read()
        for page in pages
        for one in page.get("Contents", ())
    }


def url(path: str) -> str:
    """Below the bucket."""
    return f"s3://{servers.BUCKET}/{path}"


@contextlib.contextmanager
def workers(count: int = 2, *, profiler: bool = False) -> Iterator[Any]:
    """A dask cluster of processes on this machine, with the environment of this moment."""
    import dask.config
    from distributed import LocalCluster

    with dask.config.set({PROFILER: profiler}):
        cluster = LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
        )
    try:
        yield cluster
    finally:
        cluster.close(timeout=20)


@contextlib.contextmanager
def own_cluster(
    folder: Path, *environments: dict[str, str], threads: int = 2
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """`dask scheduler` and a `dask worker` for each environment, as processes of their own."""
    port = servers.free_port()
    address = f"tcp://127.0.0.1:{port}"
    scheduler = ["dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    worker = ["dask_worker", address, "--nthreads", str(threads), "--no-nanny", "--no-dashboard"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, more in enumerate(({}, *environments)):
            words = [*worker, "--local-directory", f"worker-{number}"] if number else scheduler
            quiet = {"DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False", "PYTHONPATH": str(REPOSITORY)}
            command = [sys.executable, "-m", f"distributed.cli.{words[0]}", *words[1:]]
            with (folder / f"{words[0]}-{number}.log").open("ab") as log:
                started.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **quiet, **more}
                    )
                )
        yield address, started
    finally:
        for process in started:
            process.kill()
            process.wait()


def ready(address: str, count: int) -> None:
    """Wait for that many workers."""
    from distributed import Client

    def seen() -> bool:
        return len(client.scheduler_info(n_workers=-1)["workers"]) == count

    with Client(address, set_as_default=False, timeout=WAIT_SECONDS) as client:
        until(seen, "all workers")


def clustered(
    cluster: Any,
    source: Path | str,
    destination: Path | str,
    options: ConvertOptions = OPTIONS,
    on_progress: Callable[[ConvertProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ConvertReport:
    """Convert by the workers of a cluster that is there."""
    address = Address(kind="scheduler", url=cluster.scheduler_address)
    more: Any = {"address": address, "on_progress": on_progress, "should_stop": should_stop}
    return Clustered(source, destination, options, os.environ, **more).run()


def cli(*arguments: object, timeout: float = WAIT_SECONDS) -> subprocess.CompletedProcess[str]:
    """`python -m ckptd convert …`."""
    with begun(*arguments) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def begun(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The same, still running; killed in the end."""
    command = [sys.executable, "-m", "ckptd", "convert", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def until(found: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + WAIT_SECONDS
    while not found():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


class InBackground(threading.Thread):
    """A call in a thread; `value` or `error` once it is over."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Call."""
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    def end(self) -> Any:
        """Its value, or what it raised."""
        self.join(WAIT_SECONDS)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.value
