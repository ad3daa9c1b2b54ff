"""`ckptd uninstall` on a node where a real daemon ran: what is ours goes, what is the trainer's stays."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ckptd.storage.journal.journal import Journal
from ckptd.storage.local import fs
from tests.e2e.harness import RUN, made_before, node, same_bytes
from tests.support.real import save_dir_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Node

pytestmark = [pytest.mark.real, pytest.mark.faults]


real_saves = made_before(RUN)


def everything(folder: Path) -> dict[str, bytes]:
    """Files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def trained(here: Node) -> set[str]:
    """What the trainer wrote."""
    return {name for name in everything(here.save_dir) if not name.startswith(("_ckptd", "latest_universal"))}


def a_hold(here: Node, tag: str) -> None:
    """As on a file system that clones, by copy: the row says that it is held."""
    journal = Journal(here.state / "journal.db")
    try:
        row = next(row for row in journal.saves() if row.save.tag == tag)
        folder = here.save_dir / fs.HOLD / f"{tag}.{row.id}"
        folder.mkdir(parents=True)
        (folder / "shard.pt").write_bytes(b"only here")
        journal.set_held(row.id, held=True)
    finally:
        journal.close()


def test_everything_of_ours_goes_and_nothing_else(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.wait("its universal form", lambda: "global_step1~g1" in here.commits("universal"))
        done = here.ckptd("uninstall", here.job_file)
        assert (done.returncode, "a daemon owns" in done.stderr) == (75, True)
        assert here.stop() == 0
        aside = here.save_dir / fs.ASIDE / "global_step9"
        aside.mkdir(parents=True)
        (aside / "shard.pt").write_bytes(b"the trainer's")
        (here.state / "mine.txt").write_text("not ckptd's")
        before, remote = everything(here.save_dir), everything(here.nas)
        done = here.ckptd("uninstall", here.job_file, "--dry-run")
        assert done.returncode == 0, done.stderr
        assert "would remove: latest_universal" in done.stdout
        assert "would remove: _ckptd/derived/universal/global_step1" in done.stdout
        assert everything(here.save_dir).keys() == before.keys()
        done = here.ckptd("uninstall", here.job_file)
        assert done.returncode == 0, done.stderr
        assert "stays: _ckptd/aside/global_step9" in done.stderr
        assert "mine.txt" in done.stderr
        left = everything(here.save_dir)
        wanted = {"_ckptd/aside/global_step9/shard.pt", "_ckptd/state/mine.txt"}
        assert left.keys() - wanted == {
            n for n in before if not n.startswith(("_ckptd/", "latest_universal"))
        }
        assert all(before[name] == data for name, data in left.items())
        assert everything(here.nas) == remote
        (here.state / "mine.txt").unlink()
        assert here.ckptd("gc", here.job_file, "--aside").returncode == 0
        assert here.ckptd("uninstall", here.job_file).returncode == 0
        assert not (here.save_dir / "_ckptd").exists()
        assert "nothing of ckptd's is here" in here.ckptd("uninstall", here.job_file).stdout
        # and a daemon that comes again takes up where the remote stands
        assert here.once() == 0
        assert same_bytes(here, "global_step1", RUN, 1)
        assert set(here.commits()) == {"global_step1~g1"}


def test_what_is_nowhere_else_is_named_and_refused(tmp_path: Path) -> None:
    """Nothing at all goes then; with the flag all of it."""
    with node(tmp_path) as here:
        here.save(1)
        assert here.once() == 0
        here.nas.rename(here.root / "away")
        here.save(2)
        here.once()
        a_hold(here, "global_step2")
        a_hold(here, "global_step1")
        (mine,) = (here.save_dir / "_ckptd/hold").glob("global_step1.*")
        shutil.copytree(mine, mine.with_name(f"another{mine.suffix}"))  # of another journal
        done = here.ckptd("uninstall", here.job_file, "--dry-run")
        assert done.returncode == 65, done.stderr
        assert "refused without --uncommitted: _ckptd/hold/global_step2." in done.stdout
        assert f"refused without --uncommitted: _ckptd/hold/another{mine.suffix}" in done.stdout
        assert "would remove: _ckptd/hold/global_step1." in done.stdout
        before = everything(here.save_dir).keys()
        done = here.ckptd("uninstall", here.job_file)
        assert (done.returncode, "global_step2 is not committed" in done.stderr) == (65, True)
        assert everything(here.save_dir).keys() == before
        written = trained(here)
        assert here.ckptd("uninstall", here.job_file, "--uncommitted").returncode == 0
        assert not (here.save_dir / "_ckptd").exists()
        assert trained(here) == written
        source = save_dir_of(RUN) / "global_step2"
        here_now = here.save_dir / "global_step2"
        assert all((here_now / p.name).read_bytes() == p.read_bytes() for p in source.iterdir())
