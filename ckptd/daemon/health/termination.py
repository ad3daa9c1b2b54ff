"""Drain every job before the cloud takes this node away.

A thread asks the cloud's metadata service, never the deciding thread, which gets a notice posted once; what
fails is said and asked again.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

from ckptd.daemon.actions.control import DrainRequest, drain_before_end
from ckptd.daemon.health.cloud_notices import CLOUDS, POLL_SECONDS, Notice
from ckptd.errors import CkptdError, RemoteUnreachable, StorageError
from ckptd.observe.status import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.config.schema import DaemonConfig
    from ckptd.daemon.actions.control import Control
    from ckptd.daemon.health.cloud_notices import Cloud
    from ckptd.daemon.state.problems import Problems

log = logging.getLogger("ckptd")

LONGEST_PAUSE_SECONDS = 30.0
FAILURES_REPORTED = 3
"""Polls that fail one after another before a problem is reported."""
METADATA_URL = "http://169.254.169.254"
"""Address of the metadata service, the same in all three clouds."""


Reading = tuple[Notice | None, CkptdError | None]
"""The notice that holds, and why the service could not be asked."""


class TerminationWatch:
    """Ask in a thread; `which` is "aws", "gcp", "azure", or "auto" for the one that answers."""

    def __init__(self, which: str, url: str | None, post: Callable[[Reading], None]) -> None:
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
        posted: Reading = (None, None)
        failures = 0
        while not self._stop.is_set():
            begun = time.monotonic()
            notice, failure = posted
            try:
                cloud = self._cloud()
                notice, failure = cloud.notice(), None
                failures, pause = 0, cloud.poll_seconds
            except Exception as error:  # noqa: BLE001  whatever an answer makes of a library, it is asked again
                failures += 1
                pause = min(POLL_SECONDS * 2 ** min(failures - 1, 4), LONGEST_PAUSE_SECONDS)
                if failures >= FAILURES_REPORTED:
                    failure = error if isinstance(error, CkptdError) else _not_understood(error)
            if notice != posted[0] or str(failure) != str(posted[1]):
                posted = (notice, failure)
                self._post(posted)
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


class NotifiedJob(Protocol):
    """Declare what a notice changes in a job."""

    problems: Problems
    control: Control

    def wake(self) -> None:
        """Plan again."""


class TerminationNotices:
    """Hand every job the drain before this node's end, and say so; called in the deciding thread."""

    def __init__(
        self,
        config: DaemonConfig,
        post: Callable[[Callable[[], None]], None],
        jobs: Callable[[], Sequence[NotifiedJob]],
    ) -> None:
        self._post = post
        self._jobs = jobs
        self._reading: Reading = (None, None)
        self._drain: DrainRequest | None = None
        """The drain before the end that the notice names."""
        self._asked: tuple[str, str | None] = ("off", None)
        self._watch: TerminationWatch | None = None
        self.change(config)

    def change(self, config: DaemonConfig) -> None:
        """Ask another service from now on, or none: what the one before said holds no more."""
        asked = (config.termination, config.termination_url)
        if asked == self._asked:
            return
        self._asked = asked
        self.close()
        self._take(None, (None, None))
        if config.termination != "off":
            watch = TerminationWatch(*asked, lambda reading: self._post(lambda: self._take(watch, reading)))
            self._watch = watch

    def close(self) -> None:
        """Ask no more."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def apply_to(self, job: NotifiedJob) -> None:
        """Hand a job the drain, which may be over; its problems say what the service said."""
        notice, error = self._reading
        job.control.notice_drain = self._drain
        if notice is None or self._drain is None:
            job.problems.clear("node-ending", "")
        else:
            ends_at, begins_at = rfc3339(notice.deadline_unix), rfc3339(self._drain.asked_at_unix)
            text = f"this node ends at {ends_at} ({notice.text}): it is drained from {begins_at} on"
            job.problems.put("node-ending", "", text, "`ckptd status` says what will not make it")
        if error is None:
            job.problems.clear("termination-unread", "")
        else:
            hint = error.hint or 'correct termination in ckptd.toml, or write termination = "off"'
            job.problems.put("termination-unread", "", error.message, hint)
        job.wake()

    def _take(self, watch: TerminationWatch | None, reading: Reading) -> None:
        if watch is not self._watch:
            return
        notice = reading[0]
        if notice != self._reading[0]:
            self._drain = drain_before_end(notice.deadline_unix) if notice is not None else None
            if notice is not None:
                log.warning("this node ends at %s (%s)", rfc3339(notice.deadline_unix), notice.text)
        self._reading = reading
        for job in self._jobs():
            self.apply_to(job)


def _not_understood(error: Exception) -> CkptdError:
    return StorageError(f"the metadata service's answer is not understood ({type(error).__name__})")


def _answers(cloud: Cloud) -> bool:
    try:
        return cloud.is_here()
    except CkptdError:
        return False
