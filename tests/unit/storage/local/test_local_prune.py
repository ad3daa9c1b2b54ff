"""Pruning under a permit: real files, identities and crashes between rename and removal (P1, P7, H10)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files, names
from ckptd.core.model.layouts import Grid, Role
from ckptd.core.model.other_layouts import NOTHING_DECLARED
from ckptd.core.model.records import DeletionIntent
from ckptd.core.model.save import SaveWindow, SealedFile, SealedSave, Writer
from ckptd.core.policy.permit import DeletePermit
from ckptd.core.policy.view import CommitRef
from ckptd.daemon.actions.local_deletion import LocalDeleter
from ckptd.daemon.crash_recovery import finish_after_crash
from ckptd.errors import CkptdError, SourceChanged
from ckptd.observe.audit import Audit
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan, scan_folder
from tests.support.states import job_state

TAG = "global_step1"
NAMES = ("a.pt", "b.pt", "configs/c.json")


@pytest.fixture
def save_dir(tmp_path: Path) -> Iterator[Path]:
    """A save_dir with one folder of three files."""
    folder = tmp_path / TAG
    (folder / "configs").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text(name)
    yield tmp_path


def permit_for(save_dir: Path, **changes: object) -> DeletePermit:
    """A permit as the planner makes it."""
    with files.opened_dir(save_dir) as fd:
        listing = scan_folder(fd, TAG)
    assert listing is not None
    values: dict[str, object] = {
        "tag": TAG,
        "generation": 1,
        "folder": listing.folder,
        "files": tuple(
            SealedFile(path=f.path, identity=f.identity, fingerprint="x", role=Role.SIDE)
            for f in listing.files
        ),
        "commits": (CommitRef(remote="nas", key="k", sha256="s"),),
        "issued_at_seconds": time.monotonic(),
        "reason": "test",
    }
    return DeletePermit(**(values | changes))  # type: ignore[arg-type]


def save_of(permit: DeletePermit) -> SealedSave:
    """The save that a permit is for."""
    return SealedSave(
        tag=TAG,
        folder=permit.folder,
        files=permit.files,
        grid=Grid(dp=1, mm_count=1, zero_stage=2),
        branch=1,
        step=1,
        save_seq=1,
        window=SaveWindow(first=0, last=0),
        writer=Writer(),
    )


def prune(save_dir: Path, permit: DeletePermit) -> None:
    with files.opened_dir(save_dir) as fd:
        fs.delete_checkpoint(fd, permit, "aside")


def test_removes_exactly_what_is_listed(save_dir: Path) -> None:
    """The folder goes, and nothing is left in the trash."""
    prune(save_dir, permit_for(save_dir))
    assert not (save_dir / TAG).exists()
    assert list((save_dir / fs.TRASH).iterdir()) == []


@pytest.mark.parametrize("is_swapped", [False, True])
def test_where_no_rename_refuses_to_replace(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch, is_swapped: bool
) -> None:
    """NFS and Lustre answer EINVAL (fs/nfs/dir.c): retention works there, and so does the way back."""

    def cannot(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(files, "rename_noreplace", cannot)
    permit = permit_for(save_dir)
    if not is_swapped:
        prune(save_dir, permit)
        assert not (save_dir / TAG).exists()
        return
    before, looked = fs.check_identities, []

    def second_look_differs(*args: Any, **kwargs: Any) -> None:
        looked.append(1)
        if len(looked) == 2:
            raise SourceChanged("written meanwhile")
        before(*args, **kwargs)

    monkeypatch.setattr(fs, "check_identities", second_look_differs)
    with pytest.raises(SourceChanged):
        prune(save_dir, permit)
    assert sorted(p.name for p in (save_dir / TAG).iterdir()) == ["a.pt", "b.pt", "configs"]


@pytest.mark.parametrize("tag", ["ours", "ours.v2", "ours.0123456789ab"])
def test_a_tag_that_is_called_as_our_own_leftovers_is_not_emptied(tmp_path: Path, tag: str) -> None:
    """Half-pruned, and the journal lost: it is a trainer's folder, and is moved back."""
    name = fs.trash_name(tag)
    with files.opened_dir(tmp_path) as fd:
        os.close(fs.ensure_ours(fd, fs.TRASH))
        for folder in (name, "ours.0123456789ab", f"{names.TEMPORARY_PREFIX}x"):
            (tmp_path / fs.TRASH / folder).mkdir()
        fs.empty_our_trash(fd)
        assert fs.trash_names(fd) == [name]


def _rewrite(save_dir: Path) -> None:
    (save_dir / TAG / "a.pt").write_text("other")


