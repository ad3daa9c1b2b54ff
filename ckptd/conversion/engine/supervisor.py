"""Convert for the daemon and the command line (docs/design.md §4).

`convert` starts the restricted planning child, then the executor child, watches both, and publishes the
result by one rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from ckptd import errors
from ckptd.base import extents, files
from ckptd.base.files import opened_real, real_path
from ckptd.base.humanize import size_of
from ckptd.conversion.dtypes import numpy_folder
from ckptd.conversion.engine import children
from ckptd.conversion.engine.children import Watched, watch
from ckptd.conversion.engine.staging import (
    BLOCK_BYTES,
    OUTPUT,
    PLAN,
    PlanOrigin,
    SourceFolder,
    StagingDir,
    check_destination,
    check_place,
    find_origin,
    is_folder,
    list_source,
    open_staging_dir,
    partial_name,
    remove_staging_dir,
    was_published,
    would_clone,
)
from ckptd.conversion.options import ConvertOptions, ConvertProgress, ConvertReport
from ckptd.conversion.outputs import MADE_BY
from ckptd.conversion.plan import Header, Trailer
from ckptd.core.model.layouts import LATEST_UNIVERSAL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# --- The request to the planning child, for conversions and forecasts alike ------------------------------


def numpy_for(options: ConvertOptions) -> str:
    """Return the folder that the executor may import numpy from; empty where it is not installed.

    Raises:
        UsageError: weights are rounded, which needs it.
    """
    try:
        return numpy_folder()
    except errors.UsageError:
        if options.form == "weights" and options.dtype != "fp32":
            raise
        return ""


def origin_of(folder: SourceFolder, options: ConvertOptions) -> PlanOrigin:
    """Return the folder that paths of the plan are relative to."""
    return find_origin(folder) if options.form == "weights" else PlanOrigin(folder.path, "", ())


def plan_request(
    folder: SourceFolder, origin: PlanOrigin, options: ConvertOptions, *, block: bool, dry: bool = False
) -> dict[str, Any]:
    """Return the request of `ckptd.conversion.engine.planner_child`."""
    return {
        "root": origin.root,
        "prefix": origin.prefix,
        "files": [[n, s.role.value, s.shard.d, s.shard.mm] for n, s in folder.shards],
        "folders": list(folder.folders),
        "companions": list(origin.companions),
        "form": options.form,
        "dtype": options.dtype,
        "max_shard_bytes": options.max_shard_bytes,
        "compat": options.compat,
        "block": block,
        "strict": options.strict,
        "compare_masters": options.compare_masters,
        "dry": dry,
        "partial": folder.partial,
    }


# --- The conversion --------------------------------------------------------------------------------------

MAX_THREADS = 4
PLAN_SECONDS = 3600.0
"""Longest a planner may last. Of up to a thousand files its CPU limit is less: it waits for a disk then."""
SILENCE_SECONDS = 120.0
"""An executor tells its progress four times a second, whatever its threads wait for."""


def convert(
    source: Path,
    destination: Path,
    options: ConvertOptions | None = None,
    *,
    on_progress: Callable[[ConvertProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    should_pause: Callable[[], bool] | None = None,
    work_dir: Path | None = None,
    beneath: Path | None = None,
) -> ConvertReport:
    """Convert the checkpoint folder `source` into the new folder `destination`; blocks until published.

    The partial folder lies in `work_dir` (same file system), else beside the destination. It is removed on
    failure and left on a stop or a kill; the next call with the same source finishes it. `should_pause`
    halts the executor by SIGSTOP for as long as it is true. All three paths may lie in (or beside) `beneath`:
    then no link in them below it is followed, at no time (P15).

    Raises:
        RefusedError, DamagedError, TornArchiveError: the source has no universal form, or is damaged.
        SourceChanged: it was written meanwhile. TargetExists, NoSpaceError, LockHeld, StorageError.
        BehindError: `should_stop` said so, or planning took too long.
    """
    chosen = options or ConvertOptions()
    rounding_from = numpy_for(chosen)
    started = time.monotonic()
    folder = list_source(source, beneath)
    parent, name = os.path.split(os.path.abspath(destination))
    check_place(destination, must_be_new=False, beneath=beneath)
    place_parent = real_path(work_dir if work_dir is not None else parent, beneath)
    origin = origin_of(folder, chosen)
    conversion = Conversion(folder, origin, chosen, on_progress, should_stop, should_pause)
    conversion.numpy_folder = rounding_from
    try:
        target = check_destination(folder, destination, beneath)
    except errors.TargetExists:
        report = conversion.published_before(place_parent, real_path(destination, beneath), started)
        if report is None:
            raise
    else:
        report = _convert(conversion, place_parent, destination, target, started)
    if chosen.write_latest and chosen.form == "universal":
        with opened_real(real_path(parent, beneath)) as parent_fd:
            files.write_atomic(parent_fd, LATEST_UNIVERSAL, os.fsencode(name), mode=folder.file_mode)
    remove_staging_dir(place_parent, name)
    return report


def _convert(
    conversion: Conversion, place_parent: str, destination: Path, target: str, started: float
) -> ConvertReport:
    """Convert and publish; a failure removes the partial folder, a stop or a kill leaves it."""
    parent, name = os.path.split(target)
    try:
        with open_staging_dir(place_parent, name, parent) as place:
            return conversion.run(place, destination, target, started)
    except (errors.LockHeld, errors.BehindError):
        raise  # stopped: what is finished stays for the next attempt
    except errors.CkptdError:
        _tidy(place_parent, name)
        raise
    except OSError as error:
        _tidy(place_parent, name)
        raise errors.from_os_error(error, f"converting into {destination}") from error


def _tidy(place_parent: str, name: str) -> None:
    """Remove the partial folder after a failure, which is what is raised whatever becomes of this."""
    with contextlib.suppress(errors.CkptdError, OSError):
        remove_staging_dir(place_parent, name)


class Conversion:
    """One conversion: plan, execute, publish."""

    def __init__(
        self,
        folder: SourceFolder,
        origin: PlanOrigin,
        options: ConvertOptions,
        on_progress: Callable[[ConvertProgress], None] | None,
        should_stop: Callable[[], bool] | None,
        should_pause: Callable[[], bool] | None,
    ) -> None:
        self.folder = folder
        self.origin = origin
        self.numpy_folder = ""
        self.options = options
        self.on_progress = on_progress
        self.should_stop = should_stop
        self.should_pause = should_pause
        self.start_executor: Callable[[], subprocess.Popen[bytes]] = _start_executor
        self.more: dict[str, Any] = {}
        """Further fields of the request to an executor of another kind."""
        self.last: dict[str, Any] = {}
        self.peak_rss_bytes = self.clonable_bytes = 0

    def run(self, place: StagingDir, destination: Path, target: str, started: float) -> ConvertReport:
        """Make the output in `place` and publish it as `target`."""
        clone = not self.folder.partial and place.can_clone(self.folder)
        header, trailer = self.plan(place, clone=clone)
        self._check_room(place, trailer, clone=clone)
        self.execute(place, trailer, clone=clone)
        place.check_made(trailer)
        place.publish(target)
        return self.report(destination, header, trailer, time.monotonic() - started)

    def published_before(self, place_parent: str, destination: str, started: float) -> ConvertReport | None:
        """The report of an attempt that was killed after its result got its name; None: it is not ours."""
        parent, name = os.path.split(destination)
        if not is_folder(os.path.join(place_parent, partial_name(name))):
            return None
        with open_staging_dir(place_parent, name, parent) as place:
            found = was_published(place, self.folder, os.path.join(parent, name))
            if found is None:
                return None
            with opened_real(parent) as fd:
                files.fsync_dir(fd)
        self.last = {"resumed": found[1].files}
        return self.report(destination, *found, time.monotonic() - started)

    def plan(self, place: StagingDir, *, clone: bool) -> tuple[Header, Trailer]:
        """Have it planned, and make that the plan of `place`."""
        self.tell(ConvertProgress(phase="planning", bytes_done=0, bytes_total=0, files_done=0, files_total=0))
        request = plan_request(self.folder, self.origin, self.options, block=clone)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(PLAN + ".new", flags, 0o600, dir_fd=place.fd), "wb") as out:
            watched = write_plan(request, out, self.should_stop, self.should_pause)
        self.peak_rss_bytes = max(self.peak_rss_bytes, watched.count("peak_rss_bytes"))
        self.clonable_bytes = watched.count("clonable")
        header, trailer = place.plan_reader(PLAN + ".new").header, place.trailer(PLAN + ".new")
        place.adopt_plan(trailer)
        return header, trailer

    def _check_room(self, place: StagingDir, trailer: Trailer, *, clone: bool) -> None:
        """Raise before the first byte unless the outputs leave the reserve free (P13).

        Bytes that an earlier attempt wrote, clones and holes need no space.
        """
        have = sum(
            os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
            for _, _, names, fd in os.fwalk(OUTPUT, dir_fd=place.fd)
            for name in names
        )
        needed = trailer.bytes - have
        if clone:
            needed = max(0, min(needed - self.clonable_bytes, self.folder.disk_bytes))
        free, reserve = extents.free_bytes(place.fd), self.options.reserve_bytes
        if needed and free - needed < reserve:
            kept = f", of which {size_of(reserve)} must stay free" if reserve else ""
            raise errors.NoSpaceError(
                f"{os.path.dirname(place.path)}: the conversion needs {size_of(needed)} of new disk; "
                f"{size_of(free)} are free{kept}",
                hint=f"free {size_of(needed + reserve - free)} there, or convert to another disk; "
                "nothing was written",
            )

    def execute(self, place: StagingDir, trailer: Trailer, *, clone: bool) -> None:
        """Have the files of the plan made."""
        folder, options = self.folder, self.options
        request = {
            "source": self.origin.root,
            "work": place.path,
            "files": [*(self.origin.prefix + name for name, _ in folder.shards), *self.origin.companions],
            "memory_budget_bytes": options.memory_budget_bytes,
            "reserve_bytes": options.reserve_bytes,
            "threads": _threads(options.memory_budget_bytes),
            "is_striped": options.form != "universal",
            "clone": clone,
            "file_mode": folder.file_mode,
            "folder_mode": folder.folder_mode,
            "gid": folder.gid,
            "verify": options.verify,
            "low_priority": options.low_priority,
            "bytes_per_second": options.bytes_per_second,
            "manifest": MADE_BY,
            "numpy_folder": self.numpy_folder,
            **self.more,
        }

        def on_line(line: dict[str, Any]) -> None:
            rss_bytes, progress = _progress(line, trailer)
            self.last = line
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes)
            self.tell(progress)

        watched = watch(
            self.start_executor(),
            json.dumps(request).encode(),
            on_line=on_line,
            should_stop=self.should_stop,
            should_pause=self.should_pause,
            timeout_seconds=None,
            silence_seconds=SILENCE_SECONDS,
            yields=options.low_priority,
        )
        if watched.status != 0 or watched.garbled:
            raise failure(watched, "converting")

    def tell(self, progress: ConvertProgress) -> None:
        """Pass progress on."""
        if self.on_progress is not None:
            self.on_progress(progress)

    def report(
        self, destination: Path | str, header: Header, trailer: Trailer, seconds: float
    ) -> ConvertReport:
        return ConvertReport(
            destination=destination,
            form=header.form,
            layout=header.layout,
            files=trailer.files,
            bytes=trailer.bytes,
            bytes_cloned=self.last.get("cloned", 0),
            bytes_copied=self.last.get("copied", 0),
            parameters=header.parameters,
            step=header.step,
            plan_sha256=trailer.sha256,
            resumed_files=self.last.get("resumed", 0),
            seconds=seconds,
            peak_rss_bytes=self.peak_rss_bytes,
            verified=self.options.verify,
            compared_tensors=trailer.tensors,
            compared_elements=trailer.elements,
            not_compared=trailer.uncompared,
            notes=header.notes,
        )


def _progress(line: dict[str, Any], trailer: Trailer) -> tuple[int, ConvertProgress]:
    """(resident bytes, progress) as an executor tells it.

    Raises:
        Garbled: it is none.
    """
    try:
        return int(line["rss"]), ConvertProgress(
            phase=line["phase"],
            bytes_done=int(line["bytes"]),
            bytes_total=trailer.bytes,
            files_done=int(line["files"]),
            files_total=trailer.files,
            bytes_cloned=int(line["cloned"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise children.Garbled from error


def write_plan(
    request: dict[str, Any],
    out: int | IO[bytes],
    should_stop: Callable[[], bool] | None = None,
    should_pause: Callable[[], bool] | None = None,
) -> Watched:
    """Have a plan written to `out` by the restricted child; `request` as `supervisor` takes it.

    Raises:
        RefusedError, DamagedError, TornArchiveError: there is no such form of it, or it is damaged.
        SourceChanged, StorageError. BehindError: `should_stop` said so, or it lasted for `PLAN_SECONDS`.
    """
    watched = watch(
        children.start("planner_child", stdout=out, stderr=subprocess.PIPE),
        json.dumps(request).encode(),
        on_line=None,
        should_stop=should_stop,
        should_pause=should_pause,
        timeout_seconds=PLAN_SECONDS,
        yields=True,
    )
    if watched.status != 0:
        raise failure(watched, "planning the conversion")
    return watched


def _start_executor() -> subprocess.Popen[bytes]:
    return children.start("executor_child", stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _threads(budget_bytes: int) -> int:
    """Copying threads: more hide latency, also on few cores, but each holds a window of dirty pages."""
    return max(1, min(MAX_THREADS, (budget_bytes - (48 << 20)) // (32 << 20)))


def failure(watched: Watched, what: str) -> errors.CkptdError:
    """Return the child's own words as an error of the tree; else how it died."""
    if watched.stopped:
        return errors.BehindError(f"{what} was stopped", hint="the next attempt goes on where it ended")
    kind = getattr(errors, str(watched.said.get("error", "")), None)
    if isinstance(kind, type) and issubclass(kind, errors.CkptdError):
        return kind(str(watched.said.get("message", "")), hint=str(watched.said.get("hint", "")))
    is_ours = watched.timed_out or watched.garbled
    if watched.status == -signal.SIGKILL and not is_ours:
        return errors.BehindError(f"{what} was killed", hint="the next attempt goes on where it ended")
    words = "it hung or took too long" if watched.timed_out else children.died_of(watched.status)
    words = children.NONSENSE if watched.garbled else words
    if what.startswith("planning"):
        if watched.timed_out:  # such as of a disk that hangs: tried again, and a few times alone
            hint = "the ZeRO form is safe all the same; if it lasts, see to the disk that is read"
            return errors.BehindError(f"{what} took too long", hint=hint)
        return errors.RefusedError(f"{what} failed ({words})", hint="the ZeRO form is safe all the same")
    return errors.StorageError(f"{what} failed ({words})")


