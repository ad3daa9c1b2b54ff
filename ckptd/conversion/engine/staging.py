"""Build a conversion in a folder beside its destination, after checking source and target.

`.<name>.ckptd-partial/` holds plan.jsonl, tmp/ and out/; `out` becomes the destination by one rename. It is
locked while a conversion runs and survives a kill, so that the next attempt finishes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from ckptd.base import extents, files
from ckptd.base.extents import identity_of
from ckptd.base.files import opened_real, real_path
from ckptd.base.humanize import user_in_words
from ckptd.base.names import DESCRIPTION, NAME_BYTES
from ckptd.base.owned_dirs import list_dir, lock
from ckptd.conversion.plan import Header, PlanReader, Trailer, read_trailer
from ckptd.core.model.layouts import ADAPTER_CONFIG, NamedShard, Role, ShardKey, parse_shard_name
from ckptd.core.model.other_layouts import METADATA, SUFFIX
from ckptd.core.model.swap_paths import FOLDER, rank_of
from ckptd.errors import (
    CkptdError,
    LockHeld,
    NotFoundError,
    NotPermitted,
    StorageError,
    TargetExists,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TEMPORARIES = "tmp"
OUTPUT = "out"
PLAN = "plan.jsonl"
BLOCK_BYTES = 4096
PARAMETERS = "zero"
"""The folder of a universal form in which each parameter has one of its own."""


def partial_name(name: str) -> str:
    """Name of the folder in which `name` is built."""
    return f".{name}.ckptd-partial"


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """List a source folder: shards, sub-folders, and the access rights that outputs take over.

    Tensors swapped to NVMe follow the shards, of role `side` and with the rank of their folder; so do the
    states of the parameters of a universal form, of role `universal`.
    """

    path: str
    shards: tuple[tuple[str, NamedShard], ...]
    folders: tuple[str, ...]
    file_mode: int
    folder_mode: int
    gid: int
    disk_bytes: int
    """Bytes that the shards occupy; less than their sizes where they have holes."""
    partial: bool = False
    """The files are mirrors of remote ones: what planning reads is in them, the rest are holes."""


def list_source(folder: Path, beneath: Path | None = None) -> SourceFolder:
    """List a checkpoint folder; below `beneath` no link is followed.

    Raises:
        NotFoundError: it is not there or no folder.
    """
    path = real_path(folder, beneath)
    if not is_folder(path):
        raise NotFoundError(
            f"{folder} is no folder", hint="give a checkpoint folder or a save_dir with `latest`"
        )
    shards: list[tuple[str, NamedShard]] = []
    folders: list[str] = []
    mode, disk_bytes = 0o666, 0
    with opened_real(path) as fd:
        own = os.fstat(fd)
        for name in sorted(list_dir(fd)):
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed since it was listed
            if stat.S_ISDIR(status.st_mode):
                folders.append(name)
                if name in (FOLDER, PARAMETERS):
                    found = swapped_tensors(fd) if name == FOLDER else universal_states(fd)
                    shards += [(path, named) for path, named, _ in found]
                    disk_bytes += sum(nbytes for _, _, nbytes in found)
            elif stat.S_ISREG(status.st_mode) and (shard := _named(name)):
                shards.append((name, shard))
                mode &= status.st_mode
                disk_bytes += 512 * status.st_blocks
    if any(shard.role is Role.OPTIM for _, shard in shards):  # a universal form is none beside shards
        shards = [(name, shard) for name, shard in shards if shard.role is not Role.UNIVERSAL]
    if any(shard.role is not Role.EXTRA for _, shard in shards):  # what torch wrote beside them is not asked
        shards = [(name, shard) for name, shard in shards if shard.role is not Role.EXTRA]
    folder_mode = own.st_mode & 0o777 | 0o700  # files are put into the copy of a read-only folder, too
    return SourceFolder(
        path, tuple(shards), tuple(folders), mode & 0o666, folder_mode, own.st_gid, disk_bytes
    )


def _named(name: str) -> NamedShard | None:
    """Read a file name as a shard of DeepSpeed's, or as a part of torch.distributed.checkpoint."""
    if name == METADATA or name.endswith(SUFFIX):
        return NamedShard(role=Role.EXTRA, shard=ShardKey())
    return parse_shard_name(name)


