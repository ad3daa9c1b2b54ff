"""A remote that was copied elsewhere, an S3 remote that is repaired, any driver of fsspec: real programs."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from ckptd.cli.main import main
from ckptd.config.schema import RemoteConfig
from ckptd.core.model.manifest import Checksums
from ckptd.errors import DamagedError
from ckptd.maintenance.repair import HERE, Repair, RepairRequest, Unfinished
from ckptd.maintenance.verify import Slice, VerifiedRemote, Verifier, exit_code
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.recover.select.sources import Where
from ckptd.storage.remote.repair import ObjectRepairer
from ckptd.storage.stores.access import Access, access_of
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.sources import MemorySource
from tests.stores import servers
from tests.stores.proxy import Proxy
from tests.support.repair_scene import RepairScene, built, scene
from tests.support.restore_scene import TAG

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["built", "scene"]
pytestmark = pytest.mark.stores
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s" % (
    len(DENIED),
    DENIED,
)


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A real S3 server whose objects are files."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@dataclass
class Bucket:
    """A prefix of its own in the server's bucket."""

    server: servers.Server
    name: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def url(self) -> str:
        """As ckptd names it."""
        return f"s3://{servers.BUCKET}/{self.name}"

    def by_rclone(self, key: str = "") -> str:
        """As rclone names it."""
        options = f"provider=Other,endpoint='{self.server.endpoint}',force_path_style=true"
        keys = f"access_key_id={servers.ACCESS_KEY},secret_access_key={servers.SECRET_KEY}"
        return f":s3,{options},{keys}:{servers.BUCKET}/{self.name}{key}"

    def objects(self) -> dict[str, bytes]:
        """Key → bytes, by another client."""
        client = self.server.client()
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=servers.BUCKET, Prefix=f"{self.name}/"
        )
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {key: client.get_object(Bucket=servers.BUCKET, Key=key)["Body"].read() for key in keys}

    def change(self, key: str, data: bytes | None) -> None:
        """Behind ckptd's back."""
        client, whole = self.server.client(), f"{self.name}/{key}"
        if data is None:
            client.delete_object(Bucket=servers.BUCKET, Key=whole)
        else:
            client.put_object(Bucket=servers.BUCKET, Key=whole, Body=data)


