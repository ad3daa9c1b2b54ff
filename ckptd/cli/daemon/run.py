"""`ckptd run`: the daemon, for one save_dir, for job files, or for a configuration directory."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptd.config import commands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptd.config.loader import LoadedConfig
    from ckptd.daemon.loop import Daemon

_HELP = (
    "Watch a save_dir: upload, verify and rotate its checkpoints. This is the daemon: leave it running "
    "beside training. Name a save_dir and where its checkpoints go, or job files; without either it runs all "
    "jobs of /etc/ckptd/USER/jobs.d."
)
_EXAMPLES = """\
ckptd run /nvme/llama-7b s3://my-bucket/llama-7b
ckptd run llama-7b.toml
ckptd run /nvme/llama-7b /mnt/nas/llama-7b --once"""
_DRAIN: str | None = typer.Option(
    None,
    "--drain",
    envvar="CKPTD_DRAIN",
    metavar="DURATION",
    help="On SIGTERM finish uploads, for at most so long (20m).",
)
_EXISTING: str | None = typer.Option(
    None,
    "--existing",
    metavar="WHICH",
    help="Of checkpoints that are there already, upload newest, all or none (with SAVE_DIR URL).",
)
_LEVELS = ("debug", "info", "warning", "error")


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("run", help=_HELP, epilog=_EXAMPLES)
    def run(
        save_dir: str | None = typer.Argument(
            None, metavar="SAVE_DIR|FILE", help="Where the trainer saves; or a job file, alone."
        ),
        url: str | None = typer.Argument(
            None, help="Where its checkpoints go: a directory elsewhere, s3://bucket/prefix, sftp://…"
        ),
        # as text: a file that may not be read stops its own job alone, not all of them
        job: list[str] = typer.Option(
            [], "--job", metavar="FILE", help="A job file or its name; for several jobs, several times."
        ),
        config_dir: Path | None = typer.Option(None, "--config-dir", help="All jobs of DIR/jobs.d."),
        once: bool = typer.Option(
            False, "--once", envvar="CKPTD_ONCE", help="Work until nothing is left to do, then exit."
        ),
        drain: str | None = _DRAIN,
        save_total_limit: int | None = typer.Option(
            None, "--save-total-limit", min=1, metavar="N", help="Keep that many here (with SAVE_DIR URL)."
        ),
        existing: str | None = _EXISTING,
        same_filesystem: bool = typer.Option(
            False, "--same-filesystem", help="Allow URL on the disk of SAVE_DIR (for tests)."
        ),
        log_level: str = typer.Option("info", "--log-level", help="debug, info, warning or error."),
        log_format: str = typer.Option(
            "auto",
            "--log-format",
            envvar="CKPTD_LOG_FORMAT",
            help="text, json, or auto: json to the journal, else text.",
        ),
    ) -> None:
        from functools import partial

        from ckptd.cli.daemon.drain import parse_drain
        from ckptd.daemon.loop import Daemon

        drain_seconds = parse_drain(drain, "--drain") if drain else None
        if url is None and not job:
            save_dir, job = _as_job(save_dir, os.environ, config_dir)
        _configure_logs(log_level, log_format)
        again = partial(
            load,
            os.environ,
            save_dir=save_dir,
            url=url,
            jobs=[Path(one) for one in job],
            config_dir=config_dir,
            save_total_limit=save_total_limit,
            existing=existing,
            same_filesystem=same_filesystem,
        )
        daemon = Daemon(again(), os.environ, once=once, drain_seconds=drain_seconds, reload=again)
        raise typer.Exit(_run(daemon))


def _run(daemon: Daemon) -> int:
    """Run until the end; log what is safe of each job then, and why the exit code is not 0."""
    import logging
    import time

    from ckptd.errors import CkptdError
    from ckptd.maintenance.status.published import find_status
    from ckptd.maintenance.status.verdict import Life
    from ckptd.maintenance.status.words import headline

    log = logging.getLogger("ckptd")
    code = daemon.run()
    for job in daemon.jobs:
        name = job.config.name
        codes = sorted({one.code for one in job.problems.all() if one.lasting != "note"})
        if code and codes:
            log.warning("%s: exit code %d: %s; `ckptd status` says more", name, code, ", ".join(codes))
        with contextlib.suppress(CkptdError):
            for row in find_status(None, job.state_dir).jobs:
                if row.name == name:
                    log.info("%s: %s", name, headline(row, Life(), time.time()))
    return code


def _as_job(
    save_dir: str | None, environ: Mapping[str, str], config_dir: Path | None
) -> tuple[str | None, list[str]]:
    """Return SAVE_DIR and no job, or no SAVE_DIR and the job that it names when it stands alone.

    Raises:
        NotFoundError: a job file was meant, and it is not there (66).
    """
    if save_dir is not None and _names_a_job(save_dir, None, environ, config_dir):
        return None, [save_dir]
    return save_dir, []


def _configure_logs(level: str, style: str) -> None:
    import logging

    from ckptd.observe import logs

    _must_be_one_of("--log-level", level.lower(), _LEVELS)
    _must_be_one_of("--log-format", style, logs.STYLES)
    logs.configure(os.environ, level.upper(), style)  # type: ignore[arg-type]
    logging.getLogger("watchdog").setLevel(logging.WARNING)
    # at every end it calls an event that came too late an error
    logging.getLogger("watchdog.observers.inotify").setLevel(logging.CRITICAL)


def _must_be_one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    from ckptd.errors import UsageError

    if value not in allowed:
        raise UsageError(f"{option} {value!r} is none of {', '.join(allowed)}")


def load(
    environ: Mapping[str, str],
    *,
    save_dir: str | None = None,
    url: str | None = None,
    jobs: Sequence[Path] = (),
    config_dir: Path | None = None,
    save_total_limit: int | None = None,
    existing: str | None = None,
    same_filesystem: bool = False,
    verb: str = "run",
) -> LoadedConfig:
    """Load the jobs that the command line names, else the environment (`CKPTD_SAVE_DIR`, `CKPTD_JOB`), else
    all.

    Raises:
        UsageError: two that exclude each other, or no URL. ConfigError, NotFoundError: as `ckptd.config`.
    """
    from ckptd.config import loader
    from ckptd.errors import UsageError

    if save_dir is None and not jobs and config_dir is None:
        save_dir, jobs = _from_environment(environ)
    directory = config_dir or commands.default_config_dir(environ)
    if save_dir is None:
        _must_be_of_arguments(save_total_limit, existing, same_filesystem)
        if jobs:
            daemon = loader.load_daemon(directory / "ckptd.toml", environ)
            files = [_file_of(job, directory, environ) for job in jobs]
            return loader.load_jobs(files, daemon, environ)
        return loader.load_all(directory, environ)
    if jobs:
        msg = "SAVE_DIR and --job exclude each other"
        raise UsageError(msg, hint="ckptd run SAVE_DIR URL, or ckptd run FILE")
    url = url or environ.get("CKPTD_URL")
    if _names_a_job(save_dir, url, environ, config_dir):
        msg = f"{save_dir} is a job, no SAVE_DIR: it names its own remotes"
        raise UsageError(msg, hint=shlex.join(["ckptd", "run", save_dir]))
    url = url or _remembered_url(save_dir, environ, config_dir, verb)
    if not url:
        msg = "there is no URL: nothing would leave this node"
        raise UsageError(msg, hint=_whole_command(save_dir, environ, config_dir, verb))
    options: dict[str, object] = {"remote": {"same_filesystem": True} if same_filesystem else {}}
    if save_total_limit is not None:
        options["local"] = {"save_total_limit": save_total_limit}
    if existing is not None:
        must_be_existing(existing)
        options["existing"] = existing
    single = loader.job_from_arguments(save_dir, url, options, environ)
    daemon = loader.load_daemon(directory / "ckptd.toml", environ)
    return loader.LoadedConfig(daemon=daemon, jobs=(single,))


def _remembered_url(
    save_dir: str, environ: Mapping[str, str], config_dir: Path | None, verb: str
) -> str | None:
    """Return the URL that `check SAVE_DIR` means; a daemon is started by what is written out."""
    from ckptd.recover.select.job import job_named

    if verb == "run" or not os.path.isdir(save_dir):
        return None
    known = job_named(os.path.abspath(save_dir), environ, config_dir=config_dir)
    return known.remotes[0].url if known.remotes and known.file is None else None


def _whole_command(save_dir: str, environ: Mapping[str, str], config_dir: Path | None, verb: str) -> str:
    """Return what to type where SAVE_DIR stands alone: as the job was started before, if it was."""
    from ckptd.errors import CkptdError
    from ckptd.recover.select.job import job_named
    from ckptd.storage.local.job_names import is_remote

    hint = f"ckptd {verb} SAVE_DIR URL, or CKPTD_URL in the environment"
    if is_remote(save_dir):
        return f"{save_dir} is a remote, which goes second: {shlex.join(['ckptd', verb])} SAVE_DIR URL"
    try:
        known = job_named(save_dir, environ, config_dir=config_dir)
    except CkptdError:
        return hint
    if known.file is not None:
        return f"{shlex.join(['ckptd', verb, str(known.file)])}: the job file that names it"
    if known.remotes:
        command = shlex.join(["ckptd", verb, str(known.save_dir), known.remotes[0].url])
        return f"{command}: as it was started before"
    return hint


def _file_of(job: Path, config_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return the file of a job that is named; what is no known name is left to be judged as a file."""
    from ckptd.config import loader
    from ckptd.errors import CkptdError

    name = str(job)
    if "/" in name or name.endswith(".toml") or os.path.exists(name):
        return job
    try:
        found = loader.resolve_job(name, environ, config_dir=config_dir)
    except CkptdError:
        # its file is wrong: told of that file, beside the others
        file = config_dir / "jobs.d" / f"{name}.toml"
        return file if os.path.exists(file) else job
    # one directory of a glob cannot be run alone
    return job if found.file is None or found.is_matched else found.file


