"""Record in the destination whose attempt it is and what of it is done: a small object.

It outlives the command and the scheduler. The next command takes it over by writing an attempt of its own;
workers and a command of an older attempt that find another's name in it stop.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptd.convert.cluster.messages import SentPart
from ckptd.errors import LockHeld

if TYPE_CHECKING:
    from ckptd.storage.stores.base import Store

LEAST_SECONDS = 2.0
_SHARE = 10
"""Of the time between two writes, one in so many parts may go into writing."""


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
        """From now on the destination is this attempt's."""
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
        """Nobody took the destination over.

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
