"""Derived forms made while they are sent: a plan's outputs as the files of an order to ship (docs/adr/0093).

Nothing of the form lies on this node: the plan, in a file without a name, is all (of objects, until it is
planned, a mirror of what planning reads of them; adr/0118). The restricted child plans (P14), and everything
that a transfer does with sealed files it does with these: lanes, pace, resuming, proof, manifest and COMMIT.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar, cast

from ckptd import files
from ckptd.convert.asking import numpy_for, origin_of, plan_request
from ckptd.convert.options import ConvertOptions, Dtype
from ckptd.convert.outputs import Outputs
from ckptd.convert.rounding import use_numpy_of
from ckptd.convert.sources import Sources
from ckptd.convert.supervise import write_plan
from ckptd.convert.workplace import look_at_source
from ckptd.core.layouts import parse_shard_name
from ckptd.core.view import UNIVERSAL
from ckptd.errors import BehindError, DamagedError, NeedsWholeFiles, RefusedError, SourceChanged, UsageError
from ckptd.recover.made import ALONE_BYTES, LANE_BYTES, Made
from ckptd.recover.making_afar import MIRROR, WINDOW_BYTES, cache_for, committed_source, proven_records
from ckptd.recover.mirrored import make_mirror
from ckptd.recover.ranged_reader import RemoteRanges
from ckptd.remote.origin import CannotBeMade, changed
from ckptd.remote.source import CheckedSource, FileSource, crc64_of, records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptd.convert.companions import Origin
    from ckptd.convert.workplace import SourceFolder
    from ckptd.recover.mirrored import RemoteSource
    from ckptd.remote import origin
    from ckptd.remote.making_messages import Committed, Making
    from ckptd.remote.messages import ShipOrder
    from ckptd.remote.store import Store
    from ckptd.remote.transfer import Control
    from ckptd.torchfile.archive import Record

Found = TypeVar("Found")


@contextmanager
def opened(order: ShipOrder, root: int, control: Control, store: Store) -> Iterator[origin.Origin]:
    """The origin of an order that makes a form: planned now, made on demand.

    Raises:
        CannotBeMade: the save has no such form. SourceChanged: it is not the sealed or committed one, or the
            order was cancelled. DamagedError, TornArchiveError: its metadata cannot be read.
    """
    making = order.making
    assert making is not None
    with tempfile.TemporaryFile(dir=making.staging) as plan:
        if making.zero is None:
            with _of_shards(order, making, root, plan, control) as made:
                yield made
        else:
            zero = making.zero
            yield _twice(lambda: _of_objects(order, making, zero, root, plan, control, store))


def _twice(attempt: Callable[[], Found]) -> Found:
    """All nodes are told that there is no such form, or that shards of it are damaged, and none tries again:
    such a verdict rests on two readings, apart from each other (docs/adr/0137)."""
    try:
        return attempt()
    except (CannotBeMade, DamagedError):
        return attempt()


@contextmanager
def _of_shards(
    order: ShipOrder, making: Making, root: int, plan: IO[bytes], control: Control
) -> Iterator[Made]:
    """Of the sealed shards of this node."""
    options = _options(order.manifest.form)

    def look() -> SourceFolder:
        folder = look_at_source(Path(order.root, making.folders[0]))
        recheck(making, root)
        return folder

    folder, where = _twice(lambda: _plan(order, making, options, look, plan, control))
    outputs = Outputs(plan)
    with files.opened_dir(where.root) as source_fd:
        ranges = LocalRanges(source_fd, [s.path for s in outputs.header.sources], outputs.identities)
        made = Made(order, making, outputs, ranges, folder, lambda: recheck(making, root))
        control.on_planned(made.planned)
        _twice(lambda: made.compare(control, ranges.prove))
        yield made


def _of_objects(
    order: ShipOrder,
    making: Making,
    zero: Committed,
    root: int,
    plan: IO[bytes],
    control: Control,
    store: Store,
) -> Made:
    """Of the objects that a COMMIT lists: each block is read once and hashed, all that is used of them is
    compared with what was committed (adr/0128)."""
    options = _options(order.manifest.form)
    source, fingerprints = committed_source(store, order, making, zero)
    records: dict[str, tuple[Record, ...]] = {}
    with tempfile.TemporaryDirectory(dir=making.staging, prefix=MIRROR) as place:

        def look() -> SourceFolder:
            with files.opened_dir(place) as fd:
                _mirror(source, fd, options, control)
                records.update(proven_records(fd, source))
            rights = files.stat_beneath(root, making.folders[0]) or os.fstat(root)
            found = look_at_source(Path(place, source.name))
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
    everything = bool(order.shipped or order.partly) and order.manifest.form == UNIVERSAL

    def recheck_objects() -> None:
        ranges.recheck()
        made.recompare()
        ranges.prove(everything=everything)

    manifest = order.manifest
    assert manifest.source is not None
    update = {"source": manifest.source.model_copy(update={"fingerprints": fingerprints})}
    order = order.model_copy(update={"manifest": manifest.model_copy(update=update)})
    made = Made(order, making, outputs, ranges, folder, recheck_objects, cache_bytes)
    control.on_planned(made.planned)
    made.compare(control, lambda: ranges.prove(everything=False))
    return made


def _mirror(source: RemoteSource, place_fd: int, options: ConvertOptions, control: Control) -> None:
    """What planning reads; where that is refused every object is proven first.

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
    order: ShipOrder,
    making: Making,
    options: ConvertOptions,
    look: Callable[[], SourceFolder],
    plan: IO[bytes],
    control: Control,
) -> tuple[SourceFolder, Origin]:
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


class LocalRanges(Sources):
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
            files.drop_pages(fd, offset, nbytes)
        return data

    def prove(self) -> None:
        """Read the sources that were used once more, from the disk, against the CRC32s of their records.

        Raises:
            DamagedError: one is not what `torch.save` wrote.
        """
        for number in sorted(self._touched):
            fd, name = self[number], self._names[number]
            source = FileSource(fd, name)
            files.drop_pages(fd, 0, source.size_bytes)
            records = records_of(fd, name, is_shard=bool(parse_shard_name(Path(name).name)))
            crc64_of(CheckedSource(source, records, name), 0, source.size_bytes)
            files.drop_pages(fd, 0, source.size_bytes)


def recheck(making: Making, root: int) -> None:
    """The save is still the sealed one.

    Raises:
        SourceChanged: a file is not (P4).
    """
    for path, identity in making.sealed:
        reason = changed(root, path, identity, path)
        if reason is not None:
            raise SourceChanged(reason, hint="this attempt is dropped; the next turn looks again")


def _options(form: str) -> ConvertOptions:
    if form == UNIVERSAL:
        return ConvertOptions()
    return ConvertOptions(form="weights", dtype=cast("Dtype", form.removeprefix("weights-")))


def _is_over(control: Control) -> bool:
    """Whether planning must end; in any case a sign of life, for planning moves no bytes (adr/0090)."""
    try:
        control.pacer.breathe(control.check)
    except SourceChanged:
        return True
    return False
