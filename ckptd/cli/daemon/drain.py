"""`ckptd drain [JOB]`: commit what is complete here, and begin nothing else, before the node goes away.

A running daemon is asked to; else the same work is done here, under the job's lock (docs/adr/0108).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import ENV_JOB, JOB_HERE_HELP, print_line, print_note
from ckptd.config import commands

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.cli.daemon.request import RequestedJob
    from ckptd.config.loader import LoadedConfig
    from ckptd.observe.status import DrainStatus, JobStatus

GRACE_SECONDS = 2.0
"""Wait after the deadline for the daemon's last word."""
AGAIN_SECONDS = 0.5
_NOT_BEGUN = ("saving", "unknown", "resaving", "sealing")

_HELP = (
    "Upload what is complete before the node is taken away. Conversions and deletions stop, the newest goes "
    "first, and what will not make it is said at once. Exit code 0: all of it is committed; 3: the deadline "
    "passed; 1: some of it cannot be committed as it is."
)


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("drain", help=_HELP, epilog="ckptd drain llama-7b --deadline 2m")
    def drain(
        job: str = typer.Argument(
            None,
            metavar="JOB",
            autocompletion=complete_job,
            envvar=ENV_JOB,
            help=f"{JOB_HERE_HELP} Default: every configured job.",
        ),
        deadline: str = typer.Option(
            "120s", "--deadline", metavar="DURATION", help="How long there is (30s, 2m)."
        ),
        state_dir: str = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        from pathlib import Path

        from ckptd.storage.local.job_names import must_be_of_this_node

        seconds = parse_drain(deadline, "--deadline")
        must_be_of_this_node(job, "drain")
        places = [Path(place) if place else None for place in (state_dir, config_dir)]
        raise typer.Exit(Draining(job, seconds, *places).run())


def parse_drain(text: str, option: str) -> float:
    """Parse the time that a drain has, in seconds.

    Raises:
        UsageError: it is no duration, or longer than any drain may last.
    """
    from ckptd.config.quantities import parse_duration, show_seconds
    from ckptd.daemon.actions.control import LONGEST_ASKED_SECONDS
    from ckptd.errors import UsageError

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    if seconds > LONGEST_ASKED_SECONDS:
        raise UsageError(f"{option} {text}: a drain lasts at most {show_seconds(LONGEST_ASKED_SECONDS)}")
    return seconds


class Draining:
    """One call of the verb."""

    def __init__(
        self, job: str | None, seconds: float, state_dir: Path | None, config_dir: Path | None
    ) -> None:
        import time

        self._job, self._state_dir, self._config_dir = job, state_dir, config_dir
        self._asked_at_unix = time.time()
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._told: set[tuple[str, str]] = set()

    def run(self) -> int:
        """Ask, or work; the exit code."""
        import time

        from ckptd.errors import LockHeld

        while True:
            live = [one for one in self._known() if one.pid is not None]
            try:
                for one in live:
                    self._ask(one)
                code = self._alone({one.name for one in live})
                if not self._follow(live):
                    return max(code, self._result(live))
            except LockHeld:
                if self._has_nothing_yet():
                    print_line("nothing is complete here yet, so nothing is missing elsewhere")
                    return 0
                # a daemon that starts just now publishes within a moment, and finds what was asked
                if time.monotonic() >= self._end:
                    raise
            if time.monotonic() >= self._end:
                return max(3, self._result(self._known()))
            time.sleep(AGAIN_SECONDS)

    # --- a daemon that runs ----------------------------------------------------------------------------

    def _known(self) -> list[RequestedJob]:
        from ckptd.cli.daemon.request import requested_jobs
        from ckptd.errors import NotFoundError

        try:
            return requested_jobs(self._job, self._state_dir, self._config_dir)
        except NotFoundError:
            return []

    def _has_nothing_yet(self) -> bool:
        """Tell whether a live daemon still waits for the job's first checkpoint."""
        import time

        from ckptd.errors import NotFoundError
        from ckptd.maintenance.status.published import find_status, is_meant
        from ckptd.maintenance.status.verdict import life_of

        try:
            document = find_status(self._job, self._state_dir, self._config_dir)
        except NotFoundError:
            return False
        jobs = [
            one for one in document.jobs if self._job is None or is_meant(one, self._job, self._config_dir)
        ]
        is_waiting = bool(jobs) and all(one.state == "waiting" for one in jobs)
        return is_waiting and life_of(document, time.time()).is_well

    def _ask(self, one: RequestedJob) -> None:
        from ckptd.cli.daemon.request import send_request
        from ckptd.daemon.actions.control import DRAIN, DrainFile

        send_request(one, DRAIN, DrainFile(asked_at_unix_seconds=self._asked_at_unix, seconds=self._seconds))

    def _follow(self, live: list[RequestedJob]) -> bool:
        """Wait until all are done, nothing moves or the time is over; True: a daemon has ended meanwhile."""
        import time

        from ckptd.cli.daemon.request import POLL_SECONDS
        from ckptd.maintenance.status.verdict import is_there

        waiting = list(live)
        while waiting and time.monotonic() < self._end + GRACE_SECONDS:
            stalled = 0
            for one in list(waiting):
                drain = self._drain_of(one)
                if drain is not None and _is_over(drain):
                    waiting.remove(one)
                elif one.pid is None or not is_there(one.pid):
                    print_note(f"{one.name}: its daemon has gone")
                    return True
                stalled += one in waiting and drain is not None and bool(drain.stalled)
            if stalled == len(waiting):
                return False
            time.sleep(POLL_SECONDS)
        return False

    def _drain_of(self, one: RequestedJob) -> DrainStatus | None:
        """Return the daemon's status of this drain; print checkpoints that will not make it, once each.

        None: it tells of no such drain.
        """
        from ckptd.maintenance.status.verdict import unix_of

        job = one.job()
        drain = job.drain if job is not None else None
        if drain is None or abs(unix_of(drain.asked_at, 0.0) - self._asked_at_unix) > 1:
            return None
        for tag in drain.late:
            if (one.name, tag) not in self._told:
                self._told.add((one.name, tag))
                print_note(f"{one.name}: {tag} will not make it at the speed of the link")
        return drain

    def _result(self, jobs: list[RequestedJob]) -> int:
        """Return the result in words, and the exit code."""
        from ckptd.observe.status import NOT_FINISHED, all_committed, not_waited_for

        code = 0
        for one in jobs:
            # what status still tells of an earlier drain says nothing of what was saved since
            drain = self._drain_of(one)
            if drain is None:
                print_line(f"{one.name}: {_no_answer(one)}; what is committed is not known")
                code = 3
                continue
            if drain.is_done:
                print_line(f"{one.name}: drained, {all_committed(len(drain.unsent))}")
                continue
            job = one.job()
            print_line(f"{one.name}: not committed: {', '.join(drain.missing) or not_begun(job)}")
            if drain.stalled:
                print_note(f"{one.name}: {not_waited_for(drain.stalled)}")
            if drain.unfinished:
                print_note(f"{one.name}: {', '.join(drain.unfinished)}: {NOT_FINISHED}")
            for line in reasons(job):
                print_note(f"{one.name}: {line}")
            is_refused = drain.missing and set(drain.missing) <= set(drain.refused)
            code = max(code, 1 if is_refused else 3)
        return code

    # --- no daemon -------------------------------------------------------------------------------------

    def _alone(self, live: set[str]) -> int:
        """Do the work of the jobs that no daemon runs.

        Raises:
            LockHeld: one does after all.
        """
        import os
        import time

        from ckptd.daemon.health.drain import drained_words
        from ckptd.daemon.loop import Daemon
        from ckptd.observe import logs

        loaded = self._jobs_without_daemon(live)
        if loaded is None:
            return 0
        logs.configure_plainly("WARNING")
        left = max(0.1, self._end - time.monotonic())
        daemon = Daemon(loaded, os.environ, drain_seconds=left)
        daemon.stop()
        code = daemon.run()
        done = {job.config.name: f"drained, {drained_words([job])}" for job in daemon.jobs}
        words = {1: "some of it cannot be committed as it is; ckptd status says why"}
        for job in loaded.jobs:
            rest = words.get(code, "not all is committed; ckptd status says what is missing")
            print_line(f"{job.name}: {rest if code else done.get(job.name, rest)}")
        return code

    def _jobs_without_daemon(self, live: set[str]) -> LoadedConfig | None:
        import os
        from dataclasses import replace

        from ckptd.config import loader
        from ckptd.errors import NotFoundError
        from ckptd.recover.select.job import job_named, no_remote

        directory = self._config_dir or commands.default_config_dir(os.environ)
        if self._job is None:
            loaded = loader.load_all(directory, os.environ)
            left = tuple(job for job in loaded.jobs if job.name not in live)
            if not left and not live:
                msg = f"there is no job in {directory}"
                raise NotFoundError(msg, hint="name a job file or a SAVE_DIR")
            return replace(loaded, jobs=left) if left else None
        if live:
            return None
        job = job_named(self._job, os.environ, config_dir=directory)
        if not job.remotes:
            raise no_remote(job)
        daemon = loader.load_daemon(directory / "ckptd.toml", os.environ)
        return loader.LoadedConfig(daemon=daemon, jobs=(job,))


def not_begun(job: JobStatus | None) -> str:
    """Name the checkpoints that were not known to be complete when the time ran out."""
    rows = job.checkpoints if job is not None else ()
    return ", ".join(f"{row.tag} ({row.state})" for row in rows if row.state in _NOT_BEGUN) or (
        "what is being saved"
    )


def reasons(job: JobStatus | None) -> list[str]:
    """Return a job's other problems and their next steps: a longer window does not bring back a remote that
    is away.
    """
    import time

    from ckptd.maintenance.status.words import problem_lines

    lines = problem_lines(job, time.time()) if job is not None else []
    return [line.strip() for severity, line in lines if severity != "note"]


def _no_answer(one: RequestedJob) -> str:
    return "no daemon runs" if one.pid is None else f"its daemon (process {one.pid}) gave no answer"


def _is_over(drain: DrainStatus) -> bool:
    """Tell whether waiting changes nothing; nothing missing and not done means that a save is written."""
    never = {*drain.refused, *drain.unfinished}
    return drain.is_done or (bool(drain.missing) and set(drain.missing) <= never)
