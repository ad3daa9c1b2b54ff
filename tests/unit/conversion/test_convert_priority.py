"""A converting child runs after everybody else, and gives that up where it starves (P11; adr/0223).

Root may leave SCHED_IDLE, an ordinary user with the usual limits may not: both are tried.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.real import REPOSITORY
from tests.support.synthetic import write_stage12

WITHOUT = ("setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice")
"""As an ordinary user: of root's rights the one that is asked for here is taken away."""
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
CONVERTS = """
import contextlib, json, os, sys, time
import psutil
from pathlib import Path
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import BehindError

source, out = map(Path, sys.argv[1:3])
os.sched_setaffinity(0, {int(sys.argv[3])})
began = time.monotonic()
seen = []

def look(progress):
    for child in psutil.Process().children():
        policy = os.sched_getscheduler(child.pid)
        nice = os.getpriority(os.PRIO_PROCESS, child.pid)
        of_session = int(Path(f"/proc/{child.pid}/autogroup").read_text().split()[-1])
        seen.append([time.monotonic() - began, policy, nice, of_session])

def is_seen():
    return sys.argv[5] in [str(one[3]) for one in seen]

options = ConvertOptions(low_priority=sys.argv[4] == "low")
with contextlib.suppress(BehindError):
    convert(source, out, options, on_progress=look, should_stop=is_seen)
print(json.dumps(seen))
"""

pytestmark = pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not group by session")


@dataclass
class Seen:
    """What an executor was seen with during its life."""

    seconds: list[float]
    policies: list[int]
    nices: set[int]
    of_session: list[int]


@dataclass
class Scene:
    """A folder, and the core that all runs on."""

    root: Path
    core: int

    def converted(self, may_leave: bool, parameters: int, priority: str = "low", until: str = "") -> Seen:
        """Convert on that core with the usual limits, and with or without the right to leave SCHED_IDLE.

        A thousand parameters are some 0.7 s of a core, and more on a busy machine; `until` its session has
        that nice value.
        """
        write_stage12(self.root / "save", [{f"blocks.{i}.w": (8, 8) for i in range(parameters)}], 2)
        out = self.root / "out"

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_NICE, (0, 0))

        words = [
            sys.executable,
            "-c",
            CONVERTS,
            str(self.root / "save"),
            str(out),
            str(self.core),
            priority,
            until,
        ]
        if _may_lower_nice() and not may_leave:
            words = [*WITHOUT, *words]
        done = subprocess.run(
            words, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, preexec_fn=limited
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen, "no look while it ran"
        assert bool(until) or (out / "ckptd.json").exists()
        return Seen([s[0] for s in seen], [s[1] for s in seen], {s[2] for s in seen}, [s[3] for s in seen])


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, max(os.sched_getaffinity(0)))


@pytest.fixture
def busy(scene: Scene) -> Iterator[Scene]:
    """Somebody else never leaves that core, in a session of their own, at the usual nice value."""
    words = f"import os\nos.sched_setaffinity(0, {{{scene.core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", words], start_new_session=True) as spinner:
        try:
            if not _sessions_are_groups(scene.core):
                pytest.skip("this machine does not group by session here")
            yield scene
        finally:
            spinner.kill()


def _sessions_are_groups(core: int) -> bool:
    """Tell whether a session at nice 19 still has its part of a core that another session is busy on."""
    words = (
        f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nos.nice(19)\nend = time.monotonic() + 1\n"
        "before = time.process_time()\nwhile time.monotonic() < end: pass\n"
        "print(time.process_time() - before)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, start_new_session=True)
    return float(done.stdout) > 0.03


def _may_lower_nice() -> bool:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice - 1)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    return True


RIGHTS = pytest.mark.parametrize("may_leave", [True, False] if _may_lower_nice() else [False])


@RIGHTS
def test_its_session_is_the_last_and_so_is_its_policy_where_it_can_be_left(
    scene: Scene, may_leave: bool
) -> None:
    seen = scene.converted(may_leave, 2500, until="19")
    assert 19 in seen.of_session, seen
    assert (os.SCHED_IDLE in seen.policies) == may_leave, seen
    assert min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10) in seen.nices, seen


@RIGHTS
def test_on_a_core_that_is_never_idle_it_falls_back(busy: Scene, may_leave: bool) -> None:
    # more than is done before it starves, however slow the machine
    seen = busy.converted(may_leave, 2500, until="10")
    assert 19 in seen.of_session, seen
    assert seen.of_session[-1] == 10, seen
    assert seen.policies[-1] == os.SCHED_BATCH, seen
    assert (os.SCHED_IDLE in seen.policies) == (may_leave), seen
    last = [at for at, nice in zip(seen.seconds, seen.of_session, strict=True) if nice == 19]
    assert last[-1] - last[0] < 6, seen


def test_who_waits_for_it_has_it_at_the_usual_priority(scene: Scene) -> None:
    seen = scene.converted(False, 500, "usual")
    assert set(seen.policies) == {os.SCHED_OTHER}, seen
    assert set(seen.of_session) <= {0, 19}, seen  # 19: the planning child
