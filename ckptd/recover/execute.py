"""Carrying out a resume plan, once: renames, fetches, a conversion, pointers last (H54, P11).

Everything is written below `_ckptd/` and renamed in; the lock is flock on `_ckptd/staging` itself, so that
the launch scripts of all ranks of a node may call `resume` at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.convert.supervise import ConvertOptions, convert
from ckptd.core.listing import OURS
from ckptd.errors import CkptdError, LockHeld, StorageError, TargetExists, from_os_error
from ckptd.local.fs import ASIDE, STAGING, ensure_ours, remove_ours
from ckptd.place import path_of
from ckptd.recover.fetch import Fetcher, read_whole
from ckptd.recover.steps import (
    DERIVED_ACCELERATE,
    DERIVED_UNIVERSAL,
    Convert,
    CopyBeside,
    Drop,
    Fetch,
    MoveAside,
    Place,
    Point,
    RestoreExtras,
    Step,
    name_of_extra,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptd.recover.choose import Copy

_OTHER_CONVERSION_SECONDS = 3600.0
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_DESCRIPTION_LIMIT_BYTES = 8 << 20


class Execution:
    """Executes steps in one save_dir. `on_progress(what, bytes_done, bytes_total)`."""

    def __init__(
        self,
        save_dir: Path,
        save_dir_fd: int,
        *,
        reserve_bytes: int,
        memory_budget_bytes: int,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._save_dir = save_dir
        self._fd = save_dir_fd
        self._reserve_bytes = reserve_bytes
        self._memory_budget_bytes = memory_budget_bytes
        self._on_progress = on_progress

    def run(self, steps: Sequence[Step]) -> None:
        """All steps in order.

        Raises:
            DamagedError: a remote's copy is not what was committed; nothing of it was put in place.
            NoSpaceError, RemoteUnreachable, NotPermitted, RefusedError, StorageError: as they say.
        """
        times = self._times_of(steps)
        for step in steps:
            try:
                self._one(step)
            except OSError as error:
                raise from_os_error(error, f"{self._save_dir}: {step}") from error
        for name, (accessed_ns, modified_ns) in times.items():
            os.utime(name, ns=(accessed_ns, modified_ns), dir_fd=self._fd, follow_symlinks=False)

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

    def _one(self, step: Step) -> None:
        match step:
            case MoveAside():
                self.move_aside(step.name, step.label)
            case Fetch():
                self._fetch(step)
            case Place():
                self._place(step)
            case Convert():
                self._convert(step)
            case RestoreExtras():
                self._restore(step)
            case CopyBeside():
                self._copy_beside(step)
            case Drop():
                remove_ours(self._fd, step.folder, step.name)
            case Point():
                head, _, base = step.name.rpartition("/")
                with files.opened_dir(head or ".", self._fd) as folder:
                    files.write_atomic(folder, base, step.value.encode())

    def move_aside(self, name: str, label: str) -> str | None:
        """Rename a name below save_dir into `_ckptd/aside/`; the new name, None when it is gone already."""
        head, _, base = name.rpartition("/")
        aside = ensure_ours(self._fd, ASIDE)
        try:
            source = files.open_dir_beneath(self._fd, head) if head else os.dup(self._fd)
        except FileNotFoundError:
            os.close(aside)
            return None
        try:
            for number in range(1, 1_000_000):
                target = f"{label}.{number}"
                try:
                    files.rename_noreplace(source, base, aside, target)
                except FileExistsError:
                    continue
                except FileNotFoundError:
                    return None
                files.fsync_dir(aside)
                files.fsync_dir(source)
                return f"{ASIDE}/{target}"
            msg = f"{ASIDE} holds too many folders of {label}"
            raise StorageError(msg, hint="remove what is no longer needed there")
        finally:
            os.close(source)
            os.close(aside)

    def _fetch(self, step: Fetch) -> None:
        name = staging_name(step.form, step.copy)
        staging = ensure_ours(self._fd, f"{STAGING}/{name}")
        try:
            tell = self._on_progress
            what = str(step)
            fetcher = Fetcher(
                step.copy, staging, (lambda done, total: tell(what, done, total)) if tell else None
            )
            fetcher.check_room(self._reserve_bytes)
            fetcher.run()
        except CkptdError as error:
            if error.exit_code == 65:
                remove_ours(self._fd, STAGING, name)
            raise
        finally:
            os.close(staging)

    def _place(self, step: Place) -> None:
        head, _, base = step.target.rpartition("/")
        staging = ensure_ours(self._fd, STAGING)
        parent = self._parent_of(head)
        try:
            files.rename_noreplace(staging, staging_name(step.form, step.copy), parent, base)
            files.fsync_dir(parent)
            files.fsync_dir(staging)
        except FileExistsError as error:
            msg = f"{self._save_dir}/{step.target} appeared while it was fetched"
            raise TargetExists(msg, hint="is a trainer running? stop it and call resume again") from error
        finally:
            os.close(parent)
            os.close(staging)

    def _parent_of(self, head: str) -> int:
        """The folder that something is put into: ours is made, a trainer's must be there."""
        if not head:
            return os.dup(self._fd)
        if head.startswith(f"{OURS}/"):
            return ensure_ours(self._fd, head)
        return files.open_dir_beneath(self._fd, head)

    def _convert(self, step: Convert) -> None:
        os.close(ensure_ours(self._fd, DERIVED_UNIVERSAL))
        tell = self._on_progress
        options = ConvertOptions(
            reserve_bytes=self._reserve_bytes,
            memory_budget_bytes=self._memory_budget_bytes,
            verify=step.verify,
            low_priority=False,
        )
        deadline = time.monotonic() + _OTHER_CONVERSION_SECONDS
        while True:
            try:
                convert(
                    self._save_dir / step.tag,
                    path_of(self._save_dir, step.target),
                    options,
                    on_progress=(lambda p: tell(str(step), p.bytes_done, p.bytes_total)) if tell else None,
                    work_dir=path_of(self._save_dir, STAGING),
                )
            except TargetExists:
                return
            except LockHeld:
                # the daemon makes the same form; what it publishes is what we want
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    def _copy_beside(self, step: CopyBeside) -> None:
        """May be cut short: without the universal form, which comes after it, nothing loads this folder."""
        mode = os.fstat(self._fd).st_mode & 0o777
        with contextlib.ExitStack() as closing:
            source = files.open_dir_beneath(self._fd, step.tag)
            closing.callback(os.close, source)
            target = ensure_ours(self._fd, step.target)
            closing.callback(os.close, target)
            for path in step.paths:
                head, _, base = path.rpartition("/")
                parent = files.open_dir_beneath(target, head, create_mode=mode) if head else os.dup(target)
                closing.callback(os.close, parent)
                with files.reading(source, path) as fd:
                    status = os.fstat(fd)
                    out = os.open(base, _NEW_FILE, status.st_mode & 0o777, dir_fd=parent)
                    closing.callback(os.close, out)
                    files.copy_range(fd, 0, out, 0, status.st_size)
                    os.fsync(out)
            files.fsync_dir(target)

    def _restore(self, step: RestoreExtras) -> None:
        for file in step.files:
            data = read_whole(step.copy.remote.store, file)
            files.create_exclusive(self._fd, name_of_extra(file), data, mode=file.mode & 0o777)


