"""Leave a lease while a checkpoint is read, and find the leases that a deletion waits for (docs/adr/0214)."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptd.core.model.manifest import parse, to_bytes
from ckptd.core.model.reader import READERS, RENEW_SECONDS, SILENT_SECONDS, Reader
from ckptd.errors import CkptdError, NotPermitted, RefusedError
from ckptd.storage.remote.documents import now_utc
from ckptd.storage.remote.heartbeats import server_time_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.storage.stores.base import ObjectInfo, Store

log = logging.getLogger("ckptd.readers")


class ReaderLease:
    """The lease of one reader on one checkpoint of a remote at a time; its methods may be called by threads.

    A remote that takes none (`is_denied`) is read without: that is logged and changes nothing else.
    """

    def __init__(self, store: Store, what: str) -> None:
        self._store = store
        self._what = what
        self._key = f"{READERS}{secrets.token_hex(8)}.json"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tag: str | None = None
        self._begun_seconds = self._put_seconds = 0.0
        """Monotonic."""
        self._begun = ""
        self._is_left = False
        """The lease lies in the remote, as far as known."""
        self.is_denied = False

    @property
    def is_silent(self) -> bool:
        """Tell whether it counts no more, as nothing was read for so long."""
        return self._tag is not None and time.monotonic() - self._put_seconds >= SILENT_SECONDS

    def hold(self, tag: str) -> None:
        """Leave the lease, or renew it where that is due; call it again while reading goes on."""
        with self._lock:
            now = time.monotonic()
            silent = now - self._put_seconds
            if self.is_denied or (tag == self._tag and silent < RENEW_SECONDS):
                return
            if tag != self._tag or silent >= SILENT_SECONDS:
                self._tag, self._begun_seconds, self._begun = tag, now, now_utc()
            self._put_seconds = now
            self._put(tag, now - self._begun_seconds)

    def _put(self, tag: str, held_seconds: float) -> None:
        reader = Reader(
            tag=tag,
            what=self._what,
            host=socket.gethostname(),
            begun=self._begun,
            renewed=now_utc(),
            held_seconds=round(held_seconds, 1),
        )
        try:
            self._store.put(self._key, to_bytes(reader))
            self._is_left = True
        except (CkptdError, OSError) as error:
            self.is_denied = isinstance(error, NotPermitted | RefusedError)
            log.info("%s is read without a lease, so retention does not wait: %s", self._store.url, error)

    def end(self) -> None:
        """Remove the lease; one that cannot be removed is over a few minutes later."""
        if os.getpid() != self._pid:
            return  # the lease, and the connection, are those of the process that forked this one
        with self._lock:
            is_left, self._is_left, self.is_denied = self._is_left, False, True
            if is_left:
                with contextlib.suppress(CkptdError, OSError):
                    self._store.delete(self._key)

    @contextlib.contextmanager
    def renewing(self) -> Iterator[Callable[[str], None]]:
        """Yield `hold`; what it holds is renewed by a thread, and removed at the end."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(RENEW_SECONDS):
                if self._tag is not None:
                    self.hold(self._tag)

        threading.Thread(target=renew, name="reader-lease", daemon=True).start()
        try:
            yield self.hold
        finally:
            ended.set()
            self.end()


class ReaderLeases:
    """Hold the leases of a reader that goes to and fro between checkpoints, as a file system does: one for
    each.

    Nobody renews them but `hold`: that of a checkpoint of which nothing more is read runs out.
    """

    def __init__(self, store: Store, what: str) -> None:
        self._store = store
        self._what = what
        self._lock = threading.Lock()
        self._leases: dict[str, ReaderLease] = {}

    def hold(self, tag: str) -> None:
        """Hold a lease on a checkpoint (`ReaderLease.hold`), and remove those of others that ran out."""
        with self._lock:
            if any(lease.is_denied for lease in self._leases.values()):
                return
            over: list[str] = []
            if tag not in self._leases:
                over = [one for one, lease in self._leases.items() if lease.is_silent]
                self._leases[tag] = ReaderLease(self._store, self._what)
            ended = [self._leases.pop(one) for one in over]
            held = self._leases[tag]
        held.hold(tag)
        for lease in ended:
            lease.end()

    def end(self) -> None:
        """Remove them all."""
        with self._lock:
            leases, self._leases = self._leases, {}
        for lease in leases.values():
            lease.end()


# --- what a deletion looks at ----------------------------------------------------------------------------


def reader_of(store: Store, tag: str) -> Reader | None:
    """Return somebody who reads that checkpoint now; None: nobody does, as far as leases tell."""
    found = _leases(store)
    return next((one for _, one, is_live in found if is_live and one is not None and one.tag == tag), None)


def expired(store: Store) -> list[ObjectInfo]:
    """Return the leases that readers left which were killed."""
    return [info for info, _, is_live in _leases(store) if not is_live]


def _leases(store: Store) -> Iterator[tuple[ObjectInfo, Reader | None, bool]]:
    """Yield every lease, what it says, and whether it counts; one that cannot be read counts for nobody."""
    infos = list(store.list(READERS))
    now = server_time_seconds(store) if infos else None
    for info in infos:
        is_store_time = now is not None and info.mtime_ns > 0
        seconds_ago: float | None = now - info.mtime_ns / 1e9 if now is not None and is_store_time else None
        if seconds_ago is not None and seconds_ago >= SILENT_SECONDS:
            yield info, None, False  # whatever it says: killed readers leave many, and each costs a request
            continue
        reader = _read(store, info.key)
        if seconds_ago is None and reader is not None:
            seconds_ago = _seconds_since(reader.renewed)
        if reader is not None and seconds_ago is not None:
            yield info, reader, reader.is_live(seconds_ago, is_store_time=is_store_time)
        elif seconds_ago is None or seconds_ago >= SILENT_SECONDS:
            yield info, reader, False


def _read(store: Store, key: str) -> Reader | None:
    with contextlib.suppress(CkptdError):
        data = store.get(key)
        return None if data is None else parse(Reader, data, key)
    return None


def _seconds_since(text: str) -> float | None:
    with contextlib.suppress(ValueError, TypeError):
        return (datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()
    return None
