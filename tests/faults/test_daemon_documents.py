"""Documents in a remote that cannot be read, or that went: the remote's trouble, never the checkpoint's."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import PACE, node
from tests.support.synthetic import write_stage12

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Node

pytestmark = pytest.mark.faults


def _save(here: Node, step: int, wide: int = 8) -> None:
    write_stage12(here.save_dir / f"global_step{step}", [{"w": (wide, wide), "b": (4,)}], 2, step=step)
    (here.save_dir / "latest").write_text(f"global_step{step}")


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(data)
    beside.rename(path)


def test_an_identity_that_cannot_be_read_for_a_while(tmp_path: Path) -> None:
    """A NAS hands out an empty remote.json while a checkpoint is sent: that is the remote's damage, and over
    when it is."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]\nbandwidth = "400kB/s"') as here:
        here.start()
        identity = here.nas / "_ckptd" / "remote.json"
        _save(here, 1, wide=512)
        here.wait("an upload", lambda: b"uploading " in here.log.read_bytes())
        good = identity.read_bytes()
        _replace(identity, b"")
        here.wait("said", lambda: "remote-damaged" in here.problems())
        here.wait("tried", lambda: here.log.read_bytes().count(b"no valid RemoteIdentity") > 1)
        assert not here.problems() & {"source-damaged", "remote-unreachable"}
        assert not here.commits()
        _replace(identity, good)
        here.wait_committed("global_step1~g1", 90)
        here.wait("over", lambda: not here.problems() & {"remote-damaged", "source-damaged"})


@pytest.mark.parametrize("is_journal_lost", [False, True])
def test_a_commit_that_cannot_be_read_is_none(tmp_path: Path, *, is_journal_lost: bool) -> None:
    """The checkpoint is sent again as another generation; what is there is neither read into nor replaced."""
    with node(tmp_path, 'existing = "all"', "forms = []", 'forms = ["zero"]') as here:
        _save(here, 1)
        _save(here, 2)
        assert here.comes_to_rest()
        commit = here.nas / "_ckptd" / "commits" / "global_step1~g1~zero.json"
        good = commit.read_bytes()
        _replace(commit, good[:15])
        if is_journal_lost:
            for path in here.state.glob("journal.db*"):
                path.unlink()
        here.once()
        assert here.problems() - PACE == {"remote-damaged"}
        assert commit.read_bytes() == good[:15]
        _replace(commit, good)
        assert here.comes_to_rest()
        assert set(here.commits()) == {"global_step1~g1", "global_step1~g2", "global_step2~g1"}
        for path in (here.save_dir / "global_step1").iterdir():
            assert (here.nas / "global_step1.g2" / path.name).read_bytes() == path.read_bytes()


def test_a_form_that_a_remote_lost_is_sent_again(tmp_path: Path) -> None:
    """A NAS came back from a snapshot of before the universal form was there."""
    with node(tmp_path, local='forms = ["universal"]', remote='forms = ["zero", "universal"]') as here:
        _save(here, 1)
        assert here.comes_to_rest()
        (before,) = here.commits("universal").values()
        for path in (here.nas / "_ckptd").glob("*/*~universal*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(here.nas / "global_step1_universal")
        (here.nas / "latest_universal").unlink()
        assert here.comes_to_rest()
        (after,) = here.commits("universal").values()
        assert after["files"] == before["files"]
        assert (here.nas / "latest_universal").read_text() == "global_step1_universal"
