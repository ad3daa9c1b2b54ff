"""The slow scrub of this node's files: what is rot, and what is its trainer's own business."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.base.files import ROTTEN
from ckptd.storage.remote.documents import read_commits
from ckptd.storage.remote.messages import RemoteSettings, Scrub, Scrubbed
from ckptd.storage.remote.observe import AttachedRemote
from ckptd.storage.remote.scrub import scrub
from ckptd.storage.stores.base import Abilities
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.rate_limit import RateLimiter
from tests.support.repair_scene import RepairScene, built, scene
from tests.support.restore_scene import TAG

__all__ = ["built", "scene"]


def read_here(scene: RepairScene, check: object = None, **more: object) -> Scrubbed:
    """One pass over the newest checkpoint on the node."""
    store = open_store(str(scene.nas))
    view = next(v for v in read_commits(store).commits if v.commit.tag == TAG)
    attached = AttachedRemote(
        store=store,
        abilities=Abilities(create_only=True, checksum=None, resumable=True),
        identity=scene.ground().identity,
    )
    settings = RemoteSettings(
        name="nas", url=str(scene.nas), job="run", save_dir=str(scene.save_dir), node="n0", node_id="i"
    )
    values = {"commit_key": view.key, "commit_sha256": view.sha256, "limit_bytes": 1 << 40, **more}
    order = Scrub.model_validate({"place": "here", **values})
    calm = check if callable(check) else lambda: None
    return scrub(attached, order, RateLimiter(), calm, settings)


def names(done: Scrubbed) -> list[str]:
    """What is bad, without the folder."""
    return [copy.key.removeprefix(f"{TAG}/") for copy in done.bad]


def test_what_is_as_committed_is_read_whole_and_leaves_the_cache_clean(scene: RepairScene) -> None:
    done = read_here(scene)
    total = sum(path.stat().st_size for path in (scene.save_dir / TAG).iterdir())
    assert (done.bad, done.unread, done.is_gone, done.next_after) == ((), (), False, None)
    assert done.read_bytes == total


def test_pieces_go_on_by_path(scene: RepairScene) -> None:
    first = read_here(scene, limit_bytes=1)
    assert first.next_after == min(f"{TAG}/{path.name}" for path in (scene.save_dir / TAG).iterdir())
    rest = read_here(scene, after=first.next_after)
    assert first.read_bytes + rest.read_bytes == read_here(scene).read_bytes


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_rot_is_found(scene: RepairScene, how: str) -> None:
    """A flipped bit keeps size and time: only reading tells. One shard of several is gone: so is that."""
    shard = scene.shard(1)
    status = shard.stat()
    if how == "flipped":
        scene.flip(shard)
    elif how == "cut":
        os.truncate(shard, status.st_size - 1)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        shard.unlink()
    assert names(read_here(scene)) == [shard.name]


@pytest.mark.parametrize("how", ["rewritten", "shorter", "all-optimizer-states", "model-states", "all"])
def test_what_somebody_wrote_or_removed_is_no_rot(scene: RepairScene, how: str) -> None:
    """A save in place changes the time. Whoever removes a kind of file, or a checkpoint, means it."""
    folder = scene.save_dir / TAG
    shard = scene.shard(1)
    if how == "rewritten":
        scene.flip(shard)
        os.utime(shard)
    elif how == "shorter":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        part = {"all-optimizer-states": "optim_states", "model-states": "model_states", "all": ""}[how]
        for path in folder.iterdir():
            if part in path.name:
                path.unlink()
    done = read_here(scene)
    assert (done.bad, done.unread, done.is_gone) == ((), (), False)
    read = [path for path in folder.iterdir() if path != shard or how == "model-states"]
    assert done.read_bytes == sum(path.stat().st_size for path in read)


def test_a_save_that_begins_while_it_is_read_is_no_rot(scene: RepairScene) -> None:
    """The bytes differ, and by the end of the reading the time does too."""
    shard = scene.shard(1)
    scene.flip(shard)
    count = 0

    def check() -> None:
        nonlocal count
        count += 1
        os.utime(shard)

    assert read_here(scene, check, only=(f"{TAG}/{shard.name}",)).bad == ()
    assert count == 1


def test_bytes_that_the_disk_lost_are_rot_and_no_rights_are_not(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO is what rot says on an NVMe; EACCES says nothing of the bytes."""
    shard, real = scene.shard(1), os.pread

    def failing(number: int) -> None:
        def pread(fd: int, length: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{fd}") == str(shard):
                raise OSError(number, os.strerror(number))
            return real(fd, length, offset)

        monkeypatch.setattr("ckptd.storage.remote.scrub.os.pread", pread)

    failing(ROTTEN[0])
    assert names(read_here(scene)) == [shard.name]
    failing(13)
    done = read_here(scene)
    assert (done.bad, done.unread) == ((), (f"{TAG}/{shard.name}",))


def test_a_bad_manifest_in_the_remote_says_nothing_of_this_node(scene: RepairScene) -> None:
    """What was found bad here before stays bad: it cannot be compared now."""
    (path,) = (scene.nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero").iterdir()
    path.write_bytes(b"{}")
    assert read_here(scene) == Scrubbed()
    assert read_here(scene, only=(f"{TAG}/x.pt",)) == Scrubbed(unread=(f"{TAG}/x.pt",))


def test_a_link_is_not_followed(scene: RepairScene, tmp_path: Path) -> None:
    """What was swapped for a link is gone; what the link leads to is not read."""
    shard = scene.shard(1)
    good = shard.read_bytes()
    shard.unlink()
    (tmp_path / "elsewhere.pt").write_bytes(good)
    shard.symlink_to(tmp_path / "elsewhere.pt")
    os.utime(shard, ns=(10**18 + 10, 10**18 + 10), follow_symlinks=False)
    assert names(read_here(scene)) == [shard.name]
