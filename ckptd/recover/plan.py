"""What `resume` will do, as data: printed by --dry-run, executed once by `execute` (H54).

Nothing is deleted: what is in the way is renamed into `_ckptd/aside/`. Every step is idempotent, and the
pointers come last, so that a resume that is killed half-way leaves nothing that DeepSpeed would load.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptd.core.layouts import Role
from ckptd.core.lifecycle import State
from ckptd.core.trainers import Trainer, universal_name
from ckptd.errors import RefusedError
from ckptd.recover.choose import UNIVERSAL, ZERO, Candidate, Copy
from ckptd.recover.steps import (
    DERIVED_UNIVERSAL,
    Convert,
    Fetch,
    MoveAside,
    Place,
    Point,
    RestoreExtras,
    Step,
    is_plain,
    name_of_extra,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptd.core.listing import SaveDirListing
    from ckptd.recover.sight import LocalSight


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
        """The steps that need bytes from a remote."""
        return tuple(step for step in self.steps if isinstance(step, Fetch))


def make_plan(
    candidate: Candidate,
    local: Sequence[LocalSight],
    listing: SaveDirListing,
    derived: Mapping[str, Mapping[str, str] | None],
    world_size: int | None,
    *,
    needs_commit: bool = False,
) -> ResumePlan:
    """Plan for one candidate.

    `derived`: what lies in `_ckptd/derived/universal`: tag → fingerprints of its source, None: unreadable.

    Raises:
        RefusedError: no load on that many ranks is possible.
    """
    is_universal = needs_universal(candidate, world_size)
    steps: list[Step] = [
        MoveAside(name=sight.tag, label=sight.tag, reason=_why(sight))
        for sight in _in_the_way(candidate, local)
    ]
    if candidate.layout[0] is not Trainer.DEEPSPEED:
        steps += _beside(candidate, listing, steps, is_universal=is_universal)
        steps += _extras(candidate, listing)
        path = candidate.tag
    else:
        steps += _plain(candidate, listing, derived, steps, is_universal=is_universal)
        path = f"{DERIVED_UNIVERSAL}/{candidate.tag}" if is_universal else candidate.tag
    return ResumePlan(
        candidate=candidate,
        form=UNIVERSAL if is_universal else ZERO,
        path=path,
        world_size=world_size,
        steps=tuple(steps),
        notes=_notes(candidate, local, needs_commit=needs_commit),
    )


def needs_universal(candidate: Candidate, world_size: int | None) -> bool:
    """Whether so many ranks need the universal form.

    Raises:
        RefusedError: no load on that many ranks is possible.
    """
    if world_size is None or world_size == candidate.saved_world_size:
        return False
    if world_size % candidate.grid.mm_count:
        count = candidate.grid.mm_count
        msg = f"{candidate.tag} has {count} model-parallel ranks, {world_size} is no multiple"
        raise RefusedError(msg, hint="choose another --world-size")
    return True


def the_root(candidate: Candidate) -> str:
    """Where in a folder of another trainer the one engine's shards lie.

    Raises:
        RefusedError: there are several: no universal load by one call.
    """
    roots = candidate.layout[1]
    if len(roots) > 1:
        msg = f"{candidate.tag} holds two engines ({', '.join(roots)}): no universal load by one call"
        raise RefusedError(msg, hint="resume on the ranks that saved it, or `ckptd convert` each engine")
    return roots[0]


def beside_shards(copy: Copy) -> Copy:
    """What of a ZeRO form the Trainer reads with a universal load: all but the shards."""
    return replace(copy, files=tuple(f for f in copy.files if f.role is Role.SIDE))


def within(copy: Copy, name: str) -> Copy:
    """A universal form as it lies in its own folder `name` beside the shards."""
    inside = tuple(
        f.model_copy(update={"path": f.path.removeprefix(f"{name}/")})
        for f in copy.files
        if f.path.startswith(f"{name}/")
    )
    return replace(copy, files=inside)


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
        steps += _bring(candidate, candidate.copies[0], listing, before)
        has_zero = True
    steps += made
    steps += _extras(candidate, listing)
    every = [*before, *steps]
    return steps + _pointers(candidate, listing, every, has_zero=has_zero, is_universal=is_universal)


def _bring(candidate: Candidate, copy: Copy, listing: SaveDirListing, before: Sequence[Step]) -> list[Step]:
    return [
        Fetch(form=ZERO, copy=copy),
        *_place_for(candidate.tag, listing, before),
        Place(form=ZERO, copy=copy, target=candidate.tag),
    ]


def _beside(
    candidate: Candidate,
    listing: SaveDirListing,
    before: Sequence[Step],
    *,
    is_universal: bool,
) -> list[Step]:
    """Hugging Face, Accelerate: no pointer in save_dir; the universal form beside the shards (P11).

    Measured: the Trainer wants some `global_step*` folder and follows `latest_universal`; the raw shards may
    be absent (docs/formats.md §1.2), so only what lies beside them is fetched with a committed universal.
    """
    tag = candidate.tag
    if not is_universal:
        return [] if candidate.local else _bring(candidate, candidate.copies[0], listing, before)
    root = the_root(candidate)
    name = universal_name(root)
    target = f"{tag}/{name}"
    steps: list[Step] = []
    if candidate.local is None and candidate.universals:
        steps += _bring(candidate, beside_shards(candidate.copies[0]), listing, before)
        universal = within(candidate.universals[0], name)
        steps += [
            Fetch(form=UNIVERSAL, copy=universal),
            Place(form=UNIVERSAL, copy=universal, target=target),
        ]
    else:
        if candidate.local is None:
            steps += _bring(candidate, candidate.copies[0], listing, before)
        verify = not candidate.is_committed
        steps.append(Convert(tag=f"{tag}/{root}", target=target, verify=verify))
    return [*steps, Point(name=f"{tag}/latest_universal", value=name)]


def _in_the_way(candidate: Candidate, local: Sequence[LocalSight]) -> list[LocalSight]:
    """Unusable folders that are newer than the chosen one, or bear its name (H54)."""
    found = []
    for sight in local:
        if sight.is_complete or (candidate.local is not None and sight.tag == candidate.local.tag):
            continue
        step = sight.step
        if sight.tag == candidate.tag or step is None or step >= candidate.order.step:
            found.append(sight)
    return found


def _why(sight: LocalSight) -> str:
    reason = sight.verdict.reason or "not whole"
    return f"{sight.verdict.state.value}: {reason}"


def _place_for(tag: str, listing: SaveDirListing, steps: Sequence[Step]) -> list[Step]:
    """Move aside what bears the tag's name: another save, or something that is no checkpoint at all."""
    taken = {folder.tag for folder in listing.folders} | set(listing.foreign)
    if tag not in taken or any(isinstance(s, MoveAside) and s.name == tag for s in steps):
        return []
    return [MoveAside(name=tag, label=tag, reason="another save under the name of the one to resume from")]


