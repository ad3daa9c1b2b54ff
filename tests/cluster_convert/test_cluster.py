"""Real dask workers, real files, a real server: what a cluster makes is what one process makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import sparse
from ckptd.conversion.cluster import pool, work
from ckptd.conversion.cluster.conversion import Clustered
from ckptd.conversion.cluster.grouping import Home
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions, ConvertProgress
from ckptd.conversion.remote.uploader import NOTE
from ckptd.errors import (
    BehindError,
    DamagedError,
    LockHeld,
    RefusedError,
    RemoteUnreachable,
    SourceChanged,
    TargetExists,
    UsageError,
)
from tests.cluster_convert import scene
from tests.cluster_convert.scene import MIB, OPTIONS, InBackground, clustered, content, got, until, url
from tests.stores import rgw, servers
from tests.stores.proxy import Fault, proxy
from tests.support import recover_scene
from tests.support.real import REPOSITORY, Recipe, prepare, save_dir_of

TAG = "global_step2"
STAGE_3 = Recipe(stage=3, world_size=2)
pytestmark = [pytest.mark.stores, pytest.mark.faults]


@pytest.fixture(
    scope="module", params=["rclone", pytest.param("ceph", marks=[pytest.mark.full, pytest.mark.root])]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Server]:
    """rclone, or Ceph's gateway (`make rgw-packages`), and variables that lead there; small parts."""
    if request.param == "ceph" and (reason := rgw.missing()) is not None:
        pytest.skip(reason)
    start = {"rclone": servers.rclone, "ceph": rgw.rgw}[request.param]
    with start(tmp_path_factory.mktemp(request.param)) as found, pytest.MonkeyPatch.context() as patch:
        for name, value in servers.environment(found, CKPTD_REMOTE_PART_SIZE=scene.PART_SIZE).items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope="module")
def cluster(server: servers.Server) -> Iterator[Any]:
    """Two workers."""
    with scene.workers() as found:
        yield found


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ZeRO-2 checkpoint of 70 MB."""
    return scene.checkpoint(tmp_path_factory.mktemp("save") / "global_step1", stage=2)


@pytest.fixture(scope="module")
def expected(save: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], str]:
    """What one process makes of it, and the plan's digest."""
    folder = tmp_path_factory.mktemp("local") / "universal"
    report = convert(save, folder, OPTIONS)
    return content(folder), report.plan_sha256


def open_uploads(server: servers.Server, prefix: str) -> list[str]:
    """Below a prefix: parts that are paid for."""
    listed = server.client().list_multipart_uploads(Bucket=servers.BUCKET)
    return [one["Key"] for one in listed.get("Uploads", ()) if one["Key"].startswith(f"{prefix}/")]


# --- the same bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        pytest.param(
            ConvertOptions(form="weights", dtype="bf16", max_shard_bytes=200_000), marks=pytest.mark.full
        ),
    ],
    ids=["universal", "bf16"],
)
def test_a_real_checkpoint(
    server: servers.Server, cluster: Any, tmp_path: Path, options: ConvertOptions
) -> None:
    """Folder to folder, folder to bucket, bucket to folder, bucket to bucket: stage 3, two ranks."""
    prepare([STAGE_3])
    source = save_dir_of(STAGE_3) / TAG
    local = convert(source, tmp_path / "local", options)
    whole, client, out = content(tmp_path / "local"), server.client(), tmp_path.name
    scene.put(client, source, f"{out}/in")
    for begin, name in ((source, "here"), (url(f"{out}/in"), "fetched")):
        report = clustered(cluster, begin, tmp_path / name, replace(options, verify=name == "here"))
        assert content(tmp_path / name) == whole
        assert (report.plan_sha256, report.files) == (local.plan_sha256, local.files)
        sent = clustered(cluster, begin, url(f"{out}/{name}"), replace(options, verify=name == "fetched"))
        assert got(client, f"{out}/{name}") == whole
        assert sent.plan_sha256 == local.plan_sha256
    assert not list(tmp_path.glob(".*"))
    if options.form == "universal":
        assert (tmp_path / "latest_universal").read_text() == "fetched"
        one, other = (tmp_path / at / "mp_rank_00_model_states.pt" for at in ("local", "here"))
        assert one.stat().st_mode == other.stat().st_mode
    with pytest.raises(TargetExists):
        clustered(cluster, source, url(f"{out}/here"), options)
    with pytest.raises(TargetExists):
        clustered(cluster, source, tmp_path / "here", options)


