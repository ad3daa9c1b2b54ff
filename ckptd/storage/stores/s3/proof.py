"""Prove that an S3 server holds what was sent: by a checksum or ETag that it keeps, else by reading.

It is apart from the store because it is the one place where "sent" becomes "verified".
"""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptd.errors import VerifyError
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.parallel import crc_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.storage.stores.base import Abilities
    from ckptd.storage.stores.s3.bucket import S3Bucket


# --- ETags as a proof ------------------------------------------------------------------------------------
# The MD5 of each part as it was sent is compared with what the server says arrived (docs/adr/0089). This is
# used only where `probe` saw that the server's ETags are MD5s of what it received, also of joined parts. What
# does not fit is looked into, never believed: a part is sent again, a whole object is read back.

CHANGED = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
"""Codes with which servers answer a body that is not the one that was measured."""


def bare(etag: str) -> str:
    """Return an ETag without its quotes."""
    return etag.strip('"').lower()


def joined(md5s: Iterable[bytes]) -> str:
    """Return the ETag of an object made of parts with these MD5s."""
    parts = list(md5s)
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def guard(abilities: Abilities, content_md5: Callable[[], str]) -> dict[str, str]:
    """Content-MD5 for a server that enforces it and whose ETags do not show what arrived."""
    is_shown = abilities.checksum is not None or abilities.part_etags
    return {"ContentMD5": content_md5()} if abilities.content_md5 and not is_shown else {}


def changed(what: str, often: str = "") -> VerifyError:
    """Return the error for a server that received other bytes than were sent."""
    msg = f"{what} arrived changed{often}"
    return VerifyError(msg, hint="something on the way to the server changes bytes: a network card, a proxy")


# --- the proof of an object ------------------------------------------------------------------------------


_SMALL_BYTES = 8 << 20
_STREAMS = 4
"""Ranges of one object that are read back at a time."""


def proof(
    store: S3Bucket,
    key: str,
    size_bytes: int,
    sent: int,
    etag: str | None,
    on_progress: Callable[[int], None],
) -> str:
    """Prove that the object has so many bytes with the CRC64NVME `sent`; the name of the proof.

    `etag`: the one that follows from what was sent, if this process sent all of it.

    Raises:
        VerifyError: other bytes, or none.
    """
    can = store.abilities
    etag = etag if can.joined_etags else None
    is_read = store.is_read_back and not can.checksum and etag is None and 0 < size_bytes <= _SMALL_BYTES
    if is_read and _is_intact(store, key, size_bytes, sent, on_progress):
        return "read-back"
    head = store.head(key, **({"ChecksumMode": "ENABLED"} if can.checksum else {}))
    if head is None:
        msg = f"{key} is not in {store.url} after it was sent"
        raise VerifyError(msg, hint="ckptd sends it again")
    found, by = _digest(store, key, head, size_bytes, sent, etag, on_progress)
    if head["ContentLength"] == size_bytes and found == sent:
        return by
    msg = (
        f"{key}: the copy in {store.url} has {head['ContentLength']} bytes and CRC64 {found:016x}, "
        f"sent were {size_bytes} and {sent:016x}"
    )
    raise VerifyError(msg, hint="ckptd removes it and sends it again")


def _is_intact(
    store: S3Bucket, key: str, size_bytes: int, sent: int, on_progress: Callable[[int], None]
) -> bool:
    """Read a small object in one request; False for anything else than those very bytes."""
    crc = done = 0
    try:
        # a byte more than was sent: nothing may follow
        for chunk in store.stream(key, 0, size_bytes + 1):
            crc, done = crc64(chunk, crc), done + len(chunk)
            on_progress(done)
    except FileNotFoundError:
        return False
    return (done, crc) == (size_bytes, sent)


def _digest(
    store: S3Bucket,
    key: str,
    head: dict[str, Any],
    size_bytes: int,
    sent: int,
    etag: str | None,
    on_progress: Callable[[int], None],
) -> tuple[int, str]:
    kept = head.get("ChecksumCRC64NVME")
    if store.abilities.checksum and kept and head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
        return int.from_bytes(base64.b64decode(kept)), "store-checksum"
    if not store.is_read_back:
        return sent, "none"
    if etag is not None and bare(head.get("ETag", "")) == etag:
        return sent, "part-etags"
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done)

    try:
        _, crc = crc_of(partial(store.stream, key), size_bytes, on_bytes, at_once=_STREAMS)
    except FileNotFoundError:
        return ~sent & (1 << 64) - 1, "read-back"
    return crc, "read-back"
