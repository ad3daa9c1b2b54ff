"""Model: two saves of one tag, one or two nodes, their store operations interleaved, crashes between.

Never a COMMIT over bytes of two saves, and no whole save left uncommitted for ever (docs/design.md §3, §5;
H1, H3). The real code runs against a store in memory whose every operation waits for its turn. Two
seeded bugs show that the model sees what it is for: no generations, and no comparison of saves.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.core.model import generation
from ckptd.core.model.generation import (
    AlreadyCommitted,
    JoinGeneration,
    SeenCommit,
    SeenManifest,
    choose_generation,
)
from ckptd.errors import CkptdError
from ckptd.storage.remote.attach import attach
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.observe import AttachedRemote, live_commits, manifests_of
from ckptd.storage.stores.checksums import crc64, to_hex
from tests.stores.memory import MemoryStore
from tests.stores.scene import JOB_ID, MODEL, OPTIM, Node, ground_of
from tests.support.observing import describe, observe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckptd.core.model.generation import GenerationChoice
    from ckptd.core.model.save import SealedSave
    from ckptd.storage.remote.messages import TagView
    from ckptd.storage.stores.base import HeldRange, ObjectInfo, Progress, ResumePoint, Source

APART_SECONDS = 1000


class Killed(BaseException):
    """The node's process died between two store operations."""


class Turn:
    """Lets one node go on by one store operation at a time."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.stopped = threading.Semaphore(0)
        self.kill = False
        self.thread = threading.current_thread()

    def wait(self) -> None:
        # only the node's own thread takes turns; its verifier runs with it
        if threading.current_thread() is not self.thread:
            return
        self.stopped.release()
        self.go.acquire()
        if self.kill:
            raise Killed


class TurnStore(MemoryStore):
    """One node's view of the shared objects."""

    def __init__(self, shared: MemoryStore, turn: Turn) -> None:
        super().__init__(objects=shared.objects, partial={}, lock=shared.lock, window_bytes=32)
        self.turn = turn

    def get(self, key: str) -> bytes | None:
        self.turn.wait()
        return super().get(key)

    def put(self, key: str, data: bytes) -> None:
        self.turn.wait()
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.turn.wait()
        return super().put_if_absent(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.turn.wait()
        with self.lock:
            return iter(list(super().list(prefix)))

    def stat(self, key: str) -> ObjectInfo | None:
        self.turn.wait()
        return super().stat(key)

    def upload(
        self,
        key: str,
        source: Source,
        *,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> int:
        self.turn.wait()

        def each(progress: Progress) -> None:
            on_progress(progress)
            self.turn.wait()

        return super().upload(key, source, resume=resume, on_progress=each, held=held)

    def delete(self, key: str) -> None:
        self.turn.wait()
        super().delete(key)


def choose(save: SealedSave, view: TagView) -> GenerationChoice:
    return choose_generation(
        save,
        JOB_ID,
        manifests=[
            SeenManifest(
                generation=m.manifest.generation,
                form=m.manifest.form,
                manifest=m.manifest,
                committed=m.committed,
            )
            for m in view.manifests
        ],
        commits=[
            SeenCommit(
                generation=c.commit.generation,
                form=c.commit.form,
                key=c.key,
                sha256=c.sha256,
                disputed=c.disputed,
            )
            for c in view.commits
        ],
        tombstones=view.retired,
        save_spread_seconds=60,
    )


@dataclass
class Actor:
    """A node with its daemon: it holds some ranks, and begins an attempt whenever it is idle."""

    node: Node
    ranks: tuple[int, ...]
    shared: MemoryStore
    chooser: Callable[[SealedSave, TagView], GenerationChoice]
    has_model: bool = True
    saved: int = 0
    turn: Turn | None = None
    thread: threading.Thread | None = None
    failures: list[BaseException] = field(default_factory=list)

    def save(self, number: int) -> None:
        """The trainer writes this node's shards of save `number` in place."""
        contents = {OPTIM.format(d=rank): f"save {number} rank {rank} ".encode() * 5 for rank in self.ranks}
        if self.has_model:
            contents[MODEL] = f"save {number} model ".encode() * 5
        # every node has one of its own, of one size
        contents["notes.json"] = f"save {number} notes of {self.node.name} ".encode() * 5
        self.node.write(contents)
        for name in contents:
            at = number * APART_SECONDS * 10**9
            os.utime(self.node.save_dir / self.node.tag / name, ns=(at, at))
        self.saved = number

    def step(self) -> None:
        """Go on by one store operation, or begin an attempt."""
        if self.thread is None:
            if self.saved == 0:
                return
            self.turn = None
            self.thread = threading.Thread(target=self._attempt)
            ready = threading.Semaphore(0)
            self.ready = ready
            self.thread.start()
            ready.acquire()
        else:
            assert self.turn is not None
            self.turn.go.release()
        assert self.turn is not None
        self.turn.stopped.acquire()
        if not self.turn.thread.is_alive() or self.is_done:
            self.thread.join()
            self.thread = None

    def do(self, what: str) -> None:
        if what == "step":
            self.step()
        elif what == "crash":
            self.crash()
        else:
            self.save(2)

    def crash(self) -> None:
        if self.thread is not None and self.turn is not None:
            self.turn.kill = True
            self.step()
            while self.thread is not None:
                self.step()

    def _attempt(self) -> None:
        self.is_done = False
        self.turn = Turn()
        self.ready.release()
        try:
            self._work(TurnStore(self.shared, self.turn))
        except (Killed, CkptdError):
            pass
        except BaseException as error:
            self.failures.append(error)
        self.is_done = True
        self.turn.stopped.release()

    def _work(self, store: TurnStore) -> None:
        save = self.node.sealed(seconds=self.saved * APART_SECONDS)
        identity = observe(self.shared).identity
        choice = self.chooser(save, describe(store, self.node.tag))
        if isinstance(choice, AlreadyCommitted):
            return
        assert isinstance(choice, JoinGeneration)
        ground = AttachedRemote(store=store, abilities=self.shared.probe(), identity=identity)
        order = self.node.order(save, generation=choice.generation)
        # words that tell saves apart, no archives
        files = tuple(file.model_copy(update={"check_zip_crc": False}) for file in order.files)
        upload_form(ground, order.model_copy(update={"files": files}), self.node.control())


def check_commits(shared: MemoryStore) -> set[int]:
    """Every COMMIT is over bytes of one save; returns which saves are committed."""
    committed = set()
    for view in live_commits(observe(shared)):
        numbers = set()
        for manifest in manifests_of(shared, view):
            for file in manifest.files:
                data = shared.objects.get(file.key, b"")
                assert to_hex(crc64(data)) == file.checksums.crc64nvme, (
                    f"{file.key} is not what was committed"
                )
                numbers.add(int(data.split()[1]))
        assert len(numbers) == 1, f"{view.key} mixes saves {numbers}"
        committed |= numbers
    return committed


def run(
    folder: Path,
    node_count: int,
    schedule: list[tuple[str, int]],
    chooser: Callable[[SealedSave, TagView], GenerationChoice] = choose,
    *,
    are_replicas: bool = True,
    are_whole: bool = False,
) -> None:
    shared = MemoryStore()
    ranks = [(0, 1)] * node_count if node_count == 1 or are_whole else [(0,), (1,)]
    actors = [
        Actor(Node(folder / f"n{i}", f"n{i}"), ranks[i], shared, chooser, are_replicas or i == 0)
        for i in range(node_count)
    ]
    ground_of(shared, attach(shared, actors[0].node.settings(shared.url, job_id=JOB_ID)))
    for actor in actors:
        actor.node.save_dir.mkdir(parents=True, exist_ok=True)
        actor.save(1)
    try:
        for what, index in schedule:
            actors[index % node_count].do(what)
            check_commits(shared)
        for actor in actors:
            if actor.saved < 2:
                actor.save(2)
        for _ in range(6):
            for actor in actors:
                actor.step()
                while actor.thread is not None:
                    actor.step()
        committed = check_commits(shared)
    finally:
        for actor in actors:
            actor.crash()
    for actor in actors:
        if actor.failures:
            raise actor.failures[0]
    assert 2 in committed, "the whole last save was never committed"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 1)),
        st.tuples(st.just("many"), st.integers(0, 1), st.integers(2, 60)),
        st.tuples(st.just("crash"), st.integers(0, 1)),
        st.tuples(st.just("save"), st.integers(0, 1)),
    ),
    max_size=40,
)


