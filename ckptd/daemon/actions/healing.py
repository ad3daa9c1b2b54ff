"""Repair what the scrub found damaged, one file's checkpoint at a time, while nothing else is going on.

The repair is that of `ckptd verify --repair`, in a process of its own: from this node's folder or a remote,
whichever proves good. What cannot be repaired stays a problem and is tried again ever more seldom.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptd.base.retry import doubled
from ckptd.config.commands import command_for
from ckptd.core.completeness.sealing import put_back
from ckptd.core.policy.view import HERE
from ckptd.errors import SourceChanged
from ckptd.maintenance.repair_order import RepairOrder, repair_apart
from ckptd.observe.logs import line_fields
from ckptd.storage.local.scan import scan_folder
from ckptd.storage.remote.documents import tag_of_key
from ckptd.storage.remote.kept import SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.daemon.resources.workers import JobWorkers
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.scrub import Fault, Scrubber
    from ckptd.errors import CkptdError
    from ckptd.maintenance.repair_order import RepairedFile

log = logging.getLogger("ckptd.heal")

AGAIN_SECONDS, MOST_SECONDS = 60.0, 6 * 3600.0
"""Between attempts at what could not be repaired."""
TOLD_SECONDS = 86400.0
"""So long status tells of a repair."""


@dataclass(frozen=True, slots=True)
class _Repair:
    """The repair under way: its tag, the save of it here, and how it is stopped."""

    tag: str
    save_id: int | None
    stop: threading.Event = field(default_factory=threading.Event)


class Healer:
    """Repairs for one job; every method is called in the deciding thread."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        state_dir: Path,
        scrubber: Scrubber,
        workers: JobWorkers,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._state = state
        self._state_dir = state_dir
        self._scrubber = scrubber
        self._workers = workers
        self._wake = wake
        self._under_way: _Repair | None = None
        self._save_dir_fd = -1
        self._tries: dict[tuple[str, str], tuple[int, float]] = {}
        """(place, digest of the COMMIT) → attempts in vain, and when the last one ended."""

    def turn(self, save_dir_fd: int, *, is_wanted: bool) -> None:
        """Begin the next repair, or end the one under way where something else begins."""
        self._save_dir_fd = save_dir_fd
        for name, keys in self._scrubber.take_repaired():
            self._tell(name, [(key, SOURCE) for key in keys])
        if self._under_way is not None:
            # what it puts into the folder looks like a save in flight
            if not is_wanted or self._scrubber.is_disturbed(by_all_but=self._under_way.tag):
                self.stop()
            return
        if not self._scrubber.is_quiet:
            return
        faults = self._scrubber.faults()
        known = {(fault.place, fault.view.sha256) for fault in faults}
        self._tries = {key: tried for key, tried in self._tries.items() if key in known}
        due = next((fault for fault in faults if self._is_due(fault)), None)
        if due is not None:
            self._begin(due)

    def stop(self) -> None:
        """End the repair under way; what is durable of it is used by the next."""
        if self._under_way is not None:
            self._under_way.stop.set()

    def _is_due(self, fault: Fault) -> bool:
        tries, at_seconds = self._tries.get((fault.place, fault.view.sha256), (0, 0.0))
        return not tries or time.monotonic() - at_seconds >= doubled(AGAIN_SECONDS, tries, MOST_SECONDS)

    def _begin(self, fault: Fault) -> None:
        order = RepairOrder(
            job=self._config,
            state_dir=str(self._state_dir),
            tag=fault.view.commit.tag,
            remote=None if fault.place == HERE else fault.place,
            keys=tuple(copy.key for copy in fault.bad),
        )
        row = self._state.saves.of_tag(order.tag) if fault.place == HERE else None
        self._under_way = one = _Repair(order.tag, row.id if row is not None else None)
        if one.save_id is not None:
            # neither its folder nor its universal form goes meanwhile
            self._state.saves.begin_reading(one.save_id)
        self._workers.submit(
            f"repairing {order.tag}",
            lambda: repair_apart(order, one.stop.is_set),
            partial(self._ended, fault),
            partial(self._failed, fault),
        )

    def _end(self, fault: Fault) -> None:
        """Seal what was put back, before a look at the folder takes it for another save."""
        one, self._under_way = self._under_way, None
        if one is None or one.save_id is None:
            return
        self._state.saves.end_reading(one.save_id)
        row = self._state.saves.rows.get(one.save_id)
        folder = scan_folder(self._save_dir_fd, one.tag)
        paths = [copy.key for copy in fault.bad]
        same = put_back(row.save, folder, paths) if row is not None and folder is not None else None
        if same is not None:
            self._state.replace_sealed(one.save_id, same)

    def _ended(self, fault: Fault, rows: list[RepairedFile]) -> None:
        self._end(fault)
        fixed = [(row.key, row.source) for row in rows if row.left is None and row.source is not None]
        if fixed:
            self._tell(fault.place or "this node", fixed, fault.view.commit.tag)
        left = next((row.left for row in rows if row.left is not None), None)
        if left is None and not rows:
            left = "nothing that may be repaired was found"
        self._note(fault, left)

    def _tell(self, where: str, fixed: Sequence[tuple[str, str]], tag: str | None = None) -> None:
        """Log each (file, source), of a document the tag that it speaks of, and tell of the first."""
        texts = [f"{where}: {key} was damaged and is repaired from {source}" for key, source in fixed]
        for (key, _), text in zip(fixed, texts, strict=True):
            log.warning("%s", text, extra=line_fields("repair", tag_of_key(key) if tag is None else tag))
        more = f" (and {len(fixed) - 1} more)" if len(fixed) > 1 else ""
        step = f"a disk that rots may be failing; {command_for(self._config, 'logs')}"
        self._state.problems.put(
            "copy-repaired", where, f"{texts[0]}{more}", step, lasts_seconds=TOLD_SECONDS
        )

    def _failed(self, fault: Fault, error: CkptdError) -> None:
        self._end(fault)
        if isinstance(error, SourceChanged):
            return
        log.warning("repairing %s: %s", fault.view.commit.tag, error.message)
        self._note(fault, error.message)

    def _note(self, fault: Fault, left: str | None) -> None:
        """Note what is left; all that was tried is read again by the scrub, which alone ends the problem."""
        key = (fault.place, fault.view.sha256)
        tries = self._tries.get(key, (0, 0.0))[0] + 1
        self._tries[key] = (tries, time.monotonic())
        self._scrubber.note_repair(fault, "" if left is None else f"not repaired: {left}")
        self._wake()