# --- Forecast: run the planning child alone -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Hold the outputs and costs of a conversion that is not run; sizes in bytes."""

    source: Path | str
    layout: str
    zero_stage: int
    ranks: int
    step: int | None
    parameters: int
    files: int
    bytes: int
    """Bytes of the output that would be made."""
    clones: bool
    """Extents are shared between source and destination's file system."""
    bytes_cloned: int
    bytes_copied: int
    bytes_misplaced: int
    """Bytes of `bytes_copied` whose offsets differ modulo the block, though extents can be cloned here."""
    notes: tuple[str, ...]
    """Notes, as in `ConvertReport.notes`."""
    disk_bytes: int
    """New disk, about."""
    free_bytes: int
    memory_bytes: int
    """Upper bound of processes and dirty pages while it runs."""
    plan_sha256: str
    seconds: float
    """Duration of the planning."""
    peak_rss_bytes: int
    """Peak resident set of the planning child."""


def forecast(source: Path, destination: Path, options: ConvertOptions | None = None) -> Forecast:
    """Plan a conversion of `source` into `destination` and throw the plan away.

    Raises:
        as `ckptd.conversion.engine.supervisor.convert`, except what happens while bytes are moved.
    """
    chosen = options or ConvertOptions()
    started = time.monotonic()
    folder = list_source(source)
    parent = os.path.dirname(check_destination(folder, destination))
    numpy_for(chosen)
    clones = False
    with contextlib.suppress(OSError):  # where no file may be made
        fd = os.open(parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            clones = would_clone(folder, fd)
        finally:
            os.close(fd)
    seen = planned(folder, origin_of(folder, chosen), chosen, started, clones=clones)
    with files.opened_dir(parent) as parent_fd:
        return replace(seen, source=source, free_bytes=extents.free_bytes(parent_fd))


def planned(
    folder: SourceFolder, origin: PlanOrigin, options: ConvertOptions, started: float, *, clones: bool = False
) -> Forecast:
    """Return the forecast of the planning child, without free space; `started` is of the monotonic clock.

    Raises:
        RefusedError, DamagedError, TornArchiveError: the source has no such form, or is damaged.
    """
    request = plan_request(folder, origin, options, block=clones, dry=True)
    said = write_plan(request, subprocess.DEVNULL).said
    nbytes, cloned = said["bytes"], said["clonable"] if clones else 0
    return Forecast(
        source=folder.path,
        layout=said["layout"],
        zero_stage=said["stage"],
        ranks=said["dp"],
        step=said["step"],
        parameters=said["parameters"],
        files=said["files"],
        bytes=nbytes,
        clones=clones,
        bytes_cloned=cloned,
        bytes_copied=nbytes - cloned,
        bytes_misplaced=said["misplaced"] if clones else 0,
        notes=tuple(said["notes"]),
        disk_bytes=nbytes - cloned + BLOCK_BYTES * said["files"],
        free_bytes=0,
        memory_bytes=max(options.memory_budget_bytes, said["peak_rss_bytes"]),
        plan_sha256=said["sha256"],
        seconds=time.monotonic() - started,
        peak_rss_bytes=said["peak_rss_bytes"],
    )
