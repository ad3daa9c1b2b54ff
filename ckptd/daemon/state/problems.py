"""Collect problems that a person may need to know: a closed list of codes, each with age, text and next step
(P17).

A problem is raised when it is seen and cleared when it is not; its age is when it was first raised. Each ends
by itself once its cause is gone: most are seen anew by each turn; whoever raises another one clears it, or
says for how long it is worth saying.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from ckptd.base.names import shown
from ckptd.errors import RefusedError, SourceChanged

if TYPE_CHECKING:
    from ckptd.errors import CkptdError

Code = Literal[
    "config-invalid",
    "lock-held",
    "reload-refused",
    "save-dir-missing",
    "device-changed",
    "no-rights",
    "remote-unreachable",
    "remote-not-ours",
    "remote-denied",
    "remote-full",
    "remote-damaged",
    "remote-left-alone",
    "decision-unpublished",
    "transfer-stalled",
    "remote-object-damaged",
    "remote-object-unreadable",
    "local-file-damaged",
    "local-file-unreadable",
    "copy-repaired",
    "upload-failed",
    "source-damaged",
    "commit-waiting",
    "commit-incomplete",
    "torn-save",
    "shard-missing",
    "incomplete-save",
    "linked-save",
    "unprotected-save",
    "suspect-save",
    "tag-refused",
    "conversion-refused",
    "conversion-failed",
    "disk-low",
    "disk-full",
    "disk-full-soon",
    "link-slow",
    "save-overdue",
    "trainer-may-outrun",
    "prune-blocked",
    "local-failed",
    "retire-blocked",
    "retention-blocked",
    "config-differs",
    "save-dir-shared",
    "name-shared",
    "run-shared",
    "run-left",
    "run-copied",
    "hold-released",
    "vanished-uncommitted",
    "vanished-kept",
    "waiting-for-remote",
    "journal-set-aside",
    "job-interrupted",
    "no-file-events",
    "metrics-unreadable",
    "events-unwritten",
    "ready-dir-unwritten",
    "node-ending",
    "termination-unread",
    "memory-short",
    "internal",
]
CODES: tuple[str, ...] = get_args(Code)

Severity = Literal["attention", "behind", "note"]

_SEVERITY: dict[str, Severity] = {
    "remote-unreachable": "behind",
    "remote-full": "attention",
    "remote-left-alone": "behind",
    "decision-unpublished": "behind",
    "transfer-stalled": "behind",
    "upload-failed": "behind",
    "local-failed": "behind",
    "events-unwritten": "behind",
    "ready-dir-unwritten": "behind",
    "node-ending": "behind",
    "termination-unread": "behind",
    "commit-waiting": "behind",
    "waiting-for-remote": "behind",
    "incomplete-save": "note",
    "conversion-refused": "note",
    "trainer-may-outrun": "note",
    "link-slow": "note",
    "save-overdue": "note",
    "hold-released": "note",
    "copy-repaired": "note",
    "name-shared": "note",
    "run-left": "note",
    "run-copied": "note",
    "journal-set-aside": "note",
    "no-file-events": "note",
    "metrics-unreadable": "note",
    "save-dir-missing": "note",
}


_MAY_HEAL: frozenset[Code] = frozenset(
    {
        "disk-low",
        "disk-full-soon",
        "torn-save",
        "suspect-save",
        "shard-missing",
        "conversion-failed",
        "job-interrupted",
        "decision-unpublished",
        "waiting-for-remote",
        "vanished-kept",
        "remote-object-damaged",
        "local-file-damaged",
    }
)
"""Problems that a save, a deletion, a repair, a retry or a start ends within a minute in normal training."""

_OUTLIVES_SAVE_DIR: tuple[Code, ...] = (
    *("reload-refused", "vanished-uncommitted", "internal", "node-ending", "termination-unread"),
)

HEALS_SECONDS = 60.0
"""Such a problem is a note for so long: nobody is called, and no exit code tells of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is stuck. `about`: what it concerns (a tag, a remote), part of its identity."""

    code: Code
    about: str
    text: str
    next_step: str
    since: float
    """Unix seconds."""
    severity: Severity
    """Now. attention: a person is needed; behind: heals by itself; note: worth knowing."""
    lasting: Severity
    """Severity once it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    problem: Problem
    raised_at_seconds: float
    """Monotonic, as is the next."""
    until_seconds: float = math.inf

    def now(self, now_seconds: float) -> Problem:
        is_young = now_seconds - self.raised_at_seconds < HEALS_SECONDS
        if self.problem.code in _MAY_HEAL and is_young:
            return replace(self.problem, severity="note")
        return self.problem


