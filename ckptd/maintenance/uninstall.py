"""Remove what ckptd put on a node, and nothing else: never a trainer's file (`ckptd uninstall`).

First a plan of everything that lies there, then its execution: what no remote is known to have is named, and
unless a person says so nothing at all is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptd.base import files
from ckptd.base.owned_dirs import lock, opened_ours, path_of
from ckptd.config.commands import command_for
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.model.layouts import LATEST_UNIVERSAL, Role
from ckptd.core.model.listing import OURS
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState, UploadState
from ckptd.core.model.resume_marker import RESUMED
from ckptd.core.model.runs import RUN_FILE
from ckptd.errors import CkptdError, LockHeld, RefusedError
from ckptd.recover.execute import one_at_a_time
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.recover.select.job import owner_of
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local import clones, fs
from ckptd.storage.local.derived import describe
from ckptd.storage.local.job_names import running_daemons
from ckptd.storage.local.scan import scan_folder
from ckptd.storage.stores.access import access_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.manifest import NodeManifest
    from ckptd.core.model.records import SaveRow, UploadRecord
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.storage.local.derived import DerivedDescription

Fate = Literal["goes", "only here", "stays"]

_MADE = f"{fs.DERIVED}/{UNIVERSAL}"
_STATE_FILES = (
    "journal.db",
    "status.json",
    "audit.jsonl",
    "daemon.log",
    "daemon.log.1",
    "events.jsonl",
    "events.jsonl.1",
    "events.json",
    "node_id",
    "node_place",
    "job.json",
    "repair-uploads.json",
    "reserve",
)
_STATE_FOLDERS = ("decisions", "documents", "control")
_BESIDE = (Role.SIDE, Role.EXTRA)
"""Files that are no shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedItem:
    """One thing of ours on the node; `folder` and `name`: where, below save_dir or in the state directory."""

    folder: str
    name: str
    bytes: int
    fate: Fate
    why: str

    @property
    def path(self) -> str:
        """Return the path of what is removed, to show it."""
        return f"{self.folder}/{self.name}" if self.folder else self.name


