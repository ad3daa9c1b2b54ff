"""Decide which of two saves is the newer: assign each save its order, and note whether anything proves it
(§3, P9).

Saves that appear while the daemon runs are seen one after the other. Those found at once after a restart are
ordered by step and the trainer's `latest`; where their times contradict that, neither is deleted as the older
one before the next save (docs/adr/0102). A save that lay here while another node went on is no rewind, nor is
a copy of an older checkpoint.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from ckptd.core.completeness.order import (
    CoexistingSave,
    copied_order,
    is_proven,
    next_order,
    overtaken_order,
    rebuilt_order,
    sealing_order,
)
from ckptd.core.completeness.sealing import shards_among
from ckptd.core.model.save import Order
from ckptd.storage.journal.schema import FOUND

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.completeness.judge import Verdict
    from ckptd.core.model.listing import FolderListing, SaveDirListing
    from ckptd.core.model.save import SealedFile
    from ckptd.daemon.intake.known_saves import KnownSaves
    from ckptd.daemon.state.state import JobState
    from ckptd.storage.journal.journal import Journal

log = logging.getLogger("ckptd.intake")

Mark = tuple[tuple[object, ...], ...]


def written_ns(folder: FolderListing) -> int:
    """The greatest mtime of its shards."""
    return max((f.identity.mtime_ns for f in folder.shards), default=0)


class Ordering:
    """The orders of one job's saves; remembers when it saw each folder's shards change last."""

    def __init__(
        self, state: JobState, known: KnownSaves, is_sealed: Callable[[FolderListing], bool]
    ) -> None:
        self._state = state
        self._is_sealed = is_sealed
        self._known = known
        self._seen: dict[str, tuple[Mark, float]] = {}
        self._first_seconds: float | None = None
        """When this process looked first: what changed since has a later time in `_seen`."""
        self._guessed: set[str] = set()
        """Tags of what was taken for older than its step says: until the next save it stays."""
        self._at_begin: dict[str, int] | None = None
        """Tag → when its shards were written last, of what lay here when the journal was begun."""

    def note_changes(self, listing: SaveDirListing, now_seconds: float) -> None:
        """Note what changed; a file beside the shards, or their rights, say nothing about order."""
        if self._at_begin is None:
            self._at_begin = _found_by(self._state.journal, listing)
        if self._first_seconds is None:
            self._first_seconds = now_seconds
        seen = {}
        for folder in listing.folders:
            mark = tuple(
                (f.path, f.identity.ino, f.identity.size_bytes, f.identity.mtime_ns) for f in folder.shards
            )
            known = self._seen.get(folder.tag)
            seen[folder.tag] = known if known is not None and known[0] == mark else (mark, now_seconds)
        self._seen = seen

    def ranked(self, ready: list[tuple[FolderListing, Verdict]]) -> list[tuple[FolderListing, Verdict]]:
        """Saves that are durable now, in the order in which they count as saved."""
        latest = self._state.folders.listing.latest if self._state.folders.listing else None
        seen = {tag: at for tag, (_, at) in self._seen.items()}
        order = sealing_order({f.tag: v.step or 0 for f, v in ready}, latest, seen)
        rank = {tag: place for place, tag in enumerate(order)}
        return sorted(ready, key=lambda row: rank[row[0].tag])

    def order_of(
        self, folder: FolderListing, step: int, files: tuple[SealedFile, ...], *, is_new_tag: bool
    ) -> Order:
        """The order of a save that is sealed now."""
        self._guessed.discard(folder.tag)
        fingerprints = tuple(sorted((f.path, f.fingerprint) for f in files))
        order = self._known.known_order(folder.tag, fingerprints)
        if order is not None:
            return order
        own = max((row.save.order for row in self._state.saves.rows.values()), default=None)
        remote = self._known.highest()
        highest = max([one for one in (own, remote) if one is not None], default=None)
        # saved anew since then, it is what the trainer does now: perhaps a rewind
        was_found = is_new_tag and (self._at_begin or {}).get(folder.tag) == written_ns(folder)
        if highest is not None:
            original = None
            if step < highest.step or highest.branch > 1:  # else it changes nothing, and rows may be many
                shards = shards_among(files, folder.roots)
                original = self._known.original(folder.tag, fingerprints, shards)
            order = copied_order(step, original, highest) if original is not None else None
            if order is not None:
                text = "%s is a copy of an older checkpoint (step %d), no rewind; `ckptd pin` keeps it"
                log.info(text, folder.tag, order.step)
            elif remote is not None and self._went_on_elsewhere(folder, own, remote):
                order = overtaken_order(step, own, remote)
                if order.branch < next_order(step, remote).branch:
                    text = "%s was here before step %d of another node, no rewind"
                    log.info(text, folder.tag, remote.step)
            if order is not None:
                if original is not None or not was_found:  # what a new journal finds is old, without doubt
                    self._guessed.add(folder.tag)
                return order
        passed_by = self._passed_by(folder, step, highest)
        if was_found or passed_by is not None:
            return rebuilt_order(step, passed_by or highest, self._known.orders_of(folder.tag))
        return next_order(step, highest)

    def _went_on_elsewhere(self, folder: FolderListing, own: Order | None, remote: Order) -> bool:
        """Tell whether another node committed the newest, and this one, written while nobody looked, is not
        later.

        A clock can only narrow this: what this process saw change is what the trainer does here, now.
        """
        is_elsewhere = own is None or remote > own
        has_changed = self._seen[folder.tag][1] != self._first_seconds
        if not is_elsewhere or has_changed:
            return False
        since_ns = min((f.identity.mtime_ns for f in folder.shards), default=0)
        return self._known.may_precede(since_ns, remote)

    def _passed_by(self, folder: FolderListing, step: int, highest: Order | None) -> Order | None:
        """The oldest of the saves that were sealed while this older one lay there and could not be yet.

        None unless the newest save is one of them; with one, no run was rewound.
        """
        listing = self._state.folders.listing
        here = {f.tag: f for f in listing.folders} if listing is not None else {}
        passed_by = []
        for row in self._state.saves.rows.values():
            other, order = here.get(row.save.tag), row.save.order
            was_there = row.state == "present" and folder.tag in row.save.beside
            if not was_there or other is None or step >= row.save.step or not self._is_sealed(other):
                continue
            if is_proven(self._found(folder, Order(order.branch, step, 0)), self._found(other, order)):
                passed_by.append(order)
        return min(passed_by) if highest in passed_by else None

    def beside(self, tag: str) -> tuple[str, ...]:
        """Other folders with shards that are not the save that was sealed of their tag, if any was."""
        folders = self._state.folders.listing.folders if self._state.folders.listing else ()
        return tuple(f.tag for f in folders if f.tag != tag and f.shards and not self._is_sealed(f))

    def rivals(self, folder: FolderListing, order: Order) -> tuple[int, ...]:
        """Saves sealed while this one lay there unsealed, where what is known of both contradicts.

        All that are here, where its order is a guess: another guess is no next save.
        """
        listing = self._state.folders.listing
        here = {f.tag: f for f in listing.folders} if listing is not None else {}
        mine = self._found(folder, order)
        if folder.tag in self._guessed:
            return tuple(row.id for row in self._state.saves.rows.values() if row.state == "present")
        found = []
        for row in self._state.saves.rows.values():
            other = here.get(row.save.tag)
            was_there = row.state == "present" and folder.tag in row.save.beside
            if not was_there or other is None or not self._is_sealed(other):
                continue
            if not is_proven(mine, self._found(other, row.save.order)):
                found.append(row.id)
        return tuple(found)

    def _found(self, folder: FolderListing, order: Order) -> CoexistingSave:
        listing = self._state.folders.listing
        return CoexistingSave(
            order=order,
            seen_seconds=self._seen[folder.tag][1],
            written_ns=written_ns(folder),
            is_latest=listing is not None and listing.latest == folder.tag,
        )


def _found_by(journal: Journal, listing: SaveDirListing) -> dict[str, int]:
    """Return the folders (tag → last write, ns) that lay here when the journal was begun.

    A process that was killed before it sealed them may have begun it.
    """
    text = journal.meta(FOUND)
    if text is None:  # begun by an earlier release, which took what it found for old
        return {}
    if not text:
        text = json.dumps({folder.tag: written_ns(folder) for folder in listing.folders})
        journal.set_meta(FOUND, text)
    found: dict[str, int] = json.loads(text)
    return found
