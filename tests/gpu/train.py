"""Train as tests.support.make_ckpt does, on the GPU: `python -m tests.gpu.train JOBS.json`, one rank.

The accelerator is chosen before that module asks for the CPU, and batches are moved to the device.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda")

import torch
from deepspeed.accelerator import get_accelerator

get_accelerator()

from tests.support import make_ckpt  # noqa: E402
from tests.support.make_engines import merged  # noqa: E402

_batch_on_the_cpu = make_ckpt.batch_for
_build_on_the_cpu = make_ckpt.build
_config = make_ckpt.ds_config
_run = make_ckpt.run
setting: dict[str, Any] = {}


def batch_on_the_device(vocab: int, step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same tokens and labels, on the GPU."""
    ids, labels = _batch_on_the_cpu(vocab, step, first, last)
    device = get_accelerator().current_device_name()
    return ids.to(device), labels.to(device)


def build_and_time(r: dict[str, Any], config: dict[str, Any], init_seed: int) -> Any:
    """Return the engine, which says how long each of its saves blocks the training."""
    engine = _build_on_the_cpu(r, config, init_seed)
    save = engine.save_checkpoint

    def timed(*words: Any, **options: Any) -> Any:
        get_accelerator().synchronize()
        started = time.monotonic()
        answer = save(*words, **options)
        print(f"saved in {time.monotonic() - started:.2f} s", flush=True)
        return answer

    engine.save_checkpoint = timed
    return engine


def config_with_setting(r: dict[str, Any], dp: int, *, universal: bool) -> dict[str, Any]:
    """Return make_ckpt's configuration with the job's setting."""
    return merged(_config(r, dp, universal=universal), setting)


def run_with_setting(job: dict[str, Any]) -> Any:
    """Run make_ckpt's job with the setting that it names."""
    global setting
    setting = job["setting"]
    return _run(job)


if __name__ == "__main__":
    make_ckpt.ds_config = config_with_setting
    make_ckpt.run = run_with_setting
    make_ckpt.batch_for = batch_on_the_device
    make_ckpt.build = build_and_time
    make_ckpt.main()
