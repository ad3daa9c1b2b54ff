"""Make what the page shows, as typed values, from a published status or from a remote alone.

Words, signs and rules are those of `ckptd status`. Texts are made `printable` here and are escaped for HTML
by the template. `now` is in unix seconds; whatever is as old as `now` says is relative to it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptd.base.humanize import ago, printable, printable_everywhere, size_of
from ckptd.maintenance.status import rows, words
from ckptd.maintenance.status.verdict import exit_code, life_of, verdict
from ckptd.page.timeline import Timeline, Track, When, laid_out, when

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.maintenance.status.rows import Checkpoint
    from ckptd.maintenance.status.verdict import Life
    from ckptd.observe.audit import Deleted
    from ckptd.observe.status import FormStatus, JobStatus, ProblemStatus, Status

Tone = Literal["good", "late", "bad", "calm"]
_TONES: dict[str, Tone] = {"SAFE": "good", "BEHIND": "late", "PAUSED": "late", "WAITING": "calm"}
"""Every other verdict is bad, as in the terminal."""
_SEVERITIES: dict[str, tuple[str, Tone]] = {"attention": ("!", "bad"), "behind": ("~", "late")}
FEW = 3
"""Jobs that are open at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of a checkpoint in one place."""

    name: str
    sign: str
    word: str
    tone: Tone
    title: str = ""
    """Tooltip: why, since when, which COMMIT."""
    percent: int | None = None
    """Progress of an upload under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """One checkpoint."""

    tag: str
    step: str
    size: str
    here: str
    marks: str
    tone: Tone
    places: tuple[tuple[Form, ...], ...]
    """Forms in each of the job's places, in the order of their titles."""
    note: str = ""
    command: str = ""
    """Command to type; `effect`: what it does."""
    effect: str = ""
    kept: str = ""
    """Reason why it is kept here or deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadView:
    """One upload that is under way."""

    tag: str
    form: str
    place: str
    percent: int | None
    done: str
    left: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemView:
    """Something that is open; `next_step`: what to type."""

    sign: str
    tone: Tone
    text: str
    next_step: str = ""
    since: When | None = None

    @property
    def is_typed(self) -> bool:
        """Tell whether the next step is a command to copy, and no sentence."""
        commands = ("ckptd ", "CKPTD_", "cd ", "systemctl ", "sudo ", "mkdir ", "pip ")
        return self.next_step.startswith(commands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure of the outlook."""

    title: str
    text: str
    tone: Tone = "calm"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldView:
    """A checkpoint in a remote, and what its retention makes of it."""

    place: str
    tag: str
    forms: str
    verdict: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a job that is looked at by its remote."""

    name: str
    ranks: str
    newest: str
    state: str
    tone: Tone
    heard: str
    version: str
    is_in_safe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Hold what is shown below the first line of a job."""

    uploads: tuple[UploadView, ...] = ()
    places: tuple[str, ...] = ()
    has_local: bool = True
    checkpoints: tuple[CheckpointView, ...] = ()
    older: tuple[CheckpointView, ...] = ()
    older_title: str = ""
    timeline: Timeline | None = None
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    kept_rows: tuple[CheckpointView, ...] = ()
    held: tuple[HeldView, ...] = ()
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownJob:
    """One job; what is below its first line is made where it is shown."""

    key: str
    """Key that stays the same as long as it is the same job."""
    name: str
    where: str
    tone: Tone
    verdict: str
    clauses: tuple[str, ...]
    problems: tuple[ProblemView, ...] = ()
    needs_person: int = 0
    committed: When | None = None
    as_of: When | None = None
    code: int = 0
    """Exit code of `ckptd status` for it."""
    make_detail: Callable[[], Detail] | None = None
    """None: nothing more is known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that is shown."""

    made: When
    jobs: tuple[ShownJob, ...]
    notices: tuple[str, ...] = ()
    open_keys: frozenset[str] = frozenset()
    """Jobs and folded parts that are open."""
    is_reading: bool = False
    """Some remote was not read yet."""
    is_whole: bool = True
    """True: folded parts are included."""

    @property
    def title(self) -> str:
        """Return the title of the browser's tab: how it stands first."""
        return f"{self.summary} · ckptd"

    @property
    def counts(self) -> tuple[tuple[str, Tone, int], ...]:
        """Return verdict → how many jobs, the worst first."""
        order: tuple[Tone, ...] = ("bad", "late", "calm", "good")
        counted = Counter((job.verdict, job.tone) for job in self.jobs)
        ranked = sorted(counted.items(), key=lambda one: (order.index(one[0][1]), one[0][0]))
        return tuple((word, tone, count) for (word, tone), count in ranked)

    @property
    def summary(self) -> str:
        """Say how the jobs stand."""
        if len(self.jobs) == 1:
            return f"{self.jobs[0].verdict} {self.jobs[0].name}"
        return ", ".join(f"{count} {word}" for word, _, count in self.counts) or "no job"

    @property
    def exit_code(self) -> int:
        """Return 1 where a person is needed, else 3 where one is behind, else 0."""
        codes = {job.code for job in self.jobs} or {1}
        return 1 if 1 in codes else max(codes)

    def is_open(self, key: str) -> bool:
        """Tell whether a job or a folded part is open."""
        return key in self.open_keys

    def has(self, key: str) -> bool:
        """Tell whether the content of a job or a folded part is in the page."""
        return self.is_whole or self.is_open(key)


