"""Every problem ends by itself once its cause is gone; what heals in a moment calls nobody (P17)."""

from __future__ import annotations

import ast
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.base import files
from ckptd.core.completeness.judge import State, Verdict
from ckptd.core.model.manifest import Tombstone
from ckptd.core.model.records import UNIVERSAL, ZERO, UploadRecord, UploadState
from ckptd.core.policy.actions import Plan
from ckptd.core.policy.retention import RetentionPolicy, RetentionVerdict, Tier
from ckptd.daemon.actions.control import Control
from ckptd.daemon.health.drain import stalled_drain, stalled_remotes
from ckptd.daemon.health.stalls import report_stalls, unfinished, way_out
from ckptd.daemon.intake.clones import forget_lost_holds
from ckptd.daemon.state import problems as of_problems
from ckptd.daemon.state.deletions import BlockedDeletion
from ckptd.daemon.state.problems import CODES, HEALS_SECONDS, Problems
from ckptd.errors import NotPermitted
from ckptd.storage.journal.journal import Journal
from tests.support.core_views import committed_record, job_view, key_of, save_view, sealed
from tests.support.states import job_state

DAEMON = Path(of_problems.__file__).parents[1]
WITHOUT_A_JOB = {"config-invalid", "lock-held"}
"""Said of a job that does not run: until a reload, or until the lock is free."""


def test_every_code_is_raised_and_ends() -> None:
    """By the next turn that does not see it, by its own time, or by a `clear` of that very code."""
    raised: dict[str, set[str]] = {}
    cleared: set[str] = set()
    for path in sorted(set(DAEMON.rglob("*.py")) - {DAEMON / "state" / "problems.py"}):
        module = ast.parse(path.read_text())
        named = {t.id: _words(n) for n in module.body if isinstance(n, ast.Assign) for t in _names(n.targets)}
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef):
                for call, codes in _calls(function, named):
                    if call == "clear":
                        cleared |= codes
                    else:
                        for code in codes:
                            raised.setdefault(code, set()).add(call)
    assert set(raised) | WITHOUT_A_JOB == set(CODES)
    stay = {code for code, how in raised.items() if "put" in how and code not in cleared}
    assert stay == set(), "raised until somebody says that it is over, and nobody does"


def _words(tree: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in CODES}


def _names(targets: list[ast.expr]) -> list[ast.Name]:
    return [target for target in targets if isinstance(target, ast.Name)]


def _calls(function: ast.FunctionDef, named: dict[str, set[str]]) -> list[tuple[str, set[str]]]:
    """(put, see, clear or "put for a while", codes) of each call; a variable is any code named beside it."""
    words = _words(function)
    for node in ast.walk(function):
        words |= named.get(node.id, set()) if isinstance(node, ast.Name) else set()
    found = []
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) >= 2):
            continue
        name, first = node.func.attr, node.args[0]
        if name not in {"put", "see", "clear"}:
            continue
        codes = _words(first) if isinstance(first, ast.Constant) else words
        if any(keyword.arg == "lasts_seconds" for keyword in node.keywords):
            name = "put for a while"
        if codes:
            found.append((name, codes))
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time, to be set."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_may_heal_is_a_note_for_a_minute(clock: list[float]) -> None:
    problems = Problems()

    def severities() -> dict[str, str]:
        return {p.code: p.severity for p in problems.all()}

    problems.put("torn-save", "a", "a is torn", "wait")
    problems.put("source-damaged", "b", "b is damaged", "remove it")
    assert severities() == {"torn-save": "note", "source-damaged": "attention"}
    clock[0] += HEALS_SECONDS - 1
    problems.put("torn-save", "a", "a is torn, still", "wait")
    assert severities()["torn-save"] == "note"
    assert {p.lasting for p in problems.all()} == {"attention"}, "a run that ends now does not wait for it"
    clock[0] += 1
    assert severities()["torn-save"] == "attention"
    problems.clear("torn-save", "a")
    problems.put("torn-save", "a", "another one", "wait")
    assert severities()["torn-save"] == "note"