class JobUninstall:
    """One job's. Opened, it holds save_dir's lock until `close`.

    Raises:
        LockHeld: a daemon runs (75).
    """

    def __init__(self, job: JobConfig, state_dir: Path | None) -> None:
        self._job = job
        self._state_dir = state_dir
        self._remotes: dict[str, RemoteInventory | None] = {}
        """Those that were asked; None: it did not answer."""
        self._fd: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._fd = os.open(job.save_dir, files.DIR_FLAGS)
        if self._fd is not None:
            try:
                lock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._fd)
                msg = f"a daemon owns {job.save_dir}"
                raise LockHeld(msg, hint="stop it first; it would make all of it again") from error
        kept = {os.path.realpath(place) for one in running_daemons() for place in one.places}
        if state_dir is not None and os.path.realpath(state_dir) in kept:
            self.close()
            msg = f"a daemon keeps its state in {state_dir}"
            raise LockHeld(msg, hint="stop it first; it would make all of it again")

    def close(self) -> None:
        """Let the lock go."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # --- the plan --------------------------------------------------------------------------------------

    def plan(self) -> list[OwnedItem]:
        """Everything that ckptd put here, and what becomes of it."""
        return [*self._below_save_dir(), *self._state()]

    def _below_save_dir(self) -> Iterator[OwnedItem]:
        fd = self._fd
        if fd is None:
            return
        rows, uploads = self._known()
        yield from self._holds(fd, rows, uploads)
        by_tag = {row.save.tag: row for row in rows.values() if row.derived.state is DerivedState.READY}
        for name in fs.names_in(fd, _MADE):
            yield self._piece(_MADE, name, *self._made(fd, name, by_tag.get(name), uploads))
        for name in fs.names_in(fd, f"{fs.DERIVED}/accelerate"):
            yield self._piece(f"{fs.DERIVED}/accelerate", name, "goes", "made again by `ckptd resume`")
        for name in fs.names_in(fd, fs.STAGING):
            yield self._piece(fs.STAGING, name, "goes", "half-done work")
        for name in fs.names_in(fd, fs.TRASH):
            is_ours = fs.is_ours_in_trash(name)
            why = "half-removed" if is_ours else "a folder of the trainer's whose removal was cut short"
            yield self._piece(fs.TRASH, name, "goes" if is_ours else "stays", why)
        for name in fs.names_in(fd, fs.ASIDE):
            removes = command_for(self._job, "gc", "--aside")
            why = f"it was in the way of a resume or repair: {removes} removes it"
            yield self._piece(fs.ASIDE, name, "stays", why)
        for name, why in ((RESUMED, "what was resumed from last"), (RUN_FILE, "which run this is")):
            if name in fs.names_in(fd, OURS):
                yield OwnedItem(folder=OURS, name=name, bytes=0, fate="goes", why=why)
        if self._pointer(fd).startswith(f"{OURS}/"):
            yield OwnedItem(
                folder="", name=LATEST_UNIVERSAL, bytes=0, fate="goes", why="it names a form of ckptd's"
            )

    def _holds(
        self,
        fd: int,
        rows: Mapping[int, SaveRow],
        uploads: Mapping[int, Mapping[tuple[str, str], UploadRecord]],
    ) -> Iterator[OwnedItem]:
        """The word beside a hold goes with it; alone it is nothing to keep."""
        names = set(fs.names_in(fd, fs.HOLD))
        words = {clones.about_name(name) for name in names}
        for name in sorted(names - words):
            row = rows.get(_id_of(name))
            is_its = row is not None and name == f"{row.save.tag}.{row.id}"  # not another journal's
            if _id_of(clones.hold_of(name)) >= 0 and clones.hold_of(name) != name:
                yield self._piece(fs.HOLD, name, "goes", "noted of a hold that is gone")
            else:
                yield self._piece(fs.HOLD, name, *self._hold(row if is_its else None, uploads))

    def _piece(self, folder: str, name: str, fate: Fate, why: str) -> OwnedItem:
        assert self._fd is not None
        size = 0
        with contextlib.suppress(OSError):
            listing = scan_folder(self._fd, f"{folder}/{name}")
            size = sum(file.identity.size_bytes for file in listing.files) if listing is not None else 0
        return OwnedItem(folder=folder, name=name, bytes=size, fate=fate, why=why)

    def _known(self) -> tuple[dict[int, SaveRow], Mapping[int, Mapping[tuple[str, str], UploadRecord]]]:
        """Read the journal's saves and uploads; without a journal nothing is known to be committed."""
        path = self._state_dir / "journal.db" if self._state_dir is not None else None
        if path is None or not path.exists():
            return {}, {}
        journal = Journal(path)
        try:
            return {row.id: row for row in journal.saves()}, journal.uploads()
        finally:
            journal.close()

    def _hold(
        self, row: SaveRow | None, uploads: Mapping[int, Mapping[tuple[str, str], UploadRecord]]
    ) -> tuple[Fate, str]:
        if row is None:
            return "only here", "no journal knows of which save it is"
        if self._is_committed(uploads.get(row.id, {}), ZERO):
            return "goes", "its save is committed"
        return "only here", f"{row.save.tag} is not committed"

    def _made(
        self,
        fd: int,
        name: str,
        row: SaveRow | None,
        uploads: Mapping[int, Mapping[tuple[str, str], UploadRecord]],
    ) -> tuple[Fate, str]:
        if row is not None and fs.folder_is_intact(fd, row.save.tag, row.save.files):
            return "goes", "made of what lies in save_dir"
        records = uploads.get(row.id, {}) if row is not None else {}
        if any(self._is_committed(records, form) for form in (UNIVERSAL, ZERO)):
            return "goes", "its save is committed"
        # what `resume` made or fetched is in no journal: what it was made of tells of which save it is
        with contextlib.suppress(OSError):
            made = describe(fd, f"{_MADE}/{name}")
            if made is not None and self._lies_here(fd, name, made):
                return "goes", "made of what lies in save_dir"
            if made is not None and self._is_held(name, made):
                return "goes", "its save is committed"
        return "only here", "its shards are gone, and it is not known to be committed"

    def _lies_here(self, fd: int, tag: str, made: DerivedDescription) -> bool:
        """Tell whether the shards that a form was made of are those of the folder of its tag."""
        folder = scan_folder(fd, tag, declared=self._job.declared)
        if folder is None:
            return False
        with contextlib.suppress(CkptdError):
            shards = inspect_files(self._job.save_dir / tag, [file.path for file in folder.shards])
            return made.is_made_from({one.path.rpartition("/")[2]: one.fingerprint for one in shards})
        return False

    def _is_held(self, tag: str, made: DerivedDescription) -> bool:
        """Tell whether every required remote holds a form of the save that a form here was made of."""
        names = [remote.name for remote in self._job.remotes if remote.required]
        return bool(names) and all(self._holds_save(name, tag, made) for name in names)

    def _holds_save(self, name: str, tag: str, made: DerivedDescription) -> bool:
        if name not in self._remotes:
            remote = next(remote for remote in self._job.remotes if remote.name == name)
            owner = owner_of(self._job, self._state_dir)
            self._remotes[name] = None
            with contextlib.suppress(CkptdError):  # one that does not answer is not known to hold anything
                found = read_remote_inventory(name, remote.url, owner, access_of(remote))
                self._remotes[name] = found
        there = self._remotes[name]
        if there is None:
            return False
        for commit in (view.commit for view in there.commits):
            if commit.tag != tag or commit.form not in (ZERO, UNIVERSAL):
                continue
            with contextlib.suppress(CkptdError):
                if made.is_made_from(_shards_of(there.manifests(commit))):
                    return True
        return False

    def _is_committed(self, records: Mapping[tuple[str, str], UploadRecord], form: str) -> bool:
        names = [remote.name for remote in self._job.remotes if remote.required]
        done = [
            (r := records.get((name, form))) is not None and r.state is UploadState.COMMITTED
            for name in names
        ]
        return bool(names) and all(done)

    def _pointer(self, fd: int) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return files.read_beneath(fd, LATEST_UNIVERSAL, limit_bytes=4096).decode()
        return ""

    def _state(self) -> Iterator[OwnedItem]:
        place = self._state_dir
        if place is None or not place.is_dir():
            return
        for name in sorted(os.listdir(place)):
            is_ours = name in _STATE_FOLDERS or name.startswith(_STATE_FILES)
            size = (place / name).lstat().st_size
            why = "state" if is_ours else "not made by ckptd"
            yield OwnedItem(
                folder=str(place), name=name, bytes=size, fate="goes" if is_ours else "stays", why=why
            )

    # --- carrying it out -------------------------------------------------------------------------------

    def refuse_what_is_only_here(self, pieces: list[OwnedItem]) -> None:
        """Refuse to remove what is committed nowhere; a removal begins with this, a dry run ends with it.

        Raises:
            RefusedError: something lies only here (65).
        """
        alone = [piece for piece in pieces if piece.fate == "only here"]
        if alone:
            names = "; ".join(f"{piece.path}: {piece.why}" for piece in alone)
            hint = f"{command_for(self._job, 'drain')} commits it; --uncommitted removes it for good"
            if not self._job.remotes:
                hint = "CKPTD_URL=URL names the remote that may hold it; --uncommitted removes it for good"
            raise RefusedError(f"nothing was removed, for this is nowhere else: {names}", hint=hint)

    def carry_out(self, pieces: list[OwnedItem], *, with_uncommitted: bool) -> list[OwnedItem]:
        """Remove what goes; what was removed.

        Raises:
            RefusedError: something lies only here, and nobody said that it may go; nothing was removed.
        """
        if not with_uncommitted:
            self.refuse_what_is_only_here(pieces)
        going = [piece for piece in pieces if piece.fate != "stays"]
        fd = self._fd
        if fd is not None and path_of(self._job.save_dir, OURS).exists():
            with one_at_a_time(fd):
                for piece in going:
                    if piece.folder.startswith(f"{OURS}/"):
                        self._remove_ours(fd, piece)
                    elif piece.folder == OURS:
                        with (
                            fs.closing(fs.ensure_ours(fd, OURS)) as ours,
                            contextlib.suppress(IsADirectoryError),
                        ):
                            files.remove_file(ours, piece.name)
                if any(piece.name == LATEST_UNIVERSAL for piece in going):
                    fs.point_latest_universal(fd, None)
        self._remove_state([piece for piece in going if piece.folder == str(self._state_dir)])
        if fd is not None:
            self._remove_folders(fd)
        return going

    def _remove_ours(self, fd: int, piece: OwnedItem) -> None:
        if piece.folder == fs.TRASH:
            fs.empty_our_trash(fd)
        elif piece.folder == fs.HOLD:
            clones.release(fd, clones.hold_of(piece.name))
        else:
            fs.remove_ours(fd, piece.folder, piece.name)

    def _remove_state(self, pieces: list[OwnedItem]) -> None:
        place = self._state_dir
        if place is None or not pieces:
            return
        with opened_ours(place) as state_fd:
            for piece in pieces:
                if piece.name in _STATE_FOLDERS:
                    files.remove_tree(state_fd, piece.name)
                else:
                    files.remove_file(state_fd, piece.name)
        with contextlib.suppress(OSError):
            place.rmdir()

    def _remove_folders(self, fd: int) -> None:
        """Remove the folders that are empty by now; one that still holds something stays with it."""
        place = path_of(self._job.save_dir, OURS)
        below = (
            "derived/universal",
            "derived/accelerate",
            "derived",
            "hold",
            "aside",
            "trash",
            "staging",
            "state",
        )
        for name in below:
            with contextlib.suppress(OSError):
                (place / name).rmdir()
        with contextlib.suppress(OSError):
            place.rmdir()
        files.fsync_dir(fd)


def _shards_of(manifests: Sequence[NodeManifest]) -> dict[str, str]:
    """Return name → fingerprint of the shards of a ZeRO form, or of those that another form was made of."""
    marks: list[tuple[str, str]] = []
    for one in manifests:
        if one.form == ZERO:
            marks += [(file.path, file.fingerprint) for file in one.files if file.role not in _BESIDE]
        elif one.source is not None:
            marks += one.source.fingerprints
    return {path.rpartition("/")[2]: mark for path, mark in marks}


def _id_of(name: str) -> int:
    """Return the save that a hold's name ends with; -1: it is no name of ours."""
    number = name.rpartition(".")[2]
    return int(number) if number.isdecimal() else -1
