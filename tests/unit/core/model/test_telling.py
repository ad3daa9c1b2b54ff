"""Decisions that a remote lacks are published there again; nothing newer is overridden (P5, P8, adr/0165)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.config.loader import job_from_arguments
from ckptd.core.model.decision import Decision, lacking
from ckptd.core.model.manifest import TombstoneHeader
from ckptd.core.model.records import ZERO
from ckptd.daemon.intake.decisions import write_decision
from ckptd.daemon.intake.initial_scan import PreexistingSaves
from ckptd.daemon.intake.known_saves import KnownSaves
from ckptd.daemon.state.view_builder import of_untold
from ckptd.daemon.uploads.remote_deletion import RemoteDeleter
from ckptd.errors import DocumentDamaged
from ckptd.observe.audit import Audit
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote import messages as m
from ckptd.storage.remote import observe
from ckptd.storage.remote.attach import attach
from ckptd.storage.stores.open import open_store
from tests.stores.memory import MemoryStore
from tests.stores.scene import JOB_ID, Node
from tests.support import observing
from tests.support.recover_scene import Scene
from tests.support.states import ONE_RUN, job_state
from tests.unit.daemon.state.test_daemon_links import IDENTITY
from tests.unit.daemon.state.test_daemon_links import Scene as LinkScene

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TAG = "global_step20"


def word(kind: Any, serial: int, *, tag: str = TAG, by: str = "p", at: str = "then", **more: Any) -> Decision:
    return Decision(kind=kind, tag=tag, by=by, at=at, serial=serial, **more)


PIN = word("pin", 5)


@pytest.mark.parametrize(
    ("there", "is_lacking"),
    [
        ((), True),
        ((word("pin", 5, tag="other"), word("adopt", 9)), True),
        ((PIN,), False),
        ((word("pin", 9, by="another"),), False),
        ((word("unpin", 9, by="another"),), False),
        ((word("unpin", 5, by="another"),), False),
        ((word("unpin", 3, by="another"),), True),
        ((word("pin", 3),), True),  # raised elsewhere: an older word must not count there in time
        ((word("pin", 3), word("unpin", 4, by="another")), False),  # raised elsewhere, taken back here
        ((word("pin", 3, at="before"), word("unpin", 4, by="another")), True),
    ],
)
def test_a_pin_is_lacking_where_no_newer_word_is(there: tuple[Decision, ...], is_lacking: bool) -> None:
    assert lacking([PIN], there) == ((PIN,) if is_lacking else ())


def test_what_is_no_pin_adds_to_what_was_said() -> None:
    """Of two saves under one tag, and of two nodes, each word counts by itself; by whom matters there."""
    accept, start = word("accept", 5, fingerprints=(("a", "1"),)), word("first-start", 5, tag="*", by="n0")
    there = (word("accept", 9, fingerprints=(("a", "2"),)), word("first-start", 9, tag="*", by="n1"))
    assert lacking([accept, start], there) == (accept, start)
    raised = [one.model_copy(update={"serial": 10}) for one in (accept, start)]
    assert lacking([accept, start], [*there, *raised]) == ()


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    attach(made, Node(Path("/nowhere")).settings(made.url, job_id=JOB_ID))
    return made


def test_a_remote_takes_a_word_once_and_under_its_serial(store: MemoryStore) -> None:
    """Between the look and the order another node may say otherwise."""
    for _ in range(2):
        observing.publish(store, PIN)
    assert observing.observe(store).decisions == (PIN,)
    observing.record(store, word("unpin", 1, by="another"))
    observing.publish(store, PIN)
    assert not observe.is_pinned(store, TAG)
    assert [(d.kind, d.serial) for d in observing.observe(store).decisions] == [("pin", 5), ("unpin", 6)]


def test_first_starts_of_two_nodes_lie_beside_each_other(store: MemoryStore) -> None:
    """The same of another node is another; also where the serial is taken."""
    starts = [word("first-start", 5, tag="*", by=node, place="here") for node in ("n0", "n1")]
    for start in [*starts, *starts]:
        observing.publish(store, start)
    held = observing.observe(store).decisions
    assert [(d.by, d.serial) for d in held] == [("n0", 5), ("n1", 6)]


def test_what_cannot_be_read_there_is_not_passed_over(store: MemoryStore) -> None:
    """It may be what takes the pin back."""
    observing.record(store, word("unpin", 9))
    (key,) = (key for key in store.objects if "unpin" in key)
    store.objects[key] = b"{half"
    with pytest.raises(DocumentDamaged):
        observing.publish(store, PIN)


class Told:
    """A job with a remote for each name, all observed; `shows` is the next look of one."""

    def __init__(self, place: Path, *names: str) -> None:
        self.place = place
        self.scenes = {name: LinkScene(place / name, name) for name in names}
        self.sessions = {name: scene.session for name, scene in self.scenes.items()}
        for scene in self.scenes.values():
            scene.line.orders.clear()
        self.begin()

    def begin(self) -> None:
        """As after a start of the daemon."""
        self.state = job_state(Journal(self.place / "journal.db"))
        self.state.load()
        forms = dict.fromkeys(self.sessions, (ZERO,))
        found = PreexistingSaves(frozenset(), frozenset(), "here")
        self.known_saves = KnownSaves(
            self.state, self.place, self.sessions, "n0", found, 60.0, forms, lambda: None, ONE_RUN
        )

    def shows(self, name: str, *decisions: Decision) -> None:
        """A look."""
        session = self.sessions[name]
        session.observation = m.Observation(identity=IDENTITY, commits=(), decisions=decisions)
        session.observed_at_seconds += 1.0
        self.known_saves.refresh()

    def asked(self, name: str) -> list[Decision]:
        """Decisions that were ordered since the last call."""
        orders = self.scenes[name].line.orders
        found = [order.decision for order in orders if isinstance(order, m.RecordDecision)]
        orders[:] = [m.Point() for _ in orders]  # ids go by their number
        return found

    def answer(self, name: str, answer: m.Answer) -> None:
        self.scenes[name].answer(answer)
        self.known_saves.refresh()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Callable[..., Told]]:
    made: list[Told] = []

    def make(*names: str) -> Told:
        made.append(Told(tmp_path, *names))
        return made[-1]

    yield make
    for one in made:
        one.state.journal.close()


def test_a_pin_goes_to_a_remote_that_lacks_it_once_for_each_look(told: Callable[..., Told]) -> None:
    """Refused, it is said and tried again at the next look; nothing is retired there until it is seen."""
    job = told("nas")
    write_decision(job.place, PIN)
    job.shows("nas")
    assert job.asked("nas") == [PIN]
    assert job.state.deletions.undecided == {"nas"}
    job.known_saves.refresh()
    assert job.asked("nas") == [], "one is under way"
    job.answer("nas", m.Failed(error="NotPermitted", message="read-only"))
    (problem,) = job.state.problems.all()
    assert (problem.code, problem.about) == ("decision-unpublished", "nas")
    assert f"pin {TAG}" in problem.text
    assert job.asked("nas") == [], "not before the next look"
    job.shows("nas")
    assert job.asked("nas") == [PIN]
    job.answer("nas", m.Done())
    assert job.state.deletions.undecided == {"nas"}, "not before it is seen there"
    assert isinstance(job.scenes["nas"].line.orders[-1], m.Observe)
    job.shows("nas")
    assert job.asked("nas") == [], "it lists late"
    job.shows("nas", PIN)
    assert not job.state.deletions.undecided
    assert not job.state.problems.all()
    job.shows("nas")
    assert job.asked("nas") == [], "just now it was durable there"
    job.shows("nas", word("pin", 1, tag="older"))
    job.known_saves.refresh()
    assert job.asked("nas") == []


def test_one_that_does_not_answer_is_attached_anew(told: Callable[..., Told]) -> None:
    job = told("nas")
    write_decision(job.place, PIN)
    job.shows("nas")
    assert job.asked("nas") == [PIN]
    job.answer("nas", m.Failed(error="RemoteUnreachable", message="gone"))
    assert job.sessions["nas"].attached is None
    assert {p.code for p in job.sessions["nas"]._problems.all()} == {"remote-unreachable"}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_pin_of_another_node_goes_to_the_jobs_other_remotes(
    told: Callable[..., Told], is_restarted: bool
) -> None:
    """As the journal mirrors it: the remote that showed it may be away, or out of the job file, by then."""
    job = told("nas", "new")
    job.shows("nas", PIN)
    assert job.asked("new") == [PIN]
    job.answer("new", m.Done())
    if is_restarted:
        job.state.journal.close()
        job.begin()
    job.sessions["nas"].observation = None
    job.shows("new", word("pin", 1, tag="older"))
    assert (PIN in job.asked("new")) == is_restarted, "else it was durable there just now"


def test_what_was_taken_back_is_not_pinned_again(told: Callable[..., Told]) -> None:
    """By a newer word of whichever remote: that one goes to the others."""
    job = told("nas", "new")
    write_decision(job.place, PIN)
    unpin = word("unpin", 9, by="another")
    job.shows("nas", PIN, unpin)
    assert set(job.asked("new")) == {unpin}
    job.answer("new", m.Done())
    job.sessions["nas"].observation = None
    job.shows("new", PIN)
    assert PIN in job.known_saves._decisions.known
    assert not [d for d in job.asked("new") if d.kind == "pin"]


def test_what_lets_something_go_is_published_where_it_was_said(told: Callable[..., Told]) -> None:
    """Another node's adopt or accept, known from one remote alone, goes nowhere; our own does."""
    job = told("nas", "new")
    adopt, accept = word("adopt", 5, tag="*"), word("accept", 6, fingerprints=(("a", "1"),))
    job.shows("nas", adopt, accept)
    assert job.asked("new") == []
    write_decision(job.place, adopt)
    job.shows("new")
    assert job.asked("new") == [adopt]
    assert job.asked("nas") == []


