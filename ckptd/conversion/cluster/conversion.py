"""`ckptd convert --cluster`: planned here, made by dask workers, published here.

The plan, its digest and what comes of it are those of a conversion by one process.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ckptd
from ckptd import errors
from ckptd.base import files
from ckptd.base.extents import identity_of
from ckptd.conversion.cluster.attempt import AttemptTally, ClusterAttempt
from ckptd.conversion.cluster.destination import AttemptLog, ClusterDestination, give_up, publish_folder
from ckptd.conversion.cluster.grouping import index_of, without_links
from ckptd.conversion.cluster.memory import LEAST_BUDGET_BYTES
from ckptd.conversion.cluster.messages import ClusterJob, TaskSource
from ckptd.conversion.cluster.pool import Address, open_pool
from ckptd.conversion.engine.staging import (
    check_destination,
    check_place,
    open_staging_dir,
    remove_staging_dir,
)
from ckptd.conversion.options import ClusterReport
from ckptd.conversion.outputs import description_of
from ckptd.conversion.remote.convert import RemoteConversion, temporary_place
from ckptd.conversion.remote.reader import RemoteRanges
from ckptd.conversion.remote.uploader import NOTE, publish_in_store, target_exists
from ckptd.core.model.layouts import LATEST_UNIVERSAL
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.checksums import from_hex
from ckptd.storage.stores.open import directory_remote, open_store, within_remote
from ckptd.storage.stores.s3.store import S3Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.conversion.cluster.grouping import Index
    from ckptd.conversion.cluster.pool import WorkerPool
    from ckptd.conversion.engine.staging import StagingDir
    from ckptd.conversion.engine.supervisor import Conversion
    from ckptd.conversion.options import ConvertOptions, ConvertProgress, ConvertReport
    from ckptd.conversion.remote.source import RemoteFile

FOLDER = "cluster"
"""Folder in which outputs are gathered, in the partial folder beside the destination."""
_KEPT = (errors.LockHeld, errors.BehindError, errors.RemoteUnreachable)
"""Errors after which the next attempt continues what this one left."""
_CACHE_BYTES = 8 << 20


class Clustered(RemoteConversion):
    """One conversion by the workers of a cluster; arguments as `RemoteConversion`."""

    def __init__(
        self,
        source: Path | str,
        destination: Path | str,
        options: ConvertOptions,
        environ: Mapping[str, str],
        *,
        address: Address,
        on_progress: Callable[[ConvertProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        if options.memory_budget_bytes < LEAST_BUDGET_BYTES:
            raise errors.UsageError(
                "--memory-budget is too small for a worker of a cluster "
                f"({LEAST_BUDGET_BYTES >> 20} MiB at least)",
                hint="it is of each worker process",
            )
        if isinstance(source, Path) and directory_remote(source) is not None:
            # what is committed counts there, and workers may hold it on their own disks, as of a bucket
            source = os.path.realpath(source)
        super().__init__(
            source, destination, options, environ, on_progress=on_progress, should_stop=should_stop
        )
        self._address = address
        self._crew: WorkerPool | None = None

    def run(self) -> ConvertReport:
        """Convert; blocks until published.

        Raises:
            as `RemoteConversion.run`; RemoteUnreachable: no scheduler or no worker (69); ConfigError: workers
            have another version (78); LockHeld: another command took the destination over (75).
        """
        if self._target is not None:
            self._refuse_taken(self._target)
        elif root := directory_remote(Path(self._destination)):
            raise within_remote(str(self._destination), root)
        with open_pool(self._address, self._options.memory_budget_bytes, self._should_stop) as crew:
            self._crew = crew
            return super().run()

    # --- the two kinds of destination --------------------------------------------------------------------

    def _to_here(self, started: float) -> ConvertReport:
        """A folder that all workers see: gathered in the partial folder beside it, published by a rename."""
        destination = Path(self._destination)
        target = check_place(destination, must_be_new=False)
        parent, name = os.path.split(target)
        if os.path.lexists(target):
            report = self._published_before(parent, target, started)
            if report is None:
                raise errors.TargetExists(f"{destination} is there already")
        else:
            try:
                report = self._into_folder(parent, name, target, started)
            except _KEPT:
                raise
            except (errors.CkptdError, OSError):
                remove_staging_dir(parent, name)
                raise
        self._published_here(parent, name, parent)
        return report

    def _published_before(self, parent: str, target: str, started: float) -> ConvertReport | None:
        """Return the report of an attempt that was killed after its result got its name; else None."""
        with open_staging_dir(parent, os.path.basename(target), parent) as place:
            conversion = self._conversion(place)
        return conversion.published_before(parent, target, started) if self._remote is None else None

    def _into_folder(self, parent: str, name: str, target: str, started: float) -> ConvertReport:
        with open_staging_dir(parent, name, parent) as place:
            conversion = self._conversion(place)
            if self._remote is None:
                check_destination(conversion.folder, Path(self._destination))
            store = open_store(place.path)
            end = ClusterDestination(
                store=store,
                url=place.path,
                access=Access(),
                name=FOLDER,
                note_key=NOTE,
                gid=conversion.folder.gid if self._remote is None else None,
            )

            def publish(index: Index, _note: AttemptLog) -> None:
                description = description_of(index.header, index.trailer)
                names = [item.names for item in index.items if item.names]
                publish_folder(place, FOLDER, target, conversion.folder, description, names)

            return self._attempt(place, conversion, end, publish, started)

    def _to_remote(self, started: float) -> ConvertReport:
        assert self._target is not None
        target = self._target
        if isinstance(target.store, S3Store):
            target.store.probe()
        end = ClusterDestination(
            store=target.store,
            url=target.url,
            access=target.access,
            name=target.name,
            note_key=f"{target.name}/{NOTE}",
            gid=None,
        )

        def publish(index: Index, note: AttemptLog) -> None:
            is_pointed = self._options.write_latest and self._options.form == "universal"
            description = description_of(index.header, index.trailer)
            note.progress.done.clear()
            publish_in_store(target.store, target.name, description, LATEST_UNIVERSAL if is_pointed else None)

        with temporary_place() as place:
            conversion = self._conversion(place)
            return self._attempt(place, conversion, end, publish, started)

    # --- one attempt -------------------------------------------------------------------------------------

    def _attempt(
        self,
        place: StagingDir,
        conversion: Conversion,
        end: ClusterDestination,
        publish: Callable[[Index, AttemptLog], None],
        started: float,
    ) -> ConvertReport:
        assert self._crew is not None
        _, trailer = conversion.plan(place, clone=False)
        note = self._begun(place, end, trailer.sha256)
        with place.reading_plan() as stream:
            index = index_of(stream)
            known, wanted = self._sources(conversion, index)
            attempt = ClusterAttempt(
                self._crew,
                self._job(conversion, end, note),
                end.store,
                note,
                stream,
                index if self._target is not None else without_links(index),
                known,
                self._crew.holders(known.values()),
                verify=self._options.verify,
                tell=conversion.tell,
                should_stop=self._should_stop,
            )
            try:
                tally = attempt.run()
                self._check_sources(conversion, index, wanted, tally)
            except _KEPT:
                raise
            except (errors.CkptdError, OSError):
                if self._target is not None:
                    give_up(end, note)
                raise
            note.check_ours()
            publish(index, note)
        conversion.last = {"resumed": tally.files_resumed, "copied": tally.bytes_done}
        conversion.peak_rss_bytes = max(conversion.peak_rss_bytes, tally.peak_rss_bytes)
        shown = self._destination if self._target is None else str(self._target)
        report = conversion.report(shown, index.header, index.trailer, time.monotonic() - started)
        return replace(report, cluster=_report_of(tally, self._crew))

    def _begun(self, place: StagingDir, end: ClusterDestination, plan_sha256: str) -> AttemptLog:
        """Open the attempt log of a destination that is free, or holds an attempt at this very plan.

        Raises:
            TargetExists: it holds anything else.
        """
        note = AttemptLog(end.store, end.note_key, plan_sha256)
        is_same = note.read()
        if is_same:
            return note
        if self._target is None:
            files.remove_tree(place.fd, FOLDER)  # of another plan, in our own partial folder
        elif next(iter(end.store.list(f"{end.name}/")), None) is not None:
            raise target_exists(str(self._target), is_whole=False)
        return note

    def _job(self, conversion: Conversion, end: ClusterDestination, note: AttemptLog) -> ClusterJob:
        folder, options, remote = conversion.folder, self._options, self._remote
        can = end.store.abilities if isinstance(end.store, S3Store) else None
        return ClusterJob(
            version=ckptd.__version__,
            attempt=note.attempt,
            source_root=conversion.origin.root if remote is None else "",
            source_url=remote.store.url if remote is not None else "",
            source_access=remote.access if remote is not None else Access(),
            target_url=end.url,
            target_access=end.access,
            target_name=end.name,
            note_key=end.note_key,
            abilities=replace(can, trailers=False, notes=()) if can else None,
            file_mode=folder.file_mode,
            folder_mode=folder.folder_mode,
            gid=end.gid,
            memory_budget_bytes=options.memory_budget_bytes,
            rounds=bool(self._numpy),
        )

    def _sources(
        self, conversion: Conversion, index: Index
    ) -> tuple[dict[int, TaskSource], list[RemoteFile]]:
        """Every source of the plan by number, and as objects where they are."""
        objects = {file.path: file for file in self._remote_files(conversion)}
        allowed = {conversion.origin.prefix + name for name, _ in conversion.folder.shards}
        allowed |= set(conversion.origin.companions)
        known: dict[int, TaskSource] = {}
        wanted: list[RemoteFile] = []
        for number, source in enumerate(index.header.sources):
            if source.path not in allowed or (self._remote is not None and source.path not in objects):
                raise errors.SourceChanged(f"the plan names {source.path}, which was not listed")
            found = objects.get(source.path)
            if found is not None:
                wanted.append(found)
            known[number] = TaskSource(
                number=number,
                name=found.key if found is not None else source.path,
                bytes=source.bytes,
                mtime_ns=found.mtime_ns if found is not None else index.identities[number][3],
                fingerprint=source.fingerprint,
                crc64=found.crc64 or "" if found is not None else "",
                local=found.local if found is not None else "",
            )
        return known, wanted

    def _remote_files(self, conversion: Conversion) -> list[RemoteFile]:
        if self._remote is None:
            return []
        cut = "" if conversion.origin.prefix else f"{os.path.basename(conversion.folder.path)}/"
        return [replace(file, path=file.path.removeprefix(cut)) for file in self._remote.files]

    def _check_sources(
        self, conversion: Conversion, index: Index, wanted: list[RemoteFile], tally: AttemptTally
    ) -> None:
        """Check that the sources are what was planned (P4), and what was read of them is what was committed
        (P2)."""
        if self._remote is None:
            with files.opened_dir(conversion.origin.root) as fd:
                for source, identity in zip(index.header.sources, index.identities, strict=True):
                    status = files.stat_beneath(fd, source.path)
                    if status is None or identity_of(status) != identity:
                        raise errors.SourceChanged(
                            f"{source.path} was written or removed while it was converted",
                            hint="nothing was published; convert again when the save is complete",
                        )
            return
        ranges = RemoteRanges(self._remote.store, wanted, cache_bytes=_CACHE_BYTES, check_stop=lambda: None)
        for extent in tally.extents:
            ranges.take_over(extent.source, extent.offset, extent.nbytes, from_hex(extent.crc64))
        ranges.recheck()
        # what an earlier attempt read nobody compared: of its bytes nothing is known but the outputs
        ranges.prove(everything=self._options.verify or tally.was_begun)
        tally.bytes_read += ranges.fetched_bytes


def _report_of(tally: AttemptTally, crew: WorkerPool) -> ClusterReport:
    return ClusterReport(
        workers=crew.workers,
        tasks=tally.tasks,
        tasks_again=tally.tasks_again,
        bytes_read=tally.bytes_read,
        bytes_local=tally.bytes_local,
        bytes_needed=tally.bytes_needed,
    )
