"""A whole life of one job: four saves, each uploaded, converted, pruned and retired, cut where it is told.

A life is lived by one process after another: each is forked from a warm one, may be killed at one call, and
the next goes on where the trainer is. What the trainer has written lies outside of all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.errors import CkptdError
from tests.killpoints import trainer
from tests.killpoints.process import Process, quiet
from tests.killpoints.seams import Fate, Seams
from tests.killpoints.standins import Clock
from tests.support.known_saves import Save

TURNS = 400
"""A save is uploaded, converted, pruned and all in some forty turns; more than this is a standstill."""
TURNS_AFTER = 1200
"""After an error: removals that failed count for the hourly limit, which allows them again after an hour."""
HURT_SECONDS = 300.0
HURT_TURNS = 2500
"""While an error lasts a job is opened anew every ten seconds, some dozen turns each time; one that turns
without a pause takes more."""
DEFECT: Callable[[], None] | None = None
"""What is put in before a life begins, to see that it is found."""
_open, _write, _rename = os.open, os.write, os.rename


class Ended(Exception):
    """The daemon could not start and said why; a service starts it again."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """How a job is set up; `is_eager`: workers are faster than the deciding thread, else slower."""

    name: str
    store: str = "directory"
    universal: bool = True
    is_constant: bool = False
    is_eager: bool = False
    lanes: int = 1
    needs_clones: bool = False
    saves: int = len(trainer.STEPS)
    backfill: str = "newest"


SCENARIOS = (
    Scenario("directory"),
    Scenario("directory-eager", is_eager=True, lanes=4),
    Scenario("directory-zero", universal=False, lanes=4),
    Scenario("directory-constant", is_constant=True),
    Scenario("objects", store="objects"),
    Scenario("objects-eager", store="objects", is_eager=True, lanes=4),
    Scenario("objects-zero", store="objects", universal=False),
    Scenario("objects-constant", store="objects", is_constant=True, lanes=4),
    Scenario("clones", needs_clones=True),
    Scenario("clones-constant-eager", needs_clones=True, is_constant=True, is_eager=True, lanes=4),
)


@dataclass(slots=True)
class Place:
    """Where a life is lived."""

    root: Path
    scenario: Scenario
    save_dir: Path = field(init=False)
    remote: Path = field(init=False)
    history: Path = field(init=False)

    def __post_init__(self) -> None:
        self.save_dir = self.root / "nvme" / "run"
        self.remote = self.root / "nas" / "run"
        self.history = self.root / "history"

    def make(self) -> None:
        """Folders and the job file."""
        self.save_dir.mkdir(parents=True)
        self.remote.mkdir(parents=True)
        forms = '["universal"]' if self.scenario.universal else "[]"
        remote = '["zero", "universal"]' if self.scenario.universal else '["zero"]'
        is_directory = self.scenario.store == "directory"
        where = (
            f'url = "{self.remote}"\nsame_filesystem = true' if is_directory else 'url = "s3://bucket/run"'
        )
        (self.root / "run.toml").write_text(
            f'save_dir = "{self.save_dir}"\nsettle = "0.5s"\nexisting = "{self.scenario.backfill}"\n'
            f'[local]\nsave_total_limit = 1\nforms = {forms}\nmin_free = "1MB"\n'
            f'[[remote]]\nname = "nas"\n{where}\nforms = {remote}\nkeep_last = 2\n'
        )
        self.tell("written 0")

    # --- what is known outside of all processes --------------------------------------------------------

    def tell(self, line: str) -> None:
        """Append to the history, whatever is patched."""
        fd = _open(self.history, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _write(fd, line.encode() + b"\n")
        os.close(fd)

    def told(self) -> list[str]:
        """The history."""
        return self.history.read_text().splitlines()

    @property
    def saves(self) -> tuple[Save, ...]:
        """All that the trainer writes in this life."""
        return trainer.saves()[: self.scenario.saves]

    def tag(self, number: int) -> str:
        """Folder of the n-th save, from the end if negative."""
        return trainer.tag_of(self.saves[number].step, is_constant=self.scenario.is_constant)

    @property
    def is_first_start_noted(self) -> bool:
        """Whether a daemon has noted which saves it found."""
        return bool(list((self.save_dir / "_ckptd" / "state" / "decisions").glob("first-start*")))

    @property
    def written(self) -> int:
        """How many saves the trainer has begun and, but for the last line `writing`, ended."""
        return max(int(line.split()[1]) for line in self.told() if line.startswith("written "))

    @property
    def was_found_first(self) -> bool:
        """The first save lay there before any daemon had noted that it runs: never deleted (P5)."""
        return "found-first" in self.told()

    @property
    def hits(self) -> list[str]:
        """The calls that failed, each with its error and its site."""
        return [line.removeprefix("hit ") for line in self.told() if line.startswith("hit ")]

    def last_of(self, word: str, default: str) -> str:
        """The last thing told under a word."""
        found = [line.split(" ", 1)[1] for line in self.told() if line.startswith(f"{word} ")]
        return found[-1] if found else default


def live(
    place: Place,
    fates: tuple[Fate, ...],
    *,
    upto: int = len(trainer.STEPS),
    reads: bool = False,
    at_rest: Callable[[Place], list[str]] | None = None,
    is_safe: Callable[[Place], bool] | None = None,
) -> None:
    """In a process of its own: from a start to the end of the story, or to the next kill.

    An error that persists ends after `HURT_SECONDS` of the clock's time; the life must end well all the same.
    `at_rest` says what is wrong whenever nothing is left to do for a save, `is_safe` whether an error that
    nobody was told of has hindered nothing.
    """
    clock = Clock(float(place.last_of("clock", "0")) + 1)
    seams = Seams(
        _due(fates, place.written),
        lambda text: _note(place, clock, text),
        reads=reads,
        is_sited=reads and not fates,
        root=f"{place.root}/",
    )
    scenario = place.scenario
    with quiet():
        try:
            process = Process(
                place.root / "run.toml",
                place.root / "shelf",
                seams,
                clock,
                place.tell,
                is_eager=scenario.is_eager,
                lanes=scenario.lanes,
            )
        except CkptdError as error:
            raise Ended(error.message) from error
        if DEFECT is not None:
            DEFECT()
        while True:
            _turns(place, process, is_safe)
            number = place.written
            if number >= upto:
                break
            seams.is_open = False
            if number and scenario.is_constant and seams.hit:
                # the next save takes this one's place, sent or not: a remote that was left alone comes back
                process.until_well(TURNS)
            for text in at_rest(place) if at_rest is not None and number else ():
                place.tell(f"VIOLATION at rest after save {number}: {text}")
            trainer.write(place.save_dir, trainer.saves()[number], is_constant=scenario.is_constant)
            place.tell(f"written {number + 1}")
            seams.arm(_due(fates, number + 1))
            seams.is_open = True
        process.until_well(TURNS)
        if seams.is_hurting:  # met only while all was well
            _turns(place, process, is_safe)
            process.until_well(TURNS)
        seams.is_open = False
        process.publish()
        place.tell(f"exit {process.exit_code}")
        place.tell(f"problems {[p.text for p in process.problems]}")
    _note(place, clock, "idle" if fates else f"calls {json.dumps(seams.parts)}")


def _due(fates: tuple[Fate, ...], save: int) -> Fate:
    """What this process meets first, from where the trainer is."""
    return next((fate for fate in fates if fate.save in (None, save)), Fate())


def left_of(place: Place, fates: tuple[Fate, ...]) -> tuple[Fate, ...] | None:
    """What is still to come after a death; None if none of these was due."""
    due = _due(fates, place.written)
    return fates[fates.index(due) + 1 :] if due in fates else None


def _note(place: Place, clock: Clock, text: str) -> None:
    place.tell(f"clock {clock.ahead_seconds}")
    place.tell(text)


def _turns(place: Place, process: Process, is_safe: Callable[[Place], bool] | None) -> None:
    """Until nothing is left to do; while an error persists, until it ends."""
    seams = process.seams
    quiet_turns = hurt_turns = turns = 0
    while turns < (TURNS_AFTER if seams.hit else TURNS) and hurt_turns < HURT_TURNS:
        process.turn()
        if seams.is_hurting:
            quiet_turns, hurt_turns = 0, hurt_turns + 1
            if time.monotonic() > seams.hit_at_seconds + HURT_SECONDS:
                _heal(place, process, is_safe)
            continue
        turns += 1
        quiet_turns = quiet_turns + 1 if process.is_idle else 0
        if quiet_turns >= 3:
            break
    else:
        place.tell(f"STANDSTILL {[p.text for p in process.problems]}")
    for problem in process.problems:
        if problem.code == "internal":
            place.tell(f"VIOLATION {problem.text}")


def _heal(place: Place, process: Process, is_safe: Callable[[Place], bool] | None) -> None:
    """The error ends; by now status must have said something, if anything was hindered (P17)."""
    told = [p for p in process.problems if p.code not in ("save-overdue", "trainer-may-outrun")]
    process.seams.is_open = False
    if not told and not (is_safe is not None and is_safe(place)):
        place.tell(f"SILENT while {process.seams.hit} failed, status said nothing")
    for problem in told:
        place.tell(f"said {problem.code}: {problem.text}")
    process.seams.fate, process.seams.is_open = Fate(), True


def _die_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def fork(place: Place, *fates: Fate, **more: object) -> int:
    """Live in a forked process; its exit status as `waitpid` tells it (SIGKILL: the point was reached)."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        code = 1
        try:
            live(place, fates, **more)  # type: ignore[arg-type]
            code = 0
        except Ended as error:
            place.tell(f"said ended: {error}")
            code = ENDED
        except Exception:
            place.tell(f"VIOLATION {traceback.format_exc(limit=-6)!r}")
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


KILLED, ENDED = -signal.SIGKILL, 3
