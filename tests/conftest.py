"""S3 servers as real processes, for whoever asks for them by name; one of each per test module.

Hypothesis judges no time: a slow moment of a shared machine is no defect.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.stores import servers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

settings.register_profile("ckptd", deadline=None)
settings.load_profile("ckptd")


WAITING = ("e2e", "cluster", "cluster_convert", "faults", "stores", "service")
"""Folders whose tests wait for trainings, daemons and servers most of their time."""
SHORT = "unit"
UNTRACED = ("model", "sim", "fleet", "seeded", "killpoints", "attacks")
"""Folders whose tests live long lives in pure code: tracing costs more than they do and shows no new line."""


def pytest_configure() -> None:
    """A shell starts what it puts into the background with SIGINT ignored, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # readline, which pytest imports, puts the size of a terminal into the environment behind Python's back
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
        os.unsetenv(name)


@pytest.fixture(autouse=True)
def _handlers_of_signals_stay() -> Iterator[None]:
    """Give back the handlers that a test left, which its forks would inherit: SIGTERM would not end them.

    One of ckptd's own is an error; libraries leave some when they are imported.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    left = {n: now for n, was in before.items() if (now := signal.getsignal(n)) is not was}
    for number in (n for n in left if before[n] is not None):
        signal.signal(number, before[number])
    ours = [n.name for n, now in left.items() if str(getattr(now, "__module__", "")).startswith("ckptd")]
    assert not ours, f"the test left ckptd's handlers of {', '.join(ours)}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without CKPTD_FULL=1 the tests marked `full` are left out; files come in the order of `in_order`."""
    if not os.environ.get("CKPTD_FULL"):
        longer = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=longer)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if folder_of(item.path) in UNTRACED:
            item.add_marker("no_cover")
        files.setdefault(item.path, []).append(item)
    items[:] = [item for file in in_order(files) for item in files[file]]


def folder_of(file: Path) -> str:
    """The folder of the tests that a file lies in; of those beside this one their own name."""
    return file.relative_to(Path(__file__).parent).parts[0]


def in_order(files: Iterable[Path]) -> list[Path]:
    """In turns one that waits and one that computes; the short ones last, so that workers end together."""
    waiting = [file for file in files if folder_of(file) in WAITING]
    waiting.sort(key=lambda file: WAITING.index(folder_of(file)))
    computing = sorted((f for f in files if folder_of(f) not in WAITING), key=lambda f: folder_of(f) == SHORT)
    return [file for pair in zip_longest(waiting, computing) for file in pair if file is not None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for `either_client` over botocore and over s3fs.

    With CKPTD_FULL=1 over one of them, as CKPTD_REMOTE_CLIENT says: `make stores-full` runs all twice.
    """
    if "either_client" in metafunc.fixturenames:
        is_one = os.environ.get("CKPTD_FULL") or metafunc.definition.get_closest_marker("botocore")
        kinds = [servers.CLIENT] if is_one else ["botocore", "s3fs"]
        metafunc.parametrize("either_client", kinds, indirect=True)


@pytest.fixture
def either_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the S3 stores of this test speak by."""
    monkeypatch.setattr(servers, "CLIENT", request.param)


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """moto: takes any keys."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """`rclone serve s3`: checks keys."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "not root: cannot mount a loop device"
    missing = [tool for tool in ("mkfs.xfs", "mount", "losetup") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """An XFS that clones, in a loop device."""
    why = _why_not()
    if why:
        pytest.skip(why)
    image, mounted = tmp_path / "image", tmp_path / "xfs"
    with image.open("wb") as out:
        out.truncate(512 << 20)
    mounted.mkdir()
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a loop device here: {done.stderr.decode().strip()}")
    try:
        yield mounted
    finally:
        # lazily: once in a while the run itself still has something of it open (what, was not found)
        subprocess.run(["umount", "-l", str(mounted)], check=True)
