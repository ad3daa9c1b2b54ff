"""Pipelines, tensor parallelism and experts through a whole daemon: both forms, resumed and restored."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.e2e.harness import Node, node, shards_in_order
from tests.e2e.test_convert_experts import AUTOEP, STAGE_2
from tests.e2e.test_convert_tensor_parallel import PIPELINE, TP_1, TP_3
from tests.support import experts
from tests.support.real import TAG, prepare, save_dir_of

KINDS = ("pipeline", "tensor 1", "tensor 3", "experts", "autoep")
pytestmark = [pytest.mark.real, pytest.mark.faults]


def _saved(kind: str) -> Path:
    if kind == "autoep":
        return experts.prepare(AUTOEP) / TAG
    recipe = {"pipeline": PIPELINE, "tensor 1": TP_1, "tensor 3": TP_3, "experts": STAGE_2}[kind]
    prepare([recipe])
    return save_dir_of(recipe) / TAG


def _write(here: Node, source: Path) -> None:
    """Model states, an optimizer shard, `latest`, then the others, with the daemon watching."""
    folder = here.save_dir / TAG
    folder.mkdir()
    for number, path in enumerate(shards_in_order(source)):
        if number == len(list(source.iterdir())) - 2:
            (here.save_dir / "latest").write_text(TAG)
            time.sleep(1.2)
            assert not here.commits(), "committed before it was complete"
        shutil.copyfile(path, folder / path.name)


@pytest.mark.parametrize("kind", KINDS if os.environ.get("CKPTD_FULL") else ("tensor 3", "experts"))
def test_it_arrives_in_both_forms_and_comes_back(tmp_path: Path, kind: str) -> None:
    source = _saved(kind)
    with node(tmp_path) as here:
        here.start()
        _write(here, source)
        here.wait_committed(f"{TAG}~g1")
        here.wait("universal", lambda: f"{TAG}~g1" in here.commits("universal"))
        for path in source.iterdir():
            assert (here.nas / TAG / path.name).read_bytes() == path.read_bytes()
        assert here.problems() == set(), here.status()["problems"]
        here.stop()
        shutil.rmtree(here.save_dir)
        here.save_dir.mkdir()

        done = here.ckptd("resume", here.job_file, "--world-size", 2)

        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(here.save_dir / "_ckptd" / "derived" / "universal" / TAG)
        assert ("tensor parallel degree" in done.stderr) == (kind.split()[0] in ("pipeline", "tensor"))
        assert ("keep ep_size 2" in done.stderr) == (kind in ("experts", "autoep"))
        done = here.ckptd("restore", here.job_file, "--to", tmp_path / "back")
        assert done.returncode == 0, done.stderr
        for path in source.iterdir():
            assert (tmp_path / "back" / TAG / path.name).read_bytes() == path.read_bytes()