def test_a_start_that_asks_its_remotes_calls_nobody(clock: list[float]) -> None:
    problems = Problems()
    problems.put("waiting-for-remote", "journal", "a waits", "it asks")
    assert [(p.severity, p.lasting) for p in problems.all()] == [("note", "behind")]
    clock[0] += HEALS_SECONDS
    assert [p.severity for p in problems.all()] == ["behind"]


def test_one_that_is_told_for_a_while_ends(clock: list[float]) -> None:
    problems = Problems()
    problems.put("internal", "ValueError", "a defect", "report it", lasts_seconds=60.0)
    clock[0] += 59
    problems.put("internal", "ValueError", "a defect", "report it", lasts_seconds=60.0)
    clock[0] += 59
    assert [p.code for p in problems.all()] == ["internal"]
    clock[0] += 1
    assert problems.all() == ()


def test_what_was_about_a_save_dir_goes_with_it() -> None:
    problems = Problems()
    problems.begin_turn()
    problems.see("torn-save", "a", "a is torn", "wait")
    problems.end_turn()
    problems.put("remote-unreachable", "nas", "nas is away", "wait")
    problems.put("vanished-uncommitted", "b", "b is lost", "save less often")
    problems.put("node-ending", "", "this node ends soon", "nothing")
    problems.put("termination-unread", "", "the metadata service does not answer", "ask it")
    left = ["vanished-uncommitted", "node-ending", "termination-unread"]
    problems.begin_anew()
    assert [p.code for p in problems.all()] == left
    problems.begin_turn()
    problems.end_turn()
    assert [p.code for p in problems.all()] == left


class House:
    """A job with saves 1 to 3, the third held by nobody, as `report_stalls` sees it."""

    def __init__(self, root: Path) -> None:
        self.problems = Problems()
        self.state = job_state(Journal(root / "journal.db"), problems=self.problems)
        self.ids = [
            self.state.journal.add_save(sealed(n), found_first=False, adopted=True, seen_at=0.0)
            for n in (1, 2, 3)
        ]
        self.state.load()
        policy = RetentionPolicy()
        remote = SimpleNamespace(name="nas", forms=(ZERO, UNIVERSAL), required=True, policy=policy)
        config = SimpleNamespace(
            name="run",
            remotes=(remote,),
            save_dir=Path("/n/run"),
            file=Path("/jobs/run.toml"),
            is_matched=False,
        )
        self.link = SimpleNamespace(name="nas", is_transferring=False, observation=None, idle_seconds=0.0)
        self.job = cast(
            "Any", SimpleNamespace(config=config, problems=self.problems, sessions={"nas": self.link})
        )

    def upload(self, number: int, state: UploadState, form: str = ZERO, **more: Any) -> None:
        record = UploadRecord(remote="nas", form=form, state=state, **more)
        self.state.uploads.put(self.ids[number - 1], record)

    def ends(self, number: int, how: Any) -> None:
        self.state.journal.end_save(self.ids[number - 1], how)
        self.state.reload(self.ids[number - 1])

    def told(self) -> dict[str, str]:
        self.problems.begin_turn()
        report_stalls(self.job, self.state)
        self.problems.end_turn()
        return {p.code: f"{p.text}; {p.next_step}" for p in self.problems.all()}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


GOES, PINNED = RetentionVerdict(keeps=(), goes="limit"), RetentionVerdict(keeps=("pinned",), goes="")


def planned(
    local: dict[int, RetentionVerdict] | None = None,
    remote: dict[tuple[str, str], RetentionVerdict] | None = None,
) -> Plan:
    """Of a turn with nothing to do."""
    return Plan(actions=(), local_verdicts=local or {}, remote_verdicts=remote or {})


WRONG: dict[str, Any] = {
    "reason": "rank_0.pt: record data/0 has CRC 1",
    "hint": "bits flipped",
    "is_damaged": True,
}


