"""Find and read what daemons publish of a job: status.json, as data, with the daemon down and for any user.

Fast by importing little: no journal, no remote, and the configuration's models only where they have to judge.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd.errors import CkptdError, NotFoundError, NotPermitted, UsageError
from ckptd.maintenance.status.places import STATUS, newest_of, state_places, written_in, wrong_file
from ckptd.storage.local.job_names import named_below, remotes_below, running_daemons

if TYPE_CHECKING:
    from collections.abc import Callable


def find_status(
    job: str | None,
    state_dir: Path | None,
    config_dir: Path | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the published document of the daemon that runs a job (None: the newest that is known).

    `say` is told why one of several could not be read.

    Raises:
        UsageError: a URL with a TAG: what a daemon publishes lies on its node.
        NotFoundError: nothing is published where it would be.
    """
    if job is not None and "://" in job:
        raise UsageError(f"{job} is a remote, no job of this node", hint=f"ckptd list {job}")
    return _joined([document for _, document in published(job, state_dir, config_dir, say=say)])


def find_statuses(
    job: str | None,
    state_dir: Path | None,
    config_dir: Path | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the published document of each daemon that is meant; one where a job or a place is named.

    A place is `state_dir`, `config_dir` or $CKPTD_CONFIG_DIR. Without either: of every configured job,
    whether its daemon runs or not, and of every daemon of this user that runs, however it was started.

    Raises:
        As `find_status`.
    """
    if job or state_dir or config_dir or os.environ.get("CKPTD_CONFIG_DIR"):
        return [find_status(job, state_dir, config_dir, say=say)]
    return _by_daemon([document for _, document in published_by_all(say)])


def published_by_all(say: Callable[[str], None] | None = None) -> list[tuple[Path, dict[str, Any]]]:
    """Return state directories with their documents: of configured jobs, and of this user's daemons that run.

    Raises:
        NotFoundError: there is none. NotPermitted: this user may not look there.
    """
    why: CkptdError | None = None
    try:
        known = published(None, None, say=say)
    except CkptdError as error:
        known, why = [], error
    daemons = running_daemons()
    seen = {os.path.realpath(place) for place, _ in known}
    places = [place for one in daemons for place in one.places if os.path.realpath(place) not in seen]
    known += [(place, document) for place in places if (document := _read_if_may(place)) is not None]
    if known and why is not None and not isinstance(why, NotFoundError) and say is not None:
        say(str(why))
    pids = {document["daemon"]["pid"] for _, document in known}
    silent = [one.pid for one in daemons if one.pid not in pids]
    if silent and say is not None:
        say(f"a daemon (process {silent[0]}) has published nothing yet; it does so within seconds")
    if not known:
        raise _nothing_runs(why)
    return known


def _nothing_runs(why: CkptdError | None) -> CkptdError:
    """Add to why nothing is configured that no daemon runs either, and what to type."""
    if not isinstance(why, NotFoundError):
        return why or NotFoundError("no daemon of yours runs")
    hint = "start one: ckptd run SAVE_DIR URL; what one that ended has published: ckptd status SAVE_DIR"
    return NotFoundError(f"no daemon of yours runs, and {why.message}", hint=hint)


def _read_if_may(place: Path) -> dict[str, Any] | None:
    try:
        document = _read(place / STATUS)
    except CkptdError:
        return None
    return None if document is None else newest_of(place, document, _read)


def _by_daemon(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the jobs of each daemon; of a job that several have published, the newest document counts."""
    newest: dict[tuple[str, str], str] = {}
    for document in documents:
        for job in document["jobs"]:
            key, at = (job["name"], job["save_dir"]), str(document["generated_at"])
            newest[key] = max(newest.get(key, ""), at)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for document in documents:
        at = str(document["generated_at"])
        jobs = [
            job
            for job in document["jobs"]
            if newest[job["name"], job["save_dir"]] == at or job["state"] == "invalid"
        ]
        daemon = document["daemon"]
        key = tuple(daemon.get(name) for name in ("pid", "started_at", "pid_space"))
        if jobs:
            groups.setdefault(key, []).append(document | {"jobs": jobs})
    return [_joined(group) for group in groups.values()]


def published(
    job: str | None,
    state_dir: Path | None,
    config_dir: Path | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> list[tuple[Path, dict[str, Any]]]:
    """Return state directories with the documents in them; of one job the first that has one.

    A `state_dir` that is given may hold those of several jobs: all of them. `say` is told why one of several
    could not be read.

    Raises:
        NotFoundError: nothing is published where it would be. NotPermitted: this user may not look there.
    """
    if state_dir is None and job is not None:
        _must_be_no_file(job)
    found: list[tuple[Path, dict[str, Any]]] = []
    looked: list[str] = []
    denied: NotPermitted | None = None
    try:
        for place in _given(state_dir) if state_dir else state_places(job, config_dir):
            looked.append(str(place / STATUS))
            try:
                document = _read(place / STATUS)
            except NotPermitted as error:
                denied = denied or error
                continue
            if document is not None:
                found.append((place, newest_of(place, document, _read)))
                if job is not None and state_dir is None:
                    break
    except NotFoundError:
        if denied is None:
            raise
    if denied is not None and not found:
        raise denied
    if denied is not None and job is None and say is not None:
        say(str(denied))
    if found:
        return found
    if job is None and not looked:
        raise _no_job(config_dir)
    msg = f"no daemon has published a status (looked at {', '.join(dict.fromkeys(looked))})"
    raise NotFoundError(msg, hint=_where_then(job))


def _must_be_no_file(job: str) -> None:
    """Raises: NotFoundError: it is a file, and by its name none of a job."""
    if "/" in job and not job.endswith(".toml") and os.path.isfile(job.rstrip("/")):
        msg = f"{job} is a file, no SAVE_DIR"
        raise NotFoundError(msg, hint="the name of a job file ends in .toml")


def _no_job(config_dir: Path | None) -> NotFoundError:
    """Report that nothing is configured or can run; a daemon may go on with what it read before."""
    wrong = wrong_file(config_dir)
    if wrong is None:
        from ckptd.config.commands import default_config_dir

        msg = f"there is no job in {(config_dir or default_config_dir(os.environ)) / 'jobs.d'}"
        return NotFoundError(msg, hint="name a job file or a SAVE_DIR, or say where --state-dir is")
    hint = f"{wrong.hint or 'put it right'}; `ckptd check` reads it; meanwhile ask by SAVE_DIR"
    return NotFoundError(f"no job can be told from the configuration: {wrong.message}", hint=hint)


def _where_then(job: str | None) -> str:
    """Return the command to type where nothing is published of a job."""
    if job is not None and "/" in job and not os.path.exists(job):
        return f"{job} is not there: a remote that is not mounted, or a SAVE_DIR that is spelt otherwise?"
    if job is None:
        return "start it: ckptd run --config-dir DIR, or systemctl start ckptd@USER"
    if job.endswith(".toml"):
        return f"is it running? start it with: ckptd run {shlex.quote(job)}"
    if "/" in job and (below := named_below(remotes_below(job), "status")):
        return below
    place = shlex.quote(job) if os.path.isdir(job) else "SAVE_DIR"
    return f"is it running? start it with: ckptd run {place} URL"


def _read(path: Path) -> dict[str, Any] | None:
    """Read a published document; None where there is none.

    Raises:
        NotPermitted: this user may not look there. NotFoundError: it cannot be read.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        _judge(document)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        msg = f"{path} may not be read by this user"
        hint = "ask as the user that ckptd runs as, or let others enter its folders (chmod o+x)"
        raise NotPermitted(msg, hint=hint) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise NotFoundError(msg, hint="a daemon that runs writes it again within 20 s") from error
    return document


def _judge(document: object) -> None:
    """Raises: ValueError: it is no status of ckptd."""
    shape = {"generated_at": str, "daemon": dict, "jobs": list}
    if not isinstance(document, dict) or any(not isinstance(document.get(k), v) for k, v in shape.items()):
        raise ValueError("it is no status of ckptd")


def _given(state_dir: Path) -> list[Path]:
    """Return the state directories below one that was given: a job's own, or those of several."""
    if os.path.exists(state_dir / STATUS) or not os.path.isdir(state_dir):
        return [state_dir]
    return sorted(path.parent for path in state_dir.glob(f"*/{STATUS}")) or [state_dir]


def _joined(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the jobs of one daemon, of which each state directory holds its own; the newest document leads."""
    newest = max(documents, key=lambda document: str(document["generated_at"]))
    jobs: dict[tuple[str, str], dict[str, Any]] = {}
    for document in documents:
        # a process id alone comes again: after a reboot small ones are given out in the same order
        if all(document["daemon"][key] == newest["daemon"][key] for key in ("pid", "started_at")):
            for job in document["jobs"]:
                jobs.setdefault((job["name"], job["save_dir"]), job)
    return newest | {"jobs": list(jobs.values())}


def is_meant(status: dict[str, Any], job: str, config_dir: Path | None = None) -> bool:
    """Tell whether a job that is published is JOB: a name, a save_dir, or a job file, by what stands in
    it.
    """
    # a name needs no working directory, which may have gone
    if status["name"] == job:
        return True
    written = written_in(job, config_dir)
    if written is None or status["state"] == "invalid":
        # what does not run is published by its file's name
        is_named = status["name"] == Path(job).stem
    else:
        is_named = status["name"] == written[0] or status["save_dir"] == str(written[1])
    return is_named or bool(status["save_dir"] == os.path.normpath(os.path.abspath(job)))


def jobs_meant(document: dict[str, Any], job: str | None, config_dir: Path | None = None) -> dict[str, Any]:
    """Return the document with the jobs that are meant.

    Raises:
        NotFoundError: its daemon runs others.
    """
    jobs = [one for one in document["jobs"] if job is None or is_meant(one, job, config_dir)]
    if job is not None and not jobs:
        msg = f"the daemon does not run {job} any more"
        raise NotFoundError(msg, hint="its job file was removed or cannot run; `ckptd logs JOB` says which")
    return document | {"jobs": jobs}
