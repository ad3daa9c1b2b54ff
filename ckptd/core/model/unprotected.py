"""Find checkpoints in a save_dir that are not protected, by names alone, and word what is said of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ckptd.core.model.layouts import (
    TORCH_FILES,
    TRAINER_STATE,
    is_shard_root,
    is_weights,
    parse_shard_name,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


class Kind(StrEnum):
    """Name the kind of an unprotected checkpoint in words for people."""

    HUGGINGFACE = "a checkpoint of the Hugging Face Trainer without DeepSpeed"
    ACCELERATE = "a checkpoint of Accelerate without DeepSpeed"
    TORCH_SHARDS = "a sharded checkpoint of torch (FSDP, torch.distributed.checkpoint)"
    MEGATRON = "a checkpoint of Megatron-LM without DeepSpeed"
    LIGHTNING = "a Lightning checkpoint in one file"
    TORCH_FILE = "a checkpoint in one torch.save file"
    ZERO = "a ZeRO checkpoint"
    UNKNOWN = "a folder of a layout that ckptd does not know"
    FAST_WRITER = "a ZeRO checkpoint of DeepSpeed's fast writer, in names that DeepSpeed does not load"
    LOOSE = "shards that trainer.save_model left beside the Trainer's checkpoints"


_WATCHED = frozenset({Kind.ZERO, Kind.HUGGINGFACE, Kind.ACCELERATE, Kind.TORCH_SHARDS, Kind.LIGHTNING})
"""Protected where they lie in save_dir itself."""
_OPTIMIZERS = frozenset({"optimizer.pt", "optimizer.bin"})
_RANDOM = re.compile(r"^(rng_state|random_states)(_\d+)?\.(pth|pkl)$")
_FSDP_FILE = re.compile(r"^pytorch_model_fsdp(_\d+)?(_rank\d+)?\.bin$")
_FAST_WRITER = re.compile(r"_(?:model|optim)_states\.pt-\d+\.\d+$")
"""At stages 0 to 2 it adds its own number and how many they are: `mp_rank_00_model_states.pt-0.2`."""
_MEGATRON = frozenset({"model_optim_rng.pt", "distrib_optim.pt"})
_TORCH_FILE = re.compile(
    r"^((checkpoint|ckpt|snapshot|last|latest)([-_.=].*|\d.*)?|(epoch|step|iter|global_step)[-_=]?\d.*)"
    r"\.(pt|pth|pth\.tar|tar)$"
)
_STATE_NAME = re.compile(r"^(global_?step|checkpoint|ckpt|step|iter|epoch|snapshot|save)[-_=]?\d+$")
_STATE_END = (
    *(*TORCH_FILES, ".ckpt", ".tar", ".safetensors", ".npz", ".npy", ".msgpack", ".h5", ".ocdbt", ".index"),
)
_IN_DERIVED = re.compile(r"(_universal|_weights-[^/]*)(/|$)")
_LOOSE = re.compile(r"^global_step\d+$")
_NUMBERS = re.compile(r"\d+")
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unprotected:
    """One checkpoint that is not protected; `path` is relative to save_dir, "" is save_dir itself."""

    path: str
    kind: Kind

    @property
    def holder(self) -> str:
        """Return the folder that holds it, relative to save_dir; "" for save_dir."""
        return self.path.rpartition("/")[0]

    @property
    def number(self) -> int:
        """Return the last number in its name, by which saves are counted; -1: none."""
        found = _LAST_NUMBER.search(self.path.rpartition("/")[2])
        return int(found[1]) if found else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprotectedWarning:
    """Word a warning about unprotected checkpoints of one kind in one place."""

    about: str
    """Stays the same while more of them appear."""
    text: str
    next_step: str
    is_urgent: bool
    """False: newer checkpoints beside them are protected, or they are no checkpoints to resume from."""


def in_folder(folder: str, paths: Iterable[str]) -> tuple[Unprotected, ...]:
    """Return the checkpoints in a folder of save_dir that is no ZeRO checkpoint itself.

    `paths`: the files below it, relative to it. Forms that ckptd or DeepSpeed derived are none.
    """
    by_place: dict[str, set[str]] = {}
    for path in paths:
        head, _, name = f"{folder}/{path}".rpartition("/")
        if not _IN_DERIVED.search(head):
            by_place.setdefault(head, set()).add(name)
    found: dict[str, Kind] = {}
    for place, names in by_place.items():
        for where, kind in _in_place(place, names):
            found.setdefault(where, kind)
    whole = {path for path, kind in found.items() if kind is not Kind.ZERO}
    # what lies below a checkpoint is a part of it
    return tuple(
        Unprotected(path=path, kind=kind)
        for path, kind in sorted(found.items())
        if not any(path.startswith(f"{other}/") for other in whole if other != path)
    )


def _in_place(place: str, names: set[str]) -> Iterable[tuple[str, Kind]]:
    if any(parse_shard_name(name) for name in names):
        above, _, last = place.rpartition("/")
        yield (above if above and is_shard_root(above.rpartition("/")[2], last) else place), Kind.ZERO
        return
    kind = _kind_of(names)
    if kind is not None:
        yield _checkpoint_of(place, kind), kind
        return
    for name in names:
        if (single := _single(name)) is not None:
            yield f"{place}/{name}", single


def _checkpoint_of(place: str, kind: Kind) -> str:
    """Return the checkpoint's folder: FSDP and Megatron-LM put their files into folders of it."""
    above, _, last = place.rpartition("/")
    is_part = last.startswith(("pytorch_model", "optimizer", "mp_rank_", "model"))
    return above if above and is_part and kind in (Kind.TORCH_SHARDS, Kind.MEGATRON) else place


