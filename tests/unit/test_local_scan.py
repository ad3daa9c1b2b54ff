"""What a look at save_dir makes of folders that are another user's and closed to us."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptd import files
from ckptd.core.listing import SaveDirListing
from ckptd.daemon.intake import IN_FLIGHT_SECONDS, Intake
from ckptd.daemon.state import Quiet
from ckptd.local.scan import scan
from tests.unit.recover_scene import Scene, known_save

NOBODY = 65534


def looked(save_dir: Path, before: SaveDirListing | None = None) -> SaveDirListing:
    """A look as somebody who is not root."""
    for folder in (save_dir, *save_dir.parents)[:-1]:
        if folder.stat().st_uid == 0 and "pytest" in str(folder):
            folder.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        with files.opened_dir(save_dir) as fd:
            return scan(fd, before=before)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_users_closed_folder_is_left_alone_and_a_checkpoint_is_waited_for(tmp_path: Path) -> None:
    """`lost+found`, where save_dir is a file system of its own, stopped the whole job."""
    scene = Scene(tmp_path)
    scene.save(5)
    (scene.save_dir / "lost+found").mkdir(mode=0o700)
    listing = looked(scene.save_dir)
    assert [folder.tag for folder in listing.folders] == ["global_step5"]
    assert "lost+found" in listing.foreign
    assert listing.closed == ()
    (scene.save_dir / "global_step6").mkdir(mode=0o700)
    assert looked(scene.save_dir, listing).closed == ("global_step6",), "perhaps a checkpoint: status says so"
    (scene.save_dir / "global_step5").chmod(0o700)
    with pytest.raises(PermissionError):
        looked(scene.save_dir, listing)
    (scene.save_dir / "global_step5").chmod(0o755)
    os.chown(scene.save_dir / "lost+found", NOBODY, NOBODY)
    (scene.save_dir / "lost+found").chmod(0)
    with pytest.raises(PermissionError):
        looked(scene.save_dir, listing)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_checkpoint_of_ours_that_was_closed_meanwhile_has_not_vanished(tmp_path: Path) -> None:
    """P5: the first look of a daemon that was started after rights were lost knows of no look before."""
    scene = Scene(tmp_path)
    _, state = known_save(scene, tmp_path / "journal.db")
    intake = Intake(scene.job(), state, SimpleNamespace(), SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    (scene.save_dir / "global_step5").chmod(0o700)
    listing = looked(scene.save_dir)
    with files.opened_dir(scene.save_dir) as fd, pytest.raises(PermissionError, match="global_step5"):
        intake.look(listing, fd, 0.0)
    state.journal.close()


def test_a_folder_that_somebody_writes_to_is_in_flight_however_long_it_rests(tmp_path: Path) -> None:
    """A rank that hangs in its save for ten minutes: nothing changes, and it is no leftover (H32)."""
    scene = Scene(tmp_path)
    _, state = known_save(scene, tmp_path / "journal.db")
    intake = Intake(scene.job(), state, SimpleNamespace(), SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    with files.opened_dir(scene.save_dir) as fd:
        (folder,) = scan(fd).folders
    state.quiet[folder.tag] = Quiet(digest=folder.digest, since_seconds=0.0, first_seen_unix=0.0)

    def is_recent(now_seconds: float) -> bool:
        return intake._recently_changed(folder, now_seconds)

    shard = scene.save_dir / folder.tag / folder.files[0].path
    assert is_recent(IN_FLIGHT_SECONDS - 1)
    assert not is_recent(IN_FLIGHT_SECONDS + 1)
    with shard.open("rb"):
        assert not is_recent(IN_FLIGHT_SECONDS + 1), "a reader is no writer"
    with shard.open("r+b"):
        assert is_recent(IN_FLIGHT_SECONDS + 1)
    assert not is_recent(IN_FLIGHT_SECONDS + 1)
    state.journal.close()
