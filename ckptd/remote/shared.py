"""What hosts over one directory agree on in a remote: shares of a save, and the lease (adr/0110).

Each is a row of numbered documents, created only if absent: of two hosts that write the same number one wins,
and both read back who. No clock but the store's says who lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ckptd.core.afar import attempts_folder
from ckptd.core.manifest import Document, parse, to_bytes
from ckptd.core.shared import (
    LEASE,
    LeaseSeen,
    LeaseTerm,
    Shares,
    judge_lease,
    living,
    next_members,
    number_of,
    numbered,
    share_of,
    shares_folder,
)
from ckptd.core.view import ZERO
from ckptd.errors import RefusedError, RemoteError
from ckptd.remote.documents import stem_of
from ckptd.remote.heartbeats import Heartbeats
from ckptd.remote.replicas import tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptd.core.coverage import KnownManifest
    from ckptd.core.heartbeat import SeenNode
    from ckptd.remote.messages import ShipOrder
    from ckptd.remote.store import Store

_TRIES = 8
_Row = TypeVar("_Row", bound=Document)


def newest_row(store: Store, folder: str, kind: type[_Row]) -> tuple[int, _Row | None]:
    """The newest document of a row; (0, None): there is none."""
    number = max((number_of(folder, info.key) for info in store.list(folder)), default=0)
    data = store.get(numbered(folder, number)) if number else None
    return (number, parse(kind, data, numbered(folder, number))) if data is not None else (number, None)


def agreed(store: Store, folder: str, kind: type[_Row], wanted: Callable[[_Row | None], _Row | None]) -> _Row:
    """The newest document, superseded by `wanted` where that gives one; what is read back counts."""
    for _ in range(_TRIES):
        number, found = newest_row(store, folder, kind)
        after = wanted(found)
        if after is None:
            if found is not None:
                return found
            continue
        made = after.model_copy(update={"number": number + 1})
        store.put_if_absent(numbered(folder, number + 1), to_bytes(made))
    msg = f"{store.url}: the hosts of this job do not agree under {folder}"
    raise RemoteError(msg, hint="it is tried again; see that no two hosts have one node_name")


def _timed(store: Store, others: Iterable[SeenNode]) -> tuple[SeenNode, ...]:
    found = tuple(others)
    if any(not seen.is_store_time for seen in found):
        msg = f"{store.url} keeps no times: which hosts of a shared directory live cannot be told there"
        raise RefusedError(msg, hint="shared_fs needs a directory, S3 or SFTP remote")
    return found


# --- shares ----------------------------------------------------------------------------------------------


def take_share(store: Store, order: ShipOrder, listed: Callable[[], Sequence[KnownManifest]]) -> ShipOrder:
    """The order with this node's share of the files alone; the others are left to theirs, by fingerprint.

    What somebody listed already is nobody's to send, what we listed ourselves stays ours.

    Raises:
        RefusedError: the store cannot tell who lives.
    """
    if order.takeover_seconds is None or order.manifest.form != ZERO:
        return order
    ours, (tag, generation, form) = order.manifest, stem_of(order.manifest)
    seen = _timed(store, Heartbeats(store).others(ours.node, reads_all=True))
    here = living(ours.node, seen, order.takeover_seconds)

    def wanted(found: Shares | None) -> Shares | None:
        members = (
            next_members(found.members, here | {ours.node}) if found is not None else tuple(sorted(here))
        )
        if found is not None and members == found.members:
            return None
        return Shares(job_id=ours.job_id, number=0, members=members, by=ours.node)

    shares = agreed(store, shares_folder(tag, generation, form), Shares, wanted)
    folder = [f.path for f in order.files if f.identity is not None]
    mine = share_of(tag, folder, shares.members, ours.node)
    known = listed() if shares.number > 1 or ours.node not in shares.members else ()
    others = {f.key for k in known if k.manifest.node_id != ours.node_id for f in k.manifest.files}
    own = {f.key for k in known if k.manifest.node_id == ours.node_id for f in k.manifest.files}
    # what lies beside the folder travels with the first file, so that a COMMIT over all files has it too
    has_first = bool(folder) and min(folder) in mine
    kept = tuple(
        f
        for f in order.files
        if f.key in own or (f.key not in others and (f.path in mine if f.identity is not None else has_first))
    )
    left = tuple(sorted(tensors(f) for f in order.files if f not in kept and f.tensor_fingerprint))
    manifest = ours.model_copy(update={"replicas": left})
    return order.model_copy(update={"files": kept, "manifest": manifest})


def lacking(whole: ShipOrder, members: Iterable[KnownManifest]) -> tuple[str, ...]:
    """Files of a shared folder that no manifest lists yet: nothing is committed before each has its place."""
    if whole.takeover_seconds is None or whole.manifest.form != ZERO:
        return ()
    held = tensors_of(members)
    return tuple(f.path for f in whole.files if f.identity is not None and tensors(f) not in held)


def forget_rows(store: Store, where: tuple[str, int, str]) -> None:
    """Of a generation that was retired: nobody divides or makes it any more."""
    for info in list(store.list(shares_folder(*where) if where[2] == ZERO else attempts_folder(*where))):
        store.delete(info.key)


# --- the lease -------------------------------------------------------------------------------------------


def hold_lease(
    store: Store, job_id: str, node: str, node_id: str, others: Iterable[SeenNode], takeover_seconds: float
) -> LeaseSeen:
    """Take the lease where nobody holds it, and say who does; `others`: heard of after ours was written.

    Raises:
        RefusedError: the store cannot tell who lives.
    """
    heard = _timed(store, others)

    def wanted(found: LeaseTerm | None) -> LeaseTerm | None:
        if judge_lease(found, node, node_id, heard, takeover_seconds) != "take":
            return None
        return LeaseTerm(job_id=job_id, number=0, node=node, node_id=node_id)

    term = agreed(store, LEASE, LeaseTerm, wanted)
    is_ours = term.node_id == node_id
    if is_ours:
        for info in list(store.list(LEASE)):
            if 0 < number_of(LEASE, info.key) < term.number:
                store.delete(info.key)
    return LeaseSeen(epoch=term.number, node=term.node, is_ours=is_ours)
