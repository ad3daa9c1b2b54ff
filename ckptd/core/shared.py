"""Several daemons over one directory: who sends which file, who deletes and converts (adr/0110; P10, H36).

Pure. What the hosts agree on is a numbered row of documents, each created once: the members among which a
save is divided, and the holder of the lease. Who lives is told by heartbeats' ages on the store's own clock.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

from ckptd.core import actions as a
from ckptd.core.identity import Model
from ckptd.core.manifest import ROOT, Document, stem
from ckptd.core.view import ZERO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptd.core.heartbeat import SeenNode
    from ckptd.core.view import Tenure

SHARED = f"{ROOT}/shared/"
LEASE = f"{SHARED}lease/"
_DIGITS = 8


class Shares(Document):
    """Among whom one save is divided; a higher number supersedes a lower one."""

    job_id: str
    number: int
    members: tuple[str, ...]
    by: str


class LeaseTerm(Document):
    """Who deletes and converts; a higher number supersedes a lower one."""

    job_id: str
    number: int
    """Its epoch."""
    node: str
    node_id: str


class LeaseSeen(Model):
    """The newest term, as one host read it."""

    epoch: int
    node: str
    is_ours: bool


def shares_folder(tag: str, generation: int, form: str) -> str:
    """Where the divisions of one generation of one form lie; ends with `/`."""
    return f"{SHARED}shares/{stem(tag, generation, form)}/"


def numbered(folder: str, number: int) -> str:
    """The key of a document of a row."""
    return f"{folder}{number:0{_DIGITS}d}.json"


def number_of(folder: str, key: str) -> int:
    """The number in such a key; 0: it is none of the row."""
    name = key.removeprefix(folder).removesuffix(".json")
    return int(name) if name.isdecimal() and key == numbered(folder, int(name)) else 0


# --- who sends what --------------------------------------------------------------------------------------


def owner_of(name: str, members: Iterable[str]) -> str:
    """The member that a name falls to; when others come or go it moves only to who comes, from who goes."""
    return max(members, key=lambda node: hashlib.sha256(f"{node}\n{name}".encode()).digest())


def share_of(tag: str, paths: Sequence[str], members: Sequence[str], node: str) -> frozenset[str]:
    """The paths of a save that one node sends."""
    if node not in members:
        return frozenset()
    return frozenset(path for path in paths if owner_of(f"{tag}/{path}", members) == node)


def next_members(members: Sequence[str], living: Iterable[str]) -> tuple[str, ...]:
    """Without those that are gone; nobody joins a division while one of it lives, so that no share moves."""
    here = frozenset(living)
    return tuple(sorted(here.intersection(members) or here))


def living(node: str, others: Iterable[SeenNode], takeover_seconds: float) -> frozenset[str]:
    """Ourselves and whoever was heard of within that time, and was not paused by a person."""
    found = {
        seen.node
        for seen in others
        if seen.seconds_ago is not None
        and seen.seconds_ago < takeover_seconds
        and not (seen.heartbeat is not None and seen.heartbeat.state == "paused")
    }
    return frozenset({node, *found})


# --- the lease -------------------------------------------------------------------------------------------


def judge_lease(
    term: LeaseTerm | None, node: str, node_id: str, others: Iterable[SeenNode], takeover_seconds: float
) -> Literal["ours", "theirs", "take"]:
    """Whose the lease is; "take": nobody's, or its holder has been silent for as long as that."""
    if term is None:
        return "take"
    if term.node == node:
        # of another node id: this host before it lost its state, whose heartbeat is ours now
        return "ours" if term.node_id == node_id else "take"
    return "theirs" if term.node in living(node, others, takeover_seconds) else "take"


def term_seconds(takeover_seconds: float) -> float:
    """How long a holder trusts what it read, from before its heartbeat was sent: half of what others wait."""
    return takeover_seconds / 2


def beat_seconds(takeover_seconds: float, usual_seconds: float) -> float:
    """Between heartbeats: two may be lost before the lease lapses."""
    return min(usual_seconds, takeover_seconds / 6)


def without_lease(actions: Iterable[a.Action]) -> list[a.Action]:
    """What a host may do that does not hold the lease: send its share of the trainer's files, and ask."""
    return [
        action
        for action in actions
        if isinstance(action, a.Describe | a.MakeWay) or (isinstance(action, a.Ship) and action.form == ZERO)
    ]


def on_shared(actions: Iterable[a.Action], tenure: Tenure | None) -> list[a.Action]:
    """A plan, less what is others' to do; holds are of one host's disk and never made here."""
    wanted = list(actions)
    if tenure is None:
        return wanted
    if not tenure.holds_lease:
        return without_lease(wanted)
    return [action for action in wanted if not isinstance(action, a.Hold)]
