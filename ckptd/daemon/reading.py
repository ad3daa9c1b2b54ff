"""Reading the files of a save: inspection in restricted children, then flushing what is complete (§3, P14).

Apart from intake.py, which judges and seals. Results reach the deciding thread by `then`; what the journal
remembers is not read again.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ckptd.convert import supervise
from ckptd.local import fs
from ckptd.local.scan import scan_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.config_model import JobConfig
    from ckptd.core.facts import FileFacts
    from ckptd.core.listing import FolderListing
    from ckptd.daemon.state import JobState
    from ckptd.daemon.workers import OneJobs
    from ckptd.errors import CkptdError

log = logging.getLogger("ckptd.intake")


class Reading:
    """The workers' half of intake, for one job. `flushed`: tag → digest of the folder that is on disk."""

    def __init__(
        self, config: JobConfig, state: JobState, workers: OneJobs, wake: Callable[[], None]
    ) -> None:
        self._config = config
        self._state = state
        self._workers = workers
        self._wake = wake
        self._inspecting: set[str] = set()
        self._flushing: dict[str, str] = {}
        self.flushed: dict[str, str] = {}

    def known_facts(self, folder: FolderListing) -> dict[str, FileFacts]:
        """What the journal knows of files that are as they were."""
        known = {}
        for file in folder.files:
            facts = self._state.journal.facts(file.path, file.identity)
            if facts is not None:
                known[file.path] = facts
        return known

    def inspect(self, folder: FolderListing, paths: Sequence[str]) -> None:
        """Read the pickles of some files of a folder."""
        if folder.tag in self._inspecting:
            return
        self._inspecting.add(folder.tag)
        root = self._config.save_dir / folder.tag
        identities = {f.path: f.identity for f in folder.files}

        def then(rows: list[FileFacts]) -> None:
            self._inspecting.discard(folder.tag)
            self._state.failures.pop(f"inspecting {folder.tag}", None)
            quiet = self._state.quiet.get(folder.tag)
            if quiet is None or quiet.digest != folder.digest:
                return
            self._state.facts.setdefault(folder.tag, {}).update({r.path: r for r in rows})
            self._wake()

        def failed(error: CkptdError) -> None:
            self._inspecting.discard(folder.tag)
            self._state.note_failure(f"inspecting {folder.tag}", error)
            log.warning("inspecting %s: %s", folder.tag, error)

        self._workers.submit(
            f"inspecting {folder.tag}",
            lambda: supervise.inspect_files(root, paths, identities=identities, is_final=False),
            then,
            failed,
        )

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
            self._state.failures.pop(f"flushing {folder.tag}", None)
            if digest == folder.digest:
                self.flushed[folder.tag] = digest
                # not before: a power cut may leave other bytes under the same identity
                facts = self._state.facts.get(folder.tag, {})
                durable = [(f.identity, facts[f.path]) for f in folder.files if f.path in facts]
                self._state.journal.put_facts(durable)
                self._wake()

        def failed(error: CkptdError) -> None:
            self._flushing.pop(folder.tag, None)
            self._state.note_failure(f"flushing {folder.tag}", error)
            log.warning("flushing %s: %s", folder.tag, error)

        self._workers.submit(f"flushing {folder.tag}", work, then, failed)
