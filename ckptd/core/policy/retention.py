"""Apply a retention policy to an ordered list of checkpoints: which stay, and why (design.md §5 *Retention*).

Keeps join by union; every kept item carries its reasons, an item without one may be deleted. The same
function serves the node's disk and each remote, so that both explain themselves in the same words. Time is
the time that COMMITs carry, never a clock: a node whose clock jumps deletes nothing for it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptd.base.humanize import size_of
from ckptd.base.identity import Model
from ckptd.core.model.save import Order

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


# --- Tiers: a checkpoint ages from full to universal to weights to gone (ADR 0094) -----------------------
# A checkpoint that the other retention keys would delete is reduced step by step instead. A fuller form is
# deleted only when the tier's own form exists, so that no checkpoint is without a form before the tier
# "gone".

GONE = "gone"
RungForm = Literal["universal", "weights-fp32", "weights-bf16", "weights-fp16", "gone"]

_FULLNESS = {"zero": 4, "universal": 3, "weights-fp32": 2, "weights-bf16": 1, "weights-fp16": 1, GONE: 0}


def fullness(form: str) -> int:
    """Return how much of a save a form holds: a form is deleted when one below it takes its place."""
    return _FULLNESS[form]


class Age(NamedTuple):
    """Hold the age of a checkpoint among those of its storage tier."""

    newer: int
    """Newer ones of its kind."""
    seconds: float | None
    """Seconds from its COMMIT to the newest one's; None: not known."""


