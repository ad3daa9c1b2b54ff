"""How eyewitness and judge see the remote: a directory, a bucket, or the copy of a bucket that --keep made.

They have no code in common with ckptd, so they speak S3 by themselves: plain unsigned GETs (the quickstart's
bucket lets anyone read). Keys are relative to the remote's root. Bytes are hashed here and now, never
taken from a checksum that a server tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Iterator

Identity = list[Any]
"""Directory: [inode, bytes, mtime_ns]; bucket: [ETag, bytes, last modified (unix seconds)]."""

COPY = "bucket"
"""Folder of a kept quickstart that holds the objects of its bucket; listing.json beside them."""
TIMEOUT_SECONDS = 60
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One object: what changes when it is written again, and when it came to be (None: cannot be told)."""

    identity: Identity
    created: float | None


class RemoteView(Protocol):
    """What can be seen. `OSError`: could not be read; `FileNotFoundError`: is not there."""

    poll_seconds: float
    """How often an eyewitness may look."""

    def entries(self, folder: str) -> dict[str, Entry]:
        """Name → the objects directly in a folder, hidden ones left out; none when it is absent."""
        ...

    def read(self, key: str) -> bytes:
        """A small object."""
        ...

    def sha256(self, key: str) -> tuple[str, Identity]:
        """SHA-256 (hex) of the bytes, and whose they were."""
        ...

    def identity(self, key: str) -> Identity | None:
        """None when it is not there."""
        ...


def view_of(address: str) -> RemoteView:
    """The view of a path or of `http://host:port/bucket/prefix`."""
    return BucketView(address) if address.startswith("http://") else DirectoryView(Path(address))


class DirectoryView:
    """A mounted NAS."""

    poll_seconds = 0.05

    def __init__(self, root: Path) -> None:
        self._root = root

    def entries(self, folder: str) -> dict[str, Entry]:
        """By stat."""
        found = {}
        for name in _names(self._root / folder):
            if not name.startswith("."):
                with contextlib.suppress(OSError):  # gone again
                    status = (self._root / folder / name).stat()
                    found[name] = Entry(_identity(status), status.st_ctime)
        return found

    def read(self, key: str) -> bytes:
        """The file."""
        return (self._root / key).read_bytes()

    def sha256(self, key: str) -> tuple[str, Identity]:
        """Of one open file."""
        with (self._root / key).open("rb") as source:
            status = os.fstat(source.fileno())
            return hashlib.file_digest(source, "sha256").hexdigest(), _identity(status)

    def identity(self, key: str) -> Identity | None:
        """By stat."""
        try:
            return _identity((self._root / key).stat())
        except FileNotFoundError:
            return None


class BucketView:
    """A bucket's prefix, asked over HTTP; each answer is read to its end, each length compared."""

    poll_seconds = 0.25

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = parts.netloc
        self._bucket, _, prefix = parts.path.strip("/").partition("/")
        self._prefix = f"{prefix}/"

    def entries(self, folder: str) -> dict[str, Entry]:
        """By a listing."""
        prefix = f"{self._prefix}{folder}/"
        listed = self.listing(prefix, delimiter="/")
        return {k.removeprefix(prefix): Entry(i, None) for k, i in listed.items() if k != prefix}

    def listing(self, prefix: str | None = None, *, delimiter: str = "") -> dict[str, Identity]:
        """Whole key → identity of everything below a prefix (default: the remote's root)."""
        found: dict[str, Identity] = {}
        query = {"list-type": "2", "prefix": self._prefix if prefix is None else prefix}
        query |= {"delimiter": delimiter} if delimiter else {}
        while True:
            with self._get(f"/{self._bucket}?{urlencode(query)}") as answer:
                page = ElementTree.fromstring(answer.read())
            for element in page.iter():
                if element.tag.endswith("}Contents"):
                    fields = {child.tag.rpartition("}")[2]: child.text or "" for child in element}
                    modified = datetime.fromisoformat(fields["LastModified"]).timestamp()
                    found[fields["Key"]] = [fields["ETag"], int(fields["Size"]), int(modified)]
            token = page.findtext("{*}NextContinuationToken")
            if not token:
                return found
            query["continuation-token"] = token

    def relative(self, key: str) -> str:
        """A whole key as others name it."""
        return key.removeprefix(self._prefix)

    def read(self, key: str) -> bytes:
        """The object."""
        with self._object(key) as answer:
            return bytes(answer.read())

    def sha256(self, key: str) -> tuple[str, Identity]:
        """Downloaded and hashed."""
        digest = hashlib.sha256()
        with self._object(key) as answer:
            while piece := answer.read(PIECE_BYTES):
                digest.update(piece)
            if answer.length:
                msg = f"{key}: the answer ended {answer.length} bytes early"
                raise OSError(msg)
            return digest.hexdigest(), _told(answer)

    def identity(self, key: str) -> Identity | None:
        """By HEAD."""
        try:
            with self._object(key, "HEAD") as answer:
                return _told(answer)
        except FileNotFoundError:
            return None

    def _object(self, key: str, method: str = "GET") -> Any:
        return self._get(f"/{self._bucket}/{quote(self._prefix + key)}", method)

    @contextlib.contextmanager
    def _get(self, target: str, method: str = "GET") -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._server, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, target)
            answer = connection.getresponse()
            if answer.status == 404:
                raise FileNotFoundError(target)
            if answer.status != 200:
                msg = f"{method} {target}: {answer.status}"
                raise OSError(msg)
            yield answer
        except http.client.HTTPException as error:
            msg = f"{method} {target}: {error}"
            raise OSError(msg) from error
        finally:
            connection.close()


class CopyView:
    """The objects of a bucket as files, with the identities that they had in the bucket."""

    poll_seconds = 0.05

    def __init__(self, folder: Path) -> None:
        self._root = folder / "objects"
        self._known: dict[str, Identity] = json.loads((folder / "listing.json").read_text())

    def entries(self, folder: str) -> dict[str, Entry]:
        """By the listing of that time."""
        names = {
            k.removeprefix(f"{folder}/"): i for k, i in self._known.items() if k.startswith(f"{folder}/")
        }
        return {name: Entry(identity, None) for name, identity in names.items() if "/" not in name}

    def read(self, key: str) -> bytes:
        """The file."""
        return (self._root / key).read_bytes()

    def sha256(self, key: str) -> tuple[str, Identity]:
        """Of the file."""
        with (self._root / key).open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest(), self._known.get(key, [])

    def identity(self, key: str) -> Identity | None:
        """As listed."""
        return self._known.get(key)


def copy_bucket(view: BucketView, folder: Path) -> None:
    """Every object to `folder`/objects, and their identities to listing.json."""
    known = {view.relative(key): identity for key, identity in view.listing().items()}
    for key in known:
        path = folder / "objects" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(view.read(key))
    (folder / "listing.json").write_text(json.dumps(known, indent=1) + "\n")


def _told(answer: http.client.HTTPResponse) -> Identity:
    """The identity in an answer's headers, as a listing has it."""
    modified = parsedate_to_datetime(answer.headers["Last-Modified"]).timestamp()
    return [answer.headers["ETag"], int(answer.headers["Content-Length"]), int(modified)]


def _identity(status: os.stat_result) -> Identity:
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
