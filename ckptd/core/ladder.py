"""How a checkpoint ages on one tier: full, universal, weights, gone (docs/adr/0094).

What the other retention keys let go does not vanish at once but steps down. A fuller form goes only when the
rung's own form is there, so that nothing is left without a form before the rung that says "gone".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptd.core.identity import Model

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

GONE = "gone"
RungForm = Literal["universal", "weights-fp32", "weights-bf16", "weights-fp16", "gone"]

_FULLNESS = {"zero": 4, "universal": 3, "weights-fp32": 2, "weights-bf16": 1, "weights-fp16": 1, GONE: 0}


def fullness(form: str) -> int:
    """How much of a save a form holds: a form goes when one below it takes its place."""
    return _FULLNESS[form]


class Age(NamedTuple):
    """How old a checkpoint is among those of its tier."""

    newer: int
    """Newer ones of its kind."""
    seconds: float | None
    """From its COMMIT to the newest one's; None: not known."""


class Rung(Model):
    """From a certain age on, only `form` and what is less than it stays. One of the two ages is set."""

    form: RungForm
    after_seconds: float | None = None
    after_newer: int | None = None

    def is_reached(self, age: Age) -> bool:
        """An age that is not known reaches nothing."""
        if self.after_newer is not None:
            return age.newer >= self.after_newer
        return (
            age.seconds is not None and self.after_seconds is not None and age.seconds >= self.after_seconds
        )

    @property
    def after(self) -> str:
        """The age in words."""
        return f"{self.after_newer} newer" if self.after_newer is not None else span(self.after_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one form of one checkpoint."""

    keeps: tuple[str, ...] = ()
    """Why it stays; empty: it may go."""
    goes: str = ""
    """Why it may go."""
    instead: str | None = None
    """The form that must be there before it goes; None: nothing is meant to stay."""
    awaits: str | None = None
    """It stays for want of this form alone, as far as the policy goes."""

    def kept_for(self, *more: str) -> Fate:
        """With further reasons to stay."""
        return replace(self, keeps=self.keeps + more) if more else self


def step_down(
    ladder: Sequence[Rung], age: Age, forms: Collection[str], standing: Collection[str], otherwise: str
) -> dict[str, Fate]:
    """The fate of each form of a checkpoint that no other key keeps.

    `standing`: those of the forms that can be used without the others. The deepest rung reached whose form
    stands counts; where none does, everything stays. `otherwise`: why it goes where there is no ladder.
    """
    if not ladder:
        return dict.fromkeys(forms, Fate(goes=otherwise))
    reached = [rung for rung in ladder if rung.is_reached(age)]
    for rung in reversed(reached):
        text = f"ladder: {rung.form} after {rung.after}"
        if rung.form == GONE:
            return dict.fromkeys(forms, Fate(goes=text))
        if rung.form in standing:
            least, goes, stays = fullness(rung.form), Fate(goes=text, instead=rung.form), Fate(keeps=(text,))
            return {form: goes if fullness(form) > least else stays for form in forms}
    why = f"whole until {ladder[0].after}" if not reached else f"no {reached[-1].form} form is here instead"
    awaits = reached[-1].form if reached else None
    return dict.fromkeys(forms, Fate(keeps=(f"ladder: {why}",), awaits=awaits))


@cache
def span(seconds: float | None) -> str:
    """A duration as a job file says it."""
    left = int(seconds or 0)
    for unit, size in (("w", 604_800), ("d", 86_400), ("h", 3600), ("m", 60)):
        if left >= size and left % size == 0:
            return f"{left // size}{unit}"
    return f"{left}s"
