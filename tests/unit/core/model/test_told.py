"""Nodes without model states: whose manifests tell them the grid and the step, and whose do not (adr/0104).

Real documents in a directory; what a daemon asks, judges, chooses and ships is the real code. Its link is
a call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.base import files
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import Memory, State, Verdict, judge
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.generation import AlreadyCommitted, JoinGeneration, choose_generation
from ckptd.core.model.listing import FolderListing, ListedFile
from ckptd.core.model.shard_facts import ShardFacts
from ckptd.daemon.state.remote_sync import evidence_of, unread_manifests
from ckptd.daemon.uploads import peers as daemon_nodes
from ckptd.daemon.uploads.peers import LONGEST_SECONDS, LOOK_SECONDS, Peers
from ckptd.daemon.uploads.session import commits_of
from ckptd.storage.remote.documents import FEW, ManifestCache
from ckptd.storage.stores.directory import DirectoryStore
from tests.stores.scene import JOB_ID, MODEL, OPTIM, Node, archive
from tests.support.observing import describe

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.core.model.generation import GenerationChoice
    from ckptd.core.model.save import SealedSave
    from ckptd.storage.remote.messages import TagView, UploadResult

LATER = 5000
SPREAD_SECONDS = 60


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(daemon_nodes, "time", made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "nas").mkdir()
    made = DirectoryStore(str(tmp_path / "nas"), owner="t")
    Node(tmp_path / "n").attached(made)
    return made


@dataclass
class Daemon:
    """A node's, as far as it concerns one folder."""

    path: Path
    store: DirectoryStore
    clock: Clock
    name: str
    tag: str = "last"
    views: dict[str, TagView] = field(default_factory=dict)
    cache: ManifestCache = field(default_factory=ManifestCache)
    asked: int = 0
    read: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node = Node(self.path / self.name, name=self.name, tag=self.tag)
        settings = SimpleNamespace(node=self.name, url="x", job_id=JOB_ID)
        link: Any = SimpleNamespace(
            tag_views=self.views,
            forget_tag=lambda tag: self.views.pop(tag, None),
            attached=True,
            settings=settings,
            observation=None,
            describe=self._describe,
        )
        state: Any = SimpleNamespace(
            saves=SimpleNamespace(rows={}),
            folders=SimpleNamespace(listing=None, verdicts={}, quiet={}),
            uploads=SimpleNamespace(waiting={}),
        )
        beat: Any = None
        slurm = {"SLURM_JOB_NUM_NODES": "16"}
        self.state = state
        self.nodes = Peers(state, {"nas": link}, beat, "c", slurm, lambda: None)

    def _describe(self, tag: str, _then: object) -> None:
        self.asked += 1
        get = self.store.get

        def counted(key: str) -> bytes | None:
            self.read += [key] if "/nodes/" in key else []
            return get(key)

        self.store.get = counted  # type: ignore[method-assign]
        try:
            self.views[tag] = describe(self.store, tag, node=self.name, manifests=self.cache)
        finally:
            self.store.get = get  # type: ignore[method-assign]

    def save(self, ranks: tuple[int, ...], dp: int, step: int, at: int = 0, *, model: bool = False) -> None:
        """What its ranks write; `at`: when, in seconds."""
        self.node.dp, self.step, self.at = dp, step, at
        self.state.folders.quiet[self.tag] = SimpleNamespace(since_seconds=self.clock.now)
        written = {OPTIM.format(d=d): archive(b"%d of %d at %d, %d;" % (d, dp, step, at) * 99) for d in ranks}
        written |= {MODEL: archive(b"model at %d, %d;" % (step, at) * 99)} if model else {}
        self.node.write(written)
        for name in written:
            os.utime(self.node.save_dir / self.tag / name, ns=(at * 10**9, at * 10**9))

    def judged(self, memory: Memory | None = None) -> Verdict:
        """The verdict of the turn after the next look."""
        self.clock.now += LONGEST_SECONDS
        self.turn(memory)
        return self.turn(memory)

    def turn(self, memory: Memory | None = None) -> Verdict:
        folder = self.listing()
        self.state.folders.listing = SimpleNamespace(folders=(folder,))
        context = Context(
            settle_seconds=1,
            quiet_seconds=1e6,
            is_in_flight=False,
            save_spread_seconds=SPREAD_SECONDS,
            spread=self.nodes.spread(self.tag),
        )
        verdict = judge(folder, self.facts(), memory, context)
        self.state.folders.verdicts[self.tag] = verdict
        return verdict

    def listing(self) -> FolderListing:
        folder = self.node.save_dir / self.tag
        with files.opened_dir(folder) as fd:
            identity = files.folder_identity(fd)
        listed = [ListedFile(path=p.name, identity=files.identity_of(p.stat())) for p in folder.iterdir()]
        return FolderListing(tag=self.tag, folder=identity, files=tuple(listed))

    def facts(self) -> dict[str, FileFacts]:
        found = {}
        for file in self.node.sealed().files:
            data = (self.node.save_dir / self.tag / file.path).read_bytes()
            dp = int(data.split(b" of ")[1].split(b" ")[0]) if b" of " in data else None
            step = int(data.split(b" at ")[1].split(b",")[0])
            said = ShardFacts(zero_stage=2, partition_count=(dp,) if dp else (), optimizer_step=step)
            if file.path == MODEL:
                said = ShardFacts(dp_world_size=self.node.dp, mp_world_size=1, global_steps=step)
            found[file.path] = FileFacts(
                path=file.path,
                bytes=file.identity.size_bytes,
                archive=Archive.ZIP,
                fingerprint=file.fingerprint,
                role=file.role,
                facts=said,
            )
        return found

    def sealed(self, step: int, *, optimizer_step: int | None = None) -> SealedSave:
        save = self.node.sealed(step=step, seconds=self.at)
        inside = tuple(f for f in save.files if (f.shard.d or 0) < self.node.dp)
        return save.model_copy(update={"is_part": True, "files": inside, "optimizer_step": optimizer_step})

    def choice(self, save: SealedSave) -> GenerationChoice:
        view = describe(self.store, self.tag, node=self.name)
        manifests, commits = commits_of(view)
        return choose_generation(
            save,
            JOB_ID,
            manifests=manifests,
            commits=commits,
            tombstones=view.retired,
            save_spread_seconds=SPREAD_SECONDS,
            named=unread_manifests(view),
        )

    def upload(self, step: int | None = None, *, optimizer_step: int | None = None) -> UploadResult:
        """As the save that it is, or is thought to be."""
        save = self.sealed(self.step if step is None else step, optimizer_step=optimizer_step)
        choice = self.choice(save)
        assert isinstance(choice, JoinGeneration)
        order = self.node.order(save, generation=choice.generation)
        return self.node.upload(self.node.attached(self.store), order)


