"""Events of an open order, child → daemon: bytes move, or at least time passes as it should.

`idle_seconds` is how long no byte had moved when the event was sent; the daemon goes on counting from there,
so that a child which can say nothing any more is noticed as well (docs/adr/0090).
"""

from __future__ import annotations

from typing import Literal

from ckptd.core.identity import Model


class Moving(Model):
    """Bytes of one object; `flushed_bytes`/`crc64` can be resumed from after a crash (P7)."""

    kind: Literal["moving"] = "moving"
    key: str
    done_bytes: int
    total_bytes: int
    flushed_bytes: int
    crc64: int
    token: str = ""
    idle_seconds: float = 0.0


class Alive(Model):
    """The order waits or reads, nothing moved; the client keeps it to itself."""

    kind: Literal["alive"] = "alive"
    idle_seconds: float = 0.0
