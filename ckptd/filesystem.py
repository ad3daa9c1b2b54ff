"""Read committed checkpoints through fsspec: `ckptd://global_step100/model.safetensors::s3://bucket/run`.

Any program that opens fsspec paths reads a remote of ckptd this way, without restoring anything first. Only
what is committed exists; nothing can be written. A file is fetched whole and compared with the checksum in
its manifest before its first byte is handed out, so no reader ever sees other bytes than those committed. The
price is room for that file in TMPDIR while it is open.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import weakref
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from fsspec.spec import AbstractFileSystem

from ckptd.base import extents
from ckptd.core.model.layouts import Role
from ckptd.errors import DamagedError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.core.model.manifest import ManifestFile
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.storage.remote.readers import ReaderLeases

_IN_MEMORY_BYTES = 8 << 20
"""A file up to this size is read into memory."""


class CheckpointFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The committed checkpoints of one run in one remote, read-only.

    Each committed form has a folder at the root: `global_step100` (the ZeRO checkpoint as it was saved),
    `global_step100_universal`, `global_step100_weights-bf16`. Of a tag that was saved again the newest is
    shown. The listing is read once; `invalidate_cache()` reads it again.

    Args:
        url: the remote, as for `ckptd restore`; its `CKPTD_REMOTE_…` variables hold here too.
        run: id of a run, or its beginning; default: the run that goes on there.

    >>> import fsspec
    >>> "ckptd" in fsspec.available_protocols()
    True
    """

    protocol = "ckptd"
    root_marker = ""

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,  # noqa: ARG002 - fsspec passes what it knows of the next link
        *,
        url: str = "",
        run: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        is_local = target_protocol in (None, "file", "local")
        self.url = url or (fo if is_local else f"{target_protocol}://{fo}")
        self._run = run
        self._lock = threading.RLock()
        self._remote: RemoteInventory | None = None
        self._folders: dict[str, dict[str, ManifestFile]] = {}
        self._commits: dict[str, Any] = {}
        self._pid = 0
        self._leases: ReaderLeases | None = None

    # --- what is there -----------------------------------------------------------------------------------

    def invalidate_cache(self, path: str | None = None) -> None:
        """Read the remote again at the next call."""
        with self._lock:
            self._remote = None
        super().invalidate_cache(path)

    def _read(self) -> RemoteInventory:
        """Return the remote as it was read first, by this process: a connection does not survive a fork."""
        with self._lock:
            if self._remote is None or self._pid != os.getpid():
                self._remote, self._commits = _committed(self.url, self._run)
                self._folders, self._pid = {}, os.getpid()
                if self._leases is not None:
                    self._leases.end()
                self._leases = _leases_in(self._remote)
                weakref.finalize(self, self._leases.end)
            return self._remote

    def _files(self, folder: str) -> dict[str, ManifestFile]:
        """Return path → file of a committed form.

        Raises:
            FileNotFoundError: no such form is committed.
            DamagedError: a manifest is gone or not to be believed.
        """
        remote = self._read()
        with self._lock:
            if folder not in self._commits:
                raise FileNotFoundError(folder)
            if folder not in self._folders:
                commit = self._commits[folder]
                manifests = remote.manifests(commit)
                late, _ = remote.late(commit, manifests)
                files = (file for manifest in manifests for file in manifest.files)
                found = {file.path: file for file in files if file.role is not Role.EXTRA}
                self._folders[folder] = found | {file.path: file for file in late}
            return self._folders[folder]

    def _file(self, path: str) -> ManifestFile:
        folder, _, inner = self._strip_protocol(path).partition("/")
        file = self._files(folder).get(inner)
        if file is None:
            raise FileNotFoundError(path)
        return file

    def _tag(self, path: str) -> str:
        """Return the tag of the checkpoint that a file is of."""
        with self._lock:
            tag: str = self._commits[self._strip_protocol(path).partition("/")[0]].tag
        return tag

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder; see `AbstractFileSystem.ls`. A file's row has its CRC64NVME as `crc64nvme`."""
        place = self._strip_protocol(path).strip("/")
        self._read()
        rows = self._rows(place) if place else [_folder(name) for name in sorted(self._commits)]
        return rows if detail else [row["name"] for row in rows]

    def _rows(self, place: str) -> list[dict[str, Any]]:
        top, _, inner = place.partition("/")
        found: dict[str, dict[str, Any]] = {}
        for path, file in sorted(self._files(top).items()):
            if path == inner:
                return [_row(place, file)]
            head = f"{inner}/" if inner else ""
            if path.startswith(head):
                name, _, below = path[len(head) :].partition("/")
                shown = f"{place}/{name}"
                found.setdefault(shown, _folder(shown) if below else _row(shown, file))
        if inner and not found:
            raise FileNotFoundError(place)
        return list(found.values())

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Describe a file or folder; see `AbstractFileSystem.info`."""
        place = self._strip_protocol(path).strip("/")
        if not place:
            return _folder("")
        rows = self.ls(place)
        is_file = len(rows) == 1 and rows[0]["name"] == place and rows[0]["type"] == "file"
        return rows[0] if is_file else _folder(place)

    def modified(self, path: str) -> Any:
        """Return when the trainer wrote the file, by its node's clock."""
        from datetime import UTC, datetime

        return datetime.fromtimestamp((self._file(path).mtime_ns or 0) / 1e9, UTC)

    # --- bytes -------------------------------------------------------------------------------------------

    def _open(self, path: str, mode: str = "rb", **_: Any) -> IO[bytes]:
        """Open a file whose bytes are those committed.

        Raises:
            NotImplementedError: `mode` writes.
            DamagedError: the remote holds other bytes.
        """
        if mode != "rb":
            raise NotImplementedError("a committed checkpoint is never written to")
        file = self._file(path)
        tag = self._tag(path)
        out: IO[bytes] = io.BytesIO() if file.bytes <= _IN_MEMORY_BYTES else tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._fetch(tag, file, _writer(out))
            out.seek(0)
        except BaseException:
            out.close()
            raise
        return out

    def get_file(self, rpath: str, lpath: Any, callback: Any = None, **_: Any) -> None:
        """Copy one file here; it appears under its name once it is whole."""
        if self.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        file = self._file(rpath)
        os.makedirs(os.path.dirname(lpath) or ".", exist_ok=True)
        if callback is not None:
            callback.set_size(file.bytes)
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(lpath) or ".", delete=False) as out:
            try:
                self._fetch(
                    self._tag(rpath),
                    file,
                    _writer(out),
                    callback.relative_update if callback is not None else None,
                )
                os.fchmod(out.fileno(), file.mode & 0o777)  # as `restore` gives it
                os.rename(out.name, lpath)
            except BaseException:
                os.unlink(out.name)
                raise

    def _fetch(
        self,
        tag: str,
        file: ManifestFile,
        write: Callable[[bytes, int], None],
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Read an object in parallel ranges, hand each chunk on with its offset, and compare the whole."""
        from ckptd.recover.fetch import AHEAD, RANGE_BYTES
        from ckptd.storage.stores import parallel
        from ckptd.storage.stores.checksums import to_hex

        store, leases = self._read().store, self._leases
        assert leases is not None

        def chunks(offset: int, length: int) -> Iterator[bytes]:
            for data in store.stream(file.key, offset, length):
                leases.hold(tag)
                write(data, offset)
                offset += len(data)
                yield data

        try:
            done, crc = parallel.crc_of(
                chunks, file.bytes, on_bytes or (lambda _: None), at_once=AHEAD, range_bytes=RANGE_BYTES
            )
        except FileNotFoundError as error:
            msg = f"{file.key} is gone from {self.url}"
            raise DamagedError(
                msg, hint="retention deleted its checkpoint; invalidate_cache() and choose again"
            ) from error
        if done != file.bytes or to_hex(crc) != file.checksums.crc64nvme:
            msg = f"{file.key} in {self.url} is damaged: it is not what was committed"
            raise DamagedError(msg, hint=f"ckptd verify {self.url} --read-data tells what is intact")


def _committed(url: str, run: str | None) -> tuple[RemoteInventory, dict[str, Any]]:
    """Read a remote: its inventory, and folder → COMMIT of the newest save of each tag and form of one run.

    Raises:
        NotFoundError: no such run.
        RemoteUnreachable, RemoteNotOurs, ConfigError: as `ckptd restore`.
    """
    from ckptd.config.loader import remote_from_arguments
    from ckptd.core.model.generation import order_of
    from ckptd.core.model.manifest import folder_name
    from ckptd.recover.select.inventory import read_remote_inventory
    from ckptd.recover.select.runs import RemoteRuns
    from ckptd.storage.stores.access import access_of

    config = remote_from_arguments(url, os.environ)
    remote = read_remote_inventory(config.name, config.url, None, access_of(config))
    runs = RemoteRuns([remote])
    run_id = runs.named(run) if run is not None else runs.newest()
    shown = runs.only(remote, run_id) if run_id is not None else remote
    found: dict[str, Any] = {}
    for view in sorted(shown.commits, key=lambda view: order_of(view.commit)):
        found[folder_name(view.commit.tag, 1, view.commit.form)] = view.commit
    if not found and run is not None:
        raise NotFoundError(f"run {run} has committed nothing in {url}", hint="`ckptd list` shows the runs")
    return shown, found


def _leases_in(remote: RemoteInventory) -> ReaderLeases:
    """Return the leases that retention in the remote waits for while files are read."""
    from ckptd.storage.remote.readers import ReaderLeases

    return ReaderLeases(remote.store, "ckptd://")


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _row(name: str, file: ManifestFile) -> dict[str, Any]:
    return {
        "name": name,
        "size": file.bytes,
        "type": "file",
        "mtime": (file.mtime_ns or 0) / 1e9,
        "crc64nvme": file.checksums.crc64nvme,
    }


def _writer(out: IO[bytes]) -> Callable[[bytes, int], None]:
    """Return what writes a chunk at its offset, from several threads."""
    if not isinstance(out, io.BytesIO):
        return partial(extents.write_at, out.fileno())
    lock, buffer = threading.Lock(), out

    def write(data: bytes, offset: int) -> None:
        with lock:
            buffer.seek(offset)
            buffer.write(data)

    return write
