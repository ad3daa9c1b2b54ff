"""`ckptd takeover`: the new owner may write, the old one may not, and every COMMIT stays valid."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.core.model.heartbeat import DEAD_SECONDS, Heartbeat, heartbeat_key
from ckptd.errors import RemoteNotOurs
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote.attach import attach
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.messages import RemoteSettings
from ckptd.storage.remote.observe import still_ours
from ckptd.storage.stores.open import open_store
from tests.support.repair_scene import RepairScene, built, run_here, scene

__all__ = ["built", "scene"]


def settings(scene: RepairScene, job: str, **known: str) -> RemoteSettings:
    """A daemon's."""
    values: dict[str, object] = {
        "name": "nas",
        "url": str(scene.nas),
        "job": job,
        "save_dir": str(scene.save_dir),
        "same_filesystem": True,
        "node": "n0",
        "node_id": "i",
    }
    return RemoteSettings.model_validate(values | known)


@pytest.fixture
def job(scene: RepairScene) -> Path:
    """A job of another name on the same remote."""
    path = scene.root / "renamed.toml"
    path.write_text(
        f'save_dir = "{scene.save_dir}"\n[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n'
        "same_filesystem = true\n"
    )
    return path


def test_a_renamed_job(scene: RepairScene, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(str(scene.nas))
    old = attach(store, settings(scene, "run")).identity
    with pytest.raises(RemoteNotOurs, match="belongs to job run"):
        attach(store, settings(scene, "renamed"))
    journal = Journal(_state(scene) / "journal.db")
    journal.set_meta("job_id:nas", "of-another-remote")
    journal.close()

    fd = os.open(scene.save_dir, files.DIR_FLAGS)
    fcntl.flock(fd, fcntl.LOCK_EX)
    before = (scene.nas / "_ckptd" / "remote.json").read_bytes()
    assert run_here(capsys, "takeover", job).returncode == 75
    assert (scene.nas / "_ckptd" / "remote.json").read_bytes() == before
    os.close(fd)
    done = run_here(capsys, "takeover", job)
    assert done.returncode == 0, done.stderr
    assert "was job run's, is renamed's now" in done.stdout

    new = attach(store, settings(scene, "renamed")).identity
    assert (new.job, new.job_id) == ("renamed", old.job_id)
    assert new.remote_id != old.remote_id
    with pytest.raises(RemoteNotOurs):
        still_ours(store, old)
    with pytest.raises(RemoteNotOurs, match="was made again") as made_again:
        still_ours(store, new.model_copy(update={"remote_id": "ab" * 16}))
    assert "`ckptd takeover JOB`" in made_again.value.hint
    with pytest.raises(RemoteNotOurs):
        attach(store, settings(scene, "run", job_id=old.job_id, remote_id=old.remote_id))
    journal = Journal(_state(scene) / "journal.db")
    assert journal.meta("job_id:nas") == new.job_id
    assert journal.meta("remote_id:nas") == new.remote_id
    journal.close()
    taken = json.loads((scene.nas / "_ckptd" / "remote.json").read_bytes())["taken_from"]
    assert (taken["job"], taken["remote_id"]) == ("run", old.remote_id)
    assert run_here(capsys, "verify", job, "--read-data").returncode == 0
    assert "already" in run_here(capsys, "takeover", job).stdout

    # another node of the job, which knew the remote by its old id
    journal = Journal(_state(scene) / "journal.db")
    journal.set_meta("remote_id:nas", old.remote_id)
    journal.close()
    assert "this node knows it now" in run_here(capsys, "takeover", job).stdout
    assert json.loads((scene.nas / "_ckptd" / "remote.json").read_bytes())["remote_id"] == new.remote_id
    assert run_here(capsys, "takeover", scene.nas).returncode == 2


def beat(scene: RepairScene, node_id: str, *, seconds_ago: float = 0.0, ended: bool = False) -> None:
    """The heartbeat of node `x` of job `run`, as the store dates it."""
    said = Heartbeat(
        job_id="j", job="run", node="x", node_id=node_id, config_digest="d", ckptd_version="1",
        as_of="2026-01-01T00:00:00Z", state="ok", ended=ended,
    )  # fmt: skip
    Heartbeats(open_store(str(scene.nas))).put(said)
    at = time.time() - seconds_ago
    os.utime(scene.nas / heartbeat_key("x"), (at, at))


def test_not_while_another_job_writes_there(
    scene: RepairScene, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its newest checkpoints would be without a copy, and what it has here would go by our limits."""
    attach(open_store(str(scene.nas)), settings(scene, "run"))
    before = (scene.nas / "_ckptd" / "remote.json").read_bytes()
    beat(scene, "other", seconds_ago=DEAD_SECONDS - 60)
    done = run_here(capsys, "takeover", job)
    assert done.returncode == 75
    assert "node x of job run writes there, heard of 4 min ago" in done.stderr
    assert "stop that daemon first" in done.stderr
    assert (scene.nas / "_ckptd" / "remote.json").read_bytes() == before
    assert not list((scene.nas / "_ckptd").glob("probe*"))


@pytest.mark.parametrize("how", ["dead", "ended", "own"])
def test_a_node_that_is_gone_or_our_own_holds_nothing_up(
    scene: RepairScene, job: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    attach(open_store(str(scene.nas)), settings(scene, "run"))
    Journal(_state(scene) / "journal.db").close()
    (_state(scene) / "node_id").write_text("ours")
    said = {"dead": {"seconds_ago": DEAD_SECONDS + 60}, "ended": {"ended": True}, "own": {}}[how]
    beat(scene, "ours" if how == "own" else "other", **said)  # type: ignore[arg-type]
    done = run_here(capsys, "takeover", job)
    assert done.returncode == 0, done.stderr
    assert "is renamed's now" in done.stdout


def _state(scene: RepairScene) -> Path:
    path = scene.save_dir / "_ckptd" / "state"
    path.mkdir(parents=True, exist_ok=True)
    return path
