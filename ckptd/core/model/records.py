"""Rows of the journal as models: what is remembered of saves, objects under way and deletions (P7, P8)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ckptd.base.identity import FolderIdentity, Model
from ckptd.core.model.manifest import Proof
from ckptd.core.model.save import SealedFile, SealedSave
from ckptd.core.policy.view import UNIVERSAL, DerivedRecord

SaveState = Literal["present", "superseded", "vanished", "pruned"]


class SaveRow(Model):
    """A row of `saves`."""

    id: int
    save: SealedSave
    state: SaveState
    found_first: bool
    adopted: bool
    held: bool
    derived: DerivedRecord
    """The universal form."""
    weights: dict[str, DerivedRecord] = Field(default_factory=dict)
    """By form."""
    seen_at: float
    sealed_at: float
    ended_at: float | None

    def derived_of(self, form: str) -> DerivedRecord:
        """Where a derived form stands on this node."""
        return self.derived if form == UNIVERSAL else self.weights.get(form) or DerivedRecord()


class ObjectRow(Model):
    """Progress of one object of a ship: `proof` set when it is durable and verified."""

    key: str
    bytes: int
    flushed_bytes: int
    crc64: str
    proof: Proof | None
    token: str = ""
    """The store's words for an upload that is not finished (S3: part size and upload id)."""


class DeletionIntent(Model):
    """What a prune was going to do, written before the folder is renamed aside."""

    tag: str
    generation: int
    folder: FolderIdentity
    files: tuple[SealedFile, ...]
    commits: tuple[tuple[str, str, str], ...]
    """(remote, key, sha256)."""
    reason: str


class DeletionRow(Model):
    """A row of `deletions`."""

    id: int
    save_id: int
    trash: str
    intent: DeletionIntent
