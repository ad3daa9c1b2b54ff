"""The real daemon beside a save that takes long: a rank's shard is in the remote before the save is whole."""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import Node, node
from tests.support.synthetic import write_stage12

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.faults]

OPTIM = "bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def shards(root: Path, step: int, lr: float = 0.1) -> Path:
    """A whole save of two ranks, somewhere else; of another `lr` other bytes, and as many."""
    folder = root / "made" / f"global_step{step}"

    def change(_rank: int, inner: dict[str, Any]) -> None:
        inner["base_optimizer_state"]["param_groups"][0]["lr"] = lr

    write_stage12(folder, [{"w": (200_000,)}], 2, step=step, change=change)
    return folder


def write(here: Node, made: Path, *names: str) -> None:
    """In place, as a trainer does."""
    folder = here.save_dir / made.name
    folder.mkdir(exist_ok=True)
    for name in names or [path.name for path in made.iterdir()]:
        (folder / name).write_bytes((made / name).read_bytes())


def is_there_as_written(here: Node, tag: str) -> bool:
    """Every file, by another reader."""
    written = {p.name: hashlib.sha256(p.read_bytes()).digest() for p in (here.save_dir / tag).iterdir()}
    held = {p.name: hashlib.sha256(p.read_bytes()).digest() for p in (here.nas / tag).iterdir()}
    return written == held


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    """A daemon that has committed one save."""
    with node(tmp_path, remote='forms = ["zero"]') as one:
        one.start()
        write(one, shards(tmp_path, 1))
        one.wait_committed("global_step1~g1")
        yield one


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_shard_at_rest_is_there_first_and_the_commit_is_of_what_was_written_last(
    here: Node, tmp_path: Path, is_killed: bool
) -> None:
    made = shards(tmp_path, 2)
    early = here.nas / made.name / OPTIM.format(rank=0)
    write(here, made, OPTIM.format(rank=0))
    here.wait("the shard, before its save is whole", early.exists)
    assert early.read_bytes() == (made / early.name).read_bytes()
    assert "global_step2~g1" not in here.commits()
    if is_killed:
        here.kill()
    again = shards(tmp_path / "again", 2, lr=0.2)
    assert (again / early.name).stat().st_size == early.stat().st_size
    assert (again / early.name).read_bytes() != early.read_bytes()
    write(here, again)
    if is_killed:
        here.start()
    here.wait_committed("global_step2~g1")
    assert is_there_as_written(here, made.name)


def test_what_no_save_came_of_is_taken_back(here: Node, tmp_path: Path) -> None:
    made = shards(tmp_path, 2)
    write(here, made, OPTIM.format(rank=0))
    here.wait("the shard", (here.nas / made.name / OPTIM.format(rank=0)).exists)
    shutil.rmtree(here.save_dir / made.name)
    here.wait("nothing of it", lambda: not (here.nas / made.name).exists())
    write(here, shards(tmp_path, 3))
    here.wait_committed("global_step3~g1")
    assert is_there_as_written(here, "global_step3")
