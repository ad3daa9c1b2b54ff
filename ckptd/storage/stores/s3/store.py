"""Store objects below an S3 bucket's prefix: uploads in parts, and the proof that they arrived
(docs/internals/stores.md).
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.storage.stores.s3.bucket import S3Bucket
from ckptd.storage.stores.s3.probe import clear_left, probe, takes_trailers
from ckptd.storage.stores.s3.proof import proof
from ckptd.storage.stores.s3.uploads import S3Uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.storage.stores.access import Access
    from ckptd.storage.stores.base import Abilities, HeldRange, Progress, ResumePoint, Source
    from ckptd.storage.stores.s3.uploads import Started

_PROBES = "_ckptd/probe~"


class S3Store(S3Bucket):
    """Store on `s3://bucket/prefix`; `read_back` False: copies are not proved at all (verify = none)."""

    def __init__(self, url: str, access: Access, *, owner: str = "", read_back: bool = True) -> None:
        super().__init__(url, access, owner=owner, read_back=read_back)
        self.uploads = S3Uploads(self, access.part_size_bytes)

    def probe(self) -> Abilities:
        """Find out what this server keeps its word on, by small objects that are removed again."""
        key = f"{_PROBES}{secrets.token_hex(8)}"
        with self.asking("trying what the server can do"):
            client, place = self.client, self.place(key)
            clear_left(client, self.bucket, self.prefix + _PROBES)
            self.abilities = probe(client, place, self.access, is_read_back=self.is_read_back)
            if self.abilities.checksum and self.direct is not None:
                takes = takes_trailers(client, place, self.direct, key, self.access)
                self.abilities = replace(self.abilities, trailers=takes)
        return self.abilities

    def upload(
        self,
        key: str,
        source: Source,
        *,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> int:
        """Move one object in parts; goes on at the last part that the server holds."""
        return self.uploads.upload(key, source, resume, on_progress, held)

    def begin(self, key: str, source: Source) -> Started | None:
        """Send a small object whose answer is waited for later; None: `upload` it."""
        return self.uploads.begin(key, source)

    def discard(self, key: str, token: str = "") -> None:
        """Abort the multipart upload of that key that this process, or `token`, knows as ours."""
        self.uploads.discard(key, token)

    def verify(self, key: str, size_bytes: int, crc64: int, on_progress: Callable[[int], None]) -> str:
        """Compare with the checksum or ETag that the server computed, where they hold, else read back.

        Raises:
            VerifyError: other bytes, or none.
        """
        uploads = self.uploads
        if (known := uploads.proved(key, size_bytes, crc64)) is not None:
            return known
        return proof(self, key, size_bytes, crc64, uploads.expected_etag(key, crc64), on_progress)
