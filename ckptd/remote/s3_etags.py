"""ETags as a proof: the MD5 of each part as it was sent against what the server says arrived (adr/0089).

Used only where `probe` saw that the server's ETags are MD5s of what it received, also of joined parts. What
does not fit is looked into, never believed: a part is sent again, a whole object is read back.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ckptd.errors import VerifyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.remote.store import Abilities

CHANGED = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
"""What servers answer to a body that is not the one that was measured."""


def bare(etag: str) -> str:
    """An ETag without its quotes."""
    return etag.strip('"').lower()


def joined(md5s: Iterable[bytes]) -> str:
    """The ETag of an object made of parts with these MD5s."""
    parts = list(md5s)
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def guard(abilities: Abilities, content_md5: Callable[[], str]) -> dict[str, str]:
    """Content-MD5 for a server that enforces it and whose ETags do not show what arrived."""
    is_shown = abilities.checksum is not None or abilities.part_etags
    return {"ContentMD5": content_md5()} if abilities.content_md5 and not is_shown else {}


def changed(what: str, often: str = "") -> VerifyError:
    """The server received other bytes than were sent."""
    msg = f"{what} arrived changed{often}"
    return VerifyError(msg, hint="something on the way to the server changes bytes: a network card, a proxy")
