"""Connect to workers: started here, by Slurm, or already there; calls to dask stand here.

dask comes with the extra `ckptd[cluster]` and is imported by the calls that need it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ckptd
from ckptd.conversion.cluster import work
from ckptd.conversion.cluster.memory import shares_of
from ckptd.conversion.cluster.messages import Claims, Question
from ckptd.errors import BehindError, ConfigError, RemoteUnreachable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptd.conversion.cluster.grouping import Home
    from ckptd.conversion.cluster.messages import TaskSource

CONNECT_SECONDS = 15.0
WORKER_SECONDS = 120.0
"""Limit for the first worker of a scheduler that runs already; a queue's worker has none."""
ALONE_SECONDS = 300.0
"""Limit for a conversion that has lost all its workers."""
STOP_SECONDS = 20.0
PROFILER = "distributed.worker.profile.enabled"
_PIP = "pip install 'ckptd[cluster]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Hold the parsed `--cluster`: `kind` local, slurm or scheduler (`url`)."""

    kind: str
    count: int = 1
    url: str = ""


def parse(text: str) -> Address:
    """Read `--cluster`.

    Raises:
        UsageError: it is none of tcp://HOST:PORT, tls://HOST:PORT, local:N, slurm, slurm:N; no dask here.
    """
    address = _parsed(text)
    if address is None:
        raise UsageError(
            f"--cluster {text!r} is none of tcp://HOST:PORT, tls://HOST:PORT, local:N, slurm, slurm:N",
            hint="local:4 starts four workers on this machine",
        )
    needed = ("distributed", "dask_jobqueue") if address.kind == "slurm" else ("distributed",)
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--cluster needs {name.replace('_', '-')}, which is not installed", hint=_PIP)
    return address


def _parsed(text: str) -> Address | None:
    kind, _, rest = text.partition(":")
    if kind in ("local", "slurm") and (rest.isdecimal() or (text == "slurm")):
        count = int(rest or 1)
        return Address(kind=kind, count=count) if 1 <= count <= 4096 else None
    if re.fullmatch(r"(tcp|tls)://([^/:\s]+|\[[0-9a-fA-F:]+\]):\d{1,5}", text):
        return Address(kind="scheduler", url=text)
    return None


@contextmanager
def open_pool(
    address: Address, budget_bytes: int, should_stop: Callable[[], bool] | None
) -> Iterator[WorkerPool]:
    """Connect, wait for a first worker, and see that all have this ckptd.

    Raises:
        RemoteUnreachable: no scheduler, or no worker. ConfigError: another ckptd there; dask's own settings.
        BehindError: `should_stop` said so while it waited.
    """
    import dask.config
    import distributed

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        # see `ckptd.conversion.cluster.work.stop_profiler`; workers started here inherit these settings
        stack.enter_context(dask.config.set({PROFILER: False}))
        place = _place(address, budget_bytes, stack)
        try:
            client = distributed.Client(place, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise RemoteUnreachable(
                f"no dask scheduler answers at {address.url or place} ({str(error).splitlines()[0][:200]})",
                hint="is it running, and is --cluster its address? (dask scheduler prints it)",
            ) from error
        stack.callback(lambda: client.close(timeout=5))
        crew = WorkerPool(client, address)
        crew.wait(should_stop)
        yield crew


def _place(address: Address, budget_bytes: int, stack: ExitStack) -> Any:
    """Return the cluster or the address that dask's client connects to."""
    if address.kind == "scheduler":
        return address.url
    folder = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="ckptd-cluster-", ignore_cleanup_errors=True)
    )
    threads = max(1, min(shares_of(budget_bytes).tasks, os.cpu_count() or 1))
    if address.kind == "local":
        cluster = _local(address.count, threads, folder, stack)
    else:
        cluster = _slurm(address.count)
    stack.callback(lambda: cluster.close(timeout=10))
    return cluster


def _local(count: int, threads: int, folder: str, stack: ExitStack) -> Any:
    """Start workers on this machine; each reads the main script of this process again, where it is a file.

    Raises:
        RemoteUnreachable: they did not start (69).
    """
    from distributed import LocalCluster

    main = sys.modules["__main__"]
    if not os.path.exists(path := getattr(main, "__file__", None) or __file__):  # "<stdin>"
        stack.callback(setattr, main, "__file__", path)
        del main.__file__
    try:
        return LocalCluster(
            n_workers=count,
            threads_per_worker=threads,
            processes=True,
            host="127.0.0.1",
            security=True,
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
            local_directory=folder,
            silence_logs=logging.CRITICAL,
        )
    except RuntimeError as error:
        msg = f"no worker of --cluster local:{count} starts ({str(error).rstrip('.')})"
        hint = 'in a script of yours all that runs belongs below `if __name__ == "__main__":`'
        raise RemoteUnreachable(msg, hint=hint) from error


def _slurm(count: int) -> Any:
    if shutil.which("sbatch") is None:
        raise ConfigError("--cluster slurm: there is no sbatch here", hint="run it where jobs are submitted")
    from dask_jobqueue import SLURMCluster

    try:
        cluster = SLURMCluster()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--cluster slurm: {str(error).splitlines()[0][:300]}",
            hint="write ~/.config/dask/jobqueue.yaml; `ckptd init --example slurm-dask` prints an example",
        ) from error
    cluster.adapt(minimum_jobs=count, maximum_jobs=count)
    return cluster


