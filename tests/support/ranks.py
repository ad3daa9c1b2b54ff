"""Ranks of real DeepSpeed without the price of their imports: forks of one process that made them already.

torchrun starts an interpreter per rank, and each imports torch and DeepSpeed anew: on two cores that is most
of a start. Here multiprocessing's fork server imports them once per test process; a rank gets torchrun's
environment and then runs its module as `python -m` would. torchrun itself starts the quickstart's trainings
and those of tests/e2e/test_told.py: DeepSpeed's own loop and the Trainer.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

from tests.stores.servers import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("CKPTD_TESTS_BUILD", REPOSITORY / ".build"))
"""Where saves are kept and trainings wait for each other; another one for each release of DeepSpeed."""
EXTENSIONS = Path(os.environ.get("TORCH_EXTENSIONS_DIR", BUILD / "torch_extensions"))
"""Where DeepSpeed's ops are compiled, as `make` has it: in torch's own place anybody's lock may lie."""
ENVIRONMENT = {
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(REPOSITORY)))),
}
_IMPORTED = ["tests.support.make_ckpt", "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"]
"""What every rank loads sooner or later; the last two, which the first engine loads, cost twice the first."""
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(_IMPORTED)


def expect(*modules: str) -> None:
    """Said by a test module at its import: its ranks load these too; not heard after the first start."""
    _IMPORTED.extend(module for module in modules if module not in _IMPORTED)
    _SERVER.set_forkserver_preload(_IMPORTED)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that run; each has a log of its own."""

    processes: Sequence[multiprocessing.process.BaseProcess]
    logs: Sequence[Path]

    def wait(self, seconds: float) -> None:
        """Until all have ended. The first that fails, or the end of `seconds`, ends the others.

        Raises: RuntimeError with the ends of what the ranks said.
        """
        failed = _outlived(self.processes, seconds)
        if failed:
            tails = "\n".join(path.read_text()[-4000:] for path in self.logs if path.exists())
            raise RuntimeError(f"training failed: {failed}\n{tails}")

    def kill(self) -> None:
        """SIGKILL to all at once: the node goes down."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def start(
    module: str, arguments: Sequence[str], logs: Path, *, nodes: int = 1, ranks: int, children: bool = False
) -> Ranks:
    """`module` in `nodes` x `ranks` processes; what each says stands below `logs` as rank<n>.log.

    `children`: the ranks may start processes of their own, which DeepSpeed's decoupled engine does.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = nodes * ranks
    files = [logs / f"rank{rank}.log" for rank in range(world)]
    started = [
        _fork(module, arguments, files[rank], meeting | _place(rank, world, ranks), is_daemon=not children)
        for rank in range(world)
    ]
    return Ranks(started, files)


def train(
    module: str, arguments: Sequence[str], logs: Path, *, nodes: int = 1, ranks: int, seconds: float
) -> None:
    """The same until all have ended, as `Ranks.wait` says; one after another, whoever runs the tests.

    DeepSpeed's shared-memory collective spins while it waits: two trainings on two cores hinder each other.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _forget_killed_compilers()
        start(module, arguments, logs, nodes=nodes, ranks=ranks).wait(seconds)


def _forget_killed_compilers() -> None:
    """Remove the locks of torch's compilers that no process has open: a load would wait for one for ever.

    A rank that is killed while it compiles one of DeepSpeed's ops leaves it.
    """
    locks = set(EXTENSIONS.glob("*/lock"))
    for opened in Path("/proc").glob("[0-9]*/fd/*") if locks else ():
        with contextlib.suppress(OSError):
            locks.discard(opened.readlink())
    for lock in locks:
        lock.unlink(missing_ok=True)


def run_module(module: str, *arguments: str, log: Path, seconds: float) -> str:
    """`python -m MODULE ARGUMENTS` in one such fork; what it printed, standard error among it."""
    failed = _outlived([_fork(module, arguments, log, {}, is_daemon=False)], seconds)
    said = log.read_text()
    if failed:
        raise RuntimeError(f"{module} failed: {failed}\n{said[-6000:]}")
    return said


def _place(rank: int, world: int, ranks: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(rank // ranks),
        "GROUP_WORLD_SIZE": str(world // ranks),
        "CROSS_RANK": str(rank // ranks),
        "CROSS_SIZE": str(world // ranks),
    }


def _fork(
    module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], *, is_daemon: bool
) -> multiprocessing.process.BaseProcess:
    """A daemon in multiprocessing's sense ends with the test process, and has no such children itself."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    given = {**os.environ, **ENVIRONMENT, "PATH": path, **environment}
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # of the server, should this be the first start
    try:
        process = _SERVER.Process(
            target=_run, args=(module, tuple(arguments), str(log), given), daemon=is_daemon
        )
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return process


def _run(module: str, arguments: tuple[str, ...], log: str, environment: dict[str, str]) -> NoReturn:
    """What a fork does; it ends as make_ckpt.py's ranks do, at once."""
    os.chdir(REPOSITORY)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _outlived(
    started: Sequence[multiprocessing.process.BaseProcess], seconds: float
) -> dict[int, int | None]:
    """Exit codes by rank, when one is not 0; nothing is left running."""
    end = time.monotonic() + seconds
    try:
        running = list(started)
        while running and not any(process.exitcode for process in started):
            left = end - time.monotonic()
            if left <= 0:
                return {rank: process.exitcode for rank, process in enumerate(started)}
            connection.wait([process.sentinel for process in running], left)
            running = [process for process in running if process.is_alive()]
        codes = {rank: process.exitcode for rank, process in enumerate(started)}
        return codes if any(code != 0 for code in codes.values()) else {}
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
            process.join()
