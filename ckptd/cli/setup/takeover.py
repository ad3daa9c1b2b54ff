"""`ckptd takeover JOB`: remotes that belong to another job's name or id become this job's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import ENV_JOB, JOB_HERE_HELP, print_line

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config.schema import JobConfig, RemoteConfig
    from ckptd.storage.journal.journal import Journal

_HELP = (
    "Make the remotes of a job its own. For remotes that bear another job's name or id: after a rename, or "
    "when the job's state is of another remote. Daemons that write there under the old identity stop."
)


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(help=_HELP, epilog="ckptd takeover llama-7b --remote nas")
    def takeover(
        job: str = typer.Argument(
            ..., metavar="JOB", autocompletion=complete_job, envvar=ENV_JOB, help=JOB_HERE_HELP
        ),
        remote: str = typer.Option(None, metavar="NAME", help="Only this remote of the job."),
        config_dir: str = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import fcntl
        import os
        from contextlib import ExitStack
        from pathlib import Path

        from ckptd.base.owned_dirs import lock
        from ckptd.cli.checkpoints.verify import job_of, job_state_dir
        from ckptd.errors import LockHeld
        from ckptd.recover.files import opened_save_dir
        from ckptd.recover.select.sources import where_of
        from ckptd.storage.journal.journal import Journal
        from ckptd.storage.local.job_names import must_be_of_this_node

        must_be_of_this_node(job, "takeover")
        directory = Path(config_dir) if config_dir else None
        where = where_of(job, dict(os.environ), only=remote, config_dir=directory)
        config = job_of(where, "takeover")
        with ExitStack() as closing:
            fd = opened_save_dir(config.save_dir)
            if fd is not None:
                closing.callback(os.close, fd)
                try:
                    lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise LockHeld(f"a daemon owns {config.save_dir}", hint="stop it first") from error
            state_dir = job_state_dir(config, directory, make=False)
            journal = None
            if state_dir is not None and (state_dir / "journal.db").exists():
                journal = Journal(state_dir / "journal.db")
                closing.callback(journal.close)
            for one in where.remotes:
                _must_be_silent(config, one, state_dir)
            for one in where.remotes:
                print_line(f"{one.name}: {_one(config, one, journal)}")
                if fd is not None:
                    _bind(config, one, fd)


def _bind(config: JobConfig, remote: RemoteConfig, fd: int) -> None:
    """Let save_dir hold the newest run of the remote, so that the daemon goes on with what it committed."""
    from ckptd.core.model.runs import short
    from ckptd.recover.select.runs import bind
    from ckptd.storage.child.apart import open_apart
    from ckptd.storage.local.run_file import read_run
    from ckptd.storage.remote.attach import identity_of
    from ckptd.storage.remote.runs import newest_run
    from ckptd.storage.stores.access import access_of

    store = open_apart(remote.name, remote.url, access_of(remote))
    row, held = newest_run(store), read_run(fd, str(config.save_dir))
    if row is None:
        return
    whose = f"run {short(row.run_id)} of {row.words}"
    if held is not None and held.run_id != row.run_id:
        hint = f"`ckptd resume JOB --run {short(row.run_id)}` brings that one"
        print_line(f"{remote.name}: {whose} is the newest; save_dir holds run {short(held.run_id)}: {hint}")
        return
    bind(fd, str(config.save_dir), row.run_id, ((identity_of(store).remote_id, row.number),))
    if held is None:
        print_line(f"{remote.name}: {whose} goes on here")


def _must_be_silent(config: JobConfig, remote: RemoteConfig, state_dir: Path | None) -> None:
    """Refuse while a node of another job writes there: its newest checkpoint would be without a copy.

    Raises:
        LockHeld: one does.
    """
    from ckptd.base.humanize import ago
    from ckptd.core.model.heartbeat import DEAD_SECONDS
    from ckptd.errors import LockHeld
    from ckptd.storage.child.apart import open_apart
    from ckptd.storage.local.state_dir import own_node_id
    from ckptd.storage.remote.attach import identity_of
    from ckptd.storage.remote.heartbeats import live_nodes
    from ckptd.storage.stores.access import access_of

    store = open_apart(remote.name, remote.url, access_of(remote))
    found = identity_of(store)
    if found.job == config.name:
        return
    own = own_node_id(state_dir, config.save_dir) or ""
    for seen in live_nodes(store, but_node_id=own):
        heard = ago(seen.seconds_ago or 0.0)
        msg = f"{remote.name}: node {seen.node} of job {found.job} writes there, heard of {heard} ago"
        hint = f"stop that daemon first; one that is gone counts for {ago(DEAD_SECONDS)}, then call it again"
        raise LockHeld(msg, hint=hint)


def _one(config: JobConfig, remote: RemoteConfig, journal: Journal | None) -> str:
    """Take one remote over where it is another's; what was done."""
    from ckptd.storage.child.apart import open_apart
    from ckptd.storage.remote.attach import identity_of, take_over
    from ckptd.storage.stores.access import access_of

    store = open_apart(remote.name, remote.url, access_of(remote))
    found = identity_of(store)
    known_job = journal.meta(f"job_id:{remote.name}") if journal is not None else None
    known_remote = journal.meta(f"remote_id:{remote.name}") if journal is not None else None
    is_ours = found.job == config.name and known_job in (None, found.job_id)
    if is_ours and known_remote in (None, found.remote_id):
        return f"is this job's already ({found.job}, {found.job_id})"
    now = found if is_ours else take_over(store, found, config.name)
    if journal is not None:
        journal.set_meta(f"job_id:{remote.name}", now.job_id)
        journal.set_meta(f"remote_id:{remote.name}", now.remote_id)
    if is_ours:
        return f"was taken over for {found.job}; this node knows it now"
    return f"was job {found.job}'s, is {now.job}'s now (job id {now.job_id}, as before)"
