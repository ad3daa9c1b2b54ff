"""Read the files of saves: inspection in restricted children, then flushing what is complete (§3, P14).

`ShardInspector` reads folders that are not sealed yet, `LateFiles` what appears in sealed ones: a trainer
writes trainer_state.json or a README late, a user drops notes into a checkpoint. Results reach the deciding
thread by `then`; what the journal remembers is not read again.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckptd.base.retry import changed_seconds
from ckptd.conversion.engine import inspect
from ckptd.core.completeness.sealing import sealed_file
from ckptd.core.model.layouts import Role, ShardKey
from ckptd.core.model.shard_facts import REVISION
from ckptd.core.policy.blockers import newcomers
from ckptd.errors import StorageError
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.listing import FolderListing, SaveDirListing
    from ckptd.daemon.resources.workers import JobWorkers
    from ckptd.daemon.state.state import JobState
    from ckptd.errors import CkptdError
    from ckptd.storage.local.scan import OpenWriters

log = logging.getLogger("ckptd.intake")
Found = TypeVar("Found")

TRIES = 3
"""Refusals by a disk before a folder is judged without the refused files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """Record a read failure of one state of a folder; `lost`: the files that it was judged without."""

    digest: str
    failures: int
    again_at_seconds: float
    lost: tuple[str, ...] = ()
    reason: str = ""


def _refused_again(before: _Refused | None, folder: FolderListing, reason: str = "") -> _Refused:
    """Return the record of one more failure to read a folder: it is read again ever more seldom."""
    if before is None or before.digest != folder.digest:
        before = _Refused(digest=folder.digest, failures=0, again_at_seconds=0.0)
    failures = before.failures + 1
    again = time.monotonic() + changed_seconds(failures)
    return replace(before, failures=failures, again_at_seconds=again, reason=reason or before.reason)


def _flushed(
    save_dir_fd: int, folder: FolderListing, paths: Sequence[str], read: Callable[[], Found]
) -> Found | None:
    """Bring files of a folder to the disk, then read; None: the folder is another one now."""
    try:
        fs.flush(save_dir_fd, folder.tag, paths)
        found = read()
        again = scan_folder(save_dir_fd, folder.tag)
    finally:
        os.close(save_dir_fd)
    return found if again is not None and again.digest == folder.digest else None


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
        """Return, for each folder that a disk refused, the seconds until it is read again."""
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
        root = self._config.save_dir / folder.place
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
                self._refused[folder.tag] = _refused_again(self._refused.get(folder.tag), folder)
            if refused is None or not refused.lost:  # else its verdict says so
                self._state.failures.note(f"inspecting {folder.tag}", error)
            log.warning("inspecting %s: %s", folder.tag, error)

        self._workers.submit(
            f"inspecting {folder.tag}",
            lambda: inspect.inspect_files(
                root, paths, identities=identities, manifest=folder.manifest, is_final=is_final
            ),
            then,
            failed,
        )

    def _answered(self, folder: FolderListing, rows: Sequence[FileFacts], *, is_final: bool) -> None:
        lost = [row for row in rows if row.reason and not row.fingerprint] if is_final else []
        if not lost or folder.tag not in self._state.folders.quiet:
            self._refused.pop(folder.tag, None)
            return
        refused = _refused_again(self._refused.get(folder.tag), folder, lost[0].reason or "")
        self._refused[folder.tag] = replace(refused, lost=tuple(row.path for row in lost))

    def flush(self, folder: FolderListing, save_dir_fd: int) -> None:
        """Bring a complete folder to the disk, and look whether it is still the same."""
        if self._flushing.get(folder.tag) == folder.digest:
            return
        self._flushing[folder.tag] = folder.digest

        def then(is_durable: bool | None) -> None:
            self._flushing.pop(folder.tag, None)
            self._state.failures.clear(f"flushing {folder.tag}")
            if is_durable:
                self.flushed[folder.tag] = folder.digest
                # not before: a power cut may leave other bytes under the same identity
                facts = self._state.folders.facts.get(folder.tag, {})
                durable = [(f.identity, facts[f.path]) for f in folder.files if f.path in facts]
                self._state.journal.put_facts(durable)
                self._wake()

        def failed(error: CkptdError) -> None:
            self._flushing.pop(folder.tag, None)
            self._state.failures.note(f"flushing {folder.tag}", error)
            log.warning("flushing %s: %s", folder.tag, error)

        paths = [file.path for file in folder.files]
        work = partial(_flushed, os.dup(save_dir_fd), folder, paths, lambda: True)
        self._workers.submit(f"flushing {folder.tag}", work, then, failed)


