"""A save on disk and a remote beside it: what the tests of shipping and committing start from."""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.core.model.layouts import Grid, Role, ShardKey, parse_shard_name
from ckptd.core.model.manifest import NodeManifest, folder_name
from ckptd.core.model.save import SaveWindow, SealedFile, SealedSave, Writer
from ckptd.formats.torchfile.archive import Framing, frame, read_directory
from ckptd.formats.torchfile.fingerprint import fingerprint
from ckptd.storage.remote.attach import attach
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.messages import RemoteSettings, UploadedObject, UploadFile, UploadRequest
from ckptd.storage.remote.observe import AttachedRemote
from ckptd.storage.remote.transfer import TransferControl
from ckptd.storage.stores.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptd.storage.remote.messages import Attached, PartlyUploaded, UploadResult
    from ckptd.storage.stores.base import Progress, Store

OPTIM = "bf16_zero_pp_rank_{d}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
JOB_ID = "j" * 32


def archive(payload: bytes, records: int = 1) -> bytes:
    """An uncompressed zip as `torch.save` frames one, with CRC32s; the same at any time of the day."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as packed:
        packed.writestr(zipfile.ZipInfo("archive/data.pkl"), b"pickle")
        for number in range(records):
            packed.writestr(zipfile.ZipInfo(f"archive/data/{number}"), payload)
    return stream.getvalue()


@dataclass
class Node:
    """A node's save_dir and what a daemon would say about it."""

    save_dir: Path
    name: str = "n0"
    dp: int = 2
    zero_stage: int = 2
    tag: str = "global_step5"
    events: list[object] = field(default_factory=list)
    pacer: RateLimiter = field(default_factory=RateLimiter)

    def settings(self, url: Path | str, **more: object) -> RemoteSettings:
        values: dict[str, object] = {
            "name": "nas",
            "url": str(url),
            "job": "job",
            "save_dir": str(self.save_dir),
            "same_filesystem": True,
            "node": self.name,
            "node_id": f"id-{self.name}",
        }
        return RemoteSettings.model_validate(values | more)

    def write(self, contents: Mapping[str, bytes]) -> None:
        folder = self.save_dir / self.tag
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data)

    def write_all(self, mark: bytes = b"1", size: int = 2000) -> None:
        """A whole ZeRO-2 save of two ranks and a side file."""
        names = [MODEL, *(OPTIM.format(d=d) for d in range(self.dp))]
        self.write({name: archive((name.encode() + mark) * size) for name in names})
        self.write({"zero_to_fp32.py": b"print()"})

    def sealed(self, *, step: int = 5, seconds: int = 0, branch: int = 0, save_seq: int = 0) -> SealedSave:
        folder = self.save_dir / self.tag
        rows = []
        for path in sorted(folder.iterdir()):
            named = parse_shard_name(path.name)
            rows.append(
                SealedFile(
                    path=path.name,
                    identity=files.identity_of(path.stat()),
                    fingerprint=_fingerprint(path),
                    role=named.role if named else Role.SIDE,
                    shard=named.shard if named else ShardKey(),
                )
            )
        with files.opened_dir(folder) as fd:
            identity = files.folder_identity(fd)
        return SealedSave(
            tag=self.tag,
            folder=identity,
            files=tuple(rows),
            grid=Grid(dp=self.dp, mm_count=1, zero_stage=self.zero_stage),
            branch=branch,
            step=step,
            save_seq=save_seq,
            window=SaveWindow(first=seconds * 10**9, last=seconds * 10**9),
            writer=Writer(),
        )

    def order(
        self,
        save: SealedSave,
        *,
        generation: int = 1,
        job_id: str = JOB_ID,
        form: str = "zero",
        uploaded: tuple[UploadedObject, ...] = (),
        partly: tuple[PartlyUploaded, ...] = (),
        extras: tuple[str, ...] = (),
    ) -> UploadRequest:
        folder = folder_name(save.tag, generation, form)
        manifest = NodeManifest(
            job_id=job_id,
            tag=save.tag,
            generation=generation,
            form=form,
            folder=folder,
            node=self.name,
            node_id=f"id-{self.name}",
            ckptd_version="0",
            config_digest="c",
            branch=save.branch,
            step=save.step,
            optimizer_step=save.optimizer_step,
            save_seq=save.save_seq,
            save_window=save.window,
            grid=save.grid,
            files=(),
        )
        rows = [
            UploadFile(
                path=f.path,
                key=f"{folder}/{f.path}",
                source=f"{save.tag}/{f.path}",
                identity=f.identity,
                bytes=f.identity.size_bytes,
                role=f.role,
                shard=f.shard,
                fingerprint=f.fingerprint,
            )
            for f in save.files
        ]
        rows += [
            UploadFile(
                path=name,
                key=f"{folder}/_extra/{name}",
                source=name,
                identity=None,
                bytes=(self.save_dir / name).stat().st_size,
                role=Role.EXTRA,
                fingerprint="",
            )
            for name in extras
        ]
        return UploadRequest(
            root=str(self.save_dir), manifest=manifest, files=tuple(rows), uploaded=uploaded, partly=partly
        )

    def control(self) -> TransferControl:
        def on_moving(key: str, total_bytes: int, progress: Progress) -> None:
            self.events.append((key, progress))

        return TransferControl(
            pacer=self.pacer, check=lambda: None, on_moving=on_moving, on_done=self.events.append
        )

    def uploaded(self) -> tuple[UploadedObject, ...]:
        return tuple(event for event in self.events if isinstance(event, UploadedObject))

    def attached(self, store: Store, **more: object) -> AttachedRemote:
        found = attach(store, self.settings(store.url, job_id=JOB_ID, **more))
        return ground_of(store, found)

    def upload(self, ground: AttachedRemote, order: UploadRequest) -> UploadResult:
        return upload_form(ground, order, self.control())

    def rewrite(self, name: str, data: bytes) -> None:
        """Save again in place, as trainers do: same inode, other times."""
        path = self.save_dir / self.tag / name
        before = path.stat()
        with path.open("r+b") as stream:
            stream.truncate(0)
            stream.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def ground_of(store: Store, found: Attached) -> AttachedRemote:
    return AttachedRemote(store=store, abilities=found.abilities, identity=found.identity)


def _fingerprint(path: Path) -> str:
    """As a save is sealed with."""
    with path.open("rb") as file:
        is_archive = frame(file.fileno(), expected=False) is Framing.ZIP
        directory = read_directory(file.fileno(), path.name) if is_archive else None
        return fingerprint(file.fileno(), directory)