def _add(save_dir: Path) -> None:
    (save_dir / TAG / "eval.json").write_text("{}")


def _add_link(save_dir: Path) -> None:
    (save_dir / TAG / "link").symlink_to("/etc")


def _swap(save_dir: Path) -> None:
    (save_dir / TAG).rename(save_dir / "old")
    (save_dir / TAG).mkdir()
    for name in ("a.pt", "b.pt"):
        (save_dir / TAG / name).write_text(name)


def _swap_for_a_link(save_dir: Path) -> None:
    (save_dir / TAG).rename(save_dir / "old")
    (save_dir / TAG).symlink_to(save_dir / "old")


@pytest.mark.parametrize("change", [_rewrite, _add, _add_link, _swap, _swap_for_a_link])
def test_anything_that_changed_keeps_everything(save_dir: Path, change: Callable[[Path], None]) -> None:
    """A rewritten or added file, a link, another folder under the name: refused, nothing removed."""
    permit = permit_for(save_dir)
    change(save_dir)
    before = sorted(str(p) for p in save_dir.rglob("*") if "_ckptd" not in str(p))
    with pytest.raises(CkptdError):
        prune(save_dir, permit)
    assert sorted(str(p) for p in save_dir.rglob("*") if "_ckptd" not in str(p)) == before


