"""What the transfers move: checkpoints of true size and framing, made once below .build, and their orders.

Shards are `bench.sparse`'s with storages of pseudo-random bytes: CRCs of records are checked on the way as in
real life, and a real daemon takes them for what they are. The many small files are a universal form's.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from bench import sparse
from ckptd import __version__
from ckptd.base import files
from ckptd.core.model.layouts import Grid, Role, ShardKey, parse_shard_name
from ckptd.core.model.manifest import NodeManifest, folder_name, sha256_of
from ckptd.core.model.save import SaveWindow
from ckptd.storage.remote.messages import UploadFile, UploadRequest
from tests.support.real import REPOSITORY

CACHE = REPOSITORY / ".build" / "bench-transfer"
TAG = "global_step1"
SMALL_BYTES = 16 << 10
_BLOCK_BYTES = 1 << 20
_VERSION = "1"


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint in a save_dir of its own; `form` says how it is committed."""

    save_dir: Path
    form: str

    @property
    def name(self) -> str:
        """Folder below the cache, and prefix in the bucket."""
        return self.save_dir.name

    @property
    def folder(self) -> Path:
        """The files."""
        return self.save_dir / folder_name(TAG, 1, self.form)

    @property
    def files(self) -> list[Path]:
        """Every file, sorted."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for path in self.files)


def shards(name: str, layers: int, dp: int, *, hidden: int = 1024) -> Save:
    """A ZeRO-2 checkpoint: 14 bytes a parameter, 12.6 M parameters a layer at the usual width."""
    save = Save(CACHE / name, "zero")
    if _is_new(save):
        block = random.Random(7).randbytes(_BLOCK_BYTES)

        def fill(count: int) -> bytes:
            return (block * -(-count // _BLOCK_BYTES))[:count]

        model = sparse.Model(name, sparse.gpt(hidden, layers, 6000 if hidden == 1024 else 100), 2, dp)
        sparse.write(save.folder, model, fill)
        _finish(save)
    return save


def small(name: str, count: int, beside: Save | None = None) -> Save:
    """A universal form of `count` files of 16 KiB, with the files of another save as big ones beside them."""
    save = Save(CACHE / name, "universal")
    if _is_new(save):
        block = random.Random(8).randbytes(SMALL_BYTES)
        for number in range(count):
            place = save.folder / "zero" / f"layers.{number // 3}.weight"
            place.mkdir(parents=True, exist_ok=True)
            kind = ("fp32", "exp_avg", "exp_avg_sq")[number % 3]
            (place / f"{kind}.pt").write_bytes(number.to_bytes(8) + block[8:])
        for path in beside.files if beside else []:
            (save.folder / "zero" / "embed").mkdir(exist_ok=True)
            os.link(path, save.folder / "zero" / "embed" / path.name)
        _finish(save)
    return save


def _is_new(save: Save) -> bool:
    if (save.save_dir / f".done-{_VERSION}").exists():
        return False
    shutil.rmtree(save.save_dir, ignore_errors=True)
    save.save_dir.mkdir(parents=True)
    return True


def _finish(save: Save) -> None:
    os.sync()
    (save.save_dir / f".done-{_VERSION}").touch()


def order_of(save: Save, job_id: str, node: str) -> UploadRequest:
    """What the daemon would order for it; fingerprints are of the name, as nothing here compares content."""
    rows = [_row(save, path) for path in save.files]
    times = [row.identity.mtime_ns for row in rows if row.identity]
    manifest = NodeManifest(
        job_id=job_id,
        tag=TAG,
        generation=1,
        form=save.form,
        folder=save.folder.name,
        node=node,
        node_id=node,
        ckptd_version=__version__,
        config_digest="bench",
        branch=0,
        step=1,
        save_seq=0,
        save_window=SaveWindow(first=min(times), last=max(times)),
        grid=Grid(dp=sum(row.role is Role.OPTIM for row in rows) or 1, mm_count=1, zero_stage=2),
        files=(),
    )
    return UploadRequest(
        root=str(save.save_dir), manifest=manifest, files=tuple(rows), save_spread_seconds=3600
    )


def _row(save: Save, path: Path) -> UploadFile:
    inner = path.relative_to(save.folder).as_posix()
    named = parse_shard_name(inner) if save.form == "zero" else None
    identity = files.identity_of(path.stat())
    role = named.role if named else Role.SIDE
    return UploadFile(
        path=inner,
        key=f"{save.folder.name}/{inner}",
        source=f"{save.folder.name}/{inner}",
        identity=identity,
        bytes=identity.size_bytes,
        role=Role.UNIVERSAL if save.form == "universal" else role,
        shard=named.shard if named else ShardKey(),
        fingerprint=sha256_of(f"{inner} {identity.size_bytes}".encode()),
        check_zip_crc=save.form == "zero",
    )
