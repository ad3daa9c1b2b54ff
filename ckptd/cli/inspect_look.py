"""What `ckptd inspect` sees: the kind of a folder, the verdict on each checkpoint, every file in it.

The verdict is the daemon's own (`ckptd.core.lifecycle.judge`), so that both say the same of a folder.
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

from ckptd import files
from ckptd.convert.supervise import inspect_files
from ckptd.core.facts import Archive, FileFacts
from ckptd.core.identity import Model
from ckptd.core.layouts import Grid
from ckptd.core.lifecycle import Context, State, judge
from ckptd.core.listing import FolderListing, ListedFile
from ckptd.core.unprotected import told
from ckptd.errors import CkptdError, NotFoundError
from ckptd.local.scan import read_pointer, scan, scan_folder

_MODEL_STATES = re.compile(r"^(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt$")
_MANIFEST_LIMIT_BYTES = 16 << 20


class SeenFile(Model):
    """One file of a checkpoint."""

    path: str
    bytes: int
    role: str
    archive: str
    fingerprint: str
    reason: str | None = None
    """What is wrong with it; None when nothing is."""


class SeenConversion(Model):
    """Whether a ZeRO checkpoint has a universal form here, and what that would cost (sizes in bytes)."""

    converts: bool
    reason: str | None = None
    """Why it does not convert, in one sentence."""
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
    """What a run resumed from it will find different."""


class SeenCheckpoint(Model):
    """One folder and the verdict on it."""

    tag: str
    kind: Literal["zero", "universal", "weights"]
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
    bytes: int
    saved_seconds_apart: float | None = None
    notes: tuple[str, ...] = ()
    conversion: SeenConversion | None = None
    """Of a single ZeRO folder; None in the overview of a save_dir."""
    files: tuple[SeenFile, ...]


class Seen(Model):
    """A folder given to `ckptd inspect`."""

    path: str
    kind: Literal["zero", "universal", "weights", "save_dir"]
    latest: str | None = None
    latest_universal: str | None = None
    checkpoints: tuple[SeenCheckpoint, ...]
    notes: tuple[str, ...] = ()
    """Checkpoints in a save_dir that are not protected."""

    @property
    def is_sound(self) -> bool:
        """True when every checkpoint is complete and undamaged."""
        return all(c.is_complete for c in self.checkpoints)


def look(path: Path) -> Seen:
    """Inspect a tag folder, a save_dir, a universal folder, or exported weights.

    Raises:
        NotFoundError: there is no checkpoint.
    """
    absolute = os.path.realpath(path)
    if not os.path.isdir(absolute):
        raise NotFoundError(f"{path} is no folder here", hint="give a tag folder or a save_dir")
    parent, name = os.path.split(absolute)
    if not name:
        raise NotFoundError(f"{path} holds no DeepSpeed checkpoint", hint="name a tag folder or a save_dir")
    with files.opened_dir(parent) as parent_fd:
        listing = scan_folder(parent_fd, name)
    if listing is None:
        raise NotFoundError(f"{path} vanished")
    if _is_universal(listing):
        return Seen(path=str(path), kind="universal", checkpoints=(_universal(listing, Path(parent)),))
    if (exported := _weights(listing, Path(parent))) is not None:
        return Seen(path=str(path), kind="weights", checkpoints=(exported,))
    if listing.shards:
        checkpoint = _zero(listing, Path(parent))
        told = checkpoint.model_copy(update={"conversion": look_ahead(Path(absolute))})
        return Seen(path=str(path), kind="zero", checkpoints=(told,))
    return _save_dir(path, absolute)


def look_ahead(folder: Path) -> SeenConversion:
    """What `ckptd convert` beside `folder` would make and cost, or why it would refuse."""
    from ckptd.convert.forecast import forecast

    try:
        seen = forecast(folder, folder.parent / f".{folder.name}.ckptd-forecast")
    except (CkptdError, OSError) as error:
        message = error.message if isinstance(error, CkptdError) else str(error)
        return SeenConversion(
            converts=False, reason=message, hint=error.hint if isinstance(error, CkptdError) else None
        )
    names = [n for n in SeenConversion.model_fields if n not in ("converts", "reason", "hint")]
    return SeenConversion(converts=True, **{name: getattr(seen, name) for name in names})


def _save_dir(path: Path, absolute: str) -> Seen:
    found: list[SeenCheckpoint] = []
    with files.opened_dir(absolute) as fd:
        seen = scan(fd)
        latest, universal = read_pointer(fd, "latest"), read_pointer(fd, "latest_universal")
        for name in sorted(os.listdir(fd), key=_natural):
            try:
                listing = scan_folder(fd, name) if not name.startswith("_ckptd") else None
            except (NotADirectoryError, CkptdError):
                continue
            if listing is None:
                continue
            if _is_universal(listing):
                found.append(_universal(listing, Path(absolute)))
            elif (exported := _weights(listing, Path(absolute))) is not None:
                found.append(exported)
            elif listing.shards:
                found.append(_zero(listing, Path(absolute)))
    tags = [one.tag for one in found if one.kind == "zero"]
    others = told(seen.unprotected, absolute, latest, tags)
    if not found:
        raise NotFoundError(
            f"{path} holds no DeepSpeed checkpoint{''.join(f'; {one.text}' for one in others)}",
            hint="; ".join(dict.fromkeys(one.next_step for one in others)),
        )
    return Seen(
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


def _zero(listing: FolderListing, parent: Path) -> SeenCheckpoint:
    facts = {f.path: f for f in inspect_files(parent / listing.tag, [f.path for f in listing.files])}
    now = time.time()
    newest = max((f.identity.mtime_ns / 1e9 for f in listing.shards), default=0.0)
    listed = _listed_in(parent, listing.tag)
    if listed is not None:  # times there are those of the upload
        listing = replace(listing, files=tuple(map(_without_time, listing.files)))
    context = Context(
        settle_seconds=0.0,
        quiet_seconds=float("inf"),
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
    return SeenCheckpoint(
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
        parameters=next((s.parameters for s in shards if s is not None and s.parameters), None),
        bytes=listing.total_bytes,
        saved_seconds_apart=(times.last - times.first) / 1e9 if times else None,
        notes=verdict.notes,
        files=_seen_files(facts),
    )


def _without_time(file: ListedFile) -> ListedFile:
    return replace(file, identity=replace(file.identity, mtime_ns=0))


def _listed_in(parent: Path, folder: str) -> dict[str, str] | None:
    """Fingerprints by path of what COMMITs list in a folder of a directory remote; None: it lies in none.

    A remote whose documents cannot be read lists nothing: its own COMMITs are what makes it whole (P3).
    """
    from ckptd.remote.apart import open_apart
    from ckptd.remote.reader import live_commits, manifests_of, read_remote

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
    """Why a folder in a remote is not what a COMMIT lists; None: it is, or it lies in no remote."""
    if listed is None:
        return None
    if not listed:
        return "no COMMIT lists it: its upload is under way, or was cut short"
    other = [p for p, wanted in sorted(listed.items()) if p in facts and facts[p].fingerprint != wanted]
    missing = sorted(listed.keys() - facts.keys())
    if other:
        return f"{other[0]} is not the file that its COMMIT lists"
    return f"{missing[0]} is missing, and its COMMIT lists it" if missing else None


def _universal(listing: FolderListing, parent: Path) -> SeenCheckpoint:
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
    ours = _manifest(parent / listing.tag) if "ckptd.json" in facts else {}
    source = ours.get("source") if isinstance(ours.get("source"), dict) else {}
    assert isinstance(source, dict)
    step = source.get("step")
    model = next((f.facts for p, f in facts.items() if _MODEL_STATES.match(p) and f.facts), None)
    return SeenCheckpoint(
        tag=listing.tag,
        kind="universal",
        state="complete" if reason is None else "damaged",
        reason=reason,
        is_complete=reason is None,
        step=step if isinstance(step, int) else model.global_steps if model else None,
        dtype=model.dtype if model else None,
        optimizer=model.optimizer if model else None,
        ds_version=model.ds_version if model else None,
        zero_stage=model.zero_stage if model else None,
        parameters=model.parameters if model else None,
        tensors=len(names),
        layout=str(ours["layout"]) if "layout" in ours else None,
        notes=_loads(facts, names) if ours.get("layout") == "superset" else (),
        bytes=listing.total_bytes,
        files=_seen_files(facts),
    )


def _loads(facts: dict[str, FileFacts], names: set[str]) -> tuple[str, ...]:
    """The superset is for all stages, but stage 3's loader wants Adam's states of every parameter."""
    lacking = {k for k in ("exp_avg", "exp_avg_sq") if any(f"zero/{n}/{k}.pt" not in facts for n in names)}
    words = ", ".join(sorted(lacking))
    return (f"loads in stages 1 and 2; DeepSpeed's stage 3 loader wants {words} too",) if lacking else ()


def _weights(listing: FolderListing, parent: Path) -> SeenCheckpoint | None:
    """Exported weights, by what ckptd.json says; None: something else."""
    from ckptd.cli.inspect_weights import weights

    if not any(f.path == "ckptd.json" for f in listing.files):
        return None
    manifest = _manifest(parent / listing.tag)
    if not str(manifest.get("form", "")).startswith("weights-"):
        return None
    return weights(listing, parent, manifest)


def _manifest(folder: Path) -> dict[str, object]:
    try:
        with files.opened_dir(os.path.realpath(folder)) as fd:
            value = json.loads(files.read_beneath(fd, "ckptd.json", limit_bytes=_MANIFEST_LIMIT_BYTES))
    except (OSError, ValueError, CkptdError):
        return {}
    return value if isinstance(value, dict) else {}


def _damage(facts: dict[str, FileFacts]) -> str | None:
    """The first thing wrong with a file that ought to be an archive."""
    for path, fact in facts.items():
        if fact.archive in (Archive.TORN, Archive.EMPTY) and (fact.reason or path.endswith(".pt")):
            return fact.reason or f"{path} is empty"
    return next((f.reason for f in facts.values() if f.reason), None)


def _seen_files(facts: dict[str, FileFacts]) -> tuple[SeenFile, ...]:
    return tuple(
        SeenFile(
            path=f.path,
            bytes=f.bytes,
            role=f.role.value,
            archive=f.archive.value,
            fingerprint=f.fingerprint,
            reason=f.reason,
        )
        for f in facts.values()
    )
