"""Decide how seldom an idle job is scanned: nothing happens on most nodes most of the time (P11).

A job is *at rest* when its last plan left nothing to do and nothing is under way. After a while of that, and
where file events would tell of news, even its folders are looked through less often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.daemon.uploads.session import RemoteSession

RESCAN_SECONDS = 10.0
REST_SECONDS = 60.0
"""Between looks at the folders of a job that has been at rest for `REST_AFTER_SECONDS`."""
REST_AFTER_SECONDS = 300.0
FULL_TURN_SECONDS = 120.0
"""A job at rest, in which nothing changed, is planned for so seldom."""


class IdlePolicy:
    """One job's; all times are monotonic seconds of the deciding thread's turns."""

    def __init__(self) -> None:
        self.is_now = False
        """The last plan left nothing to do and nothing is under way."""
        self.scanned_at_seconds = 0.0
        self.stood_at_seconds = 0.0
        """Time at which save_dir was last seen to be the directory that is open."""
        self._busy_at_seconds = 0.0
        self._planned_at_seconds = 0.0
        self._are_ready: tuple[bool, ...] = ()

    def note_scan(self, now_seconds: float) -> None:
        """Record when the folders were looked through."""
        self.scanned_at_seconds = now_seconds

    def note_look(self, now_seconds: float) -> None:
        """Record when save_dir was seen to be the directory that is open."""
        self.stood_at_seconds = now_seconds

    def set_idle(self, *, is_idle: bool) -> None:
        """Record whether the last plan left anything to do."""
        self.is_now = is_idle

    @property
    def is_long(self) -> bool:
        """Tell whether nothing has happened for a while."""
        return self.is_now and self.scanned_at_seconds - self._busy_at_seconds > REST_AFTER_SECONDS

    def rescan_seconds(self, *, hears_all: bool) -> float:
        """Between looks at the folders; `hears_all`: file events tell of each new one."""
        return REST_SECONDS if self.is_long and hears_all else RESCAN_SECONDS

    def sees_new(self, sessions: Iterable[RemoteSession]) -> bool:
        """Tell whether a remote has come back, went away, or its backoff has passed since the last look."""
        before, self._are_ready = self._are_ready, tuple(session.is_ready for session in sessions)
        return before != self._are_ready

    def may_skip(self, now_seconds: float, *, is_changed: bool) -> bool:
        """Tell whether this turn needs no plan; when it does, it counts as planned."""
        if is_changed or not self.is_now:
            self._busy_at_seconds = now_seconds
        elif now_seconds - self._planned_at_seconds < FULL_TURN_SECONDS:
            return True
        self._planned_at_seconds = now_seconds
        return False
