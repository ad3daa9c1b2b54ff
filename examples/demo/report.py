"""What a quickstart prints at its end: one row per save (from the evidence), then the judge's list.

Times are seconds after the trainer's save_checkpoint returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from examples.demo.evidence import commit_of, life_of

if TYPE_CHECKING:
    from examples.demo.evidence import Evidence, Save

NOT_COMPLETE = (None, "discovered", "incomplete", "writing", "resaving")


def checkpoint_table(e: Evidence, statuses: list[dict[str, Any]]) -> Table:
    """Per save: seconds to complete, committed, converted; bytes; where it is kept and why."""
    table = Table(title="checkpoints (seconds after the save returned)")
    for column in ("checkpoint", "saved by"):
        table.add_column(column)
    for column in ("complete", "committed", "converted", "MB"):
        table.add_column(column, justify="right")
    table.add_column("kept where and why")
    for save in e.saves:
        table.add_row(*_row(e, save, statuses))
    torn_bytes = sum(size for _, size, _ in e.plan["torn_files"])
    torn = (f"{e.plan['torn_tag']} (torn)", "first", "never", "never", "never", f"{torn_bytes / 1e6:.0f}")
    table.add_row(*torn, "node, in _ckptd/aside: not a checkpoint, not deleted either")
    return table


def complete_at(e: Evidence, save: Save, statuses: list[dict[str, Any]]) -> float | None:
    """When status.json first called it complete."""
    low, high = life_of(e, save)
    mine = (s for s in statuses if s["tag"] == save.tag and low <= s["at"] < high)
    return next((s["at"] for s in mine if s["state"] not in NOT_COMPLETE), None)


def converted_at(e: Evidence, save: Save) -> float | None:
    """When its universal form appeared on the node."""
    low, high = life_of(e, save)
    looks = (x for x in e.looks("appeared") if x["place"] == "derived/universal" and x["name"] == save.tag)
    return next((x["at"] for x in looks if low <= x["at"] < high), None)


def pruned_at(e: Evidence, save: Save) -> tuple[float, str] | None:
    """When and why ckptd removed it from the node."""
    low, high = life_of(e, save)
    lines = (a for a in e.audit if a.action == "prune" and a.tag == save.tag and low <= a.at < high)
    return next(((a.at, a.reason) for a in lines), None)


def _row(e: Evidence, save: Save, statuses: list[dict[str, Any]]) -> tuple[str, ...]:
    commit = commit_of(e, save)
    ranks = e.starts[save.run]["world_size"]
    return (
        save.tag,
        f"{save.run}, {ranks} {'rank' if ranks == 1 else 'ranks'}",
        _after(save, complete_at(e, save, statuses)),
        _after(save, commit.created if commit else None),
        _after(save, converted_at(e, save)),
        f"{sum(size for size, _ in save.files.values()) / 1e6:.0f}",
        f"{_in_the_remote(e, save)}; {_on_the_node(e, save, statuses)}",
    )


def _after(save: Save, at: float | None) -> str:
    return "-" if at is None else f"{max(0.0, at - save.at):.1f}"


def _in_the_remote(e: Evidence, save: Save) -> str:
    commit = commit_of(e, save)
    if commit is None:
        return f"not {e.where}"
    if commit.gone is None:
        return _short(e)
    why = next((a.reason for a in e.audit if a.action == "retire" and a.tag == save.tag), "?")
    return f"{_short(e)}: retired, {why}"


def _short(e: Evidence) -> str:
    return e.place.removeprefix("the ")


def _on_the_node(e: Evidence, save: Save, statuses: list[dict[str, Any]]) -> str:
    removed = pruned_at(e, save)
    if removed is not None:
        return f"node: pruned, {removed[1]}"
    if life_of(e, save)[1] != float("inf"):
        return "lost with the node" if commit_of(e, save) is None else "node: until it was replaced"
    keep = [", ".join(map(str, line["keep"])) for line in statuses if line["tag"] == save.tag]
    return f"node: {keep[-1]}" if keep and keep[-1] else "node"


def promise_table(document: dict[str, Any]) -> Table:
    """The judge's verdict.json as a table."""
    table = Table(title="promises, as a judge that is not ckptd found them")
    table.add_column("")
    table.add_column("promise")
    table.add_column("checked", justify="right")
    table.add_column("verdict")
    for row in document["promises"]:
        failures = row["failures"]
        verdict = Text("held", "green") if row["held"] else Text("BROKEN", "red")
        said = (f", {row['note']}" if row["note"] else "", f": {failures[0]}" if failures else "")
        verdict = Text.assemble(verdict, *said)
        table.add_row(row["promise"], row["text"], f"{row['checked']} {row['unit']}", verdict)
    return table
