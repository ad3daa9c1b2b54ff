"""Plan what `restore` will do in another directory, as data.

The layout is the one that `resume` makes in save_dir, so that DeepSpeed, Hugging Face and a later `resume`
find what they expect; nothing that lies there already is replaced but bad files of this very save
(docs/internals/recover.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ckptd.core.model.layouts import BY_NAME, Trainer, universal_name
from ckptd.core.model.records import WEIGHTS
from ckptd.errors import RefusedError, TargetExists, UsageError
from ckptd.recover.nested_layouts import beside_shards, pointer_in, the_root, unreplaced, within, without_form
from ckptd.recover.plan import ResumePlan, needs_universal
from ckptd.recover.select.choose import Candidate
from ckptd.recover.select.copies import UNIVERSAL, ZERO, Copy, Nodes, files_for_node, files_for_ranks
from ckptd.recover.select.steps import (
    DERIVED_ACCELERATE,
    DERIVED_UNIVERSAL,
    Convert,
    ConvertFrom,
    CopyBeside,
    Fetch,
    Install,
    Mend,
    RestoreExtras,
    Step,
    WritePointer,
    is_plain,
    name_of_extra,
)

if TYPE_CHECKING:
    from ckptd.recover.files import ExistingFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """Describe what is wanted of a checkpoint. `ranks`: data-parallel ranks as in file names; None: all."""

    form: str | None = None
    world_size: int | None = None
    ranks: frozenset[int] | None = None
    nodes: Nodes = field(default_factory=Nodes)

    def check(self) -> None:
        """Raise UsageError when it contradicts itself."""
        if self.form not in (None, ZERO, UNIVERSAL, *WEIGHTS):
            msg = f"there is no form {self.form!r} to restore"
            raise UsageError(msg, hint=f"--form zero, universal, {', '.join(WEIGHTS)}")
        if self.ranks is not None and self.form not in (None, ZERO):
            msg = f"--ranks picks ZeRO shards, the {self.form} form has none"
            raise UsageError(msg, hint="leave one of them out")
        if self.world_size is not None and self.form in WEIGHTS:
            msg = "--world-size is of checkpoints to resume from, weights are none"
            raise UsageError(msg, hint="leave one of them out")
        if self.ranks is not None and self.nodes.count > 1:
            msg = "--ranks and --nnodes both say which shards are wanted"
            raise UsageError(msg, hint="leave one of them out")


class TargetFolder(Protocol):
    """The directory as it is now."""

    def held(self, target: str, whole: Copy, wanted: Copy) -> ExistingFiles:
        """Return which files of a form lie in `target`; TargetExists when it is another content."""
        ...

    def source_of(self, target: str) -> dict[str, str] | None:
        """Return the fingerprints of what the universal folder `target` was made from."""
        ...

    def has(self, name: str) -> bool:
        """Whether a name is taken."""
        ...

    def pointer(self, name: str) -> str | None:
        """Return the content of a pointer file."""
        ...


def make_restore_plan(candidate: Candidate, wish: RestoreRequest, place: TargetFolder) -> ResumePlan:
    """Plan for one committed candidate.

    Raises:
        RefusedError: the form or the number of ranks cannot be had.
        NotFoundError: ranks beyond the grid. TargetExists: another content under the tag (73).
    """
    if wish.form in WEIGHTS:
        return _weights(candidate, wish.form, place)
    is_universal = _wants_universal(candidate, wish)
    if is_universal and wish.ranks is not None:
        msg = f"{candidate.tag} is wanted in universal form, which has no ranks"
        raise RefusedError(msg, hint="leave --ranks out, or ask for --form zero without another --world-size")
    plain = candidate.layout[0] is Trainer.DEEPSPEED
    path = candidate.tag
    if is_universal and plain:
        path, steps = f"{DERIVED_UNIVERSAL}/{candidate.tag}", _universal(candidate, place)
    elif is_universal and candidate.layout[0] in BY_NAME:
        path, steps = f"{DERIVED_ACCELERATE}/{candidate.tag}", _universal_loadable(candidate, place)
        steps += [s for s in pointer_in(candidate, path) if place.pointer(s.name) != s.value]
    elif is_universal:
        steps = _universal_beside(candidate, place)
    else:
        whole = candidate.copies[0]
        whole, share = (unreplaced(candidate, one) for one in (whole, _share(whole, wish)))
        steps = _bring(ZERO, whole, share, candidate.tag, place)
        steps += [] if not plain else _point(place, "latest", candidate.tag)
    extras = _extras(candidate, place)
    first_pointer = next((i for i, s in enumerate(steps) if isinstance(s, WritePointer)), len(steps))
    steps[first_pointer:first_pointer] = extras
    return ResumePlan(
        candidate=candidate,
        form=UNIVERSAL if is_universal else ZERO,
        path=path,
        world_size=wish.world_size,
        steps=tuple(steps),
        notes=() if is_universal else _notes(candidate, wish),
    )


def _weights(candidate: Candidate, form: str, place: TargetFolder) -> ResumePlan:
    """Beside the checkpoints, as in the remote; no pointer names weights."""
    copy, target = candidate.universals[0], f"{candidate.tag}_{form}"
    steps = _bring(form, copy, copy, target, place)
    return ResumePlan(candidate=candidate, form=form, path=target, world_size=None, steps=tuple(steps))


def _wants_universal(candidate: Candidate, wish: RestoreRequest) -> bool:
    differs = needs_universal(candidate, wish.world_size)
    if wish.form == ZERO and differs:
        msg = (
            f"{candidate.tag} was saved by {candidate.saved_world_size} ranks: in ZeRO form no others load it"
        )
        raise RefusedError(msg, hint="leave --form out, or ask for --form universal")
    if wish.form == ZERO and candidate.is_universal_alone:
        msg = f"only the universal form of {candidate.tag} is left"
        raise RefusedError(msg, hint="leave --form out: it loads on any number of ranks")
    return differs or wish.form == UNIVERSAL or candidate.is_universal_alone


def _share(whole: Copy, wish: RestoreRequest) -> Copy:
    if wish.ranks is not None:
        return files_for_ranks(whole, wish.ranks)
    return files_for_node(whole, wish.nodes)


def _bring(form: str, whole: Copy, wanted: Copy, target: str, place: TargetFolder) -> list[Step]:
    held = place.held(target, whole, wanted)
    if not held.is_there:
        return [Fetch(form=form, copy=wanted), Install(form=form, copy=wanted, target=target)]
    if not held.lacking:
        return []
    part = replace(wanted, files=held.lacking)
    return [Fetch(form=form, copy=part), Mend(form=form, copy=part, target=target)]


def _universal(candidate: Candidate, place: TargetFolder) -> list[Step]:
    """Plain DeepSpeed: `_ckptd/derived/universal/<tag>` and the pointer to it."""
    target = f"{DERIVED_UNIVERSAL}/{candidate.tag}"
    steps = _made_or_fetched(candidate, "", target, place)
    if any(isinstance(step, Convert) for step in steps):
        steps += _point(place, "latest", candidate.tag)
    return [*steps, *_point(place, "latest_universal", target)]


def _universal_beside(candidate: Candidate, place: TargetFolder) -> list[Step]:
    """Hugging Face: beside the shards, or beside what else the Trainer reads (P11)."""
    root = the_root(candidate)
    name = universal_name(root)
    target = f"{candidate.tag}/{name}"
    steps: list[Step] = []
    copies = tuple(without_form(copy, name) for copy in candidate.copies)
    candidate = replace(candidate, copies=copies)
    if candidate.universals:
        whole = candidate.copies[0]
        steps = _bring(ZERO, whole, beside_shards(whole, root), candidate.tag, place)
        inside = replace(candidate, universals=(within(candidate.universals[0], name),))
        steps += _made_or_fetched(inside, root, target, place)
    else:
        steps = _made_or_fetched(candidate, root, target, place)
    return [*steps, *_point(place, f"{candidate.tag}/latest_universal", name)]


def _universal_loadable(candidate: Candidate, place: TargetFolder) -> list[Step]:
    """Return the universal form under the engine's own name, beside what else the trainer reads."""
    root = the_root(candidate)
    folder = f"{DERIVED_ACCELERATE}/{candidate.tag}"
    whole = candidate.copies[0]
    aside = beside_shards(whole, root)
    if candidate.universals:
        name = universal_name(root)
        inside = replace(candidate, universals=(within(candidate.universals[0], name),))
        steps = _bring(ZERO, whole, aside, folder, place)
        return steps + _made_or_fetched(inside, root, f"{folder}/{root}", place)
    made = _made_or_fetched(candidate, root, f"{folder}/{root}", place)
    copied = CopyBeside(tag=candidate.tag, target=folder, paths=tuple(f.path for f in aside.files))
    # the sides first: what is cut short before the form is there loads nowhere
    return (
        [s for s in made if not isinstance(s, Convert)]
        + ([copied] if made else [])
        + [s for s in made if isinstance(s, Convert)]
    )


