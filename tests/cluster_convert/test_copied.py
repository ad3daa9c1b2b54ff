"""From bucket to bucket of one server: what an output shares with a shard is copied there, not sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import sparse
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertReport
from ckptd.conversion.remote.convert import RemoteConversion
from ckptd.errors import VerifyError
from tests.cluster_convert import scene
from tests.cluster_convert.scene import MIB, OPTIONS, clustered, content, got, url
from tests.stores import servers
from tests.stores.proxy import Fault, Proxy, proxy

pytestmark = [pytest.mark.stores, pytest.mark.faults]


def answer_of(status: bytes, code: bytes) -> bytes:
    """An error of S3."""
    body = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>.</Message></Error>" % code
    head = b"HTTP/1.1 %s\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


@dataclass(frozen=True)
class Bucket:
    """A bucket of a server that copies, behind a proxy."""

    line: Proxy
    client: Any
    """Past the proxy."""


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ZeRO-2 checkpoint of two ranks, 105 MB: a tensor of 16 MiB and smaller ones."""
    model = sparse.Model("copied", sparse.gpt(512, 1, 8192), 2, 2)
    return sparse.write(tmp_path_factory.mktemp("save") / "global_step1", model, scene.FILL)


@pytest.fixture(scope="module")
def bucket(save: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """With a checkpoint in `run/in`, and variables that lead there."""
    with (
        servers.moto(tmp_path_factory.mktemp("moto")) as server,
        proxy(server.port) as line,
        pytest.MonkeyPatch.context() as patch,
    ):
        more = {"CKPTD_REMOTE_ENDPOINT_URL": line.endpoint}
        for name, value in servers.environment(server, **more).items():
            patch.setenv(name, value)
        found = Bucket(line, server.client())
        scene.put(found.client, save, "run/in")
        yield found


@pytest.fixture(scope="module")
def expected(save: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes of it on a disk."""
    folder = tmp_path_factory.mktemp("local") / "universal"
    convert(save, folder, OPTIONS)
    return content(folder)


@pytest.fixture(scope="module")
def cluster(bucket: Bucket) -> Iterator[Any]:
    """Two workers."""
    with scene.workers() as found:
        yield found


@pytest.fixture(params=["process", "cluster"])
def convert_to(request: pytest.FixtureRequest, bucket: Bucket) -> Callable[[str], ConvertReport]:
    """Convert into a folder of the bucket: by one process, or by workers."""
    if request.param == "cluster":
        return partial(clustered, request.getfixturevalue("cluster"), url("run/in"))
    return lambda target: RemoteConversion(url("run/in"), target, OPTIONS, os.environ).run()


def test_little_of_it_is_sent(
    bucket: Bucket, expected: dict[str, bytes], convert_to: Callable[[str], ConvertReport], tmp_path: Path
) -> None:
    """Outputs above 10 MiB but for their first 5, and the model's states under both names, wholly."""
    convert_to(url(f"little/{tmp_path.name}"))
    assert got(bucket.client, f"little/{tmp_path.name}") == expected
    sizes = {path: len(data) for path, data in expected.items()}
    copied = sum(size for path, size in sizes.items() if path.endswith("model_states.pt"))
    copied += sum(size - 5 * MIB for path, size in sizes.items() if size > 10 * MIB and "zero/" in path)
    sent = sum(sizes.values()) - copied
    assert copied > 60e6
    assert sent <= bucket.line.sent_bytes(f"little/{tmp_path.name}/") <= sent + 2 * MIB


def test_a_server_that_fails_to_copy_is_sent_the_bytes(
    bucket: Bucket, expected: dict[str, bytes], convert_to: Callable[[str], ConvertReport], tmp_path: Path
) -> None:
    refusal = Fault(
        "answer",
        f"^PUT .*{tmp_path.name}.*partNumber=[23]",
        times=4,
        answer=answer_of(b"501 Not Implemented", b"NotImplemented"),
    )
    bucket.line.faults.append(refusal)
    convert_to(url(f"failing/{tmp_path.name}"))
    bucket.line.faults.remove(refusal)
    assert refusal.hits
    assert got(bucket.client, f"failing/{tmp_path.name}") == expected


def test_parts_that_the_server_does_not_join_are_sent_anew(
    bucket: Bucket, expected: dict[str, bytes], convert_to: Callable[[str], ConvertReport], tmp_path: Path
) -> None:
    """As one does that wants parts of one size."""
    where = f"^POST .*{tmp_path.name}/mp_rank_00_model_states.pt.*uploadId="
    refusal = Fault("answer", where, answer=answer_of(b"400 Bad Request", b"InvalidPart"))
    bucket.line.faults.append(refusal)
    convert_to(url(f"uneven/{tmp_path.name}"))
    assert refusal.hits == 1
    assert got(bucket.client, f"uneven/{tmp_path.name}") == expected
    key = f"uneven/{tmp_path.name}/mp_rank_00_model_states.pt"
    whole = len(expected["mp_rank_00_model_states.pt"])
    assert whole <= bucket.line.sent_bytes(key) < whole + MIB
    left = bucket.client.list_multipart_uploads(Bucket=servers.BUCKET).get("Uploads", ())
    assert not [one["Key"] for one in left if tmp_path.name in one["Key"]]


def test_what_never_comes_to_its_bytes_ends_it(bucket: Bucket, cluster: Any, tmp_path: Path) -> None:
    where = f"^POST .*{tmp_path.name}/mp_rank_00_model_states.pt.*uploadId="
    refusal = Fault("answer", where, times=9, answer=answer_of(b"400 Bad Request", b"InvalidPart"))
    bucket.line.faults.append(refusal)
    with pytest.raises(VerifyError, match="twice"):
        clustered(cluster, url("run/in"), url(f"never/{tmp_path.name}"))
    bucket.line.faults.remove(refusal)
    assert refusal.hits == 2
    assert not got(bucket.client, f"never/{tmp_path.name}")
