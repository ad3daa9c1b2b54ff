"""List saves that some nodes uploaded their parts of and that are not committed, and what each lacks.

Part of `ckptd status URL`: from node manifests and heartbeats, by the store's times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.base.names import ROOT
from ckptd.core.completeness.missing import Part, UncommittedSave, late
from ckptd.core.model import coverage
from ckptd.core.model.heartbeat import DEAD_SECONDS
from ckptd.core.model.manifest import name_in
from ckptd.core.model.records import ZERO
from ckptd.core.model.save import Order
from ckptd.storage.remote.documents import read_generation, stem_of_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.core.completeness.missing import MissingShards
    from ckptd.core.model.coverage import KnownManifest
    from ckptd.core.model.heartbeat import SeenNode
    from ckptd.core.model.manifest import NodeManifest
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.stores.base import Store

    Members = tuple[KnownManifest, ...]

from ckptd.core.model.heartbeat import SeenNode

MOST_OPEN = 3
"""Uncommitted saves that are looked into, the last that were saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Safe:
    """The safe COMMIT: its order, the time since, and the nodes that were there then, or since."""

    order: Order
    seconds_ago: float
    there: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRow:
    """A save that some nodes uploaded their parts of and that is not committed."""

    tag: str
    generation: int
    branch: int
    step: int
    nodes: tuple[str, ...]
    missing: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """All of them, newest first, and what a person needs to know of them."""

    rows: tuple[OpenRow, ...]
    problems: tuple[str, ...]


def opened(
    store: Store,
    uncommitted: Sequence[Stem],
    safe: Safe | None,
    seen: Sequence[SeenNode],
    now_seconds: float,
    is_wanted: Callable[[NodeManifest], bool] = lambda _: True,
) -> Opened:
    """Return those beyond the safe one that no rewind left behind; `is_wanted`: of the run that is asked
    about.

    Raises:
        RemoteError: the remote stopped answering.
    """
    read = _newest(store, uncommitted, safe.order if safe is not None else None, is_wanted)
    if safe is not None:
        read = [members for members in read if not _is_left(store, members, safe, seen, now_seconds)]
    rows: list[OpenRow] = []
    problems: list[str] = []
    on_their_way: dict[str, int] = {}
    for members in read:
        lead = _lead(members)
        of_tag = [known for parts in read for known in parts if known.manifest.tag == lead.tag]
        save = _open_save(store, members, of_tag, lead, now_seconds)
        newer = on_their_way.get(lead.tag)
        lost = late(save, seen) if newer is None else None
        if lost is not None:
            of = {known.manifest.generation for known in of_tag}
            problems.append(_problem(lead, lost, is_one_of_several=len(of) > 1))
        else:
            on_their_way.setdefault(lead.tag, lead.generation)
        text = lost.text if lost is not None else f"{len(save.missing)} shards are on their way"
        rows.append(
            OpenRow(
                tag=lead.tag,
                generation=lead.generation,
                branch=lead.branch,
                step=lead.step,
                nodes=tuple(sorted({known.manifest.node for known in members})),
                missing=len(save.missing),
                text=text if newer is None else f"saved again, as generation {newer}",
            )
        )
    return Opened(rows=tuple(rows), problems=tuple(problems))


def _is_left(
    store: Store, members: Members, safe: Safe, seen: Sequence[SeenNode], now_seconds: float
) -> bool:
    """All that came of it came before the safe COMMIT, and no node that was there then has it: the run went
    on from before it.

    Not where it cannot be told: a store without times, a node without a heartbeat.
    """
    lead = _lead(members)
    infos = [store.stat(known.key) for known in members]
    came = [now_seconds - info.mtime_ns / 1e9 for info in infos if info is not None and info.mtime_ns]
    told = {one.node for one in seen if one.heartbeat is not None and one.seconds_ago is not None}
    if len(came) < len(members) or not {known.manifest.node for known in members} <= told:
        return False
    held = {one.node for one in seen if (save_of(one) or (-1, -1)) >= (lead.branch, lead.step)}
    return min(came) > safe.seconds_ago + DEAD_SECONDS and not held & safe.there


def _open_save(
    store: Store,
    members: Sequence[KnownManifest],
    of_tag: Sequence[KnownManifest],
    lead: NodeManifest,
    now_seconds: float,
) -> UncommittedSave:
    infos = [info for info in (store.stat(known.key) for known in members) if info is not None]
    return UncommittedSave(
        missing=coverage.absent(members),
        branch=lead.branch,
        step=lead.step,
        generation=lead.generation,
        mm_count=lead.grid.mm_count,
        # since the first part was shipped
        age_seconds=max((now_seconds - i.mtime_ns / 1e9 for i in infos if i.mtime_ns), default=0.0),
        parts=tuple(
            Part(node=m.node, generation=m.generation, last_seconds=m.save_window.last // 10**9)
            for m in (known.manifest for known in of_tag)
        ),
    )


def _problem(lead: NodeManifest, lost: MissingShards, *, is_one_of_several: bool) -> str:
    which = f" (generation {lead.generation})" if is_one_of_several else ""
    again = "; save again" if lost.apart else ""
    return f"{lead.tag}{which} is not committed: {lost.text}{again}"


# --- which generations are read --------------------------------------------------------------------------


def _newest(
    store: Store,
    uncommitted: Sequence[Stem],
    safe: Order | None,
    is_wanted: Callable[[NodeManifest], bool],
) -> list[Members]:
    """Return what was uploaded of each save beyond `safe` on the newest branch, newest save first.

    Each manifest of a thousand nodes is a request, and after a rewind a larger step is no newer save. So only
    the last saved generations are read; their order (branch, step, save_seq) tells which of them the run
    still wants.
    """
    saved = _saved_at(store, {where for where in uncommitted if where[2] == ZERO})
    last = sorted(saved, key=lambda where: (saved[where], where), reverse=True)[:MOST_OPEN]
    read = [
        members
        for where in last
        if (members := coverage.newest_revisions(read_generation(store, where)))
        and is_wanted(members[0].manifest)
    ]
    read.sort(key=lambda members: _order(_lead(members)), reverse=True)
    orders = [_order(_lead(members)) for members in read]
    return [
        members
        for order, members in zip(orders, read, strict=True)
        if order.branch == orders[0].branch and (safe is None or order > safe)
    ]


def _lead(members: Members) -> NodeManifest:
    """Return the one that tells their save's order: a node that was replaced may not know of a rewind."""
    return max((known.manifest for known in members), key=_order)


def _order(manifest: NodeManifest) -> Order:
    return Order(manifest.branch, manifest.step, manifest.save_seq)


def _saved_at(store: Store, wanted: set[Stem]) -> dict[Stem, tuple[int, int]]:
    """When each was saved, unix seconds as names of manifests tell (0: an early release's), and when its last
    part came, by the store's time in ns."""
    found: dict[Stem, tuple[int, int]] = {}
    for info in store.list(f"{ROOT}/nodes/"):
        where = stem_of_key(info.key.rpartition("/")[0])
        if where is not None and where in wanted:
            name = name_in(info.key)
            saved, came = found.get(where, (0, 0))
            found[where] = max(saved, name.last_seconds if name else 0), max(came, info.mtime_ns)
    return found


def save_of(one: SeenNode) -> tuple[int, int] | None:
    """Return (branch, step) of the newest save that is complete for a node."""
    newest = one.heartbeat.newest if one.heartbeat is not None else None
    return None if newest is None else (newest.branch, newest.step)
