"""When an upload that stands still is cut, and what shows that uploads work again (docs/adr/0090)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.remote.messages import Moving

if TYPE_CHECKING:
    from ckptd.remote.messages import ObjectDone

IDLE_SECONDS = 60.0
"""An upload of which no byte moved for so long is cut and goes on with a new child."""
MOST_PATIENCE = 16
"""Each cut doubles that time, up to so many times, until an upload is finished."""
STILL_SECONDS = 10.0
"""Said for so long an upload of which no byte moved: a link that is slow moves some."""
NEXT_STEP = "it accepts and then hangs: look at the server, the mount, the network in between"


class Standstill:
    """One remote's uploads."""

    def __init__(self) -> None:
        self._patience = 1
        self._durable: dict[str, int] = {}
        self.is_cut = False
        """Nothing more is durable there since an upload was cut."""

    @property
    def limit_seconds(self) -> float:
        """How long nothing may move."""
        return IDLE_SECONDS * self._patience

    def cut(self) -> None:
        """What is slow in large steps (a flush, a driver's block) must not be cut for ever."""
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.is_cut = True

    def ended(self, *, is_done: bool) -> None:
        """An upload or removal ended."""
        self._durable = {}
        if is_done:
            self._patience = 1

    def is_durable(self, event: Moving | ObjectDone) -> bool:
        """More is durable than before: only that is a sign that uploads work, not what a buffer took."""
        if not isinstance(event, Moving):
            return True
        before = self._durable.setdefault(event.key, event.flushed_bytes)
        self._durable[event.key] = max(before, event.flushed_bytes)
        return event.flushed_bytes > before
