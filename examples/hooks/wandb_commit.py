"""Write into a run of W&B where its newest committed checkpoint lies; a hook of the daemon.

In ckptd.toml, with the interpreter that has wandb:

    [notify]
    on_committed = ["/venv/bin/python", "/opt/ckptd/examples/hooks/wandb_commit.py", "/data/runs"]

/data/runs/JOB.wandb names the run of job JOB: `entity/project/run_id`, as the run's page does. Let the launch
script write it: `echo "my-team/llama/$WANDB_RUN_ID" > /data/runs/llama-7b.wandb`. A job without that file is
left alone. The daemon hands a hook no environment variables: log in with `wandb login` once (~/.netrc).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import wandb


def main() -> int:
    """Read the event from stdin and report it; 0 where there is nothing to report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, help="the folder with JOB.wandb")
    parser.add_argument("--offline", type=Path, help="write below this folder, for `wandb sync`")
    given = parser.parse_args()
    event = json.load(sys.stdin)
    named = given.runs / f"{event['job']}.wandb"
    if event["form"] != "zero" or not named.exists():
        return 0
    *team, project, run_id = named.read_text().strip().split("/")
    # shared: the training writes into the same run meanwhile, and it alone ends it
    run = wandb.init(
        entity=team[0] if team else None,
        project=project,
        id=run_id,
        mode="offline" if given.offline else "shared",
        dir=given.offline,
        settings=wandb.Settings(
            x_primary=False, x_label="ckptd", x_update_finish_state=False, console="off", init_timeout=20
        ),
    )
    run.summary.update(
        {
            "ckptd/committed_url": f"{event['url']}/{event['tag']}",
            "ckptd/restore": f"ckptd restore {shlex.join((event['url'], event['tag']))} --to DIR",
        }
    )
    run.log({"ckptd/committed_step": event["step"]})
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
