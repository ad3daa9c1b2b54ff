"""The small files that a loader wants beside exported weights: configuration, tokenizer, chat template.

Trainers on Hugging Face's shoulders write them into the folder that holds the shards, or the one above
(docs/formats.md §1.2, §8). They are read and copied like shards, never changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.convert.adapters import ADAPTER_CONFIG
from ckptd.convert.workplace import is_file
from ckptd.real import opened_real

if TYPE_CHECKING:
    from ckptd.convert.workplace import SourceFolder

CONFIGS = frozenset({"config.json", ADAPTER_CONFIG})
"""One of these makes a folder the trainer's: a model's configuration, or that of PEFT's adapters."""
MARKS = ("latest", "trainer_state.json")
"""A folder above the shards counts when it has one of these: it is the shards' save_dir or checkpoint-N."""
_COMPANION = re.compile(
    r"(?:config|adapter_config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|chat_template|processor_config|preprocessor_config|video_preprocessor_config)\.json"
    r"|chat_template\.jinja|merges\.txt|vocab\.txt|(?:tokenizer|spiece|sentencepiece|sentencepiece\.bpe)\.model"
    r"|(?:configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a conversion reads: shards at `root`/`prefix`…, and `companions`, names in `root`."""

    root: str
    prefix: str
    companions: tuple[str, ...]


def is_companion(name: str) -> bool:
    """True for a file name that exported weights take along."""
    return _COMPANION.fullmatch(name) is not None


def look_around(folder: SourceFolder) -> Origin:
    """The folder of the shards, or the one above, when a configuration lies there."""
    parent, name = os.path.split(folder.path)
    here = _companions(folder.path)
    if CONFIGS & here:
        return Origin(folder.path, "", tuple(sorted(here)))
    above = _companions(parent) if name else set()
    if CONFIGS & above and any(is_file(os.path.join(parent, mark)) for mark in MARKS):
        return Origin(parent, f"{name}/", tuple(sorted(above)))
    return Origin(folder.path, "", ())


def _companions(folder: str) -> set[str]:
    # a folder above that may be crossed and not listed (mode 0711) has nothing to give
    with contextlib.suppress(PermissionError), opened_real(folder) as fd:
        return {
            entry
            for entry in os.listdir(fd)
            if is_companion(entry) and stat.S_ISREG(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode)
        }
    return set()
