"""A node whose remote is a bucket of a real S3 server, looked at behind ckptd's back by another client."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.harness import PATIENCE_SECONDS, Node
from tests.stores import servers
from tests.support.real import Recipe, expect, save_dir_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BIG_RUN = Recipe(stage=2, world_size=2, hidden=512, save_at=(1, 2))
expect(BIG_RUN)
"""Shards of 38 MB: eight parts of 5 MiB each."""
PREFIX = "run"


@dataclass
class S3Node(Node):
    """See the module's first lines; `endpoint` is what the job file names (the server, or a proxy)."""

    server: servers.Server = field(kw_only=True)
    bucket: str = servers.BUCKET

    @property
    def client(self) -> Any:
        """A plain client at the server itself."""
        return self.server.client()

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Key below the job's prefix → bytes."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{PREFIX}/{prefix}"
        )
        return {
            entry["Key"].removeprefix(f"{PREFIX}/"): entry["Size"]
            for page in pages
            for entry in page.get("Contents", ())
        }

    def uploads(self) -> list[dict[str, Any]]:
        """Multipart uploads of files that are open; a kill may leave one of a probe, without parts."""
        try:
            found = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        except self.client.exceptions.ClientError as error:
            # rclone says so when there is none
            if error.response["Error"]["Code"] == "NoSuchUpload":
                return []
            raise
        return [upload for upload in found if "/probe~" not in upload["Key"]]

    def read(self, key: str) -> bytes:
        """A whole object."""
        return bytes(self.client.get_object(Bucket=self.bucket, Key=f"{PREFIX}/{key}")["Body"].read())

    def written_at(self, key: str) -> str:
        """When an object was written, and its ETag."""
        head = self.client.head_object(Bucket=self.bucket, Key=f"{PREFIX}/{key}")
        return f"{head['LastModified']} {head['ETag']}"

    def commits(self, form: str = "zero") -> dict[str, dict[str, Any]]:
        """`<tag>~g<n>` → COMMIT, straight from the bucket; one may go between list and reading."""
        found = {}
        for key in self.objects("_ckptd/commits/"):
            if key.endswith(f"~{form}.json"):
                name = key.rsplit("/", 1)[1].removesuffix(f"~{form}.json")
                # not NoSuchKey: each client has a class of its own
                with contextlib.suppress(self.client.exceptions.ClientError):
                    found[name] = json.loads(self.read(key))
        return found

    def wait_committed(self, key: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Until `<tag>~g<n>` is committed; each look costs the server as much as a part."""
        self.wait(f"the COMMIT {key}", lambda: key in self.commits(), seconds, pause_seconds=0.3)

    def holds(self, folder: str, run: Recipe, step: int) -> bool:
        """The bucket holds exactly the files of that save."""
        source = save_dir_of(run) / f"global_step{step}"
        return all(self.read(f"{folder}/{p.name}") == p.read_bytes() for p in source.iterdir())


@contextlib.contextmanager
def s3_node(root: Path, server: servers.Server, endpoint: str = "", **more: Any) -> Iterator[S3Node]:
    """A node whose processes end with the test; its bucket is emptied first."""
    more.setdefault("url", f"s3://{servers.BUCKET}/{PREFIX}")
    remote = f'endpoint_url = "{endpoint or server.endpoint}"\npart_size = "5MiB"\n{more.pop("remote", "")}'
    if servers.CLIENT != "botocore":
        remote = f'client = "{servers.CLIENT}"\n{remote}'
    environment = servers.environment() | more.pop("environment", {})
    here = S3Node(root, server=server, remote=remote, environment=environment, **more)
    for key in here.objects():
        here.client.delete_object(Bucket=here.bucket, Key=f"{PREFIX}/{key}")
    for upload in here.uploads():
        here.client.abort_multipart_upload(
            Bucket=servers.BUCKET, Key=upload["Key"], UploadId=upload["UploadId"]
        )
    try:
        yield here
    finally:
        here.end()
