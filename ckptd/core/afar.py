"""Forms of a save that no node has whole, made of its committed objects: attempts, folders (adr/0118).

Pure. Who makes such a form is written in the remote before a byte of it is: a row of numbered documents, each
created once (as in core/shared.py). The number is the attempt's, and with it its folder's: two nodes never
write in one, whatever each of them believes, and COMMIT names the one that counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.manifest import folder_name, stem
from ckptd.core.shared import SHARED, LeaseTerm
from ckptd.core.view import ZERO

if TYPE_CHECKING:
    from ckptd.core.view import JobView, RemoteView, SaveView


class Attempt(LeaseTerm):
    """Who makes a form, at the `number`th attempt; a higher number supersedes a lower one."""

    refused: str | None = None
    """There is no such form of this save, and nobody need try again: why."""
    hint: str = ""
    damaged: str = ""
    """What the shards looked like in the remote when one of them was found damaged: as long as they look so,
    or as any refusal before says, nobody need try again. Empty: no such form will ever be."""


def attempts_folder(tag: str, generation: int, form: str) -> str:
    """Where the attempts at one form of one generation are written down; ends with `/`."""
    return f"{SHARED}making/{stem(tag, generation, form)}/"


def attempt_folder(tag: str, generation: int, form: str, below: str, attempt: int) -> str:
    """The remote folder of an attempt; `below`: path of the form in it, where a trainer looks for it."""
    return folder_name(tag, generation, ZERO if below else form, attempt)


def is_made_afar(save: SaveView) -> bool:
    """No node has it whole: its other forms are made of what its remote holds."""
    return save.save.is_part and not save.is_model_only


def gets_nothing(view: JobView, remote: RemoteView) -> SaveView | None:
    """The newest save of which that remote gets no form at all: no node has it whole, and what forms are made
    of instead is not there (docs/adr/0128).
    """
    if ZERO in remote.forms:
        return None
    spread = (s for s in view.saves if is_made_afar(s) and s.is_present)
    return max(spread, key=lambda s: s.order, default=None)


def is_made_elsewhere(view: JobView, remote: RemoteView) -> bool:
    """What is on its way to that remote was committed there by another node meanwhile."""
    save = next((s for s in view.saves if s.id == remote.ships_save), None)
    if save is None or remote.ships is None or not is_made_afar(save):
        return False
    ours = save.save.tag, save.ship(remote.name, ZERO).generation, remote.ships
    return remote.ships != ZERO and any((c.tag, c.generation, c.form) == ours for c in remote.commits)
