"""Build upload requests: files, keys, identities, the manifest's head, and what an earlier attempt finished.

Built from journal rows in the deciding thread; nothing is sent here (docs/contract.md *In the remote*).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd import __version__
from ckptd.core.completeness.markers import replicas
from ckptd.core.model.layouts import LATEST_UNIVERSAL, Role, place_of
from ckptd.core.model.manifest import EXTRA_FOLDER, DerivedSource, NodeManifest, folder_name, universal_folder
from ckptd.core.model.other_layouts import below
from ckptd.core.model.records import UNIVERSAL, ZERO, ObjectRow
from ckptd.core.policy.actions import Upload
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan_folder
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.messages import Committed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.model.listing import ListedFile
    from ckptd.core.model.records import SaveRow, UploadRecord
    from ckptd.core.model.save import SealedFile
    from ckptd.core.policy.actions import UploadEarly, UploadLateFiles
    from ckptd.daemon.state.state import JobState


def files_to_upload(row: SaveRow, action: Upload, save_dir_fd: int) -> tuple[m.UploadFile, ...] | None:
    """Every file of one form, from the hold where there is one; None when its source is gone."""
    folder = _folder_of(row, action)
    if action.form != ZERO:
        return _derived_files(row, action, save_dir_fd)
    source = row.save.tag
    identities = {f.path: f.identity for f in row.save.files}
    if row.held:
        source = f"{fs.HOLD}/{hold_name(row)}"
        held = scan_folder(save_dir_fd, source)
        if held is None:
            return None
        identities = {f.path: f.identity for f in held.files}
    elsewhere = replicas(row.save)
    shards = tuple(
        m.UploadFile(
            path=f.path,
            key=place_of(folder, f.path, f.fingerprint, f.identity.size_bytes),
            source=below(source, f.path),
            is_replica=f.path in elsewhere,
            identity=identities.get(f.path, f.identity),
            bytes=f.identity.size_bytes,
            role=f.role,
            shard=f.shard,
            fingerprint=f.fingerprint,
            tensor_fingerprint=f.tensor_fingerprint,
            mode=f.mode,
        )
        for f in row.save.files
    )
    return shards + _extras(row.save.extras, folder, save_dir_fd)


def early_file(action: UploadEarly) -> m.UploadFile:
    """A shard of a save that is being written, under the key that the save's first upload will use."""
    file, folder = action.file, folder_name(action.tag, 1, ZERO, 1)
    return m.UploadFile(
        path=file.path,
        key=f"{folder}/{file.path}",
        source=below(action.tag, file.path),
        identity=file.identity,
        bytes=file.identity.size_bytes,
        role=Role.OPTIM,
        fingerprint="",
        mode=file.mode,
    )


def forget_replaced_objects(state: JobState, row: SaveRow, action: Upload) -> None:
    """Forget what other saves of this tag verified in this request's folder, before the request replaces it.

    An object of the same size would be taken for the verified one. A held save may be uploaded again after
    its successor under that tag has begun; and some file systems take two tags for one.
    """
    tag = row.save.tag.casefold()
    for other in state.saves.rows.values():
        if other.id == row.id or other.save.tag.casefold() != tag:
            continue
        if state.uploads.record(other.id, action.remote, action.form).generation == action.generation:
            state.journal.forget_objects(other.id, action.remote, action.form, are_whole=True)


def verified_row(done: m.UploadedObject) -> ObjectRow:
    """An object that is whole in the remote, for the journal."""
    size, crc64 = done.bytes, done.crc64nvme
    return ObjectRow(key=done.key, bytes=size, flushed_bytes=size, crc64=crc64, proof=done.proof)


def begun_row(file: m.UploadFile) -> ObjectRow:
    """Record that an object is about to be sent."""
    return ObjectRow(key=file.key, bytes=file.bytes, flushed_bytes=0, crc64=f"{0:016x}", proof=None)


def half_row(moving: m.TransferProgress) -> ObjectRow:
    """Record how far an object under way is durable in the remote."""
    return ObjectRow(
        key=moving.key,
        bytes=moving.total_bytes,
        flushed_bytes=moving.flushed_bytes,
        crc64=f"{moving.crc64:016x}",
        proof=None,
        token=moving.token,
    )


