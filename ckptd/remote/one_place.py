"""Two remotes that are one directory by two paths, or one bucket by two URLs, are one copy (adr/0166)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.remote.open import directory_path

if TYPE_CHECKING:
    from ckptd.remote.messages import Attached

NEXT_STEP = "remove one of the two from the job file: what both hold is one copy"


def are_one(first: Attached, second: Attached) -> bool:
    """Whether two remotes are one directory or one bucket; a copy of a remote keeps its identity, too."""
    is_alike = first.identity.remote_id == second.identity.remote_id
    return is_alike and first.place is not None and _root(first.place) == _root(second.place)


def _root(place: str | None) -> str:
    """`device:inode` of it."""
    return "" if place is None else place.partition(".")[0]


def one_place(url: str, other: str, other_url: str) -> str:
    """In words, of the one that does not count."""
    kind = "directory" if directory_path(url) is not None else "bucket and prefix"
    return f"{url} is the same {kind} as remote {other} ({other_url})"
