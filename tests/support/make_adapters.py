"""Real saves of a model under LoRA by peft, at stages 2 and 3, and peft's own opening of an export.

Two ranks of `python -m tests.support.make_adapters train OUT` (tests/support/ranks.py) write OUT/z2/step,
OUT/z3/step and OUT/named/step (two adapters, none called default), as
DeepSpeed writes them, with `adapter_config.json` in OUT/z… as peft writes it. `… load SAVE_DIR EXPORT`
loads an export by `PeftModel.from_pretrained` and prints a JSON list of what differs from what DeepSpeed's
zero_to_fp32 makes of the save.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from examples.demo.ending import leave


def base() -> torch.nn.Module:
    """The model that is adapted, the same every time."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)]
    return torch.nn.Sequential(*layers)


def adapted() -> Any:
    """A model with LoRA and DoRA on its first layer; the last one is trained as a copy."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"], use_dora=True)
    return get_peft_model(base(), config)


def named() -> Any:
    """A model with two adapters, neither called `default`."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base(), LoraConfig(r=2, target_modules=["0"]), adapter_name="policy")
    model.add_adapter("judge", LoraConfig(r=3, target_modules=["0", "2"]))
    model.base_model.set_adapter(["policy", "judge"])
    return model


def train(out: Path) -> None:
    """One step at each stage, and a save; of two named adapters too."""
    import deepspeed
    import deepspeed.comm as dist

    deepspeed.init_distributed()
    for stage, name in ((2, "z2"), (3, "z3"), (2, "named")):
        model = named() if name == "named" else adapted()
        if dist.get_rank() == 0:
            for adapter, its in model.peft_config.items():
                its.save_pretrained(str(out / name / ("" if adapter == "default" else adapter)))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
        }
        wanted = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=wanted, config=config)
        engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().sum())
        engine.step()
        engine.save_checkpoint(str(out / name), tag="step")
        engine.destroy()
    leave()


def load(save_dir: str, export: str) -> list[str]:
    """Names of the adapter's tensors that peft did not get as zero_to_fp32 says."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from peft import PeftModel

    theirs = get_fp32_state_dict_from_zero_checkpoint(save_dir, "step")
    trained = [n for n in theirs if "lora_" in n or "modules_to_save" in n]
    if any(".policy." in name for name in trained):
        model = PeftModel.from_pretrained(base(), f"{export}/policy", adapter_name="policy")
        model.load_adapter(f"{export}/judge", adapter_name="judge")
        assert len(trained) == 6
    else:
        model = PeftModel.from_pretrained(base(), export)
        assert len(trained) == 5
    mine = model.state_dict()
    return [name for name in trained if not torch.equal(theirs[name], mine[name])]


def main() -> None:
    """See the module's text."""
    verb, *rest = sys.argv[1:]
    if verb == "train":
        train(Path(rest[0]))
    else:
        print(json.dumps(load(*rest)))


if __name__ == "__main__":
    main()
