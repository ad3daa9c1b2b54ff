"""Define the messages between the deciding thread and a remote's child process: one JSON object a line.

The child holds no state that matters: a request carries all it needs, results and events carry all that the
journal keeps. A call on a dead hard mount hangs the child, never the daemon (docs/design.md §3).
"""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ckptd.base.identity import FileIdentity, Model
from ckptd.core.model.decision import Decision
from ckptd.core.model.heartbeat import Heartbeat, SeenNode
from ckptd.core.model.layouts import NamedShard, Role, ShardKey
from ckptd.core.model.manifest import (
    Commit,
    ManifestName,
    NodeManifest,
    Proof,
    RemoteIdentity,
    Tombstone,
    TombstoneHeader,
)
from ckptd.core.model.records import Comparison, SupplementRecord
from ckptd.core.model.runs import Claim, Row, RunSeen
from ckptd.core.policy.leases import LeaseSeen
from ckptd.errors import CkptdError, RemoteError, error_named
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.base import Abilities

# --- parts of both: settings of a remote, documents as read, files ------------------------------------


class RemoteSettings(Model):
    """The part of a job's `[[remote]]` that the child needs."""

    name: str
    url: str
    job: str
    job_id: str | None = None
    """None: no state yet; taken from remote.json when the job name is equal (contract)."""
    proposed_job_id: str | None = None
    """Id for a new remote.json: the one by which the job's other remotes know it."""
    remote_id: str | None = None
    """The identity seen before; another one, or none, is "not there" (P2)."""
    known_url: str | None = None
    """URL at which that identity was seen last; None: not remembered."""
    abilities: Abilities | None = None
    """Abilities that the remote showed before, for a time when it is full (adr/0161)."""
    may_initialise: bool = True
    only_looks: bool = False
    """Attaching answers whether the place is surely new, and writes nothing at all (`ckptd resume`)."""
    same_filesystem: bool = False
    save_dir: str
    """Needed to prove that a directory remote lies on another file system (H5)."""
    apart_from: tuple[str, ...] = ()
    """Local directories that a directory remote, symlinks resolved, may neither lie in nor hold (H6)."""
    verify: Literal["auto", "read-back", "none"] = "auto"
    access: Access = Access()
    bytes_per_second: int | None = None
    node: str
    node_id: str
    state_dir: str = ""
    """Folder that keeps documents and the audit of repairs; "": a command, which keeps neither."""
    is_scrubbed: bool = False
    """Documents that rotted or are lost are written again (docs/adr/0221)."""
    asks_who_lives: bool = False
    """Attaching tells who writes there now, whatever is known of it (`ckptd check`)."""


class CommitView(Model):
    """A COMMIT as read, with the digest of its bytes and its key."""

    key: str
    sha256: str
    commit: Commit
    disputed: bool = False


class ManifestView(Model):
    """A node manifest as read; `committed` when a COMMIT lists its digest."""

    key: str
    sha256: str
    manifest: NodeManifest
    committed: bool


class NamedManifest(Model):
    """A node manifest that was not read: what its name tells."""

    generation: int
    form: str
    name: ManifestName


class UploadedObject(Model):
    """An object that an earlier attempt finished and verified."""

    key: str
    bytes: int
    crc64nvme: str
    proof: Proof


# --- looks: what the remote is and holds; each order, then its answer ---------------------------------


class Attach(Model):
    """Prove that the remote is there, ours and writable; create remote.json where that is right."""

    op: Literal["attach"] = "attach"
    settings: RemoteSettings


class Attached(Model):
    """The remote is there and ours."""

    kind: Literal["attached"] = "attached"
    identity: RemoteIdentity
    abilities: Abilities
    initialised: bool = False
    free_bytes: int | None = None
    place: str | None = None
    """`device:inode` of a directory's root and ctime of its identity, as this child sees them; else None."""
    living: tuple[SeenNode, ...] = ()
    """At the first time: other nodes that write there under this job's name; else where it was asked for, and
    then all."""
    newest: Row | None = None
    """Newest row of the run that goes on there, if it was asked for."""


