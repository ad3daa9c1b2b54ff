"""Several nodes take one save or none, each by itself; `resume --tag` (P6, P18)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.config.schema import RemoteConfig
from ckptd.core.model.heartbeat import Heartbeat, heartbeat_key
from ckptd.core.model.manifest import sha256_of, to_bytes
from ckptd.errors import DamagedError, NotFoundError, RefusedError, RemoteError
from ckptd.recover.plan import RecoveryOptions
from ckptd.recover.resume import Resume
from ckptd.recover.select.copies import Nodes
from tests.support.recover_scene import Scene

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.recover.recovery import Recovered

OLD, NEW = "global_step100", "global_step200"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def is_of(rank: int, name: str) -> bool:
    """Node 0 ships all but the other node's shard."""
    return (name == OPTIM.format(1)) == (rank == 1)


class Job:
    """Two saves of two nodes, one rank each, on `near`; the older one alone on `far`. Fresh nodes resume."""

    def __init__(self, root: Path) -> None:
        self.root = root
        writer = Scene(root / "writer")
        for step in (100, 200):
            tag = writer.save(step)
            for rank in (1, 0):
                writer.node = f"n{rank}"
                writer.commit(tag, step, only=partial(is_of, rank))
            if step == 100:
                shutil.copytree(writer.nas, root / "far")
        self.near, self.far = writer.nas, root / "far"
        self.said: list[str] = []
        self.writer = writer

    def node(self, rank: int) -> Scene:
        """As it is left."""
        return Scene(self.root / f"fresh{rank}", node=f"n{rank}")

    def remotes(self, **urls: Path) -> tuple[RemoteConfig, ...]:
        """Of the job, where a node finds them."""
        return tuple(
            RemoteConfig.model_validate({"name": name, "url": str(path)}) for name, path in urls.items()
        )

    def resume(self, rank: int, **more: Any) -> Recovered:
        """On one fresh node; `nodes`: of how many (2), `near`, `far`: other places than are right."""
        count, tell = more.pop("nodes", 2), more.pop("tell", None)
        places = {name: more.pop(name, getattr(self, name)) for name in ("near", "far")}
        job = self.node(rank).job().model_copy(update={"remotes": self.remotes(**places)})
        nodes = Nodes(count=count, rank=rank, world_size=2)
        options = RecoveryOptions(world_size=2, nodes=nodes, **more)
        self.said.clear()
        return Resume(job, options, self.said.append, tell).run()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def flip(path: Path) -> None:
    """One bit of an object."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_node_with_a_damaged_shard_takes_no_older_save(job: Job) -> None:
    """The other node has read nothing of it and takes the newest."""
    flip(job.near / NEW / OPTIM.format(1))
    assert job.resume(0).path.name == NEW
    with pytest.raises(DamagedError) as caught:
        job.resume(1)
    assert caught.value.message.startswith(f"{NEW}: ")
    assert "; no other copy of it is left; every node takes it or none" in caught.value.message
    assert f"`--tag {OLD}` on every node" in caught.value.hint
    assert "--repair" in caught.value.hint
    assert not (job.node(1).save_dir / "latest").exists()
    for rank in (0, 1):
        assert job.resume(rank, tag=OLD).path.name == OLD
        assert (job.node(rank).save_dir / "latest").read_text() == OLD


def test_a_single_node_goes_back_as_before(job: Job) -> None:
    flip(job.near / NEW / OPTIM.format(1))
    assert job.resume(0, nodes=1).path.name == OLD
    assert "the next best is taken" in "\n".join(job.said)


def test_another_copy_of_the_same_save_will_do(job: Job) -> None:
    shutil.rmtree(job.far)
    shutil.copytree(job.near, job.far)
    flip(job.near / NEW / OPTIM.format(1))
    done = job.resume(1)
    assert (done.path.name, done.plan.fetches[0].copy.remote.name) == (NEW, "far")
    assert "another copy of it is looked for" in "\n".join(job.said)


def test_a_copy_that_a_daemon_found_damaged_is_taken_last(job: Job) -> None:
    """By its heartbeat, before a byte is read; where there is no other, it is tried all the same."""
    shutil.rmtree(job.far)
    shutil.copytree(job.near, job.far)
    commit = job.near / "_ckptd" / "commits" / f"{NEW}~g1~zero.json"
    document = Heartbeat(
        job_id="",
        job="run",
        node="n7",
        node_id="i",
        config_digest="c",
        ckptd_version="1",
        as_of="2020-01-01T00:00:00Z",
        state="ok",
        damaged=(sha256_of(commit.read_bytes()),),
    )
    (job.near / "_ckptd" / "heartbeats").mkdir(exist_ok=True)
    (job.near / heartbeat_key("n7")).write_bytes(to_bytes(document))
    for name in ("far", "near"):
        done = job.resume(1)
        assert (done.path.name, done.plan.fetches[0].copy.remote.name) == (NEW, name)
        shutil.rmtree(job.node(1).save_dir)
        shutil.rmtree(job.far / "_ckptd" / "commits", ignore_errors=True)


def test_a_manifest_that_cannot_be_believed(job: Job) -> None:
    """It counts as the newest all the same."""
    (manifest,) = (job.near / "_ckptd" / "nodes" / f"{NEW}~g1~zero").glob("n1~*")
    manifest.chmod(0o644)
    manifest.write_text("{}")
    with pytest.raises(DamagedError, match=NEW):
        job.resume(0)


def test_a_remote_that_one_node_does_not_see(job: Job) -> None:
    assert job.resume(0).path.name == NEW
    away = job.root / "not-mounted"
    with pytest.raises(RemoteError) as caught:
        job.resume(1, near=away)
    assert caught.value.exit_code == 69
    assert "near" in caught.value.message and "of the 2 nodes" in caught.value.message
    assert "`--remote far` to `ckptd resume` on every node" in caught.value.hint
    assert not (job.node(1).save_dir / "latest").exists()
    # the older one may be what is newer elsewhere, too
    with pytest.raises(RemoteError):
        job.resume(1, far=away)
    for rank in (0, 1):
        assert job.resume(rank, near=away, remote="far").path.name == OLD
    assert job.resume(0, near=away, nodes=1).path.name == OLD


def test_a_remote_of_weights_alone_is_not_asked_for(job: Job) -> None:
    weights = {"name": "w", "url": str(job.root / "none"), "forms": ["weights-bf16"], "required": False}
    remotes = (*job.remotes(near=job.near), RemoteConfig.model_validate(weights))
    one = job.node(1).job().model_copy(update={"remotes": remotes})
    options = RecoveryOptions(world_size=2, nodes=Nodes(count=2, rank=1, world_size=2))
    assert Resume(one, options, job.said.append).run().path.name == NEW


def test_a_remote_that_goes_away_half_way(job: Job) -> None:
    def cut_off(what: str, done: int, total: int) -> None:
        if job.near.exists():
            job.near.rename(job.near.with_name("unplugged"))

    with pytest.raises(RemoteError) as caught:
        job.resume(1, tell=cut_off)
    assert caught.value.exit_code == 69
    assert caught.value.message.startswith(f"{NEW} cannot be fetched: ")
    assert "every node takes it or none" in caught.value.message


def test_a_universal_form_in_place_of_shards(job: Job) -> None:
    """The other nodes load shards."""
    form = job.writer.commit_universal(NEW, 200)
    assert form is not None
    flip(job.near / NEW / OPTIM.format(1))
    assert job.resume(0).plan.form == "zero"
    with pytest.raises(DamagedError, match="no other copy"):
        job.resume(1)


def test_what_is_retired_meanwhile(job: Job) -> None:
    """By a daemon that should not run."""
    gone = next((job.near / "_ckptd" / "commits").glob(f"{NEW}~g1~zero*"))
    flip(job.near / NEW / OPTIM.format(1))  # the fetch may be over before the file could be taken away

    def retire(what: str, done: int, total: int) -> None:
        gone.unlink(missing_ok=True)

    with pytest.raises(RefusedError, match="was deleted from the remote while it was fetched") as caught:
        job.resume(1, tell=retire)
    assert "on every node" in caught.value.hint
    assert not (job.node(1).save_dir / "latest").exists()


def test_a_tag_that_no_save_has(job: Job) -> None:
    with pytest.raises(NotFoundError) as caught:
        job.resume(0, tag="global_step150")
    assert "'global_step150'" in caught.value.message
    assert NEW in caught.value.hint


def test_a_tag_on_one_node(job: Job) -> None:
    """Also one that only lies here; a damaged one is not replaced by another."""
    assert job.resume(0, nodes=1, tag=OLD).path.name == OLD
    here = job.node(0)
    here.save(300)
    assert job.resume(0, nodes=1).path.name == "global_step300"
    assert job.resume(0, nodes=1, tag="global_step300").path.name == "global_step300"
    flip(job.near / NEW / OPTIM.format(1))
    with pytest.raises(DamagedError) as caught:
        job.resume(0, nodes=1, tag=NEW)
    assert "every node" not in str(caught.value)


def test_the_command(job: Job) -> None:
    here = job.node(0)

    def resume(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ckptd", "resume", str(here.save_dir), str(job.near), *more],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    done = resume("--nnodes", "2", "--node-rank", "0", "--tag", OLD)
    assert (done.returncode, done.stdout.strip()) == (0, str(here.save_dir / OLD)), done.stderr
    assert resume("--tag", "global_step7").returncode == 66
