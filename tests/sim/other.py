"""Another run of the life's job name: it commits into the same remotes from a save_dir of its own (adr/0185).

Its daemon is not simulated: what it leaves in a remote is written as its documents have it, over a connection
that has no moods. Whether it may go on there is ckptd's own decision, unless a person insisted.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base.names import ROOT
from ckptd.core.model.heartbeat import Heartbeat, heartbeat_key
from ckptd.core.model.layouts import Grid, Role, ShardKey, parse_shard_name
from ckptd.core.model.manifest import (
    Checksums,
    Commit,
    ManifestFile,
    ManifestRef,
    NodeManifest,
    commit_key,
    folder_name,
    manifest_key,
    parse_stem,
    to_bytes,
)
from ckptd.core.model.runs import RUN_FILE_PATH, Claim
from ckptd.core.model.save import SaveWindow
from ckptd.errors import RemoteUnreachable
from ckptd.storage.remote.documents import read_identity
from ckptd.storage.remote.runs import claim_run
from ckptd.storage.stores.checksums import crc64, to_hex
from tests.sim.stage import inspect_files
from tests.sim.trainer import RANKS, SAVE_DIR, shards_of
from tests.support.run_scene import append_run

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from ckptd.core.model.manifest import RemoteIdentity
    from ckptd.storage.stores.base import Store
    from tests.sim.kernel import Kernel
    from tests.sim.trainer import Save

RUN_ID = "0123feed" * 4
FIRST_NUMBER = 500
"""Saves of this run bear numbers that none of the life's have, so that no bytes are alike."""