def swapped_tensors(folder_fd: int) -> list[tuple[str, NamedShard, int]]:
    """Return (path, rank, bytes on disk) of the optimizer states that NVMe offload keeps beside shards."""
    found: list[tuple[str, NamedShard, int]] = []
    for place, _, names, fd in os.fwalk(FOLDER, dir_fd=folder_fd):
        for name in names:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            rank = rank_of(f"{place}/{name}")
            if rank is not None and stat.S_ISREG(status.st_mode):
                named = NamedShard(role=Role.SIDE, shard=ShardKey(d=rank))
                found.append((f"{place}/{name}", named, 512 * status.st_blocks))
    return sorted(found, key=lambda row: row[0])


def universal_states(folder_fd: int) -> list[tuple[str, NamedShard, int]]:
    """Return (path, role, bytes on disk) of the states of parameters that a universal form keeps."""
    found: list[tuple[str, NamedShard, int]] = []
    for place, _, names, fd in os.fwalk(PARAMETERS, dir_fd=folder_fd):
        for name in names:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if name.endswith(".pt") and stat.S_ISREG(status.st_mode):
                named = NamedShard(role=Role.UNIVERSAL, shard=ShardKey())
                found.append((f"{place}/{name}", named, 512 * status.st_blocks))
    return sorted(found, key=lambda row: row[0])


