"""The tables of `ckptd status`, from the published document alone: strings, numbers, no models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptd.base.humanize import ago, size_of
from ckptd.maintenance.status.words import forms_here, remote_shown, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.text import Text

    from ckptd.cli.status.drawing import Drawing

ROWS = 20
"""Settled checkpoints that are shown without --retention."""
_OBVIOUS = ("complete", "committed", "uploading", "pruned", "vanished")
"""States that the columns of the forms show, here and in the remotes."""
_WRONG = ("suspect", "torn re-save", "incomplete", "refused", "leftover")
_SIGNS = {"committed": ("✓", "green"), "waiting": ("○", "dim"), "new": ("○", "dim"), "retired": ("–", "dim")}
"""State of a form in a remote → sign and colour; every other state is ✗ and a word."""
FULL, SHORT, SIGNS, BARE = range(4)
"""How much room a row takes: whole words; short ones; signs for forms; no sizes, no bars."""
LONGEST_TITLE = 10
"""Columns of a remote's title where there is little room."""


def checkpoints_table(job: dict[str, Any], *, retention: bool, is_alive: bool = True) -> Drawing:
    """Show the checkpoints on this node and their state in each remote; with `retention` why each is kept.

    Not `is_alive`: the daemon that published it is gone, and nothing is under way any more.
    """
    from ckptd.cli.output import cell
    from ckptd.cli.status.drawing import Drawing, beside_rows, explained, prose, table

    remotes = list(dict.fromkeys(name for c in job["checkpoints"] for name in c["remotes"]))
    shown, left_out = (job["checkpoints"], "") if retention else _worth_a_row(job["checkpoints"])
    told = [_note(c, retention=retention) for c in shown]
    notes = ["; ".join(filter(None, one)) for one in told]
    once = _once(shown, told)

    def fitting(width: int) -> tuple[list[Text], list[str]]:
        """Choose the most that fits; and the remotes that do not."""
        for level in (FULL, SHORT, SIGNS):
            if _fits(made := _laid_out(level, remotes), width):
                return made, []
        count = len(remotes)
        while not _fits(made := _laid_out(BARE, remotes[:count]), width) and count > 1:
            count -= 1
        return made, remotes[count:]

    def _laid_out(level: int, names: Sequence[str]) -> list[Text]:
        heads = [name if level < SIGNS else _cut(name) for name in names]
        titles = ["tag", "step", "size", "", "local", *heads]
        rows = [_row(c, names, level, retention=retention, is_alive=is_alive) for c in shown]
        return table(titles, rows, right=("step", "size"))

    def lines(console: Console, width: int) -> Iterable[Text]:
        found, hidden = fitting(width)
        if retention:
            yield from explained(console, width, found, ["kept here because", *notes])
        elif len(once) == sum(map(bool, notes)) and (
            beside := beside_rows(width, found, ["note" if once else "", *notes])
        ):
            yield from beside
        else:
            yield from found
            for note, command in once:
                yield from prose(note).lines(console, width)
                yield from [cell(f"    → {command}")] if command else ()
        if hidden:
            text = f"a wider terminal shows {', '.join(hidden)}"
            yield from prose(text, "dim").lines(console, width)
        if left_out:
            yield from prose(f"and {left_out} (--retention shows them)", "dim").lines(console, width)

    return Drawing(lines)


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_TITLE else f"{name[: LONGEST_TITLE - 1]}…"


def _fits(lines: Sequence[Text], width: int) -> bool:
    return max(line.cell_len for line in lines) <= width


def _row(
    checkpoint: dict[str, Any], remotes: Sequence[str], level: int, *, retention: bool, is_alive: bool
) -> list[Text]:
    """Return the cells of one checkpoint."""
    from ckptd.cli.output import cell

    step = "?" if checkpoint["step"] is None else str(checkpoint["step"])
    branch = checkpoint["branch"] or 1
    is_told = level >= SIGNS and checkpoint["tag"].endswith(step)
    if branch > 1 and level < BARE:
        step = f"branch {branch}" if is_told else f"{step} (branch {branch})"
    elif is_told:
        step = ""
    here = " ".join(_short(form, level) for form in forms_here(checkpoint)) or "–"
    is_wrong = checkpoint["state"] in _WRONG
    return [
        cell(checkpoint["tag"]),
        cell(step),
        cell(size_of(checkpoint["bytes"]) if level < BARE else ""),
        cell(_marks(checkpoint, retention=retention), "red" if is_wrong else ""),
        cell(here if level < BARE else ""),
        *(_in_remote(checkpoint["remotes"].get(name, {}), level, is_alive=is_alive) for name in remotes),
    ]


def _marks(checkpoint: dict[str, Any], *, retention: bool) -> str:
    """Name the state, where no other column shows it, and say whether it is pinned."""
    marks = [] if checkpoint["state"] in _OBVIOUS else [state_of(checkpoint, is_alive=True)]
    marks += ["pinned"] * (checkpoint["pinned"] and not retention)
    return ", ".join(marks)


def _short(form: str, level: int) -> str:
    return form if level == FULL else {"universal": "univ"}.get(form, form.removeprefix("weights-"))


