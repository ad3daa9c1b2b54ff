"""List a save_dir as one scan saw it: names and identities, no contents; decisions rest on listings alone."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.model.layouts import (
    Trainer,
    added_by_us,
    parse_shard_name,
)
from ckptd.core.model.other_layouts import MODEL, is_single_file
from ckptd.core.model.swap_paths import is_swapped
from ckptd.core.model.unprotected import Kind, Unprotected

if TYPE_CHECKING:
    from ckptd.core.model.other_layouts import Layout

OURS = "_ckptd"
_DERIVED = re.compile(r"(_universal|_weights-.*)$")
_NUMBER = re.compile(r"(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """A regular file below a folder; `path` relative to it."""

    path: str
    identity: FileIdentity
    mode: int = 0o644

    @property
    def name(self) -> str:
        """Base name."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class FolderListing:
    """One folder of save_dir. `irregular`: links, sockets, devices, mounts, and names that may not be."""

    tag: str
    folder: FolderIdentity
    files: tuple[ListedFile, ...]
    irregular: tuple[str, ...] = ()
    trainer: Trainer = Trainer.DEEPSPEED
    roots: tuple[str, ...] = ("",)
    """Folders below this one that hold the shards; "" is this one."""
    other_layout: Layout | None = None
    """The layout of a checkpoint without ZeRO shards."""
    empty: tuple[str, ...] = ()
    """Folders below this one with nothing in them: DeepSpeed's NVMe offload does not load without (§3)."""

    @property
    def is_single_file(self) -> bool:
        """Tell whether it is one file of save_dir; `folder` is save_dir's identity then."""
        return is_single_file(self.tag, [file.path for file in self.files])

    @property
    def quiet_seconds(self) -> float:
        """Return how long nothing may have changed before it is judged, where the job file says so."""
        return self.other_layout.quiet_seconds if self.other_layout is not None else 0.0

    @property
    def manifest(self) -> str:
        """Return the path of the file that lists the others, where the job file names one."""
        return self.other_layout.manifest if self.other_layout is not None else ""

    @property
    def place(self) -> str:
        """Return the folder, relative to save_dir, in which the files lie: "" of a single file."""
        return "" if self.is_single_file else self.tag

    @property
    def is_model_only(self) -> bool:
        """Hugging Face with save_only_model: nothing to resume from (ADR 0050)."""
        return self.other_layout is MODEL

    @cached_property
    def digest(self) -> str:
        """Changes when any file appears, goes or changes identity."""
        rows = [f"{self.folder.dev}:{self.folder.ino}"]
        for file in self.files:
            i = file.identity
            rows.append(f"{file.path}\0{i.dev}:{i.ino}:{i.size_bytes}:{i.mtime_ns}:{i.ctime_ns}")
        rows += [f"{path}/" for path in self.empty]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()

    @cached_property
    def shards(self) -> tuple[ListedFile, ...]:
        """Files directly in the shard roots whose names are shards'; of another layout those of its state."""
        if self.other_layout is not None:
            return tuple(f for f in self.files if self.other_layout.is_state(f.path))
        return tuple(
            f for f in self.files if f.path.rpartition("/")[0] in self.roots and parse_shard_name(f.name)
        )

    @cached_property
    def swapped(self) -> tuple[ListedFile, ...]:
        """Optimizer state beside the shards (core/completeness/swapped_tensors.py): saved again with them."""
        return tuple(f for f in self.files if is_swapped(f.path, self.roots))

    @cached_property
    def added(self) -> tuple[ListedFile, ...]:
        """Return the files that our `resume` added: derived, so no part of the save, and removed with it."""
        ours = added_by_us((f.path for f in self.files), self.roots)
        return tuple(f for f in self.files if f.path in ours)

    @cached_property
    def own(self) -> tuple[ListedFile, ...]:
        """Return the save's files: all but what we put in."""
        return tuple(f for f in self.files if f not in self.added) if self.added else self.files

    @cached_property
    def total_bytes(self) -> int:
        """Sum of file sizes."""
        return sum(f.identity.size_bytes for f in self.files)

    @cached_property
    def is_checkpoint(self) -> bool:
        """Tell whether the folder holds at least one shard and its name is not a derived form's."""
        return bool(self.shards) and not _DERIVED.search(self.tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDirListing:
    """One scan. `extras`: regular files directly in save_dir; `latest`: content of the pointer file."""

    device: int
    folders: tuple[FolderListing, ...]
    extras: tuple[ListedFile, ...] = ()
    latest: str | None = None
    latest_universal: str | None = None
    resumed: str | None = None
    """Text of the file in which `resume` names the checkpoint that it gave to the trainer (resume_marker)."""
    foreign: tuple[str, ...] = ()
    """Names that are no checkpoint and no file of ours: left alone."""
    nameless: tuple[str, ...] = ()
    """Checkpoints whose names are no text (bytes that are not UTF-8), as shown: left alone, too."""
    bare: tuple[str, ...] = ()
    """Folders without a shard, perhaps not yet one; `foreign` has them as well."""
    closed: tuple[str, ...] = ()
    """Other users' folders that we may not enter, perhaps checkpoints; `foreign` has them as well."""
    linked: tuple[str, ...] = ()
    """Links that are named as checkpoints are, or by `latest`; of a folder a shard that is no plain file."""
    unprotected: tuple[Unprotected, ...] = ()
    """Checkpoints in and below save_dir that are none of this job's layouts; never looked into."""

    def is_at_risk(self, tag: str) -> bool:
        """Tell whether `latest` names a tag, or its number is higher than those of all others listed here."""
        if tag == self.latest:
            return True
        number = _NUMBER.search(tag)
        steps = [int(m[1]) for one in self.folders if one.tag != tag and (m := _NUMBER.search(one.tag))]
        return number is not None and int(number[1]) > max(steps, default=-1)

    @property
    def loose(self) -> frozenset[str]:
        """Folders with shards that `trainer.save_model` left beside the Trainer's checkpoints."""
        return frozenset(one.path for one in self.unprotected if one.kind is Kind.LOOSE)
