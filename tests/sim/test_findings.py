"""What the simulation found in ckptd, each by itself: on its disk, the power cut right after the call."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files, names
from ckptd.cli.daemon.wait import judge_step
from ckptd.core.model.decision import Decision
from ckptd.core.model.records import ZERO, UploadState
from ckptd.daemon.health.checks import exit_code
from ckptd.daemon.health.drain import drained_words, unsent_here
from ckptd.daemon.health.status import job_status
from ckptd.daemon.intake.decisions import read_decisions, write_decision
from ckptd.daemon.job import make_state
from ckptd.errors import RemoteUnreachable, StorageError, TornArchiveError
from ckptd.observe.audit import Audit
from ckptd.storage.local import fs
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.sources import records_of
from tests.sim.decisions import HOUR_SECONDS
from tests.sim.kernel import Killed
from tests.sim.remotes import Client
from tests.sim.trainer import RANKS, SAVE_DIR, shards_of
from tests.sim.world import NAS, NAS_URL, STATE_DIR, World, job_config


@pytest.fixture
def world() -> Iterator[World]:
    """A node with a directory remote, before the daemon's first start."""
    made = World(1, job_config(((NAS, True, None),), None, "newest"))
    made.enter()
    made.kernel.mkdir(NAS_URL)
    flush(made, "/sim/nas")
    try:
        yield made
    finally:
        made.leave()


def flush(world: World, folder: str) -> None:
    fd = world.kernel.open(folder, os.O_RDONLY)
    world.kernel.fsync(fd)
    world.kernel.close(fd)


class Nothing(random.Random):
    """A power cut that keeps nothing that was not flushed."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 1.0

    def randint(self, a: int, b: int) -> int:
        return a


def cut_power(world: World) -> None:
    for disk in world.kernel.disks.values():
        disk.lose_power(Nothing())
    world.kernel.forget_processes()


def opened(world: World) -> int:
    return world.kernel.open(SAVE_DIR, os.O_RDONLY)


@pytest.mark.usefixtures("world")
def test_nothing_goes_by_the_real_clock() -> None:
    """A default is bound when its module is read: who takes a clock by one is given the simulated one."""
    real = (time.monotonic, time.time, time.sleep)
    modules = [module for name, module in sys.modules.items() if name.startswith("ckptd.")]
    classes = {c for module in modules for c in vars(module).values() if inspect.isclass(c)}
    takers = [c.__init__ for c in classes if inspect.isfunction(c.__init__)]
    assert len(takers) > 50
    late = [
        taker.__qualname__
        for taker in takers
        if any(
            value in real for value in (*(taker.__defaults__ or ()), *(taker.__kwdefaults__ or {}).values())
        )
    ]
    assert late == []


def test_decisions_outlive_a_power_cut(world: World) -> None:
    make_state(STATE_DIR, Path(SAVE_DIR), opened(world))
    write_decision(STATE_DIR, Decision(kind="pin", tag="global_step1", serial=1))
    cut_power(world)
    assert [decision.tag for decision in read_decisions(STATE_DIR)] == ["global_step1"]


def test_the_first_audit_line_outlives_a_power_cut(world: World) -> None:
    make_state(STATE_DIR, Path(SAVE_DIR), opened(world))
    Audit(STATE_DIR / "audit.jsonl").write("prune", tag="a", generation=1, form="zero", reason="r")
    cut_power(world)
    assert b'"prune"' in world.kernel.content_of(f"{STATE_DIR}/audit.jsonl")


@pytest.mark.parametrize("calls", range(1, 9))
@pytest.mark.parametrize("what", ["audit", "decision"])
def test_what_a_killed_process_made_is_flushed_before_the_next_relies_on_it(
    world: World, what: str, calls: int
) -> None:
    """Life 7204328: the audit file's name was flushed by whoever made the file, who was killed before."""
    kernel = world.kernel

    def write() -> None:
        make_state(STATE_DIR, Path(SAVE_DIR), opened(world))
        if what == "audit":
            Audit(STATE_DIR / "audit.jsonl").write("prune", tag="a", generation=1, form="zero", reason="r")
        else:
            write_decision(STATE_DIR, Decision(kind="pin", tag="global_step1", serial=1))

    kernel.ends_at = kernel.calls + calls
    with pytest.raises(Killed):
        write()
    kernel.forget_processes()
    write()
    cut_power(world)
    if what == "audit":
        assert b'"prune"' in kernel.content_of(f"{STATE_DIR}/audit.jsonl")
    else:
        assert [decision.tag for decision in read_decisions(STATE_DIR)] == ["global_step1"]


def test_what_a_prune_removed_stays_removed(world: World) -> None:
    """Half a checkpoint in the trash would look like one that nobody meant to remove."""
    save_dir = opened(world)
    trash = fs.ensure_ours(save_dir, fs.TRASH)
    folder = files.open_dir_beneath(trash, "global_step1.aa", create_mode=0o755)
    for name in ("one", "two"):
        files.write_atomic(folder, name, b"x")
    files.fsync_dir(trash)
    with pytest.raises(StorageError, match="no part of what was committed"):
        fs.finish_deletion(trash, "global_step1.aa", ())
    files.remove_file(folder, "one")
    files.remove_file(folder, "two")
    fs.finish_deletion(trash, "global_step1.aa", ())
    cut_power(world)
    assert fs.trash_names(opened(world)) == []


