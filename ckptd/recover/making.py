"""Derived forms made while they are sent: a plan's outputs as the files of an order to ship (docs/adr/0093).

Nothing of the form lies on this node: the plan, in a file without a name, is all. The restricted child plans
(P14), and everything that a transfer does with sealed files it does with these: lanes, pace, resuming, proof,
manifest and COMMIT.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from ckptd import files
from ckptd.convert.asking import numpy_for, origin_of, plan_request
from ckptd.convert.describing import NAME, description_of
from ckptd.convert.options import ConvertOptions, Dtype
from ckptd.convert.outputs import Outputs
from ckptd.convert.reading import same_bytes
from ckptd.convert.rounding import use_numpy_of
from ckptd.convert.sources import Sources
from ckptd.convert.supervise import write_plan
from ckptd.convert.workplace import look_at_source
from ckptd.core.layouts import Role
from ckptd.core.view import UNIVERSAL
from ckptd.errors import BehindError, RefusedError, SourceChanged, UsageError
from ckptd.recover.ranged_upload import PartsSource
from ckptd.remote.messages import Planned, ShipFile
from ckptd.remote.origin import CannotBeMade, changed
from ckptd.remote.source import MemorySource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.convert.workplace import SourceFolder
    from ckptd.remote.messages import Making, ShipOrder
    from ckptd.remote.origin import Origin
    from ckptd.remote.store import Source
    from ckptd.remote.transfer import Control

ALONE_BYTES = 72 << 20
LANE_BYTES = 8 << 20
MOST_LANES = 4
"""What the process takes with nothing on its way, and each lane besides, as measured (docs/adr/0093)."""


@contextmanager
def opened(order: ShipOrder, root: int, control: Control) -> Iterator[Origin]:
    """The origin of an order that makes a form: planned now, made on demand.

    Raises:
        CannotBeMade: the save has no such form. SourceChanged: it is not the sealed one, or the order was
            cancelled. DamagedError, TornArchiveError: its metadata cannot be read.
    """
    making = order.making
    assert making is not None
    with tempfile.TemporaryFile(dir=making.staging) as plan:
        folder, where = _plan(order, making, root, plan, control)
        outputs = Outputs(plan)
        with files.opened_dir(where) as source_fd:
            ranges = LocalRanges(source_fd, [s.path for s in outputs.header.sources], outputs.identities)
            made = Made(order, making, root, outputs, ranges, folder)
            control.on_planned(made.planned)
            made.compare(control)
            yield made


def _plan(
    order: ShipOrder, making: Making, root: int, plan: IO[bytes], control: Control
) -> tuple[SourceFolder, str]:
    """Have it planned; the folder of the shards, and the one that the plan's paths are relative to."""
    try:
        options = _options(order.manifest.form)
        numpy = numpy_for(options)
        if len(making.folders) > 1:
            msg = f"{order.manifest.tag} holds two engines ({', '.join(making.folders)})"
            raise RefusedError(msg, hint="`ckptd convert` each; the ZeRO form is safe all the same")
        folder = look_at_source(Path(order.root, making.folders[0]))
        where = origin_of(folder, options)
        recheck(making, root)
        write_plan(plan_request(folder, where, options, block=False), plan, lambda: _is_over(control))
    except (RefusedError, UsageError) as error:  # such as numpy that is not installed
        raise CannotBeMade(error.message, hint=error.hint) from error
    except BehindError:
        control.check()  # raises what stopped it
        raise
    if numpy:
        use_numpy_of(numpy)
    return folder, where.root


class LocalRanges(Sources):
    """Shards here; what was not in the page cache before is not left there (P12)."""

    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """Bytes of a source."""
        fd = self[source]
        data = os.pread(fd, nbytes, offset)
        if self.was_cold(fd):
            files.drop_pages(fd, offset, nbytes)
        return data


class Made:
    """The outputs of one plan (`ckptd.remote.origin.Origin`)."""

    def __init__(
        self,
        order: ShipOrder,
        making: Making,
        root: int,
        outputs: Outputs,
        ranges: LocalRanges,
        folder: SourceFolder,
    ) -> None:
        self._making = making
        self._root = root
        self._outputs = outputs
        self._ranges = ranges
        self._folder = folder
        room = (making.memory_bytes - ALONE_BYTES) // LANE_BYTES
        self.most_lanes = max(1, min(MOST_LANES, room))
        self._description = description_of(outputs.header, outputs.trailer)
        self._below = f"{making.below}/" if making.below else ""
        self.order = _planned(order, making, outputs, self._files(order))

    @property
    def planned(self) -> Planned:
        """What it comes to, second names of outputs counted: each is an object."""
        files, trailer = self.order.files, self._outputs.trailer
        return Planned(
            plan_sha256=trailer.sha256,
            layout=self._outputs.header.layout,
            files=len(files),
            bytes=sum(file.bytes for file in files),
        )

    @contextmanager
    def opened(self, file: ShipFile) -> Iterator[Source]:
        """One output, made from wherever it is read."""
        folder, path = self._folder, file.path.removeprefix(self._below)
        if path == NAME:
            yield MemorySource(
                self._description, mode=folder.file_mode, folder_mode=folder.folder_mode, gid=folder.gid
            )
            return
        parts = self._outputs.output(path).parts
        source = PartsSource(parts, self._ranges, folder.file_mode, folder.folder_mode, lambda _: None)
        source.gid = folder.gid
        yield source

    def why_changed(self, _file: ShipFile) -> str | None:
        """The shards are compared once, when all is sent: an output is of many of them."""
        return None

    def recheck(self) -> None:
        """See `Origin`."""
        recheck(self._making, self._root)

    def compare(self, control: Control) -> None:
        """Before the first byte is sent: copies of a parameter on several ranks are one (formats.md §6.1).

        Raises:
            CannotBeMade: they have drifted apart.
        """
        for check in self._outputs.checks():
            control.pacer.breathe(control.check)
            if not same_bytes(check.one, check.other, self._ranges):
                msg = f"the tensor-parallel ranks hold different copies of {check.what}"
                hint = "the run has drifted apart, or shards are damaged; an older checkpoint may be whole"
                raise CannotBeMade(msg, hint=hint)

    def _files(self, order: ShipOrder) -> tuple[ShipFile, ...]:
        found = [self._file(order, path, entry.nbytes) for path, entry in self._outputs.files.items()]
        return (*found, self._file(order, NAME, len(self._description)), *order.files)

    def _file(self, order: ShipOrder, path: str, nbytes: int) -> ShipFile:
        manifest = order.manifest
        return ShipFile(
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


def recheck(making: Making, root: int) -> None:
    """The save is still the sealed one.

    Raises:
        SourceChanged: a file is not (P4).
    """
    for path, identity in making.sealed:
        reason = changed(root, path, identity, path)
        if reason is not None:
            raise SourceChanged(reason, hint="this attempt is dropped; the next turn looks again")


def _planned(order: ShipOrder, making: Making, outputs: Outputs, found: tuple[ShipFile, ...]) -> ShipOrder:
    """The order with what the plan says; what another plan's attempt sent does not count for this one."""
    source, header = order.manifest.source, outputs.header
    assert source is not None
    plan_sha256 = outputs.trailer.sha256
    update = {"plan_sha256": plan_sha256, "layout": header.layout, "alignment": header.block_bytes}
    manifest = order.manifest.model_copy(update={"source": source.model_copy(update=update)})
    is_other = making.plan_sha256 not in ("", plan_sha256)
    done = {"shipped": (), "partly": ()} if is_other else {}
    return order.model_copy(update={"manifest": manifest, "files": found, **done})


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
