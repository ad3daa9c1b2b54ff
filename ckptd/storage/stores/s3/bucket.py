"""Read and write small objects and ranges below an S3 bucket's prefix; `S3Store` adds uploads.

What a server can do differs and its answers do not always tell, so `S3Store.probe` finds out by doing; until
then, and where a condition is ignored, nothing relies on it (docs/internals/stores.md).
"""

from __future__ import annotations

import base64
import hashlib
import threading
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptd.base import files
from ckptd.errors import CkptdError, NotPermitted, RemoteUnreachable
from ckptd.storage.stores.base import DOCUMENT_LIMIT_BYTES, Abilities, ObjectInfo, Store, too_large
from ckptd.storage.stores.s3 import client as sc
from ckptd.storage.stores.s3.direct import Direct

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.stores.access import Access

_READ_BYTES = 512 << 10
LANES = 8
FLIGHTS = 12
"""Small objects on their way at a time, for each of those who send them so."""
_RANGE_BYTES = 64 << 20
_CREATE_TRIES = 5
_READ_TRIES = 5
_KEYS_OF_S3FS = (
    "set FSSPEC_S3_KEY and FSSPEC_S3_SECRET, or credentials as for botocore; "
    "storage_options = { anon = true } reads a public bucket without keys"
)
_UNKNOWN = Abilities(create_only=False, checksum=None, resumable=True)


