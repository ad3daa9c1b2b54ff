"""`ckptd verify JOB --repair`: the remotes that are asked, the audit, what was put right and what was not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config_model import JobConfig
    from ckptd.errors import CkptdError
    from ckptd.recover.mended import Mended
    from ckptd.recover.sight import RemoteSight
    from ckptd.recover.sources import Where
    from ckptd.recover.verified import Slice


def run_repair(
    job: str,
    tag: str | None,
    read: Slice | None,
    only: str | None,
    directory: Path | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Do it, print it, exit with its code."""
    import os

    import typer

    from ckptd.cli.progress import progress_bar
    from ckptd.cli.text import say, tell
    from ckptd.cli.verify_cmd import show
    from ckptd.observe.audit import Audit
    from ckptd.recover.mended import Wanted
    from ckptd.recover.repair import Repair
    from ckptd.recover.sources import named, where_of
    from ckptd.recover.unfinished import Unfinished

    where = where_of(job, dict(os.environ), config_dir=directory)
    config = job_of(where, "--repair")
    targets = frozenset(one.name for one in named(where.remotes, only))
    sights, failures = look(where)
    state_dir = state_of(config, directory, make=not dry_run)
    unfinished = Unfinished(state_dir)
    with unfinished.alone(), progress_bar() as on_progress:
        repair = Repair(
            config,
            sights,
            Wanted(targets=targets, tag=tag, read=read, dry_run=dry_run),
            node_id=_node_id(state_dir),
            audit=Audit(state_dir / "audit.jsonl") if state_dir is not None and not dry_run else None,
            unfinished=unfinished,
            say=say,
            on_progress=on_progress,
        )
        for sight in [] if dry_run else sights:
            unfinished.give_up(sight.name, sight.store)
        repair.run()
    show(repair.verified, as_json=as_json, repairs=repair.rows)
    for row in repair.rows:
        (say if as_json else tell)(_line(row))
    code = repair.exit_code()
    for name, error in failures.items():
        code = code or (error.exit_code if name in targets else 0)
    if code:
        raise typer.Exit(code)


def job_of(where: Where, what: str) -> JobConfig:
    """The job; a remote alone is not enough.

    Raises:
        UsageError: there is none.
    """
    from ckptd.errors import UsageError

    if where.job is None:
        msg = f"{what} needs a job: a remote alone does not tell where its node keeps what"
        raise UsageError(msg, hint="name the job, its file or its save_dir")
    return where.job


def look(where: Where) -> tuple[list[RemoteSight], dict[str, CkptdError]]:
    """Every remote that answers, and why others do not; all errors are said.

    Raises:
        CkptdError: none answers.
    """
    from ckptd.cli.text import say
    from ckptd.errors import CkptdError
    from ckptd.recover.sight import look_at_remote
    from ckptd.recover.sources import said_of
    from ckptd.remote.access import access_of

    sights: list[RemoteSight] = []
    failures: dict[str, CkptdError] = {}
    for one in where.remotes:
        try:
            sights.append(look_at_remote(one.name, one.url, where.owner, access_of(one), is_tolerant=True))
        except CkptdError as error:
            failures[one.name] = error
            say(said_of(one.name, one.url, str(error)))
    if failures and not sights:
        raise next(iter(failures.values()))
    return sights, failures


def state_of(config: JobConfig, directory: Path | None, *, make: bool) -> Path | None:
    """The job's state directory; where it is absent it is made, if that is wanted and save_dir exists."""
    import os

    from ckptd.config import default_config_dir, load_daemon
    from ckptd.local.state_dir import prepare_state_dir, state_dir_of

    environ = dict(os.environ)
    daemon = load_daemon((directory or default_config_dir(environ)) / "ckptd.toml", environ)
    path = state_dir_of(config.save_dir, config.name, daemon.state_dir, environ)
    if path.is_dir():
        return path
    if not make or not config.save_dir.is_dir():
        return None
    prepare_state_dir(path)
    return path


def _node_id(state_dir: Path | None) -> str | None:
    """This node's id, where a daemon has run."""
    try:
        return (state_dir / "node_id").read_text().strip() if state_dir is not None else None
    except OSError:
        return None


def _line(row: Mended) -> str:
    from ckptd.config_quantities import show_bytes

    what = f"{row.where}: {row.key} ({show_bytes(row.bytes)}; {row.damage})"
    if row.outcome == "left":
        return f"left      {what}: {row.reason or 'its bytes lie intact nowhere that is known'}"
    return f"{row.outcome:9} {what}{f' from {row.source}' if row.source else f': {row.reason}'}"
