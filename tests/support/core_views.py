"""Views of a job for tests of the planner: saves as numbers, everything else by keyword."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.model.layouts import Grid, Role, ShardKey
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState, UploadRecord, UploadState
from ckptd.core.model.save import SaveWindow, SealedFile, SealedSave, Writer
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.core.policy.view import CommitRef, Confirmation, Disk, JobView, RemoteCommit, RemoteView, SaveView

NAS = "nas"


def sealed(step: int, branch: int = 1, save_seq: int = 0, tag: str = "") -> SealedSave:
    """A sealed ZeRO-2 save of one rank."""
    identity = FileIdentity(dev=1, ino=step * 10 + branch, size_bytes=100, mtime_ns=step, ctime_ns=step)
    return SealedSave(
        tag=tag or f"s{step}b{branch}",
        folder=FolderIdentity(dev=1, ino=1000 + step * 10 + branch),
        files=(
            SealedFile(
                path="zero_pp_rank_0_mp_rank_00_optim_states.pt",
                identity=identity,
                fingerprint=f"f{step}.{branch}.{save_seq}",
                role=Role.OPTIM,
                shard=ShardKey(d=0, mm=0),
            ),
        ),
        grid=Grid(dp=1, mm_count=1, zero_stage=2),
        branch=branch,
        step=step,
        save_seq=save_seq or step,
        window=SaveWindow(first=step, last=step),
        writer=Writer(),
    )


def resized(save: SealedSave, size_bytes: int) -> SealedSave:
    """The same of another size."""
    (file,) = save.files
    grown = file.model_copy(update={"identity": replace(file.identity, size_bytes=size_bytes)})
    return save.model_copy(update={"files": (grown,)})


def committed_record(save: SealedSave, remote: str = NAS, form: str = ZERO) -> UploadRecord:
    """A committed upload."""
    return UploadRecord(
        remote=remote,
        form=form,
        state=UploadState.COMMITTED,
        generation=1,
        commit_key=key_of(save, form),
        commit_sha256=f"sha-{save.tag}-{form}",
    )


def key_of(save: SealedSave, form: str = ZERO) -> str:
    """Key of its COMMIT."""
    return f"_ckptd/commits/{save.tag}~g1~{form}.json"


def save_view(save_id: int, save: SealedSave, *, committed: bool = True, **changes: Any) -> SaveView:
    """A present, adopted save."""
    uploads = {(NAS, ZERO): committed_record(save)} if committed else {}
    view = SaveView(
        id=save_id,
        save=save,
        is_adopted=True,
        was_found_first=False,
        is_intact=True,
        is_present=True,
        uploads=uploads,
        universal=DerivedRecord(state=DerivedState.REFUSED),
    )
    return replace(view, **changes)


def remote_commit(save: SealedSave, form: str = ZERO) -> RemoteCommit:
    """As observed."""
    return RemoteCommit(
        tag=save.tag,
        generation=1,
        form=form,
        branch=save.branch,
        step=save.step,
        save_seq=save.save_seq,
        key=key_of(save, form),
        sha256=f"sha-{save.tag}-{form}",
    )


def confirmation(save: SealedSave, at_seconds: float = 99.0) -> Confirmation:
    """A young, positive answer of the one required remote."""
    ref = CommitRef(remote=NAS, key=key_of(save), sha256=f"sha-{save.tag}-{ZERO}")
    return Confirmation(commits=(ref,), at_seconds=at_seconds)


def job_view(saves: list[SaveView], **changes: Any) -> JobView:
    """A healthy job: one required remote that holds what is committed, limit 1, now = 100 s."""
    held = tuple(remote_commit(s.save) for s in saves if s.upload(NAS, ZERO).state is UploadState.COMMITTED)
    view = JobView(
        saves=tuple(saves),
        remotes=(
            RemoteView(
                name=NAS,
                is_required=True,
                forms=(ZERO, UNIVERSAL),
                is_attached=True,
                is_busy=False,
                commits=held,
            ),
        ),
        local_forms=(UNIVERSAL,),
        local_retention=RetentionPolicy(save_total_limit=1),
        existing="newest",
        latest=None,
        latest_universal=None,
        is_save_in_flight=False,
        is_first_scan=False,
        is_paused=False,
        may_delete=True,
        deletions_left=10,
        disk=Disk(free_bytes=10_000, reserve_bytes=1000, can_clone=False),
        generations={},
        confirmations={s.id: confirmation(s.save) for s in saves},
        is_converting=False,
        now_seconds=100.0,
    )
    return replace(view, **changes)