def at_top(names: Sequence[str], latest: str | None) -> tuple[Unprotected, ...]:
    """Return what the files directly in save_dir are: save_dir itself a checkpoint, or checkpoints in a file.

    The model that a Trainer saves last into output_dir is none: it has no optimizer beside it.
    """
    listed = set(names)
    if any(parse_shard_name(name) for name in listed):
        return (Unprotected(path="", kind=Kind.ZERO),)
    if (kind := _kind_of(listed)) is not None:
        return (Unprotected(path="", kind=kind),)
    singles = ((name, _single(name)) for name in sorted(listed))
    return tuple(
        Unprotected(path=name, kind=kind or Kind.TORCH_FILE)
        for name, kind in singles
        if kind is not None or (name == latest and name.endswith((".pt", ".pth", ".ckpt")))
    )


def is_trainers_checkpoint(names: Iterable[str]) -> bool:
    """Whether the files directly in save_dir are those of one checkpoint-N, with shards in global_stepN."""
    listed = set(names)
    return TRAINER_STATE in listed and any(_RANDOM.match(name) for name in listed)


def is_loose(tag: str) -> bool:
    """Whether shards beside a Trainer's checkpoint-N bear the name that `trainer.save_model` gives them."""
    return _LOOSE.match(tag) is not None


def _kind_of(names: set[str]) -> Kind | None:
    """Classify a folder by the names of its files; None: no checkpoint that can be resumed from."""
    if any(name.endswith(".distcp") or _FSDP_FILE.match(name) for name in names):
        return Kind.TORCH_SHARDS
    if names & _MEGATRON:
        return Kind.MEGATRON
    if any(_FAST_WRITER.search(name) for name in names):
        return Kind.FAST_WRITER
    if not names & _OPTIMIZERS:
        return None
    if TRAINER_STATE in names:
        return Kind.HUGGINGFACE
    return Kind.ACCELERATE if any(_RANDOM.match(name) for name in names) else None


def _single(name: str) -> Kind | None:
    if name.endswith(".ckpt"):
        return Kind.LIGHTNING
    return Kind.TORCH_FILE if _TORCH_FILE.match(name) else None


def warn_unprotected(
    found: Sequence[Unprotected], save_dir: str, latest: str | None, protected: Iterable[str]
) -> tuple[UnprotectedWarning, ...]:
    """Return what is said of them, one for each kind and place; `protected`: tags that are watched."""
    last = max((u.number for u in (Unprotected(path=t, kind=Kind.ZERO) for t in protected)), default=None)
    groups: dict[tuple[Kind, str], list[Unprotected]] = {}
    for one in found:
        groups.setdefault((one.kind, _NUMBERS.sub("*", one.holder)), []).append(one)
    return tuple(_told(group, save_dir, latest, last) for group in groups.values())


