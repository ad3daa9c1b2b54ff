"""The launch commands of each trainer as its users type them, and where it says its losses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANKS, OTHER_RANKS = 2, 1
BATCH = 8
"""Of all ranks together: what a resume on another number of ranks must keep."""
STEPS, SAVE_STEPS = 400, 10
ALLOWED_DIFFERENCE = 0.02
"""Of losses: bf16 sums gradients of other ranks in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of training; `resume`: the path that `ckptd resume` printed."""

    bin: Path
    """The folder with the trainer's programs."""
    out: Path
    ranks: int
    port: int
    resume: Path | None = None

    @property
    def is_universal(self) -> bool:
        """Whether DeepSpeed must load the universal form: the number of ranks is another one."""
        return self.resume is not None and self.ranks != RANKS

    def torchrun(self, script: str) -> list[str]:
        """Return `torchrun … SCRIPT` for this number of ranks, by its module's name."""
        command = [str(self.bin / "python"), "-m", "torch.distributed.run"]
        return [*command, "--nproc_per_node", str(self.ranks), "--master_port", str(self.port), script]

    def config(self, name: str) -> str:
        """Return the name of a configuration, or of its twin with `load_universal`."""
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}_universal{dot}{suffix}" if self.is_universal else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one trainer is started; nothing of it knows ckptd."""

    package: str
    """Whose version is shown."""
    command: Callable[[Launch], list[str]]
    save_dir: str = ""
    """Below the trainer's output folder; the first argument of `ckptd run`."""
    loss: re.Pattern[str] = field(default=re.compile(r"'loss': '?([0-9.]+)"))
    extra: str | None = None
    """The environment of its own that `make demo-frameworks` makes; None: that of ckptd's tests."""
    folder: str = ""
    """Of the launch file; default: the recipe's name."""
    prepare: str = ""
    """A script that writes what training reads, into a folder that it is given."""


def _trainer(launch: Launch, script: str) -> list[str]:
    """Return what starts a script of the Hugging Face Trainer."""
    options = [
        *("--output_dir", str(launch.out), "--deepspeed", launch.config("../ds_zero2.json")),
        *("--max_steps", str(STEPS), "--save_steps", str(SAVE_STEPS), "--logging_steps", "1"),
        *("--per_device_train_batch_size", str(BATCH // launch.ranks)),
        *("--learning_rate", "2e-3", "--lr_scheduler_type", "constant"),
        *("--bf16", "true", "--use_cpu", "true", "--disable_tqdm", "true"),
    ]
    if launch.resume is not None:
        options += ["--resume_from_checkpoint", str(launch.resume)]
    return [*launch.torchrun(script), *options]


def _accelerate(launch: Launch) -> list[str]:
    command = [
        *(str(launch.bin / "accelerate"), "launch", "--config_file", launch.config("zero2.yaml")),
        *("--main_process_port", str(launch.port), "train_loop.py"),
        *("--project_dir", str(launch.out), "--batch_size", str(BATCH // launch.ranks)),
        *("--max_steps", str(STEPS), "--save_steps", str(SAVE_STEPS)),
    ]
    return command if launch.resume is None else [*command, "--resume_from_checkpoint", str(launch.resume)]


def _trl(launch: Launch) -> list[str]:
    command = _trainer(launch, "sft.py")
    tiny = launch.out.parent / "tiny"
    return [*command, "--model_name_or_path", str(tiny / "model"), "--dataset_name", str(tiny / "data")]


def _lightning(launch: Launch) -> list[str]:
    command = [
        *launch.torchrun("train_lightning.py"),
        *("--dirpath", str(launch.out), "--devices", str(launch.ranks)),
        *("--batch_size", str(BATCH // launch.ranks), "--config", launch.config("ds_zero2.json")),
    ]
    return command if launch.resume is None else [*command, "--ckpt_path", str(launch.resume)]


def _yaml(launch: Launch, file: str, batch_key: str) -> list[str]:
    command = [
        *(*launch.torchrun("train_yaml.py"), file, f"output_dir={launch.out}"),
        *(f"{batch_key}={BATCH // launch.ranks}", f"deepspeed={launch.config('../ds_zero2.json')}"),
    ]
    return command if launch.resume is None else [*command, f"resume_from_checkpoint={launch.resume}"]


_STEP_LINE = re.compile(r"step \d+ loss ([0-9.]+)")
EXTRA = "frameworks"

RECIPES = {
    "hf_trainer": Recipe(package="transformers", command=lambda launch: _trainer(launch, "train_gpt2.py")),
    "accelerate": Recipe(package="accelerate", command=_accelerate, save_dir="checkpoints", loss=_STEP_LINE),
    "peft": Recipe(package="peft", command=lambda launch: _trainer(launch, "train_lora.py")),
    "axolotl_style": Recipe(
        package="peft",
        folder="yaml_style",
        command=lambda launch: _yaml(launch, "axolotl.yaml", "micro_batch_size"),
    ),
    "llamafactory_style": Recipe(
        package="transformers",
        folder="yaml_style",
        command=lambda launch: _yaml(launch, "llamafactory.yaml", "per_device_train_batch_size"),
    ),
    "trl": Recipe(package="trl", command=_trl, prepare="tiny.py", extra=EXTRA),
    "lightning": Recipe(
        package="lightning",
        command=_lightning,
        loss=_STEP_LINE,
        extra=EXTRA,
    ),
}
