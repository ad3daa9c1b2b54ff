"""What a commit costs as nodes grow more: requests of each node, and time from the last part to COMMIT.

`python -m tests.fleet.cost [--most 1024] [--publish]`: no faults, 20 ms per request, each node
with a shard of its own and a replica of the model states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.pictures import replace_part
from tests.fleet.remote import Network
from tests.fleet.story import Shape, staged, tell

ROOT = Path(__file__).resolve().parents[2]
HEAD = (
    "| nodes | requests, mean node | busiest node | documents read | listing pages | to COMMIT |",
    "|---|---|---|---|---|---|",
)
CHECKPOINTS = 4
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one checkpoint on so many nodes."""

    nodes: int
    requests_mean: float
    """Per node and checkpoint."""
    requests_most: float
    """Of the node that asks most."""
    gets_mean: float
    pages_mean: float
    """Pages of listings."""
    commit_seconds: float
    """From the last node's seal to COMMIT, median."""


def measure(nodes: int) -> Cost:
    """Live one history without faults.

    Raises:
        RuntimeError: it broke a promise.
    """
    shape = Shape(
        nodes=nodes,
        checkpoints=CHECKPOINTS,
        faults=False,
        interval_seconds=(600.0, 600.0),
        remote_limit=2,
        network=Network(),
    )
    with staged():
        told = tell(3, shape)
    if told.broken is not None:
        raise RuntimeError(told.broken)
    sums = [sum(counts.values()) / CHECKPOINTS for counts in told.per_node.values()]
    gets = [counts["get"] / CHECKPOINTS for counts in told.per_node.values()]
    pages = [counts["list"] / CHECKPOINTS for counts in told.per_node.values()]
    return Cost(
        nodes=nodes,
        requests_mean=statistics.mean(sums),
        requests_most=max(sums),
        gets_mean=statistics.mean(gets),
        pages_mean=statistics.mean(pages),
        commit_seconds=statistics.median(told.commit_seconds),
    )


def row(cost: Cost) -> str:
    """A line of the table in docs/performance.md."""
    return (
        f"| {cost.nodes:,} | {cost.requests_mean:.0f} | {cost.requests_most:.0f} | {cost.gets_mean:.0f} "
        f"| {cost.pages_mean:.0f} | {cost.commit_seconds:.1f} s |"
    )


def main(arguments: list[str]) -> int:
    """Measure and print the table; with --publish it and its picture go to docs/."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.cost", description=__doc__)
    parser.add_argument("--most", type=int, default=1024)
    parser.add_argument("--least", type=int, default=1, help="those below are taken from the last run")
    parser.add_argument("--publish", action="store_true", help="write docs/performance.md, docs/fleet.png")
    chosen = parser.parse_args(arguments)
    kept = ROOT / ".build" / "fleet-cost.json"
    known = json.loads(kept.read_text()) if kept.is_file() else []
    costs = [cost for cost in (Cost(**one) for one in known) if cost.nodes < chosen.least]
    print("\n".join(HEAD))
    for cost in costs:
        print(row(cost))
    for nodes in (size for size in SIZES if chosen.least <= size <= chosen.most):
        costs.append(measure(nodes))
        print(row(costs[-1]), flush=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([{name: getattr(c, name) for name in Cost.__slots__} for c in costs]))
    if chosen.publish:
        replace_part("\n".join((*HEAD, *(row(cost) for cost in costs))), "fleet")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
