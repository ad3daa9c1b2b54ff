"""Carry out a resume plan, once: renames, fetches, a conversion, pointers last.

Everything is written below `_ckptd/` and renamed in; the lock is flock on `_ckptd/staging` itself, so that
the launch scripts of all ranks of a node may call `resume` at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base import extents, files
from ckptd.base.humanize import size_of
from ckptd.base.owned_dirs import lock, path_of
from ckptd.conversion.engine.staging import partial_name
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.remote.convert import convert_copy
from ckptd.core.model.layouts import Role, Trainer
from ckptd.core.model.listing import OURS
from ckptd.core.model.other_layouts import below, is_single_file
from ckptd.core.model.records import ZERO
from ckptd.core.model.resume_marker import RESUMED, resume_marker_of
from ckptd.errors import (
    CkptdError,
    LockHeld,
    NeedsWholeFiles,
    NoSpaceError,
    TargetExists,
    from_os_error,
)
from ckptd.recover.fetch import Fetcher, read_whole
from ckptd.recover.files import opened_parent, rename_numbered
from ckptd.recover.select.steps import (
    DERIVED_UNIVERSAL,
    ConvertFrom,
    CopyBeside,
    Delete,
    Fetch,
    Install,
    MakeUniversal,
    Mend,
    MoveAside,
    RestoreExtras,
    Step,
    WritePointer,
    done,
    name_of_extra,
)
from ckptd.storage.local.fs import (
    ASIDE,
    STAGING,
    closing,
    ensure_ours,
    names_in,
    open_tag,
    remove_empty,
    remove_ours,
)
from ckptd.storage.local.state_dir import filesystem_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckptd.conversion.options import ConvertProgress
    from ckptd.core.model.listing import SaveDirListing
    from ckptd.recover.select.choose import Candidate
    from ckptd.recover.select.copies import Copy


# --- files beside the shards -----------------------------------------------------------------------------
# Small files that a trainer keeps there are copied to where a universal form will be read from. There may be
# one for each rank: each is opened, copied, made durable and closed before the next.

_MEMORY_BUDGET_BYTES = 512 << 20
"""Memory budget of a conversion."""
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_beside(save_dir_fd: int, folder: str, target: str, paths: Iterable[str]) -> None:
    """Copy `paths` of `folder` to the same places below `target`, which is ours; names and bytes durable.

    Raises:
        RefusedError: a symlink, or another device, on the way. OSError: as the kernel says.
    """
    mode = os.fstat(save_dir_fd).st_mode & 0o777
    with (
        closing(files.open_dir_beneath(save_dir_fd, folder)) as source_fd,
        closing(ensure_ours(save_dir_fd, target)) as target_fd,
    ):
        for path in paths:
            _copy(source_fd, path, target_fd, mode)


def _copy(source_fd: int, path: str, target_fd: int, folder_mode: int) -> None:
    head, _, base = path.rpartition("/")
    with (
        opened_parent(target_fd, head, create_mode=folder_mode, is_durable=True) as parent,
        files.reading(source_fd, path) as fd,
    ):
        status = os.fstat(fd)
        with closing(os.open(base, _NEW_FILE, status.st_mode & 0o777, dir_fd=parent)) as out:
            extents.copy_range(fd, 0, out, 0, status.st_size)
            os.fsync(out)
        files.fsync_dir(parent)


# --- carrying out the steps ------------------------------------------------------------------------------

_OTHER_CONVERSION_SECONDS = 3600.0
_CLONING = ("xfs", "btrfs", "bcachefs")
_FETCHED = "resume."


class StepExecution:
    """Executes steps in one save_dir. `on_progress(what, bytes_done, bytes_total)`, `say(what is done)`."""

    def __init__(
        self,
        save_dir: Path,
        save_dir_fd: int,
        *,
        reserve_bytes: int,
        compare_masters: bool,
        on_progress: Callable[[str, int, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._save_dir = save_dir
        self._say = say
        self._fd = save_dir_fd
        self._reserve_bytes = reserve_bytes
        self._compare_masters = compare_masters
        self._on_progress = on_progress
        self.current: Step | None = None
        """The step that is, or was last, being carried out."""
        self._left: Sequence[Step] = ()

    def run(self, steps: Sequence[Step]) -> None:
        """Carry out all steps in order.

        Raises:
            DamagedError: a remote's copy is not what was committed; nothing of it was put in place.
            NoSpaceError, RemoteUnreachable, NotPermitted, RefusedError, StorageError: as they say.
        """
        self._check_room(steps)
        times = self._times_of(steps)
        for number, step in enumerate(steps):
            self.current, self._left = step, steps[number:]
            try:
                self._one(step)
            except OSError as error:
                raise from_os_error(error, f"{self._save_dir}: {step}") from error
            if self._say is not None:
                self._say(done(step))
        self._left = ()
        for name, (accessed_ns, modified_ns) in times.items():
            os.utime(name, ns=(accessed_ns, modified_ns), dir_fd=self._fd, follow_symlinks=False)

    def when_stopped(self) -> str:
        """Say what a person who stopped it finds: what was done was said, so what was not."""
        if not self._left:
            return "stopped: every step was done"
        left = ", ".join(str(step) for step in self._left)
        staging, staged = path_of(self._save_dir, STAGING), False
        with contextlib.suppress(OSError):  # by its path: save_dir is closed by now
            staged = any(name.startswith(_FETCHED) for name in os.listdir(staging))
        lies = f"; what was fetched lies in {staging}, and is not fetched again"
        return f"stopped, and this was not done: {left}{lies if staged else ''}"

    def _times_of(self, steps: Sequence[Step]) -> dict[str, tuple[int, int]]:
        """Times of trainers' folders that something is put into: they rotate by them."""
        named = [getattr(step, "target", getattr(step, "name", "")) for step in steps]
        folders = {name.split("/")[0] for name in named if "/" in name and not name.startswith(f"{OURS}/")}
        found = {}
        for name in folders:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                found[name] = (status.st_atime_ns, status.st_mtime_ns)
        return found

    def _check_room(self, steps: Sequence[Step]) -> None:
        """Refuse, before the first byte, a recovery that leaves less free than the next save and `min_free`
        need.
        """
        needed = sum(self._missing_bytes(step) for step in steps if isinstance(step, Fetch))
        needed += sum(
            f.bytes for s in steps if isinstance(s, ConvertFrom) for f in s.copy.files if f.role is Role.OPTIM
        )
        converts = any(isinstance(step, MakeUniversal) for step in steps)
        if converts and filesystem_type(self._save_dir) not in _CLONING:
            shards = [f for s in steps if isinstance(s, Fetch) for f in s.copy.files if f.role is Role.OPTIM]
            needed += sum(file.bytes for file in shards)
        free = extents.free_bytes(self._fd)
        if needed and free - needed < self._reserve_bytes:
            msg = f"{self._save_dir} needs {size_of(needed)} more; {size_of(free)} are free"
            if self._reserve_bytes:
                msg += f", {size_of(self._reserve_bytes)} of them kept for min_free and the next save"
            raise NoSpaceError(msg, hint="free space, or lower min_free; nothing was deleted to make room")

    def _missing_bytes(self, step: Fetch) -> int:
        name = f"{STAGING}/{staging_name(step.form, step.copy)}"
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            closing(files.open_dir_beneath(self._fd, name)) as staging,
        ):
            return Fetcher(step.copy, staging).missing_bytes()
        return step.copy.bytes

    def _one(self, step: Step) -> None:
        match step:
            case MoveAside():
                self._move_aside(step.name, step.label)
            case Fetch():
                self._fetch(step)
            case Install():
                self._place(step)
            case Mend():
                self._mend(step)
            case MakeUniversal():
                self._convert(step)
            case ConvertFrom():
                self._convert_from(step)
            case RestoreExtras():
                self._restore(step)
            case CopyBeside():
                # may be cut short: without the universal form, which comes after it, nothing loads it
                copy_beside(self._fd, step.tag, step.target, step.paths)
            case Delete():
                remove_ours(self._fd, step.folder, step.name)
            case WritePointer():
                head, _, base = step.name.rpartition("/")
                with opened_parent(self._fd, head) as folder:
                    files.write_atomic(folder, base, step.value.encode())

    def _move_aside(self, name: str, label: str) -> None:
        """Rename a name below save_dir into `_ckptd/aside/`, unless it is gone already."""
        head, _, base = name.rpartition("/")
        with (
            closing(ensure_ours(self._fd, ASIDE)) as aside,
            contextlib.suppress(FileNotFoundError),
            opened_parent(self._fd, head) as source,
        ):
            rename_numbered(source, base, aside, label)
            files.fsync_dir(aside)
            files.fsync_dir(source)

    def _fetch(self, step: Fetch) -> None:
        name, tell = staging_name(step.form, step.copy), self._on_progress
        report = (lambda done, total: tell(str(step), done, total)) if tell else None
        with closing(ensure_ours(self._fd, f"{STAGING}/{name}")) as staging:
            fetcher = Fetcher(step.copy, staging, report)
            try:
                fetcher.drop_others()
                fetcher.run()
            except CkptdError as error:
                if error.exit_code == 65:
                    remove_ours(self._fd, STAGING, name)
                raise

    def _place(self, step: Install) -> None:
        head, _, base = step.target.rpartition("/")
        # a folder of ours is made, a trainer's must be there
        is_ours = head.startswith(f"{OURS}/")
        with (
            closing(ensure_ours(self._fd, STAGING)) as staging,
            closing(ensure_ours(self._fd, head)) if is_ours else opened_parent(self._fd, head) as parent,
        ):
            try:
                if is_single_file(step.target, [file.path for file in step.copy.files]):
                    self._place_file(staging, staging_name(step.form, step.copy), parent, base)
                else:
                    files.rename_new(staging, staging_name(step.form, step.copy), parent, base)
            except FileExistsError as error:
                msg = f"{self._save_dir}/{step.target} appeared while it was fetched"
                raise TargetExists(msg, hint="is a trainer running? stop it and call resume again") from error
            files.fsync_dir(parent)
            files.fsync_dir(staging)

    def _place_file(self, staging_fd: int, name: str, parent_fd: int, base: str) -> None:
        """Put a checkpoint in place that is one file; the folder that it was fetched into goes."""
        with closing(files.open_dir_beneath(staging_fd, name)) as fetched:
            files.rename_new(fetched, base, parent_fd, base)
        remove_empty(staging_fd, name)

    def _mend(self, step: Mend) -> None:
        """Put fetched files into a folder; a bad one goes aside first."""
        name, tag = staging_name(step.form, step.copy), step.copy.view.commit.tag
        with (
            closing(files.open_dir_beneath(self._fd, f"{STAGING}/{name}")) as staging,
            closing(open_tag(self._fd, step.target)) as target,
        ):
            mode = stat.S_IMODE(os.fstat(target).st_mode) & 0o777
            for file in step.copy.files:
                head, _, base = file.path.rpartition("/")
                with (
                    opened_parent(staging, head) as source,
                    opened_parent(target, head, create_mode=mode, is_durable=True) as into,
                ):
                    if files.stat_beneath(into, base) is not None:
                        self._move_aside(below(step.target, file.path), f"{tag}.{base}")
                    files.rename_new(source, base, into, base)
                    files.fsync_dir(into)
            files.make_folders(target, step.copy.empty_folders, mode=mode)
            files.fsync_dir(target)
        remove_ours(self._fd, STAGING, name)

    def _convert(self, step: MakeUniversal) -> None:
        self._made_by(
            step,
            lambda options, tell: convert(
                self._save_dir / step.tag,
                path_of(self._save_dir, step.target),
                replace(options, verify=step.verify),
                on_progress=tell,
                work_dir=path_of(self._save_dir, STAGING),
            ),
        )

    def _convert_from(self, step: ConvertFrom) -> None:
        """Convert straight from a remote by ranges; fetch a form that cannot be read so whole and convert it
        here.
        """
        os.close(ensure_ours(self._fd, STAGING))
        target, staging = (path_of(self._save_dir, name) for name in (step.target, STAGING))
        try:
            self._made_by(step, lambda options, tell: convert_copy(step.copy, target, staging, options, tell))
        except NeedsWholeFiles:
            tag = step.copy.view.commit.tag
            instead = Fetch(form=ZERO, copy=step.copy), Install(form=ZERO, copy=step.copy, target=tag)
            self._check_room(instead)
            for one in (*instead, MakeUniversal(tag=tag, target=step.target, verify=False)):
                self._one(one)

    def _made_by(
        self,
        step: MakeUniversal | ConvertFrom,
        make: Callable[[ConvertOptions, Callable[[ConvertProgress], None] | None], object],
    ) -> None:
        """Convert; what another one publishes meanwhile in a folder of ours is what we want.

        In a trainer's folder nobody else publishes: what appeared there is not known.
        """
        os.close(ensure_ours(self._fd, DERIVED_UNIVERSAL))
        tell = self._on_progress
        options = ConvertOptions(
            reserve_bytes=self._reserve_bytes,
            compare_masters=self._compare_masters,
            memory_budget_bytes=_MEMORY_BUDGET_BYTES,
            low_priority=False,
        )
        deadline = time.monotonic() + _OTHER_CONVERSION_SECONDS
        while True:
            try:
                make(options, (lambda p: tell(str(step), p.bytes_done, p.bytes_total)) if tell else None)
            except TargetExists:
                if not step.target.startswith(f"{OURS}/"):
                    raise
                return
            except LockHeld:
                # a daemon, or another rank
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    def _restore(self, step: RestoreExtras) -> None:
        for file in step.files:
            data = read_whole(step.copy.remote.store, file)
            files.create_exclusive(self._fd, name_of_extra(file), data, mode=file.mode & 0o777)


