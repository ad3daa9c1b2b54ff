"""Derive a form while it is uploaded: the outputs of a plan are the files of an upload order (ADR 0093).

Their bytes come from `Ranges`: shards on this node, or objects of a remote.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from ckptd.base import extents, files
from ckptd.base.names import DESCRIPTION
from ckptd.conversion.dtypes import use_numpy_of
from ckptd.conversion.engine.staging import list_source
from ckptd.conversion.engine.supervisor import numpy_for, origin_of, plan_request, write_plan
from ckptd.conversion.options import ConvertOptions, parse_form
from ckptd.conversion.outputs import Outputs, description_of
from ckptd.conversion.reader import SourceFiles, refuse_unequal
from ckptd.conversion.remote.reader import RemoteRanges
from ckptd.conversion.remote.source import make_mirror, of_commit
from ckptd.conversion.remote.uploader import HeldSources, PartsSource
from ckptd.core.model.generation import objects_of
from ckptd.core.model.layouts import Role, parse_shard_name
from ckptd.core.model.records import UNIVERSAL, ZERO, Comparison
from ckptd.errors import BehindError, DamagedError, NeedsWholeFiles, RefusedError, SourceChanged, UsageError
from ckptd.formats.torchfile.archive import Framing, frame, read_directory
from ckptd.formats.torchfile.fingerprint import fingerprint
from ckptd.recover.select.inventory import why_untrusted
from ckptd.storage.remote.documents import manifests_of_commit, read_commit, read_identity
from ckptd.storage.remote.messages import Planned, UploadFile
from ckptd.storage.remote.transfer import CannotBeMade, changed
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.checksums import from_hex
from ckptd.storage.stores.sources import CheckedSource, FileSource, MemorySource, crc64_of, records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptd.conversion.engine.staging import PlanOrigin, SourceFolder
    from ckptd.conversion.reader import Ranges
    from ckptd.conversion.remote.source import RemoteSource
    from ckptd.formats.torchfile.archive import Record
    from ckptd.storage.remote import transfer
    from ckptd.storage.remote.messages import Committed, DeriveRequest, UploadRequest
    from ckptd.storage.remote.transfer import TransferControl
    from ckptd.storage.stores.base import HeldRange, Source, Store


ALONE_BYTES = 72 << 20
LANE_BYTES = 8 << 20
MOST_LANES = 4
"""Memory of the process while it moves nothing, and of each transfer thread, as measured (docs/adr/0093)."""


class DerivedUpload:
    """The outputs of one plan (`ckptd.storage.remote.transfer.Origin`)."""

    def __init__(
        self,
        order: UploadRequest,
        making: DeriveRequest,
        outputs: Outputs,
        ranges: Ranges,
        folder: SourceFolder,
        recheck: Callable[[], None],
        held_bytes: int = 0,
        keys: Sequence[str] = (),
    ) -> None:
        """`recheck`: as `Origin.recheck`; `held_bytes`: what `ranges` keeps in memory; `keys`: see `held`."""
        self._outputs = outputs
        self._ranges = ranges
        self._folder = folder
        self._recheck = recheck
        self._held = HeldSources(dict(enumerate(keys)))
        self.is_afar = making.zero is not None
        room = (making.memory_bytes - ALONE_BYTES - held_bytes) // LANE_BYTES
        self.most_lanes = max(1, min(MOST_LANES, room))
        self._description = description_of(outputs.header, outputs.trailer)
        self._below = f"{making.below}/" if making.below else ""
        self.order = _planned(order, making, outputs, self._files(order))

    @property
    def planned(self) -> Planned:
        """Return the size of the plan; second names of outputs count, since each is an object."""
        files, trailer = self.order.files, self._outputs.trailer
        return Planned(
            plan_sha256=trailer.sha256,
            layout=self._outputs.header.layout,
            files=len(files),
            bytes=sum(file.bytes for file in files),
            comparison=Comparison(
                tensors=trailer.tensors, elements=trailer.elements, not_compared=trailer.uncompared
            ),
        )

    @contextmanager
    def opened(self, file: UploadFile) -> Iterator[Source]:
        """One output, made from wherever it is read."""
        folder, path = self._folder, file.path.removeprefix(self._below)
        if path == DESCRIPTION:
            yield MemorySource(
                self._description, mode=folder.file_mode, folder_mode=folder.folder_mode, gid=folder.gid
            )
            return
        parts = self._outputs.output(path).parts
        source = PartsSource(parts, self._ranges, folder.file_mode, folder.folder_mode, lambda _: None)
        source.gid = folder.gid
        yield source

    def held(self, file: UploadFile) -> tuple[HeldRange, ...]:
        """Return the ranges of an output that are ranges of shards which the remote holds."""
        path = file.path.removeprefix(self._below)
        if not self._held.keys or path == DESCRIPTION:
            return ()
        return self._held.ranges_of(self._outputs.output(path).parts)

    def why_changed(self, _file: UploadFile) -> str | None:
        """The shards are compared once, when all is sent: an output is of many of them."""
        return None

    def recheck(self) -> None:
        """See `Origin`."""
        self._recheck()

    def compare(self, control: TransferControl, prove: Callable[[], object]) -> None:
        """Compare copies of a parameter, and masters with the model's weights, before the first byte is sent.

        `prove`: what was read so far is what was saved, or it raises.

        Raises:
            CannotBeMade: they differ.
        """
        for check in self._outputs.checks():
            try:
                refuse_unequal(check, self._ranges, lambda: control.pacer.breathe(control.check))
            except RefusedError as error:
                prove()
                raise CannotBeMade(error.message, hint=error.hint) from error

    def recompare(self) -> None:
        """Make again what an earlier attempt uploaded, for its CRC: nobody compared its source bytes then.

        Raises:
            SourceChanged: it comes out otherwise, for a shard was damaged then, or is.
        """
        made = {file.key: file for file in self.order.files if file.is_made}
        sent = [(one.key, one.bytes, from_hex(one.crc64nvme)) for one in self.order.uploaded]
        sent += [(one.key, one.flushed_bytes, one.crc64) for one in self.order.partly]
        for key, nbytes, crc in sent:
            file = made.get(key)
            if file is None or nbytes > file.bytes:
                continue  # it is not taken over
            with self.opened(file) as source:
                found = crc64_of(source, 0, nbytes)
            if found != crc:
                msg = f"{key} was made of other bytes than its shards hold now"
                raise SourceChanged(msg, hint="all of it is sent again")

    def _files(self, order: UploadRequest) -> tuple[UploadFile, ...]:
        found = [self._file(order, path, entry.nbytes) for path, entry in self._outputs.files.items()]
        return (*found, self._file(order, DESCRIPTION, len(self._description)), *order.files)

    def _file(self, order: UploadRequest, path: str, nbytes: int) -> UploadFile:
        manifest = order.manifest
        return UploadFile(
            path=f"{self._below}{path}",
            key=f"{manifest.folder}/{self._below}{path}",
            source="",
            identity=None,
            bytes=nbytes,
            role=Role.UNIVERSAL if manifest.form == UNIVERSAL else Role.WEIGHTS,
            fingerprint="",
            mode=self._folder.file_mode,
            check_zip_crc=False,
            is_made=True,
        )


def _planned(
    order: UploadRequest, making: DeriveRequest, outputs: Outputs, found: tuple[UploadFile, ...]
) -> UploadRequest:
    """The order with what the plan says; what another plan's attempt sent does not count for this one."""
    source, header = order.manifest.source, outputs.header
    assert source is not None
    plan_sha256 = outputs.trailer.sha256
    update = {"plan_sha256": plan_sha256, "layout": header.layout, "alignment": header.block_bytes}
    manifest = order.manifest.model_copy(update={"source": source.model_copy(update=update)})
    is_other = making.plan_sha256 not in ("", plan_sha256)
    done = {"uploaded": (), "partly": ()} if is_other else {}
    return order.model_copy(update={"manifest": manifest, "files": found, **done})