def flatten(steps: list[tuple[str, int] | tuple[str, int, int]]) -> list[tuple[str, int]]:
    flat: list[tuple[str, int]] = []
    for step in steps:
        flat += [("step", step[1])] * step[2] if len(step) == 3 else [(step[0], step[1])]
    return flat


@pytest.mark.faults
@settings(
    max_examples=int(os.environ.get("CKPTD_MODEL_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(node_count=st.integers(1, 2), are_replicas=st.booleans(), are_whole=st.booleans(), steps=STEPS)
def test_no_commit_over_two_saves_and_no_whole_save_left(
    tmp_path_factory: pytest.TempPathFactory,
    node_count: int,
    are_replicas: bool,
    are_whole: bool,
    steps: list[tuple[str, int] | tuple[str, int, int]],
) -> None:
    """`are_whole`: every node holds every rank and may commit alone; else all are needed."""
    folder = tmp_path_factory.mktemp("model")
    run(folder, node_count, flatten(steps), are_replicas=are_replicas or are_whole, are_whole=are_whole)


# node 0 ships and lists save 1, both nodes are saved again, node 1 ships only then
LATE = [("step", 0)] * 200 + [("save", 0), ("save", 1)] + [("step", 1)] * 200 + [("step", 0)] * 200


def test_the_late_node_s_save_is_committed(tmp_path: Path) -> None:
    run(tmp_path, 2, LATE)


def test_the_model_sees_a_protocol_without_generations(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="never committed"):
        run(tmp_path, 2, LATE, chooser=lambda save, view: JoinGeneration(generation=1))


def test_the_model_sees_saves_that_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "differs", lambda a, b, save_spread_seconds: None)
    with pytest.raises(AssertionError, match="mixes saves"):
        run(tmp_path, 2, [("step", 0)] * 200 + [("save", 1)] + [("step", 1)] * 200, are_replicas=False)


def replaced_half_way(folder: Path) -> None:
    """Node 0 has sent all and listed nothing; node 1, with files of its own under those names, dies among
    them; node 0 goes on and could commit alone."""
    for first in (30, 31):
        for second in range(18, 28):
            steps = [("step", 0)] * first + [("step", 1)] * second + [("crash", 1)] + [("step", 0)] * 100
            run(folder / f"{first}-{second}", 2, steps, are_whole=True)


def test_nothing_is_committed_over_what_another_node_replaces(tmp_path: Path) -> None:
    replaced_half_way(tmp_path)


def test_the_model_sees_commits_over_what_is_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.storage.remote.commit.pending_replacement", lambda *_: None)
    with pytest.raises(AssertionError, match=r"notes\.json"):
        replaced_half_way(tmp_path)
