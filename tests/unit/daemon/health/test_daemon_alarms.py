"""Early alarms: which rank's shard does not come, what holds retention up, and for how long it must (P17)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.base import files
from ckptd.base.humanize import size_of
from ckptd.base.identity import FolderIdentity
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, Verdict, judge
from ckptd.core.completeness.sealing import sealed_file
from ckptd.core.model.layouts import Trainer
from ckptd.core.model.listing import FolderListing, SaveDirListing
from ckptd.core.policy.blockers import LONG_SECONDS, SOON_SECONDS, blocked
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.core.policy.view import Disk, JobView, RemoteView
from ckptd.daemon.health import checks, stalls
from ckptd.daemon.health.stalls import removal, unfinished
from ckptd.daemon.state.local_saves import Quiet
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local.scan import scan
from tests.support.core_views import job_view, remote_commit, save_view, sealed
from tests.support.recover_scene import Scene
from tests.support.states import job_state

RANK1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


class Watched:
    """A save_dir with real shards, and what the daemon remembers of it; `quiet` since seconds ago."""

    def __init__(self, root: Path, *, quiet: float = 11.0, is_in_flight: bool = True) -> None:
        self.scene = Scene(root)
        self.quiet, self.is_in_flight = quiet, is_in_flight
        self.state = job_state(Journal(root / "journal.db"))
        job_file = Path("/jobs/run.toml")
        config = SimpleNamespace(name="run", settle_seconds=0.5, file=job_file, is_matched=False)
        config.save_dir = self.scene.save_dir
        self.job: Any = SimpleNamespace(
            config=config, problems=self.state.problems, node="node-7", view=None, phase="active"
        )

    def look(self) -> None:
        """List, inspect and judge every folder, as a turn does."""
        with files.opened_dir(self.scene.save_dir) as fd:
            self.state.folders.listing = listing = scan(fd)
        context = Context(
            settle_seconds=0.5,
            quiet_seconds=self.quiet,
            is_in_flight=self.is_in_flight,
            save_spread_seconds=60.0,
        )
        for folder in listing.folders:
            rows = inspect_files(self.scene.save_dir / folder.tag, [f.path for f in folder.files])
            facts = {row.path: row for row in rows}
            self.state.folders.facts[folder.tag] = facts
            self.state.folders.verdicts[folder.tag] = judge(folder, facts, None, context)
            # after the child that inspects: on a busy machine its start takes a second
            since = time.monotonic() - self.quiet
            self.state.folders.quiet[folder.tag] = Quiet(folder.digest, since, 0.0)

    def seal(self, tag: str, step: int) -> None:
        """As complete as it lies there."""
        assert self.state.folders.listing is not None
        folder = next(f for f in self.state.folders.listing.folders if f.tag == tag)
        facts, verdict = self.state.folders.facts[tag], self.state.folders.verdicts[tag]
        assert verdict.grid is not None
        assert verdict.window is not None
        changes = {
            "tag": tag,
            "files": tuple(sealed_file(f, facts[f.path], folder) for f in folder.own),
            "window": verdict.window,
        }
        save = sealed(step).model_copy(update=changes)
        self.state.journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
        self.state.load()

    def alarms(self) -> dict[str, str]:
        problems = self.state.problems
        problems.begin_turn()
        stalls.report_alarms(self.job, self.state)
        problems.end_turn()
        return {p.code: f"{p.text}; {p.next_step}" for p in problems.all()}


def listed(trainer: Trainer) -> SaveDirListing:
    """One folder of that trainer's."""
    where = FolderIdentity(dev=1, ino=2)
    folder = FolderListing(tag="checkpoint-4", folder=where, files=(), trainer=trainer)
    return SaveDirListing(device=1, folders=(folder,))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """One whole save, then one without rank 1's shard."""
    one = Watched(tmp_path)
    one.scene.save(5)
    one.look()
    one.seal("global_step5", 5)
    one.scene.save(10)
    (one.scene.save_dir / "global_step10" / RANK1).unlink()
    yield one
    one.state.journal.close()


def test_a_shard_that_does_not_come_names_its_rank_and_node(watched: Watched) -> None:
    watched.look()
    text = watched.alarms()["shard-missing"]
    assert text.startswith("global_step10: optimizer shard of rank 1 (zero_pp_rank_1_mp_rank_00")
    assert "in global_step5 node node-7 wrote it" in text
    (problem,) = watched.state.problems.all()
    assert (problem.severity, problem.lasting) == ("note", "attention"), (
        "a slow rank calls nobody for a minute"
    )


