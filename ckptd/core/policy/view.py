"""Hold the planner's input for one job: plain data gathered by the deciding thread before each turn.

Planning asks for nothing beyond it, so that the same view always gives the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from ckptd.core.model.records import UNIVERSAL, DerivedRecord, UploadRecord
from ckptd.core.model.save import Best, Order, SealedFile, SealedSave
from ckptd.core.policy.retention import RetentionPolicy, Unuploaded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptd.core.model.listing import ListedFile
    from ckptd.core.model.resume_marker import ResumeMarker

BEGUN_FACTOR = 1.25
"""An upload under way goes on while it is late by no more than this factor: estimates vary."""


HERE = ""
"""Name of this node's disk among the places of copies; a remote's is never empty."""
WEIGHTS_SHARE = {"weights-fp32": 1 / 3, "weights-bf16": 1 / 6, "weights-fp16": 1 / 6}
"""Bytes of a model beside those of its ZeRO form, at most: masters and two moments in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRef:
    """Identify a COMMIT that a permit rests on, freshly read from `remote`."""

    remote: str
    key: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Hold the planner's input for a drain."""

    seconds_left: float
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Remote → bytes per second, as last measured; a remote of which nothing is known is missing."""
    left_bytes: Mapping[tuple[int, str, str], int] = field(default_factory=dict)
    """(save id, remote, form) → bytes that are still to be sent, where it was begun."""

    def needs_seconds(self, remote: RemoteView, save: SaveView, form: str) -> float:
        """Return the seconds that an upload takes at the known speed of the link; one under way is given some
        patience."""
        whole = save.save.total_bytes * WEIGHTS_SHARE.get(form, 1.0)
        seconds = self.left_bytes.get((save.id, remote.name, form), whole) / self.speeds[remote.name]
        is_begun = (remote.uploading_save_id, remote.uploading) == (save.id, form)
        return seconds / BEGUN_FACTOR if is_begun else seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalRequest:
    """Hold the planner's input for `ckptd rm`: what a person named to be deleted (docs/adr/0199)."""

    tags: tuple[str, ...]
    is_here: bool
    """True: delete it from this node's disk."""
    remotes: frozenset[str]
    is_remote_named: bool = False
    """The person named the remotes: that other nodes need what they hold was considered."""
    agreed: frozenset[str] | None = None
    """Digests of the COMMITs that the person saw and agreed to; None: only asked what would be deleted."""
    by: str = ""
    is_alone: bool = False
    """Nothing else is done: no daemon watches the job, the command itself works under its lock."""


# --- The disk of save_dir --------------------------------------------------------------------------------