# --- The committed ZeRO form of a remote as the source of another form (ADR 0118) ------------------------
# What a node makes of it is committed for the whole job. So the COMMIT is read afresh, its manifests by
# their digests, and nothing of them is used before it is checked.

MIRROR = "mirror."
"""Begins the name of a folder in staging: what planning reads of objects, gone once it is planned."""
WINDOW_BYTES = 4 << 20
LEAST_CACHE_BYTES = 8 << 20


def committed_source(
    store: Store, order: UploadRequest, making: DeriveRequest, zero: Committed
) -> tuple[RemoteSource, tuple[tuple[str, str], ...]]:
    """Return the shards that the COMMIT lists, and their fingerprints by path.

    Raises:
        SourceChanged: that COMMIT is gone, or disputed. DamagedError: its manifests cannot be believed.
    """
    tag, generation = order.manifest.tag, order.manifest.generation
    view = read_commit(store, (tag, generation, ZERO))
    if view is None or view.disputed or view.sha256 != zero.sha256:
        msg = f"{store.url} no longer holds the COMMIT of {tag} that was seen there"
        raise SourceChanged(msg, hint="the next turn looks again")
    members = [known.manifest for known in manifests_of_commit(store, view.commit)]
    identity = read_identity(store)
    problem = (
        why_untrusted(identity, view.commit, members) if identity is not None else "it has no remote.json"
    )
    if problem is not None:
        msg = f"nothing is made of {tag} in {store.url}: {problem}"
        raise DamagedError(msg, hint="it was changed in the remote; see `ckptd verify`")
    objects = list(objects_of(members).values())
    marks = tuple(sorted((f.path, f.fingerprint) for f in objects if f.role is not Role.EXTRA))
    root = making.folders[0].removeprefix(tag).strip("/")
    folder = f"{view.commit.folder}/{root}".rstrip("/")
    return of_commit(store.url, Access(), store, folder, tag, objects), marks