class WorkerPool:
    """The workers, through dask's client."""

    def __init__(self, client: Any, address: Address) -> None:
        import distributed

        self._client = client
        self._address = address
        self._asked = distributed.as_completed(loop=client.loop)
        self._alone_since: float | None = None
        self._looked_at = 0.0
        self._threads: dict[str, int] = {}

    def wait(self, should_stop: Callable[[], bool] | None) -> None:
        """Wait until there is a worker; see `open_pool`."""
        begun = time.monotonic()
        while not self._look():
            if should_stop is not None and should_stop():
                raise BehindError("the conversion was stopped", hint="nothing was begun")
            if self._address.kind != "slurm" and time.monotonic() - begun > WORKER_SECONDS:
                raise RemoteUnreachable(
                    f"the scheduler has no worker ({WORKER_SECONDS:.0f} s)",
                    hint="start some: dask worker ADDRESS",
                )
            time.sleep(0.1)
        for name, version in self._client.run(work.report_version, on_error="return").items():
            if version != ckptd.__version__:
                said = f"has ckptd {version}" if isinstance(version, str) else f"has no ckptd ({version})"
                raise ConfigError(
                    f"worker {name} {said}, the command has {ckptd.__version__}",
                    hint="install the same version everywhere",
                )

    def _look(self) -> int:
        # not `scheduler_info`: dask's own look every two seconds leaves no worker in what that returns
        with suppress(OSError):
            seen = self._client.sync(self._client.scheduler.identity, n_workers=-1)["workers"]
            self._threads = {address: int(one["nthreads"]) for address, one in seen.items()}
        return self.workers

    @property
    def alive(self) -> frozenset[str]:
        """Addresses of the workers, as of the last look."""
        return frozenset(self._threads)

    @property
    def workers(self) -> int:
        """Return the number of them."""
        return len(self._threads)

    @property
    def threads(self) -> int:
        """Return the number of threads of all workers."""
        return sum(self._threads.values())

    def threads_of(self, home: Home) -> int:
        """Return the threads of the workers of a home; of all workers where none of them is left."""
        return sum(n for address, n in self._threads.items() if address in home) or self.threads

    def holders(self, sources: Iterable[TaskSource]) -> dict[int, Home]:
        """Ask the workers which sources they have on their own disk: source → workers.

        Raises:
            ConfigError: the settings of one are wrong.
        """
        wanted = tuple(source for source in sources if source.local and source.crc64)
        if not wanted:
            return {}
        text = Question(sources=wanted).model_dump_json()
        found: dict[int, set[str]] = {}
        for address, answer in self._client.run(work.claims, text, on_error="return").items():
            if not isinstance(answer, str):
                continue  # a worker that went
            claims = Claims.model_validate_json(answer)
            if claims.error:
                raise ConfigError(f"worker {address}: {claims.error}", hint=claims.hint)
            for number in claims.numbers:
                found.setdefault(number, set()).add(address)
        return {number: frozenset(addresses) for number, addresses in found.items()}

    def ask(self, job_text: str, task_text: str, key: str, home: Home) -> Any:
        """Have a task done by one of these workers, or by any; `ready` hands its future out."""
        # restricted strictly: what dask may take elsewhere, idle workers steal, and read from the remote
        future = self._client.submit(
            work.run, job_text, task_text, key=key, pure=False, workers=sorted(home) or None
        )
        self._asked.add(future)
        return future

    def cancel(self, future: Any) -> None:
        """A task whose workers are gone."""
        with suppress(Exception):
            future.cancel(force=True)

    def ready(self) -> list[Any]:
        """Futures of tasks that are over.

        Raises:
            RemoteUnreachable: the scheduler is lost, or all workers are.
        """
        if self._client.status != "running":
            raise _lost()
        now = time.monotonic()
        if now - self._looked_at > 2.0:
            self._looked_at = now
            self._alone_since = None if self._look() else self._alone_since or now
            if (
                self._alone_since
                and now - self._alone_since > ALONE_SECONDS
                and self._address.kind != "slurm"
            ):
                raise RemoteUnreachable("the scheduler has no worker any more", hint="run the command again")
        return list(self._asked.next_batch(block=False)) if self._asked.has_ready() else []

    def answer(self, future: Any) -> str | None:
        """Return the task's `Result` as JSON; None: workers died of it again and again.

        Raises:
            RemoteUnreachable: the scheduler was lost.
        """
        from distributed import KilledWorker

        if future.status == "finished":
            try:
                return str(future.result(timeout=60))
            except Exception as error:
                raise _lost() from error
        if future.status == "error":
            died = future.exception(timeout=60)
            if isinstance(died, KilledWorker):
                return None
            raise ConfigError(
                f"a worker could not run a task of ckptd ({type(died).__name__}: {ascii(str(died))[:200]})",
                hint="install the same version of ckptd, dask and Python everywhere",
            )
        raise _lost()

    def end(self, attempt: str, futures: list[Any]) -> None:
        """Cancel what is queued, and have what runs stop; waits for it, within reason."""
        with suppress(Exception):
            self._client.cancel(futures, force=True)
            self.release(attempt)
            end = time.monotonic() + STOP_SECONDS
            while time.monotonic() < end and any(
                self._client.run(work.running, attempt, on_error="ignore").values()
            ):
                time.sleep(0.1)

    def release(self, attempt: str) -> None:
        """Have the workers close what they keep open for an attempt, which is over."""
        with suppress(Exception):
            self._client.run(work.stop, attempt, on_error="ignore")


def _lost() -> RemoteUnreachable:
    return RemoteUnreachable(
        "the scheduler was lost in the middle of the conversion",
        hint="what is done is noted at the destination: the same command goes on",
    )
