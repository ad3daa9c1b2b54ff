"""Saves whose end is proved instead of waited for: however ranks and looks interleave, no mixture is whole.

A history is the Hugging Face Trainer at stage 3 as measured: two ranks write every shard twice between
barriers, in place; then rank 0 its random state and trainer_state.json, rank 1 its random state when it
likes. Some trainers die and begin anew in the folder, some write a shard again when all was over. The daemon
looks at any instant, and what it then calls whole must be one write's. CKPTD_FULL=1 lives 1,000,000 of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import Memory, State, judge
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.layouts import TRAINER_STATE, shard_roots_of
from ckptd.core.model.listing import FolderListing, ListedFile, SaveDirListing
from ckptd.daemon.state.local_saves import Folders
from tests.support.synthetic import Shard, write_stage3

TAG, ROOT, RANKS = "checkpoint-7", "global_step7", 2
HISTORIES, LIMIT_SECONDS = (1_000_000, 7200) if os.environ.get("CKPTD_FULL") else (2000, 300)
SHARDS = tuple(
    tuple(f"{ROOT}/{name}" for name in names)
    for names in (
        [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt", f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt"]
        for r in range(RANKS)
    )
)
RANDOM = tuple(f"rng_state_{rank}.pth" for rank in range(RANKS))


@dataclass(slots=True)
class Written:
    """A file: its latest write, whether that is over, and its mtime."""

    write: int
    is_open: bool
    at_ns: int


@dataclass(slots=True)
class History:
    """One folder and its daemon; every event moves the clock on, or not."""

    rng: random.Random
    facts: dict[str, FileFacts]
    folders: Folders = field(default_factory=Folders)
    files: dict[str, Written] = field(default_factory=dict)
    now_ns: int = 1
    write: int = 0
    """Number of the write that the trainer is at."""
    wholes: int = 0

    def listed(self) -> FolderListing:
        """The folder as it is."""
        listed = tuple(
            ListedFile(
                path=path,
                identity=FileIdentity(dev=1, ino=9, size_bytes=1, mtime_ns=one.at_ns, ctime_ns=one.at_ns),
            )
            for path, one in sorted(self.files.items())
        )
        trainer, roots = shard_roots_of(TAG, self.files)
        return FolderListing(
            tag=TAG, trainer=trainer, roots=roots, folder=FolderIdentity(dev=1, ino=2), files=listed
        )

    def look(self) -> None:
        """The daemon lists and judges, without any quiet time."""
        folder = self.listed()
        found = (folder,) if folder.is_checkpoint else ()
        foreign = (TAG,) if self.files and not found else ()
        self.folders.update(SaveDirListing(device=1, folders=found, foreign=foreign))
        if not found:
            return
        torn = {"archive": Archive.TORN, "trainer": None, "facts": None, "fingerprint": ""}
        read = {
            path: self.facts[path].model_copy(update=torn) if one.is_open else self.facts[path]
            for path, one in self.files.items()
        }
        context = Context(
            settle_seconds=5.0,
            quiet_seconds=0.0,
            is_in_flight=True,
            save_spread_seconds=60.0,
            saw_end=self.folders.saw_end(folder),
        )
        if judge(folder, read, None, context).state is State.COMPLETE:
            self.wholes += 1
            shards = {self.files[path].write for names in SHARDS for path in names}
            assert len(shards) == 1, f"shards of writes {sorted(shards)}: {self.files}"
            assert not any(one.is_open for one in self.files.values()), self.files
            assert set(self.files) >= {*RANDOM, TRAINER_STATE}, sorted(self.files)

    def carry_out(self, *ranks: Iterator[None]) -> None:
        """Let the ranks go on, one step of one of them at a time, until all are at their barrier."""
        left = list(ranks)
        while left:
            one = self.rng.choice(left)
            if next(one, left) is left:
                left.remove(one)
            self.now_ns += self.rng.random() < 0.8
            # most of what may go wrong does once the mark is there
            if self.rng.random() < (0.5 if TRAINER_STATE in self.files else 0.15):
                self.look()

    def written(self, *paths: str) -> Iterator[None]:
        """Write files one after another, each in place."""
        for path in paths:
            self.files[path] = Written(self.write, True, self.now_ns)
            yield
            self.files[path] = Written(self.write, False, self.now_ns)
            yield

    def save(self, times: int) -> None:
        """All shards so many times, each between two barriers, then what ends the save."""
        for _ in range(times):
            self.write += 1
            self.carry_out(*(self.written(*names) for names in SHARDS))
        self.carry_out(self.written(RANDOM[0], TRAINER_STATE), *map(self.written, RANDOM[1:]))

    def die_and_begin_anew(self) -> None:
        """Some steps of a save, then the same save from its beginning by another process."""
        self.write += 1
        self.carry_out(*(self._cut(self.written(*names)) for names in SHARDS))
        self.look()

    def _cut(self, steps: Iterator[None]) -> Iterator[None]:
        for _ in range(self.rng.randrange(4)):
            yield next(steps)

    def write_again(self, *, is_end_seen: bool) -> None:
        """What no trainer does: shards are written once more after the end.

        Who saw the end, and then a shard that changed, needs no clock; one that is set back hides the order
        from anybody else.
        """
        self.write += 1
        self.now_ns += self.rng.choice((1, -1000)) if is_end_seen else 1
        self.carry_out(*(self._cut(self.written(*names)) for names in SHARDS))
        self.look()


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileFacts]:
    """What inspection says of each file once it is whole."""
    folder: Path = tmp_path_factory.mktemp("whole")
    write_stage3(folder / ROOT, [{"w": (12,)}], RANKS, step=7)
    for name in RANDOM:
        Shard().save(folder / name, {"cpu": 1})
    (folder / TRAINER_STATE).write_text('{"global_step": 7, "log_history": []}')
    paths = [*(path for names in SHARDS for path in names), *RANDOM, TRAINER_STATE]
    return {fact.path: fact for fact in inspect_files(folder, paths)}


def lived(seed: int, facts: dict[str, FileFacts]) -> History:
    """One history, from an empty folder to its end, at which the daemon looks."""
    rng = random.Random(seed)
    history = History(rng, facts)
    history.look()
    if rng.random() < 0.3:
        history.die_and_begin_anew()
    history.save(rng.choice((1, 2, 2)))
    is_end_seen = rng.random() < 0.5
    if is_end_seen:
        history.look()
        assert history.wholes, "a save that has ended is whole"
    if rng.random() < 0.5:
        history.write_again(is_end_seen=is_end_seen)
    return history


@pytest.mark.timeout(LIMIT_SECONDS)
def test_nothing_mixed_is_whole(facts: dict[str, FileFacts]) -> None:
    wholes = sum(lived(seed, facts).wholes > 0 for seed in range(HISTORIES))
    assert wholes > HISTORIES / 2


def test_an_end_that_lay_there_before_is_waited_for(facts: dict[str, FileFacts]) -> None:
    """The mark of an older save, in a folder that the daemon found with it: only quiet time tells."""
    history = History(random.Random(1), facts)
    for path in (*RANDOM, TRAINER_STATE):
        history.files[path] = Written(0, False, 10**9)  # a clock that was set back since
    history.look()
    history.save(2)
    history.look()
    assert history.wholes == 0


def test_what_the_save_before_left_ends_no_other(facts: dict[str, FileFacts]) -> None:
    """Saved again into a sealed checkpoint: its old marks count for nothing, however long all is quiet."""
    history = History(random.Random(2), facts)
    history.save(2)
    before = {file.path: file.identity for file in history.listed().files}
    shards = [path for names in SHARDS for path in names]
    memory = Memory(
        shards={path: before[path] for path in shards},
        beside={path: before[path] for path in before if path not in shards},
    )
    history.now_ns += 10
    said: dict[str, str | None] = {}
    for paths in (shards, [RANDOM[0], TRAINER_STATE], [RANDOM[1]]):
        for _ in history.written(*paths):
            history.now_ns += 1
        context = Context(settle_seconds=5.0, quiet_seconds=59.0, is_in_flight=True, save_spread_seconds=60.0)
        verdict = judge(history.listed(), facts, memory, context)
        said[paths[-1]] = verdict.reason
    assert said == {
        shards[-1]: "trainer_state.json is of the save before",
        TRAINER_STATE: "rng_state_1.pth is of the save before",
        RANDOM[1]: None,
    }
