"""Make the universal form of a save on this node, in a worker apart from the deciding thread (§4).

A form that is there already and was made from this very save is used; any other is deleted first. A stop
leaves what is finished to the next start, a lack of space leaves nothing.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.base.owned_dirs import path_of
from ckptd.conversion import options as convert_options
from ckptd.conversion.engine import supervisor
from ckptd.conversion.engine.staging import partial_name
from ckptd.core.model.records import UNIVERSAL, Comparison, DerivedRecord, DerivedState
from ckptd.errors import BehindError, NoSpaceError, RefusedError, SourceChanged
from ckptd.storage.local import fs
from ckptd.storage.local.derived import describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptd.core.model.records import SaveRow


PLACE = f"{fs.DERIVED}/{UNIVERSAL}"


@dataclass(slots=True)
class Signals:
    """Carry signals from the deciding thread to a conversion under way."""

    pause: threading.Event = field(default_factory=threading.Event)
    """A save is in flight (P11)."""
    stop: threading.Event = field(default_factory=threading.Event)
    """The daemon ends; the next start goes on."""
    give_room: threading.Event = field(default_factory=threading.Event)
    """The trainer needs the room (P13)."""
    holds: Callable[[], bool] = lambda: True
    """The lease of a shared directory is this host's."""

    def must_end(self) -> bool:
        """Tell whether the conversion must end: a stop, room for the trainer, or a lost lease."""
        return self.stop.is_set() or self.give_room.is_set() or not self.holds()


def found_universal(fd: int, row: SaveRow) -> DerivedRecord | None:
    """Return the form that an earlier attempt published for this very save before it was killed or failed,
    else None.

    Raises:
        StorageError, NotPermitted and others: the leftovers beside the form cannot be removed.
    """
    tag = row.save.tag
    found = describe(fd, f"{PLACE}/{tag}")
    if found is None or not found.is_made_from(row.save.shard_fingerprints):
        return None
    fs.remove_ours(fd, fs.STAGING, partial_name(tag))
    return DerivedRecord(
        state=DerivedState.READY,
        plan_sha256=found.plan_sha256,
        layout=found.layout,
        alignment=found.alignment,
    )


def make_universal(
    fd: int,
    save_dir: Path,
    row: SaveRow,
    options: convert_options.ConvertOptions,
    progress: Callable[[convert_options.ConvertProgress], None],
    signals: Signals,
    removing: Callable[[str], None],
) -> DerivedRecord:
    """Make `_ckptd/derived/universal/<tag>` and say what it is; `removing`: called with why before one goes.

    Raises:
        NoSpaceError: there is no room, or there is none any more; nothing is left behind.
        BehindError: stopped. RefusedError, SourceChanged and others: as the converter says.
    """
    tag, place = row.save.tag, PLACE
    os.close(fs.ensure_ours(fd, place))
    os.close(fs.ensure_ours(fd, fs.STAGING))
    if len(row.save.roots) > 1:
        msg = f"{tag} holds two engines ({', '.join(row.save.roots)})"
        raise RefusedError(msg, hint="`ckptd convert` each; the ZeRO form is safe all the same")
    made_before = found_universal(fd, row)
    if made_before is not None:
        return made_before
    if tag in fs.names_in(fd, place):
        removing("made from another save of the tag")
    fs.remove_ours(fd, place, tag)
    report = _converted(fd, save_dir, row, options, progress, signals)
    made = describe(fd, f"{place}/{tag}")
    is_of_this_save = made is not None and made.is_made_from(row.save.shard_fingerprints)
    if not is_of_this_save or not fs.folder_is_intact(fd, tag, row.save.files):
        msg = f"{tag} was saved again while it was converted"
        removing(msg)
        fs.remove_ours(fd, place, tag)
        raise SourceChanged(msg)
    return DerivedRecord(
        state=DerivedState.READY,
        plan_sha256=report.plan_sha256,
        layout=report.layout,
        alignment=made.alignment if made else 0,
        is_cloned=report.bytes_cloned > 0,
        is_source_verified=report.verified,
        comparison=Comparison(
            tensors=report.compared_tensors,
            elements=report.compared_elements,
            not_compared=report.not_compared,
        ),
        bytes=report.bytes,
    )


def _converted(
    fd: int,
    save_dir: Path,
    row: SaveRow,
    options: convert_options.ConvertOptions,
    progress: Callable[[convert_options.ConvertProgress], None],
    signals: Signals,
) -> convert_options.ConvertReport:
    tag = row.save.tag
    try:
        return supervisor.convert(
            save_dir / tag / row.save.roots[0],
            path_of(save_dir, f"{PLACE}/{tag}"),
            options,
            on_progress=progress,
            should_stop=signals.must_end,
            should_pause=signals.pause.is_set,
            work_dir=path_of(save_dir, fs.STAGING),
            beneath=save_dir,
        )
    except BehindError as error:
        if signals.stop.is_set() or not signals.give_room.is_set():
            raise
        fs.remove_ours(fd, fs.STAGING, partial_name(tag))
        msg = f"the universal form of {tag} was given up half-way: less than min_free was left"
        raise NoSpaceError(msg, hint="it is tried again when there is room") from error
