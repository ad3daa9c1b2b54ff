"""What the deciding thread knows of one job between turns: memory that the next scan or journal can refill.

Only the deciding thread touches it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptd.core.view import UNIVERSAL, ZERO, ShipRecord, ShipState
from ckptd.daemon.problems import Problems
from ckptd.errors import RefusedError, SourceChanged

if TYPE_CHECKING:
    from ckptd.core.actions import Plan
    from ckptd.core.facts import FileFacts
    from ckptd.core.lifecycle import Verdict
    from ckptd.core.listing import SaveDirListing
    from ckptd.core.save import SealedSave
    from ckptd.core.view import Confirmation, DerivedRecord, GenerationAnswer, SaveView
    from ckptd.daemon.sharing import Sharer
    from ckptd.daemon.waiting import Waiting
    from ckptd.errors import CkptdError
    from ckptd.journal import Journal, SaveRow
    from ckptd.remote.documents import Stem

ShipKey = tuple[int, str, str]
"""(save id, remote, form)."""

HOUR_SECONDS = 3600.0
FAILURE_SECONDS = 120.0
"""How long status says that something failed here; what is tried in vain again is said anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFailure:
    """Why something could not be done on this node; until when (monotonic) that is worth saying."""

    text: str
    hint: str
    until_seconds: float


@dataclass(slots=True)
class Quiet:
    """Since when a folder's identities have not changed, by our monotonic clock."""

    digest: str
    since_seconds: float
    first_seen_unix: float


@dataclass(slots=True)
class Moving:
    """An upload under way."""

    done_bytes: int
    total_bytes: int
    started_seconds: float
    start_bytes: int = 0
    objects: dict[str, int] = field(default_factory=dict)
    """Bytes done, by key."""
    durable: tuple[str, int, str] = ("", 0, "")
    """Key, flushed bytes and token last noted in the journal."""


