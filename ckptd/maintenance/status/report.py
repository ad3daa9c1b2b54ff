"""Report what `ckptd status` says as values: of a job of this node, or of a remote with all its nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, cast

from ckptd.base.humanize import in_columns, printable, size_of
from ckptd.maintenance.status.rows import checkpoints_of
from ckptd.maintenance.status.verdict import exit_code, life_of, seconds_since, verdict
from ckptd.maintenance.status.words import (
    MARKS,
    NEXT,
    clauses,
    form_state_of,
    forms_here,
    start_it,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ckptd.maintenance.listing import ListedCheckpoint
    from ckptd.maintenance.status.fleet import FleetStatus, NodeReport
    from ckptd.maintenance.status.verdict import Life, Verdict

    Severity = Literal["attention", "behind", "note"]

_SHOWN = 10
"""Checkpoints in the text of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeReport:
    """The newest committed checkpoint that a run can go on from."""

    tag: str
    step: int
    generation: int
    branch: int
    committed_at: str
    """RFC 3339, UTC; empty: its COMMIT names none."""
    age_seconds: float | None
    """Seconds since it was committed; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemReport:
    """Something that is stuck or worth knowing, and what to do about it."""

    code: str
    """Code of docs/problems.md; empty: no daemon published it."""
    severity: Severity
    """attention: a person is needed; behind: it goes on by itself; note."""
    text: str
    hint: str = ""
    """Advice: a command to type, or what to do."""
    since: str = ""
    """RFC 3339, UTC."""
    about: str = ""
    """A tag, or a remote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReport:
    """An upload under way; `eta_seconds` None: not known yet."""

    tag: str
    form: str
    remote: str
    bytes_done: int
    bytes_total: int
    eta_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """A checkpoint and where it is."""

    tag: str
    step: int | None
    generation: int | None
    branch: int | None
    bytes: int | None
    """Bytes of its ZeRO form; None: not known."""
    state: str
    """State in the words of the screen: saving, complete, uploading, committed, deleted here, suspect, …."""
    here: tuple[str, ...] = ()
    """Forms on this node; `kept copy`: only what ckptd keeps of it until it is committed."""
    remotes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Remote → form → its state there: committed, uploading, waiting, failed, refused, …."""
    reason: str | None = None
    hint: str | None = None
    """The command for one that will not be safe as it is."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class JobReport:
    """Hold what `ckptd status JOB` says. Checkpoints: the newest first."""

    name: str
    verdict: Verdict
    exit_code: int
    """Exit code of the command: 0 safe · 1 a person is needed · 3 behind, or nothing is safe yet."""
    clauses: tuple[str, ...]
    """Reasons of the verdict, and what is under way."""
    save_dir: str | None
    """None: the report is of a remote."""
    url: str | None = None
    """None: the report is of this node."""
    safe: SafeReport | None
    steps_at_risk: int | None = None
    """None: not known."""
    seconds_at_risk: float | None = None
    """Training since the safe checkpoint was saved."""
    checkpoints: tuple[CheckpointReport, ...] = ()
    problems: tuple[ProblemReport, ...] = ()
    uploads: tuple[UploadReport, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    """Every node of a remote's job; empty for a job of this node."""

    @property
    def headline(self) -> str:
        """Return the first line of the screen, without the job's name."""
        return f"{self.verdict}  {' · '.join(self.clauses)}"

    def __repr__(self) -> str:
        """Show the first line, what is open, and the newest checkpoints."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield printable(f"{self.name}  {self.headline}")
        for problem in self.problems:
            yield printable(f"  {MARKS.get(problem.severity, '·')} {problem.text}")
            if problem.hint:
                yield printable(f"{NEXT}{problem.hint}")
        remotes = list(dict.fromkeys(name for one in self.checkpoints for name in one.remotes))
        rows = [("tag", "step", "size", "state", "here", *remotes)]
        for one in self.checkpoints[:_SHOWN]:
            step = "?" if one.step is None else str(one.step)
            size = "" if one.bytes is None else size_of(one.bytes)
            there = (_there(one.remotes.get(name, {})) for name in remotes)
            rows.append((one.tag, step, size, one.state, " ".join(one.here), *there))
        if len(rows) > 1:
            yield from in_columns(rows)
        if len(self.checkpoints) > _SHOWN:
            yield f"  and {len(self.checkpoints) - _SHOWN} more"
        for one in self.checkpoints:
            if one.hint:
                yield printable(f"  {one.tag}: {one.reason or one.state}")
                yield printable(f"{NEXT}{one.hint}")


def _there(forms: Mapping[str, str]) -> str:
    return ", ".join(f"{form} {state}" for form, state in forms.items())


# --- of a job of this node -------------------------------------------------------------------------------


def reports_of(document: dict[str, Any], now: float) -> tuple[JobReport, ...]:
    """Report the jobs of a published document."""
    life = life_of(document, now)
    return tuple(_report_of(job, life, now) for job in document["jobs"])


def _report_of(job: dict[str, Any], life: Life, now: float) -> JobReport:
    since = seconds_since(job["as_of"], now) if job.get("as_of") else life.age_seconds
    at_risk = job.get("seconds_at_risk")
    return JobReport(
        name=job["name"],
        verdict=verdict(job, life),
        exit_code=exit_code([job], is_alive=life.is_well),
        clauses=tuple(clauses(job, life, now)),
        save_dir=job["save_dir"],
        safe=_safe(job["safe"], since) if job.get("safe") else None,
        steps_at_risk=job.get("steps_at_risk"),
        seconds_at_risk=None if at_risk is None else at_risk + since,
        checkpoints=tuple(_checkpoint(one, is_alive=life.is_well) for one in checkpoints_of(job)),
        problems=tuple(_problems(job, life)),
        uploads=tuple(_uploads(job)) if life.is_well else (),
    )


def _safe(safe: dict[str, Any], since_seconds: float) -> SafeReport:
    at = safe["committed_at"]
    return SafeReport(
        tag=safe["tag"],
        step=safe["step"],
        generation=safe["generation"],
        branch=safe["branch"],
        committed_at=at,
        age_seconds=safe["age_seconds"] + since_seconds if at else None,
    )


def _checkpoint(one: dict[str, Any], *, is_alive: bool) -> CheckpointReport:
    return CheckpointReport(
        tag=one["tag"],
        step=one["step"],
        generation=one["generation"],
        branch=one["branch"],
        bytes=one["bytes"],
        state=state_of(one, is_alive=is_alive),
        here=tuple(forms_here(one)),
        remotes={
            name: {
                form: form_state_of(state, is_alive=is_alive)
                for form, state in forms.items()
                if state["state"] != "none"
            }
            for name, forms in one["remotes"].items()
        },
        reason=one.get("reason"),
        hint=one.get("next_step"),
    )


def _problems(job: dict[str, Any], life: Life) -> Iterator[ProblemReport]:
    """Yield what is published as open; first that nobody watches, which no daemon can publish."""
    if not life.is_well and job["state"] != "invalid":
        yield ProblemReport(code="", severity="attention", text=life.reason, hint=start_it(job, life))
    for problem in job["problems"]:
        yield ProblemReport(
            code=problem["code"],
            severity=cast("Severity", problem["severity"]),
            text=problem["text"],
            hint=problem["next_step"],
            since=problem["since"],
            about=problem.get("about", ""),
        )


def _uploads(job: dict[str, Any]) -> Iterator[UploadReport]:
    for one in job["checkpoints"]:
        for remote, forms in one["remotes"].items():
            for form, state in forms.items():
                if state["state"] == "shipping":
                    yield UploadReport(
                        tag=one["tag"],
                        form=form,
                        remote=remote,
                        bytes_done=state["bytes_done"],
                        bytes_total=state["bytes_total"],
                        eta_seconds=state.get("eta_seconds"),
                    )


# --- of a remote -----------------------------------------------------------------------------------------


def report_of_remote(url: str, config_dir: Path | None = None) -> JobReport:
    """Look once at a remote, by its URL or directory.

    Raises:
        RemoteError: it does not answer, or is no remote of ckptd.
    """
    from ckptd.maintenance.listing import list_remote
    from ckptd.maintenance.status.fleet import FleetReader, inventory_of

    inventory = inventory_of(url, config_dir)
    found = FleetReader(inventory).read()
    listing = list_remote(inventory, datetime.now(UTC))
    committed = [one for one in listing.checkpoints if found.run_id in (None, one.run_id)]
    safe = found.safe
    return JobReport(
        name=found.job,
        verdict=cast("Verdict", found.verdict.upper().replace("-", " ")),
        exit_code=found.exit_code,
        clauses=tuple(found.clauses),
        save_dir=None,
        url=found.url,
        safe=None
        if safe is None
        else SafeReport(
            tag=safe.tag,
            step=safe.step,
            generation=safe.generation,
            branch=safe.branch,
            committed_at=safe.committed_at,
            age_seconds=safe.age_seconds,
        ),
        steps_at_risk=_steps_at_risk(found),
        seconds_at_risk=found.seconds_at_risk,
        checkpoints=(*_uncommitted(found), *(_committed(one, listing.name) for one in reversed(committed))),
        problems=tuple(ProblemReport(code="", severity="attention", text=text) for text in found.problems),
        nodes=found.nodes,
    )


def _steps_at_risk(found: FleetStatus) -> int | None:
    """Return None where it is not known; after a rewind the newest step is no larger one."""
    if found.safe is None or found.newest_step is None or found.newest_step < found.safe.step:
        return None
    return found.newest_step - found.safe.step


def _uncommitted(found: FleetStatus) -> Iterator[CheckpointReport]:
    for row in found.uncommitted:
        yield CheckpointReport(
            tag=row.tag,
            step=row.step,
            generation=row.generation,
            branch=row.branch,
            bytes=None,
            state="not committed",
            reason=f"{', '.join(row.nodes)} uploaded their parts; {row.text}",
        )


def _committed(one: ListedCheckpoint, remote: str) -> CheckpointReport:
    return CheckpointReport(
        tag=one.tag,
        step=one.step,
        generation=one.generation,
        branch=one.branch,
        bytes=next((form.bytes for form in one.forms if form.form == "zero"), None),
        state="committed",
        remotes={remote: {form.form: "committed" for form in one.forms}},
    )