def test_a_first_start_is_published_with_its_place_alone(told: Callable[..., Told]) -> None:
    """One of a release that noted none would count for any directory of that name."""
    job = told("nas")
    write_decision(job.place, word("first-start", 1, tag="*", by="n0"))
    mine = word("first-start", 2, tag="*", by="n0", place="here")
    write_decision(job.place, mine)
    job.shows("nas", word("first-start", 3, tag="*", by="n1", place="here"))
    assert job.asked("nas") == [mine]


def test_all_are_published_one_after_the_other(told: Callable[..., Told]) -> None:
    job = told("nas")
    words = {word("pin", number, tag=f"global_step{number}") for number in range(3)}
    for one in words:
        write_decision(job.place, one)
    job.shows("nas")
    asked = job.asked("nas")
    assert len(asked) == 1
    for _ in range(3):
        job.answer("nas", m.Done())
        asked += job.asked("nas")
    assert len(asked) == 3
    assert set(asked) == words


def test_nothing_is_retired_from_a_remote_that_is_to_be_told(tmp_path: Path) -> None:
    """Neither what a plan lets go nor what another removal left half done."""
    state = job_state(Journal(tmp_path / "journal.db"))
    seen = SimpleNamespace(commits=(SimpleNamespace(sha256="a"), SimpleNamespace(sha256="b")))
    links: Any = {"nas": SimpleNamespace(observation=seen), "away": SimpleNamespace(observation=None)}
    assert of_untold(state, links) == frozenset()
    state.deletions.undecided |= {"nas", "away", "gone"}
    assert of_untold(state, links) == {("nas", "a"), ("nas", "b")}
    stone = TombstoneHeader(
        tag=TAG, generation=1, form=ZERO, commit_sha256="a", branch=1, step=20, save_seq=1, reason="limit"
    )
    half = m.Observation(identity=IDENTITY, commits=(), retired=(stone,), retiring=((TAG, 1, ZERO),))
    scene = LinkScene(tmp_path / "nas")
    scene.session.observation = half
    before = len(scene.line.orders)
    job = job_from_arguments(str(tmp_path), str(tmp_path / "nas"), check_paths=False)
    retiring = RemoteDeleter(
        job, state, {"nas": scene.session}, Audit(tmp_path / "audit.jsonl"), lambda: None
    )
    retiring.finish_interrupted(rests=False)
    assert len(scene.line.orders) == before
    state.deletions.undecided.clear()
    retiring.finish_interrupted(rests=False)
    assert isinstance(scene.asked, m.DeleteCommit)
    state.journal.close()


