"""Ask the cloud's metadata service whether it is about to take this node away; in a thread.

The service answers on the node itself. It is asked every few seconds, as the clouds recommend, and never by
the deciding thread, which gets a notice posted once; what fails is said and asked again.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Protocol

from ckptd.errors import CkptdError, RemoteUnreachable, StorageError
from ckptd.observe.status import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from urllib3 import BaseHTTPResponse

    from ckptd.config.schema import DaemonConfig
    from ckptd.daemon.actions.control import Control
    from ckptd.daemon.state.problems import Problems

log = logging.getLogger("ckptd")

POLL_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 30.0
TIMEOUT_SECONDS = 5.0
FAILURES_TOLD = 3
"""So many polls fail one after another before that is a problem."""
METADATA_URL = "http://169.254.169.254"
"""Of all three clouds."""
_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What the cloud said."""

    text: str
    deadline_unix: float
    """The node may be gone from then on."""


Told = tuple[Notice | None, CkptdError | None]
"""The notice that holds, and why the service could not be asked."""


class Cloud(Protocol):
    """A metadata service."""

    def is_here(self) -> bool:
        """Tell whether this node is one of this cloud's."""

    def notice(self) -> Notice | None:
        """Return the notice that holds now.

        Raises:
            RemoteUnreachable, StorageError: the service cannot be asked, or answers what nobody documents.
        """


class TerminationWatch:
    """The thread that asks; `which` is "aws", "gcp", "azure", or "auto" for the one that answers."""

    def __init__(self, which: str, url: str | None, post: Callable[[Told], None]) -> None:
        self._post = post
        base = (url or METADATA_URL).rstrip("/")
        self._clouds = [make(base) for name, make in CLOUDS.items() if which in (name, "auto")]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="termination", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; what is being asked is not waited for."""
        self._stop.set()

    def _serve(self) -> None:
        told: Told = (None, None)
        failures = 0
        while not self._stop.is_set():
            begun = time.monotonic()
            now: Told = told
            try:
                now = (self._cloud().notice(), None)
                failures = 0
            except CkptdError as error:
                failures += 1
                now = (told[0], error if failures >= FAILURES_TOLD else told[1])
            except Exception as error:  # noqa: BLE001  whatever an answer makes of a library, it is asked again
                failures += 1
                text = f"the metadata service's answer is not understood ({type(error).__name__})"
                now = (told[0], StorageError(text) if failures >= FAILURES_TOLD else told[1])
            if now[0] != told[0] or str(now[1]) != str(told[1]):
                told = now
                self._post(told)
            pause = min(POLL_SECONDS * 2 ** min(max(0, failures - 1), 4), LONGEST_PAUSE_SECONDS)
            self._stop.wait(max(0.0, pause - (time.monotonic() - begun)))

    def _cloud(self) -> Cloud:
        """Return the cloud of this node.

        Raises:
            RemoteUnreachable: none answers.
        """
        if len(self._clouds) > 1:
            self._clouds = [cloud for cloud in self._clouds if _answers(cloud)][:1] or self._clouds
        if len(self._clouds) > 1:
            msg = "no metadata service of AWS, GCP or Azure answers here"
            raise RemoteUnreachable(msg, hint='on other nodes leave out termination, or write "off"')
        return self._clouds[0]


class Drained(Protocol):
    """What a notice does to a job."""

    problems: Problems
    control: Control

    def wake(self) -> None:
        """Plan again."""


class TerminationNotices:
    """Begin a drain of every job with a notice, and say so; called in the deciding thread."""

    def __init__(
        self,
        config: DaemonConfig,
        post: Callable[[Callable[[], None]], None],
        jobs: Callable[[], Sequence[Drained]],
    ) -> None:
        self._post = post
        self._jobs = jobs
        self._told: Told = (None, None)
        self._asked: tuple[str, str | None] = ("off", None)
        self._watch: TerminationWatch | None = None
        self.change(config)

    def change(self, config: DaemonConfig) -> None:
        """Ask another service from now on, or none."""
        asked = (config.termination, config.termination_url)
        if asked == self._asked:
            return
        self._asked = asked
        self.close()
        self._told = (None, None)
        if config.termination != "off":
            watch = TerminationWatch(*asked, lambda told: self._post(lambda: self._take(watch, told)))
            self._watch = watch

    def close(self) -> None:
        """Ask no more."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def apply_to(self, job: Drained, *, is_news: bool = True) -> None:
        """Drain a job by a notice, where that is news to it; its problems say what the service said."""
        notice, error = self._told
        if notice is None:
            job.problems.clear("node-ending", "")
        else:
            if is_news:
                job.control.drain_by(notice.deadline_unix)
            text = f"this node ends at {rfc3339(notice.deadline_unix)} ({notice.text}): it is drained"
            job.problems.put("node-ending", "", text, "`ckptd status` says what will not make it")
        if error is None:
            job.problems.clear("termination-unread", "")
        else:
            hint = error.hint or 'correct termination in ckptd.toml, or write termination = "off"'
            job.problems.put("termination-unread", "", error.message, hint)
        job.wake()

    def _take(self, watch: TerminationWatch, told: Told) -> None:
        if watch is not self._watch:
            return
        is_news = told[0] != self._told[0]
        if is_news and told[0] is not None:
            log.warning("this node ends at %s (%s)", rfc3339(told[0].deadline_unix), told[0].text)
        self._told = told
        for job in self._jobs():
            self.apply_to(job, is_news=is_news)


