"""A prune that was journalled and never begun: what its tag was saved before stays known (P4, H2)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, judge
from ckptd.core.completeness.sealing import memory_of, sealed_file
from ckptd.core.model.facts import FileFacts
from ckptd.core.model.layouts import Grid
from ckptd.core.model.listing import FolderListing
from ckptd.core.model.records import DeletionIntent
from ckptd.core.model.save import SaveWindow, SealedSave, Writer
from ckptd.daemon.crash_recovery import finish_after_crash
from ckptd.observe.audit import Audit
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local.scan import scan_folder
from tests.support.recover_scene import Scene
from tests.support.states import job_state

QUIET = Context(settle_seconds=1, quiet_seconds=100, is_in_flight=False, save_spread_seconds=600)


class Killed:
    """A sealed save whose removal was journalled when the daemon was killed."""

    def __init__(self, root: Path) -> None:
        self.scene = Scene(root)
        self.tag = self.scene.save(100)
        folder, facts = self._listed()
        save = SealedSave(
            tag=self.tag,
            folder=folder.folder,
            files=tuple(sealed_file(file, facts[file.path], folder) for file in folder.own),
            grid=Grid(dp=2, mm_count=1, zero_stage=2),
            branch=1,
            step=100,
            save_seq=1,
            window=SaveWindow(first=0, last=0),
            writer=Writer(),
        )
        state_dir = self.scene.save_dir / "_ckptd" / "state"
        state_dir.mkdir(parents=True)
        self.audit = Audit(state_dir / "audit.jsonl")
        self.state = job_state(Journal(state_dir / "journal.db"))
        self.save_id = self.state.journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
        intent = DeletionIntent(
            tag=self.tag,
            generation=1,
            folder=save.folder,
            files=save.files,
            commits=(("nas", "k", "s"),),
            reason="test",
        )
        self.state.journal.intend_deletion(self.save_id, f"{self.tag}.0badcafe", intent)

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return self.scene.save_dir / self.tag

    def _listed(self) -> tuple[FolderListing, dict[str, FileFacts]]:
        with files.opened_dir(self.scene.save_dir) as fd:
            folder = scan_folder(fd, self.tag)
        assert folder is not None
        rows = inspect_files(self.folder, [file.path for file in folder.files])
        return folder, {row.path: row for row in rows}

    def save_again(self, *shards: str) -> None:
        """The run was rewound and is at that step again: the trainer writes anew, in place."""
        for name in shards:
            data = (self.folder / name).read_bytes()
            (self.folder / name).unlink()
            (self.folder / name).write_bytes(data)

    def start(self) -> State:
        """The daemon starts again; its verdict on what lies there."""
        self.state.load()
        with files.opened_dir(self.scene.save_dir) as fd:
            finish_after_crash(self.state, fd, self.audit)
        folder, facts = self._listed()
        row = self.state.saves.of_tag(self.tag)
        return judge(folder, facts, memory_of(row, folder, facts), QUIET).state


@pytest.mark.parametrize("rank", [0, 1])
def test_half_a_save_over_what_was_to_go_is_torn(tmp_path: Path, rank: int) -> None:
    """Of two ranks one wrote its shard before everything died: no COMMIT over the bytes of two saves."""
    killed = Killed(tmp_path)
    killed.save_again(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    assert killed.start() is State.TORN_RESAVE
    assert killed.state.saves.rows[killed.save_id].state == "present"
    assert killed.state.journal.open_deletions() == []
    assert killed.start() is State.TORN_RESAVE, "however often it is killed"


def test_what_was_saved_again_as_a_whole_is_whole(tmp_path: Path) -> None:
    killed = Killed(tmp_path)
    killed.save_again(*(path.name for path in killed.folder.iterdir()))
    assert killed.start() is State.COMPLETE


def test_a_tag_that_is_gone_was_pruned(tmp_path: Path) -> None:
    """Killed after the last unlink: what the trainer saves there next is new, in part too."""
    killed = Killed(tmp_path)
    shutil.rmtree(killed.folder)
    killed.scene.save(200)
    with files.opened_dir(killed.scene.save_dir) as fd:
        killed.state.load()
        finish_after_crash(killed.state, fd, killed.audit)
    assert killed.state.saves.rows[killed.save_id].state == "pruned"
    assert killed.state.saves.of_tag(killed.tag) is None
