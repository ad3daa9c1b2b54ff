"""JOB and SAVE_DIR mean one job to every verb, though its file is wrong or it never had one (P16, P18)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckptd.config.loader import job_from_arguments, resolve_job
from ckptd.errors import ConfigError
from ckptd.recover.select.job import job_named
from ckptd.storage.local.state_dir import prepare_state_dir, remember_job
from tests.support.recover_scene import Scene, scene

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["scene"]


def ckptd(scene: Scene, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """A verb, with the scene's configuration directory."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    where = {"CKPTD_CONFIG_DIR": str(scene.root / "conf")}
    command = [sys.executable, "-m", "ckptd", *map(str, words)]
    return subprocess.run(
        command, env=clean | where | environ, capture_output=True, text=True, check=False, timeout=120
    )


WRONG = {
    "a key": 'save_dir = "{d}"\nsetle = "5s"\n[[remote]]\nname = "nas"\nurl = "{n}"\n',
    "no quotes": 'save_dir = {d}\n[[remote]]\nname = "nas"\nurl = "{n}"\n',
    "another word": 'output_dir = "{d}"\n[[remote]]\nname = "nas"\nurl = "{n}"\n',
    "no remote": 'save_dir = "{d}/"\n',
    "a glob": 'save_dir = "{p}/*"\n[[remote]]\nname = "nas"\nurl = "{n}"\n',
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_of_save_dir_is_no_missing_file(scene: Scene, wrong: str) -> None:
    """`resume SAVE_DIR` took an older checkpoint here and ended with 0; the newer one is in the remote."""
    scene.commit(scene.save(8), 8)
    scene.lose_node()
    scene.save(2)
    jobs = scene.root / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    text = WRONG[wrong].format(d=scene.save_dir, n=scene.nas, p=scene.save_dir.parent)
    (jobs / "llama.toml").write_text(text)
    for verb in (
        ["resume", scene.save_dir],
        ["list", scene.save_dir],
        ["pin", scene.save_dir, "global_step8"],
    ):
        done = ckptd(scene, *verb)
        assert (done.returncode, done.stdout) == (78, ""), done
        assert "llama.toml" in done.stderr


def test_without_any_remote_resume_says_so(scene: Scene) -> None:
    scene.save(2)
    done = ckptd(scene, "resume", scene.save_dir)
    assert done.returncode == 0
    assert f"no remote is known of {scene.save_dir}" in done.stderr


def test_other_wrong_files_are_others(scene: Scene) -> None:
    jobs = scene.root / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    (jobs / "other.toml").write_text(f'save_dir = "{scene.save_dir}2"\nx = 1\nname = "named so"\n')
    assert not resolve_job(str(scene.save_dir), {}, config_dir=scene.root / "conf").remotes


def test_a_wrong_file_is_found_by_the_name_it_gives(scene: Scene) -> None:
    jobs = scene.root / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    (jobs / "file.toml").write_text(f'name = "llama"\nsave_dir = "{scene.save_dir}"\nx = 1\n')
    with pytest.raises(ConfigError, match=r"file\.toml"):
        resolve_job("llama", {}, config_dir=scene.root / "conf")


def test_a_save_dir_is_found_through_a_link(scene: Scene) -> None:
    jobs = scene.root / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    (scene.root / "link").symlink_to(scene.save_dir.parent)
    (jobs / "llama.toml").write_text(
        f'save_dir = "{scene.save_dir}"\n[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n'
    )
    spelt = scene.root / "link" / scene.save_dir.name
    assert resolve_job(str(spelt), {}, config_dir=scene.root / "conf").name == "llama"


def test_every_verb_knows_the_url_of_a_run(scene: Scene) -> None:
    """Two arguments once; a real daemon; then SAVE_DIR alone."""
    scene.save(2)
    run = ("run", scene.save_dir, scene.nas, "--same-filesystem", "--save-total-limit", 7, "--once")
    assert ckptd(scene, *run, CKPTD_SETTLE="1s", CKPTD_NAME="llama").returncode == 0
    for verb in ("list", "verify", "gc", "drain", "resume", "accept"):
        existing = ["--existing"] if verb == "accept" else []
        done = ckptd(scene, verb, scene.save_dir, *existing)
        assert done.returncode == 0, (verb, done.stderr)
    assert "global_step2" in ckptd(scene, "list", scene.save_dir).stdout
    for option in ((), ("--remove",)):
        assert ckptd(scene, "pin", scene.save_dir, "global_step2", *option).returncode == 0
    job = job_named(str(scene.save_dir), {}, config_dir=scene.root / "conf")
    assert (job.name, job.settle_seconds, job.local.save_total_limit) == ("llama", 1.0, 7)
    assert job.remotes[0].same_filesystem
    now = job_named(str(scene.save_dir), {"CKPTD_SETTLE": "9s"}, config_dir=scene.root / "conf")
    assert now.settle_seconds == 9.0
    other = job_named(str(scene.save_dir), {"CKPTD_URL": str(scene.root / "other")})
    assert other.remotes[0].url == str(scene.root / "other")
    scene.lose_node()
    assert "no remote is known" in ckptd(scene, "resume", scene.save_dir).stderr


def test_only_what_is_suspect_is_accepted(scene: Scene) -> None:
    """`accept` of a complete checkpoint was recorded, and meant nothing."""
    scene.save(2)
    run = ("run", scene.save_dir, scene.nas, "--same-filesystem", "--once")
    assert ckptd(scene, *run, CKPTD_SETTLE="1s").returncode == 0
    done = ckptd(scene, "accept", scene.save_dir, "global_step2")
    assert (done.returncode, done.stdout) == (65, "")
    assert "global_step2 is complete; only a suspect checkpoint is accepted" in done.stderr
    for step in (4, 6):
        folder = scene.save_dir / scene.save(step)
        for number, shard in enumerate(sorted(folder.glob("*.pt"))):
            os.utime(shard, (1_700_000_000 + 9000 * number,) * 2)
    done = ckptd(scene, "accept", scene.save_dir, "global_step4", "global_step2")
    assert (done.returncode, done.stdout) == (65, ""), "nothing is recorded beside an error"
    done = ckptd(scene, "accept", scene.save_dir, "global_step4", "global_step6")
    assert done.returncode == 0, done
    assert "global_step4: accepted, recorded" in done.stdout
    assert "global_step6: accepted, recorded" in done.stdout


def test_a_file_outside_the_configuration_is_remembered(scene: Scene) -> None:
    """`run --job FILE`: its errors are SAVE_DIR's later too."""
    from ckptd.config.loader import load_job

    file = scene.root / "elsewhere.toml"
    file.write_text(f'save_dir = "{scene.save_dir}"\n[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n')
    state = scene.save_dir / "_ckptd" / "state"
    scene.save(2)
    prepare_state_dir(state)
    remember_job(state, load_job(file, check_paths=False))
    assert job_named(str(scene.save_dir), {}).file == file
    file.write_text("save_dir = 3")
    with pytest.raises(ConfigError, match=r"elsewhere\.toml"):
        job_named(str(scene.save_dir), {})


def test_a_copied_save_dir_is_no_job(scene: Scene) -> None:
    """`cp -a` of a save_dir takes the memory along; it is of the other one."""
    state = scene.root / "copy" / "_ckptd" / "state"
    state.mkdir(parents=True)
    remember_job(state, job_from_arguments(str(scene.save_dir), str(scene.nas), check_paths=False))
    assert (state / "job.json").exists()
    assert not job_named(str(scene.root / "copy"), {}).remotes


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("nas:/export/x", "sftp://nas/export/x"),
        ("user@host:/path", "sftp://user@host/path"),
        ("nas:export", "sftp://nas/export"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("gs:/bucket/x", "gs://bucket/x"),
        ("sftp:/host/x", "sftp://host/x"),
        ("file:/mnt/x", "file:///mnt/x"),
        ("C:\\\\x", "Linux"),
    ],
)
def test_an_address_is_no_directory(tmp_path: Path, url: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_from_arguments(str(tmp_path), url)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("url", "environ", "said"),
    [
        ("s3://bucket/run", {"CKPTD_REMOTE_KEEP_LAST": "ten"}, 'CKPTD_REMOTE_KEEP_LAST = "ten": '),
        ("s3://", {}, 'URL = "s3://": '),
        ("s3://bucket/run", {"CKPTD_SETTLE": "soon"}, 'CKPTD_SETTLE = "soon": '),
        ("s3://bucket/run", {"CKPTD_SAVE_TOTAL_LIMIT": "few"}, 'CKPTD_SAVE_TOTAL_LIMIT = "few": '),
        (
            "s3://bucket/run",
            {"CKPTD_SETTLE": "soon", "CKPTD_REMOTE_KEEP_LAST": "ten"},
            "2 mistakes: (1) CKPTD_",
        ),
    ],
)
def test_what_was_typed_is_named_and_no_key(
    tmp_path: Path, url: str, environ: dict[str, str], said: str
) -> None:
    """There is no file with a `remote[0]` in it."""
    with pytest.raises(ConfigError) as caught:
        job_from_arguments(str(tmp_path / "run"), url, {}, environ)
    assert said in caught.value.message
    assert "remote[" not in caught.value.message
    assert "[local]" not in caught.value.message


