"""What training scripts call (ckptd/trainer.py) and what hears it: hints never block, no answer is early."""

from __future__ import annotations

import ast
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd import trainer
from ckptd.storage.local.watch import PAUSE_SECONDS, Hints, Watcher, address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(trainer.__file__)


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What was said once is forgotten before each test; no state of another daemon is in the way."""
    found: set[str] = set()
    monkeypatch.setattr(trainer, "_said", found)
    monkeypatch.delenv("CKPTD_STATE_DIR", raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    return found


class Ear:
    """Hints about a save_dir, counted."""

    def __init__(self, save_dir: Path) -> None:
        self.heard = 0
        self.hints = Hints(str(save_dir), self.hear)

    def hear(self) -> None:
        self.heard += 1

    def waits(self, number: int) -> bool:
        end = time.monotonic() + 200
        while self.heard < number and time.monotonic() < end:
            time.sleep(0.02)
        return self.heard >= number


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    made = Ear(tmp_path)
    made.hints.start()
    yield made
    made.hints.stop()


# --- hints --------------------------------------------------------------------------------------------


def test_a_save_is_heard_under_any_path_of_the_save_dir(ear: Ear, tmp_path: Path) -> None:
    """By device and inode: a link to save_dir, or another mount of it, is the same place."""
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    assert trainer.saved(link)
    assert ear.waits(1)
    link.unlink()


def test_both_sides_agree_on_the_address(tmp_path: Path) -> None:
    """trainer.py repeats the rule, since it imports nothing of ckptd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(200)
        listener.bind(address_of(str(tmp_path)))
        assert trainer.saved(tmp_path)
        assert len(listener.recv(10)) == 1


def test_a_stream_of_hints_is_heard_seldom_and_sent_without_waiting(ear: Ear, tmp_path: Path) -> None:
    """Nobody who saves in a loop blocks or keeps the daemon busy: PAUSE_SECONDS lie between two hints."""
    begun = time.monotonic()
    assert all(trainer.saved(tmp_path) for _ in range(2000))
    assert ear.waits(1)
    heard = ear.heard
    assert heard <= 2 + (time.monotonic() - begun) / PAUSE_SECONDS


def test_whoever_does_not_run_as_us_or_root_is_not_heard(ear: Ear, tmp_path: Path) -> None:
    """The kernel says who sent it."""
    send = (
        "import os, socket, sys\n"
        "os.getuid() or (os.setgid(65534), os.setuid(65534))\n"
        f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {address_of(str(tmp_path))!r})"
    )
    subprocess.run([sys.executable, "-S", "-c", send], check=True, timeout=200)
    if os.getuid() == 0:
        time.sleep(0.5)
        assert ear.heard == 0
    else:
        assert ear.waits(1)
    trainer.saved(tmp_path)
    assert ear.waits(1)


def test_the_name_is_free_again_after_stop_and_taken_names_are_no_error(tmp_path: Path) -> None:
    """A daemon whose hints another process has taken lives by file events."""
    first, second = Ear(tmp_path), Ear(tmp_path)
    first.hints.start()
    second.hints.start()
    assert trainer.saved(tmp_path)
    assert first.waits(1)
    assert second.heard == 0
    second.hints.stop()
    first.hints.stop()
    assert not trainer.saved(tmp_path)
    third = Ear(tmp_path)
    third.hints.start()
    assert trainer.saved(tmp_path)
    assert third.waits(1)
    third.hints.stop()
    end = time.monotonic() + 200
    while "hints" in {thread.name for thread in threading.enumerate()}:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_watcher_without_file_events_hears_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the inotify limits are used up nothing else tells of a save before the next rescan."""
    heard = threading.Event()
    watcher = Watcher(str(tmp_path), lambda *, is_writing=False: heard.set())

    def no_watches_left(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watcher._observer, "schedule", no_watches_left)
    watcher.start()
    try:
        assert watcher.problem is not None
        (tmp_path / "global_step1").mkdir()
        assert not heard.wait(0.5)
        trainer.saved(tmp_path)
        assert heard.wait(200)
    finally:
        watcher.stop()


@pytest.mark.parametrize("place", ["absent", "\0", None, 7.5])
def test_nothing_of_it_raises_and_it_is_said_once(
    place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No daemon, no save_dir, nonsense: training goes on."""
    with caplog.at_level(logging.WARNING, "ckptd.trainer"):
        for _ in range(3):
            assert trainer.saved(tmp_path / place if place == "absent" else place) is False
    assert len(caplog.records) == 1


