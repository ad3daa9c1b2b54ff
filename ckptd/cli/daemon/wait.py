"""`ckptd wait JOB --step N`: until that step is committed, or cannot be; for scripts (docs/contract.md)."""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import ENV_JOB, JOB_HERE_HELP, print_line

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.observe.status import CheckpointStatus, JobStatus

POLL_SECONDS = 0.5
UNWATCHED_SECONDS = 30.0
"""Wait so long for a daemon to start."""

_ENDED = {
    "torn re-save": "it was saved over in part",
    "incomplete": "its writer has gone and it is not whole",
    "suspect": "its shards may be of two saves",
    "refused": "it cannot be uploaded as it is",
    "vanished": "somebody removed it before it was committed",
    "superseded": "another save took its place before it was committed",
    "retired": "the remote's retention has deleted it",
}


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "wait",
        help="Wait until the checkpoint of a step is committed. Exit code 0: it is; 3: --timeout passed; "
        "1: it cannot be, and why.",
        epilog="ckptd wait llama-7b --step 4000 --timeout 1h",
    )
    def wait(
        job: str = typer.Argument(
            ..., metavar="JOB", autocompletion=complete_job, envvar=ENV_JOB, help=JOB_HERE_HELP
        ),
        step: int = typer.Option(..., "--step", min=0, metavar="N", help="The trainer's global step."),
        timeout: str = typer.Option(
            None, "--timeout", metavar="DURATION", help="At most so long (90s, 1h); default: for ever."
        ),
        state_dir: str = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import time
        from pathlib import Path

        from ckptd.config.quantities import parse_duration
        from ckptd.errors import BehindError, PersonNeeded, UsageError
        from ckptd.storage.local.job_names import must_be_of_this_node

        try:
            seconds = parse_duration(timeout) if timeout else inf
        except ValueError as error:
            raise UsageError(f"--timeout: {error}") from error
        places = [Path(place) if place else None for place in (state_dir, config_dir)]
        end, watched_at = time.monotonic() + seconds, time.monotonic()
        must_be_of_this_node(job, "wait")
        if places[0] is None:
            _must_be_a_job(job, places[1])
        while True:
            found, is_watched = _look(job, places)
            verdict, text = judge_step(found, step)
            if verdict == "committed":
                print_line(text)
                return
            if verdict == "cannot":
                raise PersonNeeded(text, hint=f"ckptd status {job}")
            now = time.monotonic()
            watched_at = now if is_watched else watched_at
            if now >= end:
                msg = f"step {step} is not committed after {timeout}"
                raise BehindError(msg, hint=f"ckptd status {job} says what it waits for")
            if now - watched_at > UNWATCHED_SECONDS:
                msg = f"step {step} is not committed, and no daemon runs"
                raise PersonNeeded(msg, hint="start it: ckptd run, or systemctl start ckptd@USER")
            time.sleep(min(POLL_SECONDS, max(0.0, end - now)))


def _must_be_a_job(job: str, config_dir: Path | None) -> None:
    """Refuse to wait for a name that nobody knows.

    Raises:
        NotFoundError, ConfigError: there is no such job, or its file is wrong.
    """
    import os

    from ckptd.errors import NotFoundError
    from ckptd.maintenance.status.published import published
    from ckptd.recover.select.job import job_named

    try:
        published(job, None, config_dir)
    except NotFoundError:
        job_named(job, os.environ, config_dir=config_dir)


def _look(job: str, places: list[Path | None]) -> tuple[JobStatus | None, bool]:
    """Return the job as published (None: not yet), and whether a daemon watches it."""
    import time

    from ckptd.errors import NotFoundError
    from ckptd.maintenance.status.published import find_status, is_meant
    from ckptd.maintenance.status.verdict import life_of

    try:
        document = find_status(job, *places)
    except NotFoundError:
        return None, False
    found = next((one for one in document.jobs if is_meant(one, job, places[1])), None)
    return found, life_of(document, time.time()).is_well


def judge_step(job: JobStatus | None, step: int) -> tuple[str, str]:
    """Return ("committed" | "cannot" | "not yet", why) of the step's newest save in its newest branch."""
    from ckptd.maintenance.status.verdict import unread

    if job is None:
        return "not yet", ""
    if why := unread(job):
        return "cannot", why
    newest = _newest(job, step)
    safe = job.safe
    # a COMMIT of the step may be of an older save of it: where one is known here, its own state decides
    branch = 0 if newest is None else newest.branch or inf
    is_safe = safe is not None and safe.step == step and safe.branch > branch
    if is_safe or (_is_committed(newest) if newest is not None else _is_held(job, step)):
        tag = newest.tag if newest else safe.tag if is_safe and safe else f"step {step}"
        return "committed", f"step {step} ({tag}) is committed"
    if newest is not None and newest.state in _ENDED and not _is_sent_still(newest):
        reason = newest.reason or _ENDED[newest.state]
        return "cannot", f"step {step} ({newest.tag}) is not committed and will not be: {reason}"
    complete = next((c.step for c in job.checkpoints if c.tag == job.newest_complete), None)
    if newest is None and safe is not None and complete is not None and min(safe.step, complete) > step:
        return "cannot", f"no checkpoint of step {step} is known, and the run is at step {complete}"
    return "not yet", ""


def _newest(job: JobStatus, step: int) -> CheckpointStatus | None:
    """Return the newest checkpoint of a step; one being saved has no branch yet and is newer than all that
    have.
    """
    ones = [c for c in job.checkpoints if c.kind == "resumable"]
    sealed = next((c for c in ones if c.step == step and c.branch is not None), None)
    return next((c for c in ones if c.branch is None and _is_later(c, step, sealed)), sealed)


def _is_later(one: CheckpointStatus, step: int, sealed: CheckpointStatus | None) -> bool:
    """Tell whether a folder that is no sealed save is of the step; which one says its tag before its
    shards do.
    """
    if one.state == "leftover":
        return False
    is_again = sealed is not None and one.tag == sealed.tag
    if one.step is None:
        return is_again and re.search(rf"(?<!\d)0*{step}\D*$", one.tag) is not None
    # what an interrupted save left under another name is no later one than what was sealed
    return one.step == step and (sealed is None or is_again or one.state not in _ENDED)


def _is_committed(one: CheckpointStatus) -> bool:
    """Tell whether a checkpoint is committed; one deleted here counts if each remote meant for it holds its
    ZeRO form.
    """
    zero = [forms["zero"].state for forms in one.remotes.values() if "zero" in forms]
    is_gone = not one.local.present
    return one.state == "committed" or (is_gone and bool(zero) and set(zero) == {"committed"})


def _is_sent_still(one: CheckpointStatus) -> bool:
    """Tell whether the trainer deleted it and our clones of it are still uploaded."""
    return one.local.held and one.state in ("vanished", "superseded")


def _is_held(job: JobStatus, step: int) -> bool:
    """Tell whether nothing is known of it here and every remote that answers holds its ZeRO form."""
    remotes = [remote for remote in job.remotes if remote.attached]
    return bool(remotes) and all(
        any(one.step == step and "zero" in one.forms for one in remote.held) for remote in remotes
    )
