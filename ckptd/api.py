"""Do from Python what the commands do: `import ckptd; ckptd.restore("s3://bucket/run", "here")`.

Each function takes what the command of its name takes and returns a typed result (docs/python.md). Errors are
those of `ckptd.errors`, with the message, hint and exit code that the command would end with: the commands
run the same code. Whoever calls hears nothing on stdout or stderr: `say` is told what the command prints on
stderr, and `on_progress` (what is done, bytes done, bytes in all) how far a long call is.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptd.config.schema import JobConfig
    from ckptd.conversion.cluster.pool import Address
    from ckptd.conversion.options import (
        Compat,
        ConvertOptions,
        ConvertProgress,
        ConvertReport,
        FormName,
    )
    from ckptd.core.model.manifest import Commit
    from ckptd.errors import CkptdError
    from ckptd.maintenance.deepspeed_load import Loaded
    from ckptd.maintenance.inspection import Inspection
    from ckptd.maintenance.listing import RemoteListing
    from ckptd.maintenance.status.report import JobReport
    from ckptd.maintenance.verify import Slice, VerifiedRemote
    from ckptd.recover.plan import RecoveryOptions
    from ckptd.recover.recovery import Recovered
    from ckptd.recover.restore import Restore
    from ckptd.recover.resume import Resume

    PathLike = str | os.PathLike[str]
    Say = Callable[[str], None]
    Progress = Callable[[str, int, int], None]
    Failures = dict[str, CkptdError]


def inspect(folder: PathLike) -> Inspection:
    """Inspect a tag folder, a save_dir, a universal folder or exported weights of this machine.

    Raises:
        NotFoundError: there is no checkpoint.

    >>> ckptd.inspect("nvme/run").checkpoints[0].step
    5
    """
    from ckptd.base.process import must_answer
    from ckptd.errors import UsageError
    from ckptd.maintenance.inspection import inspect_folder

    path = os.fspath(folder)
    if "://" in path:
        hint = f"ckptd list {path}; of one checkpoint: ckptd convert --dry-run {path} DST"
        raise UsageError(f"inspect looks at folders of this machine; {path} is a URL", hint=hint)
    must_answer(path)
    return inspect_folder(Path(path))


def convert(
    source: PathLike,
    destination: PathLike,
    *,
    form: FormName = "universal",
    compat: Compat = "auto",
    max_shard_bytes: int = 5_000_000_000,
    memory_budget_bytes: int = 512 << 20,
    verify: bool = False,
    cluster: str = "",
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ConvertReport:
    """Convert a checkpoint into the universal form, into weights, or for FSDP2; both ends may be URLs.

    Args:
        form: universal; weights-fp32, weights-bf16, weights-fp16 (safetensors); dcp.
        max_shard_bytes: of weights and dcp.
        verify: check the source's CRCs first, and compare what was made with the plan.
        cluster: Dask workers that do it: tcp://HOST:PORT, local:N or slurm:N (the extra `ckptd[cluster]`).
        should_stop: is asked again and again; once it returns true the call ends, and another one goes on.

    Raises:
        RefusedError, DamagedError: it has no such form, or is damaged. TargetExists, NoSpaceError, ….
        UsageError: no such form or layout.

    >>> report = ckptd.convert("nvme/run/global_step5", "universal", verify=True)
    >>> report.step
    5
    """
    from ckptd.conversion.options import MIB, ConvertOptions, parse_form
    from ckptd.errors import UsageError

    if memory_budget_bytes < 64 * MIB:
        raise UsageError(f"memory_budget_bytes={memory_budget_bytes} is too small", hint="at least 64 << 20")
    kind, dtype = parse_form(form)
    options = ConvertOptions(
        form=kind,
        dtype=dtype,
        compat=compat,
        max_shard_bytes=max_shard_bytes,
        memory_budget_bytes=memory_budget_bytes,
        verify=verify,
    )

    def tell(progress: ConvertProgress) -> None:
        if on_progress is not None:
            on_progress(progress.phase, progress.bytes_done, progress.bytes_total)

    address = None
    if cluster:
        from ckptd.conversion.cluster.pool import parse

        address = parse(cluster)
    stops = should_stop or (lambda: False)
    return converted(source, destination, options, address=address, on_progress=tell, should_stop=stops)


def converted(
    source: PathLike,
    destination: PathLike,
    options: ConvertOptions,
    *,
    address: Address | None,
    on_progress: Callable[[ConvertProgress], None] | None,
    should_stop: Callable[[], bool],
) -> ConvertReport:
    """Convert on this machine, or by the workers at `address`; files too are told of in the progress."""
    from ckptd.conversion.remote.ends import convert_ends, ends_of

    begin, there = ends_of(os.fspath(source), os.fspath(destination))
    if address is None:
        return convert_ends(begin, there, options, on_progress=on_progress, should_stop=should_stop)
    from ckptd.conversion.cluster.conversion import Clustered
    from ckptd.errors import UsageError

    if options.form == "dcp":
        raise UsageError("dcp is not made on a cluster yet", hint="leave out --cluster")
    ends = begin, there, options, os.environ
    return Clustered(*ends, address=address, on_progress=on_progress, should_stop=should_stop).run()


def checkpoints(
    job: PathLike,
    *,
    run: str | None = None,
    remote: str | None = None,
    config_dir: PathLike | None = None,
    say: Say | None = None,
    failures: Failures | None = None,
) -> list[RemoteListing]:
    """List what is committed in a remote, or in each remote of a job; oldest first.

    Args:
        job: a job's name, file or save_dir; or the URL of a remote.
        failures: takes the errors of remotes that do not answer, by name; else the first is raised.
        say: is told each note, such as why a remote does not answer.

    >>> [one.tag for one in ckptd.checkpoints("nas/run")[0].checkpoints]
    ['global_step5']
    """
    from datetime import UTC, datetime

    from ckptd.maintenance.listing import list_remote
    from ckptd.recover.select.runs import RemoteRuns
    from ckptd.recover.select.sources import where_of

    where = where_of(os.fspath(job), os.environ, only=remote, config_dir=_path(config_dir))
    with _raising(failures) as failed:
        inventories = list(where.read(say or _silent, failed))
    if run is not None and inventories:
        runs = RemoteRuns(inventories)
        inventories = [runs.only(inventory, runs.named(run)) for inventory in inventories]
    return [list_remote(inventory, datetime.now(UTC)) for inventory in inventories]


@overload
def status(
    job: PathLike,
    *,
    state_dir: PathLike | None = None,
    config_dir: PathLike | None = None,
    say: Say | None = None,
) -> JobReport: ...


@overload
def status(
    job: None = None,
    *,
    state_dir: PathLike | None = None,
    config_dir: PathLike | None = None,
    say: Say | None = None,
) -> tuple[JobReport, ...]: ...


def status(
    job: PathLike | None = None,
    *,
    state_dir: PathLike | None = None,
    config_dir: PathLike | None = None,
    say: Say | None = None,
) -> JobReport | tuple[JobReport, ...]:
    """Report whether a run is safe, as its daemon last published it; of a URL: the whole job, all its nodes.

    Args:
        job: a name, file, save_dir or URL; None: every job that is configured, or
            that a daemon of this user watches.
        state_dir: where status.json lies, if neither save_dir nor the configuration tells.
        say: is told why the status of one of several daemons cannot be read.

    Raises:
        NotFoundError: no daemon has published a status of it.

    >>> report = ckptd.status("nas/run")
    >>> report.verdict, report.safe.step, report.exit_code
    ('SAFE', 5, 0)
    """
    import time

    from ckptd.maintenance.status.published import find_statuses, jobs_meant
    from ckptd.maintenance.status.report import report_of_remote, reports_of
    from ckptd.storage.local.job_names import is_remote

    named = None if job is None else os.fspath(job)
    if named is not None and is_remote(named):
        return report_of_remote(named, _path(config_dir))
    documents = find_statuses(named, _path(state_dir), _path(config_dir), say=say)
    now = time.time()
    found = tuple(
        report
        for one in documents
        for report in reports_of(jobs_meant(one, named, _path(config_dir)).status, now)
    )
    # a name may be that of a job, and of the file of another one that cannot run: the worst, as the command
    return found if named is None else min(found, key=lambda one: (1, 3, 0).index(one.exit_code))


def verify(
    job: PathLike,
    tag: str | None = None,
    *,
    read: Slice | bool | None = None,
    run: str | None = None,
    remote: str | None = None,
    config_dir: PathLike | None = None,
    on_progress: Progress | None = None,
    say: Say | None = None,
    failures: Failures | None = None,
) -> list[VerifiedRemote]:
    """Prove committed checkpoints again from the remotes alone; damage is in the result, not raised.

    Args:
        tag: only this one; None: every COMMIT.
        read: True: every byte; `Slice(1, 7)`: the first seventh; else documents, presence and sizes.
        failures, say: as `checkpoints`.

    >>> {row.verdict for row in ckptd.verify("nas/run")[0].commits}
    {'good'}
    """
    from ckptd.config.remote_names import said_of
    from ckptd.core.model.runs import run_of
    from ckptd.errors import CkptdError
    from ckptd.maintenance.verify import Slice, Verifier
    from ckptd.recover.select.runs import RemoteRuns
    from ckptd.recover.select.sources import where_of

    where = where_of(os.fspath(job), os.environ, only=remote, config_dir=_path(config_dir))
    found: list[VerifiedRemote] = []
    tell = say or _silent
    part = Slice() if read is True else read or None
    with _raising(failures) as failed:
        inventories = list(where.read(tell, failed, is_tolerant=True))
        runs = RemoteRuns(inventories)
        run_id = runs.named(run) if run is not None and inventories else None

        def is_wanted(commit: Commit) -> bool:
            return run_id is None or runs.is_same(run_of(commit, commit.job_id), run_id)

        for inventory in inventories:
            try:
                found.append(Verifier(inventory, read=part, on_progress=on_progress).run(tag, is_wanted))
            except CkptdError as error:
                failed[inventory.name] = error
                tell(said_of(inventory.name, inventory.url, str(error)))
    return found


def verify_by_loading(
    job: PathLike,
    tag: str | None = None,
    *,
    form: str | None = None,
    run: str | None = None,
    remote: str | None = None,
    config_dir: PathLike | None = None,
    say: Say | None = None,
    on_progress: Progress | None = None,
) -> Loaded:
    """Load a checkpoint by DeepSpeed's own code on this host's CPU, and compare what it holds then.

    Args:
        job: a job's name, file or save_dir; the URL of a remote; or, without a tag, a checkpoint folder.
        tag: which one; None: the newest. It is restored into a temporary folder.
        form: zero or universal; None: universal where it is committed.

    Raises:
        UsageError: DeepSpeed is not installed. RefusedError: only its model's own code loads it.
        DamagedError: DeepSpeed refuses it, or holds other values. NoSpaceError: too little memory or disk.
    """
    import tempfile

    from ckptd.maintenance import deepspeed_load

    tell = say or _silent
    if tag is None and deepspeed_load.is_checkpoint(Path(job)):
        return deepspeed_load.load(Path(job), tell)
    if form is None:
        listed = checkpoints(job, run=run, remote=remote, config_dir=config_dir, say=say)
        forms = [
            {one.form for one in row.forms}
            for listing in listed[:1]
            for row in listing.checkpoints
            if tag in (None, row.tag)
        ]
        form = "universal" if forms and "universal" in forms[-1] else "zero"
    with tempfile.TemporaryDirectory(prefix="ckptd-load-") as there:
        done = restore(
            job,
            there,
            tag,
            form=form,
            run=run,
            remote=remote,
            config_dir=config_dir,
            say=say,
            on_progress=on_progress,
        )
        return deepspeed_load.load(done.path, tell)


def restore(
    job: PathLike,
    to: PathLike,
    tag: str | None = None,
    *,
    form: str | None = None,
    world_size: int | None = None,
    ranks: Iterable[int] | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    run: str | None = None,
    remote: str | None = None,
    dry_run: bool = False,
    config_dir: PathLike | None = None,
    say: Say | None = None,
    on_progress: Progress | None = None,
) -> Recovered:
    """Put a committed checkpoint into another directory; the result's `path` is what to load.

    Args:
        job: a job's name, file or save_dir; or the URL of a remote.
        tag: which one; None: the newest, and if that is damaged the one before it.
        form: zero, universal or weights-bf16 …; None: zero, for another grid universal.
        world_size: ranks that will load it.
        ranks: only the ZeRO shards of these data-parallel ranks.
        nnodes, node_rank: how many nodes restore together, each its own shards, and which one this is.
        dry_run: change nothing; the result's `plan` has the steps.

    Raises:
        NothingCommitted, DamagedError, TargetExists, NoSpaceError, RemoteUnreachable, ….

    >>> ckptd.restore("nas/run", "here").path.name
    'global_step5'
    """
    from ckptd.errors import UsageError
    from ckptd.recover.plan import RecoveryOptions
    from ckptd.recover.select.copies import Nodes

    if isinstance(ranks, str):
        raise UsageError(f"ranks={ranks!r} are no numbers", hint="for example ranks=[0, 2, 3]")
    options = RecoveryOptions(
        tag=tag,
        run=run,
        form=form,
        world_size=world_size,
        ranks=frozenset(ranks) if ranks is not None else None,
        nodes=Nodes(count=nnodes, rank=node_rank),
        dry_run=dry_run,
    )
    work = restoring(job, to, options, remote=remote, config_dir=config_dir, say=say, on_progress=on_progress)
    return work.run()


def restoring(
    job: PathLike,
    to: PathLike,
    options: RecoveryOptions,
    *,
    remote: str | None = None,
    config_dir: PathLike | None = None,
    say: Say | None = None,
    on_progress: Progress | None = None,
) -> Restore:
    """Return a restore that has not begun: `run()` carries it out, `when_stopped()` says what it left.

    Raises:
        UsageError: the directory to restore to is empty, or a URL.
    """
    from ckptd.errors import UsageError
    from ckptd.recover.restore import Restore
    from ckptd.recover.select.sources import where_of

    directory = os.fspath(to)
    if not directory.strip():
        msg = "the directory to restore to is empty"
        raise UsageError(msg, hint="an unset variable? name the directory, `.` for this one")
    if "://" in directory:
        msg = f"restore puts a checkpoint into a directory of this machine, and {directory} is a URL"
        raise UsageError(msg, hint="restore to a directory, and copy it from there")
    where = where_of(os.fspath(job), os.environ, only=remote, config_dir=_path(config_dir))
    return Restore(where, Path(to), options, say or _silent, on_progress)


def resume(
    job: PathLike,
    url: str | None = None,
    *,
    world_size: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    tag: str | None = None,
    run: str | None = None,
    remote: str | None = None,
    dry_run: bool = False,
    config_dir: PathLike | None = None,
    say: Say | None = None,
    on_progress: Progress | None = None,
) -> Recovered:
    """Make a save_dir resumable in place; the result's `path` is what to resume from.

    Args:
        job: a job's name or file, or a save_dir; `url`: its remote where no job file names one.
        world_size: ranks of the coming run; another number than before gets the universal form.
        nnodes, node_rank: how many nodes resume together, and which one this is.

    Raises:
        NothingCommitted: a training begins anew (the command ends with 4). Others as `restore`.

    >>> ckptd.resume("nvme/run", "nas/run").path.name
    'global_step5'
    """
    from ckptd.recover.plan import RecoveryOptions
    from ckptd.recover.select.copies import Nodes

    options = RecoveryOptions(
        world_size=world_size,
        nodes=Nodes(count=nnodes, rank=node_rank, world_size=world_size),
        dry_run=dry_run,
        remote=remote,
        tag=tag,
        run=run,
    )
    work = resuming(job, url, options, config_dir=config_dir, say=say, on_progress=on_progress)
    return work.run()


def resuming(
    job: PathLike,
    url: str | None,
    options: RecoveryOptions,
    *,
    config_dir: PathLike | None = None,
    say: Say | None = None,
    on_progress: Progress | None = None,
) -> Resume:
    """Return a resume that has not begun, as `restoring`."""
    from dataclasses import replace

    from ckptd.recover.resume import Resume
    from ckptd.recover.select.job import state_dir_hint

    tell = say or _silent
    directory = _path(config_dir)
    config = _job(os.fspath(job), url, directory, tell)
    options = replace(options, state_dir=state_dir_hint(config, os.environ, directory))
    return Resume(config, options, tell, on_progress)


def _job(job: str, url: str | None, config_dir: Path | None, say: Say) -> JobConfig:
    from ckptd.config.loader import job_from_arguments
    from ckptd.errors import CkptdError, UsageError
    from ckptd.recover.select.job import job_named
    from ckptd.storage.local.job_names import is_remote

    if url is None:
        if is_remote(job):
            hint = f"ckptd resume SAVE_DIR {job}; into another directory: ckptd restore {job}"
            raise UsageError(f"resume works in a save_dir of this node, and {job} is a remote", hint=hint)
        return job_named(job, os.environ, config_dir=config_dir)
    options: dict[str, str] = {}
    try:
        known = job_named(job, os.environ, config_dir=config_dir)
    except CkptdError as error:
        say(f"{error}; going on with {url} alone")
        known = None
    if known is not None and (known.file is not None or known.remotes):
        options = {"name": known.name}
    return job_from_arguments(job, url, options, os.environ)


def _path(given: PathLike | None) -> Path | None:
    return None if given is None else Path(given)


def _silent(_: str) -> None:
    """Drop a line, for a caller who gave no `say`."""


@contextmanager
def _raising(failures: Failures | None) -> Iterator[Failures]:
    """Collect errors of remotes in `failures`; where the caller gave none, raise the first at the end."""
    own: Failures = {}
    yield own if failures is None else failures
    for error in own.values():
        raise error
