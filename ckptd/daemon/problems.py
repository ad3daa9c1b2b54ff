"""What a person may need to know: a closed list of codes, each with age, text and next step (P17).

A problem is raised when it is seen and cleared when it is not; its age is when it was first raised.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, get_args

from ckptd.core.names import shown

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
    "transfer-stalled",
    "remote-object-damaged",
    "remote-object-unreadable",
    "upload-failed",
    "source-damaged",
    "commit-waiting",
    "commit-incomplete",
    "torn-save",
    "shard-missing",
    "incomplete-save",
    "suspect-save",
    "tag-refused",
    "conversion-refused",
    "conversion-failed",
    "disk-low",
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
    "hold-released",
    "vanished-uncommitted",
    "vanished-kept",
    "waiting-for-remote",
    "journal-set-aside",
    "job-interrupted",
    "no-file-events",
    "metrics-unreadable",
    "memory-short",
    "internal",
]
CODES: tuple[str, ...] = get_args(Code)

Severity = Literal["attention", "behind", "note"]

_SEVERITY: dict[str, Severity] = {
    "remote-unreachable": "behind",
    "remote-full": "attention",
    "remote-left-alone": "behind",
    "transfer-stalled": "behind",
    "upload-failed": "behind",
    "local-failed": "behind",
    "commit-waiting": "behind",
    "waiting-for-remote": "behind",
    "incomplete-save": "note",
    "conversion-refused": "note",
    "trainer-may-outrun": "note",
    "link-slow": "note",
    "save-overdue": "note",
    "hold-released": "note",
    "vanished-kept": "note",
    "journal-set-aside": "note",
    "no-file-events": "note",
    "metrics-unreadable": "note",
    "save-dir-missing": "note",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is stuck. `about`: what it concerns (a tag, a remote), part of its identity."""

    code: Code
    about: str
    text: str
    next_step: str
    since: float
    """Unix seconds."""

    @property
    def severity(self) -> Severity:
        """attention: a person is needed; behind: heals by itself; note: worth knowing."""
        return _SEVERITY.get(self.code, "attention")


class Problems:
    """The open problems of one job; two kinds: raised by events until cleared, and renewed each turn."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Problem] = {}
        self._renewed: set[tuple[str, str]] = set()
        self._per_turn: set[tuple[str, str]] = set()

    def put(self, code: Code, about: str, text: str, next_step: str) -> None:
        """Raise or refresh; stays until `clear`."""
        about, text = shown(about), shown(text)
        key = (code, about)
        old = self._open.get(key)
        since = old.since if old else time.time()
        self._open[key] = Problem(code=code, about=about, text=text, next_step=next_step, since=since)

    def clear(self, code: Code, about: str) -> None:
        """It is over."""
        self._open.pop((code, shown(about)), None)

    def begin_turn(self) -> None:
        """From here to `end_turn`, `see` renews; what is not seen again is cleared."""
        self._renewed = set()

    def see(self, code: Code, about: str, text: str, next_step: str) -> None:
        """Raise for as long as each turn sees it."""
        self.put(code, about, text, next_step)
        self._renewed.add((code, shown(about)))

    def end_turn(self) -> None:
        """Clear what the turn did not see again."""
        for key in self._per_turn - self._renewed:
            self._open.pop(key, None)
        self._per_turn = self._renewed

    def all(self) -> tuple[Problem, ...]:
        """Most severe first, then oldest."""
        rank = {"attention": 0, "behind": 1, "note": 2}
        return tuple(sorted(self._open.values(), key=lambda p: (rank[p.severity], p.since)))