@pytest.mark.parametrize("end", ["vanished", "pruned", "saved again"])
def test_a_damaged_save_is_told_of_while_it_lies_here(house: House, end: str) -> None:
    house.upload(1, UploadState.REFUSED, **WRONG)
    text = house.told()["source-damaged"]
    assert text == (
        "s1b1 → nas: rank_0.pt: record data/0 has CRC 1; bits flipped; "
        "ckptd gc /jobs/run.toml --incomplete s1b1 removes it"
    )
    again = job_state(house.state.journal)
    again.load()
    assert unfinished(again) == {"s1b1": 0}, "a new start knows it too"
    if end == "saved again":
        house.state.journal.add_save(sealed(1, save_seq=4), found_first=False, adopted=True, seen_at=0.0)
        house.state.load()
    else:
        house.ends(1, end)
    assert house.told() == {}
    assert unfinished(house.state) == {}


def test_what_was_put_back_is_looked_at_anew(house: House) -> None:
    house.upload(1, UploadState.REFUSED, **WRONG)
    house.state.uploads.forget_damage(house.ids[0])
    assert house.state.uploads.record(house.ids[0], "nas", ZERO).state is UploadState.NEW
    assert house.told() == {}


def test_a_damaged_hold_whose_folder_is_gone_is_told_of(house: House) -> None:
    """It is the last copy, so only a person can give it up: there is a command for it."""
    house.upload(1, UploadState.REFUSED, **WRONG)
    house.state.journal.set_held(house.ids[0], held=True)
    house.ends(1, "superseded")
    told = house.told()["source-damaged"]
    assert told.endswith("ckptd never removes its last copy: rm -r /n/run/_ckptd/hold/s1b1.1")
    house.state.set_held(house.ids[0], held=False)
    assert house.told() == {}


def test_a_form_of_a_damaged_copy_is_told_of_until_it_is_made(house: House) -> None:
    wrong: dict[str, Any] = {
        "reason": "the object differs",
        "hint": "ckptd verify --repair",
        "is_damaged": True,
    }
    house.upload(1, UploadState.WAITING, UNIVERSAL, **wrong)
    assert house.told()["source-damaged"] == "s1b1 → nas: the object differs; ckptd verify --repair"
    assert unfinished(house.state) == {}, "its own bytes are right"
    house.upload(1, UploadState.UPLOADING, UNIVERSAL, **wrong | {"reason": None})
    assert house.told()["source-damaged"].startswith("s1b1 → nas: the object differs"), "tried again just now"
    house.upload(1, UploadState.COMMITTED, UNIVERSAL)
    assert house.told() == {}


def test_a_form_that_nothing_tries_again_is_told_of_no_more(house: House) -> None:
    """Of an older save nobody makes it, unless a ladder leaves that alone."""
    house.upload(1, UploadState.WAITING, UNIVERSAL, **WRONG)
    house.upload(2, UploadState.WAITING)
    assert set(house.told()) == {"source-damaged"}
    house.upload(2, UploadState.COMMITTED)
    assert house.told() == {}
    (remote,) = house.job.config.remotes
    remote.policy = RetentionPolicy(save_total_limit=2, ladder=(Tier(form="universal", after_newer=3),))
    assert set(house.told()) == {"source-damaged"}
    house.upload(1, UploadState.COMMITTED, UNIVERSAL, **WRONG)
    assert house.told() == {}, "as an earlier release noted it"


def test_damage_that_an_earlier_release_noted_is_told(house: House) -> None:
    """It wrote the state and the reason, and no more."""
    house.upload(1, UploadState.REFUSED, reason="rank_0.pt: record data/0 has CRC 1")
    assert house.told()["source-damaged"] == (
        "s1b1 → nas: rank_0.pt: record data/0 has CRC 1; ckptd gc /jobs/run.toml --incomplete s1b1 removes it"
    )
    assert unfinished(house.state) == {"s1b1": 0}


def test_the_way_out_is_a_repair_where_a_remote_has_it(house: House) -> None:
    house.upload(1, UploadState.REFUSED, **WRONG)
    house.state.uploads.put(house.ids[0], committed_record(sealed(1), remote="s3"))
    assert way_out(house.job, house.state, "s1b1") == (
        "ckptd verify /jobs/run.toml s1b1 --repair",
        "puts it right",
    )
    house.state.folders.verdicts["s9"] = Verdict(state=State.SUSPECT, reason="two saves?")
    assert way_out(house.job, house.state, "s9") == ("ckptd accept /jobs/run.toml s9", "takes it as one save")


