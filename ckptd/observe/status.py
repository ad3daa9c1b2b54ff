"""Declare status.json: what the daemon publishes for everybody, by rename, and the only thing `ckptd status`
reads.

Shapes as docs/contract.md says (schema_version 1); sizes in bytes, times in RFC 3339 (UTC) or seconds.
Annotations are types, no text, since `status_reader` asks for them each time that `ckptd status` starts; that
no record has a repr saves it a millisecond.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

SCHEMA_VERSION = 1
FILE_NAME = "status.json"
_FIRST_UNIX_SECONDS, _LAST_UNIX_SECONDS = -62_135_596_800.0, 253_402_300_799.0
"""The years 1 and 9999."""


JobStateName = Literal["ok", "behind", "attention", "waiting", "paused", "invalid"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DaemonStatus:
    """The process."""

    pid: int
    alive: bool
    version: str
    started_at: str
    last_turn_age_seconds: float
    memory_bytes: int
    memory_budget_bytes: int
    pid_space: str = ""
    """The boot and the namespace in which `pid` means something (`observe.space`)."""
    reloaded_at: str | None = None
    reload_error: str | None = None
    """Job files that the last reload refused; their jobs run as before."""
    notify_error: str | None = None
    """Reason why the last notification was not delivered."""
    metrics_error: str | None = None
    """Reason why metrics are not served where `ckptd.toml` says."""
    start_command: str = ""
    """Command that starts the daemon again."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SafeStatus:
    """The newest committed checkpoint."""

    tag: str
    generation: int
    branch: int
    step: int
    committed_at: str
    """Empty: its COMMIT names no time, or what can be none; `age_seconds` says nothing then."""
    age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiskStatus:
    """save_dir's file system."""

    free_bytes: int
    next_save_bytes: int
    full_in_saves: int | None = None
    full_in_seconds: float | None = None
    unfinished_bytes: int = 0
    """Bytes in saves cut short, torn, damaged or doubtful, which ckptd never deletes by itself."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProblemStatus:
    """Something stuck: code, age, text, next step; `about`: what it concerns (a tag, a remote)."""

    code: str
    severity: Literal["attention", "behind", "note"]
    since: str
    text: str
    next_step: str
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FormStatus:
    """One form of a checkpoint on one remote."""

    state: str
    bytes_done: int = 0
    bytes_total: int = 0
    eta_seconds: float | None = None
    commit_sha256: str | None = None
    generation: int | None = None
    reason: str | None = None
    started_at: str | None = None
    ended_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ComparisonStatus:
    """How far a form's masters were compared with the model's own weights when this node made it."""

    tensors: int
    elements: int
    not_compared: tuple[str, ...] = ()
    """Trained tensors that were not: how many of them, and why."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LocalStatus:
    """A checkpoint on this node."""

    present: bool
    universal: str
    held: bool
    seen_at: str | None = None
    complete_at: str | None = None
    ended_at: str | None = None
    damaged: bool = False
    """A file of it is not what was committed, or cannot be read: `resume` takes another copy."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckpointStatus:
    """One checkpoint."""

    tag: str
    generation: int | None
    branch: int | None
    step: int | None
    state: str
    bytes: int
    local: LocalStatus
    reason: str | None = None
    remotes: dict[str, dict[str, FormStatus]] = field(default_factory=dict)
    comparisons: dict[str, ComparisonStatus] = field(default_factory=dict)
    """Form made by this node → what was compared."""
    keep: tuple[str, ...] = ()
    """Reasons to keep it on this node; empty: it may be deleted."""
    goes: str | None = None
    """Reason why it may be deleted from this node; None: it stays, or is gone."""
    pinned: bool = False
    next_step: str | None = None
    """The command for a save that will not be safe as it is: cut short, torn, doubtful or damaged."""
    kind: str = "resumable"
    """Or "model-only": weights alone, nothing to resume from."""
    complete_for: str | None = None
    """node: this node's ranks have all written, others' shards are on other nodes; job: all of it is here or
    committed; None: not even this node's part is complete."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HeldStatus:
    """A checkpoint in a remote and what its retention makes of it (docs/adr/0094)."""

    tag: str
    generation: int
    branch: int
    step: int
    forms: tuple[str, ...]
    verdict: str
    """keep, delete, or step-down: some of its forms go."""
    why: tuple[str, ...]
    leaves: tuple[str, ...] = ()
    """The forms that stay."""
    kind: str = "resumable"
    """Or "model-only", "weights-only": nothing to resume from."""
    bytes: int | None = None
    """Bytes of its ZeRO form, or of the form that is left; None: published by an earlier release."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RemoteStatus:
    """A remote as its store was last seen; None and empty before it answered."""

    name: str
    url: str
    attached: bool
    create_only: bool | None = None
    proof: str | None = None
    """Proof of uploads there: store-checksum, part-etags, read-back or none."""
    resumable: bool | None = None
    notes: tuple[str, ...] = ()
    held: tuple[HeldStatus, ...] = ()
    """Newest first."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PauseStatus:
    """A person paused the job on this node: transfers, conversions and removals rest (docs/adr/0108)."""

    since: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DrainStatus:
    """The node is about to go: what is complete here is sent first, nothing else is begun (docs/adr/0108)."""

    asked_at: str
    deadline_at: str
    is_done: bool
    """All that is complete here is committed."""
    missing: tuple[str, ...] = ()
    """Tags that are not committed yet, newest first."""
    late: tuple[str, ...] = ()
    """Those that will not be uploaded in time at the speed of the link."""
    refused: tuple[str, ...] = ()
    """Those that cannot be committed as they are: a person is needed."""
    unfinished: tuple[str, ...] = ()
    """Those that were being written and that nobody writes any more: not waited for."""
    unsent: tuple[str, ...] = ()
    """Found at the first start and not accepted: neither missing nor committed."""
    stalled: tuple[str, ...] = ()
    """Remotes on which nothing moves and that all which is missing waits for: `ckptd drain` gives them up."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RemovalRowStatus:
    """Report what becomes of one checkpoint in one place that `ckptd rm` named; what is deleted has no
    row."""

    tag: str
    remote: str | None
    """None: this node's disk."""
    verdict: str
    """unknown (not enough was read yet), delete, wait (deleted as soon as `why` is over) or keep."""
    forms: tuple[str, ...] = ()
    bytes: int = 0
    why: str = ""
    next_step: str = ""
    commits: tuple[str, ...] = ()
    """Digests of the COMMITs that a person agrees to delete, or to delete a copy of."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RemovalStatus:
    """Checkpoints that a person named to be deleted (`ckptd rm`, docs/adr/0199)."""

    asked_at: str
    is_agreed: bool
    """False: only asked what would be deleted."""
    rows: tuple[RemovalRowStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HoldingStatus:
    """Hold what one place holds after so many further saves."""

    saves: int
    checkpoints: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ForeseenDeletionStatus:
    """A checkpoint, or forms of it, that retention keys would delete in one place."""

    tag: str
    generation: int
    forms: tuple[str, ...]
    bytes: int
    why: str
    after_saves: int
    """Number of further saves after which it is deleted; 0: with what is there now."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ForeseenPlaceStatus:
    """One place under other retention keys."""

    remote: str | None
    """None: this node's disk."""
    is_known: bool
    """False: the remote did not answer, and what it holds is not known."""
    checkpoints: int
    """There now, as are the bytes."""
    bytes: int
    held: tuple[HoldingStatus, ...]
    """After 0, 1, 2 … further saves; of fewer than were asked for when the time was up."""
    deletions: tuple[ForeseenDeletionStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanStatus:
    """Tell what a person's other retention keys would delete and keep (`ckptd plan`); nothing is done."""

    asked_at: str
    places: tuple[ForeseenPlaceStatus, ...]
    error: str | None = None
    """Why there is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SharedStatus:
    """A save_dir that hosts share: who divide the work, and who deletes and converts (docs/adr/0110)."""

    hosts: tuple[str, ...]
    """Heard of lately, this one included: files go by the hash of their names."""
    holds_lease: bool
    holder: str | None = None
    """Holder of the lease, as last read; None: not read yet."""
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class JobStatus:
    """One job."""

    name: str
    job_id: str | None
    save_dir: str
    state: JobStateName
    as_of: str | None = None
    """When this was computed: the ages below are of then; later than `generated_at` never."""
    opt_outs: tuple[str, ...] = ()
    safe: SafeStatus | None = None
    newest_complete: str | None = None
    steps_at_risk: int | None = None
    seconds_at_risk: float | None = None
    exposed_seconds: float | None = None
    """Since the newest save that is not safe was written; None: all that is complete here is safe."""
    disk: DiskStatus | None = None
    production_bytes_per_second: float | None = None
    link_bytes_per_second: float | None = None
    problems: tuple[ProblemStatus, ...] = ()
    checkpoints: tuple[CheckpointStatus, ...] = ()
    remotes: tuple[RemoteStatus, ...] = ()
    paused: PauseStatus | None = None
    drain: DrainStatus | None = None
    removal: RemovalStatus | None = None
    """None: nothing was asked to be deleted within the last minutes."""
    plan: PlanStatus | None = None
    """None: no `ckptd plan` was asked within the last minute."""
    making_way: bool = False
    """A save is being written on its disk: conversions wait, transfers go slowly."""
    waits_for_memory: bool = False
    """Tasks of its node wait for memory: as above, but for ZeRO forms that are committed nowhere yet."""
    shared: SharedStatus | None = None
    """None: save_dir is this node's alone."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Status:
    """The whole document."""

    generated_at: str
    daemon: DaemonStatus
    jobs: tuple[JobStatus, ...]
    schema_version: int = SCHEMA_VERSION


def all_committed(unsent: int) -> str:
    """Describe a finished drain in words; `unsent`: how many saves `existing` leaves out."""
    text = "all that is complete here is committed"
    return f"{text}, but for {unsent} that were there before ckptd (not uploaded)" if unsent else text


NOT_FINISHED = "the save is not whole and nobody writes it any more: not waited for"


def not_waited_for(stalled: Sequence[str]) -> str:
    """Say that a drain gives up remotes to which no byte moves."""
    return f"no byte moves to {', '.join(stalled)}, nor anywhere else: not waited for"


def rfc3339(unix_seconds: float) -> str:
    """Format a time in UTC with milliseconds.

    They may come from a document that anybody wrote: what no calendar has is shown as its first or last day.
    """
    # in this order NaN is the first day
    shown = min(max(_FIRST_UNIX_SECONDS, unix_seconds), _LAST_UNIX_SECONDS)
    return datetime.fromtimestamp(shown, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- The namespace of process ids ------------------------------------------------------------------------
# The daemon publishes it, so that a reader in another container does not take the daemon for dead.


def pid_space() -> str:
    """Name this boot and this namespace of process ids; empty: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
