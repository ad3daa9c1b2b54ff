"""Delete one committed form from a remote, in an order that every crash survives.

Pointers → tombstone (so that it is never uploaded again) → COMMIT → objects that no other manifest lists →
its manifests. Keys come from manifests, never from a prefix; repeating the order finishes what was cut short.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ckptd.base.names import ROOT
from ckptd.core.model.generation import fingerprints_of, objects_of, order_of
from ckptd.core.model.manifest import (
    Tombstone,
    commit_key,
    folder_name,
    parse,
    side_key,
    stem,
    supplement_of,
    to_bytes,
)
from ckptd.core.model.runs import of_run, run_of
from ckptd.core.model.save import best_named
from ckptd.errors import BeingRead, CommitConflict, NotFoundError, RefusedError
from ckptd.storage.remote.documents import (
    Stem,
    generations_with_manifests,
    manifest_folder,
    read_commit,
    read_commits,
    read_generation,
    read_keys,
    stem_of,
)
from ckptd.storage.remote.observe import is_pinned, is_pointed_at, point, still_ours
from ckptd.storage.remote.readers import reader_of
from ckptd.storage.remote.shares import forget_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ckptd.core.model.generation import KnownManifest
    from ckptd.storage.remote.messages import CommitView, DeleteCommit
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.stores.base import Store


def delete_commit(attached: AttachedRemote, order: DeleteCommit, check: Callable[[], None]) -> None:
    """Remove one committed form of one generation; `check` may raise between two removals.

    Raises:
        CommitConflict: the COMMIT is another one than the order names.
        RefusedError: it is pinned in the remote, the newest or the best there (P5), a manifest is unreadable,
            or the form that is to be left instead is not whole. BeingRead: a reader's lease says so.
        NotFoundError: no such COMMIT and no tombstone.
    """
    store = attached.store
    still_ours(store, attached.identity)
    where: Stem = (order.tag, order.generation, order.form)
    damaged: list[str] = []
    manifests = read_generation(store, where, damaged)
    if damaged:
        msg = f"nothing of {order.tag} is removed: {damaged[0]}"
        raise RefusedError(msg, hint="what a damaged manifest lists is not known; see `ckptd gc`")
    mine = objects_of(known.manifest for known in manifests)
    needed = listed_elsewhere(attached, where, mine.keys())
    commit = read_commit(store, where)
    _entomb(attached, order, where, commit, manifests)
    point(store, attached.documents)
    store.delete(commit_key(*where))
    for key in _supplements(store, where):
        store.delete(key)
    for object_key in mine:
        if object_key not in needed:
            check()
            store.discard(object_key)
            store.delete(object_key)
    for known in manifests:
        check()
        store.delete(known.key)
    forget_rows(store, where)
    point(store, attached.documents)


def _entomb(
    attached: AttachedRemote,
    order: DeleteCommit,
    where: Stem,
    commit: CommitView | None,
    manifests: tuple[KnownManifest, ...],
) -> None:
    """Create the tombstone, or find the one that an earlier attempt left."""
    store, key = attached.store, side_key("retired", stem(*where))
    data = store.get(key)
    if data is not None:
        stone = parse(Tombstone, data, key)
        if stone.commit_sha256 != order.commit_sha256:
            msg = f"{key} speaks of COMMIT {stone.commit_sha256[:12]}, not {order.commit_sha256[:12]}"
            raise CommitConflict(msg, hint="look again; nothing was removed")
        return
    if commit is None:
        msg = f"{store.url} has no COMMIT of {order.tag}, generation {order.generation}, form {order.form}"
        raise NotFoundError(msg, hint="another node deleted it, or it was never committed")
    if commit.sha256 != order.commit_sha256:
        msg = f"{commit.key} is {commit.sha256[:12]}, not {order.commit_sha256[:12]}"
        raise CommitConflict(msg, hint="look again; nothing was removed")
    _protected(attached, order, commit)
    # who committed the newer one may have died before the pointers followed (P6)
    if is_pointed_at(store, commit.commit.folder):
        point(store, attached.documents, leaving=where)
    members = [known.manifest for known in manifests if _is_listed(known, commit)]
    stone = Tombstone(
        tag=order.tag,
        generation=order.generation,
        form=order.form,
        branch=commit.commit.branch,
        step=commit.commit.step,
        save_seq=commit.commit.save_seq,
        reason=order.reason,
        commit_sha256=commit.sha256,
        run_id=commit.commit.run_id,
        fingerprints=fingerprints_of(members) if order.form == "zero" else (),
    )
    if not store.put_if_absent(key, to_bytes(stone)):
        _entomb(attached, order, where, commit, manifests)
    elif attached.kept is not None:
        attached.kept.keep_side_document(key, to_bytes(stone))


def _protected(attached: AttachedRemote, order: DeleteCommit, commit: CommitView) -> None:
    """Refuse what retention may never touch, judged by the remote alone (P5); which COMMITs there are is
    listed afresh."""
    store = attached.store
    if order.instead is not None:
        _whole(store, order, *order.instead)
    if not commit.disputed and not order.ends_run:
        _spared(attached, order, commit)
    # last, for another node's pin, or a reader, may come while all that is read
    if is_pinned(store, order.tag):
        msg = f"{order.tag} is pinned"
        raise RefusedError(msg, hint=f"`ckptd pin JOB {shlex.quote(order.tag)} --remove` first")
    reader = reader_of(store, order.tag)
    if reader is not None:
        raise BeingRead(f"{reader.what} on {reader.host} reads it since {reader.begun}")


def _spared(attached: AttachedRemote, order: DeleteCommit, commit: CommitView) -> None:
    """Refuse what is the newest or the best there, and what would go for a COMMIT that does not count."""
    store = attached.store
    found = read_commits(store, cache=attached.documents)
    # a COMMIT may be disputed while manifests are read, which takes minutes of many nodes
    lost = next((v for v in found.commits if v.disputed and v.sha256 in order.counted), None)
    if lost is not None:
        msg = f"{order.tag} stays for now: {lost.key}, which was counted as newer or kept, is disputed"
        raise CommitConflict(msg, hint="look again; nothing was removed")
    run_id = run_of(commit.commit, commit.commit.job_id)
    live = of_run((view.commit for view in found.live()), run_id)
    if best_named((order_of(one), one.names_best) for one in live) == order.tag:
        msg = f"{order.tag} is the best checkpoint, as the newest commit of {store.url} has it"
        raise RefusedError(msg, hint="it stays until a later one is the best")
    if order.form == "zero":
        rivals = [other for other in live if other.form == "zero"]
    elif any(other.form == "zero" and stem_of(other)[:2] == stem_of(commit.commit)[:2] for other in live):
        return
    else:  # the last that is left of this save
        rivals = live
    if rivals and max(order_of(other) for other in rivals) <= order_of(commit.commit):
        msg = f"{order.tag} is the newest commit of {store.url}"
        raise RefusedError(msg, hint="the newest one always stays")


def _whole(store: Store, order: DeleteCommit, form: str, sha256: str) -> None:
    """Check that the form which replaces the retired one is committed, each object there with its size.

    Tiered retention retires a form only because another form of the same save stays (docs/adr/0094).

    Raises:
        RefusedError: the other form does not count, or lacks a manifest or an object.
    """
    where: Stem = (order.tag, order.generation, form)
    commit = read_commit(store, where)
    about = f"{order.tag} stays as it is: its {form} form in {store.url}"
    if commit is None or commit.sha256 != sha256 or commit.disputed or _is_entombed(store, where):
        msg = f"{about} does not count"
        raise RefusedError(msg, hint="it was deleted, disputed or replaced; see `ckptd list`")
    listed = [known.manifest for known in read_generation(store, where, []) if _is_listed(known, commit)]
    if len(listed) != len(commit.commit.manifests):
        msg = f"{about} lacks a manifest"
        raise RefusedError(msg, hint="see `ckptd verify`; nothing was removed")
    sizes = {info.key: info.bytes for info in store.list(f"{commit.commit.folder}/")}
    for key, file in objects_of(listed).items():
        found = sizes.get(key) if key in sizes else getattr(store.stat(key), "bytes", None)
        if found != file.bytes:
            msg = f"{about} lacks {key}" if found is None else f"{about}: {key} has {found} bytes"
            raise RefusedError(msg, hint="see `ckptd verify --repair`; nothing was removed")


def _is_entombed(store: Store, where: Stem) -> bool:
    return store.get(side_key("retired", stem(*where))) is not None


def _is_listed(known: KnownManifest, commit: CommitView) -> bool:
    return any(ref.sha256 == known.sha256 for ref in commit.commit.manifests)


def _supplements(store: Store, where: Stem) -> list[str]:
    keys = [(supplement_of(info.key), info.key) for info in store.list(f"{ROOT}/commits/")]
    return [key for late, key in keys if late is not None and late[:3] == where]


def listed_elsewhere(attached: AttachedRemote, where: Stem, mine: Collection[str]) -> set[str]:
    """Return those of our keys that any other manifest lists, committed or not: they stay (H17).

    Keys lie in folders that are named after tag and generation, so only manifests of that generation, and of
    COMMITs that name such a folder, can list them; what is not committed is read as well, as no COMMIT tells
    its format. Where one of ours lies elsewhere, all others are read.
    """
    folders = {key.partition("/")[0] for key in mine}
    others = generations_with_manifests(attached.store) - {where}
    if all(_may_hold(where, folder) for folder in folders):
        commits = read_commits(attached.store, cache=attached.documents).commits
        strange = {stem_of(v.commit) for v in commits if v.commit.folder.partition("/")[0] in folders}
        near = {other for other in others if any(_may_hold(other, folder) for folder in folders)}
        others = near | (others & strange) | (others - {stem_of(v.commit) for v in commits})
    needed: set[str] = set()
    for other in others:
        needed |= _readable(attached, other) & set(mine)
    return needed


def _may_hold(where: Stem, folder: str) -> bool:
    """Whether the first component of a key may be a folder of one of that save's forms."""
    base = folder_name(where[0], where[1], "zero")
    return folder == base or folder.startswith((f"{base}_", f"{base}.a"))


def _readable(attached: AttachedRemote, where: Stem) -> set[str]:
    keys = [info.key for info in attached.store.list(manifest_folder(where))]
    found, damaged = read_keys(attached.store, where, keys, attached.manifests)
    if damaged:
        msg = f"nothing is removed: {damaged[0]}"
        raise RefusedError(msg, hint="it may list objects that are about to be deleted; see `ckptd gc`")
    return set(objects_of(known.manifest for known in found))
