"""Read what a person asks of a running job beside its configuration: a pause, a drain, a removal, a what-if
(docs/adr/0108, docs/adr/0199).

Each request is a file in the state directory, written by the command and only read here: it survives a
restart, and a daemon that is just starting finds it. SIGUSR1 makes the daemon read the files at once.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from ckptd.base import files
from ckptd.base.owned_dirs import opened_ours
from ckptd.core.policy.retention import RetentionKeys
from ckptd.errors import CkptdError, RefusedError
from ckptd.observe.status import PauseStatus, PlanStatus, rfc3339

if TYPE_CHECKING:
    from pathlib import Path


log = logging.getLogger("ckptd.control")

FOLDER = "control"
PAUSE, DRAIN, REMOVE, PLAN = "pause.json", "drain.json", "remove.json", "plan.json"
_LIMIT_BYTES = 64 << 10
LONGEST_ASKED_SECONDS = 7 * 86_400.0
"""Limit of a drain that a person asks for: meanwhile nothing is converted or deleted."""
SHORTEST_DRAIN_SECONDS, LONGEST_DRAIN_SECONDS = 30.0, 900.0
"""Limits of a drain before the node's end: clocks differ, and while it drains all else rests."""


class PauseFile(BaseModel):
    """`pause.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    is_paused: bool
    by: str = ""
    at_unix_seconds: FiniteFloat = 0.0


class DrainFile(BaseModel):
    """`drain.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    asked_at_unix_seconds: FiniteFloat
    seconds: float = Field(ge=0, le=LONGEST_ASKED_SECONDS)


class RemovalFile(BaseModel):
    """`remove.json`: the checkpoints that `ckptd rm` names; without tags it takes an earlier one back."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    asked_at_unix_seconds: FiniteFloat
    seconds: FiniteFloat
    """It ends then: what could not be deleted until then stays."""
    tags: tuple[str, ...] = ()
    is_here: bool = False
    remotes: tuple[str, ...] = ()
    is_remote_named: bool = False
    agreed: tuple[str, ...] | None = None
    """Digests of the COMMITs that the person saw; None: nothing is deleted, only asked what would be."""
    by: str = ""


class PlanFile(BaseModel):
    """`plan.json`: what would these retention keys delete and keep? Nothing is done."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    asked_at_unix_seconds: FiniteFloat
    seconds: FiniteFloat
    """The answer is published so long."""
    keys: RetentionKeys
    saves: int = Field(ge=0, le=100)


def write_control(state_dir: Path, name: str, document: BaseModel) -> None:
    """Put a request into a state directory, durable when it returns.

    Raises:
        OSError: as the kernel says.
    """
    with opened_ours(state_dir) as state_fd:
        os.close(files.open_dir_beneath(state_fd, FOLDER, create_mode=0o777, is_durable=True))
        with files.opened_dir(FOLDER, state_fd) as fd:
            files.write_atomic(fd, name, document.model_dump_json().encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """Record a drain that a person asked for, or that ends with the node."""

    asked_at_unix: float
    deadline_unix: float
    deadline_seconds: float
    """Monotonic, as is the next: a clock that jumps moves no deadline."""
    begun_seconds: float
    """Time at which this daemon began it, or begins it."""


def drain_before_end(deadline_unix: float) -> DrainRequest:
    """Return the drain before this node's end: the last minutes, and never less than the shortest."""
    now_unix, now = time.time(), time.monotonic()
    left = max(deadline_unix - now_unix, SHORTEST_DRAIN_SECONDS)
    wait = max(0.0, left - LONGEST_DRAIN_SECONDS)
    return DrainRequest(
        asked_at_unix=now_unix + wait,
        deadline_unix=now_unix + left,
        deadline_seconds=now + left,
        begun_seconds=now + wait,
    )


class Control:
    """One job's; every method is called in the deciding thread."""

    def __init__(self, *, only_removes: bool = False) -> None:
        self.pause: PauseFile | None = None
        self._asked_drain: DrainRequest | None = None
        self.notice_drain: DrainRequest | None = None
        """The drain before this node's end, as long as a cloud's notice holds."""
        self._was_draining = False
        self._removal: RemovalFile | None = None
        self._removal_ends_seconds = 0.0
        self._plan: PlanFile | None = None
        self._plan_ends_seconds = 0.0
        self.plan_begun: PlanFile | None = None
        """The what-if that a worker was given last."""
        self.plan_answer: PlanStatus | None = None
        """The answer to the what-if that was asked last; None: not given yet."""
        self.only_removes = only_removes
        """Nothing but a person's removal is done: `ckptd rm` where no daemon runs."""
        self._read: dict[str, tuple[int, int]] = {}
        self._unread: dict[str, tuple[int, int]] = {}

    # --- what was asked --------------------------------------------------------------------------------

    def refresh(self, state_dir: Path) -> bool:
        """Read again what was written since; whether anything is new."""
        news, folder = False, str(state_dir / FOLDER)
        for name in (PAUSE, DRAIN, REMOVE, PLAN):
            try:
                status = os.stat(f"{folder}/{name}")
            except (FileNotFoundError, NotADirectoryError):
                self._unread.pop(name, None)
                continue
            except OSError as error:
                self._say_once(name, (0, 0), error)
                continue
            known = (status.st_mtime_ns, status.st_ino)
            if self._read.get(name) == known:
                continue
            try:
                with opened_ours(state_dir / FOLDER) as fd:
                    data = files.read_beneath(fd, name, limit_bytes=_LIMIT_BYTES)
                self._take(name, data)
            except (RefusedError, ValidationError) as error:
                self._say_once(name, known, error)
            except (CkptdError, OSError) as error:
                # not marked as read: it is asked for until it could be read
                self._say_once(name, known, error)
                continue
            self._read[name] = known
            news = True
        was_draining, self._was_draining = self._was_draining, self.is_draining
        return news or self.is_draining != was_draining

    def _take(self, name: str, data: bytes) -> None:
        """Obey what was read.

        Raises:
            ValidationError: no ckptd wrote it; it asks for nothing.
        """
        if name == PAUSE:
            said = PauseFile.model_validate_json(data)
            self.pause = said if said.is_paused else None
        elif name == REMOVE:
            removal = RemovalFile.model_validate_json(data)
            passed = max(0.0, time.time() - removal.asked_at_unix_seconds)
            self._removal = removal if removal.tags else None
            self._removal_ends_seconds = time.monotonic() + removal.seconds - passed
        elif name == PLAN:
            what_if = PlanFile.model_validate_json(data)
            passed = max(0.0, time.time() - what_if.asked_at_unix_seconds)
            self._plan, self.plan_answer = what_if, None
            self._plan_ends_seconds = time.monotonic() + what_if.seconds - passed
        else:
            asked = DrainFile.model_validate_json(data)
            passed = max(0.0, time.time() - asked.asked_at_unix_seconds)
            if passed < asked.seconds or not self.is_draining:
                self.begin_drain(asked.seconds, passed_seconds=passed)

    def _say_once(self, name: str, version: tuple[int, int], error: Exception) -> None:
        """Log why a request was not obeyed, once for each file that was written."""
        if self._unread.get(name) != version:
            self._unread[name] = version
            log.warning("the request in %s/%s cannot be read: %s", FOLDER, name, error)

    def begin_drain(self, seconds: float, *, passed_seconds: float = 0.0) -> None:
        """Begin a drain now, or as if `passed_seconds` ago."""
        asked_at, now = time.time() - passed_seconds, time.monotonic()
        self._asked_drain = DrainRequest(
            asked_at_unix=asked_at,
            deadline_unix=asked_at + seconds,
            deadline_seconds=now + seconds - passed_seconds,
            begun_seconds=now,
        )

    @property
    def drain(self) -> DrainRequest | None:
        """Return the drain that lasts, else the one that ended last.

        Of two that last the earlier deadline holds, and the person's is told: they know the answer by when
        they asked.
        """
        now = time.monotonic()
        both = (self._asked_drain, self.notice_drain)
        begun = [one for one in both if one is not None and one.begun_seconds <= now]
        lasting = [one for one in begun if now < one.deadline_seconds]
        if not lasting:
            return max(begun, key=lambda one: one.deadline_seconds, default=None)
        first = min(lasting, key=lambda one: one.deadline_seconds)
        return replace(lasting[0], deadline_unix=first.deadline_unix, deadline_seconds=first.deadline_seconds)

    @property
    def is_draining(self) -> bool:
        """Tell whether a drain lasts: until its deadline, even when all is done, since later saves belong to
        it.
        """
        drain = self.drain
        return drain is not None and time.monotonic() < drain.deadline_seconds

    @property
    def is_resting(self) -> bool:
        """Conversions and the slow reading stand still."""
        return self.is_draining or self.pause is not None

    @property
    def removal(self) -> RemovalFile | None:
        """Return the checkpoints that a person asked to delete; None: nothing, or its time is over."""
        return self._removal if time.monotonic() < self._removal_ends_seconds else None

    @property
    def plan(self) -> PlanFile | None:
        """Return the what-if that was asked; None: none, or its time is over."""
        return self._plan if time.monotonic() < self._plan_ends_seconds else None

    @property
    def may_act(self) -> bool:
        """Tell whether plans are carried out: `ckptd plan` where no daemon runs only looks."""
        return not self.only_removes or self.removal is not None

    @property
    def awaits_answer(self) -> bool:
        """Tell whether a person waits for the answer to a removal or a what-if."""
        return self.removal is not None or (self.plan is not None and self.plan_answer is None)

    @property
    def seconds_to_next(self) -> float:
        """Drains and removals are planned anew each second; what could not be read is tried again."""
        is_unread = any(self._read.get(name) != version for name, version in self._unread.items())
        is_asked = self.is_draining or self.awaits_answer
        return 1.0 if is_asked or is_unread else 3600.0

    def pause_status(self) -> PauseStatus | None:
        """Return what status.json says of the pause."""
        if self.pause is None:
            return None
        return PauseStatus(since=rfc3339(self.pause.at_unix_seconds), by=self.pause.by)
