"""Is this folder a complete save? A verdict on structure, from listing and inspected facts (§3 *Complete*).

`latest` is never asked. The grid is what metadata inside the shards proves; names present only raise the
expectation (H13). A verdict never deletes: what is not complete is left alone and explained (P5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ckptd.core.facts import Archive, FileFacts, ShardFacts
from ckptd.core.layouts import Grid, NamedShard, Role, missing_shards, parse_shard_name
from ckptd.core.manifest import SaveWindow, Writer, tag_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.core.identity import FileIdentity
    from ckptd.core.listing import FolderListing

SLOWEST_SAVE_BYTES_PER_SECOND = 100e6


class State(StrEnum):
    """Verdict on a folder."""

    SAVING = "saving"
    UNKNOWN = "unknown"
    """Quiet, but not every file has been inspected yet."""
    INCOMPLETE = "incomplete"
    RESAVING = "resaving"
    TORN_RESAVE = "torn re-save"
    SUSPECT = "suspect"
    REFUSED = "refused"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is remembered of a tag: identities of its last sealed save's shards (path → identity)."""

    shards: Mapping[str, FileIdentity]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything beside the folder that a verdict needs.

    `quiet_seconds`: since when no identity changed, by our monotonic clock; `is_in_flight`: changed less than
    max(60 s, 3 × settle) ago or held open for writing; `widest_save_seconds`: widest window seen in this job.
    """

    settle_seconds: float
    quiet_seconds: float
    is_in_flight: bool
    save_spread_seconds: float
    widest_save_seconds: float = 0.0
    accepted: frozenset[tuple[tuple[str, str], ...]] = frozenset()
    """Fingerprint sets of saves that a person accepted."""
    known_grids: frozenset[tuple[int, int, int]] = frozenset()
    """(dp, mm_count, stage) proven earlier in this job (H28)."""
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement; `needs`: paths to inspect before judging again."""

    state: State
    reason: str | None = None
    needs: tuple[str, ...] = ()
    grid: Grid | None = None
    step: int | None = None
    optimizer_step: int | None = None
    writer: Writer = field(default_factory=Writer)
    window: SaveWindow | None = None
    notes: tuple[str, ...] = ()


def judge(
    listing: FolderListing, facts: Mapping[str, FileFacts], memory: Memory | None, context: Context
) -> Verdict:
    """Judge one folder; `facts` by path, only those of the current identities.

    The tests run from cheap to dear and from "still moving" to "complete"; each names the file it is about.
    """
    problem = tag_problem(listing.tag)
    if problem:
        return Verdict(state=State.REFUSED, reason=f"tag {listing.tag!r} {problem}; rename it to ship it")
    if context.quiet_seconds < context.settle_seconds:
        return Verdict(state=_moving(listing, memory), reason="files are still changing")
    needs = tuple(f.path for f in listing.files if f.path not in facts)
    if needs:
        return Verdict(state=State.UNKNOWN, needs=needs)
    shards = {f.path: facts[f.path] for f in listing.shards}
    torn = _torn(shards)
    if torn:
        return _not_yet(listing, memory, context, torn)
    grid, problem = _grid(shards, context)
    if grid is None:
        return _not_yet(listing, memory, context, problem or "the grid is not proven yet")
    shards = {path: fact for path, fact in shards.items() if not _is_stale(path, grid)}
    present = frozenset(_name(path) for path in shards)
    missing = missing_shards(grid, present)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return _not_yet(listing, memory, context, f"missing: {missing[0]}{more}")
    return _whole(listing, shards, grid, memory, context)


