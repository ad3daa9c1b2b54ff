"""Word the answers of `ckptd status`: the first line of a job, what needs a person, one checkpoint's story.

They follow from the published document and the time alone, so that every answer can be tested word by word
(P17).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.base.humanize import ago, size_of
from ckptd.maintenance.status.verdict import (
    is_unprotected,
    newest_in_doubt,
    seconds_since,
    unix_of,
    unread,
    verdict,
)
from ckptd.observe.status import all_committed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.maintenance.status.verdict import Life
    from ckptd.observe.status import DaemonStatus, FormStatus, JobStatus, LocalStatus, RemoteStatus

FULL_SOON_SAVES = 10
"""A disk that is full later than that is told below the first line alone."""

MANY_SAVES = 1000
"""Room for so many needs no word."""
SHOWN_REMOTES = 2
"""Remotes that the first line names; the table has all of them."""

NEXT = "  → "
"""Sign before what to type next."""
MARKS = {"attention": "!", "behind": "~"}
"""Severity → sign before a problem; `·` before any other."""
_STATES = {"pruned": "deleted here", "retired": "deleted there", "vanished": "gone", "superseded": "replaced"}


def headline(job: JobStatus, life: Life, now: float) -> str:
    """Write the first line without the job's name: is my run safe?"""
    return f"{verdict(job, life)}  {' · '.join(clauses(job, life, now))}"


def clauses(job: JobStatus, life: Life, now: float) -> list[str]:
    """Say what the verdict rests on, what is under way, and what a person asked for or must do."""
    since = seconds_since(job.as_of, now) if job.as_of else life.age_seconds
    runs = job.state != "invalid"
    said = [*(life.reason.split("; ") if runs else ()), _committed(job, since)]
    said += [_under_way(job), _slowed(job)] if life.is_well else []
    said += [_doubtful(job), _risk(job, since, life)]
    said += _control(job, now)
    said.append(_full(job) if life.is_well else "")
    needed = sum(problem.severity == "attention" for problem in job.problems)
    if needed and runs:
        said.append("1 thing needs a person" if needed == 1 else f"{needed} things need a person")
    said += [f"OPT-OUT {text}" for text in job.opt_outs]
    return [clause for clause in said if clause]


def _committed(job: JobStatus, since_seconds: float) -> str:
    safe = job.safe
    if safe is None:
        words = {"waiting": "no checkpoint yet", "invalid": "this job does not run"}
        if job.state == "waiting" and is_unprotected(job):
            return "no ZeRO checkpoint is here"
        if job.state == "waiting" and (there := _newest_there(job)):
            return f"no checkpoint here yet; {there}"
        if unread(job):
            return "what is committed is not known"
        return words.get(job.state) or _unproved(job) or _unseen(job) or "nothing is committed yet"
    when = f"{ago(safe.age_seconds + since_seconds)} ago" if safe.committed_at else "at an unknown time"
    step, tag = safe.step, safe.tag
    named = f"step {step}" if tag == f"global_step{step}" else f"step {step} ({tag})"
    where = _remotes_with(job, tag)
    return f"{named} on {where}, {when}" if where else f"{named} committed {when}"


def is_committed(forms: Mapping[str, FormStatus]) -> bool:
    """Tell whether a remote has the ZeRO form of a checkpoint, by its forms there."""
    return "zero" in forms and forms["zero"].state == "committed"


def _newest_there(job: JobStatus) -> str:
    """Name the newest checkpoint of the remotes, for a job that has none here; empty: they hold none."""
    held = [one for remote in job.remotes for one in remote.held]
    if not held:
        return ""
    newest = max(held, key=lambda one: (one.branch, one.step))
    return f"{newest.tag} is on {_remotes_with(job, newest.tag) or 'a remote'}"


def _remotes_with(job: JobStatus, tag: str) -> str:
    """Name the remotes that hold a checkpoint, as far as the document tells; empty: it does not."""
    names = [
        name
        for checkpoint in job.checkpoints
        if checkpoint.tag == tag
        for name, forms in checkpoint.remotes.items()
        if is_committed(forms)
    ] or [
        remote.name
        for remote in job.remotes
        if any(held.tag == tag and "zero" in held.forms for held in remote.held)
    ]
    if len(names) > SHOWN_REMOTES:
        return f"{len(names)} remotes"
    return " and ".join("the remote" if name == "remote" else name for name in names)


