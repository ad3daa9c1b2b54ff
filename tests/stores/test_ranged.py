"""Conversions from and to real servers: byte for byte what the local conversion makes, and nothing half."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import sparse
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.engine.writer import Counters
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.parts import Literal
from ckptd.conversion.plan import OutputFile
from ckptd.conversion.reader import SourceFiles
from ckptd.conversion.remote.convert import RemoteConversion
from ckptd.conversion.remote.uploader import Target, Uploader
from ckptd.errors import CkptdError, DamagedError, NotFoundError, RefusedError, TargetExists, UsageError
from ckptd.formats.torchfile.archive import LEGACY_MAGIC
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.open import open_store
from tests.e2e.test_resume_real import ckptd
from tests.stores import servers
from tests.stores.proxy import proxy
from tests.stores.sshd import needs_sshd, sshd
from tests.support.processes import kill_with_children
from tests.support.real import REPOSITORY, Recipe, prepare, save_dir_of

MIB = 1 << 20
TAG = "global_step2"
STAGE_2, STAGE_3 = Recipe(stage=2, world_size=2), Recipe(stage=3, world_size=2)
FULL = pytest.mark.full
client: Any = None
"""A plain client of the server: what is put behind its back it does not list."""
UNIVERSAL = ConvertOptions(write_latest=True)
STRICT = ConvertOptions(compat="strict", write_latest=True)
WEIGHTS = ConvertOptions(form="weights", dtype="bf16")
DCP = ConvertOptions(form="dcp", max_shard_bytes=300_000)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """rclone, and variables that lead there; the folder that its bucket is."""
    folder = tmp_path_factory.mktemp("rclone")
    with servers.rclone(folder) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in servers.environment(server).items():
            patch.setenv(name, value)
        patch.setattr(sys.modules[__name__], "client", server.client())
        yield folder / "objects" / servers.BUCKET


def url(path: str) -> str:
    """Below the bucket."""
    return f"s3://{servers.BUCKET}/{path}"


def put(key: str, data: bytes) -> None:
    """An object, behind ckptd's back."""
    client.put_object(Bucket=servers.BUCKET, Key=key, Body=data)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def ranged(source: Path | str, destination: Path | str, options: ConvertOptions = UNIVERSAL) -> Any:
    """Convert."""
    return RemoteConversion(source, destination, options, os.environ).run()