def key_of(name: str, where: str) -> str:
    """Return the key of a job."""
    return f"j{hashlib.sha256(f'{name} {where}'.encode(errors='replace')).hexdigest()[:12]}"


def first_open(jobs: Sequence[ShownJob]) -> frozenset[str]:
    """Choose the jobs that are open before anybody chose: all of a few, else some that need a person."""
    few = jobs if len(jobs) <= FEW else [job for job in jobs if job.needs_person][:FEW]
    return frozenset(job.key for job in few)


def jobs_of(document: Status, now: float, deleted: Sequence[Deleted] = ()) -> list[ShownJob]:
    """Return the jobs of a published status; details are made when they are asked for.

    `deleted`: what was deleted in remotes of the job, where there is one.
    """
    life = life_of(document, now)
    return [_job(one, life, now, deleted) for one in printable_everywhere(document.jobs)]


def notices_of(document: Status) -> list[str]:
    """Say what the daemon itself cannot do."""
    return [printable(text) for text in words.daemon_errors(document.daemon)]


def _job(job: JobStatus, life: Life, now: float, deleted: Sequence[Deleted]) -> ShownJob:
    word = verdict(job, life)
    problems = [_problem(one, now) for one in job.problems]
    if not life.is_well and job.state != "invalid":
        problems.insert(0, _not_watched(job, life))
    return ShownJob(
        key=key_of(job.name, job.save_dir),
        name=job.name,
        where=job.save_dir,
        tone=_TONES.get(word, "bad"),
        verdict=word,
        clauses=tuple(words.clauses(job, life, now)),
        problems=tuple(problems),
        needs_person=sum(one.tone == "bad" for one in problems),
        committed=when(job.safe.committed_at if job.safe else None, now),
        as_of=when(job.as_of, now),
        code=exit_code([job], is_alive=life.is_well),
        make_detail=lambda: _detail(job, life, now, deleted),
    )


def _not_watched(job: JobStatus, life: Life) -> ProblemView:
    """Say that nobody watches, and what starts the daemon."""
    step = printable(words.start_it(job, life))
    command = printable(life.start_command)
    before, found, after = step.partition(command) if command else (step, "", "")
    text = f"{life.reason} → {before.rstrip(': ')}{after}"
    return ProblemView(sign="!", tone="bad", text=text, next_step=found)


def _problem(problem: ProblemStatus, now: float) -> ProblemView:
    sign, tone = _SEVERITIES.get(problem.severity, ("·", "calm"))
    return ProblemView(
        sign=sign,
        tone=tone,
        text=problem.text,
        next_step=problem.next_step,
        since=when(problem.since, now),
    )


def _detail(job: JobStatus, life: Life, now: float, deleted: Sequence[Deleted]) -> Detail:
    checkpoints = rows.checkpoints_of(job)
    places = list(dict.fromkeys(name for one in checkpoints for name in one.remotes))
    chosen = rows.worth_a_row(checkpoints)
    notes = [words.shared_line(job), *(words.abilities(one, is_all=False) for one in job.remotes)]

    def made(ones: Sequence[Checkpoint]) -> tuple[CheckpointView, ...]:
        return tuple(_row(one, places, now, is_alive=life.is_well) for one in ones)

    known = [one for one in (*chosen.shown, *chosen.gone) if one.local.seen_at]
    tracks = [_track(one, now, deleted, names_places=len(places) > 1) for one in known]
    return Detail(
        uploads=tuple(_uploads(checkpoints)) if life.is_well else (),
        places=tuple(places),
        checkpoints=made(chosen.shown),
        older=made([*chosen.older, *chosen.there, *chosen.gone]),
        older_title=chosen.left_out,
        timeline=laid_out(tracks, now),
        facts=tuple(_outlook(job)),
        notes=tuple(line for line in notes if line),
        kept_rows=made([one for one in checkpoints if one.keep or one.goes]),
        held=tuple(_held(job)),
    )


# --- checkpoints -----------------------------------------------------------------------------------------


def _row(checkpoint: Checkpoint, places: Sequence[str], now: float, *, is_alive: bool) -> CheckpointView:
    step, branch = checkpoint.step, checkpoint.branch or 1
    note, effect = rows.note_of(checkpoint)
    command = checkpoint.next_step or ""
    return CheckpointView(
        tag=checkpoint.tag,
        step=("?" if step is None else str(step)) + (f" (branch {branch})" if branch > 1 else ""),
        size="" if checkpoint.bytes is None else size_of(checkpoint.bytes),
        here=" ".join(words.forms_here(checkpoint.local)) or "–",
        marks=rows.marks_of(checkpoint),
        tone="bad" if rows.is_wrong(checkpoint) else "calm",
        places=tuple(
            tuple(
                _form(name, form, now, is_alive=is_alive)
                for name, form in checkpoint.remotes.get(place, {}).items()
                if form.state != "none"
            )
            for place in places
        ),
        note=note,
        command=command,
        effect=effect.removeprefix(command).strip(),
        kept=rows.why_kept(checkpoint),
    )


