"""A disk under another device number is the same one only if a save on it proves that."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.save import SealedSave
from ckptd.daemon.device import check_device
from ckptd.daemon.state.problems import Problems
from ckptd.storage.journal.journal import Journal
from tests.support.core_views import sealed

BEFORE = 77
"""The number that the disk had."""


def noted_before(save_dir: Path, journal: Journal) -> SealedSave:
    """A save as it lies there, noted while its disk had another number."""
    planned = sealed(1)
    (file,) = planned.files
    path = save_dir / planned.tag / file.path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"shard")
    identity = replace(files.identity_of(path.stat()), dev=BEFORE)
    folder = replace(planned.folder, dev=BEFORE, ino=path.parent.stat().st_ino)
    save = planned.model_copy(
        update={"files": (file.model_copy(update={"identity": identity}),), "folder": folder}
    )
    journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
    facts = FileFacts(path=f"{save.tag}/{file.path}", bytes=5, archive=Archive.ZIP)
    journal.put_facts([(identity, facts)])
    journal.set_meta("device", str(BEFORE))
    return save


def check(save_dir: Path, journal: Journal) -> bool:
    """Whether it is told that the disk is another one."""
    problems = Problems()
    with files.opened_dir(save_dir) as fd:
        check_device(journal, fd, problems, str(save_dir))
    return any(problem.code == "device-changed" for problem in problems.all())


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty one."""
    return Journal(tmp_path / "journal.db")


def test_the_same_disk_is_given_its_new_number(tmp_path: Path, journal: Journal) -> None:
    """Saves, and what was read of their files, are known again; the journal can still be read."""
    save_dir = tmp_path / "run"
    save = noted_before(save_dir, journal)
    assert not check(save_dir, journal)
    (row,) = journal.saves()
    now = os.stat(save_dir).st_dev
    assert row.save.folder == replace(save.folder, dev=now)
    (file,) = row.save.files
    assert file.identity == files.identity_of((save_dir / save.tag / file.path).stat())
    assert journal.facts(f"{save.tag}/{file.path}", file.identity) is not None
    journal.close()
    again = Journal(tmp_path / "journal.db")
    assert again.set_aside is None
    assert again.meta("device") == str(now)


def test_a_copy_on_another_disk_is_another_disk(tmp_path: Path, journal: Journal) -> None:
    """Bytes, names and mtimes alike: inodes and times of change are not."""
    save_dir = tmp_path / "run"
    save = noted_before(save_dir, journal)
    shutil.copytree(save_dir, tmp_path / "copy")
    assert check(tmp_path / "copy", journal)
    assert [row.save for row in journal.saves()] == [save]
    assert journal.meta("device") == str(BEFORE)


def test_an_empty_folder_is_another_disk(tmp_path: Path, journal: Journal) -> None:
    """The disk is not mounted."""
    noted_before(tmp_path / "run", journal)
    (tmp_path / "empty").mkdir()
    assert check(tmp_path / "empty", journal)
