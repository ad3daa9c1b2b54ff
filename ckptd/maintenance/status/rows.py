"""Judge the checkpoints of a published status: which are worth a row, and what is said of each."""

from __future__ import annotations

from typing import Any

from ckptd.maintenance.status.words import state_of

ROWS = 20
"""Settled checkpoints that are shown where not all are asked for."""
_OBVIOUS = ("complete", "committed", "uploading", "pruned", "vanished")
"""States that the columns of the forms show, here and in the remotes."""
_WRONG = ("suspect", "torn re-save", "incomplete", "refused", "leftover")
_SIGNS = {"committed": ("✓", "green"), "waiting": ("○", "dim"), "new": ("○", "dim"), "retired": ("–", "dim")}


def sign_of(state: str) -> tuple[str, str]:
    """Return sign and colour for the state of a form in a remote; what went wrong is a red ✗."""
    return _SIGNS.get(state, ("✗", "red"))


def worth_a_row(
    checkpoints: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide into the newest with all that is not settled, the older ones, and those that left this node."""
    here = [c for c in checkpoints if not is_gone(c)]
    shown = [c for place, c in enumerate(here) if place < ROWS or not is_settled(c)]
    older = [c for place, c in enumerate(here) if place >= ROWS and is_settled(c)]
    return shown, older, [c for c in checkpoints if is_gone(c)]


def left_out_in_words(older: list[dict[str, Any]], gone: list[dict[str, Any]]) -> str:
    """Count the checkpoints that have no row; empty: there is none."""
    parts = (
        f"{len(older)} older ones, safe" if older else "",
        f"{len(gone)} that left this node" if gone else "",
    )
    return " and ".join(part for part in parts if part)


def is_settled(checkpoint: dict[str, Any]) -> bool:
    """Tell whether it is committed, nothing of it is under way and nothing is to be said about it."""
    forms = {form["state"] for forms in checkpoint["remotes"].values() for form in forms.values()}
    is_quiet = not checkpoint["reason"] and not checkpoint.get("next_step")
    return checkpoint["state"] == "committed" and is_quiet and forms <= {"committed", "retired", "none"}


def is_gone(checkpoint: dict[str, Any]) -> bool:
    """Tell whether it is neither here nor held by a clone."""
    return not checkpoint["local"]["present"] and not checkpoint["local"]["held"]


def is_wrong(checkpoint: dict[str, Any]) -> bool:
    """Tell whether it will not be safe as it is."""
    return checkpoint["state"] in _WRONG


def marks_of(checkpoint: dict[str, Any], *, says_pinned: bool = True) -> str:
    """Name the state, where no other column shows it, and say whether it is pinned."""
    marks = [] if checkpoint["state"] in _OBVIOUS else [state_of(checkpoint, is_alive=True)]
    marks += ["pinned"] * (checkpoint["pinned"] and says_pinned)
    return ", ".join(marks)


def note_of(checkpoint: dict[str, Any], *, retention: bool = False) -> tuple[str, str]:
    """Say what is wrong with a checkpoint, or with `retention` why it is kept; and what to type."""
    if retention:
        parts = [why_kept(checkpoint)]
    else:
        parts = [checkpoint["reason"] or ""]
        parts += [
            f"{name}: {state['reason']}"
            for name, forms in checkpoint["remotes"].items()
            for state in forms.values()
            if state["state"] in ("failed", "refused") and state.get("reason")
        ]
    if checkpoint.get("kind") == "model-only":
        parts.append("only a model: nothing to resume from")
    if checkpoint.get("complete_for") == "node":
        parts.append("complete for this node, not for the job")
    command = f"{checkpoint['next_step']} {_does(checkpoint)}" if checkpoint.get("next_step") else ""
    return "; ".join(dict.fromkeys(part for part in parts if part)), command


def why_kept(checkpoint: dict[str, Any]) -> str:
    """Say why it is kept on this node, or is deleted; empty: neither is known."""
    goes = checkpoint.get("goes")
    return f"delete: {goes}" if goes else "; ".join(checkpoint["keep"])


def _does(checkpoint: dict[str, Any]) -> str:
    """Return the effect of the command that is printed beside a checkpoint."""
    if checkpoint["state"] == "suspect":
        return "takes it as one save"
    return "puts it right" if "--repair" in checkpoint["next_step"] else "removes it"
