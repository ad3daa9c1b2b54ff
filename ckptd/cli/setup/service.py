"""`ckptd service install|uninstall`: the daemon as a systemd service of one training user."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.config.loader import LoadedConfig
    from ckptd.maintenance.install.plan import Step, UnitsTarget
    from ckptd.maintenance.install.units import DropIn

_LINGER = Path("/var/lib/systemd/linger")
"""One file for each user whose services outlive the sessions."""
_HIDDEN = ("/tmp", "/var/tmp")  # noqa: S108  PrivateTmp=
_HELP = (
    "Install or remove ckptd as a systemd service. install, called again, writes the units anew; uninstall "
    "stops the service and removes its units, no checkpoint and no state. `ckptd logs JOB` shows its log."
)
_EXAMPLES = """\
sudo ckptd service install --run-as alice --now
ckptd service install --user --now
sudo ckptd service uninstall --run-as alice"""


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("service", help=_HELP, epilog=_EXAMPLES)
    def service(
        action: str = typer.Argument(..., metavar="install|uninstall", help="What to do."),
        user: bool = typer.Option(
            False, "--user", help="In your own systemd (`systemctl --user`), without root."
        ),
        run_as: str = typer.Option(
            "", "--run-as", metavar="USER", help="The user who trains: ckptd@USER.service."
        ),
        config_dir: str = typer.Option(
            "", help="Of install: where the service finds ckptd.toml and jobs.d/."
        ),
        now: bool = typer.Option(False, "--now", help="Of install: start it, or start it anew."),
        root: str = typer.Option("", "--root", metavar="DIR", help="An image that is not running."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be done; do nothing."),
    ) -> None:
        from ckptd.errors import UsageError

        if action not in ("install", "uninstall"):
            raise UsageError(f"service {action!r} is none of install, uninstall")
        if action == "uninstall" and (now or config_dir):
            raise UsageError("--now and --config-dir belong to service install")
        target = _target(user=user, run_as=run_as, root=root)
        if action == "install":
            _install(target, config_dir, starts=now, dry_run=dry_run)
        else:
            _uninstall(target, dry_run=dry_run)


def _install(target: UnitsTarget, config_dir: str, *, starts: bool, dry_run: bool) -> None:
    from ckptd.maintenance.install.plan import install_steps

    place = _config_dir(target, config_dir)
    loaded = _loaded(place)
    drop_in = _drop_in(loaded, target, place)
    steps = install_steps(target, drop_in, _program(target.root), place, starts=starts)
    _carry(steps, dry_run=dry_run)
    _say(f"{target.service}: {len(loaded.jobs)} jobs in {place / 'jobs.d'}")
    for path in drop_in.paths if drop_in.sets_paths else ():
        _say(f"  may write {path}")
    for line in _next_steps(target, loaded, place, started=starts):
        _say(f"→ {line}")


def _uninstall(target: UnitsTarget, *, dry_run: bool) -> None:
    from ckptd.maintenance.install.plan import uninstall_steps

    _carry(uninstall_steps(target), dry_run=dry_run)


def _target(*, user: bool, run_as: str, root: str) -> UnitsTarget:
    import os
    import pwd

    from ckptd.errors import NotFoundError, UsageError
    from ckptd.maintenance.install.plan import SYSTEM_UNITS, UnitsTarget

    if user and (run_as or root):
        raise UsageError("--user is for yourself and this machine; it takes no --run-as and no --root")
    if user or (os.geteuid() != 0 and not run_as):
        base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
        return UnitsTarget(folder=Path(base) / "systemd" / "user", user=None)
    if not run_as:
        hint = "--run-as alice (jobs in /etc/ckptd/alice/jobs.d), or --user as that user"
        raise UsageError("which user trains? ckptd runs as that user", hint=hint)
    where = Path(root).absolute() if root else Path("/")
    if where == Path("/"):
        try:
            pwd.getpwnam(run_as)
        except KeyError:
            raise NotFoundError(
                f"there is no user {run_as!r} here", hint="name the user who trains"
            ) from None
    return UnitsTarget(folder=where / SYSTEM_UNITS.relative_to("/"), user=run_as, root=where)


def _config_dir(target: UnitsTarget, given: str) -> Path:
    """Return the directory of the job files. One user's own variable does not apply to another user's
    service.
    """
    import os

    if target.user is None:
        given = given or os.environ.get("CKPTD_CONFIG_DIR", "")
    return Path(given).absolute() if given else _units_own(target)


def _units_own(target: UnitsTarget) -> Path:
    """Return the directory of job files that the service's unit names by default."""
    import os

    if target.user is not None:
        return target.root / "etc" / "ckptd" / target.user
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "ckptd"


