"""Ranges that another object of the store holds are made there: by parts that S3 copies, by shared blocks."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.core.model.manifest import folder_name
from ckptd.core.model.records import UNIVERSAL
from ckptd.errors import VerifyError
from ckptd.storage.stores.base import HeldRange, Progress, ResumePoint
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.rate_limit import RateLimiter
from ckptd.storage.stores.s3.parts import LEAST_PART_BYTES, PartLayout, held_parts, layout_with
from ckptd.storage.stores.sources import RateLimitedSource
from tests.stores import servers
from tests.stores.adapters import AdapterModel
from tests.stores.conformance import source_of
from tests.stores.scene import MODEL, Node
from tests.stores.test_s3 import store_at
from tests.support.synthetic import write_stage12
from tests.unit.storage.remote.test_making import Scene

if TYPE_CHECKING:
    from ckptd.storage.remote.messages import UploadResult
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.stores.s3.store import S3Store

pytestmark = pytest.mark.stores

MIB = 1 << 20
OLD = secrets.token_bytes(22 * MIB + 77)


@pytest.fixture
def credentials(either_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def store(credentials: None, moto: servers.Server) -> S3Store:
    return store_at(moto)


def put(
    store: Any, key: str, data: bytes, *held: HeldRange, resume: ResumePoint | None = None
) -> tuple[int, str]:
    """Upload; how many bytes went over the wire, and the proof."""
    source = RateLimitedSource(source_of(data), RateLimiter(), lambda: None)
    told: list[Progress] = []
    more = {"held": held} if held else {}
    crc = store.upload(key, source, resume=resume, on_progress=told.append, **more)
    assert crc == crc64(data)
    assert told[-1].done_bytes == len(data)
    proof = store.verify(key, len(data), crc, lambda _: None)
    return source.read_bytes, proof


def whole(store: Any, key: str, size_bytes: int) -> bytes:
    return bytes(store.read_at(key, 0, size_bytes + 1))


def test_a_whole_object_is_copied(store: S3Store) -> None:
    assert store.copies
    put(store, "a/old", OLD)
    sent_bytes, proof = put(
        store, "b/new", OLD, HeldRange(offset=0, length=len(OLD), key="a/old", key_offset=0)
    )
    assert sent_bytes == 0
    assert proof == store.abilities.proof
    assert whole(store, "b/new", len(OLD)) == OLD


def test_a_server_that_takes_an_empty_part_instead_does_not_copy(
    credentials: None, rclone: servers.Server
) -> None:
    assert not store_at(rclone).copies


def test_what_changed_is_sent(store: S3Store) -> None:
    put(store, "a/old", OLD)
    new = OLD[: 6 * MIB] + secrets.token_bytes(MIB) + OLD[7 * MIB : -100] + secrets.token_bytes(100)
    held = (
        HeldRange(offset=0, length=6 * MIB, key="a/old", key_offset=0),
        HeldRange(offset=7 * MIB, length=len(OLD) - 100 - 7 * MIB, key="a/old", key_offset=7 * MIB),
    )
    sent_bytes, _ = put(store, "b/new", new, *held)
    assert sent_bytes == LEAST_PART_BYTES + 100
    assert whole(store, "b/new", len(new)) == new


@pytest.mark.botocore
@pytest.mark.parametrize("offset", [0, 4096])
def test_a_wrong_word_about_what_is_held_costs_bytes_and_nothing_else(store: S3Store, offset: int) -> None:
    put(store, "a/old", OLD)
    new = secrets.token_bytes(11 * MIB)
    wrong = HeldRange(offset=0, length=len(new), key="a/old", key_offset=offset)
    try:
        sent_bytes, _ = put(store, "b/new", new, wrong)
    except VerifyError:
        pass  # whoever asked sends it whole
    else:
        assert sent_bytes >= len(new)
        assert whole(store, "b/new", len(new)) == new


@pytest.mark.botocore
def test_an_object_that_is_gone_costs_bytes_and_nothing_else(store: S3Store) -> None:
    new = secrets.token_bytes(11 * MIB)
    sent_bytes, _ = put(store, "b/new", new, HeldRange(offset=0, length=len(new), key="a/gone", key_offset=0))
    assert sent_bytes == len(new)
    assert whole(store, "b/new", len(new)) == new


@pytest.mark.botocore
def test_an_upload_that_was_cut_goes_on(store: S3Store) -> None:
    """The layout of its parts travels with the token."""
    put(store, "a/old", OLD)
    held = HeldRange(offset=0, length=12 * MIB, key="a/old", key_offset=0)
    new = OLD[: 12 * MIB] + secrets.token_bytes(12 * MIB)
    told: list[Progress] = []

    def stop(progress: Progress) -> None:
        told.append(progress)
        if progress.flushed_bytes >= 12 * MIB:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        store.upload("b/new", source_of(new), resume=None, on_progress=stop, held=(held,))
    last = told[-1]
    resume = ResumePoint(flushed_bytes=last.flushed_bytes, crc64=last.crc64, token=last.token)
    sent_bytes, _ = put(store, "b/new", new, resume=resume)
    assert sent_bytes <= 12 * MIB
    assert whole(store, "b/new", len(new)) == new


def test_ranges_become_parts_that_a_server_takes() -> None:
    size = 100 * MIB

    def at(offset: int, length: int, shift: int = 0) -> HeldRange:
        return HeldRange(offset=offset, length=length, key="k", key_offset=offset + shift)

    short, near = at(0, MIB), at(MIB, 20 * MIB)
    found = held_parts(
        [near, at(22 * MIB, 30 * MIB), short, at(60 * MIB, 4 * MIB), at(94 * MIB, 6 * MIB)], size
    )
    assert [(one.offset, one.length) for one in found] == [
        (0, 21 * MIB),  # adjoining ones are one
        (26 * MIB, 26 * MIB),  # what lies between must be a part
        (94 * MIB, 6 * MIB),
    ]
    layout = layout_with(found, size, 64 * MIB)
    spans = [layout.range_of(number) for number in range(1, layout.parts + 1)]
    assert sum(length for _, length in spans) == size
    assert min(length for _, length in spans[:-1]) >= LEAST_PART_BYTES
    for one in found:
        inside = [s for s in spans if one.offset <= s[0] < one.offset + one.length]
        assert sum(length for _, length in inside) == one.length
    assert layout.parts_until(21 * MIB) == 1
    assert layout.parts_until(22 * MIB) == 0
    even = PartLayout(25 * MIB + 7, LEAST_PART_BYTES)
    assert [even.parts_until(end) for end in (0, 5 * MIB, 7 * MIB, 25 * MIB, 25 * MIB + 7)] == [0, 1, 0, 5, 6]


def test_shared_blocks(xfs: Path) -> None:
    store = DirectoryStore(str(xfs))
    store.probe()
    put(store, "a/old", OLD)
    new = OLD[: 12 * MIB] + secrets.token_bytes(5000) + OLD[12 * MIB + 5000 :]
    held = (
        HeldRange(offset=0, length=12 * MIB, key="a/old", key_offset=0),
        HeldRange(
            offset=12 * MIB + 5000, length=len(OLD) - 12 * MIB - 5000, key="a/old", key_offset=12 * MIB + 5000
        ),
    )
    sent_bytes, proof = put(store, "b/new", new, *held)
    assert proof == "read-back"
    assert sent_bytes < 5000 + 2 * 4096
    assert (xfs / "b" / "new").read_bytes() == new
    assert (xfs / "a" / "old").read_bytes() == OLD
    gone = HeldRange(offset=0, length=len(OLD), key="a/gone", key_offset=0)
    assert put(store, "c/new", OLD, gone)[0] == len(OLD)


def test_a_file_system_without_shared_blocks_gets_all_bytes(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    put(store, "a/old", OLD)
    held = HeldRange(offset=0, length=len(OLD), key="a/old", key_offset=0)
    sent_bytes, _ = put(store, "b/new", OLD, held)
    is_shared = sent_bytes < 4096
    assert is_shared or (sent_bytes == len(OLD) and store.copies == 0)
    assert (tmp_path / "b" / "new").read_bytes() == OLD


# --- saves of a run of which only adapters change ---------------------------------------------------------


def summed(data: bytes) -> tuple[int, int]:
    return len(data), crc64(data)


def held_by(store: Any, folder: str) -> dict[str, tuple[int, int]]:
    """What the remote holds of a save."""
    return {
        info.key.rpartition("/")[2]: summed(whole(store, info.key, info.bytes))
        for info in store.list(f"{folder}/")
    }


class AdapterRun:
    """A node whose saves hold a frozen base, which is in a file of its own as well, and adapters."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder / "save")
        base = {f"layers.{number}.base_layer.weight": torch.randn(4 * MIB) for number in range(2)}
        adapters = {f"layers.{number}.lora_A.default.weight": (16 << 10,) for number in range(2)}
        self._model = AdapterModel(base, adapters)

    def save(self, step: int) -> dict[str, tuple[int, int]]:
        """Save once more; the name of each file, its bytes and its CRC64."""
        node = self.node
        node.tag = f"global_step{step}"
        node.write_all(mark=str(step).encode())
        self._model.save(node.save_dir / node.tag / MODEL)
        node.write({"frozen.bin": OLD})
        return {path.name: summed(path.read_bytes()) for path in (node.save_dir / node.tag).iterdir()}

    def upload(self, attached: AttachedRemote, step: int) -> UploadResult:
        return self.node.upload(attached, self.node.order(self.node.sealed(step=step)))