def test_a_process_that_may_open_and_write_nothing_goes_on(tmp_path: Path) -> None:
    """A full disk harms nothing, because nothing is written; without descriptors left nothing is told."""
    code = (
        f"import resource, sys; sys.path.insert(0, {str(FILE.parent)!r}); import trainer\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        f"print(trainer.saved({str(tmp_path)!r}), trainer.wait_committed({str(tmp_path)!r}, 5, 0.1))"
    )
    publish(tmp_path, [row(5, "committed")])
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr
    assert done.stderr.count("no daemon heard") == 1


def test_it_is_one_file_of_the_standard_library() -> None:
    """It may be copied beside a script: no part of ckptd, and transformers only within a function."""
    tree = ast.parse(FILE.read_text())
    top = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    everywhere = {
        str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    assert top <= sys.stdlib_module_names
    assert everywhere - sys.stdlib_module_names == {"transformers"}
    code = f"import sys; sys.path.insert(0, {str(FILE.parent)!r}); import trainer; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert "transformers" not in done.stdout
    assert "ckptd" not in done.stdout


# --- waiting ------------------------------------------------------------------------------------------


def rfc3339(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def row(
    step: int, state: str, zero: str = "committed", *, at_seconds: float | None = None, **more: object
) -> dict[str, Any]:
    """A checkpoint of status.json, as much of it as is read."""
    complete = rfc3339(time.time() if at_seconds is None else at_seconds)
    found = {
        "tag": f"global_step{step}",
        "step": step,
        "state": state,
        "local": {"complete_at": complete},
        "remotes": {"nas": {"zero": {"state": zero}}, "weights": {"weights-bf16": {"state": "waiting"}}},
    }
    return found | more


def publish(save_dir: Path, rows: list[dict[str, Any]], place: Path | None = None) -> Path:
    """A status.json."""
    place = place or save_dir / "_ckptd" / "state"
    place.mkdir(parents=True, exist_ok=True)
    document = {"jobs": [{"name": "run", "save_dir": str(save_dir), "checkpoints": rows}]}
    (place / "status.json").write_text(json.dumps(document))
    return place / "status.json"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], False),
        ([row(5, "committed")], True),
        ([row(6, "committed")], False),
        ([row(5, "uploading", "shipping")], False),
        ([row(5, "complete"), row(5, "committed")], False),
        ([row(5, "pruned")], True),
        ([row(5, "vanished", "waiting")], False),
        ([row(5, "pruned", "waiting")], False),
        ([row(5, "superseded")], False),
        ([row(5, "vanished", remotes={})], False),
    ],
)
def test_committed_is_what_status_proves(tmp_path: Path, rows: list[dict[str, Any]], expected: bool) -> None:
    """The newest save of that very step; what left the node counts when every copy was committed."""
    publish(tmp_path, rows)
    assert trainer.is_committed(tmp_path, 5) is expected


def test_an_older_save_of_the_same_step_is_no_answer(tmp_path: Path) -> None:
    """A rewound run saves step 5 again: until the daemon has looked through that, nothing is committed."""
    publish(tmp_path, [row(5, "committed", at_seconds=time.time() - 60)])
    shard = tmp_path / "global_step5" / "mp_rank_00_model_states.pt"
    shard.parent.mkdir()
    shard.write_bytes(b"new")
    assert not trainer.is_committed(tmp_path, 5)
    os.utime(shard, (1.0, time.time() - 120))
    assert trainer.is_committed(tmp_path, 5)
    beside = tmp_path / "global_step5" / "global_step5_universal"
    beside.mkdir()
    (beside / "ckptd.json").write_bytes(b"put there by resume")
    assert trainer.is_committed(tmp_path, 5)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"jobs": 7}', '{"jobs": [{}]}', '{"jobs": [[]]}', "\x00\xff", "[" * 100_000],
)
def test_a_status_that_is_garbage_is_no_commit_and_no_error(tmp_path: Path, text: str) -> None:
    """Also halves of it, in every key that is read."""
    publish(tmp_path, []).write_bytes(text.encode("latin-1"))
    assert not trainer.is_committed(tmp_path, 5)


