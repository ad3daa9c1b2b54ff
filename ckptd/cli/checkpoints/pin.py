"""`ckptd pin | accept`: what a person decides about a checkpoint (P8).

A decision is a file in the state directory *and* an object in the remote before the command returns 0; the
daemon, running or not, reads both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import typer

from ckptd.cli.completion import complete_job, complete_tag
from ckptd.cli.output import JOB_HERE_HELP, print_line

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config.schema import JobConfig, RemoteConfig
    from ckptd.core.model.decision import Decision
    from ckptd.recover.select.job import Owner
    from ckptd.storage.stores.base import Store

_IN_DOUBT = {"suspect", "torn re-save"}
_READ_SECONDS = 20.0
"""A daemon reads a decision at its next turn, and publishes what follows from it within a second."""

Kind = Literal["pin", "unpin", "accept", "adopt"]

_JOB: str = typer.Argument(..., metavar="JOB", autocompletion=complete_job, help=JOB_HERE_HELP)
_CONFIG_DIR: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie.")


_ALL = "*"
_HELP_ACCEPT = (
    "Upload a suspect checkpoint, or those from before ckptd. TAG: it looked like two saves and is one after "
    "all. --existing: checkpoints that lay there at the first start are uploaded, and then deleted by the "
    "same rules as any other."
)
_EXAMPLES_ACCEPT = """\
ckptd accept llama-7b global_step4000
ckptd accept llama-7b --existing
ckptd accept llama-7b --existing global_step100 global_step200"""
_WORDS = {"pin": "pinned", "unpin": "no longer pinned", "accept": "accepted", "adopt": "accepted"}


def register(app: typer.Typer) -> None:
    """Add the verbs."""

    @app.command(
        "pin",
        help="Never delete this checkpoint, here or in a remote.",
        epilog="ckptd pin llama-7b global_step4000\nckptd pin llama-7b global_step4000 --remove",
    )
    def pin(
        job: str = _JOB,
        tag: str = typer.Argument(..., metavar="TAG", autocompletion=complete_tag, help="The folder's name."),
        remove: bool = typer.Option(False, "--remove", help="Take the pin back."),
        config_dir: str = _CONFIG_DIR,
    ) -> None:
        _decide(job, "unpin" if remove else "pin", [tag], config_dir)

    @app.command("accept", help=_HELP_ACCEPT, epilog=_EXAMPLES_ACCEPT)
    def accept(
        job: str = _JOB,
        tags: list[str] = typer.Argument(
            None,
            metavar="TAG ...",
            autocompletion=complete_tag,
            help="The suspect ones; with --existing some of those, default: all.",
        ),
        existing: bool = typer.Option(False, "--existing", help="Those that lay there before ckptd."),
        config_dir: str = _CONFIG_DIR,
    ) -> None:
        from ckptd.errors import UsageError

        if existing:
            _decide(job, "adopt", tags or [_ALL], config_dir)
        elif tags:
            _decide(job, "accept", tags, config_dir)
        else:
            msg = "accept takes the TAG of a suspect checkpoint"
            raise UsageError(msg, hint="of those that lay there before ckptd: ckptd accept JOB --existing")


def _decide(job: str, kind: Kind, tags: list[str], config_dir: str | None) -> None:
    import os
    import time
    from pathlib import Path

    from ckptd.config.commands import default_config_dir, user_name
    from ckptd.core.model.decision import Decision
    from ckptd.daemon.intake.decisions import write_decision
    from ckptd.recover.select.job import job_named, no_remote, owner_of
    from ckptd.storage.local.job_names import must_be_of_this_node
    from ckptd.storage.remote.documents import now_utc

    must_be_of_this_node(job, {"adopt": "accept", "unpin": "pin"}.get(kind, kind))
    directory = Path(config_dir) if config_dir else default_config_dir(os.environ)
    config = job_named(job, os.environ, config_dir=directory)
    if not config.remotes:
        raise no_remote(config)
    state_dir = _state_dir(config, directory)
    owner = owner_of(config, state_dir)
    for tag in tags:
        # a name that is written wrong would change nothing and pass for done
        if kind == "unpin":
            _must_be_pinned(config, tag, state_dir)
        elif kind == "pin" or (kind == "adopt" and tag != _ALL):
            _must_exist(config, tag)
    # all of them first: nothing is recorded beside an error
    found = [_fingerprints(config, tag, state_dir) if kind == "accept" else () for tag in tags]
    for tag, fingerprints in zip(tags, found, strict=True):
        decision = Decision(
            kind=kind,
            tag=tag,
            fingerprints=fingerprints,
            by=user_name(),
            at=now_utc(),
            serial=time.time_ns(),
        )
        write_decision(state_dir, _record_remotely(config, decision, owner))
        what = "what lay there at the first start" if tag == _ALL else tag
        places = ", ".join(remote.name for remote in config.remotes)
        print_line(f"{what}: {_WORDS[kind]}, recorded here and in {places}")
    _have_it_read(config, state_dir, tags if kind == "accept" else [])


def _have_it_read(config: JobConfig, state_dir: Path, accepted: list[str]) -> None:
    """Have the daemon read decisions at once; wait until it calls what was accepted suspect no more, so that
    `ckptd wait` does not hear that from it.
    """
    import contextlib
    import os
    import signal

    from ckptd.cli.daemon.request import wait_until
    from ckptd.cli.output import print_note
    from ckptd.storage.local.job_names import running_in

    daemon = running_in(config.save_dir)
    if daemon is None:
        return
    with contextlib.suppress(OSError):  # it has ended, and reads them at its start
        os.kill(daemon.pid, signal.SIGUSR1)

    def is_read() -> bool:
        return not any(_published_state(state_dir, tag) in _IN_DOUBT for tag in accepted)

    if not wait_until(is_read, _READ_SECONDS):
        print_note("its daemon has not read that yet; it does by itself, and `ckptd status` shows it then")


def _state_dir(config: JobConfig, config_dir: Path) -> Path:
    import os

    from ckptd.errors import NotFoundError
    from ckptd.recover.select.job import state_dir_for

    path = state_dir_for(config, os.environ, config_dir)
    if not path.is_dir():
        msg = f"no daemon of this user has kept a state of job {config.name} ({path} is not there)"
        raise NotFoundError(msg, hint=_whose_daemon(config))
    return path


def _whose_daemon(config: JobConfig) -> str:
    """Say how to reach the daemon's state, where a person's decisions are kept."""
    import os

    from ckptd.base.humanize import user_in_words

    try:
        owner = os.stat(config.save_dir).st_uid
    except OSError:
        owner = os.geteuid()
    if owner == os.geteuid():
        return "start the daemon once (`ckptd run`); if it runs as another user, call this as that user"
    return f"{config.save_dir} is {user_in_words(owner)}'s: call this as the user whose daemon watches it"


def _record_remotely(config: JobConfig, decision: Decision, owner: Owner) -> Decision:
    """Record the decision in the remotes, with a serial above every earlier one of its subject."""
    from ckptd.storage.remote.observe import record, require_identity

    for remote in config.remotes:
        store = _opened(remote)
        identity = require_identity(store)
        owner.must_own(remote.name, remote.url, identity)
        decision = record(store, decision, identity)
    return decision


def _opened(remote: RemoteConfig) -> Store:
    from ckptd.storage.child.apart import open_apart
    from ckptd.storage.stores.access import access_of

    return open_apart(remote.name, remote.url, access_of(remote))


def _fingerprints(config: JobConfig, tag: str, state_dir: Path) -> tuple[tuple[str, str], ...]:
    """Return fingerprints of the shards of a suspect folder, as the daemon compares them.

    Raises:
        RefusedError: neither this look at it nor the daemon finds it suspect (65).
    """
    from ckptd.base import files
    from ckptd.config.commands import command_for
    from ckptd.conversion.engine.inspect import inspect_files
    from ckptd.core.completeness.grid import Context
    from ckptd.core.completeness.judge import judge
    from ckptd.errors import NotFoundError, RefusedError
    from ckptd.storage.local.scan import scan_folder

    with files.opened_dir(config.save_dir) as fd:
        listing = scan_folder(fd, tag, declared=config.declared)
    if listing is None or not listing.is_checkpoint:
        msg = f"no checkpoint {tag} in {config.save_dir}"
        raise NotFoundError(msg, hint="ckptd status shows the suspect ones")
    facts = inspect_files(config.save_dir / listing.place, [f.path for f in listing.shards])
    context = Context(save_spread_seconds=config.save_spread_seconds)
    verdict = judge(listing, {f.path: f for f in facts}, None, context)
    if not {verdict.state.value, _published_state(state_dir, tag)} & _IN_DOUBT:
        why = f": {verdict.reason}" if verdict.reason else ""
        msg = f"{tag} is {verdict.state.value}{why}; only a suspect checkpoint is accepted"
        raise RefusedError(msg, hint=command_for(config, "status"))
    return tuple(sorted((f.path, f.fingerprint) for f in facts))


def _published_state(state_dir: Path, tag: str) -> str:
    """Return the daemon's last word on a checkpoint here: it may know an earlier save of that tag."""
    from ckptd.observe.status_reader import read_status

    try:
        status, _ = read_status((state_dir / "status.json").read_bytes())
    except (OSError, ValueError):
        return ""
    return next((row.state for job in status.jobs for row in job.checkpoints if row.tag == tag), "")


def _must_be_pinned(config: JobConfig, tag: str, state_dir: Path) -> None:
    """Require a pin here or in a remote: it may outlive its checkpoint, or be another node's."""
    from ckptd.core.model.decision import PINS, pinned_tags
    from ckptd.daemon.intake.decisions import read_decisions
    from ckptd.storage.remote.observe import is_pinned

    if tag in pinned_tags(read_decisions(state_dir, PINS)):
        return
    if not any(is_pinned(_opened(remote), tag) for remote in config.remotes):
        _must_exist(config, tag)


def _must_exist(config: JobConfig, tag: str) -> None:
    from ckptd.base.names import tag_problem
    from ckptd.config.commands import command_for
    from ckptd.errors import NotFoundError
    from ckptd.storage.remote.observe import read_remote

    if tag_problem(tag) is None and (config.save_dir / tag).exists():
        return
    for remote in config.remotes:
        if any(view.commit.tag == tag for view in read_remote(_opened(remote)).commits):
            return
    msg = f"no checkpoint {tag}, neither in {config.save_dir} nor in a remote"
    raise NotFoundError(msg, hint=command_for(config, "list"))
