"""Elect the node that makes a form of what the remote itself holds, at a numbered attempt of its own.

It only saves work: two nodes that both think it is theirs write into folders of their own, and one COMMIT is
created. What losing attempts left is removed, by the keys of the one that counts, never by a prefix
(docs/adr/0118).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

from ckptd.core.model.generation import objects_of
from ckptd.core.model.layouts import is_in_form
from ckptd.core.model.manifest import folder_name, parse, sha256_of, side_key, stem, to_bytes
from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.core.policy.leases import Attempt, attempt_folder, attempts_folder, judge_lease, numbered
from ckptd.errors import DamagedError, DocumentDamaged, RefusedError, VerifyError
from ckptd.storage.remote.deletion import listed_elsewhere
from ckptd.storage.remote.documents import (
    ManifestCache,
    manifests_of_commit,
    read_commit,
    read_keys,
    read_snapshot,
    stem_of,
)
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.messages import UploadResult
from ckptd.storage.remote.runs import append_row, latest_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.model.manifest import Commit
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.messages import CommitView, DeriveRequest, UploadRequest
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.stores.base import Store


def claim_attempt(attached: AttachedRemote, order: UploadRequest) -> UploadRequest | UploadResult:
    """Claim an attempt for this order: returns the order with the attempt's folder, or the final result.

    It ends before anything is read where the form is committed by whoever it was, refused, retired, or made
    by another node for now.
    """
    making = order.making
    if making is None or making.zero is None:
        return order
    store, ours, where = attached.store, order.manifest, stem_of(order.manifest)
    commit = read_commit(store, where)
    if commit is not None and not commit.disputed:
        return _committed(attached, order, commit)
    if store.get(side_key("retired", stem(*where))) is not None:
        reason = f"generation {where[1]} of {where[0]} was deleted by retention"
        return UploadResult(outcome="conflict", reason=reason)
    takeover_seconds = making.zero.takeover_seconds
    is_taken = folder_in_use(attached, where, attempt_folder(*where, making.below, 1))

    def wanted(found: Attempt | None) -> Attempt | None:
        fresh = Attempt(job_id=ours.job_id, number=0, node=ours.node, node_id=ours.node_id)
        if found is not None and found.refused is not None:
            return fresh if found.damaged and _is_mended(attached, order, found) else None
        of_another = found is not None and found.node != ours.node
        heard = Heartbeats(store).of(found.node) if found is not None and of_another else None
        others = (heard,) if heard is not None else ()
        whose = judge_lease(found, ours.node, ours.node_id, others, takeover_seconds)
        is_void = whose == "ours" and found is not None and found.number == 1 and is_taken
        return fresh if whose == "take" or is_void else None

    attempt = append_row(store, attempts_folder(*where), Attempt, wanted)
    if attempt.refused is not None:
        outcome: Literal["damaged", "refused"] = "damaged" if attempt.damaged else "refused"
        return UploadResult(outcome=outcome, reason=attempt.refused, hint=attempt.hint)
    if attempt.node_id != ours.node_id:
        return UploadResult(outcome="waiting", reason=f"{attempt.node} makes it")
    return _as_attempt(order, making, attempt.number)


def folder_in_use(attached: AttachedRemote, where: Stem, folder: str) -> bool:
    """Whether a ZeRO form lists objects under the names of a universal form that is sent into `folder` (P3).

    Earlier releases sent what a person had put beside a trainer's shards under its own path: ours would go
    over committed objects (docs/internals/completeness.md).
    """
    tag, generation, form = where
    if form != UNIVERSAL or folder != folder_name(tag, generation, ZERO):
        return False
    seen = read_snapshot(attached.store, (tag, generation, ZERO), attached.manifests, node=None)
    keys = (file.key for known in seen.read for file in known.manifest.files)
    return any(key.startswith(f"{folder}/") and is_in_form(key.removeprefix(f"{folder}/")) for key in keys)


def finish_attempt(
    attached: AttachedRemote, order: UploadRequest, run: Callable[[], UploadResult]
) -> UploadResult:
    """Finish an attempt by `run`: with the COMMIT that is there, whosever it is; a failure is recorded for
    all.
    """
    making = order.making
    if making is None or making.zero is None:
        return run()
    looked = shards_look(attached.store, order, ManifestCache())
    try:
        result = run()
    except (VerifyError, DocumentDamaged):
        raise  # what was sent, or what `_ckptd/` says now; not what it is made of
    except DamagedError as error:
        result = UploadResult(outcome="damaged", reason=error.message, hint=error.hint)
        _tell(attached, order, result, looked)
        return result
    where = stem_of(order.manifest)
    if result.outcome == "refused":
        _tell(attached, order, result)
    commit = read_commit(attached.store, where)
    if commit is None or commit.disputed:
        return result
    found = _committed(attached, order, commit)
    return result if result.outcome == "committed" else found


def _as_attempt(order: UploadRequest, making: DeriveRequest, number: int) -> UploadRequest:
    """Return the upload request with its keys in the folder of attempt `number`."""
    ours = order.manifest
    folder = attempt_folder(*stem_of(ours), making.below, number)
    files = tuple(
        file.model_copy(update={"key": folder + file.key.removeprefix(ours.folder)}) for file in order.files
    )
    manifest = ours.model_copy(update={"folder": folder, "attempt": number})
    return order.model_copy(update={"manifest": manifest, "files": files})


def _is_mended(attached: AttachedRemote, order: UploadRequest, refusal: Attempt) -> bool:
    """Whether the shards look otherwise than in the newest refusal, and than in all before it.

    Before it: releases that have another digest for the same look publish it in turn with this one, and each
    would take the other's word for a mended shard, without end (docs/internals/commit.md).
    """
    store, folder = attached.store, attempts_folder(*stem_of(order.manifest))
    # of manifests that are known first: many nodes ask this again and again
    if refusal.damaged == shards_look(store, order, attached.manifests):
        return False
    looked = shards_look(store, order, ManifestCache())
    keys = [numbered(folder, number) for number in range(refusal.number - 1, 0, -1)]
    before = (parse(Attempt, data, key).damaged for key in keys if (data := store.get(key)) is not None)
    return looked != refusal.damaged and looked not in before


def shards_look(store: Store, order: UploadRequest, cache: ManifestCache) -> str:
    """Return the digest of names, sizes and times of the objects that the manifests list; other once one is
    mended.

    Of these alone: forms that are made, and files that come late, lie in the same folder.
    """
    where = order.manifest.tag, order.manifest.generation, ZERO
    commit = read_commit(store, where)
    refs = commit.commit.manifests if commit is not None else ()
    read, unreadable = read_keys(store, where, [ref.key for ref in refs], cache)
    found = {info.key: info for info in store.list(f"{commit.commit.folder}/")} if commit is not None else {}
    infos = (found.get(key) or store.stat(key) for key in objects_of(known.manifest for known in read))
    rows = sorted(f"{info.key}\0{info.bytes}\0{info.mtime_ns}\n" for info in infos if info is not None)
    return sha256_of("".join([*rows, *unreadable]).encode())


def _tell(attached: AttachedRemote, order: UploadRequest, result: UploadResult, damaged: str = "") -> None:
    """Record that there is no such form, while the row is ours: the next node then does not try it."""
    ours, folder = order.manifest, attempts_folder(*stem_of(order.manifest))
    number, found = latest_row(attached.store, folder, Attempt)
    if found is None or found.node_id != ours.node_id:
        return
    refusal = Attempt(
        job_id=ours.job_id,
        number=number + 1,
        node=ours.node,
        node_id=ours.node_id,
        refused=result.reason or "there is no such form",
        hint=result.hint,
        damaged=damaged,
    )
    attached.store.put_if_absent(numbered(folder, number + 1), to_bytes(refusal))


def _committed(attached: AttachedRemote, order: UploadRequest, commit: CommitView) -> UploadResult:
    with contextlib.suppress(DamagedError, RefusedError):  # what cannot be read may list some of it: it stays
        _sweep(attached, order, commit.commit)
    return UploadResult(outcome="committed", commit=commit)


def _sweep(attached: AttachedRemote, order: UploadRequest, commit: Commit) -> None:
    """Delete objects of losing attempts that the committed one has too and that no manifest lists.

    Unfinished uploads are given up by their own node when it hears of the COMMIT.
    """
    assert order.making is not None
    store, where, row = attached.store, stem_of(commit), attempts_folder(*stem_of(commit))
    last, _ = latest_row(store, row, Attempt)
    folders = {n: attempt_folder(*where, order.making.below, n) for n in range(1, last + 1)}
    others = {number: folder for number, folder in folders.items() if folder != commit.folder}
    if not others:
        return
    members = (known.manifest for known in manifests_of_commit(store, commit))
    tails = [key.removeprefix(commit.folder) for key in objects_of(members)]
    for number, folder in others.items():
        there = {info.key for info in store.list(f"{folder}/")}
        mine = {folder + tail for tail in tails} & there
        for key in sorted(mine - listed_elsewhere(attached, where, mine) if mine else ()):
            store.delete(key)
        data = store.get(numbered(row, number))
        if data is not None and parse(Attempt, data, row).node_id == order.manifest.node_id:
            for tail in tails:
                store.discard(folder + tail)