def cli(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`python -m ckptd convert …`."""
    command = [sys.executable, "-m", "ckptd", "convert", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`z2`, `z3`: real checkpoints."""
    prepare([STAGE_2, STAGE_3])
    root = tmp_path_factory.mktemp("saves")
    shutil.copytree(save_dir_of(STAGE_2), root / "z2")
    shutil.copytree(save_dir_of(STAGE_3), root / "z3")
    return root


@pytest.fixture(scope="module")
def stored(bucket: Path, saves: Path) -> Path:
    """The same in the bucket, below `in`."""
    shutil.copytree(saves, bucket / "in")
    return bucket


@pytest.mark.parametrize(
    ("save", "options"),
    [("z2", UNIVERSAL), pytest.param("z3", STRICT, marks=FULL), ("z2", WEIGHTS)],
    ids=["z2", "z3-strict", "z2-bf16"],
)
def test_it_is_what_the_local_conversion_makes(
    stored: Path, saves: Path, tmp_path: Path, save: str, options: ConvertOptions
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
        assert content(stored / out / name) == expected
        assert (report.destination, report.bytes) == (url(f"{out}/{name}"), local.bytes)
    pointer = "latest_universal"
    if options.form == "universal":
        assert (tmp_path / pointer).read_text() == "fetched"
        assert (stored / out / pointer).read_text() == "both"
    else:
        assert not (stored / out / pointer).exists()
    assert not list(tmp_path.glob(".*"))


# --- what is refused, and what is proved -----------------------------------------------------------------


@pytest.fixture(scope="module")
def committed(stored: Path, saves: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`job` in the bucket: a remote of ckptd that holds z2, committed."""
    save_dir = tmp_path_factory.mktemp("node") / "job"
    shutil.copytree(saves / "z2", save_dir)
    done = ckptd("run", save_dir, url("job"), "--once")
    assert done.returncode == 0, done.stderr
    return stored / "job"


def test_what_is_committed_is_compared_with_its_manifest(
    committed: Path, saves: Path, tmp_path: Path
) -> None:
    """The folder, or the root's `latest`; a bit that turned in the remote is found, and nothing is left."""
    convert(saves / "z2" / TAG, tmp_path / "local", UNIVERSAL)
    ranged(url("job"), tmp_path / "u")
    assert content(tmp_path / "u") == content(tmp_path / "local")
    shard = next((committed / TAG).glob("*rank_1*optim*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    try:
        with pytest.raises(DamagedError, match="CRC64"):
            ranged(url(f"job/{TAG}"), url("bad/u"))
        with pytest.raises(DamagedError, match="CRC64"):
            ranged(url(f"job/{TAG}"), tmp_path / "bad", ConvertOptions(form="weights", verify=True))
        assert not list(tmp_path.glob("*bad*"))
        assert not (committed.parent / "bad" / "u").exists()
    finally:
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)


@pytest.mark.usefixtures("committed")
def test_in_a_remote_of_ckptd_only_commits_count(saves: Path, tmp_path: Path) -> None:
    """What lies there without a COMMIT does not exist; nothing is written there either (P3)."""
    for path in (saves / "z2" / TAG).iterdir():
        put(f"job/stray/{path.name}", path.read_bytes())
    with pytest.raises(RefusedError, match="no committed checkpoint in stray"):
        ranged(url("job/stray"), tmp_path / "u")
    with pytest.raises(RefusedError, match="lies in the remote of ckptd"):
        ranged(saves / "z2" / TAG, url("job/mine"))


def test_places_that_are_taken_or_nothing(stored: Path, saves: Path, tmp_path: Path) -> None:
    """73 for a folder with anything in it, 66 for a source without shards, 2 for a folder in its source."""
    put("taken/u/notes.txt", b"mine")
    done = cli(saves / "z2", url("taken/u"))
    assert done.returncode == 73
    assert "other files" in done.stderr
    assert (stored / "taken" / "u" / "notes.txt").read_text() == "mine"
    assert [p.name for p in (stored / "taken").rglob("*") if p.is_file()] == ["notes.txt"]
    with pytest.raises(NotFoundError, match="no shards"):
        ranged(url("taken/u"), tmp_path / "u")
    with pytest.raises(UsageError, match="inside the source"):
        ranged(url("in/z2"), url("in/z2/u"))
    (tmp_path / "here").mkdir()
    with pytest.raises(TargetExists):
        ranged(url("in/z2"), tmp_path / "here")
    seen = cli(url("in/z2"), url("taken/free"), "--dry-run", "--json")
    assert (seen.returncode, (stored / "taken" / "free").exists()) == (0, False)
    convert(saves / "z2" / TAG, tmp_path / "local")
    assert json.loads(seen.stdout)["files"] + 1 == len(content(tmp_path / "local"))


def test_a_torn_shard_elsewhere_is_named(stored: Path, saves: Path, tmp_path: Path) -> None:
    """Cut short, of torch's old format, or gone: 65 with its name, and nothing is left."""
    for path in (saves / "z2" / TAG).iterdir():
        put(f"torn/{TAG}/{path.name}", path.read_bytes())
    shard = next((stored / "torn" / TAG).glob("*rank_1*optim*"))
    whole = shard.read_bytes()
    for bad in (whole[:-300], LEGACY_MAGIC + whole):
        put(f"torn/{TAG}/{shard.name}", bad)
        done = cli(url(f"torn/{TAG}"), tmp_path / "u")
        assert (done.returncode, shard.name in done.stderr) == (65, True), done.stderr
    client.delete_object(Bucket=servers.BUCKET, Key=f"torn/{TAG}/{shard.name}")
    done = cli(url(f"torn/{TAG}"), url("torn/u"))
    assert (done.returncode, shard.name in done.stderr) == (65, True), done.stderr
    assert not list(tmp_path.iterdir())
    assert not (stored / "torn" / "u").exists()


# --- Folders of torch.distributed.checkpoint -------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(bucket: Path, saves: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of many files, here and in the bucket."""
    assert bucket.is_dir()
    folder = tmp_path_factory.mktemp("sharded") / "step-2"
    convert(saves / "z3" / TAG, folder, DCP)
    for path in folder.iterdir():
        put(f"titan/step-2/{path.name}", path.read_bytes())
    return folder


def test_a_folder_of_torch_elsewhere_becomes_universal(sharded: Path, stored: Path, tmp_path: Path) -> None:
    """Bucket to disk, disk to bucket, bucket to bucket: what the local conversion makes."""
    local = convert(sharded, tmp_path / "local", UNIVERSAL)
    expected = content(tmp_path / "local")
    fetched = ranged(url("titan/step-2"), tmp_path / "fetched")
    assert content(tmp_path / "fetched") == expected
    assert fetched.plan_sha256 == local.plan_sha256
    for begin, name in ((sharded, "sent"), (url("titan/step-2"), "both")):
        ranged(begin, url(f"titan-out/{name}"))
        assert content(stored / "titan-out" / name) == expected
    assert (stored / "titan-out" / "latest_universal").read_text() == "both"


def test_a_folder_for_torch_is_made_elsewhere(
    sharded: Path, stored: Path, saves: Path, tmp_path: Path
) -> None:
    """The shards here, or in the bucket; no pointer lies beside it."""
    ranged(saves / "z3" / TAG, url("dcp-out/sent"), DCP)
    ranged(url("in/z3"), url("dcp-out/both"), DCP)
    ranged(url("in/z3"), tmp_path / "here", DCP)
    made = (stored / "dcp-out" / "sent", stored / "dcp-out" / "both", tmp_path / "here")
    assert [content(folder) == content(sharded) for folder in made] == [True] * 3
    assert sorted(path.name for path in (stored / "dcp-out").iterdir()) == ["both", "sent"]


def test_what_is_not_whole_elsewhere_is_named(sharded: Path, saves: Path, tmp_path: Path) -> None:
    """65 with the file's name, as for a folder here; a universal form at a URL is refused with what to do."""
    whole = content(sharded)
    last = max(name for name in whole if name.endswith(".distcp"))
    for key, data in whole.items():
        put(f"torn-dcp/step-2/{key}", data)
    for bad in (whole[last][:-1], bytes(len(whole[last]))):
        put(f"torn-dcp/step-2/{last}", bad)
        done = cli(url("torn-dcp/step-2"), tmp_path / "u")
        assert (done.returncode, last in done.stderr) == (65, True), done.stderr
    client.delete_object(Bucket=servers.BUCKET, Key=f"torn-dcp/step-2/{last}")
    done = cli(url("torn-dcp/step-2"), tmp_path / "u")
    assert (done.returncode, f"{last}, which .metadata names, is missing" in done.stderr) == (65, True)
    client.delete_object(Bucket=servers.BUCKET, Key="torn-dcp/step-2/.metadata")
    done = cli(url("torn-dcp/step-2"), tmp_path / "u")
    assert (done.returncode, "without .metadata" in done.stderr) == (65, True), done.stderr
    ranged(saves / "z2" / TAG, url("torn-dcp/u"))
    done = cli(url("torn-dcp/u"), tmp_path / "d", "--form", "dcp")
    assert (done.returncode, "copy the universal form to this machine" in done.stderr) == (65, True)
    assert not list(tmp_path.iterdir())


def test_a_committed_folder_of_torch_is_compared_with_its_manifest(
    sharded: Path, stored: Path, tmp_path: Path
) -> None:
    """ckptd keeps the folders of torchtitan; a bit that turned in a part or in `.metadata` is found."""
    save_dir = tmp_path / "node" / "titan"
    shutil.copytree(sharded, save_dir / "step-2", ignore=shutil.ignore_patterns("ckptd.json"))
    done = ckptd("run", save_dir, url("titan-job"), "--once")
    assert done.returncode == 0, done.stderr
    convert(sharded, tmp_path / "local", UNIVERSAL)
    ranged(url("titan-job"), tmp_path / "u")
    assert content(tmp_path / "u") == content(tmp_path / "local")
    for name in ("__0_1.distcp", ".metadata"):
        path = stored / "titan-job" / "step-2" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        put(f"titan-job/step-2/{path.name}", bytes(data))
        with pytest.raises(CkptdError, match=path.name) as refused:
            ranged(url("titan-job/step-2"), tmp_path / "bad")
        assert refused.value.exit_code == 65
        data[len(data) // 2] ^= 1
        put(f"titan-job/step-2/{path.name}", bytes(data))
    assert not (tmp_path / "bad").exists()


def test_killed_in_the_middle_and_run_again(stored: Path, saves: Path, tmp_path: Path) -> None:
    """kill -9 of all its processes: no ckptd.json, no pointer; the next attempt compares and finishes."""
    convert(saves / "z3" / TAG, tmp_path / "local", UNIVERSAL)
    out = stored / "killed"
    command = [sys.executable, "-m", "ckptd", "convert", str(saves / "z3" / TAG), url("killed/u")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a kill leaves the plan there
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL, env=environment)
    end = time.monotonic() + 200
    while sum(len(names) for _, _, names in os.walk(out)) < 20 and time.monotonic() < end:
        time.sleep(0.005)
    kill_with_children(process)
    left = set(content(out))
    assert len(left) > 15
    assert not {"latest_universal", "u/ckptd.json"} & left
    done = cli(saves / "z3" / TAG, url("killed/u"), "--json", "--compat", "strict")
    assert (done.returncode, "killed" in done.stderr) == (73, True)
    done = cli(saves / "z3" / TAG, url("killed/u"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_files"] > 10
    assert content(out / "u") == content(tmp_path / "local")
    assert (out / "latest_universal").read_text() == "u"


def test_the_next_attempt_gives_up_what_a_killed_one_left(
    moto: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ids in the note, written before the first part; another plan touches nothing."""
    for name, value in servers.environment(moto).items():
        monkeypatch.setenv(name, value)
    root = f"s3://{servers.BUCKET}/{tmp_path.name}"
    there = moto.client()
    place = {"Bucket": servers.BUCKET, "Prefix": f"{tmp_path.name}/u/"}

    def target() -> Target:
        store = open_store(root, access=Access(part_size_bytes=5 * MIB))
        return Target(store, "u", mode=0o644, folder_mode=0o755)

    class Killed(BaseException):
        """As kill -9: nothing is tidied."""

    def check_stop() -> None:
        if there.list_multipart_uploads(**place).get("Uploads") and counters.bytes > 6 * MIB:
            raise Killed

    output = OutputFile(path="big.pt", parts=(Literal(b"x" * (12 * MIB)),))
    counters = Counters()
    first = target()
    first.begin("plan")
    with pytest.raises(Killed):
        Uploader(first, SourceFiles(-1, [], []), {}, counters, check_stop).make(output)
    (left,) = there.list_multipart_uploads(**place)["Uploads"]
    stranger = there.create_multipart_upload(Bucket=servers.BUCKET, Key=left["Key"])["UploadId"]
    with pytest.raises(TargetExists):
        target().begin("another plan")
    assert len(there.list_multipart_uploads(**place)["Uploads"]) == 2
    again = target()
    again.begin("plan")
    assert [one["UploadId"] for one in there.list_multipart_uploads(**place)["Uploads"]] == [stranger]
    Uploader(again, SourceFiles(-1, [], []), {}, Counters(), lambda: None).make(output)
    again.publish(b"{}", pointer=None)
    names = [one["Key"].rpartition("/")[2] for one in there.list_objects_v2(**place)["Contents"]]
    assert names == ["big.pt", "ckptd.json"]


@FULL
def test_no_upload_stays_open_after_a_kill(
    tmp_path: Path, moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of an upload that nobody joins are seen by no listing and paid for; a stranger's upload stays."""
    save = sparse.write(tmp_path / TAG, sparse.Model("m", {"wide": (2560, 2048)}, 1, 2))
    out = f"open-{tmp_path.name}"
    there = moto.client()
    place = {"Bucket": servers.BUCKET, "Prefix": f"{out}/u/"}
    stranger = there.create_multipart_upload(Bucket=servers.BUCKET, Key=f"{out}/u/other")["UploadId"]
    for name, value in servers.environment(CKPTD_REMOTE_PART_SIZE="5MiB", TMPDIR=str(tmp_path)).items():
        monkeypatch.setenv(name, value)

    def with_parts() -> set[str]:
        """Ids; one that was begun and not yet noted holds no part, and nothing is sent before the note."""
        found = there.list_multipart_uploads(**place).get("Uploads", [])
        held = set[str]()
        for one in found:
            # joined since it was listed: not open any more
            with contextlib.suppress(there.exceptions.NoSuchUpload):
                where = {"Bucket": servers.BUCKET, "Key": one["Key"], "UploadId": one["UploadId"]}
                held |= {one["UploadId"]} if there.list_parts(**where).get("Parts") else set()
        return held

    with proxy(moto.port) as between:
        between.latency_seconds = 0.1
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        command = [sys.executable, "-m", "ckptd", "convert", str(save), url(f"{out}/u")]
        process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 200
        while not with_parts() and time.monotonic() < end:
            time.sleep(0.005)
        kill_with_children(process)
        assert with_parts()
        between.latency_seconds = 0.0
        done = cli(save, url(f"{out}/u"))
        assert done.returncode == 0, done.stderr
    assert with_parts() == set()
    assert stranger in {one["UploadId"] for one in there.list_multipart_uploads(**place)["Uploads"]}
    names = {one["Key"].rpartition("/")[2] for one in there.list_objects_v2(**place)["Contents"]}
    assert "ckptd.json" in names
    assert "ckptd-partial.json" not in names


@FULL
def test_memory_does_not_grow_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times 192 MiB through a process that stays below 144 MiB, from a bucket and into it."""
    model = sparse.Model("m", {"wide": (6144, 8192), "norm": (4096,)}, 1, 4)
    with servers.rclone(tmp_path) as server:
        for name, value in servers.environment(server).items():
            monkeypatch.setenv(name, value)
        sparse.write(tmp_path / "objects" / servers.BUCKET / "in" / TAG, model)
        for to in (tmp_path / "u", url("out/u")):
            report = ranged(url(f"in/{TAG}"), to, ConvertOptions())
            assert report.bytes > 560 * MIB
            assert report.peak_rss_bytes < 144 * MIB


@FULL
@needs_sshd
def test_over_sftp(saves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind of store, both ways."""
    convert(saves / "z2" / TAG, tmp_path / "local", UNIVERSAL)
    with sshd(tmp_path / "sshd") as server:
        monkeypatch.setenv("HOME", str(server.home))
        for name in ("in", "out"):
            (server.files / name).mkdir()
        shutil.copytree(saves / "z2", server.files / "in" / "z2")
        ranged(server.url("in/z2"), tmp_path / "fetched")
        assert content(tmp_path / "fetched") == content(tmp_path / "local")
        ranged(server.url("in/z2"), server.url("out/u"))
        assert content(server.files / "out" / "u") == content(tmp_path / "local")
        assert sorted(p.name for p in (server.files / "out").iterdir()) == ["latest_universal", "u"]