def test_a_remote_that_is_configured_no_more_is_not_told_of(house: House) -> None:
    house.upload(1, UploadState.FAILED, tries=9, reason="it is full")
    assert set(house.told()) == {"upload-failed"}
    house.job.config.remotes = ()
    assert house.told() == {}


def test_what_may_go_and_stays_is_told_until_it_is_kept(house: House) -> None:
    stays = BlockedDeletion(text="permission denied", hint="give rights", is_brief=False)
    house.state.deletions.blocked[house.ids[0]] = stays
    house.state.plan = planned({house.ids[0]: GOES})
    assert house.told() == {"prune-blocked": "s1b1 stays: permission denied; give rights"}
    assert [p.severity for p in house.problems.all()] == ["attention"]
    house.state.plan = planned({house.ids[0]: PINNED})
    assert house.told() == {}
    assert house.state.deletions.blocked == {}


def test_a_save_that_begins_beside_a_prune_needs_nobody(house: House) -> None:
    house.state.deletions.blocked[house.ids[0]] = BlockedDeletion(
        text="s2 is being saved", hint="", is_brief=True
    )
    assert set(house.told()) == {"prune-blocked"}
    assert [(p.severity, p.lasting) for p in house.problems.all()] == [("note", "note")]
    house.ends(1, "pruned")
    assert house.told() == {}


def test_what_a_remote_will_not_let_go_is_told_while_it_is_to_go(house: House) -> None:
    """Kept there by now, gone from there by whoever: over. A tombstone alone: still to be finished."""
    save = sealed(1)
    stone = Tombstone(
        tag=save.tag, generation=1, form=ZERO, branch=1, step=1, save_seq=1, reason="keep_last",
        commit_sha256="sha",
    )  # fmt: skip
    view = SimpleNamespace(key=key_of(save), sha256="sha")

    def refused(
        commits: tuple[Any, ...], verdicts: dict[Any, RetentionVerdict], retiring: tuple[Any, ...] = ()
    ) -> set[str]:
        house.state.deletions.note_refused("nas", "sha", "s1b1 (zero) of nas", NotPermitted("no"))
        house.link.observation = SimpleNamespace(commits=commits, retired=(stone,), retiring=retiring)
        house.state.plan = planned(remote=verdicts)
        return set(house.told())

    at = ("nas", key_of(save))
    assert refused((view,), {at: GOES}) == {"retire-blocked"}
    assert refused((), {}, (("s1b1", 1, ZERO),)) == {"retire-blocked"}
    assert refused((view,), {at: PINNED}) == set()
    assert refused((), {}) == set()
    house.state.deletions.note_refused("nas", "sha", "s1b1 (zero) of nas", NotPermitted("no"))
    house.link.observation = None
    assert set(house.told()) == {"retire-blocked"}, "while it is away nobody knows"


@pytest.mark.parametrize("end", ["committed", "vanished", "held again"])
def test_a_hold_that_was_given_up_is_told_of_until_it_is_of_no_use(house: House, end: str) -> None:
    house.state.holds.released[house.ids[0]] = "s1b1 lost its hold"
    assert house.told() == {"hold-released": "s1b1 lost its hold; free space, or save less often"}
    if end == "committed":
        house.upload(1, UploadState.COMMITTED)
    elif end == "vanished":
        house.ends(1, "vanished")
    else:
        house.state.set_held(house.ids[0], held=True)
    assert house.told() == {}


def test_a_transfer_that_was_cut_is_over_when_nothing_is_left_to_move(house: House) -> None:
    house.problems.put("transfer-stalled", "nas", "nas: no byte moved", "wait")
    house.upload(1, UploadState.FAILED, tries=1, reason="cut")
    assert set(house.told()) == {"transfer-stalled"}
    house.ends(1, "vanished")
    assert house.told() == {}


