"""What a person decided, what a first start found: a file with the state, an object in each remote (P8)."""

from __future__ import annotations

from typing import Literal

from ckptd.core.manifest import Document, Many


class Decision(Document):
    """What a person decided: pin, unpin, accept, adopt (P8). The newest `serial` of a subject counts."""

    kind: Literal["pin", "unpin", "accept", "adopt", "first-start"]
    tag: str
    """`*` = every checkpoint found at the first start (adopt)."""
    fingerprints: Many[tuple[str, str]] = ()
    """Which save of the tag is meant, where it matters (accept)."""
    tags: Many[str] = ()
    """first-start: the tags found then."""
    committed: Many[str] = ()
    """first-start: those of them that had a COMMIT then: what it lists was not found, a resume brought it."""
    place: str = ""
    """first-start: of which directory (a digest of path and inode); empty: of a release that noted none."""
    by: str = ""
    at: str = ""
    serial: int = 0
