"""Judge the checkpoints of a published status: which are worth a row, and what is said of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptd.maintenance.status.words import state_of

ROWS, ROWS_THERE = 20, 5
"""Settled checkpoints that are shown where not all are asked for: here, and of those only remotes hold."""
_OBVIOUS = ("complete", "committed", "uploading", "pruned", "vanished")
"""States that the columns of the forms show, here and in the remotes."""
_WRONG = ("suspect", "torn re-save", "incomplete", "refused", "leftover")
_SIGNS = {"committed": ("✓", "green"), "waiting": ("○", "dim"), "new": ("○", "dim"), "retired": ("–", "dim")}


def sign_of(state: str) -> tuple[str, str]:
    """Return sign and colour for the state of a form in a remote; what went wrong is a red ✗."""
    return _SIGNS.get(state, ("✗", "red"))


def checkpoints_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the published checkpoints, and as such rows those that only remotes hold: after the loss of a
    node, what it had.
    """
    known = {(c["tag"], c["branch"], c["step"]) for c in job["checkpoints"]}
    # what was not sealed yet may be that very save
    open_tags = {c["tag"] for c in job["checkpoints"] if c["branch"] is None and not is_wrong(c)}
    there: dict[tuple[str, int, int], dict[str, Any]] = {}
    for remote in job.get("remotes", ()):
        for held in remote.get("held", ()):
            key = (held["tag"], held["branch"], held["step"])
            if key not in known and held["tag"] not in open_tags:
                row = there.setdefault(key, _only_there(held))
                row["remotes"][remote["name"]] = {form: {"state": "committed"} for form in held["forms"]}
    newest_first = sorted(there.values(), key=lambda row: (row["branch"], row["step"]), reverse=True)
    return [*job["checkpoints"], *newest_first]


def _only_there(held: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a checkpoint that a remote holds and this node never had, or has forgotten."""
    same = {key: held[key] for key in ("tag", "generation", "branch", "step", "kind")}
    here = {"present": False, "universal": "none", "held": False}
    rest = {"reason": None, "next_step": None, "keep": (), "goes": None, "pinned": False}
    return {**same, **rest, "state": "committed", "bytes": held.get("bytes"), "local": here, "remotes": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Divide checkpoints into those that are worth a row at once, and the others."""

    shown: list[dict[str, Any]]
    older: list[dict[str, Any]]
    """Here, and settled."""
    there: list[dict[str, Any]]
    """Only remotes hold them."""
    gone: list[dict[str, Any]]
    """They left this node, and no remote holds them."""

    @property
    def left_out(self) -> str:
        """Count those that have no row; empty: there is none."""
        parts = (
            f"{len(self.older)} older ones, safe" if self.older else "",
            f"{len(self.there)} more that only a remote holds" if self.there else "",
            f"{len(self.gone)} that left this node" if self.gone else "",
        )
        return " and ".join(part for part in parts if part)


def worth_a_row(checkpoints: list[dict[str, Any]]) -> Rows:
    """Choose the newest here with all that is not settled, and the newest that only remotes hold."""
    here = [c for c in checkpoints if not is_gone(c)]
    there = [c for c in checkpoints if is_gone(c) and is_there(c)]
    shown = [c for place, c in enumerate(here) if place < ROWS or not is_settled(c)]
    older = [c for place, c in enumerate(here) if place >= ROWS and is_settled(c)]
    gone = [c for c in checkpoints if is_gone(c) and not is_there(c)]
    return Rows(shown=[*shown, *there[:ROWS_THERE]], older=older, there=there[ROWS_THERE:], gone=gone)


def is_there(checkpoint: dict[str, Any]) -> bool:
    """Tell whether a remote holds any form of it."""
    states = [form["state"] for forms in checkpoint["remotes"].values() for form in forms.values()]
    return "committed" in states


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
