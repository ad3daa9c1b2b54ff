"""Saves that some nodes shipped their parts of and that are not committed, and what each lacks (P17).

Part of `ckptd status URL`: from node manifests and heartbeats, by the store's times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core import coverage
from ckptd.core.missing import OpenSave, Part, late
from ckptd.core.view import ZERO
from ckptd.remote.documents import read_generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.coverage import KnownManifest
    from ckptd.core.heartbeat import SeenNode
    from ckptd.core.manifest import NodeManifest
    from ckptd.core.missing import Lost
    from ckptd.core.save import Order
    from ckptd.remote.documents import Stem
    from ckptd.remote.store import Store

MOST_OPEN = 3
"""Uncommitted saves that are looked into, the newest by the numbers in their tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRow:
    """A save that some nodes shipped their parts of and that is not committed."""

    tag: str
    generation: int
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
    safe: Order | None,
    seen: Sequence[SeenNode],
    now_seconds: float,
) -> Opened:
    """Those beyond the safe one.

    Raises:
        RemoteError: the remote stopped answering.
    """
    stems = [where for where in uncommitted if where[2] == ZERO]
    stems.sort(key=lambda where: (_number(where[0]), where[1]), reverse=True)
    read = {w: coverage.newest_revisions(read_generation(store, w)) for w in stems[:MOST_OPEN]}
    rows: list[OpenRow] = []
    problems: list[str] = []
    on_their_way: dict[str, int] = {}
    for where, members in read.items():
        lead = max((k.manifest for k in members), key=_order, default=None)
        if lead is None or (safe is not None and _order(lead) <= safe):
            continue
        of_tag = [known for (tag, *_), parts in read.items() if tag == where[0] for known in parts]
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
                step=lead.step,
                nodes=tuple(sorted({known.manifest.node for known in members})),
                missing=len(save.missing),
                text=text if newer is None else f"saved again, as generation {newer}",
            )
        )
    return Opened(rows=tuple(rows), problems=tuple(problems))


def _open_save(
    store: Store,
    members: Sequence[KnownManifest],
    of_tag: Sequence[KnownManifest],
    lead: NodeManifest,
    now_seconds: float,
) -> OpenSave:
    infos = [info for info in (store.stat(known.key) for known in members) if info is not None]
    return OpenSave(
        missing=coverage.absent(members),
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


def _problem(lead: NodeManifest, lost: Lost, *, is_one_of_several: bool) -> str:
    which = f" (generation {lead.generation})" if is_one_of_several else ""
    again = "; save again" if lost.apart else ""
    return f"{lead.tag}{which} is not committed: {lost.text}{again}"


def _order(manifest: NodeManifest) -> tuple[int, int, int]:
    return manifest.branch, manifest.step, manifest.save_seq


def _number(tag: str) -> int:
    found = re.search(r"(\d{1,18})(?!.*\d)", tag)
    return int(found[1]) if found else 0
