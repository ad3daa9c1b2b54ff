"""The slow scrub, with the remote's real child: what it reads when, what it raises, when that is over."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ckptd.config.schema import RemoteConfig
from ckptd.core.model.heartbeat import Heartbeat
from ckptd.core.policy.actions import Plan
from ckptd.daemon.state.local_saves import RunningConversion
from ckptd.daemon.state.state import JobState
from ckptd.daemon.uploads import scrub as scrubbing
from ckptd.daemon.uploads.peers import Peers
from ckptd.daemon.uploads.scrub import Scrubber
from ckptd.daemon.uploads.session import RemoteSession
from ckptd.errors import RefusedError, StorageError
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote import scrub as remote_scrub
from ckptd.storage.remote.documents import read_commits
from ckptd.storage.remote.messages import Answer, RemoteSettings, Scrub, Scrubbed
from ckptd.storage.remote.observe import AttachedRemote
from ckptd.storage.remote.scrub import scrub
from ckptd.storage.stores.base import Abilities
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.rate_limit import Cancelled, RateLimiter
from tests.support.repair_scene import RepairScene, built, scene
from tests.support.restore_scene import TAG
from tests.support.states import job_state

__all__ = ["built", "scene"]


def piece(scene: RepairScene, tag: str = TAG, **more: object) -> Scrub:
    """The order for one COMMIT."""
    view = next(v for v in read_commits(open_store(str(scene.nas))).commits if v.commit.tag == tag)
    values = {"commit_key": view.key, "commit_sha256": view.sha256, "limit_bytes": 1 << 40} | more
    return Scrub.model_validate(values)


def ground(scene: RepairScene) -> AttachedRemote:
    """The remote as the child holds it."""
    return AttachedRemote(
        store=open_store(str(scene.nas)),
        abilities=Abilities(create_only=True, checksum=None, resumable=True),
        identity=scene.ground().identity,
    )


def nothing() -> None:
    """Never stops."""


def test_pieces_cover_every_object_once(scene: RepairScene) -> None:
    total = sum(p.stat().st_size for p in (scene.nas / TAG).rglob("*") if p.is_file())
    here, read, after, pieces = ground(scene), 0, "", 0
    while True:
        done = scrub(here, piece(scene, after=after, limit_bytes=1), RateLimiter(), nothing, None)
        assert done.bad == ()
        read += done.read_bytes
        pieces += 1
        if done.next_after is None:
            break
        after = done.next_after
    assert (read, pieces) == (total, 4)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "manifest", "retired"])
def test_what_it_finds(scene: RepairScene, how: str) -> None:
    shard = scene.shard(1, root=scene.nas)
    key = f"{TAG}/{shard.name}"
    if how == "flipped":
        scene.flip(shard)
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "manifest":
        (path,) = (scene.nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero").iterdir()
        path.write_bytes(b"{}")
        key = f"_ckptd/commits/{TAG}~g1~zero.json"
    else:
        shard.unlink()
    order = piece(scene)
    if how == "retired":
        stones = scene.nas / "_ckptd" / "retired"
        stones.mkdir()
        (stones / f"{TAG}~g1~zero.json").write_text("{}")
    done = scrub(ground(scene), order, RateLimiter(), nothing, None)
    assert done.is_gone is (how == "retired")
    assert [copy.key for copy in done.bad] == ([] if how == "retired" else [key])
    other = order.model_copy(update={"commit_sha256": "other"})
    assert scrub(ground(scene), other, RateLimiter(), nothing, None).is_gone is (how != "manifest")


def test_it_stops_between_two_steps(scene: RepairScene) -> None:
    def stop() -> None:
        msg = "enough"
        raise Cancelled(msg)

    with pytest.raises(Cancelled):
        scrub(ground(scene), piece(scene), RateLimiter(), stop, None)


@dataclass
class Thread:
    """The deciding thread of a job that has nothing to do: a link with its child, and the scrubber."""

    scene: RepairScene
    state: JobState
    node: str = "n0"
    calls: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.state.plan = Plan(actions=(), local_verdicts={}, remote_verdicts={})
        self.state.is_first_scan = False
        settings = RemoteSettings(
            name="nas",
            url=str(self.scene.nas),
            job="run",
            save_dir=str(self.scene.save_dir),
            same_filesystem=True,
            node=self.node,
            node_id="i",
        )
        self.session = RemoteSession(
            settings, self.state.problems, self.calls.put, lambda _: None, lambda: None
        )
        self.restart()

    def restart(self) -> None:
        """A new scrubber, as after a start of the daemon."""
        remote = RemoteConfig.model_validate({"name": "nas", "url": str(self.scene.nas), "scrub": "10TB/day"})
        job = self.scene.job(remote=False).model_copy(update={"remotes": (remote,), "name": "run"})
        self.scrubber = Scrubber(job, self.state, {"nas": self.session})

    def until(self, done: Callable[[], object], seconds: float = 200.0) -> None:
        """Turns until it is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not done():
            self.session.turn(time.monotonic())
            self.scrubber.turn()
            if done():  # before an answer that may be there already
                return
            try:
                self.calls.get(timeout=0.05)()
            except queue.Empty:
                continue
        assert done()

    @property
    def damaged_tags(self) -> set[str]:
        """Checkpoints of which no copy may go."""
        return {tag for _, tag, _ in self.scrubber.damaged}

    @property
    def problems(self) -> list[str]:
        """Texts and next steps."""
        return [f"{p.code}: {p.text}; {p.next_step}" for p in self.state.problems.all()]

    @property
    def proven(self) -> int:
        """COMMITs that were read to their end."""
        return len(self.scrubber._progress["nas"].proven_at)


