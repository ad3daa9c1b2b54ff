"""Write a cluster's outputs to a folder of a store with the attempt's log; publish it or give it up.

The log is a small object that outlives the command and the scheduler. The next command takes it over by
writing an attempt of its own; workers and a command of an older attempt that find another's name in it stop.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptd.base import files
from ckptd.base.names import DESCRIPTION
from ckptd.conversion.cluster.messages import SentPart
from ckptd.conversion.engine.writer import own
from ckptd.errors import CkptdError, LockHeld

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.conversion.engine.staging import SourceFolder, StagingDir
    from ckptd.storage.stores.access import Access
    from ckptd.storage.stores.base import Store


LEAST_SECONDS = 2.0
_SHARE = 10
"""At most one part in so many of the time between two writes is spent writing."""


@dataclass(slots=True)
class AttemptProgress:
    """Hold the outputs, uploads and parts known to be at the destination."""

    done: dict[str, str] = field(default_factory=dict)
    """CRC64 by path."""
    uploads: dict[str, str] = field(default_factory=dict)
    """Token by path."""
    parts: dict[str, dict[int, SentPart]] = field(default_factory=dict)


class AttemptLog:
    """One attempt's note at `key` of the destination."""

    def __init__(self, store: Store, key: str, plan_sha256: str) -> None:
        self._store = store
        self._key = key
        self.plan_sha256 = plan_sha256
        self.attempt = secrets.token_hex(8)
        self.progress = AttemptProgress()
        self.is_behind = False
        """Something is done that is not in it yet."""
        self._due_at = 0.0

    def read(self) -> bool:
        """Take over what an earlier attempt of the same plan noted; False: there is no such note."""
        raw = _raw(self._store.get(self._key))
        if raw is None or raw.get("plan_sha256") != self.plan_sha256:
            return False
        try:
            self.progress = AttemptProgress(
                done={str(k): str(v) for k, v in dict(raw.get("done", {})).items()},
                uploads={str(k): str(v) for k, v in dict(raw.get("uploads", {})).items()},
                parts={
                    str(path): {
                        int(p[0]): SentPart(number=p[0], etag=p[1], crc64=p[2], md5=p[3]) for p in parts
                    }
                    for path, parts in dict(raw.get("parts", {})).items()
                },
            )
        except (ValueError, TypeError, IndexError, AttributeError):
            self.progress = AttemptProgress()
        return True

    def claim(self) -> None:
        """Claim the destination for this attempt."""
        self._put()

    def write(self, *, force: bool) -> None:
        """Write it when that is due: seldom enough that writing costs a tenth of the time at most.

        Raises:
            LockHeld: another command took the destination over.
        """
        now = time.monotonic()
        if not force and (now < self._due_at or not self.is_behind):
            return
        self.check_ours()
        self._put()
        ended = time.monotonic()
        self._due_at = ended + max(LEAST_SECONDS, _SHARE * (ended - now))

    def _put(self) -> None:
        known = self.progress
        text = {
            "plan_sha256": self.plan_sha256,
            "attempt": self.attempt,
            "uploads": known.uploads,
            "done": known.done,
            "parts": {
                path: [[p.number, p.etag, p.crc64, p.md5] for p in parts.values()]
                for path, parts in known.parts.items()
            },
        }
        self.is_behind = False
        self._store.put(self._key, json.dumps(text, separators=(",", ":")).encode())

    def check_ours(self) -> None:
        """Check that no other command took the destination over.

        Raises:
            LockHeld: another command did.
        """
        raw = _raw(self._store.get(self._key))
        if raw is None or raw.get("attempt") != self.attempt:
            raise LockHeld(
                f"another conversion took {self._store.url} over ({self._key})", hint="let that one finish"
            )


def _raw(data: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads(data or b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDestination:
    """Describe the destination of outputs: the folder `name` of a store; `note_key`: the attempt's log."""

    store: Store
    url: str
    access: Access
    name: str
    note_key: str
    gid: int | None


def give_up(end: ClusterDestination, note: AttemptLog) -> None:
    """Remove what was made; what cannot be removed stays without ckptd.json."""
    head = f"{end.name}/"

    def remove(key: str) -> None:
        with suppress(CkptdError):
            end.store.delete(key)

    with suppress(CkptdError):
        note.check_ours()
        for path, token in note.progress.uploads.items():
            with suppress(CkptdError):
                end.store.discard(head + path, token)
        keys = [info.key for info in end.store.list(head) if info.key != end.note_key]
        with ThreadPoolExecutor(8, thread_name_prefix="give-up") as pool:
            list(pool.map(remove, keys))
        note.progress.done.clear()
        end.store.delete(end.note_key)


# --- Publishing a shared folder by one rename: the outputs of the plan alone -----------------------------


def publish_folder(
    place: StagingDir,
    name: str,
    target: str,
    folder: SourceFolder,
    description: bytes,
    outputs: Iterable[tuple[str, ...]],
) -> None:
    """Make `name` in the partial folder the folder `target`; `outputs`: the names of each output.

    Temporaries of workers that died are removed; so is whatever else nobody planned: it is our own folder.
    """
    planned = {names[0]: names[1:] for names in outputs}
    with files.opened_dir(name, place.fd) as top:
        for root, _, found, fd in os.fwalk(".", dir_fd=top):
            for file in found:
                if os.path.normpath(os.path.join(root, file)) not in planned:
                    files.remove_file(fd, file)
        for first, links in planned.items():
            for link in links:
                os.link(first, link, src_dir_fd=top, dst_dir_fd=top, follow_symlinks=False)
        for _, _, _, fd in os.fwalk(".", dir_fd=top):
            files.fsync_dir(fd)
        files.write_atomic(top, DESCRIPTION, description, mode=folder.file_mode)
        with files.reading(top, DESCRIPTION) as fd:
            own(fd, folder.gid, folder.file_mode)
            os.fsync(fd)
        own(top, folder.gid, folder.folder_mode)
        files.fsync_dir(top)
    place.publish(target, name)
