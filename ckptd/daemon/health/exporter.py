"""Offers metrics: an HTTP page for Prometheus, or a file for node_exporter's textfile collector.

The deciding thread hands over what it publishes anyway and waits for nobody; what cannot be offered is said
in status, and the daemon goes on.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from ckptd.observe.status import DaemonStatus, JobStatus

log = logging.getLogger("ckptd")

FILE_SECONDS = 10.0
"""The file is written at most so often."""
AGAIN_SECONDS = 60.0
"""A port that is taken is tried again so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    daemon: DaemonStatus
    jobs: tuple[JobStatus, ...]
    at_unix: float


class Exporter:
    """Called in the deciding thread, but for `collect`."""

    def __init__(self, where: str | None) -> None:
        self._where = where
        self._seen: _Seen | None = None
        self._server: tuple[Any, threading.Thread] | None = None
        self._next_at = 0.0
        self.failed: str | None = None
        """Reason why metrics are not served; None: they are, or nobody asked for them."""

    def change(self, where: str | None) -> None:
        """Serve metrics at another place, or nowhere, from now on."""
        if where != self._where:
            self.close()
            self._where, self._next_at, self.failed = where, 0.0, None

    def see(self, daemon: DaemonStatus, jobs: Sequence[JobStatus]) -> None:
        """Take in what is published; offer it where and when that is due."""
        if self._where is None:
            return
        self._seen = _Seen(daemon=daemon, jobs=tuple(jobs), at_unix=time.time())
        now = time.monotonic()
        if now < self._next_at or self._server is not None:
            return
        is_file = self._where.startswith("/")
        self._next_at = now + (FILE_SECONDS if is_file else AGAIN_SECONDS)
        try:
            if is_file:
                self._write(self._where)
            else:
                self._serve(self._where)
            self.failed = None
        except Exception as error:  # noqa: BLE001  whatever is wrong with what is told, the jobs go on
            if self.failed is None:
                log.warning("metrics are not offered at %s: %s", self._where, error)
            self.failed = f"{self._where}: {error}"

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the library calls this in its own threads."""
        from ckptd.observe.exposition import families

        seen = self._seen
        if seen is not None:
            yield from families(seen.daemon, seen.jobs, seen.at_unix, time.time())

    def close(self) -> None:
        """Offer nothing any more."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(5)
            self._server = None

    def _registry(self) -> Any:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def _write(self, path: str) -> None:
        from prometheus_client import write_to_textfile

        write_to_textfile(path, self._registry())

    def _serve(self, where: str) -> None:
        from prometheus_client import start_http_server

        host, _, port = where.rpartition(":")
        self._server = start_http_server(int(port), addr=host.strip("[]"), registry=self._registry())
        log.info("metrics: http://%s/metrics", where)
