"""Judge whether a folder is a complete save, from its listing and inspected facts (design.md §3 *Complete*).

`latest` is never asked: trainers write it whatever the shards are. The grid is what metadata inside the
shards proves; file names only raise the expectation. A verdict never deletes: an incomplete folder is left
alone and explained.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ckptd.base.names import tag_problem
from ckptd.core.completeness.grid import Context, expert_notes, known, named, prove_grid, two_saves
from ckptd.core.completeness.markers import judge_markers, may_be_elsewhere, out_of_order, proves_end
from ckptd.core.completeness.peer_evidence import find_evidence
from ckptd.core.completeness.stale_files import WrittenShard, stale_layout
from ckptd.core.completeness.swapped_tensors import lacking
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.layouts import (
    Grid,
    Role,
    Trainer,
    missing_shards,
    parse_shard_name,
)
from ckptd.core.model.other_layouts import STAGE_0
from ckptd.core.model.save import SaveWindow, Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.base.identity import FileIdentity
    from ckptd.core.model.listing import FolderListing
    from ckptd.core.model.other_layouts import Layout

SLOWEST_SAVE_BYTES_PER_SECOND = 100e6


PIPELINE_0 = (
    "a pipeline of DeepSpeed without ZeRO (stage 0), whose files do not tell how many layers there are"
)


class State(StrEnum):
    """Verdict on a folder."""

    SAVING = "saving"
    UNKNOWN = "unknown"
    """Quiet, but not every file has been inspected yet."""
    INCOMPLETE = "incomplete"
    RESAVING = "resaving"
    TORN_RESAVE = "torn re-save"
    SUSPECT = "suspect"
    LEFTOVER = "leftover"
    """Sealed before, and files of it are gone while none is new: somebody is removing it, or was."""
    REFUSED = "refused"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Remember the last sealed save of a tag: the identities of its shards (path → identity)."""

    shards: Mapping[str, FileIdentity]
    is_part: bool = False
    """It was one node's part of a save, which may grow."""
    beside: Mapping[str, FileIdentity] = field(default_factory=dict)
    """Identities, as they are now, of its other files that nobody wrote since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Hold the judgement; `needs`: paths to inspect before judging again."""

    state: State
    reason: str | None = None
    needs: tuple[str, ...] = ()
    grid: Grid | None = None
    step: int | None = None
    optimizer_step: int | None = None
    writer: Writer = field(default_factory=Writer)
    window: SaveWindow | None = None
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Shards that the proven grid demands and the folder lacks; of a complete one: other nodes' (a part)."""
    stale: tuple[str, ...] = ()
    """Shards that a run with another ZeRO stage or precision left: files beside this save."""
    is_unread: bool = False
    """Judged without what the disk refuses to give: rights, or a disk that fails."""


def judge(
    listing: FolderListing, facts: Mapping[str, FileFacts], memory: Memory | None, context: Context
) -> Verdict:
    """Judge one folder; `facts` by path, only those of the current identities.

    The tests run from cheap to dear and from "still moving" to "complete"; each names the file it is about.
    """
    problem = tag_problem(listing.tag) if context.is_to_send else None
    if problem:
        return Verdict(state=State.REFUSED, reason=f"tag {listing.tag!r} {problem}; rename it to upload it")
    gone = _gone(listing, memory)
    if gone:
        return Verdict(state=State.LEFTOVER, reason=f"being removed: {gone} is gone, nothing is new")
    moving = Verdict(state=_moving(listing, memory), reason="files are still changing")
    is_quiet = context.quiet_seconds >= max(context.settle_seconds, listing.quiet_seconds)
    if not is_quiet and (memory is not None or not context.saw_end):
        return moving
    verdict = _at_rest(listing, facts, memory, context)
    if is_quiet or verdict.state is State.UNKNOWN:
        return verdict
    is_whole = verdict.state is State.COMPLETE and not verdict.missing and not verdict.stale
    return verdict if is_whole and proves_end(listing, facts) else moving


