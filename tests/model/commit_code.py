"""Shipped code, one store operation at a time: what the world of the commit protocol is made of.

`commit.upload`, `observe.describe`, `retire.retire` and the transfer's decisions run as they are, against a
store whose verbs are questions to the world; a file is one object of a few bytes, which moves in one step.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.model import manifest as documents_of
from ckptd.core.model.generation import GenerationChoice, choose_generation
from ckptd.core.model.layouts import Grid, parse_shard_name
from ckptd.core.model.manifest import NodeManifest, RemoteIdentity, folder_name
from ckptd.core.model.save import SaveWindow, SealedFile, SealedSave, Writer
from ckptd.daemon.state.remote_sync import unread_manifests
from ckptd.daemon.uploads.session import commits_of
from ckptd.errors import SourceChanged, TargetExists, VerifyError
from ckptd.storage.remote import commit, deletion, documents
from ckptd.storage.remote.messages import UploadFile, UploadRequest
from ckptd.storage.remote.transfer import Carried, Transfer
from ckptd.storage.stores.base import ObjectInfo
from ckptd.storage.stores.checksums import crc64
from tests.stores.offers import OffersNothing
from tests.stores.scene import JOB_ID, MODEL, OPTIM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.remote.messages import TagView
    from tests.model.explorer import Io

TAG = "global_step5"
APART_SECONDS = 1000
OVERWRITTEN = "overwritten:"
"""Begins the key under which the world notes that a COMMIT was replaced."""
IDENTITY = RemoteIdentity(remote_id="r", job_id=JOB_ID, job="job", created="then")
Chooser = "Callable[[SealedSave, TagView], GenerationChoice]"


def content_of(number: int, path: str) -> bytes:
    """What the trainer wrote into `path` at save `number`."""
    return f"save {number} {path}".encode()


class Slot(NamedTuple):
    """A place in the training run, whichever machine stands there; or somebody else who uses the remote."""

    names: tuple[str, ...]
    """The machines that stand there one after the other."""
    paths: tuple[str, ...] = ()
    """The shards that its ranks save."""
    task: str = "upload"
    """Or `delete_commit` (the generation that the save number names), or `read` (as a restore does)."""


TWO_NODES = (Slot(("n0",), (OPTIM.format(d=0), MODEL)), Slot(("n1", "n1b"), (OPTIM.format(d=1),)))
TWO_REPLICAS = (
    Slot(("n0",), (OPTIM.format(d=0), MODEL)),
    Slot(("n1", "n1b"), (OPTIM.format(d=1), MODEL)),
)


@cache
def sealed(slot: Slot, number: int) -> SealedSave:
    """Save `number` as the daemon of that slot sealed it."""
    rows = []
    for path in slot.paths:
        named = parse_shard_name(path)
        assert named is not None
        data = content_of(number, path)
        rows.append(
            SealedFile(
                path=path,
                identity=FileIdentity(dev=1, ino=1, size_bytes=len(data), mtime_ns=number, ctime_ns=number),
                fingerprint=documents_of.sha256_of(data),
                role=named.role,
                shard=named.shard,
            )
        )
    at_ns = number * APART_SECONDS * 10**9
    return SealedSave(
        tag=TAG,
        folder=FolderIdentity(dev=1, ino=2),
        files=tuple(rows),
        grid=Grid(dp=2, mm_count=1, zero_stage=2),
        branch=1,
        step=5,
        save_seq=number,
        window=SaveWindow(first=at_ns, last=at_ns),
        writer=Writer(),
    )


@cache
def order_of(slot: Slot, name: int, number: int, generation: int) -> UploadRequest:
    """The daemon's order to upload a save as a generation."""
    save = sealed(slot, number)
    node = slot.names[name]
    folder = folder_name(TAG, generation, "zero")
    head = NodeManifest(
        job_id=JOB_ID,
        tag=TAG,
        generation=generation,
        form="zero",
        folder=folder,
        node=node,
        node_id=f"id-{node}",
        ckptd_version="0",
        config_digest="c",
        branch=save.branch,
        step=save.step,
        save_seq=save.save_seq,
        save_window=save.window,
        grid=save.grid,
        files=(),
    )
    rows = tuple(
        UploadFile(
            path=file.path,
            key=f"{folder}/{file.path}",
            source=file.path,
            identity=file.identity,
            bytes=file.identity.size_bytes,
            role=file.role,
            shard=file.shard,
            fingerprint=file.fingerprint,
        )
        for file in save.files
    )
    return UploadRequest(root="", manifest=head, files=rows)


def choose(save: SealedSave, view: TagView) -> GenerationChoice:
    """As the daemon asks `choose_generation`."""
    manifests, commits = commits_of(view)
    return choose_generation(
        save,
        JOB_ID,
        manifests=manifests,
        commits=commits,
        tombstones=view.retired,
        save_spread_seconds=60,
        named=unread_manifests(view),
    )


