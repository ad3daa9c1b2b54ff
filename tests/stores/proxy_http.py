"""Requests in a stream of bytes: heads and bodies told apart, nothing changed; the rest passes as it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINE = re.compile(rb"(GET|PUT|POST|HEAD|DELETE) (\S+) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_HEAD_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A whole head (`line` is "PUT /key?x"), or bytes of the body that follows it."""

    data: bytes
    line: str = ""
    path: str = ""
    body_bytes: int = 0
    """Of the whole body, as the head says."""
    is_last: bool = False


class Requests:
    """Feed it what a client sends."""

    def __init__(self) -> None:
        self._held = b""
        self._left_bytes = 0
        self._path = ""
        self._is_chunked = False
        self._is_http: bool | None = None

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that are whole by now."""
        self._held += data
        while self._held:
            if self._is_http is False:
                yield Piece(data=self._take(len(self._held)))
            elif self._is_chunked:
                yield from self._chunked()
                if self._is_chunked:
                    return
            elif self._left_bytes:
                part = self._take(min(self._left_bytes, len(self._held)))
                self._left_bytes -= len(part)
                yield Piece(data=part, path=self._path, is_last=not self._left_bytes)
            else:
                end = self._held.find(b"\r\n\r\n")
                if end < 0 and self._looks_like_http():
                    return
                yield from self._head(end + 4)

    def _looks_like_http(self) -> bool:
        is_known = self._is_http or b"GETPUTPOSTHEADDELETE".find(self._held[:3]) >= 0
        return is_known and len(self._held) < _HEAD_LIMIT_BYTES

    def _head(self, length: int) -> Iterator[Piece]:
        found = _LINE.match(self._held) if length >= 4 else None
        if found is None:
            self._is_http = False
            return
        self._is_http = True
        head = self._take(length)
        target = found[2].decode()
        self._path = target.partition("?")[0] if found[1] == b"PUT" else ""
        self._is_chunked = _CHUNKED.search(head) is not None
        match = _LENGTH.search(head)
        self._left_bytes = int(match[1]) if match and not self._is_chunked else 0
        yield Piece(data=head, line=f"{found[1].decode()} {target}", body_bytes=self._left_bytes)

    def _chunked(self) -> Iterator[Piece]:
        """Whole chunks, with their framing; the empty one and its trailer end the body."""
        while (end := self._held.find(b"\r\n")) >= 0:
            size = int(self._held[:end].partition(b";")[0], 16)
            if size == 0:
                stop = self._held.find(b"\r\n\r\n")
                if stop < 0:
                    return
                self._is_chunked = False
                yield Piece(data=self._take(stop + 4), path=self._path, is_last=True)
                return
            if len(self._held) < end + 2 + size + 2:
                return
            yield Piece(data=self._take(end + 2 + size + 2), path=self._path)

    def _take(self, count: int) -> bytes:
        data, self._held = self._held[:count], self._held[count:]
        return data
