"""Convert from or to a remote by ranges: only the plan is local (docs/internals/conversion.md).

The parent reads the source's listing and mirrors what planning reads; the restricted planning child plans
over the mirror, without network or credentials; the executor (`ckptd.conversion.remote.child`) moves ranges.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd import errors
from ckptd.base import extents, files
from ckptd.base.names import DESCRIPTION
from ckptd.base.process import spawn
from ckptd.config.loader import remote_from_arguments
from ckptd.conversion.engine.staging import (
    SourceFolder,
    StagingDir,
    check_place,
    list_source,
    open_staging_dir,
    remove_staging_dir,
)
from ckptd.conversion.engine.supervisor import Conversion, Forecast, numpy_for, origin_of, planned
from ckptd.conversion.options import ConvertOptions, ConvertProgress, ConvertReport
from ckptd.conversion.remote.source import (
    PARALLEL,
    RemoteSource,
    is_root,
    look_at,
    make_mirror,
    mirror_archives,
    of_copy,
)
from ckptd.conversion.remote.uploader import target_exists
from ckptd.core.model.layouts import LATEST_UNIVERSAL
from ckptd.storage.child.apart import open_apart
from ckptd.storage.remote.readers import ReaderLease
from ckptd.storage.stores.access import Access, access_of
from ckptd.storage.stores.open import ancestors, clean_environment, within_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckptd.recover.select.copies import Copy
    from ckptd.storage.stores.base import Store

_MIRROR = "source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A folder to be made in a remote: `name` below `url`."""

    url: str
    name: str
    access: Access
    store: Store

    def __str__(self) -> str:
        return f"{self.url}/{self.name}"


