"""The outputs of a plan as the files of an order to ship, made on demand (docs/adr/0093).

Where their bytes come from is `Ranges`: shards here, or objects of a remote.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptd.convert.describing import NAME, description_of
from ckptd.convert.reading import same_bytes
from ckptd.core.layouts import Role
from ckptd.core.view import UNIVERSAL
from ckptd.errors import SourceChanged
from ckptd.recover.ranged_upload import PartsSource
from ckptd.remote.checksums import from_hex
from ckptd.remote.messages import Planned, ShipFile
from ckptd.remote.origin import CannotBeMade
from ckptd.remote.source import MemorySource, crc64_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.convert.outputs import Outputs
    from ckptd.convert.ranges import Ranges
    from ckptd.convert.workplace import SourceFolder
    from ckptd.remote.messages import Making, ShipOrder
    from ckptd.remote.store import Source
    from ckptd.remote.transfer import Control

ALONE_BYTES = 72 << 20
LANE_BYTES = 8 << 20
MOST_LANES = 4
"""What the process takes with nothing on its way, and each lane besides, as measured (docs/adr/0093)."""


class Made:
    """The outputs of one plan (`ckptd.remote.origin.Origin`)."""

    def __init__(
        self,
        order: ShipOrder,
        making: Making,
        outputs: Outputs,
        ranges: Ranges,
        folder: SourceFolder,
        recheck: Callable[[], None],
        held_bytes: int = 0,
    ) -> None:
        """`recheck`: as `Origin.recheck`; `held_bytes`: what `ranges` keeps in memory."""
        self._outputs = outputs
        self._ranges = ranges
        self._folder = folder
        self._recheck = recheck
        room = (making.memory_bytes - ALONE_BYTES - held_bytes) // LANE_BYTES
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
        self._recheck()

    def compare(self, control: Control, prove: Callable[[], object]) -> None:
        """Before the first byte is sent: copies of a parameter on several ranks are one (formats.md §6.1).

        `prove`: what was read so far is what was saved, or it raises.

        Raises:
            CannotBeMade: they have drifted apart.
        """
        for check in self._outputs.checks():
            control.pacer.breathe(control.check)
            if not same_bytes(check.one, check.other, self._ranges):
                prove()
                msg = f"the tensor-parallel ranks hold different copies of {check.what}"
                hint = "the run has drifted apart, or shards are damaged; an older checkpoint may be whole"
                raise CannotBeMade(msg, hint=hint)

    def recompare(self) -> None:
        """What an earlier attempt sent was made of bytes that nobody compared then: made again, for its CRC.

        Raises:
            SourceChanged: it comes out otherwise, for a shard was damaged then, or is.
        """
        made = {file.key: file for file in self.order.files if file.is_made}
        sent = [(one.key, one.bytes, from_hex(one.crc64nvme)) for one in self.order.shipped]
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
