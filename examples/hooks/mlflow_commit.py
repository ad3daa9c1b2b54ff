"""Write into a run of MLflow where its newest committed checkpoint lies; a hook of the daemon.

In ckptd.toml, with the interpreter that has mlflow or mlflow-skinny:

    [notify]
    on_committed = ["/venv/bin/python", "/opt/ckptd/examples/hooks/mlflow_commit.py", "/data/runs"]

/data/runs/JOB.mlflow names the run of job JOB: `TRACKING_URI RUN_ID`. Let the launch script write it:
`echo "$MLFLOW_TRACKING_URI $MLFLOW_RUN_ID" > /data/runs/llama-7b.mlflow`. A job without that file is left
alone. It does not matter whether the run has ended.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from mlflow import MlflowClient


def main() -> int:
    """Read the event from stdin and report it; 0 where there is nothing to report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, help="the folder with JOB.mlflow")
    given = parser.parse_args()
    event = json.load(sys.stdin)
    named = given.runs / f"{event['job']}.mlflow"
    if event["form"] != "zero" or not named.exists():
        return 0
    tracking_uri, run_id = named.read_text().split()
    client = MlflowClient(tracking_uri)
    client.set_tag(run_id, "ckptd/committed_url", f"{event['url']}/{event['tag']}")
    client.set_tag(
        run_id, "ckptd/restore", f"ckptd restore {shlex.join((event['url'], event['tag']))} --to DIR"
    )
    client.log_metric(run_id, "ckptd/committed_step", event["step"], step=event["step"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