@pytest.mark.parametrize("calls", range(1, 12))
def test_a_commit_that_a_killed_process_made_is_flushed_before_it_counts(world: World, calls: int) -> None:
    """Killed anywhere while it was created; found by the next process, which says that it is there."""
    key = "_ckptd/commits/global_step1~g1~zero.json"
    kernel = world.kernel
    kernel.ends_at = kernel.calls + calls
    with contextlib.suppress(Killed):
        DirectoryStore(NAS_URL).put_if_absent(key, b"{}")
    kernel.forget_processes()
    store = DirectoryStore(NAS_URL)
    is_found = store.get(key) is not None
    if is_found:
        store.flush_name(key)
    cut_power(world)
    assert (DirectoryStore(NAS_URL).get(key) is not None) or not is_found


def test_what_proving_our_rights_left_is_swept(world: World) -> None:
    save_dir = opened(world)
    for place in (fs.TRASH, fs.STAGING):
        fd = fs.ensure_ours(save_dir, place)
        world.kernel.mkdir(f"{names.TEMPORARY_PREFIX}aa", dir_fd=fd)
        files.write_atomic(fd, f"{names.TEMPORARY_PREFIX}bb", b"")
    fs.empty_our_trash(save_dir)
    assert fs.trash_names(save_dir) == fs.names_in(save_dir, fs.STAGING) == []


