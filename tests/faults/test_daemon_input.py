"""Bad input for the daemon: whatever is damaged, mixed, foreign or missing ends in one clear sentence."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import (
    OTHER_RUN,
    RUN,
    Node,
    children_of,
    made_before,
    node,
    same_bytes,
    shards_in_order,
)
from tests.support.disguise import disguise
from tests.support.real import save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.faults]
RANK0 = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
RANK1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


real_saves = made_before(RUN, OTHER_RUN)


def _missing_rank(here: Node) -> None:
    here.save(2, shards=2)


def _truncated(here: Node) -> None:
    here.save(2)
    path = here.save_dir / "global_step2" / RANK1
    path.write_bytes(path.read_bytes()[:-1000])


def _empty(here: Node) -> None:
    here.save(2)
    (here.save_dir / "global_step2" / RANK0).write_bytes(b"")


def _two_saves(here: Node) -> None:
    here.save(2)
    shutil.copyfile(save_dir_of(RUN) / "global_step3" / RANK1, here.save_dir / "global_step2" / RANK1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_missing_rank, "optimizer shard of rank 1"),
        pytest.param(_truncated, "rank_1_mp_rank_00_optim_states.pt is cut off", marks=pytest.mark.full),
        pytest.param(_empty, "rank_0_mp_rank_00_optim_states.pt is empty", marks=pytest.mark.full),
        (_two_saves, "shards of two saves"),
    ],
)
def test_damaged_saves_are_named_and_never_committed(
    tmp_path: Path, damage: Callable[[Node], None], words: str
) -> None:
    """The reason names the file; the older checkpoint stays committed; resume moves the damaged one aside."""
    with node(tmp_path) as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        damage(here)
        here.wait(words, lambda: words in (here.checkpoint("global_step2")["reason"] or ""))
        time.sleep(1.5)
        assert set(here.commits()) == {"global_step1~g1"}
        assert here.local_tags() == {"global_step1", "global_step2"}
        here.stop()

        done = here.ckptd("resume", here.job_file)

        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith("global_step1")
        assert (here.save_dir / "latest").read_text() == "global_step1"
        assert [p.name for p in (here.save_dir / "_ckptd" / "aside").iterdir()]


def test_legacy_shards_prove_their_grid_and_are_converted(tmp_path: Path) -> None:
    """Pre-zip torch.save shards are read like any: committed by their own proof, then made universal."""
    with node(tmp_path) as here:
        here.save(1, tag="staged")
        disguise([(here.save_dir / "staged", tmp_path / "legacy", None, False)])
        shutil.rmtree(here.save_dir / "staged")
        here.start()
        shutil.copytree(tmp_path / "legacy", here.save_dir / "global_step1")
        here.wait_committed("global_step1~g1")
        (commit,) = here.commits().values()
        assert "dp_world_size" in commit["grid"]["proof"], "metadata, not names"
        here.wait("universal", lambda: "global_step1~g1" in here.commits("universal"))
        assert (here.nas / "global_step1" / RANK0).read_bytes() == (tmp_path / "legacy" / RANK0).read_bytes()


def test_a_legacy_shard_that_cannot_be_read_ships_raw_and_is_not_converted(tmp_path: Path) -> None:
    """Names prove its grid after a longer quiet time; status says why there is no universal form (H28)."""
    with node(tmp_path) as here:
        here.save(1, tag="staged")
        folder = tmp_path / "legacy"
        disguise([(here.save_dir / "staged", folder, None, False)])
        shutil.rmtree(here.save_dir / "staged")
        data = bytearray((folder / RANK0).read_bytes())
        data[data.index(b"\x88", data.index(b"little_endian"))] = 0x89  # False
        (folder / RANK0).write_bytes(data)
        here.start()
        shutil.copytree(folder, here.save_dir / "global_step1")
        here.wait_committed("global_step1~g1", 40)
        (commit,) = here.commits().values()
        assert "names" in commit["grid"]["proof"]
        here.wait("refused", lambda: "conversion-refused" in here.problems())
        assert (here.nas / "global_step1" / RANK0).read_bytes() == data


def test_foreign_things_are_left_alone(tmp_path: Path) -> None:
    """Foreign files and folders, links and a FIFO in save_dir change nothing and are never touched."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    with node(tmp_path, local="save_total_limit = 1") as here:
        (here.save_dir / "notes").mkdir()
        (here.save_dir / "notes" / "a.txt").write_text("mine")
        (here.save_dir / "link").symlink_to(outside)
        os.mkfifo(here.save_dir / "pipe")
        (here.save_dir / "global_step0_universal").mkdir()
        here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.wait("the limit", lambda: not (here.save_dir / "global_step1").exists())
        assert (here.save_dir / "notes" / "a.txt").read_text() == "mine"
        assert (outside / "precious").exists()
        assert (here.save_dir / "link").is_symlink()
        assert not (here.nas / "notes").exists()


