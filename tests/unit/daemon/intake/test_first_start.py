"""A first start is of one directory, whatever its node is called, whenever it is mounted (P5, H20)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.core.model.decision import Decision
from ckptd.core.model.listing import SaveDirListing
from ckptd.core.model.records import ZERO
from ckptd.daemon.intake.decisions import read_decisions, write_decision
from ckptd.daemon.intake.initial_scan import InitialScan, beginning
from ckptd.daemon.intake.known_saves import KnownSaves
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local.run_file import place_of
from ckptd.storage.remote import messages as m
from tests.support.core_views import sealed
from tests.support.recover_scene import Scene
from tests.support.states import ONE_RUN, job_state
from tests.unit.daemon.intake.test_daemon_ordering import folder
from tests.unit.daemon.state.test_daemon_links import IDENTITY
from tests.unit.daemon.state.test_daemon_links import Scene as LinkScene

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD = (100, 200, 300)
DAY_SECONDS = 86400.0


def first_starts(scene: Scene) -> list[tuple[str, ...]]:
    """Of the state directory in save_dir."""
    return [d.tags for d in read_decisions(scene.save_dir / "_ckptd" / "state") if d.kind == "first-start"]


def lying_here(scene: Scene) -> set[str]:
    """Checkpoints in save_dir."""
    return {path.name for path in scene.save_dir.glob("global_step*")}


def fill(scene: Scene) -> set[str]:
    """Checkpoints of a month ago."""
    tags = [scene.save(step) for step in OLD]
    for number, tag in enumerate(tags):
        at = time.time() - 30 * DAY_SECONDS + 1000 * number
        for path in (scene.save_dir / tag).iterdir():
            os.utime(path, (at, at))
    return set(tags)


@contextmanager
def daemon(scene: Scene, nas: Path) -> Iterator[None]:
    """The real one, with a limit of one here and there."""
    job_file = scene.root / "run.toml"
    job_file.write_text(
        f'name = "run"\nsave_dir = "{scene.save_dir}"\nnode_name = "{scene.node}"\nsettle = "0.3s"\n'
        '[local]\nmin_free = "0%"\nforms = []\nsave_total_limit = 1\n'
        f'[[remote]]\nname = "nas"\nurl = "{nas}"\nforms = ["zero"]\nsame_filesystem = true\n'
        "save_total_limit = 1\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    with (scene.root / "log").open("ab") as log:
        command = [sys.executable, "-m", "ckptd", "run", "--job", str(job_file)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


def wait_for(what: Any) -> None:
    """At most a minute."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def committed(nas: Path) -> set[str]:
    """Tags with a COMMIT of their ZeRO form."""
    return {json.loads(path.read_bytes())["tag"] for path in (nas / "_ckptd" / "commits").glob("*zero.json")}


def stays_but_sends_the_newest(scene: Scene, nas: Path, tags: set[str]) -> None:
    """While the daemon has settled it and may let go what it takes for its own."""
    wait_for(lambda: first_starts(scene) == [tuple(sorted(tags))])
    wait_for(lambda: "global_step300" in committed(nas))
    time.sleep(2.0)  # time for a removal that must not come
    assert lying_here(scene) == tags


def test_another_directory_of_the_same_node_has_a_first_start_of_its_own(tmp_path: Path) -> None:
    """The record of the first one, which found nothing: all of these were sent, then removed everywhere."""
    one, other = Scene(tmp_path / "a"), Scene(tmp_path / "b")
    with daemon(one, one.nas):
        wait_for(lambda: (one.nas / "_ckptd" / "remote.json").exists() or one.save(50))
        one.save(50)
        wait_for(lambda: "global_step50" in committed(one.nas))
    tags = fill(other)
    with daemon(other, one.nas):
        stays_but_sends_the_newest(other, one.nas, tags)


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_disk_that_is_mounted_later_was_there_before_us(tmp_path: Path, is_missing: bool) -> None:
    """save_dir was missing, or the empty place where the disk is mounted."""
    scene = Scene(tmp_path)
    tags = fill(scene)
    disk = tmp_path / "disk"
    scene.save_dir.rename(disk)
    if not is_missing:
        scene.save_dir.mkdir()
    with daemon(scene, scene.nas):
        wait_for(lambda: has_looked(scene))
        if not is_missing:
            scene.save_dir.rename(tmp_path / "empty")
        disk.rename(scene.save_dir)
        stays_but_sends_the_newest(scene, scene.nas, tags)


def has_looked(scene: Scene) -> bool:
    """The daemon has looked at save_dir, or for it."""
    command = [sys.executable, "-m", "ckptd", "status", str(scene.root / "run.toml")]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    return "WAITING" in said


def test_what_is_saved_into_a_directory_that_was_awaited_was_not_found() -> None:
    old, new = folder(5, 10**9), folder(6, time.time_ns() + 60 * 10**9)
    listing = SaveDirListing(device=1, folders=(old, new))
    first = InitialScan()
    assert first.record_first_listing(listing)
    assert not first.record_first_listing(SaveDirListing(device=1, folders=()))
    assert first.tags == {old.tag, new.tag}
    first.awaits()
    assert not first.tags
    assert first.record_first_listing(listing)
    assert first.tags == {old.tag}


