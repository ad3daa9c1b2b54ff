"""Forms that only a remote lists: made of the shards while they are sent, and nothing of them on the node."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.convert.options import ConvertOptions
from ckptd.convert.supervise import convert
from tests.e2e.harness import RUN, Node, children_of, node
from tests.real import Recipe, prepare, save_dir_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.real, pytest.mark.faults]
BF16 = "weights-bf16"
TAG = "global_step1"
PROBE = ".ckptd-tmp-"
"""What proving a right leaves for a moment (P19)."""
FORMS = f'forms = ["zero", "universal", "{BF16}"]'


def expected(folder: Path, form: str, run: Recipe = RUN, step: int = 1) -> Path:
    """The form as `ckptd convert` makes it where extents do not clone."""
    prepare([run])
    options = ConvertOptions() if form == "universal" else ConvertOptions(form="weights", dtype="bf16")
    convert(save_dir_of(run) / f"global_step{step}", folder / form, options)
    return folder / form


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextlib.contextmanager
def watched(here: Node) -> Iterator[set[str]]:
    """Every name that shows itself below `_ckptd` while this runs, but for state and the empty folders."""
    seen: set[str] = set()
    over = threading.Event()
    ours = here.save_dir / "_ckptd"

    def look() -> None:
        while not over.wait(0.002):
            for root in ("derived", "staging", "hold"):
                for _, folders, names in os.walk(ours / root):
                    seen.update(folders, names)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def maker_of(here: Node) -> int | None:
    """Process id of the child that makes a form just now."""
    for pid in children_of(here.processes[-1].pid):
        with contextlib.suppress(OSError):
            if b"making_child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def has(here: Node, form: str, step: int = 1) -> bool:
    return f"global_step{step}~g1" in here.commits(form)


def test_forms_that_only_a_remote_lists_never_lie_on_the_node(tmp_path: Path) -> None:
    """Byte for byte what `ckptd convert` makes; verified, restored; not sent again, journal lost or not."""
    wanted = {form: contents(expected(tmp_path, form)) for form in ("universal", BF16)}
    with node(tmp_path / "n", remote=FORMS, local="forms = []") as here:
        with watched(here) as seen:
            here.start()
            here.save(1)
            here.wait(BF16, lambda: has(here, BF16))
            here.wait("status", lambda: _state(here, BF16) == _state(here, "universal") == "committed")
        assert not {name for name in seen if not name.startswith(PROBE)}, seen
        commits = {form: here.commits(form) for form in wanted}
        for form, files in wanted.items():
            assert contents(here.nas / f"{TAG}_{form}") == files
            assert commits[form][f"{TAG}~g1"]["files"] == len(files)
        assert here.problems() == set(), here.status()["problems"]
        assert (here.nas / "latest_universal").read_text() == f"{TAG}_universal"
        assert not (here.save_dir / "latest_universal").exists()
        here.stop()
        for is_forgotten in (False, True):
            if is_forgotten:
                shutil.rmtree(here.state)
            assert here.once() == 0
            assert {form: here.commits(form) for form in wanted} == commits
        for form, files in wanted.items():
            to = tmp_path / form / "to"
            restored = here.ckptd("restore", here.nas, "--to", to, "--form", form)
            assert restored.returncode == 0, restored.stderr
            assert contents(Path(restored.stdout.strip())) == files
        verified = here.ckptd("verify", here.nas, "--read-data")
        assert verified.returncode == 0, verified.stdout


def _state(here: Node, form: str, remote: str = "nas") -> Any:
    return here.checkpoint(TAG)["remotes"][remote][form]["state"]
