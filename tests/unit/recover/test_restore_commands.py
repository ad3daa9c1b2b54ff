"""`ckptd restore` as a command, and what restore and resume do with several remotes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.config.schema import RemoteConfig
from ckptd.errors import NotFoundError, RemoteUnreachable
from ckptd.recover.plan import RecoveryOptions
from ckptd.recover.restore import Restore
from ckptd.recover.resume import Resume
from ckptd.recover.select.job import Owner
from ckptd.recover.select.sources import Where, named
from tests.support.restore_scene import MODEL, OPTIM, TAG, RestoreScene, scene
from tests.unit.recover.test_recover_commands import ckptd

__all__ = ["scene"]


def test_the_path_alone_on_stdout(scene: RestoreScene) -> None:
    scene.two()
    done = ckptd("restore", scene.nas, "--to", scene.dir)
    assert (done.returncode, done.stdout) == (0, f"{scene.dir / TAG}\n"), done.stderr
    assert "resume from step 10" in done.stderr
    done = ckptd("restore", scene.nas, "global_step5", "--to", scene.dir, "--world-size", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{scene.dir}/_ckptd/derived/universal/global_step5\n"
    assert '{"load_universal": true}' in done.stderr
    done = ckptd("restore", scene.nas, "--to", scene.root / "one", "--ranks", "1")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (scene.root / "one" / TAG).iterdir()} == {MODEL, OPTIM.format(1)}


def test_without_a_directory_it_lies_here(scene: RestoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ./TAG, said with the line that loads it; not where a training goes on from another checkpoint."""
    scene.two()
    scene.dir.mkdir()
    monkeypatch.chdir(scene.dir)
    done = run_here("restore", scene.nas)
    assert (done.returncode, done.stdout) == (0, f"{scene.dir / TAG}\n"), done.stderr
    assert f'load it: engine.load_checkpoint("{scene.dir}", "{TAG}")' in done.stderr
    assert run_here("restore", scene.nas, TAG).returncode == 0
    other = run_here("restore", scene.nas, "global_step5")
    assert (other.returncode, "--to . here all the same" in other.stderr) == (73, True), other.stderr
    assert "nothing was changed" in run_here("restore", scene.nas, TAG, "--dry-run").stderr


