"""Let one run after another save into a remote: who may go on there (docs/adr/0185).

Runs are rows of numbered documents, each created only if absent: of two nodes that write the same number one
wins, and both read back who. Shares, leases and attempts are such rows, too (docs/adr/0110).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ckptd.base.names import ROOT
from ckptd.core.model.manifest import Document, parse, to_bytes
from ckptd.core.model.runs import RUNS, Row, RunSeen, judge
from ckptd.core.policy.leases import (
    number_of,
    numbered,
)
from ckptd.errors import RemoteError
from ckptd.storage.remote.documents import now_utc
from ckptd.storage.remote.heartbeats import Heartbeats, server_time_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.core.model.runs import Claim
    from ckptd.storage.remote.documents import DocumentCache
    from ckptd.storage.stores.base import ObjectInfo, Store

# --- rows of numbered documents --------------------------------------------------------------------------


_TRIES = 8
_Row = TypeVar("_Row", bound=Document)


def latest_row(store: Store, folder: str, kind: type[_Row]) -> tuple[int, _Row | None]:
    """Return the newest document of a row; (0, None): there is none."""
    number = max((number_of(folder, info.key) for info in store.list(folder)), default=0)
    data = store.get(numbered(folder, number)) if number else None
    return (number, parse(kind, data, numbered(folder, number))) if data is not None else (number, None)


def append_row(
    store: Store, folder: str, kind: type[_Row], wanted: Callable[[_Row | None], _Row | None]
) -> _Row:
    """Supersede the newest document by `wanted` where that gives one; return the newest, read back."""
    for _ in range(_TRIES):
        number, found = latest_row(store, folder, kind)
        after = wanted(found)
        if after is None:
            if found is not None:
                return found
            continue
        made = after.model_copy(update={"number": number + 1})
        store.put_if_absent(numbered(folder, number + 1), to_bytes(made))
    msg = f"{store.url}: the hosts of this job do not agree under {folder}"
    raise RemoteError(msg, hint="it is tried again; see that no two hosts have one node_name")


# --- runs ------------------------------------------------------------------------------------------------


def read_runs(store: Store, cache: DocumentCache, listed: Iterable[ObjectInfo]) -> tuple[Row, ...]:
    """Return those rows, in order of number.

    Raises:
        DocumentDamaged, RefusedError: one cannot be read; whose turn it is, is not known then.
    """
    found = []
    for info in listed:
        number = number_of(RUNS, info.key)
        read = cache.get(store, info, Row) if number else None
        if read is not None:
            found.append(read[0].model_copy(update={"number": number}))
    return tuple(sorted(found, key=lambda row: row.number))


def claim_run(
    store: Store, claim: Claim, job_id: str, beat: Callable[[str], None] = lambda _run_id: None
) -> RunSeen:
    """Say that a place goes on with a run there, unless another one that lives does.

    Of two that say so at once one creates the row; the other reads it and is judged again. Who adds no row is
    judged again after its heartbeat, so that of two with one rank not both join. `beat` writes the
    place's heartbeat with a run id: before the row, so that whoever reads a row finds that its place lives.

    Raises:
        RemoteError: the places do not come to an end.
    """
    said: str | None = None
    for _ in range(_TRIES):
        number, row = latest_row(store, RUNS, Row)
        row = row.model_copy(update={"number": number}) if row is not None else None
        seen = Heartbeats(store).everyone(server_time_seconds(store)) if row is not None else ()
        is_virgin = row is None and next(iter(store.list(f"{ROOT}/commits/")), None) is None
        decision = judge(claim, row, seen, job_id=job_id, is_virgin=is_virgin)
        run_id = claim.run_id if decision.others else decision.run_id
        if said != run_id and not (decision.others and said is None):
            beat(run_id)
            said = run_id
            if not decision.others and not decision.appends:
                continue  # two that join at once with one rank each find the other's word now
        if decision.others or not decision.appends:
            return RunSeen(run_id=decision.run_id, number=number, others=decision.others)
        made = row_of(claim, job_id, decision.run_id, number + 1)
        data = to_bytes(made)
        key = numbered(RUNS, number + 1)
        if store.put_if_absent(key, data) or store.get(key) == data:
            return RunSeen(run_id=decision.run_id, number=number + 1)
    msg = f"{store.url}: the places that save this job do not agree under {RUNS}"
    raise RemoteError(msg, hint="it is tried again; `ckptd check` says who else writes there")


def row_of(claim: Claim, job_id: str, run_id: str, number: int) -> Row:
    """Return the row that a place appends."""
    now = now_utc()
    said = claim.model_dump(include=set(Row.model_fields) - {"run_id", "number"})
    return Row(**said, job_id=job_id, run_id=run_id, number=number, created_at=now)


def newest_run(store: Store) -> Row | None:
    """Return the newest row; None: no release that knows runs wrote there."""
    number, row = latest_row(store, RUNS, Row)
    return None if row is None else row.model_copy(update={"number": number})