def _at_rest(
    listing: FolderListing, facts: Mapping[str, FileFacts], memory: Memory | None, context: Context
) -> Verdict:
    """Judge a folder in which nobody writes."""
    needs = tuple(f.path for f in listing.own if f.path not in facts)
    if needs:
        return Verdict(state=State.UNKNOWN, needs=needs)
    shards = {f.path: facts[f.path] for f in listing.shards}
    torn = _torn(shards)
    if torn:
        return _not_yet(listing, memory, context, torn)
    if listing.other_layout is not None:
        return _without_shards(listing, listing.other_layout, facts, memory, context)
    written = {f.path: f.identity.mtime_ns for f in listing.shards}
    left = {path for root in listing.roots for path in _of_other_layout(_within(root, shards), written)}
    shards = {path: fact for path, fact in shards.items() if path not in left}
    if context.spread is not None and context.spread.evidence:
        evidence = find_evidence(
            context.spread.evidence, shards, written, save_spread_seconds=context.save_spread_seconds
        )
        context = replace(context, evidence=evidence)
    grids: list[Grid] = []
    current: dict[str, FileFacts] = {}
    elsewhere: tuple[str, ...] = ()
    for root in listing.roots:
        grid, inside, problem, missing = _root(root, shards, listing, context)
        if grid is None:
            return replace(_not_yet(listing, memory, context, problem), missing=missing)
        grids.append(grid)
        current |= inside
        elsewhere += missing
    ranks = 0 if elsewhere else grids[0].dp * grids[0].mm_count
    left_over, is_in_flight = _left_over(listing, memory), context.is_in_flight
    marks = judge_markers(listing, facts, ranks, context.quiet_seconds, left_over, is_in_flight=is_in_flight)
    # of a trainer's own marks other nodes may have none
    if marks.waits_for is not None and (context.is_in_flight or not elsewhere):
        # the writer is at work or has gone quiet in mid-save: which of the two, its age tells
        if marks.is_patient:
            return Verdict(state=_moving(listing, memory), reason=marks.waits_for)
        return _not_yet(listing, memory, context, marks.waits_for)
    verdict = _whole(listing, current, grids[0], memory, context, marks.notes)
    verdict = replace(verdict, stale=tuple(sorted(left)))
    return replace(verdict, missing=elsewhere) if verdict.state is State.COMPLETE else verdict


def _without_shards(
    listing: FolderListing,
    layout: Layout,
    facts: Mapping[str, FileFacts],
    memory: Memory | None,
    context: Context,
) -> Verdict:
    """Judge a checkpoint of another layout by what that layout says is missing."""
    own = {file.path: facts[file.path] for file in listing.own}
    reason = layout.missing(listing.tag, own)
    if reason is not None:
        return _not_yet(listing, memory, context, reason)
    step = layout.step(listing.tag, own)
    if step is None:
        return Verdict(state=State.REFUSED, reason="its name holds no number that tells its step")
    verdict = Verdict(
        state=State.COMPLETE,
        grid=Grid(dp=0, mm_count=0, zero_stage=0, proof=layout.words, layout=layout.name),
        step=step,
        writer=Writer(trainer=listing.trainer.value),
        window=_window(listing, {file.path: facts[file.path] for file in listing.shards}),
        notes=() if layout.is_resumable else ("only a model: nothing to resume from",),
    )
    if tuple(sorted((f.path, facts[f.path].fingerprint) for f in listing.shards)) in context.accepted:
        return verdict
    renewed, kept = _renewal(listing, memory)
    renewed = [path for path in renewed if memory is not None and path in memory.shards]
    if renewed and kept:
        return _not_yet(listing, memory, context, f"{renewed[0]} was saved again, {kept[0]} was not")
    doubt = _after_the_last(listing, layout.written_last) or _too_wide(listing, verdict, context)
    return verdict if doubt is None else _with(verdict, State.SUSPECT, doubt)


def _after_the_last(listing: FolderListing, last: str) -> str | None:
    """Name a file of the state that is younger than the one that is written last, as the job file says."""
    times = {file.path: file.identity.mtime_ns for file in listing.own}
    newer = [file.path for file in listing.shards if last and file.identity.mtime_ns > times[last]]
    return f"two saves? {newer[0]} was written after {last}" if newer else None


