"""Draws what happened: losses of interrupted and uninterrupted training, and the life of each checkpoint.

matplotlib is imported inside the functions, with a backend that needs no display.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from examples.demo.evidence import commit_of, life_of
from examples.demo.report import complete_at, pruned_at

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from examples.demo.evidence import Evidence, Save

COLOURS = {
    "save": "#4c72b0",
    "upload": "#dd8452",
    "local": "#c8c8c8",
    "commit": "#55a868",
    "universal": "#8172b3",
    "event": "#c44e52",
}
NAMES = {"first": "before the crash"}
RUN_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")
EVENTS = {
    "kill-daemon": "kill -9 ckptd in mid-upload",
    "remote-away": "no way to the remote",
    "kill-trainer": "kill -9 training in mid-save",
    "wipe": "node replaced",
    "resume": "ckptd resume",
}


def _figure(rows: int, height: float) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, 1, figsize=(8.5, height), layout="constrained", squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes[:, 0]


def draw_losses(path: Path, runs: Mapping[str, Mapping[int, float]], tolerance: float) -> None:
    """Losses by step of every run (above), and their distance from the run `reference` (below)."""
    figure, (above, below) = _figure(2, 6)
    reference = runs["reference"]
    above.plot(list(reference), list(reference.values()), label="uninterrupted", color="#b0b0b0", linewidth=5)
    for number, (name, losses) in enumerate((n, r) for n, r in runs.items() if n != "reference"):
        style = {"label": NAMES.get(name, name), "color": RUN_COLOURS[number], "marker": ".", "linewidth": 1}
        above.plot(list(losses), list(losses.values()), **style)
        shared = [step for step in losses if step in reference]
        below.plot(shared, [abs(losses[step] - reference[step]) for step in shared], **style)
    above.set_ylabel("loss")
    above.legend()
    below.axhline(tolerance, color=COLOURS["event"], linestyle="--", label=f"allowed: {tolerance:g}")
    below.set_yscale("symlog", linthresh=1e-6)
    below.set_ylim(bottom=0)
    below.set_ylabel("|loss - uninterrupted|")
    below.set_xlabel("step")
    below.legend()
    figure.savefig(path, dpi=165)


def draw_timeline(path: Path, e: Evidence, statuses: list[dict[str, Any]]) -> None:
    """One row per save: saved, complete, uploaded, committed, deleted; faults as vertical lines.

    `statuses` are the changes that status.json showed: at, tag, state, upload_started_at.
    """
    figure, (axes,) = _figure(1, 2.6 + 0.3 * max(4, len(e.saves)))
    zero = min([*(s["at"] for s in e.starts.values()), *(save.at for save in e.saves)])
    labels = []
    for row, save in enumerate(e.saves):
        labels.append(save.tag + ("" if save.run == "first" else " (resumed)"))
        _draw_save(axes, row, e, save, statuses, zero)
    steps = [at - zero for at in e.steps]
    axes.plot(steps, [len(labels)] * len(steps), "|", color=COLOURS["save"], markersize=5)
    happened = [kind for kind in EVENTS if e.driver_lines(kind)]
    for number, kind in enumerate(happened):
        for line in e.driver_lines(kind):
            at = line["at"] - zero
            axes.axvline(at, color=COLOURS["event"], linestyle=":", linewidth=1.5)
            if kind == "remote-away":
                axes.axvspan(line["begin"] - zero, at, color=COLOURS["event"], alpha=0.12)
            text = axes.text(at, -0.9 - 0.7 * number, f" {EVENTS[kind]}", color=COLOURS["event"], fontsize=9)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.set_yticks([*range(len(labels)), len(labels)], [*labels, "training steps"], fontsize=9)
    axes.set_ylim(len(labels) + 0.7, -1.2 - 0.7 * len(happened))
    axes.set_xlabel("seconds")
    figure.suptitle(_finding(e), fontweight="bold")
    figure.legend(*_once_each(axes), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=165)


def _finding(e: Evidence) -> str:
    """Say how many saves were committed, and how many left the node before that."""
    ends = [(commit_of(e, save), pruned_at(e, save)) for save in e.saves]
    early = sum(gone is not None and (commit is None or gone[0] < commit.created) for commit, gone in ends)
    committed = sum(commit is not None for commit, _ in ends)
    return f"{len(ends)} saves of two runs: {committed} committed, {early} deleted on the node before that"


def _draw_save(
    axes: Any, row: int, e: Evidence, save: Save, statuses: list[dict[str, Any]], zero: float
) -> None:
    low, high = life_of(e, save)
    pruned = pruned_at(e, save)
    until = min(high, pruned[0] if pruned else high, max(line["at"] for line in e.driver))
    left, width = save.at - zero, until - save.at
    axes.barh(row, width, left=left, height=0.22, color=COLOURS["local"], label="on the node")
    begun = [
        datetime.fromisoformat(s["upload_started_at"]).timestamp()
        for s in statuses
        if s["tag"] == save.tag and low <= s["at"] < high and s["upload_started_at"]
    ]
    commit, universal = commit_of(e, save), commit_of(e, save, "universal")
    if begun:
        end = commit.created if commit is not None else until
        left, width = min(begun) - zero, end - min(begun)
        axes.barh(row, width, left=left, height=0.45, color=COLOURS["upload"], label="upload")
    marks = (
        (save.at, "|", "saved", COLOURS["save"]),
        (complete_at(e, save, statuses), ".", "complete", "black"),
        (commit.created if commit else None, "D", "committed", COLOURS["commit"]),
        (universal.created if universal else None, "d", "universal committed", COLOURS["universal"]),
        (pruned[0] if pruned else None, "x", "deleted on the node", COLOURS["event"]),
        (commit.gone if commit else None, "X", f"deleted {e.where}", "black"),
    )
    for at, shape, label, colour in marks:
        if at is not None:
            axes.plot([at - zero], [row], shape, label=label, color=colour, markersize=6)


def _once_each(axes: Any) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    first = {label: handle for handle, label in reversed(list(zip(handles, labels, strict=True)))}
    return list(first.values()), list(first)