@pytest.mark.parametrize("key", ["step", "state", "tag", "local", "remotes"])
@pytest.mark.parametrize("value", [None, 7, "x", [], {}, float("nan")])
def test_a_row_of_another_shape_is_no_error(tmp_path: Path, key: str, value: object) -> None:
    """What is not understood is not committed."""
    publish(tmp_path, [row(5, "committed") | {key: value}])
    assert trainer.is_committed(tmp_path, 5) is ((key, value) in (("tag", "x"), ("remotes", {})))


def test_a_status_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    """Whatever lies there is opened without waiting."""
    path = publish(tmp_path, [])
    path.unlink()
    os.mkfifo(path)
    assert not trainer.wait_committed(tmp_path, 5, 0.1)


def test_found_where_a_daemon_of_several_jobs_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`state_dir`, by argument and by environment; beside save_dir for Accelerate's own names."""
    save_dir, states = tmp_path / "run", tmp_path / "states"
    save_dir.mkdir()
    publish(tmp_path / "other", [row(5, "committed")], states / "a")
    assert not trainer.is_committed(save_dir, 5, states)
    publish(save_dir, [row(5, "committed")], states / "b")
    assert trainer.is_committed(save_dir, 5, states)
    assert trainer.is_committed(save_dir, 5, states / "b")
    assert not trainer.is_committed(save_dir, 5)
    monkeypatch.setenv("CKPTD_STATE_DIR", str(states))
    assert trainer.is_committed(save_dir, 5)
    monkeypatch.delenv("CKPTD_STATE_DIR")
    publish(save_dir, [row(5, "committed")], tmp_path / "_ckptd.run" / "state")
    assert trainer.is_committed(save_dir, 5)


def test_waiting_ends_with_the_commit_or_with_the_time(tmp_path: Path) -> None:
    """A status that appears later is seen."""
    timer = threading.Timer(0.3, publish, (tmp_path, [row(5, "committed")]))
    timer.start()
    assert trainer.wait_committed(tmp_path, 5, 60)
    timer.join()
    begun = time.monotonic()
    assert not trainer.wait_committed(tmp_path, 6, 0.3)
    assert time.monotonic() - begun >= 0.3


class Engine:
    """Stands where DeepSpeed's engine does; remembers its call."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def save_checkpoint(self, save_dir: object, tag: str | None = None, **named: object) -> bool:
        self.calls.append((save_dir, tag, named))
        return True


def test_the_engine_saves_first_and_one_process_of_a_node_tells(
    ear: Ear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments go through as they are."""
    engine = Engine()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert trainer.save_checkpoint(engine, tmp_path, "a", client_state={"x": 1})
    assert engine.calls == [(tmp_path, "a", {"client_state": {"x": 1}})]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert trainer.save_checkpoint(engine, str(tmp_path))
    assert ear.waits(1)
    assert ear.heard == 1


def test_no_other_name_is_made_up() -> None:
    """`CkptdCallback` is the only one that is made when asked for."""
    with pytest.raises(AttributeError, match="Callback"):
        _ = trainer.Callback


# --- reports to trackers ------------------------------------------------------------------------------