class Tier(Model):
    """Keep only `form` and smaller forms from a certain age on. One of the two ages is set."""

    form: RungForm
    after_seconds: float | None = None
    after_newer: int | None = None

    def is_reached(self, age: Age) -> bool:
        """Tell whether the age is reached; an unknown age reaches nothing."""
        if self.after_newer is not None:
            return age.newer >= self.after_newer
        return (
            age.seconds is not None and self.after_seconds is not None and age.seconds >= self.after_seconds
        )

    @property
    def after(self) -> str:
        """Return the age in words."""
        return f"{self.after_newer} newer" if self.after_newer is not None else span(self.after_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionVerdict:
    """Hold the verdict of the policy on one form of one checkpoint."""

    keeps: tuple[str, ...] = ()
    """Reasons to keep it; empty: it may be deleted."""
    goes: str = ""
    """Reason why it may be deleted."""
    instead: str | None = None
    """The form that must exist before this one is deleted; None: no form is meant to stay."""
    awaits: str | None = None
    """It stays for want of this form alone, as far as the policy goes."""

    def kept_for(self, *more: str) -> RetentionVerdict:
        """Return the verdict with further reasons to stay."""
        return replace(self, keeps=self.keeps + more) if more else self


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalVerdicts:
    """Hold the verdicts of local retention by save id and form."""

    zero: dict[int, RetentionVerdict]
    """Save id → verdict on its ZeRO form, for every save whose folder is here."""
    universal: dict[int, RetentionVerdict]
    """Save id → verdict on its universal form, where a ladder decides; else the other rules do."""
    forbidden: dict[int, tuple[str, ...]]
    """Save id → why nobody may delete it, whatever the retention keys say, for every save whose folder is
    here."""


def step_down(
    ladder: Sequence[Tier], age: Age, forms: Collection[str], standing: Collection[str], otherwise: str
) -> dict[str, RetentionVerdict]:
    """Return the verdict on each form of a checkpoint that no other key keeps.

    `standing`: those of the forms that can be used without the others. The deepest rung reached whose form
    stands counts; where none does, everything stays. `otherwise`: why it goes where there is no ladder.
    """
    if not ladder:
        return dict.fromkeys(forms, RetentionVerdict(goes=otherwise))
    reached = [rung for rung in ladder if rung.is_reached(age)]
    for rung in reversed(reached):
        text = f"ladder: {rung.form} after {rung.after}"
        if rung.form == GONE:
            return dict.fromkeys(forms, RetentionVerdict(goes=text))
        if rung.form in standing:
            least, goes, stays = (
                fullness(rung.form),
                RetentionVerdict(goes=text, instead=rung.form),
                RetentionVerdict(keeps=(text,)),
            )
            return {form: goes if fullness(form) > least else stays for form in forms}
    why = f"whole until {ladder[0].after}" if not reached else f"no {reached[-1].form} form is here instead"
    awaits = reached[-1].form if reached else None
    return dict.fromkeys(forms, RetentionVerdict(keeps=(f"ladder: {why}",), awaits=awaits))


@cache
def span(seconds: float | None) -> str:
    """Word a duration as a job file does."""
    left = int(seconds or 0)
    for unit, size in (("w", 604_800), ("d", 86_400), ("h", 3600), ("m", 60)):
        if left >= size and left % size == 0:
            return f"{left // size}{unit}"
    return f"{left}s"


# --- The policy ------------------------------------------------------------------------------------------

Unuploaded = Literal["keep", "thin", "delete"]
"""Treatment of a checkpoint that is not committed: it stays; it goes once a newer one of its branch is
committed; the limit applies to it."""

DAMAGED = "a copy of it is damaged"
_MOST_GAPS = 4
"""A gap between two COMMITs counts as at most so many usual ones."""


class Ephemeral(Model):
    """Keep only the newest `keep` of the ephemeral steps: those that are no multiple of `every_steps`."""

    every_steps: int
    keep: int


class RetentionPolicy(Model):
    """Keys of `[local]` and `[[remote]]`; all unset: nothing is deleted."""

    save_total_limit: int | None = None
    keep_bytes: int | None = None
    keep_every_steps: int | None = None
    keep_every_seconds: float | None = None
    keep_within_seconds: float | None = None
    keep_best: int | None = None
    keep_steps: tuple[int, ...] = ()
    ephemeral: Ephemeral | None = None
    ladder: tuple[Tier, ...] = ()
    """Oldest rung last; only for what the other keys let go."""

    @property
    def has_limit(self) -> bool:
        """Tell whether a number or bytes limit the newest ones that stay."""
        return self.save_total_limit is not None or self.keep_bytes is not None

    @property
    def limits(self) -> bool:
        """Tell whether the policy deletes permanent checkpoints."""
        spans = (
            self.save_total_limit,
            self.keep_bytes,
            self.keep_every_steps,
            self.keep_every_seconds,
            self.keep_within_seconds,
            self.keep_best,
        )
        return any(value is not None for value in spans) or bool(self.keep_steps)

    @property
    def deletes(self) -> bool:
        """Tell whether the policy deletes anything at all."""
        return self.limits or self.ephemeral is not None

    def is_ephemeral(self, step: int) -> bool:
        """Thrown away after the next few."""
        return self.ephemeral is not None and step % self.ephemeral.every_steps != 0

    def why_deleted(self, step: int) -> str:
        """Return why a checkpoint is deleted that no key keeps."""
        if self.ephemeral is not None and self.is_ephemeral(step):
            return f"ephemeral: the newest {self.ephemeral.keep} stay"
        limits = [f"save_total_limit {self.save_total_limit}"] if self.save_total_limit else []
        limits += [f"keep_bytes {size_of(self.keep_bytes)}"] if self.keep_bytes else []
        return " and ".join(limits) or "kept by no retention key"

    def has_rung(self, form: str) -> bool:
        """Tell whether a tier keeps this form alone."""
        return any(rung.form == form for rung in self.ladder)


class RemoteKeys(Model):
    """Hold what a job file says of one remote, as far as deletions depend on it."""

    retention: RetentionPolicy
    is_required: bool
    forms: tuple[str, ...]


class RetentionKeys(Model):
    """Hold what a job file says of deletions, here and in each remote."""

    local: RetentionPolicy
    local_forms: tuple[str, ...]
    remotes: dict[str, RemoteKeys]
    """All remotes of the job: what another one holds stays, and counts for nothing."""
    existing: str
    unuploaded: Unuploaded = "keep"
    metric: str | None = None
    """Metric that keep_best compares."""
    is_higher_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyItem:
    """Hold a committed checkpoint as input of the policy."""

    key: str
    order: Order
    bytes: int = 0
    """Size of all its forms in this place."""
    pinned: bool = False
    is_damaged: bool = False
    """It stays, and no key counts it: it takes no sound one's place."""
    has_damaged_copy: bool = False
    """Here or in another place: it stays."""
    committed_at_seconds: float | None = None
    """Unix time in its COMMIT; None: not known (yet), and every key that goes by time keeps it."""
    score: float | None = None
    """Value of the job's metric, higher is better; None: not known, and keep_best ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """Hold a checkpoint with the forms of it that the disk or remote has."""

    item: PolicyItem
    forms: frozenset[str]
    standing: frozenset[str]
    """Those that can be used without the others."""


def apply_policy(
    held: Sequence[PolicyFacts], policy: RetentionPolicy
) -> dict[str, dict[str, RetentionVerdict]]:
    """Judge each form of each checkpoint by the policy: key → form → verdict.

    Whole checkpoints (with their ZeRO form) are ranked among themselves; one that is already reduced to a
    derived form displaces none, and also stays if the policy would keep it. The newest whole one stays whole.
    """
    whole = [one.item for one in held if "zero" in one.forms]
    everything = [one.item for one in held]
    reasons = keep_reasons(everything, policy)
    if len(whole) < len(everything):
        reasons |= keep_reasons(whole, policy)
    ages = ages_of([item for item in everything if not item.is_damaged]) if policy.ladder else {}
    found: dict[str, dict[str, RetentionVerdict]] = {}
    for one in held:
        key = one.item.key
        if reasons[key]:
            found[key] = dict.fromkeys(one.forms, RetentionVerdict(keeps=reasons[key]))
        else:
            step = one.item.order.step
            # what is thrown away after the next few is not kept in a lesser form for years
            ladder = () if policy.is_ephemeral(step) else policy.ladder
            age = ages.get(key, Age(0, None))
            found[key] = step_down(ladder, age, one.forms, one.standing, policy.why_deleted(step))
    return found


def ages_of(items: Sequence[PolicyItem]) -> dict[str, Age]:
    """Return the age of each among the others; without a date at least as old as the dated one after it."""
    newest_first = sorted(items, key=lambda item: item.order, reverse=True)
    known = _ages(newest_first)
    ages: dict[str, Age] = {}
    seconds: float | None = None
    for newer, item in enumerate(newest_first):
        seconds = known.get(item.key, seconds)
        ages[item.key] = Age(newer, seconds)
    return ages


def keep_reasons(items: Sequence[PolicyItem], policy: RetentionPolicy) -> dict[str, tuple[str, ...]]:
    """Reasons to keep, by key; an empty tuple means that the policy lets it go.

    Newest is by (branch, step, save_seq), so a rewound run's new saves count before the abandoned ones (P9).
    The newest item is always kept.
    """
    reasons: dict[str, list[str]] = {item.key: [DAMAGED] if item.is_damaged else [] for item in items}
    newest_first = sorted((i for i in items if not i.is_damaged), key=lambda i: i.order, reverse=True)
    permanent = [item for item in newest_first if not policy.is_ephemeral(item.order.step)]
    unlimited = _unlimited(policy)
    for item in permanent:
        reasons[item.key] += [*unlimited, *_divided(item, policy)]
    for key in _spaced(permanent, policy):
        reasons[key].append(f"keep_every {span(policy.keep_every_seconds)}")
    if policy.ephemeral is not None:
        ephemeral = [item for item in newest_first if policy.is_ephemeral(item.order.step)]
        for rank, item in enumerate(ephemeral[: policy.ephemeral.keep], start=1):
            reasons[item.key].append(f"ephemeral: {rank} of {policy.ephemeral.keep}")
    scored = [item for item in newest_first if item.score is not None]
    best_first = sorted(scored, key=lambda item: item.score or 0.0, reverse=True)
    for rank, item in enumerate(best_first[: policy.keep_best or 0], start=1):
        reasons[item.key].append(f"keep_best: {rank} of {policy.keep_best}")
    ages = _ages(newest_first) if policy.keep_within_seconds is not None else {}
    for item in newest_first:
        reasons[item.key] += _named_or_dated(item, policy, ages.get(item.key))
    if newest_first:
        reasons[newest_first[0].key].append("newest committed")
    if policy.has_limit:
        _keep_newest(permanent, policy, reasons, sum(i.bytes for i in newest_first if reasons[i.key]))
    return {key: tuple(why) for key, why in reasons.items()}


def _unlimited(policy: RetentionPolicy) -> tuple[str, ...]:
    """Return why every permanent checkpoint stays, where no key limits them."""
    if not policy.deletes:
        return ("nothing is deleted: no retention key is set",)
    return () if policy.limits else ("permanent: only ephemeral ones are limited",)


def _keep_newest(
    permanent: Sequence[PolicyItem], policy: RetentionPolicy, reasons: dict[str, list[str]], kept_bytes: int
) -> None:
    """Apply the two limits, both of which must hold; `kept_bytes`: what the other keys keep counts first."""
    limit, most_bytes = policy.save_total_limit, policy.keep_bytes
    for rank, item in enumerate(permanent[:limit], start=1):
        if most_bytes is not None:
            kept_bytes += 0 if reasons[item.key] else item.bytes
            if kept_bytes > most_bytes:
                return
            reasons[item.key].insert(0, f"keep_bytes {size_of(most_bytes)}")
        if limit is not None:
            reasons[item.key].insert(0, f"save_total_limit: {rank} of {limit}")


def _divided(item: PolicyItem, policy: RetentionPolicy) -> list[str]:
    """Apply the key that divides permanent checkpoints."""
    is_kept = policy.keep_every_steps and item.order.step % policy.keep_every_steps == 0
    return [f"keep_every_steps {policy.keep_every_steps}"] if is_kept else []


def _named_or_dated(item: PolicyItem, policy: RetentionPolicy, age_seconds: float | None) -> list[str]:
    """Apply the keys that name or date a checkpoint, whatever its kind."""
    why: list[str] = []
    within = policy.keep_within_seconds
    if within is not None and age_seconds is None:
        why.append("keep_within: the time of its COMMIT is not known")
    elif within is not None and age_seconds is not None and age_seconds <= within:
        why.append(f"keep_within {span(within)}")
    if item.order.step in policy.keep_steps:
        why.append(f"keep_steps {item.order.step}")
    if item.pinned:
        why.append("pinned")
    if item.has_damaged_copy:
        why.append(DAMAGED)
    return why


def _ages(newest_first: Sequence[PolicyItem]) -> dict[str, float]:
    """Seconds before the newest dated COMMIT, by key, as far as their times bear each other out (P9).

    From one COMMIT to the next counts as at most a few times what the others took: a clock that jumped, or a
    run that rested for a month, makes no older checkpoint old. A jump back counts as nothing.
    """
    dated = [(item.key, at) for item in newest_first if (at := item.committed_at_seconds) is not None]
    gaps = [max(later - at, 0.0) for (_, later), (_, at) in itertools.pairwise(dated)]
    ordered, middle = sorted(gaps), (len(gaps) - 2) // 2
    ages: dict[str, float] = {}
    age = 0.0
    for (key, _), gap in zip(dated, (0.0, *gaps), strict=False):
        # the lower median of the other gaps; one gap alone is borne out by none
        usual = ordered[middle + (gap <= ordered[middle])] if len(gaps) > 1 else 0.0
        age += min(gap, _MOST_GAPS * usual)
        ages[key] = age
    return ages


def _spaced(newest_first: Sequence[PolicyItem], policy: RetentionPolicy) -> list[str]:
    """Keys of one checkpoint of each span, the oldest first: what is kept never depends on newer ones.

    A COMMIT that seems older than the one kept before it (a clock that was wrong) is kept as well.
    """
    span = policy.keep_every_seconds
    if span is None:
        return []
    kept: list[str] = []
    last: float | None = None
    for item in reversed(newest_first):
        at = item.committed_at_seconds
        if at is None or last is None or not 0 <= at - last < span:
            kept.append(item.key)
            last = at if at is not None else last
    return kept
