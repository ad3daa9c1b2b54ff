"""Reading the files of a save: inspection in restricted children, then flushing what is complete (§3, P14).

Apart from intake.py, which judges and seals. Results reach the deciding thread by `then`; what the journal
remembers is not read again.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptd.base.retry import changed_seconds
from ckptd.convert.engine import inspect
from ckptd.core.model.facts import REVISION
from ckptd.errors import StorageError
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.listing import FolderListing
    from ckptd.daemon.resources.workers import JobWorkers
    from ckptd.daemon.state.state import JobState
    from ckptd.errors import CkptdError

log = logging.getLogger("ckptd.intake")

TRIES = 3
"""How often a disk may refuse files of a folder before that folder is judged without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """Record a read failure of one state of a folder; `lost`: the files that it was judged without."""

    digest: str
    failures: int
    again_at_seconds: float
    lost: tuple[str, ...] = ()
    reason: str = ""


class ShardInspector:
    """The workers' half of intake, for one job. `flushed`: tag → digest of the folder that is on disk."""

    def __init__(
        self, config: JobConfig, state: JobState, workers: JobWorkers, wake: Callable[[], None]
    ) -> None:
        self._config = config
        self._state = state
        self._workers = workers
        self._wake = wake
        self._inspecting: set[str] = set()
        self._flushing: dict[str, str] = {}
        self.flushed: dict[str, str] = {}
        self._refused: dict[str, _Refused] = {}

    def known_facts(self, folder: FolderListing) -> dict[str, FileFacts]:
        """Return the journal's facts of those files that have not changed."""
        known = {}
        for file in folder.files:
            facts = self._state.journal.facts(file.path, file.identity)
            if facts is None or (facts.reason and not facts.fingerprint):  # nobody read it
                continue
            if facts.facts is None or facts.facts.revision >= REVISION:
                known[file.path] = facts
        return known

    def lost(self, folder: FolderListing) -> str | None:
        """Return why the folder cannot be whole: the disk refuses a file of it, again and again."""
        refused = self._refused.get(folder.tag)
        return refused.reason if refused and refused.lost and refused.digest == folder.digest else None

    def seconds_to_read(self, now_seconds: float) -> list[float]:
        """For each folder that a disk refused: how long until it is asked again."""
        waiting = (r for tag, r in self._refused.items() if tag not in self._inspecting)
        return [refused.again_at_seconds - now_seconds for refused in waiting]

    def forget(self, tag: str) -> None:
        """The folder is gone."""
        self._refused.pop(tag, None)

    def inspect(self, folder: FolderListing, needs: Sequence[str], now_seconds: float) -> None:
        """Read the pickles of some files of a folder, and seldom what a disk would not give."""
        if folder.tag in self._inspecting:
            return
        refused = self._refused.get(folder.tag)
        if refused is not None and refused.digest != folder.digest:
            refused = None
        paths = needs or (refused.lost if refused is not None else ())
        if refused is None or not paths:
            self._refused.pop(folder.tag, None)
        if not paths or (refused is not None and now_seconds < refused.again_at_seconds):
            return
        is_final = refused is not None and refused.failures >= TRIES and not refused.lost
        self._inspecting.add(folder.tag)
        root = self._config.save_dir / folder.tag
        identities = {f.path: f.identity for f in folder.files}

        def then(rows: list[FileFacts]) -> None:
            self._inspecting.discard(folder.tag)
            self._state.failures.clear(f"inspecting {folder.tag}")
            self._answered(folder, rows, is_final=is_final)
            quiet = self._state.folders.quiet.get(folder.tag)
            if quiet is None or quiet.digest != folder.digest:
                return
            self._state.folders.add_facts(folder.tag, rows)
            self._wake()

        def failed(error: CkptdError) -> None:
            self._inspecting.discard(folder.tag)
            # one that is gone meanwhile is not asked for again
            if isinstance(error, StorageError) and folder.tag in self._state.folders.quiet:
                self._put_off(folder)
            if refused is None or not refused.lost:  # else its verdict says so
                self._state.failures.note(f"inspecting {folder.tag}", error)
            log.warning("inspecting %s: %s", folder.tag, error)

        self._workers.submit(
            f"inspecting {folder.tag}",
            lambda: inspect.inspect_files(root, paths, identities=identities, is_final=is_final),
            then,
            failed,
        )

    def _put_off(self, folder: FolderListing) -> None:
        before = self._refused.get(folder.tag) or _Refused(
            digest=folder.digest, failures=0, again_at_seconds=0.0
        )
        failures = before.failures + 1
        again = time.monotonic() + changed_seconds(failures)
        self._refused[folder.tag] = replace(before, failures=failures, again_at_seconds=again)

    def _answered(self, folder: FolderListing, rows: Sequence[FileFacts], *, is_final: bool) -> None:
        lost = [row for row in rows if row.reason and not row.fingerprint] if is_final else []
        if not lost or folder.tag not in self._state.folders.quiet:
            self._refused.pop(folder.tag, None)
            return
        self._put_off(folder)
        refused = self._refused[folder.tag]
        paths, reason = tuple(row.path for row in lost), lost[0].reason or ""
        self._refused[folder.tag] = replace(refused, lost=paths, reason=reason)

    def flush(self, folder: FolderListing, save_dir_fd: int) -> None:
        """Bring a complete folder to the disk, and look whether it is still the same."""
        if self._flushing.get(folder.tag) == folder.digest:
            return
        self._flushing[folder.tag] = folder.digest
        paths = [f.path for f in folder.files]
        fd = os.dup(save_dir_fd)

        def work() -> str | None:
            try:
                fs.flush(fd, folder.tag, paths)
                again = scan_folder(fd, folder.tag)
            finally:
                os.close(fd)
            return again.digest if again else None

        def then(digest: str | None) -> None:
            self._flushing.pop(folder.tag, None)
            self._state.failures.clear(f"flushing {folder.tag}")
            if digest == folder.digest:
                self.flushed[folder.tag] = digest
                # not before: a power cut may leave other bytes under the same identity
                facts = self._state.folders.facts.get(folder.tag, {})
                durable = [(f.identity, facts[f.path]) for f in folder.files if f.path in facts]
                self._state.journal.put_facts(durable)
                self._wake()

        def failed(error: CkptdError) -> None:
            self._flushing.pop(folder.tag, None)
            self._state.failures.note(f"flushing {folder.tag}", error)
            log.warning("flushing %s: %s", folder.tag, error)

        self._workers.submit(f"flushing {folder.tag}", work, then, failed)
