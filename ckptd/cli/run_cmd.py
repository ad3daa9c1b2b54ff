"""`ckptd run`: the daemon, for one save_dir, for job files, or for a configuration directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ckptd.config import LoadedConfig

_LEVELS = ("debug", "info", "warning", "error")


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("run", help="Run the daemon: watch, convert, upload, commit, keep save_total_limit.")
    def run(
        save_dir: str | None = typer.Argument(None, help="Where the trainer saves."),
        url: str | None = typer.Argument(
            None, help="Where they go: a directory on another file system, s3://bucket/prefix, sftp://…"
        ),
        job: list[Path] = typer.Option([], "--job", help="A job file; may be given several times."),
        config_dir: Path | None = typer.Option(None, "--config-dir", help="ckptd.toml and jobs.d/*.toml."),
        once: bool = typer.Option(
            False, "--once", envvar="CKPTD_ONCE", help="Work until nothing is left to do, then exit."
        ),
        drain: str | None = typer.Option(
            None, "--drain", envvar="CKPTD_DRAIN", help="On SIGTERM finish uploads for at most T (20m)."
        ),
        save_total_limit: int | None = typer.Option(
            None, "--save-total-limit", min=1, help="Keep that many."
        ),
        same_filesystem: bool = typer.Option(
            False, "--same-filesystem", help="Allow a remote on save_dir's own disk (tests)."
        ),
        log_level: str = typer.Option("info", "--log-level", help="debug, info, warning or error."),
    ) -> None:
        import logging
        import os
        import sys
        from functools import partial

        from ckptd.daemon.loop import Daemon
        from ckptd.errors import UsageError

        if log_level.lower() not in _LEVELS:
            raise UsageError(f"--log-level {log_level!r} is none of {', '.join(_LEVELS)}")
        drain_seconds = _drain_seconds(drain) if drain else None
        logging.basicConfig(
            stream=sys.stderr,
            level=log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        logging.getLogger("watchdog").setLevel(logging.WARNING)
        load = partial(_load, save_dir, url, job, config_dir, save_total_limit, same_filesystem)
        daemon = Daemon(load(), os.environ, once=once, drain_seconds=drain_seconds, reload=load)
        raise typer.Exit(daemon.run())


def _drain_seconds(text: str) -> float:
    from ckptd.config_quantities import parse_duration
    from ckptd.errors import UsageError

    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--drain: {error}") from error


def _load(
    save_dir: str | None,
    url: str | None,
    jobs: list[Path],
    config_dir: Path | None,
    save_total_limit: int | None,
    same_filesystem: bool,
) -> LoadedConfig:
    import os

    from ckptd import config
    from ckptd.errors import UsageError

    environ = os.environ
    if save_dir is None:
        directory = config_dir or config.default_config_dir(environ)
        if jobs:
            daemon = config.load_daemon(directory / "ckptd.toml", environ)
            return config.load_jobs(jobs, daemon, environ)
        return config.load_all(directory, environ)
    if jobs:
        msg = "SAVE_DIR and --job exclude each other"
        raise UsageError(msg, hint="ckptd run SAVE_DIR URL, or ckptd run --job FILE")
    if url is None and "CKPTD_URL" not in environ:
        msg = "there is no URL: nothing would leave this node"
        raise UsageError(msg, hint="ckptd run SAVE_DIR URL")
    options: dict[str, object] = {"remote": {"same_filesystem": True} if same_filesystem else {}}
    if save_total_limit is not None:
        options["local"] = {"save_total_limit": save_total_limit}
    single = config.job_from_arguments(save_dir, url or environ["CKPTD_URL"], options, environ)
    daemon_path = config_dir / "ckptd.toml" if config_dir else None
    return config.LoadedConfig(daemon=config.load_daemon(daemon_path, environ), jobs=(single,))
