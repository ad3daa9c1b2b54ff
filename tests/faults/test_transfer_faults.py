"""Every fault of a transfer at a real S3 server: bytes intact, one COMMIT, little sent again, said.

A real remote child sends through a proxy that fails in the chosen way; what lies in the bucket afterwards is
compared by another client, behind ckptd's back. The table of faults is docs/faults.md.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.base import retry
from ckptd.daemon.uploads import session
from ckptd.errors import CkptdError, NoSpaceError, NotPermitted, RemoteError, RemoteUnreachable, VerifyError
from tests.faults.transfer_rig import BIG, PART_BYTES, Rig
from tests.stores import servers
from tests.stores.proxy import SLOW_DOWN, Fault, Proxy, answer, proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.faults, pytest.mark.stores]

STEPS = count(1)
MEGABYTES = 16
FULL = bool(os.environ.get("CKPTD_FULL"))
COMMIT = r"PUT .*/_ckptd/commits/"
BIG_PART = rf"PUT .*{BIG}\?.*partNumber=3"


class Scene:
    """The rig, the proxy, and the bucket as another client sees it."""

    def __init__(self, rig: Rig, between: Proxy, server: servers.Server) -> None:
        self.rig = rig
        self.between = between
        self.server = server
        self.folder = rig.node.save_dir
        self.before_bytes = 0

    def save(self, megabytes: int = MEGABYTES) -> None:
        """A save that is not uploaded yet."""
        self.folder = self.rig.save(next(STEPS), megabytes)
        self.before_bytes = self.between.sent_bytes(f"/{self.folder.name}/")

    def fault(self, kind: Any, where: str, **more: Any) -> Fault:
        """One that is waiting for its request."""
        fault = Fault(kind, where, **more)
        self.between.faults.append(fault)
        return fault

    def upload(self, seconds: float = 200.0, *, orphans: int = 0) -> None:
        """Until it is committed; then everything that must hold after any fault does."""
        self.rig.upload(seconds)
        client, tag = self.server.client(), self.folder.name
        for path in self.folder.iterdir():
            found = client.get_object(Bucket=servers.BUCKET, Key=f"run/{tag}/{path.name}")["Body"].read()
            assert found == path.read_bytes(), path.name
        listed = client.list_objects_v2(Bucket=servers.BUCKET, Prefix=f"run/_ckptd/commits/{tag}~")
        assert [entry["Key"].rsplit("/", 1)[1] for entry in listed["Contents"]] == [f"{tag}~g1~zero.json"]
        uploads = client.list_multipart_uploads(Bucket=servers.BUCKET).get("Uploads", [])
        assert len([u for u in uploads if f"/{tag}/" in u["Key"]]) == orphans

    @property
    def size_bytes(self) -> int:
        """Of the save."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    @property
    def sent_again_bytes(self) -> int:
        """Bytes of bodies beyond the save's own."""
        return self.between.sent_bytes(f"/{self.folder.name}/") - self.before_bytes - self.size_bytes


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, moto: servers.Server) -> Iterator[Scene]:
    """One server, one child, one bucket for all: each test ships a save of its own."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch, proxy(moto.port) as between:
        for name, value in servers.environment().items():
            patch.setenv(name, value)
        patch.setattr(retry, "backoff_seconds", lambda tries: 0.2)
        access = {"endpoint_url": between.endpoint, "part_size_bytes": PART_BYTES, "client": servers.CLIENT}
        rig = Rig(folder, f"s3://{servers.BUCKET}/run", access=access)
        yield Scene(rig, between, moto)
        rig.close()


@pytest.fixture
def scene(running: Scene) -> Iterator[Scene]:
    running.rig.said.clear()
    running.between.faults.clear()
    yield running
    running.between.faults.clear()
    running.between.latency_seconds = 0.0


def _resets(scene: Scene) -> None:
    """F14, RST at byte n: that part alone is sent again, by the library or by the next attempt."""
    faults = [
        scene.fault("cut", rf"PUT .*{BIG}\?.*partNumber={part}", after_bytes=after)
        for part, after in ((1, 0), (3, 3 << 20))
    ]
    scene.upload()
    assert [fault.hits for fault in faults] == [1, 1]


def _flaps(scene: Scene) -> None:
    """F14: every connection broken each second for a while."""
    scene.rig.until("a part", lambda: scene.between.sent_bytes(scene.folder.name) > PART_BYTES)
    for _ in range(6):
        for is_away, seconds in ((True, 0.7), (False, 0.3)):
            scene.between.away = is_away
            scene.between.cut()
            end = time.monotonic() + seconds
            scene.rig.until("a while", lambda end=end: time.monotonic() > end)  # type: ignore[misc]
    scene.upload()


@pytest.mark.parametrize("way", [_resets, _flaps] if FULL else [_resets])
def test_connections_that_break(scene: Scene, way: Callable[[Scene], None]) -> None:
    """Only what was on its way is sent again."""
    scene.save()
    way(scene)
    assert scene.sent_again_bytes <= 3 * PART_BYTES


def test_a_storm_of_slow_down(scene: Scene) -> None:
    """F13: nine of ten requests are 503 with Retry-After; no burst, at most a tenth is sent again."""
    scene.save()
    scene.rig.until("attached", lambda: scene.rig.session.is_ready)
    dice, requests = random.Random(5), 12 if FULL else 2
    storm = [scene.fault("busy", rf".*{BIG}") for _ in range(requests) if dice.random() < 0.9]
    before = len(scene.between.requests)
    scene.upload()
    assert [fault.hits for fault in storm] == [1] * len(storm)
    assert scene.sent_again_bytes <= scene.size_bytes // 10
    assert len(scene.between.requests) - before < 60 + 10 * requests


def test_two_hundred_with_an_error_inside(scene: Scene) -> None:
    """F13: Complete answers 200 and carries an error in its body: nothing is taken for joined."""
    scene.save()
    body = "<?xml version='1.0'?><Error><Code>InternalError</Code><Message>try again</Message></Error>"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    fault = scene.fault("answer", rf"POST .*{BIG}\?uploadId", answer=f"{head}{body}".encode())
    scene.upload()
    assert fault.hits == 1
    assert scene.sent_again_bytes <= PART_BYTES


LOST = {
    "PUT of an object": r"PUT .*zero_to_fp32.py",
    "begin": rf"POST .*{BIG}\?uploads",
    "part": BIG_PART,
    "join": rf"POST .*{BIG}\?uploadId",
    "manifest": r"PUT .*/_ckptd/nodes/",
    "COMMIT": COMMIT,
    "pointer": r"PUT .*/run/latest",
    "look": rf"HEAD .*{BIG}",
    "list": r"GET .*list-type=2",
}


def test_every_answer_is_lost_once(scene: Scene) -> None:
    """F15: done by the server, never heard of: found by looking, each request kind in turn."""
    scene.save()
    faults = {what: scene.fault("lose-answer", where) for what, where in LOST.items()}
    # an upload whose beginning nobody heard of has no name here: the bucket's own rule ends it
    scene.upload(orphans=1)
    assert {what: fault.hits for what, fault in faults.items()} == dict.fromkeys(LOST, 1)
    assert scene.sent_again_bytes <= 2 * PART_BYTES


LIES = {
    "a COMMIT that is forgotten": ("forget", COMMIT, RemoteError),
    "an object that is forgotten": ("forget", rf"PUT .*/{BIG}$", VerifyError),
    "a bit that flips on its way there": ("flip-up", rf"PUT .*/{BIG}$", VerifyError),
}


@pytest.mark.parametrize("what", LIES if FULL else list(LIES)[:1])
def test_two_hundred_is_no_proof(scene: Scene, what: str) -> None:
    """F9, F16: all is proved before anybody rests on it, and sent again (P2, P3)."""
    kind, where, error = LIES[what]
    scene.save(megabytes=1)
    fault = scene.fault(kind, where, after_bytes=1 << 18)
    scene.upload()
    assert fault.hits == 1
    assert type(scene.rig.failures[0]) is error
    assert scene.sent_again_bytes <= scene.size_bytes


REFUSALS: list[tuple[bytes, type[CkptdError], str]] = [
    (answer("507 Insufficient Storage", "XMinioStorageFull"), NoSpaceError, "XMinioStorageFull")
]
if FULL:
    REFUSALS += [
        (answer("403 Forbidden", "AccessDenied"), NotPermitted, "access is denied"),
        (answer("403 Forbidden", "ExpiredToken"), NotPermitted, "the session token has expired"),
        (SLOW_DOWN, RemoteUnreachable, "503 SlowDown"),
    ]


@pytest.mark.parametrize(("said", "kind", "words"), REFUSALS, ids=lambda v: v if isinstance(v, str) else "")
def test_full_or_denied_or_busy_in_the_middle(
    scene: Scene, said: bytes, kind: type[CkptdError], words: str
) -> None:
    """F5, F13, F21: said with the cause; when it is over, what lies there is not sent again."""
    scene.save()
    fault = scene.fault("answer", BIG_PART, times=10**6, answer=said)
    scene.rig.until("said", lambda: any(words in text for text in scene.rig.said))
    assert isinstance(scene.rig.failures[0], kind)
    fault.times = 0
    scene.upload()
    # that part, and what was in flight beside it
    assert scene.sent_again_bytes <= 3 * PART_BYTES


def _drips(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is not hung: no cut while bytes move, whatever the latency."""
    # the system's buffers hide what happens to some megabytes
    monkeypatch.setattr(session, "IDLE_SECONDS", 8.0)
    scene.save()
    scene.between.latency_seconds = 0.2
    fault = scene.fault("drip", rf"PUT .*{BIG}", times=3, bytes_per_second=1 << 20)
    began = time.monotonic()
    scene.upload()
    assert time.monotonic() - began > 12
    assert fault.hits == 3
    assert not scene.rig.failures
    assert scene.sent_again_bytes == 0


