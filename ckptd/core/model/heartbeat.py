"""`_ckptd/heartbeats/<node>.json`: what a node says of itself, about once a minute (docs/contract.md).

Economy and words alone: who is missing, since when, what is at risk. Nothing is committed on the strength of
one, and nothing deleted but what the job file lets go uncommitted; what one calls damaged is kept. Durations
are by the node's own clock, so that a clock which is wrong changes none of them.
"""

from __future__ import annotations

from ckptd.base.identity import Model
from ckptd.base.names import ROOT, decode_name, encode_name
from ckptd.core.model.manifest import Document

HEARTBEATS = f"{ROOT}/heartbeats/"
BEAT_SECONDS = 60.0
DEAD_SECONDS = 300.0
"""A node that has not been heard of for so long is named."""


class NewestSave(Model):
    """The newest save that is complete for that node."""

    tag: str
    branch: int
    step: int
    written_seconds_ago: float
    """Seconds since its last shard was written here."""
    last_seconds: int | None = None
    """The end of its save window, as that node's manifest of it says: compared with nothing else. None: an
    older release."""


class SafeSave(Model):
    """The newest committed save, as that node last saw its required remotes."""

    tag: str
    branch: int
    step: int
    seconds_at_risk: float
    """Training since that save was written."""


class Heartbeat(Document):
    """One node of one job."""

    job_id: str
    job: str
    node: str
    node_id: str
    config_digest: str
    ckptd_version: str
    as_of: str
    """RFC 3339, UTC, by the node's clock; shown where a store has no times of its own."""
    state: str
    """ok, behind, attention, waiting or paused."""
    ranks: tuple[int, ...] = ()
    """Data-parallel ranks whose shards it holds of its newest save."""
    shards: tuple[tuple[int, int], ...] | None = None
    """(data-parallel rank, model-parallel rank) of each of them; None: an older release."""
    newest: NewestSave | None = None
    safe: SafeSave | None = None
    run_id: str | None = None
    """The run that its save_dir holds; None: none yet, or an older release."""
    host: str = ""
    user: str = ""
    save_dir: str = ""
    """The directory it watches; "": an older release."""
    damaged: tuple[str, ...] = ()
    """Digests of COMMITs of which its scrub found something damaged in the remote that this is written to."""
    ended: bool = False
    """The last one of a daemon that was stopped in order: no training that it would see goes on."""


MOST_DAMAGED = 64
"""COMMITs that one tells of."""
DAMAGED_SECONDS = 86400.0
"""Limit how long damage counts that a node told of before it fell silent or ended."""


class SeenNode(Model):
    """A heartbeat as it was found; `seconds_ago` None: its age cannot be told."""

    node: str
    seconds_ago: float | None
    is_store_time: bool = True
    """The age is by the store's own times; else by two nodes' clocks."""
    heartbeat: Heartbeat | None = None
    """None: it was not read, or cannot be."""

    @property
    def has_ended(self) -> bool:
        """Tell whether the node's daemon announced its end."""
        return self.heartbeat is not None and self.heartbeat.ended

    @property
    def is_dead(self) -> bool:
        """Tell whether nothing more is to be expected: it has ended, or was not heard of for a while."""
        return self.has_ended or (self.seconds_ago is not None and self.seconds_ago > DEAD_SECONDS)

    @property
    def damaged(self) -> frozenset[str]:
        """Return the digests of COMMITs that it found damaged, as far as that counts still."""
        is_old = self.seconds_ago is None or self.seconds_ago > DAMAGED_SECONDS
        return frozenset() if is_old or self.heartbeat is None else frozenset(self.heartbeat.damaged)


def heartbeat_key(node: str, node_id: str = "") -> str:
    """Key of a node's heartbeat; with its id where another daemon of that node name has the plain one."""
    more = f"~{encode_name(node_id)}" if node_id else ""
    return f"{HEARTBEATS}{encode_name(node)}{more}.json"


def node_of_key(key: str) -> str | None:
    """Return the node that a key speaks of; None: it is no heartbeat's."""
    name = key.removeprefix(HEARTBEATS)
    if not name.endswith(".json") or "/" in name:
        return None
    return decode_name(name.removesuffix(".json").partition("~")[0])
