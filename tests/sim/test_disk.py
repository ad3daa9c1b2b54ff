"""The simulated disk: what fsync promises and nothing more."""

from __future__ import annotations

import os
import random

import pytest

from tests.sim.kernel import Kernel, Killed

RUN = "/sim/nvme/run"
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def kernel() -> Kernel:
    """A disk with one durable folder."""
    made = Kernel()
    disk = made.add_disk("nvme")
    made.mkdir(RUN)
    disk.flush_folder(disk.root)
    return made


def write(kernel: Kernel, name: str, data: bytes, *, flush: bool = False) -> None:
    fd = kernel.open(f"{RUN}/{name}", WRITE)
    kernel.write(fd, data)
    if flush:
        kernel.fsync(fd)
    kernel.close(fd)


def flush_names(kernel: Kernel) -> None:
    fd = kernel.open(RUN, os.O_RDONLY | os.O_DIRECTORY)
    kernel.fsync(fd)
    kernel.close(fd)


def left(kernel: Kernel, seed: int) -> dict[str, bytes]:
    """What lies in the folder after a power cut."""
    kernel.disks["nvme"].lose_power(random.Random(seed))
    return {name: kernel.content_of(f"{RUN}/{name}") for name in kernel.listdir(RUN)}


@pytest.mark.parametrize("seed", range(20))
def test_what_was_flushed_stays(kernel: Kernel, seed: int) -> None:
    write(kernel, "a", b"x" * 9000, flush=True)
    flush_names(kernel)
    assert left(kernel, seed) == {"a": b"x" * 9000}


@pytest.mark.parametrize("seed", range(40))
def test_what_was_flushed_and_appended_to_stays(kernel: Kernel, seed: int) -> None:
    """A line that was durable outlives a cut in the middle of the next one."""
    write(kernel, "a", b"x" * 5000, flush=True)
    flush_names(kernel)
    fd = kernel.open(f"{RUN}/a", os.O_WRONLY | os.O_APPEND)
    kernel.write(fd, b"y" * 5000)
    kernel.close(fd)
    found = left(kernel, seed)["a"]
    assert found[:5000] == b"x" * 5000
    assert set(found[5000:]) <= set(b"y\0")


def test_what_was_not_flushed_is_lost_torn_or_whole() -> None:
    seen = set()
    for seed in range(300):
        kernel = Kernel()
        disk = kernel.add_disk("nvme")
        kernel.mkdir(RUN)
        disk.flush_folder(disk.root)
        write(kernel, "a", b"x" * 9000)
        found = left(kernel, seed)
        if "a" not in found:
            seen.add("no name")
        elif found["a"] == b"x" * 9000:
            seen.add("whole")
        elif not found["a"]:
            seen.add("empty")
        elif b"\0" in found["a"]:
            seen.add("zeros")
        else:
            assert found["a"] == b"x" * len(found["a"])
            seen.add("cut")
    assert seen == {"no name", "whole", "empty", "zeros", "cut"}


@pytest.mark.parametrize("seed", range(40))
def test_a_rename_is_never_half(kernel: Kernel, seed: int) -> None:
    write(kernel, "new", b"new", flush=True)
    write(kernel, "target", b"old", flush=True)
    flush_names(kernel)
    kernel.rename(f"{RUN}/new", f"{RUN}/target")
    assert left(kernel, seed) in ({"new": b"new", "target": b"old"}, {"target": b"new"})


def test_a_name_may_outlive_its_content(kernel: Kernel) -> None:
    """The classic: written, renamed, never flushed."""
    torn = 0
    for seed in range(100):
        other = Kernel()
        disk = other.add_disk("nvme")
        other.mkdir(RUN)
        disk.flush_folder(disk.root)
        write(other, "temporary", b"x" * 9000)
        other.rename(f"{RUN}/temporary", f"{RUN}/final")
        torn += left(other, seed).get("final", b"x" * 9000) != b"x" * 9000
    assert torn > 10


def test_the_dead_make_no_calls(kernel: Kernel) -> None:
    kernel.ends_at = kernel.calls + 2
    kernel.mkdir(f"{RUN}/one")
    for _ in range(3):
        with pytest.raises(Killed):
            kernel.mkdir(f"{RUN}/two")
    kernel.forget_processes()
    assert kernel.listdir(RUN) == ["one"]
