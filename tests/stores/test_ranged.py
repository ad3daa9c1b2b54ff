"""Conversions from and to real servers: byte for byte what the local conversion makes, and nothing half."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.convert.options import ConvertOptions
from ckptd.convert.supervise import convert
from ckptd.errors import DamagedError, NotFoundError, RefusedError, TargetExists, UsageError
from ckptd.recover.ranged import Ranged
from tests.real import REPOSITORY, Recipe, prepare, save_dir_of
from tests.stores import servers
from tests.stores.sshd import Sshd, needs_sshd, sshd
from tests.unit.synthetic import write_stage3
from tests.unit.weights import large_save

MIB = 1 << 20
TAG = "global_step2"
STAGE_2, STAGE_3 = Recipe(stage=2, world_size=2), Recipe(stage=3, world_size=2)
UNIVERSAL = ConvertOptions(write_latest=True)
STRICT = ConvertOptions(compat="strict", write_latest=True)
WEIGHTS = ConvertOptions(form="weights", dtype="bf16")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """moto, and variables that lead there."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in servers.environment(server).items():
            patch.setenv(name, value)
        yield server


def url(path: str) -> str:
    """Below the bucket."""
    return f"s3://{servers.BUCKET}/{path}"


def put(server: servers.Server, folder: Path, prefix: str) -> None:
    """Copy a folder into the bucket behind ckptd's back."""
    client = server.client()
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder)}"
            client.put_object(Bucket=servers.BUCKET, Key=key, Body=path.read_bytes())


def held(server: servers.Server, prefix: str) -> dict[str, bytes]:
    """Every object below a prefix."""
    client = server.client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=servers.BUCKET, Prefix=f"{prefix}/")
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    return {
        key[len(prefix) + 1 :]: client.get_object(Bucket=servers.BUCKET, Key=key)["Body"].read() for key in keys
    }


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def ranged(source: Path | str, destination: Path | str, options: ConvertOptions = UNIVERSAL) -> Any:
    """Convert."""
    return Ranged(source, destination, options, os.environ).run()


def cli(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`python -m ckptd convert …`."""
    command = [sys.executable, "-m", "ckptd", "convert", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`z2`, `z3`: real checkpoints; `big`: outputs of 20 MB."""
    prepare([STAGE_2, STAGE_3])
    root = tmp_path_factory.mktemp("saves")
    shutil.copytree(save_dir_of(STAGE_2), root / "z2")
    shutil.copytree(save_dir_of(STAGE_3), root / "z3")
    large_save(root / "big" / TAG, 5_000_000, 3)
    return root


@pytest.fixture(scope="module")
def stored(bucket: servers.Server, saves: Path) -> servers.Server:
    """The same in the bucket, below `in`."""
    put(bucket, saves, "in")
    return bucket


@pytest.mark.parametrize(
    ("save", "options"),
    [("z2", UNIVERSAL), ("z3", STRICT), ("z2", WEIGHTS), ("big", UNIVERSAL)],
    ids=["z2", "z3-strict", "z2-bf16", "big"],
)
def test_it_is_what_the_local_conversion_makes(
    stored: servers.Server, saves: Path, tmp_path: Path, save: str, options: ConvertOptions
) -> None:
    """Bucket to disk, disk to bucket, bucket to bucket; `latest` is followed, `latest_universal` written."""
    local = convert(saves / save / TAG, tmp_path / "local", options)
    expected = content(tmp_path / "local")
    out = f"out-{tmp_path.name}"
    source = url(f"in/{save}") if save == "z2" else url(f"in/{save}/{TAG}")
    fetched = ranged(source, tmp_path / "fetched", options)
    assert content(tmp_path / "fetched") == expected
    assert (fetched.plan_sha256, fetched.files) == (local.plan_sha256, local.files)
    for begin, name in ((saves / save / TAG, "sent"), (source, "both")):
        report = ranged(begin, url(f"{out}/{name}"), options)
        assert held(stored, f"{out}/{name}") == expected
        assert (report.destination, report.bytes) == (url(f"{out}/{name}"), local.bytes)
    pointer = "latest_universal"
    if options.form == "universal":
        assert (tmp_path / pointer).read_text() == "fetched"
        assert held(stored, out)[pointer] == b"both"
    else:
        assert pointer not in held(stored, out)
    assert not list(tmp_path.glob(".*"))