class StepStore(OffersNothing):
    """The store as a program sees it: every verb is a question to the world."""

    url = "memory:"
    lanes = 1

    def __init__(self, io: Io) -> None:
        self.io = io

    def get(self, key: str) -> bytes | None:
        found = self.io.ask("get", key)
        assert found is None or isinstance(found, bytes)
        return found

    def put(self, key: str, data: bytes) -> None:
        self.io.ask("put", key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return bool(self.io.ask("create", key, data))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self.io.ask("list", prefix)
        assert isinstance(found, tuple)
        return iter([ObjectInfo(key=key, bytes=size) for key, size in found])

    def stat(self, key: str) -> ObjectInfo | None:
        size = self.io.ask("stat", key)
        assert size is None or isinstance(size, int)
        return None if size is None else ObjectInfo(key=key, bytes=size)

    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        yield (self.get(key) or b"")[offset : offset + length]

    def delete(self, key: str) -> None:
        self.io.ask("delete", key)

    def discard(self, key: str, token: str = "") -> None:
        """Nothing is left half done here."""

    def free_bytes(self) -> int | None:
        return None

    def upload(self, key: str, _source: object, **_: object) -> int:
        """One step; the bytes are those that lie on the disk at that moment."""
        sent = self.io.ask("upload", key, key.rpartition("/")[2])
        if sent is None:
            raise TargetExists(f"{key} appeared")
        assert isinstance(sent, bytes)
        return crc64(sent)

    def verify(self, key: str, size_bytes: int, crc: int, _: object) -> str:
        data = self.get(key) or b""
        if (len(data), crc64(data)) != (size_bytes, crc):
            raise VerifyError(f"{key} differs")
        return "read-back"


class LocalFile:
    """A shard on the disk of the node that the program runs on."""

    mode = 0o644
    folder_mode = 0o755
    gid = None

    def __init__(self, io: Io, file: UploadFile) -> None:
        self._io = io
        self.path = file.source
        self.size_bytes = file.bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        data = self._io.ask("read", self.path)
        assert isinstance(data, bytes)
        buffer[: len(data)] = data
        return len(data)

    def drop(self, offset: int, length: int) -> None:
        """No page cache here."""


class StepTransfer(Transfer):
    """The real transfer, its files one after the other and each a few bytes."""

    def run(self) -> Carried:
        for file in self._order.files:
            sent = self._upload_one(file)
            if sent is not None:
                self._verify(sent)
        return Carried(
            files=tuple(self._results[file.key] for file in self._order.files), bytes_sent=0, bytes_skipped=0
        )


class StepOrigin:
    """The node's disk, as the world has it when it is asked."""

    most_lanes = 1
    is_afar = False

    def __init__(self, order: UploadRequest, io: Io) -> None:
        self.order = order
        self._io = io

    @contextmanager
    def opened(self, file: UploadFile) -> Iterator[LocalFile]:
        yield LocalFile(self._io, file)

    def held(self, _file: UploadFile) -> tuple[()]:
        return ()

    def why_changed(self, file: UploadFile) -> str | None:
        return changed_in(self._io, file.identity, file.path)

    def recheck(self) -> None:
        for file in self.order.files:
            reason = self.why_changed(file)
            if reason is not None:
                raise SourceChanged(reason)


@contextmanager
def on_this_disk(order: UploadRequest, _root: int, _control: object, _store: object) -> Iterator[StepOrigin]:
    """The origin of an order of the program that runs."""
    yield StepOrigin(order, _IO[-1])


def changed_in(io: Io, identity: FileIdentity | None, name: str) -> str | None:
    """As `origin.changed`: the save that lies there is not the sealed one."""
    number = io.ask("look")
    assert identity is not None
    if number == 0:
        return f"{name} vanished"
    return None if number == identity.mtime_ns else f"{name} is another save's"


_IO: list[Io] = []
"""Of the program that runs: `commit` asks for files by descriptor, which is none here."""


@contextmanager
def asking(io: Io) -> Iterator[None]:
    """What runs here asks through `io`."""
    _IO.append(io)
    try:
        yield
    finally:
        _IO.pop()


@contextmanager
def stepwise(*, is_pointing: bool) -> Iterator[None]:
    """The real code, with files and time of this world; `is_pointing`: pointers in many steps too."""

    def point(_store: object, _cache: object = None, leaving: object = None) -> None:
        _IO[-1].ask("point", "latest")

    patches: list[Any] = [
        mock.patch.object(commit, "Transfer", StepTransfer),
        mock.patch.object(commit, "changed", lambda _root, _source, i, name: changed_in(_IO[-1], i, name)),
        mock.patch.object(commit, "open_root", lambda _path: os.open("/", os.O_PATH)),
        mock.patch.object(commit, "now_utc", lambda: "2026-01-01T00:00:00+00:00"),
        mock.patch.object(documents, "parse", lru_cache(maxsize=None)(documents_of.parse)),
    ]
    if not is_pointing:
        patches += [mock.patch.object(commit, "point", point), mock.patch.object(deletion, "point", point)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


class PlainStore(OffersNothing):
    """Objects that lie still: for the judge, and for what is done in one step."""

    url = "memory:"
    lanes = 1

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects

    def get(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def put(self, key: str, data: bytes) -> None:
        self._objects[key] = data

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(
            [
                ObjectInfo(key=k, bytes=len(v))
                for k, v in sorted(self._objects.items())
                if k.startswith(prefix)
            ]
        )

    def free_bytes(self) -> int | None:
        return None


def perform(objects: dict[str, bytes], verb: str, key: str, *more: object, is_create_only: bool) -> Any:
    """One operation on what lies in the remote; its answer."""
    data = more[0] if more else b""
    assert isinstance(data, bytes)
    match verb:
        case "get":
            return objects.get(key)
        case "list":
            return tuple(sorted((k, len(v)) for k, v in objects.items() if k.startswith(key)))
        case "stat":
            return len(objects[key]) if key in objects else None
        case "put":
            objects[key] = data
        case "delete":
            objects.pop(key, None)
        case "create":
            if is_create_only and key in objects:
                return False
            if key.startswith("_ckptd/commits/") and objects.get(key, data) != data:
                objects[OVERWRITTEN + key] = b""
            objects[key] = data
            return True
        case "arrive":
            return None if key in objects else objects.setdefault(key, data)
        case _:
            raise AssertionError(verb)
    return None