@pytest.mark.botocore
def test_later_saves_send_what_changed(store: S3Store, tmp_path: Path) -> None:
    run = AdapterRun(tmp_path)
    attached = run.node.attached(store)
    for step in range(1, 5):
        files = run.save(step)
        result = run.upload(attached, step)
        assert result.outcome == "committed"
        total_bytes = sum(size for size, _ in files.values())
        if step == 1:
            assert result.bytes_sent == total_bytes
            continue
        # what lies between two copied parts is a part as well, and so at least 5 MiB
        assert result.bytes_sent < 2 * LEAST_PART_BYTES + MIB
        assert result.bytes_sent + result.bytes_copied == total_bytes
        assert held_by(store, run.node.tag) == files


@pytest.mark.botocore
def test_a_copy_that_rotted_is_not_copied_on(store: S3Store, tmp_path: Path) -> None:
    run = AdapterRun(tmp_path)
    attached = run.node.attached(store)
    run.save(1)
    run.upload(attached, 1)
    for name in ("frozen.bin", MODEL):
        held = bytearray(whole(store, f"global_step1/{name}", 64 * MIB))
        held[8 * MIB] ^= 1
        store.put(f"global_step1/{name}", bytes(held))
    files = run.save(2)
    assert run.upload(attached, 2).outcome == "committed"
    assert held_by(store, "global_step2") == files


