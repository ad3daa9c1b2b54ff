"""kill -9 at every change of the disk, in every process of a conversion; full disks (P7, P13)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ckptd.base import files
from ckptd.conversion.engine import children
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions, ConvertReport
from ckptd.errors import BehindError, NoSpaceError, TargetExists
from ckptd.maintenance.inspection import inspect_folder
from ckptd.storage.local.scan import scan
from tests.faults import dying
from tests.support.processes import state_of, wait_gone
from tests.support.real import REPOSITORY
from tests.support.synthetic import Shapes, write_stage3, write_stage12

pytestmark = pytest.mark.faults
GROUPS: list[Shapes] = [{"embed": (64, 64), "w": (70, 65)}, {"bias": (33,)}]
OPTIONS = ConvertOptions(write_latest=True, memory_budget_bytes=64 << 20, low_priority=False)
NAME = "global_step7_universal"
FULL = bool(os.environ.get("CKPTD_FULL"))
TREE = dict[str, bytes]


@dataclass
class Scene:
    """A save_dir with one save, and what an undisturbed conversion of it makes."""

    save_dir: Path
    source: Path
    whole: TREE

    @property
    def target(self) -> Path:
        """Where it is converted to."""
        return self.save_dir / NAME

    def convert(self) -> ConvertReport:
        """As `ckptd convert` does."""
        return convert(self.source, self.target, OPTIONS)

    def is_nothing_or_whole(self) -> bool:
        """What DeepSpeed and ckptd may see after a kill; True when the result is there."""
        with files.opened_dir(self.save_dir) as fd:
            listing = scan(fd)
        tags = {self.source.name, *([NAME] if self.target.exists() else [])}
        assert {self.source.name} <= {f.tag for f in listing.folders} <= tags
        assert {c.tag for c in inspect_folder(self.save_dir).checkpoints} == tags
        if (self.save_dir / "latest_universal").exists():
            assert listing.latest_universal == NAME
            assert self.target.is_dir()
        if self.target.exists():
            assert tree(self.target) == self.whole
        return self.target.exists()

    def is_whole_and_tidy(self) -> None:
        """After the attempt that ends well."""
        assert self.is_nothing_or_whole()
        assert (self.save_dir / "latest_universal").read_text() == NAME
        assert [p.name for p in self.save_dir.iterdir() if p.name.startswith(".")] == []

    def reset(self) -> None:
        """Back to the beginning."""
        with files.opened_dir(self.save_dir) as fd:
            files.remove_tree(fd, NAME)
            files.remove_tree(fd, f".{NAME}.ckptd-partial")
        (self.save_dir / "latest_universal").unlink()


def tree(folder: Path) -> TREE:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(params=[pytest.param("stage2", marks=pytest.mark.full), "stage3"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    source = tmp_path / "save" / "global_step7"
    write = write_stage3 if request.param == "stage3" else write_stage12
    write(source, GROUPS, 2)
    (source.parent / "latest").write_text(source.name)
    convert(source, tmp_path / "whole", OPTIONS)
    return Scene(source.parent, source, tree(tmp_path / "whole"))


def _numbers(stride: int) -> Iterator[int]:
    """1, 2, 3 … in full; else the first ones and then every `stride`-th."""
    number = 1
    while True:
        yield number
        number += 1 if FULL or number < 3 else stride


@pytest.mark.parametrize(("child", "stride"), [("executor_child", 23), ("planner_child", 9)])
def test_killed_children(scene: Scene, monkeypatch: pytest.MonkeyPatch, child: str, stride: int) -> None:
    """At each kill: nothing to be seen; the next attempt completes, with the finished files of the first."""
    deaths = resumed = 0
    for number in _numbers(stride):
        with monkeypatch.context() as patched:
            patched.setattr(children, "start", dying.starting(child, number))
            try:
                scene.convert()
            except BehindError:
                deaths += 1
            else:
                break
        assert not scene.is_nothing_or_whole()
        finished = len(list((scene.save_dir / f".{NAME}.ckptd-partial" / "out").rglob("*.pt")))
        report = scene.convert()
        assert report.resumed_files >= finished - 1  # the second name of the superset is a link
        resumed += report.resumed_files
        scene.is_whole_and_tidy()
        scene.reset()
    scene.is_whole_and_tidy()
    assert deaths >= 4
    assert resumed > 0 or child == "planner_child"


def test_killed_parents_take_their_children_along(scene: Scene) -> None:
    """The process that plans, publishes and names; `rename` of the result is its one visible step."""
    deaths = published = 0
    arguments = ["convert", str(scene.source), str(scene.target), "--memory-budget", "64MiB"]
    for number in _numbers(6):
        done = subprocess.run(
            dying.command(number, *arguments), cwd=REPOSITORY, capture_output=True, check=False, timeout=60
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        deaths += 1
        if scene.is_nothing_or_whole():
            published += 1
        if (scene.save_dir / f".{NAME}.ckptd-partial" / "plan.jsonl").exists() or not published:
            scene.convert()
        else:  # killed while the last empty folder was removed: all else was done
            with pytest.raises(TargetExists):
                scene.convert()
        scene.is_nothing_or_whole()
        assert (scene.save_dir / "latest_universal").read_text() == NAME
        scene.reset()
    assert deaths >= 3
    assert published or not FULL


@pytest.mark.parametrize("scene", ["stage2"], indirect=True)
def test_a_parent_killed_from_outside_leaves_no_child(scene: Scene, tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom ckptd.conversion.engine.supervisor import convert\n"
        "def wait(p):\n"
        "    if p.phase != 'planning':\n        print(p.phase, flush=True); time.sleep(600)\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), on_progress=wait)"
    )
    command = [sys.executable, "-c", code, str(scene.source), str(scene.target)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        born = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert born
    wait_gone(child.pid for child in born)
    assert not scene.is_nothing_or_whole()
    scene.convert()
    scene.is_whole_and_tidy()


@pytest.mark.parametrize("scene", ["stage2"], indirect=True)
def test_a_published_result_is_finished_only_for_the_same_source(scene: Scene) -> None:
    """Killed after the rename: the same source completes it, a newer save finds the name taken."""
    arguments = ["convert", str(scene.source), str(scene.target)]
    number = 1
    while True:
        subprocess.run(dying.command(number, *arguments), cwd=REPOSITORY, capture_output=True, check=False)
        if scene.target.exists():
            break
        number += 1
    assert (scene.save_dir / f".{NAME}.ckptd-partial").is_dir()
    shard = next(scene.source.glob("*rank_1*optim*"))
    status = shard.stat()
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(TargetExists):
        scene.convert()
    assert tree(scene.target) == scene.whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 40 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_in_mid_conversion(small_disk: Path, tmp_path: Path) -> None:
    """Refused in words: before the first byte where it cannot fit, later where others take the room."""
    big: list[Shapes] = [{f"w{i}": (512, 512) for i in range(6)}]
    write_stage12(tmp_path / "big", big, 2)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(30 << 20))
    with pytest.raises(NoSpaceError, match=r"needs .* of new disk; .* are free"):
        convert(tmp_path / "big", small_disk / "u", OPTIONS)
    assert [p.name for p in small_disk.iterdir()] == ["filler"]

    filler.unlink()
    with pytest.raises(NoSpaceError, match=r"[Nn]o space"):
        _convert_while_filling(tmp_path / "big", small_disk)
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


def _convert_while_filling(source: Path, disk: Path) -> None:
    """Another writer takes all room as soon as the executor is started."""
    real = children.start

    def start(module: str, **rest: object) -> subprocess.Popen[bytes]:
        if module == "executor_child":
            with (disk / "filler").open("wb") as out:
                out.write(bytes(30 << 20))
        return real(module, **rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(children, "start", start)
        convert(source, disk / "u", OPTIONS)


def test_a_planner_is_not_stopped_before_it_dies_with_its_parent() -> None:
    """One that was stopped as it started outlived a killed daemon, stopped, for ever."""
    slow = (
        "import sys, time\n"
        "from ckptd.conversion.engine.sandbox import UNLIMITED, restrict\n"
        "sys.stdin.read()\n"
        "time.sleep(0.5)\n"
        "restrict(memory_bytes=UNLIMITED, cpu_seconds=UNLIMITED, file_bytes=UNLIMITED)\n"
        "time.sleep(60)\n"
    )
    program = (
        "import subprocess, sys\n"
        "from ckptd.conversion.engine.children import watch\n"
        f"command = [sys.executable, '-c', {slow!r}]\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "watch(child, b'', on_line=None, should_stop=None, should_pause=lambda: True, timeout_seconds=None)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    _wait_for_state(pid, "T")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait_for_state(pid, "Z", "")


def _wait_for_state(pid: int, *wanted: str) -> None:
    """Until a process is in one of these states; "": it is gone."""
    deadline = time.monotonic() + 30
    while (state := state_of(pid)) not in wanted:
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
