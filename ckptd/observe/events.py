"""Compare two statuses of a job and return the events between them, purely, so that nothing reports twice.

Hooks and notifications use the same words as `ckptd status` (P17).
"""

from __future__ import annotations

import shlex
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptd.observe.status import CheckpointStatus, JobStatus, ProblemStatus

Kind = Literal[
    "complete", "committed", "converted", "pruned", "problem", "solved", "not-safe", "safe-again", "gap"
]
"""`gap`: events are missing here (observe/event_log.py)."""


RANK = {"note": 0, "behind": 1, "attention": 2}
"""Rank of each severity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened; `about` and `kind` make it comparable with the same thing later."""

    kind: Kind
    job: str
    text: str
    at: str | None
    """RFC 3339, of the status that shows it."""
    about: str = ""
    tag: str | None = None
    step: int | None = None
    form: str | None = None
    remote: str | None = None
    url: str | None = None
    """URL of `remote`."""
    code: str | None = None
    severity: str = "note"
    next_step: str = ""


def events_between(before: JobStatus | None, after: JobStatus) -> tuple[Event, ...]:
    """Return them in the order of a checkpoint's life; without `before` (the first status) problems alone."""
    found: list[Event] = []
    if before is not None:
        old = {_key(checkpoint): checkpoint for checkpoint in before.checkpoints}
        for checkpoint in after.checkpoints:
            found += _checkpoint(after, old.get(_key(checkpoint)), checkpoint)
    known = {_problem_key(p): RANK[p.severity] for p in before.problems} if before is not None else {}
    open_now = {_problem_key(p) for p in after.problems}
    # one that did not heal, and needs a person by now, is news
    found += [_problem(after, p) for p in after.problems if RANK[p.severity] > known.get(_problem_key(p), -1)]
    for problem in before.problems if before is not None else ():
        if _problem_key(problem) not in open_now:
            found.append(_solved(after, problem))
    return tuple(found)


def _key(checkpoint: CheckpointStatus) -> tuple[str, str | None]:
    return checkpoint.tag, checkpoint.local.complete_at


def _problem_key(problem: ProblemStatus) -> tuple[str, str]:
    return problem.code, problem.about


def _checkpoint(job: JobStatus, old: CheckpointStatus | None, new: CheckpointStatus) -> Iterator[Event]:
    event = partial(Event, job=job.name, at=job.as_of, tag=new.tag, step=new.step, about=new.tag)
    if new.local.complete_at is None:
        return
    if old is None:
        yield event(kind="complete", text=f"{new.tag} is complete")
    was = old.remotes if old is not None else {}
    urls = {remote.name: remote.url for remote in job.remotes}
    for remote, forms in new.remotes.items():
        for form, status in forms.items():
            before = was.get(remote, {}).get(form)
            if status.state == "committed" and (before is None or before.state != "committed"):
                text = f"{new.tag} ({form}) is committed on {remote}"
                yield event(kind="committed", text=text, form=form, remote=remote, url=urls.get(remote))
    if new.local.universal == "ready" and (old is None or old.local.universal != "ready"):
        yield event(kind="converted", text=f"{new.tag} is universal", form="universal")
    if new.state == "pruned" and (old is None or old.state != "pruned"):
        where = [n for n, forms in new.remotes.items() if any(f.state == "committed" for f in forms.values())]
        kept = f"it is committed on {', '.join(where)}" if where else "no remote holds it"
        yield event(kind="pruned", text=f"{new.tag} left this node; {kept}")


def _problem(job: JobStatus, problem: ProblemStatus) -> Event:
    return Event(
        kind="problem",
        job=job.name,
        at=job.as_of,
        about=problem.about,
        code=problem.code,
        severity=problem.severity,
        text=problem.text,
        next_step=problem.next_step,
    )


def _solved(job: JobStatus, problem: ProblemStatus) -> Event:
    return Event(
        kind="solved",
        job=job.name,
        at=job.as_of,
        about=problem.about,
        code=problem.code,
        severity=problem.severity,
        text=f"no more: {problem.text}",
    )


# --- Notices: which events a person is told of -----------------------------------------------------------
# Once, again when they last, never in a flood; pure, with the time given. A problem that comes and goes is
# reported once in `repeat`; more than `MOST_IN_AN_HOUR` messages become one that counts the rest.

MOST_IN_AN_HOUR = 20
_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyRules:
    """Hold the settings of `[notify]`."""

    severity: str
    repeat_seconds: float
    not_safe_after_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """Hold everything that happened (for hooks), and what a person is told of it."""

    events: tuple[Event, ...]
    messages: tuple[Event, ...]


