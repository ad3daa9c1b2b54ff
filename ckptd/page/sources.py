"""Read what the page shows: what daemons publish on this node, and remotes by their URLs."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptd.errors import CkptdError
from ckptd.maintenance.status.published import (
    Published,
    is_meant,
    jobs_meant,
    published,
    published_by_all,
)
from ckptd.observe.audit import read_retired
from ckptd.page.fleet import job_not_read, job_of_remote
from ckptd.page.timeline import when
from ckptd.page.view import Page, ShownJob, first_open, jobs_of, notices_of
from ckptd.storage.local.job_names import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

REMOTE_SECONDS = 30.0
"""Between two looks at a remote: each costs some requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """Name what the page was asked to show: jobs of this node (none and no URL: all of them), and remotes."""

    jobs: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    state_dir: Path | None = None
    config_dir: Path | None = None


def wanted(
    names: Sequence[str], state_dir: Path | None = None, config_dir: Path | None = None
) -> PageRequest:
    """Divide names into jobs and remotes.

    Raises:
        RemoteUnreachable: a path does not answer.
    """
    urls = tuple(name for name in names if is_remote(name))
    jobs = tuple(name for name in names if name not in urls)
    return PageRequest(jobs=jobs, urls=urls, state_dir=state_dir, config_dir=config_dir)


def read_page(asked: PageRequest) -> Page:
    """Read everything once, for a file.

    Raises:
        NotFoundError: nothing is published. RemoteError: a remote does not answer.
    """
    now = time.time()
    jobs, notices = read_local(asked, now)
    jobs += [job_of_remote(url, now, asked.config_dir) for url in asked.urls]
    return page_of(jobs, notices, now, None)


def page_of(
    jobs: Sequence[ShownJob], notices: Sequence[str], now: float, opened: frozenset[str] | None
) -> Page:
    """Return the page of jobs; `opened` None: nobody chose yet what is open."""
    made = when(datetime.fromtimestamp(now, UTC).isoformat(), now)
    assert made is not None
    keys = first_open(jobs) if opened is None else opened
    return Page(made=made, jobs=tuple(jobs), notices=tuple(notices), open_keys=keys)


def read_local(asked: PageRequest, now: float) -> tuple[list[ShownJob], list[str]]:
    """Return the jobs of this node, and what their daemons cannot do.

    Raises:
        NotFoundError: nothing is published. NotPermitted: this user may not look there.
    """
    jobs: dict[str, ShownJob] = {}
    notices: list[str] = []
    for name in asked.jobs or (() if asked.urls else (None,)):
        known = _published(name, asked, notices.append)
        is_there = False
        # of a job that several daemons have published the newest document counts
        for one in sorted(known, key=lambda one: one.status.generated_at, reverse=True):
            # the audit file is of one job
            deleted = read_retired(one.place) if len(one.status.jobs) == 1 else []
            meant = [job for job in one.status.jobs if name is None or is_meant(job, name, asked.config_dir)]
            is_there |= bool(meant)
            notices += notices_of(one.status)
            for shown in jobs_of(replace(one.status, jobs=tuple(meant)), now, deleted):
                jobs.setdefault(shown.key, shown)
        if name is not None and not is_there:
            # says that the daemon does not run it any more
            jobs_meant(known[0], name, asked.config_dir)
    return list(jobs.values()), list(dict.fromkeys(notices))


def _published(name: str | None, asked: PageRequest, say: Callable[[str], None]) -> list[Published]:
    """Return what `ckptd status` reads: without a name and a place every daemon of this user."""
    if name or asked.state_dir or asked.config_dir or os.environ.get("CKPTD_CONFIG_DIR"):
        return published(name, asked.state_dir, asked.config_dir, say=say)
    return published_by_all(say)


class LivePage:
    """The page as it is now: status files are read when it is asked for, remotes every 30 s beside it."""

    def __init__(self, asked: PageRequest) -> None:
        self._asked = asked
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._remotes: dict[str, ShownJob] = {}

    def start(self) -> None:
        """Begin to look at remotes, each in a thread: one that hangs delays no other."""
        for url in self._asked.urls:
            threading.Thread(target=self._watch, args=(url,), daemon=True).start()

    def stop(self) -> None:
        """Begin no other look."""
        self._end.set()

    def read(self, opened: frozenset[str] | None) -> Page:
        """Return the page; what cannot be read is a notice on it."""
        now = time.time()
        jobs: list[ShownJob] = []
        notices: list[str] = []
        try:
            jobs, notices = read_local(self._asked, now)
        except CkptdError as error:
            notices = [str(error)]
        with self._lock:
            read = dict(self._remotes)
        unread = [url for url in self._asked.urls if url not in read]
        notices += [f"{url} is being read" for url in unread]
        jobs += [_as_old(read[url], now) for url in self._asked.urls if url in read]
        return replace(page_of(jobs, notices, now, opened), is_whole=False, is_reading=bool(unread))

    def _watch(self, url: str) -> None:
        while not self._end.is_set():
            now = time.time()
            try:
                job = job_of_remote(url, now, self._asked.config_dir)
            except CkptdError as error:
                job = _unread(self._remotes.get(url), job_not_read(url, error, now))
            with self._lock:
                self._remotes[url] = job
            self._end.wait(REMOTE_SECONDS)


def _as_old(job: ShownJob, now: float) -> ShownJob:
    """Return it with its age as of now."""
    return job if job.as_of is None else replace(job, as_of=when(job.as_of.at, now))


def _unread(before: ShownJob | None, now: ShownJob) -> ShownJob:
    """Return what was read last, of a remote that does not answer any more: the verdict is not known."""
    if before is None or before.make_detail is None:
        return now
    return replace(now, name=before.name, make_detail=before.make_detail, as_of=before.as_of)