class RemoteConversion:
    """One conversion. `source`: a folder here, a URL, or what was looked at; `destination`: a folder or URL.

    `work_dir`: where the partial folder of a local destination lies, else beside it. `on_progress` and
    `should_stop` as `ckptd.conversion.engine.supervisor.convert`.
    """

    def __init__(
        self,
        source: Path | str | RemoteSource,
        destination: Path | str,
        options: ConvertOptions,
        environ: Mapping[str, str],
        *,
        on_progress: Callable[[ConvertProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        work_dir: Path | None = None,
    ) -> None:
        self._options = options
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._numpy = numpy_for(options)
        self._destination = destination
        self._work_dir = work_dir
        self._is_asked_for = isinstance(source, RemoteSource)
        """True for `restore`, which promises that every file was compared (P18)."""
        self._remote = look_at(source, environ) if isinstance(source, str) else None
        if isinstance(source, RemoteSource):
            self._remote, source = source, source.url
        self._source = source
        self._target = _target(destination, environ) if isinstance(destination, str) else None
        if self._remote is not None and f"{self._target}/".startswith(f"{str(source).rstrip('/')}/"):
            raise errors.UsageError(
                f"{self._target} lies inside the source folder", hint="choose a place beside it"
            )

    def run(self) -> ConvertReport:
        """Convert; blocks until published.

        Raises:
            as `ckptd.conversion.engine.supervisor.convert`; DamagedError: a source is not what was committed
            (65);
            RemoteUnreachable, RemoteNotOurs (69), NotPermitted (77), NotFoundError (66), ConfigError (78).
        """
        started = time.monotonic()
        try:
            with self._lease():
                return self._to_here(started) if self._target is None else self._to_remote(started)
        except OSError as error:
            raise errors.from_os_error(error, f"converting into {self._destination}") from error

    def forecast(self) -> Forecast:
        """Forecast what `run` would make: plan, and discard the plan.

        Raises:
            as `run`, except what happens while bytes are moved.
        """
        started = time.monotonic()
        if self._target is None:
            parent, _ = os.path.split(check_place(Path(self._destination)))
            with files.opened_dir(parent) as fd:
                free_bytes = extents.free_bytes(fd)
        else:
            self._refuse_taken(self._target)
            free_bytes = self._target.store.free_bytes() or 0
        with temporary_place() as place:
            folder = self._look(place)
            seen = planned(folder, origin_of(folder, self._options), self._options, started)
        return replace(
            seen,
            source=str(self._source),
            free_bytes=free_bytes,
            disk_bytes=seen.disk_bytes if self._target is None else 0,
        )

    # --- inside ----------------------------------------------------------------------------------------

    @contextmanager
    def _lease(self) -> Iterator[None]:
        """Leave a lease in the remote that is read, so that retention there waits (docs/adr/0214)."""
        if self._remote is None or not self._remote.tag or self._is_asked_for:  # `restore` leaves its own
            yield
            return
        with ReaderLease(self._remote.store, "convert").renewing() as hold:
            hold(self._remote.tag)
            yield

    def _to_here(self, started: float) -> ConvertReport:
        """Ranges into a local folder; a stop or a kill leaves what the next attempt finishes."""
        target = check_place(Path(self._destination))
        parent, name = os.path.split(target)
        work = os.path.realpath(self._work_dir) if self._work_dir is not None else parent
        try:
            with open_staging_dir(work, name, parent) as place:
                report = self._conversion(place).run(place, Path(self._destination), target, started)
        except (errors.LockHeld, errors.BehindError):
            raise
        except (errors.CkptdError, OSError):
            remove_staging_dir(work, name)
            raise
        self._published_here(parent, name, work)
        return report

    def _published_here(self, parent: str, name: str, work: str) -> None:
        """The pointer first: while the partial folder is there, a next attempt finishes a killed one."""
        if self._options.write_latest and self._options.form == "universal":
            with files.opened_dir(parent) as fd:
                files.write_atomic(fd, LATEST_UNIVERSAL, os.fsencode(name))
        remove_staging_dir(work, name)

    def _to_remote(self, started: float) -> ConvertReport:
        """Uploads; here lies the plan alone, in a folder that goes when this ends."""
        assert self._target is not None
        self._refuse_taken(self._target)
        with temporary_place() as place:
            conversion = self._conversion(place)
            header, trailer = conversion.plan(place, clone=False)
            conversion.execute(place, trailer, clone=False)
            return conversion.report(str(self._target), header, trailer, time.monotonic() - started)

    def _refuse_taken(self, target: Destination) -> None:
        """Refuse a destination that holds a whole checkpoint, or that lies in a remote of ckptd."""
        for root in ancestors(target.url)[:4]:
            if is_root(root, target.access, must_answer=False):
                raise within_remote(str(target), root)
        if target.store.stat(f"{target.name}/{DESCRIPTION}") is not None:
            raise target_exists(str(target), is_whole=True)

    def _look(self, place: StagingDir) -> SourceFolder:
        """Return the source as a folder: itself, or its mirror in `place`."""
        if self._remote is None:
            return list_source(Path(self._source))
        fd = place.fresh_folder(_MIRROR)
        try:
            make_mirror(self._remote, fd, companions=self._options.form == "weights")
        finally:
            os.close(fd)
        mirror_archives(self._remote, Path(place.path, _MIRROR))
        folder = list_source(Path(place.path, _MIRROR, self._remote.name))
        return replace(folder, partial=True)

    def _conversion(self, place: StagingDir) -> Conversion:
        self._tell_planning()
        folder = self._look(place)
        conversion = Conversion(
            folder,
            origin_of(folder, self._options),
            self._options,
            self._on_progress,
            self._should_stop,
            None,
        )
        conversion.numpy_folder = self._numpy
        urls = [end.url for end in (self._remote, self._target) if end is not None]
        conversion.start_executor = lambda: _start_executor(*urls)
        conversion.more = {"network": True, "ends": self._ends(folder, conversion.origin.prefix)}
        # latency of requests is hidden by more threads than copying here has
        is_striped = self._target is None and self._options.form != "universal"
        conversion.more |= {"threads": PARALLEL, "is_striped": is_striped}
        return conversion

    def _ends(self, folder: SourceFolder, prefix: str) -> dict[str, Any]:
        """`ckptd.conversion.remote.child.Ends`: paths as the plan says them."""
        source, target = self._remote, self._target
        found: list[dict[str, Any]] = []
        for file in source.files if source is not None else ():
            path = file.path if prefix else file.path.removeprefix(f"{os.path.basename(folder.path)}/")
            found.append(asdict(replace(file, path=path)))
        is_pointed = self._options.write_latest and self._options.form == "universal"
        return {
            "source_url": source.store.url if source is not None else "",
            "source_access": source.access.model_dump() if source is not None else {},
            "source_files": found,
            "prove": self._is_asked_for or self._options.verify,
            "target_url": target.url if target is not None else "",
            "target_access": target.access.model_dump() if target is not None else {},
            "target_name": target.name if target is not None else "",
            "pointer": LATEST_UNIVERSAL if is_pointed else None,
        }

    def _tell_planning(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                ConvertProgress(phase="planning", bytes_done=0, bytes_total=0, files_done=0, files_total=0)
            )


def convert_copy(
    copy: Copy,
    target: Path,
    work_dir: Path,
    options: ConvertOptions,
    on_progress: Callable[[ConvertProgress], None] | None,
) -> ConvertReport:
    """Convert a committed copy, whose shards lie directly in its folder, into the new folder `target`."""
    source = of_copy(copy)
    return RemoteConversion(
        source, target, options, os.environ, on_progress=on_progress, work_dir=work_dir
    ).run()


def _target(url: str, environ: Mapping[str, str]) -> Destination:
    url = url.rstrip("/")
    above = ancestors(url)[1:]
    if not above:
        msg = f"{url} has no folder to be made in it"
        raise errors.UsageError(msg, hint="name one more: s3://bucket/prefix/global_step100_universal")
    name = url.rpartition("/")[2]
    files.check_relative(name)
    access = access_of(remote_from_arguments(url, environ))
    return Destination(url=above[0], name=name, access=access, store=open_apart(url, above[0], access))


@contextmanager
def temporary_place() -> Iterator[StagingDir]:
    """Make a folder for the plan and the mirror, of a few megabytes, on the disk of TMPDIR."""
    with (
        tempfile.TemporaryDirectory(prefix="ckptd-convert-", ignore_cleanup_errors=True) as path,
        files.opened_dir(path) as fd,
    ):
        yield StagingDir(path, fd)


def _start_executor(*urls: str) -> subprocess.Popen[bytes]:
    """Start the executor that may speak to remotes: with credentials in its environment, and packages."""
    return spawn(
        [sys.executable, "-m", "ckptd.conversion.remote.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=clean_environment(*urls),
        start_new_session=True,
    )
