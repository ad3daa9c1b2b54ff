"""Older copies that cannot be read or copied, servers that fail in mid-copy: the bytes are sent instead."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.awsrequest import AWSResponse

from ckptd.base import extents
from ckptd.errors import StorageError
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.messages import PartlyUploaded
from ckptd.storage.stores.base import HeldRange
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.rate_limit import Cancelled
from tests.stores import servers
from tests.stores.scene import MODEL, Node
from tests.stores.test_held_ranges import MIB, OLD, AdapterRun, held_by, put, whole
from tests.stores.test_s3 import store_at

if TYPE_CHECKING:
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.stores.s3.store import S3Store

pytestmark = pytest.mark.stores
ERROR = b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>%s</Code><Message>failed</Message></Error>"
HELD = HeldRange(offset=0, length=len(OLD), key="a/old", key_offset=0)


@pytest.fixture
def store(moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # botocore's pauses before it asks again
    return store_at(moto)


class _Raw(io.BytesIO):
    def stream(self, *_: object) -> Iterator[bytes]:
        yield self.read()


def answer(store: S3Store, call: str, status: int, code: bytes) -> None:
    """Have this call answered so from now on, whatever it asks."""

    def handler(request: Any, **_: object) -> AWSResponse:
        headers: Any = {"Content-Type": "application/xml"}
        return AWSResponse(request.url, status, headers, _Raw(ERROR % code))

    store.client.meta.events.register(f"before-send.s3.{call}", handler)


def rows_of(node: Node) -> tuple[PartlyUploaded, ...]:
    """What the journal noted of uploads that did not end."""
    last = {event[0]: event[1] for event in node.events if isinstance(event, tuple)}
    return tuple(
        PartlyUploaded(key=key, flushed_bytes=at.flushed_bytes, crc64=at.crc64, token=at.token)
        for key, at in last.items()
        if at.flushed_bytes or at.token
    )


def second_save(run: AdapterRun, attached: AttachedRemote, between: Callable[[], None]) -> None:
    """Commit one save, let something happen, and commit the next, which shares most of its bytes."""
    run.save(1)
    run.upload(attached, 1)
    between()
    files = run.save(2)
    assert run.upload(attached, 2).outcome == "committed"
    assert held_by(attached.store, "global_step2") == files


# --- copies that cannot be read --------------------------------------------------------------------------


def test_copies_that_went_to_an_archive_hold_up_no_upload(store: S3Store, tmp_path: Path) -> None:
    """A lifecycle rule moved them to GLACIER: reading and copying them is refused."""

    def archive_them() -> None:
        for name in ("frozen.bin", MODEL):
            key = f"global_step1/{name}"
            data = whole(store, key, 64 * MIB)
            store.client.put_object(**store.place(key), Body=data, StorageClass="GLACIER")

    run = AdapterRun(tmp_path)
    second_save(run, run.node.attached(store), archive_them)


@pytest.mark.parametrize("call", ["pread", "ioctl"])
def test_copies_on_a_disk_that_fails_hold_up_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """EIO as the newest copy is looked at, and as its blocks are shared."""
    (nas := tmp_path / "nas").mkdir()
    run = AdapterRun(tmp_path)
    if call == "pread":  # else the first file shows that nothing is shared here, and no other is looked at
        write = run.node.write
        monkeypatch.setattr(
            run.node, "write", lambda new: write({k: v for k, v in new.items() if v is not OLD})
        )
    pread, ioctl = os.pread, fcntl.ioctl

    def fail() -> None:
        bad = (nas / "global_step1" / MODEL).stat()

        def broken_pread(fd: int, length: int, offset: int) -> bytes:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == (bad.st_dev, bad.st_ino):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return pread(fd, length, offset)

        def broken_ioctl(fd: int, request: int, *more: Any) -> Any:
            if request == extents.FICLONERANGE:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return ioctl(fd, request, *more)

        if call == "pread":
            monkeypatch.setattr(os, "pread", broken_pread)
        else:
            monkeypatch.setattr(fcntl, "ioctl", broken_ioctl)

    second_save(run, run.node.attached(DirectoryStore(str(nas), owner="id-n0")), fail)


def test_an_object_that_cannot_be_read_back_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies on a disk that fails there: the next attempt writes it elsewhere."""
    (nas := tmp_path / "nas").mkdir()
    node = Node(tmp_path / "save")
    node.write_all()
    attached = node.attached(DirectoryStore(str(nas), owner="id-n0"))
    verify = DirectoryStore.verify

    with ExitStack() as opened:
        # held open: no other file is given the inode of the one that is removed
        bad: list[BinaryIO] = []

        def broken(self: DirectoryStore, key: str, *more: Any) -> str:
            if key.endswith(MODEL) and not bad:
                bad.append(opened.enter_context((nas / key).open("rb")))
            if bad and os.fstat(bad[0].fileno()).st_ino == (nas / key).stat().st_ino:
                raise StorageError(f"verifying {key}: Input/output error")
            return verify(self, key, *more)

        monkeypatch.setattr(DirectoryStore, "verify", broken)
        with pytest.raises(StorageError):
            node.upload(attached, node.order(node.sealed()))
        assert node.upload(attached, node.order(node.sealed())).outcome == "committed"


