"""Plan steps for layouts in which the shards lie one level deeper.

None of these trainers follows a pointer in save_dir. The Trainer finds a universal form beside its shards;
Accelerate opens `pytorch_model` by name, and Lightning wants a folder `checkpoint`: there the universal form
lies under that name in a folder of ours (docs/adr/0050).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.core.model.layouts import BY_NAME, LATEST_UNIVERSAL, Role, Trainer, universal_name
from ckptd.errors import RefusedError
from ckptd.recover.select.copies import UNIVERSAL, ZERO
from ckptd.recover.select.steps import (
    DERIVED_ACCELERATE,
    Convert,
    CopyBeside,
    Delete,
    Fetch,
    Install,
    MoveAside,
    WritePointer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptd.core.model.listing import SaveDirListing
    from ckptd.recover.select.choose import Candidate
    from ckptd.recover.select.copies import Copy
    from ckptd.recover.select.steps import Step


def beside(
    candidate: Candidate,
    listing: SaveDirListing,
    derived: Mapping[str, Mapping[str, str] | None],
    before: Sequence[Step],
    *,
    is_universal: bool,
    put_in: Mapping[str, Mapping[str, str] | None] | None = None,
) -> tuple[str, list[Step]]:
    """Return (path to resume from, steps). `derived`: what lies in `_ckptd/derived/accelerate`, by tag;
    `put_in`: fingerprints of what each universal form was made from that lies beside shards here, by its
    name.

    Raises:
        RefusedError: two engines in one checkpoint, and another number of ranks.
    """
    tag = candidate.tag
    if not is_universal:
        if candidate.local is None:
            return tag, bring(candidate, unreplaced(candidate, candidate.copies[0]), listing, before)
        return tag, _stale(candidate, put_in or {})
    root = the_root(candidate)
    if candidate.layout[0] in BY_NAME:
        place = f"{DERIVED_ACCELERATE}/{tag}"
        return place, [*_loadable(candidate, root, listing, derived, before), *pointer_in(candidate, place)]
    return tag, _huggingface(candidate, root, listing, before, put_in or {})


def pointer_in(candidate: Candidate, place: str) -> list[WritePointer]:
    """Lightning loads without a tag: DeepSpeed then follows `latest_universal` in the folder it is given."""
    if candidate.layout[0] is not Trainer.LIGHTNING:
        return []
    return [WritePointer(name=f"{place}/{LATEST_UNIVERSAL}", value=the_root(candidate))]


def the_root(candidate: Candidate) -> str:
    """Return where the only engine's shards lie in a folder of another trainer.

    Raises:
        RefusedError: there are several: no universal load by one call; or none: a model alone.
    """
    roots = candidate.layout[1]
    if not roots:
        msg = f"{candidate.tag} is only a model: there is no universal form of it"
        raise RefusedError(msg, hint="leave --form out; use it with from_pretrained")
    if len(roots) > 1:
        msg = f"{candidate.tag} holds two engines ({', '.join(roots)}): no universal load by one call"
        raise RefusedError(msg, hint="resume on the ranks that saved it, or `ckptd convert` each engine")
    return roots[0]


def bring(candidate: Candidate, copy: Copy, listing: SaveDirListing, before: Sequence[Step]) -> list[Step]:
    """Fetch a ZeRO form and put it in its place."""
    return [
        Fetch(form=ZERO, copy=copy),
        *place_for(candidate.tag, listing, before),
        Install(form=ZERO, copy=copy, target=candidate.tag),
    ]


def unreplaced(candidate: Candidate, copy: Copy) -> Copy:
    """Return a ZeRO form, or a share of it, without objects that our universal form went over: of
    what a person had put beside the shards no byte is left, and the shards are what is wanted.
    """
    there = (universal for universal in candidate.universals if universal.remote.name == copy.remote.name)
    taken = {file.key for universal in there for file in universal.files}
    return replace(copy, files=tuple(file for file in copy.files if file.key not in taken))


def _stale(candidate: Candidate, put_in: Mapping[str, Mapping[str, str] | None]) -> list[Step]:
    """Return the forms that say that they were made from another save: a trainer told to load one would
    follow them.
    """
    tag = candidate.tag
    steps: list[Step] = []
    for root in candidate.layout[1]:
        target = f"{tag}/{universal_name(root)}"
        if put_in.get(target) and not _is_of(candidate, root, put_in[target]):
            for name in (f"{tag}/{LATEST_UNIVERSAL}", target):
                label = f"{tag}.{name.rpartition('/')[2]}"
                steps.append(MoveAside(name=name, label=label, reason="made from another save of that tag"))
    return steps


def _huggingface(
    candidate: Candidate,
    root: str,
    listing: SaveDirListing,
    before: Sequence[Step],
    put_in: Mapping[str, Mapping[str, str] | None],
) -> list[Step]:
    """The universal form beside the shards (P11).

    Measured: the Trainer wants some `global_step*` folder and follows `latest_universal`; the raw shards may
    be absent (docs/formats.md §1.2), so only what lies beside them is fetched with a committed universal.
    One that lies there is used if it says that it was made from this very save (H15): the Trainer saves over
    a checkpoint in place, and a converter of DeepSpeed's that was killed leaves half a folder.
    """
    tag, name = candidate.tag, universal_name(root)
    target, pointer = f"{tag}/{name}", WritePointer(name=f"{tag}/{LATEST_UNIVERSAL}", value=name)
    convert = Convert(tag=f"{tag}/{root}", target=target, verify=not candidate.is_committed)
    if candidate.local is None:
        whole = without_form(candidate.copies[0], name)
        if candidate.universals:
            brought = bring(candidate, beside_shards(whole, root), listing, before)
            return [*brought, *_placed(candidate.universals[0], name, target), pointer]
        return [*bring(candidate, whole, listing, before), convert, pointer]
    if target not in put_in:
        return [convert, pointer]
    if _is_of(candidate, root, put_in[target]):
        return [pointer]
    reason = "nothing says that it was made from this very save"
    return [MoveAside(name=target, label=f"{tag}.{name}", reason=reason), convert, pointer]


def _loadable(
    candidate: Candidate,
    root: str,
    listing: SaveDirListing,
    derived: Mapping[str, Mapping[str, str] | None],
    before: Sequence[Step],
) -> list[Step]:
    """Return a folder of ours that the trainer opens: what lies beside the shards, then the universal form.

    `load_state` hands the tag `pytorch_model` to DeepSpeed, which then reads no `latest_universal`.
    """
    tag = candidate.tag
    place = f"{DERIVED_ACCELERATE}/{tag}"
    steps: list[Step] = [
        Delete(folder=DERIVED_ACCELERATE, name=name)
        for name, sources in derived.items()
        if name != tag or not _is_of(candidate, root, sources)
    ]
    if tag in derived and not any(isinstance(s, Delete) and s.name == tag for s in steps):
        return steps
    if candidate.local is None and candidate.universals:
        copy = beside_shards(candidate.copies[0], root)
        steps += [Fetch(form=ZERO, copy=copy), Install(form=ZERO, copy=copy, target=place)]
        return steps + _placed(candidate.universals[0], universal_name(root), f"{place}/{root}")
    if candidate.local is None:
        steps += bring(candidate, candidate.copies[0], listing, before)
        paths = tuple(f.path for f in beside_shards(candidate.copies[0], root).files)
    else:
        files = candidate.local.listing.files
        paths = tuple(f.path for f in files if not f.path.startswith(f"{root}/"))
    steps.append(CopyBeside(tag=tag, target=place, paths=paths))
    verify = not candidate.is_committed
    return [*steps, Convert(tag=f"{tag}/{root}", target=f"{place}/{root}", verify=verify)]


def _is_of(candidate: Candidate, root: str, sources: Mapping[str, str] | None) -> bool:
    ours = [candidate.fingerprints, *([candidate.local.fingerprints] if candidate.local else [])]
    return bool(sources) and all(
        any(marks.get(f"{root}/{path}") == mark for marks in ours) for path, mark in (sources or {}).items()
    )


def beside_shards(copy: Copy, root: str) -> Copy:
    """Return the files of a ZeRO form that lie beside its shards: all that a trainer reads with a universal
    load.
    """
    files = tuple(f for f in copy.files if f.role is Role.SIDE and not f.path.startswith(f"{root}/"))
    return replace(copy, files=files)


def without_form(copy: Copy, name: str) -> Copy:
    """Return a ZeRO form without a universal form `name` that somebody put beside its shards before it was
    shipped.

    Nothing proves what that was made from; the one that is wanted takes its place.
    """
    files = tuple(
        f for f in copy.files if not f.path.startswith(f"{name}/") and f.path not in (name, LATEST_UNIVERSAL)
    )
    return replace(copy, files=files)


def within(universal: Copy, name: str) -> Copy:
    """Return a universal form as it lies in its own folder `name` beside the shards."""
    inside = tuple(
        f.model_copy(update={"path": f.path.removeprefix(f"{name}/")})
        for f in universal.files
        if f.path.startswith(f"{name}/")
    )
    return replace(universal, files=inside)


def _placed(universal: Copy, name: str, target: str) -> list[Step]:
    """Fetch a committed universal form from below `name` in its folder and put it at `target`."""
    copy = within(universal, name)
    return [Fetch(form=UNIVERSAL, copy=copy), Install(form=UNIVERSAL, copy=copy, target=target)]


def place_for(tag: str, listing: SaveDirListing, steps: Sequence[Step]) -> list[Step]:
    """Move aside what bears the tag's name: another save, or something that is no checkpoint at all."""
    taken = {folder.tag for folder in listing.folders} | set(listing.foreign)
    if tag not in taken or any(isinstance(s, MoveAside) and s.name == tag for s in steps):
        return []
    return [MoveAside(name=tag, label=tag, reason="another save under the name of the one to resume from")]
