"""Repair what a daemon's scrub found, in a process of its own: `python -m ckptd.maintenance.repair_child`.

It is the repair of `ckptd verify --repair`, asked for a few files by name. It opens remotes as a command
does, so a dead mount or a stop costs this process alone; killed at any instant it leaves what the next one
uses or removes (docs/adr/0213).
"""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base.extents import write_all
from ckptd.base.process import become_child
from ckptd.conversion.engine.sandbox import STOP_SIGNAL
from ckptd.errors import CkptdError
from ckptd.maintenance.repair import Repair, RepairRequest, Unfinished
from ckptd.maintenance.verify import Keys
from ckptd.observe.audit import Audit
from ckptd.recover.select.job import owner_of
from ckptd.recover.select.sources import Where
from ckptd.storage.local.state_dir import own_node_id, own_state

if TYPE_CHECKING:
    from ckptd.maintenance.repair_order import RepairOrder


def main() -> None:
    """Read an order from stdin; write its rows, or the error, as one line of JSON."""
    become_child()
    signal.signal(STOP_SIGNAL, signal.SIG_DFL)
    # the daemon that started us pickled it; no byte of it comes from elsewhere
    order: RepairOrder = pickle.load(sys.stdin.buffer)  # noqa: S301
    try:
        rows = carry_out(order)
    except CkptdError as error:
        answer: dict[str, object] = {"error": error.message}
    except OSError as error:
        answer = {"error": str(error)}
    else:
        answer = {"rows": rows}
    with contextlib.suppress(BrokenPipeError):  # of a daemon that has ended
        write_all(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def carry_out(order: RepairOrder) -> list[dict[str, object]]:
    """Repair, and return a row for each damaged file.

    Raises:
        CkptdError: no remote answers, or another repair is at work.
    """
    job, state_dir = order.job, Path(order.state_dir)
    failures: dict[str, CkptdError] = {}
    node_id = own_node_id(state_dir, job.save_dir)
    where = Where(remotes=job.remotes, owner=owner_of(job, state_dir), job=job, node_id=node_id or "")
    inventories = list(where.read(_say, failures, is_tolerant=True))
    if failures and not inventories:
        raise next(iter(failures.values()))
    unfinished = Unfinished(own_state(state_dir, job.save_dir))
    keys = frozenset(order.keys)
    request = RepairRequest(
        targets=frozenset() if order.remote is None else frozenset({order.remote}),
        here=keys if order.remote is None else False,
        tag=order.tag,
        read=Keys(keys),
        is_daemons=True,
    )
    with unfinished.alone():
        for inventory in inventories:
            unfinished.give_up(inventory.name, inventory.store)
        repair = Repair(
            job,
            inventories,
            request,
            node_id=node_id,
            audit=Audit(state_dir / "audit.jsonl"),
            unfinished=unfinished,
            say=_say,
        )
        repair.run()
    return [asdict(row) for row in repair.rows]


def _say(text: str) -> None:
    sys.stderr.write(f"ckptd: repair: {text}\n")


if __name__ == "__main__":
    main()