def _told(
    group: Sequence[Unprotected], save_dir: str, latest: str | None, last: int | None
) -> UnprotectedWarning:
    newest = next((one for one in group if one.path == latest), None)
    newest = newest or max(group, key=lambda one: (one.number, one.path))
    kind, holder = newest.kind, newest.holder
    more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
    pointed = ", which latest names," if latest and newest.path == latest else ""
    is_urgent = kind is not Kind.LOOSE and (last is None or bool(pointed) or newest.number > last)
    if not newest.path:
        text = f"{save_dir} is itself {kind}: it is not watched, and nothing of it is sent"
        name = save_dir.rstrip("/").rpartition("/")[0] or "/"
        step = f"name its parent as save_dir: {name}" if kind in _WATCHED else KNOWN_ALONE
        return UnprotectedWarning(about=save_dir, text=text, next_step=step, is_urgent=True)
    text = f"{newest.path}{more}{pointed} is {kind}: it is not watched, and nothing of it is sent"
    step = _step_for_file(newest) or KNOWN_ALONE
    if kind is Kind.UNKNOWN:
        text = f"{newest.path}{more}{pointed} is {kind}: it is not protected"
        step = DECLARE
    elif kind is Kind.LOOSE:
        text = f"{newest.path}{more}: {kind}, which the Trainer cannot resume from; left alone and not sent"
        step = '"stage3_gather_16bit_weights_on_model_save": true in DeepSpeed\'s configuration saves the '
        made = f"`ckptd convert {save_dir}/{newest.path} DIR --form weights-fp32` makes it of these"
        step += f"model instead; {made}"
    elif kind is Kind.FAST_WRITER:
        step = (
            "without checkpoint.writer, or with its type python, it is protected; of what is saved, rename "
        )
        step += "each ….pt-0.N to ….pt"
    elif kind in _WATCHED and not holder and kind is not Kind.LIGHTNING:
        step = "rename its folder to checkpoint-N, as the Trainer does, N being its step"
    elif kind in _WATCHED and holder:
        depth = "one folder" if holder.count("/") == 0 else "some folders"
        text = f"{newest.path}{more}{pointed} lies {depth} deeper than save_dir: it is not watched, "
        text += "and nothing of it is sent"
        step = f'name the folder that holds it: save_dir = "{save_dir}/{_glob(holder)}"'
    about = f"{_NUMBERS.sub('*', holder)}/{kind.name.lower()}" if holder else kind.name.lower()
    return UnprotectedWarning(about=about, text=text, next_step=step, is_urgent=is_urgent)


def _step_for_file(one: Unprotected) -> str | None:
    """Return what makes a file directly in save_dir a checkpoint of the job; None: it is no such file."""
    if one.holder or one.kind not in (Kind.TORCH_FILE, Kind.LIGHTNING):
        return None
    if one.kind is Kind.LIGHTNING:
        return 'set trainer = "auto" in the job file, which is for checkpoints of another trainer alone'
    return f'say in the job file that such files are checkpoints: [layout] files = "{_pattern(one.path)}"'


DECLARE = (
    'say in the job file when it is whole: [layout] complete_when = "marker NAME" (docs/integrations.md)'
)
KNOWN_ALONE = (
    "ckptd protects checkpoints of DeepSpeed, the Hugging Face Trainer, Accelerate, Lightning and "
    f"torch.distributed.checkpoint by itself; {DECLARE}"
)


def _pattern(name: str) -> str:
    """Return a pattern of files that are named alike but for their number."""
    return re.sub(r"\d+(?!.*\d)", "*", name)


def _glob(holder: str) -> str:
    """A folder that is numbered has siblings to come: `run-0` → `run-*`."""
    return re.sub(r"\d+(?=/|$)", "*", holder)


def shown_unprotected(found: Iterable[Unprotected]) -> str:
    """Name them with their kinds, for an error of one line."""
    return "; ".join(f"{one.path or 'save_dir itself'} ({one.kind})" for one in found)


def of_listing(
    folders: Mapping[str, Iterable[str]],
    names: Sequence[str],
    loose: Sequence[str],
    latest: str | None,
    at_rest: Collection[str] = (),
) -> tuple[Unprotected, ...]:
    """Return all that one look at a save_dir shows: `folders` that are no checkpoints of the job, each with
    the files below it; the `names` of the files directly in save_dir; `loose` shards; `at_rest`: which
    folders nobody has written in for long, so that their names tell all that they will.
    """
    if is_trainers_checkpoint(names) and loose:
        found = [Unprotected(path="", kind=Kind.ZERO)]
    else:
        found = [*(Unprotected(path=tag, kind=Kind.LOOSE) for tag in loose), *at_top(names, latest)]
    for folder, paths in folders.items():
        inside = in_folder(folder, paths)
        if not inside and folder in at_rest and _is_unknown(folder, paths):
            inside = (Unprotected(path=folder, kind=Kind.UNKNOWN),)
        found += inside
    return tuple(found)


def _is_unknown(folder: str, paths: Iterable[str]) -> bool:
    """Tell whether a folder is named as checkpoints are and holds a state that no layout here describes.

    A model that `save_pretrained` wrote is none.
    """
    names = [path.rpartition("/")[2] for path in paths]
    is_state = any(name.endswith(_STATE_END) for name in names) and not any(map(is_weights, names))
    return is_state and _STATE_NAME.match(folder) is not None