def _folder_of(row: SaveRow, action: Upload) -> str:
    save = row.save
    if action.form == UNIVERSAL:
        return universal_folder(save.tag, action.generation, save.roots[0], action.attempt)[0]
    return folder_name(save.tag, action.generation, action.form, action.attempt)


def _derived_files(row: SaveRow, action: Upload, save_dir_fd: int) -> tuple[m.UploadFile, ...] | None:
    """The derived folder; where a trainer expects it beside its shards, with the pointer that it follows."""
    folder, subfolder = _folder_of(row, action), _subfolder(row, action)
    source = f"{fs.DERIVED}/{action.form}/{row.save.tag}"
    derived = scan_folder(save_dir_fd, source)
    if derived is None:
        return None
    found = tuple(_derived(f, folder, source, subfolder) for f in derived.files)
    return found + pointer_to_upload(row, action)


def _subfolder(row: SaveRow, action: Upload) -> str:
    """Path of a derived form in its remote folder."""
    if action.form != UNIVERSAL:
        return ""
    return universal_folder(row.save.tag, action.generation, row.save.roots[0], action.attempt)[1]


def pointer_to_upload(row: SaveRow, action: Upload) -> tuple[m.UploadFile, ...]:
    """`latest_universal` in a folder where a trainer looks for the form beside its shards."""
    subfolder = _subfolder(row, action)
    if not subfolder:
        return ()
    pointer = m.UploadFile(
        path=LATEST_UNIVERSAL,
        key=f"{_folder_of(row, action)}/{LATEST_UNIVERSAL}",
        source="",
        identity=None,
        bytes=len(subfolder),
        role=Role.UNIVERSAL,
        fingerprint="",
        check_zip_crc=False,
        inline=subfolder,
    )
    return (pointer,)


def committed_source(row: SaveRow, zero: UploadRecord, takeover_seconds: float) -> Committed | None:
    """Return the committed ZeRO form from which this remote's other forms are derived if the save is not
    whole here (adr/0118).
    """
    if not row.save.is_part or zero.commit_sha256 is None:
        return None
    return Committed(sha256=zero.commit_sha256, takeover_seconds=takeover_seconds)


def derive_request(
    row: SaveRow,
    action: Upload,
    zero: Committed | None,
    staging: str,
    memory_bytes: int,
    *,
    compare_masters: bool,
) -> m.DeriveRequest:
    """Build the request to derive a form that lies nowhere here; `zero`: derive from that, not from files
    here.
    """
    save = row.save
    sealed = save.files if zero is None else ()
    return m.DeriveRequest(
        folders=tuple(f"{save.tag}/{root}".rstrip("/") for root in save.roots),
        zero=zero,
        sealed=tuple((f"{save.tag}/{file.path}", file.identity) for file in sealed),
        below=_subfolder(row, action),
        staging=staging,
        memory_bytes=memory_bytes,
        compare_masters=compare_masters,
        plan_sha256=row.derived_of(action.form).plan_sha256,
    )


