"""Where the bytes of an order to ship come from: sealed files of this node, or what is made while it is sent.

A transfer knows origins alone. What makes a derived form out of shards stands higher (`ckptd.recover.making`,
docs/adr/0093) and is handed in.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

from ckptd import files
from ckptd.core.layouts import Role
from ckptd.errors import RefusedError, SourceChanged
from ckptd.remote.extras import mode_of_folder
from ckptd.remote.source import CheckedSource, FileSource, records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ckptd.core.identity import FileIdentity
    from ckptd.remote.messages import ShipFile, ShipOrder
    from ckptd.remote.store import Source, Store
    from ckptd.remote.transfer import Control

_FOLDERS = 64
_SHARDS = (Role.OPTIM, Role.MODEL, Role.LAYER, Role.EXPERT)


class CannotBeMade(RefusedError):
    """The form does not exist for this save: no attempt will make it, and its ZeRO form is none the worse."""


class Origin(Protocol):
    """The source of one order."""

    @property
    def order(self) -> ShipOrder:
        """The order with all its files: of a form that is made they are known once it is planned."""
        ...

    @property
    def most_lanes(self) -> int:
        """How many of them may be read at a time (P12)."""
        ...

    def opened(self, file: ShipFile) -> AbstractContextManager[Source]:
        """One of these files, to be read."""
        ...

    def why_changed(self, file: ShipFile) -> str | None:
        """Why it is not what it was when the order was given; None when it is."""
        ...

    def recheck(self) -> None:
        """All that was read is what it was.

        Raises:
            SourceChanged: something is not (P4).
        """
        ...


if TYPE_CHECKING:
    OpenOrigin = Callable[[ShipOrder, int, Control, Store], AbstractContextManager[Origin]]
    """From an order and the open folder that its sources are relative to, or the store that holds them."""


class Sealed:
    """Files as they were sealed: opened by identity, the CRC32s of records compared while they are read."""

    most_lanes = 64

    def __init__(self, order: ShipOrder, root: int) -> None:
        self.order = order
        self._root = root
        # thousands of small files have few folders, and each look walks down to one
        self._mode_of_folder = lru_cache(_FOLDERS)(partial(mode_of_folder, root))

    @contextmanager
    def opened(self, file: ShipFile) -> Iterator[Source]:
        """See `Origin`."""
        with files.reading(self._root, file.source, file.identity) as fd:
            mode = self._mode_of_folder(file.source.rpartition("/")[0])
            inner = FileSource(fd, file.path, folder_mode=mode)
            try:
                is_shard = file.role in _SHARDS
                records = records_of(fd, file.path, is_shard=is_shard) if file.check_zip_crc else []
                yield CheckedSource(inner, records, file.path) if records else inner
            finally:
                inner.drop_all()

    def why_changed(self, file: ShipFile) -> str | None:
        """See `Origin`."""
        return changed(self._root, file.source, file.identity, file.path)

    def recheck(self) -> None:
        """See `Origin`."""
        for file in self.order.files:
            reason = self.why_changed(file)
            if reason is not None:
                raise SourceChanged(reason, hint="this attempt is dropped; the next turn looks again")


@contextmanager
def sealed(order: ShipOrder, root: int, _control: Control, _store: Store) -> Iterator[Origin]:
    """The origin of an order whose files lie here."""
    if order.making is not None:
        msg = f"this process makes no {order.manifest.form} forms"
        raise RefusedError(msg, hint="a defect of ckptd: it sends what lies here")
    yield Sealed(order, root)


def changed(root: int, source: str, identity: FileIdentity | None, name: str) -> str | None:
    """Why a file is not the sealed one any more; None when it is (and of extras, which are not sealed)."""
    if identity is None:
        return None
    status = files.stat_beneath(root, source)
    if status is None:
        return f"{name} vanished"
    if files.identity_of(status) != identity:
        return f"{name} was written since it was sealed"
    return None
