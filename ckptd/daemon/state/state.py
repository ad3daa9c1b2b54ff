"""Hold what the deciding thread knows of one job between turns: memory that the next scan or the journal can
refill.

Only the deciding thread reads or writes it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptd.base.retry import doubled
from ckptd.core.completeness.sealing import shards_of
from ckptd.core.model.records import UNIVERSAL, ZERO, ShipRecord, ShipState
from ckptd.daemon.state.problems import Problems
from ckptd.errors import RefusedError, SourceChanged
from ckptd.storage.journal.history import BELT_SECONDS, WIDEST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.core.completeness.judge import Verdict
    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.listing import SaveDirListing
    from ckptd.core.model.records import DerivedRecord, SaveRow
    from ckptd.core.model.save import Order, SealedSave
    from ckptd.core.policy.actions import Plan
    from ckptd.core.policy.view import Confirmation, GenerationAnswer, SaveView
    from ckptd.errors import CkptdError
    from ckptd.observe.audit import Audit
    from ckptd.storage.journal.journal import Journal
    from ckptd.storage.remote.documents import Stem

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.core.completeness.missing import Part
    from ckptd.core.model.layouts import NamedShard


MOST_TIMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherHost:
    """Name a host that uploads the files that lie here."""

    node: str
    tag: str
    stands_by: bool
    """We do: of two, the one with the lower node id goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitWait:
    """Record what the last commit attempt lacked; `reason`: the same as text."""

    reason: str
    hint: str = "see the other nodes"
    missing: tuple[NamedShard, ...] = ()
    parts: tuple[Part, ...] = ()
    """Of the tag, of other nodes: as the last look told."""
    attempts: int = 1
    """In a row, with that reason."""
    first_seconds: float = 0.0
    """After the first attempt."""
    is_whole: bool = False
    """All parts are listed, as the last look told: a COMMIT is due."""

    @property
    def retry_seconds(self) -> float:
        """Return the seconds until the next attempt, doubled with each one, at most 8 times the first wait.

        Without the back-off all other nodes would ask each minute, for ever, for a save that one node never
        wrote. A COMMIT by another node is noticed at once, whatever this returns.
        """
        return doubled(self.first_seconds, self.attempts, self.first_seconds * MOST_TIMES)


# --- Uploads under way: for status, forecasts, and for the next start to continue ------------------------


@dataclass(slots=True)
class UploadProgress:
    """Track the progress of an upload under way."""

    done_bytes: int
    total_bytes: int
    started_seconds: float
    start_bytes: int = 0
    objects: dict[str, int] = field(default_factory=dict)
    """Bytes done, by key."""
    durable: tuple[str, int, str] = ("", 0, "")
    """Key, flushed bytes and token last noted in the journal."""


# --- Refused deletions and failed uploads of late files, kept until done or not wanted -------------------
# health/stalls.py reports them.

