"""How long one plan takes with thousands of checkpoints: `python -m bench.retention [COUNT]`.

A job whose remote holds COUNT checkpoints in both forms, every key and a ladder set, and whose node still has
them all: retention of both, and a whole plan, each the best of three. Prints one JSON object; seconds of CPU.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.core.model.records import UNIVERSAL, DerivedRecord, DerivedState
from ckptd.core.model.save import Best
from ckptd.core.policy.local import keep_local
from ckptd.core.policy.remote import keep_remote
from ckptd.core.policy.retention import Ephemeral, RetentionPolicy, Tier
from ckptd.daemon.state.view_builder import planned
from tests.support.core_views import job_view, remote_commit, save_view, sealed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.policy.view import JobView

HOUR_SECONDS = 3600.0
POLICY = RetentionPolicy(
    save_total_limit=50,
    keep_every_steps=100_000,
    keep_every_seconds=24 * HOUR_SECONDS,
    keep_within_seconds=48 * HOUR_SECONDS,
    keep_best=5,
    keep_steps=(300, 7000),
    ephemeral=Ephemeral(every_steps=500, keep=3),
    ladder=(
        Tier(form="universal", after_seconds=72 * HOUR_SECONDS),
        Tier(form="gone", after_seconds=2000 * HOUR_SECONDS),
    ),
)


def scene(count: int) -> JobView:
    """One checkpoint an hour at steps 100, 200, …, a rewind in the middle, all of them everywhere."""
    saves, commits = [], []
    for number in range(1, count + 1):
        branch = 1 + (number > count // 2)
        step = (number - (branch - 1) * count // 4) * 100
        save = sealed(step, branch, number, tag=f"global_step{step}b{branch}")
        best = Best(metric="eval_loss", value=(number * 7919) % 1000 / 100)
        save = save.model_copy(update={"best": best})
        ready = DerivedRecord(state=DerivedState.READY, is_source_verified=True)
        saves.append(save_view(number, save, universal=ready))
        for form in ("zero", UNIVERSAL):
            commit = remote_commit(save, form)
            commits.append(replace(commit, committed_at_seconds=number * HOUR_SECONDS, best=best))
    view = job_view(saves, local_retention=POLICY, metric="eval_loss", local_forms=(UNIVERSAL,))
    nas = replace(view.remotes[0], commits=tuple(commits), retention=POLICY)
    return replace(view, remotes=(nas,))


def seconds(work: Callable[[], object]) -> float:
    """The best of three."""
    found = []
    for _ in range(3):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return round(min(found), 3)


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    view = scene(count)
    report = {
        "checkpoints": count,
        "commits": len(view.remotes[0].commits),
        "retention_node_seconds": seconds(lambda: keep_local(view)),
        "retention_remote_seconds": seconds(lambda: keep_remote(view)),
        "plan_seconds": seconds(lambda: planned(view)),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