def run_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in the working directory."""
    command = [sys.executable, "-m", "ckptd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_exit_codes(scene: RestoreScene) -> None:
    to = ("--to", scene.dir)
    assert ckptd("restore", "no-such-job", *to).returncode == 66
    assert ckptd("restore", scene.root / "nowhere", *to).returncode == 69
    scene.ground()
    assert ckptd("restore", scene.nas, *to).returncode == 4
    scene.two()
    for ranks in ("", "1-", "a", "3-1", "0,,1", "-1", "0-99999999"):
        done = ckptd("restore", scene.nas, *to, f"--ranks={ranks}")
        assert done.returncode == 2, (ranks, done.stderr)
        assert "Traceback" not in done.stderr
    assert ckptd("restore", scene.nas, *to, "--ranks", "0,7").returncode == 66
    assert ckptd("restore", scene.nas, *to, "--form", "weights").returncode == 2
    assert ckptd("restore", scene.nas, *to, "--nnodes", "2", "--node-rank", "2").returncode == 2
    done = ckptd("restore", scene.nas, "global_stp10", *to)
    assert done.returncode == 66
    assert "nearest: global_step10" in done.stderr
    assert ckptd("restore", scene.nas, *to, "--remote", "s3").returncode == 66
    assert not scene.dir.exists()
    scene.dir.mkdir()
    (scene.dir / TAG).write_text("mine")
    assert ckptd("restore", scene.nas, *to).returncode == 73
    scene.flip(scene.nas / TAG / MODEL)
    done = ckptd("restore", scene.nas, TAG, "--to", scene.root / "two")
    assert (done.returncode, "next best" in done.stderr) == (65, False), done.stderr
    done = ckptd("restore", scene.nas, "--form", "weights-bf16", "--to", scene.root / "three")
    assert (done.returncode, "start training" in done.stderr) == (66, False), done.stderr
    assert ckptd("restore", scene.nas, "--to", scene.nas / "in").returncode == 65


class Two:
    """A job with two remotes, the second a copy of the first."""

    def __init__(self, scene: RestoreScene) -> None:
        scene.two()
        self.scene = scene
        self.second = scene.root / "second"
        shutil.copytree(scene.nas, self.second)
        self.remotes = tuple(
            RemoteConfig.model_validate({"name": name, "url": str(path)})
            for name, path in (("first", scene.nas), ("second", self.second))
        )
        self.where = Where(remotes=self.remotes, owner=Owner(job="run"))

    def cut_off(self, what: str, done: int, total: int) -> None:
        """The first remote goes away as soon as its first bytes arrived."""
        if "from first" in what and self.scene.nas.exists():
            self.scene.nas.rename(self.scene.root / "unplugged")


@pytest.fixture
def two(scene: RestoreScene) -> Two:
    return Two(scene)


def test_the_first_remote_that_answers(two: Two) -> None:
    scene = two.scene
    assert scene.restore(where=two.where, dry_run=True).plan.fetches[0].copy.remote.name == "first"
    scene.nas.rename(scene.root / "gone")
    done = scene.restore(where=two.where)
    assert done.plan.fetches[0].copy.remote.name == "second"
    assert "remote first" in "\n".join(scene.said)
    assert scene.got(TAG) == scene.shards(TAG)
    with pytest.raises(NotFoundError, match="third"):
        named(two.remotes, "third")
    with pytest.raises(RemoteUnreachable):
        scene.restore(where=Where(remotes=named(two.remotes, "first"), owner=Owner(job="run")))


def test_the_next_remote_when_one_goes_away(two: Two) -> None:
    scene = two.scene
    Restore(two.where, scene.dir, RecoveryOptions(), scene.said.append, two.cut_off).run()
    assert "going on with second" in "\n".join(scene.said)
    assert scene.got(TAG) == scene.shards(TAG)


def test_resume_takes_the_next_remote_too(two: Two) -> None:
    scene = two.scene
    good = scene.shards(TAG)
    job = scene.job().model_copy(update={"remotes": two.remotes})
    scene.lose_node()
    Resume(job, RecoveryOptions(), scene.said.append, two.cut_off).run()
    assert "going on with second" in "\n".join(scene.said)
    assert scene.shards(TAG) == good
    assert scene.pointer() == TAG


def test_resume_from_one_remote(two: Two) -> None:
    scene = two.scene
    job = scene.job().model_copy(update={"remotes": two.remotes})
    scene.lose_node()
    done = Resume(job, RecoveryOptions(remote="second"), scene.said.append).run()
    assert [fetch.copy.remote.name for fetch in done.plan.fetches] == ["second"]
    with pytest.raises(NotFoundError):
        Resume(job, RecoveryOptions(remote="third"), scene.said.append).run()


def test_no_remote_is_left(scene: RestoreScene) -> None:
    two = Two(scene)
    shutil.rmtree(two.second)
    with pytest.raises(RemoteUnreachable):
        Restore(two.where, scene.dir, RecoveryOptions(), scene.said.append, two.cut_off).run()
    assert scene.named() is None


def test_a_bad_copy_is_taken_from_the_other_remote(two: Two) -> None:
    scene = two.scene
    scene.flip(scene.nas / TAG / MODEL)
    scene.restore(TAG, where=two.where)
    assert scene.got(TAG) == scene.shards(TAG)
    assert "is damaged" in "\n".join(scene.said)


def test_remotes_are_listed_and_named(scene: RestoreScene, tmp_path: Path) -> None:
    two = Two(scene)
    jobs = tmp_path / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    text = f'save_dir = "{scene.save_dir}"\n'
    for name, path in (("first", scene.nas), ("second", two.second)):
        text += f'[[remote]]\nname = "{name}"\nurl = "{path}"\nsame_filesystem = true\n'
    (jobs / "run.toml").write_text(text)
    environ = {"CKPTD_CONFIG_DIR": str(tmp_path / "conf")}
    both = ckptd("list", "run", **environ)
    assert both.returncode == 0, both.stderr
    assert "first:" in both.stdout
    assert "second:" in both.stdout
    one = ckptd("list", "run", "--remote", "second", **environ)
    assert "first:" not in one.stdout
    done = ckptd("restore", "run", "--to", scene.dir, "--remote", "second", **environ)
    assert done.returncode == 0, done.stderr
    assert "from second" in done.stderr
    done = ckptd("restore", "run", "--to", scene.save_dir, **environ)
    assert done.returncode == 65
    assert f"ckptd resume {jobs / 'run.toml'}" in done.stderr
