"""Inspect a folder: is it a checkpoint, a universal form, weights or a save_dir, and is it whole?

The verdict is the daemon's own (`ckptd.core.completeness.judge`), so that both say the same of a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ckptd.base import files
from ckptd.base.humanize import in_columns, printable, size_of
from ckptd.base.identity import Model
from ckptd.base.names import DESCRIPTION
from ckptd.base.owned_dirs import list_dir
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.weights import ADAPTER_FILE, read_names
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, judge
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.layouts import Grid, Role
from ckptd.core.model.listing import FolderListing, ListedFile
from ckptd.core.model.other_layouts import STAGE_0, TORCH, words_of
from ckptd.core.model.unprotected import warn_unprotected
from ckptd.errors import CkptdError, NotFoundError
from ckptd.storage.local.derived import DerivedDescription, describe
from ckptd.storage.local.scan import read_pointer, scan, scan_folder

_MODEL_STATES = re.compile(r"^(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt$")


class InspectedFile(Model):
    """One file of a checkpoint."""

    path: str
    bytes: int
    role: str
    archive: str
    fingerprint: str
    reason: str | None = None
    """The fault found in it; None: there is none."""


class ConversionForecast(Model):
    """Report whether a ZeRO checkpoint has a universal form here, and what that would cost (sizes in
    bytes).
    """

    converts: bool
    reason: str | None = None
    """Reason why it does not convert, in one sentence."""
    hint: str | None = None
    layout: str | None = None
    parameters: int | None = None
    files: int | None = None
    bytes: int | None = None
    bytes_cloned: int | None = None
    bytes_copied: int | None = None
    bytes_misplaced: int | None = None
    """Copied although extents clone here: in ranges whose offsets do not agree modulo the block."""
    disk_bytes: int | None = None
    free_bytes: int | None = None
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()
    """Differences that a run resumed from it will meet."""


class InspectedCheckpoint(Model):
    """One folder and the verdict on it."""

    tag: str
    kind: Literal["zero", "universal", "weights", "dcp"]
    state: str
    reason: str | None = None
    is_complete: bool
    step: int | None = None
    optimizer_step: int | None = None
    zero_stage: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    ds_version: str | None = None
    grid: Grid | None = None
    parameters: int | None = None
    """Elements of all trained parameters, in every form; None when the folder does not say."""
    tensors: int | None = None
    """Named tensors (universal, weights)."""
    layout: str | None = None
    """The layout of a universal form, or of a checkpoint without ZeRO shards."""
    bytes: int
    saved_seconds_apart: float | None = None
    notes: tuple[str, ...] = ()
    conversion: ConversionForecast | None = None
    """Given for a single folder of ZeRO or dcp; None in the overview of a save_dir."""
    files: tuple[InspectedFile, ...]


class Inspection(Model):
    """A folder given to `ckptd inspect`."""

    path: str
    kind: Literal["zero", "universal", "weights", "dcp", "save_dir"]
    latest: str | None = None
    latest_universal: str | None = None
    checkpoints: tuple[InspectedCheckpoint, ...]
    notes: tuple[str, ...] = ()
    """Checkpoints in a save_dir that are not protected."""

    @property
    def is_sound(self) -> bool:
        """Tell whether every checkpoint is complete and undamaged."""
        return all(c.is_complete for c in self.checkpoints)

    def __repr__(self) -> str:
        """Show the checkpoints as lines, and why one is not whole or does not convert."""
        rows = [("tag", "kind", "state", "step", "dtype", "ranks", "size", "")]
        for c in self.checkpoints:
            ranks = f"{c.grid.dp} × {c.grid.mm_count}" if c.grid and c.grid.has_shards else ""
            step = "" if c.step is None else str(c.step)
            pointers = (("latest", self.latest), ("latest_universal", self.latest_universal))
            marks = " ".join(f"← {name}" for name, tag in pointers if tag == c.tag)
            rows.append((c.tag, c.kind, c.state, step, c.dtype or "", ranks, size_of(c.bytes), marks))
        lines = [f"{self.path}: {self.kind}", *in_columns(rows)]
        lines += [f"  ! {c.tag}: {c.reason}" for c in self.checkpoints if c.reason]
        lines += [
            f"  ! {c.tag} does not convert: {c.conversion.reason}"
            for c in self.checkpoints
            if c.conversion is not None and not c.conversion.converts
        ]
        lines += [
            f"  {note}" for note in (*self.notes, *(note for c in self.checkpoints for note in c.notes))
        ]
        return "\n".join(map(printable, lines))

    __str__ = __repr__


def inspect_folder(path: Path) -> Inspection:
    """Inspect a tag folder, a checkpoint in one file, a save_dir, a universal folder, or exported weights.

    Raises:
        NotFoundError: there is no checkpoint.
    """
    absolute = os.path.realpath(path)
    if not os.path.exists(absolute):
        raise NotFoundError(f"{path} is not here", hint="give a checkpoint or a save_dir")
    parent, name = os.path.split(absolute)
    if not name:
        raise NotFoundError(f"{path} holds no DeepSpeed checkpoint", hint="name a tag folder or a save_dir")
    with files.opened_dir(parent) as parent_fd:
        listing = scan_folder(parent_fd, name)
    if listing is None:
        raise NotFoundError(f"{path} vanished")
    seen = _checkpoint(listing, Path(parent))
    if seen is None:
        return _save_dir(path, absolute)
    if seen.kind in ("zero", "dcp"):
        has_forms = seen.layout in (None, TORCH.name, STAGE_0)
        forecast = forecast_conversion(Path(absolute)) if has_forms else _without_forms(seen.layout or "")
        seen = seen.model_copy(update={"conversion": forecast})
    return Inspection(path=str(path), kind=seen.kind, checkpoints=(seen,))


def _checkpoint(listing: FolderListing, parent: Path) -> InspectedCheckpoint | None:
    """Return the verdict on a folder; None: it is no checkpoint."""
    if _is_universal(listing):
        return _universal(listing, parent)
    made = _weights(listing, parent) or _dcp(listing, parent)
    return made or (_zero(listing, parent) if listing.shards else None)


def _without_forms(layout: str) -> ConversionForecast:
    reason = f"{words_of(layout)}: other forms are made of ZeRO shards alone"
    return ConversionForecast(converts=False, reason=reason)


def forecast_conversion(folder: Path) -> ConversionForecast:
    """Forecast what `ckptd convert` beside `folder` would make and cost, or why it would refuse."""
    from ckptd.conversion.engine.supervisor import forecast

    try:
        seen = forecast(folder, folder.parent / f".{folder.name}.ckptd-forecast")
    except (CkptdError, OSError) as error:
        message = error.message if isinstance(error, CkptdError) else str(error)
        return ConversionForecast(
            converts=False, reason=message, hint=error.hint if isinstance(error, CkptdError) else None
        )
    names = [n for n in ConversionForecast.model_fields if n not in ("converts", "reason", "hint")]
    return ConversionForecast(converts=True, **{name: getattr(seen, name) for name in names})


def _save_dir(path: Path, absolute: str) -> Inspection:
    found: list[InspectedCheckpoint] = []
    with files.opened_dir(absolute) as fd:
        seen = scan(fd)
        single = {folder.tag for folder in seen.folders if folder.is_single_file}
        latest, universal = read_pointer(fd, "latest"), read_pointer(fd, "latest_universal")
        for name in sorted(list_dir(fd), key=_natural):
            try:
                is_looked_at = name in single or not (name.startswith("_ckptd") or files.is_file(fd, name))
                listing = scan_folder(fd, name) if is_looked_at else None
            except (NotADirectoryError, CkptdError):
                continue
            checkpoint = _checkpoint(listing, Path(absolute)) if listing is not None else None
            found += [checkpoint] if checkpoint is not None else []
    tags = [one.tag for one in found if one.kind == "zero"]
    others = warn_unprotected(seen.unprotected, absolute, latest, tags)
    if not found:
        raise NotFoundError(
            f"{path} holds no DeepSpeed checkpoint{''.join(f'; {one.text}' for one in others)}",
            hint="; ".join(dict.fromkeys(one.next_step for one in others))
            or "name a save_dir, or a folder in one (global_step500, checkpoint-500)",
        )
    return Inspection(
        path=str(path),
        kind="save_dir",
        latest=latest,
        latest_universal=universal,
        checkpoints=tuple(found),
        notes=tuple(f"{one.text}; {one.next_step}" for one in others),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(w), "") if w.isdigit() else (0, w) for w in re.split(r"(\d+)", name)]


def _is_universal(listing: FolderListing) -> bool:
    return any(f.path.startswith("zero/") for f in listing.files)


def _zero(listing: FolderListing, parent: Path) -> InspectedCheckpoint:
    facts = {f.path: f for f in inspect_files(parent / listing.place, [f.path for f in listing.files])}
    now = time.time()
    newest = max((f.identity.mtime_ns / 1e9 for f in listing.shards), default=0.0)
    listed = _listed_in(parent, listing.tag)
    if listed is not None:  # times there are those of the upload
        listing = replace(listing, files=tuple(map(_without_time, listing.files)))
    context = Context(
        is_in_flight=listed is None and now - newest < 5.0,
        save_spread_seconds=60.0,
        is_to_send=False,
    )
    verdict = judge(listing, facts, None, context)
    damaged = _damage(facts)
    damaged = damaged or _unlisted(facts, listed)
    reason = verdict.reason or damaged
    whole = verdict.state is State.COMPLETE and damaged is None
    times = verdict.window if listed is None else None
    shards = [facts[f.path].facts for f in listing.shards]
    return InspectedCheckpoint(
        tag=listing.tag,
        kind="zero",
        state=verdict.state.value if whole or verdict.state is not State.COMPLETE else "damaged",
        reason=None if whole else reason,
        is_complete=whole,
        step=verdict.step,
        optimizer_step=verdict.optimizer_step,
        zero_stage=verdict.writer.zero_stage,
        dtype=verdict.writer.dtype,
        optimizer=verdict.writer.optimizer,
        ds_version=verdict.writer.ds_version,
        grid=verdict.grid,
        layout=(listing.other_layout.name if listing.other_layout else verdict.grid and verdict.grid.layout)
        or None,
        parameters=next((s.parameters for s in shards if s is not None and s.parameters), None),
        bytes=listing.total_bytes,
        saved_seconds_apart=(times.last - times.first) / 1e9 if times else None,
        notes=verdict.notes,
        files=_seen_files(facts),
    )


def _without_time(file: ListedFile) -> ListedFile:
    return replace(file, identity=replace(file.identity, mtime_ns=0))


def _listed_in(parent: Path, folder: str) -> dict[str, str] | None:
    """Return fingerprints by path of what COMMITs list in a folder of a directory remote; None: in none.

    A remote whose documents cannot be read lists nothing: its own COMMITs are what makes it whole (P3).
    """
    from ckptd.storage.child.apart import open_apart
    from ckptd.storage.remote.observe import live_commits, manifests_of, read_remote

    if not (parent / "_ckptd" / "remote.json").is_file():
        return None
    store = open_apart(str(parent), str(parent))
    listed: dict[str, str] = {}
    with contextlib.suppress(CkptdError):
        for view in live_commits(read_remote(store)):
            for manifest in manifests_of(store, view):
                for file in manifest.files:
                    place, _, path = file.key.partition("/")
                    if place == folder:
                        listed[path] = file.fingerprint
    return listed


def _unlisted(facts: dict[str, FileFacts], listed: dict[str, str] | None) -> str | None:
    """Return why a folder in a remote is not what a COMMIT lists; None: it is, or it lies in no remote."""
    if listed is None:
        return None
    if not listed:
        return "no COMMIT lists it: its upload is under way, or was cut short"
    other = [p for p, wanted in sorted(listed.items()) if p in facts and facts[p].fingerprint != wanted]
    missing = sorted(listed.keys() - facts.keys())
    if other:
        return f"{other[0]} is not the file that its COMMIT lists"
    return f"{missing[0]} is missing, and its COMMIT lists it" if missing else None


def _universal(listing: FolderListing, parent: Path) -> InspectedCheckpoint:
    facts = {f.path: f for f in inspect_files(parent / listing.tag, [f.path for f in listing.files])}
    names = {p.removeprefix("zero/").rpartition("/")[0] for p in facts if p.startswith("zero/")} - {""}
    reason = _damage(facts)
    if "zero/optimizer_state.pt" not in facts:
        reason = reason or "zero/optimizer_state.pt is missing"
    if not any(_MODEL_STATES.match(p) for p in facts):
        reason = reason or "no *_model_states.pt: no loader finds its start here"
    lacking = sorted(n for n in names if f"zero/{n}/fp32.pt" not in facts)
    if lacking:
        reason = reason or f"zero/{lacking[0]}/fp32.pt is missing"
    ours = _description(listing, parent)
    step = ours.source.step if ours is not None else None
    model = next((f.facts for p, f in facts.items() if _MODEL_STATES.match(p) and f.facts), None)
    return InspectedCheckpoint(
        tag=listing.tag,
        kind="universal",
        state="complete" if reason is None else "damaged",
        reason=reason,
        is_complete=reason is None,
        step=model.global_steps if step is None and model else step,
        dtype=model.dtype if model else None,
        optimizer=model.optimizer if model else None,
        ds_version=model.ds_version if model else None,
        zero_stage=model.zero_stage if model else None,
        parameters=model.parameters if model else None,
        tensors=len(names),
        layout=ours.layout if ours is not None else None,
        notes=_loads(facts, names) if ours is not None and ours.layout == "superset" else (),
        bytes=listing.total_bytes,
        files=_seen_files(facts),
    )


def _dcp(listing: FolderListing, parent: Path) -> InspectedCheckpoint | None:
    """Return the verdict on a folder whose ckptd.json says that it is dcp; None: something else."""
    ours = _description(listing, parent)
    if ours is None or ours.form != "dcp":
        return None
    facts = {f.path: f for f in inspect_files(parent / listing.tag, [f.path for f in listing.files])}
    reason = TORCH.missing(listing.tag, facts)
    return InspectedCheckpoint(
        tag=listing.tag,
        kind="dcp",
        state="complete" if reason is None else "damaged",
        reason=reason,
        is_complete=reason is None,
        step=ours.source.step,
        layout=TORCH.name,
        bytes=listing.total_bytes,
        files=_seen_files(facts),
    )


def _loads(facts: dict[str, FileFacts], names: set[str]) -> tuple[str, ...]:
    """Note where stage 3's loader cannot load a superset: it wants Adam's states of every parameter."""
    lacking = {k for k in ("exp_avg", "exp_avg_sq") if any(f"zero/{n}/{k}.pt" not in facts for n in names)}
    words = ", ".join(sorted(lacking))
    return (f"loads in stages 1 and 2; DeepSpeed's stage 3 loader wants {words} too",) if lacking else ()


def _description(listing: FolderListing, parent: Path) -> DerivedDescription | None:
    """Read the `ckptd.json` of a form; None: it has none that can be read."""
    if not any(file.path == DESCRIPTION for file in listing.files):
        return None
    place, name = os.path.split(os.path.realpath(parent / listing.tag))
    try:
        with files.opened_dir(place) as fd:
            return describe(fd, name)
    except (OSError, CkptdError):
        return None


def _damage(facts: dict[str, FileFacts]) -> str | None:
    """Return the first thing wrong with a file that ought to be an archive."""
    for path, fact in facts.items():
        if fact.archive in (Archive.TORN, Archive.EMPTY) and (fact.reason or path.endswith(".pt")):
            return fact.reason or f"{path} is empty"
    return next((f.reason for f in facts.values() if f.reason), None)


def _seen_files(facts: dict[str, FileFacts]) -> tuple[InspectedFile, ...]:
    return tuple(
        InspectedFile(
            path=f.path,
            bytes=f.bytes,
            role=f.role.value,
            archive=f.archive.value,
            fingerprint=f.fingerprint,
            reason=f.reason,
        )
        for f in facts.values()
    )


# ---------------------------------------------------------------------------------------------------------
# What `ckptd inspect` says of exported weights: headers against sizes, the index against the files.
# Reads headers alone, so that a folder of hundreds of gigabytes is looked at in no time.

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_INDEX_LIMIT_BYTES = 100_000_000


def _weights(listing: FolderListing, parent: Path) -> InspectedCheckpoint | None:
    """Return the verdict on a folder whose ckptd.json says that it is weights; None: something else."""
    ours = _description(listing, parent)
    if ours is None or not ours.form.startswith("weights-"):
        return None
    held: dict[str, list[str]] = {}
    seen: list[InspectedFile] = []
    with files.opened_dir(os.path.realpath(parent / listing.tag)) as fd:
        for file in listing.files:
            reason = None
            if file.path.endswith(".safetensors"):
                try:
                    with files.reading(fd, file.path) as opened:
                        held[file.path] = read_names(opened, file.path)
                except (CkptdError, OSError) as error:
                    reason = error.message if isinstance(error, CkptdError) else str(error)
            role = Role.WEIGHTS if file.path.endswith(".safetensors") else Role.SIDE
            seen.append(
                InspectedFile(
                    path=file.path,
                    bytes=file.identity.size_bytes,
                    role=role.value,
                    archive=Archive.OTHER.value,
                    fingerprint="",
                    reason=reason,
                )
            )
        reason = next((f.reason for f in seen if f.reason), None) or _index_reason(fd, held)
    return InspectedCheckpoint(
        tag=listing.tag,
        kind="weights",
        state="complete" if reason is None else "damaged",
        reason=reason,
        is_complete=reason is None,
        step=ours.source.step,
        zero_stage=ours.source.zero_stage,
        dtype=ours.form.removeprefix("weights-"),
        tensors=sum(len(names) for names in held.values()),
        layout=ours.layout,
        bytes=listing.total_bytes,
        files=tuple(seen),
    )


def _index_reason(fd: int, held: dict[str, list[str]]) -> str | None:
    """Return why files and index do not agree; adapters of PEFT stand in no index."""
    adapters = {file for file in held if file.rpartition("/")[2] == ADAPTER_FILE}
    held = {file: names for file, names in held.items() if file not in adapters}
    if set(held) == {SINGLE} or (adapters and not held):
        return None
    try:
        listed = json.loads(files.read_beneath(fd, INDEX, limit_bytes=_INDEX_LIMIT_BYTES))["weight_map"]
        wanted = {str(name): str(file) for name, file in listed.items()}
    except (OSError, CkptdError, ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} is missing or unreadable" if held else "there is no file of weights"
    absent = sorted(set(wanted.values()) - set(held))
    if absent:
        return f"{absent[0]} is missing"
    if wanted != {name: file for file, names in held.items() for name in names}:
        return f"{INDEX} lists other tensors than the files hold"
    return None