class Told:
    """A journal and state directory over /nvme/run, and one remote that was heard."""

    def __init__(
        self, place: Path, *, decisions: tuple[Decision, ...] = (), state: str = "/nvme/run"
    ) -> None:
        self.place = place
        self.session = LinkScene(place / "nas").session
        self.session.observation = m.Observation(identity=IDENTITY, commits=(), decisions=decisions)
        self.sessions = {"nas": self.session}
        self.state = job_state(Journal(place / "journal.db"))
        self.state.load()

    def knowledge(self, *, holds_state: bool) -> KnownSaves:
        """Of node n0; "a" lies there."""
        found = beginning(self.state.journal, "/nvme/run", 7, frozenset({"a"}), holds_state=holds_state)
        sessions, forms = self.sessions, {"nas": (ZERO,)}
        return KnownSaves(self.state, self.place, sessions, "n0", found, 60.0, forms, lambda: None, ONE_RUN)


def start(*tags: str, place: str = "", serial: int = 1) -> Decision:
    """A first start of n0."""
    return Decision(kind="first-start", tag="*", tags=tags, by="n0", place=place, serial=serial)


HERE, THERE = place_of("/nvme/run", 7), place_of("/nvme/other", 7)


@pytest.mark.parametrize(
    ("recorded", "wanted"),
    [
        ((start("x", place=HERE),), frozenset("x")),
        ((start("x", place=THERE),), frozenset("a")),
        ((start("x", place=THERE, serial=2), start("y", place=HERE)), frozenset("y")),
        ((start("x"),), frozenset("x")),
    ],
)
@pytest.mark.parametrize("is_here", [True, False])
def test_a_recorded_one_counts_for_its_directory_alone(
    tmp_path: Path, recorded: tuple[Decision, ...], wanted: frozenset[str], is_here: bool
) -> None:
    """In the state directory or in a remote; one of an earlier release tells no place, and counts."""
    told = Told(tmp_path, decisions=() if is_here else recorded)
    for decision in recorded if is_here else ():
        write_decision(tmp_path, decision)
    assert told.knowledge(holds_state=False).found_first() == wanted
    told.state.journal.close()


def test_a_state_directory_in_save_dir_moves_with_it(tmp_path: Path) -> None:
    told = Told(tmp_path)
    write_decision(tmp_path, start("x", place=THERE))
    assert told.knowledge(holds_state=True).found_first() == frozenset("x")
    told.state.journal.close()


def test_what_a_resume_brought_to_a_new_disk_is_rotated(tmp_path: Path) -> None:
    """A node of the same name comes back with an empty disk: what COMMITs list is no find."""
    first, again = Scene(tmp_path / "a"), Scene(tmp_path / "b")
    first.save(5)
    with daemon(first, first.nas):
        wait_for(lambda: "global_step5" in committed(first.nas))
    shutil.copytree(first.save_dir / "global_step5", again.save_dir / "global_step5")
    other = again.save(3)
    with daemon(again, first.nas):
        wait_for(lambda: first_starts(again))
        again.save(9)
        wait_for(lambda: "global_step9" in committed(first.nas))
        wait_for(lambda: lying_here(again) == {other, "global_step9"})
    [decision] = read_decisions(again.save_dir / "_ckptd" / "state")
    assert decision.committed == ("global_step5",)


def test_an_adopt_is_of_the_first_starts_before_it(tmp_path: Path) -> None:
    """What a job adopted once was of another directory; said again, it is of this one."""
    before = Decision(kind="adopt", tag="*", at="2026-01-01T00:00:00+00:00", serial=3)
    told = Told(tmp_path, decisions=(before,))
    told.state.journal.add_save(sealed(1), found_first=True, adopted=False, seen_at=0.0)
    told.state.load()
    known_saves = told.knowledge(holds_state=False)
    known_saves.refresh()
    known_saves.adopt()  # not settled yet
    assert known_saves.found_first() == frozenset("a")
    known_saves.adopt()
    assert not any(row.adopted for row in told.state.saves.rows.values())
    again = before.model_copy(update={"at": "2026-01-02T00:00:00+00:00", "serial": 4})
    told.session.observation = m.Observation(identity=IDENTITY, commits=(), decisions=(before, again))
    known_saves.refresh()
    known_saves.adopt()
    assert all(row.adopted for row in told.state.saves.rows.values())
    told.state.journal.close()


def test_an_adopt_that_was_said_while_remotes_were_waited_for_counts(tmp_path: Path) -> None:
    """The daemon had looked at this directory, and a person said it of what lies here."""
    told = Told(tmp_path)
    heard, told.session.observation = told.session.observation, None
    told.state.journal.add_save(sealed(1), found_first=True, adopted=False, seen_at=0.0)
    told.state.load()
    known_saves = told.knowledge(holds_state=True)
    assert known_saves.found_first() is None
    adopt = Decision(kind="adopt", tag="*", at="2026-01-01T00:00:00+00:00", serial=time.time_ns())
    write_decision(tmp_path, adopt)
    assert heard is not None
    told.session.observation = heard.model_copy(update={"decisions": (adopt,)})
    known_saves.refresh()
    assert known_saves.found_first() == frozenset("a")
    known_saves.adopt()
    assert all(row.adopted for row in told.state.saves.rows.values())
    told.state.journal.close()


@pytest.mark.parametrize("is_rebuilt", [True, False])
def test_a_remote_that_is_away_holds_up_no_other_directory(tmp_path: Path, is_rebuilt: bool) -> None:
    """save_dir was made anew while one of two remotes is down: nothing was sealed, held or sent until it came
    back. A journal that never heard it waits: it may know what lies here."""
    told = Told(tmp_path)
    write_decision(tmp_path, start("x", place=THERE))
    if is_rebuilt:
        told.state.journal.set_meta("rebuilt", "1")
    away: Any = SimpleNamespace(name="far", observation=None, is_duplicate=False, is_away=True)
    told.sessions = {"nas": told.session, "far": away}
    assert told.knowledge(holds_state=False).found_first() == (frozenset("a") if is_rebuilt else None)
    told.state.journal.close()
