"""Build the planner's view of a job from memory, journal mirror and observations; asks no remote and no
disk.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ckptd.base.extents import free_bytes
from ckptd.core.completeness.judge import State
from ckptd.core.completeness.sealing import sealed_extra
from ckptd.core.model.manifest import node_in
from ckptd.core.model.records import ZERO, DerivedState, UploadRecord, UploadState
from ckptd.core.model.resume_marker import read_resume_marker
from ckptd.core.policy.blockers import lacking, late_now
from ckptd.core.policy.planner import plan
from ckptd.core.policy.view import Disk, JobView, RemoteCommit, RemoteView, SaveView, next_save_bytes
from ckptd.daemon.resources.limits import uncollected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.config.schema import JobConfig, RemoteConfig
    from ckptd.core.model.listing import FolderListing, ListedFile
    from ckptd.core.model.records import SaveRow
    from ckptd.core.model.save import SaveWindow, SealedFile
    from ckptd.core.policy.actions import Plan
    from ckptd.core.policy.view import Drain, LeaseStatus, RemovalRequest
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.remote.messages import CommitView

_NEW = UploadRecord(remote="", form=ZERO)
_MOST_PLANNED = 10_000
_PLANNED: dict[str, RemoteCommit] = {}


def unsealed(state: JobState) -> list[tuple[FolderListing, SaveWindow, int]]:
    """Complete checkpoints without a row yet, oldest first: (folder, when it was written, step).

    Nothing is sealed before every remote has answered once, and the disk fills all the same.
    """
    found = []
    for folder in state.folders.listing.folders if state.folders.listing is not None else ():
        verdict = state.folders.verdicts.get(folder.tag)
        if verdict is None or verdict.state is not State.COMPLETE or verdict.window is None:
            continue
        if state.saves.of_tag(folder.tag) is None:
            found.append((folder, verdict.window, verdict.step or 0))
    return sorted(found, key=lambda one: one[1].last)


def next_save_of(state: JobState) -> int:
    """Estimate the size of the next save, in bytes, by the last five."""
    sizes = [row.save.total_bytes for row in state.saves.latest_rows()]
    sizes += [folder.total_bytes for folder, _, _ in unsealed(state)]
    return next_save_bytes(sizes[-5:])


def next_save_files(state: JobState) -> int:
    """Files and folders of the next save: the most of the last five."""
    counts = [len(row.save.files) + 1 for row in state.saves.latest_rows()]
    counts += [len(folder.files) + 1 for folder, _, _ in unsealed(state)]
    return max(counts[-5:], default=0)


def disk_of(config: JobConfig, state: JobState, save_dir_fd: int) -> Disk:
    """Free bytes of save_dir's file system and P13's line."""
    total = os.fstatvfs(save_dir_fd)
    min_free = config.local.min_free.of(total.f_blocks * total.f_frsize)
    return Disk(
        free_bytes=free_bytes(save_dir_fd),
        reserve_bytes=next_save_of(state) + min_free,
        min_free_bytes=min_free,
        can_clone=state.holds.can_clone,
        free_files=total.f_favail if total.f_files > 0 else None,
        reserve_files=next_save_files(state),
    )


def build_view(
    config: JobConfig,
    state: JobState,
    sessions: Mapping[str, RemoteSession],
    save_dir_fd: int,
    *,
    pins: frozenset[str],
    damaged: frozenset[tuple[str, str, str]],
    may_delete: bool,
    is_paused: bool,
    is_spread: bool,
    drain: Drain | None,
    removal: RemovalRequest | None,
    lease: LeaseStatus | None,
) -> JobView:
    """The view of this turn."""
    listing, deletions = state.folders.listing, state.deletions
    assert listing is not None
    deletions.forget_past_hour()
    if state.plan is not None:
        deletions.note_verdicts(state.plan.remote_verdicts)
    folders = {f.tag: f for f in listing.folders}
    return JobView(
        saves=_saves(config, state, folders, pins),
        remotes=_remotes(config, state, sessions),
        local_forms=config.local.forms,
        local_retention=config.local.policy,
        existing=config.existing,
        unuploaded=config.unuploaded,
        metric=config.metric,
        is_higher_better=config.is_higher_better,
        latest=listing.latest,
        latest_universal=listing.latest_universal,
        resumed=read_resume_marker(listing.resumed),
        is_save_in_flight=bool(state.folders.in_flight),
        is_first_scan=state.is_first_scan,
        is_paused=is_paused,
        is_spread=is_spread,
        drain=drain,
        removal=removal,
        lease=lease,
        may_delete=may_delete,
        deletions_left=deletions.local_left(config.local.policy.save_total_limit),
        pinned_tags=pins,
        damaged=damaged,
        config_digest=state.config_digest,
        node=next((session.settings.node for session in sessions.values()), ""),
        due_since_seconds=deletions.due_since_seconds,
        not_to_delete=deletions.blocked_lately(),
        not_to_upload_late=state.uploads.late_failed_lately(),
        not_to_delete_remotely=deletions.refused_lately() | of_untold(state, sessions),
        at_rest=_at_rest(state),
        unsealed_tags=frozenset(tag for tag in folders if state.saves.of_tag(tag) is None),
        disk=disk_of(config, state, save_dir_fd),
        generations=state.uploads.generations,
        confirmations=deletions.confirmations,
        is_converting=state.saves.conversion is not None,
        now_seconds=time.monotonic(),
    )


def _at_rest(state: JobState) -> dict[str, tuple[ListedFile, ...]]:
    """Return the shards that may be uploaded early: of tags of which this node has no save.

    Some file systems take two tags for one.
    """
    written = state.folders.written_shards()
    known = {row.save.tag.casefold() for row in state.saves.rows.values()} if written else set()
    return {
        tag: tuple(rests)
        for tag, (rests, _) in written.items()
        if tag.casefold() not in known and state.folders.verdicts[tag].state is not State.REFUSED
    }


def of_untold(state: JobState, sessions: Mapping[str, RemoteSession]) -> frozenset[tuple[str, str]]:
    """All COMMITs of remotes that a decision is yet to be published to."""
    seen = [(name, sessions[name].observation) for name in state.deletions.undecided if name in sessions]
    return frozenset((name, view.sha256) for name, one in seen if one is not None for view in one.commits)


def _remotes(
    config: JobConfig, state: JobState, sessions: Mapping[str, RemoteSession]
) -> tuple[RemoteView, ...]:
    return tuple(
        _remote(state, remote, sessions[remote.name], _remote_deletions_left(config, state, remote))
        for remote in config.remotes
    )


def _remote_deletions_left(config: JobConfig, state: JobState, remote: RemoteConfig) -> int:
    others = {other.name for other in config.remotes} - {remote.name}
    return state.deletions.remote_left(others, remote.policy.save_total_limit)


def folders_to_watch(state: JobState) -> list[str]:
    """Folders being written, and the newest: a trainer with a constant name saves into it again.

    With the folders in them that hold the shards: watches are not recursive.
    """
    newest = max(
        (r for r in state.saves.rows.values() if r.state == "present"), key=lambda r: r.id, default=None
    )
    tags = state.folders.in_flight | ({newest.save.tag} if newest else frozenset())
    return [
        f"{folder.tag}/{root}".rstrip("/")
        for folder in (state.folders.listing.folders if state.folders.listing else ())
        if folder.tag in tags
        for root in {"", *folder.roots}
    ]


def _saves(
    config: JobConfig, state: JobState, folders: Mapping[str, FolderListing], pins: frozenset[str]
) -> tuple[SaveView, ...]:
    """Return the saves that lie here, are held, or left a derived form."""
    return tuple(
        _save(config, state, row, folders.get(row.save.tag), pins)
        for row in state.saves.rows.values()
        if row.state == "present" or row.held or _has_derived(row)
    )


def _save(
    config: JobConfig, state: JobState, row: SaveRow, folder: FolderListing | None, pins: frozenset[str]
) -> SaveView:
    uploads = state.uploads.of(row.id)
    basis = (row, folder, tuple(uploads.values()), state.saves.busy[row.id] > 0, row.save.tag in pins)
    return state.saves.view(row.id, basis, lambda: _fresh(config, state, row, folder, pins))


def _has_derived(row: SaveRow) -> bool:
    return row.derived.state is DerivedState.READY


def _fresh(
    config: JobConfig, state: JobState, row: SaveRow, folder: FolderListing | None, pins: frozenset[str]
) -> SaveView:
    now = {f.path: f.identity for f in folder.files} if folder else {}
    is_mine = row.state == "present" and folder is not None
    is_intact = (
        is_mine
        and folder is not None
        and folder.folder == row.save.folder
        and all(now.get(f.path) == f.identity for f in row.save.files)
    )
    added: tuple[ListedFile, ...] = folder.added if is_mine and folder is not None else ()
    late: tuple[SealedFile, ...] = late_now(row.save, now) if is_mine else ()
    sealed = {f.path for f in (*row.save.files, *late)} | {f.path for f in added}
    unlisted = [path for path in now if path not in sealed] if is_mine else []
    if is_mine and folder is not None:
        unlisted += folder.irregular
    uploads = state.uploads.of(row.id)
    names = [remote.name for remote in config.remotes if ZERO in remote.forms]
    lacks: dict[str, tuple[SealedFile, ...]] = {
        name: lacking(row.save, uploads.get((name, ZERO)) or _NEW, late) for name in names
    }
    required = [remote.name for remote in config.remotes if remote.required]
    unlisted += [file.path for name in required for file in lacks[name] if file.path in now]
    return SaveView(
        id=row.id,
        save=row.save,
        is_adopted=row.adopted or config.existing == "all",
        was_found_first=row.found_first,
        is_intact=is_intact,
        is_present=is_mine,
        has_unlisted=tuple(dict.fromkeys(unlisted)),
        late=late,
        lacking={name: lacks[name] for name in names if _is_committed(uploads.get((name, ZERO)))},
        added=tuple(sealed_extra(f) for f in added),
        is_held=row.held,
        is_busy=state.saves.busy[row.id] > 0,
        is_pinned=row.save.tag in pins,
        # a folder that is gone, and the look did not call it vanished: whoever deletes it has not said so yet
        is_pruned=row.state == "pruned" or (row.state == "present" and folder is None),
        uploads=uploads,
        universal=row.derived,
        weights=row.weights,
    )


def _is_committed(record: UploadRecord | None) -> bool:
    return record is not None and record.state is UploadState.COMMITTED


def as_planned(view: CommitView) -> RemoteCommit:
    """A COMMIT in the planner's words; it never changes, so what was made of it is kept."""
    known = _PLANNED.get(view.sha256)
    if known is None or known.key != view.key:
        if len(_PLANNED) >= _MOST_PLANNED:
            _PLANNED.clear()
        known = _PLANNED[view.sha256] = _planned(view)
    return known


