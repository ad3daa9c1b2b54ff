"""Draws what happened: losses of interrupted and uninterrupted training, and the life of each checkpoint.

matplotlib is imported inside the functions, with a backend that needs no display.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptd.quickstart.evidence import Evidence

COLOURS = {"save": "#4c72b0", "upload": "#dd8452", "local": "#b0b0b0", "event": "#c44e52"}


def _figure(rows: int, height: float) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, 1, figsize=(11, height), layout="constrained")
    return figure, axes


def draw_losses(path: Path, runs: Mapping[str, Mapping[int, float]], tolerance: float) -> None:
    """Losses by step of every run (above), and their distance from the run `reference` (below)."""
    figure, (above, below) = _figure(2, 7)
    reference = runs["reference"]
    for name, losses in runs.items():
        style = {"linewidth": 4, "alpha": 0.35} if name == "reference" else {"marker": ".", "linewidth": 1}
        above.plot(list(losses), list(losses.values()), label=name, **style)
        if name != "reference":
            shared = [step for step in losses if step in reference]
            distance = [abs(losses[step] - reference[step]) for step in shared]
            below.plot(shared, distance, marker=".", linewidth=1, label=name)
    above.set_ylabel("loss")
    above.legend()
    below.axhline(tolerance, color=COLOURS["event"], linestyle="--", label=f"allowed: {tolerance:g}")
    below.set_yscale("symlog", linthresh=1e-6)
    below.set_ylim(bottom=0)
    below.set_ylabel("|loss - uninterrupted|")
    below.set_xlabel("step")
    below.legend()
    figure.savefig(path, dpi=120)


def draw_timeline(path: Path, e: Evidence, statuses: list[dict[str, Any]]) -> None:
    """One row per save: saved, complete, uploaded, committed, converted, removed; faults as vertical lines.

    `statuses` are the changes of state that status.json showed: at, tag, state.
    """
    figure, axes = _figure(1, 1.8 + 0.42 * max(4, len(e.saves)))
    zero = min((s["at"] for s in e.starts.values()), default=0.0)
    zero = min([zero, *(save.at for save in e.saves)])
    labels = []
    for row, save in enumerate(e.saves):
        labels.append(save.tag + ("" if save.run == "first" else " (resumed)"))
        _draw_save(axes, row, e, save, statuses, zero)
    _draw_steps(axes, e, len(labels), zero)
    for kind, text in (
        ("kill-daemon", "kill -9 ckptd"),
        ("kill-trainer", "kill -9 training"),
        ("resume", "resume"),
    ):
        for line in e.driver_lines(kind):
            axes.axvline(line["at"] - zero, color=COLOURS["event"], linestyle=":", linewidth=1.5)
            axes.text(line["at"] - zero, -0.9, f" {text}", color=COLOURS["event"], fontsize=8)
    axes.set_yticks([*range(len(labels)), len(labels)], [*labels, "training steps"], fontsize=8)
    axes.set_ylim(len(labels) + 0.7, -1.3)
    axes.set_xlabel("seconds")
    axes.legend(*_once_each(axes), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.savefig(path, dpi=120)


def _draw_save(
    axes: Any, row: int, e: Evidence, save: Any, statuses: list[dict[str, Any]], zero: float
) -> None:
    def mark(at: float, shape: str, label: str, colour: str) -> None:
        axes.plot([at - zero], [row], shape, label=label, color=colour, markersize=7)

    mine = [s for s in statuses if s["tag"] == save.tag and s["at"] >= save.at - 1]
    complete = next((s["at"] for s in mine if s["state"] not in ("discovered", "incomplete")), None)
    uploading = next((s["at"] for s in mine if s["uploading"]), None)
    commit = next((c for c in e.commits if c.form == "zero" and e.save_of(c) is save), None)
    universal = next(
        (c for c in e.commits if c.form == "universal" and c.tag == save.tag and c.created > save.at), None
    )
    gone = next((a.at for a in e.audit if a.action == "prune" and a.tag == save.tag and a.at > save.at), None)
    end = max([save.at, *(line["at"] for line in e.driver)])
    wiped = next((x["at"] for x in e.driver_lines("wipe") if x["at"] > save.at), None)
    until = min(x for x in (gone, wiped if save.run == "first" else None, end) if x is not None)
    axes.barh(
        row, until - save.at, left=save.at - zero, height=0.25, color=COLOURS["local"], label="on the node"
    )
    mark(save.at, "|", "saved", COLOURS["save"])
    if complete is not None:
        mark(complete, ".", "complete", "black")
    if commit is not None:
        begin = uploading if uploading is not None and uploading < commit.created else commit.created
        width = commit.created - begin
        axes.barh(row, width, left=begin - zero, height=0.5, color=COLOURS["upload"], label="upload")
        mark(commit.created, "D", "committed", "#55a868")
    converted = [
        x["at"]
        for x in e.looks("appeared")
        if x["place"] == "derived/universal" and x["name"] == save.tag and x["at"] > save.at
    ]
    if converted:
        mark(converted[0], "^", "converted", "#8172b3")
    if universal is not None:
        mark(universal.created, "d", "universal committed", "#8172b3")
    if gone is not None:
        mark(gone, "x", "pruned on the node", COLOURS["event"])


def _draw_steps(axes: Any, e: Evidence, row: int, zero: float) -> None:
    for line in e.steps:
        axes.plot([line - zero], [row], "|", color=COLOURS["save"], markersize=5)


def _once_each(axes: Any) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    first = {label: handle for handle, label in reversed(list(zip(handles, labels, strict=True)))}
    return list(first.values()), list(first)
