"""Run the process of one remote, within the slots that the memory budget has room for.

One process does everything for a remote, also making the forms that it uploads: two of them would each hold
Python, the messages and the S3 library. What making a form takes is loaded with the first order that makes
one, and the process is ended after it (docs/adr/0113). Where `memory_budget` has no room for a process
of every remote, orders wait for a slot (docs/adr/0113).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from ckptd.storage.child.client import RemoteClient
from ckptd.storage.remote.messages import Planned, UploadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage.remote import messages as m


# --- slots for children ----------------------------------------------------------------------------------
# As many children live at once as `memory_budget` has room for (docs/adr/0113). Where there is room for all,
# each lasts. Where there is not, one that has nothing to do gives its slot to the next in the queue, whose
# orders wait until then. Everything here is called in the deciding thread.


class SlotUser(Protocol):
    """Whoever has a child."""

    def make_room(self) -> bool:
        """End the child if it has nothing to do; whether it is gone."""

    def begin(self) -> None:
        """Begin: this user has been given a slot."""


class SlotPool:
    """First come, first served; `count` may change at any time, and nobody is sent away from an order."""

    def __init__(self, count: Callable[[], int] = lambda: sys.maxsize) -> None:
        self._count = count
        self._here: list[SlotUser] = []
        self._waiting: list[SlotUser] = []

    @property
    def is_crowded(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def take(self, user: SlotUser) -> bool:
        """Tell whether `user` has a slot; else it waits, and `begin` is called when it has one."""
        if user not in self._here and user not in self._waiting:
            self._waiting.append(user)
            self._admit(but=user)
        return user in self._here

    def leave(self, user: SlotUser) -> None:
        """Release the user's slot, or its place in the queue."""
        self._here = [one for one in self._here if one is not user]
        self._waiting = [one for one in self._waiting if one is not user]

    def settle(self) -> None:
        """Release slots whose users have nothing to do, and begin those that wait; called after all turns."""
        self._admit()

    def _admit(self, but: SlotUser | None = None) -> None:
        count = self._count()
        self._make_room(count)
        while self._waiting:
            self._make_room(count - 1)
            if len(self._here) >= count:
                return
            user = self._waiting.pop(0)
            self._here.append(user)
            if user is not but:
                user.begin()

    def _make_room(self, most: int) -> None:
        """Release the slot that was taken last: those before it stay, instead of all being started again in
        turn.
        """
        for one in reversed(self._here.copy()):
            if len(self._here) <= most:
                return
            if one.make_room():
                self._here.remove(one)


# --- a remote's process ----------------------------------------------------------------------------------

MAKING = "ckptd.conversion.remote.derive"


class RemoteProcess:
    """Run a `RemoteClient` within a slot; every method is called in the deciding thread."""

    def __init__(
        self,
        settings: m.RemoteSettings,
        on_answer: Callable[[int, m.Answer], None],
        slots: SlotPool | None = None,
    ) -> None:
        self._slots = slots or SlotPool()
        self._has_made = False
        self._held: dict[int, m.Request] = {}
        """Orders that wait for a slot; the child has none of them."""
        self._cancelled: set[int] = set()

        def heard(order_id: int, answer: m.Answer) -> None:
            self._has_made |= isinstance(answer, Planned)
            on_answer(order_id, answer)

        self._child = RemoteClient(settings, heard, making=MAKING)

    @property
    def pid(self) -> int | None:
        """Return the process id; None when there is none."""
        return self._child.pid

    def submit(self, order: m.Request) -> int:
        """Queue an order."""
        # one that may end with "another node makes it" counts once it is planned
        self._has_made |= (
            isinstance(order, UploadRequest) and order.making is not None and not order.making.zero
        )
        order_id = self._child.new_id()
        self._held[order_id] = order
        if self._slots.take(self):
            self.begin()
        return order_id

    def begin(self) -> None:
        """Submit what waited, now that there is a slot."""
        for order_id, order in list(self._held.items()):
            self._child.submit(order, order_id)
            del self._held[order_id]  # one that no child could be started for is held until the next
        for order_id in self._cancelled:
            self._child.cancel(order_id)
        self._cancelled.clear()

    def make_room(self) -> bool:
        """End the child if it has nothing to do; whether there is none."""
        is_gone = self._child.end_idle()
        self._has_made &= not is_gone
        return is_gone

    def ended(self) -> None:
        """Note that an order has its last answer: the memory of a form that was made is given back."""
        if self._has_made:
            self.make_room()

    def pace(self, fraction: float, bytes_per_second: int | None) -> None:
        """See `RemoteClient.pace`."""
        self._child.pace(fraction, bytes_per_second)

    def cancel(self, order_id: int) -> None:
        """See `RemoteClient.cancel`; an order that waits is cancelled once its child can say so."""
        if order_id in self._held:
            self._cancelled.add(order_id)
        else:
            self._child.cancel(order_id)

    def idle_seconds(self, order_id: int) -> float:
        """See `RemoteClient.idle_seconds`."""
        return self._child.idle_seconds(order_id)

    def silent_seconds(self, but: int | None) -> float:
        """See `RemoteClient.silent_seconds`."""
        return self._child.silent_seconds(but)

    def abandon(self, reason: str) -> None:
        """Kill what hangs, and fail every order."""
        self._child.abandon(reason)

    def close(self) -> None:
        """End it; open orders get no answer any more."""
        self._held.clear()
        self._slots.leave(self)
        self._child.close()
