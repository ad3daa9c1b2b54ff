"""Remove one folder that a person gave up, an incomplete or torn save, comparing it before and after the
rename.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.errors import CkptdError, SourceChanged, from_os_error
from ckptd.storage.local.fs import TRASH, closing, ensure_ours, everything_in, open_tag, trash_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.model.listing import ListedFile


def remove_incomplete(save_dir_fd: int, tag: str, files_seen: Sequence[ListedFile]) -> None:
    """Remove a checkpoint folder that a person gave up: looked at before and after it is renamed aside.

    Killed in between, the next start of the daemon moves it back; once it is ours it goes for good.

    Raises:
        SourceChanged: it is another than was looked at; it stays where it was.
    """
    name = trash_name(tag)
    trash_fd = ensure_ours(save_dir_fd, TRASH)
    try:
        with closing(open_tag(save_dir_fd, tag)) as folder:
            _check_listed(folder, tag, files_seen)
            files.rename_new(save_dir_fd, tag, trash_fd, name)
            try:
                _check_listed(folder, tag, files_seen)
            except (CkptdError, OSError):
                files.rename_new(trash_fd, name, save_dir_fd, tag)
                raise
        files.fsync_dir(save_dir_fd)
        aside = f"ours.{secrets.token_hex(6)}"
        files.rename_new(trash_fd, name, trash_fd, aside)
        files.remove_tree(trash_fd, aside)
    except OSError as error:
        raise from_os_error(error, f"removing {tag}") from error
    finally:
        os.close(trash_fd)


def _check_listed(folder_fd: int, tag: str, seen: Sequence[ListedFile]) -> None:
    known = {file.path: file.identity for file in seen}
    for path in everything_in(folder_fd):
        status = files.stat_beneath(folder_fd, path)
        if status is None or known.get(path) != files.identity_of(status):
            msg = f"{tag}/{path} changed while {tag} was looked at"
            raise SourceChanged(msg, hint="somebody writes there; it stays")
