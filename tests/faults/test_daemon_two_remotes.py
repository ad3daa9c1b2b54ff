"""Several remotes of one job: each at its own pace, required or not, one away, one added later."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import RUN, Node, made_before, node

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.faults]


real_saves = made_before(RUN)


def second(root: Path, *, required: bool = True, more: str = "") -> str:
    """Keys of the first remote's end, and the second one."""
    return (
        f'forms = ["zero"]\n[[remote]]\nname = "other"\nurl = "{root}/other/run"\nsame_filesystem = true\n'
        f'forms = ["zero"]\nrequired = {str(required).lower()}\n{more}'
    )


def other_has(here: Node, step: int) -> bool:
    return (here.root / "other/run/_ckptd/commits" / f"global_step{step}~g1~zero.json").exists()


def identity(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "_ckptd" / "remote.json").read_text())
    return found


def test_both_get_it_under_one_job_id(tmp_path: Path) -> None:
    """A new job is called the same on both; retention is each one's own."""
    (tmp_path / "other").mkdir()
    with node(tmp_path, local="save_total_limit = 1", remote=second(tmp_path, more="keep_last = 1")) as here:
        here.start()
        for step in (1, 2, 3):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
            here.wait(f"{step} on the other", lambda n=step: other_has(here, n))  # type: ignore[misc]
        here.wait("the local limit", lambda: here.local_tags() == {"global_step3"})
        here.wait("the other's limit", lambda: not other_has(here, 1) and not other_has(here, 2))
        assert set(here.commits()) == {f"global_step{step}~g1" for step in (1, 2, 3)}
        first, other = identity(here.nas), identity(tmp_path / "other" / "run")
        assert first["job_id"] == other["job_id"]
        assert first["remote_id"] != other["remote_id"]


@pytest.mark.parametrize("required", [pytest.param(True, marks=pytest.mark.full), False])
def test_one_away_never_holds_the_other_up(tmp_path: Path, required: bool) -> None:
    """What a required remote lacks stays here; what an optional one lacks does not; both heal."""
    (tmp_path / "other").mkdir()
    with node(tmp_path, local="save_total_limit = 1", remote=second(tmp_path, required=required)) as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.wait("on the other", lambda: other_has(here, 1))
        (tmp_path / "other").rename(tmp_path / "gone")
        here.save(2)
        here.save(3)
        here.wait_committed("global_step2~g1")
        here.wait_committed("global_step3~g1")
        here.wait("said", lambda: here.problems() & {"remote-unreachable", "remote-not-ours"}, 40)
        text = next(p["text"] for p in here.status()["problems"] if p["code"].startswith("remote-"))
        assert text.startswith("other: ")
        if required:
            assert {"global_step2", "global_step3"} <= here.local_tags()
        else:
            here.wait("the limit", lambda: here.local_tags() == {"global_step3"}, 40)
        (tmp_path / "gone").rename(tmp_path / "other")
        here.wait("caught up", lambda: other_has(here, 3), 90)
        here.wait("the limit", lambda: here.local_tags() == {"global_step3"}, 90)


def test_one_added_later_gets_what_is_here(tmp_path: Path) -> None:
    """By a reload: the checkpoints that are still on the node go there too, newest first."""
    (tmp_path / "other").mkdir()
    with node(tmp_path, local="", remote='forms = ["zero"]') as here:
        daemon = here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.write_job(remote=second(tmp_path))
        daemon.send_signal(1)
        here.wait("both there", lambda: other_has(here, 1) and other_has(here, 2), 60)
        assert identity(here.nas)["job_id"] == identity(tmp_path / "other" / "run")["job_id"]