def _planned(view: CommitView) -> RemoteCommit:
    commit = view.commit
    return RemoteCommit(
        tag=commit.tag,
        generation=commit.generation,
        form=commit.form,
        branch=commit.branch,
        step=commit.step,
        save_seq=commit.save_seq,
        key=view.key,
        sha256=view.sha256,
        bytes=commit.bytes,
        is_model_only=commit.grid.is_model_only,
        committed_at_seconds=commit.committed_at_seconds,
        best=commit.best,
        best_tag=commit.names_best,
        is_self_contained=commit.is_self_contained,
        config_digest=commit.config_digest,
        nodes=frozenset(node_in(ref.key) for ref in commit.manifests),
    )


def _remote(
    state: JobState, config: RemoteConfig, session: RemoteSession, retirements_left: int
) -> RemoteView:
    seen = session.observation
    commits = () if seen is None else tuple(as_planned(v) for v in seen.commits if not v.disputed)
    return RemoteView(
        name=session.name,
        is_required=config.required,
        forms=config.forms,
        is_attached=session.is_ready and not session.others,
        was_heard=session.name in state.deletions.observed,
        is_busy=session.is_transferring or session.seconds_to_transfer > 0 or not session.is_claimed,
        uploading=session.uploading,
        uploading_save_id=next((key[0] for key in state.uploads.progress if key[1] == session.name), None),
        uploading_early=state.uploads.early.get(session.name),
        not_early=frozenset(
            (tag, file) for remote, tag, file in state.uploads.tried_early if remote == session.name
        ),
        commits=commits,
        known_tags=session.known_tags(),
        deleting_tags=frozenset() if seen is None else frozenset(tag for tag, _, _ in seen.retiring),
        retention=config.policy,
        deletions_left=retirements_left,
    )


def planned(view: JobView) -> Plan:
    """The plan of one view."""
    with uncollected():
        return plan(view)