class Observe(Model):
    """Read what the remote holds: COMMITs, tombstones, decisions, pointers."""

    op: Literal["observe"] = "observe"
    only_changed: bool = False
    """Answer `Unchanged` when all is as in the last observation that was given."""


class Observation(Model):
    """Describe what the remote holds; the receiver dates it."""

    kind: Literal["observation"] = "observation"
    identity: RemoteIdentity
    commits: tuple[CommitView, ...]
    retired: tuple[TombstoneHeader, ...] = ()
    """Tombstones of removals that are under way and others that matter (`storage/remote/observe.py`)."""
    retired_tags: tuple[str, ...] = ()
    """Tags of all tombstones."""
    retired_beside: tuple[tuple[str, int, str], ...] = ()
    """Tombstones of generations of which another form is committed still."""
    unreadable: tuple[tuple[str, int, str], ...] = ()
    """COMMITs that are there and cannot be read."""
    decisions: tuple[Decision, ...] = ()
    uncommitted: tuple[tuple[str, int, str], ...] = ()
    """(tag, generation, form) with node manifests and no COMMIT."""
    listed_whole: tuple[tuple[str, int, str], ...] = ()
    """Those of them whose shards may all be listed, as names of manifests tell."""
    latest: str | None = None
    latest_universal: str | None = None
    is_pointing: bool = True
    """They name what the COMMITs say, as far as those could be read."""
    damaged: tuple[str, ...] = ()
    """Documents that could not be read, with the reason."""
    damaged_pins: tuple[Decision, ...] = ()
    """Pins among them, as their names tell: who pinned it and when is not known."""
    supplements: tuple[CommitView, ...] = ()
    retiring: tuple[tuple[str, int, str], ...] = ()
    """(tag, generation, form) with a tombstone whose removal was cut short: `DeleteCommit` finishes it."""
    free_bytes: int | None = None
    rows: tuple[Row, ...] = ()
    """Rows of the runs that were saved there (core/model/runs.py)."""
    repaired: tuple[str, ...] = ()
    """Keys of documents that were written again just before."""


class Unchanged(Model):
    """The remote holds what the last observation said; only its free room may be another."""

    kind: Literal["unchanged"] = "unchanged"
    free_bytes: int | None = None


class DescribeTag(Model):
    """Read every manifest of one tag, committed or not."""

    op: Literal["describe"] = "describe"
    tag: str


class TagView(Model):
    """Everything the remote knows of one tag."""

    kind: Literal["tag"] = "tag"
    tag: str
    manifests: tuple[ManifestView, ...]
    commits: tuple[CommitView, ...]
    retired: tuple[Tombstone, ...]
    named: tuple[NamedManifest, ...] = ()
    unreadable: tuple[tuple[str, int, str], ...] = ()
    """(tag, generation, form) of COMMITs and tombstones that are there and cannot be read."""


class Confirm(Model):
    """Fresh read of COMMITs for a permit: each must be there with that digest, undisputed (P1)."""

    op: Literal["confirm"] = "confirm"
    commits: tuple[tuple[str, str], ...]
    """(key, sha256)."""


class Confirmed(Model):
    """Answer to `Confirm`."""

    kind: Literal["confirmed"] = "confirmed"
    ok: bool
    reason: str | None = None


class Beat(Model):
    """Write the heartbeat, where one is given; say which other nodes were heard of, and when."""

    op: Literal["beat"] = "beat"
    heartbeat: Heartbeat | None = None
    node: str
    """Own node; its heartbeat is not returned."""
    reads_all: bool = False
    """Read every heartbeat afresh; else those that are not known, or were read long ago."""
    takeover_seconds: float | None = None
    """Of a shared directory: say who holds the lease; take it over after so long a silence (adr/0110)."""


class Beats(Model):
    """The other nodes."""

    kind: Literal["beats"] = "beats"
    nodes: tuple[SeenNode, ...] = ()
    sharers: tuple[SeenNode, ...] = ()
    """Daemons over other directories, also those that bear this node's name."""
    lease: LeaseSeen | None = None


class ClaimRun(Model):
    """Say that this place goes on with a run there, unless another one that lives does (adr/0185)."""

    op: Literal["claim"] = "claim"
    claim: Claim
    heartbeat: Heartbeat | None = None
    """Written before the row, with the run that the row names; None: the remote takes none."""


