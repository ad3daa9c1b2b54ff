"""A child of a conversion that kills itself at its n-th change of the disk, or in the middle of a copy (P7).

`python -S -c PRELUDE N MODULE …`: wraps the calls that change the disk, then runs the module as the real
child is run. No ptrace, no environment, no change to the product.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

from ckptd.conversion.engine import children

PRELUDE = """
import itertools, os, runpy, signal, sys
target, module = int(sys.argv[1]), sys.argv[2]
count = itertools.count(1)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wrap(owner, name, half=None):
    real = getattr(owner, name)
    def dying(*args, **kwargs):
        if name == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        if next(count) == target:
            if half is not None:
                half(real, *args, **kwargs)
            die()
        return real(*args, **kwargs)
    setattr(owner, name, dying)

def half_copy(real, src, dst, length, **kwargs):
    real(src, dst, max(1, length // 2), **kwargs)

for name in ("open", "mkdir", "ftruncate", "fchmod", "fsync", "rename", "link", "unlink", "rmdir"):
    wrap(os, name)
wrap(os, "pwrite", lambda real, fd, data, at: real(fd, data[: len(data) // 2], at))
wrap(os, "copy_file_range", half_copy)
from ckptd.base import extents, files
wrap(files, "rename_noreplace")
if module.endswith("planner_child"):
    from ckptd.conversion.plan import PlanWriter
    wrap(PlanWriter, "_line")
if hasattr(extents, "clone_range"):
    wrap(extents, "clone_range")
sys.argv = [module, *sys.argv[3:]]
runpy.run_module(module, run_name="__main__")
"""


def starting(child: str, number: int) -> Callable[..., subprocess.Popen[bytes]]:
    """A stand-in for `children.start` whose `child` dies at its `number`-th change."""
    real = children.start

    def start(module: str, *, stdout: int | IO[bytes], stderr: int | IO[bytes], **rest: Any) -> Any:
        if module != child:
            return real(module, stdout=stdout, stderr=stderr, **rest)
        options = ["-E", "-s", "-S", "-X", "utf8"]
        return subprocess.Popen(
            [sys.executable, *options, "-c", PRELUDE, str(number), f"ckptd.conversion.engine.{module}"],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            cwd=children.PACKAGE_PARENT,
            env={},
            start_new_session=True,
        )

    return start


def command(number: int, *arguments: str) -> list[str]:
    """`ckptd ARGUMENTS` whose own process (not its children) dies at its `number`-th change."""
    return [sys.executable, "-c", PRELUDE, str(number), "ckptd", *arguments]
