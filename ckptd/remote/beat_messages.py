"""The order to write this node's heartbeat and to look at the others', and its answer (docs/contract.md)."""

from __future__ import annotations

from typing import Literal

from ckptd.core.heartbeat import Heartbeat, SeenNode
from ckptd.core.identity import Model
from ckptd.core.shared import LeaseSeen


class Beat(Model):
    """Write the heartbeat, where one is given; say which other nodes were heard of, and when."""

    op: Literal["beat"] = "beat"
    heartbeat: Heartbeat | None = None
    node: str
    """Whose is not told."""
    reads_all: bool = False
    """Read every heartbeat afresh; else those that are not known, or were read long ago."""
    takeover_seconds: float | None = None
    """Of a shared directory: say who holds the lease; take it over after so long a silence (adr/0110)."""


class Beats(Model):
    """The other nodes."""

    kind: Literal["beats"] = "beats"
    nodes: tuple[SeenNode, ...] = ()
    sharers: tuple[SeenNode, ...] = ()
    """Daemons over other directories, also those that bear this node's name."""
    lease: LeaseSeen | None = None