def _made_or_fetched(candidate: Candidate, root: str, target: str, place: TargetFolder) -> list[Step]:
    """Return the universal form in `target`: there already, else fetched, else converted.

    From the ZeRO form where that lies here or trainers want what lies beside it, else from the remote's.
    """
    prefix = f"{root}/" if root else ""
    sources, ours = place.source_of(target), candidate.fingerprints
    is_made = bool(sources) and all(
        ours.get(f"{prefix}{path}", ours.get(path)) == mark for path, mark in (sources or {}).items()
    )
    if candidate.universals:
        copy = candidate.universals[0]
        try:
            return _bring(UNIVERSAL, copy, copy, target, place)
        except TargetExists:
            if is_made:
                return []  # an earlier restore converted it here: same content, other bytes
            raise
    if is_made:
        return []
    if place.has(target):
        msg = f"{target} is there and was not made from the save of {candidate.tag} that was committed"
        raise TargetExists(msg, hint="move it away, or restore into another directory")
    whole = candidate.copies[0]
    source = f"{candidate.tag}/{root}" if root else candidate.tag
    if not root and not place.has(candidate.tag):
        return [ConvertFrom(copy=whole, target=target)]
    brought = _bring(ZERO, whole, whole, candidate.tag, place)
    return [*brought, Convert(tag=source, target=target, verify=False)]


def _extras(candidate: Candidate, place: TargetFolder) -> list[Step]:
    """Return the files of save_dir that travelled along, where DIR has none of that name."""
    copy = (candidate.copies or candidate.universals)[0]
    names = {name_of_extra(file): file for file in copy.extras}
    absent = tuple(file for name, file in names.items() if is_plain(name) and not place.has(name))
    return [RestoreExtras(copy=copy, files=absent)] if absent else []


def _point(place: TargetFolder, name: str, value: str) -> list[Step]:
    return [] if place.pointer(name) == value else [WritePointer(name=name, value=value)]


def _notes(candidate: Candidate, wish: RestoreRequest) -> tuple[str, ...]:
    if wish.ranks is None and wish.nodes.count == 1:
        return ()
    every = _share(candidate.copies[0], wish).all_for_each
    if every is not None and wish.ranks is None:
        return (every,)
    whose = f"ranks {show_ranks(wish.ranks)}" if wish.ranks is not None else f"node {wish.nodes.rank}"
    return (f"only the shards of {whose} of {candidate.tag} are wanted here: no other rank can load from it",)


def show_ranks(ranks: frozenset[int]) -> str:
    """`0,2-3`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
