"""Say before anything is uploaded which checkpoints will be, and what each save costs (`check`, `run`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptd.base.humanize import size_of
from ckptd.config.quantities import show_bandwidth, show_seconds
from ckptd.config.remote_names import shown_remote
from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.storage.local.probe import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckptd.config.schema import JobConfig, RemoteConfig
    from ckptd.core.model.listing import FolderListing, SaveDirListing

_BYTES_A_PARAMETER = {ZERO: 14, UNIVERSAL: 16, "weights-fp32": 4, "weights-bf16": 2, "weights-fp16": 2}
"""Bytes per parameter with 16-bit weights and Adam, whose states are nearly all of a checkpoint
(docs/formats.md)."""


def planned_uploads(job: JobConfig, listing: SaveDirListing, state_dir: Path | None) -> Iterator[Finding]:
    """Yield which of the checkpoints that lie here will be uploaded, and what each save costs on the link.

    Nothing is yielded where none lies here: what a save takes is not known then. `state_dir`: of the job; the
    first start, which alone leaves checkpoints out, is over once its journal is there.
    """
    saves = [folder for folder in listing.folders if folder.shards and not folder.is_model_only]
    if not saves:
        return
    by_time = max(saves, key=lambda folder: max(file.identity.mtime_ns for file in folder.shards))
    newest = next((folder for folder in saves if folder.tag == listing.latest), by_time)
    if state_dir is None or not (state_dir / "journal.db").exists():
        yield _existing(job.existing, saves, newest)
    size_bytes = sum(file.identity.size_bytes for file in newest.files)
    for remote in job.remotes:
        # of other checkpoints the files as they are, in no other form
        has_forms = newest.other_layout is None
        yield _cost(remote, remote.forms if has_forms else (ZERO,), size_bytes)


def _existing(which: str, saves: Sequence[FolderListing], newest: FolderListing) -> Finding:
    """Say how many lie here, and which of them will be uploaded."""
    count = len(saves)
    one, verb = (f"{count} checkpoints", "lie") if count > 1 else (newest.tag, "lies")
    left = {"all": 0, "newest": count - 1, "none": count}[which]
    will = {
        "all": "all of them will be uploaded" if count > 1 else "it will be uploaded",
        "newest": f"{newest.tag} will be uploaded" if count > 1 else "it will be uploaded",
        "none": "nothing of it will be uploaded",
    }[which]
    text = f"{one} {verb} here already: {will}"
    if not left:
        return Finding(what="existing", verdict="ok", text=text)
    rest = "the other one stays" if left == 1 else f"the other {left} stay"
    if which == "none":
        rest = "it stays" if left == 1 else f"all {left} stay"
    text += f"; {rest} on this node alone, never deleted"
    hint = 'existing = "all" (--existing all, CKPTD_EXISTING=all) uploads and rotates them too'
    return Finding(what="existing", verdict="note", text=text, hint=hint)


def _cost(remote: RemoteConfig, forms: Sequence[str], size_bytes: int) -> Finding:
    """Say what a save of `size_bytes` takes to upload, and how to halve that."""
    each = size_bytes / _BYTES_A_PARAMETER[ZERO]
    costs = [(form, each * _BYTES_A_PARAMETER[form]) for form in forms]
    total_bytes = sum(cost for _, cost in costs)
    text = f"a save of this size uploads about {size_of(round(total_bytes))}"
    if len(costs) > 1:
        text += f" ({', '.join(f'{form} {size_of(round(cost))}' for form, cost in costs)})"
    if rate := remote.bandwidth.at(time.time()):
        text += f", {show_seconds(total_bytes / rate)} at {show_bandwidth(rate)}"
    halves = ZERO in forms and UNIVERSAL in forms
    hint = 'forms = ["zero"] halves it: `ckptd convert` makes the universal form when it is needed'
    what = shown_remote(remote.name, remote.url)
    return Finding(what=what, verdict="note", text=text, hint=hint if halves else "")