def staging_name(form: str, copy: Copy) -> str:
    """Where a fetch lies until it is whole: named by its COMMIT, so that a killed one goes on."""
    return f"resume.{form}.{copy.view.sha256[:16]}"


@contextlib.contextmanager
def one_at_a_time(save_dir_fd: int) -> Iterator[None]:
    """Hold the lock of recoveries in a save_dir; waits for another one."""
    staging = ensure_ours(save_dir_fd, STAGING)
    try:
        fcntl.flock(staging, fcntl.LOCK_EX)
        yield
    finally:
        os.close(staging)


def derived_universals(save_dir_fd: int) -> dict[str, dict[str, str] | None]:
    """What lies in `_ckptd/derived/universal`: tag → fingerprints of its source; None when unreadable."""
    return _derived(save_dir_fd, DERIVED_UNIVERSAL, "")


def derived_accelerate(save_dir_fd: int) -> dict[str, dict[str, str] | None]:
    """The same of `_ckptd/derived/accelerate`, where the form lies one level deeper."""
    return _derived(save_dir_fd, DERIVED_ACCELERATE, "pytorch_model/")


def _derived(save_dir_fd: int, place: str, inner: str) -> dict[str, dict[str, str] | None]:
    try:
        fd = files.open_dir_beneath(save_dir_fd, place)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    try:
        names = [name for name in sorted(os.listdir(fd)) if not name.startswith(".")]
        return {name: _sources(fd, f"{name}/{inner}ckptd.json") for name in names}
    finally:
        os.close(fd)


def _sources(fd: int, path: str) -> dict[str, str] | None:
    try:
        data = files.read_beneath(fd, path, limit_bytes=_DESCRIPTION_LIMIT_BYTES)
        marks = json.loads(data)["source"]["fingerprints"]
        return {str(path): str(mark) for path, mark in marks.items()}
    except (OSError, CkptdError, ValueError, KeyError, TypeError, AttributeError):
        return None
