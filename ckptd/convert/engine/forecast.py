"""Forecast a conversion without doing it: run the planning child alone and discard its plan.

For `ckptd inspect` and `ckptd convert --dry-run`. Nothing is written: whether extents clone is tried on a
file that has no name (O_TMPFILE).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptd.base import extents, files
from ckptd.convert.engine import children
from ckptd.convert.engine.children import watch
from ckptd.convert.engine.staging import SourceFolder, check_destination, list_source
from ckptd.convert.engine.supervisor import PLAN_SECONDS, failure, numpy_for, origin_of, plan_request
from ckptd.convert.options import ConvertOptions
from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.convert.engine.staging import Origin

BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Hold the outputs and costs of a conversion that is not run; sizes in bytes."""

    source: Path | str
    layout: str
    zero_stage: int
    ranks: int
    step: int | None
    parameters: int
    files: int
    bytes: int
    """Of what would be made."""
    clones: bool
    """Extents are shared between source and destination's file system."""
    bytes_cloned: int
    bytes_copied: int
    bytes_misplaced: int
    notes: tuple[str, ...]
    """As `ConvertReport.notes`."""
    """Of the copied: in ranges whose offsets do not agree modulo the block, though extents clone here."""
    disk_bytes: int
    """New disk, about."""
    free_bytes: int
    memory_bytes: int
    """Upper bound of processes and dirty pages while it runs."""
    plan_sha256: str
    seconds: float
    """That planning took."""
    peak_rss_bytes: int
    """Of the planning child."""


def forecast(source: Path, destination: Path, options: ConvertOptions | None = None) -> Forecast:
    """Plan a conversion of `source` into `destination` and throw the plan away.

    Raises:
        as `ckptd.convert.engine.supervisor.convert`, except what happens while bytes are moved.
    """
    chosen = options or ConvertOptions()
    started = time.monotonic()
    folder = list_source(source)
    parent = os.path.dirname(check_destination(folder, destination))
    clones = _would_clone(folder, parent)
    numpy_for(chosen)
    seen = planned(folder, origin_of(folder, chosen), chosen, started, clones=clones)
    return replace(seen, source=source, free_bytes=_free(parent))


def planned(
    folder: SourceFolder, origin: Origin, options: ConvertOptions, started: float, *, clones: bool = False
) -> Forecast:
    """Return the forecast of the planning child, without free space; `started` is of the monotonic clock.

    Raises:
        RefusedError, DamagedError, TornArchiveError: the source has no such form, or is damaged.
    """
    said = _plan(folder, origin, options, clones=clones)
    nbytes, cloned = said["bytes"], said["clonable"] if clones else 0
    return Forecast(
        source=folder.path,
        layout=said["layout"],
        zero_stage=said["stage"],
        ranks=said["dp"],
        step=said["step"],
        parameters=said["parameters"],
        files=said["files"],
        bytes=nbytes,
        clones=clones,
        bytes_cloned=cloned,
        bytes_copied=nbytes - cloned,
        bytes_misplaced=said["misplaced"] if clones else 0,
        notes=tuple(said["notes"]),
        disk_bytes=nbytes - cloned + BLOCK_BYTES * said["files"],
        free_bytes=0,
        memory_bytes=max(options.memory_budget_bytes, said["peak_rss_bytes"]),
        plan_sha256=said["sha256"],
        seconds=time.monotonic() - started,
        peak_rss_bytes=said["peak_rss_bytes"],
    )


def _plan(folder: SourceFolder, origin: Origin, options: ConvertOptions, *, clones: bool) -> dict[str, Any]:
    """Return the planning child's last words about a plan that it kept to itself."""
    request = plan_request(folder, origin, options, block=clones, dry=True)
    child = children.start("planner_child", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    watched = watch(
        child,
        json.dumps(request).encode(),
        on_line=None,
        should_stop=None,
        should_pause=None,
        timeout_seconds=PLAN_SECONDS,
    )
    if watched.status != 0:
        raise failure(watched, "planning the conversion")
    return watched.said


def _would_clone(folder: SourceFolder, parent: str) -> bool:
    """Try one block; False as well where no file may be made."""
    with contextlib.suppress(OSError, CkptdError), files.opened_dir(folder.path) as source_fd:
        fd = os.open(parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            for name, _ in folder.shards:
                with files.reading(source_fd, name) as source:
                    if os.fstat(source).st_size >= BLOCK_BYTES:
                        return extents.clone_range(source, 0, fd, 0, BLOCK_BYTES)
        finally:
            os.close(fd)
    return False


def _free(parent: str) -> int:
    with files.opened_dir(parent) as fd:
        return extents.free_bytes(fd)
