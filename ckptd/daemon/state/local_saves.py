"""Record what lies in save_dir: folders as the last scan found them, sealed saves, holds."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.completeness.markers import end_mark
from ckptd.core.completeness.sealing import shards_of
from ckptd.core.model.layouts import Role, parse_shard_name
from ckptd.core.model.records import UNIVERSAL
from ckptd.storage.journal.history import WIDEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.base.identity import FolderIdentity
    from ckptd.core.completeness.judge import Verdict
    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.listing import FolderListing, ListedFile, SaveDirListing
    from ckptd.core.model.records import DerivedRecord, SaveRow
    from ckptd.core.model.save import Order, SealedSave
    from ckptd.core.policy.view import SaveView
    from ckptd.storage.journal.journal import Journal


# --- Folders, sealed or not ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quiet:
    """Record since when a folder's identities have not changed, by our monotonic clock."""

    digest: str
    since_seconds: float
    first_seen_unix: float


class Folders:
    """The checkpoint folders of save_dir as the last scan found them, each with its verdict."""

    def __init__(self) -> None:
        self.listing: SaveDirListing | None = None
        self.verdicts: dict[str, Verdict] = {}
        self.facts: dict[str, dict[str, FileFacts]] = {}
        """tag → path → facts of the current identities."""
        self.quiet: dict[str, Quiet] = {}
        self.in_flight: frozenset[str] = frozenset()
        """Tags of saves that are being written."""
        self._before: dict[str, FolderListing] = {}
        """Folders as the scan before found them."""
        self._came: set[str] = set()
        """Tags of checkpoints that were not there at the first scan."""
        self._begun: dict[str, FolderIdentity] = {}
        """Folders that were seen to come, or without the file that ends a save: what has it now, got it
        since."""

    def update(self, listing: SaveDirListing) -> set[str]:
        """Take over a scan, and forget the folders that are gone; return their tags."""
        before, self.listing = self.listing, listing
        known = self._before = {folder.tag: folder for folder in before.folders} if before else {}
        there = known.keys() | set(before.foreign) if before else None
        for folder in listing.folders:
            old = known.get(folder.tag)
            if folder is old:
                continue
            if old is None and before is not None:
                self._came.add(folder.tag)
            if not _has_end(folder) or (there is not None and folder.tag not in there):
                self._begun[folder.tag] = folder.folder
            elif old is not None and _end_of(old) == _end_of(folder) and old.shards != folder.shards:
                self._begun.pop(folder.tag, None)  # written over: that end is of the save before
        gone = self.quiet.keys() - {folder.tag for folder in listing.folders}
        for tag in gone:
            del self.quiet[tag]
            self.verdicts.pop(tag, None)
            self.facts.pop(tag, None)
            self._begun.pop(tag, None)
        self._came -= gone
        return gone

    def written_shards(self) -> dict[str, tuple[frozenset[ListedFile], frozenset[ListedFile]]]:
        """Return the optimizer shards of each new save that is being written: those at rest since the scan
        before, and the others.
        """
        found = {}
        for folder in self.listing.folders if self.listing is not None and self.in_flight else ():
            if folder.tag in self.in_flight & self._came and folder.other_layout is None:
                now = _optimizer_shards(folder)
                before = self._before.get(folder.tag)
                rests = now & _optimizer_shards(before) if before is not None else frozenset()
                found[folder.tag] = rests, now - rests
        return found

    def saw_end(self, folder: FolderListing) -> bool:
        """Tell whether the file that ends a save is there and was not, in a folder that was there or not."""
        return self._begun.get(folder.tag) == folder.folder and _has_end(folder)

    def note_digest(self, folder: FolderListing, now_seconds: float, *, is_new_save: bool) -> Quiet:
        """Begin the quiet time of a folder anew if it changed; a new save in it is first seen now."""
        quiet = self.quiet.get(folder.tag)
        if quiet is None or quiet.digest != folder.digest:
            first = time.time() if quiet is None or is_new_save else quiet.first_seen_unix
            quiet = Quiet(digest=folder.digest, since_seconds=now_seconds, first_seen_unix=first)
            self.quiet[folder.tag] = quiet
            self.facts.pop(folder.tag, None)
        return quiet

    def add_facts(self, tag: str, facts: Iterable[FileFacts]) -> None:
        """Add facts of files to those known of a folder."""
        self.facts.setdefault(tag, {}).update({fact.path: fact for fact in facts})

    def set_facts(self, tag: str, facts: dict[str, FileFacts]) -> dict[str, FileFacts]:
        """Record what is known of a folder's files, by path."""
        self.facts[tag] = facts
        return facts

    def forget_facts(self, tag: str) -> None:
        """Forget the facts of a sealed folder: the journal has them."""
        self.facts.pop(tag, None)

    def set_verdict(self, tag: str, verdict: Verdict) -> None:
        """Record what a folder is judged to be."""
        self.verdicts[tag] = verdict

    def set_in_flight(self, tags: Iterable[str]) -> None:
        """Record which saves are being written."""
        self.in_flight = frozenset(tags)


