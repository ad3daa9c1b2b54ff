"""What the rows of a whole job come to: alive, over or behind, and the training that is at risk; in words.

Pure; part of `ckptd status URL` (`jobwide.py` reads what there is).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.heartbeat import DEAD_SECONDS
from ckptd.words import ago

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from ckptd.core.heartbeat import SeenNode
    from ckptd.recover.jobwide import NodeRow, SafeRow, Verdict
    from ckptd.recover.opened import OpenRow


def is_alive(row: NodeRow) -> bool:
    """It was heard of lately, and goes on."""
    return row.heard_seconds_ago is not None and not (row.is_dead or row.has_ended)


def ended_seconds_ago(rows: Sequence[NodeRow]) -> float | None:
    """Since the last node ended, where all of them did."""
    ages = [row.heard_seconds_ago for row in rows if row.has_ended and row.heard_seconds_ago is not None]
    return min(ages) if ages and len(ages) == len(rows) else None


def newest_step(rows: Sequence[NodeRow], seen: Sequence[SeenNode], opened: Sequence[OpenRow]) -> int | None:
    """Of the newest save that is known, which after a rewind is not the one of the most steps."""
    names = {row.node for row in rows}
    saves = [save_of(one) for one in seen if one.node in names]
    saves += [(row.branch, row.step) for row in opened]
    known = [save for save in saves if save is not None]
    return max(known)[1] if known else None


def save_of(one: SeenNode) -> tuple[int, int] | None:
    """(branch, step) of the newest save that is complete for a node."""
    newest = one.heartbeat.newest if one.heartbeat is not None else None
    return None if newest is None else (newest.branch, newest.step)


def present(seen: Sequence[SeenNode], seconds_ago: float, nodes: Set[str]) -> frozenset[str]:
    """Nodes that were there when a COMMIT was made so long ago, or since: those it rests on, who was alive.

    Alive is, as everywhere, who was heard of in the five minutes before: the last minute of a node is not
    told, and clocks may be off.
    """
    lately = seconds_ago + DEAD_SECONDS
    return frozenset(
        one.node for one in seen if one.node in nodes or one.seconds_ago is None or one.seconds_ago <= lately
    )


def is_ahead(one: SeenNode, safe: SafeRow, there: Set[str]) -> bool:
    """A node that was there when the safe save was committed has a newer one: alive, ended or dead.

    Who left before that COMMIT had its save passed by: the run went on without it.
    """
    newest = save_of(one)
    return newest is not None and newest > (safe.branch, safe.step) and one.node in there


def silent(row: NodeRow, ahead: Set[str]) -> str:
    """What a person is told of a node that has died; `ahead`: nodes with a newer save than the safe one."""
    clock = "" if row.is_store_time else " (by the nodes' own clocks)"
    text = f"node {row.node} has not been heard of for {ago(row.heard_seconds_ago or 0.0)}{clock}"
    if row.node not in ahead:
        return text
    step = f"its newest save, step {row.newest_step}, is not committed"
    return f"{text}; {step}: start ckptd there again, else the run goes back"


def seconds_at_risk(safe: SafeRow | None, seen: Sequence[SeenNode], ended: float | None) -> float | None:
    """Since the safe save was written, by the nodes that said so of that very save; else since its COMMIT.

    Nothing is trained on a node that has ended.
    """
    if safe is None:
        return None
    told = [
        one.heartbeat.safe.seconds_at_risk + (0.0 if one.has_ended else one.seconds_ago or 0.0)
        for one in seen
        if one.heartbeat is not None
        and one.heartbeat.safe is not None
        and (one.heartbeat.safe.tag, one.heartbeat.safe.step) == (safe.tag, safe.step)
    ]
    return max([*told, safe.age_seconds - (ended or 0.0), 0.0])


def headline(
    verdict: Verdict, safe: SafeRow | None, alive: int, expected: int, risk: float | None, newest: int | None
) -> str:
    """The first line, of a job that goes on."""
    nodes = f"{alive}/{expected} nodes"
    if safe is None:
        return f"NOT SAFE: nothing is committed yet; {nodes}"
    text = f"{verdict.upper()}: step {safe.step} committed {ago(safe.age_seconds)} ago, {nodes}"
    behind = f", step {newest} is not committed yet" if verdict == "behind" and newest is not None else ""
    return f"{text}{behind}, {ago(risk or 0.0)} of training at risk"


def headline_of_end(
    verdict: Verdict, safe: SafeRow | None, ended: float, risk: float | None, newest: int | None
) -> str:
    """The same of a job whose daemons were all stopped in order."""
    when = f"ended {ago(ended)} ago"
    if safe is None:
        return f"NOT SAFE: {when}, nothing is committed"
    if verdict == "safe":
        return f"SAFE: {when}, newest step {safe.step} committed"
    return (
        f"BEHIND: {when}, step {newest} is not committed, step {safe.step} is, "
        f"{ago(risk or 0.0)} of training at risk"
    )
