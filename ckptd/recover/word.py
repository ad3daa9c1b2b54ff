"""The word that `resume` leaves where no `latest` says what a run is resumed from (docs/adr/0154)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core.listing import OURS
from ckptd.core.resumed import RESUMED, word_of
from ckptd.core.trainers import Trainer
from ckptd.local.fs import closing, ensure_ours

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.listing import SaveDirListing
    from ckptd.recover.choose import Candidate


def leave_word(
    save_dir_fd: int, candidate: Candidate, listing: SaveDirListing, say: Callable[[str], None]
) -> None:
    """Durable before anything is fetched or printed: a folder may be let go as soon as it is there.

    Where nothing can be written a daemon cannot remove anything either: said, and no reason to stop.
    """
    if candidate.layout[0] is Trainer.DEEPSPEED:  # `latest` names it
        return
    text = word_of(candidate.tag, listing.folders).model_dump_json()
    if text == listing.resumed:
        return
    try:
        with closing(ensure_ours(save_dir_fd, OURS)) as fd:
            files.write_atomic(fd, RESUMED, text.encode())
    except OSError as error:
        why = os.strerror(error.errno or 0)
        say(f"{OURS}/{RESUMED} cannot be written ({why}): retention may let {candidate.tag} go")
