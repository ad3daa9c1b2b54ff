"""What a remote's child is told of its remote: the part of a job's `[[remote]]` that it needs.

No secret is in it: how credentials are found, never what they are (P15).
"""

from __future__ import annotations

import contextlib
import json
from typing import Literal

from ckptd.core.identity import Model
from ckptd.remote.access import Access
from ckptd.remote.store import Abilities


def known_url(attached: str | None) -> str | None:
    """Return the URL in what a journal keeps of a remote that was attached (`abilities:<name>`), or None."""
    with contextlib.suppress(ValueError, AttributeError):
        url = json.loads(attached or "{}").get("url")
        return url if isinstance(url, str) else None
    return None


class RemoteSettings(Model):
    """The part of a job's `[[remote]]` that the child needs."""

    name: str
    url: str
    job: str
    job_id: str | None = None
    """None: no state yet; taken from remote.json when the job name is equal (contract)."""
    proposed_job_id: str | None = None
    """What a new remote.json gets: the id that the job's other remotes know it by."""
    remote_id: str | None = None
    """The identity seen before; another one, or none, is "not there" (P2)."""
    known_url: str | None = None
    """Where that identity was seen last; None: not remembered."""
    abilities: Abilities | None = None
    """What the remote of that identity was seen to do, for a time when it is full (adr/0161)."""
    may_initialise: bool = True
    same_filesystem: bool = False
    save_dir: str
    """To prove that a directory remote lies on another file system (H5)."""
    apart_from: tuple[str, ...] = ()
    """Local directories that a directory remote, symlinks resolved, may neither lie in nor hold (H6)."""
    verify: Literal["auto", "read-back", "none"] = "auto"
    access: Access = Access()
    bytes_per_second: int | None = None
    node: str
    node_id: str
    asks_who_lives: bool = False
    """Attaching tells who writes there now, whatever is known of it (`ckptd check`)."""
