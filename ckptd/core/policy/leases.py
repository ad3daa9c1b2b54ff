"""Divide the work of several daemons over one directory: who uploads, deletes and converts (ADR 0110).

Pure. The hosts agree by a numbered row of documents, each created once: the members among which a save is
divided, and the holder of the lease. A host counts as alive by the age of its heartbeat on the store's clock.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

from ckptd.base.identity import Model
from ckptd.base.names import ROOT
from ckptd.core.model.manifest import Document, folder_name, stem
from ckptd.core.model.records import ZERO
from ckptd.core.policy import actions as a

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptd.core.model.heartbeat import SeenNode
    from ckptd.core.policy.view import JobView, LeaseStatus, RemoteView, SaveView

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
    """Name the host that deletes and converts; a higher number supersedes a lower one."""

    job_id: str
    number: int
    """Number of the lease (its epoch)."""
    node: str
    node_id: str


class LeaseSeen(Model):
    """Hold the newest term as one host read it."""

    epoch: int
    node: str
    is_ours: bool


def shares_folder(tag: str, generation: int, form: str) -> str:
    """Return the folder of the share documents of one generation of one form; it ends with `/`."""
    return f"{SHARED}shares/{stem(tag, generation, form)}/"


def numbered(folder: str, number: int) -> str:
    """Return the key of a numbered document of a row."""
    return f"{folder}{number:0{_DIGITS}d}.json"


def number_of(folder: str, key: str) -> int:
    """Return the number in such a key; 0: it is none of the row."""
    name = key.removeprefix(folder).removesuffix(".json")
    return int(name) if name.isdecimal() and key == numbered(folder, int(name)) else 0


# --- The shares: which host uploads which file -----------------------------------------------------------


def owner_of(name: str, members: Iterable[str]) -> str:
    """Return the member that owns a name; it moves only to a member that joins, or from one that leaves."""
    return max(members, key=lambda node: hashlib.sha256(f"{node}\n{name}".encode()).digest())


def share_of(tag: str, paths: Sequence[str], members: Sequence[str], node: str) -> frozenset[str]:
    """Return the paths of a save that one node uploads."""
    if node not in members:
        return frozenset()
    return frozenset(path for path in paths if owner_of(f"{tag}/{path}", members) == node)


def next_members(members: Sequence[str], living: Iterable[str]) -> tuple[str, ...]:
    """Return the members without those that are gone. Nobody joins while one of them lives, so that no share
    moves."""
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


# --- The lease: one host deletes and converts ------------------------------------------------------------


def judge_lease(
    term: LeaseTerm | None, node: str, node_id: str, others: Iterable[SeenNode], takeover_seconds: float
) -> Literal["ours", "theirs", "take"]:
    """Judge who holds the lease; "take": nobody, or its holder was silent for `takeover_seconds`."""
    if term is None:
        return "take"
    if term.node == node:
        # of another node id: this host before it lost its state, whose heartbeat is ours now
        return "ours" if term.node_id == node_id else "take"
    return "theirs" if term.node in living(node, others, takeover_seconds) else "take"


def term_seconds(takeover_seconds: float) -> float:
    """Return how long a holder trusts its lease, from before its heartbeat: half of what others wait."""
    return takeover_seconds / 2


def beat_seconds(takeover_seconds: float, usual_seconds: float) -> float:
    """Return the seconds between heartbeats: two may be lost before the lease lapses."""
    return min(usual_seconds, takeover_seconds / 6)


def without_lease(actions: Iterable[a.Action]) -> list[a.Action]:
    """Return the actions allowed without the lease: upload this host's share of the files, and ask."""
    return [
        action
        for action in actions
        if isinstance(action, a.Describe | a.CancelUpload)
        or (isinstance(action, a.Upload) and action.form == ZERO)
    ]


def on_shared(actions: Iterable[a.Action], lease: LeaseStatus | None) -> list[a.Action]:
    """Return the plan without the other hosts' work; holds belong to one disk and are never made here."""
    wanted = list(actions)
    if lease is None:
        return wanted
    if not lease.holds_lease:
        return without_lease(wanted)
    return [action for action in wanted if not isinstance(action, a.Hold)]


# --- Attempts at derived forms of a save that no node holds whole (ADR 0118) -----------------------------
# Before a node uploads a byte of such a form it claims an attempt in the remote: a row of numbered
# documents, each created once. The number names the attempt and its folder, so two nodes never write into
# one folder, whatever each of them believes; the COMMIT names the attempt that counts.


class Attempt(LeaseTerm):
    """Record who makes a form, at the `number`th attempt; a higher number supersedes a lower one."""

    refused: str | None = None
    """There is no such form of this save, and nobody need try again: why."""
    hint: str = ""
    damaged: str = ""
    """State of the shards in the remote when one of them was found damaged: as long as they look so,
    or as any refusal before says, nobody need try again. Empty: no such form will ever be."""


def attempts_folder(tag: str, generation: int, form: str) -> str:
    """Return the folder of the attempt documents of one form of one generation; ends with `/`."""
    return f"{SHARED}making/{stem(tag, generation, form)}/"


def attempt_folder(tag: str, generation: int, form: str, below: str, attempt: int) -> str:
    """Return the remote folder of an attempt; `below`: path of the form in it."""
    return folder_name(tag, generation, ZERO if below else form, attempt)


def is_derived_remotely(save: SaveView) -> bool:
    """Tell whether no node has the save whole, so that forms are derived from its remote's objects."""
    return save.save.is_part and not save.is_model_only


def gets_nothing(view: JobView, remote: RemoteView) -> SaveView | None:
    """The newest save of which that remote gets no form at all: no node has it whole, and what forms are made
    of instead is not there (docs/adr/0118).
    """
    if ZERO in remote.forms:
        return None
    spread = (s for s in view.saves if is_derived_remotely(s) and s.is_present)
    return max(spread, key=lambda s: s.order, default=None)


def is_committed_elsewhere(view: JobView, remote: RemoteView) -> bool:
    """Tell whether another node committed the form that this node is uploading to the remote."""
    save = next((s for s in view.saves if s.id == remote.uploading_save_id), None)
    if save is None or remote.uploading is None or not is_derived_remotely(save):
        return False
    ours = save.save.tag, save.upload(remote.name, ZERO).generation, remote.uploading
    return remote.uploading != ZERO and any((c.tag, c.generation, c.form) == ours for c in remote.commits)