def _in_remote(forms: dict[str, Any], level: int, *, is_alive: bool) -> Text:
    """Return the cell of one remote: a sign and a name for each form, a bar for what is uploaded."""
    from rich.text import Text

    told = {form: state for form, state in forms.items() if state["state"] != "none"}
    if told.get("zero", {}).get("state") == "shipping":
        # what waits for the upload that is shown is no news
        told = {form: state for form, state in told.items() if state["state"] not in ("waiting", "new")}
    made = [
        _upload(form, state, level, is_alive=is_alive)
        if state["state"] == "shipping"
        else _settled(form, state, level)
        for form, state in told.items()
    ]
    if level >= SIGNS and len({one.plain for one in made}) == 1:
        made = made[:1]
    return Text({FULL: "  ", BARE: ""}.get(level, " ")).join(made) if made else Text("–")


def _settled(form: str, state: dict[str, Any], level: int) -> Text:
    from ckptd.cli.output import cell

    sign, style = _SIGNS.get(state["state"], ("✗", "red"))
    name = f" {_short(form, level)}" if level < SIGNS else ""
    word = f" {state['state']}" if sign == "✗" and level < BARE else ""
    return cell(sign, style).append_text(cell(f"{name}{word}", style if style != "green" else ""))


def _upload(form: str, state: dict[str, Any], level: int, *, is_alive: bool) -> Text:
    from ckptd.cli.output import cell
    from ckptd.cli.status.drawing import bar

    name = "" if form == "zero" or level >= SIGNS else f"{_short(form, level)} "
    part = state["bytes_done"] / state["bytes_total"] if state["bytes_total"] else None
    percent = "" if part is None else f"{100 * part:.0f} %"
    if not is_alive:
        return cell("✗" if level == BARE else f"✗ {name}stopped at {percent or '?'}", "red")
    if part is None or level == BARE:
        return cell(f"{name}{percent or 'uploading'}", "yellow")
    is_timed = level < SIGNS and state.get("eta_seconds") is not None
    eta = f", {ago(state['eta_seconds'])}" if is_timed else ""
    width = (10 if level == FULL else 5) - (2 if name else 0)
    return cell(f"{name}{bar(part, width)} {percent:>5}", "yellow").append_text(cell(eta))


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


def _note(checkpoint: dict[str, Any], *, retention: bool) -> tuple[str, str]:
    """Say what is wrong with a checkpoint, or with `retention` why it is kept; and what to type."""
    if retention:
        goes = checkpoint.get("goes")
        parts = [f"delete: {goes}" if goes else "; ".join(checkpoint["keep"])]
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


def _once(checkpoints: Sequence[dict[str, Any]], notes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return every note once, with the checkpoints that it is about."""
    about: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for checkpoint, (note, command) in zip(checkpoints, notes, strict=True):
        if note or command:
            tag = checkpoint["tag"]
            named = re.compile(rf"(?<!\w){re.escape(tag)}(?!\w)")
            alike = named.sub("TAG", note), named.sub("TAG", command)
            about.setdefault(alike, []).append((tag, note, command))
    found = []
    for (note, command), told in about.items():
        tag, own_note, own_command = told[0]
        if len(told) == 1:
            found.append((f"{tag}: {own_note}" if own_note else tag, own_command))
        else:
            who = f"{tag} and {len(told) - 1} more"
            found.append((f"{who}: {note}" if note else who, command))
    return found


def _does(checkpoint: dict[str, Any]) -> str:
    """Return the effect of the command that is printed beside a checkpoint."""
    if checkpoint["state"] == "suspect":
        return "takes it as one save"
    return "puts it right" if "--repair" in checkpoint["next_step"] else "removes it"


def _is_gone(checkpoint: dict[str, Any]) -> bool:
    """Tell whether it is neither here nor held by a clone."""
    return not checkpoint["local"]["present"] and not checkpoint["local"]["held"]


def remote_table(remote: dict[str, Any]) -> Drawing:
    """Show what a remote holds, newest first: keep, delete or what is left, and why."""
    from ckptd.cli.output import cell, cells
    from ckptd.cli.status.drawing import INDENT, Drawing, explained, prose, table

    rows, notes = [], []
    for held in remote.get("held", []):
        step = f"{held['step']} (branch {held['branch']})" if held["branch"] > 1 else f"{held['step']}"
        generation = str(held["generation"]) if held["generation"] > 1 else ""
        verdict = held["verdict"]
        if verdict == "step-down":
            verdict = f"leaves {', '.join(held['leaves'])}"
        why = "; ".join(held["why"])
        if held["kind"] != "resumable":
            why = f"{held['kind'].replace('-', ' ')}: nothing to resume from; {why}"
        rows.append(cells(held["tag"], generation, step, ", ".join(held["forms"]), verdict))
        notes.append(why)

    def lines(console: Console, width: int) -> Iterable[Text]:
        yield cell(f"{INDENT}{remote_shown(remote)}", "italic")
        if not rows:
            text = "holds no checkpoint" if remote["attached"] else "not attached: not known"
            yield from prose(text, "dim").lines(console, width)
            return
        found = table(("tag", "gen", "step", "forms", "verdict"), rows, right=("gen", "step"))
        yield from explained(console, width, found, ["because", *notes])

    return Drawing(lines)
