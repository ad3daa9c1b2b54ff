"""One remote as the daemon sees it, its child and its server real, and saves of a trainer to upload.

The test plays the deciding thread: it turns the link, orders what a daemon would order, keeps what a journal
would keep, and tries again for as long as it takes. What the problems say is what status shows.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from typing import TYPE_CHECKING

from ckptd.daemon.state.problems import Problems
from ckptd.daemon.uploads.session import RemoteSession
from ckptd.errors import CkptdError, SourceChanged, VerifyError
from ckptd.storage.remote import messages as m
from tests.stores.scene import OPTIM, Node, archive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BIG = OPTIM.format(d=0)
PART_BYTES = 5 << 20


class Rig:
    """One node, one remote, one link; its saves are called global_step<n>."""

    def __init__(self, folder: Path, url: Path | str, **more: object) -> None:
        self.node = Node(folder / "save")
        self.node.save_dir.mkdir(parents=True, exist_ok=True)
        self.problems = Problems()
        self.said: list[str] = []
        """Every text of a problem, in the order in which they were seen first."""
        self.failures: list[CkptdError] = []
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.settings = self.node.settings(url, **more)
        self.session = RemoteSession(
            self.settings, self.problems, self._calls.put, lambda _: None, lambda: None
        )
        self._uploaded: dict[str, m.UploadedObject] = {}
        self._partly: dict[str, m.PartlyUploaded] = {}
        self._order: m.UploadRequest | None = None
        self._is_saved = False
        self.result: m.UploadResult | None = None

    # --- the trainer -----------------------------------------------------------------------------------

    def save(self, step: int, megabytes: int) -> Path:
        """A whole save with one big shard; its folder."""
        self.node.tag = f"global_step{step}"
        self.node.write_all()
        payload = os.urandom(1 << 20)
        self.node.write({BIG: archive(payload, megabytes)})
        self._uploaded, self._partly, self.result, self._order = {}, {}, None, None
        self.failures, self._is_saved = [], True
        return self.node.save_dir / self.node.tag

    # --- the deciding thread ---------------------------------------------------------------------------

    def turn(self) -> None:
        """One pass: answers, then the link, then an order to upload where there may be one."""
        while True:
            try:
                self._calls.get(timeout=0.01)()
            except queue.Empty:
                break
        self.session.turn(time.monotonic())
        for problem in self.problems.all():
            if problem.text not in self.said:
                self.said.append(problem.text)
        if self.result is None and self.session.may_transfer and self._is_saved:
            self._upload()

    def until(self, what: str, done: Callable[[], object], seconds: float = 200.0) -> None:
        """Turn until it is so."""
        end = time.monotonic() + seconds
        while not done():
            message = f"waited {seconds} s for {what}: {self.said[-4:]} {self.failures[-4:]}"
            assert time.monotonic() < end, message
            self.turn()

    def upload(self, seconds: float = 200.0) -> m.UploadResult:
        """Until the save that was written last is committed, whatever fails meanwhile."""
        self.until("a COMMIT", lambda: self.result is not None, seconds)
        assert self.result is not None
        assert self.result.outcome == "committed", self.result
        return self.result

    def kill_child(self) -> None:
        """Kill the process that uploads now."""
        pid = self.session._client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the child."""
        self.session.close()

    def _upload(self) -> None:
        attached = self.session.attached
        assert attached is not None
        if self._order is None:
            order = self.node.order(
                self.node.sealed(step=int(self.node.tag[11:])), job_id=attached.identity.job_id
            )
            self._order = order.model_copy(
                update={"files": tuple(sorted(order.files, key=lambda f: -f.bytes))}
            )
        again = self._order.model_copy(
            update={"uploaded": tuple(self._uploaded.values()), "partly": tuple(self._partly.values())}
        )
        self.session.transfer = self.session.request(again, self._heard)

    def _heard(self, answer: m.Answer) -> None:
        if isinstance(answer, m.ObjectDone):
            self._uploaded[answer.object.key] = answer.object
            self._partly.pop(answer.object.key, None)
        elif isinstance(answer, m.TransferProgress):
            if answer.flushed_bytes or answer.token:
                self._partly[answer.key] = m.PartlyUploaded(
                    key=answer.key,
                    flushed_bytes=answer.flushed_bytes,
                    crc64=answer.crc64,
                    token=answer.token,
                )
        elif isinstance(answer, m.Failed):
            error = answer.raised
            self.failures.append(error)
            if not isinstance(error, SourceChanged):
                self.session.note_transfer_failed(error, is_answering=isinstance(error, VerifyError))
        elif isinstance(answer, m.UploadResult):
            self.result = answer
            self.session.note_answer()