def _universal(candidate: Candidate, derived: Mapping[str, Mapping[str, str] | None]) -> list[Step]:
    """The universal form: the one that is here, else a remote's, else made on the way."""
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
            Place(form=UNIVERSAL, copy=copy, target=target),
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
            pointers.append(Point(name="latest", value=candidate.tag))
    elif listing.latest is not None and (
        listing.latest in gone or listing.latest not in {f.tag for f in listing.folders}
    ):
        reason = f"names {listing.latest}, which is not there"
        pointers.append(MoveAside(name="latest", label="latest", reason=reason))
    wanted = f"{DERIVED_UNIVERSAL}/{candidate.tag}"
    if is_universal and listing.latest_universal != wanted:
        pointers.append(Point(name="latest_universal", value=wanted))
    return pointers


def _notes(candidate: Candidate, local: Sequence[LocalSight], *, needs_commit: bool) -> tuple[str, ...]:
    notes = []
    for sight in local:
        if sight.verdict.state is State.SUSPECT:
            notes.append(f"{sight.tag} is suspect: {sight.verdict.reason}; `ckptd accept` makes it usable")
        elif needs_commit and sight.is_complete and sight.tag != candidate.tag:
            notes.append(f"{sight.tag} is whole here but not committed: other nodes could not choose it")
    return tuple(notes)
