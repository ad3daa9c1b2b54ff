"""Model the rows of the journal: saves, uploads, derived forms, objects and deletions."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from ckptd.base.identity import FolderIdentity, Model
from ckptd.core.model.manifest import Proof
from ckptd.core.model.save import SealedFile, SealedSave

ZERO = "zero"


UNIVERSAL = "universal"


WEIGHTS = ("weights-fp32", "weights-bf16", "weights-fp16")
"""Forms that remotes alone hold: they never lie here (docs/adr/0093)."""


class UploadState(StrEnum):
    """Name the state of one form of one save on one remote."""

    NEW = "new"
    UPLOADING = "shipping"
    WAITING = "waiting"
    """Uploaded; other nodes' shards are missing."""
    COMMITTED = "committed"
    DELETED = "retired"
    """Was committed; remote retention deleted it."""
    FAILED = "failed"
    REFUSED = "refused"


SETTLED = (UploadState.COMMITTED, UploadState.DELETED, UploadState.REFUSED)
"""Nothing is left to do or to find out about it."""


class SupplementRecord(Model):
    """A SUPPLEMENT beside a COMMIT, and what it lists: (path, bytes, fingerprint)."""

    key: str
    sha256: str
    files: tuple[tuple[str, int, str], ...]


class UploadRecord(Model):
    """Journal row: one form of one save on one remote."""

    remote: str
    form: str
    state: UploadState = UploadState.NEW
    generation: int | None = None
    attempt: int = 1
    commit_key: str | None = None
    commit_sha256: str | None = None
    tries: int = 0
    retry_at_seconds: float = 0.0
    """Monotonic; not stored."""
    reason: str | None = None
    hint: str = ""
    """Advice about the reason."""
    is_damaged: bool = False
    """An upload found other bytes than were written, here or in what the remote holds to make a form of."""
    unlisted: tuple[str, ...] = ()
    """Files of the folder that the COMMIT does not list: they stay, and the folder with them (H8)."""
    bytes_sent: int = 0
    supplements: tuple[SupplementRecord, ...] = ()
    """Supplements of that COMMIT that list a file of this folder."""


class DerivedState(StrEnum):
    """Name the state of a derived form of a save on this node."""

    NONE = "none"
    CONVERTING = "converting"
    READY = "ready"
    REFUSED = "refused"
    FAILED = "failed"


class Comparison(Model):
    """Record how far the masters of a form were compared with the model's weights (docs/adr/0212)."""

    tensors: int = 0
    """Tensors whose masters round to the weights, and their elements."""
    elements: int = 0
    not_compared: tuple[str, ...] = ()
    """Trained tensors that were not compared: how many of them, and why."""


class DerivedRecord(Model):
    """Journal row: a derived form of a save on this node."""

    state: DerivedState = DerivedState.NONE
    plan_sha256: str = ""
    layout: str = ""
    alignment: int = 0
    is_cloned: bool = False
    is_source_verified: bool = False
    comparison: Comparison | None = None
    """None: it was made by another node or an older release, or before this journal."""
    bytes: int = 0
    tries: int = 0
    lacks: int = 0
    """Times that this node's disk refused; that passes, and does not count as a try."""
    retry_at_seconds: float = 0.0
    """Monotonic; reset by a restart."""
    reason: str | None = None
    hint: str = ""


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
    """Form of weights → its record."""
    seen_at: float
    sealed_at: float
    ended_at: float | None

    def derived_of(self, form: str) -> DerivedRecord:
        """Return the record of a derived form on this node."""
        return self.derived if form == UNIVERSAL else self.weights.get(form) or DerivedRecord()


class ObjectRow(Model):
    """Progress of one object of a upload: `proof` set when it is durable and verified."""

    key: str
    bytes: int
    flushed_bytes: int
    crc64: str
    proof: Proof | None
    token: str = ""
    """The store's words for an upload that is not finished (S3: part size and upload id)."""


class DeletionIntent(Model):
    """Record a deletion before the folder is renamed aside, so that it can be finished after a crash."""

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
