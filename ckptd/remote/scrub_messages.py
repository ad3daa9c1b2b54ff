"""The order to read a piece of a COMMIT's objects again, and its answer (adr/0091)."""

from __future__ import annotations

from typing import Literal

from ckptd.core.identity import Model


class Scrub(Model):
    """Read objects of one COMMIT in the order of their keys and compare them with its manifests."""

    op: Literal["scrub"] = "scrub"
    commit_key: str
    commit_sha256: str
    after: str = ""
    """Go on behind this key."""
    limit_bytes: int
    """Begin no object once that much was read."""
    only: tuple[str, ...] = ()
    """These keys alone; empty: all."""


class BadCopy(Model):
    """One object that is not as it was committed."""

    key: str
    expected: str
    found: str


class Scrubbed(Model):
    """How far it got."""

    kind: Literal["scrubbed"] = "scrubbed"
    read_bytes: int = 0
    next_after: str | None = None
    """None: all objects were compared."""
    bad: tuple[BadCopy, ...] = ()
    unread: tuple[str, ...] = ()
    """Keys that rights or I/O kept from being read: what was known of them stays known."""
    is_gone: bool = False
    """The COMMIT does not count any more; nothing is said of its objects."""
