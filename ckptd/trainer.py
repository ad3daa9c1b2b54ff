"""Tell ckptd of a save, or wait until it is committed: for training scripts, with the standard library alone.

Training needs nothing of this: the daemon finds every save by itself. This file imports no other part of
ckptd, so it may be copied beside a training script; transformers is loaded when `CkptdCallback` is asked for.

    from ckptd.trainer import CkptdCallback       # Hugging Face: Trainer(..., callbacks=[CkptdCallback()])
    from ckptd.trainer import save_checkpoint     # DeepSpeed: save_checkpoint(engine, save_dir)

Nothing here raises because of ckptd, writes a file or takes locks; what goes wrong is logged once. With
`CkptdCallback(report_to="wandb")` (or "mlflow", or both in a list) the run shows where its newest committed
checkpoint lies; a thread writes that, so training does not wait for W&B or MLflow.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import shlex
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

log = logging.getLogger("ckptd.trainer")

POLL_SECONDS = 0.5
REPORT_SECONDS = 5.0
"""Between two looks for a COMMIT to report."""
LAST_REPORT_SECONDS = 10.0
"""The end of training waits so long for a tracker that does not answer."""
STATUS_LIMIT_BYTES = 64 << 20
_said: set[str] = set()


def saved(save_dir: str | os.PathLike[str]) -> bool:
    """Tell the daemon on this machine that something was saved below save_dir, so that it looks at once.

    Returns at once, whatever happens; False where no daemon heard it, which loses nothing: file events and
    rescans find every save. One process of a node is enough.
    """
    try:
        status = os.stat(save_dir)
        address = f"\0ckptd/saved/{status.st_dev:x}/{status.st_ino:x}".encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as teller:
            teller.setblocking(False)
            teller.sendto(b"\0", address)
    except BlockingIOError:
        return True  # so many hints wait there that it is going to look anyhow
    except (OSError, ValueError, TypeError) as error:
        _say_once(f"no daemon heard of the save in {save_dir} ({error}); it looks by itself")
        return False
    return True


def is_committed(
    save_dir: str | os.PathLike[str], step: int, state_dir: str | os.PathLike[str] | None = None
) -> bool:
    """Whether the newest save of that step is proved to lie in every required remote, as status.json says.

    False when nothing can be read, or what is said is of an earlier save of the same step: the folder has a
    file that was written after the daemon had looked through it. `state_dir`: where status.json lies, unless
    in save_dir, below CKPTD_STATE_DIR, or where a service keeps it.
    """
    try:
        job, place = _published_job(save_dir, state_dir)
        return job is not None and _committed_row(job, place, step) is not None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _say_once(f"status.json of {save_dir} cannot be read ({type(error).__name__}: {error})")
    return False


def wait_committed(
    save_dir: str | os.PathLike[str],
    step: int,
    timeout_seconds: float,
    state_dir: str | os.PathLike[str] | None = None,
) -> bool:
    """Wait until the newest save of that step is committed; False after `timeout_seconds`.

    For the end of a script, in one process: whoever waits in a collective operation meanwhile runs into that
    one's time-out.
    """
    deadline = time.monotonic() + timeout_seconds
    while not is_committed(save_dir, step, state_dir):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(POLL_SECONDS, left))
    return True


def save_checkpoint(
    engine: Any, save_dir: str | os.PathLike[str], tag: str | None = None, **named: Any
) -> Any:
    """`engine.save_checkpoint` of DeepSpeed, then `saved`; every rank calls it, the node's first one tells.

    Raises:
        What DeepSpeed raises.
    """
    done = engine.save_checkpoint(save_dir, tag=tag, **named)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        saved(save_dir)
    return done


class _Commit(NamedTuple):
    """A committed checkpoint, and the remote that holds it, as `ckptd restore` takes both."""

    step: int
    tag: str
    remote_url: str


def _newest_commit(
    save_dir: str | os.PathLike[str], steps: Iterable[int], state_dir: str | os.PathLike[str] | None
) -> _Commit | None:
    """Return the newest of these steps that is committed, in the first remote that has it; None: none is."""
    job, place = _published_job(save_dir, state_dir)
    if job is None:
        return None
    for step in sorted(steps, reverse=True):
        row = _committed_row(job, place, step)
        if row is None:
            continue
        for remote in job["remotes"]:
            if row["remotes"].get(remote["name"], {}).get("zero", {}).get("state") == "committed":
                return _Commit(step, row["tag"], remote["url"].rstrip("/"))
    return None


def _say_once(text: str) -> None:
    if text not in _said and len(_said) < 100:
        _said.add(text)
        with contextlib.suppress(Exception):
            log.warning("ckptd: %s", text)


def _published_job(
    save_dir: str | os.PathLike[str], state_dir: str | os.PathLike[str] | None
) -> tuple[dict[str, Any] | None, str]:
    """Return what a daemon publishes of a save_dir, and save_dir's absolute path."""
    place = os.path.abspath(os.fspath(save_dir))
    for path in _status_files(place, state_dir):
        job = _job_of(path, place)
        if job is not None:
            return job, place
    return None, place


