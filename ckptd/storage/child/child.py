"""Run a remote's own process: read orders, write answers.

Started as `python -m ckptd.storage.child.child [WINDOW_BYTES [MODULE]]`. It exists because a call on a dead
hard mount cannot be interrupted: then this process hangs and the daemon does not. It ends with its parent or
at end of input; being killed at any instant loses nothing. MODULE makes forms while they are uploaded
(docs/adr/0113): it belongs to a higher layer, so its name is handed in, and it is loaded when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ckptd.base.process import become_child
from ckptd.errors import UsageError
from ckptd.storage.child.service import Service
from ckptd.storage.remote.messages import (
    ANSWER_LINE,
    LONG_ORDERS,
    ORDER_LINE,
    AnswerLine,
    Attach,
    Cancel,
    Failed,
    Pace,
)
from ckptd.storage.remote.transfer import sealed
from ckptd.storage.stores.base import WINDOW_BYTES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ckptd.storage.remote.messages import Answer, RequestLine, UploadRequest
    from ckptd.storage.remote.transfer import OpenOrigin, Origin, TransferControl
    from ckptd.storage.stores.base import Store

_EX_SOFTWARE = 70


class _Output:
    """Answers as whole lines on a descriptor of their own, from any thread."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.set_inheritable(self._fd, False)
        # whatever else prints goes to stderr, never between two answers
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def emit(self, order_id: int, answer: Answer) -> None:
        """Write one line; the end of the reader is the end of this process."""
        data = ANSWER_LINE.dump_json(AnswerLine(id=order_id, answer=answer)) + b"\n"
        with self._lock:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
            except BrokenPipeError:
                os._exit(0)


def main() -> None:
    """Serve until the input ends."""
    become_child()
    threading.excepthook = _end_by_bug
    output = _Output()
    window_bytes = int(sys.argv[1]) if len(sys.argv) > 1 else WINDOW_BYTES
    making = sys.argv[2] if len(sys.argv) > 2 else None
    service = Service(output.emit, window_bytes=window_bytes, open_origin=partial(_opened, making))
    long_orders: queue.SimpleQueue[RequestLine] = queue.SimpleQueue()
    short_orders: queue.SimpleQueue[RequestLine] = queue.SimpleQueue()
    for name, orders in (("long", long_orders), ("short", short_orders)):
        threading.Thread(target=_work, args=(service, orders), name=name, daemon=True).start()
    for raw in sys.stdin.buffer:
        line = _parse(raw, output)
        if line is None:
            continue
        if isinstance(line.order, Pace | Cancel):
            service.steer(line.order)
        elif isinstance(line.order, LONG_ORDERS):
            long_orders.put(line)
        else:
            if isinstance(line.order, Attach):
                service.expect(line.order.settings)
            short_orders.put(line)
    # nothing to clean up: what is half done is resumed or sent again (P7)
    os._exit(0)


def _opened(
    making: str | None, order: UploadRequest, root: int, control: TransferControl, store: Store
) -> AbstractContextManager[Origin]:
    """Open the source of an upload's bytes: files that lie here, or a form that `making` makes."""
    if order.making is None:
        return sealed(order, root, control, store)
    if making is None:
        msg = "this child makes no forms"
        raise UsageError(msg, hint="it is a bug: please report it")
    opened: OpenOrigin = importlib.import_module(making).opened
    return opened(order, root, control, store)


def _work(service: Service, orders: queue.SimpleQueue[RequestLine]) -> None:
    while True:
        line = orders.get()
        service.carry_out(line.id, line.order)


def _parse(raw: bytes, output: _Output) -> RequestLine | None:
    try:
        return ORDER_LINE.validate_json(raw)
    except ValidationError as error:
        sys.stderr.write(f"ckptd.storage.child.child: not an order: {error}\n")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        order_id = int(json.loads(raw)["id"])
        output.emit(order_id, Failed(error="UsageError", message="not an order that this child knows"))
    return None


def _end_by_bug(args: threading.ExceptHookArgs) -> None:
    """End the process on a bug: the daemon sees it, fails the open orders and starts another one."""
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
    sys.stderr.flush()
    os._exit(_EX_SOFTWARE)


if __name__ == "__main__":
    main()
