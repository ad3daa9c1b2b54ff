"""Too little memory, too few descriptors and processes; children that hang or lie (F25, F26).

The daemon degrades, says why, loses nothing; a child costs its own conversion, never the upload.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckptd.base.process import spawn
from ckptd.conversion.engine import children, supervisor
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import BehindError, CkptdError, StorageError
from tests.killpoints import judge, trainer
from tests.killpoints.life import Place, Scenario
from tests.support import cgroup
from tests.support.real import REPOSITORY
from tests.support.synthetic import Shapes, write_stage12

pytestmark = pytest.mark.faults
GROUPS: list[Shapes] = [{"embed": (64, 64), "w": (70, 65)}, {"bias": (33,)}]
OPTIONS = ConvertOptions(memory_budget_bytes=64 << 20, low_priority=False)
needs_cgroup = pytest.mark.skipif(cgroup.why_not() is not None, reason=str(cgroup.why_not()))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small save."""
    return write_stage12(tmp_path / "save" / "global_step7", GROUPS, 2).folder


def is_tidy(source: Path) -> bool:
    """Nothing but the save lies there, and no process of ours is left."""
    mine = psutil.Process().children(recursive=True)
    left = [p for p in mine if any("ckptd.conversion" in word for word in p.cmdline())]
    return [p.name for p in source.parent.iterdir()] == [source.name] and left == []


# --- children ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _starved(module: str, limit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children of that name start in a memory cgroup of so many bytes."""
    group = cgroup.CONTROLLER / f"ckptd-hungry-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    (group / "memory.swappiness").write_text("0")
    start = children.start
    # the child goes in by itself: were this process in there for a moment, the kernel might take it instead
    enter = ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]

    def started(name: str, **more: Any) -> Any:
        with monkeypatch.context() as patch:
            if name == module:
                patch.setattr(children, "spawn", lambda command, **rest: spawn([*enter, *command], **rest))
            return start(name, **more)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(children, "start", started)
            yield
    finally:
        _end_group(group)


