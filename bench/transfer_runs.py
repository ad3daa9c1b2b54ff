"""One run of each kind for bench.transfer: up, down, to a directory, under a real daemon; each a `Sample`.

Every run starts from a source that is in the page cache and a server that knows nothing, and is checked: a
tool that did not move all bytes has failed and has no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Run, Watcher, make_warm, measure, resident_share
from bench.native import NullServer
from bench.saves import CACHE, TAG, Save
from tests.stores import servers
from tests.support.real import REPOSITORY

BUCKET = "bench"
LIMIT_SECONDS = 150.0
PEERS = REPOSITORY / ".build" / "peers" / "bin"
ENVIRONMENT = {
    **os.environ,
    **servers.environment(),
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
PART_BYTES = 16 << 20
POLITE = ("nice", "-n", "10")
"""As a remote's child runs, so that a busy machine hinders all tools alike; a restore does not step back."""
LIBRARIES = ("boto3", "s3fs", "awscrt")
BY_S3FS = "ckptd, s3fs"
"""ckptd with `client = "s3fs"`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured run; time is of the transfer alone where the tool can tell, else of its whole process."""

    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    sent_bytes: int = 0
    """Of data, as the server counted."""
    commit_after_seconds: float | None = None
    cached_bytes: int = 0
    """Of source and copy, in the page cache afterwards and not before."""
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """A null server and the URL to reach it by: its own, or a link's."""

    server: NullServer
    endpoint: str


def program(tool: str) -> str | None:
    """Where a program or the Python of a library lies; None when it is not installed."""
    if tool in LIBRARIES:
        found = PEERS / "python"
        is_there = any(found.parents[1].glob(f"lib/python*/site-packages/{tool}/__init__.py"))
        return str(found) if is_there else None
    places = [PEERS / tool, Path(sys.executable).with_name(tool)]
    return next((str(place) for place in places if place.exists()), None)


def _run(command: list[str], *, flush: Path | None = None, **more: str) -> Run:
    return measure(command, cwd=REPOSITORY, env=ENVIRONMENT | more, flush=flush, limit_seconds=LIMIT_SECONDS)


# --- up ---------------------------------------------------------------------------------------------------


def up(tool: str, save: Save, way: Way, *, verify: str = "read-back", kill_after: float = 0.0) -> Sample:
    """Send a save to the null server."""
    make_warm(save.files)
    way.server.reset()
    if tool.split(",")[0] == "ckptd":
        url = f"s3://{BUCKET}/{save.name}"
        words = [str(save.save_dir), save.form, url, "--endpoint", way.endpoint, "--verify", verify]
        words += ["--kill-after", str(kill_after)] if kill_after else []
        words += ["--client", "s3fs"] if tool == BY_S3FS else []
        run = _run([sys.executable, "-m", "bench.upload", *words])
        told = json.loads(run.stdout)
    else:
        run = _run([*POLITE, *_up_command(tool, save, way.endpoint)])
        told = json.loads(run.stdout) if tool in LIBRARIES else _whole(run)
    counted = way.server.counted()
    if counted.data_bytes < save.bytes or counted.objects < len(save.files):
        raise RuntimeError(f"{tool} moved {counted.data_bytes} of {save.bytes} bytes")
    return Sample(
        wall_seconds=told["wall_seconds"],
        cpu_seconds=told["cpu_seconds"],
        peak_rss_bytes=run.peak_rss_bytes,
        sent_bytes=counted.data_bytes,
        commit_after_seconds=counted.commit_after_seconds,
        requests=counted.requests,
    )


def _whole(run: Run) -> dict[str, Any]:
    return {"wall_seconds": run.wall_seconds, "cpu_seconds": run.cpu_seconds}


def _up_command(tool: str, save: Save, endpoint: str) -> list[str]:
    place = f"{BUCKET}/{save.name}/{save.folder.name}"
    name = program(tool) or tool
    if tool in LIBRARIES:
        prefix = f"{save.name}/{save.folder.name}"
        return [name, str(REPOSITORY / "bench" / "peers.py"), tool, "up", str(save.folder), prefix, endpoint]
    if tool == "s5cmd":
        return [name, "--endpoint-url", endpoint, "cp", f"{save.folder}/", f"s3://{place}/"]
    if tool == "rclone":
        return [name, "copy", str(save.folder), f":s3:{place}", *_rclone(endpoint)]
    return [name, "--endpoint-url", endpoint, "s3", "sync", "--quiet", str(save.folder), f"s3://{place}"]


def _rclone(endpoint: str) -> list[str]:
    keys = ["--s3-access-key-id", servers.ACCESS_KEY, "--s3-secret-access-key", servers.SECRET_KEY]
    quirks = ["--s3-no-check-bucket", "--s3-use-multipart-etag=false", "--config", "/dev/null"]
    return ["--s3-provider", "Other", "--s3-endpoint", endpoint, *keys, *quirks]


# --- down -------------------------------------------------------------------------------------------------


