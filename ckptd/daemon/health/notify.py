"""Tells people and programs: webhook, command, heartbeat, hooks; in a thread that nothing ever waits for.

A notifier that fails, hangs or floods costs its own messages and nothing else: the queue is bounded, every
delivery has a time limit, and what failed is one line in status. URLs are read when they are used and never
logged, since they are secrets (P15).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckptd.errors import CkptdError, StorageError, from_os_error
from ckptd.observe.events import EventReporter, NotifyRules
from ckptd.storage.stores.access import credentials_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.config.schema import NotifyConfig
    from ckptd.observe.events import Event
    from ckptd.observe.status import JobStatus

log = logging.getLogger("ckptd.notify")

DELIVERY_SECONDS = 30.0
HEARTBEAT_SECONDS = 60.0
_WAITING = 200
_TRIES = 3
_PASSED_ON = ("PATH", "HOME", "LANG", "TZ")
"""All that a command sees of our environment."""
_MARKS = {"attention": "🔴", "behind": "🟡", "note": "⚪"}


class Notifier:
    """`see` and `turn` are called by the deciding thread and return at once."""

    def __init__(self, config: NotifyConfig, node: str) -> None:
        self._config = config
        self._node = node
        self._desk = EventReporter(_rules(config))
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._beat_at: float | None = None
        self.failed: str | None = None
        """Reason why the last delivery failed; None: it did not."""
        self._thread = threading.Thread(target=self._serve, name="notify", daemon=True)
        if config.is_wanted:
            self._thread.start()

    def see(self, status: JobStatus, *, is_scanned: bool = True) -> None:
        """A job's status changed; `is_scanned`: its checkpoints are known."""
        if not self._config.is_wanted:
            return
        news = self._desk.see(status, time.monotonic(), is_scanned=is_scanned)
        for event in news.events:
            hook: tuple[str, ...] = getattr(self._config, f"on_{event.kind}", ())
            if hook:
                self._put(lambda hook=hook, event=event: self._exec(hook, event))  # type: ignore[misc]
        for event in news.messages:
            if self._config.webhook:
                self._put(lambda event=event: self._post(event))  # type: ignore[misc]
            if self._config.command:
                self._put(lambda event=event: self._exec(self._config.command, event))  # type: ignore[misc]

    def turn(self, jobs: Sequence[JobStatus]) -> None:
        """All jobs took their turns, among them what does not run: the heartbeat goes on, if all is well."""
        self._desk.forget_others(jobs)
        if self._config.heartbeat is None or not self._desk.is_well():
            return
        now = time.monotonic()
        if self._beat_at is None or now - self._beat_at >= HEARTBEAT_SECONDS:
            self._beat_at = now
            self._put(self._beat)

    def close(self, seconds: float = 5.0) -> None:
        """Let what waits be delivered, for a moment."""
        if self._thread.is_alive():
            self._put(None)
            self._thread.join(seconds)

    def change(self, config: NotifyConfig) -> None:
        """A reload: what waits is told by the old rules, what comes by the new ones."""
        if config != self._config:
            self._config = config
            self._desk.rules = _rules(config)
            if config.is_wanted and not self._thread.is_alive():
                self._thread.start()

    # --- the thread ------------------------------------------------------------------------------------

    def _put(self, call: Callable[[], None] | None) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self.failed = f"{_WAITING} messages wait; the newest are not told"

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except CkptdError as error:
                self._fail(error.message)
            except Exception as error:  # noqa: BLE001  whatever a library raises, the next message is tried
                self._fail(type(error).__name__)
            else:
                self.failed = None

    def _fail(self, why: str) -> None:
        if why != self.failed:
            log.warning("a notification was not delivered: %s", why)
        self.failed = why

    def _post(self, event: Event) -> None:
        assert self._config.webhook is not None
        body = {"text": words(event, self._node), "event": asdict(event) | {"node": self._node}}
        _request("POST", "webhook", url_of(self._config.webhook), json.dumps(body).encode())

    def _beat(self) -> None:
        assert self._config.heartbeat is not None
        _request("GET", "heartbeat", url_of(self._config.heartbeat), None)

    def _exec(self, argv: tuple[str, ...], event: Event) -> None:
        """Run one; its whole process group ends with the time limit."""
        data = json.dumps(asdict(event) | {"node": self._node, "text": words(event, self._node)}).encode()
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise from_os_error(error, f"starting {argv[0]}") from error
        try:
            child.communicate(data, timeout=DELIVERY_SECONDS)
        except subprocess.TimeoutExpired as error:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise StorageError(f"{argv[0]} did not end within {DELIVERY_SECONDS:.0f} s") from error
        if child.returncode != 0:
            raise StorageError(f"{argv[0]} ended with {child.returncode}")


def _rules(config: NotifyConfig) -> NotifyRules:
    return NotifyRules(
        severity=config.severity,
        repeat_seconds=config.repeat_seconds,
        not_safe_after_seconds=config.not_safe_after_seconds,
    )


def words(event: Event, node: str) -> str:
    """One message for people."""
    mark = _MARKS[event.severity] if event.kind in ("problem", "not-safe") else "🟢"
    where = f"{event.job} on {node}"
    return f"{mark} ckptd: {where}: {event.text}" + (f"\n→ {event.next_step}" if event.next_step else "")


def url_of(given: str) -> str:
    """The URL itself, read from its file each time: it may be replaced while we run.

    Raises:
        StorageError, NotPermitted: the file cannot be read.
    """
    if not given.startswith("file:"):
        return given
    path = credentials_path(given.removeprefix("file:"))
    try:
        with open(path, encoding="utf-8") as source:
            return source.read(4096).strip()
    except OSError as error:
        raise from_os_error(error, f"reading {path}") from error


def _proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL ($https_proxy, $no_proxy …); many nodes have no
    other way out.
    """
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    if proxy_bypass(parts.netloc):
        return None
    return getproxies().get(parts.scheme)


def _request(method: str, what: str, url: str, body: bytes | None) -> None:
    """One request, tried again at connection errors and 5xx; the URL stays out of every message."""
    import urllib3
    from urllib3.util import Retry, Timeout

    retries = Retry(
        total=_TRIES, backoff_factor=0.5, backoff_jitter=0.5, allowed_methods=None,
        status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False,
    )  # fmt: skip
    headers = {"Content-Type": "application/json"} if body is not None else {}
    try:
        with urllib3.ProxyManager(proxy) if (proxy := _proxy_of(url)) else urllib3.PoolManager() as pool:
            answer = pool.request(
                method, url, body=body, headers=headers, retries=retries, timeout=Timeout(total=10.0)
            )
    except urllib3.exceptions.HTTPError as error:
        raise StorageError(f"the {what} was not reached ({type(error).__name__})") from None
    if answer.status >= 400:
        raise StorageError(f"the {what} answered {answer.status}")