@dataclass(slots=True)
class EventReporter:
    """Remember what was reported, for all jobs of a daemon."""

    rules: NotifyRules
    _last: dict[tuple[str, str], JobStatus] = field(default_factory=dict)
    """Name and save_dir → last status: a wrong job file may have the name of a job that runs."""
    _scanned: set[tuple[str, str]] = field(default_factory=set)
    """Those whose last status knew its checkpoints."""
    _told_at: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _times: deque[float] = field(default_factory=deque)
    _held_back: int = 0

    def see(self, status: JobStatus, now_seconds: float, *, is_scanned: bool = True) -> Notices:
        """Take in a job's status; `now_seconds` is a monotonic time.

        `is_scanned`: its checkpoints are known. What it shows first was there before.
        """
        key = _notice_key(status)
        events = events_between(self._last.get(key), status)
        if not is_scanned or key not in self._scanned:
            events = tuple(event for event in events if event.tag is None)
        self._last[key] = status
        (self._scanned.add if is_scanned else self._scanned.discard)(key)
        messages = [e for e in events if e.kind in ("problem", "solved") and self._is_told(e, now_seconds)]
        messages += self._lasting(status, now_seconds)
        messages += self._safety(status, now_seconds)
        return Notices(events=events, messages=self._bounded(messages, now_seconds))

    def is_well(self) -> bool:
        """Tell whether every job that was seen is well, and none unsafe for longer than it may be."""
        return all(
            status.state not in ("attention", "invalid") and not self._is_unsafe(status)
            for status in self._last.values()
        )

    def forget_others(self, jobs: Sequence[JobStatus]) -> None:
        """Forget all jobs but these."""
        left = {_notice_key(status) for status in jobs}
        self._last = {key: status for key, status in self._last.items() if key in left}
        self._scanned &= left

    def _is_told(self, event: Event, now_seconds: float) -> bool:
        """Tell whether to send it: once in `repeat`; that it is over, only if it was sent before."""
        if RANK[event.severity] < RANK[self.rules.severity]:
            return False
        key = (event.job, event.code or event.kind, event.about)
        at = self._told_at.get(key)
        if event.kind == "solved":
            return at is not None
        if at is not None and now_seconds - at < self.rules.repeat_seconds:
            return False
        self._told_at[key] = now_seconds
        return True

    def _lasting(self, status: JobStatus, now_seconds: float) -> list[Event]:
        """Return the events that are open for longer than `repeat` since they were last reported."""
        found = []
        for event in events_between(None, status):
            key = (event.job, event.code or event.kind, event.about)
            at = self._told_at.get(key)
            if at is not None and now_seconds > at and self._is_told(event, now_seconds):
                found.append(event)
        return found

    def _is_unsafe(self, status: JobStatus) -> bool:
        limit = self.rules.not_safe_after_seconds
        return limit is not None and (status.seconds_at_risk or 0.0) > limit

    def _safety(self, status: JobStatus, now_seconds: float) -> list[Event]:
        key = (status.name, "not-safe", "")
        if not self._is_unsafe(status):
            if self._told_at.pop(key, None) is None:
                return []
            text = f"{status.name} is safe again"
            return [Event(kind="safe-again", job=status.name, at=status.as_of, text=text)]
        at = self._told_at.get(key)
        if at is not None and now_seconds - at < self.rules.repeat_seconds:
            return []
        self._told_at[key] = now_seconds
        minutes = int((status.seconds_at_risk or 0.0) / 60)
        last = (
            f"; safe is step {status.safe.step} ({status.safe.tag})" if status.safe else "; nothing is safe"
        )
        return [
            Event(
                kind="not-safe",
                job=status.name,
                at=status.as_of,
                severity="attention",
                text=f"{minutes} min of training would be lost with this node{last}",
                next_step=f"ckptd status {shlex.quote(status.save_dir)}",
            )
        ]

    def _bounded(self, messages: list[Event], now_seconds: float) -> tuple[Event, ...]:
        while self._times and now_seconds - self._times[0] > _HOUR_SECONDS:
            self._times.popleft()
        kept: list[Event] = []
        for message in messages:
            if len(self._times) >= MOST_IN_AN_HOUR:
                self._held_back += 1
                continue
            if self._held_back:
                text = f"{self._held_back} more messages were held back; `ckptd status` has them all"
                kept.append(Event(kind="problem", job=message.job, at=message.at, text=text))
                self._held_back = 0
            self._times.append(now_seconds)
            kept.append(message)
        return tuple(kept)


def _notice_key(status: JobStatus) -> tuple[str, str]:
    return status.name, status.save_dir