@pytest.fixture
def thread(scene: RepairScene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Thread]:
    """Small objects and short times."""
    monkeypatch.setattr(scrubbing, "LEAST_BYTES", 1)
    monkeypatch.setattr(scrubbing, "RECHECK_SECONDS", 0.2)
    scene.state.mkdir()
    one = Thread(scene, job_state(Journal(scene.state / "journal.db")))
    yield one
    one.session.close()
    one.state.journal.close()


def test_rot_is_a_problem_until_it_is_repaired(thread: Thread) -> None:
    """Every COMMIT is proven; a flipped bit is named with the repair, keeps its tag from being deleted,
    outlives a restart, and is over once the object is right again."""
    scene = thread.scene
    shard = scene.shard(1, root=scene.nas)
    good = shard.read_bytes()
    scene.flip(shard)
    thread.until(lambda: thread.proven == 2 and thread.problems)
    assert thread.damaged_tags == {TAG}
    (text,) = thread.problems
    assert text.startswith("remote-object-damaged: nas: ")
    assert f"{TAG}/{shard.name}" in text
    assert text.endswith(f"ckptd verify {scene.save_dir} {TAG} --repair --read-data")
    thread.restart()
    assert thread.damaged_tags == {TAG}
    assert thread.proven == 2
    shard.write_bytes(good)
    thread.until(lambda: not thread.problems)
    assert thread.damaged_tags == frozenset()
    # read lately: nothing more is read
    for _ in range(5):
        thread.scrubber.turn()
    assert thread.session.scrub is None


def heard(one: Thread) -> Peers:
    """After its node beat and listened."""

    def heartbeat() -> Heartbeat:
        return Heartbeat(
            job_id="",
            job="run",
            node=one.node,
            node_id="i",
            config_digest="c",
            ckptd_version="1",
            as_of="2020-01-01T00:00:00Z",
            state="ok",
        )

    sessions = {"nas": one.session}
    told = one.scrubber.damaged_commits
    peers = Peers(one.state, sessions, heartbeat, "c", {}, lambda: None, damaged_commits=told)
    one.until(lambda: one.session.observation is not None)
    peers.turn(time.monotonic())
    one.until(lambda: one.session.heartbeat is None)
    return peers