class LateFiles:
    """The late files of one job's saves, as they become durable."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        workers: JobWorkers,
        writers: OpenWriters,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._state = state
        self._workers = workers
        self._writers = writers
        self._wake = wake
        self._looking: dict[str, str] = {}
        self._refused: dict[str, _Refused] = {}
        self.is_waiting = False
        """A file came late and may be durable soon."""

    @property
    def refused(self) -> dict[str, str]:
        """Tag → why a file that came late cannot be read; tried ever more seldom, up to an hour."""
        return {tag: refused.reason for tag, refused in self._refused.items()}

    def read_late_files(self, listing: SaveDirListing, save_dir_fd: int, now_seconds: float) -> None:
        """Flush and read what has come to rest since its folder was sealed."""
        self.is_waiting = False
        digests = {folder.tag: folder.digest for folder in listing.folders} if self._refused else {}
        self._refused = {t: r for t, r in self._refused.items() if digests.get(t) == r.digest}
        for folder in listing.folders:
            row = self._state.saves.of_tag(folder.tag)
            quiet = self._state.folders.quiet.get(folder.tag)
            if row is None or quiet is None or folder.folder != row.save.folder:
                continue
            if not newcomers(row.save, folder):
                continue
            refused = self._refused.get(folder.tag)
            if refused is not None and now_seconds < refused.again_at_seconds:
                continue
            self.is_waiting = True
            is_quiet = now_seconds - quiet.since_seconds >= self._config.settle_seconds
            if not is_quiet or self._looking.get(folder.tag) == folder.digest:
                continue
            if not self._writers.has(folder.tag, now_seconds - quiet.since_seconds):
                self._look_at(row.id, folder, save_dir_fd)

    def _look_at(self, save_id: int, folder: FolderListing, save_dir_fd: int) -> None:
        self._looking[folder.tag] = folder.digest
        save = self._state.saves.rows[save_id].save
        files = newcomers(save, folder)
        identities = {file.path: file.identity for file in files}
        root = self._config.save_dir / folder.place

        def read() -> list[FileFacts]:
            return inspect.inspect_files(root, list(identities), identities=identities, is_final=False)

        def then(facts: list[FileFacts] | None) -> None:
            self._looking.pop(folder.tag, None)
            self._refused.pop(folder.tag, None)
            row = self._state.saves.rows.get(save_id)
            if facts is not None and row is not None and row.save == save:
                by_path = {fact.path: fact for fact in facts}
                aside = {"role": Role.SIDE, "shard": ShardKey(), "tensor_fingerprint": None}
                found = {
                    file.path: sealed_file(file, by_path[file.path], folder).model_copy(update=aside)
                    for file in files
                }
                late = {file.path: file for file in save.late} | found
                self._state.replace_sealed(save_id, save.model_copy(update={"late": tuple(late.values())}))
                log.info("%s: %d files came after it was complete", folder.tag, len(found))
            self._wake()

        def failed(error: CkptdError) -> None:
            self._looking.pop(folder.tag, None)
            self._refused[folder.tag] = _refused_again(self._refused.get(folder.tag), folder, error.message)
            log.warning("what came late in %s: %s", folder.tag, error)

        work = partial(_flushed, os.dup(save_dir_fd), folder, list(identities), read)
        self._workers.submit(f"looking at what came late in {folder.tag}", work, then, failed)