def callback_of(save_dir: Path, report_to: object, *, is_first: bool = True, **more: Any) -> Any:
    """A callback, and what the Trainer hands it; its own methods take both."""
    made = trainer.CkptdCallback(save_dir, report_to=report_to, **more)
    state = SimpleNamespace(global_step=5, is_local_process_zero=is_first, is_world_process_zero=is_first)
    return made, state


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Any]:
    """MLflow with a database of its own, and an active run."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.start_run()
    yield mlflow
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


def commit_rows(save_dir: Path, *states: str) -> None:
    """Steps 5, 6, ... in these states, newest first as in status.json; two remotes, one without zero."""
    rows = [row(5 + n, state) for n, state in enumerate(states)][::-1]
    path = publish(save_dir, rows)
    document = json.loads(path.read_text())
    remotes = [{"name": "weights", "url": "/mnt/weights"}, {"name": "nas", "url": "s3://bucket/my run/"}]
    document["jobs"][0]["remotes"] = remotes
    path.write_text(json.dumps(document))


def test_the_active_run_shows_the_newest_commit_and_the_end_looks_once_more(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one that is committed meanwhile changes nothing; the first process alone reports."""
    monkeypatch.setattr(trainer, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(trainer, "LAST_REPORT_SECONDS", 200.0)
    run_id = mlflow.active_run().info.run_id

    def run() -> Any:
        return mlflow.get_run(run_id).data

    other, state = callback_of(tmp_path, ["mlflow"], is_first=False)
    commit_rows(tmp_path, "committed")
    other.on_save(None, state)
    other.on_train_end(None, state)
    assert run().metrics == {}

    callback, state = callback_of(tmp_path, "mlflow")
    commit_rows(tmp_path, "uploading", "committed")
    callback.on_save(None, state)
    state.global_step = 6
    callback.on_save(None, state)
    end = time.monotonic() + 200
    while "ckptd/committed_step" not in run().metrics and time.monotonic() < end:
        time.sleep(0.05)
    assert run().metrics == {"ckptd/committed_step": 6}
    assert run().tags["ckptd/committed_url"] == "s3://bucket/my run/global_step6"
    assert run().tags["ckptd/restore"] == "ckptd restore 's3://bucket/my run' global_step6 --to DIR"

    commit_rows(tmp_path, "committed", "committed", "committed")
    monkeypatch.setattr(trainer, "REPORT_SECONDS", 600.0)
    state.global_step = 7
    callback.on_save(None, state)
    mlflow.end_run()
    callback.on_train_end(None, state)
    history = mlflow.MlflowClient().get_metric_history(run_id, "ckptd/committed_step")
    assert [(one.value, one.step) for one in history] == [(6, 6), (7, 7)]
    assert "ckptd-report" not in {thread.name for thread in threading.enumerate()}


def test_a_tracker_that_is_absent_or_has_no_run_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on; a name that nobody knows is said before it begins."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    commit_rows(tmp_path, "committed")
    callback, state = callback_of(tmp_path, ["wandb", "mlflow"])
    with caplog.at_level(logging.WARNING, "ckptd.trainer"):
        for _ in range(2):
            callback.on_save(None, state)
            callback.on_train_end(None, state)
    said = [record.message for record in caplog.records if "no COMMIT is reported" in record.message]
    assert len(said) == 2
    assert "wandb" in said[0]
    assert "mlflow.start_run" in said[1]
    with pytest.raises(ValueError, match="'tensorboard' is not known; choose of wandb, mlflow"):
        trainer.CkptdCallback(report_to=["tensorboard"])


class Silent(BaseHTTPRequestHandler):
    """A server of MLflow that makes a run and never answers again."""

    def do_POST(self) -> None:
        if not self.path.endswith("/runs/create"):
            time.sleep(30)
            return
        info = {
            "run_id": "r",
            "run_uuid": "r",
            "experiment_id": "0",
            "status": "RUNNING",
            "artifact_uri": "x",
        }
        body = json.dumps({"run": {"info": info, "data": {}}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_does_not_answer_delays_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves go on at once, and the end waits for a moment alone."""
    import mlflow

    monkeypatch.setattr(trainer, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(trainer, "LAST_REPORT_SECONDS", 0.5)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"http://127.0.0.1:{server.server_address[1]}")
    try:
        mlflow.start_run(experiment_id="0")
        commit_rows(tmp_path, "committed")
        callback, state = callback_of(tmp_path, "mlflow")
        for _ in range(20):
            begun = time.monotonic()
            callback.on_save(None, state)
            assert time.monotonic() - begun < 10.0
            time.sleep(0.02)
        begun = time.monotonic()
        callback.on_train_end(None, state)
        assert time.monotonic() - begun < 15.0
    finally:
        _drop_run(mlflow)
        mlflow.set_tracking_uri(before)
        server.shutdown()
        server.server_close()


def _drop_run(mlflow: Any) -> None:
    """Forget the active run without asking its server."""
    from mlflow.tracking import fluent

    fluent._active_run_stack.set([])