@dataclass
class Job:
    """Rank 0's node has model states; the others have none."""

    path: Path
    store: DirectoryStore
    clock: Clock

    def daemon(self, name: str) -> Daemon:
        return Daemon(self.path, self.store, self.clock, name)

    def pair(self) -> tuple[Daemon, Daemon]:
        return self.daemon("n0"), self.daemon("n1")


@pytest.fixture
def job(tmp_path: Path, store: DirectoryStore, clock: Clock) -> Job:
    return Job(tmp_path, store, clock)


def save_on(pair: tuple[Daemon, Daemon], step: int, at: int = 0, dp: int = 4) -> None:
    """Half of the ranks on each."""
    first, second = pair
    first.save(tuple(range(dp // 2)), dp, step, at, model=True)
    second.save(tuple(range(dp // 2, dp)), dp, step, at)


def commit_on(pair: tuple[Daemon, Daemon], step: int, at: int = 0, dp: int = 4) -> None:
    """What one and the other then upload."""
    first, second = pair
    save_on(pair, step, at, dp)
    assert first.upload().outcome == "waiting"
    verdict = second.judged()
    assert verdict.state is State.COMPLETE
    assert second.upload(verdict.step).outcome == "committed"


@pytest.mark.parametrize("others", [1, 8, 9, 15])
def test_however_many_parts_are_there_one_of_them_tells(job: Job, others: int) -> None:
    """Nodes upload in the order of their ranks, or the last first; the one that comes last commits."""
    daemons = [job.daemon(f"n{rank:02d}") for rank in range(others + 1)]
    for rank, daemon in enumerate(daemons):
        daemon.save((rank,), others + 1, 5, model=rank == 0)
    result = daemons[0].upload()
    for daemon in (*daemons[2:][::-1], daemons[1]):
        verdict = daemon.judged()
        assert (verdict.state, verdict.step) == (State.COMPLETE, 5), verdict.reason
        result = daemon.upload(verdict.step)
        assert len(daemon.read) <= FEW
    assert result.outcome == "committed"
    assert result.commit is not None and len(result.commit.commit.manifests) == others + 1


def test_what_was_read_once_is_not_read_again_however_many_come(job: Job) -> None:
    waiting = job.daemon("waiting")
    waiting.save((15,), 16, 5, at=LATER)
    for rank in reversed(range(15)):
        daemon = job.daemon(f"n{rank}")
        daemon.save((rank,), 16, 5)
        daemon.upload()
        assert waiting.judged().state is State.INCOMPLETE, "of another save"
    assert waiting.asked == 15
    assert len(waiting.read) == FEW
    # after a restart of the daemon it reads one
    again = job.daemon("waiting")
    again.save((15,), 16, 5)
    assert again.judged().state is State.COMPLETE
    assert len(again.read) == 1


def test_one_that_is_damaged_is_passed_over(job: Job, store: DirectoryStore) -> None:
    waiting = job.daemon("waiting")
    waiting.save((15,), 16, 5)
    for rank in range(15):
        daemon = job.daemon(f"n{rank}")
        daemon.save((rank,), 16, 5)
        daemon.upload()
    (lowest,) = (info.key for info in store.list("_ckptd/nodes/") if "/n0~" in info.key)
    store.put(lowest, b"{")
    assert waiting.judged().state is State.COMPLETE
    assert waiting.read[0] == lowest and len(waiting.read) == 2


class TestOneTag:
    def test_the_save_before_tells_nothing_of_this_one(self, job: Job) -> None:
        pair = first, second = job.pair()
        commit_on(pair, 100)
        for number, at in ((200, LATER), (300, LATER + 30)):
            before = {f.path: f.identity for f in second.listing().files}
            save_on(pair, number, at)
            memory = Memory(shards=before, is_part=True)
            waiting = second.judged(memory)
            assert (waiting.state, waiting.grid) == (State.INCOMPLETE, None), waiting.reason
            assert first.upload().outcome == "waiting"
            verdict = second.judged(memory)
            assert (verdict.state, verdict.step) == (State.COMPLETE, number)
            result = second.upload(verdict.step)
            assert result.outcome == "committed" and result.commit is not None
            assert (result.commit.commit.step, result.commit.commit.generation) == (number, number // 100)

    def test_half_a_resave_is_torn_as_before(self, job: Job) -> None:
        pair = job.pair()
        commit_on(pair, 100)
        before = {f.path: f.identity for f in pair[1].listing().files}
        pair[1].save((2,), 4, 200, LATER)
        assert pair[1].judged(Memory(shards=before, is_part=True)).state is State.TORN_RESAVE

    def test_a_save_that_was_left_half_sent_tells_nothing_of_the_next(self, job: Job) -> None:
        """Further apart than one save takes; both generations are open."""
        pair = first, second = job.pair()
        save_on(pair, 100)
        first.upload()
        save_on(pair, 200, LATER)
        assert second.judged().state is State.INCOMPLETE
        first.upload()
        verdict = second.judged()
        assert (verdict.state, verdict.step) == (State.COMPLETE, 200)
        result = second.upload(verdict.step)
        assert result.outcome == "committed" and result.commit is not None
        assert result.commit.commit.generation == 2

    @pytest.mark.parametrize("at", [0, 30])
    def test_within_seconds_the_optimizers_step_tells_them_apart(self, job: Job, at: int) -> None:
        """Node 1 has step 200 on its disk, or 100 still, when node 0 has sent the other."""
        pair = first, second = job.pair()
        save_on(pair, 200, at)
        first.save((0, 1), 4, 100, 0, model=True)
        first.upload(optimizer_step=100)
        assert second.judged().state is State.INCOMPLETE
        first.save((0, 1), 4, 200, at, model=True)
        first.upload(optimizer_step=200)
        verdict = second.judged()
        assert (verdict.state, verdict.step) == (State.COMPLETE, 200)
        second.save((2, 3), 4, 100, 0)
        assert second.judged().step == 100

    def test_where_nothing_does_neither_is_taken(self, job: Job) -> None:
        """Manifests of older releases, of saves that followed each other within seconds."""
        pair = first, second = job.pair()
        save_on(pair, 100)
        first.upload()
        save_on(pair, 200, 30)
        first.upload()
        assert [told.step for told in evidence_of(describe(job.store, "last"))] == [100, 200]
        assert second.judged().state is State.INCOMPLETE

    def test_what_a_node_sent_itself_speaks_against_another_save(self, job: Job) -> None:
        """Its part of step 100 is in a generation that was never whole, and seconds later it saves again."""
        daemons = [job.daemon(f"n{n}") for n in range(3)]
        for rank, daemon in enumerate(daemons):
            daemon.save((rank,), 3, 100, model=rank == 0)
        daemons[0].upload()
        daemons[1].upload(daemons[1].judged().step)
        daemons[1].save((1,), 3, 200, 30)
        assert daemons[1].judged().state is State.INCOMPLETE


class TestAnotherGrid:
    @pytest.mark.parametrize("committed", [True, False])
    def test_it_is_told_by_who_saved_again(self, job: Job, committed: bool) -> None:
        """Of the earlier attempt all was sent, or half."""
        pair = first, second = job.pair()
        if committed:
            commit_on(pair, 9)
        else:
            save_on(pair, 9)
            first.upload()
        (second.node.save_dir / "last" / OPTIM.format(d=2)).unlink()
        (second.node.save_dir / "last" / OPTIM.format(d=3)).unlink()
        save_on(pair, 9, LATER, dp=8)
        assert second.judged().state is State.INCOMPLETE
        assert first.upload().outcome == "waiting"
        verdict = second.judged()
        assert verdict.state is State.COMPLETE, verdict.reason
        assert verdict.grid is not None and verdict.grid.dp == 8
        result = second.upload(verdict.step)
        assert result.outcome == "committed" and result.commit is not None
        assert (result.commit.commit.generation, result.commit.commit.grid.dp) == (2, 8)

    def test_of_a_larger_world_shards_may_lie_beside(self, job: Job) -> None:
        pair = first, second = job.pair()
        commit_on(pair, 9, dp=8)
        first.node.dp = second.node.dp = 4
        save_on(pair, 9, LATER)
        for d in (2, 3):
            (first.node.save_dir / "last" / OPTIM.format(d=d)).unlink()
        assert second.judged().state is State.INCOMPLETE
        first.upload()
        verdict = second.judged()
        assert verdict.state is State.COMPLETE, verdict.reason
        result = second.upload(verdict.step)
        assert result.outcome == "committed" and result.commit is not None
        assert result.commit.commit.grid.dp == 4


class TestLostJournal:
    @pytest.mark.parametrize(("nodes", "at"), [(2, 0), (12, 0), (12, LATER)])
    def test_a_save_that_is_committed_is_known_again(self, job: Job, nodes: int, at: int) -> None:
        """By what it holds, also where a copy has other times."""
        daemons = [job.daemon(f"n{rank:02d}") for rank in range(nodes)]
        for rank, daemon in enumerate(daemons):
            daemon.save((rank,), nodes, 7, model=rank == 0)
        outcomes = [daemon.upload().outcome for daemon in daemons]
        assert outcomes == ["waiting"] * (nodes - 1) + ["committed"]
        again = job.daemon("n01")
        again.node, again.at = daemons[1].node, at
        for file in (again.node.save_dir / "last").iterdir():
            os.utime(file, ns=(at * 10**9, at * 10**9))
        verdict = again.judged()
        assert (verdict.state, verdict.step) == (State.COMPLETE, 7), verdict.reason
        assert isinstance(again.choice(again.sealed(7)), AlreadyCommitted)

    def test_another_save_of_that_tag_is_not_taken_for_it(self, job: Job) -> None:
        """Nor within the seconds that one save may take."""
        pair = job.pair()
        commit_on(pair, 7)
        pair[1].save((2, 3), 4, 8, 1)
        assert pair[1].judged().state is State.INCOMPLETE

    def test_nor_where_ranks_have_other_places(self, job: Job) -> None:
        """Of many nodes it reads its own manifest, which lists another rank's shard."""
        daemons = [job.daemon(f"n{rank:02d}") for rank in range(12)]
        for rank, daemon in enumerate(daemons):
            daemon.save((rank,), 12, 7, model=rank == 0)
            daemon.upload()
        (daemons[1].node.save_dir / "last" / OPTIM.format(d=1)).unlink()
        daemons[1].save((5,), 12, 8, 1)
        assert daemons[1].judged().state is State.INCOMPLETE


def test_who_waits_for_long_asks_seldom(job: Job) -> None:
    waiting = job.daemon("n1")
    waiting.save((2, 3), 4, 5)

    def asked(seconds: int) -> int:
        before, until = waiting.asked, job.clock.now + seconds
        while job.clock.now < until:
            waiting.turn()
            job.clock.now += 1
        return waiting.asked - before

    assert asked(50) == 50 / LOOK_SECONDS
    assert asked(550) < 30
    assert asked(3600) == 3600 / LONGEST_SECONDS