def test_an_upload_that_stands_still_is_said_before_it_is_cut(house: House) -> None:
    """As a note: a flush may last so long. Once it was cut that is said instead."""
    said = []
    for seconds in (9.0, 10.0, 47.0, 0.0):
        house.link.idle_seconds = seconds
        said += [text.partition(";")[0] for text in house.told().values()]
        assert all(problem.severity == "note" for problem in house.problems.all())
    still = "no byte of what is under way has moved"
    assert said == [f"remote nas has not answered for {seconds} s: {still}" for seconds in (10, 40)]
    house.link.idle_seconds, house.link.is_transferring = 47.0, True
    house.problems.put("transfer-stalled", "nas", "nas: cut", "wait")
    assert list(house.told().values()) == ["nas: cut; wait"]


def drains(
    *, is_stalled: bool = True, is_moving: bool = False, committed: bool = False, required: bool = True
) -> Any:
    """A job with a checkpoint that "nas" lacks or has, its link, and a link of another remote."""
    view = job_view([save_view(1, sealed(1), committed=committed)])
    view = replace(view, remotes=(replace(view.remotes[0], is_required=required),))
    nas = SimpleNamespace(is_stalled=is_stalled, is_moving=False)
    other = SimpleNamespace(is_stalled=False, is_moving=is_moving)
    state = SimpleNamespace(is_first_scan=False, plan=planned(), folders=SimpleNamespace(verdicts={}))
    links = {"nas": nas, "other": other}
    config = SimpleNamespace(settle_seconds=0.5)
    return cast(
        "Any", SimpleNamespace(config=config, view=view, sessions=links, state=state, needs_turn=False)
    )


def test_a_drain_waits_for_no_remote_on_which_nothing_moves() -> None:
    """Unless something moves elsewhere, or is about to: then the deadline holds."""
    done = drains(committed=True)
    assert stalled_drain([drains()]) == ("nas",)
    assert stalled_drain([drains(required=False)]) == ("nas",), "where none is required all are waited for"
    assert stalled_drain([drains(), done]) == ("nas",)
    assert stalled_drain([drains(is_stalled=False)]) == ()
    assert stalled_drain([drains(is_moving=True)]) == ()
    assert stalled_drain([drains(), drains(is_stalled=False)]) == ()
    assert stalled_drain([done]) == (), "nothing is left at all"
    done.needs_turn = True
    assert stalled_drain([drains(), done]) == (), "a save may be about to be complete"


def test_a_drain_that_was_asked_for_says_what_it_need_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: a remote that was cut just before gets its next try. Nor after the deadline."""
    now = [100.0]
    monkeypatch.setattr("ckptd.daemon.actions.control.time.monotonic", lambda: now[0])
    control = Control()
    assert stalled_remotes(control, [drains()]) == ()
    control.begin_drain(120.0)
    told = []
    for seconds in (9.0, 10.0, 119.0, 121.0):
        now[0] = 100.0 + seconds
        told.append(stalled_remotes(control, [drains()]))
    assert told == [(), ("nas",), ("nas",), ()]
    now[0] = 150.0
    assert stalled_remotes(control, [drains(is_moving=True)]) == ()


def test_a_hold_of_a_damaged_save_that_a_person_removed_is_forgotten(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "_ckptd" / "hold" / "s1b1.1"
    folder.mkdir(parents=True)
    house.state.journal.set_held(1, held=True)
    house.state.load()
    house.upload(1, UploadState.REFUSED, **WRONG)
    with files.opened_dir(tmp_path) as fd:
        forget_lost_holds(house.state, fd)
        assert house.state.saves.rows[1].held
        folder.rmdir()
        forget_lost_holds(house.state, fd)
    assert not house.state.saves.rows[1].held


def test_a_journal_that_was_set_aside_is_told_of_while_it_lies_there(house: House, tmp_path: Path) -> None:
    aside = tmp_path / "journal.db.1"
    aside.write_bytes(b"")
    house.state.journal.set_aside = aside
    assert set(house.told()) == {"journal-set-aside"}
    aside.unlink()
    assert house.told() == {}
