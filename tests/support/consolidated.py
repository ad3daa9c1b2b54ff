"""DeepSpeed's own consolidation and transformers' loading, run in a child, beside an export of ours.

`python -m tests.support.consolidated fp32 '[[save_dir, tag, ours], …]'` prints a JSON list of differences
from
zero_to_fp32's state dictionary per case; `… logits '[[checkpoint, ours, dtype], …]'` loads each export with
`AutoModelForCausalLM.from_pretrained` and prints what differs from the trained model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.real import run_module
from tests.support.weights import as_read, read_folder


def differences(verb: str, cases: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """What differs per case; empty when nothing does."""
    out = run_module("tests.support.consolidated", verb, json.dumps(cases))
    found: list[list[str]] = json.loads(out.splitlines()[-1])
    return found


def stock_state_dict(save_dir: str, tag: str) -> dict[str, Any]:
    """What zero_to_fp32 makes of a save."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(save_dir, tag)
    return found


def _fp32(save_dir: str, tag: str, ours: str) -> list[str]:
    """Every tensor by type, shape and bytes.

    The stock tool turns integer buffers into floats, leaves frozen parameters in 16 bits and writes tied
    tensors under each name: that is evened out here.
    """
    import torch

    try:
        theirs = stock_state_dict(save_dir, tag)
    except Exception as error:
        return [f"zero_to_fp32 fails: {error!r}"]
    mine = read_folder(Path(ours))
    wrong: list[str] = []
    twins: dict[int, str] = {}
    for name, tensor in theirs.items():
        is_tied = twins.setdefault(tensor.data_ptr(), name) != name and tensor.numel() > 0
        if name not in mine:
            wrong += [] if is_tied else [f"{name} is not exported"]
            continue
        if is_tied:
            wrong.append(f"{name} is exported beside {twins[tensor.data_ptr()]}")
        expected = tensor.long() if mine[name].dtype == "I64" else tensor.to(torch.float32)
        if as_read(expected) != mine[name]:
            wrong.append(f"{name} differs")
    return wrong + [f"{name} is only exported" for name in mine if name not in theirs]


def _logits(checkpoint: str, ours: str, dtype: str) -> list[str]:
    """Loaded as users do, against the Trainer's weights, or zero_to_fp32's where it saved none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    trained: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    trained.load_state_dict(
        {
            n: t.float()
            for n, t in stock_state_dict(checkpoint, Path(checkpoint, "latest").read_text()).items()
        }
    )
    trained.to(getattr(torch, dtype)).eval()
    loaded, info = AutoModelForCausalLM.from_pretrained(
        ours, dtype=getattr(torch, dtype), output_loading_info=True
    )
    ids = torch.arange(24).reshape(2, 12) % config.vocab_size
    with torch.no_grad():
        equal = torch.equal(trained(ids).logits, loaded.eval()(ids).logits)
    wrong = [f"{key}: {value}" for key, value in info.items() if value]
    return wrong + ([] if equal else ["the logits differ"])


def main() -> None:
    """One verb for a list of cases."""
    verb = {"fp32": _fp32, "logits": _logits}[sys.argv[1]]
    found = [verb(*case) for case in json.loads(sys.argv[2])]
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
