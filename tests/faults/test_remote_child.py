"""The child process of a remote: killed, cancelled, slowed, hung; what its parent sees of it (P7, P11)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.storage.child import service
from ckptd.storage.child.client import RemoteClient
from ckptd.storage.child.service import Service
from ckptd.storage.remote.messages import (
    Attach,
    Attached,
    Confirm,
    Confirmed,
    DeriveRequest,
    Failed,
    ObjectDone,
    Observation,
    Observe,
    Pace,
    PartlyUploaded,
    Planned,
    RemoteSettings,
    TransferProgress,
    Unchanged,
    UploadResult,
)
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.open import FOR_SERVERS, clean_environment
from ckptd.storage.stores.rate_limit import RateLimiter
from tests.stores.scene import OPTIM, Node, archive
from tests.support.processes import wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.storage.remote.messages import Answer, Request

WINDOW_BYTES = 1 << 20
BIG = OPTIM.format(d=0)


def wait_until(holds: Callable[[], bool], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Ear:
    """Collects answers and waits for them."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Answer]] = []
        self.news = threading.Condition()

    def __call__(self, order_id: int, answer: Answer) -> None:
        with self.news:
            self.heard.append((order_id, answer))
            self.news.notify_all()

    def until(self, found: Callable[[], bool], seconds: float = 200) -> None:
        with self.news:
            assert self.news.wait_for(found, seconds), self.heard[-5:]

    def final(self, order_id: int, seconds: float = 200) -> Answer:
        def ended() -> list[Answer]:
            events = TransferProgress | ObjectDone | Planned
            return [a for i, a in self.heard if i == order_id and not isinstance(a, events)]

        self.until(lambda: bool(ended()), seconds)
        return ended()[0]

    def moved(self, order_id: int) -> list[TransferProgress]:
        return [a for i, a in self.heard if i == order_id and isinstance(a, TransferProgress)]


class Rig:
    """One node, one remote, one client."""

    def __init__(self, folder: Path, **more: object) -> None:
        self.node = Node(folder / "save")
        self.node.write_all()
        self.nas = folder / "nas"
        self.ear = Ear()
        self.settings = self.node.settings(self.nas, **more)
        self.client = RemoteClient(
            self.settings, self.ear, window_bytes=WINDOW_BYTES, making="tests.faults.endless"
        )
        answer = self.ask(Attach(settings=self.settings))
        assert isinstance(answer, Attached)
        self.attached = answer

    def ask(self, order: Request) -> Answer:
        return self.ear.final(self.client.submit(order))

    def big(self, megabytes: int) -> bytes:
        self.node.write({BIG: archive(os.urandom(1 << 20) * megabytes)})
        return (self.node.save_dir / self.node.tag / BIG).read_bytes()

    def signs(self, count: int) -> None:
        """Wait for so many signs of life of an open order: waiting is not hanging."""
        for _ in range(count):
            silent = self.client.silent_seconds()
            while (now := self.client.silent_seconds()) >= silent:
                assert now < 200
                silent = now
                time.sleep(0.01)

    def order(self, **more: object) -> Request:
        order = self.node.order(self.node.sealed(), job_id=self.attached.identity.job_id)
        # the big one first
        files = sorted(order.files, key=lambda f: -f.bytes)
        return order.model_copy(update={"files": tuple(files), **more})


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.client.close()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, bytes_per_second=8 << 20)
    yield rig
    rig.client.close()


@pytest.mark.faults
def test_what_has_not_changed_is_not_told_again(rig: Rig) -> None:
    """Free room alone is no news: it changes with every file that anybody writes there."""
    assert isinstance(rig.ask(Observe(only_changed=True)), Observation), "nothing was told yet"
    (rig.nas.parent / "ballast").write_bytes(os.urandom(8 << 20))
    again = rig.ask(Observe(only_changed=True))
    assert isinstance(again, Unchanged)
    assert again.free_bytes
    assert isinstance(rig.ask(Observe()), Observation)
    (rig.nas / "latest").write_text("elsewhere")
    news = rig.ask(Observe(only_changed=True))
    assert isinstance(news, Observation)
    assert news.latest == "elsewhere"


@pytest.mark.faults
def test_what_kills_a_maker_says_nothing_of_the_remote(rig: Rig) -> None:
    """The form's order fails as its own; a look that was open is answered by the next process."""
    making = DeriveRequest(folders=(rig.node.tag,), sealed=(), staging=str(rig.node.save_dir), memory_bytes=1)
    order = rig.client.submit(rig.order(making=making))
    rig.ear.until(lambda: any(i == order and isinstance(a, Planned) for i, a in rig.ear.heard))
    assert not rig.client.end_idle(), "it is at work"
    maker = rig.client.pid
    assert maker is not None
    os.kill(maker, signal.SIGSTOP)
    look = rig.client.submit(Observe())
    os.kill(maker, signal.SIGKILL)
    failed = rig.ear.final(order)
    assert isinstance(failed, Failed)
    assert failed.error == "BehindError"
    assert isinstance(rig.ear.final(look), Observation)
    assert rig.client.pid != maker
    assert rig.client.end_idle()
    assert not rig.client.alive
    assert isinstance(rig.ask(Observe()), Observation), "the next order starts another one"


