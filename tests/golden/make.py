"""`python -m tests.golden.make`: what this version writes, kept for ever; run once before a release.

`remote-<format>/` is a whole remote with two checkpoints and a universal form, `journal-<schema>.db` a
journal with one save. What is there already is left alone: an old release's files never change.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from pathlib import Path

from ckptd.base import files
from ckptd.core.model.layouts import Grid, Role
from ckptd.core.model.manifest import FORMAT
from ckptd.core.model.save import SaveWindow, SealedFile, SealedSave, Writer
from ckptd.storage.journal.journal import Journal
from ckptd.storage.journal.schema import SCHEMA
from ckptd.storage.local.scan import scan_folder
from tests.support.restore_scene import TAG, RestoreScene

HERE = Path(__file__).resolve().parent


def make_remote(target: Path) -> None:
    """Two committed checkpoints, the newer one in both forms."""
    with tempfile.TemporaryDirectory() as root:
        scene = RestoreScene(Path(root))
        scene.two()
        scene.commit_universal(TAG, 10)
        shutil.copytree(scene.nas, target)


def make_journal(target: Path) -> None:
    """A journal that knows one save."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "run" / "global_step1"
        folder.mkdir(parents=True)
        (folder / "mp_rank_00_model_states.pt").write_bytes(b"x")
        with files.opened_dir(folder.parent) as fd:
            listing = scan_folder(fd, folder.name)
        assert listing is not None
        save = SealedSave(
            tag="global_step1",
            folder=listing.folder,
            files=tuple(
                SealedFile(path=f.path, identity=f.identity, fingerprint="x", role=Role.MODEL)
                for f in listing.files
            ),
            grid=Grid(dp=1, mm_count=1, zero_stage=2),
            branch=1,
            step=1,
            save_seq=1,
            window=SaveWindow(first=0, last=0),
            writer=Writer(),
        )
        journal = Journal(Path(root) / "journal.db")
        journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
        journal.set_meta("job_id:nas", "golden")
        journal.close()
        with sqlite3.connect(Path(root) / "journal.db") as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.execute("PRAGMA journal_mode=DELETE")
        db.close()
        shutil.copyfile(Path(root) / "journal.db", target)


if __name__ == "__main__":
    remote, journal = HERE / f"remote-{FORMAT}", HERE / f"journal-{SCHEMA}.db"
    if not remote.exists():
        make_remote(remote)
    if not journal.exists():
        make_journal(journal)