@dataclass(slots=True)
class Converting:
    """A conversion under way."""

    save_id: int
    form: str = UNIVERSAL
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(slots=True)
class JobState:
    """See the module's first lines."""

    journal: Journal
    config_digest: str = ""
    """Of what all nodes of the job must agree on."""
    is_shared: bool = False
    """save_dir is shared by hosts on purpose (adr/0110)."""
    sharer: Sharer | None = None
    """Another host over the same directory."""
    due_since_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    """(remote, COMMIT key) → since when nothing has kept it there; monotonic."""
    retiring_since_seconds: dict[tuple[str, Stem], float] = field(default_factory=dict)
    """(remote, stem) → when a removal that is under way was first seen; monotonic."""
    listing: SaveDirListing | None = None
    listing_at_seconds: float = 0.0
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    facts: dict[str, dict[str, FileFacts]] = field(default_factory=dict)
    """tag → path → facts of the current identities."""
    quiet: dict[str, Quiet] = field(default_factory=dict)
    in_flight: frozenset[str] = frozenset()
    rows: dict[int, SaveRow] = field(default_factory=dict)
    ships: dict[int, dict[tuple[str, str], ShipRecord]] = field(default_factory=dict)
    busy: Counter[int] = field(default_factory=Counter)
    """Save id → workers that read it."""
    generations: dict[ShipKey, GenerationAnswer] = field(default_factory=dict)
    confirmations: dict[int, Confirmation] = field(default_factory=dict)
    asking: set[int] = field(default_factory=set)
    moving: dict[ShipKey, Moving] = field(default_factory=dict)
    converting: Converting | None = None
    deleted_at: deque[float] = field(default_factory=deque)
    """Monotonic times of prunes, for the seat belt."""
    retired_at: deque[float] = field(default_factory=deque)
    """Monotonic times of zero COMMITs retired, likewise."""
    retire_refused_at: dict[str, float] = field(default_factory=dict)
    """Digest of a COMMIT that a remote would not let go → when; it is asked again an hour later."""
    completed_at: deque[float] = field(default_factory=deque)
    waiting: dict[ShipKey, Waiting] = field(default_factory=dict)
    """Parts that wait for other nodes' shards."""
    problems: Problems = field(default_factory=Problems)
    failures: dict[str, LocalFailure] = field(default_factory=dict)
    """What was tried on this node → why it failed, until it works or for a while."""
    plan: Plan | None = None
    can_clone: bool = False
    link_speeds: dict[str, float] = field(default_factory=dict)
    """Remote → bytes per second of its last upload that was committed."""
    is_first_scan: bool = True
    blocked_since: tuple[str, float] | None = None
    """What holds retention up, and since when (monotonic)."""
    widest_save_seconds: float = 0.0
    views: dict[int, tuple[tuple[object, ...], SaveView]] = field(default_factory=dict)
    """Save id → what its view was made from, and the view."""
    _by_tag: dict[str, int] = field(default_factory=dict)
    """Tag → id of the save of that tag that this node holds now."""

    def load(self) -> None:
        """Fill saves and ships from the journal."""
        self.rows = {row.id: row for row in self.journal.saves()}
        waits = {
            (save_id, key): record.retry_at_seconds
            for save_id, records in self.ships.items()
            for key, record in records.items()
            if record.retry_at_seconds
        }
        self.ships = self.journal.ships()
        for (save_id, key), at_seconds in waits.items():
            # monotonic, so the journal does not have it; a new state of the record needs no wait
            record = self.ships.get(save_id, {}).get(key)
            if record is not None and record.state in (ShipState.FAILED, ShipState.WAITING):
                self.ships[save_id][key] = record.model_copy(update={"retry_at_seconds": at_seconds})
        self._by_tag = {
            row.save.tag: row.id
            for row in sorted(self.rows.values(), key=lambda row: row.id)
            if row.state == "present"
        }
        here = {row.id for row in self.rows.values() if row.state == "present" or row.held}
        self.views = {save_id: view for save_id, view in self.views.items() if save_id in here}
        windows = [row.save.window for row in self.rows.values()]
        self.widest_save_seconds = max(((w.last - w.first) / 1e9 for w in windows), default=0.0)

    def note_failure(self, what: str, error: CkptdError) -> None:
        """Something on this node failed and is tried again; what the trainer changed is no failure."""
        if not isinstance(error, SourceChanged | RefusedError):
            self.failures[what] = LocalFailure(
                text=error.message, hint=error.hint, until_seconds=time.monotonic() + FAILURE_SECONDS
            )

    def ship(self, save_id: int, remote: str, form: str) -> ShipRecord:
        """The record, or a new one."""
        return self.ships.get(save_id, {}).get((remote, form)) or ShipRecord(remote=remote, form=form)

    def rests_on(self, save_id: int) -> dict[str, Any]:
        """Generation and COMMITs of a save's ZeRO form, for an audit line about something of that save."""
        zero = [r for r in self.ships.get(save_id, {}).values() if r.form == ZERO and r.commit_key]
        return {
            "generation": max((r.generation or 0 for r in zero), default=0),
            "commits": [(r.commit_key or "", r.commit_sha256 or "") for r in zero],
        }

    def refused_lately(self) -> frozenset[str]:
        """Digests of COMMITs that a remote would not let go within the last hour."""
        now = time.monotonic()
        return frozenset(sha for sha, at in self.retire_refused_at.items() if now - at < HOUR_SECONDS)

    def put_ship(self, save_id: int, record: ShipRecord) -> None:
        """Journal and remember."""
        self.journal.put_ship(save_id, record)
        self.ships.setdefault(save_id, {})[record.remote, record.form] = record

    def grow(self, save_id: int, save: SealedSave) -> None:
        """More shards of a part came: it is shipped again, as another revision of its manifest."""
        self.journal.replace_sealed(save_id, save)
        for (remote, form), record in list(self.ships.get(save_id, {}).items()):
            if record.state in (ShipState.WAITING, ShipState.FAILED):
                update = {"state": ShipState.NEW, "retry_at_seconds": 0.0}
                self.put_ship(save_id, record.model_copy(update=update))
                self.generations.pop((save_id, remote, form), None)
        self.load()

    def lose_commit(self, save_id: int, remote: str, reason: str) -> None:
        """The remote no longer vouches for a save: it counts as not committed there, and is shipped again."""
        gone = {"state": ShipState.NEW, "commit_key": None, "commit_sha256": None, "supplements": ()}
        record = self.ship(save_id, remote, ZERO)
        self.put_ship(save_id, record.model_copy(update=gone | {"reason": reason}))
        self.generations.pop((save_id, remote, ZERO), None)

    def put_derived(self, save_id: int, record: DerivedRecord, form: str = UNIVERSAL) -> None:
        """Journal and remember."""
        row = self.rows[save_id]
        if form != UNIVERSAL:
            weights = {**row.weights, form: record}
            self.journal.set_weights(save_id, weights)
            self.rows[save_id] = row.model_copy(update={"weights": weights})
            return
        self.journal.set_derived(save_id, record)
        self.rows[save_id] = row.model_copy(update={"derived": record})

    def row_of_tag(self, tag: str) -> SaveRow | None:
        """The save of that tag that this node holds now."""
        return self.rows.get(self._by_tag.get(tag, -1))

    def recent_sizes_bytes(self) -> list[int]:
        """Sizes of the last five saves."""
        rows = sorted(self.rows.values(), key=lambda row: row.id)
        return [row.save.total_bytes for row in rows[-5:]]
