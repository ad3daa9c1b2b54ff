"""The quickstart's S3 server: moto on 127.0.0.1, as a process of its own, with a log of every write.

    python -m examples.demo.s3_server --log FILE --life-seconds N      (prints its port, ends at SIGTERM)

The log is the server's own word on what was written, in which order. Objects lie in memory (larger ones in
$TMPDIR) and end with the process, which ends with whoever started it, or after N seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WRITES = ("PUT", "POST", "DELETE")
WATCH_SECONDS = 0.5


class Logged:
    """A WSGI application with one JSON line per write: after it took effect, before it is answered."""

    def __init__(self, app: Callable[..., Any], path: Path) -> None:
        self._app = app
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """One request."""
        if environ["REQUEST_METHOD"] not in WRITES:
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        begin = time.time()

        def start(status: str, *rest: Any) -> Any:
            self._write(environ, int(status.split()[0]), begin)
            return start_response(status, *rest)

        logged: Iterable[bytes] = self._app(environ, start)
        return logged

    def _write(self, environ: dict[str, Any], status: int, begin: float) -> None:
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        line = {
            "begin": begin,
            "at": time.time(),
            "method": environ["REQUEST_METHOD"],
            "path": environ["PATH_INFO"],
            "status": status,
            "bytes": int(environ.get("CONTENT_LENGTH") or 0),
            "query": {name: values[0] for name, values in query.items()},
        }
        with self._lock:
            self._file.write(json.dumps(line) + "\n")


def _end_with(parent: int, life_seconds: float) -> None:
    """Nobody is left who would stop it, or it lived long enough: end."""
    deadline = time.monotonic() + life_seconds
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


def main() -> None:
    """Serve until SIGTERM, the end of the parent process, or the end of its life."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--life-seconds", type=float, required=True)
    a = parser.parse_args()
    watch = threading.Thread(target=_end_with, args=(os.getppid(), a.life_seconds), daemon=True)
    watch.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))

    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Logged(DomainDispatcherApplication(create_backend_app), a.log)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