class Claimed(Model):
    """Answer to it."""

    kind: Literal["claimed"] = "claimed"
    run: RunSeen


# --- uploads ------------------------------------------------------------------------------------------
# A form that no disk of this node ever holds is made while it is uploaded: the order names shards, or a
# COMMIT whose objects are read (docs/adr/0118); the child plans it and makes it of them (docs/adr/0093).


class UploadFile(Model):
    """One file to upload."""

    path: str
    key: str
    source: str
    """Path relative to `UploadRequest.root`."""
    identity: FileIdentity | None
    """As sealed; None for role `extra`, read whole, consistent by itself, and for what is made."""
    bytes: int
    role: Role
    shard: ShardKey = ShardKey()
    fingerprint: str
    tensor_fingerprint: str | None = None
    mode: int = 0o644
    check_zip_crc: bool = True
    inline: str | None = None
    """The whole content, for a small file that no disk holds; `source` is not read then."""
    is_replica: bool = False
    """The node of data-parallel rank 0 has it too and sends it; others do when it does not come (H29)."""
    is_made: bool = False
    """An output of a plan: its bytes are made while they are sent."""

    @property
    def is_extra(self) -> bool:
        """Neither sealed nor made: what it holds when it is read is what counts."""
        return self.identity is None and not self.is_made


class PartlyUploaded(Model):
    """An object that an earlier attempt left half done: `flushed_bytes` durable, their CRC64NVME."""

    key: str
    flushed_bytes: int
    crc64: int
    token: str = ""


class Committed(Model):
    """The ZeRO form that a form is made of where no node has all shards: what that remote holds."""

    sha256: str
    """Digest of its COMMIT, of the order's tag and generation."""
    takeover_seconds: float
    """A node that makes the form and was not heard of for so long is replaced."""


class DeriveRequest(Model):
    """A derived form that no disk holds: made of the sealed shards while it is sent."""

    folders: tuple[str, ...]
    """Folders of the shards, relative to `UploadRequest.root` or the remote's; more than one is refused."""
    zero: Committed | None = None
    """None: the shards lie here."""
    sealed: tuple[tuple[str, FileIdentity], ...]
    """Every file of the save, relative to `UploadRequest.root`, as it was sealed (P4)."""
    below: str = ""
    """Path of the form in the manifest's folder."""
    staging: str
    """Folder of this disk where the plan lies, without a name."""
    memory_bytes: int
    """Memory that the process that makes it may use (P12)."""
    compare_masters: bool = True
    """See `JobConfig.compare_masters`."""
    plan_sha256: str = ""
    """The plan that `UploadRequest.uploaded` and `partly` were made by."""


class UploadRequest(Model):
    """Ship one form of one save, verify it, write the node manifest, commit by coverage, move `latest`."""

    op: Literal["upload"] = "upload"
    root: str
    """Absolute path of the folder that `UploadFile.source` is relative to (save_dir)."""
    manifest: NodeManifest
    """Complete but for `files` (empty) and `revision`."""
    files: tuple[UploadFile, ...]
    making: DeriveRequest | None = None
    """Form to make during the upload; `files` are then those that are not made."""
    uploaded: tuple[UploadedObject, ...] = ()
    partly: tuple[PartlyUploaded, ...] = ()
    save_spread_seconds: float = 60.0
    steps_in: bool = False
    """Replicas that nobody listed are sent too: their owner had its time."""
    supplement_to: str | None = None
    """Digest of a COMMIT: the files came after it, and are committed beside it."""
    takeover_seconds: float | None = None
    """The folder is shared: send this node's share, and that of who was silent for so long (adr/0110)."""


class EarlyRequest(Model):
    """Upload one shard of a save that is still being written, if it is framed and nothing has its key.

    It is proved by the upload of its save alone. Answered by `Done`, after an `ObjectDone` where it was.
    """

    op: Literal["early"] = "early"
    root: str
    """Absolute path of the folder that `file.source` is relative to (save_dir)."""
    file: UploadFile
    node_id: str


