"""Ask the metadata service of AWS, GCP or Azure for the notice that it takes this node away.

Each answers on the node itself, past every proxy. What an answer leaves unclear errs on the early side: a
notice without a time that can be read ends the node as soon as that cloud ever does.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
from pydantic import TypeAdapter

from ckptd.base import files
from ckptd.errors import CkptdError, RemoteUnreachable, StorageError
from ckptd.storage.local.state_dir import drop_status, prepare_state_dir, private_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from urllib3 import BaseHTTPResponse

POLL_SECONDS = 5.0
TIMEOUT_SECONDS = 5.0
_LIMIT_BYTES = 1 << 20
_COUNTED = "notices.json"
_GCP = {"Metadata-Flavor": "Google"}
_AZURE = {"Metadata": "true"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Hold what the cloud announced."""

    text: str
    deadline_unix: float
    """The node may be gone from then on."""


class Cloud(Protocol):
    """Ask one metadata service."""

    poll_seconds: float
    """Ask so often, as the cloud recommends."""

    def is_here(self) -> bool:
        """Tell whether this node is one of this cloud's."""

    def notice(self) -> Notice | None:
        """Return the notice that holds now.

        Raises:
            RemoteUnreachable, StorageError: the service cannot be asked, or answers what nobody documents.
        """


class _Deadlines:
    """Count the time of notices that name none, from when each was first seen since this node began.

    A daemon that is started again goes on counting by a file in the user's own place.
    """

    def __init__(self, base: str) -> None:
        self._place = private_place(Path("/", base))
        self._counted: dict[str, float] = {}

    def of(self, notice: str, seconds: float, named: object = None) -> float:
        """Return the time that is named, else `seconds` after the first call for this notice."""
        at = _unix(named)
        if at is None and notice not in self._counted:
            self._counted |= {notice: time.time() + seconds}
            with contextlib.suppress(OSError, CkptdError):
                prepare_state_dir(self._place)
                with files.opened_dir(self._place) as fd:
                    self._counted |= _counted_before(fd)
                    files.write_atomic(fd, _COUNTED, json.dumps(self._counted).encode())
        return self._counted[notice] if at is None else at

    def forget(self) -> None:
        """Count anew for a notice that comes again."""
        self._counted.clear()
        drop_status(self._place, _COUNTED)


def _counted_before(place_fd: int) -> dict[str, float]:
    """Return what was counted since this node was booted."""
    status = files.stat_beneath(place_fd, _COUNTED)
    if status is None or status.st_mtime < psutil.boot_time():
        return {}
    with contextlib.suppress(ValueError):
        return TypeAdapter(dict[str, float]).validate_json(files.read_beneath(place_fd, _COUNTED))
    return {}