def _whole(
    listing: FolderListing,
    shards: Mapping[str, FileFacts],
    grid: Grid,
    memory: Memory | None,
    context: Context,
) -> Verdict:
    window = _window(listing, shards)
    step, optimizer_step = step_of(listing.tag, shards)
    verdict = Verdict(
        state=State.COMPLETE,
        grid=grid,
        step=step,
        optimizer_step=optimizer_step,
        writer=_writer(shards, grid),
        window=window,
        notes=tuple(
            f"{f.path} lies outside the grid of this save (stale)"
            for f in listing.shards
            if f.path not in shards
        ),
    )
    if tuple(sorted((p, f.fingerprint) for p, f in shards.items())) in context.accepted:
        return verdict
    mixed = _mixed(shards, grid)
    if mixed:
        return _with(verdict, State.TORN_RESAVE, f"shards of two saves: {mixed}")
    renewed, kept = _renewal(listing, memory, shards)
    if renewed and kept:
        state = State.RESAVING if context.is_in_flight else State.TORN_RESAVE
        return _with(verdict, state, f"{renewed[0]} was saved again, {kept[0]} was not")
    wide_seconds = (window.last - window.first) / 1e9
    limit = max(
        context.save_spread_seconds,
        3 * context.widest_save_seconds,
        listing.total_bytes / SLOWEST_SAVE_BYTES_PER_SECOND,
    )
    if wide_seconds > limit:
        reason = f"two saves? shards were written {wide_seconds:.0f} s apart (more than {limit:.0f} s)"
        return _with(verdict, State.SUSPECT, reason)
    if step is None:
        return _with(verdict, State.SUSPECT, "no shard tells its step and the tag holds no number")
    return verdict


def step_of(tag: str, shards: Mapping[str, FileFacts]) -> tuple[int | None, int | None]:
    """(step, optimizer step): global_steps of model states, else the optimizer's, else the tag's number."""
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


def _name(path: str) -> NamedShard:
    named = parse_shard_name(path)
    assert named is not None
    return named


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
    kept = [p for p, identity in now.items() if memory.shards.get(p) == identity]
    renewed = [p for p in now if p not in kept]
    return renewed, kept


def _moving(listing: FolderListing, memory: Memory | None) -> State:
    return State.RESAVING if memory is not None and _renewal(listing, memory)[1] else State.SAVING


def _not_yet(listing: FolderListing, memory: Memory | None, context: Context, reason: str) -> Verdict:
    renewed, kept = _renewal(listing, memory)
    if context.is_in_flight:
        return Verdict(state=State.RESAVING if kept else State.SAVING, reason=reason)
    if memory is not None and (renewed or len(kept) < len(memory.shards)):
        return Verdict(state=State.TORN_RESAVE, reason=reason)
    return Verdict(state=State.INCOMPLETE, reason=reason)


def _torn(shards: Mapping[str, FileFacts]) -> str | None:
    for path, fact in shards.items():
        if fact.archive in (Archive.TORN, Archive.EMPTY):
            return f"{path} is {'empty' if fact.archive is Archive.EMPTY else 'cut off'}" + (
                f" ({fact.reason})" if fact.reason else ""
            )
    return None


def _known(shards: Mapping[str, FileFacts]) -> list[tuple[str, ShardFacts]]:
    return [(path, fact.facts) for path, fact in shards.items() if fact.facts is not None]


def _mixed(shards: Mapping[str, FileFacts], grid: Grid) -> str | None:
    """A contradiction that two shards of one save cannot have."""
    for path, facts in _known(shards):
        if facts.partition_count and max(facts.partition_count) != grid.dp:
            return f"{path} is one of {max(facts.partition_count)} ranks, {grid.proof}"
    for what in ("global_steps", "optimizer_step", "ds_version", "zero_stage", "run_id"):
        seen: tuple[str, object] | None = None
        for path, facts in _known(shards):
            value = getattr(facts, what)
            if value is None:
                continue
            if seen is not None and seen[1] != value:
                return f"{what} {seen[1]} in {seen[0]}, {value} in {path}"
            seen = (path, value)
    return None


