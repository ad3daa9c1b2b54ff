"""A renamed job file, and a remote that is another's: every command judges as the daemon does (P2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote.documents import read_identity
from ckptd.storage.stores.open import open_store
from tests.support.repair_scene import RepairScene, built, run_here, scene
from tests.support.restore_scene import TAG

__all__ = ["built", "scene"]

COMMANDS = [
    ("list", "JOB"),
    ("verify", "JOB"),
    ("gc", "JOB", "--dry-run"),
    ("restore", "JOB", "--to", "ELSEWHERE", "--dry-run"),
    ("resume", "JOB", "--dry-run"),
    ("check", "JOB"),
    ("pin", "JOB", TAG),
]


def job_file(scene: RepairScene, name: str) -> Path:
    """A job of that name on the scene's remote, which belongs to job "run"."""
    path = scene.root / f"{name}.toml"
    path.write_text(
        f'save_dir = "{scene.save_dir}"\n[local]\nmin_free = "0%"\n[[remote]]\nname = "nas"\n'
        f'url = "{scene.nas}"\nsame_filesystem = true\n'
    )
    return path


def remember(scene: RepairScene, **known: str) -> Path:
    """What the daemon's journal knows of the remote."""
    state = scene.save_dir / "_ckptd" / "state"
    state.mkdir(parents=True, exist_ok=True)
    journal = Journal(state / "journal.db")
    for what, value in known.items():
        journal.set_meta(f"{what}:nas", value)
    journal.close()
    return state


def words(scene: RepairScene, command: tuple[str, ...], job: Path) -> list[str]:
    places = {"JOB": str(job), "ELSEWHERE": str(scene.root / "elsewhere")}
    return [places.get(word, word) for word in command]


@pytest.mark.parametrize("command", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_by_the_id_that_is_remembered(
    scene: RepairScene, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    identity = read_identity(open_store(str(scene.nas)))
    assert identity is not None
    renamed, same = job_file(scene, "renamed"), job_file(scene, "run")
    scene.quiet()

    state = remember(scene)
    done = run_here(capsys, *words(scene, command, renamed))
    assert (done.returncode, "belongs to job run" in done.stdout + done.stderr) == (69, True), done

    remember(scene, job_id=identity.job_id, remote_id=identity.remote_id)
    before = (state / "journal.db").read_bytes()
    for job in (renamed, same):
        done = run_here(capsys, *words(scene, command, job))
        assert done.returncode == 0, done
    # `gc` asks the journal for what uploads left; the others only read it
    assert command[0] == "gc" or (state / "journal.db").read_bytes() == before

    remember(scene, job_id="another", remote_id="another")
    done = run_here(capsys, *words(scene, command, same))
    assert (done.returncode, "(another)" in done.stdout + done.stderr) == (69, True), done


def test_a_remote_that_is_known_is_not_called_new(
    scene: RepairScene, capsys: pytest.CaptureFixture[str]
) -> None:
    """Emptied, or not mounted: `run` would not make it again, so `check` must not say so."""
    identity = read_identity(open_store(str(scene.nas)))
    assert identity is not None
    remember(scene, job_id=identity.job_id, remote_id=identity.remote_id)
    scene.nas.rename(scene.root / "away")
    scene.nas.mkdir()
    done = run_here(capsys, "check", job_file(scene, "run"))
    assert (done.returncode, "though it had one before" in done.stdout) == (69, True), done
    scene.nas.rmdir()
    done = run_here(capsys, "check", job_file(scene, "run"))
    assert (done.returncode, "is not initialised yet" in done.stdout) == (69, False), done


def test_a_new_place_needs_another_name_and_all_say_so(
    scene: RepairScene, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` sent to `takeover`, which sent to `check`."""
    identity = read_identity(open_store(str(scene.nas)))
    assert identity is not None
    remember(scene, job_id=identity.job_id, remote_id=identity.remote_id)
    job = job_file(scene, "run")
    job.write_text(job.read_text().replace(str(scene.nas), str(scene.root / "moved")))
    for words in (["check"], ["check", "--init-remote"], ["takeover"]):
        done = run_here(capsys, *words, job)
        assert done.returncode == 69
        assert "another name in the job file" in " ".join((done.stdout + done.stderr).split()), done
        assert "see `ckptd check`" not in done.stdout
        (scene.root / "moved").mkdir(exist_ok=True)
    job.write_text(job.read_text().replace('name = "nas"', 'name = "new"'))
    assert run_here(capsys, "check", "--init-remote", job).returncode == 0
    # made again: the id in it is another one, of the same job
    remember(scene, job_id=identity.job_id, remote_id="the-one-before")
    job = job_file(scene, "run")
    done = run_here(capsys, "check", job)
    assert (done.returncode, "`ckptd takeover JOB`" in done.stdout) == (69, True), done
    assert run_here(capsys, "takeover", job).returncode == 0
    assert run_here(capsys, "check", job).returncode == 0


def test_a_journal_that_cannot_be_read_is_no_obstacle(
    scene: RepairScene, capsys: pytest.CaptureFixture[str]
) -> None:
    state = scene.save_dir / "_ckptd" / "state"
    state.mkdir(parents=True, exist_ok=True)
    (state / "journal.db").write_bytes(b"no database at all")
    assert run_here(capsys, "list", job_file(scene, "run")).returncode == 0
    assert run_here(capsys, "list", job_file(scene, "renamed")).returncode == 69