class S3Bucket(Store):
    """`s3://bucket/prefix`; `read_back` False: copies are not proved at all (verify = none).

    Raises (everywhere): RemoteUnreachable (no answer, busy, clock), RemoteNotOurs (no bucket, other region),
    NotPermitted (credentials, rights), NoSpaceError (quota), StorageError (the rest).
    """

    def __init__(self, url: str, access: Access, *, owner: str = "", read_back: bool = True) -> None:
        parts = urlsplit(url)
        self._url = url
        self.bucket = parts.netloc
        self.prefix = f"{parts.path.strip('/')}/"
        self.access = access
        self._owner = owner
        self.is_read_back = read_back
        self._client: Any = None
        self._direct: Direct | None = None
        self._lock = threading.Lock()
        self.abilities = _UNKNOWN

    @property
    def url(self) -> str:
        """s3://bucket/prefix."""
        return self._url

    @property
    def lanes(self) -> int:
        """Small objects at a time: each costs round trips."""
        return LANES

    @property
    def client(self) -> Any:
        """Return the client; made anew after credentials failed, so that rotated ones are found."""
        with self._lock:
            if self._client is None:
                open_one = sc.open_botocore
                if self.access.client == "s3fs":
                    from ckptd.storage.stores.s3.s3fs_client import open_s3fs as open_one
                self._client, credentials, verify = sc.make_client(self.access, open_one)
                if self.access.client == "botocore":
                    self._direct = Direct(
                        self._client,
                        credentials,
                        self.bucket,
                        self.prefix,
                        signs_payload=self.access.signs_payload,
                        verify=verify,
                    )
            return self._client

    def close(self) -> None:
        """End idle connections; a later request opens new ones."""
        with self._lock:
            client, direct = self._client, self._direct
            self._client = self._direct = None
        if direct is not None:
            direct.close()
        if client is not None:
            client.close()

    @property
    def direct(self) -> Direct | None:
        """Return the short way for PUTs, once botocore's client has shown it; s3fs's requests are its own."""
        return self._direct

    @property
    def pending_puts(self) -> int:
        """Return how many small objects one thread may have on their way (`begin`), their answers being
        proofs.
        """
        can, direct = self.abilities, self._direct
        is_proved = can.checksum is not None or (self.wants_md5 and can.joined_etags)
        is_offered = can.create_only and is_proved and direct is not None and direct.is_ready
        return FLIGHTS if is_offered else 0

    @property
    def overlap(self) -> int:
        """Two large objects, so that the way is never empty between them; one where copies are read back."""
        can = self.abilities
        return 2 if can.checksum or can.part_etags else 1

    @property
    def copies(self) -> bool:
        """Whether the server copies parts of an upload from objects that it holds; the result is proved."""
        can = self.abilities
        return can.copies and (self.is_read_back or can.checksum is not None)

    @property
    def wants_md5(self) -> bool:
        """Whether an ETag is what proves or guards what is sent."""
        can = self.abilities
        return self.is_read_back and not can.checksum and (can.part_etags or can.joined_etags)

    def place(self, key: str) -> dict[str, str]:
        """Bucket and whole key of an object.

        Raises:
            RefusedError: a key with empty or dotted parts.
        """
        files.check_relative(key)
        return {"Bucket": self.bucket, "Key": self.prefix + key}

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Run requests; what botocore raises leaves as an error of the tree."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
        from botocore.parsers import ResponseParserError

        try:
            yield
        except RecursionError as error:
            # botocore asks for the bucket's region when told "elsewhere", and was told "elsewhere" again
            raise sc.elsewhere(self._url, self._endpoint()) from error
        except (BotoCoreError, ClientError, ResponseParserError) as error:
            endpoint = self._endpoint()
            if sc.ran_in_circles(error):
                raise sc.elsewhere(self._url, endpoint) from error
            raised = sc.failure(error, what, self._url, endpoint)
            if isinstance(error, NoCredentialsError) and self.access.client == "s3fs":
                raised = NotPermitted(raised.message, hint=_KEYS_OF_S3FS)
            if isinstance(raised, NotPermitted):
                with self._lock:
                    self._client = None
            raise raised from error

    def _endpoint(self) -> str:
        with self._lock:
            return str(self._client.meta.endpoint_url) if self._client is not None else "AWS"

    # --- small objects ---------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Return a small object, whole; None when absent."""
        with self.asking(f"reading {key}"):
            try:
                answer = self.client.get_object(**self.place(key))
                # the body's own `with` hands out the stream below it, which takes a break for the end
                with closing(answer["Body"]) as body:
                    if answer["ContentLength"] > DOCUMENT_LIMIT_BYTES:
                        raise too_large(key)
                    return bytes(body.read())
            except self.client.exceptions.ClientError as error:
                if sc.code_of(error) in sc.ABSENT:
                    return None
                raise

    def put(self, key: str, data: bytes) -> None:
        """Create or replace a small object."""
        with self.asking(f"writing {key}"):
            self.client.put_object(
                **self.place(key), **self.access.for_documents, Body=data, ContentMD5=_md5(data)
            )

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create a small object; False when it exists (P3).

        Where the server ignores the condition: look, write, read again (one writing node only, P10).
        """
        if not self.abilities.create_only and self.stat(key) is not None:
            return False
        with self.asking(f"creating {key}"):
            for _ in range(_CREATE_TRIES):
                try:
                    answer = self.client.put_object(
                        **self.place(key),
                        **self.access.for_documents,
                        Body=data,
                        ContentMD5=_md5(data),
                        IfNoneMatch="*",
                    )
                except self.client.exceptions.ClientError as error:
                    if sc.code_of(error) in sc.RACING:
                        continue
                    if sc.code_of(error) not in sc.TAKEN:
                        raise
                    # a request of ours whose answer was lost was sent again and met itself
                    again = error.response["ResponseMetadata"].get("RetryAttempts", 0)
                    return bool(again) and self.get(key) == data
                del answer
                return self.abilities.create_only or self.get(key) == data
        return False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below the folder `prefix` ("" = all); folder marks of consoles are left out."""
        with self.asking(f"listing {prefix or 'the prefix'}"):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    key = entry["Key"].removeprefix(self.prefix)
                    if key and not key.endswith("/"):
                        mtime_ns = int(entry["LastModified"].timestamp() * 1e9)
                        yield ObjectInfo(key=key, bytes=entry["Size"], mtime_ns=mtime_ns)

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the size and time of an object; None when absent."""
        head = self.head(key)
        if head is None:
            return None
        mtime_ns = int(head["LastModified"].timestamp() * 1e9)
        return ObjectInfo(key=key, bytes=head["ContentLength"], mtime_ns=mtime_ns)

    def head(self, key: str, **more: str) -> dict[str, Any] | None:
        """Return the answer to HEAD; None when absent."""
        with self.asking(f"looking at {key}"):
            try:
                return dict(self.client.head_object(**self.place(key), **more))
            except self.client.exceptions.ClientError as error:
                if sc.code_of(error) in sc.ABSENT:
                    return None
                raise

    def read_at(self, key: str, offset: int, length: int) -> bytes:
        """Return a range of an object; shorter at its end."""
        return b"".join(self.stream(key, offset, length))

    def delete(self, key: str) -> None:
        """Remove an object; gone already is fine."""
        with self.asking(f"removing {key}"):
            self.client.delete_object(**self.place(key))

    def free_bytes(self) -> int | None:
        """A bucket does not tell."""
        return None

    def now_seconds(self) -> float | None:
        """Return the time of an answer (`Date`, whole seconds); None: no answer."""
        with suppress(CkptdError, ValueError, KeyError, TypeError):
            with self.asking("reading its clock"):
                answer = self.client.head_bucket(Bucket=self.bucket)
            return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
        return None

    # --- ranges ----------------------------------------------------------------------------------------

    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        """Yield the chunks of a range; a connection that breaks costs the rest of one request, asked for
        again.
        """
        end, tries = offset + length, 0
        while offset < end:
            begin, last, is_answered = offset, min(end, offset + _RANGE_BYTES), False
            try:
                with self.asking(f"reading {key} at {offset}"):
                    for chunk in self._range(key, offset, last):
                        is_answered = True
                        offset += len(chunk)
                        yield chunk
            except RemoteUnreachable:
                # botocore sends requests again, but no body that breaks off
                tries = tries + 1 if offset == begin else 1
                if not is_answered or tries >= _READ_TRIES:
                    raise
                continue
            if offset == begin or offset < last:
                return

    def _range(self, key: str, begin: int, end: int) -> Iterator[bytes]:
        """The bytes as they come; nothing at first, once the server has answered."""
        place = self.place(key)
        try:
            answer = self.client.get_object(**place, Range=f"bytes={begin}-{end - 1}")
        except self.client.exceptions.ClientError as error:
            if sc.code_of(error) in sc.ABSENT:
                msg = f"{key} is not in {self._url}"
                raise FileNotFoundError(msg) from error
            if sc.status_of(error) == 416:
                return
            raise
        yield b""
        with closing(answer["Body"]) as body:
            while chunk := body.read(_READ_BYTES):
                yield chunk


def _md5(data: bytes) -> str:
    """Return the MD5 that servers compare on arrival, also those that know no CRC."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
