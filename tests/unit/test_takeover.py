"""`ckptd takeover`: the new owner may write, the old one may not, and every COMMIT stays valid."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from ckptd import files
from ckptd.errors import RemoteNotOurs
from ckptd.journal import Journal
from ckptd.remote.attach import attach
from ckptd.remote.messages import RemoteSettings
from ckptd.remote.observe import still_ours
from ckptd.remote.open import open_store
from tests.unit.repair_scene import RepairScene, built, run_here, scene

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


def _state(scene: RepairScene) -> Path:
    path = scene.save_dir / "_ckptd" / "state"
    path.mkdir(parents=True, exist_ok=True)
    return path