def test_a_save_that_begins_while_it_is_renamed_aside_comes_back(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer had the file open: what it wrote since the first look is no committed byte (P4)."""
    real, permit = files.rename_noreplace, permit_for(save_dir)

    def rename(source_fd: int, source: str, target_fd: int, target: str) -> None:
        real(source_fd, source, target_fd, target)
        if source == TAG:
            with opened:
                opened.write("new save")

    opened = (save_dir / TAG / "a.pt").open("r+")
    monkeypatch.setattr(files, "rename_noreplace", rename)
    with pytest.raises(CkptdError, match=r"a\.pt changed"):
        prune(save_dir, permit)
    assert (save_dir / TAG / "a.pt").read_text() == "new save"
    assert all((save_dir / TAG / name).exists() for name in NAMES), "nothing else went either"


def test_what_was_written_in_the_trash_is_not_removed(save_dir: Path) -> None:
    """A trainer that still had the file open: bytes that were never committed (P4)."""
    permit, aside = permit_for(save_dir), save_dir / fs.TRASH / "aside"
    aside.parent.mkdir(parents=True)
    (save_dir / TAG).rename(aside)
    (aside / "a.pt").write_text("another save")
    with files.opened_dir(aside.parent) as fd, contextlib.suppress(CkptdError, OSError):
        fs.finish_deletion(fd, "aside", permit.files)
    assert "another save" in [p.read_text() for p in save_dir.rglob("a.pt")]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (mounts)")
def test_what_is_mounted_there_is_not_entered(save_dir: Path) -> None:
    """A share mounted below a folder of ours is not emptied with it (P15)."""
    ours = save_dir / fs.DERIVED / "x"
    (ours / "share").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(ours / "share")], check=True)
    try:
        (ours / "share" / "theirs").write_text("theirs")
        with files.opened_dir(save_dir) as fd:
            with pytest.raises(CkptdError, match="another file system"):
                files.open_dir_beneath(fd, f"{fs.DERIVED}/x/share")
            with pytest.raises(CkptdError, match="mount"):
                files.remove_tree(fd, f"{fs.DERIVED}/x")
        assert (ours / "share" / "theirs").read_text() == "theirs"
    finally:
        subprocess.run(["umount", "-l", str(ours / "share")], check=True)


@pytest.mark.parametrize("change", [{"commits": ()}, {"issued_at_seconds": time.monotonic() - 61}])
def test_a_permit_without_commit_or_past_its_minute_is_refused(
    save_dir: Path, change: dict[str, object]
) -> None:
    """No COMMIT, or older than sixty seconds: nothing happens."""
    with pytest.raises(CkptdError):
        prune(save_dir, permit_for(save_dir, **change))
    assert (save_dir / TAG / "a.pt").exists()


CRASH = """
import os, sys, pickle, time
from ckptd.base import files
from ckptd.storage.local import fs
permit = pickle.load(open(sys.argv[1], "rb"))
left = [int(sys.argv[2])]
def counting(name):
    real = getattr(os, name)
    def call(*a, **k):
        if left[0] == 0:
            os.kill(os.getpid(), 9)
        left[0] -= 1
        return real(*a, **k)
    setattr(os, name, call)
for name in ("unlink", "rmdir", "fsync"):
    counting(name)
with files.opened_dir(sys.argv[3]) as fd:
    fs.delete_checkpoint(fd, permit, "global_step1.aside")
"""


@pytest.mark.faults
@pytest.mark.parametrize("calls", range(12))
def test_killed_at_any_call_a_restart_finishes(save_dir: Path, tmp_path: Path, calls: int) -> None:
    """kill -9 before the n-th durable call: with its intent journalled, never half done."""
    import pickle

    permit = permit_for(save_dir)
    state_dir = save_dir / "_ckptd" / "state"
    state_dir.mkdir(parents=True)
    journal = Journal(state_dir / "journal.db")
    save = save_of(permit)
    save_id = journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
    intent = DeletionIntent(
        tag=TAG,
        generation=1,
        folder=permit.folder,
        files=permit.files,
        commits=(("nas", "k", "s"),),
        reason="test",
    )
    journal.intend_deletion(save_id, "global_step1.aside", intent)
    (tmp_path / "permit").write_bytes(pickle.dumps(permit))
    command = [sys.executable, "-c", CRASH, str(tmp_path / "permit"), str(calls), str(save_dir)]
    killed = subprocess.run(command, check=False, env=os.environ, timeout=200).returncode
    assert killed in (-9, 0)
    state = job_state(journal)
    state.load()
    with files.opened_dir(save_dir) as fd:
        finish_after_crash(state, fd, Audit(state_dir / "audit.jsonl"))
        listing = scan(fd)
    assert list(save_dir.glob(f"{fs.TRASH}/*")) == []
    whole = (save_dir / TAG).exists() and all((save_dir / TAG / n).exists() for n in NAMES)
    assert whole or not (save_dir / TAG).exists()
    assert state.saves.rows[save_id].state == ("present" if whole else "pruned")
    assert listing.folders == ()
    journal.close()


def test_a_folder_in_the_trash_without_an_intent_comes_back(save_dir: Path) -> None:
    """Renamed aside without a permit on record: moved back at the next start."""
    state_dir = save_dir / "_ckptd" / "state"
    state_dir.mkdir(parents=True)
    (save_dir / fs.TRASH).mkdir()
    (save_dir / TAG).rename(save_dir / fs.TRASH / f"{TAG}.0badcafe")
    journal = Journal(state_dir / "journal.db")
    with files.opened_dir(save_dir) as fd:
        finish_after_crash(job_state(journal), fd, Audit(state_dir / "audit.jsonl"))
    assert (save_dir / TAG / "a.pt").exists()
    journal.close()


def test_a_garbage_journal_is_set_aside(tmp_path: Path) -> None:
    """What SQLite cannot read, and another schema, are kept beside and a new journal is begun."""
    path = tmp_path / "journal.db"
    path.write_bytes(os.urandom(8192))
    journal = Journal(path)
    assert journal.set_aside is not None
    journal.set_meta("a", "b")
    journal._db.execute("PRAGMA user_version=99")
    journal.close()
    again = Journal(path)
    assert again.meta("a") is None
    assert again.set_aside is not None
    again.close()


def test_half_conversions_of_saves_that_are_gone_are_swept(save_dir: Path) -> None:
    """A partial universal form whose save is not here any more is removed at the next start."""
    state_dir, place = save_dir / "_ckptd" / "state", save_dir / fs.DERIVED / "universal"
    state_dir.mkdir(parents=True)
    (place / ".gone.ckptd-partial").mkdir(parents=True)
    journal = Journal(state_dir / "journal.db")
    with files.opened_dir(save_dir) as fd:
        finish_after_crash(job_state(journal), fd, Audit(state_dir / "audit.jsonl"))
    assert list(place.iterdir()) == []
    journal.close()


def test_a_form_that_was_never_noted_goes_with_a_line_of_its_own(save_dir: Path) -> None:
    """Found by the quick start's judge: a daemon was killed between publishing and noting it."""
    place = fs.DERIVED + "/universal"
    (save_dir / place / TAG).mkdir(parents=True)
    (save_dir / fs.STAGING).mkdir()
    state = job_state(Journal(save_dir / "journal.db"))
    pruner = LocalDeleter(
        state,
        Audit(save_dir / "audit.jsonl"),
        lambda *_: None,
        lambda: None,
        trainer="auto",
        declared=NOTHING_DECLARED,
        is_pinned=lambda _tag: False,
    )
    with files.opened_dir(save_dir) as fd:
        pruner._remove_leftovers(fd, permit_for(save_dir), pruner._leftovers(TAG))
    (line,) = [json.loads(text) for text in (save_dir / "audit.jsonl").read_text().splitlines()]
    assert (line["action"], line["tag"], line["form"]) == ("drop-derived", TAG, "universal")
    assert list((save_dir / place).iterdir()) == []
    state.journal.close()