def down(tool: str, save: Save, way: Way) -> Sample:
    """Bring a committed save back to the disk, flushed; whole processes, for every tool alike."""
    make_warm(save.files)
    out = CACHE / "out"
    shutil.rmtree(out, ignore_errors=True)
    # ckptd makes its directory by itself
    is_own = tool.startswith("ckptd")
    target = out if is_own else out / TAG
    (out.parent if is_own else target).mkdir(parents=True, exist_ok=True)
    subprocess.run(["sync", "-f", str(CACHE)], check=True)
    more = {"AWS_ENDPOINT_URL": way.endpoint} | ({"CKPTD_REMOTE_CLIENT": "s3fs"} if tool == BY_S3FS else {})
    run = _run(_down_command(tool, save, way.endpoint, target), flush=CACHE, **more)
    sizes = {path.name: path.stat().st_size for path in (out / TAG).rglob("*") if path.is_file()}
    if sizes != {path.name: path.stat().st_size for path in save.files}:
        raise RuntimeError(f"{tool} brought {sizes}")
    shutil.rmtree(out)
    return Sample(
        wall_seconds=run.wall_seconds, cpu_seconds=run.cpu_seconds, peak_rss_bytes=run.peak_rss_bytes
    )


def _down_command(tool: str, save: Save, endpoint: str, target: Path) -> list[str]:
    prefix = f"{save.name}/{save.folder.name}"
    name = program(tool) or tool
    if tool.startswith("ckptd"):
        return [sys.executable, "-m", "ckptd", "restore", f"s3://{BUCKET}/{save.name}", "--to", str(target)]
    if tool in LIBRARIES:
        return [name, str(REPOSITORY / "bench" / "peers.py"), tool, "down", str(target), prefix, endpoint]
    if tool == "s5cmd":
        return [name, "--endpoint-url", endpoint, "cp", f"s3://{BUCKET}/{prefix}/*", f"{target}/"]
    return [name, "copy", f":s3:{BUCKET}/{prefix}", str(target), *_rclone(endpoint)]


# --- a directory, a real server, a real daemon ------------------------------------------------------------


def directory(tool: str, save: Save, *, verify: str = "none") -> Sample:
    """Copy a save to another folder of the same disk, flushed; says what stays in the page cache."""
    out = CACHE / "nas"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    subprocess.run(["sync", "-f", str(CACHE)], check=True)
    make_warm(save.files)
    before = _cached(save.files)
    if tool.startswith("cp"):
        run = _run([*POLITE, "cp", "-r", str(save.folder), str(out)], flush=CACHE)
        told = _whole(run)
    else:
        words = [str(save.save_dir), save.form, str(out), "--verify", verify]
        run = _run([sys.executable, "-m", "bench.upload", *words])
        told = json.loads(run.stdout)
    copies = sorted((out / save.folder.name).iterdir())
    cached = max(0, _cached([*save.files, *copies]) - before)
    shutil.rmtree(out)
    return Sample(
        wall_seconds=told["wall_seconds"],
        cpu_seconds=told["cpu_seconds"],
        peak_rss_bytes=run.peak_rss_bytes,
        cached_bytes=cached,
    )


def _cached(paths: list[Path]) -> int:
    return sum(round(resident_share([path]) * path.stat().st_size) for path in paths)


def there_and_back(save: Save) -> Sample:
    """Through a server that keeps what it gets (rclone serve s3), restored and compared byte by byte."""
    place = CACHE / "rclone"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        with servers.rclone(place) as server:
            url = f"s3://{servers.BUCKET}/{save.name}"
            words = [str(save.save_dir), save.form, url, "--endpoint", server.endpoint]
            run = _run([sys.executable, "-m", "bench.upload", *words])
            out = place / "back"
            words = [sys.executable, "-m", "ckptd", "restore", url, "--to", str(out)]
            _run(words, AWS_ENDPOINT_URL=server.endpoint)
            for path in save.files:
                subprocess.run(["cmp", str(path), str(out / TAG / path.name)], check=True)
    finally:
        shutil.rmtree(place)
    told = json.loads(run.stdout)
    return Sample(
        wall_seconds=told["wall_seconds"],
        cpu_seconds=told["cpu_seconds"],
        peak_rss_bytes=run.peak_rss_bytes,
    )


def under_daemon(save: Save, way: Way, forms: tuple[str, ...]) -> Sample:
    """The peak of a whole daemon with its children, from its start to the COMMITs; settling counts."""
    root = CACHE / "daemon"
    shutil.rmtree(root, ignore_errors=True)
    (root / "etc" / "jobs.d").mkdir(parents=True)
    (root / "save").mkdir()
    make_warm(save.files)
    way.server.reset()
    shutil.copytree(save.folder, root / "save" / TAG, copy_function=os.link)
    (root / "etc" / "ckptd.toml").write_text(f'state_dir = "{root}/state"\n')
    (root / "etc" / "jobs.d" / "job.toml").write_text(
        f'save_dir = "{root}/save"\nexisting = "all"\nsettle = "1s"\n[local]\nforms = []\n[[remote]]\n'
        f'name = "remote"\nurl = "s3://{BUCKET}/{save.name}"\nendpoint_url = "{way.endpoint}"\n'
        f"forms = {json.dumps(forms)}\n"
    )
    command = [sys.executable, "-m", "ckptd", "run", "--config-dir", str(root / "etc")]
    started = time.monotonic()
    with (root / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
    watcher = Watcher(daemon.pid)
    try:
        while way.server.counted().commits < len(forms):
            if daemon.poll() is not None or time.monotonic() - started > LIMIT_SECONDS:
                raise RuntimeError(f"no COMMIT: {(root / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
    finally:
        watcher.stop()
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(20)
        daemon.kill()
        daemon.wait()
    wall = time.monotonic() - started
    shutil.rmtree(root)
    return Sample(wall_seconds=wall, cpu_seconds=0.0, peak_rss_bytes=watcher.peak_bytes)