@pytest.mark.faults
def test_killed_in_the_middle_of_an_object_sends_at_most_one_window_again(slow: Rig) -> None:
    data = slow.big(32)
    first = slow.client.submit(slow.order())
    slow.ear.until(lambda: any(m.done_bytes > 4 << 20 for m in slow.ear.moved(first)))
    pid = slow.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    failed = slow.ear.final(first)
    assert isinstance(failed, Failed)
    assert failed.error == "RemoteUnreachable"
    last = slow.ear.moved(first)[-1]
    flushed = max(m.flushed_bytes for m in slow.ear.moved(first))
    assert flushed >= 3 << 20
    assert crc64(data[: last.flushed_bytes]) == last.crc64
    assert not (slow.nas / slow.node.tag / BIG).exists()

    partly = PartlyUploaded(key=last.key, flushed_bytes=last.flushed_bytes, crc64=last.crc64)
    slow.client.pace(1, None)
    answer = slow.ask(slow.order(partly=(partly,)))
    assert isinstance(answer, UploadResult)
    assert answer.outcome == "committed"
    rest = sum(f.stat().st_size for f in (slow.nas / slow.node.tag).iterdir() if f.name != BIG)
    # the small files went beside it, and were there already
    assert answer.bytes_sent + answer.bytes_skipped == len(data) - last.flushed_bytes + rest
    assert answer.bytes_skipped <= rest
    # what was done and not flushed is at most one window
    assert last.done_bytes - last.flushed_bytes <= WINDOW_BYTES
    assert (slow.nas / slow.node.tag / BIG).read_bytes() == data
    assert slow.client.pid != pid


@pytest.mark.faults
def test_a_confirm_does_not_wait_for_an_upload(slow: Rig) -> None:
    committed = slow.ask(slow.order())
    assert isinstance(committed, UploadResult)
    assert committed.commit is not None
    slow.node.tag = "global_step6"
    slow.node.write_all()
    slow.big(64)
    shipping = slow.client.submit(slow.order())
    slow.ear.until(lambda: bool(slow.ear.moved(shipping)))
    answer = slow.ask(Confirm(commits=((committed.commit.key, committed.commit.sha256),)))
    assert isinstance(answer, Confirmed)
    assert answer.ok
    assert shipping in slow.client.open_orders
    slow.client.cancel(shipping)
    failed = slow.ear.final(shipping)
    assert isinstance(failed, Failed)
    assert failed.error == "SourceChanged"
    assert list((slow.nas / "global_step6").glob(".ckptd-part-*"))


class Clock:
    """Time that passes only when somebody sleeps by it; called from all lanes."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


@pytest.mark.faults
def test_the_bandwidth_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real files to a real directory, the time by the pacer's own clock: no machine is too slow for it."""
    clock = Clock()
    monkeypatch.setattr(service, "RateLimiter", partial(RateLimiter, clock=clock, sleep=clock.sleep))
    node = Node(tmp_path / "save")
    settings = node.settings(tmp_path / "nas", bytes_per_second=1 << 20)
    ear = Ear()
    remote = Service(ear, window_bytes=WINDOW_BYTES)
    remote.expect(settings)
    remote.carry_out(0, Attach(settings=settings))
    attached = ear.final(0)
    assert isinstance(attached, Attached)
    for number, (fraction, rate) in enumerate(((1.0, 1 << 20), (1.0, 1 << 19), (0.5, 1 << 20)), 1):
        node.tag = f"global_step{number}"
        node.write_all()
        node.write({BIG: archive(os.urandom(1 << 20) * 6)})
        remote.steer(Pace(fraction=fraction, bytes_per_second=rate))
        began = clock.now
        remote.carry_out(number, node.order(node.sealed(step=number), job_id=attached.identity.job_id))
        answer = ear.final(number)
        assert isinstance(answer, UploadResult)
        least = answer.bytes_sent / (rate * fraction)
        # the last buffer of a lane goes on credit; what was saved up before is a quarter of a second at most
        assert clock.now - began > least - 1
        # at a fraction reading back rests too, which is no bandwidth
        assert fraction < 1 or clock.now - began < least + 1
        assert answer.bytes_sent > 6 << 20


@pytest.mark.faults
def test_the_pace_changes_on_the_fly(slow: Rig) -> None:
    slow.big(6)
    slow.client.pace(0, None)
    paused = slow.client.submit(slow.order())
    slow.signs(2)
    assert slow.ear.moved(paused) == []
    slow.client.pace(1, None)
    assert isinstance(slow.ear.final(paused), UploadResult)


