"""What a quickstart prints at its end: one row per save (from the evidence), then the judge's list.

Times are seconds after the trainer's save_checkpoint returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from ckptd.quickstart.evidence import Evidence, Save


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
    table.add_row(
        f"{e.plan['torn_tag']} (torn)",
        "first",
        "never",
        "never",
        "never",
        f"{torn_bytes / 1e6:.0f}",
        "_ckptd/aside",
    )
    return table


def _row(e: Evidence, save: Save, statuses: list[dict[str, Any]]) -> tuple[str, ...]:
    until = _end_of(e, save)
    complete = next((s["at"] for s in statuses if _is_complete(s) and _is_of(s, save, until)), None)
    commit = next((c for c in e.commits if c.form == "zero" and e.save_of(c) is save), None)
    converted = next((x["at"] for x in e.looks("appeared") if _is_conversion(x, save, until)), None)
    size = sum(size for size, _ in save.files.values())
    return (
        save.tag,
        f"{save.run}, {e.starts[save.run]['world_size']} ranks",
        _after(save, complete),
        _after(save, commit.created if commit else None),
        _after(save, converted),
        f"{size / 1e6:.0f}",
        _where(e, save, statuses),
    )


def _end_of(e: Evidence, save: Save) -> float:
    """When the save's tag was over on its node: the next save under the same tag, or never."""
    return min((s.at for s in e.saves if s.tag == save.tag and s.at > save.at), default=float("inf"))


def _is_of(line: dict[str, Any], save: Save, until: float) -> bool:
    return bool(line["tag"] == save.tag and save.at - 1 <= line["at"] < until)


def _is_complete(line: dict[str, Any]) -> bool:
    return line["state"] not in (None, "discovered", "incomplete", "writing", "resaving")


def _is_conversion(look: dict[str, Any], save: Save, until: float) -> bool:
    return bool(
        look["place"] == "derived/universal" and look["name"] == save.tag and save.at < look["at"] < until
    )


def _after(save: Save, at: float | None) -> str:
    return "-" if at is None else f"{max(0.0, at - save.at):.1f}"


def _where(e: Evidence, save: Save, statuses: list[dict[str, Any]]) -> str:
    parts = []
    commit = next((c for c in e.commits if c.form == "zero" and e.save_of(c) is save), None)
    if commit is not None:
        retired = [a.reason for a in e.audit if a.action == "retire" and a.tag == save.tag]
        parts.append("NAS" if commit.gone is None else f"NAS until: {'; '.join(retired[:1])}")
    folder = e.save_dir / save.tag
    lost = any(line["at"] > save.at for line in e.driver_lines("wipe"))
    if folder.is_dir() and (not lost or commit is not None):
        keep = [line["keep"] for line in statuses if line["tag"] == save.tag]
        parts.append(f"node ({', '.join(map(str, keep[-1]))})" if keep and keep[-1] else "node")
    elif (
        removed := next((a for a in e.audit if a.action == "prune" and a.tag == save.tag), None)
    ) is not None:
        parts.append(f"node until: {removed.reason}")
    elif lost:
        parts.append("lost with the node" if commit is None else "node until it was replaced")
    return " · ".join(parts) or "-"


def promise_table(document: dict[str, Any]) -> Table:
    """The judge's verdict.json as a table."""
    table = Table(title="promises, as a judge that is not ckptd found them")
    table.add_column("")
    table.add_column("promise")
    table.add_column("checked", justify="right")
    table.add_column("verdict")
    for row in document["promises"]:
        verdict = "[green]held[/]" if row["held"] else "[red]BROKEN[/]"
        if row["failures"]:
            verdict += f": {row['failures'][0]}"
        table.add_row(row["promise"], row["text"], f"{row['checked']} {row['unit']}", verdict)
    return table
