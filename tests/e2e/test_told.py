"""Real trainers that tell ckptd of their saves and wait for COMMITs; without a daemon they train the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import node
from tests.stores.servers import free_port
from tests.support.hf import START_SECONDS
from tests.support.ranks import ENVIRONMENT, REPOSITORY
from tests.support.trackers import read_mlflow, read_wandb

pytestmark = pytest.mark.real

PROCESSES = 2 if os.environ.get("CKPTD_FULL") else 1
HEARD = "hint from the trainer"


def mlflow_of(work: Path) -> str:
    """Where MLflow keeps its runs."""
    return f"sqlite:///{work}/mlflow.db"


def train(work: Path, jobs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """One start for all jobs: their answers, and what was printed."""
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(PROCESSES)),
            *("--master_port", str(free_port()), "-m", "tests.support.told_train"),
            *(str(work / "jobs.json"), str(work / "answers.json")),
        ],
        cwd=REPOSITORY,
        env=os.environ
        | ENVIRONMENT
        | {
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(work),
            "MLFLOW_TRACKING_URI": mlflow_of(work),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        },
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((work / "answers.json").read_text()), done.stdout + done.stderr


def test_both_trainers_wait_for_their_commits_and_train_alike_without_a_daemon(tmp_path: Path) -> None:
    """With a daemon: heard, and the COMMIT is there when the wait ends. Without one, and with a status.json
    that is garbage: the same losses, `False`, and one line that nobody heard. The runs of W&B and MLflow that
    the Trainer made show where the last checkpoint lies."""
    with node(tmp_path / "a", local="forms = []") as plain, node(tmp_path / "b", local="forms = []") as hf:
        alone, garbled = tmp_path / "alone", tmp_path / "garbled"
        state = garbled / "_ckptd" / "state"
        state.mkdir(parents=True)
        (state / "status.json").write_text('{"jobs": [{"save_dir": 7')
        for here in (plain, hf):
            here.start("--log-level", "debug")
        jobs = [
            {"kind": "deepspeed", "save_dir": str(plain.save_dir), "wait_seconds": 120, "report_to": []},
            {"kind": "deepspeed", "save_dir": str(alone), "wait_seconds": 0.1, "report_to": []},
            {
                "kind": "huggingface",
                "save_dir": str(hf.save_dir),
                "wait_seconds": 120,
                "report_to": ["wandb", "mlflow"],
            },
            {"kind": "huggingface", "save_dir": str(garbled), "wait_seconds": 0.1, "report_to": []},
        ]
        answers, printed = train(tmp_path, jobs)

        assert [answer["committed"] for answer in answers] == [True, False, True, False], printed[-3000:]
        assert answers[0]["losses"] == answers[1]["losses"]
        assert answers[2]["losses"] == answers[3]["losses"]
        assert "global_step2~g1" in plain.commits()
        assert "checkpoint-2~g1" in hf.commits()
        assert printed.count(f"no daemon heard of the save in {alone}") == 1
        assert printed.count(f"status.json of {garbled} cannot be read") == 1
        assert not (alone / "_ckptd").exists()
        restore = f"ckptd restore {hf.nas} checkpoint-2 --to DIR"
        (by_wandb,) = read_wandb(tmp_path)
        assert by_wandb.summary["ckptd/committed_url"] == f"{hf.nas}/checkpoint-2"
        assert by_wandb.summary["ckptd/restore"] == restore
        assert by_wandb.values_of("ckptd/committed_step")[-1] == 2
        assert len(by_wandb.values_of("train/loss")) == 2
        (by_mlflow,) = read_mlflow(mlflow_of(tmp_path))
        assert by_mlflow.data.tags["ckptd/committed_url"] == f"{hf.nas}/checkpoint-2"
        assert by_mlflow.data.tags["ckptd/restore"] == restore
        assert by_mlflow.data.metrics["ckptd/committed_step"] == 2
        assert by_mlflow.info.status == "FINISHED"
        for here in (plain, hf):
            assert HEARD in here.log.read_text()
            assert here.stop() == 0
