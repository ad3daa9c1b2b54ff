"""The tables of `ckptd status`, from the published document alone: strings, numbers, no models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptd.base.humanize import ago, size_of
from ckptd.maintenance.status.rows import (
    checkpoints_of,
    is_wrong,
    marks_of,
    note_of,
    sign_of,
    worth_a_row,
)
from ckptd.maintenance.status.words import forms_here, remote_shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.text import Text

    from ckptd.cli.status.drawing import Drawing

FULL, SHORT, SIGNS, BARE = range(4)
"""Widths of a row: whole words; short ones; signs for forms; no sizes, no bars."""
LONGEST_TITLE = 10
"""Columns of a remote's title where there is little room."""


def checkpoints_table(job: dict[str, Any], *, retention: bool, is_alive: bool = True) -> Drawing:
    """Show the checkpoints on this node and their state in each remote, and the newest that only a remote
    holds; with `retention` those of this node, and why each is kept.

    Not `is_alive`: the daemon that published it is gone, and nothing is under way any more.
    """
    from ckptd.cli.output import cell
    from ckptd.cli.status.drawing import Drawing, beside_rows, explained, prose, table

    rows = worth_a_row(checkpoints_of(job))
    shown, left_out = (job["checkpoints"], "") if retention else (rows.shown, rows.left_out)
    remotes = list(dict.fromkeys(name for c in shown for name in c["remotes"]))
    all_notes = [note_of(c, retention=retention) for c in shown]
    notes = ["; ".join(filter(None, one)) for one in all_notes]
    once = _once(shown, all_notes)

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
    return [
        cell(checkpoint["tag"]),
        cell(step),
        cell("" if level >= BARE or checkpoint["bytes"] is None else size_of(checkpoint["bytes"])),
        cell(marks_of(checkpoint, says_pinned=not retention), "red" if is_wrong(checkpoint) else ""),
        cell(here if level < BARE else ""),
        *(_in_remote(checkpoint["remotes"].get(name, {}), level, is_alive=is_alive) for name in remotes),
    ]


def _short(form: str, level: int) -> str:
    return form if level == FULL else {"universal": "univ"}.get(form, form.removeprefix("weights-"))


def _in_remote(forms: dict[str, Any], level: int, *, is_alive: bool) -> Text:
    """Return the cell of one remote: a sign and a name for each form, a bar for what is uploaded."""
    from rich.text import Text

    begun = {form: state for form, state in forms.items() if state["state"] != "none"}
    if begun.get("zero", {}).get("state") == "shipping":
        # what waits for the upload that is shown is no news
        begun = {form: state for form, state in begun.items() if state["state"] not in ("waiting", "new")}
    made = [
        _upload(form, state, level, is_alive=is_alive)
        if state["state"] == "shipping"
        else _settled(form, state, level)
        for form, state in begun.items()
    ]
    if level >= SIGNS and len({one.plain for one in made}) == 1:
        made = made[:1]
    return Text({FULL: "  ", BARE: ""}.get(level, " ")).join(made) if made else Text("–")


def _settled(form: str, state: dict[str, Any], level: int) -> Text:
    from ckptd.cli.output import cell

    sign, style = sign_of(state["state"])
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
    for (note, command), rows in about.items():
        tag, own_note, own_command = rows[0]
        if len(rows) == 1:
            found.append((f"{tag}: {own_note}" if own_note else tag, own_command))
        else:
            who = f"{tag} and {len(rows) - 1} more"
            found.append((f"{who}: {note}" if note else who, command))
    return found


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