def test_ranks_may_lie_as_far_apart_as_they_ever_did(watched: Watched) -> None:
    """Ten seconds at least; then the turn that time alone will bring is waited for."""
    watched.quiet = 9.0
    watched.look()
    assert watched.alarms() == {}
    assert stalls.waits_for_alarm(watched.job, watched.state)
    watched.quiet, watched.state.saves.widest_save_seconds = 50.0, 30.0
    watched.look()
    assert watched.alarms() == {}
    watched.quiet = 61.0
    watched.look()
    assert "shard-missing" in watched.alarms()
    assert not stalls.waits_for_alarm(watched.job, watched.state)


def test_it_clears_when_the_shard_comes_or_a_later_save_is_whole(watched: Watched) -> None:
    watched.look()
    assert "shard-missing" in watched.alarms()
    watched.scene.save(15)
    watched.look()
    watched.seal("global_step15", 15)
    assert watched.alarms() == {}
    watched.scene.save(10)
    watched.look()
    assert watched.alarms() == {}


def test_two_saves_that_lack_the_same_shard_are_no_accident(watched: Watched) -> None:
    watched.scene.save(15)
    (watched.scene.save_dir / "global_step15" / RANK1).unlink()
    watched.look()
    assert "as in global_step10: it is never written" in watched.alarms()["shard-missing"]


def test_a_save_that_was_cut_short_is_counted_with_the_command_that_removes_it(watched: Watched) -> None:
    """Only once its writer is gone: what is in flight is no leftover."""
    watched.look()
    assert unfinished(watched.state) == {}
    watched.is_in_flight = False
    watched.look()
    lying = sum(p.stat().st_size for p in (watched.scene.save_dir / "global_step10").iterdir())
    assert lying > 0
    assert unfinished(watched.state) == {"global_step10": lying}
    assert removal(watched.job, "global_step10") == "ckptd gc /jobs/run.toml --incomplete global_step10"


OTHERS = (
    "_forget_vanished", "report_conversions", "report_unused_remotes", "_see_failures", "report_stalls",
    "see_outlook", "report_alarms", "report_waiting", "report_differing_nodes",
)  # fmt: skip