class Aws:
    """Ask EC2 by IMDSv2: a token first; 404 until there is a notice."""

    poll_seconds = POLL_SECONDS
    WARNING_SECONDS = 120.0
    """An interruption comes two minutes after its notice; so it may after a rebalance recommendation, which
    names no deadline."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._token: str | None = None
        self._deadlines = _Deadlines(base)

    def is_here(self) -> bool:
        """Tell whether a token is given out."""
        return bool(self._new_token())

    def notice(self) -> Notice | None:
        """Return an interruption, else a rebalance recommendation of the last two minutes."""
        action = self._document("spot/instance-action")
        if action is not None:
            text = f"AWS: spot/instance-action {action.get('action')}"
            at = self._earlier(text, action.get("time"), _unix(action.get("time")))
            return Notice(text=text, deadline_unix=at)
        rebalance = self._document("events/recommendations/rebalance")
        if rebalance is None:
            self._deadlines.forget()
            return None
        text, noticed_at = "AWS: rebalance recommendation", _unix(rebalance.get("noticeTime"))
        named = None if noticed_at is None else noticed_at + self.WARNING_SECONDS
        at = self._earlier(text, rebalance.get("noticeTime"), named)
        return Notice(text=text, deadline_unix=at) if at > time.time() else None

    def _earlier(self, text: str, said: object, named_unix: float | None) -> float:
        """Return the time that is named, and no later than two minutes after its first sight: this node's
        clock may be behind.
        """
        counted = self._deadlines.of(f"{text} {said}", self.WARNING_SECONDS)
        return counted if named_unix is None else min(named_unix, counted)

    def _document(self, path: str) -> dict[str, Any] | None:
        for _ in range(2):
            token = self._token = self._token or self._new_token()
            url, headers = f"{self._base}/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": token}
            status, text, _ = _ask("GET", url, headers, also=(401, 404))
            if status != 401:
                return None if status == 404 else _table(text)
            self._token = None  # it has ended
        raise StorageError("the metadata service refuses the token that it gave")

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        try:
            return _ask("PUT", f"{self._base}/latest/api/token", headers)[1].strip()
        except RemoteUnreachable as error:
            hint = "in a container the instance's hop limit must be 2 (--http-put-response-hop-limit 2)"
            raise RemoteUnreachable(error.message, hint=hint) from error


class Gcp:
    """Ask Compute Engine: wait for `preempted`, and look for a host maintenance that terminates."""

    poll_seconds = POLL_SECONDS
    PREEMPTED_SECONDS = 30.0
    MAINTENANCE_SECONDS = 3600.0
    """Neither value names a deadline: the shortest that is documented. A maintenance that terminates is
    announced to nodes with GPUs, an hour ahead."""

    def __init__(self, base: str) -> None:
        self._base = f"{base}/computeMetadata/v1/instance"
        self._etag = "0"
        self._deadlines = _Deadlines(base)

    def is_here(self) -> bool:
        """Tell whether the service says its name."""
        return _ask("GET", f"{self._base}/id", _GCP)[2].get("Metadata-Flavor") == "Google"

    def notice(self) -> Notice | None:
        """Return a preemption as soon as it comes, and every few seconds look for a maintenance."""
        query = f"wait_for_change=true&timeout_sec={self.poll_seconds:.0f}&last_etag={self._etag}"
        seconds = self.poll_seconds + TIMEOUT_SECONDS
        _, preempted, headers = _ask("GET", f"{self._base}/preempted?{query}", _GCP, seconds=seconds)
        self._etag = headers.get("ETag", "0")
        if preempted.strip() == "TRUE":
            return self._counted("GCP: preempted", self.PREEMPTED_SECONDS)
        if preempted.strip() != "FALSE":
            raise StorageError(f"the metadata service answered {preempted[:40]!r} for preempted")
        maintenance = _ask("GET", f"{self._base}/maintenance-event", _GCP)[1].strip()
        if maintenance.startswith("TERMINATE"):
            return self._counted(f"GCP: {maintenance}", self.MAINTENANCE_SECONDS)
        self._deadlines.forget()
        return None

    def _counted(self, text: str, seconds: float) -> Notice:
        return Notice(text=text, deadline_unix=self._deadlines.of(text, seconds))


class Azure:
    """Ask for the Scheduled Events of this machine; the service lists those of its whole scale set."""

    poll_seconds = 1.0
    SHORTEST_SECONDS = 30.0
    """An event that has begun has no time any more."""
    FIRST_SECONDS = 120.0
    """The first request enables the service, which may take so long."""
    ENDS = ("Preempt", "Terminate", "Redeploy")
    """After these the node, or what lies on its own disk, is gone."""

    def __init__(self, base: str) -> None:
        self._base = f"{base}/metadata"
        self._name: str | None = None
        self._is_asked = False
        self._deadlines = _Deadlines(base)

    def is_here(self) -> bool:
        """Tell whether the service knows this machine."""
        return bool(self._own_name())

    def notice(self) -> Notice | None:
        """Return the first event that ends this machine."""
        self._name = self._name or self._own_name()
        url = f"{self._base}/scheduledevents?api-version=2020-07-01"
        seconds, self._is_asked = TIMEOUT_SECONDS if self._is_asked else self.FIRST_SECONDS, True
        events = _table(_ask("GET", url, _AZURE, seconds=seconds)[1]).get("Events")
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise StorageError("the metadata service lists no Events")
        found = [
            Notice(text=f"Azure: {event.get('EventType')}", deadline_unix=self._deadline(event))
            for event in events
            if event.get("EventType") in self.ENDS and self._name in (event.get("Resources") or ())
        ]
        return min(found, key=lambda notice: notice.deadline_unix, default=None)

    def _deadline(self, event: Mapping[str, Any]) -> float:
        return self._deadlines.of(str(event.get("EventId")), self.SHORTEST_SECONDS, event.get("NotBefore"))

    def _own_name(self) -> str:
        url = f"{self._base}/instance/compute/name?api-version=2021-02-01&format=text"
        name = _ask("GET", url, _AZURE)[1].strip()
        if not re.fullmatch(r"[\w.-]+", name):
            # it is kept, and events of any other machine are passed over
            raise StorageError(f"the metadata service answered {name[:40]!r} for this machine's name")
        return name


CLOUDS: dict[str, Callable[[str], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


# --- one request -----------------------------------------------------------------------------------------


def _ask(
    method: str,
    url: str,
    headers: Mapping[str, str],
    *,
    also: tuple[int, ...] = (),
    seconds: float | None = None,
) -> tuple[int, str, Mapping[str, str]]:
    """Send one request, past every proxy; `also`: what counts as an answer beside 200.

    Raises:
        RemoteUnreachable: no answer in time. StorageError: another answer.
    """
    from http.client import HTTPException

    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.exceptions import HTTPError
    from urllib3.util import parse_url

    seconds = TIMEOUT_SECONDS if seconds is None else seconds
    end_seconds = time.monotonic() + seconds
    to = parse_url(url)
    make = HTTPSConnection if to.scheme == "https" else HTTPConnection
    connection = make(to.host or "", to.port, timeout=seconds)
    try:
        connection.connect()
        with _cut_off(connection.sock, end_seconds):
            connection.request(method, to.request_uri, headers=dict(headers), preload_content=False)
            answer: BaseHTTPResponse = connection.getresponse()
            text = answer.read(_LIMIT_BYTES).decode("utf-8", "replace")
            answer.close()
        if time.monotonic() >= end_seconds:  # what was cut off may look whole
            raise TimeoutError
    except (HTTPError, HTTPException, OSError) as error:
        msg = f"the metadata service at {url.split('/')[2]} does not answer ({type(error).__name__})"
        raise RemoteUnreachable(msg, hint="`curl` it on this node; termination_url is for a proxy") from None
    finally:
        connection.close()
    if answer.status not in (200, *also):
        raise StorageError(f"the metadata service answered {answer.status} for {url.split('?')[0]}")
    return answer.status, text, answer.headers


@contextlib.contextmanager
def _cut_off(connected: socket.socket | None, end_seconds: float) -> Iterator[None]:
    """Cut a connection off at a monotonic time: the limit of a socket holds for each read, and one byte a
    second would keep it for ever.
    """

    def cut() -> None:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if connected is not None:
                connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, end_seconds - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _table(text: str) -> dict[str, Any]:
    """Raises: StorageError: it is no JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise StorageError(f"the metadata service answered what is no notice: {text[:40]!r}")
    return found


def _unix(value: object) -> float | None:
    """Return a time of RFC 3339 or of HTTP as Unix seconds; None: it is none."""
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            at = read(str(value))
        except ValueError:
            continue
        if at.tzinfo is not None:
            return at.timestamp()
    return None
