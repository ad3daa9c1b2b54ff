"""Write a cluster's outputs to a folder of a store with the attempt's log; publish it or give it up."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.convert.engine.writer import own
from ckptd.convert.provenance import NAME
from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.convert.cluster.attempt_log import AttemptLog
    from ckptd.convert.engine.staging import SourceFolder, StagingDir
    from ckptd.storage.stores.access import Access
    from ckptd.storage.stores.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDestination:
    """Describe the destination of outputs: the folder `name` of a store; `note_key`: the attempt's log."""

    store: Store
    url: str
    access: Access
    name: str
    note_key: str
    gid: int | None


def give_up(end: ClusterDestination, note: AttemptLog) -> None:
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


# --- Publishing a shared folder by one rename: the outputs of the plan alone -----------------------------


def publish_folder(
    place: StagingDir,
    name: str,
    target: str,
    folder: SourceFolder,
    description: bytes,
    outputs: Iterable[tuple[str, ...]],
) -> None:
    """Make `name` in the partial folder the folder `target`; `outputs`: the names of each output.

    Temporaries of workers that died are removed; so is whatever else nobody planned: it is our own folder.
    """
    planned = {names[0]: names[1:] for names in outputs}
    with files.opened_dir(name, place.fd) as top:
        for root, _, found, fd in os.fwalk(".", dir_fd=top):
            for file in found:
                if os.path.normpath(os.path.join(root, file)) not in planned:
                    files.remove_file(fd, file)
        for first, links in planned.items():
            for link in links:
                os.link(first, link, src_dir_fd=top, dst_dir_fd=top, follow_symlinks=False)
        for _, _, _, fd in os.fwalk(".", dir_fd=top):
            files.fsync_dir(fd)
        files.write_atomic(top, NAME, description, mode=folder.file_mode)
        with files.reading(top, NAME) as fd:
            own(fd, folder.gid, folder.file_mode)
            os.fsync(fd)
        own(top, folder.gid, folder.folder_mode)
        files.fsync_dir(top)
    place.publish(target, name)