def test_one_that_cannot_be_read_there_holds_no_other_up(told: Callable[..., Told]) -> None:
    job = told("nas")
    first, second = (word("pin", number, tag=f"global_step{number}") for number in (1, 2))
    write_decision(job.place, first)
    write_decision(job.place, second)
    job.shows("nas")
    assert job.asked("nas") == [first]
    job.answer("nas", m.Failed(error="DocumentDamaged", message="half"))
    assert job.asked("nas") == [second]
    job.answer("nas", m.Done())
    job.shows("nas", second)
    assert job.asked("nas") == [first]
    (problem,) = job.state.problems.all()
    assert problem.code == "decision-unpublished"


class Place:
    """The real daemon on directories."""

    def __init__(self, root: Path) -> None:
        self.scene = Scene(root)
        self.job_file = root / "run.toml"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")
        }
        self.process: subprocess.Popen[bytes] | None = None

    def with_remotes(self, **remotes: Path) -> None:
        """(Re)write the job file; one that runs reads it again."""
        text = f'name = "run"\nsave_dir = "{self.scene.save_dir}"\nnode_name = "n0"\nsettle = "0.3s"\n'
        text += '[local]\nmin_free = "0%"\nforms = []\n'
        for name, url in remotes.items():
            url.mkdir(parents=True, exist_ok=True)
            text += f'[[remote]]\nname = "{name}"\nurl = "{url}"\nforms = ["zero"]\nsame_filesystem = true\n'
        self.job_file.write_text(text)
        if self.process is not None:
            self.process.send_signal(signal.SIGHUP)

    def start(self) -> None:
        command = [sys.executable, "-m", "ckptd", "run", "--job", str(self.job_file)]
        self.process = subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None

    def say(self, verb: str) -> None:
        command = [sys.executable, "-m", "ckptd", verb, str(self.job_file), TAG]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    def is_shown_pinned(self) -> bool | None:
        """What status.json says of it; None: nothing yet of a daemon that runs."""
        path = self.scene.save_dir / "_ckptd" / "state" / "status.json"
        document = json.loads(path.read_bytes()) if path.exists() else {"jobs": []}
        found = [one for job in document["jobs"] for one in job.get("checkpoints", ()) if one["tag"] == TAG]
        return found[0]["pinned"] if found and document["daemon"]["pid"] == self.pid else None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else -1


