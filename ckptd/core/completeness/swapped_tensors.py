"""Optimizer state that DeepSpeed's NVMe offload keeps beside the shards (docs/formats.md §1).

With `offload_optimizer.device: nvme` at stage 3, tensors of a shard have no elements and
`offloaded_tensors/rankNN/*.tensor.swp`, which each rank copies after its shard, hold the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.layouts import Role, parse_shard_name
from ckptd.core.model.manifest import Cell
from ckptd.core.model.swap_paths import END, FOLDER, folder_of, is_swapped

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.shard_facts import ShardFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """An optimizer shard with fewer elements than its parameters need; `needed`: of each such sub-group."""

    path: str
    facts: ShardFacts
    rank: int
    needed: tuple[int, ...]
    words: str


def lacking(
    root: str, shards: Mapping[str, FileFacts], sizes: Mapping[str, int], folders: Collection[str], mms: int
) -> str | None:
    """Say what is missing of the optimizer states of the shards of one root; None: all elements are there.

    `sizes`: bytes of every file of the checkpoint, `folders`: its empty folders, `mms`: model-parallel ranks.
    """
    above = f"{root}/{FOLDER}/" if root else f"{FOLDER}/"
    by_folder: dict[str, dict[str, int]] = {path: {} for path in folders if path.startswith(above)}
    for path, size in sizes.items():
        if is_swapped(path, (root,)):
            folder, _, name = path.rpartition("/")
            by_folder.setdefault(folder, {})[name] = size
    for short in _owing(shards, mms):
        place = f"{root}/{folder_of(short.rank)}" if root else folder_of(short.rank)
        problem = _problem(short, place, by_folder)
        # which global rank a model-parallel rank is, its engine decides: any folder that fits will do
        fitting = mms > 1 and next((p for p in by_folder if _problem(short, p, by_folder) is None), None)
        if problem is not None and not fitting:
            return f"{short.path} {short.words}: {problem}"
        by_folder.pop(fitting or place, None)
    return None


def _owing(shards: Mapping[str, FileFacts], mms: int) -> list[Short]:
    """Return the optimizer shards that need a folder of swapped tensors, by rank."""
    optim: dict[Cell, tuple[str, ShardFacts]] = {}
    needed: dict[Cell, tuple[int, ...]] = {}
    for path, fact in shards.items():
        named = parse_shard_name(path.rpartition("/")[2])
        if named is None or named.shard.d is None or fact.facts is None:
            continue
        cell = Cell(named.shard.d, named.shard.mm or 0)
        if named.role is Role.OPTIM:
            optim[cell] = path, fact.facts
        elif named.role is Role.MODEL:
            needed[cell] = fact.facts.owed
    found = []
    for local, cell in enumerate(sorted(optim)):
        path, facts = optim[cell]
        rows = list(enumerate(zip(facts.held, facts.owed or needed.get(cell, ()), strict=False)))
        if len(rows) != len(facts.held):
            rows = []
        few = [(group, held, owed) for group, (held, owed) in rows if held < owed]
        if not few and not (facts.is_offloaded and facts.zero_stage == 3):
            continue
        words = "swaps its optimizer state to NVMe"
        if few:
            words = f"holds {few[0][1]} of {few[0][2]} elements of group {few[0][0]}"
        rank = local if facts.is_node_local else cell.d * mms + cell.mm
        owes = tuple(sorted((owed for _, _, owed in few), reverse=True))
        found.append(Short(path=path, facts=facts, rank=rank, needed=owes, words=words))
    return found


def _problem(short: Short, folder: str, by_folder: Mapping[str, Mapping[str, int]]) -> str | None:
    """Word what a rank's folder lacks: per state one file for each sub-group, at least as long as it."""
    if folder not in by_folder:
        return f"{folder} is not there"
    names = by_folder[folder]
    for tensor, elements in short.facts.swapped:
        name, needed = f"{tensor}{END}", elements * short.facts.item_bytes
        if name not in names:
            return f"{folder} lacks {name}"
        if names[name] < needed:
            return f"{folder}/{name} has {names[name]} bytes, {needed} are needed"
    states = short.facts.emptied
    for state in ("", *states):
        own = {n: size for n, size in names.items() if _is_of(n, state, states)}
        rest = sorted(own.items(), key=lambda row: row[1], reverse=True)
        for at, owed in enumerate(short.needed):
            what = f"{state}-*{END}" if state else f"the fp32 *{END}"
            if at >= len(rest):
                return f"{folder} lacks {what} ({at} of {len(short.needed)} are there)"
            name, size = rest[at]
            if size < owed * short.facts.item_bytes:
                return f"{folder}/{name} has {size} bytes, {owed * short.facts.item_bytes} are needed"
    return None


def _is_of(name: str, state: str, states: Collection[str]) -> bool:
    if state:
        return name.startswith(f"{state}-")
    return not any(name.startswith(f"{other}-") for other in states)
