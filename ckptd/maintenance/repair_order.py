"""Order a repair from a process of its own, and wait for it (the daemon's side of `repair_child`)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.base.process import spawn
from ckptd.conversion.engine.children import died_of, watch
from ckptd.errors import SourceChanged, StorageError
from ckptd.storage.stores.open import clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.config.schema import JobConfig

CHILD = "ckptd.maintenance.repair_child"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOrder:
    """Name what is damaged: files of one tag in one place."""

    job: JobConfig
    state_dir: str
    tag: str
    remote: str | None
    """None: on this node."""
    keys: tuple[str, ...]
    """Keys of objects, or paths below save_dir."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedFile:
    """Report what came of one damaged file."""

    key: str
    source: str | None
    """None: it was found as committed when it was read again."""
    left: str | None
    """Why it is as it was; None: it is right now."""


def repair_apart(order: RepairOrder, should_stop: Callable[[], bool]) -> list[RepairedFile]:
    """Repair what is named from any copy that proves good; what was found right already is not listed.

    Raises:
        SourceChanged: it was stopped; what is durable of it is used by the next.
        StorageError: the process could not repair anything, and why.
    """
    import pickle  # not loaded in a daemon at rest

    child = spawn(
        [sys.executable, "-m", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(*(remote.url for remote in order.job.remotes)),
        cwd="/",
        close_fds=True,
    )
    answers: list[dict[str, Any]] = []
    ended = watch(
        child,
        pickle.dumps(order),
        on_line=answers.append,
        should_stop=should_stop,
        should_pause=None,
        timeout_seconds=None,
    )
    if ended.stopped:
        raise SourceChanged("the repair was stopped", hint="it goes on when all is quiet")
    if not answers or ended.garbled:
        raise StorageError(f"the process that repairs ended by {died_of(ended.status)}")
    if "error" in answers[-1]:
        raise StorageError(str(answers[-1]["error"]))
    return [
        RepairedFile(
            key=str(row["key"]),
            source=row["source"],
            left=str(row["reason"]) if row["outcome"] == "left" else None,
        )
        for row in answers[-1]["rows"]
    ]
