"""Find and read what daemons publish of a job: status.json, with the daemon down and for any user.

Fast by importing little: no journal, no remote, and the configuration's models only where they have to judge.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd.errors import CkptdError, NotFoundError, NotPermitted, UsageError
from ckptd.maintenance.status.places import STATUS, other_places, state_places, written_in, wrong_file
from ckptd.observe.status_reader import hint_of, read_status
from ckptd.storage.local.job_names import named_below, remotes_below, running_daemons

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.observe.status import DaemonStatus, JobStatus, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A document of a daemon, and the state directory in which it lies."""

    place: Path
    status: Status
    written: dict[str, Any]
    """The document itself, its jobs in the same order: `--json` passes on what a newer daemon adds."""

    def only(self, is_wanted: Callable[[JobStatus], bool]) -> Published:
        """Return it with the jobs that are wanted."""
        both = zip(self.status.jobs, self.written["jobs"], strict=True)
        return self.with_jobs([one for one in both if is_wanted(one[0])])

    def with_jobs(self, jobs: list[tuple[JobStatus, Any]]) -> Published:
        """Return it with other jobs, each with what is written of it."""
        return replace(
            self,
            status=replace(self.status, jobs=tuple(job for job, _ in jobs)),
            written=self.written | {"jobs": [written for _, written in jobs]},
        )


