"""Plan what `resume` will do, as data: printed by --dry-run, executed once by `execute`.

Nothing is deleted: what is in the way is renamed into `_ckptd/aside/`. Every step is idempotent, and the
pointers come last, so that a resume that is killed half-way leaves nothing that DeepSpeed would load.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.base.names import tag_problem
from ckptd.core.completeness.judge import State
from ckptd.core.model.layouts import Trainer
from ckptd.recover.nested_layouts import beside, bring
from ckptd.recover.select.choose import Candidate
from ckptd.recover.select.copies import UNIVERSAL, ZERO
from ckptd.recover.select.steps import (
    DERIVED_UNIVERSAL,
    Convert,
    Fetch,
    Install,
    MoveAside,
    RestoreExtras,
    Step,
    WritePointer,
    is_plain,
    name_of_extra,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptd.core.model.listing import SaveDirListing
    from ckptd.recover.select.inventory import LocalCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """A chosen checkpoint and the steps to it; `path` is relative to save_dir."""

    candidate: Candidate
    form: str
    path: str
    world_size: int | None
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """Return the steps that need bytes from a remote."""
        return tuple(step for step in self.steps if isinstance(step, Fetch))


def make_plan(
    candidate: Candidate,
    local: Sequence[LocalCheckpoint],
    listing: SaveDirListing,
    derived: Mapping[str, Mapping[str, str] | None],
    world_size: int | None,
    *,
    loadable: Mapping[str, Mapping[str, str] | None] | None = None,
    put_in: Mapping[str, Mapping[str, str] | None] | None = None,
    needs_commit: bool = False,
    aside: Sequence[MoveAside] = (),
) -> ResumePlan:
    """Plan for one candidate.

    `derived`: what lies in `_ckptd/derived/universal`: tag → fingerprints of its source, None: unreadable;
    `loadable`: the same of `_ckptd/derived/accelerate`; `put_in`: of what lies beside shards, by its name;
    `aside`: what has to go first.

    Raises:
        RefusedError: no load on that many ranks is possible.
    """
    is_universal = candidate.is_universal_alone or needs_universal(candidate, world_size)
    steps: list[Step] = [
        *aside,
        *(
            MoveAside(name=sight.tag, label=sight.tag, reason=_why(sight))
            for sight in _in_the_way(candidate, local)
        ),
    ]
    if candidate.layout[0] is not Trainer.DEEPSPEED:
        path, more = beside(
            candidate, listing, loadable or {}, steps, is_universal=is_universal, put_in=put_in
        )
        steps += [*more, *_extras(candidate, listing)]
    else:
        steps += _plain(candidate, listing, derived, steps, is_universal=is_universal)
        path = f"{DERIVED_UNIVERSAL}/{candidate.tag}" if is_universal else candidate.tag
    return ResumePlan(
        candidate=candidate,
        form=UNIVERSAL if is_universal else ZERO,
        path=path,
        world_size=world_size,
        steps=tuple(steps),
        notes=(
            *_notes(candidate, local, steps, needs_commit=needs_commit),
            *_doubt(candidate, local, listing.latest),
        ),
    )


def needs_universal(candidate: Candidate, world_size: int | None) -> bool:
    """Whether so many ranks need the universal form."""
    if candidate.grid.is_model_only or world_size is None:
        return False
    return world_size != candidate.saved_world_size


def _plain(
    candidate: Candidate,
    listing: SaveDirListing,
    derived: Mapping[str, Mapping[str, str] | None],
    before: Sequence[Step],
    *,
    is_universal: bool,
) -> list[Step]:
    """DeepSpeed's own layout: the tag in save_dir, the universal form under `_ckptd`, two pointers."""
    steps: list[Step] = []
    made: list[Step] = []
    has_zero = candidate.local is not None
    if is_universal:
        made = _universal(candidate, derived)
    if not has_zero and (not is_universal or any(isinstance(step, Convert) for step in made)):
        steps += bring(candidate, candidate.copies[0], listing, before)
        has_zero = True
    steps += made
    steps += _extras(candidate, listing)
    every = [*before, *steps]
    return steps + _pointers(candidate, listing, every, has_zero=has_zero, is_universal=is_universal)


def _in_the_way(candidate: Candidate, local: Sequence[LocalCheckpoint]) -> list[LocalCheckpoint]:
    """Return the unusable folders that are newer than the chosen one, or bear its name (H54)."""
    found = []
    for sight in local:
        # refused: whole, and none that ckptd knows
        is_refused = sight.verdict.state is State.REFUSED and sight.tag != candidate.tag
        if (
            sight.is_complete
            or is_refused
            or (candidate.local is not None and sight.tag == candidate.local.tag)
        ):
            continue
        step = sight.step
        if sight.tag == candidate.tag or step is None or step >= candidate.order.step:
            found.append(sight)
    return found


