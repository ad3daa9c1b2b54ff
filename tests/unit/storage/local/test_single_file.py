"""A checkpoint that is one file of save_dir: listed, deleted and put back without touching its neighbours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.core.model.layouts import Role
from ckptd.core.model.save import SealedFile
from ckptd.core.policy.permit import DeletePermit
from ckptd.core.policy.view import CommitRef
from ckptd.errors import CkptdError, SourceChanged, StorageError
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan, scan_folder

TAG = "last.ckpt"
OTHERS = ("epoch=0-step=2.ckpt", "config.json")


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    for name in (TAG, *OTHERS):
        (tmp_path / name).write_text(name)
    return tmp_path


def permit_for(save_dir: Path) -> DeletePermit:
    with files.opened_dir(save_dir) as fd:
        listing = scan_folder(fd, TAG)
    assert listing is not None
    assert listing.is_single_file
    return DeletePermit(
        tag=TAG,
        generation=1,
        folder=listing.folder,
        files=tuple(
            SealedFile(path=f.path, identity=f.identity, fingerprint="x", role=Role.WEIGHTS)
            for f in listing.files
        ),
        commits=(CommitRef(remote="nas", key="k", sha256="s"),),
        issued_at_seconds=time.monotonic(),
        reason="test",
    )


def prune(save_dir: Path, permit: DeletePermit) -> None:
    with files.opened_dir(save_dir) as fd:
        fs.delete_checkpoint(fd, permit, "aside")


def names_in(save_dir: Path) -> set[str]:
    return {path.name for path in save_dir.iterdir()} - {"_ckptd"}


def test_the_file_is_deleted_and_its_neighbours_stay(save_dir: Path) -> None:
    prune(save_dir, permit_for(save_dir))
    assert names_in(save_dir) == set(OTHERS)
    assert list((save_dir / fs.TRASH).iterdir()) == []


def _longer(path: Path) -> None:
    path.write_text("longer than before")


def _another(path: Path) -> None:
    path.with_suffix(".new").write_text(TAG)
    path.with_suffix(".new").rename(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / TAG).write_text(TAG)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".bak"))
    path.symlink_to(path.with_suffix(".bak"))


@pytest.mark.parametrize("change", [_longer, _another, _folder, _link])
def test_what_is_another_file_by_now_stays(save_dir: Path, change: Callable[[Path], None]) -> None:
    permit = permit_for(save_dir)
    change(save_dir / TAG)
    before = (save_dir / TAG).lstat().st_ino
    with pytest.raises(CkptdError):
        prune(save_dir, permit)
    assert (save_dir / TAG).lstat().st_ino == before


def test_a_file_that_takes_its_place_before_the_rename_is_put_back(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer renames a new save over it between the look and the rename."""
    permit, rename = permit_for(save_dir), files.rename_new

    def late(*arguments: object) -> None:
        monkeypatch.setattr(files, "rename_new", rename)
        _another(save_dir / TAG)
        rename(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "rename_new", late)
    with pytest.raises(SourceChanged, match="swapped for another file"):
        prune(save_dir, permit)
    assert (save_dir / TAG).read_text() == TAG
    assert names_in(save_dir) == {TAG, *OTHERS}


def test_one_that_is_killed_after_the_rename_is_put_back_or_removed(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    permit = permit_for(save_dir)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fs, "finish_deletion", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(save_dir, permit)
    assert names_in(save_dir) == set(OTHERS)
    with files.opened_dir(save_dir) as fd:
        assert fs.is_whole_in_trash(fd, "aside", permit.files)
        assert fs.put_back(fd, "aside", TAG, permit.files)
        assert names_in(save_dir) == {TAG, *OTHERS}
        os.rename(save_dir / TAG, save_dir / fs.TRASH / "aside")
        with fs.closing(fs.ensure_ours(fd, fs.TRASH)) as trash:
            fs.finish_deletion(trash, "aside", permit.files)
        assert fs.trash_names(fd) == []
        (save_dir / fs.TRASH / "aside").write_text("of somebody else")
        with fs.closing(fs.ensure_ours(fd, fs.TRASH)) as trash, pytest.raises(StorageError):
            fs.finish_deletion(trash, "aside", permit.files)
        assert fs.trash_names(fd) == ["aside"], "what was not sealed stays"


def test_one_that_a_person_gave_up_is_removed_unless_somebody_writes_it(save_dir: Path) -> None:
    with files.opened_dir(save_dir) as fd:
        listing = scan_folder(fd, TAG)
        assert listing is not None
        _longer(save_dir / TAG)
        with pytest.raises(SourceChanged, match=f"{TAG} changed"):
            fs.remove_incomplete(fd, TAG, listing.files)
        listing = scan_folder(fd, TAG)
        assert listing is not None
        fs.remove_incomplete(fd, TAG, listing.files)
        assert names_in(save_dir) == set(OTHERS)
        assert fs.trash_names(fd) == []


def test_an_unchanged_one_is_given_back_as_the_same_object(save_dir: Path) -> None:
    with files.opened_dir(save_dir) as fd:
        before = scan(fd)
        again = scan(fd, before=before)
        assert [one.tag for one in before.folders] == ["epoch=0-step=2.ckpt", TAG]
        assert all(one is other for one, other in zip(before.folders, again.folders, strict=True))
        _longer(save_dir / TAG)
        changed = {one.tag for one in scan(fd, before=before).folders if one not in before.folders}
        assert changed == {TAG}


def test_a_folder_that_holds_a_file_of_its_own_name_is_no_single_file(save_dir: Path) -> None:
    _folder(save_dir / TAG)
    with files.opened_dir(save_dir) as fd:
        assert [one.tag for one in scan(fd).folders] == ["epoch=0-step=2.ckpt"]
