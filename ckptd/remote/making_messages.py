"""What an order says of a form that is made while it is sent, and what its child answers (docs/adr/0093).

No disk of this node ever holds such a form: the order names shards, the child plans and makes it of them.
"""

from __future__ import annotations

from typing import Literal

from ckptd.core.identity import FileIdentity, Model


class Making(Model):
    """A derived form that no disk holds: made of the sealed shards while it is sent."""

    folders: tuple[str, ...]
    """Of the shards, relative to `ShipOrder.root`; more than one is refused."""
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