def _unproved(job: JobStatus) -> str | None:
    """Say what was committed when its remotes were last seen: no comfort while they do not answer."""
    done = [
        checkpoint
        for checkpoint in job.checkpoints
        if any(is_committed(forms) for forms in checkpoint.remotes.values())
    ]
    if not done:
        return None
    newest = max(done, key=lambda checkpoint: (checkpoint.branch or 0, checkpoint.step or 0))
    return f"{newest.tag} was committed, and a required remote has not been seen to hold it since"


def _unseen(job: JobStatus) -> str:
    """Name the remotes not reached since the daemon's start, whose content is unknown; empty: none."""
    away = [remote_shown(remote) for remote in job.remotes if not remote.attached]
    return f"what is committed is not known: {', '.join(away)} not attached yet" if away else ""


def _doubtful(job: JobStatus) -> str:
    tag = newest_in_doubt(job) if job.safe else ""
    return f"{tag} is suspect and not uploaded" if tag else ""


def _risk(job: JobStatus, since_seconds: float, life: Life) -> str:
    """Say what a lost node would cost now: saved steps that are here alone, and the training since.

    Where all that was saved is safe, and a newer save would be seen: the time since the last one.
    """
    steps, seconds = job.steps_at_risk or 0, job.seconds_at_risk
    if seconds is None:
        return f"{steps} steps at risk" if steps else ""
    span = ago(seconds + since_seconds)
    if steps:
        exposed = job.exposed_seconds
        saved = f" (saved {ago(exposed + since_seconds)} ago)" if exposed is not None else ""
        return f"{steps} steps, {span} of training at risk{saved}"
    return f"last save {span} ago" if life.is_well else f"{span} of training at risk"


def _control(job: JobStatus, now: float) -> list[str]:
    """Say what a person, or a preemption, asked of the job."""
    said = []
    paused, drain = job.paused, job.drain
    if paused:
        said.append(f"paused by {paused.by} {ago(seconds_since(paused.since, now))} ago")
    left = unix_of(drain.deadline_at, now) - now if drain else 0.0
    if drain and drain.is_done:
        # it says nothing of what is saved later, nor once the node was to be gone
        if left > 0 and not job.steps_at_risk:
            said.append(f"drained: {all_committed(len(drain.unsent))}")
    elif drain:
        text = f"draining, {ago(left)} left" if left > 0 else "the drain's deadline passed"
        text += f", no byte moves to {', '.join(drain.stalled)}" if drain.stalled else ""
        late, word = (drain.late, "will not make it") if left > 0 else (drain.missing, "not committed")
        said.append(text + (f", {word}: {', '.join(late)}" if late else ""))
    return said


def _under_way(job: JobStatus) -> str:
    """Describe the upload that matters most: the newest ZeRO form, else another form."""
    moving = [
        (form != "zero", checkpoint.tag, name, form, state)
        for checkpoint in job.checkpoints
        for name, forms in checkpoint.remotes.items()
        for form, state in forms.items()
        if state.state == "shipping"
    ]
    if not moving:
        return ""
    is_derived, tag, name, form, state = min(moving, key=lambda one: one[0])
    what = f"{tag} {form}" if is_derived else tag
    where = f" to {name}" if len(job.remotes) > 1 else ""
    done = f" {100 * state.bytes_done / state.bytes_total:.0f} %" if state.bytes_total else ""
    eta = state.eta_seconds
    left = f", {ago(eta)} left" if eta is not None else ""
    more = f" (and {len(moving) - 1} more)" if len(moving) > 1 else ""
    slowly = ", slowed by a save on this disk" if job.making_way else ""
    return f"next: {what}{where}{done}{left}{more}{slowly}"


def _slowed(job: JobStatus) -> str:
    """Say that what is under way waits as its node is short of memory; empty: nothing does."""
    for checkpoint in job.checkpoints if job.waits_for_memory else ():
        is_safe = any(is_committed(forms) for forms in checkpoint.remotes.values())
        moving = [
            form
            for forms in checkpoint.remotes.values()
            for form, state in forms.items()
            if state.state == "shipping"
        ]
        if checkpoint.local.universal == "converting" or any(form != "zero" or is_safe for form in moving):
            return "slowed: tasks of this node wait for memory (/proc/pressure/memory)"
    return ""


def _full(job: JobStatus) -> str:
    saves = job.disk.full_in_saves if job.disk else None
    if saves is None or saves > FULL_SOON_SAVES:
        return ""
    return f"disk full in {saves} {'save' if saves == 1 else 'saves'}"


