"""What earlier versions wrote is read for ever, or refused in words (docs/contract.md)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptd.core.model.manifest import FORMAT
from ckptd.maintenance.verify import Slice, Verifier
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.recover.select.sources import where_of
from ckptd.storage.journal.journal import Journal
from ckptd.storage.journal.schema import SCHEMA
from tests.golden.make import HERE
from tests.support.restore_scene import TAG, RestoreScene
from tests.unit.recover.test_recover_commands import ckptd

REMOTES = sorted(path.name for path in HERE.glob("remote-*"))
JOURNALS = sorted(path.name for path in HERE.glob("journal-*.db"))
READ = (f"journal-{SCHEMA}.db", "journal-3.db")


def test_this_versions_formats_are_kept() -> None:
    """Whoever changes a format runs `python -m tests.golden.make` and keeps the old files beside the new."""
    assert f"remote-{FORMAT}" in REMOTES
    assert f"journal-{SCHEMA}.db" in JOURNALS


@pytest.mark.parametrize("name", REMOTES)
def test_a_remote_verifies_and_restores(tmp_path: Path, name: str) -> None:
    """Every byte of it, in both forms."""
    nas = tmp_path / "nas" / "run"
    shutil.copytree(HERE / name, nas)
    found = Verifier(read_remote_inventory("nas", str(nas), None), read=Slice()).run(None)
    assert [(row.tag, row.form, row.verdict) for row in found.commits] == [
        ("global_step5", "zero", "good"),
        (TAG, "zero", "good"),
        (TAG, "universal", "good"),
    ]
    scene = RestoreScene(tmp_path)
    where = where_of(str(nas), {})
    assert scene.restore(where=where).path.name == TAG
    assert scene.got(TAG) == {p.name: p.read_bytes() for p in (nas / TAG).glob("*.pt")}
    scene.restore(where=where, form="universal", to=tmp_path / "universal")
    assert list((tmp_path / "universal").rglob("zero/*/fp32.pt"))


@pytest.mark.parametrize("name", JOURNALS)
def test_a_journal_is_read_or_set_aside(tmp_path: Path, name: str) -> None:
    """With its save, of the schema before too (rows get sums); else beside, and a new one is begun (P8)."""
    path = tmp_path / "journal.db"
    shutil.copyfile(HERE / name, path)
    journal = Journal(path)
    rows = [row.save.tag for row in journal.saves()]
    is_read = name in READ
    assert rows == (["global_step1"] if is_read else [])
    assert (journal.set_aside is None) == is_read
    assert journal.meta("job_id:nas") == ("golden" if is_read else None)
    journal.close()


@pytest.mark.parametrize(
    "document",
    [
        pytest.param("COMMIT", marks=pytest.mark.full),
        "manifest",
        pytest.param("remote.json", marks=pytest.mark.full),
    ],
)
def test_a_later_major_is_refused_and_nothing_changes(tmp_path: Path, document: str) -> None:
    """It is named; what can be read beside it is restored."""
    nas = tmp_path / "nas" / "run"
    shutil.copytree(HERE / f"remote-{FORMAT}", nas)
    path = {
        "COMMIT": nas / "_ckptd" / "commits" / f"{TAG}~g1~zero.json",
        "manifest": next((nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero").iterdir()),
        "remote.json": nas / "_ckptd" / "remote.json",
    }[document]
    held = json.loads(path.read_bytes()) | {"format": "9.0"}
    path.write_text(json.dumps(held))
    done = ckptd("restore", nas, "--to", tmp_path / "dir")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 65), done.stderr
    if done.returncode == 65:
        assert "upgrade ckptd" in done.stderr
    told = ckptd("verify", nas)
    assert told.returncode == 65
    assert ("damaged" if document == "manifest" else "9.0") in told.stdout + told.stderr
    assert "Traceback" not in told.stderr
    assert json.loads(path.read_bytes()) == held