def find_status(
    job: str | None,
    state_dir: Path | None,
    config_dir: Path | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> Status:
    """Return the published document of the daemon that runs a job (None: the newest that is known).

    `say` is told why one of several could not be read.

    Raises:
        UsageError: a URL with a TAG: what a daemon publishes lies on its node.
        NotFoundError: nothing is published where it would be.
    """
    return _of_one_daemon(job, state_dir, config_dir, say).status


def _of_one_daemon(
    job: str | None, state_dir: Path | None, config_dir: Path | None, say: Callable[[str], None] | None
) -> Published:
    if job is not None and "://" in job:
        raise UsageError(f"{job} is a remote, no job of this node", hint=f"ckptd list {job}")
    return _joined(published(job, state_dir, config_dir, say=say))


def find_statuses(
    job: str | None,
    state_dir: Path | None,
    config_dir: Path | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> list[Published]:
    """Return the published document of each daemon that is meant; one where a job or a place is named.

    A place is `state_dir`, `config_dir` or $CKPTD_CONFIG_DIR. Without either: of every configured job,
    whether its daemon runs or not, and of every daemon of this user that runs, however it was started.

    Raises:
        As `find_status`.
    """
    if job or state_dir or config_dir or os.environ.get("CKPTD_CONFIG_DIR"):
        return [_of_one_daemon(job, state_dir, config_dir, say)]
    return _by_daemon(published_by_all(say))


def published_by_all(say: Callable[[str], None] | None = None) -> list[Published]:
    """Return the documents in all state directories: of configured jobs, and of this user's daemons that run.

    Raises:
        NotFoundError: there is none. NotPermitted: this user may not look there.
    """
    why: CkptdError | None = None
    try:
        known = published(None, None, say=say)
    except CkptdError as error:
        known, why = [], error
    daemons = running_daemons()
    seen = {os.path.realpath(one.place) for one in known}
    places = [place for one in daemons for place in one.places if os.path.realpath(place) not in seen]
    known += [found for place in places if (found := _read_if_may(place)) is not None]
    if known and why is not None and not isinstance(why, NotFoundError) and say is not None:
        say(str(why))
    pids = {one.status.daemon.pid for one in known}
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


def _read_if_may(place: Path) -> Published | None:
    try:
        found = _read(place)
    except CkptdError:
        return None
    return None if found is None else _newest(found)


def _newest(found: Published) -> Published:
    """Return the newest document: while the disk of save_dir takes nothing, it lies in the user's own
    place.
    """
    for place in other_places(found.place, found.status):
        with contextlib.suppress(CkptdError):
            other = _read(place)
            if other is not None and other.status.generated_at > found.status.generated_at:
                return replace(other, place=found.place)
    return found


def _by_daemon(documents: list[Published]) -> list[Published]:
    """Join the jobs of each daemon; of a job that several have published, the newest document counts."""
    newest: dict[tuple[str, str], str] = {}
    for one in documents:
        for job in one.status.jobs:
            key = (job.name, job.save_dir)
            newest[key] = max(newest.get(key, ""), one.status.generated_at)

    def is_newest(at: str, job: JobStatus) -> bool:
        return newest[job.name, job.save_dir] == at or job.state == "invalid"

    groups: dict[tuple[int, str, str], list[Published]] = {}
    for one in documents:
        daemon, counted = one.status.daemon, one.only(partial(is_newest, one.status.generated_at))
        if counted.status.jobs:
            groups.setdefault((daemon.pid, daemon.started_at, daemon.pid_space), []).append(counted)
    return [_joined(group) for group in groups.values()]


def published(
    job: str | None,
    state_dir: Path | None,
    config_dir: Path | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> list[Published]:
    """Return the documents in the state directories; of one job the first that there is.

    A `state_dir` that is given may hold those of several jobs: all of them. `say` is told why one of several
    could not be read.

    Raises:
        NotFoundError: nothing is published where it would be. NotPermitted: this user may not look there.
    """
    if state_dir is None and job is not None:
        _must_be_no_file(job)
    found: list[Published] = []
    looked: list[str] = []
    denied: NotPermitted | None = None
    try:
        for place in _given(state_dir) if state_dir else state_places(job, config_dir):
            looked.append(str(place / STATUS))
            try:
                one = _read(place)
            except NotPermitted as error:
                denied = denied or error
                continue
            if one is not None:
                found.append(_newest(one))
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


def _read(place: Path) -> Published | None:
    """Read the document in a state directory; None where there is none.

    Raises:
        NotPermitted: this user may not look there. NotFoundError: it cannot be read.
    """
    path, data = place / STATUS, b""
    try:
        data = path.read_bytes()
        status, written = read_status(data)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        msg = f"{path} may not be read by this user"
        hint = "ask as the user that ckptd runs as, or let others enter its folders (chmod o+x)"
        raise NotPermitted(msg, hint=hint) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise NotFoundError(msg, hint=hint_of(data)) from error
    return Published(place=place, status=status, written=written)


def _given(state_dir: Path) -> list[Path]:
    """Return the state directories below one that was given: a job's own, or those of several."""
    if os.path.exists(state_dir / STATUS) or not os.path.isdir(state_dir):
        return [state_dir]
    return sorted(path.parent for path in state_dir.glob(f"*/{STATUS}")) or [state_dir]


def _joined(documents: list[Published]) -> Published:
    """Join the jobs of one daemon, of which each state directory holds its own; the newest document leads."""
    newest = max(documents, key=lambda one: one.status.generated_at)
    jobs: dict[tuple[str, str], tuple[JobStatus, Any]] = {}
    for one in documents:
        if _process(one.status.daemon) == _process(newest.status.daemon):
            for job, written in zip(one.status.jobs, one.written["jobs"], strict=True):
                jobs.setdefault((job.name, job.save_dir), (job, written))
    return newest.with_jobs(list(jobs.values()))


def _process(daemon: DaemonStatus) -> tuple[int, str]:
    # a process id alone comes again: after a reboot small ones are given out in the same order
    return daemon.pid, daemon.started_at


def is_meant(status: JobStatus, job: str, config_dir: Path | None = None) -> bool:
    """Tell whether a job that is published is JOB: a name, a save_dir, or a job file, by what stands in
    it.
    """
    # a name needs no working directory, which may have gone
    if status.name == job:
        return True
    written = written_in(job, config_dir)
    if written is None or status.state == "invalid":
        # what does not run is published by its file's name
        is_named = status.name == Path(job).stem
    else:
        is_named = status.name == written[0] or status.save_dir == str(written[1])
    return is_named or status.save_dir == os.path.normpath(os.path.abspath(job))


def jobs_meant(found: Published, job: str | None, config_dir: Path | None = None) -> Published:
    """Return the document with the jobs that are meant.

    Raises:
        NotFoundError: its daemon runs others.
    """
    meant = found.only(lambda one: job is None or is_meant(one, job, config_dir))
    if job is not None and not meant.status.jobs:
        msg = f"the daemon does not run {job} any more"
        raise NotFoundError(msg, hint="its job file was removed or cannot run; `ckptd logs JOB` says which")
    return meant
