"""The order to prove a remote, and its answer (P2, P10, P19; docs/adr/0166)."""

from __future__ import annotations

from typing import Literal

from ckptd.core.heartbeat import SeenNode
from ckptd.core.identity import Model
from ckptd.core.manifest import RemoteIdentity
from ckptd.core.runs import Row
from ckptd.remote.settings import RemoteSettings
from ckptd.remote.store import Abilities


class Attach(Model):
    """Prove that the remote is there, ours and writable; create remote.json where that is right."""

    op: Literal["attach"] = "attach"
    settings: RemoteSettings


class Attached(Model):
    """The remote is there and ours."""

    kind: Literal["attached"] = "attached"
    identity: RemoteIdentity
    abilities: Abilities
    initialised: bool = False
    free_bytes: int | None = None
    place: str | None = None
    """`device:inode` of a directory's root and ctime of its identity, as this child sees them; else None."""
    living: tuple[SeenNode, ...] = ()
    """At the first time: other nodes that write there under this job's name; else where it was asked for, and
    then all."""
    newest: Row | None = None
    """Which run goes on there, and where, where that was asked for."""