class Problems:
    """The open problems of one job; two kinds: raised by events until cleared, and renewed each turn."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], _Open] = {}
        self._renewed: set[tuple[str, str]] = set()
        self._per_turn: set[tuple[str, str]] = set()

    def put(
        self,
        code: Code,
        about: str,
        text: str,
        next_step: str,
        *,
        severity: Severity | None = None,
        lasts_seconds: float = math.inf,
    ) -> None:
        """Raise or refresh; stays until `clear`, or for so long. `severity`: another than the code's."""
        about, text = shown(about), shown(text)
        key, now = (code, about), time.monotonic()
        old = self._open.get(key)
        lasting: Severity = severity or _SEVERITY.get(code, "attention")
        problem = Problem(
            code=code,
            about=about,
            text=text,
            next_step=next_step,
            since=old.problem.since if old else time.time(),
            severity=lasting,
            lasting=lasting,
        )
        raised_at = old.raised_at_seconds if old else now
        self._open[key] = _Open(
            problem=problem, raised_at_seconds=raised_at, until_seconds=now + lasts_seconds
        )

    def clear(self, code: Code, about: str) -> None:
        """End a problem."""
        self._open.pop((code, shown(about)), None)

    def begin_turn(self) -> None:
        """Begin a turn: problems that are not seen again before `end_turn` are cleared."""
        self._renewed = set()

    def see(
        self, code: Code, about: str, text: str, next_step: str, *, severity: Severity | None = None
    ) -> None:
        """Raise for as long as each turn sees it."""
        self.put(code, about, text, next_step, severity=severity)
        self._renewed.add((code, shown(about)))

    def stays(self, code: Code, about: str) -> None:
        """Keep a reported problem open unchanged: its subject is just being tried again."""
        self._renewed.add((code, shown(about)))

    def end_turn(self) -> None:
        """Clear what the turn did not see again."""
        for key in self._per_turn - self._renewed:
            self._open.pop(key, None)
        self._per_turn = self._renewed

    def begin_anew(self) -> None:
        """Drop the problems of a save_dir that was replaced by another directory or deleted."""
        self._open = {key: one for key, one in self._open.items() if one.problem.code in _OUTLIVES_SAVE_DIR}
        self._per_turn &= self._open.keys()

    def all(self) -> tuple[Problem, ...]:
        """Most severe first, then oldest."""
        now = time.monotonic()
        self._open = {key: one for key, one in self._open.items() if one.until_seconds > now}
        rank = {"attention": 0, "behind": 1, "note": 2}
        found = [one.now(now) for one in self._open.values()]
        return tuple(sorted(found, key=lambda p: (rank[p.severity], p.since)))


# --- Failures of this node's own disk, each tried again --------------------------------------------------

FAILURE_SECONDS = 120.0
"""Status reports a failure here for so long; another failed try reports it anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFailure:
    """Record why something could not be done on this node; until when (monotonic) that is worth saying."""

    text: str
    hint: str
    until_seconds: float


class Failures:
    """Hold what failed on this node and why, until it works or for a while."""

    def __init__(self) -> None:
        self._open: dict[str, LocalFailure] = {}

    def note(self, what: str, error: CkptdError) -> None:
        """Record that something failed and is tried again; what the trainer changed is no failure."""
        if not isinstance(error, SourceChanged | RefusedError):
            until = time.monotonic() + FAILURE_SECONDS
            self._open[what] = LocalFailure(text=error.message, hint=error.hint, until_seconds=until)

    def clear(self, what: str) -> None:
        """Record that it works."""
        self._open.pop(what, None)

    def forget_old(self) -> None:
        """Forget what was not tried again for a while."""
        now = time.monotonic()
        self._open = {what: one for what, one in self._open.items() if one.until_seconds > now}

    def all(self) -> dict[str, LocalFailure]:
        """Return what failed, and why."""
        return self._open
