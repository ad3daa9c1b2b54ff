"""Where a quickstart ships to: a directory that stands for a NAS, or a bucket of an S3 server of its own.

One object per kind says what differs: lines of the job file, the daemon's environment, what an unfinished
upload looks like from outside. The rest of the quickstart does not ask which kind it has.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from ckptd.errors import CkptdError
from examples.demo.gate import Gate
from examples.demo.remote_view import COPY, BucketView, DirectoryView, copy_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from examples.demo.remote_view import RemoteView

DIRECTORY, S3 = "directory", "s3"
KINDS = (DIRECTORY, S3)
SERVER = "examples.demo.s3_server"
SERVER_LOG = "server.jsonl"
SERVER_LIFE_SECONDS = 900
START_SECONDS = 60.0
STOP_SECONDS = 5.0
COMMITS = "_ckptd/commits/"
BUCKET, PREFIX = "ckptd-quickstart", "gpt"
PART_BYTES_AT_KILL = 2_000_000
READABLE = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": "*",
            "Action": ["s3:GetObject", "s3:HeadObject"],
            "Resource": f"arn:aws:s3:::{BUCKET}/*",
        }
    ],
}
"""Bucket policy: the eyewitness has no keys."""

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "quickstart",
    "AWS_SECRET_ACCESS_KEY": "quickstart-secret",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}

DIRECTORY_TOML = """\
url = "{url}"
same_filesystem = true                  # quickstart: the "NAS" is a directory beside
"""
S3_TOML = """\
url = "s3://{bucket}/{prefix}"
endpoint_url = "{endpoint}"   # quickstart: a server of its own; keys come from the environment
region = "us-east-1"
part_size = "5MiB"                      # quickstart: small shards, and still several parts each
"""


class ServerFailed(CkptdError):
    """The quickstart's S3 server does not start."""

    default_hint = "its log says why; it needs moto: pip install 'ckptd[demo]'"


class Remote(Protocol):
    """What a quickstart ships to."""

    kind: str
    name: str
    """In the job file."""
    place: str
    """What people call it: "the NAS", "the bucket"."""
    where: str
    """ "on the NAS", "in the bucket"."""

    @property
    def toml(self) -> str:
        """Its lines of the job file."""
        ...

    @property
    def address(self) -> str:
        """What `remote_view.view_of` takes."""
        ...

    @property
    def view(self) -> RemoteView:
        """How the quickstart itself looks at it."""
        ...

    @property
    def environment(self) -> dict[str, str]:
        """What ckptd's processes, and no others, get in addition: credentials."""
        ...

    @property
    def gate(self) -> Gate | None:
        """The door on the way there; None: there is none to shut."""
        ...

    def parts_in_flight(self) -> dict[str, int]:
        """Tag → bytes of an unfinished object of its ZeRO form."""
        ...

    def uploads_in_flight(self) -> set[str]:
        """Tags whose ZeRO form is being sent."""
        ...

    def keep(self, root: Path) -> None:
        """Keep below `root` what would end with this process, for judging again."""
        ...


@contextlib.contextmanager
def open_remote(kind: str, root: Path) -> Iterator[Remote]:
    """The remote of a quickstart in `root`; whatever it runs ends with the context.

    Raises:
        ServerFailed: the S3 server does not start.
    """
    if kind == DIRECTORY:
        yield DirectoryRemote(root / "nas" / PREFIX)
        return
    with _server(root) as port, Gate(port) as gate:
        yield BucketRemote(port, gate, root / "records" / SERVER_LOG)


class DirectoryRemote:
    """A directory beside the node's."""

    kind, name, place, where = DIRECTORY, "nas", "the NAS", "on the NAS"

    def __init__(self, path: Path) -> None:
        self.environment: dict[str, str] = {}
        self.gate: Gate | None = None
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.address = str(path)
        self.view = DirectoryView(path)
        self.toml = DIRECTORY_TOML.format(url=path)

    def parts_in_flight(self) -> dict[str, int]:
        """By the names that ckptd gives to what it has not finished."""
        found: dict[str, int] = {}
        for tag in filter(_is_zero, _names(self._path)):
            for name in _names(self._path / tag):
                if name.startswith(".ckptd-part-"):
                    with contextlib.suppress(OSError):
                        size = (self._path / tag / name).stat().st_size
                        if size >= PART_BYTES_AT_KILL:
                            found[tag] = max(found.get(tag, 0), size)
        return found

    def uploads_in_flight(self) -> set[str]:
        """Those with such a name."""
        return set(self.parts_in_flight())

    def keep(self, root: Path) -> None:
        """It is files already."""


