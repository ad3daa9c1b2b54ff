"""Write a file for each checkpoint that is committed in every remote, for scripts that wait for it.

Directories hang (NFS): a thread writes that nothing waits for, and tries again what failed.
"""

from __future__ import annotations

import json
import queue
import threading
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.core.model.records import ZERO
from ckptd.errors import CkptdError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.observe.status import CheckpointStatus, JobStatus

AGAIN_SECONDS = 10.0


class ReadyFiles:
    """Write those of one job; `see` and `close` are called in the deciding thread, which `post` wakes."""

    def __init__(self, config: JobConfig, folder: Path, post: Callable[[Callable[[], None]], None]) -> None:
        self._config = config
        self._folder = folder
        self._post = post
        self._known: dict[str, bytes] = {}
        self._queue: queue.SimpleQueue[dict[str, bytes] | None] = queue.SimpleQueue()
        self.failure: CkptdError | None = None
        """Reason why the last file was not written."""
        self._thread = threading.Thread(target=self._serve, name="ready-files", daemon=True)
        self._thread.start()

    def see(self, status: JobStatus) -> None:
        """Have a file written for what is committed by now, and again where it says more than before."""
        new = {}
        for checkpoint in status.checkpoints:
            if is_ready(self._config, checkpoint):
                name = f"{checkpoint.tag.replace('/', '__')}.json"
                data = _document(status, checkpoint)
                if self._known.get(name) != data:
                    new[name] = data
        if new:
            self._known |= new
            self._queue.put(new)

    def close(self, seconds: float = 5.0) -> None:
        """Let what waits be written, for a moment."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _serve(self) -> None:
        waiting: dict[str, bytes] = {}
        while True:
            try:
                new = self._queue.get(timeout=AGAIN_SECONDS if waiting else None)
                if new is None:
                    return
                waiting |= new
            except queue.Empty:
                pass
            before, self.failure = self.failure, self._write(waiting)
            if str(before) != str(self.failure):
                self._post(lambda: None)

    def _write(self, waiting: dict[str, bytes]) -> CkptdError | None:
        """Write what waits and take it out of there; return what keeps the rest from it."""
        try:
            with files.opened_dir(self._folder) as fd:
                for name in list(waiting):
                    if files.stat_beneath(fd, name) is None or files.read_beneath(fd, name) != waiting[name]:
                        files.write_atomic(fd, name, waiting[name])
                    del waiting[name]
        except OSError as error:
            return from_os_error(error, f"writing to {self._folder}")
        except CkptdError as error:
            return error
        return None


def is_ready(config: JobConfig, checkpoint: CheckpointStatus) -> bool:
    """Tell whether each remote of the job has it committed as it is, or in the form that it takes first."""

    def is_committed(remote: str, forms: tuple[str, ...]) -> bool:
        found = checkpoint.remotes.get(remote, {}).get(ZERO if ZERO in forms else forms[0])
        return found is not None and found.state == "committed"

    return bool(config.remotes) and all(is_committed(one.name, one.forms) for one in config.remotes)


def _document(status: JobStatus, checkpoint: CheckpointStatus) -> bytes:
    urls = {remote.name: remote.url for remote in status.remotes}
    document = {
        "job": status.name,
        "tag": checkpoint.tag,
        "step": checkpoint.step,
        "remotes": {
            name: {
                "url": urls.get(name),
                "forms": sorted(form for form, its in forms.items() if its.state == "committed"),
            }
            for name, forms in checkpoint.remotes.items()
        },
    }
    return json.dumps(document).encode() + b"\n"
