"""What happened to a job between two of its statuses: a pure comparison, so that nobody has to report twice.

Hooks and notifications tell what `status` says, in the same words (P17).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.observe.status import CheckpointStatus, JobStatus, ProblemStatus

Kind = Literal["complete", "committed", "converted", "pruned", "problem", "solved", "not-safe", "safe-again"]


RANK = {"note": 0, "behind": 1, "attention": 2}
"""Of severities."""


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
    code: str | None = None
    severity: str = "note"
    next_step: str = ""


def events_between(before: JobStatus | None, after: JobStatus) -> tuple[Event, ...]:
    """In the order of a checkpoint's life; without `before` (a daemon that started) problems alone."""
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
    for remote, forms in new.remotes.items():
        for form, status in forms.items():
            before = was.get(remote, {}).get(form)
            if status.state == "committed" and (before is None or before.state != "committed"):
                text = f"{new.tag} ({form}) is committed on {remote}"
                yield event(kind="committed", text=text, form=form, remote=remote)
    if new.local.universal == "ready" and (old is None or old.local.universal != "ready"):
        yield event(kind="converted", text=f"{new.tag} is universal", form="universal")
    if new.state == "pruned" and old is not None and old.state != "pruned":
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
