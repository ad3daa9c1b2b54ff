"""Where a cluster's outputs go: the folder of a store with the attempt's note, and how it is given up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from ckptd.cluster.note import Note
    from ckptd.remote.access import Access
    from ckptd.remote.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where outputs go: the folder `name` of a store; `note_key`: the attempt's note."""

    store: Store
    url: str
    access: Access
    name: str
    note_key: str
    gid: int | None


def give_up(end: End, note: Note) -> None:
    """Remove what was made; what cannot be removed stays without ckptd.json."""
    head = f"{end.name}/"

    def remove(key: str) -> None:
        with suppress(CkptdError):
            end.store.delete(key)

    with suppress(CkptdError):
        note.check_ours()
        for path, token in note.progress.uploads.items():
            with suppress(CkptdError):
                end.store.discard(head + path, token)
        keys = [info.key for info in end.store.list(head) if info.key != end.note_key]
        with ThreadPoolExecutor(8, thread_name_prefix="give-up") as pool:
            list(pool.map(remove, keys))
        note.progress.done.clear()
        end.store.delete(end.note_key)
