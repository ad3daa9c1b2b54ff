"""Judge the checkpoints of a published status: which are worth a row, and what is said of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.maintenance.status.words import state_of
from ckptd.observe.status import CheckpointStatus, FormStatus, LocalStatus

if TYPE_CHECKING:
    from ckptd.observe.status import JobStatus

ROWS, ROWS_THERE = 20, 5
"""Settled checkpoints that are shown where not all are asked for: here, and of those only remotes hold."""
_OBVIOUS = ("complete", "committed", "uploading", "pruned", "vanished")
"""States that the columns of the forms show, here and in the remotes."""
_WRONG = ("suspect", "torn re-save", "incomplete", "refused", "leftover")
_SIGNS = {"committed": ("✓", "green"), "waiting": ("○", "dim"), "new": ("○", "dim"), "retired": ("–", "dim")}


_NOT_HERE = LocalStatus(present=False, universal="none", held=False)


@dataclass(slots=True, kw_only=True, eq=False)
class OnlyThere:
    """A checkpoint that a remote holds and this node never had, or has forgotten; as `CheckpointStatus`."""

    tag: str
    generation: int
    branch: int
    step: int
    kind: str
    bytes: int | None
    """None: not known."""
    state: str = "committed"
    local: LocalStatus = _NOT_HERE
    remotes: dict[str, dict[str, FormStatus]] = field(default_factory=dict)
    reason: None = None
    next_step: None = None
    keep: tuple[str, ...] = ()
    goes: None = None
    pinned: bool = False
    complete_for: None = None


Checkpoint = CheckpointStatus | OnlyThere


def sign_of(state: str) -> tuple[str, str]:
    """Return sign and colour for the state of a form in a remote; what went wrong is a red ✗."""
    return _SIGNS.get(state, ("✗", "red"))


def checkpoints_of(job: JobStatus) -> list[Checkpoint]:
    """Return the published checkpoints, and as such rows those that only remotes hold: after the loss of a
    node, what it had.
    """
    known = {(c.tag, c.branch, c.step) for c in job.checkpoints}
    # what was not sealed yet may be that very save
    open_tags = {c.tag for c in job.checkpoints if c.branch is None and not is_wrong(c)}
    there: dict[tuple[str, int, int], OnlyThere] = {}
    for remote in job.remotes:
        for held in remote.held:
            key = (held.tag, held.branch, held.step)
            if key not in known and held.tag not in open_tags:
                if key not in there:
                    there[key] = OnlyThere(
                        tag=held.tag,
                        generation=held.generation,
                        branch=held.branch,
                        step=held.step,
                        kind=held.kind,
                        bytes=held.bytes,
                    )
                there[key].remotes[remote.name] = {form: FormStatus(state="committed") for form in held.forms}
    newest_first = sorted(there.values(), key=lambda row: (row.branch, row.step), reverse=True)
    return [*job.checkpoints, *newest_first]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Divide checkpoints into those that are worth a row at once, and the others."""

    shown: list[Checkpoint]
    older: list[Checkpoint]
    """Here, and settled."""
    there: list[Checkpoint]
    """Only remotes hold them."""
    gone: list[Checkpoint]
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


def worth_a_row(checkpoints: list[Checkpoint]) -> Rows:
    """Choose the newest here with all that is not settled, and the newest that only remotes hold."""
    here = [c for c in checkpoints if not is_gone(c)]
    there = [c for c in checkpoints if is_gone(c) and is_there(c)]
    shown = [c for place, c in enumerate(here) if place < ROWS or not is_settled(c)]
    older = [c for place, c in enumerate(here) if place >= ROWS and is_settled(c)]
    gone = [c for c in checkpoints if is_gone(c) and not is_there(c)]
    return Rows(shown=[*shown, *there[:ROWS_THERE]], older=older, there=there[ROWS_THERE:], gone=gone)


def is_there(checkpoint: Checkpoint) -> bool:
    """Tell whether a remote holds any form of it."""
    states = [form.state for forms in checkpoint.remotes.values() for form in forms.values()]
    return "committed" in states


def is_settled(checkpoint: Checkpoint) -> bool:
    """Tell whether it is committed, nothing of it is under way and nothing is to be said about it."""
    forms = {form.state for forms in checkpoint.remotes.values() for form in forms.values()}
    is_quiet = not checkpoint.reason and not checkpoint.next_step
    return checkpoint.state == "committed" and is_quiet and forms <= {"committed", "retired", "none"}


def is_gone(checkpoint: Checkpoint) -> bool:
    """Tell whether it is neither here nor held by a clone."""
    return not checkpoint.local.present and not checkpoint.local.held


def is_wrong(checkpoint: Checkpoint) -> bool:
    """Tell whether it will not be safe as it is."""
    return checkpoint.state in _WRONG


def marks_of(checkpoint: Checkpoint, *, says_pinned: bool = True) -> str:
    """Name the state, where no other column shows it, and say whether it is pinned."""
    marks = [] if checkpoint.state in _OBVIOUS else [state_of(checkpoint.state, is_alive=True)]
    marks += ["pinned"] * (checkpoint.pinned and says_pinned)
    return ", ".join(marks)


def note_of(checkpoint: Checkpoint, *, retention: bool = False) -> tuple[str, str]:
    """Say what is wrong with a checkpoint, or with `retention` why it is kept; and what to type."""
    if retention:
        parts = [why_kept(checkpoint)]
    else:
        parts = [checkpoint.reason or ""]
        parts += [
            f"{name}: {state.reason}"
            for name, forms in checkpoint.remotes.items()
            for state in forms.values()
            if state.state in ("failed", "refused") and state.reason
        ]
    if checkpoint.kind == "model-only":
        parts.append("only a model: nothing to resume from")
    if checkpoint.complete_for == "node":
        parts.append("complete for this node, not for the job")
    command = f"{checkpoint.next_step} {_does(checkpoint)}" if checkpoint.next_step else ""
    return "; ".join(dict.fromkeys(part for part in parts if part)), command


def why_kept(checkpoint: Checkpoint) -> str:
    """Say why it is kept on this node, or is deleted; empty: neither is known."""
    goes = checkpoint.goes
    return f"delete: {goes}" if goes else "; ".join(checkpoint.keep)


def _does(checkpoint: Checkpoint) -> str:
    """Return the effect of the command that is printed beside a checkpoint."""
    if checkpoint.state == "suspect":
        return "takes it as one save"
    return "puts it right" if "--repair" in (checkpoint.next_step or "") else "removes it"