@pytest.mark.botocore
def test_what_retention_deleted_is_sent_again(store: S3Store, tmp_path: Path) -> None:
    run = AdapterRun(tmp_path)
    attached = run.node.attached(store)
    run.save(1)
    run.upload(attached, 1)
    for info in list(store.list("global_step1/")):
        store.delete(info.key)
    files = run.save(2)
    result = run.upload(attached, 2)
    assert (result.outcome, result.bytes_copied) == ("committed", 0)
    assert held_by(store, "global_step2") == files


def test_saves_share_the_blocks_of_the_base(xfs: Path, tmp_path: Path) -> None:
    run = AdapterRun(tmp_path)
    attached = run.node.attached(DirectoryStore(str(xfs), owner="id-n0"))
    for step in (1, 2, 3):
        files = run.save(step)
        result = run.upload(attached, step)
        assert result.outcome == "committed"
        assert step == 1 or result.bytes_sent < MIB
        assert held_by(attached.store, run.node.tag) == files


def test_blocks_of_a_copy_that_rotted_are_not_shared(xfs: Path, tmp_path: Path) -> None:
    run = AdapterRun(tmp_path)
    attached = run.node.attached(DirectoryStore(str(xfs), owner="id-n0"))
    run.save(1)
    run.upload(attached, 1)
    for name in ("frozen.bin", MODEL):
        with (xfs / "global_step1" / name).open("r+b") as stream:
            stream.seek(8 * MIB)
            stream.write(b"rotten")
    files = run.save(2)
    assert run.upload(attached, 2).outcome == "committed"
    assert held_by(attached.store, run.node.tag) == files


@pytest.mark.botocore
@pytest.mark.parametrize("are_here", [True, False])
def test_a_form_is_made_of_the_shards_that_lie_there(store: S3Store, tmp_path: Path, are_here: bool) -> None:
    """Byte for byte what `ckptd convert` makes, of which little is sent; `are_here`: the shards, on the
    node."""
    shards = write_large(tmp_path / "shards")
    scene = Scene(tmp_path / "scene", shards)
    scene.ground = scene.node.attached(store)
    assert scene.node.upload(scene.ground, scene.node.order(scene.node.sealed())).outcome == "committed"
    order = scene.order(UNIVERSAL) if are_here else scene.order_from_remote(UNIVERSAL)
    result = scene.upload(order)
    assert result.outcome == "committed"
    report = convert(shards, tmp_path / "made", ConvertOptions())
    made = {
        str(path.relative_to(tmp_path / "made")): summed(path.read_bytes())
        for path in (tmp_path / "made").rglob("*")
        if path.is_file()
    }
    folder = f"{folder_name(scene.node.tag, 1, UNIVERSAL)}/"
    listed = (info for info in store.list(folder))
    assert {i.key.removeprefix(folder): summed(whole(store, i.key, i.bytes)) for i in listed} == made
    assert report.plan_sha256 == scene.planned()[0].plan_sha256
    assert result.bytes_copied + result.bytes_sent == scene.planned()[0].bytes
    # what the first rank holds of each state is too little for a part beside the file's own beginning
    assert result.bytes_copied > 3 * 7 * MIB


def write_large(folder: Path) -> Path:
    """A save by two ranks with one parameter of 16 MiB."""
    write_stage12(folder, [{"embed.weight": (4096, 1024), "norm.weight": (16,)}], 2)
    return folder