_FIRST_SECONDS, _MOST_SECONDS = 60.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedDeletion:
    """Record why a checkpoint that may be deleted here is still here."""

    text: str
    hint: str
    is_brief: bool
    """The trainer wrote meanwhile: it goes at the next look."""
    times: int = 1
    """In a row."""
    at_seconds: float = 0.0
    """The last time; monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedDeletion:
    """Record a deletion that a remote refused: how often in a row, and when last (monotonic)."""

    about: str
    text: str
    hint: str
    times: int
    at_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLateFiles:
    """Record why files that came late in a save are not committed beside its COMMIT, while the remote
    works.
    """

    about: str
    text: str
    hint: str
    times: int
    """In a row."""
    at_seconds: float
    """The last time; monotonic."""


def unsent_again(before: FailedLateFiles | None, about: str, error: CkptdError) -> FailedLateFiles:
    """Once more."""
    return FailedLateFiles(
        about=about,
        text=f"{about}: files that came late are not committed: {error.message}",
        hint=error.hint or "tried again by itself, ever more seldom; the folder stays here until then",
        times=before.times + 1 if before is not None else 1,
        at_seconds=time.monotonic(),
    )


def unsent_lately(unsent: Mapping[tuple[int, str], FailedLateFiles]) -> frozenset[tuple[int, str]]:
    """(save id, remote) whose late files are tried again in a minute, two … an hour."""
    now = time.monotonic()
    return frozenset(
        at
        for at, one in unsent.items()
        if now - one.at_seconds < doubled(_FIRST_SECONDS, one.times, _MOST_SECONDS)
    )


# --- The state of a job ----------------------------------------------------------------------------------

ShipKey = tuple[int, str, str]
"""(save id, remote, form)."""

HOUR_SECONDS = BELT_SECONDS
MINUTE_SECONDS = 60.0
SOON_SECONDS = 10.0

FAILURE_SECONDS = 120.0
"""How long status says that something failed here; what is tried in vain again is said anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFailure:
    """Record why something could not be done on this node; until when (monotonic) that is worth saying."""

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
    required: tuple[str, ...] = ()
    """Remotes that must hold a save before its last copy here may go (P1); none: it stays."""
    audit: Audit | None = None
    """None: nobody reads it (a state that no job runs on)."""
    is_shared: bool = False
    """save_dir is shared by hosts on purpose (adr/0110)."""
    sharer: OtherHost | None = None
    """Another host over the same directory."""
    due_since_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    """(remote, COMMIT key) → since when nothing has kept it there; monotonic."""
    retiring_since_seconds: dict[tuple[str, Stem], float] = field(default_factory=dict)
    """(remote, stem) → when a removal that is under way was first seen; monotonic."""
    heard: set[str] = field(default_factory=set)
    """Remotes that were observed since the start, though they may be away by now."""
    untold: set[str] = field(default_factory=set)
    """Remotes that lack a decision that is known here: nothing is retired from them (adr/0165)."""
    run_id: str | None = None
    """The run that save_dir holds; None: not known yet, or runs are not told apart."""
    listing: SaveDirListing | None = None
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
    moving: dict[ShipKey, UploadProgress] = field(default_factory=dict)
    converting: Converting | None = None
    deleted_at: deque[float] = field(default_factory=deque)
    """Monotonic times of prunes, for the hourly limit."""
    retired_at: dict[tuple[str, str], float] = field(default_factory=dict)
    """(remote, digest of a zero COMMIT) → monotonic time of its (first) removal; tries of one count once."""
    retire_refused: dict[tuple[str, str], RefusedDeletion] = field(default_factory=dict)
    """(remote, digest) of a COMMIT that the remote would not let go: two may hold the same bytes."""
    prune_blocked: dict[int, BlockedDeletion] = field(default_factory=dict)
    """Save id → why it may go, and is still here."""
    half_removed: set[int] = field(default_factory=set)
    """Deletions of the journal whose folder lies in the trash and that nobody works on."""
    late_unsent: dict[tuple[int, str], FailedLateFiles] = field(default_factory=dict)
    """(save id, remote) → why files that came late are not committed there."""
    holds_released: dict[int, str] = field(default_factory=dict)
    """Save id → what is to be said of a hold that was given up for want of room."""
    completed_at: deque[float] = field(default_factory=deque)
    waiting: dict[ShipKey, CommitWait] = field(default_factory=dict)
    """Parts that wait for other nodes' shards."""
    problems: Problems = field(default_factory=Problems)
    failures: dict[str, LocalFailure] = field(default_factory=dict)
    """What was tried on this node → why it failed, until it works or for a while."""
    plan: Plan | None = None
    can_clone: bool = False
    stray_holds: dict[str, str] = field(default_factory=dict)
    """Name of a hold that is no known save's → why it is not shipped; "" while that is to be found out."""
    failed_holds: set[int] = field(default_factory=set)
    """Ids of saves of which a hold could not be made, and may have left something."""
    link_speeds: dict[str, float] = field(default_factory=dict)
    """Remote → bytes per second of its last upload that was committed."""
    is_first_scan: bool = True
    tidied_at_seconds: float | None = None
    """When the journal last let go of what ended long ago; monotonic."""
    blocked_since: tuple[str, float] | None = None
    """What holds retention up, and since when (monotonic)."""
    widest_save_seconds: float = 0.0
    views: dict[int, tuple[tuple[object, ...], SaveView]] = field(default_factory=dict)
    """Save id → what its view was made from, and the view."""
    why_pruned: dict[int, str] = field(default_factory=dict)
    """Save id → why its folder went, as far as that was asked for (gone.py)."""
    _by_tag: dict[str, int] = field(default_factory=dict)
    """Tag → id of the save of that tag that this node holds now."""

    def load(self) -> None:
        """Fill saves and ships from the journal."""
        self.rows = {row.id: row for row in self.journal.saves()}
        known, self.ships = self.ships, self.journal.ships()
        for save_id, records in self.ships.items():
            for key, record in records.items():
                records[key] = self._with_wait(record, known.get(save_id, {}).get(key))
        self.views.clear()
        self._by_tag.clear()
        self.widest_save_seconds = float(self.journal.meta(WIDEST) or 0.0)
        for row in self.rows.values():
            self._note(row)

    @staticmethod
    def _with_wait(record: ShipRecord, known: ShipRecord | None) -> ShipRecord:
        """Waits are monotonic, so the journal does not have them; a new state of the record needs none."""
        if known is None or record.state not in (ShipState.FAILED, ShipState.WAITING):
            return record
        return record.model_copy(update={"retry_at_seconds": known.retry_at_seconds})

    def reload(self, *ids: int) -> None:
        """Read the rows of changed saves again from the journal; the others, possibly thousands, are not
        read.
        """
        ships = self.journal.ships(*ids)
        for row in self.journal.saves(*ids):
            self.rows[row.id] = row
            self.ships[row.id] = {
                key: self._with_wait(record, self.ships.get(row.id, {}).get(key))
                for key, record in ships.get(row.id, {}).items()
            }
            self._note(row)

    def _note(self, row: SaveRow) -> None:
        self.views.pop(row.id, None)
        window, tag = row.save.window, row.save.tag
        self.widest_save_seconds = max(self.widest_save_seconds, (window.last - window.first) / 1e9)
        if row.state == "present":
            self._by_tag[tag] = max(row.id, self._by_tag.get(tag, -1))
        elif self._by_tag.get(tag) == row.id:
            del self._by_tag[tag]

    def tidy(self, now_seconds: float) -> None:
        """Now and then, let go of what ended long ago: memory and the journal follow what is here (P12)."""
        is_due = self.tidied_at_seconds is None or now_seconds - self.tidied_at_seconds > HOUR_SECONDS
        if not is_due or self.listing is None:
            return
        self.tidied_at_seconds = now_seconds
        alive = (file.identity for folder in self.listing.folders for file in folder.files)
        highest = max(self.rows.values(), key=lambda row: row.save.order, default=None)
        spare = {row_id for row_id, count in self.busy.items() if count} | {key[0] for key in self.moving}
        spare |= {highest.id} if highest is not None else set()
        spare |= {self.converting.save_id} if self.converting is not None else set()
        for save_id in self.journal.tidy(alive, spare, self.widest_save_seconds):
            self.rows.pop(save_id, None)
            self.ships.pop(save_id, None)
            self.views.pop(save_id, None)
            self.busy.pop(save_id, None)
            self.why_pruned.pop(save_id, None)
            self.confirmations.pop(save_id, None)
            self.asking.discard(save_id)
        for known in (self.generations, self.waiting):
            for key in [key for key in known if key[0] not in self.rows]:
                del known[key]

    def go_on_with(self, run_id: str | None) -> None:
        """Take save_dir as of this run: the generation of a save was chosen among another run's."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.generations.clear()

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

    def blocked_lately(self) -> frozenset[int]:
        """Saves that could not be removed from here: tried again in ten seconds, twenty … an hour."""
        now = time.monotonic()
        return frozenset(
            save_id
            for save_id, stays in self.prune_blocked.items()
            if not stays.is_brief
            and now - stays.at_seconds < doubled(SOON_SECONDS, stays.times, HOUR_SECONDS)
        )

    def not_pruned(self, save_id: int, error: CkptdError) -> None:
        """Once more."""
        before = self.prune_blocked.get(save_id)
        self.prune_blocked[save_id] = BlockedDeletion(
            text=error.message,
            hint=error.hint,
            is_brief=isinstance(error, SourceChanged),
            times=before.times + 1 if before is not None else 1,
            at_seconds=time.monotonic(),
        )

    def refused_lately(self) -> frozenset[tuple[str, str]]:
        """(remote, digest) of COMMITs that did not go from there: asked again in a minute, two … an hour."""
        now = time.monotonic()
        return frozenset(
            at
            for at, refusal in self.retire_refused.items()
            if now - refusal.at_seconds < doubled(MINUTE_SECONDS, refusal.times, HOUR_SECONDS)
        )

    def refused_to_retire(self, sha256: str, remote: str, about: str, error: CkptdError) -> None:
        """Once more."""
        before = self.retire_refused.get((remote, sha256))
        self.retire_refused[remote, sha256] = RefusedDeletion(
            about=about,
            text=f"{about} stays: {error.message}",
            hint=error.hint,
            times=before.times + 1 if before is not None else 1,
            at_seconds=time.monotonic(),
        )

    def put_ship(self, save_id: int, record: ShipRecord) -> None:
        """Journal and remember."""
        self.journal.put_ship(save_id, record)
        self.ships.setdefault(save_id, {})[record.remote, record.form] = record

    def grow(self, save_id: int, save: SealedSave) -> None:
        """Reset the upload of a part that got more shards: it is uploaded again, as another revision of its
        manifest.
        """
        self.journal.replace_sealed(save_id, save)
        for (remote, form), record in list(self.ships.get(save_id, {}).items()):
            if record.state in (ShipState.WAITING, ShipState.FAILED):
                update = {"state": ShipState.NEW, "retry_at_seconds": 0.0}
                self.put_ship(save_id, record.model_copy(update=update))
                self.generations.pop((save_id, remote, form), None)
        self.reload(save_id)

    def forget_damage(self, save_id: int) -> None:
        """Reset refused uploads of a save whose files were put back, so that they are read again."""
        for record in list(self.ships.get(save_id, {}).values()):
            if record.form == ZERO and record.state is ShipState.REFUSED:
                update = {"state": ShipState.NEW, "reason": None, "is_damaged": False}
                self.put_ship(save_id, record.model_copy(update=update))
                self.generations.pop((save_id, record.remote, ZERO), None)

    def lose_commit(self, save_id: int, remote: str, reason: str, form: str = ZERO) -> None:
        """Mark a form as not committed in a remote that no longer vouches for it, so that it is uploaded
        again.
        """
        gone = {"state": ShipState.NEW, "commit_key": None, "commit_sha256": None, "supplements": ()}
        record = self.ship(save_id, remote, form)
        self.put_ship(save_id, record.model_copy(update=gone | {"reason": reason}))
        self.generations.pop((save_id, remote, form), None)

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

    def past_order(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> Order | None:
        """The order that just these shards were sealed with here, however long ago; a note makes no save."""
        wanted = set(fingerprints)
        saves = (row.save for row in self.rows.values() if row.save.tag == tag)
        known = next((save.order for save in saves if _is_of(save, wanted)), None)
        return known if known is not None else self.journal.past_order(tag, fingerprints)

    def recent_sizes_bytes(self) -> list[int]:
        """Sizes of the last five saves."""
        rows = sorted(self.rows.values(), key=lambda row: row.id)
        return [row.save.total_bytes for row in rows[-5:]]


def _is_of(save: SealedSave, wanted: set[tuple[str, str]]) -> bool:
    shards = shards_of(save)
    return shards <= wanted if shards else set(save.fingerprints) == wanted
