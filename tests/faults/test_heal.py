"""Copies heal: rot in every place and every kind of file is found by the daemon's scrub and repaired by it.

Rot on this node's disk is made below its file system, so that no time of a file tells of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, Node, made_before, node
from tests.e2e.s3_node import PREFIX, S3Node, s3_node
from tests.stores import servers

pytestmark = [pytest.mark.real, pytest.mark.faults]

TAG = "global_step1"
LONG_AGO_NS = 10**18
DISK_BYTES = 256 << 20
BLOCK_BYTES = 4096
SCRUB = 'scrub = "20TB/day"'
CYCLE_SECONDS = 300.0
BESIDE = ("pins", "runs", "retired")
POINTERS = {"latest", "latest_universal"}
_FIBMAP = 1

real_saves = made_before(RUN)


@contextlib.contextmanager
def disk_at(place: Path, image: Path) -> Iterator[None]:
    """An ext4 of its own at `place`, whose blocks can be written below it."""
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", str(BLOCK_BYTES), str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def rot(image: Path, path: Path) -> None:
    """One bit in the middle of a file turns on the disk; no time, size or inode changes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        before, middle = os.fstat(file.fileno()), os.fstat(file.fileno()).st_size // 2
        (block,) = struct.unpack("i", fcntl.ioctl(file, _FIBMAP, struct.pack("i", middle // BLOCK_BYTES)))
        assert block, path
        with image.open("r+b") as disk:
            disk.seek(block * BLOCK_BYTES + middle % BLOCK_BYTES)
            (byte,) = disk.read(1)
            disk.seek(-1, os.SEEK_CUR)
            disk.write(bytes([byte ^ 1]))
        good = path.read_bytes()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert path.read_bytes() != good
        assert os.fstat(file.fileno()) == before
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def keeping_times(path: Path, change: Callable[[Path], object]) -> None:
    """Change a file, or remove it; its time and its folder's stay."""
    status, folder = path.stat(), path.parent.stat()
    change(path)
    if path.exists():
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(path.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))


def cut(path: Path) -> None:
    """The last byte is lost."""
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    """One bit turns."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def old_save(here: Node, step: int) -> Path:
    """A save of long ago, with what trainers write beside the shards."""
    folder = here.save_dir / here.save(step)
    (folder / "rng_state_0.pth").write_bytes(os.urandom(9000))
    (folder / "trainer_state.json").write_text('{"global_step": 1, "log_history": []}' + " " * 9000)
    (folder / "notes.txt").write_text("a note\n" * 2000)
    for path in [*folder.iterdir(), folder]:
        os.utime(path, ns=(LONG_AGO_NS + step, LONG_AGO_NS + step))
    return folder


def contents(root: Path) -> dict[str, tuple[str, int]]:
    """Path → digest and time of all files but ckptd's own notes."""
    skipped = (
        "_ckptd/state",
        "_ckptd/aside",
        "_ckptd/staging",
        "_ckptd/trash",
        "_ckptd/heartbeats",
        "lost+found",
    )
    found = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_file() and not name.startswith(skipped):
            found[name] = (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
    return found


def shard(folder: Path, what: str) -> Path:
    """The first shard of a kind."""
    return min(path for path in folder.iterdir() if what in path.name)


def is_healed(here: Node, place: str, names: set[str]) -> bool:
    """The audit tells of each of these repairs."""
    lines = [line for line in here.audit("repair") if line["reason"].startswith(f"{place}:")]
    return {name for line in lines for name, _ in line["files"]} >= names


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_rot_on_this_node_heals(tmp_path: Path) -> None:
    """A bit of every kind of file, of both forms: each is found, put right byte for byte, and nothing else is
    touched."""
    image = tmp_path / "image"
    with disk_at(tmp_path / "nvme", image), node(tmp_path, job='existing = "all"') as here:
        folder = old_save(here, 1)
        assert here.once() == 0
        made = here.save_dir / "_ckptd" / "derived" / "universal" / TAG
        before = contents(here.save_dir)
        damaged = {
            shard(folder, "model_states"),
            shard(folder, "optim_states"),
            folder / "rng_state_0.pth",
            folder / "trainer_state.json",
            folder / "notes.txt",
            made / "ckptd.json",
            max(made.rglob("*.pt"), key=lambda path: path.stat().st_size),
        }
        for path in damaged:
            rot(image, path)
        # what a trainer never writes again is one file with two names in both forms
        wrong = {name for name, found in contents(here.save_dir).items() if found != before[name]}
        assert wrong >= {str(path.relative_to(here.save_dir)) for path in damaged}
        here.write_job(local=f"{here.local}\n{SCRUB}")
        here.start()
        heals(here, {here.save_dir / name for name in wrong})
        after = contents(here.save_dir)
        # the pointer is taken away and set again while its form is put right
        assert after.pop("latest_universal")[0] == before.pop("latest_universal")[0]
        assert after == before


def test_what_is_cut_short_or_gone_on_this_node_comes_back(tmp_path: Path) -> None:
    """A shard that lost its end, a file and a shard that are not there: the folder is the same save again."""
    with node(tmp_path, job='existing = "all"') as here:
        folder = old_save(here, 1)
        assert here.once() == 0
        before = contents(folder)
        optim = sorted(path for path in folder.iterdir() if "optim_states" in path.name)
        harms: dict[Path, Callable[[Path], object]] = {
            optim[0]: cut,
            optim[1]: Path.unlink,
            folder / "notes.txt": Path.unlink,
        }
        for path, harm in harms.items():
            keeping_times(path, harm)
        here.write_job(local=f"{here.local}\n{SCRUB}")
        here.start()
        heals(here, set(harms))
        here.wait("sealed again", lambda: here.checkpoint(TAG)["state"] == "committed")
        assert contents(folder) == before
        assert here.commits().keys() == {f"{TAG}~g1"}


def heals(here: Node, damaged: set[Path]) -> None:
    """Found, repaired, told, and over: each of these files once."""
    names = {str(path.relative_to(here.save_dir)) for path in damaged}
    here.wait("found", lambda: "local-file-damaged" in here.problems(), CYCLE_SECONDS, pause_seconds=0.01)
    here.wait("healed", lambda: is_healed(here, "here", names), CYCLE_SECONDS)
    here.wait("over", lambda: "local-file-damaged" not in here.problems(), CYCLE_SECONDS)
    assert len(here.audit("repair")) == len(names)
    assert "copy-repaired" in here.problems()


def test_rot_in_a_directory_heals(tmp_path: Path) -> None:
    """Objects of every kind, of both forms: turned bits, one cut short, one gone."""
    with node(tmp_path, job='existing = "all"') as here:
        folder = old_save(here, 1)
        assert here.once() == 0
        before, on_node = contents(here.nas), contents(here.save_dir)
        kept = here.nas / TAG
        universal = list((here.nas / f"{TAG}_universal").rglob("*.pt"))
        damaged: dict[Path, Callable[[Path], object]] = {
            kept / shard(folder, "model_states").name: flip,
            kept / shard(folder, "optim_states").name: cut,
            kept / "rng_state_0.pth": flip,
            kept / "notes.txt": Path.unlink,
            min(universal): flip,
        }
        for path, harm in damaged.items():
            keeping_times(path, harm)
        here.write_job(remote=SCRUB)
        here.start()
        names = {str(path.relative_to(here.nas)) for path in damaged}
        here.wait("healed", lambda: is_healed(here, "nas", names), CYCLE_SECONDS)
        here.wait("over", lambda: "remote-object-damaged" not in here.problems(), CYCLE_SECONDS)
        after = contents(here.nas)
        assert {name: found[0] for name, found in after.items()} == {
            name: found[0] for name, found in before.items()
        }
        assert {name for name in after if after[name] != before[name]} <= names
        assert contents(here.save_dir) == on_node
        assert len(here.audit("repair")) == len(names)


def empty(path: Path) -> None:
    """Nothing is left in a file."""
    os.truncate(path, 0)


def turn_a_digit(path: Path) -> None:
    """One bit of a COMMIT, which can be read all the same, as of another branch."""
    data = path.read_bytes()
    at = data.index(b'"branch":') + len(b'"branch":')
    path.write_bytes(data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :])


def documents(here: Node, *kinds: str) -> dict[str, bytes]:
    """Key → bytes of documents in a directory."""
    paths = [path for kind in kinds for path in (here.nas / "_ckptd" / kind).rglob("*.json")]
    return {str(path.relative_to(here.nas)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("is_left_here", [True, False], ids=["here", "in the remote alone"])
def test_documents_in_a_directory_heal(tmp_path: Path, is_left_here: bool) -> None:
    """COMMITs and manifests of both forms that rotted or are gone, also of what no save_dir holds any more:
    each is the same bytes again, no other is written, and nothing is uploaded again."""
    rots: list[Callable[[Path], object]] = [flip, cut, empty, Path.unlink, turn_a_digit]
    with node(tmp_path, job='existing = "all"', local="save_total_limit = 9") as here:
        for step in range(1, 6):
            old_save(here, step)
        assert here.once() == 0
        before = documents(here, "commits", "nodes")
        if not is_left_here:
            for step in range(1, 6):
                shutil.rmtree(here.save_dir / f"global_step{step}")
        damaged = set()
        for step, rot_of_commit in enumerate(rots, 1):
            commit = here.nas / "_ckptd" / "commits" / f"global_step{step}~g1~zero.json"
            (manifest,) = (here.nas / "_ckptd" / "nodes" / f"global_step{step}~g1~zero").iterdir()
            keeping_times(commit, rot_of_commit)
            keeping_times(manifest, rots[step % 4])
            damaged |= {str(path.relative_to(here.nas)) for path in (commit, manifest)}
        objects = contents(here.nas)
        here.write_job(remote=SCRUB)
        here.start()
        here.wait("healed", lambda: is_healed(here, "nas", damaged), CYCLE_SECONDS)
        here.wait("over", lambda: not here.problems() & {"remote-object-damaged", "remote-damaged"})
        assert documents(here, "commits", "nodes") == before
        after = contents(here.nas)
        assert {name for name in objects if after[name] != objects[name]} <= damaged | POINTERS
        assert {name for line in here.audit("repair") for name, _ in line["files"]} == damaged
        here.wait("told", lambda: "copy-repaired" in here.problems())


def test_what_rots_under_a_daemon_heals(tmp_path: Path) -> None:
    """A COMMIT that is lost while the daemon is at rest: its next look finds it."""
    with node(tmp_path, remote=SCRUB) as here:
        here.start()
        here.save(1)
        here.wait_committed(f"{TAG}~g1")
        kept = here.state / "documents"
        here.wait("both forms", lambda: len(list(kept.glob("*/*~*.json"))) == len(("zero", "universal")))
        before = documents(here, "commits")
        for path in (here.nas / "_ckptd" / "commits").glob("*.json"):
            path.unlink()
        here.wait("healed", lambda: documents(here, "commits") == before, CYCLE_SECONDS)
        here.wait("audited", lambda: is_healed(here, "nas", set(before)))


def test_documents_that_a_person_removed_stay_removed(tmp_path: Path) -> None:
    """A checkpoint whose folder and documents somebody deleted in the remote does not come back there."""
    with node(
        tmp_path, job='existing = "all"', local="save_total_limit = 9", remote='forms = ["zero"]'
    ) as here:
        for step in (1, 2):
            old_save(here, step)
        assert here.once() == 0
        for root in (here.save_dir, here.nas):
            shutil.rmtree(root / TAG)
        (here.nas / "_ckptd" / "commits" / f"{TAG}~g1~zero.json").unlink()
        here.write_job(remote=f'forms = ["zero"]\n{SCRUB}')
        assert here.once() == 0
        assert here.commits().keys() == {"global_step2~g1"}
        assert here.audit("repair") == []


@pytest.mark.parametrize("place", ["directory", pytest.param("bucket", marks=pytest.mark.stores)])
def test_side_documents_heal(tmp_path: Path, place: str, moto: servers.Server) -> None:
    """A pin, the row of the run and the identity that cannot be read any more are what they were at the next
    look, a tombstone at the next day's; the pin counts all the while."""
    few = f'forms = ["zero"]\nsave_total_limit = 1\n{SCRUB}'
    with s3_node(tmp_path, moto) if place == "bucket" else node(tmp_path) as here:
        here.write_job(remote=f"{here.remote}\n{few}" if place == "bucket" else few)
        here.start()
        for step in (1, 2, 3):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        assert here.ckptd("pin", here.job_file, "global_step2").returncode == 0
        here.wait("step 1 deleted there", lambda: "global_step1~g1" not in here.commits())
        kept = here.state / "documents"
        here.wait("kept", lambda: len({*BESIDE} & {path.parent.name for path in kept.rglob("*.json")}) == 3)
        (known,) = kept.glob("*/remote.json")
        keys = [f"_ckptd/{path.relative_to(known.parent)}" for path in known.parent.glob("*/[!.]*.json")]
        before = {key: read(here, key) for key in (*keys, "_ckptd/remote.json")}
        for key, data in before.items():
            if isinstance(here, S3Node):
                here.client.put_object(Bucket=here.bucket, Key=f"{PREFIX}/{key}", Body=data[:-1])
            else:
                keeping_times(here.nas / key, cut)
        here.wait("healed", lambda: is_healed(here, "nas", {k for k in before if "retired" not in k}))
        here.stop()  # all are compared once a day, and at a start
        here.start()
        here.save(4)
        here.wait("healed, too", lambda: is_healed(here, "nas", set(before)), CYCLE_SECONDS)
        assert {key: read(here, key) for key in before} == before
        here.wait("over", lambda: not here.problems() & {"remote-damaged", "remote-not-ours"}, CYCLE_SECONDS)
        assert "global_step2~g1" in here.commits()


def read(here: Node, key: str) -> bytes:
    """A document of the remote."""
    return here.read(key) if isinstance(here, S3Node) else (here.nas / key).read_bytes()


@pytest.mark.stores
def test_documents_in_a_bucket_heal(tmp_path: Path, moto: servers.Server) -> None:
    """A COMMIT that lost its end and a manifest that is gone: the same bytes again, and no object is sent."""
    with s3_node(tmp_path, moto, job='existing = "all"') as here:
        old_save(here, 1)
        assert here.once() == 0
        data = [key for key in here.objects() if not key.startswith("_ckptd/heartbeats/")]
        before = {key: here.read(key) for key in data}
        (manifest,) = (key for key in data if key.startswith(f"_ckptd/nodes/{TAG}~g1~zero/"))
        commit = f"_ckptd/commits/{TAG}~g1~zero.json"
        written = {key: here.written_at(key) for key in data if key not in (commit, manifest)}
        here.client.put_object(Bucket=here.bucket, Key=f"{PREFIX}/{commit}", Body=before[commit][:-9])
        here.client.delete_object(Bucket=here.bucket, Key=f"{PREFIX}/{manifest}")
        here.write_job(remote=f"{here.remote}\n{SCRUB}")
        here.start()
        here.wait("healed", lambda: is_healed(here, "nas", {commit, manifest}), CYCLE_SECONDS)
        here.wait("over", lambda: "remote-damaged" not in here.problems(), CYCLE_SECONDS)
        assert {key: here.read(key) for key in data} == before
        assert {key: here.written_at(key) for key in written} == written


@pytest.mark.stores
def test_rot_in_a_bucket_heals(tmp_path: Path, moto: servers.Server) -> None:
    """The object that is put right is the one that was bad; no other is written."""
    with s3_node(tmp_path, moto, job='existing = "all"') as here:
        folder = old_save(here, 1)
        assert here.once() == 0
        data = [key for key in here.objects() if key.startswith(f"{TAG}/")]
        before = {key: here.read(key) for key in data}
        names = [f"{TAG}/{shard(folder, what).name}" for what in ("model_states", "optim_states")]
        bad = bytearray(before[names[0]])
        bad[len(bad) // 2] ^= 1
        here.client.put_object(Bucket=here.bucket, Key=f"{PREFIX}/{names[0]}", Body=bytes(bad))
        here.client.delete_object(Bucket=here.bucket, Key=f"{PREFIX}/{names[1]}")
        written = {key: here.written_at(key) for key in data if key not in names}
        here.write_job(remote=f"{here.remote}\n{SCRUB}")
        here.start()
        here.wait("healed", lambda: is_healed(here, "nas", set(names)), CYCLE_SECONDS)
        here.wait("over", lambda: "remote-object-damaged" not in here.problems(), CYCLE_SECONDS)
        assert {key: here.read(key) for key in data} == before
        assert {key: here.written_at(key) for key in written} == written
        assert here.uploads() == []


def test_what_no_copy_can_repair_stays_named_and_holds_its_place_for_none(tmp_path: Path) -> None:
    """Bad here and in the only remote: it is said, both stay, and limits count the sound ones alone."""
    with node(tmp_path, job='existing = "all"', local="save_total_limit = 5") as here:
        for step in (1, 2):
            old_save(here, step)
        assert here.once() == 0
        newest = here.save_dir / "global_step2"
        bad = shard(newest, "optim_states")
        there = here.nas / "global_step2" / bad.name
        for path in (bad, there):
            keeping_times(path, flip)
        here.write_job(local=f"save_total_limit = 5\n{SCRUB}", remote=SCRUB)
        here.start()
        here.wait("said", lambda: {"remote-object-damaged", "local-file-damaged"} <= here.problems(), 300)
        here.wait(
            "tried",
            lambda: all(
                "not repaired:" in p["text"] for p in here.status()["problems"] if "damaged" in p["code"]
            ),
            CYCLE_SECONDS,
        )
        assert here.checkpoint("global_step2")["local"]["damaged"] is True
        here.stop()
        limits = {"remote": f"keep_last = 1\n{SCRUB}", "local": f"save_total_limit = 1\n{SCRUB}"}
        here.write_job(**limits)
        here.start()
        for step in (3, 4):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.wait("the limit", lambda: "global_step3" not in here.local_tags())
        here.wait("the limit there", lambda: "global_step3~g1" not in here.commits())
        assert here.local_tags() == {"global_step2", "global_step4"}
        assert set(here.commits()) == {"global_step2~g1", "global_step4~g1"}
        assert here.audit("repair") == []


def test_what_another_node_found_damaged_counts_for_no_deletion(tmp_path: Path) -> None:
    """Its heartbeat names a COMMIT: this node keeps that checkpoint, and others in its stead."""
    with node(tmp_path, local="save_total_limit = 2", remote="keep_last = 5") as here:
        here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        beats = here.nas / "_ckptd" / "heartbeats"
        here.wait("a heartbeat", lambda: any(beats.glob("*.json")))
        said = json.loads(next(beats.glob("*.json")).read_bytes())
        commit = (here.nas / "_ckptd" / "commits" / "global_step2~g1~zero.json").read_bytes()
        told = {"node": "b", "node_id": "b", "save_dir": "", "damaged": [hashlib.sha256(commit).hexdigest()]}
        (beats / "b.json").write_text(json.dumps(said | told))

        def reasons() -> list[str]:
            """Why the remote keeps it."""
            held = here.status()["remotes"][0]["held"]
            return [why for row in held if row["tag"] == "global_step2" for why in row["why"]]

        here.wait("heard", lambda: "a copy of it is damaged" in reasons())
        for step in (3, 4):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.wait("the limit", lambda: here.local_tags() == {f"global_step{step}" for step in (2, 3, 4)})


def test_resume_takes_no_damaged_folder(tmp_path: Path) -> None:
    """The newest is damaged here and in the remote: the one before it is resumed from."""
    local, remote = "save_total_limit = 5", 'forms = ["zero"]'
    with node(tmp_path, job='existing = "all"', local=local, remote=remote) as here:
        for step in (1, 2):
            old_save(here, step)
        assert here.once() == 0
        bad = shard(here.save_dir / "global_step2", "optim_states")
        for path in (bad, here.nas / "global_step2" / bad.name):
            keeping_times(path, flip)
        here.write_job(local=f"{local}\n{SCRUB}")
        here.start()
        here.wait("said", lambda: here.checkpoint("global_step2")["local"]["damaged"], 300)
        here.stop()
        done = here.ckptd("resume", here.job_file)
        assert done.returncode == 0, done.stderr
        assert "global_step2: the daemon found a file of it that is not what was committed" in done.stderr
        assert done.stdout.strip().endswith("global_step1"), done.stdout
