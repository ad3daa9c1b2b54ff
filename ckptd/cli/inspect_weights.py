"""What `ckptd inspect` says of exported weights: headers against sizes, the index against the files.

Reads headers alone, so that a folder of hundreds of gigabytes is looked at in no time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.cli.inspect_look import SeenCheckpoint, SeenFile
from ckptd.convert.adapters import ADAPTER_FILE
from ckptd.convert.safetensors import read_names
from ckptd.core.facts import Archive
from ckptd.core.layouts import Role
from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from ckptd.core.listing import FolderListing

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_INDEX_LIMIT_BYTES = 100_000_000


def weights(listing: FolderListing, parent: Path, manifest: dict[str, object]) -> SeenCheckpoint:
    """The verdict on a folder whose ckptd.json says that it is weights."""
    held: dict[str, list[str]] = {}
    seen: list[SeenFile] = []
    with files.opened_dir(os.path.realpath(parent / listing.tag)) as fd:
        for file in listing.files:
            reason = None
            if file.path.endswith(".safetensors"):
                try:
                    with files.reading(fd, file.path) as opened:
                        held[file.path] = read_names(opened, file.path)
                except (CkptdError, OSError) as error:
                    reason = error.message if isinstance(error, CkptdError) else str(error)
            role = Role.WEIGHTS if file.path.endswith(".safetensors") else Role.SIDE
            seen.append(
                SeenFile(
                    path=file.path,
                    bytes=file.identity.size_bytes,
                    role=role.value,
                    archive=Archive.OTHER.value,
                    fingerprint="",
                    reason=reason,
                )
            )
        reason = next((f.reason for f in seen if f.reason), None) or _index_reason(fd, held)
    source = manifest.get("source")
    step = source.get("step") if isinstance(source, dict) else None
    stage = source.get("zero_stage") if isinstance(source, dict) else None
    return SeenCheckpoint(
        tag=listing.tag,
        kind="weights",
        state="complete" if reason is None else "damaged",
        reason=reason,
        is_complete=reason is None,
        step=step if isinstance(step, int) else None,
        zero_stage=stage if isinstance(stage, int) else None,
        dtype=str(manifest.get("form", "")).removeprefix("weights-"),
        tensors=sum(len(names) for names in held.values()),
        layout=str(manifest.get("layout", "")),
        bytes=listing.total_bytes,
        files=tuple(seen),
    )


def _index_reason(fd: int, held: dict[str, list[str]]) -> str | None:
    """Why files and index do not agree; adapters of PEFT stand in no index."""
    adapters = {file for file in held if file.rpartition("/")[2] == ADAPTER_FILE}
    held = {file: names for file, names in held.items() if file not in adapters}
    if set(held) == {SINGLE} or (adapters and not held):
        return None
    try:
        listed = json.loads(files.read_beneath(fd, INDEX, limit_bytes=_INDEX_LIMIT_BYTES))["weight_map"]
        wanted = {str(name): str(file) for name, file in listed.items()}
    except (OSError, CkptdError, ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} is missing or unreadable" if held else "there is no file of weights"
    absent = sorted(set(wanted.values()) - set(held))
    if absent:
        return f"{absent[0]} is missing"
    if wanted != {name: file for file, names in held.items() for name in names}:
        return f"{INDEX} lists other tensors than the files hold"
    return None