def test_arguments_that_lie_in_each_other_are_named_as_typed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        job_from_arguments(str(tmp_path / "run"), str(tmp_path / "run" / "copies"))
    assert "URL lies inside SAVE_DIR" in caught.value.message
    with pytest.raises(ConfigError, match=r'SAVE_DIR = "\S+/none/run": its parent'):
        job_from_arguments(str(tmp_path / "none" / "run"), "s3://bucket/run")


def test_a_directory_with_a_colon_can_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no other machine"):
        job_from_arguments(str(tmp_path / "a"), "file://host/x")
    assert job_from_arguments(str(tmp_path / "a"), "./x:y").remotes[0].url.endswith("/x:y")
    assert job_from_arguments(str(tmp_path / "a"), f"{tmp_path}/x:y").remotes


def test_a_changed_url_is_named_by_check(scene: Scene) -> None:
    """Of two arguments, after a real run with others; the remote is had under a name of its own."""
    scene.save(2)
    run = ("run", scene.save_dir, scene.nas, "--same-filesystem", "--once")
    assert ckptd(scene, *run, CKPTD_SETTLE="1s").returncode == 0
    new = scene.root / "nas" / "new"
    again = ("check", scene.save_dir, new)
    done = ckptd(scene, *again, CKPTD_REMOTE_SAME_FILESYSTEM="true")
    assert done.returncode != 0
    assert str(scene.nas) in done.stdout + done.stderr
    assert "its url was changed" in " ".join((done.stdout + done.stderr).split())
    assert "had one before" not in done.stdout + done.stderr
    named = ckptd(scene, *again, CKPTD_REMOTE_SAME_FILESYSTEM="true", CKPTD_REMOTE_NAME="second")
    assert "its url was changed" not in " ".join(named.stdout.split()), named


def test_a_job_file_that_is_not_there(scene: Scene) -> None:
    done = ckptd(scene, "run", "missing.toml")
    assert (done.returncode, "no file missing.toml" in done.stderr) == (66, True), done.stderr


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (another user's save_dir)")
def test_a_decision_as_the_wrong_user(scene: Scene) -> None:
    """The daemon runs, as another user: `run the daemon once first` led nowhere."""
    scene.commit(scene.save(8), 8)
    os.chown(scene.save_dir, 65534, 65534)
    done = ckptd(scene, "pin", scene.save_dir, "global_step8", CKPTD_URL=str(scene.nas), CKPTD_NAME="run")
    assert done.returncode == 66, done
    assert "(65534)'s: call this as the user whose daemon watches it" in done.stderr
