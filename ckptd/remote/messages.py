"""What the deciding thread and a remote's child process say to each other: one JSON object a line.

The child holds no state that matters: an order carries all it needs, results and events carry all that the
journal keeps. A call on a dead hard mount hangs the child, never the daemon (docs/design.md §3).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ckptd.core.decision import Decision
from ckptd.core.heartbeat import Heartbeat
from ckptd.core.identity import FileIdentity, Model
from ckptd.core.layouts import NamedShard, Role, ShardKey
from ckptd.core.manifest import Headstone, NodeManifest, Proof, RemoteIdentity, Tombstone
from ckptd.core.runs import Claim, Row, RunSeen
from ckptd.remote.attach_messages import Attach as Attach
from ckptd.remote.attach_messages import Attached as Attached
from ckptd.remote.beat_messages import Beat as Beat
from ckptd.remote.beat_messages import Beats as Beats
from ckptd.remote.events import Alive as Alive
from ckptd.remote.events import Moving as Moving
from ckptd.remote.making_messages import Making as Making
from ckptd.remote.making_messages import Planned as Planned
from ckptd.remote.scrub_messages import Scrub, Scrubbed
from ckptd.remote.seen_messages import CommitView as CommitView
from ckptd.remote.seen_messages import ManifestView as ManifestView
from ckptd.remote.seen_messages import NamedManifest as NamedManifest
from ckptd.remote.seen_messages import SupplementView as SupplementView
from ckptd.remote.settings import RemoteSettings as RemoteSettings

# --- orders: daemon → child -----------------------------------------------------------------------------


class Observe(Model):
    """Read what the remote holds: COMMITs, tombstones, decisions, pointers."""

    op: Literal["observe"] = "observe"
    only_changed: bool = False
    """Answer `Unchanged` when all is as in the last observation that was given."""


class Describe(Model):
    """Read every manifest of one tag, committed or not."""

    op: Literal["describe"] = "describe"
    tag: str


class ShipFile(Model):
    """One file to ship."""

    path: str
    key: str
    source: str
    """Path relative to `ShipOrder.root`."""
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


class Shipped(Model):
    """An object that an earlier attempt finished and verified."""

    key: str
    bytes: int
    crc64nvme: str
    proof: Proof


class PartlyShipped(Model):
    """An object that an earlier attempt left half done: `flushed_bytes` durable, their CRC64NVME."""

    key: str
    flushed_bytes: int
    crc64: int
    token: str = ""


class ShipOrder(Model):
    """Ship one form of one save, verify it, write the node manifest, commit by coverage, move `latest`."""

    op: Literal["ship"] = "ship"
    root: str
    """Absolute path of the folder that `ShipFile.source` is relative to (save_dir)."""
    manifest: NodeManifest
    """Complete but for `files` (empty) and `revision`."""
    files: tuple[ShipFile, ...]
    making: Making | None = None
    """What is made besides; `files` are then those that are not."""
    shipped: tuple[Shipped, ...] = ()
    partly: tuple[PartlyShipped, ...] = ()
    save_spread_seconds: float = 60.0
    steps_in: bool = False
    """Replicas that nobody listed are sent too: their owner had its time."""
    supplement_to: str | None = None
    """Digest of a COMMIT: the files came after it, and are committed beside it."""
    takeover_seconds: float | None = None
    """The folder is shared: send this node's share, and that of who was silent for so long (adr/0110)."""


class Confirm(Model):
    """Fresh read of COMMITs for a permit: each must be there with that digest, undisputed (P1)."""

    op: Literal["confirm"] = "confirm"
    commits: tuple[tuple[str, str], ...]
    """(key, sha256)."""


class Retire(Model):
    """Remote retention: tombstone, then COMMIT, then objects that no COMMIT lists, then `latest`."""

    op: Literal["retire"] = "retire"
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


class Record(Model):
    """Put a decision that is known here in the remote, as it is, unless a newer one of its subject is there;
    answered when it is durable (P8, adr/0165)."""

    op: Literal["record"] = "record"
    decision: Decision


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


class Point(Model):
    """Let the pointers name the newest committed checkpoint in (branch, step) (P6)."""

    op: Literal["point"] = "point"


class Discard(Model):
    """Give up half uploads that the journal knows as ours and nobody goes on with."""

    op: Literal["discard"] = "discard"
    uploads: tuple[tuple[str, str], ...]
    """(key, token)."""