class OtherRun:
    """Its saves, and what it put into which remote."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.saves = 0
        self.step = 0
        self.kept: dict[str, dict[str, bytes]] = {}
        """Remote → all that it committed there, by key: nobody else may remove or replace any of it."""
        self.beating: set[str] = set()
        self.had_turn: set[str] = set()

    def commit(self, name: str, store: Store, rng: random.Random, saves: Sequence[Save]) -> None:
        """Save and commit, or be refused; `saves`: the life's own, whose tag this one may bear, and perhaps
        whose very bytes, where its save_dir is a copy."""
        self.saves += 1
        self.step += rng.randint(1, 30)
        contents: dict[str, bytes] | None = None
        fingerprints: dict[str, str] = {}
        asks, is_alive = rng.random(), rng.random() < 0.3
        if saves and rng.random() < 0.5:
            twin = rng.choice(saves)
            self.step = twin.step
            if rng.random() < 0.5 and self._kernel.exists(f"{SAVE_DIR}/{RUN_FILE_PATH}"):
                contents, fingerprints = self._copied(twin)
        contents = contents or shards_of(self.step, FIRST_NUMBER + self.saves)
        identity = _identity(store)
        if identity is None:
            return
        # who had its turn there once may wake up and commit after it lost it
        is_late = asks < 0.4 and name in self.had_turn
        if not is_late and not self._goes_on(store, identity.job_id, insists=asks > 0.8):
            return
        self.had_turn.add(name)
        if is_alive:
            self.beating.add(name)
            self._beat(store, identity.job_id, ended=False)
        kept = self._documents(store, identity.job_id, contents, fingerprints)
        for key, data in kept.items():
            assert store.put_if_absent(key, data), key
        self.kept.setdefault(name, {}).update(kept)

    def end(self, name: str, store: Store) -> None:
        """It is stopped, or named apart."""
        identity = _identity(store)
        if name in self.beating and identity is not None:
            self.beating.discard(name)
            self._beat(store, identity.job_id, ended=True)

    def _goes_on(self, store: Store, job_id: str, *, insists: bool) -> bool:
        claim = Claim(node="n9", node_id="other", host="far", save_dir="/other", run_id=RUN_ID)
        if insists:
            append_run(store, claim)
            return True
        return not claim_run(store, claim, job_id).others

    def _beat(self, store: Store, job_id: str, *, ended: bool) -> None:
        beat = Heartbeat(
            job_id=job_id,
            job="run",
            node="n9",
            node_id="other",
            config_digest="c",
            ckptd_version="0",
            as_of=self._now(),
            state="ok",
            run_id=RUN_ID,
            host="far",
            save_dir="/other",
            ended=ended,
        )
        store.put(heartbeat_key("n9"), to_bytes(beat))

    def _now(self) -> str:
        return datetime.fromtimestamp(self._kernel.wall(), UTC).isoformat(timespec="seconds")

    def _copied(self, save: Save) -> tuple[dict[str, bytes] | None, dict[str, str]]:
        """What `cp -a` of that save gives, with its fingerprints; (None, {}): it does not lie there whole."""
        folder = f"{SAVE_DIR}/{save.tag}"
        try:
            alike = all(self._kernel.content_of(f"{folder}/{p}") == data for p, data in save.files.items())
        except OSError:
            return None, {}
        if not alike:
            return None, {}
        facts = inspect_files(self._kernel, Path(folder), list(save.files))
        return save.files, {one.path: one.fingerprint for one in facts}

    def _documents(
        self, store: Store, job_id: str, contents: dict[str, bytes], fingerprints: dict[str, str]
    ) -> dict[str, bytes]:
        """Objects, manifest and COMMIT of a save, in the order in which they are written."""
        tag = f"global_step{self.step}"
        generation = _free_generation(store, tag)
        folder = folder_name(tag, generation, "zero")
        wall_ns = int(self._kernel.wall() * 1e9)
        found = {f"{folder}/{path}": data for path, data in contents.items()}
        manifest = NodeManifest(
            job_id=job_id,
            tag=tag,
            generation=generation,
            form="zero",
            folder=folder,
            node="n9",
            node_id="other",
            run_id=RUN_ID,
            ckptd_version="0",
            config_digest="c",
            branch=1,
            step=self.step,
            save_seq=self.saves,
            save_window=SaveWindow(first=wall_ns, last=wall_ns),
            grid=Grid(dp=RANKS, mm_count=1, zero_stage=2),
            files=tuple(
                _file(folder, path, data, fingerprints.get(path)) for path, data in sorted(contents.items())
            ),
        )
        said = to_bytes(manifest)
        digest = hashlib.sha256(said).hexdigest()
        key = manifest_key(manifest, digest)
        found[key] = said
        same = manifest.model_dump(include=set(Commit.model_fields) - {"files"})
        commit = Commit(
            **same,
            bytes=sum(map(len, contents.values())),
            manifests=(ManifestRef(key=key, sha256=digest),),
            committed_by="n9",
            committed_at=self._now(),
            files=len(contents),
        )
        found[commit_key(tag, generation, "zero")] = to_bytes(commit)
        return found


def _identity(store: Store) -> RemoteIdentity | None:
    """None: the life's daemon has not made that remote yet."""
    try:
        return read_identity(store)
    except RemoteUnreachable:
        return None


def _file(folder: str, path: str, data: bytes, fingerprint: str | None) -> ManifestFile:
    named = parse_shard_name(path)
    return ManifestFile(
        path=path,
        key=f"{folder}/{path}",
        bytes=len(data),
        role=named.role if named is not None else Role.SIDE,
        shard=named.shard if named is not None else ShardKey(),
        checksums=Checksums(crc64nvme=to_hex(crc64(data))),
        fingerprint=fingerprint or hashlib.sha256(data).hexdigest(),
        proof="read-back",
    )


def _free_generation(store: Store, tag: str) -> int:
    """The first that nothing in the remote is of: what another daemon has begun there is not joined."""
    taken = set()
    for info in store.list(ROOT):
        for part in info.key.split("/"):
            parsed = parse_stem(part.removesuffix(".json").partition("~x")[0])
            if parsed is not None and parsed[0] == tag:
                taken.add(parsed[1])
    generation = max(taken, default=0) + 1
    while any(info for info in store.list(f"{folder_name(tag, generation, 'zero')}/")):
        generation += 1
    return generation
