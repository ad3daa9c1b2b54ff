"""Whether a folder still is the save that was sealed, when a file of it was put back (adr/0091)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.completeness.sealing import memory_of, refreshed, same_files, sealed_file
from ckptd.core.model.facts import FileFacts
from ckptd.core.model.listing import FolderListing
from ckptd.core.model.records import DerivedRecord, SaveRow
from ckptd.core.model.save import SealedSave
from ckptd.storage.local.scan import scan_folder
from tests.stores.scene import Node
from tests.support.recover_scene import Scene

TAG = "global_step5"


def look(root: Path) -> tuple[FolderListing, dict[str, FileFacts]]:
    """The folder as listed and inspected."""
    with files.opened_dir(root) as fd:
        listing = scan_folder(fd, TAG)
    assert listing is not None
    rows = inspect_files(root / TAG, [f.path for f in listing.files])
    return listing, {row.path: row for row in rows}


@pytest.mark.parametrize("how", ["put back", "other time", "other content"])
def test_a_file_that_was_put_back_is_no_new_save(tmp_path: Path, how: str) -> None:
    """Another inode with the size, time and content of the sealed one; any other difference is a new save."""
    scene = Scene(tmp_path)
    scene.save(5)
    listing, facts = look(scene.save_dir)
    node = Node(scene.save_dir)
    sealed: SealedSave = node.sealed().model_copy(
        update={
            "folder": listing.folder,
            "files": tuple(sealed_file(f, facts[f.path], listing) for f in listing.own),
        }
    )
    row = SaveRow(
        id=1,
        save=sealed,
        state="present",
        found_first=False,
        adopted=True,
        held=False,
        derived=DerivedRecord(),
        ended_at=None,
        seen_at=0.0,
        sealed_at=0.0,
    )
    shard = scene.save_dir / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    copy = tmp_path / "copy"
    shutil.copy2(shard, copy)
    if how == "other content":
        other = Scene(tmp_path / "other")
        other.save(6, TAG)
        data = (other.save_dir / TAG / shard.name).read_bytes()
        status = shard.stat()
        copy.write_bytes(data)
        assert len(data) == status.st_size
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif how == "other time":
        os.utime(copy)
    os.rename(copy, shard)
    listing, facts = look(scene.save_dir)
    assert not same_files(sealed, listing)
    again = refreshed(sealed, listing, facts)
    memory = memory_of(row, listing, facts)
    assert memory is not None
    is_kept = memory.shards[shard.name] == next(f.identity for f in listing.files if f.path == shard.name)
    if how == "put back":
        assert again is not None
        assert same_files(again, listing)
        assert is_kept
    else:
        assert again is None
        assert not is_kept