class Pace(Model):
    """Move at this fraction of that speed; 1.0 = all of it, no speed = no limit (P11). Needs no answer."""

    op: Literal["pace"] = "pace"
    fraction: float
    bytes_per_second: int | None = None


class Cancel(Model):
    """End the order with that id at the next window; its answer is a `SourceChanged` error."""

    op: Literal["cancel"] = "cancel"
    order_id: int


_Look = Attach | Observe | Describe | Confirm | Beat | ClaimRun
_Work = _Look | ShipOrder | Retire | Record | Point | Discard | Scrub
Order = Annotated[_Work | Pace | Cancel, Field(discriminator="op")]


LONG_ORDERS = (ShipOrder, Retire, Scrub)
"""Carried out one at a time; all else in a thread of its own, so that a permit never waits for them."""


def in_short(order: Order) -> Order:
    """What is remembered of an order while it is open: not its files, of which there may be thousands."""
    if isinstance(order, ShipOrder):
        return order.model_copy(update={"files": (), "shipped": (), "partly": ()})
    return order


class OrderLine(Model):
    """One line to the child."""

    id: int
    order: Order


# --- answers: child → daemon ----------------------------------------------------------------------------


class Observation(Model):
    """What the remote holds; dated by whoever receives it."""

    kind: Literal["observation"] = "observation"
    identity: RemoteIdentity
    commits: tuple[CommitView, ...]
    retired: tuple[Headstone, ...] = ()
    """Tombstones of removals that are under way and others that matter (`remote/observe.py`)."""
    retired_tags: tuple[str, ...] = ()
    """Of all tombstones."""
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
    supplements: tuple[CommitView, ...] = ()
    retiring: tuple[tuple[str, int, str], ...] = ()
    """(tag, generation, form) with a tombstone whose removal was cut short: `Retire` finishes it."""
    free_bytes: int | None = None
    rows: tuple[Row, ...] = ()
    """Which runs were saved there, and where (core/runs.py)."""


class Unchanged(Model):
    """The remote holds what the last observation said; only its free room may be another."""

    kind: Literal["unchanged"] = "unchanged"
    free_bytes: int | None = None


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


class ShipResult(Model):
    """How an order to ship ended, when it did not fail."""

    kind: Literal["shipped"] = "shipped"
    outcome: Literal["committed", "waiting", "conflict", "refused", "damaged"]
    """waiting: shipped, other nodes' shards are missing; conflict: this generation holds another save;
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
    unlisted: tuple[str, ...] = ()
    """committed: files of the folder that the COMMIT does not list."""
    supplements: tuple[SupplementView, ...] = ()
    """Of a supplement: all that list a file of the order."""


class Confirmed(Model):
    """Answer to `Confirm`."""

    kind: Literal["confirmed"] = "confirmed"
    ok: bool
    reason: str | None = None


class Done(Model):
    """Answer to orders without a result."""

    kind: Literal["done"] = "done"


class Failed(Model):
    """The order failed with an error of the tree; `error` is the class name in ckptd.errors."""

    kind: Literal["failed"] = "failed"
    error: str
    message: str
    hint: str = ""


class ObjectDone(Model):
    """Event: one object is durable and verified."""

    kind: Literal["object-done"] = "object-done"
    object: Shipped


_End = (
    Attached
    | Observation
    | Unchanged
    | TagView
    | ShipResult
    | Confirmed
    | Scrubbed
    | Beats
    | Claimed
    | Done
    | Failed
)
EVENTS = (Moving, ObjectDone, Planned, Alive)
"""All else ends the order."""
Answer = Annotated[_End | Moving | ObjectDone | Planned | Alive, Field(discriminator="kind")]


class AnswerLine(Model):
    """One line from the child."""

    id: int
    answer: Answer


ORDER_LINE: TypeAdapter[OrderLine] = TypeAdapter(OrderLine)
ANSWER_LINE: TypeAdapter[AnswerLine] = TypeAdapter(AnswerLine)


def known(settings: RemoteSettings, found: Attached) -> RemoteSettings:
    """The settings for the next time: only this very remote is meant from now on (P2)."""
    identity = found.identity
    learned = {"remote_id": identity.remote_id, "job_id": identity.job_id, "may_initialise": False}
    return settings.model_copy(update={**learned, "abilities": found.abilities})
