"""Uploads that a killed `verify --repair` leaves on a server: their ids, kept until they are over.

Only what is noted here is ever aborted by the next repair or `ckptd gc`, of which one is at work at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.errors import LockHeld
from ckptd.place import opened_ours
from ckptd.recover.lock import lock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ckptd.remote.store import Store

NAME = "repair-uploads.json"


class Unfinished:
    """The notes of one job, in its state directory; None: nothing is kept (no state directory)."""

    def __init__(self, state_dir: Path | None) -> None:
        self._dir = state_dir
        self._open = {(remote, key): token for remote, key, token in self._read()}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While no other repair or `gc` of this job is at work on this node: flock on the state directory.

        Raises:
            LockHeld: one is; what it has under way must not be taken for what it left.
        """
        if self._dir is None:
            yield
            return
        with files.opened_dir(self._dir) as fd:
            try:
                lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                msg = f"a repair or `ckptd gc` is at work with {self._dir}"
                raise LockHeld(msg, hint="call it again when that is done") from error
            self._open = {(remote, key): token for remote, key, token in self._read()}
            yield

    def of(self, remote: str) -> list[tuple[str, str]]:
        """(key, token) of uploads to a remote that nobody goes on with."""
        return [(key, token) for (name, key), token in self._open.items() if name == remote]

    def note(self, remote: str, key: str, token: str) -> None:
        """An upload began (or goes on under another id); token "": it is over."""
        if token:
            self._open[remote, key] = token
        elif self._open.pop((remote, key), None) is None:
            return
        self._write()

    def give_up(self, remote: str, store: Store) -> int:
        """Abort what is noted of a remote; how many there were."""
        left = self.of(remote)
        for key, token in left:
            store.discard(key, token)
            self.note(remote, key, "")
        return len(left)

    def _read(self) -> Iterable[tuple[str, str, str]]:
        try:
            rows = json.loads((self._dir / NAME).read_bytes()) if self._dir is not None else []
            return [(str(remote), str(key), str(token)) for remote, key, token in rows]
        except (OSError, ValueError, TypeError):
            return []

    def _write(self) -> None:
        if self._dir is None:
            return
        rows = [[remote, key, token] for (remote, key), token in sorted(self._open.items())]
        with opened_ours(self._dir) as fd:
            files.write_atomic(fd, NAME, json.dumps(rows).encode())
