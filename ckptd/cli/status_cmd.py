"""`ckptd status`: is my run safe? Reads status.json alone: with the daemon down, and for any user (H33).

Fast by importing little: the file is JSON, the table is rich's; no journal, no remote, no pydantic.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ckptd.cli.status_tables import ago, checkpoints_table, remote_table, size_of
from ckptd.cli.text import ENV_JOB, printable_everywhere
from ckptd.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

STALE_SECONDS = 60.0

_SERVICES = Path("/var/lib/ckptd")
"""Where systemd keeps the state of `ckptd@USER.service`, by user and job."""


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("status", help="Is my run safe? What is under way, what needs a person.")
    def status(
        job: str | None = typer.Argument(
            None, envvar=ENV_JOB, help="SAVE_DIR, job file or job name; default: every job."
        ),
        tag: str | None = typer.Argument(None, help="One checkpoint's whole story."),
        as_json: bool = typer.Option(False, "--json", help="The published document."),
        retention: bool = typer.Option(False, "--retention", help="Why each checkpoint is kept."),
        live: bool = typer.Option(False, "--live", help="Exit 0 only if the daemon lives."),
        state_dir: str | None = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str | None = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        document = find_status(
            job, Path(state_dir) if state_dir else None, Path(config_dir) if config_dir else None
        )
        alive = _is_alive(document)
        jobs = [j for j in document["jobs"] if job is None or _is_meant(j, job)]
        if job is not None and not jobs and not as_json and not live:
            msg = f"the daemon does not run {job} any more"
            raise NotFoundError(
                msg, hint="its job file was removed or cannot run; the daemon's log says which"
            )
        if as_json:
            document["daemon"]["alive"] = alive
            print(json.dumps(document | {"jobs": jobs}, indent=2))
        elif tag is not None:
            _story(jobs, tag)
        else:
            _show(document, jobs, alive, retention)
        if live:
            raise typer.Exit(0 if alive else 1)
        raise typer.Exit(_exit_code(jobs, alive))


def find_status(job: str | None, state_dir: Path | None, config_dir: Path | None = None) -> dict[str, Any]:
    """The published document of the daemon that runs a job (None: the newest that is known).

    Raises:
        UsageError: a URL: what a daemon publishes lies on its node.
        NotFoundError: nothing is published where it would be.
    """
    if job is not None and "://" in job:
        raise UsageError(f"{job} is a remote, no job of this node", hint=f"ckptd list {job}")
    found: list[dict[str, Any]] = []
    looked: list[str] = []
    for place in _given(state_dir) if state_dir else _places(job, config_dir):
        path = place / "status.json"
        looked.append(str(path))
        try:
            found.append(json.loads(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            msg = f"{path} cannot be read: {error}"
            raise NotFoundError(msg, hint="the daemon writes it again within 20 s") from error
        if job is not None:
            break
    if found:
        return _joined(found)
    if job is None and not looked:
        msg = "there is no job in the configuration directory"
        raise NotFoundError(msg, hint="name a job file or a SAVE_DIR, or say where --state-dir is")
    msg = f"no daemon has published a status (looked at {', '.join(dict.fromkeys(looked))})"
    if job is not None and os.path.exists(os.path.join(job, "_ckptd", "remote.json")):
        raise NotFoundError(msg, hint=f"this is a remote: ckptd list {job}")
    raise NotFoundError(msg, hint="is it running? start it with: ckptd run SAVE_DIR URL")


def _given(state_dir: Path) -> list[Path]:
    """A job's state directory, or one that holds those of several."""
    if (state_dir / "status.json").exists() or not state_dir.is_dir():
        return [state_dir]
    return sorted(path.parent for path in state_dir.glob("*/status.json")) or [state_dir]


