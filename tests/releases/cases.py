"""The releases and the saves that are tried with each."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.real import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A DeepSpeed release with the Hugging Face packages of its time; None: those of this environment."""

    version: str
    transformers: str | None = None
    accelerate: str | None = None
    tokenizers: str | None = None
    huggingface_hub: str | None = None

    @property
    def requirements(self) -> tuple[str, ...]:
        """What is installed beside it, without dependencies."""
        named = {
            "transformers": self.transformers,
            "accelerate": self.accelerate,
            "tokenizers": self.tokenizers,
            "huggingface_hub": self.huggingface_hub,
        }
        return tuple(f"{name}=={version}" for name, version in named.items() if version)


def _of_the_time(version: str, *of: str) -> Release:
    transformers, accelerate, tokenizers, hub = of
    return Release(
        version=version,
        transformers=transformers,
        accelerate=accelerate,
        tokenizers=tokenizers,
        huggingface_hub=hub,
    )


RELEASES = (
    Release(version="0.19.8"),
    Release(version="0.19.4"),
    _of_the_time("0.19.2", "5.5.4", "1.13.0", "0.22.2", "1.9.2"),
    _of_the_time("0.19.1", "5.5.4", "1.13.0", "0.22.2", "1.9.2"),
    _of_the_time("0.18.9", "5.2.0", "1.12.0", "0.22.2", "1.3.7"),
    _of_the_time("0.18.3", "4.57.3", "1.12.0", "0.22.1", "0.36.0"),
    _of_the_time("0.18.2", "4.57.1", "1.11.0", "0.22.1", "0.36.0"),
    _of_the_time("0.17.6", "4.56.2", "1.10.1", "0.22.0", "0.35.0"),
    _of_the_time("0.16.9", "4.52.4", "1.7.0", "0.21.1", "0.32.0"),
    _of_the_time("0.15.4", "4.46.3", "1.1.1", "0.20.3", "0.26.2"),
    _of_the_time("0.14.5", "4.44.2", "0.33.0", "0.19.1", "0.24.6"),
    _of_the_time("0.14.4", "4.42.4", "0.31.0", "0.19.1", "0.23.4"),
)
"""Twelve: the last release of each minor series since 0.14, and those on the other side of a change that
conversion must know (0.14.4: no loader of stage 3; 0.18.2 and 0.18.3: sub-groups; 0.19.1, 0.19.2 and 0.19.4:
experts). 0.14.4 is also the oldest that TRL takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A save of one layout, and how many ranks load what it becomes."""

    name: str
    recipe: Recipe
    ranks: int = 2


def _dense(name: str, *, stage: int, **more: object) -> Case:
    return Case(name=name, recipe=Recipe(stage=stage, world_size=3, **more))  # type: ignore[arg-type]


CASES = (
    _dense("stage 0, bf16", stage=0),
    _dense("stage 1, bf16", stage=1),
    _dense("stage 2, bf16", stage=2),
    _dense("stage 3, bf16", stage=3),
    _dense("stage 2, fp16", stage=2, dtype="fp16"),
    _dense("stage 3, fp16", stage=3, dtype="fp16"),
    _dense("stage 1, fp32", stage=1, dtype="fp32"),
    _dense("stage 3, fp32", stage=3, dtype="fp32"),
    _dense("stage 1, BF16_Optimizer", stage=1, grad_accum_dtype="fp32"),
    _dense(
        "stage 1, BF16_Optimizer, two groups, tied",
        stage=1,
        grad_accum_dtype="fp32",
        two_groups=True,
        tie=True,
    ),
    _dense("stage 2, two groups, tied", stage=2, two_groups=True, tie=True),
    _dense("stage 3, two groups, tied", stage=3, two_groups=True, tie=True),
    _dense("stage 3, sub-groups", stage=3, sub_group_size=20_000),
    _dense("stage 2, frozen", stage=2, freeze=True),
    _dense("stage 3, frozen", stage=3, freeze=True),
    _dense("stage 2, CPU offload", stage=2, offload=True),
    _dense("stage 3, CPU offload", stage=3, offload=True),
    _dense("stage 2, no universal info", stage=2, universal_info=False),
    _dense("stage 2, round robin", stage=2, round_robin=True),
    Case(name="pipeline 2 x 2, stage 1", recipe=Recipe(stage=1, world_size=4, pipe=2)),
    Case(name="pipeline 2 x 2, stage 0", recipe=Recipe(stage=0, world_size=4, pipe=2)),
    Case(name="experts, ep 2, stage 1", recipe=Recipe(stage=1, world_size=4, moe=4, ep=2)),
    Case(name="experts, ep 2, stage 2", recipe=Recipe(stage=2, world_size=4, moe=4, ep=2)),
)
TRAINER_STAGES = (2, 3)


def trainer_case(stage: int) -> str:
    """Return the name of a save by transformers.Trainer."""
    return f"Trainer, stage {stage}"