def is_committed(nas: Path) -> bool:
    return (nas / "_ckptd" / "commits" / f"{TAG}~g1~zero.json").exists()


def pins(nas: Path) -> list[str]:
    return sorted(path.name.partition("~")[0] for path in (nas / "_ckptd" / "pins").glob("*.json"))


def wait_for(what: Callable[[], Any]) -> None:
    """At most a minute."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_new_remote_and_one_that_was_rolled_back_get_the_pin(tmp_path: Path) -> None:
    """A move to a new NAS; a remote from a snapshot before the pin; an unpin elsewhere is not undone."""
    here, old, new = Place(tmp_path), tmp_path / "nas" / "run", tmp_path / "new" / "run"
    here.scene.save(20)
    here.with_remotes(nas=old)
    try:
        here.start()
        wait_for(lambda: is_committed(old))
        shutil.copytree(old, tmp_path / "snapshot", ignore=shutil.ignore_patterns(".ckptd-tmp*"))
        here.say("pin")
        here.with_remotes(nas=old, new=new)
        wait_for(lambda: pins(new) == ["pin"])
        here.with_remotes(new=new)
        here.stop()
        shutil.rmtree(old)
        (tmp_path / "snapshot").rename(old)
        assert pins(old) == []
        here.with_remotes(nas=old, new=new)
        here.start()
        wait_for(lambda: pins(old) == ["pin"])
        # a temporary file of a write may lie beside it for a moment
        names = [{path.name for path in (place / "_ckptd/pins").glob("pin~*")} for place in (old, new)]
        assert names[0] == names[1] != set()
        here.stop()
        elsewhere = Decision(kind="unpin", tag=TAG, by="another", serial=time.time_ns())
        observing.record(open_store(str(new)), elsewhere)
        here.start()
        wait_for(lambda: pins(old) == ["pin", "unpin"])
        wait_for(lambda: here.is_shown_pinned() is False)
        assert pins(new) == ["pin", "unpin"]
        assert not any(observe.is_pinned(open_store(str(place)), TAG) for place in (old, new))
    finally:
        here.stop()