def _joined(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The jobs of one daemon, of which each state directory holds its own; the newest document leads."""
    newest = max(documents, key=lambda document: str(document["generated_at"]))
    jobs: dict[tuple[str, str], dict[str, Any]] = {}
    for document in documents:
        # a process id alone comes again: after a reboot small ones are given out in the same order
        if all(document["daemon"][key] == newest["daemon"][key] for key in ("pid", "started_at")):
            for job in document["jobs"]:
                jobs.setdefault((job["name"], job["save_dir"]), job)
    return newest | {"jobs": list(jobs.values())}


def _places(job: str | None, config_dir: Path | None) -> Iterator[Path]:
    """Where a state directory may be; the configuration is read only when a save_dir's own place has none."""
    if job is None:
        yield from _all_known(config_dir)
        return
    if ("/" in job or os.path.isdir(job)) and not job.endswith(".toml"):
        save_dir = Path(os.path.normpath(os.path.abspath(job)))
        yield from _state_dirs(save_dir)
        yield from _base_dirs(save_dir.name)
    yield from _configured(job, config_dir)


def _configured(job: str, config_dir: Path | None) -> list[Path]:
    """Where a job that the configuration knows keeps its state."""
    from ckptd.config import default_config_dir, load_daemon, resolve_job

    directory = config_dir or default_config_dir(os.environ)
    config = resolve_job(job, os.environ, config_dir=directory)
    base = load_daemon(directory / "ckptd.toml", os.environ).state_dir
    named = [base / config.name] if base is not None else []
    return [*named, *_base_dirs(config.name), *_state_dirs(config.save_dir)]


def _state_dirs(save_dir: Path) -> list[Path]:
    import hashlib

    from ckptd.place import path_of

    digest = hashlib.sha256(os.fsencode(os.path.realpath(save_dir))).hexdigest()[:16]
    return [
        path_of(save_dir, "_ckptd/state"),
        Path("/var/tmp") / f"ckptd-{os.getuid()}" / digest,  # noqa: S108 — read only
    ]


def _base_dirs(name: str) -> list[Path]:
    bases = [os.environ.get("CKPTD_STATE_DIR"), os.environ.get("STATE_DIRECTORY")]
    places = [Path(base.split(":")[0]) / name for base in bases if base]
    return places + sorted(path for path in _SERVICES.glob(f"*/{name}") if path.is_dir())


def _all_known(config_dir: Path | None) -> list[Path]:
    from ckptd.config import default_config_dir, load_all

    loaded = load_all(config_dir or default_config_dir(os.environ), os.environ)
    found: list[Path] = []
    for config in loaded.jobs:
        if loaded.daemon.state_dir is not None:
            found.append(loaded.daemon.state_dir / config.name)
        found += [*_base_dirs(config.name), *_state_dirs(config.save_dir)]
    # whoever asks: what the node's services publish
    return found or sorted(path.parent for path in _SERVICES.glob("*/*/status.json"))


def _is_meant(status: dict[str, Any], job: str) -> bool:
    path = os.path.normpath(os.path.abspath(job))
    return status["name"] in (job, Path(job).stem) or status["save_dir"] == path


def _is_alive(document: dict[str, Any]) -> bool:
    daemon = document["daemon"]
    if not daemon["alive"]:
        return False
    try:
        os.kill(int(daemon["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _age_seconds(at: str) -> float:
    return max(0.0, time.time() - datetime.fromisoformat(at).timestamp())


def _headline(job: dict[str, Any], age_seconds: float) -> str:
    """The first line: is my run safe?"""
    safe = job.get("safe")
    if safe is None:
        words = {"waiting": "no checkpoint yet", "invalid": "this job does not run"}
        return f"NOT SAFE: {words.get(job['state'], _unproved(job) or 'nothing is committed yet')}"
    risk = (job.get("seconds_at_risk") or 0) + age_seconds
    text = f"step {safe['step']} ({safe['tag']}) committed {ago(safe['age_seconds'] + age_seconds)} ago"
    steps = job.get("steps_at_risk") or 0
    behind = f"; {steps} saved steps not committed yet" if steps else ""
    return f"{'SAFE' if not steps else 'BEHIND'}: {text}{behind}; {ago(risk)} of training at risk"


def _unproved(job: dict[str, Any]) -> str | None:
    """What was committed when its remotes were last seen: no comfort while they do not answer (P17)."""
    done = [
        checkpoint
        for checkpoint in job["checkpoints"]
        if any(forms.get("zero", {}).get("state") == "committed" for forms in checkpoint["remotes"].values())
    ]
    if not done:
        return None
    newest = max(done, key=lambda checkpoint: (checkpoint["branch"] or 0, checkpoint["step"] or 0))
    return f"{newest['tag']} was committed, and a required remote has not been seen to hold it since"


def _show(document: dict[str, Any], jobs: list[dict[str, Any]], alive: bool, retention: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    age = _age_seconds(document["generated_at"])
    for job in printable_everywhere(jobs):
        since = _age_seconds(job["as_of"]) if job.get("as_of") else age
        waived = "".join(f"; OPT-OUT {text}" for text in job["opt_outs"])
        console.print(f"[bold]{escape(job['name'])}[/bold]  {escape(_headline(job, since) + waived)}")
        if not alive:
            console.print(f"  [red]the daemon is not running[/red]; this is what it saw {ago(age)} ago")
        elif age > STALE_SECONDS:
            console.print(f"  [yellow]the daemon has not published for {ago(age)}[/yellow]")
        _disk(console, job)
        for remote in job.get("remotes", []):
            console.print(f"  {escape(_abilities(remote))}", style="dim")
        for problem in job["problems"]:
            mark = {"attention": "[red]![/red]", "behind": "[yellow]~[/yellow]"}.get(problem["severity"], "·")
            console.print(f"  {mark} {escape(problem['text'])} ({ago(_age_seconds(problem['since']))})")
            if problem["next_step"]:
                console.print(f"    → {escape(problem['next_step'])}")
        if job["checkpoints"]:
            console.print(checkpoints_table(job, retention=retention))
        for remote in job.get("remotes", []) if retention else []:
            console.print(remote_table(remote))
    if document["daemon"].get("notify_error"):
        console.print(f"[yellow]![/yellow] nobody was told: {escape(document['daemon']['notify_error'])}")


def _abilities(remote: dict[str, Any]) -> str:
    """What the store was seen to do, and what it does not."""
    # of an older daemon there is no URL; the name of a remote without one says nothing
    shown = f"remote {remote['name']}" if remote["name"] != "remote" else remote.get("url") or "remote"
    if not remote["attached"]:
        return f"{shown}: not attached"
    exclusive = "create-only writes" if remote["create_only"] else "no create-only writes"
    return "; ".join([f"{shown}: {exclusive}", f"verified by {remote['proof']}", *remote["notes"]])


def _disk(console: Any, job: dict[str, Any]) -> None:
    disk = job.get("disk")
    if not disk:
        return
    parts = [f"{size_of(disk['free_bytes'])} free"]
    if disk.get("full_in_saves") is not None:
        parts.append(f"full in {disk['full_in_saves']} saves / {ago(disk['full_in_seconds'])} at this pace")
    if disk.get("unfinished_bytes"):
        parts.append(f"{size_of(disk['unfinished_bytes'])} in saves that were cut short")
    if job.get("production_bytes_per_second"):
        parts.append(f"production {size_of(job['production_bytes_per_second'])}/s")
    if job.get("link_bytes_per_second"):
        parts.append(f"link {size_of(job['link_bytes_per_second'])}/s")
    console.print("  " + ", ".join(parts), style="dim")


def _story(jobs: list[dict[str, Any]], tag: str) -> None:
    """One checkpoint: on this node, its way to each remote, and what retention makes of it there."""
    for job in jobs:
        here = next((c for c in job["checkpoints"] if c["tag"] == tag), None)
        held = {
            remote["name"]: [one for one in remote.get("held", []) if one["tag"] == tag]
            for remote in job.get("remotes", [])
        }
        if here is not None or any(held.values()):
            print(json.dumps((here or {"tag": tag}) | {"held": held}, indent=2))
            return
    msg = f"no checkpoint {tag!r} in the published status"
    raise NotFoundError(msg, hint="ckptd status shows those there are; ckptd list shows the remote's")


def _exit_code(jobs: list[dict[str, Any]], alive: bool) -> int:
    """0 safe · 1 a person is needed · 3 behind (docs/contract.md)."""
    states = {job["state"] for job in jobs}
    if not jobs or not alive or states & {"attention", "invalid"}:
        return 1
    return 3 if "behind" in states or any(job.get("steps_at_risk") for job in jobs) else 0