@pytest.mark.faults
def test_attaching_again_keeps_the_pace(rig: Rig) -> None:
    """Settings know the remote's own speed only, not its share of what all jobs may use (P11)."""
    rig.client.pace(1.0, 4 << 20)
    assert isinstance(rig.ask(Attach(settings=rig.settings)), Attached)
    rig.big(6)
    began = time.monotonic()
    assert isinstance(rig.ask(rig.order()), UploadResult)
    assert time.monotonic() - began > 1


@pytest.mark.faults
def test_a_paused_transfer_gives_signs_of_life_and_a_hung_one_does_not(slow: Rig) -> None:
    slow.big(64)
    shipping = slow.client.submit(slow.order())
    slow.ear.until(lambda: bool(slow.ear.moved(shipping)))
    slow.client.pace(0, None)
    slow.signs(2)
    pid = slow.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    # a sign that was on its way may still come
    wait_until(lambda: slow.client.silent_seconds() > 2.5)
    slow.client.abandon("no sign of life for 2 s")
    failed = slow.ear.final(shipping)
    assert isinstance(failed, Failed)
    assert "no sign of life" in failed.message
    slow.client.pace(1, None)
    assert isinstance(slow.ask(Observe()), Observation)


@pytest.mark.faults
def test_an_unmounted_share_is_not_there_after_a_restart_either(rig: Rig) -> None:
    rig.nas.rename(rig.nas.with_name("away"))
    rig.nas.mkdir()
    for _ in range(2):
        failed = rig.ask(Observe())
        assert isinstance(failed, Failed)
        assert failed.error in ("RemoteUnreachable", "RemoteNotOurs")
        pid = rig.client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while rig.client.alive:
            time.sleep(0.01)
    assert list(rig.nas.iterdir()) == []
    rig.nas.rmdir()
    rig.nas.with_name("away").rename(rig.nas)
    assert isinstance(rig.ask(Observe()), Observation)


SETTINGS = RemoteSettings(name="nas", url="/mnt/nas/job", job="job", save_dir="/x", node="n", node_id="i")


@pytest.mark.faults
def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    for how in ("closed input", "killed parent"):
        script = (
            "import subprocess, sys, time\n"
            "command = [sys.executable, '-m', 'ckptd.storage.child.child']\n"
            "child = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
            "time.sleep(1.0); print(child.pid, flush=True)\n"
            "child.stdin.close() if sys.argv[1] == 'closed input' else None\n"
            "time.sleep(60)\n"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", script, how],
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(SETTINGS.url),
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if how == "killed parent":
            parent.kill()
            parent.wait()
        wait_gone([child])
        parent.kill()
        parent.wait()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/autogroup"), reason="this kernel does not group by session"
)
@pytest.mark.parametrize("rights", ["all", "those of a user"])
def test_children_that_start_at_once_rank_behind_other_sessions(rights: str) -> None:
    """The kernel takes few requests of users at a time: whoever is refused asks again (P11; adr/0223)."""
    command = [sys.executable, "-m", "ckptd.storage.child.child"]
    if rights != "all" and os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *command]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, env=clean_environment(SETTINGS.url))
        for _ in range(4)
    ]
    try:
        for child in children:
            autogroup = Path(f"/proc/{child.pid}/autogroup")
            wait_until(lambda: autogroup.read_text().endswith(" nice 10\n"), 20)  # noqa: B023 - waited for here
            assert os.getsid(child.pid) == child.pid
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_nothing_secret_reaches_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    environment = clean_environment(SETTINGS.url)
    assert "s3cret" not in environment.values()
    heap = {"MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    assert set(environment) <= {"PATH", "LANG", "PYTHONPATH", "PYDANTIC_DISABLE_PLUGINS"} | heap
    on_s3 = clean_environment("s3://bucket/job")
    assert on_s3["AWS_SECRET_ACCESS_KEY"] == "s3cret"
    assert set(on_s3) - set(environment) <= {n for n in os.environ if n.startswith("AWS_")} | set(FOR_SERVERS)


def test_nonsense_is_answered_not_fatal(rig: Rig) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "ckptd.storage.child.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(SETTINGS.url),
    )
    out, err = child.communicate(b'not json\n{"id": 7, "order": {"op": "dance"}}\n', timeout=200)
    assert b'"id":7' in out
    assert b"UsageError" in out
    assert b"not an order" in err
    assert child.returncode == 0


def test_the_memory_of_the_child_stays_small(rig: Rig) -> None:
    """P12: ≤ 45 MB resident while it ships and reads back, whatever the size of the files."""
    rig.big(96)
    pid = rig.client.pid
    assert isinstance(rig.ask(rig.order()), UploadResult)
    with open(f"/proc/{pid}/status") as stream:
        peak_kb = next(int(line.split()[1]) for line in stream if line.startswith("VmHWM"))
    assert peak_kb < 46_000