@pytest.fixture
def told(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """Code → text and next step of what a turn sees of saves and of the disk, without what others see."""
    for name in OTHERS:
        monkeypatch.setattr(checks, name, lambda *_: None)
    job = watched.job
    job.config.remotes = (SimpleNamespace(name="nas", required=True, forms=("zero",)),)
    job.known_saves = SimpleNamespace(has_heard_all=True, is_rebuilt=True)
    job.sessions, job.watcher, job.sealer = {}, None, SimpleNamespace(late=None)
    job.runs = SimpleNamespace(see_problems=lambda _: None)

    def seen() -> dict[str, str]:
        checks.report_problems(job, watched.state)
        return {p.code: f"{p.text}; {p.next_step}" for p in job.problems.all()}

    return seen


@pytest.mark.parametrize(
    ("state", "code", "cure"),
    [
        (State.INCOMPLETE, "incomplete-save", "ckptd resume moves it aside, {gc} removes it"),
        (
            State.TORN_RESAVE,
            "torn-save",
            "ckptd resume moves it aside, {gc} removes it; an older checkpoint is used",
        ),
        (
            State.SUSPECT,
            "suspect-save",
            "if it is one save: ckptd accept /jobs/run.toml global_step10; else ckptd resume moves it aside",
        ),
    ],
    ids=["incomplete", "torn", "suspect"],
)
def test_what_will_never_be_safe_is_told_with_its_bytes_and_a_command(
    watched: Watched, told: Callable[[], dict[str, str]], state: State, code: str, cure: str
) -> None:
    watched.is_in_flight = False
    watched.look()
    watched.state.folders.verdicts["global_step10"] = Verdict(state=state, reason="one is missing")
    lying = sum(p.stat().st_size for p in (watched.scene.save_dir / "global_step10").iterdir())
    cure = cure.format(gc="ckptd gc /jobs/run.toml --incomplete global_step10")
    assert told() == {code: f"global_step10: one is missing ({size_of(lying)}); {cure}"}


def test_a_short_disk_names_what_frees_how_much(watched: Watched, told: Callable[[], dict[str, str]]) -> None:
    """The command for what will never be safe, and its bytes; without such a save, what else helps."""
    watched.is_in_flight = False
    watched.look()
    short = Disk(free_bytes=2 * 10**9, reserve_bytes=5 * 10**9, can_clone=True)
    watched.job.view = job_view([], disk=short)
    lying = sum(p.stat().st_size for p in (watched.scene.save_dir / "global_step10").iterdir())
    text, rest = "2.0 GB free, the next save and min_free need 5.0 GB; ", "nothing uncommitted is deleted; "
    frees = f"ckptd gc /jobs/run.toml --incomplete global_step10 frees {size_of(lying)}; "
    assert told()["disk-low"] == f"{text}{frees}{rest}free space or save less often"
    watched.state.folders.verdicts["global_step10"] = Verdict(state=State.SUSPECT, reason="one is older")
    assert told()["disk-low"] == f"{text}{rest}free space or save less often", "`accept` frees nothing"
    watched.state.folders.verdicts.clear()
    assert told() == {"disk-low": f"{text}{rest}free space or save less often"}
    watched.job.view = job_view([], disk=replace(short, free_bytes=5 * 10**9))
    assert told() == {}


@pytest.mark.parametrize(
    ("waiting", "can_clone", "trainer", "has_lost_one", "is_told"),
    [
        (2, False, Trainer.HUGGINGFACE, False, True),
        (2, False, Trainer.DEEPSPEED, True, True),
        (2, False, Trainer.DEEPSPEED, False, False),
        (1, False, Trainer.HUGGINGFACE, False, False),
        (2, True, Trainer.HUGGINGFACE, False, False),
    ],
)
def test_a_trainer_that_may_outrun_the_upload_is_told_of_where_nothing_can_be_held(
    watched: Watched,
    told: Callable[[], dict[str, str]],
    waiting: int,
    can_clone: bool,
    trainer: Trainer,
    has_lost_one: bool,
    is_told: bool,
) -> None:
    """A trainer that rotates by itself removes the older of two before it was sent; DeepSpeed never does."""
    watched.state.folders.verdicts.clear()
    watched.state.holds.can_clone = can_clone
    watched.state.folders.listing = listed(trainer)
    if has_lost_one:
        row = next(iter(watched.state.saves.rows.values()))
        watched.state.journal.end_save(row.id, "vanished")
        watched.state.reload(row.id)
    saves = [save_view(n, sealed(n), committed=n > waiting) for n in (1, 2, 3)]
    watched.job.view = job_view(saves)
    text = f"{waiting} checkpoints wait and cannot be held: the trainer may outrun the upload; "
    cure = "raise the trainer's own limit, or use XFS or btrfs (clones)"
    assert told() == ({"trainer-may-outrun": text + cure} if is_told else {})


# --- retention ---------------------------------------------------------------------------------------------


def three(**changes: Any) -> JobView:
    """Two of three may go, and every COMMIT is confirmed."""
    return job_view([save_view(n, sealed(n)) for n in (1, 2, 3)], **changes)


def why(view: JobView) -> str:
    found = blocked(view, plan(view).local_verdicts)
    return f"{found.text}; {found.next_step}; {found.patience_seconds:.0f}" if found else ""


def away(view: JobView) -> JobView:
    return replace(view, remotes=tuple(replace(r, is_attached=False) for r in view.remotes))


@pytest.mark.parametrize(
    ("view", "words", "patience"),
    [
        (away(three()), "required remote nas is not attached", SOON_SECONDS),
        (
            three(is_save_in_flight=True),
            "nothing is removed during one; they are deleted in the next pause",
            LONG_SECONDS,
        ),
        (three(deletions_left=0), "allowed in an hour", SOON_SECONDS),
        (three(may_delete=False), "may not delete", SOON_SECONDS),
        (three(is_paused=True), "paused", SOON_SECONDS),
        (three(confirmations={}), "not confirmed by every required remote", SOON_SECONDS),
    ],
)
def test_what_is_in_the_way_of_retention_is_said(view: JobView, words: str, patience: float) -> None:
    found = why(view)
    assert found.startswith("s1b1 may be deleted and stays (with 1 more): ")
    assert words in found
    assert found.endswith(f"; {patience:.0f}")


def test_one_that_could_not_be_removed_holds_up_no_other() -> None:
    """It is left alone for a while, and has a problem of its own; nothing is asked for it meanwhile."""
    view = three(not_to_delete=frozenset({1}), confirmations={})
    assert why(view).startswith("s2b1 may be deleted and stays: ")
    assert [getattr(a, "save_id", 0) for a in plan(view).actions] == [2]
    assert why(three(not_to_delete=frozenset({1, 2}))) == ""


def test_delete_waits_for_no_remote() -> None:
    """But for one that did not answer since the start: its pins are not known."""
    view = away(three(unuploaded="delete", confirmations={}))
    assert why(view) == ""
    silent = replace(view, remotes=(replace(view.remotes[0], was_heard=False),))
    assert "required remote nas did not answer since the start" in why(silent)


def test_nothing_is_in_the_way_where_nothing_may_go() -> None:
    roomy = RetentionPolicy(save_total_limit=3)
    assert why(three(local_retention=roomy)) == ""


def test_on_a_short_disk_every_reason_is_counted() -> None:
    saves = [
        save_view(1, sealed(1), is_adopted=False),
        save_view(2, sealed(2), is_pinned=True),
        save_view(3, sealed(3)),
        save_view(4, sealed(4), committed=False),
        save_view(5, sealed(5), committed=False),
        save_view(6, sealed(6), has_unlisted=("notes.txt",)),
    ]
    short = Disk(free_bytes=0, reserve_bytes=1000, can_clone=False)
    found = why(
        job_view(saves, disk=short, local_retention=RetentionPolicy(save_total_limit=2, keep_steps=(3,)))
    )
    for words in (
        "2 not committed yet",
        "1 pinned",
        "1 there before ckptd",
        "1 with files that no COMMIT lists",
        "1 within the policy",
    ):
        assert words in found


def test_a_remote_whose_seat_belt_holds_retention_up_is_named(watched: Watched) -> None:
    """A note: what would go for two minutes, and may not before the hour is over."""
    watched.state.folders.verdicts.clear()
    view = job_view([save_view(3, sealed(3))])
    commits = tuple(remote_commit(sealed(step)) for step in (1, 2, 3))
    nas = replace(view.remotes[0], commits=commits, retention=RetentionPolicy(save_total_limit=1))
    full = replace(nas, deletions_left=0)

    def said(remote: RemoteView, since_seconds: float) -> str:
        due = {("nas", c.key): since_seconds for c in commits[:2]}
        now = replace(view, remotes=(remote,), due_since_seconds=due, now_seconds=1000.0)
        watched.job.view, watched.state.plan = now, plan(now)
        return watched.alarms().get("retention-blocked", "")

    found = said(full, 880.0)
    assert found.startswith(
        "s1b1 may be deleted from nas and stays (with 1 more): as many as are allowed in an hour"
    )
    assert [(p.about, p.lasting) for p in watched.state.problems.all()] == [("nas", "note")]
    assert said(full, 881.0) == ""
    assert said(nas, 0.0) == ""
    assert said(replace(full, is_attached=False), 0.0) == ""
    watched.state.plan = None


def test_it_is_said_once_it_has_lasted(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same thing for its whole patience; another thing, or nothing, begins anew."""
    watched.state.folders.verdicts.clear()
    state, now = watched.state, time.monotonic()
    state.is_first_scan = False

    def at(seconds: float, view: JobView) -> bool:
        monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
        watched.job.view, state.plan = view, plan(view)
        watched.alarms()
        return "attention" in {p.severity for p in watched.state.problems.all()}

    missing, busy = away(three()), three(is_save_in_flight=True)
    assert not at(0, missing)
    assert not at(119, missing)
    assert at(121, missing)
    assert not at(122, busy)
    (note,) = watched.state.problems.all()
    assert (note.code, note.severity) == ("retention-blocked", "note"), (
        "more lies here than the limit: at once"
    )
    assert not at(243, missing)
    assert at(365, missing)
    assert not at(366, three())
    assert not state.deletions.is_blocked


def test_a_short_disk_that_found_checkpoints_hold_names_what_lets_them_go() -> None:
    """Unpinning, a lower limit: neither helps."""
    short = Disk(free_bytes=1, reserve_bytes=100, can_clone=False)
    view = three(disk=short)
    kept = replace(view, saves=tuple(replace(s, is_adopted=False, was_found_first=True) for s in view.saves))
    said = "3 there before ckptd; `ckptd accept --existing` has the 3 that were there before ckptd uploaded"
    assert said in why(kept)
    assert "--existing" not in why(three(disk=short, local_retention=RetentionPolicy(save_total_limit=3)))
    assert "--existing" not in why(replace(kept, local_retention=RetentionPolicy()))