def test_a_file_that_came_late_is_committed_beside_and_the_folder_goes(tmp_path: Path) -> None:
    """The result of an evaluation, written into a checkpoint after its COMMIT (P1, H8)."""
    with node(tmp_path, local="save_total_limit = 1") as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        (here.save_dir / "global_step1" / "eval_results.json").write_text('{"loss": 1}')
        here.save(2)
        here.wait_committed("global_step2~g1")
        here.wait("gone", lambda: not (here.save_dir / "global_step1").exists())
        assert (here.nas / "global_step1" / "eval_results.json").read_text() == '{"loss": 1}'
        assert (here.nas / "_ckptd" / "commits" / "global_step1~g1~zero~x1.json").exists()


def test_a_file_that_is_still_open_keeps_its_folder(tmp_path: Path) -> None:
    """It is not uploaded before whoever writes it is done; status says which file (P1, H8)."""
    with node(tmp_path, local="save_total_limit = 1") as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        with (here.save_dir / "global_step1" / "eval_results.json").open("w") as writer:
            writer.write("{")
            writer.flush()
            here.save(2)
            here.wait_committed("global_step2~g1")
            here.wait(
                "kept", lambda: "eval_results.json" in " ".join(here.checkpoint("global_step1")["keep"])
            )
            time.sleep(1)
            assert (here.save_dir / "global_step1" / RANK0).exists()
            assert not (here.nas / "global_step1" / "eval_results.json").exists()
            writer.write("}")
        here.wait("gone", lambda: not (here.save_dir / "global_step1").exists())


