"""A child's progress: a line of JSON on stdout every quarter of a second, and one at the end."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING

from ckptd.convert.sandbox import peak_rss_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.convert.writing import Counters

PROGRESS_SECONDS = 0.25


class Ticker:
    """Tells counters and phase for as long as its block runs."""

    def __init__(self, counters: Counters, phase: Callable[[], str]) -> None:
        self._counters = counters
        self._phase = phase
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._print()

    def _run(self) -> None:
        while not self._done.wait(PROGRESS_SECONDS):
            self._print()

    def _print(self) -> None:
        c = self._counters
        line = {
            "phase": self._phase(),
            "files": c.files,
            "bytes": c.bytes,
            "cloned": c.cloned,
            "copied": c.copied,
            "resumed": c.resumed,
            "at": time.monotonic(),
            "rss": peak_rss_bytes(),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
