"""`ckptd resume` and `ckptd list` as commands: stdout, stderr and exit codes that a launch script reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]


def ckptd(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, without this machine's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    return subprocess.run(
        [sys.executable, "-m", "ckptd", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=kept | environ,
    )


def test_resume_prints_the_path_alone(scene: Scene) -> None:
    scene.save(5)
    scene.commit("global_step5", 5)
    scene.lose_node()
    done = ckptd("resume", scene.save_dir, scene.nas, "--world-size", "4", CKPTD_MIN_FREE="0%")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{scene.save_dir}/_ckptd/derived/universal/global_step5\n"
    assert '{"load_universal": true}' in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_codes(scene: Scene) -> None:
    assert ckptd("resume", scene.save_dir).returncode == 66
    assert ckptd("resume", scene.save_dir, scene.nas).returncode == 69
    assert ckptd("resume", scene.save_dir, "ftp://bucket/run").returncode == 78
    assert ckptd("resume", "no-such-job").returncode == 66
    assert ckptd("resume", scene.save_dir, scene.nas, "--node-rank", "1").returncode == 2
    assert ckptd("resume", scene.save_dir, scene.nas, "--world-size", "0").returncode == 2
    assert ckptd("resume", scene.root / "nowhere" / "run", scene.nas).returncode == 78
    scene.ground()
    done = ckptd("resume", scene.save_dir, scene.nas)
    assert (done.returncode, done.stdout) == (4, "")
    scene.save(5)
    scene.commit("global_step5", 5)
    for path in (scene.nas / "global_step5").iterdir():
        if path.suffix == ".pt":
            path.write_bytes(b"rot")
    scene.lose_node()
    assert ckptd("resume", scene.save_dir, scene.nas, CKPTD_MIN_FREE="0%").returncode == 65


def test_a_job_file_names_the_job(scene: Scene) -> None:
    """`resume SAVE_DIR URL` takes the name of the job file that watches save_dir."""
    scene.save(5)
    jobs = scene.root / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    (jobs / "llama.toml").write_text(
        f'save_dir = "{scene.save_dir}"\n[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n'
        'same_filesystem = true\n[local]\nmin_free = "0%"\n'
    )
    done = ckptd("check", "--init-remote", "--config-dir", scene.root / "conf")
    assert done.returncode == 0, done.stdout
    for job in ("llama", scene.save_dir, jobs / "llama.toml"):
        done = ckptd("resume", job, CKPTD_CONFIG_DIR=str(scene.root / "conf"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(scene.save_dir / "global_step5")
    done = ckptd("resume", scene.save_dir, scene.nas, "--config-dir", scene.root / "conf")
    assert done.returncode == 0, done.stderr
    assert ckptd("list", "llama", CKPTD_CONFIG_DIR=str(scene.root / "conf")).returncode == 0


def test_list(scene: Scene) -> None:
    for step, branch in ((100, 1), (60, 2)):
        scene.save(step)
        scene.commit(f"global_step{step}", step, branch=branch)
    scene.commit_universal("global_step100", 100)
    done = ckptd("list", scene.nas, "--json")
    assert done.returncode == 0, done.stderr
    (remote,) = json.loads(done.stdout)["remotes"]
    rows = remote["checkpoints"]
    assert [(r["tag"], r["branch"], r["step"]) for r in rows] == [
        ("global_step100", 1, 100),
        ("global_step60", 2, 60),
    ]
    assert [f["form"] for f in rows[0]["forms"]] == ["zero", "universal"]
    assert rows[1]["forms"][0]["pointers"] == ["latest"]
    assert rows[0]["forms"][1]["pointers"] == ["latest_universal"]
    table = ckptd("list", scene.nas).stdout
    assert "global_step60" in table
    assert "← latest" in table


def test_list_of_what_is_not_there(scene: Scene) -> None:
    assert ckptd("list", scene.root / "nowhere").returncode == 69
    assert ckptd("list", scene.save_dir).returncode == 66
    scene.ground()
    done = ckptd("list", scene.nas)
    assert done.returncode == 0
    assert "no committed checkpoint" in done.stdout


def test_pins_are_listed(scene: Scene) -> None:
    from ckptd.core.model.decision import Decision
    from tests.support.observing import record

    scene.save(5)
    scene.commit("global_step5", 5)
    store = scene.ground().store
    record(store, Decision(kind="pin", tag="global_step5"))
    assert "pinned" in ckptd("list", scene.nas).stdout
    record(store, Decision(kind="unpin", tag="global_step5", serial=1))
    assert "pinned" not in ckptd("list", scene.nas).stdout


def test_a_wrong_daemon_file_does_not_stop_a_resume(scene: Scene) -> None:
    scene.save(5)
    (scene.root / "conf").mkdir()
    (scene.root / "conf" / "ckptd.toml").write_text("nonsense = 1\n")
    done = ckptd("resume", scene.save_dir, CKPTD_CONFIG_DIR=str(scene.root / "conf"))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "global_step5"


def test_a_misspelt_tag_is_not_adopted(scene: Scene) -> None:
    scene.save(5)
    scene.commit("global_step5", 5)
    (scene.save_dir / "_ckptd" / "state").mkdir(parents=True)
    job = scene.root / "run.toml"
    remote = f'[[remote]]\nname = "nas"\nurl = "{scene.nas}"\nsame_filesystem = true\n'
    job.write_text(f'save_dir = "{scene.save_dir}"\n{remote}')
    done = ckptd("accept", job, "--existing", "global_step5", "global_stp5")
    assert (done.returncode, "no checkpoint global_stp5" in done.stderr) == (66, True), done.stderr
    assert [ckptd("pin", job, tag).returncode for tag in ("_ckptd", "..")] == [66, 66]
    assert not [*scene.save_dir.glob("_ckptd/state/decisions/*"), *scene.nas.glob("_ckptd/decisions/*")]
    done = ckptd("accept", job, "--existing", "global_step5")
    assert done.returncode == 0, done.stderr
    done = ckptd("gc", job, "--incomplete", "global_stp5")
    assert (done.returncode, done.stdout) == (66, ""), done.stderr


def test_inspect_of_a_url_says_what_looks_there() -> None:
    done = ckptd("inspect", "s3://bucket/run")
    assert (done.returncode, "ckptd list s3://bucket/run" in done.stderr) == (2, True), done.stderr


def test_options_of_run_that_are_wrong_end_in_a_sentence(scene: Scene) -> None:
    run = ("run", scene.save_dir, scene.nas, "--same-filesystem")
    for words, variables in (
        (("--once", "--log-level", "loud"), {}),
        (("--once", "--drain", "5"), {}),
        (("--once",), {"CKPTD_DRAIN": "5"}),
    ):
        done = ckptd(*run, *words, **variables)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert "drain" in done.stderr or "debug, info, warning, error" in done.stderr


def test_an_unset_variable_is_not_the_working_directory(scene: Scene) -> None:
    scene.save(5)
    for words in (("resume", ""), ("run", "", ""), ("pin", scene.save_dir, ""), ("check", "")):
        done = ckptd(*words)
        assert (done.returncode, "is empty" in done.stderr) == (2, True), done.stderr
