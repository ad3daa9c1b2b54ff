"""The real daemon, or the real child of its remote, that kills itself at its n-th durable call.

`python -m tests.killpoints.victim daemon|remote RUN SIDE N ROOT`: `ckptd run --job ROOT/run.toml --once`,
with its own processes, threads and clock. N = 0 only counts, into ROOT/calls-<who>-<run>; ROOT/died is made
by who dies.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ckptd.base.process import spawn
from ckptd.storage.child import client
from tests.killpoints.seams import Fate, Seams
from tests.killpoints.standins import put

DIED = "died"
_open, _write = os.open, os.write


def main() -> None:
    """Become the victim, or the parent of it."""
    who, run, side, at, root = sys.argv[1:6]
    fate = Fate(int(at), side)
    if who == "remote":
        put(client, "spawn", _starter(run, side, at, root))
    else:
        _install(fate, Path(root), f"calls-{who.removesuffix('-child')}-{run}")
    if who == "remote-child":
        sys.argv = sys.argv[:1] + sys.argv[6:]
        from ckptd.storage.child import child

        child.main()
    from ckptd.cli.main import main as ckptd

    ckptd(["run", "--job", f"{root}/run.toml", "--once"])


def _install(fate: Fate, root: Path, calls: str) -> None:
    log = _open(root / calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    class Told(Seams):
        """Each call leaves a line, so that a process that ends anyhow was counted."""

        def call(self, name: str, real: Any, *args: Any, half: Any = None, **kwargs: Any) -> Any:
            if self.fate.at == 0 and args[:1] != (log,):
                _write(log, name.encode() + b"\n")
            return super().call(name, real, *args, half=half, **kwargs)

    def note(text: str) -> None:
        """It dies now."""
        os.close(_open(root / DIED, os.O_WRONLY | os.O_CREAT, 0o644))

    Told(fate, note).install()


def _starter(run: str, side: str, at: str, root: str) -> Any:
    """The first child of the remote is the victim; those after it are whole."""
    real, started = spawn, [False]

    def start(command: list[str], *args: Any, **more: Any) -> Any:
        if "ckptd.storage.child.child" in command and not started[0]:
            started[0] = True
            given = command[command.index("ckptd.storage.child.child") + 1 :]
            command = [sys.executable, "-m", "tests.killpoints.victim"]
            command += ["remote-child", run, side, at, root, *given]
        return real(command, *args, **more)

    return start


if __name__ == "__main__":
    main()