def test_one_copy_that_is_gone_does_not_end_sharing(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    put(store, "c/new", OLD, replace(HELD, key="a/gone"))
    assert store.copies


# --- servers that fail in mid-copy -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"),
    [(200, b"InternalError"), (200, b"NoSuchKey"), (500, b"InternalError"), (503, b"SlowDown")],
)
def test_what_a_server_fails_to_copy_is_sent(store: S3Store, status: int, code: bytes) -> None:
    put(store, "a/old", OLD)
    answer(store, "UploadPartCopy", status, code)
    sent_bytes, _ = put(store, "b/new", OLD, HELD)
    assert sent_bytes == len(OLD)
    assert whole(store, "b/new", len(OLD)) == OLD


def test_a_server_that_fails_to_copy_is_attached_all_the_same(store: S3Store, tmp_path: Path) -> None:
    answer(store, "UploadPartCopy", 500, b"InternalError")
    store.probe()
    assert not store.abilities.copies


def test_copied_parts_that_a_server_does_not_join_are_sent(store: S3Store, tmp_path: Path) -> None:
    run = AdapterRun(tmp_path)
    attached = run.node.attached(store)
    run.save(1)
    run.upload(attached, 1)
    copied: set[str] = set()
    events = store.client.meta.events

    def upload_of(request: Any) -> str:
        return str(parse_qs(urlsplit(request.url).query)["uploadId"][0])

    def refuse(request: Any, **_: object) -> AWSResponse | None:
        headers: Any = {"Content-Type": "application/xml"}
        body = _Raw(ERROR % b"InvalidPart")
        return AWSResponse(request.url, 400, headers, body) if upload_of(request) in copied else None

    events.register("before-send.s3.UploadPartCopy", lambda request, **_: copied.add(upload_of(request)))
    events.register("before-send.s3.CompleteMultipartUpload", refuse)
    files = run.save(2)
    assert run.upload(attached, 2).outcome == "committed"
    assert copied
    assert held_by(store, "global_step2") == files


def test_a_copy_that_was_cut_goes_on_in_the_store(store: S3Store, tmp_path: Path) -> None:
    node = Node(tmp_path / "save", dp=1)
    attached = node.attached(store)
    frozen = {"frozen.bin": secrets.token_bytes(160 * MIB)}
    for step in (1, 2):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode())
        node.write(frozen)
        node.events.clear()
        sealed = node.sealed(step=step)
        if step == 2:

            def check() -> None:
                if any(isinstance(e, tuple) and e[0].endswith("frozen.bin") for e in node.events):
                    raise Cancelled("a restart, or a newer save")

            with pytest.raises(Cancelled):
                upload_form(attached, node.order(sealed), replace(node.control(), check=check))
        order = node.order(sealed, partly=rows_of(node), uploaded=node.uploaded())
        result = node.upload(attached, order)
        assert result.outcome == "committed"
        assert step == 1 or result.bytes_sent < 16 * MIB


# --- files that are taken for others ---------------------------------------------------------------------


def test_files_of_one_size_without_a_fingerprint_are_no_copies_of_each_other(
    store: S3Store, tmp_path: Path
) -> None:
    """A form that lies on the node has no fingerprints; all parameters of one shape have one size."""
    node = Node(tmp_path / "save", dp=1)
    attached = node.attached(store)
    copied: list[str] = []
    store.client.meta.events.register("before-call.s3.UploadPartCopy", lambda **_: copied.append("one"))
    for step in (1, 2):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode())
        node.write({f"{name}.bin": secrets.token_bytes(9 * MIB) for name in ("exp_avg", "exp_avg_sq")})
        order = node.order(node.sealed(step=step))
        files = tuple(
            file.model_copy(update={"fingerprint": ""}) if file.path.endswith(".bin") else file
            for file in order.files
        )
        result = node.upload(attached, order.model_copy(update={"files": files}))
        assert (result.outcome, result.bytes_copied) == ("committed", 0)
    assert not copied
