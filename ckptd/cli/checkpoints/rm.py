"""`ckptd rm JOB TAG ...`: delete checkpoints by name, by the same proofs as retention (docs/adr/0199).

A running daemon is asked to; else the same planner and executors work here, under the job's lock. Asked
twice: first what would be deleted, then with the COMMITs that the person saw, so that what is saved or
committed again meanwhile stays.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job, complete_tag
from ckptd.cli.output import JOB_HERE_HELP, print_line, print_note

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.daemon.actions.control import RemovalFile
    from ckptd.daemon.job import Job
    from ckptd.observe.status import RemovalRowStatus

LOOK_SECONDS = 30.0
"""Limit for the answer of each remote."""
DELETE_SECONDS = 600.0
"""A removal that was agreed to ends then: what could not be deleted stays."""

_HELP = (
    "Delete checkpoints by name, here and in the remotes. Asks first. Never the newest one, a pinned one, "
    "one that latest names or a training was resumed from, nor a local copy that no verified COMMIT lists."
)
_EXAMPLES = """\
ckptd rm llama-7b global_step500 --dry-run
ckptd rm llama-7b global_step500 global_step1000
ckptd rm llama-7b global_step500 --local --yes"""


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("rm", help=_HELP, epilog=_EXAMPLES)
    def rm(
        job: str = typer.Argument(..., metavar="JOB", autocompletion=complete_job, help=JOB_HERE_HELP),
        tags: list[str] = typer.Argument(
            ..., metavar="TAG ...", autocompletion=complete_tag, help="The folders' names."
        ),
        local: bool = typer.Option(False, "--local", help="Only from this node's disk."),
        remote: list[str] = typer.Option(
            None, "--remote", metavar="NAME", help="Only from this remote; may be repeated."
        ),
        dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would be deleted."),
        yes: bool = typer.Option(False, "--yes", help="Do not ask."),
        config_dir: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import os
        from pathlib import Path

        from ckptd.config.commands import default_config_dir

        directory = Path(config_dir) if config_dir else default_config_dir(os.environ)
        removing = Removing(job, tags, directory, is_local=local, remotes=remote or [])
        raise typer.Exit(removing.run(is_dry=dry_run, is_agreed=yes))


class Removing:
    """One call of the verb."""

    def __init__(
        self, job: str, tags: Sequence[str], directory: Path, *, is_local: bool, remotes: Sequence[str]
    ) -> None:
        from ckptd.cli.daemon.request import requested_job

        self._job, self._tags, self._directory = job, tuple(dict.fromkeys(tags)), directory
        self._config = _job_config(job, directory)
        known = tuple(remote.name for remote in self._config.remotes)
        self._is_here = is_local or not remotes
        self._remotes = _named(self._config, remotes) if remotes else () if is_local else known
        self._is_remote_named = bool(remotes)
        self._where = requested_job(job, self._config, directory)

    def run(self, *, is_dry: bool, is_agreed: bool) -> int:
        """Show what would be deleted, ask, delete; return the exit code.

        Raises:
            NotFoundError: a checkpoint is in none of the places (66).
            RefusedError: nothing of it may be deleted (65). UsageError: nobody can be asked (2).
        """
        rows = self._ask(None, LOOK_SECONDS)
        self._withdraw()
        self._must_be_known(rows)
        going = [row for row in rows if row.verdict in ("delete", "wait")]
        staying = [row for row in rows if row.verdict not in ("delete", "wait")]
        for row in going:
            print_line(f"{'would' if is_dry else 'will'} delete {_what(row)}{_because(row)}")
        for row in staying:
            print_note(f"stays: {_what(row)}{_because(row)}")
        if going and not is_dry:
            _must_agree(len(going), is_agreed=is_agreed)
            left = self._delete(going)
            if left:
                return 3
        elif not going:
            print_note("nothing is deleted")
        if any(row.verdict == "unknown" for row in staying):
            return 69
        return 65 if staying else 0

    def _must_be_known(self, rows: Sequence[RemovalRowStatus]) -> None:
        from ckptd.config.commands import command_for
        from ckptd.errors import NotFoundError

        missing = [tag for tag in self._tags if tag not in {row.tag for row in rows}]
        if missing:
            here = [str(self._config.save_dir)] if self._is_here else []
            msg = f"no checkpoint {', '.join(missing)} in {' or '.join([*here, *self._remotes])}"
            raise NotFoundError(f"{msg}; nothing was deleted", hint=command_for(self._config, "list"))

    def _delete(self, going: Sequence[RemovalRowStatus]) -> list[RemovalRowStatus]:
        """Have it deleted; say what was; return what was not."""
        agreed = tuple(dict.fromkeys(digest for row in going for digest in row.commits))
        try:
            rows = self._ask(agreed, DELETE_SECONDS, going)
        except KeyboardInterrupt:
            self._withdraw()
            print_note("stopped: what is not deleted yet stays; what was begun is finished by the daemon")
            raise
        self._withdraw()
        left = {(row.tag, row.remote): row for row in rows}
        for row in going:
            now = left.get((row.tag, row.remote))
            if now is None:
                print_line(f"deleted {_what(row)}")
            else:
                print_note(f"not deleted: {_what(row)}{_because(now)}")
        return [row for row in going if (row.tag, row.remote) in left]

    # --- asking ----------------------------------------------------------------------------------------

    def _ask(
        self, agreed: tuple[str, ...] | None, seconds: float, going: Sequence[RemovalRowStatus] = ()
    ) -> list[RemovalRowStatus]:
        """Put the request, and wait for its answer: all is known, or all that was to go is gone."""
        from ckptd.cli.daemon.request import send_request
        from ckptd.config.commands import user_name
        from ckptd.daemon.actions.control import REMOVE, RemovalFile

        asked = RemovalFile(
            asked_at_unix_seconds=time.time(),
            seconds=seconds + LOOK_SECONDS,
            tags=self._tags,
            is_here=self._is_here,
            remotes=self._remotes,
            is_remote_named=self._is_remote_named,
            agreed=agreed,
            by=user_name(),
        )
        send_request(self._where, REMOVE, asked)
        try:
            waiting = _Waiting(asked, seconds, going)
            if self._where.pid is None:
                self._alone(waiting)
            else:
                self._follow(waiting)
        except BaseException:
            self._withdraw()
            raise
        return waiting.rows

    def _withdraw(self) -> None:
        from ckptd.cli.daemon.request import send_request
        from ckptd.daemon.actions.control import REMOVE, RemovalFile

        send_request(self._where, REMOVE, RemovalFile(asked_at_unix_seconds=time.time(), seconds=0.0))

    def _follow(self, waiting: _Waiting) -> None:
        """Read the daemon's answers in status.json.

        Raises:
            BehindError: it gave none in time (3).
        """
        from ckptd.cli.daemon.request import POLL_SECONDS
        from ckptd.errors import BehindError
        from ckptd.maintenance.status.verdict import is_there
        from ckptd.observe.status import RemovalRowStatus

        while not waiting.is_over:
            found = self._where.job().get("removal")
            if found is not None and waiting.is_answer(found["asked_at"]):
                if waiting.takes([RemovalRowStatus(**row) for row in found["rows"]]):
                    return
            elif self._where.pid is not None and not is_there(self._where.pid):
                break
            time.sleep(POLL_SECONDS)
        if not waiting.is_answered:
            msg = f"the daemon of {self._where.name} (process {self._where.pid}) gave no answer"
            raise BehindError(msg, hint="`ckptd status` says how it is; nothing was deleted")

    def _alone(self, waiting: _Waiting) -> None:
        """Do the work of a job that no daemon runs.

        Raises:
            LockHeld: one does after all (75).
        """
        from ckptd.cli.daemon.request import work_alone

        def is_done(jobs: Sequence[Job]) -> bool:
            from ckptd.daemon.health.removal import removal_status

            for job in jobs:
                answer = removal_status(job)
                if answer is not None and waiting.is_answer(answer.asked_at):
                    return waiting.takes(answer.rows) or waiting.is_over
            return waiting.is_over

        work_alone(self._config, self._directory, is_done)


class _Waiting:
    """Follow a request: keep its last answer, tell when it is over."""

    def __init__(self, asked: RemovalFile, seconds: float, going: Sequence[RemovalRowStatus]) -> None:
        from ckptd.observe.status import rfc3339

        self._asked_at = rfc3339(asked.asked_at_unix_seconds)
        self._ends = time.monotonic() + seconds
        self._going = {(row.tag, row.remote) for row in going}
        self._told: set[str] = set()
        self.rows: list[RemovalRowStatus] = []
        self.is_answered = False

    @property
    def is_over(self) -> bool:
        """Tell whether the time is over."""
        return time.monotonic() >= self._ends

    def is_answer(self, asked_at: str) -> bool:
        """Tell whether an answer is to this request."""
        return asked_at == self._asked_at

    def takes(self, rows: Sequence[RemovalRowStatus]) -> bool:
        """Take an answer; tell whether it is the last one."""
        self.rows, self.is_answered = list(rows), True
        if not self._going:
            return not any(row.verdict == "unknown" for row in rows)
        left = [row for row in rows if (row.tag, row.remote) in self._going and row.verdict != "keep"]
        for row in left:
            line = f"waits: {_what(row)}{_because(row)}"
            if row.verdict == "wait" and line not in self._told:
                self._told.add(line)
                print_note(line)
        return not left


# --- whose, where, and in words --------------------------------------------------------------------------


def _job_config(job: str, directory: Path) -> JobConfig:
    """Return the job; of a remote alone nobody knows which copies rest on what it holds."""
    import os

    from ckptd.errors import UsageError
    from ckptd.recover.select.sources import where_of

    where = where_of(job, dict(os.environ), config_dir=directory)
    if where.job is None:
        msg = f"{job} is a remote: which copies elsewhere rest on what it holds is not known here"
        hint = "on the node that uploads to it: ckptd rm JOB TAG; a whole earlier run: ckptd gc URL --run RUN"
        raise UsageError(msg, hint=hint)
    return where.job


def _named(config: JobConfig, names: Sequence[str]) -> tuple[str, ...]:
    from ckptd.recover.select.sources import named

    return tuple(remote.name for name in dict.fromkeys(names) for remote in named(config.remotes, name))


def _must_agree(count: int, *, is_agreed: bool) -> None:
    """Ask on a terminal.

    Raises:
        UsageError: there is none, and no --yes (2). RefusedError: the answer was no (65).
    """
    import sys

    from ckptd.errors import RefusedError, UsageError

    if is_agreed:
        return
    if not sys.stdin.isatty():
        msg = "nothing was deleted: nobody can be asked here"
        raise UsageError(msg, hint="--yes deletes without asking; --dry-run only says what would be deleted")
    answer = input(f"delete {'these' if count > 1 else 'this'}? it cannot be undone [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        msg = "nothing was deleted"
        raise RefusedError(msg, hint="answer y, or type it again with --yes")


def _what(row: RemovalRowStatus) -> str:
    from ckptd.base.humanize import size_of

    if row.remote is None:
        size = size_of(row.bytes) if row.bytes else ", ".join(row.forms)
        return f"{row.tag} here{f' ({size})' if size else ''}"
    forms = ", ".join(row.forms)
    return f"{row.tag} in {row.remote}{f' ({forms})' if forms else ''}"


def _because(row: RemovalRowStatus) -> str:
    return f": {row.why}{f' → {row.next_step}' if row.next_step else ''}" if row.why else ""
