"""Publishing what workers gathered in a shared folder: the outputs of the plan alone, one rename (P3)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.convert.describing import NAME
from ckptd.convert.writing import own

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.convert.workplace import SourceFolder, Workplace


def publish_folder(
    place: Workplace,
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