def proven_records(place_fd: int, source: RemoteSource) -> dict[str, tuple[Record, ...]]:
    """Return the records of each archive mirrored below `place_fd`, by path in the mirror.

    A manifest's fingerprint is of the zip directory, and that has a CRC32 of each record: so what is read of
    one is proven, however little of the object it is.

    Raises:
        DamagedError: a directory is not the one that was committed.
    """
    found = {}
    for file in source.files:
        if not file.fingerprint or not parse_shard_name(Path(file.path).name):
            continue
        fd = files.open_beneath(place_fd, file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if frame(fd, expected=True) is not Framing.ZIP:
                continue  # planning says what is wrong with it
            directory = read_directory(fd, file.path)
            if fingerprint(fd, directory) != file.fingerprint:
                msg = f"{file.key} in {source.store.url} is damaged: its zip directory is not as committed"
                raise DamagedError(msg, hint="see `ckptd verify`")
            found[file.path] = tuple(directory.records.values())
        finally:
            os.close(fd)
    return found


def cache_for(room_bytes: int, sources: int) -> int:
    """Bytes of blocks to keep: two windows of each source where there is room, half of the room at most."""
    return max(LEAST_CACHE_BYTES, min(room_bytes // 2, 2 * WINDOW_BYTES * sources))


# --- Plan outputs as the files of an upload order (ADR 0093) ---------------------------------------------
# Nothing of the form is written on this node but the plan, in a file without a name (and, for objects, a
# mirror of what planning reads, until it is planned). The restricted child plans. The transfer treats the
# outputs like sealed files: parallel uploads, rate limit, resuming, proof, manifest and COMMIT.

Found = TypeVar("Found")


@contextmanager
def opened(
    order: UploadRequest, root: int, control: TransferControl, store: Store
) -> Iterator[transfer.Origin]:
    """Return the origin of an order that makes a form: planned now, made on demand.

    Raises:
        CannotBeMade: the save has no such form. SourceChanged: it is not the sealed or committed one, or the
            order was cancelled. DamagedError, TornArchiveError: its metadata cannot be read.
    """
    making = order.making
    assert making is not None
    with tempfile.TemporaryFile(dir=making.staging) as plan:
        if making.zero is None:
            with _of_shards(order, making, root, plan, control, store) as made:
                yield made
        else:
            zero = making.zero
            yield _twice(lambda: _of_objects(order, making, zero, root, plan, control, store))


def _twice(attempt: Callable[[], Found]) -> Found:
    """All nodes are told that there is no such form, or that shards of it are damaged, and none tries again:
    such a verdict rests on two readings, apart from each other (docs/internals/commit.md)."""
    try:
        return attempt()
    except (CannotBeMade, DamagedError):
        return attempt()


@contextmanager
def _of_shards(
    order: UploadRequest,
    making: DeriveRequest,
    root: int,
    plan: IO[bytes],
    control: TransferControl,
    store: Store,
) -> Iterator[DerivedUpload]:
    """Derive a form from the sealed shards of this node."""
    options = _options(order.manifest.form, making)

    def look() -> SourceFolder:
        folder = list_source(Path(order.root, making.folders[0]))
        recheck(making, root)
        return folder

    folder, where = _twice(lambda: _plan(order, making, options, look, plan, control))
    outputs = Outputs(plan)
    with files.opened_dir(where.root) as source_fd:
        ranges = LocalRanges(source_fd, [s.path for s in outputs.header.sources], outputs.identities)
        keys = _keys_of_shards(store, order, where, outputs)
        made = DerivedUpload(order, making, outputs, ranges, folder, lambda: recheck(making, root), keys=keys)
        control.on_planned(made.planned)
        _twice(lambda: made.compare(control, ranges.prove))
        yield made


def _keys_of_shards(
    store: Store, order: UploadRequest, where: PlanOrigin, outputs: Outputs
) -> tuple[str, ...]:
    """Return the key of the object that holds each source of a plan, "" where none does; () if nothing does.

    They are those of the ZeRO form, committed before; that they hold the same bytes each upload proves.
    """
    tag = order.manifest.tag
    try:
        view = read_commit(store, (tag, order.manifest.generation, ZERO))
        members = manifests_of_commit(store, view.commit) if view is not None and not view.disputed else ()
    except DamagedError:
        return ()
    rows = {(row.path, row.bytes): row.key for known in members for row in known.manifest.files}
    if not rows:
        return ()
    above = os.path.relpath(where.root, os.path.join(order.root, tag))
    paths = [os.path.normpath(os.path.join(above, source.path)) for source in outputs.header.sources]
    sizes = [source.bytes for source in outputs.header.sources]
    return tuple(rows.get(place, "") for place in zip(paths, sizes, strict=True))


def _of_objects(
    order: UploadRequest,
    making: DeriveRequest,
    zero: Committed,
    root: int,
    plan: IO[bytes],
    control: TransferControl,
    store: Store,
) -> DerivedUpload:
    """Derive a form from the objects that a COMMIT lists.

    Each block is read once and hashed; all that is used is compared with what was committed (ADR 0118).
    """
    options = _options(order.manifest.form, making)
    source, fingerprints = committed_source(store, order, making, zero)
    records: dict[str, tuple[Record, ...]] = {}
    with tempfile.TemporaryDirectory(dir=making.staging, prefix=MIRROR) as place:

        def look() -> SourceFolder:
            with files.opened_dir(place) as fd:
                _mirror(source, fd, options, control)
                records.update(proven_records(fd, source))
            rights = files.stat_beneath(root, making.folders[0]) or os.fstat(root)
            found = list_source(Path(place, source.name))
            mode = rights.st_mode & 0o777 | 0o700
            return replace(found, partial=True, folder_mode=mode, gid=rights.st_gid)

        folder, where = _plan(order, making, options, look, plan, control)
    outputs = Outputs(plan)
    above = "" if where.prefix else f"{source.name}/"
    known = {file.path.removeprefix(above): file for file in source.files}
    wanted = [known[one.path] for one in outputs.header.sources]
    cache_bytes = cache_for(making.memory_bytes - ALONE_BYTES - LANE_BYTES, len(wanted))
    ranges = RemoteRanges(
        store,
        wanted,
        cache_bytes=cache_bytes,
        check_stop=control.check,
        most_block_bytes=WINDOW_BYTES,
        records=records,
    )
    # what an earlier attempt sent was of bytes that nobody compared then, and that may be mended by now
    everything = bool(order.uploaded or order.partly) and order.manifest.form == UNIVERSAL

    def recheck_objects() -> None:
        ranges.recheck()
        made.recompare()
        ranges.prove(everything=everything)

    manifest = order.manifest
    assert manifest.source is not None
    update = {"source": manifest.source.model_copy(update={"fingerprints": fingerprints})}
    order = order.model_copy(update={"manifest": manifest.model_copy(update=update)})
    keys = [file.key for file in wanted]
    made = DerivedUpload(order, making, outputs, ranges, folder, recheck_objects, cache_bytes, keys)
    control.on_planned(made.planned)
    made.compare(control, lambda: ranges.prove(everything=False))
    return made


def _mirror(source: RemoteSource, place_fd: int, options: ConvertOptions, control: TransferControl) -> None:
    """Mirror what planning reads; if that is refused, prove every object before raising.

    Raises:
        DamagedError: one is not what was committed. RefusedError: they all are, and there is no such form.
    """
    try:
        make_mirror(source, place_fd, companions=options.form == "weights")
    except NeedsWholeFiles:
        raise
    except RefusedError:
        # of a flipped bit it says the same, and what is refused is told to all for ever
        ranges = RemoteRanges(source.store, source.files, cache_bytes=LANE_BYTES, check_stop=control.check)
        ranges.prove(everything=True)
        raise


def _plan(
    order: UploadRequest,
    making: DeriveRequest,
    options: ConvertOptions,
    look: Callable[[], SourceFolder],
    plan: IO[bytes],
    control: TransferControl,
) -> tuple[SourceFolder, PlanOrigin]:
    """Have it planned; the folder of the shards, and the one that the plan's paths are relative to."""
    try:
        numpy = numpy_for(options)
        if len(making.folders) > 1:
            msg = f"{order.manifest.tag} holds two engines ({', '.join(making.folders)})"
            raise RefusedError(msg, hint="`ckptd convert` each; the ZeRO form is safe all the same")
        folder = look()
        where = origin_of(folder, options)
        plan.seek(0)
        plan.truncate()
        write_plan(plan_request(folder, where, options, block=False), plan, lambda: _is_over(control))
    except (RefusedError, UsageError) as error:  # such as numpy that is not installed
        raise CannotBeMade(error.message, hint=error.hint) from error
    except BehindError:
        control.check()  # raises what stopped it
        raise
    if numpy:
        use_numpy_of(numpy)
    return folder, where


class LocalRanges(SourceFiles):
    """Shards here; what was not in the page cache before is not left there (P12)."""

    def __init__(self, folder_fd: int, paths: list[str], identities: Sequence[tuple[int, ...]]) -> None:
        super().__init__(folder_fd, paths, identities)
        self._names = paths
        self._touched: set[int] = set()

    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """Bytes of a source."""
        self._touched.add(source)
        fd = self[source]
        data = os.pread(fd, nbytes, offset)
        if self.was_cold(fd):
            extents.drop_pages(fd, offset, nbytes)
        return data

    def prove(self) -> None:
        """Read the sources that were used once more, from the disk, against the CRC32s of their records.

        Raises:
            DamagedError: one is not what `torch.save` wrote.
        """
        for number in sorted(self._touched):
            fd, name = self[number], self._names[number]
            source = FileSource(fd, name)
            extents.drop_pages(fd, 0, source.size_bytes)
            records = records_of(fd, name, is_shard=bool(parse_shard_name(Path(name).name)))
            crc64_of(CheckedSource(source, records, name), 0, source.size_bytes)
            extents.drop_pages(fd, 0, source.size_bytes)


def recheck(making: DeriveRequest, root: int) -> None:
    """The save is still the sealed one.

    Raises:
        SourceChanged: a file is not (P4).
    """
    for path, identity in making.sealed:
        reason = changed(root, path, identity, path)
        if reason is not None:
            raise SourceChanged(reason, hint="this attempt is dropped; the next turn looks again")


def _options(form: str, making: DeriveRequest) -> ConvertOptions:
    kind, dtype = parse_form(form)
    return ConvertOptions(form=kind, dtype=dtype, compare_masters=making.compare_masters)


def _is_over(control: TransferControl) -> bool:
    """Tell whether planning must end; in any case a sign of life, for planning moves no bytes."""
    try:
        control.pacer.breathe(control.check)
    except SourceChanged:
        return True
    return False
