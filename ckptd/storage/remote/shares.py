"""Divide the files of a save among nodes, and lend a shared save_dir to one host (docs/adr/0110).

What each uploads, and who holds the lease, stands in rows of numbered documents (runs.py). Only the store's
clock decides which host is alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.heartbeat import SeenNode
from ckptd.core.model.records import ZERO
from ckptd.core.policy.leases import (
    LEASE,
    LeaseSeen,
    LeaseTerm,
    Shares,
    attempts_folder,
    judge_lease,
    living,
    next_members,
    number_of,
    share_of,
    shares_folder,
)
from ckptd.errors import RefusedError
from ckptd.storage.remote.documents import stem_of
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.runs import append_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptd.core.model.generation import KnownManifest
    from ckptd.core.model.manifest import ManifestFile
    from ckptd.storage.remote.messages import UploadFile, UploadRequest
    from ckptd.storage.stores.base import Store

# --- replicas: files that several nodes have, uploaded once ----------------------------------------------
# Under ZeRO-1/2 every node has the same `mp_rank_*_model_states.pt`. The holder of data-parallel rank 0
# uploads them at once. The others leave them to it for a while after their own shards are verified, and for
# good once a manifest of the generation lists them with the same tensors: pickles of replicas may differ,
# their storages do not (docs/design.md §5).


def tensors(file: UploadFile | ManifestFile) -> tuple[str, str]:
    """Return what identifies a replica of a file: its path, and the fingerprint of its storages."""
    return file.path, file.tensor_fingerprint or file.fingerprint


def tensors_of(manifests: Iterable[KnownManifest]) -> frozenset[tuple[str, str]]:
    """Return what identifies replicas (see `tensors`) for every file that the manifests list."""
    return frozenset(tensors(file) for known in manifests for file in known.manifest.files)


def leave_to_owner(order: UploadRequest, listed: Callable[[], Iterable[KnownManifest]]) -> UploadRequest:
    """Return the order without the replicas that another node listed, or that are still left to it.

    `listed` reads the generation's manifests; it is asked only by who would step in.
    """
    if not any(file.is_replica for file in order.files):
        return order
    others = listed() if order.steps_in else ()
    held = tensors_of(known for known in others if known.manifest.node_id != order.manifest.node_id)
    kept = tuple(
        file for file in order.files if not file.is_replica or (order.steps_in and tensors(file) not in held)
    )
    if len(kept) == len(order.files):
        return order
    left = tuple(sorted(tensors(file) for file in order.files if file not in kept))
    manifest = order.manifest.model_copy(update={"replicas": left})
    return order.model_copy(update={"files": kept, "manifest": manifest})


def _timed(store: Store, others: Iterable[SeenNode]) -> tuple[SeenNode, ...]:
    found = tuple(others)
    if any(not seen.is_store_time for seen in found):
        msg = f"{store.url} keeps no times: which hosts of a shared directory live cannot be told there"
        raise RefusedError(msg, hint="shared_fs needs a directory, S3 or SFTP remote")
    return found


# --- shares of a save ------------------------------------------------------------------------------------


def take_share(
    store: Store, order: UploadRequest, listed: Callable[[], Sequence[KnownManifest]]
) -> UploadRequest:
    """Return the order with this node's share of the files alone; the others are left to theirs, by
    fingerprint.

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

    shares = append_row(store, shares_folder(tag, generation, form), Shares, wanted)
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


def lacking(whole: UploadRequest, members: Iterable[KnownManifest]) -> tuple[str, ...]:
    """Return the files of a shared folder that no manifest lists yet: nothing is committed before each has
    its place.
    """
    if whole.takeover_seconds is None or whole.manifest.form != ZERO:
        return ()
    held = tensors_of(members)
    return tuple(f.path for f in whole.files if f.identity is not None and tensors(f) not in held)


def forget_rows(store: Store, where: tuple[str, int, str]) -> None:
    """Delete the shares and attempts of a retired generation: no node divides or makes it any more."""
    for info in list(store.list(shares_folder(*where) if where[2] == ZERO else attempts_folder(*where))):
        store.delete(info.key)


# --- the lease on a shared save_dir ----------------------------------------------------------------------


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

    term = append_row(store, LEASE, LeaseTerm, wanted)
    is_ours = term.node_id == node_id
    if is_ours:
        for info in list(store.list(LEASE)):
            if 0 < number_of(LEASE, info.key) < term.number:
                store.delete(info.key)
    return LeaseSeen(epoch=term.number, node=term.node, is_ours=is_ours)