def test_what_one_node_found_damaged_another_does_not_count(thread: Thread) -> None:
    """Its heartbeat tells it, until it is right again."""
    shard = thread.scene.shard(1, root=thread.scene.nas)
    good = shard.read_bytes()
    thread.scene.flip(shard)
    thread.until(lambda: thread.damaged_tags)
    other = Thread(thread.scene, job_state(Journal(thread.scene.state / "other.db")), node="n1")
    assert heard(thread).damaged == frozenset()
    assert heard(other).damaged == {("nas", TAG, "zero")}
    shard.write_bytes(good)
    thread.until(lambda: not thread.damaged_tags)
    heard(thread)
    other.session.close()
    again = Thread(thread.scene, other.state, node="n1")
    assert heard(again).damaged == frozenset()
    again.session.close()
    again.state.journal.close()


def test_a_rotten_commit_is_named_and_holds_up_no_other(thread: Thread) -> None:
    """Rot below the remote's file system changes no time, so that no listing shows it: the scrub reads the
    COMMIT itself, and goes on with the next."""
    commit = thread.scene.nas / "_ckptd" / "commits" / f"{TAG}~g1~zero.json"
    good = commit.read_bytes()
    thread.until(lambda: thread.session.observation is not None)
    thread.scene.flip(commit, good.index(b'"branch":') + 3)
    thread.until(lambda: thread.proven == 2 and thread.problems)
    assert thread.damaged_tags == {TAG}
    (text,) = thread.problems
    assert text.startswith(f"remote-object-damaged: nas: _ckptd/commits/{TAG}~g1~zero.json is ")
    assert "; not repaired: this node keeps no copy of its documents; " in text
    assert thread.scrubber.faults() == []
    thread.scene.flip(commit, good.index(b'"branch":') + 3)
    thread.until(lambda: not thread.problems)
    assert thread.damaged_tags == frozenset()


