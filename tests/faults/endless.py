"""Makes forms that are never done: what a remote's child is told to import by the test of its death."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptd.core.model.records import Comparison
from ckptd.storage.remote.messages import Planned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.remote.messages import UploadRequest
    from ckptd.storage.remote.transfer import Origin, TransferControl
    from ckptd.storage.stores.base import Store


@contextmanager
def opened(_order: UploadRequest, _root: int, control: TransferControl, _store: Store) -> Iterator[Origin]:
    """Says that it has begun, and goes on for ever."""
    control.on_planned(Planned(plan_sha256="", layout="", files=0, bytes=0, comparison=Comparison()))
    threading.Event().wait()
    yield  # type: ignore[misc]