def _extras(extras: Sequence[SealedFile], folder: str, save_dir_fd: int) -> tuple[m.UploadFile, ...]:
    """Files of save_dir that travel along, as they are now: trainers rewrite them at each save."""
    found = []
    for extra in extras:
        try:
            status = os.stat(extra.path, dir_fd=save_dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        found.append(
            m.UploadFile(
                path=f"{EXTRA_FOLDER}/{extra.path}",
                key=f"{folder}/{EXTRA_FOLDER}/{extra.path}",
                source=extra.path,
                identity=None,
                bytes=status.st_size,
                role=Role.EXTRA,
                fingerprint="",
                mode=extra.mode,
                check_zip_crc=False,
            )
        )
    return tuple(found)


def _derived(file: ListedFile, folder: str, source: str, subfolder: str) -> m.UploadFile:
    path = f"{subfolder}/{file.path}" if subfolder else file.path
    return m.UploadFile(
        path=path,
        key=f"{folder}/{path}",
        source=f"{source}/{file.path}",
        identity=file.identity,
        bytes=file.identity.size_bytes,
        role=Role.UNIVERSAL,
        fingerprint="",
        mode=file.mode,
        check_zip_crc=False,
    )


def upload_request(
    row: SaveRow,
    action: Upload,
    files: tuple[m.UploadFile, ...],
    making: m.DeriveRequest | None,
    *,
    root: str,
    settings: m.RemoteSettings,
    config_digest: str,
    objects: Sequence[ObjectRow],
    save_spread_seconds: float,
    steps_in: bool,
    takeover_seconds: float | None = None,
    run_id: str | None = None,
) -> m.UploadRequest:
    """The whole order; `objects` is what the journal knows of an earlier attempt."""
    save = row.save
    assert settings.job_id is not None
    manifest = NodeManifest(
        job_id=settings.job_id,
        tag=save.tag,
        generation=action.generation,
        form=action.form,
        folder=_folder_of(row, action),
        node=settings.node,
        node_id=settings.node_id,
        attempt=action.attempt,
        run_id=run_id or save.run_id,
        ckptd_version=__version__,
        config_digest=config_digest,
        branch=save.branch,
        step=save.step,
        optimizer_step=save.optimizer_step,
        save_seq=save.save_seq,
        save_window=save.window,
        writer=save.writer,
        best=save.best,
        best_checkpoint=save.best_checkpoint,
        grid=save.grid,
        source=_source_of(row, action),
        empty_folders=save.empty if action.form == ZERO else (),
        files=(),
    )
    return m.UploadRequest(
        root=root,
        manifest=manifest,
        files=files,
        making=making,
        uploaded=_verified(objects),
        partly=tuple(
            m.PartlyUploaded(key=o.key, flushed_bytes=o.flushed_bytes, crc64=int(o.crc64, 16), token=o.token)
            for o in objects
            if o.proof is None and (o.flushed_bytes or o.token)
        ),
        save_spread_seconds=save_spread_seconds,
        steps_in=steps_in,
        takeover_seconds=takeover_seconds,
    )


def _verified(objects: Sequence[ObjectRow]) -> tuple[m.UploadedObject, ...]:
    return tuple(
        m.UploadedObject(key=o.key, bytes=o.bytes, crc64nvme=o.crc64, proof=o.proof)
        for o in objects
        if o.proof in ("read-back", "store-checksum", "part-etags")
    )


def late_upload_request(
    row: SaveRow,
    action: UploadLateFiles,
    record: UploadRecord,
    *,
    root: str,
    settings: m.RemoteSettings,
    config_digest: str,
    run_id: str | None = None,
) -> m.UploadRequest:
    """Files that came after the COMMIT that `record` knows, for a supplement beside it."""
    zero = Upload(
        save_id=action.save_id,
        remote=action.remote,
        form=ZERO,
        generation=record.generation or 1,
        attempt=1,
    )
    folder = _folder_of(row, zero)
    files = tuple(
        m.UploadFile(
            path=f.path,
            key=f"{folder}/{f.path}",
            source=f"{row.save.tag}/{f.path}",
            identity=f.identity,
            bytes=f.identity.size_bytes,
            role=f.role,
            shard=f.shard,
            fingerprint=f.fingerprint,
            mode=f.mode,
            check_zip_crc=False,
        )
        for f in action.files
    )
    order = upload_request(
        row,
        zero,
        files,
        None,
        root=root,
        settings=settings,
        config_digest=config_digest,
        objects=(),
        save_spread_seconds=60.0,
        steps_in=False,
        run_id=run_id,
    )
    return order.model_copy(update={"supplement_to": record.commit_sha256})


def _source_of(row: SaveRow, action: Upload) -> DerivedSource | None:
    if action.form == ZERO:
        return None
    derived = row.derived_of(action.form)
    return DerivedSource(
        generation=action.generation,
        # of a save that is not whole here they are the COMMIT's, filled in by who reads that
        fingerprints=() if row.save.is_part else row.save.fingerprints,
        plan_sha256=derived.plan_sha256,
        layout=derived.layout,
        alignment=derived.alignment,
    )


def hold_name(row: SaveRow) -> str:
    """Folder of a hold: the tag and the save's journal id."""
    return f"{row.save.tag}.{row.id}"