def _answers(cloud: Cloud) -> bool:
    try:
        return cloud.is_here()
    except CkptdError:
        return False


# --- the three services ----------------------------------------------------------------------------------


class Aws:
    """EC2 by IMDSv2: a token first; 404 until there is a notice."""

    REBALANCE_SECONDS = 120.0
    """A rebalance recommendation names no deadline; the interruption itself comes two minutes before."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._token: str | None = None

    def is_here(self) -> bool:
        """Tell whether a token is given out."""
        return bool(self._new_token())

    def notice(self) -> Notice | None:
        """Return an interruption, else a rebalance recommendation of the last two minutes."""
        action = self._document("spot/instance-action")
        if action is not None:
            at = _unix(action.get("time"))
            return Notice(text=f"AWS: spot/instance-action {action.get('action')}", deadline_unix=at)
        rebalance = self._document("events/recommendations/rebalance")
        if rebalance is not None:
            at = _unix(rebalance.get("noticeTime")) + self.REBALANCE_SECONDS
            if at > time.time():
                return Notice(text="AWS: rebalance recommendation", deadline_unix=at)
        return None

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
    """Compute Engine: `preempted` is waited for; a host maintenance that terminates."""

    PREEMPTED_SECONDS = 30.0
    MAINTENANCE_SECONDS = 60.0
    """Neither value names a deadline: the shortest that is documented."""

    def __init__(self, base: str) -> None:
        self._base = f"{base}/computeMetadata/v1/instance"
        self._etag = "0"
        self._holds: Notice | None = None

    def is_here(self) -> bool:
        """Tell whether the service says its name."""
        return _ask("GET", f"{self._base}/id", _GCP)[2].get("Metadata-Flavor") == "Google"

    def notice(self) -> Notice | None:
        """Return a preemption as soon as it comes, and every few seconds look for a maintenance."""
        query = f"wait_for_change=true&timeout_sec={POLL_SECONDS:.0f}&last_etag={self._etag}"
        seconds = POLL_SECONDS + TIMEOUT_SECONDS
        _, preempted, headers = _ask("GET", f"{self._base}/preempted?{query}", _GCP, seconds=seconds)
        self._etag = headers.get("ETag", "0")
        maintenance = _ask("GET", f"{self._base}/maintenance-event", _GCP)[1].strip()
        if preempted.strip() == "TRUE":
            self._hold("GCP: preempted", self.PREEMPTED_SECONDS)
        elif preempted.strip() != "FALSE":
            raise StorageError(f"the metadata service answered {preempted[:40]!r} for preempted")
        elif maintenance.startswith("TERMINATE"):
            self._hold(f"GCP: {maintenance}", self.MAINTENANCE_SECONDS)
        else:
            self._holds = None
        return self._holds

    def _hold(self, text: str, seconds: float) -> None:
        """Count the time from when it was first seen."""
        if self._holds is None or self._holds.text != text:
            self._holds = Notice(text=text, deadline_unix=time.time() + seconds)


class Azure:
    """Scheduled Events of this machine; a service that lists those of its whole scale set."""

    SHORTEST_SECONDS = 30.0
    """An event that has begun has no time any more."""
    ENDS = ("Preempt", "Terminate", "Redeploy")
    """After these the node, or what lies on its own disk, is gone."""

    def __init__(self, base: str) -> None:
        self._base = f"{base}/metadata"
        self._name: str | None = None
        self._begun: dict[str, float] = {}

    def is_here(self) -> bool:
        """Tell whether the service knows this machine."""
        return bool(self._own_name())

    def notice(self) -> Notice | None:
        """Return the first event that ends this machine."""
        self._name = self._name or self._own_name()
        url = f"{self._base}/scheduledevents?api-version=2020-07-01"
        events = _table(_ask("GET", url, _AZURE)[1]).get("Events")
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise StorageError("the metadata service lists no Events")
        found = [
            Notice(text=f"Azure: {event.get('EventType')}", deadline_unix=self._deadline(event))
            for event in events
            if event.get("EventType") in self.ENDS and self._name in event.get("Resources", ())
        ]
        return min(found, key=lambda notice: notice.deadline_unix, default=None)

    def _deadline(self, event: Mapping[str, Any]) -> float:
        if at := event.get("NotBefore"):
            return _unix(at)
        return self._begun.setdefault(str(event.get("EventId")), time.time() + self.SHORTEST_SECONDS)

    def _own_name(self) -> str:
        url = f"{self._base}/instance/compute/name?api-version=2021-02-01&format=text"
        name = _ask("GET", url, _AZURE)[1].strip()
        if not re.fullmatch(r"[\w.-]+", name):
            # it is kept, and events of any other machine are passed over
            raise StorageError(f"the metadata service answered {name[:40]!r} for this machine's name")
        return name


_GCP = {"Metadata-Flavor": "Google"}
_AZURE = {"Metadata": "true"}
CLOUDS: dict[str, Callable[[str], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


# --- one request -----------------------------------------------------------------------------------------


def _ask(
    method: str,
    url: str,
    headers: Mapping[str, str],
    *,
    also: tuple[int, ...] = (),
    seconds: float = TIMEOUT_SECONDS,
) -> tuple[int, str, Mapping[str, str]]:
    """Send one request, past every proxy; `also`: what counts as an answer beside 200.

    Raises:
        RemoteUnreachable: no answer in time. StorageError: another answer.
    """
    import urllib3

    try:
        with urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(total=seconds)) as pool:
            answer: BaseHTTPResponse = pool.request(
                method, url, headers=dict(headers), redirect=False, preload_content=False
            )
            text = answer.read(_LIMIT_BYTES).decode("utf-8", "replace")
            answer.release_conn()
    except urllib3.exceptions.HTTPError as error:
        msg = f"the metadata service at {url.split('/')[2]} does not answer ({type(error).__name__})"
        raise RemoteUnreachable(msg, hint="`curl` it on this node; termination_url is for a proxy") from None
    if answer.status not in (200, *also):
        raise StorageError(f"the metadata service answered {answer.status} for {url.split('?')[0]}")
    return answer.status, text, answer.headers


def _table(text: str) -> dict[str, Any]:
    """Raises: StorageError: it is no JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise StorageError(f"the metadata service answered what is no notice: {text[:40]!r}")
    return found


def _unix(value: object) -> float:
    """Return a time of RFC 3339 or of HTTP as Unix seconds.

    Raises:
        StorageError: it is none.
    """
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            at = read(str(value))
        except ValueError:
            continue
        if at.tzinfo is not None:
            return at.timestamp()
    raise StorageError(f"the metadata service named a time that is none: {str(value)[:40]!r}")
