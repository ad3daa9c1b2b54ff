"""What an observation means to the planner, in the daemon's own words; remembered by digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.daemon.viewing import as_planned

if TYPE_CHECKING:
    from ckptd.core.view import RemoteCommit
    from ckptd.remote.messages import CommitView, Observation

_KNOWN: dict[str, RemoteCommit] = {}
_MOST = 100_000


def remote_commits(seen: Observation) -> tuple[RemoteCommit, ...]:
    """The COMMITs that count."""
    return tuple(_one(view) for view in seen.commits if not view.disputed)


def _one(view: CommitView) -> RemoteCommit:
    found = _KNOWN.get(view.sha256)
    if found is None:
        if len(_KNOWN) > _MOST:
            _KNOWN.clear()
        found = _KNOWN[view.sha256] = as_planned(view)
    return found