@pytest.fixture
def bucket(scene: RepairScene, rclone: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The remote, copied into a bucket."""
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    made = Bucket(rclone)
    copied = _rclone("copy", str(scene.nas), made.by_rclone())
    assert copied.returncode == 0, copied.stderr
    return made


def _rclone(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("rclone")
    return subprocess.run(
        [str(program), "--config", "/dev/null", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )


def verified(url: str, endpoint: str | None = None, *, read: bool = True) -> VerifiedRemote:
    """One remote, proven."""
    inventory = read_remote_inventory("one", url, None, Access(endpoint_url=endpoint), is_tolerant=True)
    return Verifier(inventory, read=Slice() if read else None).run()


def test_copied_by_rclone_to_s3_and_back_it_verifies_and_restores(scene: RepairScene, bucket: Bucket) -> None:
    """Directory → bucket → directory: relative names and our own checksums alone, nothing of the store."""
    in_bucket = verified(bucket.url, bucket.server.endpoint)
    assert in_bucket.is_good
    assert in_bucket.unlisted == ()
    back = scene.root / "back"
    done = _rclone("copy", bucket.by_rclone(), str(back))
    assert done.returncode == 0, done.stderr
    shutil.copytree(scene.nas, scene.root / "copied")
    for place in (back, scene.root / "copied"):
        found = verified(str(place))
        assert [row.commit_sha256 for row in found.commits] == [r.commit_sha256 for r in in_bucket.commits]
        assert found.is_good
    good = scene.shards(TAG)
    scene.nas.rename(scene.root / "lost")
    shutil.copytree(back, scene.nas)
    scene.restore()
    assert scene.got(TAG) == good


def test_an_object_that_may_not_be_read_stops_nothing(scene: RepairScene, bucket: Bucket) -> None:
    """Named as unreadable, all else is proven: 77, and 65 as soon as something is proven damaged."""
    proxy = Proxy(bucket.server.port)
    try:
        proxy.canned, proxy.canned_for = FORBIDDEN, rf"GET [^ ]*{TAG}/bf16_zero_pp_rank_1"
        found = verified(bucket.url, proxy.endpoint)
        assert [(row.tag, row.verdict) for row in found.commits] == [
            ("global_step5", "good"),
            (TAG, "unreadable"),
        ]
        (difference,) = found.commits[1].differences
        assert difference.key.startswith(f"{TAG}/bf16_zero_pp_rank_1")
        assert "unreadable" in difference.found
        assert exit_code([found]) == 77
        bucket.change(f"global_step5/{scene.shard(0).name}", None)
        assert exit_code([verified(bucket.url, proxy.endpoint)]) == 65
        # a document is no reason to stop either
        proxy.canned_for = rf"GET [^ ]*/commits/{TAG}"
        found = verified(bucket.url, proxy.endpoint)
        assert [row.tag for row in found.commits] == ["global_step5"]
        assert len(found.problems) == 1
    finally:
        proxy.close()


def test_a_restore_goes_on_where_reading_is_allowed(scene: RepairScene, bucket: Bucket) -> None:
    """Rights that end in mid-restore: the next remote that has the checkpoint."""
    proxy = Proxy(bucket.server.port)
    try:
        proxy.canned, proxy.canned_for = FORBIDDEN, rf"GET [^ ]*{TAG}/bf16_zero_pp_rank_1"
        remotes = tuple(
            RemoteConfig.model_validate(values)
            for values in (
                {"name": "s3", "url": bucket.url, "endpoint_url": proxy.endpoint},
                {"name": "nas", "url": str(scene.nas)},
            )
        )
        good = scene.shards(TAG)
        scene.restore(where=Where(remotes=remotes, owner=None))
        assert scene.got(TAG) == good
        assert any("going on with nas" in line for line in scene.said)
    finally:
        proxy.close()


def test_an_object_in_s3_is_put_right(scene: RepairScene, bucket: Bucket) -> None:
    """Flipped and missing objects of a bucket come back from the node and from a directory."""
    good = bucket.objects()
    flipped = bytearray(scene.shard(0).read_bytes())
    flipped[-200] ^= 1
    bucket.change(f"{TAG}/{scene.shard(0).name}", bytes(flipped))
    bucket.change(f"{TAG}/{scene.shard(1).name}", None)
    scene.shard(1).unlink()
    scene.quiet()
    config = RemoteConfig.model_validate(
        {"name": "s3", "url": bucket.url, "endpoint_url": bucket.server.endpoint}
    )
    job = scene.job(remote=False).model_copy(update={"remotes": (config,)})
    inventories = [
        read_remote_inventory("s3", bucket.url, None, access_of(config)),
        read_remote_inventory("nas", str(scene.nas), None),
    ]
    repair = Repair(
        job,
        inventories,
        RepairRequest(targets=frozenset({"s3"}), here=False, read=Slice()),
        node_id=None,
        audit=None,
        unfinished=Unfinished(None),
        say=scene.said.append,
    )
    repair.run()
    sources = sorted(str(row.source).split(" ")[0] for row in repair.rows)
    assert sources == [HERE, "nas"]
    assert repair.exit_code() == 0
    assert bucket.objects() == good


def test_an_upload_that_dies_is_known_and_given_up(scene: RepairScene, bucket: Bucket) -> None:
    """Its id is noted before a part is sent; what failed is aborted at once, what was killed by the next."""
    inventory = read_remote_inventory(
        "s3", bucket.url, None, Access(endpoint_url=bucket.server.endpoint, part_size_bytes=5 << 20)
    )
    data = secrets.token_bytes(11 << 20)
    view = inventory.commits[0]
    shard = next(f for f in inventory.manifests(view.commit)[0].files if "rank_0" in f.path)
    checksums = Checksums(crc64nvme=to_hex(crc64(data)))
    big = shard.model_copy(update={"key": "big", "bytes": len(data), "checksums": checksums})
    scene.state.mkdir()
    notes = Unfinished(scene.state)
    seen: list[str] = []

    def note(key: str, token: str) -> None:
        seen.append(token)
        notes.note("s3", key, token)

    resender = ObjectRepairer(inventory.store, inventory.observation.identity, note, lambda *_: None)

    class Killed(BaseException):
        """Nothing after it runs."""

    class Dying(MemorySource):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            if offset > 6 << 20:
                raise Killed
            return super().read_into(offset, buffer)

    def source(kind: type[MemorySource], content: bytes) -> MemorySource:
        return kind(content, mode=0o644, folder_mode=0o755, gid=None)

    with pytest.raises(Killed):
        resender.put_right(view, big, lambda: source(Dying, data))
    assert [key for key, _ in Unfinished(scene.state).of("s3")] == ["big"]
    assert len(_uploads(bucket)) == 1
    assert Unfinished(scene.state).give_up("s3", inventory.store) == 1
    assert _uploads(bucket) == []
    assert Unfinished(scene.state).of("s3") == []
    # other bytes than were committed never get the name
    other = bytes(len(data))
    with pytest.raises(DamagedError):
        resender.put_right(view, big, lambda: source(MemorySource, other))
    assert (_uploads(bucket), inventory.store.stat("big")) == ([], None)
    resender.put_right(view, big, lambda: source(MemorySource, data))
    assert bucket.objects()[f"{bucket.name}/big"] == data
    assert seen[-1] == ""


def _uploads(bucket: Bucket) -> list[str]:
    """Multipart uploads that are open on the server."""
    client = bucket.server.client()
    try:
        found = client.list_multipart_uploads(Bucket=servers.BUCKET).get("Uploads", [])
    except client.exceptions.ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchUpload":  # rclone says so when there is none
            return []
        raise
    return [row["Key"] for row in found]


def test_by_hand_one_tag_of_a_bucket(scene: RepairScene, bucket: Bucket) -> None:
    """docs/recovery.md: copy the tag's folder, write `latest`; no ckptd."""
    to = scene.root / "by-hand"
    done = _rclone("copy", bucket.by_rclone(f"/{TAG}"), str(to / TAG), "--exclude", "_extra/**")
    assert done.returncode == 0, done.stderr
    assert {p.name: p.read_bytes() for p in (to / TAG).iterdir()} == scene.shards(TAG)


class Elsewhere(LocalFileSystem):  # type: ignore[misc]
    """Stands for a driver that somebody installed: another scheme, its own places."""

    protocol = "elsewhere"
    root = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = str(path).removeprefix("elsewhere://")
        return text if text.startswith(cls.root) else f"{cls.root}/{text.strip('/')}"


def test_any_scheme_of_fsspec(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """list, verify and restore take the URL of a driver that ckptd has never heard of."""
    fsspec.register_implementation("elsewhere", f"{__name__}.Elsewhere", clobber=True)
    monkeypatch.setattr(Elsewhere, "root", str(scene.root))
    url = "elsewhere://nas/run"
    for arguments in (["list", url, "--json"], ["verify", url, "--read-data", "--json"]):
        try:
            main(arguments)
        except SystemExit as ended:
            assert not ended.code, capsys.readouterr().err
        shown = json.loads(capsys.readouterr().out)
        assert TAG in json.dumps(shown)
    try:
        main(["restore", url, "--to", str(scene.dir)])
    except SystemExit as ended:
        assert not ended.code, capsys.readouterr().err
    assert scene.got(TAG) == scene.shards(TAG)