def next_save_bytes(saves_bytes: Iterable[int]) -> int:
    """Estimate the size of the next save by earlier ones: the largest and a tenth (P13: the trainer never
    lacks space).
    """
    return int(max(saves_bytes, default=0) * 1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Hold the file system of save_dir, in bytes; `reserve_bytes` = next save × 1.1 + min_free."""

    free_bytes: int
    reserve_bytes: int
    can_clone: bool
    min_free_bytes: int = 0
    free_files: int | None = None
    """Inodes that are left; None: this file system has no such limit (btrfs)."""
    reserve_files: int = 0
    """Those of the next save."""

    @property
    def lacks_files(self) -> bool:
        """Tell whether the files of the next save would not fit, however many bytes are free."""
        return self.free_files is not None and self.free_files < self.reserve_files

    @property
    def is_short(self) -> bool:
        """Tell whether the next save would not fit beside `min_free`: then ckptd frees space."""
        return self.free_bytes < self.reserve_bytes

    @property
    def is_full(self) -> bool:
        """Tell whether less than `min_free` is left: then unfinished conversions are deleted too."""
        return self.free_bytes < self.min_free_bytes


# --- Saves, remotes and the job --------------------------------------------------------------------------


_NOT_MADE = DerivedRecord()


@cache
def _new_record(remote: str, form: str) -> UploadRecord:
    return UploadRecord(remote=remote, form=form)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveView:
    """Hold a sealed save that this node has or had."""

    id: int
    save: SealedSave
    is_adopted: bool
    """False: found at the first start and not adopted; never deleted."""
    was_found_first: bool
    is_intact: bool
    """Every sealed file is still there with its identity."""
    is_present: bool
    """The folder is there at all."""
    has_unlisted: tuple[str, ...] = ()
    """Files in the folder that were not sealed."""
    late: tuple[SealedFile, ...] = ()
    """Files that appeared after it was sealed, as they are now."""
    lacking: Mapping[str, tuple[SealedFile, ...]] = field(default_factory=dict)
    """Remote with its COMMIT → files of the folder that neither the COMMIT nor a supplement lists."""
    added: tuple[SealedFile, ...] = ()
    """Derived files that our `resume` put in: they go with the folder."""
    is_held: bool = False
    is_busy: bool = False
    """Being read by a worker (uploaded, converted, cloned)."""
    is_pinned: bool = False
    is_pruned: bool = False
    """We deleted the folder, under a permit; what was derived from it may stay (docs/adr/0094)."""
    uploads: Mapping[tuple[str, str], UploadRecord] = field(default_factory=dict)
    universal: DerivedRecord = field(default_factory=DerivedRecord)
    weights: Mapping[str, DerivedRecord] = field(default_factory=dict)
    """Form → what is known of making it; the weights themselves are not kept here."""
    order: Order = field(init=False, compare=False)
    """Order of the save, computed once: a plan of thousands asks a dozen times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.save.order)

    @property
    def is_model_only(self) -> bool:
        """Weights alone: kept apart from what can be resumed from."""
        return self.save.grid.is_model_only

    @property
    def is_convertible(self) -> bool:
        """Tell whether all of its shards are here, of a ZeRO checkpoint."""
        return self.save.grid.has_shards and not self.save.is_part

    @property
    def is_self_contained(self) -> bool:
        """Tell whether the universal form loads alone; trainers' layouts have files beside it (ADR 0050)."""
        return self.save.roots == ("",)

    def derived(self, form: str) -> DerivedRecord:
        """Return the record of a derived form on this node."""
        return self.universal if form == UNIVERSAL else self.weights.get(form) or _NOT_MADE

    def upload(self, remote: str, form: str) -> UploadRecord:
        """Return the record of an upload, or a new one."""
        known = self.uploads.get((remote, form))
        return known if known is not None else _new_record(remote, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCommit:
    """Hold a COMMIT as last observed."""

    tag: str
    generation: int
    form: str
    branch: int
    step: int
    save_seq: int
    key: str
    sha256: str
    bytes: int = 0
    is_model_only: bool = False
    committed_at_seconds: float | None = None
    """Unix time that the COMMIT carries; None: it carries none that can be read."""
    best: Best | None = None
    best_tag: str | None = None
    """The tag that its trainer called the best so far."""
    is_self_contained: bool = True
    """It can be used when the other forms of its generation are gone."""
    config_digest: str = ""
    """Configuration that its nodes share; empty: they disagree."""
    nodes: frozenset[str] = frozenset()
    """Nodes whose manifests it lists."""
    order: Order = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", Order(self.branch, self.step, self.save_seq))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteView:
    """One remote as last observed."""

    name: str
    is_required: bool
    forms: tuple[str, ...]
    is_attached: bool
    """There, ours, observed, and not backing off."""
    is_busy: bool
    """Its one transfer (an upload or a deletion) is under way, or none is tried for a while."""
    was_heard: bool = True
    """Observed since the start: what people decided on other nodes before that is known."""
    uploading: str | None = None
    """The form that is being uploaded."""
    uploading_save_id: int | None = None
    """Id of the save that is uploaded; None: none is."""
    uploading_early: tuple[str, ListedFile] | None = None
    """Tag and shard that are uploaded before their save is whole."""
    not_early: frozenset[tuple[str, ListedFile]] = frozenset()
    """Those that were uploaded so, or cannot be."""
    commits: tuple[RemoteCommit, ...] = ()
    known_tags: frozenset[str] = frozenset()
    """Tags with commits, tombstones or manifests: must be described before they are uploaded."""
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    deleting_tags: frozenset[str] = frozenset()
    """Tags of which a deletion was begun there and is not finished."""
    deletions_left: int = 3
    """Its own hourly limit: each save brings one removal to each remote (adr/0127)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAnswer:
    """Hold the answer of `choose_generation` for one save on one remote."""

    generation: int
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Fresh reads of the COMMITs of one save, on every required remote, all well."""

    commits: tuple[CommitRef, ...]
    at_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    """Hold the lease of a job on a shared directory, as one host knows it."""

    holds_lease: bool
    """Read back a short while ago by this host's monotonic clock, which a stopped process does not escape."""
    until_seconds: float = 0.0
    """Monotonic: after this nothing is deleted or converted before the lease is read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """Everything the planner needs of one job."""

    saves: tuple[SaveView, ...]
    remotes: tuple[RemoteView, ...]
    local_forms: tuple[str, ...]
    local_retention: RetentionPolicy
    existing: str
    latest: str | None
    """Content of the trainer's pointer file."""
    latest_universal: str | None
    is_save_in_flight: bool
    is_first_scan: bool
    """Nothing is deleted in the first scan after a start."""
    is_paused: bool
    """A person paused the job: transfers, conversions and removals rest."""
    may_delete: bool
    """Access rights proved, same device as before, deletion rate limit not reached."""
    deletions_left: int
    """The deletion rate limit for this node's disk: checkpoints that may still be deleted in this hour."""
    disk: Disk
    generations: Mapping[tuple[int, str, str], GenerationAnswer]
    """(save id, remote, form) → generation, for saves whose tag the remote knows."""
    confirmations: Mapping[int, Confirmation]
    is_converting: bool
    now_seconds: float
    unuploaded: Unuploaded = "keep"
    """The job file's rule for checkpoints that are not committed."""
    metric: str | None = None
    """Metric that keep_best compares."""
    is_higher_better: bool = False
    pinned_tags: frozenset[str] = frozenset()
    """Pinned tags, also those of which no save is on this node."""
    damaged: frozenset[tuple[str, str, str]] = frozenset()
    """(remote or HERE, tag, form) of what is damaged, or cannot be read, there."""
    damaged_tags: frozenset[str] = field(init=False, compare=False)
    """Checkpoints of which retention deletes no copy: a sound one may repair the damaged one."""
    not_to_delete: frozenset[int] = frozenset()
    """Ids of saves whose deletion from this node failed a short while ago."""
    not_to_upload_late: frozenset[tuple[int, str]] = frozenset()
    """(save id, remote) whose late files that remote did not take a short while ago, though it works."""
    not_to_delete_remotely: frozenset[tuple[str, str]] = frozenset()
    """(remote, digest) of COMMITs that the remote refused to delete a short while ago."""
    drain: Drain | None = None
    """The node is about to go; comes before a pause."""
    removal: RemovalRequest | None = None
    config_digest: str = ""
    """Digest of what all nodes of the job must agree on; empty: not compared."""
    node: str = ""
    """This node's name."""
    due_since_seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(remote, COMMIT key) → since when nothing has kept it here; monotonic."""
    lease: LeaseStatus | None = None
    """save_dir is shared by hosts (adr/0110); None: it is this host's alone."""
    is_spread: bool = False
    """Other nodes of this run are known, which may hold the rest of a part."""
    resumed: ResumeMarker | None = None
    """Checkpoint that `resume` gave to the trainer last, whatever became of it."""
    at_rest: Mapping[str, tuple[ListedFile, ...]] = field(default_factory=dict)
    """Tag of a new save that is being written → its ranks' optimizer shards that have stopped changing."""
    unsealed_tags: frozenset[str] = frozenset()
    """Checkpoints on this node of which nothing is known yet, as after the loss of the journal."""
    newest_found: Mapping[bool, Order] = field(init=False, compare=False)
    """The highest order found at the first start, of models alone (True) and of the others (False)."""
    intact: Mapping[bool, tuple[SaveView, ...]] = field(init=False, compare=False)
    """True (only the model was saved) or False → saves that lie here as sealed, newest first."""

    def __post_init__(self) -> None:
        newest: dict[bool, Order] = {}
        for save in self.saves:  # once a view: of thousands, each is compared with it
            if save.was_found_first:
                newest[save.is_model_only] = max(save.order, newest.get(save.is_model_only, save.order))
        object.__setattr__(self, "newest_found", newest)
        object.__setattr__(self, "damaged_tags", frozenset(tag for _, tag, _ in self.damaged))
        whole = sorted((s for s in self.saves if s.is_intact), key=lambda s: s.order, reverse=True)
        kinds = {kind: tuple(s for s in whole if s.is_model_only == kind) for kind in (False, True)}
        object.__setattr__(self, "intact", kinds)
