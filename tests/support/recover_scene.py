"""A node and its NAS for tests of recovery: convertible synthetic shards, committed through the real path."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files
from ckptd.config.loader import job_from_arguments
from ckptd.config.schema import JobConfig
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.core.model.layouts import Grid, Role, ShardKey
from ckptd.core.model.manifest import DerivedSource, NodeManifest, folder_name
from ckptd.core.model.save import SaveWindow
from ckptd.daemon.state.state import JobState
from ckptd.formats.torchfile.archive import read_directory
from ckptd.recover.plan import RecoveryOptions
from ckptd.recover.recovery import Recovered
from ckptd.recover.resume import Resume
from ckptd.recover.select.copies import Nodes
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote.attach import attach
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.messages import (
    DeleteCommit,
    RemoteSettings,
    UploadFile,
    UploadRequest,
    UploadResult,
)
from ckptd.storage.remote.observe import AttachedRemote
from ckptd.storage.remote.transfer import TransferControl
from ckptd.storage.stores.base import Abilities
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.rate_limit import RateLimiter
from tests.stores.scene import Node
from tests.support.states import job_state
from tests.support.synthetic import Shapes, write_stage12

SHAPES: list[Shapes] = [{"embed.weight": (7, 5), "head.weight": (3, 4), "head.bias": (3,)}]
EXTRA = "tokenizer.json"


@dataclass
class Scene:
    """`root/nvme/run` and `root/nas/run`, job "run", two ranks, ZeRO-2; what resume said."""

    root: Path
    said: list[str] = field(default_factory=list)
    dp: int = 2
    node: str = "n0"
    grid: Grid | None = None
    """Else: of `dp` ranks."""
    run_id: str | None = None
    """Of what is committed; None: as releases before runs were known."""

    def __post_init__(self) -> None:
        for path in (self.save_dir, self.nas.parent):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def save_dir(self) -> Path:
        """The trainer's."""
        return self.root / "nvme" / "run"

    @property
    def nas(self) -> Path:
        """The remote's root."""
        return self.root / "nas" / "run"

    @property
    def staging(self) -> Path:
        """Where fetches lie."""
        return self.save_dir / "_ckptd" / "staging"

    def known_node(self) -> Path:
        """A state directory that has the id of this node and no status."""
        place = self.root / "state"
        place.mkdir(exist_ok=True)
        (place / "node_id").write_text(f"id-{self.node}")
        return place

    def save(self, step: int, tag: str = "", *, salt: str = "") -> str:
        """What a trainer leaves: shards, `latest`, an extra file."""

        def change(model: dict[str, Any]) -> None:
            model["ds_config"] |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "salt": salt}
            model["buffer_names"] = ["scale"]

        tag = tag or f"global_step{step}"
        write_stage12(self.save_dir / tag, SHAPES, self.dp, step=step, change_model=change)
        (self.save_dir / "latest").write_text(tag)
        (self.save_dir / EXTRA).write_text("{}")
        return tag

    def tear(self, step: int) -> str:
        """A save whose last shard was cut off by a crash; `latest` names it all the same."""
        tag = self.save(step)
        shard = self.save_dir / tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        shard.write_bytes(shard.read_bytes()[:200])
        return tag

    def turn_a_byte(self, tag: str) -> None:
        """Of the tensors in rank 0's optimizer shard in the remote; size and times stay what they were."""
        self.turn_a_byte_of(self.nas / tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")

    def turn_a_byte_of(self, shard: Path) -> None:
        """The same of any shard."""
        with shard.open("rb") as stream:
            records = read_directory(stream.fileno(), shard.name).records.values()
        data, times = bytearray(shard.read_bytes()), shard.stat()
        data[max(records, key=lambda record: record.size).offset + 5] ^= 0x40
        shard.chmod(0o644)
        shard.write_bytes(data)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))

    def ground(self) -> AttachedRemote:
        """The remote, attached as the daemon would."""
        settings = RemoteSettings(
            name="nas",
            url=str(self.nas),
            job="run",
            save_dir=str(self.save_dir),
            same_filesystem=True,
            node=self.node,
            node_id=f"id-{self.node}",
        )
        store = open_store(str(self.nas))
        found = attach(store, settings)
        return AttachedRemote(
            store=store,
            abilities=Abilities(create_only=True, checksum=None, resumable=True),
            identity=found.identity,
        )

    def commit(
        self,
        tag: str,
        step: int,
        *,
        branch: int = 1,
        save_seq: int = 1,
        generation: int = 1,
        only: Callable[[str], bool] = lambda path: True,
    ) -> UploadResult:
        """Ship the ZeRO form; `only` picks this node's files."""
        folder = folder_name(tag, generation, "zero")
        below = self.save_dir / tag
        names = sorted(str(p.relative_to(below)) for p in below.rglob("*") if p.is_file() and only(p.name))
        rows = inspect_files(self.save_dir / tag, names)
        upload_files = [
            UploadFile(
                path=row.path,
                key=f"{folder}/{row.path}",
                source=f"{tag}/{row.path}",
                identity=files.identity_of((self.save_dir / tag / row.path).stat()),
                bytes=row.bytes,
                role=row.role,
                shard=row.shard,
                fingerprint=row.fingerprint,
            )
            for row in rows
        ]
        upload_files.append(
            UploadFile(
                path=f"_extra/{EXTRA}",
                key=f"{folder}/_extra/{EXTRA}",
                source=EXTRA,
                identity=None,
                bytes=2,
                role=Role.EXTRA,
                fingerprint="",
            )
        )
        return self._upload(
            "zero", folder, tag, step, (branch, save_seq, generation), tuple(upload_files), None
        )

    def commit_universal(
        self, tag: str, step: int, *, keep: bool = False, below: str = "", root: str = "", attempt: int = 1
    ) -> UploadResult:
        """Convert, upload the universal form, and remove it from the node unless `keep`.

        `below`: as where it lies beside a trainer's files, in a folder of the ZeRO form's own; `root`: where
        in the checkpoint the shards lie.
        """
        options = ConvertOptions()
        return self._commit_derived(
            tag, step, "universal", options, keep=keep, below=below, root=root, attempt=attempt
        )

    def commit_weights(self, tag: str, step: int, root: str = "") -> UploadResult:
        """The same with weights in fp32."""
        options = ConvertOptions(form="weights")
        return self._commit_derived(tag, step, "weights-fp32", options, keep=False, root=root)

    def _commit_derived(
        self,
        tag: str,
        step: int,
        form: str,
        options: ConvertOptions,
        *,
        keep: bool,
        below: str = "",
        root: str = "",
        attempt: int = 1,
    ) -> UploadResult:
        source = self.save_dir / tag / root
        derived = f"_ckptd/derived/{form}/{tag}"
        (self.save_dir / derived).parent.mkdir(parents=True, exist_ok=True)
        report = convert(source, self.save_dir / derived, options)
        marks = inspect_files(source, sorted(p.name for p in source.iterdir() if p.is_file()))
        folder = folder_name(tag, 1, "zero" if below else form, attempt)
        paths = sorted(p for p in (self.save_dir / derived).rglob("*") if p.is_file())
        upload_files = tuple(
            UploadFile(
                path=f"{below}{p.relative_to(self.save_dir / derived)}",
                key=f"{folder}/{below}{p.relative_to(self.save_dir / derived)}",
                source=str(p.relative_to(self.save_dir)),
                identity=files.identity_of(p.stat()),
                bytes=p.stat().st_size,
                role=Role.UNIVERSAL if form == "universal" else Role.WEIGHTS,
                shard=ShardKey(),
                fingerprint="",
                check_zip_crc=False,
            )
            for p in paths
        )
        made_from = DerivedSource(
            generation=1,
            fingerprints=tuple(sorted((str(Path(root) / m.path), m.fingerprint) for m in marks)),
            plan_sha256=report.plan_sha256,
            layout=report.layout,
            alignment=0,
        )
        result = self._upload(form, folder, tag, step, (1, 1, 1), upload_files, made_from)
        if not keep:
            (self.save_dir / derived).rename(self.root / f"gone-{form}-{tag}")
        return result

    def retire(self, gone: UploadResult, instead: UploadResult | None = None) -> None:
        """Remote retention takes one form, and leaves another."""
        assert gone.commit is not None
        commit, left = gone.commit.commit, instead.commit if instead else None
        order = DeleteCommit(
            tag=commit.tag,
            generation=commit.generation,
            form=commit.form,
            reason="ladder",
            commit_sha256=gone.commit.sha256,
            instead=(left.commit.form, left.sha256) if left else None,
        )
        delete_commit(self.ground(), order, lambda: None)

    def _upload(
        self,
        form: str,
        folder: str,
        tag: str,
        step: int,
        place: tuple[int, int, int],
        upload_files: tuple[UploadFile, ...],
        source: DerivedSource | None,
    ) -> UploadResult:
        ground = self.ground()
        times = [f.identity.mtime_ns for f in upload_files if f.identity]
        manifest = NodeManifest(
            job_id=ground.identity.job_id,
            tag=tag,
            generation=place[2],
            form=form,
            folder=folder,
            node=self.node,
            node_id=f"id-{self.node}",
            run_id=self.run_id,
            ckptd_version="0",
            config_digest="c",
            branch=place[0],
            step=step,
            save_seq=place[1],
            save_window=SaveWindow(first=min(times), last=max(times)),
            grid=self.grid or Grid(dp=self.dp, mm_count=1, zero_stage=2),
            source=source,
            files=(),
        )
        order = UploadRequest(root=str(self.save_dir), manifest=manifest, files=upload_files)
        control = TransferControl(
            pacer=RateLimiter(), check=lambda: None, on_moving=lambda *_: None, on_done=lambda _: None
        )
        return upload_form(ground, order, control)

    def job(self, *, remote: bool = True, **options: Any) -> JobConfig:
        """The job as `ckptd resume SAVE_DIR URL` makes it."""
        url = str(self.nas) if remote else None
        return job_from_arguments(str(self.save_dir), url, {"local": {"min_free": "0%"}, **options})

    def resume(
        self,
        *,
        world_size: int | None = None,
        dry_run: bool = False,
        nodes: Nodes | None = None,
        state_dir: Path | None = None,
        remote: bool = True,
        tag: str | None = None,
        run: str | None = None,
        **options: Any,
    ) -> Recovered:
        """`ckptd resume`."""
        self.said.clear()
        chosen = RecoveryOptions(
            world_size=world_size,
            dry_run=dry_run,
            nodes=nodes or Nodes(),
            state_dir=state_dir,
            tag=tag,
            run=run,
        )
        return Resume(self.job(remote=remote, **options), chosen, self.said.append).run()

    def tree(self) -> dict[str, bytes]:
        """Every file below save_dir, but the word which run it holds."""
        return {
            str(p.relative_to(self.save_dir)): p.read_bytes()
            for p in sorted(self.save_dir.rglob("*"))
            if p.is_file() and p.name != "run.json"
        }

    def shards(self, tag: str) -> dict[str, bytes]:
        """Files of one checkpoint folder."""
        return {p.name: p.read_bytes() for p in (self.save_dir / tag).iterdir()}

    def lose_node(self) -> None:
        """The node is replaced: save_dir is gone."""
        self.save_dir.rename(self.root / f"lost-{len(list(self.root.iterdir()))}")

    def pointer(self, name: str = "latest") -> str | None:
        """Content of a pointer file."""
        path = self.save_dir / name
        return path.read_text() if path.exists() else None

    def aside(self) -> list[str]:
        """What was moved aside."""
        path = self.save_dir / "_ckptd" / "aside"
        return sorted(p.name for p in path.iterdir()) if path.exists() else []


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """An empty node and NAS."""
    return Scene(tmp_path)


def known_save(scene: Scene, path: Path) -> tuple[Node, JobState]:
    """`global_step5` in its save_dir and in a journal at `path`."""
    node = Node(scene.save_dir, tag="global_step5")
    node.write_all()
    state = job_state(Journal(path))
    state.journal.add_save(node.sealed(step=5), found_first=False, adopted=True, seen_at=0.0)
    state.load()
    return node, state