def problem_lines(job: JobStatus, now: float) -> list[tuple[str, str]]:
    """Return (severity, line) of what is open, with the next command below it."""
    lines: list[tuple[str, str]] = []
    for problem in job.problems:
        severity = problem.severity
        age = ago(seconds_since(problem.since, now))
        lines.append((severity, f"{MARKS.get(severity, '·')} {problem.text} ({age})"))
        if problem.next_step:
            lines.append((severity, f"{NEXT}{problem.next_step}"))
    return lines


def start_it(job: JobStatus, life: Life) -> str:
    """Return the next step that starts the daemon again."""
    first = f"end process {life.hanging}, then start it" if life.hanging else "start it"
    if life.short:
        first = f"if the disk of {life.short} is full, free space: the daemon goes on by itself; else {first}"
    how = life.start_command or "ckptd run --config-dir DIR, or systemctl start ckptd@USER"
    return f"{first}: {how}; until then nothing of {job.save_dir} is uploaded"


def daemon_errors(daemon: DaemonStatus) -> list[str]:
    """Say what the daemon itself cannot do."""
    said = (daemon.notify_error, "nobody was told:"), (daemon.metrics_error, "no metrics at")
    return [f"{text} {error}" for error, text in said if error]


def disk_clauses(job: JobStatus) -> list[str]:
    """Describe room and speeds; empty: not known."""
    disk = job.disk
    if not disk:
        return []
    free, saves = f"disk {size_of(disk.free_bytes)} free", disk.full_in_saves
    room = disk.free_bytes // disk.next_save_bytes if disk.next_save_bytes else MANY_SAVES
    if saves is not None:
        said = [free, f"full in {saves} saves, {ago(disk.full_in_seconds or 0.0)} at this pace"]
    else:
        said = [free if room >= MANY_SAVES else f"{free} ({room} saves)"]
    if disk.unfinished_bytes:
        said.append(f"{size_of(disk.unfinished_bytes)} in saves cut short, damaged or in doubt")
    speeds = (job.production_bytes_per_second, "trainer writes"), (job.link_bytes_per_second, "upload")
    for speed, title in speeds:
        if speed:
            said.append(f"{title} {size_of(speed)}/s")
    return said


def shared_line(job: JobStatus) -> str:
    """Say how hosts on a shared directory divide the work and who holds the lease; empty: it is not
    shared.
    """
    shared = job.shared
    if not shared:
        return ""
    hosts, holder = shared.hosts, shared.holder
    several = (
        f"{len(hosts)} hosts ({', '.join(hosts)})"
        if len(hosts) > 1
        else f"{''.join(hosts) or 'a host'} alone"
    )
    if holder is None:
        whose = "the lease was not read yet: nothing is deleted or converted"
    elif shared.holds_lease:
        whose = f"this host holds the lease (epoch {shared.epoch}): it deletes and converts"
    elif holder in hosts:
        whose = f"{holder} holds the lease (epoch {shared.epoch}): it deletes and converts"
    else:
        whose = f"{holder} held the lease and is silent: another host takes it over"
    return f"shared by {several}, files divided by name; {whose}"


def abilities(remote: RemoteStatus, *, is_all: bool) -> str:
    """Describe what a remote's store can and cannot do; without `is_all` only if that is unusual."""
    is_usual = remote.attached and remote.create_only and remote.proof != "none"
    if is_usual and not remote.notes and not is_all:
        return ""
    shown = remote_shown(remote)
    if not remote.attached:
        return "; ".join([f"{shown}: not attached", *remote.notes])
    exclusive = "create-only writes" if remote.create_only else "no create-only writes"
    return "; ".join([f"{shown}: {exclusive}", f"verified by {remote.proof}", *remote.notes])


def remote_shown(remote: RemoteStatus) -> str:
    """Name a remote: by its URL where it has no name of its own and the daemon is new enough to tell it."""
    return f"remote {remote.name}" if remote.name != "remote" else remote.url or "remote"


def state_of(state: str, *, is_alive: bool) -> str:
    """Word the state of a checkpoint; a daemon that is gone saves and uploads nothing."""
    if state == "uploading" and not is_alive:
        return "not sent"
    return _STATES.get(state, state)


def form_state_of(form: FormStatus, *, is_alive: bool) -> str:
    """Name the state of a form in a remote; `is_alive` as for `state_of`."""
    if form.state == "shipping":
        return "uploading" if is_alive else "not sent"
    return _STATES.get(form.state, form.state)


def forms_here(local: LocalStatus) -> list[str]:
    """Name the forms on this node; where there is none, the copy that is kept until it is committed."""
    forms = ["zero"] * local.present + ["universal"] * (local.universal == "ready")
    return forms or ["kept copy"] * local.held
