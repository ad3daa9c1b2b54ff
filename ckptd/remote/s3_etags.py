"""ETags as a proof: the MD5 of each part as it was sent against what the server says arrived (adr/0089).

Used only where `probe` saw that the server's ETags are MD5s of what it received, also of joined parts. What
does not fit is looked into, never believed: a part is sent again, a whole object is read back.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ckptd.errors import VerifyError
from ckptd.remote import s3_client as sc
from ckptd.remote.s3_body import SourceStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.remote.s3 import S3Store
    from ckptd.remote.s3_body import Body
    from ckptd.remote.store import Abilities

_TRIES = 3
CHANGED = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
"""What servers answer to a body that is not the one that was measured."""


def bare(etag: str) -> str:
    """An ETag without its quotes."""
    return etag.strip('"').lower()


def joined(md5s: Iterable[bytes]) -> str:
    """The ETag of an object made of parts with these MD5s."""
    parts = list(md5s)
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def guard(abilities: Abilities, body: Body) -> dict[str, str]:
    """Content-MD5 for a server that enforces it and whose ETags do not show what arrived."""
    is_shown = abilities.checksum is not None or abilities.part_etags
    return {"ContentMD5": body.content_md5()} if abilities.content_md5 and not is_shown else {}


def send_part(
    store: S3Store, key: str, number: int, make_body: Callable[[], Body], request: dict[str, Any]
) -> tuple[Body, str]:
    """Send one part until the server holds the bytes that were sent; the body as read, and the part's ETag.

    Raises:
        VerifyError: it arrived changed three times.
    """
    for _ in range(_TRIES):
        with store.asking(f"writing part {number} of {key}"):
            try:
                body = make_body()
                answer = store.client.upload_part(
                    **request, **guard(store.abilities, body), PartNumber=number, Body=body
                )
            except SourceStopped as stopped:
                raise stopped.error from None
            except store.client.exceptions.ClientError as error:
                if sc.code_of(error) in CHANGED:
                    continue
                raise
        etag = str(answer["ETag"])
        if not store.abilities.part_etags or body.md5 is None or bare(etag) == body.md5.hex():
            return body, etag
    raise changed(f"part {number} of {key}", f" {_TRIES} times")


def changed(what: str, often: str = "") -> VerifyError:
    """The server received other bytes than were sent."""
    msg = f"{what} arrived changed{often}"
    return VerifyError(msg, hint="something on the way to the server changes bytes: a network card, a proxy")