class DeleteEarly(Model):
    """Delete what was uploaded early for a save that never became whole, where no other node writes."""

    op: Literal["delete-early"] = "delete-early"
    uploads: tuple[tuple[str, str], ...] = ()
    """Half uploads to give up: (key, token)."""
    objects: tuple[str, ...] = ()
    """Keys of objects to delete, unless a manifest lists them."""
    node_id: str


class UploadResult(Model):
    """Report how an order to upload ended, when it did not fail."""

    kind: Literal["uploaded"] = "uploaded"
    outcome: Literal["committed", "waiting", "conflict", "refused", "damaged"]
    """waiting: uploaded, other nodes' shards are missing; conflict: this generation holds another save;
    refused: the save has no such form; damaged: nor will it, until what the remote holds is mended."""
    reason: str | None = None
    hint: str = ""
    missing: tuple[NamedShard, ...] = ()
    """waiting: what no manifest lists yet."""
    commit: CommitView | None = None
    manifest_key: str | None = None
    manifest_sha256: str | None = None
    bytes_sent: int = 0
    bytes_skipped: int = 0
    bytes_copied: int = 0
    """Made by the store of what it held."""
    unlisted: tuple[str, ...] = ()
    """committed: files of the folder that the COMMIT does not list."""
    supplements: tuple[SupplementRecord, ...] = ()
    """For a supplement: all supplements that list a file of the order."""


# --- events of an open upload -------------------------------------------------------------------------
# `idle_seconds` is how long no byte had moved when the event was sent; the daemon goes on counting from
# there, so that a child which can say nothing any more is noticed as well (docs/internals/stores.md).


class TransferProgress(Model):
    """Bytes of one object; `flushed_bytes`/`crc64` can be resumed from after a crash (P7)."""

    kind: Literal["moving"] = "moving"
    key: str
    done_bytes: int
    total_bytes: int
    flushed_bytes: int
    crc64: int
    token: str = ""
    idle_seconds: float = 0.0


class ObjectDone(Model):
    """Event: one object is durable and verified."""

    kind: Literal["object-done"] = "object-done"
    object: UploadedObject


class Planned(Model):
    """Event: how much an order makes, and which plan it follows."""

    kind: Literal["planned"] = "planned"
    plan_sha256: str
    layout: str
    files: int
    bytes: int
    comparison: Comparison
    """Comparison that is made before the first byte is sent."""


class Alive(Model):
    """The order waits or reads, nothing moved; the client keeps it to itself."""

    kind: Literal["alive"] = "alive"
    idle_seconds: float = 0.0


# --- other work: deletions, decisions, pointers, scrubbing --------------------------------------------


class DeleteCommit(Model):
    """Remote retention: tombstone, then COMMIT, then objects that no COMMIT lists, then `latest`."""

    op: Literal["delete"] = "delete"
    tag: str
    generation: int
    form: str
    reason: str
    commit_sha256: str
    instead: tuple[str, str] | None = None
    """(form, digest of its COMMIT) of the same save: it must be whole there, or nothing goes (adr/0094)."""
    ends_run: bool = False
    """A person has the whole of its run removed: its newest and its best go too."""
    counted: tuple[str, ...] = ()
    """Digests of the COMMITs that stay: is one of them disputed by now, this one may have to stay too."""


class RecordDecision(Model):
    """Put a decision that is known here in the remote, as it is, unless a newer one of its subject is there;
    answered when it is durable (P8, adr/0165)."""

    op: Literal["record"] = "record"
    decision: Decision


class Point(Model):
    """Let the pointers name the newest committed checkpoint in (branch, step) (P6)."""

    op: Literal["point"] = "point"


class Discard(Model):
    """Give up half uploads that the journal knows as ours and nobody goes on with."""

    op: Literal["discard"] = "discard"
    uploads: tuple[tuple[str, str], ...]
    """(key, token)."""


class Scrub(Model):
    """Read files of one COMMIT in the order of their keys and compare them with its manifests."""

    op: Literal["scrub"] = "scrub"
    place: Literal["remote", "here"] = "remote"
    """Read the remote's objects, or the same files on this node."""
    commit_key: str
    commit_sha256: str
    after: str = ""
    """Go on behind this key."""
    limit_bytes: int
    """Begin no object once that much was read."""
    only: tuple[str, ...] = ()
    """These keys alone; empty: all."""


