"""The processes of one remote: its child, and beside it one that makes what it sends (docs/adr/0093).

To whoever orders they are one: order ids are shared, pace and limits hold for both. The second is started by
an order that makes a form and ended with it, so that the memory of a conversion is held for its time alone.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from ckptd import errors
from ckptd.remote.client import RemoteClient
from ckptd.remote.messages import ShipOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.remote import messages as m

MAKER = "ckptd.recover.making_child"


class Processes:
    """As `RemoteClient`; every method is called in the deciding thread."""

    def __init__(self, settings: m.RemoteSettings, on_answer: Callable[[int, m.Answer], None]) -> None:
        self._on_answer = on_answer
        self._ids = count(1)
        self._child = RemoteClient(settings, on_answer, ids=self._ids)
        self._maker: RemoteClient | None = None
        self._pace: tuple[float, int | None] = (1.0, settings.bytes_per_second)

    @property
    def _all(self) -> tuple[RemoteClient, ...]:
        return (self._child,) if self._maker is None else (self._child, self._maker)

    @property
    def pid(self) -> int | None:
        """Of the lasting child; None when there is none."""
        return self._child.pid

    def submit(self, order: m.Order, settings: m.RemoteSettings) -> int:
        """Queue an order; `settings`: the remote as it is known by now, for a process that is started."""
        if not (isinstance(order, ShipOrder) and order.making is not None):
            return self._child.submit(order)
        self._end_maker("another form is made")
        settings = settings.model_copy(update={"may_initialise": False})
        # its death says nothing of the remote, and holds up no upload of what lies here
        self._maker = RemoteClient(
            settings, self._on_answer, module=MAKER, ids=self._ids, ended_as="BehindError"
        )
        self._maker.pace(*self._pace)
        return self._maker.submit(order)

    def ended(self) -> None:
        """An order has its last answer: whoever made a form for it is not needed any more."""
        if self._maker is not None and not self._maker.open_orders:
            self._end_maker("it is done")

    def pace(self, fraction: float, bytes_per_second: int | None) -> None:
        """See `RemoteClient.pace`."""
        self._pace = (fraction, bytes_per_second)
        for client in self._all:
            client.pace(fraction, bytes_per_second)

    def cancel(self, order_id: int) -> None:
        """See `RemoteClient.cancel`."""
        for client in self._all:
            client.cancel(order_id)

    def idle_seconds(self, order_id: int) -> float:
        """See `RemoteClient.idle_seconds`."""
        return max(client.idle_seconds(order_id) for client in self._all)

    def silent_seconds(self, but: int | None) -> float:
        """See `RemoteClient.silent_seconds`."""
        return max(client.silent_seconds(but) for client in self._all)

    def abandon(self, reason: str) -> None:
        """Kill what hangs, and fail every order."""
        self._end_maker(reason)
        self._child.abandon(reason)

    def close(self) -> None:
        """End both; open orders get no answer any more."""
        for client in self._all:
            client.close()

    def _end_maker(self, reason: str) -> None:
        maker, self._maker = self._maker, None
        if maker is not None:
            maker.abandon(reason)


def error_of(failed: m.Failed) -> errors.CkptdError:
    """The error of the tree that a child reported by class name."""
    kind = getattr(errors, failed.error, errors.RemoteError)
    if not (isinstance(kind, type) and issubclass(kind, errors.CkptdError)):
        kind = errors.RemoteError
    return kind(failed.message, hint=failed.hint)