def _form(name: str, form: FormStatus, now: float, *, is_alive: bool) -> Form:
    is_uploading = form.state == "shipping"
    percent = _percent(form) if is_uploading else None
    said = [form.reason or ""]
    if done := when(form.ended_at, now):
        said.append(f"{done.absolute} ({done.relative})")
    if form.commit_sha256:
        said.append(f"COMMIT {form.commit_sha256[:12]}")
    title = "; ".join(text for text in said if text)
    if is_uploading and not is_alive:
        word = f"stopped at {'?' if percent is None else percent} %"
        return Form(name=name, sign="✗", word=word, tone="bad", title=title)
    if is_uploading:
        word = "uploading" if percent is None else f"{percent} %"
        return Form(name=name, sign="↑", word=word, tone="late", title=title, percent=percent)
    sign, tone = rows.sign_of(form.state)
    word = words.form_state_of(form, is_alive=is_alive)
    return Form(name=name, sign=sign, word=word, tone=_OF_STYLE.get(tone, "calm"), title=title)


_OF_STYLE: dict[str, Tone] = {"green": "good", "red": "bad", "yellow": "late"}


def _percent(form: FormStatus) -> int | None:
    return int(100 * form.bytes_done / form.bytes_total) if form.bytes_total else None


def _uploads(checkpoints: Sequence[Checkpoint]) -> list[UploadView]:
    """Return what is under way, in the order of the checkpoints."""
    return [
        UploadView(
            tag=checkpoint.tag,
            form=name,
            place=place,
            percent=_percent(form),
            done=f"{size_of(form.bytes_done)} of {size_of(form.bytes_total)}"
            if form.bytes_total
            else "begins",
            left="" if form.eta_seconds is None else f"{ago(form.eta_seconds)} left",
        )
        for checkpoint in checkpoints
        for place, forms in checkpoint.remotes.items()
        for name, form in forms.items()
        if form.state == "shipping"
    ]


def _track(checkpoint: Checkpoint, now: float, deleted: Sequence[Deleted], *, names_places: bool) -> Track:
    local = checkpoint.local
    committed = [
        (place if names_places else "", name, form)
        for place, forms in checkpoint.remotes.items()
        for name, form in forms.items()
        if form.ended_at
    ]
    found = [
        when(form.ended_at, now, f"{place} {name}".strip() if len(committed) > 1 else "")
        for place, name, form in committed
    ]
    there = [
        when(one.at, now, one.form)
        for one in deleted
        if one.tag == checkpoint.tag and one.generation == checkpoint.generation
    ]
    return Track(
        tag=checkpoint.tag,
        saved=when(local.seen_at, now),
        complete=when(local.complete_at, now),
        committed=tuple(one for one in found if one is not None),
        deleted_here=when(local.ended_at, now),
        deleted_there=tuple(one for one in there if one is not None),
        is_here=bool(local.present or local.held),
    )


# --- outlook ---------------------------------------------------------------------------------------------


def _outlook(job: JobStatus) -> list[Fact]:
    """Say how long the disk and the link last."""
    found = []
    clauses = words.disk_clauses(job)
    if clauses:
        is_full_soon = job.disk is not None and job.disk.full_in_saves is not None
        disk = [text for text in clauses if not text.startswith(("trainer writes", "upload "))]
        text = ", ".join([disk[0].removeprefix("disk "), *disk[1:]])
        found.append(Fact(title="Disk", text=text, tone="late" if is_full_soon else "calm"))
    written, sent = job.production_bytes_per_second, job.link_bytes_per_second
    if written:
        found.append(Fact(title="Trainer writes", text=f"{size_of(written)}/s"))
    if sent:
        text = f"{size_of(sent)}/s"
        if written:
            part = sent / written
            text += f", {part:.1f} times what the trainer writes"
        is_slow = bool(written and sent < written)
        found.append(Fact(title="Upload", text=text, tone="late" if is_slow else "calm"))
    for remote in job.remotes:
        verified = f"connected, uploads verified by {remote.proof or '?'}"
        text = verified if remote.attached else "not attached"
        found.append(
            Fact(
                title=words.remote_shown(remote),
                text=f"{text} · {remote.url}" if remote.url else text,
                tone="calm" if remote.attached else "late",
            )
        )
    return found


def _held(job: JobStatus) -> list[HeldView]:
    return [
        HeldView(
            place=remote.name,
            tag=held.tag,
            forms=", ".join(held.forms),
            verdict=f"leaves {', '.join(held.leaves)}" if held.verdict == "step-down" else held.verdict,
            why="; ".join(held.why),
        )
        for remote in job.remotes
        for held in remote.held
    ]
