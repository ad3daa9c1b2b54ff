"""Declare the retention keys of `[local]` and `[[remote]]`: one set of words for the node's disk and each
remote.

They become a `RetentionPolicy`, which one pure function reads (docs/design.md §5 *Retention*). The keys of a
tier are checked here; whether its form is made at all, in the section that says so.
"""

from __future__ import annotations

import itertools
from typing import Annotated

from pydantic import BeforeValidator, Field, Strict, model_validator

from ckptd.config.quantities import Bytes, Count, Seconds, parse_duration
from ckptd.config.section import Section, key
from ckptd.config.values import reject
from ckptd.core.policy.retention import GONE, Ephemeral, RetentionPolicy, RungForm, Tier, fullness

_Span = Annotated[Seconds, Field(gt=0)]


class EphemeralConfig(Section):
    """`ephemeral = { every_steps = 1000, keep = 2 }`."""

    every_steps: Count
    keep: Annotated[int, Field(ge=0)]


def _after(value: object) -> int | float:
    """Parse a tier's start: a number of newer saves, or a duration in seconds."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value >= 0 else reject('after is a span such as "2d", or how many newer ones')
    return parse_duration(value)


class RungConfig(Section):
    """`{ after = "7d", form = "universal" }`, or `after = 5`: that many newer ones."""

    after: Annotated[int | float, BeforeValidator(_after)]
    form: RungForm

    @property
    def rung(self) -> Tier:
        """Return this tier as the retention policy's record."""
        if isinstance(self.after, int):
            return Tier(form=self.form, after_newer=self.after)
        return Tier(form=self.form, after_seconds=self.after)


class Retention(Section):
    """Name the committed checkpoints that stay: those that a key keeps. Without a key nothing is deleted."""

    save_total_limit: Count | None = key(
        None, "save_total_limit", "3", "keep that many newest ones; unset: nothing is deleted"
    )
    keep_last: Count | None = key(None, "keep_last", "3", "another name of save_total_limit")
    keep_bytes: Annotated[Bytes, Field(ge=1)] | None = key(
        None, "keep_bytes", '"2TB"', "keep as many newest ones as fit; with save_total_limit both hold"
    )
    keep_every_steps: Count | None = key(
        None, "keep_every_steps", "5000", "also keep steps that are multiples of this"
    )
    keep_every_seconds: _Span | None = key(
        None, "keep_every", '"6h"', "also keep one for each such span of time"
    )
    keep_within_seconds: _Span | None = key(
        None, "keep_within", '"2d"', "also keep what was committed within this time before the newest"
    )
    keep_best: Count | None = key(
        None, "keep_best", "2", "also keep that many with the best value of the job's metric"
    )
    keep_steps: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False)] = key(
        (), "keep_steps", "[]", "also keep these steps"
    )
    ephemeral: EphemeralConfig | None = key(
        None,
        "ephemeral",
        "{ every_steps = 1000, keep = 2 }",
        "of steps that are no multiples only the newest are kept, counted apart",
    )

    ladder: Annotated[tuple[RungConfig, ...], Strict(False)] = key(
        (),
        "ladder",
        '[{ after = "7d", form = "universal" }]',
        "keep a smaller form before deleting; after = 5: when 5 newer ones exist",
    )

    @model_validator(mode="after")
    def _climbs_down(self) -> Retention:
        for upper, lower in itertools.pairwise(self.ladder):
            if isinstance(upper.after, int) != isinstance(lower.after, int):
                reject("ladder: every after is a span, or every one a number of newer checkpoints")
            if lower.after <= upper.after:
                reject(f"ladder: {lower.form} must come after {upper.form}, not at the same time or before")
            if fullness(lower.form) >= fullness(upper.form):
                reject(f"ladder: {lower.form} holds no less than {upper.form}, the rung before it")
        return self

    def rungs_beyond(self, forms: tuple[str, ...]) -> list[str]:
        """Return the forms of rungs that this tier does not take."""
        return [rung.form for rung in self.ladder if rung.form not in (*forms, GONE)]

    @model_validator(mode="after")
    def _one_limit(self) -> Retention:
        if self.keep_last is not None and self.save_total_limit not in (None, self.keep_last):
            reject("save_total_limit and keep_last are one key; they say different numbers")
        if self.ladder and not self.policy.limits:
            reject("ladder is for what another key deletes; set save_total_limit or keep_bytes")
        return self

    @property
    def policy(self) -> RetentionPolicy:
        """Return the keys as the one retention function reads them."""
        limit = self.save_total_limit if self.save_total_limit is not None else self.keep_last
        ephemeral = self.ephemeral
        return RetentionPolicy(
            save_total_limit=limit,
            keep_bytes=self.keep_bytes,
            keep_every_steps=self.keep_every_steps,
            keep_every_seconds=self.keep_every_seconds,
            keep_within_seconds=self.keep_within_seconds,
            keep_best=self.keep_best,
            keep_steps=self.keep_steps,
            ephemeral=None
            if ephemeral is None
            else Ephemeral(every_steps=ephemeral.every_steps, keep=ephemeral.keep),
            ladder=tuple(rung.rung for rung in self.ladder),
        )
