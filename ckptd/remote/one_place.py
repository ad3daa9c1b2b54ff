"""Two remotes that are one directory, under two paths, are one copy (docs/adr/0166)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.remote.messages import Attached

NEXT_STEP = "remove one of the two from the job file: what both hold is one copy"


def are_one(first: Attached, second: Attached) -> bool:
    """Whether two remotes are one directory under two paths; a copy of a remote keeps its identity, too."""
    is_alike = first.identity.remote_id == second.identity.remote_id
    return is_alike and first.place is not None and _root(first.place) == _root(second.place)


def _root(place: str | None) -> str:
    """`device:inode` of it."""
    return "" if place is None else place.partition(".")[0]


def one_place(url: str, other: str, other_url: str) -> str:
    """In words, of the one that does not count."""
    return f"{url} is the same directory as remote {other} ({other_url})"
