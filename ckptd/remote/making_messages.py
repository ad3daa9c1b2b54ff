"""What an order says of a form that is made while it is sent, and what its child answers (docs/adr/0093).

No disk of this node ever holds such a form: the order names shards, or a COMMIT whose objects are read
(adr/0118); the child plans and makes it of them.
"""

from __future__ import annotations

from typing import Literal

from ckptd.core.identity import FileIdentity, Model


class Committed(Model):
    """The ZeRO form that a form is made of where no node has all shards: what that remote holds."""

    sha256: str
    """Of its COMMIT, of the order's tag and generation."""
    takeover_seconds: float
    """A node that makes the form and was not heard of for so long is replaced."""


class Making(Model):
    """A derived form that no disk holds: made of the sealed shards while it is sent."""

    folders: tuple[str, ...]
    """Of the shards, relative to `ShipOrder.root`, or in the remote's; more than one is refused."""
    zero: Committed | None = None
    """None: the shards lie here."""
    sealed: tuple[tuple[str, FileIdentity], ...]
    """Every file of the save, relative to `ShipOrder.root`, as it was sealed (P4)."""
    below: str = ""
    """Path of the form in the manifest's folder."""
    staging: str
    """Folder of this disk where the plan lies, without a name."""
    memory_bytes: int
    """What the process that makes it may use (P12)."""
    plan_sha256: str = ""
    """The plan that `ShipOrder.shipped` and `partly` were made by."""


class Planned(Model):
    """Event: how much an order makes, and which plan it follows."""

    kind: Literal["planned"] = "planned"
    plan_sha256: str
    layout: str
    files: int
    bytes: int