@needs_cgroup
@pytest.mark.root
@pytest.mark.parametrize("module", ["planner_child", "executor_child"])
def test_a_child_that_the_kernel_kills_for_memory(
    source: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Said as a kill; the next attempt, with memory, is whole."""
    target = source.parent / "universal"
    with _starved(module, 4 << 20, monkeypatch), pytest.raises(CkptdError) as told:
        supervisor.convert(source, target, OPTIONS)
    assert isinstance(told.value, BehindError), told.value
    assert "killed" in told.value.message
    assert not target.exists()
    supervisor.convert(source, target, OPTIONS)
    assert (target / "ckptd.json").is_file()


@needs_cgroup
@pytest.mark.root
def test_an_inspection_that_the_kernel_kills_for_memory(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No facts without a reason, and no exception but that it does not start."""
    names = sorted(p.name for p in source.iterdir())
    with _starved("inspect_child", 4 << 20, monkeypatch):
        try:
            facts = inspect_files(source, names)
        except StorageError as error:
            assert "does not start" in error.message
        else:
            assert all(fact.reason for fact in facts)
    assert [fact.reason for fact in inspect_files(source, names)] == [None] * len(names)


def test_an_executor_that_is_stopped_is_ended(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP from somebody else: silence ends it."""
    real = children.start

    def start(name: str, **more: Any) -> Any:
        child = real(name, **more)
        if name == "executor_child":
            os.kill(child.pid, signal.SIGSTOP)
        return child

    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "SILENCE_SECONDS", 1.0)
        patch.setattr(children, "start", start)
        with pytest.raises(StorageError, match="hung"):
            supervisor.convert(source, source.parent / "universal", OPTIONS)
    assert is_tidy(source)
    supervisor.convert(source, source.parent / "universal", OPTIONS)
    assert (source.parent / "universal" / "ckptd.json").is_file()


@pytest.mark.full
def test_a_pause_that_we_order_is_no_silence(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it lasts."""
    monkeypatch.setattr(supervisor, "SILENCE_SECONDS", 5.0)
    until = time.monotonic() + 12
    supervisor.convert(
        source, source.parent / "universal", OPTIONS, should_pause=lambda: time.monotonic() < until
    )
    assert (source.parent / "universal" / "ckptd.json").is_file()


LIARS = {
    "says nothing": "pass",
    "makes an empty folder": "os.makedirs(os.path.join(work, 'out', 'zero'), exist_ok=True)",
    "describes another plan": "open(work + '/out/ckptd.json', 'w').write(json.dumps({'plan_sha256': 'x'}))",
    "describes no object": "open(work + '/out/ckptd.json', 'w').write('[]')",
}
NONSENSE = {
    "says no JSON": "print('done')",
    "says no object": "print('[1]')",
    "says no progress": "print('{}')",
    "says numbers that are none": (
        "print(json.dumps(dict(rss='much', bytes=[], files={}, cloned=None, phase=1)))"
    ),
    "has no end of line": "sys.stdout.write('x' * (17 << 20))",
}


@contextlib.contextmanager
def executors_that_run(script: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, a script of ours runs in the place of each executor."""

    def start() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)

    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "_start_executor", start)
        yield


@pytest.mark.parametrize("lie", LIARS)
def test_an_executor_that_ends_well_without_a_result(
    source: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """Exit status 0 proves nothing: nothing is published."""
    script = f"import json, os, sys\nwork = json.load(sys.stdin)['work']\n{LIARS[lie]}"
    with executors_that_run(script, monkeypatch), pytest.raises(StorageError, match="no whole result"):
        supervisor.convert(source, source.parent / "universal", OPTIONS)
    assert is_tidy(source)


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_an_executor_that_ends_well_and_said_nonsense(
    source: Path, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    """Ended for it, in words; nothing is left of it, and the next one is whole."""
    script = f"import json, sys\nsys.stdin.read()\n{NONSENSE[nonsense]}"
    with executors_that_run(script, monkeypatch), pytest.raises(StorageError, match="nonsense"):
        supervisor.convert(source, source.parent / "universal", OPTIONS)
    assert is_tidy(source)
    supervisor.convert(source, source.parent / "universal", OPTIONS)
    assert (source.parent / "universal" / "ckptd.json").is_file()


def _instead_of(module: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of that name run a script of ours from now on."""
    real = children.start

    def start(name: str, **more: Any) -> Any:
        if name != module:
            return real(name, **more)
        command = [sys.executable, "-c", f"import json, sys\nasked = json.load(sys.stdin)\n{script}"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, **more)

    monkeypatch.setattr(children, "start", start)


PLANS = {
    "none": "",
    "no JSON": "print('a plan')",
    "no object": "print('[]')",
    "of the future": "print('{\"ckptd_plan\": 99}')",
    "no header": "print('{\"ckptd_plan\": 4}')",
    "cut": "print('{\"ckptd_plan\": 4', end='')",
    "an end that is none": "print('{\"ckptd_plan\": 4}'); print('{\"end\": [1]}')",
    "words that are none": 'print(\'{"peak_rss_bytes": "much"}\', file=sys.stderr)',
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_planner_that_ends_well_without_a_plan(
    source: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """Likewise."""
    with monkeypatch.context() as patch:
        _instead_of("planner_child", PLANS[plan], patch)
        with pytest.raises(CkptdError):
            supervisor.convert(source, source.parent / "universal", OPTIONS)
    assert is_tidy(source)


STARTED = "print(json.dumps({'restrictions': []}), flush=True)\n"
FINDINGS = {
    "nothing": "",
    "no JSON": "print('fine')",
    "of no file": "print(json.dumps({'index': 99, 'final': True}))",
    "of a file before the first": "print(json.dumps({'index': -1, 'final': True}))",
    "of a file that is no number": "print(json.dumps({'index': 'x', 'final': True}))",
    "of another kind": "print(json.dumps({'index': 0, 'final': True, 'archive': 'whole'}))",
    "facts that are none": (
        "print(json.dumps({'index': 0, 'final': True, 'archive': 'zip', 'facts': {'global_steps': []}}))"
    ),
    "sizes that are none": "print(json.dumps({'index': 0, 'final': True, 'bytes': 'all'}))",
}


@pytest.mark.parametrize("finding", FINDINGS)
def test_an_inspector_that_ends_well_without_findings(
    source: Path, monkeypatch: pytest.MonkeyPatch, finding: str
) -> None:
    """Every file has a reason then: none of them passes for whole."""
    names = sorted(path.name for path in source.iterdir())
    with monkeypatch.context() as patch:
        _instead_of("inspect_child", STARTED + FINDINGS[finding], patch)
        facts = inspect_files(source, names)
    assert [fact.path for fact in facts] == names
    assert all(fact.reason for fact in facts), facts
    with monkeypatch.context() as patch:
        _instead_of("inspect_child", FINDINGS["no JSON"], patch)
        with pytest.raises(StorageError, match="does not start"):
            inspect_files(source, names)


# --- the daemon -------------------------------------------------------------------------------------------


class Fed:
    """A real daemon under a limit; `said` are the codes and texts of all problems that status showed."""

    def __init__(self, folder: Path, before: Callable[[], object] | None) -> None:
        self.place = Place(folder, Scenario("hungry", saves=2, backfill="all"))
        self.place.make()
        trainer.write(self.place.save_dir, trainer.saves()[0], is_constant=False)
        self.place.tell("written 1")
        self.status = self.place.save_dir / "_ckptd" / "state" / "status.json"
        self.said: set[tuple[str, str]] = set()
        self.log = (folder / "log").open("w+")
        command = [sys.executable, "-m", "ckptd", "run", "--job", str(folder / "run.toml")]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, preexec_fn=before, stdout=self.log, stderr=self.log
        )

    def until(self, what: Callable[[], object], seconds: float) -> bool:
        """Read status until it is so."""
        end = time.monotonic() + max(seconds, 200)
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
                for problem in json.loads(self.status.read_text())["jobs"][0]["problems"]:
                    self.said.add((problem["code"], problem["text"]))
            if what():
                return True
            time.sleep(0.1)
        return bool(what())

    @property
    def committed(self) -> set[tuple[int, str]]:
        """As the judge sees it; nothing else may be wrong."""
        verdict = judge.judge(self.place)
        assert verdict.wrong == []
        return verdict.committed

    def words(self) -> str:
        """What the log says."""
        self.log.flush()
        return Path(self.log.name).read_text()

    def end(self) -> None:
        """Stop it."""
        self.process.kill()
        self.process.wait(10)
        self.log.close()


@contextlib.contextmanager
def fed(folder: Path, before: Callable[[], object] | None = None) -> Iterator[Fed]:
    """A daemon for the block."""
    here = Fed(folder, before)
    try:
        yield here
    finally:
        here.end()


@pytest.mark.full
def test_too_few_descriptors_are_said_and_nothing_is_lost(tmp_path: Path) -> None:
    """Sixteen descriptors: no child starts. It is in status with its reason; with enough all is committed."""
    with fed(tmp_path, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 4096))) as here:
        assert here.until(lambda: any("Too many open files" in text for _, text in here.said), 40), (
            here.words()
        )
        assert here.committed == set()
        assert "Traceback" not in here.words()
        assert here.process.poll() is None
        resource.prlimit(here.process.pid, resource.RLIMIT_NOFILE, (1024, 4096))
        assert here.until(lambda: here.committed == {(10, "zero"), (10, "universal")}, 90), here.words()
        assert "internal" not in {code for code, _ in here.said}


PIDS = Path("/sys/fs/cgroup/pids")


def _end_group(group: Path) -> None:
    """Once the last of its processes is gone."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
    group.rmdir()


@pytest.mark.full
@pytest.mark.root
@pytest.mark.skipif(not os.access(PIDS / "cgroup.procs", os.W_OK), reason="no cgroup of processes to be had")
def test_too_few_processes_and_threads_are_said_and_nothing_is_lost(tmp_path: Path) -> None:
    """No thread and no child can be started: said, waited for, and when there is room all is committed."""
    group = PIDS / f"ckptd-hungry-{os.getpid()}"
    group.mkdir()
    try:
        (group / "pids.max").write_text("5")
        with fed(tmp_path, lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None) as here:
            assert here.until(lambda: here.said, 40), here.words()
            assert here.committed == set()
            assert here.process.poll() is None
            assert not [text for code, text in here.said if code == "internal"]
            (group / "pids.max").write_text("max")
            assert here.until(lambda: here.committed == {(10, "zero"), (10, "universal")}, 90), here.words()
    finally:
        _end_group(group)


@pytest.mark.full
@needs_cgroup
@pytest.mark.root
def test_a_daemon_that_the_kernel_kills_for_memory_goes_on(tmp_path: Path) -> None:
    """Killed wherever it was; started again with memory it ends what it began."""
    with fed(tmp_path) as here:
        assert here.until(lambda: here.status.exists(), 40)
        group = cgroup.CONTROLLER / f"ckptd-oom-{os.getpid()}"
        group.mkdir()
        try:
            (group / "memory.swappiness").write_text("0")
            (group / "memory.limit_in_bytes").write_text(str(1 << 20))
            trainer.write(here.place.save_dir, trainer.saves()[1], is_constant=False)
            here.place.tell("written 2")
            (group / "cgroup.procs").write_text(str(here.process.pid))
            assert here.process.wait(200) == -signal.SIGKILL
        finally:
            _end_group(group)
        assert judge.judge(here.place).wrong == []
        command = [sys.executable, "-m", "ckptd", "run", "--job", str(tmp_path / "run.toml"), "--once"]
        assert subprocess.run(command, cwd=REPOSITORY, check=False, timeout=200).returncode == 0
        assert {step for step, _ in here.committed} == {10, 20}


def test_threads_of_this_test_are_gone() -> None:
    """Nothing of the tests above goes on."""
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptd")]