def test_a_shard_whose_first_block_a_power_cut_took_is_no_side_file(world: World) -> None:
    """Without its magic it was read as a file that has no CRCs, and uploaded."""
    name = "mp_rank_00_model_states.pt"
    whole = shards_of(1, 1)[name]
    world.kernel.actor = "trainer"
    for head, wanted in ((b"", True), (bytes(4096), False)):
        fd = world.kernel.open(f"{SAVE_DIR}/{name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        world.kernel.write(fd, head + whole[len(head) :])
        if wanted:
            assert records_of(fd, name, is_shard=True)
        else:
            with pytest.raises(TornArchiveError):
                records_of(fd, name, is_shard=True)


def test_a_shard_whose_last_bytes_a_power_cut_zeroed_is_torn(world: World) -> None:
    """Its end record named no records: taken for the zip of something else, it was committed (P4)."""
    rng = random.Random(0)
    saved(world, 1)
    world.live_on(100, rng)
    saved(world, 2)
    path = f"{SAVE_DIR}/global_step2/mp_rank_00_model_states.pt"
    whole = bytes(world.kernel.content_of(path))
    left = whole.rindex(b"PK\x05\x06") + 8
    world.kernel.actor = "trainer"
    fd = world.kernel.open(path, os.O_WRONLY)
    world.kernel.pwrite(fd, bytes(len(whole) - left), left)
    world.kernel.close(fd)
    world.kernel.actor = "ckptd"
    world.live_on(100, rng)
    saved(world, 3)
    world.live_on(100, rng)
    assert [live.tag for live in world.judge.live(NAS)] == ["global_step1", "global_step3"]


def test_what_was_read_before_the_flush_is_read_again_after_a_power_cut(world: World) -> None:
    """The torn file has the identity of the whole one: the journal keeps facts of durable files alone."""
    world.trainer.begin(1, random.Random(0))
    world.trainer.end()
    rng = random.Random(0)

    def inspected() -> bool:
        state = world.job.state if world.job is not None else None
        return state is not None and bool(state.folders.facts.get("global_step1"))

    world.live_on(60, rng, inspected)
    assert inspected(), "it was looked at"
    assert world.job is not None
    assert world.job.state is not None
    listing = world.job.state.folders.listing
    assert listing is not None
    journal = world.job.state.journal
    assert [journal.facts(f.path, f.identity) for f in listing.folders[0].files] == [None] * 3
    world.live_on(60, rng)
    assert None not in [journal.facts(f.path, f.identity) for f in listing.folders[0].files]


def saved(world: World, *steps: int, torn: int | None = None) -> None:
    """Saves that no daemon saw; of the last only `latest` and a part are written."""
    for step in steps:
        world.kernel.now_seconds += 90
        world.trainer.begin(step, random.Random(step))
        world.trainer.end()
    if torn is not None:
        world.kernel.now_seconds += 90
        world.trainer.begin(torn, random.Random(4))
        while world.kernel.content_of(f"{SAVE_DIR}/latest") != f"global_step{torn}".encode():
            world.trainer.go_on(1)
        world.trainer.abort()


def lying_here(world: World) -> list[int]:
    return [save.step for save in world.trainer.saves if save.is_finished and world.is_intact(save)]


@pytest.fixture
def strict() -> Iterator[World]:
    """A node that keeps one checkpoint."""
    made = World(1, job_config(((NAS, True, None),), 1, "all"))
    made.enter()
    made.kernel.mkdir(NAS_URL)
    flush(made, "/sim/nas")
    try:
        yield made
    finally:
        made.leave()


@pytest.mark.parametrize(
    ("steps", "torn", "stay"), [((4, 3), 5, {4, 3}), ((3, 2), 1, {3, 2}), ((5, 7, 2, 3), 9, {7, 3})]
)
def test_saves_found_at_once_stay_until_the_next_one_says_which_is_newer(
    strict: World, steps: tuple[int, ...], torn: int, stay: set[int]
) -> None:
    """Lives 81287 and 81694: the run was rewound behind the daemon's back, and `latest` names a torn save.

    The one of the higher step was taken for the newest, and the newest was pruned.
    """
    saved(strict, *steps, torn=torn)
    strict.live_on(300, random.Random(1), strict.has_rested)
    assert set(lying_here(strict)) == stay, "either may be the newest"
    saved(strict, 10)
    strict.live_on(300, random.Random(1))
    assert lying_here(strict) == [10]


def test_what_was_doubted_is_doubted_after_a_restart(strict: World) -> None:
    """Life 81851: the newest of three is torn by its next save, and only the journal knows of the doubt."""
    saved(strict, 5, 2, 1)
    strict.live_on(300, random.Random(1), strict.has_rested)
    assert 1 in lying_here(strict)
    strict.trainer.begin(1, random.Random(1), tag="global_step1")
    strict.trainer.go_on(3)
    strict.kill()
    strict.trainer.abort()
    strict.live_on(300, random.Random(1), strict.has_rested)
    assert 2 in lying_here(strict)


def test_saves_found_at_once_in_the_order_of_their_steps_are_pruned(strict: World) -> None:
    """Nothing contradicts: a daemon that was down for a weekend makes room at once."""
    saved(strict, 1, 2, 3)
    strict.live_on(300, random.Random(1))
    assert lying_here(strict) == [3]


def test_a_rewind_that_was_seen_needs_no_clock(strict: World) -> None:
    """The clock is set back by a day as well; what the daemon saw happen is no matter of times."""
    saved(strict, 5)
    strict.live_on(100, random.Random(1))
    strict.kernel.wall_offset_seconds -= 86400.0
    saved(strict, 2)
    strict.live_on(300, random.Random(1))
    assert lying_here(strict) == [5, 2], "what is ahead of the rewound run stays until that has passed it"
    saved(strict, 6)
    strict.live_on(300, random.Random(1))
    assert lying_here(strict) == [6]


def test_transfers_and_conversions_make_way_for_a_save_in_flight(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I/O priorities do nothing on NVMe: what is under way gets a tenth until the save is there (H34)."""
    told: list[float] = []
    real = Client.pace

    def pace(client: Client, fraction: float, bytes_per_second: int | None) -> None:
        told.append(fraction)
        real(client, fraction, bytes_per_second)

    monkeypatch.setattr(Client, "pace", pace)
    rng = random.Random(0)
    saved(world, 1)
    world.live_on(100, rng)
    assert (told or [1.0])[-1] == 1.0
    assert not is_paused(world)
    world.trainer.begin(2, rng)
    world.trainer.go_on(4)
    world.live_on(20, rng)
    assert told[-1] <= 0.1
    assert is_paused(world)
    assert world.job is not None
    assert job_status(world.job).making_way
    world.trainer.end()
    world.live_on(100, rng)
    assert told[-1] == 1.0
    assert not is_paused(world)
    assert not job_status(world.job).making_way


def test_all_jobs_of_a_disk_make_way_at_the_first_event(world: World) -> None:
    """No look is waited for, and none of a job that works for another save_dir on that disk."""
    saved(world, 1)
    rng = random.Random(0)
    world.live_on(100, rng)
    assert world.hint is not None
    world.hint(is_writing=False)
    world.take_posts()
    assert not is_paused(world)
    world.hint(is_writing=True)
    world.take_posts()
    assert is_paused(world)
    world.live_on(20, rng)
    assert not is_paused(world), "what was written was no save"
    assert (
        world.job is not None and world.job.state is not None and world.job.state.folders.listing is not None
    )
    way, disk = world.limits.disk_yield, world.job.state.folders.listing.device
    neighbour, elsewhere = Neighbour(), Neighbour()
    way.join(neighbour, disk, lambda: None)
    way.join(elsewhere, disk + 1, lambda: None)
    way.set_saving(elsewhere, is_saving=True)
    assert not is_paused(world)
    way.set_saving(neighbour, is_saving=True)
    assert is_paused(world)
    world.live_on(20, rng)
    assert is_paused(world), "a turn without a save of its own forgot the neighbour's"
    way.leave(neighbour)
    assert not is_paused(world)


def test_a_folder_that_came_is_made_way_for_before_it_has_a_shard(world: World) -> None:
    """Hugging Face makes `checkpoint-N`, writes the model, then the shards: only the folder was heard."""
    saved(world, 1)
    rng = random.Random(0)
    world.live_on(100, rng)
    assert world.hint is not None
    world.kernel.actor = "trainer"
    world.kernel.mkdir(f"{SAVE_DIR}/checkpoint-2")
    world.kernel.actor = "ckptd"
    world.hint(is_writing=True)
    for _ in range(10):
        world.turn()
        assert is_paused(world)
        world.kernel.now_seconds += 0.5
    assert "checkpoint-2" in followed(world)
    world.live_on(30, rng)
    assert not is_paused(world), "nothing came of it"
    world.live_on(60, rng)
    assert "checkpoint-2" not in followed(world)


def test_a_log_in_a_checkpoint_holds_nobody_up(world: World) -> None:
    """An evaluation that writes into the newest one ten times a second, for as long as it likes."""
    saved(world, 1)
    rng = random.Random(0)
    world.live_on(100, rng)
    assert world.hint is not None
    paused = 0
    for _ in range(300):
        world.hint(is_writing=True)
        world.turn()
        paused += is_paused(world)
        world.kernel.now_seconds += 0.1
    assert 0 < paused < 60


def test_what_never_settles_is_not_made_way_for_for_ever(world: World) -> None:
    """Nor is a job whose turns fail."""
    saved(world, 1)
    rng = random.Random(0)
    world.live_on(100, rng)
    assert world.job is not None
    assert world.job.state is not None
    assert world.job.state.folders.listing is not None
    way, disk = world.limits.disk_yield, world.job.state.folders.listing.device
    neighbour = Neighbour()
    way.join(neighbour, disk, lambda: None)
    way.set_saving(neighbour, is_saving=True)
    world.live_on(20, rng)
    assert is_paused(world)
    world.kernel.now_seconds += 3600
    world.live_on(20, rng)
    assert not is_paused(world)
    way.set_saving(world.job, is_saving=True)
    assert way.is_saving(world.job)
    world.job.leave_line()
    assert not way.is_saving(world.job)


def followed(world: World) -> list[str]:
    """Folders in which writes are heard."""
    assert world.job is not None
    return world.job._save_detector.newcomers(world.kernel.now_seconds)


class Neighbour:
    """Another job of this daemon, of which nothing is known yet."""

    state = view = None


def is_paused(world: World) -> bool:
    """Conversions of the job wait."""
    assert world.job is not None
    return world.job.local_actions.signals.pause.is_set()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_hold_outlives_its_folder_and_the_journal(world: World, is_known: bool) -> None:
    """Rotated by the trainer before it was sent; the clones are all that is left of it."""
    rng = random.Random(0)
    saved(world, 1)
    world.live_on(60, rng)
    world.set_mood(NAS, "down")
    saved(world, 2)
    world.live_on(100, rng, lambda: bool(holds(world)))
    (name,) = [name for name in holds(world) if not name.endswith(".json")]
    saved(world, 3)
    world.trainer.rotate(1)
    world.live_on(5, rng)
    world.kill()
    world.kernel.actor = "trainer"
    if not is_known:
        world.kernel.unlink(f"{STATE_DIR}/journal.db")
    world.kernel.actor = "ckptd"
    assert name in holds(world)
    world.set_mood(NAS, "ok")
    world.live_on(200, rng)
    assert [save.number for save in world.trainer.saves if world.judge.holds(NAS, save)] == [1, 2, 3]
    assert holds(world) == []


def holds(world: World) -> list[str]:
    try:
        return world.kernel.listdir(f"{SAVE_DIR}/_ckptd/hold")
    except FileNotFoundError:
        return []


def test_a_hold_that_was_made_and_not_noted_is_kept(world: World) -> None:
    """Killed between the last rename and the journal: the trainer removed the folder meanwhile."""
    rng = random.Random(0)
    saved(world, 1)
    world.live_on(60, rng)
    world.set_mood(NAS, "down")
    saved(world, 2)
    for _ in range(3000):
        if any(name.endswith(".2") for name in holds(world)) or not world.move(rng):
            break
        world.kernel.now_seconds += 0.05
    world.kill()
    assert [name for name in holds(world) if name.endswith(".2")]
    saved(world, 3)
    world.trainer.rotate(1)
    world.set_mood(NAS, "ok")
    world.live_on(200, rng)
    assert [save.number for save in world.trainer.saves if world.judge.holds(NAS, save)] == [1, 2, 3]


def test_a_hold_that_was_cut_short_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it was written down what the hold is of."""
    rng = random.Random(0)
    saved(world, 1)
    world.live_on(60, rng)
    world.set_mood(NAS, "down")
    kernel, real = world.kernel, world.kernel.call
    died: list[str] = []

    def call(name: str, path: str) -> None:
        if f"_ckptd/hold/{names.TEMPORARY_PREFIX}" in path and name == "rename" and not died:
            died.append(path)
            kernel.ends_at = kernel.calls + 1
        real(name, path)

    monkeypatch.setattr(kernel, "call", call)
    saved(world, 2)
    world.live_on(30, rng, lambda: bool(died))
    assert died
    assert [name for name in holds(world) if name.startswith(names.TEMPORARY_PREFIX)]
    world.set_mood(NAS, "ok")
    world.live_on(100, rng)
    assert holds(world) == []


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_hold_that_a_power_cut_brought_back_is_of_no_other_save(world: World, is_torn: bool) -> None:
    """Life 604608: committed and let go, saved over, the journal lost. In the new one the second save has the
    number of the first, so the name of its hold: it was sent from there, without end, and nothing was told.
    """
    rng, kernel = random.Random(0), world.kernel
    saved(world, 1)
    world.live_on(60, rng)
    assert world.judge.holds(NAS, world.trainer.saves[0])
    assert holds(world) == []
    world.kill()
    kernel.actor = "trainer"
    kernel.unlink(f"{STATE_DIR}/journal.db")
    kernel.actor = "ckptd"
    saved(world, 1)
    world.live_on(60, rng, lambda: bool(orders(world)))
    world.kill()
    cut_power(world)
    assert sorted(holds(world)) == ["global_step1.1", "global_step1.1.json"]
    if is_torn:  # a disk may keep that its files were removed, and not that it was renamed before
        kernel.actor = "judge"
        for name in kernel.listdir(f"{SAVE_DIR}/_ckptd/hold/global_step1.1"):
            kernel.unlink(f"{SAVE_DIR}/_ckptd/hold/global_step1.1/{name}")
        kernel.actor = "ckptd"
    world.live_on(200, rng)
    assert world.judge.holds(NAS, world.trainer.saves[1])
    assert holds(world) == []


def test_a_hold_of_a_lost_journal_is_not_sent_as_the_next_save_of_its_tag(strict: World) -> None:
    """Life 610615: held, not sent, the journal lost; saved over before it was sealed anew, and killed before
    that was held. The first save's bytes were committed as the second's, which then left the node.
    """
    rng, kernel = random.Random(0), strict.kernel
    saved(strict, 1)
    strict.live_on(60, rng, lambda: "global_step1.1" in holds(strict))
    strict.set_mood(NAS, "down")
    strict.kill()
    kernel.actor = "trainer"
    kernel.unlink(f"{STATE_DIR}/journal.db")
    kernel.actor = "ckptd"
    strict.live_on(60, rng)
    assert orders(strict) == {}, "nothing is sealed before the remote was heard"
    saved(strict, 1)
    strict.set_mood(NAS, "ok")
    strict.live_on(100, rng, lambda: bool(orders(strict)))
    strict.kill()
    assert "global_step1.1" in holds(strict)
    strict.live_on(200, rng)
    assert strict.judge.holds(NAS, strict.trainer.saves[0]), "its only copy is sent as a save of its own"
    assert strict.judge.holds(NAS, strict.trainer.saves[1])
    saved(strict, 2)
    strict.live_on(200, rng)
    assert lying_here(strict) == [2]
    assert holds(strict) == []


def lost(world: World, rng: random.Random) -> bytes:
    """A save that is held and not sent; its journal is lost. The bytes of what lies beside its hold."""
    kernel = world.kernel
    saved(world, 1)
    world.live_on(60, rng)
    world.set_mood(NAS, "down")
    saved(world, 2)
    world.live_on(100, rng, lambda: "global_step2.2" in holds(world))
    world.kill()
    kernel.actor = "trainer"
    kernel.unlink(f"{STATE_DIR}/journal.db")
    kernel.actor = "ckptd"
    return kernel.content_of(f"{SAVE_DIR}/_ckptd/hold/global_step2.2.json")


def test_a_hold_of_a_lost_journal_is_a_save_of_its_own_when_its_tag_was_saved_again(world: World) -> None:
    """It was left where it lay for as long as the later save of its tag was here, and nothing was told."""
    rng = random.Random(0)
    lost(world, rng)
    world.live_on(30, rng)
    saved(world, 2)
    world.set_mood(NAS, "ok")
    world.live_on(200, rng)
    first, second = (save for save in world.trainer.saves if save.step == 2)
    assert world.judge.holds(NAS, first)
    assert world.judge.holds(NAS, second)
    assert max(orders(world).items(), key=lambda row: row[1])[0] == "global_step2"
    assert world.is_intact(second)
    assert holds(world) == []


def test_a_hold_whose_folder_goes_before_it_is_sealed_anew_is_sent_without_a_restart(world: World) -> None:
    rng = random.Random(0)
    lost(world, rng)
    world.live_on(30, rng)
    saved(world, 3)
    world.trainer.rotate(1)
    world.set_mood(NAS, "ok")
    world.live_on(200, rng)
    assert [save.number for save in world.trainer.saves if world.judge.holds(NAS, save)] == [1, 2, 3]


@pytest.mark.parametrize("lacks", ["about", "shard"])
def test_a_hold_that_nobody_can_tell_the_worth_of_stays_and_is_told(world: World, lacks: str) -> None:
    """Its name was the next save's, whose hold went over it."""
    rng, kernel = random.Random(0), world.kernel
    lost(world, rng)
    place = f"{SAVE_DIR}/_ckptd/hold/global_step2.2"
    kernel.actor = "judge"
    left = sorted(kernel.listdir(place))
    if lacks == "shard":
        kernel.unlink(f"{place}/{left.pop()}")
    else:
        kernel.unlink(f"{place}.json")
    kernel.actor = "ckptd"
    saved(world, 2)
    world.set_mood(NAS, "ok")
    world.live_on(200, rng)
    (stray,) = [name for name in holds(world) if not name.endswith(".json")]
    assert sorted(kernel.listdir(f"{SAVE_DIR}/_ckptd/hold/{stray}")) == left
    assert world.job is not None
    (told,) = [p for p in world.job.problems.all() if p.code == "incomplete-save"]
    assert stray in told.text
    assert f"rm -r {SAVE_DIR}/_ckptd/hold/{stray}" in told.next_step
    assert world.judge.holds(NAS, world.trainer.saves[-1])


def dropped(world: World, path: str, data: bytes, *, is_open: bool = False) -> int:
    """A user puts a file into save_dir, and may go on writing it."""
    kernel = world.kernel
    kernel.actor = "trainer"
    fd = kernel.open(f"{SAVE_DIR}/{path}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    kernel.write(fd, data)
    if not is_open:
        kernel.close(fd)
    kernel.actor = "ckptd"
    return fd


def beside(world: World, tag: str) -> list[str]:
    """SUPPLEMENTs of a tag on the NAS."""
    held = world.judge._remotes[NAS]()
    return sorted(key.rsplit("/", 1)[1] for key in held if "/commits/" in key and f"{tag}~g1~zero~x" in key)


def test_what_came_late_is_committed_beside_and_the_folder_goes(strict: World) -> None:
    rng = random.Random(0)
    saved(strict, 1)
    strict.live_on(60, rng)
    dropped(strict, "global_step1/notes.txt", b"loss looks fine")
    dropped(strict, "global_step1/README.md", b"")
    strict.live_on(60, rng)
    assert beside(strict, "global_step1") == ["global_step1~g1~zero~x1.json"]
    held = strict.judge._remotes[NAS]()
    assert held["global_step1/notes.txt"][1] == b"loss looks fine"
    saved(strict, 2)
    strict.live_on(200, rng)
    assert lying_here(strict) == [2]
    assert not strict.trainer_has("global_step1")


def test_a_late_file_that_changes_keeps_its_folder_until_it_rests(strict: World) -> None:
    """Its first content is committed already: the second lies beside it, never over it."""
    rng = random.Random(0)
    saved(strict, 1)
    strict.live_on(60, rng)
    dropped(strict, "global_step1/notes.txt", b"one")
    strict.live_on(60, rng)
    saved(strict, 2)
    for text in (b"two", b"three", b"four"):
        dropped(strict, "global_step1/notes.txt", text)
        strict.live_on(4, rng)
        assert strict.trainer_has("global_step1")
    strict.live_on(300, rng)
    held = strict.judge._remotes[NAS]()
    assert not strict.trainer_has("global_step1")
    assert held["global_step1/notes.txt"][1] == b"one"
    assert b"four" in [data for key, (_, data) in held.items() if "/_late/" in key]
    assert beside(strict, "global_step1")[:2] == [f"global_step1~g1~zero~x{k}.json" for k in (1, 2)]


def test_what_came_late_is_known_when_the_journal_is_lost(strict: World) -> None:
    rng = random.Random(0)
    saved(strict, 1)
    strict.live_on(60, rng)
    dropped(strict, "global_step1/notes.txt", b"one")
    strict.live_on(60, rng)
    strict.kill()
    strict.kernel.actor = "trainer"
    strict.kernel.unlink(f"{STATE_DIR}/journal.db")
    strict.kernel.actor = "ckptd"
    strict.live_on(100, rng)
    saved(strict, 2)
    strict.live_on(200, rng)
    assert beside(strict, "global_step1") == ["global_step1~g1~zero~x1.json"], "nothing is sent again"
    assert not strict.trainer_has("global_step1")


def test_a_note_makes_no_save_of_ours_of_what_was_found() -> None:
    """A README that was sealed with shards found at the first start is written again: they stay (P5)."""
    made, rng = World(1, job_config(((NAS, True, None),), 1, "newest")), random.Random(0)
    made.enter()
    try:
        made.kernel.mkdir(NAS_URL)
        flush(made, "/sim/nas")
        saved(made, 1)
        dropped(made, "global_step1/README.md", b"one")
        made.live_on(60, rng)
        dropped(made, "global_step1/README.md", b"two")
        made.live_on(60, rng)
        for step in (2, 3):
            saved(made, step)
            made.live_on(200, rng)
        assert not made.trainer_has("global_step2"), "the limit is kept among what is ours"
        assert made.trainer_has("global_step1")
    finally:
        made.leave()


def test_a_hold_of_a_lost_journal_makes_no_save_of_ours_of_what_was_found() -> None:
    """Life 7101857: its README is written over and the journal lost, before what was found is committed.

    The hold was taken for an older save of the tag, and what lay in the folder for a later one.
    """
    made, rng = World(1, job_config(((NAS, True, None),), 1, "newest")), random.Random(0)
    made.enter()
    try:
        made.kernel.mkdir(NAS_URL)
        flush(made, "/sim/nas")
        saved(made, 1)
        dropped(made, "global_step1/README.md", b"one")
        made.live_on(100, rng, lambda: "global_step1.1" in holds(made))
        made.set_mood(NAS, "down")
        dropped(made, "global_step1/README.md", b"two")
        made.kill()
        made.kernel.actor = "trainer"
        made.kernel.unlink(f"{STATE_DIR}/journal.db")
        made.kernel.actor = "ckptd"
        made.live_on(60, rng)
        made.set_mood(NAS, "ok")
        for step in (2, 3):
            saved(made, step)
            made.live_on(200, rng)
        assert not made.trainer_has("global_step2"), "the limit is kept among what is ours"
        assert made.trainer_has("global_step1")
    finally:
        made.leave()


def test_a_note_in_an_older_one_that_is_not_committed_is_no_rewind() -> None:
    """README.md, sealed with its shards, is written over while the remote is away: the order stays (P9)."""
    made, rng = World(1, job_config(((NAS, True, None),), None, "newest")), random.Random(0)
    made.enter()
    try:
        made.kernel.mkdir(NAS_URL)
        flush(made, "/sim/nas")
        saved(made, 1)
        made.live_on(100, rng)
        made.set_mood(NAS, "down")
        saved(made, 2)
        dropped(made, "global_step2/README.md", b"one")
        made.live_on(100, rng)
        saved(made, 3)
        made.live_on(100, rng)
        before = orders(made)
        assert before == {f"global_step{step}": (1, step) for step in (1, 2, 3)}
        dropped(made, "global_step2/README.md", b"two")
        made.live_on(100, rng)
        assert orders(made) == before
    finally:
        made.leave()


def test_an_older_one_that_a_note_held_up_is_no_rewind() -> None:
    """Life 810958: of two saves found at once the older is sealed last, since somebody writes to it.

    It counted as the newest, and `resume` would have taken it.
    """
    made, rng = World(1, job_config(((NAS, True, None),), None, "all")), random.Random(0)
    made.enter()
    try:
        made.kernel.mkdir(NAS_URL)
        flush(made, "/sim/nas")
        saved(made, 1)
        made.live_on(100, rng)
        made.kill()
        saved(made, 8, 10)
        made.live_on(2, rng)
        for line in range(20):
            dropped(made, "global_step8/README.md", b"line %d" % line)
            made.live_on(2, rng)
        assert "global_step8" not in orders(made)
        assert orders(made)["global_step10"] == (1, 10)
        made.live_on(200, rng)
        assert orders(made) == {f"global_step{step}": (1, step) for step in (1, 8, 10)}
    finally:
        made.leave()


def test_an_older_one_that_two_others_passed_goes_before_both() -> None:
    """Life 5002663: it went between the two, and a limit of three deleted the one that it had overtaken."""
    made, rng = World(1, job_config(((NAS, True, None),), 3, "all")), random.Random(0)
    made.enter()
    try:
        made.kernel.mkdir(NAS_URL)
        flush(made, "/sim/nas")
        saved(made, 2)
        made.live_on(100, rng)
        made.kill()
        saved(made, 1, 4)
        made.live_on(2, rng)
        saved(made, 2)
        for line in range(20):
            dropped(made, "global_step1/README.md", b"line %d" % line)
            made.live_on(2, rng)
        assert orders(made) == {"global_step4": (1, 4), "global_step2": (2, 2)}
        made.live_on(200, rng)
        assert orders(made) == {"global_step1": (1, 1), "global_step4": (1, 4), "global_step2": (2, 2)}
        saved(made, 5)
        made.live_on(200, rng)
        folders = {name for name in made.kernel.listdir(SAVE_DIR) if name.startswith("global_step")}
        assert folders == {"global_step4", "global_step2", "global_step5"}
    finally:
        made.leave()


@pytest.mark.parametrize("late", ["global_step4", "global_step5"])
def test_an_older_one_that_the_disk_does_not_flush_at_once_is_no_rewind(
    monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Life 67, with the wait for older ones taken out: of the saves before a rewind one was sealed last,
    counted as one of the run since, and what the job file keeps was pruned."""
    made, rng = World(1, job_config(((NAS, True, None),), None, "all")), random.Random(0)
    made.enter()
    flushed = fs.flush
    refused: list[str] = []

    def flush_later(save_dir_fd: int, tag: str, paths: Any) -> None:
        if tag == late and not refused:
            refused.append(tag)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flushed(save_dir_fd, tag, paths)

    try:
        made.kernel.mkdir(NAS_URL)
        flush(made, "/sim/nas")
        saved(made, 1)
        made.live_on(100, rng)
        made.kill()
        monkeypatch.setattr(fs, "flush", flush_later)
        saved(made, 4, 5, 1)
        made.live_on(300, rng)
        assert refused == [late]
        assert orders(made) == {"global_step4": (1, 4), "global_step5": (1, 5), "global_step1": (2, 1)}
    finally:
        made.leave()


def test_a_remote_that_went_away_again_is_waited_for_when_the_journal_is_lost() -> None:
    """It was heard, and gone before anything was sealed: orders were not those in COMMITs, and the remote
    let go what lies here, which then stayed for ever (seed 601793)."""
    made, rng = World(1, job_config(((NAS, True, None),), None, "newest")), random.Random(0)
    made.enter()
    try:
        made.kernel.mkdir(NAS_URL)
        flush(made, "/sim/nas")
        saved(made, 7)
        made.live_on(60, rng)
        saved(made, 3)
        made.live_on(60, rng)
        before = orders(made)
        assert before == {"global_step7": (1, 7), "global_step3": (2, 3)}
        made.kill()
        made.kernel.actor = "trainer"
        made.kernel.unlink(f"{STATE_DIR}/journal.db")
        made.kernel.actor = "ckptd"
        made.live_on(60, rng, lambda: made.job is not None and made.job.sessions[NAS].observation is not None)
        made.set_mood(NAS, "down")
        assert made.job is not None
        assert made.job.sessions[NAS].observation is not None
        made.job.sessions[NAS].note_error(RemoteUnreachable("no answer"))
        assert orders(made) == {}
        made.live_on(100, rng)
        assert orders(made) == {}, "what the remote knows of them was not asked"
        made.set_mood(NAS, "ok")
        made.live_on(200, rng)
        assert orders(made) == before
        saved(made, 5)
        made.set_mood(NAS, "down")
        made.live_on(60, rng)
        assert orders(made) == before | {"global_step5": (2, 5)}, "the journal is whole: nobody is asked"
    finally:
        made.leave()


def test_what_was_found_is_old_whoever_seals_it() -> None:
    """Killed between the beginning of a new journal and the first seal: the next process knew no more that
    what lay there was found, and took an old save that no COMMIT lists for a rewind."""
    made, rng = World(1, job_config(((NAS, True, None),), None, "newest")), random.Random(0)
    made.enter()
    try:
        made.kernel.mkdir(NAS_URL)
        flush(made, "/sim/nas")
        for step in (5, 7):
            saved(made, step)
        made.live_on(100, rng)
        assert orders(made) == {"global_step5": (1, 5), "global_step7": (1, 7)}
        made.kill()
        made.kernel.actor = "trainer"
        made.kernel.unlink(f"{STATE_DIR}/journal.db")
        made.kernel.actor = "ckptd"
        made.set_mood(NAS, "down")
        made.live_on(60, rng)
        assert orders(made) == {}, "nothing is sealed before the remote was heard"
        made.kill()
        made.set_mood(NAS, "ok")
        made.live_on(100, rng)
        assert orders(made) == {"global_step5": (1, 5), "global_step7": (1, 7)}
    finally:
        made.leave()


def test_a_save_written_over_another_of_its_step_is_the_newer_one(world: World) -> None:
    """Life 7200337: each was found by a new journal, both had one order, and the later one was deleted."""
    rng = random.Random(0)
    saved(world, 3, 1)
    world.live_on(100, rng)
    world.kill()
    world.kernel.actor = "trainer"
    world.kernel.unlink(f"{STATE_DIR}/journal.db")
    saved(world, 1)
    world.live_on(200, rng)
    first, second = (save for save in world.trainer.saves if save.step == 1)
    order_of = {live.save: live.order for live in world.judge.live(NAS)}
    assert order_of[first.number] == (1, 1, 0)
    assert order_of[second.number] == (1, 1, 1)


def orders(world: World) -> dict[str, tuple[int, int]]:
    """(branch, step) of each save that was sealed."""
    rows = (
        world.job.state.saves.rows.values() if world.job is not None and world.job.state is not None else ()
    )
    return {row.save.tag: (row.save.branch, row.save.step) for row in rows}


def test_a_power_cut_after_quiet_hours_gives_no_hours_to_live(world: World) -> None:
    """Lives 801385, 801698, 801210 and 800171, no defect of ckptd: a power cut sets the machine's clock back,
    and the step went on until that clock said again what it had said; a daemon that slept from rescan to
    rescan all those hours counted as one that turns in circles.
    """
    rng = random.Random(0)
    saved(world, 1)
    world.live_on(60, rng)
    world.kernel.now_seconds += 9 * HOUR_SECONDS
    world.live_on(60, rng)
    saved(world, 2)
    world.is_power_cut = True
    world.kernel.ends_at = world.kernel.calls + 5
    before_seconds = world.judge.clock()
    world.live_on(30, rng)
    assert world.crashes == 1
    assert world.kernel.now_seconds < HOUR_SECONDS, "it was set back"
    assert world.judge.clock() - before_seconds < 60


def test_a_step_saved_again_is_at_risk_until_that_save_is_committed(world: World) -> None:
    """The run was rewound and is at step 3 again: the COMMIT of the first one says nothing of its weights."""
    rng = random.Random(0)
    for step in (1, 3):
        saved(world, step)
        world.live_on(100, rng)
    assert world.job is not None
    assert (job_status(world.job).state, job_status(world.job).steps_at_risk) == ("ok", 0)
    saved(world, 3)
    world.live_on(100, rng, until=lambda: is_sealed_again(world))
    told = job_status(world.job)
    assert told.safe is not None
    assert (told.safe.step, told.steps_at_risk) == (3, 2)
    assert judge_step(told, 3)[0] == "not yet"
    world.live_on(100, rng)
    done = job_status(world.job)
    assert (done.steps_at_risk, judge_step(done, 3)[0]) == (0, "committed")
    assert done.seconds_at_risk is not None
    assert told.seconds_at_risk is not None
    assert done.seconds_at_risk < told.seconds_at_risk + 100


def is_sealed_again(world: World) -> bool:
    assert world.job is not None
    assert world.job.state is not None
    row = world.job.state.saves.of_tag("global_step3")
    return row is not None and row.save.save_seq > 2


def test_of_an_old_save_dir_all_that_may_be_its_newest_is_committed(world: World) -> None:
    """Its run was rewound from 9 to 3 before the first start: 3 was never sent, and all said 0."""
    saved(world, 8, 9, 3)
    rng = random.Random(0)
    world.live_on(100, rng, until=lambda: is_committed_there(world, 9))
    assert world.job is not None
    assert judge_step(job_status(world.job), 3)[0] == "not yet"
    assert exit_code(world.job) == 3
    world.live_on(300, rng, world.has_rested)
    assert is_committed_there(world, 3)
    assert not is_committed_there(world, 8)
    done = job_status(world.job)
    assert (done.steps_at_risk, judge_step(done, 3)[0], exit_code(world.job)) == (0, "committed", 0)
    reasons = {one.step: one.reason for one in done.checkpoints}
    assert reasons[3] is None
    assert str(reasons[8]).startswith("there before ckptd: not uploaded")
    assert unsent_here(world.job) == ("global_step8",)
    world.job.control.begin_drain(60)
    world.live_on(20, rng)
    drain = job_status(world.job).drain
    assert drain is not None
    assert (drain.is_done, drain.unsent) == (True, ("global_step8",))
    assert drained_words([world.job]).endswith("but for 1 that were there before ckptd (not uploaded)")
    saved(world, 4)
    world.live_on(300, rng, world.has_rested)
    assert orders(world)["global_step4"] == (2, 4)


def is_committed_there(world: World, step: int) -> bool:
    state = world.job.state if world.job is not None else None
    row = state.saves.of_tag(f"global_step{step}") if state is not None else None
    return (
        state is not None
        and row is not None
        and state.uploads.record(row.id, NAS, ZERO).state is UploadState.COMMITTED
    )


class Alive(random.Random):
    """Another run that claims its turn and beats."""

    def random(self) -> float:
        return 0.1


@pytest.mark.parametrize("how", ["thin", "delete"])
def test_what_a_dead_trainer_left_is_no_part_of_another_run(how: str) -> None:
    """Life 4000710: before this run had an id, the heartbeat of another run's node made one rank of two look
    like a node's part; it was sealed, and `unuploaded` let it go though nobody had the other rank.
    """
    rng = random.Random(0)
    config = job_config(((NAS, True, None),), 1, "all", unuploaded=how)
    world = World(1, config)
    world.enter()
    try:
        world.kernel.mkdir(NAS_URL)
        flush(world, "/sim/nas")
        world.trainer.begin(1, rng)
        while len(world.trainer.saves) == 0 or len(world.trainer.saves[0].written) < RANKS:
            world.trainer.go_on(1)
        world.trainer.abort()
        world.live_on(5, rng)
        world.another_commits(Alive())
        world.live_on(100, rng)
        assert world.job is not None
        assert world.job.state is not None
        row = world.job.state.saves.of_tag("global_step1")
        assert row is not None, "it counts as a part until the run has an id"
        assert row.save.is_part
        world.another_ends()
        for step in (3, 4, 5):
            saved(world, step)
            world.live_on(400, rng)
        world.look()
        assert sorted(world.kernel.listdir(SAVE_DIR))[1:3] == ["global_step1", "global_step5"]
    finally:
        world.leave()
