"""Give the S3 store s3fs's access: its calls go through `S3FileSystem.call_s3`, one by one.

Nothing of s3fs's file interface is used: it knows no resumed upload, no proof and no part that is not held in
memory (docs/adr/0200). What it does for a person is to find the way in: fsspec's configuration, FSSPEC_S3_*,
anonymous and requester-pays access. Time limits, retries and errors are those of botocore's own client.
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fsspec.asyn import sync

from ckptd.errors import ConfigError
from ckptd.storage.stores.s3 import client as sc
from ckptd.storage.stores.s3.body import STEP_BYTES, Body, SourceStopped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from _typeshed import WriteableBuffer

    from ckptd.storage.stores.access import Access

_CHUNK_BYTES = 256 << 10
"""Bytes of a body copied at a time: the event loop may keep what it could not send yet."""
_READERS = 16
"""Threads that read bodies: as many as the store sends at once, each of which a rate limit may hold."""
_NEXT = {
    "list_objects_v2": ("ContinuationToken", "NextContinuationToken"),
    "list_parts": ("PartNumberMarker", "NextPartNumberMarker"),
}
"""Operation → where the next page begins: as it is asked for, as it is told."""


def open_s3fs(access: Access) -> sc.OpenedClient:
    """Return a client that s3fs makes from `storage_options`, fsspec's configuration and the environment.

    Raises:
        ConfigError: s3fs does not take these settings.
        botocore's errors: no such profile, no such endpoint.
    """
    from aiobotocore.session import AioSession
    from botocore.loaders import Loader
    from s3fs import S3FileSystem

    options = {name: json.loads(text) for name, text in access.storage_options}
    kind, _, rest = access.credentials.partition(":")
    if kind == "profile":
        options["profile"] = rest
    if access.endpoint_url is not None:
        options["endpoint_url"] = access.endpoint_url
    try:
        fs = S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
        _configure(fs, access)
        # a profile that is named keeps the environment's keys from winning over the file
        named = {"profile": "default"} if kind == "file" else {}
        fs.session = AioSession(**fs.kwargs | named)
        fs.session.register_component("data_loader", Loader(file_loader=sc.SmallModels()))
        if kind == "file":
            fs.session.set_config_variable("credentials_file", sc.credentials_file(rest))
        fs.connect()
    except (TypeError, KeyError, AttributeError) as error:
        msg = f"s3fs cannot use its settings: {error}"
        raise ConfigError(
            msg, hint="see storage_options, FSSPEC_S3_* and the files of ~/.config/fsspec"
        ) from error
    return sc.OpenedClient(S3fsClient(fs), None, None)


def _configure(fs: Any, access: Access) -> None:
    """Fill in what s3fs's own settings leave open: what both clients do alike."""
    # its loop would send five times what botocore sends five times
    fs.retries = 1
    at = fs.endpoint_url or fs.client_kwargs.get("endpoint_url") or access.endpoint
    if at is None and not fs.client_kwargs.get("use_ssl", fs.use_ssl):
        at = "http://s3.amazonaws.com"
    signs = access.model_copy(update={"endpoint_url": at}).signs_payload
    ours = sc.config_values(payload_signing_enabled=signs)
    said = {
        "addressing_style": None if access.addressing == "auto" else access.addressing,
        "payload_signing_enabled": access.sign_payload,
    }
    said = {name: value for name, value in said.items() if value is not None}
    s3 = ours["s3"] | fs.config_kwargs.get("s3", {}) | said
    connector = {"socket_factory": _socket} | fs.config_kwargs.get("connector_args", {})
    fs.config_kwargs = ours | fs.config_kwargs | {"s3": s3, "connector_args": connector}
    if access.region is not None:
        fs.client_kwargs = fs.client_kwargs | {"region_name": access.region}


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket whose connection the kernel ends where the server takes no more bytes.

    aiohttp has no time limit for sending, and closing such a connection waits until the bytes are gone.
    """
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, sc.READ_SECONDS * 1000)
    return made


class S3fsClient:
    """Answer the operations of botocore's client that the store asks for; errors are botocore's own.

    Called from many threads; the requests run in fsspec's event loop.
    """

    def __init__(self, fs: Any) -> None:
        from botocore import exceptions

        self._fs = fs
        self.meta = fs.s3.meta
        self.exceptions = exceptions
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="body")
        events = self.meta.events
        events.register("before-sign.s3", _before_signing)
        events.register("before-send.s3", _before_sending)
        events.register_first("needs-retry.s3", _before_retrying)

    def __getattr__(self, operation: str) -> Callable[..., dict[str, Any]]:
        return partial(self._call, operation)

    def get_paginator(self, operation: str) -> _Pages:
        """Return what asks for page after page of a listing, as botocore's client does."""
        return _Pages(partial(self._call, operation), *_NEXT[operation])

    def close(self) -> None:
        """End idle connections."""
        _asked(sync, self._fs.loop, self._fs.s3.close)
        self._readers.shutdown(wait=False)

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        given = arguments.get("Body")
        if not isinstance(given, Body):
            return self._answer(operation, arguments)
        body = _LentBody(given, self._readers)
        try:
            answer = self._answer(operation, arguments | {"Body": body})
        finally:
            # whoever is told of a failure may close the source
            body.wait()
            if body.stopped is not None:
                raise body.stopped
        return answer

    def _answer(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = _asked(partial(self._fs.call_s3, operation, **arguments))
        if operation == "get_object":
            answer["Body"] = _ReceivedBody(answer["Body"], self._fs.loop)
        return answer


class _Pages:
    """Pages of one listing."""

    def __init__(self, ask: Callable[..., dict[str, Any]], asked: str, told: str) -> None:
        self._ask = ask
        self._asked, self._told = asked, told

    def paginate(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the answers, one request each.

        Raises:
            botocore's PaginationError: the server gives the same page again.
        """
        while True:
            page = self._ask(**arguments)
            yield page
            following = page.get(self._told)
            if not page.get("IsTruncated") or following is None:
                return
            if following == arguments.get(self._asked):
                from botocore.exceptions import PaginationError

                raise PaginationError(message=f"The same next token was received twice: {following}")
            arguments[self._asked] = following


# --- bodies that are sent --------------------------------------------------------------------------------
# Reading a source waits: for the disk, for the rate limit. In the event loop every other request would wait
# with it, so threads read; the loop gets copies, since it keeps what the socket did not take.


class _GaveUp(Exception):
    """The source has stopped, so the request is not sent again; `_LentBody.stopped` says why."""


class _LentBody(io.RawIOBase):
    """A `Body` for one call, all its tries; read by the event loop to be signed, by threads to be sent."""

    def __init__(self, body: Body, readers: ThreadPoolExecutor) -> None:
        super().__init__()
        self._body = body
        self._readers = readers
        self._reading: Future[bytes] | None = None
        self.stopped: SourceStopped | None = None

    def __len__(self) -> int:
        return len(self._body)

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Within the range."""
        return True

    def tell(self) -> int:
        """Return the position in the range."""
        return self._body.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, as `Body` does."""
        return self._body.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        """Return a copy of what follows, at most a MiB; none at the end.

        Raises:
            _GaveUp: the source has stopped.
        """
        return self._taken(size if size >= 0 else STEP_BYTES)

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read into a buffer as `read` does; the CRT signs bodies through it."""
        view = memoryview(buffer).cast("B")
        data = self._taken(len(view))
        view[: len(data)] = data
        return len(data)

    async def chunk(self) -> bytes:
        """Return what is to be sent next, read by a thread."""
        self._reading = self._readers.submit(self._taken, _CHUNK_BYTES)
        return await asyncio.wrap_future(self._reading)

    def _taken(self, most: int) -> bytes:
        try:
            return bytes(self._body.take(most))
        except SourceStopped as stopped:
            self.stopped = stopped
            raise _GaveUp from stopped

    async def begin(self, *, is_rehearsal: bool) -> None:
        """Go to the beginning, once the thread of an earlier try has ended: it reads the same buffer."""
        if self._reading is not None:
            await asyncio.wait([asyncio.wrap_future(self._reading)])
        self._body.rehearse(is_rehearsal)

    def wait(self) -> None:
        """Wait until no thread reads any more."""
        if self._reading is not None:
            wait([self._reading])


class _Sent:
    """One try to send a body, as aiohttp takes it: piece after piece."""

    def __init__(self, body: _LentBody) -> None:
        self._body = body

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Do nothing: botocore rewinds before it tries again, `begin` once that is safe."""
        del offset, whence
        return 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self._body.chunk():
            yield data


class _Request(Protocol):
    """Hold what botocore's events show of a request."""

    data: Any
    body: Any
    headers: Any


async def _before_signing(request: _Request, **_: Any) -> None:
    if isinstance(request.data, _LentBody):
        await request.data.begin(is_rehearsal=True)


async def _before_sending(request: _Request, **_: Any) -> None:
    # aiohttp would wait without end where a server does not know it; botocore waits a second
    request.headers.pop("Expect", None)
    if isinstance(request.body, _LentBody):
        await request.body.begin(is_rehearsal=False)
        request.body = _Sent(request.body)


def _before_retrying(request_dict: dict[str, Any], **_: Any) -> None:
    body = request_dict.get("body")
    if isinstance(body, _LentBody) and body.stopped is not None:
        raise _GaveUp from body.stopped


# --- bodies that are received, errors --------------------------------------------------------------------


class _ReceivedBody:
    """The body of an answer, for a thread."""

    def __init__(self, body: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._body = body
        self._loop = loop

    def read(self, most: int = -1) -> bytes:
        """Return so many bytes, fewer at the end, all by default.

        Raises:
            botocore's ResponseStreamingError, ReadTimeoutError, IncompleteReadError: it broke off.
        """
        return bytes(_asked(sync, self._loop, self._read, most))

    async def _read(self, most: int) -> bytes:
        from aiohttp import ClientError
        from botocore.exceptions import ResponseStreamingError

        try:
            if most < 0:
                return bytes(await self._body.read())
            pieces, held = list[bytes](), 0
            while held < most and (piece := await self._body.read(most - held)):
                pieces.append(piece)
                held += len(piece)
            return b"".join(pieces)
        except ClientError as error:
            raise ResponseStreamingError(error=error) from error

    def close(self) -> None:
        """Give the connection back, or end it where bytes are left."""
        self._loop.call_soon_threadsafe(self._body.close)


def _asked(action: Callable[..., Any], *given: Any) -> Any:
    """Call something that waits for the event loop; raises botocore's errors.

    s3fs and fsspec make errors of the operating system of them.
    """
    from aiohttp import ClientConnectorError, ClientOSError
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionClosedError,
        EndpointConnectionError,
    )

    cause: BaseException | None
    try:
        return action(*given)
    except (OSError, EndpointConnectionError) as error:
        cause = error
        while cause is not None and not isinstance(cause, BotoCoreError | ClientError):
            cause = cause.__cause__
        if cause is None:
            raise
        details = cause.kwargs if isinstance(cause, EndpointConnectionError) else {}
        inner = details.get("error")
        if isinstance(inner, ClientOSError) and not isinstance(inner, ClientConnectorError):
            # aiobotocore calls a connection that broke one that was never made
            cause = ConnectionClosedError(**details)
    # outside of the handler: the error that it is the cause of would become its context, a circle
    raise cause