def _names_a_job(save_dir: str, url: str | None, environ: Mapping[str, str], config_dir: Path | None) -> bool:
    """Tell whether SAVE_DIR names a job file or, without a URL, a job that the configuration knows.

    Raises:
        NotFoundError: a job file was meant, and it is not there (66).
    """
    from ckptd.errors import NotFoundError

    if save_dir.endswith(".toml"):
        if url is None and not os.path.exists(save_dir):
            raise NotFoundError(f"no file {save_dir}", hint="`ckptd init SAVE_DIR URL` prints one")
        return os.path.isfile(save_dir)
    if url or environ.get("CKPTD_URL"):
        return False
    directory = config_dir or commands.default_config_dir(environ)
    return not os.path.exists(save_dir) and _file_of(Path(save_dir), directory, environ) != Path(save_dir)


def must_be_existing(value: str) -> None:
    """Raises: UsageError: no value of `--existing`."""
    _must_be_one_of("--existing", value, ("newest", "all", "none"))


def _must_be_of_arguments(save_total_limit: int | None, existing: str | None, same_filesystem: bool) -> None:
    """Refuse options that a job file sets itself: of several jobs, which one would they be for?"""
    from ckptd.errors import UsageError

    msg = "{} goes with SAVE_DIR URL alone"
    if save_total_limit is not None:
        hint = f"write save_total_limit = {save_total_limit} into the job file, below [local]"
        raise UsageError(msg.format("--save-total-limit"), hint=hint)
    if existing is not None:
        hint = f'write existing = "{existing}" into the job file'
        raise UsageError(msg.format("--existing"), hint=hint)
    if same_filesystem:
        hint = "write same_filesystem = true into the job file, below its [[remote]]"
        raise UsageError(msg.format("--same-filesystem"), hint=hint)


def _from_environment(environ: Mapping[str, str]) -> tuple[str | None, Sequence[Path]]:
    """Return SAVE_DIR or the job files that the environment names: `CKPTD_SAVE_DIR`, or the file of
    `CKPTD_JOB`.
    """
    from ckptd.config import loader
    from ckptd.errors import UsageError

    save_dir, job = environ.get("CKPTD_SAVE_DIR"), environ.get("CKPTD_JOB")
    if save_dir and job:
        msg = "CKPTD_SAVE_DIR and CKPTD_JOB are both set, and exclude each other"
        raise UsageError(msg, hint="unset one of them")
    if not job:
        return save_dir or None, ()
    file = loader.resolve_job(job, environ).file
    if file is None:
        msg = f"CKPTD_JOB = {job!r} names no job file"
        raise UsageError(msg, hint="a SAVE_DIR goes into CKPTD_SAVE_DIR, its remote into CKPTD_URL")
    return None, [file]