class BadCopy(Model):
    """One file that is not as it was committed."""

    key: str
    """Key of the object, or on this node the path below save_dir; so too in `Scrub` and `Scrubbed`."""
    expected: str
    found: str


class Scrubbed(Model):
    """Report how far a scrub got."""

    kind: Literal["scrubbed"] = "scrubbed"
    read_bytes: int = 0
    next_after: str | None = None
    """None: all objects were compared."""
    bad: tuple[BadCopy, ...] = ()
    unread: tuple[str, ...] = ()
    """Keys that rights or I/O kept from being read: what was known of them stays known."""
    repaired: tuple[str, ...] = ()
    """Keys of documents that were written again."""
    is_gone: bool = False
    """The COMMIT does not count any more; nothing is said of its objects."""


# --- steering, and answers without a result -----------------------------------------------------------


class Pace(Model):
    """Move at this fraction of that speed; 1.0 = all of it, no speed = no limit (P11). Needs no answer."""

    op: Literal["pace"] = "pace"
    fraction: float
    bytes_per_second: int | None = None


class Cancel(Model):
    """End the order with that id at the next window; its answer is a `SourceChanged` error."""

    op: Literal["cancel"] = "cancel"
    order_id: int


class Done(Model):
    """Answer to orders without a result."""

    kind: Literal["done"] = "done"


class Failed(Model):
    """The order failed with an error of the tree; `error` is the class name in ckptd.errors."""

    kind: Literal["failed"] = "failed"
    error: str
    message: str
    hint: str = ""

    @property
    def raised(self) -> CkptdError:
        """Return the error that the child ran into."""
        return error_named(self.error, self.message, self.hint, otherwise=RemoteError)


# --- lines of the pipe --------------------------------------------------------------------------------

_Look = Attach | Observe | DescribeTag | Confirm | Beat | ClaimRun
_Upload = UploadRequest | EarlyRequest | DeleteEarly
_Work = _Look | _Upload | DeleteCommit | RecordDecision | Point | Discard | Scrub
Request = Annotated[_Work | Pace | Cancel, Field(discriminator="op")]
LONG_ORDERS = (UploadRequest, EarlyRequest, DeleteEarly, DeleteCommit, Scrub)
"""Carried out one at a time; all else in a thread of its own, so that a permit never waits for them."""
_End = (
    Attached
    | Observation
    | Unchanged
    | TagView
    | UploadResult
    | Confirmed
    | Scrubbed
    | Beats
    | Claimed
    | Done
    | Failed
)
EVENTS = (TransferProgress, ObjectDone, Planned, Alive)
"""All else ends the order."""
Answer = Annotated[_End | TransferProgress | ObjectDone | Planned | Alive, Field(discriminator="kind")]


class RequestLine(Model):
    """One line to the child."""

    id: int
    order: Request


class AnswerLine(Model):
    """One line from the child."""

    id: int
    answer: Answer


ORDER_LINE: TypeAdapter[RequestLine] = TypeAdapter(RequestLine)
ANSWER_LINE: TypeAdapter[AnswerLine] = TypeAdapter(AnswerLine)


def in_short(order: Request) -> Request:
    """Return an order without its files: there may be thousands, and an open order is remembered without
    them.
    """
    if isinstance(order, UploadRequest):
        return order.model_copy(update={"files": (), "uploaded": (), "partly": ()})
    return order


def known(settings: RemoteSettings, found: Attached) -> RemoteSettings:
    """Return the settings for the next time: only this very remote is meant from now on (P2)."""
    identity = found.identity
    learned = {"remote_id": identity.remote_id, "job_id": identity.job_id, "may_initialise": False}
    return settings.model_copy(update={**learned, "abilities": found.abilities})


def known_url(attached: str | None) -> str | None:
    """Return the URL in what a journal keeps of a remote that was attached (`abilities:<name>`), or None."""
    with contextlib.suppress(ValueError, AttributeError):
        url = json.loads(attached or "{}").get("url")
        return url if isinstance(url, str) else None
    return None