def test_parts_by_several_workers_and_each_source_byte_once(
    server: servers.Server, cluster: Any, save: Path, expected: tuple[dict[str, bytes], str]
) -> None:
    """Bucket to bucket with outputs of several parts: tasks share the plan, the wire carries it once."""
    client = server.client()
    scene.put(client, save, "big/in")
    with proxy(server.port) as line, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTD_REMOTE_ENDPOINT_URL", line.endpoint)
        told: list[ConvertProgress] = []
        report = clustered(cluster, url("big/in"), url("big/out"), on_progress=told.append)
        sent = line.sent_bytes("big/out")
    assert got(client, "big/out") == expected[0]
    assert report.plan_sha256 == expected[1]
    seen = report.cluster
    assert seen is not None
    assert seen.workers == 2
    assert seen.tasks >= 4
    assert seen.bytes_read <= 1.01 * seen.bytes_needed
    assert 0 < report.peak_rss_bytes < OPTIONS.memory_budget_bytes
    whole = sum(map(len, expected[0].values()))
    assert whole <= sent <= 1.03 * whole + MIB
    needed = sum(path.stat().st_size for path in save.iterdir())
    assert seen.bytes_read < 1.05 * needed
    assert [one.bytes_done for one in told] == sorted(one.bytes_done for one in told)
    assert told[-1].bytes_done == told[-1].bytes_total == report.bytes
    assert told[-1].files_done == report.files
    assert not open_uploads(server, "big/out")


