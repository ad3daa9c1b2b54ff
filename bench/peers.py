"""`python bench/peers.py TOOL up|down FOLDER PREFIX ENDPOINT`: one transfer by another library, timed inside.

Runs on the Python of .build/peers and imports nothing of this repository. Every library is told what ckptd
tells its own client: CRC64NVME per part, and payloads that are not hashed a second time for the signature.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

BUCKET, REGION, KEYS = "bench", "us-east-1", ("test", "testtest")
CHECKSUM = "CRC64NVME"


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _boto3_client(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        region_name=REGION,
        endpoint_url=endpoint,
        aws_access_key_id=KEYS[0],
        aws_secret_access_key=KEYS[1],
        config=Config(s3={"payload_signing_enabled": False, "addressing_style": "path"}),
    )


def boto3_up(folder: Path, prefix: str, endpoint: str) -> Callable[[], None]:
    """upload_file of each file, with its defaults: parts of 8 MiB, ten threads."""
    client = _boto3_client(endpoint)

    def run() -> None:
        for path in _found(folder):
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            client.upload_file(str(path), BUCKET, key, ExtraArgs={"ChecksumAlgorithm": CHECKSUM})

    return run


def boto3_down(folder: Path, prefix: str, endpoint: str) -> Callable[[], None]:
    """download_file of each object below the prefix."""
    client = _boto3_client(endpoint)

    def run() -> None:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        for entry in (entry for page in pages for entry in page.get("Contents", ())):
            to = folder / str(entry["Key"]).removeprefix(f"{prefix}/")
            to.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(BUCKET, entry["Key"], str(to))

    return run


def _s3fs(endpoint: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        key=KEYS[0],
        secret=KEYS[1],
        endpoint_url=endpoint,
        client_kwargs={"region_name": REGION},
        config_kwargs={"s3": {"payload_signing_enabled": False, "addressing_style": "path"}},
        s3_additional_kwargs={"ChecksumAlgorithm": CHECKSUM},
        skip_instance_cache=True,
    )


def s3fs_up(folder: Path, prefix: str, endpoint: str) -> Callable[[], None]:
    """put of the folder, with its defaults: parts of 50 MiB, ten of each file and all files at once."""
    system = _s3fs(endpoint)
    return lambda: system.put(f"{folder}/", f"{BUCKET}/{prefix}/", recursive=True)


def s3fs_down(folder: Path, prefix: str, endpoint: str) -> Callable[[], None]:
    """get of the prefix, with the same defaults."""
    system = _s3fs(endpoint)
    return lambda: system.get(f"{BUCKET}/{prefix}/", f"{folder}/", recursive=True)


def awscrt_up(folder: Path, prefix: str, endpoint: str) -> Callable[[], None]:
    """One request per file to the CRT's S3 client, all at once, checksums in trailers."""
    from awscrt import auth, http, io, s3

    group = io.EventLoopGroup(4)
    bootstrap = io.ClientBootstrap(group, io.DefaultHostResolver(group))
    provider = auth.AwsCredentialsProvider.new_static(*KEYS)
    signing = s3.create_default_s3_signing_config(region=REGION, credential_provider=provider)
    client = s3.S3Client(
        bootstrap=bootstrap,
        region=REGION,
        signing_config=signing,
        tls_mode=s3.S3RequestTlsMode.DISABLED,
    )
    checksum = s3.S3ChecksumConfig(
        algorithm=s3.S3ChecksumAlgorithm.CRC64NVME, location=s3.S3ChecksumLocation.TRAILER
    )

    def run() -> None:
        waiting = []
        for path in _found(folder):
            key = quote(f"{prefix}/{path.relative_to(folder).as_posix()}")
            headers = http.HttpHeaders(
                [
                    ("Host", endpoint.removeprefix("http://")),
                    ("Content-Type", "application/octet-stream"),
                    ("Content-Length", str(path.stat().st_size)),
                ]
            )
            request = http.HttpRequest("PUT", f"/{BUCKET}/{key}", headers)
            asked = client.make_request(
                request=request,
                type=s3.S3RequestType.PUT_OBJECT,
                send_filepath=str(path),
                checksum_config=checksum,
            )
            waiting.append(asked.finished_future)
        for future in waiting:
            future.result(600)

    return run


MAKERS: dict[tuple[str, str], Callable[[Path, str, str], Callable[[], None]]] = {
    ("boto3", "up"): boto3_up,
    ("boto3", "down"): boto3_down,
    ("s3fs", "up"): s3fs_up,
    ("s3fs", "down"): s3fs_down,
    ("awscrt", "up"): awscrt_up,
}


def main() -> None:
    """One transfer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool")
    parser.add_argument("direction", choices=["up", "down"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("prefix")
    parser.add_argument("endpoint")
    given = parser.parse_args()
    run = MAKERS[given.tool, given.direction](given.folder, given.prefix, given.endpoint)
    cpu, started = time.process_time(), time.monotonic()
    run()
    wall = time.monotonic() - started
    print(json.dumps({"wall_seconds": wall, "cpu_seconds": time.process_time() - cpu}))


if __name__ == "__main__":
    main()
