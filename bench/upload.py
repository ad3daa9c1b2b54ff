"""`python -m bench.upload SAVE_DIR FORM URL`: one order as the daemon gives it, from the order to the COMMIT.

Prints one JSON object: wall and CPU seconds of this process and of the remote's child while the order ran.
With --kill-after the child is killed with SIGKILL and ordered to go on with what a journal would know.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from bench.saves import Save, order_of
from ckptd.storage.child.client import RemoteClient
from ckptd.storage.remote.messages import (
    Answer,
    Attach,
    Attached,
    Failed,
    ObjectDone,
    PartlyUploaded,
    RemoteSettings,
    Request,
    TransferProgress,
    UploadedObject,
    UploadResult,
)
from ckptd.storage.stores.access import Access

NODE = "bench"
ANSWER_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Shipping:
    """How an order went; `attach_seconds` is the start of the child, which a daemon pays once."""

    attach_seconds: float
    wall_seconds: float
    cpu_seconds: float
    proof: str
    kills: int


@dataclass
class Orderer:
    """Gives orders and waits; remembers what a daemon's journal would."""

    settings: RemoteSettings
    answers: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)
    uploaded: dict[str, UploadedObject] = field(default_factory=dict)
    partly: dict[str, PartlyUploaded] = field(default_factory=dict)
    cpu_of_dead: float = 0.0

    def __post_init__(self) -> None:
        self.client = RemoteClient(self.settings, self._take)

    def ask(self, order: Request) -> Answer:
        """The answer that ends the order."""
        self.client.submit(order)
        return self.answers.get(timeout=ANSWER_SECONDS)

    def kill(self) -> None:
        """SIGKILL for the child; its order fails."""
        pid = self.client.pid
        if pid is not None:
            self.cpu_of_dead += self.child_cpu()
            os.kill(pid, signal.SIGKILL)

    def child_cpu(self) -> float:
        """CPU seconds of the child so far."""
        pid = self.client.pid
        times = psutil.Process(pid).cpu_times() if pid is not None else None
        return float(times.user + times.system) if times is not None else 0.0

    def _take(self, _order_id: int, answer: Answer) -> None:
        if isinstance(answer, TransferProgress):
            self.partly[answer.key] = PartlyUploaded(
                key=answer.key, flushed_bytes=answer.flushed_bytes, crc64=answer.crc64, token=answer.token
            )
        elif isinstance(answer, ObjectDone):
            self.uploaded[answer.object.key] = answer.object
            self.partly.pop(answer.object.key, None)
        else:
            self.answers.put(answer)


def upload(orderer: Orderer, save: Save, kill_after: float | None) -> Shipping:
    """Attach, order, wait for the COMMIT.

    Raises:
        RuntimeError: it did not come to that.
    """
    started = time.monotonic()
    attached = orderer.ask(Attach(settings=orderer.settings))
    if not isinstance(attached, Attached):
        raise RuntimeError(f"not attached: {attached}")
    order = order_of(save, attached.identity.job_id, NODE)
    attach_seconds = time.monotonic() - started
    cpu = time.process_time() + orderer.child_cpu()
    if kill_after is not None:
        timer = threading.Timer(kill_after, orderer.kill)
        timer.daemon = True
        timer.start()
    started = time.monotonic()
    answer, kills = orderer.ask(order), 0
    while isinstance(answer, Failed) and kill_after is not None and kills < 3:
        kills += 1
        again = {"uploaded": tuple(orderer.uploaded.values()), "partly": tuple(orderer.partly.values())}
        answer = orderer.ask(order.model_copy(update=again))
    if not isinstance(answer, UploadResult) or answer.outcome != "committed":
        raise RuntimeError(f"not committed: {answer}")
    return Shipping(
        attach_seconds=attach_seconds,
        wall_seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() + orderer.child_cpu() + orderer.cpu_of_dead - cpu,
        proof=", ".join(sorted({object_.proof for object_ in orderer.uploaded.values()})),
        kills=kills,
    )


def main() -> None:
    """One order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("save_dir", type=Path)
    parser.add_argument("form", choices=["zero", "universal"])
    parser.add_argument("url")
    parser.add_argument("--endpoint")
    parser.add_argument("--verify", choices=["read-back", "none"], default="read-back")
    parser.add_argument("--client", choices=["botocore", "s3fs"], default="botocore")
    parser.add_argument("--kill-after", type=float)
    given = parser.parse_args()
    settings = RemoteSettings(
        name="bench",
        url=given.url,
        job="bench",
        save_dir=str(given.save_dir),
        same_filesystem=True,
        verify=given.verify,
        access=Access(endpoint_url=given.endpoint, client=given.client),
        node=NODE,
        node_id=NODE,
    )
    orderer = Orderer(settings)
    try:
        print(json.dumps(asdict(upload(orderer, Save(given.save_dir, given.form), given.kill_after))))
    finally:
        orderer.client.close()


if __name__ == "__main__":
    main()