class BucketRemote:
    """A bucket of a server on this machine; ckptd goes through `gate`, everybody else to the server."""

    kind, name, place, where = S3, "s3", "the bucket", "in the bucket"

    def __init__(self, port: int, gate: Gate, log: Path) -> None:
        self.environment = dict(ENVIRONMENT)
        self.gate: Gate | None = gate
        self.address = f"http://127.0.0.1:{port}/{BUCKET}/{PREFIX}"
        self.view = BucketView(self.address)
        self.toml = S3_TOML.format(bucket=BUCKET, prefix=PREFIX, endpoint=f"http://127.0.0.1:{gate.port}")
        self._uploads = OpenUploads(log, f"/{BUCKET}/{PREFIX}/")

    def uploads_in_flight(self) -> set[str]:
        """By the server's log: tags of which something came and no COMMIT yet."""
        return self._uploads.uncommitted()

    def parts_in_flight(self) -> dict[str, int]:
        """By the server's log: parts that came, of objects that are not joined yet."""
        return self._uploads.by_tag()

    def keep(self, root: Path) -> None:
        """Copy the bucket: its server keeps objects in memory."""
        copy_bucket(self.view, root / COPY)


class OpenUploads:
    """Follows the server's log: which objects are between their first part and their last word."""

    def __init__(self, log: Path, prefix: str) -> None:
        self._log, self._prefix = log, prefix
        self._read_bytes = 0
        self._parts: dict[str, int] = {}
        self._begun: set[str] = set()

    def by_tag(self) -> dict[str, int]:
        """Tag → bytes of an object of its ZeRO form that is not whole yet."""
        self._follow()
        found = {_tag_of(key): size for key, size in self._parts.items()}
        return {tag: size for tag, size in found.items() if _is_zero(tag)}

    def uncommitted(self) -> set[str]:
        """Tags of which something of the ZeRO form came since the last COMMIT of theirs."""
        self._follow()
        return set(self._begun)

    def _follow(self) -> None:
        with self._log.open("rb") as source:
            source.seek(self._read_bytes)
            news = source.read()
        news = news[: news.rfind(b"\n") + 1]
        self._read_bytes += len(news)
        for line in news.splitlines():
            self._add(line)

    def _add(self, text: bytes) -> None:
        line = json.loads(text)
        key = str(line["path"]).removeprefix(self._prefix)
        if line["status"] != 200 and line["method"] != "DELETE":
            return
        if line["method"] != "DELETE" and _is_zero(_tag_of(key)):
            self._begun.add(_tag_of(key))
        elif line["method"] == "PUT" and key.startswith(COMMITS) and key.endswith("~zero.json"):
            self._begun.discard(key.removeprefix(COMMITS).partition("~")[0])
        if line["method"] == "PUT" and "partNumber" in line["query"]:
            self._parts[key] = self._parts.get(key, 0) + int(line["bytes"])
        elif "uploadId" in line["query"]:
            self._parts.pop(key, None)


@contextlib.contextmanager
def _server(root: Path) -> Iterator[int]:
    """The server's port; the process ends with the context, with this process, or after its life."""
    records, objects = root / "records", root / "server-tmp"
    for folder in (records, objects):
        folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", SERVER, "--log", str(records / SERVER_LOG)]
    command += ["--life-seconds", str(SERVER_LIFE_SECONDS)]
    with (records / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TMPDIR": str(objects)},
            text=True,
        )
    try:
        said = process.stdout.readline() if process.stdout is not None else ""
        if not said.strip().isdigit():
            tail = (records / "server.log").read_text(errors="replace")[-1000:]
            msg = f"the S3 server does not start: {tail.strip()}"
            raise ServerFailed(msg)
        _make_bucket(int(said))
        yield int(said)
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _make_bucket(port: int) -> None:
    for target, body in ((f"/{BUCKET}", ""), (f"/{BUCKET}?policy", json.dumps(READABLE))):
        put("127.0.0.1", port, target, body.encode())


def put(host: str, port: int, target: str, body: bytes) -> None:
    """An unsigned PUT; raises ServerFailed."""
    connection = http.client.HTTPConnection(host, port, timeout=START_SECONDS)
    try:
        connection.request("PUT", quote(target, safe="/?=&"), body)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        if answer.status not in (200, 204):
            msg = f"PUT {target}: {answer.status} {text[:200]}"
            raise ServerFailed(msg)
    except (OSError, http.client.HTTPException) as error:
        msg = f"PUT {target}: {error}"
        raise ServerFailed(msg) from error
    finally:
        connection.close()


def _tag_of(key: str) -> str:
    """`<tag>[.g<n>]/…` → tag."""
    return key.partition("/")[0].partition(".")[0]


def _is_zero(tag: str) -> bool:
    return tag.startswith("global_step") and not tag.endswith("_universal")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
