"""Names of PEFT's adapters: the adapter that a parameter belongs to, and what `save_pretrained` calls it.

In a model's state dictionary the adapter's name follows the tuner's part, `….lora_A.default.weight`; in
`adapter_model.safetensors` it is left out, `….lora_A.weight`, because PEFT puts in the name that the adapter
is loaded under (docs/formats.md §8).
"""

from __future__ import annotations

import re

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
DEFAULT = "default"
"""The adapter that `save_pretrained` writes into the folder itself; every other has a folder of its name."""
_TUNER = re.compile(
    r"(?P<head>base_model\..+?)\.(?P<part>(?:lora|ia3|oft|boft|vera|hada|lokr|randlora|trainable_tokens)_\w+)"
    r"\.(?P<adapter>[^.]+)(?P<rest>\..+)?"
)
_COPY = re.compile(r"(?P<head>base_model\..+?)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_MAGNITUDE = "lora_magnitude_vector"


def adapter_place(name: str) -> tuple[str, str] | None:
    """Return the file and the name in it of an adapter's parameter; None: it is the base model's."""
    if copied := _COPY.fullmatch(name):
        return _file_of(copied["adapter"]), f"{copied['head']}.{copied['rest']}"
    found = _TUNER.fullmatch(name)
    if found is None:
        return None
    # DoRA's vector became a module with a weight; PEFT keeps the older name in files
    rest = "" if found["part"] == _MAGNITUDE else found["rest"] or ""
    return _file_of(found["adapter"]), f"{found['head']}.{found['part']}{rest}"


def _file_of(adapter: str) -> str:
    return ADAPTER_FILE if adapter == DEFAULT else f"{adapter}/{ADAPTER_FILE}"