def _grid(shards: Mapping[str, FileFacts], context: Context) -> tuple[Grid | None, str | None]:
    known = _known(shards)
    if len(known) < len(shards) and any(f.archive is Archive.LEGACY or f.reason for f in shards.values()):
        return _grid_from_names(shards, context)
    stages = [f.zero_stage for _, f in known if f.zero_stage is not None]
    stage = max(stages) if stages else 3 if _has_stage3_names(shards) else None
    model = sorted(
        ((p, f) for p, f in known if _name(p).role is Role.MODEL), key=lambda row: _name(row[0]).shard.d or 0
    )
    optim = [(p, f) for p, f in known if _name(p).role is Role.OPTIM]
    if not model:
        return None, "no model states yet: the grid is not proven"
    path, first = model[0]
    dp = _dp(model, optim)
    if dp is None:
        return None, f"{path} does not tell the data-parallel size"
    mm = _mm(first)
    if stage is None:
        return None, "no optimizer shard yet: the ZeRO stage is not proven"
    experts = max((f.num_experts for _, f in model), key=len, default=())
    return (
        Grid(
            dp=dp,
            mm_count=mm,
            tp=first.tp,
            pp=first.pp,
            sp=first.sp,
            ep=first.ep,
            zero_stage=stage,
            layers=tuple(sorted({n for _, f in model for n in f.layers})),
            experts=experts if any(n > 1 for n in experts) else (),
            proof=f"{path}: dp_world_size {first.dp_world_size}, mp_world_size {first.mp_world_size}",
        ),
        None,
    )


def _dp(model: list[tuple[str, ShardFacts]], optim: list[tuple[str, ShardFacts]]) -> int | None:
    """The lowest rank's model states say it: higher ones may be stale, left by a larger world."""
    if model[0][1].dp_world_size:
        return model[0][1].dp_world_size
    claims = [max(f.partition_count) for _, f in optim if f.partition_count]
    return max(claims) if claims else None


def _mm(facts: ShardFacts) -> int:
    degrees = (facts.tp or 1) * (facts.pp or 1)
    return max(facts.mp_world_size or 1, degrees)


def _has_stage3_names(shards: Mapping[str, FileFacts]) -> bool:
    return any(_name(p).role is Role.MODEL and _name(p).shard.d is not None for p in shards)


def _grid_from_names(shards: Mapping[str, FileFacts], context: Context) -> tuple[Grid | None, str | None]:
    """H28: what the child cannot read ships raw when its names fill a grid that this job has shown before.

    Without an earlier proof the names must have been quiet for ten times the settle time.
    """
    names = [_name(p).shard for p in shards if _name(p).role is Role.OPTIM]
    unread = next((p for p, f in shards.items() if f.facts is None), "a shard")
    if not names:
        return None, f"{unread} cannot be read and no optimizer shard is there"
    dp = max((s.d or 0) for s in names) + 1
    mm = max((s.mm or 0) for s in names) + 1
    stage = 3 if _has_stage3_names(shards) else 2
    seen = (dp, mm, stage) in context.known_grids
    if not seen and context.quiet_seconds < 10 * context.settle_seconds:
        return None, f"{unread} cannot be read; waiting for ten times the settle time"
    proof = "names, a grid proven earlier" if seen else "names, quiet for ten times the settle time"
    return Grid(dp=dp, mm_count=mm, zero_stage=stage, proof=proof), None


def _window(listing: FolderListing, within: Mapping[str, FileFacts]) -> SaveWindow:
    times = [f.identity.mtime_ns for f in listing.shards if f.path in within]
    return SaveWindow(first=min(times), last=max(times))


def _writer(shards: Mapping[str, FileFacts], grid: Grid) -> Writer:
    known = [f for _, f in _known(shards)]

    def first(what: str) -> str | None:
        value = next((getattr(f, what) for f in known if getattr(f, what) is not None), None)
        return None if value is None else str(value)

    return Writer(
        ds_version=first("ds_version"),
        zero_stage=grid.zero_stage,
        dtype=first("dtype"),
        optimizer=first("optimizer"),
    )


def _is_stale(path: str, grid: Grid) -> bool:
    shard = _name(path).shard
    return (shard.d or 0) >= grid.dp or (shard.mm or 0) >= grid.mm_count
