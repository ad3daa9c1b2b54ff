"""Hold the result of inspecting one file: data only, made in a restricted child, cached by identity.

`FileFacts` is the single interface between reading pickles (torchfile, zero) and deciding (lifecycle);
every field that is not known is None, never guessed (docs/design.md §3).
"""

from __future__ import annotations

from enum import StrEnum

from ckptd.base.identity import Model
from ckptd.core.model.layouts import Role, ShardKey
from ckptd.core.model.shard_facts import ShardFacts


class Archive(StrEnum):
    """Name the framing of a file's bytes."""

    ZIP = "zip"
    """A `torch.save` archive, central directory valid, every record inside the file."""
    LEGACY = "legacy"
    """A `torch.save` stream from before torch 1.6, without a directory or CRCs."""
    TORN = "torn"
    EMPTY = "empty"
    OTHER = "other"
    """Not a torch archive and not expected to be one (side files)."""


class TrainerFacts(Model):
    """Hold what `trainer_state.json` of Hugging Face's Trainer says."""

    global_step: int | None = None
    best_metric: float | None = None
    best_checkpoint: str | None = None
    """Last component of best_model_checkpoint: the path itself is as the trainer saw it (H37)."""
    metrics: tuple[tuple[str, float], ...] = ()
    """(name, value) of what `log_history` holds for `global_step`."""


class FileFacts(Model):
    """One file as inspected."""

    path: str
    """Relative to the checkpoint folder, `/`-separated."""
    bytes: int
    archive: Archive
    reason: str | None = None
    """Reason why the archive is torn or the shard's pickle could not be read."""
    fingerprint: str = ""
    """SHA-256 hex (docs/design.md §3 *Fingerprint*); empty for torn and empty files."""
    tensor_fingerprint: str | None = None
    has_crc: bool = False
    role: Role = Role.SIDE
    shard: ShardKey = ShardKey()
    facts: ShardFacts | None = None
    """None for side files, and for shards whose pickle could not be read."""
    trainer: TrainerFacts | None = None
    """Read from `trainer_state.json` alone."""