def _root(
    root: str, shards: Mapping[str, FileFacts], listing: FolderListing, context: Context
) -> tuple[Grid | None, dict[str, FileFacts], str, tuple[str, ...]]:
    """Return the proven grid of one shard root and the shards that belong to it; or why it is not whole."""
    inside = _within(root, shards)
    grid, problem = prove_grid(inside, context)
    if grid is None:
        return None, {}, problem or "the grid is not proven yet", ()
    inside = {path: fact for path, fact in inside.items() if not _is_stale(path, grid)}
    present = frozenset(named(path) for path in inside)
    if grid.zero_stage == 0 and not any(shard.role is Role.OPTIM for shard in present):
        if any(fact.facts is not None and fact.facts.groups for fact in inside.values()):
            return None, {}, "no optimizer shard yet", ()
        if any(shard.role is Role.LAYER for shard in present) and not grid.layers:
            return None, {}, PIPELINE_0, ()
        absent = missing_shards(grid.model_copy(update={"dp": 0}), present)
        if absent:
            return None, {}, f"missing: {absent[0]}", ()
        # the optimizer lies in the model states: any number of data-parallel ranks loads them
        return Grid(dp=0, mm_count=0, zero_stage=0, proof=grid.proof, layout=STAGE_0), inside, "", ()
    missing = missing_shards(grid, present)
    if missing and not may_be_elsewhere(context.spread, present, grid, is_in_flight=context.is_in_flight):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        where = f" in {root}" if root else ""
        return None, {}, f"missing{where}: {missing[0]}{more}", missing
    sizes = {f.path: f.identity.size_bytes for f in listing.own}
    unheld = lacking(root, inside, sizes, listing.empty, grid.mm_count)
    return (grid, inside, "", missing) if unheld is None else (None, {}, unheld, ())


def _of_other_layout(inside: Mapping[str, FileFacts], written: Mapping[str, int]) -> frozenset[str]:
    rows = ((path, named(path), fact.facts) for path, fact in inside.items())
    return stale_layout(
        WrittenShard(
            path=path,
            is_optimizer=name.role is Role.OPTIM,
            is_ranked=name.shard.d is not None,
            stage=facts.zero_stage if facts else None,
            dtype=facts.dtype if facts else None,
            written_ns=written[path],
        )
        for path, name, facts in rows
        if name.role in (Role.OPTIM, Role.MODEL)
    )


def _whole(
    listing: FolderListing,
    shards: Mapping[str, FileFacts],
    grid: Grid,
    memory: Memory | None,
    context: Context,
    notes: tuple[str, ...],
) -> Verdict:
    window = _window(listing, shards)
    step, optimizer_step = step_of(listing.tag, shards)
    if context.evidence is not None:
        step = context.evidence.step
    verdict = Verdict(
        state=State.COMPLETE,
        grid=grid,
        step=step,
        optimizer_step=optimizer_step,
        writer=_writer(listing, shards, grid),
        window=window,
        notes=notes
        + expert_notes(shards, grid)
        + tuple(
            f"{f.path} is stale: an earlier save of another layout left it"
            for f in listing.shards
            if f.path not in shards
        ),
    )
    if tuple(sorted((p, f.fingerprint) for p, f in shards.items())) in context.accepted:
        return verdict
    mixed = next((m for root in listing.roots if (m := two_saves(_within(root, shards), grid))), None)
    if mixed:
        return _with(verdict, State.TORN_RESAVE, f"shards of two saves: {mixed}")
    renewed, kept = _renewal(listing, memory, shards)
    if renewed and kept:
        state = State.RESAVING if context.is_in_flight else State.TORN_RESAVE
        return _with(verdict, state, f"{renewed[0]} was saved again, {kept[0]} was not")
    late = out_of_order(listing, shards)
    if late:
        return _with(verdict, State.SUSPECT, f"two saves? {late}")
    if (wide := _too_wide(listing, verdict, context)) is not None:
        return _with(verdict, State.SUSPECT, wide)
    if step is None:
        return _with(verdict, State.SUSPECT, "no shard tells its step and the tag holds no number")
    return verdict


def _too_wide(listing: FolderListing, verdict: Verdict, context: Context) -> str | None:
    """Say that the files of a save were written further apart than one save takes; None: they were not."""
    window = verdict.window
    wide_seconds = (window.last - window.first) / 1e9 if window is not None else 0.0
    limit = max(
        context.save_spread_seconds,
        3 * context.widest_save_seconds,
        listing.total_bytes / SLOWEST_SAVE_BYTES_PER_SECOND,
    )
    if wide_seconds <= limit:
        return None
    return f"two saves? shards were written {wide_seconds:.0f} s apart (more than {limit:.0f} s)"


def step_of(tag: str, shards: Mapping[str, FileFacts]) -> tuple[int | None, int | None]:
    """Return (step, optimizer step): of model states, else of the optimizer, else the tag's number."""
    steps = [f.facts.global_steps for f in shards.values() if f.facts and f.facts.global_steps is not None]
    optimizer = [
        f.facts.optimizer_step for f in shards.values() if f.facts and f.facts.optimizer_step is not None
    ]
    optimizer_step = optimizer[0] if optimizer else None
    if steps:
        return steps[0], optimizer_step
    number = re.search(r"(\d+)(?!.*\d)", tag)
    return optimizer_step if optimizer_step is not None else int(
        number[1]
    ) if number else None, optimizer_step


