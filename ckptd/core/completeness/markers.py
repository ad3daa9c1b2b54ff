"""Judge the markers that trainers leave beside the shards when a save is whole, and a node's part of a save.

Measured (docs/formats.md §1.2): Hugging Face writes everything twice at stage 3, so complete shards mean
nothing before trainer_state.json; and other ranks' random states appear after it. Neither marker alone is an
end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.completeness.grid import Spread, named
from ckptd.core.model.facts import Archive
from ckptd.core.model.layouts import (
    TORCH_FILES,
    TRAINER_STATE,
    NamedShard,
    Role,
    Trainer,
    parse_shard_name,
    step_of_folder,
    wanted_marks,
)
from ckptd.core.model.manifest import cells_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.layouts import Grid
    from ckptd.core.model.listing import FolderListing
    from ckptd.core.model.save import SealedSave

PATIENCE_SECONDS = 600.0
"""Wait for random states so long; trainers resume without them."""
OTHER_SAVE_SECONDS = 10
"""A shard that is so much younger than the file that ends a save is of another save, or of a copy: the clocks
of two nodes may differ by less."""
COPY_GAP_SECONDS = 0.5
SLOWEST_COPY_BYTES_PER_SECOND = 10e6


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMarkers:
    """`waits_for`: what is missing, None when nothing is; `is_patient`: its absence is no damage yet."""

    waits_for: str | None = None
    is_patient: bool = False
    notes: tuple[str, ...] = ()


def out_of_order(listing: FolderListing, shards: Mapping[str, FileFacts]) -> str | None:
    """Model states that were written long after the optimizer shard of the same rank; None: there are none.

    The engine writes a rank's model states first (docs/formats.md §1.1). The other way round they are of a
    save that was begun over a finished one and has not come to its optimizer shards; steps do not tell, for
    only one of the two kinds of file holds each. A copy may well change the order, but leaves no gap.
    """
    at = {file.path: file.identity for file in listing.shards if file.path in shards}
    optim = {
        (named(path).shard.d, named(path).shard.mm): identity
        for path, identity in at.items()
        if named(path).role is Role.OPTIM
    }
    for path, identity in at.items():
        shard = named(path)
        other = optim.get((shard.shard.d or 0, shard.shard.mm)) if shard.role is Role.MODEL else None
        if other is None:
            continue
        gap_seconds = (identity.mtime_ns - other.mtime_ns) / 1e9
        if gap_seconds > COPY_GAP_SECONDS + identity.size_bytes / SLOWEST_COPY_BYTES_PER_SECOND:
            return f"{path} was written {gap_seconds:.1f} s after its optimizer shard"
    return None


def judge_markers(
    listing: FolderListing,
    facts: Mapping[str, FileFacts],
    processes: int,
    quiet_seconds: float,
    left_over: frozenset[str],
    *,
    is_in_flight: bool,
) -> EndMarkers:
    """Judge by the trainer's own end-of-save markers a folder whose shards are all there.

    `left_over`: files of the save that these shards were written over; they say nothing of this one.
    `is_in_flight`: the folder changed a moment ago, or a file of it is open.
    """
    # a power cut leaves names without their bytes: trainers flush nothing, and loading such a file fails
    beside = (fact for path, fact in facts.items() if path.endswith(TORCH_FILES) and fact.role is Role.SIDE)
    torn = next((fact for fact in beside if fact.archive is Archive.EMPTY or fact.reason), None)
    if torn is not None:
        return EndMarkers(waits_for=torn.reason or f"{torn.path} is empty")
    names = frozenset(f.path for f in listing.files) - left_over
    if listing.trainer is Trainer.HUGGINGFACE:
        state = facts.get(TRAINER_STATE)
        if TRAINER_STATE not in names or state is None:
            return EndMarkers(waits_for=_absent(TRAINER_STATE, left_over))
        step = state.trainer.global_step if state.trainer else None
        if step != step_of_folder(listing.tag):
            return EndMarkers(waits_for=f"{TRAINER_STATE} is of step {step}, not of {listing.tag}")
        if is_in_flight and (path := _written_after(listing, TRAINER_STATE)) is not None:
            # of a save that was never sealed, and is being written over; in a copy the order means nothing
            return EndMarkers(waits_for=f"{TRAINER_STATE} is older than {path}", is_patient=True)
    missing = [name for name in wanted_marks(listing.trainer, names, processes) if name not in names]
    if missing and quiet_seconds < PATIENCE_SECONDS:
        return EndMarkers(waits_for=_absent(missing[0], left_over), is_patient=True)
    return EndMarkers(notes=tuple(f"{name} was never written" for name in missing))


def _written_after(listing: FolderListing, end: str) -> str | None:
    """Return a shard that was written OTHER_SAVE_SECONDS after the file that ends a save; None: none was."""
    times = {file.path: file.identity.mtime_ns for file in listing.files}
    last_ns = times[end] + OTHER_SAVE_SECONDS * 10**9
    return next((f.path for f in listing.shards if f.identity.mtime_ns > last_ns), None)


def _absent(name: str, left_over: frozenset[str]) -> str:
    return f"{name} is of the save before" if name in left_over else f"{name} is not there yet"


# --- The end of a save, proved instead of waited for (adr/0218) ------------------------------------------


def end_mark(listing: FolderListing) -> str:
    """Return the path of the file that its trainer writes after all ranks have closed theirs; "": none is.

    Hugging Face's rank 0 writes trainer_state.json behind the barrier that ends DeepSpeed's save, of both
    where it saves twice. DeepSpeed itself writes nothing behind its last barrier, and `latest` before it.
    """
    is_one = listing.trainer is Trainer.HUGGINGFACE and listing.other_layout is None
    return TRAINER_STATE if is_one else ""


def proves_end(listing: FolderListing, facts: Mapping[str, FileFacts]) -> bool:
    """Tell whether the file that ends a save ended this one: no shard is younger, no archive is unfinished.

    Of a folder that is complete but for quiet time, in which that file was seen to appear.
    """
    times = {file.path: file.identity.mtime_ns for file in listing.own}
    last_ns = times.get(end_mark(listing))
    if last_ns is None or any(times[f.path] > last_ns for f in (*listing.shards, *listing.swapped)):
        return False
    # other ranks' random states come when they like
    archives = (path for path in times if path.endswith(TORCH_FILES))
    return all(facts[path].archive is Archive.ZIP and not facts[path].reason for path in archives)


# --- A node's part of a save -----------------------------------------------------------------------------
# A node has only the shards that its ranks wrote; the others lie on other nodes' disks. "Complete for this
# node" never means more than that: a part is uploaded with a node manifest, which grows by revisions until
# the union over all nodes covers the proven grid. Nothing here decides on a COMMIT or a deletion.


def may_be_elsewhere(
    spread: Spread | None, present: Iterable[NamedShard], grid: Grid, *, is_in_flight: bool
) -> bool:
    """Tell whether missing shards may be on other nodes: this node's own ranks have all written.

    A rank that saved here before is waited for while the save is in flight; which ranks live here is known
    from the second save on, so a first part may grow (H27).
    """
    here = cells_of(present)
    if spread is None or not here:
        return False
    expected = {cell for cell in spread.usual if cell.d < grid.dp and cell.mm < grid.mm_count}
    return not (is_in_flight and expected - here)


def replicas(save: SealedSave) -> frozenset[str]:
    """Paths of a part that the node of data-parallel rank 0 has too, and sends: `mp_rank_*` (ZeRO-1/2)."""
    if not save.is_part:
        return frozenset()
    owned = {f.shard.mm for f in save.files if f.role is Role.OPTIM and f.shard.d == 0}
    return frozenset(
        f.path for f in save.files if f.role is Role.MODEL and f.shard.d is None and f.shard.mm not in owned
    )


def role_of(path: str) -> Role | None:
    """Return the role of a shard by its name; None if the name is no shard's."""
    named = parse_shard_name(path.rpartition("/")[2])
    return named.role if named else None
