"""Choose the next upload to a remote: the newest save first, its shards before its other forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.records import UNIVERSAL, WEIGHTS, ZERO, DerivedState, UploadState
from ckptd.core.policy.actions import Action, CancelUpload, Describe, Upload, UploadEarly, UploadLateFiles
from ckptd.core.policy.derived_forms import is_converted_on_the_fly, to_derive
from ckptd.core.policy.leases import is_committed_elsewhere
from ckptd.core.policy.safety import is_to_upload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.policy.view import JobView, RemoteView, SaveView


EARLY = "early"
"""Stands for a form while a remote gets a shard of a save that is still being written."""


def next_upload(view: JobView, remote: RemoteView, deletable: frozenset[int]) -> list[Action]:
    """Choose at most one upload: the newest save's zero form first; derived forms only when no zero form
    waits."""
    if not remote.is_attached:
        return []
    newest_first = sorted(view.saves, key=lambda s: s.order, reverse=True)
    waiting = (s for s in newest_first if s.id not in deletable and _is_zero_due(view, s, remote))
    zero = next(waiting, None)
    if remote.is_busy:
        if zero is not None and remote.uploading not in (None, ZERO) and not is_early_file(zero, remote):
            return [CancelUpload(remote=remote.name)]
        if is_committed_elsewhere(view, remote):
            return [CancelUpload(remote=remote.name, reason="another node was faster")]
        return []
    if zero is not None:
        return [upload_or_describe(view, zero, remote, ZERO)]
    whole = (s for s in newest_first if s.is_intact and not s.is_busy)
    late = (
        s for s in whole if s.lacking.get(remote.name) and (s.id, remote.name) not in view.not_to_upload_late
    )
    if (save := next(late, None)) is not None:
        return [UploadLateFiles(save_id=save.id, remote=remote.name, files=save.lacking[remote.name])]
    for form in (UNIVERSAL, *WEIGHTS):
        for save in to_derive(view, remote, form) if form in remote.forms else ():
            is_here = save.derived(form).state is DerivedState.READY
            if is_due(view, save, remote, form) and (is_here or is_converted_on_the_fly(view, save, form)):
                return [upload_or_describe(view, save, remote, form, is_streamed=not is_here)]
    return []


def is_early_file(save: SaveView, remote: RemoteView) -> bool:
    """Tell whether what is uploaded early is a file of that save, which waits for it."""
    if remote.uploading_early is None:
        return False
    tag, file = remote.uploading_early
    is_sealed = any((one.path, one.identity) == (file.path, file.identity) for one in save.save.files)
    return save.save.tag == tag and is_sealed


def early_uploads(view: JobView, planned: Iterable[Action]) -> list[UploadEarly]:
    """Choose for each remote with nothing to do the largest shard at rest of a save that is being written."""
    if view.lease is not None or view.is_spread:
        return []
    at_work = {getattr(action, "remote", None) for action in planned}
    found = (_largest_at_rest(view, remote) for remote in view.remotes if remote.name not in at_work)
    return [action for action in found if action is not None]


def _largest_at_rest(view: JobView, remote: RemoteView) -> UploadEarly | None:
    """Only of a tag that the remote knows nothing of: nothing else may lie, or belong, in its folder."""
    if not remote.is_attached or remote.is_busy or ZERO not in remote.forms:
        return None
    due = (
        UploadEarly(remote=remote.name, tag=tag, file=file)
        for tag, files in view.at_rest.items()
        if tag not in remote.known_tags
        for file in files
        if (tag, file) not in remote.not_early
    )
    return max(due, key=lambda one: (one.file.identity.size_bytes, one.tag, one.file.path), default=None)


def _is_zero_due(view: JobView, save: SaveView, remote: RemoteView) -> bool:
    has_source = save.is_intact or save.is_held
    return has_source and is_due(view, save, remote, ZERO) and is_to_upload(view, save)


def is_due(view: JobView, save: SaveView, remote: RemoteView, form: str) -> bool:
    if form not in remote.forms:
        return False
    record = save.upload(remote.name, form)
    is_open = record.state in (UploadState.NEW, UploadState.FAILED, UploadState.WAITING)
    return is_open and view.now_seconds >= record.retry_at_seconds


def upload_or_describe(
    view: JobView, save: SaveView, remote: RemoteView, form: str, *, is_streamed: bool = False
) -> Action:
    answer = view.generations.get((save.id, remote.name, form))
    record = save.upload(remote.name, form)
    attempt = answer.attempt if answer else record.attempt
    if form != ZERO and ZERO in remote.forms:
        zero = view.generations.get((save.id, remote.name, ZERO))
        known = save.upload(remote.name, ZERO).generation or (zero.generation if zero else None)
        if known is None and save.save.tag in remote.known_tags:
            return Describe(remote=remote.name, tag=save.save.tag, save_id=save.id, form=ZERO)
        generation = known or 1
    elif answer is None and save.save.tag in remote.known_tags:
        return Describe(remote=remote.name, tag=save.save.tag, save_id=save.id, form=form)
    else:
        generation = answer.generation if answer else 1
    return Upload(
        save_id=save.id,
        remote=remote.name,
        form=form,
        generation=generation,
        attempt=attempt,
        is_streamed=is_streamed,
    )