def _why(sight: LocalCheckpoint) -> str:
    reason = sight.verdict.reason or "not whole"
    return f"{sight.verdict.state.value}: {reason}"


def _universal(candidate: Candidate, derived: Mapping[str, Mapping[str, str] | None]) -> list[Step]:
    """Return the universal form: the one that is here, else a remote's, else made on the way."""
    target = f"{DERIVED_UNIVERSAL}/{candidate.tag}"
    stale: list[Step] = []
    if candidate.tag in derived:
        sources, ours = derived[candidate.tag], candidate.fingerprints
        if sources and all(ours.get(path) == mark for path, mark in sources.items()):
            return []
        label = f"{candidate.tag}_universal"
        stale = [MoveAside(name=target, label=label, reason="made from another save of that tag")]
    if candidate.universals:
        copy = candidate.universals[0]
        return [
            Fetch(form=UNIVERSAL, copy=copy),
            *stale,
            Install(form=UNIVERSAL, copy=copy, target=target),
        ]
    return [*stale, Convert(tag=candidate.tag, target=target, verify=not candidate.is_committed)]


def _extras(candidate: Candidate, listing: SaveDirListing) -> list[Step]:
    if not candidate.copies:
        return []
    copy = candidate.copies[0]
    here = {file.path for file in listing.extras} | set(listing.foreign) | {f.tag for f in listing.folders}
    absent = tuple(f for f in copy.extras if name_of_extra(f) not in here and is_plain(name_of_extra(f)))
    return [RestoreExtras(copy=copy, files=absent)] if absent else []


def _pointers(
    candidate: Candidate,
    listing: SaveDirListing,
    steps: Sequence[Step],
    *,
    has_zero: bool,
    is_universal: bool,
) -> list[Step]:
    pointers: list[Step] = []
    gone = {step.name for step in steps if isinstance(step, MoveAside)}
    if has_zero:
        if listing.latest != candidate.tag:
            pointers.append(WritePointer(name="latest", value=candidate.tag))
    elif listing.latest is not None and (
        listing.latest in gone or listing.latest not in {f.tag for f in listing.folders}
    ):
        reason = f"names {listing.latest}, which is not there"
        pointers.append(MoveAside(name="latest", label="latest", reason=reason))
    wanted = f"{DERIVED_UNIVERSAL}/{candidate.tag}"
    if is_universal and listing.latest_universal != wanted:
        pointers.append(WritePointer(name="latest_universal", value=wanted))
    return pointers


def _notes(
    candidate: Candidate, local: Sequence[LocalCheckpoint], steps: Sequence[Step], *, needs_commit: bool
) -> tuple[str, ...]:
    notes = [s.copy.all_for_each for s in steps if isinstance(s, Fetch) and s.copy.all_for_each]
    for sight in local:
        if (problem := tag_problem(sight.tag)) is not None and sight.is_complete:
            notes.append(
                f"{sight.tag!r} is not sent to any remote: the tag {problem}; rename it to have it sent"
            )
        if sight.verdict.state is State.REFUSED:
            notes.append(f"{sight.tag} is {sight.verdict.reason}: not resumed from, and left where it is")
        if sight.verdict.state is State.SUSPECT:
            cure = f"`ckptd accept JOB {shlex.quote(sight.tag)}` makes it usable"
            notes.append(f"{sight.tag} is suspect: {sight.verdict.reason}; {cure}")
        elif sight.is_complete and sight.listing.is_model_only:
            notes.append(f"{sight.tag} is only a model: nothing to resume from")
        elif needs_commit and sight.is_complete and sight.tag != candidate.tag:
            notes.append(f"{sight.tag} is whole here but not committed: other nodes could not choose it")
    return tuple(notes)


def _doubt(candidate: Candidate, local: Sequence[LocalCheckpoint], latest: str | None) -> tuple[str, ...]:
    """A run that was rewound while nobody watched looks like a crash right before `latest` was written."""
    named = next((s for s in local if s.tag == latest and s.is_complete), None)
    if named is None or named.tag == candidate.tag or (named.step or 0) >= candidate.order.step:
        return ()
    told = f"latest names {named.tag}, which is whole here too, and {candidate.tag} counts as newer"
    return (f"{told}: if the run was rewound to before that, `--tag {named.tag}` takes the other",)
