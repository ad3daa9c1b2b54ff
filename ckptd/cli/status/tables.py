"""The tables of `ckptd status`, from the published document alone: strings, numbers, no models.

Apart from status_cmd.py, which finds and judges the document; rich is imported only when a table is made.
"""

from __future__ import annotations

from typing import Any

from ckptd.base import humanize
from ckptd.cli.output import cell, cells

ROWS = 20
"""Settled checkpoints that are shown without --retention."""


def ago(seconds: float | None) -> str:
    """Return a span in words; `?`: not known."""
    return "?" if seconds is None else humanize.ago(seconds)


def size_of(count: float) -> str:
    """Return bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def checkpoints_table(job: dict[str, Any], *, retention: bool, is_alive: bool = True) -> Any:
    """Show the checkpoints on this node and their state in each remote; with `retention` why each is kept.

    Not `is_alive`: the daemon that published it is gone, and nothing is under way any more.
    """
    from rich.table import Table

    remotes = list(dict.fromkeys(name for c in job["checkpoints"] for name in c["remotes"]))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in (
        "tag",
        "step",
        "state",
        "size",
        "local",
        *remotes,
        "kept here because" if retention else "note",
    ):
        table.add_column(cell(title), justify="right" if title in ("step", "size") else "left")
    shown, left_out = (job["checkpoints"], "") if retention else _worth_a_row(job["checkpoints"])
    if left_out:
        table.caption = f"and {left_out} (--retention shows them)"
        table.caption_justify = "left"
    for checkpoint in shown:
        local = checkpoint["local"]
        here = ("zero" if local["present"] else "") + (" +universal" if local["universal"] == "ready" else "")
        here += " +hold" if local["held"] else ""
        forms = [_forms(checkpoint["remotes"].get(name, {}), is_alive=is_alive) for name in remotes]
        note = _kept(checkpoint) if retention else (checkpoint["reason"] or "")
        if checkpoint.get("next_step"):
            note = f"{note}; {checkpoint['next_step']} {_does(checkpoint)}"
        if checkpoint.get("kind") == "model-only":
            note = f"only a model: nothing to resume from {note}".strip()
        if checkpoint.get("complete_for") == "node":
            note = f"complete for this node, not for the job {note}".strip()
        if checkpoint["pinned"] and not retention:
            note = f"pinned {note}".strip()
        step = f"{checkpoint['step']}" if checkpoint["step"] is not None else "?"
        if checkpoint["branch"] and checkpoint["branch"] > 1:
            step = f"{step} (branch {checkpoint['branch']})"
        size = size_of(checkpoint["bytes"])
        state = state_of(checkpoint, is_alive=is_alive)
        table.add_row(*cells(checkpoint["tag"], step, state, size, here.strip(), *forms, note))
    for place, column in enumerate(table.columns):
        # a tag that is cut off cannot be typed: on a narrow terminal the others give way
        column.no_wrap, column.overflow = place in (0, 1, 3), "fold"
    return table


def _worth_a_row(checkpoints: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Choose the newest and all that is not settled; count the others: a long table hides its headline."""
    here = [c for c in checkpoints if not _is_gone(c)]
    shown = [c for place, c in enumerate(here) if place < ROWS or not _is_settled(c)]
    older, gone = len(here) - len(shown), len(checkpoints) - len(here)
    parts = (f"{older} older ones, safe" if older else "", f"{gone} that left this node" if gone else "")
    return shown, " and ".join(part for part in parts if part)


def _is_settled(checkpoint: dict[str, Any]) -> bool:
    """Tell whether it is committed, nothing of it is under way and nothing is to be said about it."""
    forms = {form["state"] for forms in checkpoint["remotes"].values() for form in forms.values()}
    is_quiet = not checkpoint["reason"] and not checkpoint.get("next_step")
    return checkpoint["state"] == "committed" and is_quiet and forms <= {"committed", "retired", "none"}


def _does(checkpoint: dict[str, Any]) -> str:
    """Return the effect of the command that is printed beside a checkpoint."""
    if checkpoint["state"] == "suspect":
        return "takes it as one save"
    return "puts it right" if "--repair" in checkpoint["next_step"] else "removes it"


def _is_gone(checkpoint: dict[str, Any]) -> bool:
    """Tell whether it is neither here nor held by a clone."""
    return not checkpoint["local"]["present"] and not checkpoint["local"]["held"]


def _kept(checkpoint: dict[str, Any]) -> str:
    """Return why a checkpoint stays on this node, or why it is deleted."""
    goes = checkpoint.get("goes")
    return f"delete: {goes}" if goes else "; ".join(checkpoint["keep"])


def remote_shown(remote: dict[str, Any]) -> str:
    """Name a remote: by its URL where it has no name of its own and the daemon is new enough to tell it."""
    return f"remote {remote['name']}" if remote["name"] != "remote" else remote.get("url") or "remote"


def remote_table(remote: dict[str, Any]) -> Any:
    """Return a table of what a remote holds, newest first: keep, delete or what is left, and why."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", title=cell(remote_shown(remote)))
    table.title_justify = "left"
    for title in ("tag", "gen", "step", "forms", "verdict", "because"):
        table.add_column(title, justify="right" if title in ("gen", "step") else "left")
    for held in remote.get("held", []):
        step = f"{held['step']} (branch {held['branch']})" if held["branch"] > 1 else f"{held['step']}"
        verdict = held["verdict"]
        if verdict == "step-down":
            verdict = f"leaves {', '.join(held['leaves'])}"
        why = "; ".join(held["why"])
        if held["kind"] != "resumable":
            why = f"{held['kind'].replace('-', ' ')}: nothing to resume from; {why}"
        table.add_row(
            *cells(held["tag"], str(held["generation"]), step, ", ".join(held["forms"]), verdict, why)
        )
    if not remote.get("held"):
        table.caption = "holds no checkpoint" if remote["attached"] else "not attached: not known"
    return table


def state_of(checkpoint: dict[str, Any], *, is_alive: bool) -> str:
    """Name the state; a daemon that is gone saves and uploads nothing."""
    return "not sent" if checkpoint["state"] == "uploading" and not is_alive else str(checkpoint["state"])


def _forms(forms: dict[str, Any], *, is_alive: bool) -> str:
    parts = []
    for form, state in forms.items():
        if state["state"] == "none":
            continue
        text = "uploading" if state["state"] == "shipping" else state["state"]
        if text == "uploading" and state["bytes_total"]:
            text = f"{100 * state['bytes_done'] / state['bytes_total']:.0f} %"
            if not is_alive:
                text = f"stopped at {text}"
            elif state.get("eta_seconds") is not None:
                text += f" (in {ago(state['eta_seconds'])})"
        parts.append(text if form == "zero" else f"{form} {text}")
    return ", ".join(parts)