def staging_name(form: str, copy: Copy) -> str:
    """Name the folder of a fetch that is not whole yet: by its COMMIT, so that a killed one goes on."""
    return f"{_FETCHED}{form}.{copy.view.sha256[:16]}"


def drop_leftovers(save_dir_fd: int, tag: str) -> None:
    """Remove what killed recoveries staged of other checkpoints, and the shell of a conversion of `tag`.

    A conversion that was killed after it got its name leaves one. The caller holds `one_at_a_time`.
    """
    for name in names_in(save_dir_fd, STAGING):
        if name.startswith(_FETCHED) or name == partial_name(tag):
            remove_ours(save_dir_fd, STAGING, name)


# --- the resume marker -----------------------------------------------------------------------------------
# Where no `latest` says what a run is resumed from, `resume` writes it down, so that the daemon does not
# delete that checkpoint before the run has committed another (docs/internals/retention.md).


def write_resume_marker(
    save_dir_fd: int, candidate: Candidate, listing: SaveDirListing, say: Callable[[str], None]
) -> None:
    """Write the resume marker, durably, before anything is fetched or printed.

    From then on the daemon keeps the checkpoint, which it might otherwise delete as soon as it is there.
    Where nothing can be written a daemon cannot remove anything either: said, and no reason to stop.
    """
    if candidate.layout[0] is Trainer.DEEPSPEED:  # `latest` names it
        return
    text = resume_marker_of(candidate.tag, listing.folders).model_dump_json()
    if text == listing.resumed:
        return
    try:
        with closing(ensure_ours(save_dir_fd, OURS)) as fd:
            files.write_atomic(fd, RESUMED, text.encode())
    except OSError as error:
        why = os.strerror(error.errno or 0)
        say(f"{OURS}/{RESUMED} cannot be written ({why}): retention may delete {candidate.tag}")


# --- one recovery at a time ------------------------------------------------------------------------------
# The lock is flock on `_ckptd/staging` itself, which leaves no lock file.


@contextlib.contextmanager
def one_at_a_time(save_dir_fd: int) -> Iterator[None]:
    """Hold the lock of recoveries in a save_dir; waits for another one.

    Where there was nothing of ours and it fails before anything lies there, nothing stays: before the first
    checkpoint nobody knows whether the trainer bears a folder of ours (adr/0050).
    """
    was_there = files.stat_beneath(save_dir_fd, OURS) is not None
    while True:
        with closing(ensure_ours(save_dir_fd, STAGING)) as staging:
            lock(staging, fcntl.LOCK_EX)
            if os.fstat(staging).st_nlink == 0:  # the one that was waited for failed, and removed it
                continue
            try:
                yield
            except BaseException:
                for name in () if was_there else (STAGING, OURS):
                    remove_empty(save_dir_fd, name)
                raise
            return