def _optimizer_shards(folder: FolderListing) -> frozenset[ListedFile]:
    named = ((file, parse_shard_name(file.name)) for file in folder.shards)
    return frozenset(
        file for file, name in named if name and name.role is Role.OPTIM and name.shard.d is not None
    )


def _end_of(folder: FolderListing) -> ListedFile | None:
    mark = end_mark(folder)
    return next((file for file in folder.files if file.path == mark), None) if mark else None


def _has_end(folder: FolderListing) -> bool:
    return _end_of(folder) is not None


# --- Sealed saves ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunningConversion:
    """A conversion under way, here or while a form is uploaded."""

    save_id: int
    form: str = UNIVERSAL
    done_bytes: int = 0
    total_bytes: int = 0

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        """Record its progress (any thread)."""
        self.done_bytes, self.total_bytes = done_bytes, total_bytes


class LocalSaves:
    """The saves that this node has or had, as the journal knows them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.rows: dict[int, SaveRow] = {}
        self.busy: Counter[int] = Counter()
        """Save id → workers that read it."""
        self.conversion: RunningConversion | None = None
        self.widest_save_seconds = 0.0
        self._by_tag: dict[str, int] = {}
        """Tag → id of the save of that tag that this node holds now."""
        self._views: dict[int, tuple[tuple[object, ...], SaveView]] = {}
        """Save id → what its view was made from, and the view."""
        self._deletion_reasons: dict[int, str] = {}

    def load(self) -> None:
        """Read all saves from the journal."""
        self.rows = {row.id: row for row in self._journal.saves()}
        self._views.clear()
        self._by_tag.clear()
        self.widest_save_seconds = float(self._journal.meta(WIDEST) or 0.0)
        for row in self.rows.values():
            self._note(row)

    def reload(self, *ids: int) -> None:
        """Read changed saves again from the journal; the others, possibly thousands, are not read."""
        for row in self._journal.saves(*ids):
            self.rows[row.id] = row
            self._note(row)

    def _note(self, row: SaveRow) -> None:
        self._views.pop(row.id, None)
        window, tag = row.save.window, row.save.tag
        self.widest_save_seconds = max(self.widest_save_seconds, (window.last - window.first) / 1e9)
        if row.state == "present":
            self._by_tag[tag] = max(row.id, self._by_tag.get(tag, -1))
        elif self._by_tag.get(tag) == row.id:
            del self._by_tag[tag]

    def forget(self, save_id: int) -> None:
        """Forget a save that the journal forgot."""
        for known in (self.rows, self._views, self.busy, self._deletion_reasons):
            known.pop(save_id, None)

    def begin_reading(self, save_id: int) -> None:
        """Count a worker that reads a save: its folder and its hold stay meanwhile."""
        self.busy[save_id] += 1

    def end_reading(self, save_id: int) -> None:
        """Count a worker less."""
        self.busy[save_id] -= 1

    def begin_conversion(
        self, save_id: int, form: str = UNIVERSAL, total_bytes: int = 0
    ) -> RunningConversion:
        """Record the conversion that is under way from now on."""
        self.conversion = RunningConversion(save_id=save_id, form=form, total_bytes=total_bytes)
        return self.conversion

    def end_conversion(self) -> None:
        """Record that no conversion is under way."""
        self.conversion = None

    def put_derived(self, save_id: int, record: DerivedRecord, form: str = UNIVERSAL) -> None:
        """Record a derived form in the journal and here."""
        row = self.rows[save_id]
        if form == UNIVERSAL:
            self._journal.set_derived(save_id, record)
            self.rows[save_id] = row.model_copy(update={"derived": record})
        else:
            weights = {**row.weights, form: record}
            self._journal.set_weights(save_id, weights)
            self.rows[save_id] = row.model_copy(update={"weights": weights})

    def of_tag(self, tag: str) -> SaveRow | None:
        """Return the save of that tag that this node holds now."""
        return self.rows.get(self._by_tag.get(tag, -1))

    def past_order(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> Order | None:
        """Return the order that just these shards were sealed with here, however long ago; a note makes no
        save.
        """
        wanted = set(fingerprints)
        saves = (row.save for row in self.rows.values() if row.save.tag == tag)
        known = next((save.order for save in saves if _is_of(save, wanted)), None)
        return known if known is not None else self._journal.past_order(tag, fingerprints)

    def latest_rows(self) -> list[SaveRow]:
        """Return the last five saves."""
        return sorted(self.rows.values(), key=lambda row: row.id)[-5:]

    def deletion_reason(self, save_id: int) -> str | None:
        """Return why a folder was deleted, as the journal knows it; None: it does not."""
        # the journal's row names every file of the save: it is read once
        if (
            save_id not in self._deletion_reasons
            and (why := self._journal.deletion_reason(save_id)) is not None
        ):
            self._deletion_reasons[save_id] = why
        return self._deletion_reasons.get(save_id)

    def view(self, save_id: int, basis: tuple[object, ...], make: Callable[[], SaveView]) -> SaveView:
        """Return the view of a save, made anew when what it is made from changed."""
        known = self._views.get(save_id)
        if known is None or not _same(known[0], basis):
            known = self._views[save_id] = (basis, make())
        return known[1]


def _same(known: tuple[object, ...], basis: tuple[object, ...]) -> bool:
    """Compare by identity first, then by value: most saves are the same objects as before."""
    return len(known) == len(basis) and all(a is b or a == b for a, b in zip(known, basis, strict=True))


def _is_of(save: SealedSave, wanted: set[tuple[str, str]]) -> bool:
    shards = shards_of(save)
    return shards <= wanted if shards else set(save.fingerprints) == wanted


# --- Holds: clones that keep a save until it is committed ------------------------------------------------


class Holds:
    """Hold what is known of kept copies beside the journal."""

    def __init__(self) -> None:
        self.can_clone = False
        """The file system of save_dir shares extents."""
        self.stray: dict[str, str] = {}
        """Name of a hold that is no known save's → why it is not uploaded; "" while that is to be found
        out."""
        self.failed: set[int] = set()
        """Ids of saves of which a hold could not be made, and may have left something."""
        self.released: dict[int, str] = {}
        """Save id → what is to be said of a hold that was given up for want of room."""

    def set_can_clone(self, can_clone: bool) -> None:
        """Record whether the file system shares extents."""
        self.can_clone = can_clone

    def put_stray(self, name: str, reason: str = "") -> None:
        """Record a hold that is no known save's."""
        self.stray[name] = reason

    def take_unsettled(self) -> list[str]:
        """Return the stray holds that are to be found out about, and forget them."""
        names = [name for name, reason in self.stray.items() if not reason]
        for name in names:
            del self.stray[name]
        return names

    def note_failed(self, save_id: int) -> None:
        """Record that a hold could not be made."""
        self.failed.add(save_id)

    def forget_failed(self, save_id: int) -> None:
        """Record that nothing is left of a hold that could not be made."""
        self.failed.discard(save_id)

    def note_released(self, save_id: int, text: str) -> None:
        """Record what is to be said of a hold that is given up."""
        self.released[save_id] = text

    def forget_released(self, save_id: int) -> None:
        """Record that the save of a hold that was given up is safe, or gone."""
        self.released.pop(save_id, None)
