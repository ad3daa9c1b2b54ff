"""Seal a save from listed and inspected files; check whether a folder still holds it (docs/design.md §3)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.core.completeness.judge import Memory
from ckptd.core.model.layouts import TRAINER_STATE, Role, ShardKey, is_in_roots
from ckptd.core.model.metrics import logged_name
from ckptd.core.model.other_layouts import below
from ckptd.core.model.save import Best, SealedFile, SealedSave

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.listing import FolderListing, ListedFile
    from ckptd.core.model.records import SaveRow


def same_files(save: SealedSave, folder: FolderListing) -> bool:
    """Tell whether every sealed file is unchanged (new ones may have appeared) and a part has not grown."""
    now = {f.path: f.identity for f in folder.files}
    if save.is_part and not {f.path for f in folder.shards} <= {f.path for f in save.files}:
        return False
    return save.folder == folder.folder and all(now.get(f.path) == f.identity for f in save.files)


def shards_of(save: SealedSave) -> frozenset[tuple[str, str]]:
    """Return (path, fingerprint) of DeepSpeed's files, without the trainer's and derived forms."""
    return shards_among(save.files, save.roots)


def shards_among(files: Iterable[SealedFile], roots: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """Return (path, fingerprint) of the shards among files that are not sealed yet."""
    return frozenset(
        (f.path, f.fingerprint)
        for f in files
        if f.role not in (Role.SIDE, Role.EXTRA) and is_in_roots(f.path, roots)
    )


def memory_of(row: SaveRow | None, folder: FolderListing, facts: Mapping[str, FileFacts]) -> Memory | None:
    """Identities of the last sealed save of the tag; one that is the same but for ctime, or that was put back
    (adr/0091), counts as kept (H50)."""
    if row is None:
        return None
    here = {f.path: f for f in folder.files}
    shards = {f.path for f in (*folder.shards, *folder.swapped)}
    memory = {}
    beside = {}
    for file in row.save.files:
        current = here.get(file.path)
        if current is None:
            memory[file.path] = file.identity
        elif file.path in shards:
            known = facts.get(file.path)
            is_same = (
                _is_put_back(file, current) and known is not None and known.fingerprint == file.fingerprint
            )
            memory[file.path] = current.identity if is_same else file.identity
        elif _is_put_back(file, current):
            beside[file.path] = current.identity
    return Memory(shards=memory, is_part=row.save.is_part, beside=beside)


def refreshed(save: SealedSave, folder: FolderListing, facts: Mapping[str, FileFacts]) -> SealedSave | None:
    """Return the save with the identities that its files have now, or None if the folder holds another save.

    It is the same save if only ctimes changed, or if files were put back with the same size, mtime and
    fingerprint (`verify --repair`, rsync -t).
    """
    now = {f.path: f for f in folder.own}
    if set(now) != {f.path for f in save.files} or folder.folder != save.folder:
        return None
    for file in save.files:
        is_same = file.identity == now[file.path].identity or _is_put_back(file, now[file.path])
        if not is_same or facts[file.path].fingerprint != file.fingerprint:
            return None
    files = tuple(f.model_copy(update={"identity": now[f.path].identity}) for f in save.files)
    return save.model_copy(update={"files": files})


def put_back(save: SealedSave, folder: FolderListing, paths: Collection[str]) -> SealedSave | None:
    """Return the save with the identities that its files have after a repair of `paths`, below save_dir,
    whose content it compared; None: somebody else wrote there, or a file is still gone.
    """
    now = {f.path: f for f in folder.own}
    if set(now) != {f.path for f in save.files} or folder.folder != save.folder:
        return None
    for file in save.files:
        is_put_back = below(save.tag, file.path) in paths and _is_put_back(file, now[file.path])
        if file.identity != now[file.path].identity and not is_put_back:
            return None
    files = tuple(f.model_copy(update={"identity": now[f.path].identity}) for f in save.files)
    return save.model_copy(update={"files": files})


def sealed_file(
    file: ListedFile, facts: FileFacts, folder: FolderListing, stale: Collection[str] = ()
) -> SealedFile:
    """Seal a file of the checkpoint folder as inspected; without shards the state identifies the save.

    A shard that another layout left (`stale`) stands for no rank: it travels as a file beside the save.
    """
    is_state = folder.other_layout is not None and file in folder.shards
    is_stale = file.path in stale
    return SealedFile(
        path=file.path,
        identity=file.identity,
        fingerprint=facts.fingerprint,
        tensor_fingerprint=facts.tensor_fingerprint,
        role=Role.WEIGHTS if is_state else Role.SIDE if is_stale else facts.role,
        shard=ShardKey() if is_stale else facts.shard,
        mode=file.mode,
    )


def sealed_extra(file: ListedFile) -> SealedFile:
    """Seal a file directly in save_dir, which is uploaded too: read whole then, not sealed by identity."""
    return SealedFile(path=file.path, identity=file.identity, fingerprint="", role=Role.EXTRA, mode=file.mode)


def best_checkpoint_of(facts: Mapping[str, FileFacts]) -> str | None:
    """Return the tag that trainer_state.json calls the best so far."""
    state = facts.get(TRAINER_STATE)
    return state.trainer.best_checkpoint if state and state.trainer else None


def best_of(tag: str, facts: Mapping[str, FileFacts], metric: str | None = None) -> Best | None:
    """Return the `metric` that trainer_state.json logged at this step; without a name, the best so far.

    As for Hugging Face's `metric_for_best_model`, "loss" means "eval_loss" where that was ever logged.
    """
    state = facts.get(TRAINER_STATE)
    if state is None or state.trainer is None:
        return None
    if metric is not None:
        logged = dict(state.trainer.metrics)
        value = logged.get(logged_name(metric), logged.get(metric))
        is_best = state.trainer.best_checkpoint == tag
        return None if value is None else Best(metric=metric, value=value, is_best=is_best)
    if state.trainer.best_metric is None:
        return None
    if state.trainer.best_checkpoint != tag:
        return None
    return Best(metric="best_metric", value=state.trainer.best_metric, is_best=True)


def _is_put_back(file: SealedFile, now: ListedFile) -> bool:
    """Perhaps another inode, and all that a save would change is as it was; the caller compares content."""
    same = {"ctime_ns": now.identity.ctime_ns, "ino": now.identity.ino}
    return replace(file.identity, **same) == now.identity
