"""List a save_dir as one scan saw it: names and identities, no contents; decisions rest on listings alone."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.model.layouts import Trainer, added_by_us, is_weights, parse_shard_name
from ckptd.core.model.swapped_tensors import is_swapped
from ckptd.core.model.unprotected import Kind, Unprotected

OURS = "_ckptd"
POINTERS = frozenset({"latest", "latest_universal"})
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
    empty: tuple[str, ...] = ()
    """Folders below this one with nothing in them: DeepSpeed's NVMe offload does not load without (§3)."""

    @property
    def is_model_only(self) -> bool:
        """Hugging Face with save_only_model: nothing to resume from (ADR 0050)."""
        return not self.roots

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
        """Files directly in the shard roots whose names are shards'; of a model alone its weights."""
        if self.is_model_only:
            return tuple(f for f in self.files if is_weights(f.path))
        return tuple(
            f for f in self.files if f.path.rpartition("/")[0] in self.roots and parse_shard_name(f.name)
        )

    @cached_property
    def swapped(self) -> tuple[ListedFile, ...]:
        """Optimizer state beside the shards (core/model/swapped_tensors.py): saved again with them."""
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

    @property
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
    """What `resume` wrote of the checkpoint that it gave to the trainer (resumed.py)."""
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


# --- The resume marker: which save a run was resumed from -------------------------------------
# `ckptd resume` writes it before it does anything else. It protects the save where no `latest` of the
# trainer names it, until the run has committed a newer one. A file that cannot be parsed protects nothing.


if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.model.save import SealedSave

RESUMED = "resumed.json"
RESUMED_PATH = f"{OURS}/{RESUMED}"


class ResumeMarker(BaseModel):
    """The checkpoint, and what lay beside it then."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    tag: str
    written_ns: dict[str, int]
    """Tag → greatest mtime of its shards: tells which folder it was, never which is newer (P9)."""

    def is_later(self, save: SealedSave) -> bool:
        """Tell whether a save was not there yet: the run has gone on."""
        known = self.written_ns.get(save.tag)
        return save.tag != self.tag and all(file.identity.mtime_ns != known for file in save.files)


def resume_marker_text(tag: str, folders: Iterable[FolderListing]) -> ResumeMarker:
    """Return the resume marker's text for `tag`; `folders`: all in save_dir, whole or not."""
    newest = {f.tag: max((s.identity.mtime_ns for s in f.shards), default=0) for f in folders}
    return ResumeMarker(tag=tag, written_ns=newest)


@functools.lru_cache(maxsize=64)
def read_resume_marker(text: str | None) -> ResumeMarker | None:
    """None: nothing was resumed from, or somebody else wrote that."""
    try:
        return None if text is None else ResumeMarker.model_validate_json(text)
    except ValidationError:
        return None