def test_modes_are_never_wider_and_nothing_of_ours_lies_in_a_checkpoint(tmp_path: Path) -> None:
    """Files in the NAS have the source's mode; `_ckptd` appears with the first checkpoint, not before."""
    with node(tmp_path) as here:
        here.start()
        time.sleep(1)
        assert not (here.save_dir / "_ckptd").exists()
        old = os.umask(0o077)
        try:
            here.save(1)
        finally:
            os.umask(old)
        here.wait_committed("global_step1~g1")
        here.wait("universal", lambda: "global_step1~g1" in here.commits("universal"))
        for path in (here.nas / "global_step1").glob("*.pt"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        for path in (here.nas / "global_step1_universal").rglob("*.pt"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        assert sorted(p.name for p in (here.save_dir / "global_step1").iterdir()) == sorted(
            p.name for p in (save_dir_of(RUN) / "global_step1").iterdir()
        )


def test_the_trainer_deletes_while_it_is_uploaded(tmp_path: Path) -> None:
    """The attempt ends without a COMMIT, the loss is said, the daemon goes on with the next one."""
    with node(tmp_path, remote='bandwidth = "300kB/s"') as here:
        here.start()
        here.save(1)
        here.wait("shipping", lambda: here.checkpoint("global_step1")["state"] == "uploading")
        shutil.rmtree(here.save_dir / "global_step1")
        here.wait("said", lambda: "vanished-uncommitted" in here.problems())
        here.write_job(remote="")
        here.stop()
        here.start()
        here.save(2)
        here.wait_committed("global_step2~g1")
        assert "global_step1~g1" not in here.commits()


def test_the_trainer_saves_again_while_it_is_uploaded(tmp_path: Path) -> None:
    """P4: the attempt over two saves is dropped; what is committed holds one save only."""
    with node(tmp_path, remote='bandwidth = "150kB/s"') as here:
        here.start()
        here.save(1)
        here.wait("shipping", lambda: here.checkpoint("global_step1")["state"] == "uploading")
        time.sleep(0.5)
        source = save_dir_of(OTHER_RUN) / "global_step1"
        for path in shards_in_order(source):
            shutil.copyfile(path, here.save_dir / "global_step1" / path.name)
        here.wait("a COMMIT", lambda: here.commits(), 60)
        folders = [c["folder"] for c in here.commits().values()]
        assert folders
        assert all(same_bytes(here, folder, OTHER_RUN, 1) for folder in folders)


def test_a_bit_that_flipped_after_the_save_is_not_uploaded(tmp_path: Path) -> None:
    """The zip's own CRC is checked in the upload's pass: a damaged record is named and never committed."""
    with node(tmp_path) as here:
        here.save(1, tag="staged")
        folder = here.save_dir / "staged"
        data = bytearray((folder / RANK0).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / RANK0).write_bytes(data)
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (1e9, 1e9))
        here.start()
        folder.rename(here.save_dir / "global_step1")
        here.wait("said", lambda: "source-damaged" in here.problems())
        here.wait("its row", lambda: here.checkpoint("global_step1")["state"] == "refused")
        assert not here.commits()
        row = here.checkpoint("global_step1")
        assert f"{RANK0}: record" in row["reason"]
        assert here.status()["disk"]["unfinished_bytes"] == row["bytes"] > 0
        shown = " ".join(here.ckptd("status", here.job_file).stdout.split())
        assert f"{row['next_step']} removes it" in shown
        words = shlex.split(row["next_step"])
        assert words[:2] == ["ckptd", "gc"]
        done = here.ckptd(*words[1:])
        assert done.returncode == 0, done.stderr
        assert not here.local_tags()
        here.wait("its end", lambda: here.status()["disk"]["unfinished_bytes"] == 0)
        assert not here.problems() & {"source-damaged", "vanished-uncommitted"}, "nothing was lost by that"
        # the same tag, saved well: nothing is left of the one before
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.wait("safe", lambda: here.status()["state"] == "ok")


def test_save_dir_appears_later_and_its_parent_must_exist(tmp_path: Path) -> None:
    """A missing save_dir is waited for; a missing parent is an error that names it (78)."""
    with node(tmp_path) as here:
        here.save_dir.rmdir()
        here.start()
        time.sleep(1.5)
        here.save_dir.mkdir()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.stop()
        shutil.rmtree(tmp_path / "nvme")
        done = here.ckptd("run", "--job", here.job_file, "--once")
        assert done.returncode == 78
        assert str(tmp_path / "nvme") in done.stderr
        assert "Traceback" not in done.stderr


def test_late_files_beside_a_damaged_manifest_cost_nothing_else(tmp_path: Path) -> None:
    """The remote was called not reachable, again and again, and got the next checkpoint late."""
    with node(tmp_path, remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        (manifest,) = (here.nas / "_ckptd" / "nodes" / "global_step1~g1~zero").iterdir()
        whole = manifest.read_bytes()
        manifest.write_bytes(whole.replace(b'"branch"', b'"Branch"'))
        (here.save_dir / "global_step1" / "eval_results.json").write_text('{"loss": 1}')
        here.wait("said", lambda: "upload-failed" in here.problems())
        here.save(2)
        here.wait_committed("global_step2~g1")
        time.sleep(3)
        assert "what came late" in here.log.read_text()
        assert here.log.read_text().count("what came late") <= 2
        assert here.status()["remotes"][0]["attached"]
        assert not {code for code in here.problems() if code.startswith("remote-")}
        manifest.write_bytes(whole)
        here.stop()
        here.start()
        beside = here.nas / "_ckptd" / "commits" / "global_step1~g1~zero~x1.json"
        here.wait("committed beside", beside.exists)
        here.wait("over", lambda: here.status() and "upload-failed" not in here.problems())


@pytest.mark.root
def test_a_sealed_shard_that_the_disk_does_not_give_holds_up_nothing_else(tmp_path: Path) -> None:
    """The remote was called unreachable, and what it holds not safe, at each try of that one checkpoint."""
    with node(tmp_path / "node", local="save_total_limit = 4\nforms = []", remote='forms = ["zero"]') as here:
        bad = here.save_dir / "global_step2" / RANK0
        # uploads alone read by preadv; the shard was read, judged and sealed before
        calls = ("-e", "trace=preadv2,preadv", "-e", "inject=preadv2,preadv:error=EIO")
        log = ("-o", str(tmp_path / "calls"))
        here.under = ("strace", "-f", "--seccomp-bpf", *log, "-P", str(bad), *calls)
        process = here.start()
        try:
            here.save(1)
            here.wait_committed("global_step1~g1")
            here.save(2)
            here.wait("the problem", lambda: "upload-failed" in here.problems())
            (said,) = (p for p in here.status()["problems"] if p["code"] == "upload-failed")
            assert said["text"] == f"global_step2 → nas: reading {RANK0} at 0: Input/output error"
            assert "mend the disk of this node" in said["next_step"]
            here.save(3)
            here.wait_committed("global_step3~g1")
            here.wait("it is safe", lambda: (here.status()["safe"] or {}).get("tag") == "global_step3")
            assert "INJECTED" in (tmp_path / "calls").read_text()
            assert set(here.commits()) == {"global_step1~g1", "global_step3~g1"}
            assert here.checkpoint("global_step2")["remotes"]["nas"]["zero"]["state"] in (
                "failed",
                "shipping",
            )
            assert {"global_step1", "global_step2", "global_step3"} <= here.local_tags()
            assert here.status()["remotes"][0]["attached"]
            assert not {code for code in here.problems() if code.startswith("remote-")}
            assert "remote nas: reading" not in here.log.read_text()
        finally:
            for pid in children_of(process.pid):  # strace would leave it behind
                os.kill(pid, signal.SIGKILL)