def _hangs(scene: Scene, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """F12: half-open, or all taken and nothing answered. Said when it is cut, until more is durable."""
    monkeypatch.setattr(session, "IDLE_SECONDS", 1.5)
    scene.save()
    cuts = 3 if FULL else 1
    fault = scene.fault(kind, BIG_PART, times=cuts, after_bytes=1 << 20)
    for cut in range(1, cuts + 1):
        scene.rig.until("a cut", lambda cut=cut: len(scene.rig.failures) >= cut)  # type: ignore[misc]
        codes = {problem.code for problem in scene.rig.problems.all()}
        assert "transfer-stalled" in codes, "a buffer that took some bytes is no sign of health"
    assert "no byte moved" in " ".join(scene.rig.said)
    scene.upload()
    assert fault.hits == cuts
    assert "transfer-stalled" not in {problem.code for problem in scene.rig.problems.all()}
    assert scene.sent_again_bytes <= (cuts + 1) * PART_BYTES


WAYS: dict[str, Callable[[Scene, pytest.MonkeyPatch], None]] = {"deaf": partial(_hangs, kind="deaf")}
if FULL:
    WAYS |= {"stall": partial(_hangs, kind="stall"), "drip": _drips}


@pytest.mark.parametrize("way", WAYS)
def test_slow_half_open_and_hung(scene: Scene, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """F12."""
    WAYS[way](scene, monkeypatch)