def test_an_order_that_fails_holds_up_no_other(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is of, the COMMIT is named as unreadable, and the others are read."""
    real = remote_scrub._compare_all

    def failing(place: Any, listed: dict[str, Any], *more: Any) -> Scrubbed:
        if any(key.startswith(f"{TAG}/") for key in listed):
            raise RefusedError("a name that no store takes")
        return real(place, listed, *more)

    monkeypatch.setattr(remote_scrub, "_compare_all", failing)
    order = piece(thread.scene)
    assert scrub(ground(thread.scene), order, RateLimiter(), nothing, None).unread == (order.commit_key,)
    with pytest.raises(RefusedError):
        scrub(
            ground(thread.scene),
            piece(thread.scene, only=("a",)).model_copy(update={"place": "here"}),
            RateLimiter(),
            nothing,
            thread.session.settings,
        )


def test_a_bad_object_that_cannot_be_read_any_more_stays_bad(
    thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails answers with EIO: that ends neither the problem nor what keeps the other copies."""
    scene = thread.scene
    scene.flip(scene.shard(1, root=scene.nas))
    thread.until(lambda: thread.proven == 2 and thread.session.scrub is None)
    answers: list[Scrubbed] = []

    class Failing(DirectoryStore):
        def read_at(self, key: str, offset: int, length: int) -> bytes:
            raise StorageError(key)

    def order(order: Scrub, on_answer: Callable[[Answer], None]) -> int:
        answers.append(
            scrub(replace(ground(scene), store=Failing(str(scene.nas))), order, RateLimiter(), nothing, None)
        )
        on_answer(answers[0])
        return 1

    monkeypatch.setattr(thread.session, "request", order)
    thread.until(lambda: answers)
    assert (answers[0].bad, len(answers[0].unread)) == ((), 1)
    assert thread.damaged_tags == {TAG}
    assert thread.problems


def failing(
    scene: RepairScene, thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> list[Callable[[str], bool]]:
    """The remote's disk answers with EIO where the function in the list says so."""
    fails: list[Callable[[str], bool]] = [lambda _: False]

    class Failing(DirectoryStore):
        def read_at(self, key: str, offset: int, length: int) -> bytes:
            if fails[0](key):
                raise StorageError(key)
            return super().read_at(key, offset, length)

        def get(self, key: str) -> bytes | None:
            if fails[0](key):
                raise StorageError(key)
            return super().get(key)

    def order(order: Scrub, on_answer: Callable[[Answer], None]) -> int:
        answer = scrub(
            replace(ground(scene), store=Failing(str(scene.nas))), order, RateLimiter(), nothing, None
        )

        def answered() -> None:
            thread.session.scrub = None
            on_answer(answer)

        thread.calls.put(answered)
        return 1

    thread.until(lambda: thread.session.observation is not None)
    monkeypatch.setattr(thread.session, "request", order)
    return fails


@pytest.mark.parametrize("what", ["object", "manifest"])
def test_what_cannot_be_read_is_not_proven(
    thread: Thread, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """P17: EIO of one object of a COMMIT is a problem, and its tag is kept, until it was read as a whole."""
    scene = thread.scene
    shard = scene.shard(1, root=scene.nas)
    fails = failing(scene, thread, monkeypatch)
    if what == "object":
        fails[0] = lambda key: key == f"{TAG}/{shard.name}"
    else:
        fails[0] = lambda key: key.startswith(f"_ckptd/nodes/{TAG}~")
    thread.until(lambda: thread.proven == 1 and thread.problems)
    end = time.monotonic() + 1
    thread.until(lambda: time.monotonic() > end)
    assert thread.proven == 1
    (text,) = thread.problems
    key = f"{TAG}/{shard.name}" if what == "object" else f"_ckptd/commits/{TAG}~g1~zero.json"
    assert text.startswith(f"remote-object-unreadable: nas: {key} cannot be read")
    assert f"ckptd verify {scene.save_dir} {TAG} --read-data" in text
    assert thread.damaged_tags == {TAG}
    thread.restart()
    assert thread.damaged_tags == {TAG}
    fails[0] = lambda _: False
    thread.until(lambda: thread.proven == 2)
    assert thread.problems == []
    assert thread.damaged_tags == frozenset()


def test_many_that_cannot_be_read(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are remembered: none counts as read because the remembered ones are readable again."""
    monkeypatch.setattr(scrubbing, "MOST_UNREAD", 1)
    fails = failing(thread.scene, thread, monkeypatch)
    fails[0] = lambda key: key.startswith(f"{TAG}/")
    thread.until(lambda: thread.proven == 1 and thread.problems)
    keys = thread.scrubber._progress["nas"].unread
    assert [len(found) for found in keys.values()] == [1]
    (hidden,) = next(iter(keys.values()))
    fails[0] = lambda key: key.startswith(f"{TAG}/") and key != hidden
    thread.until(lambda: next(iter(thread.scrubber._progress["nas"].unread.values()), (hidden,)) != (hidden,))
    assert thread.proven == 1


def test_what_is_known_damaged_is_kept_while_its_remote_is_away(thread: Thread) -> None:
    """A daemon that starts without the network must not let the good copy go."""
    thread.scene.flip(thread.scene.shard(1, root=thread.scene.nas))
    thread.until(lambda: thread.problems)
    thread.session.observation = None
    thread.restart()
    assert thread.damaged_tags == {TAG}


def test_every_bad_checkpoint_is_looked_at_again(thread: Thread) -> None:
    """Not only the first, as long as that is bad."""
    scene = thread.scene
    good = {}
    for tag in ("global_step5", TAG):
        path = scene.shard(1, tag, scene.nas)
        good[tag] = path.read_bytes()
        scene.flip(path)
    thread.until(lambda: len(thread.damaged_tags) == 2)
    progress = thread.scrubber._progress["nas"]
    first, last = (progress.tags[sha] for sha in progress.bad)
    scene.shard(1, last, scene.nas).write_bytes(good[last])
    thread.until(lambda: thread.damaged_tags == {first})


def test_anything_else_comes_first(thread: Thread) -> None:
    """No reading while something moves, and what is under way makes way."""
    thread.until(lambda: thread.session.is_ready)
    thread.state.saves.conversion = RunningConversion(save_id=1)
    time.sleep(0.2)
    thread.scrubber.turn()
    assert thread.session.scrub is None
    thread.state.saves.conversion = None
    thread.until(lambda: thread.session.scrub is not None)
    assert thread.session.open_requests == 0, "a slow reading is no work that the daemon waits for"
    thread.state.folders.in_flight = frozenset({"global_step15"})
    thread.until(lambda: thread.session.scrub is None)
    assert thread.problems == []