def test_no_secret_and_no_data_travels(cluster: Any, save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to the scheduler: kilobytes of text, no word of the credentials (P15)."""
    texts: list[str] = []
    ask = pool.WorkerPool.ask

    def listening(self: pool.WorkerPool, job: str, task: str, key: str, home: Home) -> Any:
        texts.extend((job, task))
        return ask(self, job, task, key, home)

    monkeypatch.setattr(pool.WorkerPool, "ask", listening)
    report = clustered(cluster, save, url("secret/out"))
    assert texts
    assert not any(word in text for word in (servers.SECRET_KEY, "aws_secret") for text in texts)
    assert sum(map(len, texts)) < report.bytes / 100


# --- what dies -------------------------------------------------------------------------------------------


def test_a_worker_killed_in_its_task(
    server: servers.Server, cluster: Any, save: Path, expected: tuple[dict[str, bytes], str]
) -> None:
    """SIGKILL while a part is on its way: another worker does it again, nothing is left behind."""
    with proxy(server.port) as line, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTD_REMOTE_ENDPOINT_URL", line.endpoint)
        fault = Fault("deaf", "^PUT .*killed/out/.*partNumber")
        line.faults.append(fault)
        run = InBackground(lambda: clustered(cluster, save, url("killed/out")))
        until(lambda: fault.hits, "a part that is not answered")
        os.kill(_busy(cluster), signal.SIGKILL)
        run.end()
    assert got(server.client(), "killed/out") == expected[0]
    assert not open_uploads(server, "killed/out")
    until(lambda: len(cluster.scheduler.workers) == 2, "a worker in the place of the dead one")


def _busy(cluster: Any) -> int:
    """The process of the worker whose task waits for an answer: the other one has nothing left to do."""
    from distributed import Client

    with Client(cluster.scheduler_address, set_as_default=False) as client:
        looks: list[list[str]] = []

        def one_alone() -> bool:
            looks.append([address for address, keys in client.processing().items() if keys])
            return len(looks[-1]) == 1 and looks[-10:] == looks[-1:] * 10

        # between two tasks a worker has none for a moment
        until(one_alone, "one worker alone has a task, look after look")
        (address,) = looks[-1]
        return int(client.run(os.getpid, workers=[address])[address])


@pytest.mark.full
def test_the_command_killed_and_run_again(
    server: servers.Server, cluster: Any, save: Path, expected: tuple[dict[str, bytes], str]
) -> None:
    """kill -9 of the command: what was noted is not made again, what was open is gone on with."""
    client, address = server.client(), cluster.scheduler_address
    with proxy(server.port) as line, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTD_REMOTE_ENDPOINT_URL", line.endpoint)
        line.faults.append(Fault("stall", "^PUT .*again/out/.*partNumber=2", after_bytes=1000))
        with scene.begun(save, url("again/out"), "--cluster", address) as process:
            until(lambda: len(_noted(client, "again/out").get("done", ())) > 20, "files that are noted")
            process.kill()
            process.communicate()
        before = _noted(client, "again/out")
        line.cut()
    report = clustered(cluster, save, url("again/out"))
    assert got(client, "again/out") == expected[0]
    assert report.resumed_files >= len(before["done"])
    assert not open_uploads(server, "again/out")
    done_before = sum(len(expected[0][path]) for path in before["done"])
    assert report.cluster is not None
    assert report.cluster.bytes_needed <= sum(map(len, expected[0].values())) - done_before


def _noted(client: Any, prefix: str) -> dict[str, Any]:
    try:
        raw = client.get_object(Bucket=servers.BUCKET, Key=f"{prefix}/{NOTE}")["Body"].read()
    except client.exceptions.NoSuchKey:
        return {}
    return dict(json.loads(raw))


@pytest.mark.full
def test_the_scheduler_killed_and_another_one_started(
    server: servers.Server, save: Path, expected: tuple[dict[str, bytes], str], tmp_path: Path
) -> None:
    """69, and the same command goes on with another scheduler; a folder is published by one rename."""
    noted = tmp_path / ".out.ckptd-partial" / NOTE
    with scene.own_cluster(tmp_path, {}) as (address, (process, _)):
        slow = replace(OPTIONS, verify=True)

        def kill_late(p: ConvertProgress) -> None:
            if p.files_done >= 40 and process.poll() is None:
                process.kill()

        with pytest.raises(RemoteUnreachable) as caught:
            Clustered(
                *(save, tmp_path / "out", slow, os.environ),
                address=pool.parse(address),
                on_progress=kill_late,
            ).run()
        assert "the same command goes on" in caught.value.hint
    assert not (tmp_path / "out").exists()
    before = len(json.loads(noted.read_text())["done"])
    assert before >= 40
    with scene.own_cluster(tmp_path, {}) as (address, _):
        done = scene.cli(save, tmp_path / "out", "--cluster", address, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_files"] >= before
    assert content(tmp_path / "out") == expected[0]
    assert not list(tmp_path.glob(".out*"))


def test_no_profiler_runs_beside_tasks() -> None:
    """dask's own can halt a worker for ever (Python 3.11.7): off in workers that we start, or find."""
    seen: list[Any] = []
    with pool.open_pool(pool.parse("local:1"), 512 * MIB, None) as found:
        seen += found._client.run(_profiler).values()
    with scene.workers(1, profiler=True) as cluster:
        address = pool.parse(cluster.scheduler_address)
        with pool.open_pool(address, 512 * MIB, None) as found:
            seen += found._client.run(_profiler).values()
    assert seen == [False, False]


def _profiler(dask_worker: Any) -> bool:
    return "profile" in dask_worker.periodic_callbacks


def test_clients_end_with_their_conversion(save: Path, tmp_path: Path) -> None:
    """A worker that lives for months keeps nothing of the conversions that it served."""
    from distributed import Client

    with scene.workers(1) as cluster, Client(cluster.scheduler_address, set_as_default=False) as client:
        for number in range(3):
            clustered(cluster, save, tmp_path / f"u{number}")
            assert set(client.run(work.open_clients).values()) == {0}


@pytest.mark.full
def test_a_stop_leaves_what_is_done(cluster: Any, save: Path, tmp_path: Path) -> None:
    """SIGTERM of the command: workers stop, the folder is not there, the next attempt takes over."""
    told: list[ConvertProgress] = []
    with pytest.raises(BehindError):
        clustered(
            *(cluster, save, tmp_path / "out", OPTIONS, told.append),
            should_stop=lambda: bool(told and told[-1].files_done > 10),
        )
    assert not (tmp_path / "out").exists()
    report = clustered(cluster, save, tmp_path / "out")
    assert report.resumed_files > 10


def test_what_is_gone_on_with_is_compared(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged object that the attempt that was stopped had read: the next one refuses it all the same."""
    monkeypatch.setattr(recover_scene, "SHAPES", [{f"p{n}": (60, 80) for n in range(700)}])
    source = recover_scene.Scene(tmp_path)
    tag = source.save(100)
    source.commit(tag, 100)
    source.turn_a_byte(tag)
    told: list[ConvertProgress] = []
    with pytest.raises(BehindError):
        clustered(
            *(cluster, source.nas / tag, tmp_path / "out", OPTIONS, told.append),
            should_stop=lambda: bool(told and told[-1].files_done > 1800),
        )
    with pytest.raises(DamagedError, match="rank_0"):
        clustered(cluster, source.nas / tag, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what is refused -------------------------------------------------------------------------------------


def test_another_command_takes_over(server: servers.Server, cluster: Any, save: Path) -> None:
    """Two converters never mix: the older one publishes nothing and says so (75)."""
    client, key = server.client(), f"taken/out/{NOTE}"

    def take_over(p: ConvertProgress) -> None:
        if p.phase == "copying" and p.files_done > 10:
            note = {**_noted(client, "taken/out"), "attempt": "another"}
            client.put_object(Bucket=servers.BUCKET, Key=key, Body=json.dumps(note).encode())

    with pytest.raises(LockHeld) as caught:
        clustered(cluster, save, url("taken/out"), on_progress=take_over)
    assert caught.value.exit_code == 75
    assert "ckptd.json" not in got(client, "taken/out")
    assert _noted(client, "taken/out")["attempt"] == "another"


def test_a_source_that_changes(server: servers.Server, cluster: Any, tmp_path: Path) -> None:
    """Its worker or the command sees it: nothing is published, the bucket is empty again (P4)."""
    source = scene.checkpoint(tmp_path / "global_step1", stage=3, layers=1)
    shard = next(source.glob("*optim_states.pt"))

    def touch(p: ConvertProgress) -> None:
        if p.phase == "copying":
            os.utime(shard)

    with pytest.raises(SourceChanged):
        clustered(cluster, source, url("changed/out"), on_progress=touch)
    assert not got(server.client(), "changed/out")
    assert not open_uploads(server, "changed/out")


def test_somebody_elses_folder(server: servers.Server, cluster: Any, save: Path) -> None:
    server.client().put_object(Bucket=servers.BUCKET, Key="theirs/out/a", Body=b"a")
    with pytest.raises(TargetExists):
        clustered(cluster, save, url("theirs/out"))
    assert got(server.client(), "theirs/out") == {"a": b"a"}


def test_a_bad_answer_of_a_worker_is_an_error_of_ours(cluster: Any, save: Path, tmp_path: Path) -> None:
    """Two tensor ranks that drifted apart: what the worker found is raised by the command (65)."""
    model = sparse.Model("tp", sparse.gpt(64, 1, 512), 2, 1, tp=2)
    source = sparse.write(tmp_path / "global_step1", model, sparse.random_fill(4))
    with pytest.raises(RefusedError) as caught:
        clustered(cluster, source, tmp_path / "out")
    assert caught.value.exit_code == 65
    assert "different copies" in caught.value.message
    assert not list(tmp_path.glob(".out*"))


def test_no_scheduler_there(save: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """69 with the address; nothing is left."""
    monkeypatch.setattr(pool, "CONNECT_SECONDS", 1.0)
    address = pool.parse(f"tcp://127.0.0.1:{servers.free_port()}")
    with pytest.raises(RemoteUnreachable) as caught:
        Clustered(save, tmp_path / "out", OPTIONS, os.environ, address=address).run()
    assert caught.value.exit_code == 69
    assert address.url in caught.value.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_file", [False, True])
def test_a_script_that_starts_workers(save: Path, tmp_path: Path, is_file: bool) -> None:
    """On stdin it works, though workers read a main script again; one without a guard is told of it."""
    words = [str(save), str(tmp_path / "out")]
    script = f"import ckptd\nckptd.convert(*{words}, cluster='local:1')\n"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py") if is_file else "-"]
    done = subprocess.run(
        command, input=script, cwd=REPOSITORY, text=True, capture_output=True, check=False, timeout=200
    )
    assert (done.returncode, (tmp_path / "out").exists()) == ((1, False) if is_file else (0, True)), (
        done.stderr
    )
    assert ('belongs below `if __name__ == "__main__":`' in done.stderr) == is_file


# --- memory ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_memory_of_a_worker(server: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of its own, a checkpoint larger than the budget: its resident set stays below (P12)."""
    del server
    budget = 256 * MIB
    source = scene.checkpoint(tmp_path / "global_step1", stage=2, layers=4, hidden=640, fill=None)
    done = scene.cli(source, tmp_path / "out", "--cluster", "local:1", "--memory-budget", "256MiB", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bytes"] > budget
    assert 0 < report["peak_rss_bytes"] < budget, report
    assert report["cluster"]["workers"] == 1
    with pytest.raises(UsageError):
        Clustered(
            *(source, tmp_path / "x", replace(OPTIONS, memory_budget_bytes=64 * MIB), os.environ),
            address=pool.parse("local:1"),
        )
