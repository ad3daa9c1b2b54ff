"""Put ckptd in the place of `deepspeed.checkpoint.ds_to_universal.main`, in every process of the suite.

The suite converts inside processes that a forkserver starts and that import the test module anew, so no
fixture of the parent reaches them; Python imports this file in each of them, before anything else. Two
checks that want a GPU are answered for the CPU too: bf16 and fp16 work here, if slowly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.support.changed_modules import change_modules


def _convert(arguments: Any, *_: Any, **__: Any) -> None:
    """`ckptd convert` for the suite's namespace; the exit code decides."""
    command = ["convert", arguments.input_folder, arguments.output_folder]
    command += ["--compat", os.environ["DS_SUITE_COMPAT"], "--verify"]
    command += [] if arguments.strict else ["--no-strict"]
    command += ["--inject-missing-state"] if arguments.inject_missing_state else []
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", *command],
        cwd=os.environ["DS_SUITE_CKPTD"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    with open(os.environ["DS_SUITE_LOG"], "a", encoding="utf-8") as log:  # one short line: appended whole
        log.write(f"{done.returncode} {arguments.input_folder}\n")
    if done.returncode != 0:
        raise RuntimeError(f"ckptd convert: exit {done.returncode}\n{done.stdout}\n{done.stderr}")


def _converter(module: ModuleType) -> None:
    stock = vars(module)["main"]

    def main(arguments: Any, *more: Any, **named: Any) -> None:
        # a test of stock from the inside gives fewer arguments than any conversion
        (_convert if hasattr(arguments, "strict") else stock)(arguments, *more, **named)

    vars(module)["main"] = main


def _bf16(module: ModuleType) -> None:
    vars(module)["bf16_required_version_check"] = lambda accelerator_check=True: True


def _fp16(module: ModuleType) -> None:
    vars(module)["CPU_Accelerator"].is_fp16_supported = lambda self: True


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "deepspeed.checkpoint.ds_to_universal": _converter,
    "unit.util": _bf16,
    "deepspeed.accelerator.cpu_accelerator": _fp16,
    "accelerator.cpu_accelerator": _fp16,
}

if "DS_SUITE_LOG" in os.environ:
    change_modules(CHANGES)