def _within(root: str, shards: Mapping[str, FileFacts]) -> dict[str, FileFacts]:
    return {path: fact for path, fact in shards.items() if path.rpartition("/")[0] == root}


def _with(verdict: Verdict, state: State, reason: str) -> Verdict:
    return Verdict(
        state=state,
        reason=reason,
        grid=verdict.grid,
        step=verdict.step,
        optimizer_step=verdict.optimizer_step,
        writer=verdict.writer,
        window=verdict.window,
        notes=verdict.notes,
    )


def _renewal(
    listing: FolderListing, memory: Memory | None, within: Mapping[str, FileFacts] | None = None
) -> tuple[list[str], list[str]]:
    """Shards (renewed, kept) against the last sealed save; both empty without memory."""
    if memory is None:
        return [], []
    now = {f.path: f.identity for f in listing.shards if within is None or f.path in within}
    # one that was not sealed appeared later: no shard waits for it any more
    now |= {f.path: f.identity for f in listing.swapped if f.path in memory.shards}
    kept = [p for p, identity in now.items() if memory.shards.get(p) == identity]
    renewed = [p for p in now if p not in kept and (p in memory.shards or not memory.is_part)]
    return renewed, kept


def _left_over(listing: FolderListing, memory: Memory | None) -> frozenset[str]:
    """Return the files beside shards that were saved again which the save before left: they end that one."""
    if memory is None or not _renewal(listing, memory)[0]:
        return frozenset()
    return frozenset(f.path for f in listing.files if memory.beside.get(f.path) == f.identity)


def _gone(listing: FolderListing, memory: Memory | None) -> str | None:
    """Return a file that a trainer's rotation deleted: it deletes file by file, so this is no torn save.

    Of DeepSpeed's own layout only shards count: there, people tidy what lies beside them.
    """
    if memory is None or _renewal(listing, memory)[0]:
        return None
    here = {f.path for f in listing.files}
    gone = sorted(path for path in memory.shards if path not in here)
    if listing.trainer is Trainer.DEEPSPEED:
        gone = [path for path in gone if parse_shard_name(path.rpartition("/")[2])]
    return gone[0] if gone else None


def _moving(listing: FolderListing, memory: Memory | None) -> State:
    return State.RESAVING if memory is not None and _renewal(listing, memory)[1] else State.SAVING


def _not_yet(listing: FolderListing, memory: Memory | None, context: Context, reason: str) -> Verdict:
    if reason == PIPELINE_0:
        return Verdict(state=State.REFUSED, reason=reason)
    renewed, kept = _renewal(listing, memory)
    if context.is_in_flight:
        return Verdict(state=State.RESAVING if kept else State.SAVING, reason=reason)
    # a part that is new throughout waits for the others, as a first one does
    is_anew = memory is not None and memory.is_part and set(memory.shards) <= set(renewed)
    if memory is not None and not is_anew and (renewed or len(kept) < len(memory.shards)):
        return Verdict(state=State.TORN_RESAVE, reason=reason)
    return Verdict(state=State.INCOMPLETE, reason=reason)


def _torn(shards: Mapping[str, FileFacts]) -> str | None:
    for path, fact in shards.items():
        why = f" ({fact.reason})" if fact.reason else ""
        if fact.archive in (Archive.TORN, Archive.EMPTY):
            return f"{path} is {'empty' if fact.archive is Archive.EMPTY else 'cut off'}{why}"
        if fact.reason and not fact.fingerprint:  # not even framed as an archive
            return f"{path} was not read{why}"
    return None


def _window(listing: FolderListing, within: Mapping[str, FileFacts]) -> SaveWindow:
    times = [f.identity.mtime_ns for f in listing.shards if f.path in within]
    return SaveWindow(first=min(times), last=max(times))


def _writer(listing: FolderListing, shards: Mapping[str, FileFacts], grid: Grid) -> Writer:
    read = [f for _, f in known(shards)]

    def first(what: str) -> str | None:
        value = next((getattr(f, what) for f in read if getattr(f, what) is not None), None)
        return None if value is None else str(value)

    return Writer(
        trainer=listing.trainer.value,
        ds_version=first("ds_version"),
        zero_stage=grid.zero_stage,
        dtype=first("dtype"),
        optimizer=first("optimizer"),
    )


def _is_stale(path: str, grid: Grid) -> bool:
    shard = named(path).shard
    return (shard.d or 0) >= grid.dp or (shard.mm or 0) >= grid.mm_count