def is_folder(path: str) -> bool:
    """Tell whether it is a folder; raises where `os.path.isdir` takes an I/O error for a no."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: str) -> bool:
    """Tell whether it is a regular file; raises where `os.path.isfile` takes an I/O error for a no."""
    return stat.S_ISREG(_mode(path))


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def check_destination(source: SourceFolder, destination: Path, beneath: Path | None = None) -> str:
    """Return the absolute path of the destination, when a conversion may create it.

    Raises:
        TargetExists, UsageError, NotFoundError.
    """
    target = check_place(destination, must_be_new=False, beneath=beneath)
    if target == source.path or target.startswith(source.path + os.sep):
        raise UsageError(f"{destination} lies inside the source folder", hint="choose a place beside it")
    return check_place(destination, beneath=beneath)


def check_place(destination: Path, *, must_be_new: bool = True, beneath: Path | None = None) -> str:
    """Return the absolute path of a destination whatever its source is.

    Raises:
        TargetExists, UsageError, NotFoundError.
    """
    absolute = os.path.abspath(destination)
    parent, name = os.path.split(absolute)
    if not name:
        raise UsageError(f"{destination} cannot be made")
    if len(os.fsencode(partial_name(name))) > NAME_BYTES:
        raise UsageError(f"{name} is too long a name", hint="choose a shorter one (230 bytes)")
    try:
        is_there = is_folder(parent)
    except PermissionError as error:
        raise NotPermitted(
            f"{parent} cannot be reached by {user_in_words(os.geteuid())}",
            hint="choose a DST where you may write",
        ) from error
    if not is_there:
        raise NotFoundError(f"{parent} is no folder", hint="make it first")
    target = os.path.join(real_path(parent, beneath), name)
    if must_be_new and os.path.lexists(target):
        raise TargetExists(f"{destination} is there already")
    return target


def _no_right(folder: str) -> NotPermitted:
    """Return the refusal of a place where this user cannot make files, with its owner and who we are."""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return NotPermitted(f"{folder} is mounted read-only", hint="choose a DST on another file system")
    status = os.stat(folder)
    return NotPermitted(
        f"{folder} is owned by {user_in_words(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):o}; "
        f"{user_in_words(os.geteuid())} may not write there",
        hint="choose a DST where you may write",
    )


def would_clone(source: SourceFolder, fd: int) -> bool:
    """Tell whether extents of the source can be shared with the file open at `fd`: one block is tried."""
    with opened_real(source.path) as source_fd:
        for name, _ in source.shards:
            with contextlib.suppress(CkptdError, OSError), files.reading(source_fd, name) as shard:
                if os.fstat(shard).st_size >= BLOCK_BYTES:
                    return extents.clone_range(shard, 0, fd, 0, BLOCK_BYTES)
    return False


class StagingDir:
    """The partial folder, open and locked."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    def adopt_plan(self, trailer: Trailer) -> None:
        """Make the new plan current: keep finished files of the same plan, else drop them."""
        if self._current_digest() != trailer.sha256:
            files.remove_tree(self.fd, OUTPUT)
        files.remove_tree(self.fd, TEMPORARIES)
        os.rename(PLAN + ".new", PLAN, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        for name in (OUTPUT, TEMPORARIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)

    def _current_digest(self) -> str:
        try:
            return self.trailer().sha256
        except (OSError, CkptdError, ValueError):
            return ""

    def trailer(self, name: str = PLAN) -> Trailer:
        """Totals of a plan.

        Raises:
            DamagedError, OSError: it is not there or not finished.
        """
        with self.reading_plan(name) as stream:
            return read_trailer(stream)

    @contextlib.contextmanager
    def reading_plan(self, name: str = PLAN) -> Iterator[IO[bytes]]:
        """Return the plan file, open for reading."""
        with open(files.open_beneath(self.fd, name), "rb") as stream:
            yield stream

    def plan_reader(self, name: str) -> PlanReader:
        """Header of a plan (the stream is closed: outputs are not read here)."""
        with self.reading_plan(name) as stream:
            return PlanReader(stream)

    def can_clone(self, source: SourceFolder) -> bool:
        """Tell whether extents of the source can be shared with files made here."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open("probe", flags, 0o600, dir_fd=self.fd)
        try:
            return would_clone(source, fd)
        finally:
            os.close(fd)
            files.remove_file(self.fd, "probe")

    def fresh_folder(self, name: str) -> int:
        """Return an empty folder in here, open; what an earlier attempt left in it is removed."""
        files.remove_tree(self.fd, name)
        return files.open_dir_beneath(self.fd, name, create_mode=0o700)

    def check_made(self, trailer: Trailer) -> None:
        """Check that the file the executor writes last is there, whatever its exit status said.

        Raises:
            StorageError: it is not, or of another plan.
        """
        try:
            with files.opened_dir(OUTPUT, self.fd) as fd:
                made = json.loads(files.read_beneath(fd, DESCRIPTION)).get("plan_sha256")
        except (OSError, ValueError, AttributeError):
            made = None
        if made != trailer.sha256:
            raise StorageError("the executor ended well and left no whole result", hint="it is tried again")

    def publish(self, target: str, made: str = OUTPUT) -> None:
        """One rename makes the destination of the folder `made` in here."""
        parent, name = os.path.split(target)
        with opened_real(parent) as parent_fd:
            try:
                files.rename_new(self.fd, made, parent_fd, name)
            except FileExistsError as error:
                raise TargetExists(f"{target} appeared while it was converted") from error
            files.fsync_dir(parent_fd)


@contextlib.contextmanager
def open_staging_dir(parent: str, name: str, target_parent: str) -> Iterator[StagingDir]:
    """Make or reopen `.<name>.ckptd-partial` in `parent`, locked.

    Raises:
        LockHeld: another conversion works on it.
        UsageError: it lies on another file system than the destination.
        NotPermitted: no right to write there.
    """
    folder = partial_name(name)
    with contextlib.ExitStack() as stack:
        try:
            parent_fd = stack.enter_context(opened_real(parent))
            if os.fstat(parent_fd).st_dev != os.stat(target_parent).st_dev:
                raise UsageError(f"{parent} is on another file system than {target_parent}")
            fd = files.open_dir_beneath(parent_fd, folder, create_mode=0o700)
        except (PermissionError, NotPermitted) as error:
            raise _no_right(parent) from error
        try:
            try:
                lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LockHeld(
                    f"another conversion into {name} is running",
                    hint="wait for it or choose another destination",
                ) from error
            yield StagingDir(os.path.join(parent, folder), fd)
        finally:
            os.close(fd)


def remove_staging_dir(parent: str, name: str) -> None:
    """Remove the partial folder and all in it; the plan last, which tells whose leftovers these are."""
    folder = partial_name(name)
    with opened_real(parent) as parent_fd:
        with contextlib.suppress(FileNotFoundError), files.opened_dir(folder, parent_fd) as fd:
            for inner in (OUTPUT, TEMPORARIES):
                files.remove_tree(fd, inner)
        files.remove_tree(parent_fd, folder)


def was_published(place: StagingDir, source: SourceFolder, target: str) -> tuple[Header, Trailer] | None:
    """Return the plan that `target` results from, if its attempt was killed before tidying up; else None.

    It is when the plan in `place` is of the source files as they are now and `target` says that it is
    the plan's result (the rename that makes it is the last step of a conversion).
    """
    try:
        reader, trailer = place.plan_reader(PLAN), place.trailer()
        with opened_real(target) as fd:
            made = json.loads(files.read_beneath(fd, DESCRIPTION))["plan_sha256"]
        with opened_real(source.path) as fd:
            for planned, identity in zip(reader.header.sources, reader.identities, strict=True):
                status = files.stat_beneath(fd, planned.path)
                if status is None or identity_of(status) != identity:
                    return None
    except (OSError, CkptdError, ValueError, KeyError, TypeError):
        return None
    return (reader.header, trailer) if made == trailer.sha256 else None


# --- Companions: the small files that a loader wants beside exported weights -----------------------------
# These are configuration, tokenizer and chat template. Trainers built on Hugging Face write them into the
# folder of the shards, or the one above (docs/formats.md §1.2, §8). They are read and copied like shards,
# never changed.

CONFIGS = frozenset({"config.json", ADAPTER_CONFIG})
"""One of these makes a folder the trainer's: a model's configuration, or that of PEFT's adapters."""
MARKS = ("latest", "trainer_state.json")
"""A folder above the shards counts when it has one of these: it is the shards' save_dir or checkpoint-N."""
_COMPANION = re.compile(
    r"(?:config|adapter_config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|chat_template|processor_config|preprocessor_config|video_preprocessor_config)\.json"
    r"|chat_template\.jinja|merges\.txt|vocab\.txt|(?:tokenizer|spiece|sentencepiece|sentencepiece\.bpe)\.model"
    r"|(?:configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)


@dataclass(frozen=True, slots=True)
class PlanOrigin:
    """Name what a conversion reads: shards at `root`/`prefix`…, and `companions`, names in `root`."""

    root: str
    prefix: str
    companions: tuple[str, ...]


def is_companion(name: str) -> bool:
    """True for a file name that exported weights take along."""
    return _COMPANION.fullmatch(name) is not None


def is_config(path: str) -> bool:
    """True for one of `CONFIGS`, or that of an adapter which has a folder of its name."""
    return path in CONFIGS or (path.count("/") == 1 and path.endswith(f"/{ADAPTER_CONFIG}"))


def find_origin(folder: SourceFolder) -> PlanOrigin:
    """The folder of the shards, or the one above, when a configuration lies there."""
    parent, name = os.path.split(folder.path)
    here = _companions(folder.path)
    if any(is_config(path) for path in here):
        return PlanOrigin(folder.path, "", tuple(sorted(here)))
    above = _companions(parent) if name else set()
    if any(is_config(path) for path in above) and any(is_file(os.path.join(parent, mark)) for mark in MARKS):
        return PlanOrigin(parent, f"{name}/", tuple(sorted(above)))
    return PlanOrigin(folder.path, "", ())


def _companions(folder: str) -> set[str]:
    # a folder above that may be crossed and not listed (mode 0711) has nothing to give
    with contextlib.suppress(PermissionError), opened_real(folder) as fd:
        names = list_dir(fd)
        nested = {f"{name}/{ADAPTER_CONFIG}" for name in names if _lies(fd, name, stat.S_ISDIR)}
        here = {name for name in names if is_companion(name)}
        return {path for path in here | nested if _lies(fd, path, stat.S_ISREG)}
    return set()


def _lies(folder_fd: int, path: str, kind: Callable[[int], bool]) -> bool:
    """Tell whether something of that kind lies there; links are not followed."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return kind(os.stat(path, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    return False
