"""make_ckpt.py with what only mixtures of experts need: the other order of ranks, and AutoEP over a Mixtral.

Started as make_ckpt.py is; a job's recipe has two keys more: `in_blocks`
(use_data_before_expert_parallelism) and `auto` (AutoEP's expert-parallel size; 0 = native).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support import make_ckpt

EXPERTS = 4
_config, _network = make_ckpt.ds_config, make_ckpt.network


def ds_config(r: dict[str, Any], dp: int, *, universal: bool) -> dict[str, Any]:
    """The configuration of make_ckpt.py and what the two keys add."""
    config = _config(r, dp, universal=universal)
    if r["in_blocks"]:
        config["use_data_before_expert_parallelism"] = True
    if r["auto"]:
        preset = {"enabled": True, "preset_model": "mixtral", "use_grouped_mm": False}
        config["expert_parallel"] = {**preset, "autoep_size": r["auto"]}
    return config


def network(r: dict[str, Any]) -> nn.Module:
    """A tiny Mixtral for AutoEP, else make_ckpt.py's."""
    if not r["auto"]:
        return _network(r)
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import output_capturing

    # DeepSpeed 0.19.8 gives this registry's get a default, which transformers 5.23 does not take.
    registry: Any = type(output_capturing._CAN_RECORD_REGISTRY)
    plain = registry.get
    registry.get = lambda self, key, *default: (dict.get if isinstance(key, str) else plain)(
        self, key, *default
    )

    shape = {"hidden_size": r["hidden"], "intermediate_size": r["hidden"], "num_hidden_layers": r["layers"]}
    shape |= {"num_attention_heads": r["heads"], "num_key_value_heads": r["heads"] // 2}
    limits = {"vocab_size": r["vocab"], "max_position_embeddings": make_ckpt.SEQ, "use_cache": False}
    return MixtralForCausalLM(
        MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=2, **shape, **limits)
    )


if __name__ == "__main__":
    make_ckpt.ds_config, make_ckpt.network = ds_config, network
    make_ckpt.main()
