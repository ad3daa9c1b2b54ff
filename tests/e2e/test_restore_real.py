"""Restored for real: stock DeepSpeed goes on from a ZeRO and from a universal restore; S3 as a remote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.s3_node import s3_node
from tests.e2e.test_resume_real import ckptd
from tests.stores import servers
from tests.support.real import Recipe, Resume, losses_of, prepare, resume, save_dir_of

pytestmark = pytest.mark.real
RECIPE = Recipe(stage=2, world_size=2)
TAG = "global_step2"


def test_deepspeed_goes_on_from_a_restore(tmp_path: Path) -> None:
    """Same ranks: exactly the losses of the uninterrupted run. Another number: within 1e-3."""
    prepare([RECIPE])
    save_dir, nas, to = tmp_path / "nvme" / "run", tmp_path / "nas" / "run", tmp_path / "else"
    nas.parent.mkdir()
    shutil.copytree(save_dir_of(RECIPE), save_dir)
    done = ckptd("run", save_dir, nas, "--once", "--same-filesystem")
    assert done.returncode == 0, done.stderr
    # what was copied with cp -r is the same remote
    subprocess.run(["cp", "-r", nas, tmp_path / "copied"], check=True)
    shutil.rmtree(nas)
    done = ckptd("restore", tmp_path / "copied", "--to", to)
    assert (done.returncode, done.stdout) == (0, f"{to / TAG}\n"), done.stderr
    (losses,) = resume(2, [Resume(recipe=RECIPE, save_dir=to, tag=TAG, load="zero")], tmp_path)
    expected = losses_of(RECIPE)
    assert losses
    assert losses == {step: expected[step] for step in losses}
    other = tmp_path / "other"
    done = ckptd("restore", tmp_path / "copied", TAG, "--to", other, "--world-size", 1)
    assert done.returncode == 0, done.stderr
    named = (other / "latest_universal").read_text()
    assert done.stdout == f"{other / named}\n"
    (losses,) = resume(1, [Resume(recipe=RECIPE, save_dir=other, tag=named)], tmp_path)
    assert losses
    for step, loss in losses.items():
        assert abs(loss - expected[step]) <= 1e-3


if os.environ.get("CKPTD_FULL"):  # two starts of torch

    @pytest.mark.timeout(200)
    def test_deepspeed_goes_on_from_a_copy_by_hand(tmp_path: Path) -> None:
        """docs/recovery.md: `cp` of one tag and its name in `latest`, nothing of ckptd."""
        prepare([RECIPE])
        save_dir, nas, to = tmp_path / "nvme" / "run", tmp_path / "nas" / "run", tmp_path / "by-hand"
        nas.parent.mkdir()
        shutil.copytree(save_dir_of(RECIPE), save_dir)
        assert ckptd("run", save_dir, nas, "--once", "--same-filesystem").returncode == 0
        to.mkdir()
        subprocess.run(["cp", "-r", nas / TAG, to], check=True)
        (to / "latest").write_text(TAG)
        (losses,) = resume(2, [Resume(recipe=RECIPE, save_dir=to, tag=TAG, load="zero")], tmp_path)
        expected = losses_of(RECIPE)
        assert losses
        assert losses == {step: expected[step] for step in losses}


@pytest.mark.timeout(600)
@pytest.mark.faults
def test_killed_for_real_and_called_again(tmp_path: Path) -> None:
    """SIGKILL at six moments of a real process; whatever is named is whole, and the next call finishes."""
    prepare([RECIPE])
    save_dir, nas, to = tmp_path / "nvme" / "run", tmp_path / "nas" / "run", tmp_path / "else"
    nas.parent.mkdir()
    shutil.copytree(save_dir_of(RECIPE), save_dir)
    assert ckptd("run", save_dir, nas, "--once", "--same-filesystem").returncode == 0
    command = [sys.executable, "-m", "ckptd", "restore", str(nas), "--to", str(to)]
    good = {p.name: p.read_bytes() for p in (save_dir / TAG).iterdir()}
    killed = late = 0
    while killed < 6:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        staging = to / "_ckptd" / "staging"
        end = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < end and not staging.exists():
            time.sleep(0.001)
        time.sleep(killed * 0.005)
        process.kill()
        if process.wait() != -signal.SIGKILL:  # it was done before this busy machine let us go on
            assert process.returncode == 0
            late += 1
            assert late < 50
            shutil.rmtree(to)
            continue
        killed += 1
        if (to / TAG).exists():
            assert {p.name: p.read_bytes() for p in (to / TAG).iterdir()} == good
        else:
            assert not (to / "latest").exists()
        if killed % 3 == 0:
            done = ckptd("restore", nas, "--to", to)
            assert done.returncode == 0, done.stderr
            assert {p.name: p.read_bytes() for p in (to / TAG).iterdir()} == good
            shutil.rmtree(to)


@pytest.mark.timeout(600)
@pytest.mark.stores
def test_from_s3(tmp_path: Path) -> None:
    prepare([RECIPE])
    (tmp_path / "server").mkdir()
    with servers.moto(tmp_path / "server") as server, s3_node(tmp_path / "node", server) as here:
        shutil.copytree(save_dir_of(RECIPE), here.save_dir, dirs_exist_ok=True)
        assert here.ckptd("check", here.job_file, "--init-remote").returncode == 0
        assert here.once() == 0, here.log.read_text()[-3000:]
        done = here.ckptd("restore", here.job_file, "--to", tmp_path / "else")
        assert done.returncode == 0, done.stderr
        for path in (here.save_dir / TAG).iterdir():
            assert (tmp_path / "else" / TAG / path.name).read_bytes() == path.read_bytes()
        assert (tmp_path / "else" / "latest").read_text() == TAG
        here.environment["CKPTD_REMOTE_ENDPOINT_URL"] = server.endpoint
        proven = here.ckptd("verify", here.url, "--read-data", "--json")
        assert proven.returncode == 0, proven.stderr
        (remote,) = json.loads(proven.stdout)["remotes"]
        assert {row["verdict"] for row in remote["commits"]} == {"good"}
        key = next(k for k in here.objects(f"{TAG}/") if "rank_1" in k)
        data = bytearray(here.read(key))
        data[-200] ^= 1
        here.client.put_object(Bucket=here.bucket, Key=f"run/{key}", Body=bytes(data))
        assert here.ckptd("verify", here.url).returncode == 0
        proven = here.ckptd("verify", here.url, "--read-data")
        assert proven.returncode == 65
        assert key in proven.stderr
        done = here.ckptd("restore", here.job_file, TAG, "--to", tmp_path / "again")
        # its universal form is intact: the same training, and more of it than an older save
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith(f"derived/universal/{TAG}")
        assert f"{TAG}: " in done.stderr
        assert "another copy of it is looked for" in done.stderr
        assert "load_universal" in done.stderr
        done = here.ckptd("restore", here.job_file, TAG, "--to", tmp_path / "third", "--form", "zero")
        assert done.returncode == 65, done.stderr
