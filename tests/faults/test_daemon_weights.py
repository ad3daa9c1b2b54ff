"""Weights that a remote lists: made once its ZeRO form is committed, shipped, then gone from the node."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptd.convert.options import ConvertOptions
from ckptd.convert.supervise import convert
from tests.e2e.harness import RUN, Node, node
from tests.real import prepare, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.faults]
FORM = "weights-bf16"
FORMS = f'forms = ["zero", "universal", "{FORM}"]'


def _same(folder: Path, expected: Path) -> bool:
    names = sorted(p.name for p in expected.iterdir())
    return names == sorted(p.name for p in folder.iterdir()) and all(
        (folder / name).read_bytes() == (expected / name).read_bytes() for name in names
    )


def _has(here: Node, step: int) -> bool:
    return f"global_step{step}~g1" in here.commits(FORM)


def _state(here: Node) -> str:
    return str(here.checkpoint("global_step1")["remotes"]["nas"][FORM]["state"])


def test_weights_go_where_they_are_listed(tmp_path: Path) -> None:
    """Beside both other forms, byte for byte what `ckptd convert` makes; nothing of it stays on the node.

    A kill in between costs nothing but time, and what was committed is not sent again.
    """
    prepare([RUN])
    convert(
        save_dir_of(RUN) / "global_step1",
        tmp_path / "expected",
        ConvertOptions(form="weights", dtype="bf16"),
    )
    with node(tmp_path / "n", remote=FORMS) as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.kill()
        here.start()
        here.wait(FORM, lambda: _has(here, 1))
        made = here.commits(FORM)["global_step1~g1"]
        assert (made["form"], made["folder"]) == (FORM, f"global_step1_{FORM}")
        assert _same(here.nas / f"global_step1_{FORM}", tmp_path / "expected")
        assert "global_step1~g1" in here.commits("universal")
        derived = here.save_dir / "_ckptd" / "derived"
        here.wait("the drop", lambda: not list((derived / FORM).glob("*")))
        here.wait(
            "status", lambda: here.checkpoint("global_step1")["remotes"]["nas"][FORM]["state"] == "committed"
        )
        assert (derived / "universal" / "global_step1").is_dir()
        assert here.problems() == set()
        here.stop()
        assert here.once() == 0
        assert here.commits(FORM) == {"global_step1~g1": made}
        listed = here.ckptd("list", here.nas, "--json")
        assert FORM in listed.stdout, json.loads(listed.stdout)
        shutil.rmtree(here.state)
        here.once()
        assert here.commits(FORM) == {"global_step1~g1": made}
        assert not list((derived / FORM).glob("*"))
        restored = here.ckptd("restore", here.nas, "--to", tmp_path / "to", "--form", FORM)
        assert restored.stdout.strip() == str(tmp_path / "to" / f"global_step1_{FORM}"), restored.stderr
        assert _same(tmp_path / "to" / f"global_step1_{FORM}", tmp_path / "expected")
        assert [p.name for p in (tmp_path / "to").iterdir() if p.name != "_ckptd"] == [f"global_step1_{FORM}"]
        assert (
            here.ckptd("restore", here.nas, "--to", tmp_path / "no", "--form", "weights-fp16").returncode == 4
        )
        verified = here.ckptd("verify", here.nas, "--read-data")
        assert verified.returncode == 0, verified.stdout
    shutil.rmtree(tmp_path / "n")