def _loaded(place: Path) -> LoadedConfig:
    """Load the jobs as they will run; report a wrong one and leave out its paths."""
    from ckptd.config.loader import load_all

    loaded = load_all(place, {})
    for path, error in loaded.problems:
        _say(f"{path} is left out: {error.message}")
    return loaded


def _drop_in(loaded: LoadedConfig, target: UnitsTarget, place: Path) -> DropIn:
    import psutil

    from ckptd.errors import RefusedError
    from ckptd.maintenance.install.plan import writable_paths
    from ckptd.maintenance.install.units import DropIn

    budget = loaded.daemon.memory_budget_bytes(psutil.virtual_memory().total)
    config_dir = ""
    if place != _units_own(target):
        # an image is / when its service runs
        inside = place.relative_to(target.root) if place.is_relative_to(target.root) else place
        config_dir = str(Path("/") / inside)
        if target.user is not None and (hidden := _hidden(config_dir)):
            msg = f"{config_dir} lies in {hidden}, which a service does not see"
            raise RefusedError(msg, hint="put ckptd.toml and jobs.d/ elsewhere, for example in /etc/ckptd")
    return DropIn(
        paths=writable_paths(loaded),
        memory_budget_bytes=budget,
        sets_paths=target.user is not None,
        config_dir=config_dir,
    )


def _hidden(path: str) -> str | None:
    return next((place for place in _HIDDEN if Path(path).is_relative_to(place)), None)


def _program(root: Path) -> tuple[str, ...]:
    """Return this installation's `ckptd`; the service's PATH is not this shell's."""
    import sys

    from ckptd.errors import RefusedError

    beside = Path(sys.executable).parent / "ckptd"
    program = (str(beside),) if beside.is_file() else (sys.executable, "-m", "ckptd")
    hidden = _hidden(program[0])
    if hidden is not None and root == Path("/"):
        msg = f"{program[0]} lies in {hidden}, which a service does not see"
        raise RefusedError(msg, hint="install ckptd elsewhere, for example in /opt/ckptd")
    return program


def _next_steps(target: UnitsTarget, loaded: LoadedConfig, place: Path, *, started: bool) -> list[str]:
    from ckptd.config.commands import user_name

    name = target.service.removesuffix(".service")
    control = " ".join(target.systemctl)
    lines = []
    if not loaded.jobs and not loaded.problems:
        lines.append(f"`ckptd init SAVE_DIR URL > {place / 'jobs.d'}/NAME.toml`, then the same command again")
    if target.user is None and not (_LINGER / user_name()).exists():
        lines.append("it ends with your last session: `loginctl enable-linger` lets it live on")
    if not started:
        lines.append(f"`{control} start {name}`")
    lines.append("after a change of save_dir or url: the same command again")
    return lines


def _carry(steps: Sequence[Step], *, dry_run: bool) -> None:
    from ckptd.cli.output import print_line
    from ckptd.maintenance.install.execute import describe, execute
    from ckptd.maintenance.install.plan import Write

    if not dry_run:
        execute(steps, _say)
        return
    for step in steps:
        print_line(f"would {describe(step)}")
        if isinstance(step, Write):
            for line in step.text.splitlines():
                print_line(f"    {line}")


def _say(text: str) -> None:
    import sys

    from ckptd.base.humanize import printable

    print(printable(text), file=sys.stderr)