def _status_files(save_dir: str, state_dir: str | os.PathLike[str] | None) -> Iterator[str]:
    """List where a daemon may publish its status, most certain first."""
    if state_dir is not None:
        yield os.path.join(state_dir, "status.json")
        yield from _below(os.fspath(state_dir))
        return
    above, name = os.path.split(save_dir)
    yield os.path.join(save_dir, "_ckptd", "state", "status.json")
    yield os.path.join(above, f"_ckptd.{name}", "state", "status.json")
    for variable in ("CKPTD_STATE_DIR", "STATE_DIRECTORY"):
        for base in filter(None, os.environ.get(variable, "").split(":")):
            yield os.path.join(base, "status.json")
            yield from _below(base)
    digest = hashlib.sha256(os.fsencode(os.path.realpath(save_dir))).hexdigest()[:16]
    yield f"/var/tmp/ckptd-{os.getuid()}/{digest}/status.json"  # noqa: S108 — read only
    for user in _names("/var/lib/ckptd"):
        yield from _below(f"/var/lib/ckptd/{user}")


def _below(base: str) -> Iterator[str]:
    """List the status files below a directory that holds the states of several jobs."""
    for name in _names(base):
        yield os.path.join(base, name, "status.json")


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _job_of(path: str, save_dir: str) -> dict[str, Any] | None:
    """The job of a save_dir in a published document; None: no document, or it is of other jobs."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as published:
        document = json.loads(published.read(STATUS_LIMIT_BYTES))
    for job in document["jobs"]:
        if os.path.realpath(job["save_dir"]) == os.path.realpath(save_dir):
            return dict(job)
    return None


def _committed_row(job: dict[str, Any], save_dir: str, step: int) -> dict[str, Any] | None:
    """Return the newest save of a step if it is committed on every required remote."""
    saves = [c for c in job["checkpoints"] if c["step"] == step]
    if not saves or saves[0]["state"] not in ("committed", "pruned", "vanished"):
        return None
    newest: dict[str, Any] = saves[0]
    zero = [forms["zero"]["state"] for forms in newest["remotes"].values() if "zero" in forms]
    if newest["state"] != "committed" and (not zero or set(zero) != {"committed"}):
        return None
    seen_at = newest["local"]["complete_at"]
    if seen_at is None or _written_at_seconds(os.path.join(save_dir, newest["tag"])) > _unix(seen_at):
        return None
    return newest


def _written_at_seconds(folder: str) -> float:
    """Return when the trainer last wrote a file below a checkpoint folder (Unix seconds); 0 where it is
    gone."""
    newest = 0.0
    for place, _, names in os.walk(folder):
        if place.endswith("_universal"):
            continue  # beside the shards by `ckptd resume`
        for name in names:
            if name != "latest_universal":
                with contextlib.suppress(FileNotFoundError):
                    newest = max(newest, os.lstat(os.path.join(place, name)).st_mtime)
    return newest


def _unix(rfc3339: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(rfc3339.replace("Z", "+00:00")).timestamp()


# --- Reports to experiment trackers --------------------------------------------------------------------


def _wandb_report() -> Callable[[_Commit], None]:
    """Return what writes a COMMIT into the active run of W&B: its summary and a row of its history.

    Raises:
        LookupError: no run is active.
    """
    run = importlib.import_module("wandb").run
    if run is None:
        raise LookupError("no run is active: call wandb.init first")

    def report(commit: _Commit) -> None:
        run.summary.update(_facts(commit))
        # into the row that is open, so that the script's own count of steps stays what it is
        run.log({"ckptd/committed_step": commit.step}, commit=False)

    return report


def _mlflow_report() -> Callable[[_Commit], None]:
    """Return what writes a COMMIT into the active run of MLflow, also once it has ended: tags and a metric.

    Raises:
        LookupError: no run is active in this thread.
    """
    mlflow = importlib.import_module("mlflow")
    run = mlflow.active_run()
    if run is None:
        raise LookupError("no run is active: call mlflow.start_run first")
    client, run_id = mlflow.MlflowClient(mlflow.get_tracking_uri()), run.info.run_id

    def report(commit: _Commit) -> None:
        for name, value in _facts(commit).items():
            client.set_tag(run_id, name, value)
        client.log_metric(run_id, "ckptd/committed_step", commit.step, step=commit.step)

    return report


_TRACKERS = {"wandb": _wandb_report, "mlflow": _mlflow_report}


def _tracker_names(report_to: str | Iterable[str] | None) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    for name in names:
        if name not in _TRACKERS:
            raise ValueError(f"report_to: {name!r} is not known; choose of {', '.join(_TRACKERS)}")
    return names


def _facts(commit: _Commit) -> dict[str, str]:
    """Return what people copy out of a run: where the checkpoint lies, and the command that restores it."""
    return {
        "ckptd/committed_url": f"{commit.remote_url}/{commit.tag}",
        "ckptd/restore": f"ckptd restore {shlex.join((commit.remote_url, commit.tag))} --to DIR",
    }


class _Reporter:
    """Reports the newest COMMIT of a training run from a thread; `save` and `close` are of the main thread.

    `save` looks for the runs that are active there: MLflow knows them by thread.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        trackers: Iterable[str],
        state_dir: str | os.PathLike[str] | None,
    ) -> None:
        self._save_dir = save_dir
        self._state_dir = state_dir
        self._waiting: set[int] = set()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._reports: dict[str, Callable[[_Commit], None]] = {}
        for name in trackers:
            try:
                self._reports[name] = _TRACKERS[name]()
            except Exception as error:  # noqa: BLE001 — a tracker that is not there costs its reports alone
                _say_once(f"no COMMIT is reported to {name}: {error}")
        self._thread = threading.Thread(target=self._serve, name="ckptd-report", daemon=True)
        if self._reports:
            self._thread.start()

    def save(self, step: int) -> None:
        """Have a step reported once it is committed."""
        with self._lock:
            self._waiting.add(step)

    def close(self) -> None:
        """Look once more, and wait for that for at most LAST_REPORT_SECONDS."""
        self._is_over.set()
        if self._reports:
            self._thread.join(LAST_REPORT_SECONDS)

    def _serve(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(REPORT_SECONDS)
            _quietly(self._look)

    def _look(self) -> None:
        with self._lock:
            steps = set(self._waiting)
        commit = _newest_commit(self._save_dir, steps, self._state_dir) if steps else None
        if commit is None:
            return
        with self._lock:
            self._waiting -= {step for step in steps if step <= commit.step}
        for name, report in self._reports.items():
            try:
                report(commit)
            except Exception as error:  # noqa: BLE001 — the next COMMIT is tried again
                _say_once(f"{name} did not take a COMMIT: {type(error).__name__}: {error}")


def _make_callback() -> type:
    from transformers import TrainerCallback

    class CkptdCallback(TrainerCallback):
        """Tells ckptd of each save of the Trainer; `wait_seconds`: at the end, for the last one's COMMIT.

        save_dir: default the Trainer's `output_dir`. Only the first process of a node tells, only the first
        of all waits and reports. report_to: "wandb", "mlflow" or both, whose active run is to show where the
        newest committed checkpoint lies; the last COMMIT too if `wait_seconds` is long enough for it.

        Raises:
            ValueError: report_to names another tracker.
        """

        def __init__(
            self,
            save_dir: str | os.PathLike[str] | None = None,
            *,
            wait_seconds: float = 0.0,
            state_dir: str | os.PathLike[str] | None = None,
            report_to: str | Iterable[str] | None = None,
        ) -> None:
            self.save_dir = save_dir
            self.wait_seconds = wait_seconds
            self.state_dir = state_dir
            self.last_step: int | None = None
            self.is_committed: bool | None = None
            """After the end of training: whether the last save was committed in time; None: nobody waited."""
            self._trackers = _tracker_names(report_to)
            self._reporter: _Reporter | None = None

        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.last_step = state.global_step
            place = self.save_dir or args.output_dir
            if state.is_local_process_zero:
                _quietly(lambda: saved(place))
            if self._trackers and state.is_world_process_zero:
                if self._reporter is None:
                    self._reporter = _Reporter(place, self._trackers, self.state_dir)
                self._reporter.save(state.global_step)

        def on_train_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if self.wait_seconds and self.last_step is not None and state.is_world_process_zero:
                self._wait(self.save_dir or args.output_dir, self.last_step)
            if self._reporter is not None:
                self._reporter.close()
                self._reporter = None

        def _wait(self, place: str | os.PathLike[str], step: int) -> None:
            _quietly(lambda: saved(place))
            self.is_committed = bool(
                _quietly(lambda: wait_committed(place, step, self.wait_seconds, self.state_dir))
            )
            if not self.is_committed:
                _say_once(f"step {step} in {place} was not committed within {self.wait_seconds:.0f} s")

    CkptdCallback.__qualname__ = "CkptdCallback"
    return CkptdCallback


def _quietly(call: Callable[[], bool | None]) -> bool | None:
    """Whatever it is, training goes on."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 — a hint is worth no run
        _say_once(f"{type(error).__name__}: {error}")
        return None


def __getattr__(name: str) -> Any:
    if name != "CkptdCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _make_callback()
    return globals()[name]
