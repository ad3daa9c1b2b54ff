"""`ckptd verify --repair`: bad copies here and in remotes are put right, intact ones are never touched."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import extents, files
from ckptd.core.model.manifest import ManifestFile, Tombstone, to_bytes
from ckptd.errors import NothingCommitted, RemoteUnreachable
from ckptd.maintenance.repair import HERE
from ckptd.recover.fetch import Fetcher
from ckptd.recover.select.sources import Where
from ckptd.storage.child.apart import ApartStore
from ckptd.storage.remote.repair import ObjectRepairer, StoreSource
from ckptd.storage.stores.base import Source
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.rate_limit import RateLimiter
from tests.attacks.test_hostile_remotes import rewrite
from tests.support.repair_scene import LONG_AGO_NS, RepairScene, bare, built, outcomes, run_here, scene
from tests.support.restore_scene import TAG

__all__ = ["bare", "built", "scene"]


def damage(scene: RepairScene, path: Path, how: str) -> None:
    """Make a file bad, without a sign of it in its folder."""
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    else:
        scene.flip(path)
    scene.quiet()


def contents(*roots: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and inode."""
    return {
        str(p): (p.read_bytes(), p.stat().st_ino)
        for root in roots
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_a_bad_file_here_comes_from_a_remote(scene: RepairScene, how: str) -> None:
    before = scene.shards(TAG)
    shard = scene.shard(1)
    status = shard.stat()
    damage(scene, shard, how)
    bad = shard.read_bytes() if shard.exists() else None
    folder_ns = (scene.save_dir / TAG).stat().st_mtime_ns
    others = {k: v for k, v in contents(scene.save_dir, scene.nas, scene.nas2).items() if k != str(shard)}

    plan = scene.repair(dry_run=True)
    assert outcomes(plan) == [(HERE, "planned", "nas")]
    assert plan.exit_code() == 65
    assert scene.audit() == []
    done = scene.repair()
    assert outcomes(done) == [(HERE, "repaired", "nas")]
    assert done.exit_code() == 0
    assert scene.shards(TAG) == before
    assert shard.stat().st_mtime_ns == status.st_mtime_ns
    assert (scene.save_dir / TAG).stat().st_mtime_ns == folder_ns
    # the bad one is kept, and nothing else was touched
    kept = [(scene.save_dir / "_ckptd" / "aside" / name).read_bytes() for name in scene.aside()]
    assert kept == ([] if bad is None else [bad])
    after = contents(scene.save_dir, scene.nas, scene.nas2)
    assert {k: after[k] for k in others} == others
    assert list(scene.staging.iterdir()) == []
    (line,) = scene.audit()
    assert (line["action"], line["tag"], line["files"]) == (
        "repair",
        TAG,
        [[f"{TAG}/{shard.name}", shard.stat().st_size]],
    )
    assert scene.repair().rows == []


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
@pytest.mark.parametrize("source", [HERE, "nas2"])
def test_a_bad_object_comes_from_here_or_another_remote(scene: RepairScene, how: str, source: str) -> None:
    good = contents(scene.nas)
    shard = scene.shard(1, root=scene.nas)
    damage(scene, shard, how)
    if source != HERE:
        scene.lose_node()
    plan = scene.repair(dry_run=True)
    assert outcomes(plan) == [("nas", "planned", source)]
    done = scene.repair()
    assert outcomes(done) == [("nas", "repaired", source)]
    assert done.exit_code() == 0
    after = contents(scene.nas)
    assert {k: v[0] for k, v in after.items()} == {k: v[0] for k, v in good.items()}
    assert {k for k in good if after[k] != good[k]} <= {str(shard)}
    assert [line["action"] for line in scene.audit()] == ["repair"]
    assert scene.repair().exit_code() == 0


def test_without_reading_only_presence_and_size_are_repaired(scene: RepairScene) -> None:
    scene.flip(scene.shard(0, root=scene.nas))
    scene.shard(1, root=scene.nas).unlink()
    done = scene.repair(read=False)
    assert [row.key for row in done.rows] == [f"{TAG}/{scene.shard(1).name}"]
    assert done.exit_code() == 0
    assert [row.key for row in scene.repair().rows] == [f"{TAG}/{scene.shard(0).name}"]


def test_what_no_place_holds_is_left(scene: RepairScene) -> None:
    for root in (None, scene.nas, scene.nas2):
        scene.flip(scene.shard(1, root=root))
    scene.quiet()
    before = contents(scene.save_dir / TAG, scene.nas, scene.nas2)
    done = scene.repair()
    assert [(row.where, row.outcome) for row in done.rows] == [
        (HERE, "left"),
        ("nas", "left"),
        ("nas2", "left"),
    ]
    assert done.exit_code() == 65
    assert contents(scene.save_dir / TAG, scene.nas, scene.nas2) == before
    assert scene.audit() == []


def test_a_bad_remote_is_no_source(scene: RepairScene) -> None:
    """The first remote's copy is bad too: the second one's is taken for the node."""
    scene.flip(scene.shard(1))
    scene.flip(scene.shard(1, root=scene.nas))
    scene.quiet()
    done = scene.repair()
    assert outcomes(done) == [(HERE, "repaired", "nas2"), ("nas", "repaired", HERE)]
    assert done.exit_code() == 0


def test_disputed_and_retired_are_left_alone(scene: RepairScene) -> None:
    scene.lose_node()
    disputes, retired = scene.nas / "_ckptd" / "disputes", scene.nas / "_ckptd" / "retired"
    disputes.mkdir()
    (disputes / f"{TAG}~g1~zero.json").write_text("{}")
    for tag in (TAG, "global_step5"):
        scene.shard(1, tag, scene.nas).unlink()
    before = contents(scene.nas / TAG)
    done = scene.repair()
    assert [(row.tag, row.outcome) for row in done.rows] == [("global_step5", "repaired")]
    assert contents(scene.nas / TAG) == before
    scene.shard(1, "global_step5", scene.nas).unlink()
    retired.mkdir()
    stone = Tombstone(
        tag="global_step5",
        generation=1,
        form="zero",
        branch=1,
        step=5,
        save_seq=1,
        reason="keep_last",
        commit_sha256="0",
    )
    (retired / "global_step5~g1~zero.json").write_bytes(to_bytes(stone))
    before = contents(scene.nas)
    with pytest.raises(NothingCommitted):
        scene.repair(targets=["nas"])
    assert contents(scene.nas) == before


def test_a_re_save_and_a_busy_folder_are_left_alone(scene: RepairScene) -> None:
    scene.save(10, salt="again")
    scene.quiet()
    before = contents(scene.save_dir)
    done = scene.repair()
    assert done.rows == []
    assert any("another save" in line for line in scene.said)
    assert contents(scene.save_dir) == before
    # somebody is at work in it
    scene.flip(scene.shard(1, "global_step5"))
    (scene.save_dir / "global_step5").touch()
    done = scene.repair()
    assert [(row.where, row.outcome) for row in done.rows] == [(HERE, "left")]
    assert "changed less than" in done.rows[0].reason
    assert done.exit_code() == 65


@pytest.mark.parametrize("which", [0, 1])
def test_a_tag_that_is_saved_again_while_its_bytes_are_fetched(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """P4: a shard of the old save never lands among those of the new one."""
    fetch = Fetcher.run
    scene.flip(scene.shard(1))
    scene.quiet()

    def slow(fetcher: Fetcher) -> None:
        fetch(fetcher)
        scene.shard(which).write_bytes(b"of the next save")
        os.utime(scene.shard(which), ns=(LONG_AGO_NS, LONG_AGO_NS))
        scene.quiet()

    monkeypatch.setattr(Fetcher, "run", slow)
    done = scene.repair(targets=[])
    assert [(row.where, row.outcome) for row in done.rows] == [(HERE, "left")]
    assert "was written in" in done.rows[0].reason
    assert scene.shard(which).read_bytes() == b"of the next save"
    assert scene.aside() == []
    assert list(scene.staging.iterdir()) == []


def test_a_file_beside_the_shards_that_somebody_changed(bare: RepairScene) -> None:
    scene = bare
    (scene.save_dir / "global_step5").mkdir(parents=True)
    scene.save(5)
    side = scene.save_dir / "global_step5" / "notes.txt"
    side.write_text("one")
    scene.save(5)
    scene.commit("global_step5", 5)
    side.write_text("two")
    scene.quiet()
    assert scene.repair().rows == []
    assert side.read_text() == "two"
    side.unlink()
    scene.quiet()
    assert scene.repair().exit_code() == 0
    assert side.read_text() == "one"


def test_beside_a_daemon_only_remotes_are_repaired(scene: RepairScene) -> None:
    scene.flip(scene.shard(1))
    scene.flip(scene.shard(0, root=scene.nas))
    scene.quiet()
    fd = os.open(scene.save_dir, files.DIR_FLAGS)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        done = scene.repair()
    finally:
        os.close(fd)
    assert [(row.where, row.outcome) for row in done.rows] == [(HERE, "left"), ("nas", "repaired")]
    assert done.exit_code() == 75
    assert "a daemon owns" in done.rows[0].reason


def repairer(scene: RepairScene, node_id: str) -> tuple[Callable[[Callable[[], Source]], bool], ManifestFile]:
    """One node's repair of the first bad object on nas, and what should lie there."""
    where = Where(remotes=scene.job_with(scene.nas).remotes, owner=None, node_id=node_id)
    remote = where.read_one("nas")
    (view,) = (one for one in remote.commits if one.commit.tag == TAG)
    key = f"{TAG}/{scene.shard(1).name}"
    (file,) = (f for m in remote.manifests(view.commit) for f in m.files if f.key == key)
    here = ObjectRepairer(remote.store, remote.observation.identity, lambda *_: None, lambda *_: None)
    return partial(here.put_right, view, file), file


def test_what_another_node_put_right_meanwhile_is_not_removed(scene: RepairScene) -> None:
    """Both read it as bad; the second one's source goes away before it could send it again."""
    good = contents(scene.nas)
    scene.flip(scene.shard(1, root=scene.nas))
    first, file = repairer(scene, "first")
    second, _ = repairer(scene, "second")
    asked: list[bool] = []

    def source() -> Source:
        return StoreSource(open_store(str(scene.nas2)), file)

    def source_that_ends() -> Source:
        if asked:
            raise RemoteUnreachable("the other remote went away")
        asked.append(first(source))
        return source()

    assert not second(source_that_ends)
    assert asked == [True]
    assert {key: data for key, (data, _) in contents(scene.nas).items()} == {k: v[0] for k, v in good.items()}


def test_two_nodes_send_the_same_object_side_by_side(scene: RepairScene) -> None:
    """Neither takes the other's half upload for its own, nor removes it."""
    good = contents(scene.nas)
    scene.flip(scene.shard(1, root=scene.nas))
    first, file = repairer(scene, "first")
    second, _ = repairer(scene, "second")
    begun: list[bool] = []

    class Between(StoreSource):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            if not begun:
                begun.append(True)
                first(lambda: StoreSource(open_store(str(scene.nas2)), file))
            return super().read_into(offset, buffer[:512])

    second(lambda: Between(open_store(str(scene.nas2)), file))
    after = contents(scene.nas)
    assert all(after[key][0] == good[key][0] for key in good)


def test_an_object_that_was_misread_once_is_not_touched(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips on the way is no damage: what is intact is neither removed nor sent again."""
    shard = scene.shard(1, root=scene.nas)
    before = contents(scene.nas)
    stream = ApartStore.stream
    flips = [1]

    def flipping(store: ApartStore, key: str, offset: int, length: int) -> Iterator[bytes]:
        for chunk in stream(store, key, offset, length):
            if key == f"{TAG}/{shard.name}" and flips:
                yield bytes([chunk[0] ^ flips.pop()]) + chunk[1:]
            else:
                yield chunk

    monkeypatch.setattr(ApartStore, "stream", flipping)
    done = scene.repair(targets=["nas"], here=False)
    assert [(row.where, row.outcome, row.source) for row in done.rows] == [("nas", "repaired", None)]
    assert done.exit_code() == 0
    assert contents(scene.nas) == before
    assert scene.audit() == []


def test_a_universal_form(scene: RepairScene) -> None:
    scene.commit_universal(TAG, 10, keep=True)
    scene.quiet()
    some = next(p for p in (scene.nas / f"{TAG}_universal").rglob("fp32.pt"))
    scene.flip(some)
    good = contents(scene.derived)
    done = scene.repair()
    assert [(row.where, row.form, row.outcome) for row in done.rows] == [("nas", "universal", "repaired")]
    assert done.exit_code() == 0
    assert contents(scene.derived) == good


def test_the_command(scene: RepairScene, capsys: pytest.CaptureFixture[str]) -> None:
    """A job by its file; what it prints, its JSON, and what it refuses."""
    job = scene.root / "run.toml"
    remotes = "".join(
        f'[[remote]]\nname = "{root.parent.name}"\nurl = "{root}"\nsame_filesystem = true\n'
        for root in (scene.nas, scene.nas2)
    )
    job.write_text(f'save_dir = "{scene.save_dir}"\n[local]\nmin_free = "0%"\n{remotes}')
    assert run_here(capsys, "verify", scene.nas, "--repair").returncode == 2
    assert run_here(capsys, "verify", job, "--dry-run").returncode == 2
    assert run_here(capsys, "verify", job, "--repair", "--remote", "nowhere").returncode == 66
    assert run_here(capsys, "verify", job, "global_step99", "--repair").returncode == 66
    for root in (scene.nas, scene.nas2):
        scene.flip(scene.shard(1, root=root))
    planned = run_here(capsys, "verify", job, TAG, "--repair", "--read-data", "--dry-run")
    assert planned.returncode == 65
    assert f"planned   nas: {TAG}/{scene.shard(1).name}" in planned.stdout
    assert scene.staging.exists() is False
    one = run_here(capsys, "verify", job, TAG, "--repair", "--read-data", "--json", "--remote", "nas")
    assert one.returncode == 0, one.stderr
    (row,) = json.loads(one.stdout)["repairs"]
    assert (row["where"], row["outcome"], row["source"].split()[0]) == ("nas", "repaired", HERE)
    both = run_here(capsys, "verify", job, "--repair", "--read-data")
    assert both.returncode == 0, both.stderr
    assert f"repaired  nas2: {TAG}/{scene.shard(1).name}" in both.stdout
    assert run_here(capsys, "verify", job, "--read-data").returncode == 0
    lines = (scene.save_dir / "_ckptd" / "state" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines] == ["repair", "repair"]


def test_no_faster_than_the_job_file_says(scene: RepairScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bandwidth` of the remote counts for repairs too."""
    rates: list[int | None] = []

    class Noted(RateLimiter):
        def __init__(self, bytes_per_second: int | None = None) -> None:
            rates.append(bytes_per_second)
            super().__init__(bytes_per_second)

    monkeypatch.setattr("ckptd.maintenance.repair.RateLimiter", Noted)
    monkeypatch.setattr(RepairScene, "bandwidth", "8Mb/s")
    scene.flip(scene.shard(1, root=scene.nas))
    assert scene.repair().exit_code() == 0
    assert rates == [1_000_000]


def test_an_empty_folder_that_is_lost_here_is_made_again(scene: RepairScene) -> None:
    """DeepSpeed's NVMe offload loads no save without the folder of a rank that had nothing to swap."""
    empty = ["offloaded_tensors/rank00", "offloaded_tensors/rank01"]

    def record(document: dict[str, Any]) -> None:
        document["empty_folders"] = empty

    rewrite(scene, TAG, record)
    folder = scene.save_dir / TAG
    (folder / empty[0]).mkdir(parents=True)
    scene.quiet()
    before, time_ns = contents(scene.save_dir, scene.nas), folder.stat().st_mtime_ns
    plan = scene.repair(TAG, targets=["nas"], dry_run=True)
    assert [(row.key, row.outcome) for row in plan.rows] == [(f"{TAG}/{empty[1]}/", "planned")]
    assert plan.exit_code() == 65
    assert not (folder / empty[1]).exists()
    done = scene.repair(TAG, targets=["nas"])
    assert [(row.where, row.outcome) for row in done.rows] == [(HERE, "repaired")]
    assert done.exit_code() == 0
    assert (folder / empty[1]).is_dir()
    assert folder.stat().st_mtime_ns == time_ns
    assert contents(scene.save_dir, scene.nas) == before
    assert [line["files"] for line in scene.audit()] == [[[f"{TAG}/{empty[1]}/", 0]]]
    assert scene.repair(TAG, targets=["nas"]).rows == []


def test_two_contents_under_one_key(scene: RepairScene) -> None:
    """A manifest that was changed to claim another checkpoint's object: that one is intact and stays."""

    def claim(document: dict[str, Any]) -> None:
        (row,) = [f for f in document["files"] if "rank_1" in f["path"]]
        row["key"] = f"global_step5/{row['path']}"

    rewrite(scene, TAG, claim)
    before = contents(scene.nas)
    done = scene.repair(TAG, targets=["nas"], here=False)
    assert [row.outcome for row in done.rows] == ["left"]
    assert "two contents" in done.rows[0].reason
    assert done.exit_code() == 65
    assert contents(scene.nas) == before


def test_rot_in_every_zip_directory(scene: RepairScene) -> None:
    """No fingerprint is left to tell the save by: sizes and times of its files still do."""
    before = scene.shards(TAG)
    for path in (scene.save_dir / TAG).iterdir():
        scene.flip(path, -30)
    assert scene.repair().exit_code() == 0
    assert scene.shards(TAG) == before
    for path in (scene.save_dir / TAG).iterdir():
        scene.flip(path, -30)
    scene.shard(1).write_bytes(scene.shard(1).read_bytes()[:-5])
    scene.quiet()
    assert scene.repair().rows == []
    assert any("another save" in line for line in scene.said)


def test_no_room_on_the_node(scene: RepairScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched would eat the next save's room: nothing is written, the damage is said (P13)."""
    damage(scene, scene.shard(1), "gone")
    before = contents(scene.save_dir)
    monkeypatch.setattr(extents, "free_bytes", lambda fd: 1000)
    done = scene.repair()
    assert [(row.outcome, "no room" in (row.reason or "")) for row in done.rows] == [("left", True)]
    assert contents(scene.save_dir) == before
