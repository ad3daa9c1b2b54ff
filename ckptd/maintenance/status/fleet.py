"""Report on a whole job from its remote: what is safe, which nodes are alive, which saves lack whose shards.

The data of `ckptd status URL`: from COMMITs, node manifests and heartbeats, from anywhere. Ages are by the
store's own times; what is by other clocks says so (`clock`). A COMMIT proves what is safe; heartbeats only
tell which nodes are alive.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptd.base.humanize import ago, ranks_in_words
from ckptd.base.names import ROOT, decode_name
from ckptd.core.completeness.missing import MissingPart, UncommittedSave, late
from ckptd.core.model import generation
from ckptd.core.model.generation import order_of
from ckptd.core.model.heartbeat import DEAD_SECONDS, SeenNode
from ckptd.core.model.manifest import name_in
from ckptd.core.model.records import ZERO
from ckptd.core.model.runs import run_of, short
from ckptd.core.model.save import Order
from ckptd.recover.select.runs import RemoteRuns
from ckptd.recover.select.sources import where_of
from ckptd.storage.remote.documents import read_generation, stem_of_key
from ckptd.storage.remote.heartbeats import Heartbeats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set
    from pathlib import Path

    from ckptd.core.completeness.missing import MissingShards
    from ckptd.core.model.generation import KnownManifest
    from ckptd.core.model.heartbeat import Heartbeat
    from ckptd.core.model.manifest import Commit, NodeManifest
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.recover.select.runs import RunView
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.messages import CommitView
    from ckptd.storage.stores.base import Store

    Members = tuple[KnownManifest, ...]


# --- verdict and headline --------------------------------------------------------------------------------
# Pure: whether the job is alive, over or behind, and the training that is at risk; in words.


def is_alive(row: NodeReport) -> bool:
    """Whether the node was heard of lately, and goes on."""
    return row.heard_seconds_ago is not None and not (row.is_dead or row.has_ended)


def ended_seconds_ago(rows: Sequence[NodeReport]) -> float | None:
    """Return the seconds since the last node ended; None: not all of them did."""
    ages = [row.heard_seconds_ago for row in rows if row.has_ended and row.heard_seconds_ago is not None]
    return min(ages) if ages and len(ages) == len(rows) else None


def newest_step(
    rows: Sequence[NodeReport], seen: Sequence[SeenNode], opened: Sequence[OpenRow]
) -> int | None:
    """Return the step of the newest known save, which after a rewind is not the largest step."""
    names = {row.node for row in rows}
    saves = [save_of(one) for one in seen if one.node in names]
    saves += [(row.branch, row.step) for row in opened]
    known = [save for save in saves if save is not None]
    return max(known)[1] if known else None


def present(seen: Sequence[SeenNode], seconds_ago: float, nodes: Set[str]) -> frozenset[str]:
    """Return the nodes that were there when a COMMIT was made so long ago, or since: those it rests on, who
    was alive.

    Alive is, as everywhere, who was heard of in the five minutes before: the last minute of a node is not
    told, and clocks may be off.
    """
    lately = seconds_ago + DEAD_SECONDS
    return frozenset(
        one.node for one in seen if one.node in nodes or one.seconds_ago is None or one.seconds_ago <= lately
    )


def is_ahead(one: SeenNode, safe: SafeRow, there: Set[str]) -> bool:
    """Whether a node that was there when the safe save was committed has a newer one: alive, ended or dead.

    Who left before that COMMIT had its save passed by: the run went on without it.
    """
    newest = save_of(one)
    return newest is not None and newest > (safe.branch, safe.step) and one.node in there


def silent(row: NodeReport, ahead: Set[str]) -> str:
    """Say that a node has died; `ahead`: nodes with a newer save than the safe one."""
    clock = "" if row.is_store_time else " (by the nodes' own clocks)"
    text = f"node {row.node} has not been heard of for {ago(row.heard_seconds_ago or 0.0)}{clock}"
    if row.node not in ahead:
        return text
    step = f"its newest save, step {row.newest_step}, is not committed"
    return f"{text}; {step}: start ckptd there again, else the run goes back"


def seconds_at_risk(safe: SafeRow | None, seen: Sequence[SeenNode], ended: float | None) -> float | None:
    """Return the seconds since the safe save was written, as its nodes said; else since its COMMIT.

    Nothing is trained on a node that has ended.
    """
    if safe is None:
        return None
    ages = [
        one.heartbeat.safe.seconds_at_risk + (0.0 if one.has_ended else one.seconds_ago or 0.0)
        for one in seen
        if one.heartbeat is not None
        and one.heartbeat.safe is not None
        and (one.heartbeat.safe.tag, one.heartbeat.safe.step) == (safe.tag, safe.step)
    ]
    return max([*ages, safe.age_seconds - (ended or 0.0), 0.0])


def headline(
    verdict: Verdict, safe: SafeRow | None, alive: int, expected: int, risk: float | None, newest: int | None
) -> str:
    """Return the first line, for a job that goes on."""
    nodes = f"{alive}/{expected} nodes"
    if safe is None:
        return f"NOT SAFE: nothing is committed yet; {nodes}"
    text = f"{verdict.upper()}: step {safe.step} committed {ago(safe.age_seconds)} ago, {nodes}"
    behind = f", step {newest} is not committed yet" if verdict == "behind" and newest is not None else ""
    return f"{text}{behind}, {ago(risk or 0.0)} of training at risk"


def headline_of_end(
    verdict: Verdict, safe: SafeRow | None, ended: float, risk: float | None, newest: int | None
) -> str:
    """Return the headline for a job whose daemons were all stopped in order."""
    when = f"ended {ago(ended)} ago"
    if safe is None:
        return f"NOT SAFE: {when}, nothing is committed"
    if verdict == "safe":
        return f"SAFE: {when}, newest step {safe.step} committed"
    return (
        f"BEHIND: {when}, step {newest} is not committed, step {safe.step} is, "
        f"{ago(risk or 0.0)} of training at risk"
    )


# --- reading a remote ------------------------------------------------------------------------------------

SCHEMA_VERSION = 1
SKEW_SECONDS = 5.0

Verdict = Literal["safe", "behind", "not-safe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeRow:
    """The newest committed save that a run can go on from. Ages in seconds."""

    tag: str
    generation: int
    branch: int
    step: int
    committed_at: str
    age_seconds: float
    commit_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node; `heard_seconds_ago` None: only its manifests are known."""

    node: str
    node_id: str | None
    heard_seconds_ago: float | None
    is_store_time: bool
    is_dead: bool
    """Not heard of for a while, and it did not say that it ends."""
    has_ended: bool
    """Its daemon was stopped in order when it was heard of last."""
    state: str
    """State that its daemon last reported: ok, behind, attention, waiting, paused; ended; unknown."""
    newest_step: int | None
    newest_tag: str | None
    ranks: str
    ckptd_version: str | None
    config_digest: str | None
    is_in_safe: bool
    """The safe COMMIT rests on a manifest of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Everything that is shown; `seconds_at_risk`: training since the safe save was written."""

    url: str
    job: str
    job_id: str
    verdict: Verdict
    headline: str
    safe: SafeRow | None
    nodes_alive: int
    nodes_expected: int
    seconds_at_risk: float | None
    newest_step: int | None
    ended_seconds_ago: float | None
    """Seconds since the last of all nodes ended in order; None: the job goes on, or a node fell silent."""
    run_id: str | None = None
    """The newest run, of which all this is; None: nothing says that there is one."""
    runs: tuple[RunView, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    uncommitted: tuple[OpenRow, ...] = ()
    problems: tuple[str, ...] = ()
    clock: Literal["store", "reader", "nodes"] = "store"
    """Clock by which ages are told: the store's; this machine's, compared with the store's times; the
    nodes'."""
    schema_version: int = SCHEMA_VERSION

    @property
    def clauses(self) -> list[str]:
        """Return what the headline says after the verdict, one by one."""
        return self.headline.partition(": ")[2].replace("; ", ", ").split(", ")

    @property
    def exit_code(self) -> int:
        """0 safe · 1 a person is needed · 3 behind (docs/contract.md)."""
        if self.verdict == "not-safe" or self.problems:
            return 1
        return 3 if self.verdict == "behind" else 0


def read_fleet(url: str, config_dir: Path | None = None) -> FleetStatus:
    """Look once at a remote, by its URL or directory.

    Raises:
        RemoteError: it does not answer, or is no remote of ckptd.
    """
    return FleetReader(inventory_of(url, config_dir)).read()


def inventory_of(url: str, config_dir: Path | None) -> RemoteInventory:
    """Read what a remote holds, by its URL or directory.

    Raises:
        RemoteError: it does not answer, or is no remote of ckptd.
    """
    where = where_of(url, os.environ, config_dir=config_dir)
    return where.read_one(where.remotes[0].name)


class FleetReader:
    """One look at one remote."""

    def __init__(self, inventory: RemoteInventory) -> None:
        runs = RemoteRuns([inventory])
        self._run_id = runs.views[0].run_id if runs.views else None
        self._runs = runs.views
        self._inventory = inventory if self._run_id is None else runs.only(inventory, self._run_id)
        self._store: Store = inventory.store
        self._problems: list[str] = []
        self._clock: Literal["store", "reader", "nodes"] = "store"

    def read(self) -> FleetStatus:
        """Read what there is; the remote was seen a moment ago (`inventory`).

        Raises:
            RemoteError: it stopped answering.
        """
        seen = self._nodes()
        commits = [
            view
            for view in self._inventory.commits
            if view.commit.form == ZERO and not view.commit.grid.is_model_only
        ]
        safe = commits[-1] if commits else None
        shown = _safe(safe, self._age_of(safe)) if safe is not None else None
        beyond: Safe | None = None
        ahead: Set[str] = frozenset()
        if safe is not None and shown is not None:
            there = present(seen, shown.age_seconds, _nodes_of(safe.commit))
            ahead = frozenset(one.node for one in seen if is_ahead(one, shown, there))
            beyond = Safe(order=order_of(safe.commit), seconds_ago=shown.age_seconds, there=there)
        uncommitted = self._inventory.observation.uncommitted
        open_rows, problems = opened(
            self._store, uncommitted, beyond, seen, self._now_seconds, self._is_of_run
        )
        self._problems += problems
        rows = _rows(seen, safe, ahead)
        newest = newest_step(rows, seen, open_rows)
        ended = ended_seconds_ago(rows)
        self._see_nodes(rows, ahead)
        self._see_damage(seen)
        identity = self._inventory.observation.identity
        verdict: Verdict = "not-safe" if shown is None else "behind" if open_rows or ahead else "safe"
        alive = sum(map(is_alive, rows))
        risk = seconds_at_risk(shown, seen, ended)
        return FleetStatus(
            url=self._inventory.url,
            job=identity.job,
            job_id=identity.job_id,
            verdict=verdict,
            headline=headline_of_end(verdict, shown, ended, risk, newest)
            if ended is not None
            else headline(verdict, shown, alive, len(rows), risk, newest),
            safe=shown,
            nodes_alive=alive,
            nodes_expected=len(rows),
            seconds_at_risk=None if risk is None else round(risk, 1),
            newest_step=newest,
            ended_seconds_ago=ended,
            run_id=self._run_id,
            runs=self._runs,
            nodes=rows,
            uncommitted=open_rows,
            problems=tuple(self._problems),
            clock=self._clock,
        )

    # --- nodes -----------------------------------------------------------------------------------------

    def _nodes(self) -> tuple[SeenNode, ...]:
        """Return every heartbeat; ages by the store's present where it tells it, else by this machine's
        clock.
        """
        now = self._store.now_seconds()
        if now is None:
            self._clock, now = "reader", time.time()
        beats = Heartbeats(self._store)
        found = beats.others("", reads_all=True, now_seconds=now)
        if any(not seen.is_store_time for seen in found):
            self._clock = "nodes"
        ahead = beats.newest_seconds - now
        if ahead > SKEW_SECONDS:
            self._problems.append(
                f"this machine's clock is {ago(ahead)} behind the store's: ages are from its newest object on"
            )
        self._now_seconds = max(now, beats.newest_seconds)
        return self._without_others(found)

    def _is_of_run(self, document: NodeManifest | Heartbeat) -> bool:
        job_id = self._inventory.observation.identity.job_id
        return self._run_id is None or run_of(document, job_id) == self._run_id

    def _without_others(self, seen: Sequence[SeenNode]) -> tuple[SeenNode, ...]:
        """Return the nodes of this run; one of another run that lives is a problem."""
        own: list[SeenNode] = []
        for one in seen:
            beat = one.heartbeat
            if beat is None or beat.run_id is None or self._is_of_run(beat):
                own.append(one)
            elif not one.is_dead and beat.newest is not None:
                whose = f"{beat.user}@{beat.host}:{beat.save_dir} saves another run ({short(beat.run_id)})"
                heard = ago(one.seconds_ago or 0.0)
                self._problems.append(
                    f"{whose} under this name, heard of {heard} ago: nothing of it is sent here; "
                    "it needs a name and a url of its own"
                )
        return tuple(own)

    def _see_nodes(self, rows: Sequence[NodeReport], ahead: Set[str]) -> None:
        self._problems += [silent(row, ahead) for row in rows if row.is_dead]
        digests: dict[str, list[str]] = {}
        for row in rows:
            if row.config_digest is not None and is_alive(row):
                digests.setdefault(row.config_digest, []).append(row.node)
        if len(digests) > 1:
            fewest = min(digests.values(), key=lambda nodes: (len(nodes), nodes))
            names = ", ".join(fewest[:5])
            self._problems.append(
                f"{names} has another configuration than the other nodes: nothing is deleted"
            )

    def _see_damage(self, seen: Sequence[SeenNode]) -> None:
        """Say what daemons found damaged here."""
        told = {digest: one.node for one in seen for digest in one.damaged}
        views = [view for view in self._inventory.commits if view.sha256 in told]
        if views:
            commit, node = views[-1].commit, told[views[-1].sha256]
            more = f" (and {len(views) - 1} more)" if len(views) > 1 else ""
            url, tag = shlex.quote(self._inventory.url), shlex.quote(commit.tag)
            self._problems.append(
                f"{node} found {commit.tag} ({commit.form}) damaged here{more}: "
                f"`ckptd verify {url} {tag} --read-data` says what is wrong"
            )

    # --- saves -----------------------------------------------------------------------------------------

    def _age_of(self, view: CommitView) -> float:
        """Return the age of a COMMIT in seconds, by the store's time of the object."""
        info = self._store.stat(view.key)
        if info is not None and info.mtime_ns:
            return max(0.0, self._now_seconds - info.mtime_ns / 1e9)
        self._clock = "nodes"
        at = view.commit.committed_at_seconds
        return max(0.0, self._now_seconds - at) if at is not None else 0.0


def _rows(seen: Sequence[SeenNode], safe: CommitView | None, ahead: Set[str]) -> tuple[NodeReport, ...]:
    """Return the nodes of the safe COMMIT and those that are alive, or went on after it; who left before it
    is nobody's loss.
    """
    uploaded = _nodes_of(safe.commit) if safe is not None else set()
    known = {one.node: one for one in seen}
    names = uploaded | {one.node for one in seen if safe is None or not one.is_dead} | ahead
    return tuple(_row(name, known.get(name), is_in_safe=name in uploaded) for name in sorted(names))


def _nodes_of(commit: Commit) -> set[str]:
    """Return the names of the nodes whose manifests a COMMIT rests on: they stand in the keys."""
    names = (ref.key.rsplit("/", 1)[-1].partition("~")[0] for ref in commit.manifests)
    return {decode_name(name) for name in names if name}


def _row(name: str, seen: SeenNode | None, *, is_in_safe: bool) -> NodeReport:
    beat = seen.heartbeat if seen is not None else None
    age = seen.seconds_ago if seen is not None else None
    has_ended = seen is not None and seen.has_ended
    return NodeReport(
        node=name,
        node_id=beat.node_id if beat else None,
        heard_seconds_ago=None if age is None else round(age, 1),
        is_store_time=seen is None or seen.is_store_time,
        is_dead=age is not None and age > DEAD_SECONDS and not has_ended,
        has_ended=has_ended,
        state="ended" if has_ended else beat.state if beat else "unknown",
        newest_step=beat.newest.step if beat and beat.newest else None,
        newest_tag=beat.newest.tag if beat and beat.newest else None,
        ranks=ranks_in_words(beat.ranks) if beat else "",
        ckptd_version=beat.ckptd_version if beat else None,
        config_digest=beat.config_digest if beat else None,
        is_in_safe=is_in_safe,
    )


def _safe(view: CommitView, age_seconds: float) -> SafeRow:
    commit = view.commit
    return SafeRow(
        tag=commit.tag,
        generation=commit.generation,
        branch=commit.branch,
        step=commit.step,
        committed_at=commit.committed_at,
        age_seconds=round(age_seconds, 1),
        commit_sha256=view.sha256,
    )


# --- saves that are not committed ------------------------------------------------------------------------
# Saves that some nodes uploaded their parts of, and what each lacks: from node manifests and heartbeats.

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


def opened(
    store: Store,
    uncommitted: Sequence[Stem],
    safe: Safe | None,
    seen: Sequence[SeenNode],
    now_seconds: float,
    is_wanted: Callable[[NodeManifest], bool] = lambda _: True,
) -> tuple[tuple[OpenRow, ...], list[str]]:
    """Return the uncommitted saves beyond the safe one that no rewind left behind, newest first, and what a
    person needs to know of them; `is_wanted`: of the run that is asked about.

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
    return tuple(rows), problems


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
    alive = {one.node for one in seen if one.heartbeat is not None and one.seconds_ago is not None}
    if len(came) < len(members) or not {known.manifest.node for known in members} <= alive:
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
        missing=generation.absent(members),
        branch=lead.branch,
        step=lead.step,
        generation=lead.generation,
        mm_count=lead.grid.mm_count,
        # since the first part was uploaded
        age_seconds=max((now_seconds - i.mtime_ns / 1e9 for i in infos if i.mtime_ns), default=0.0),
        parts=tuple(
            MissingPart(node=m.node, generation=m.generation, last_seconds=m.save_window.last // 10**9)
            for m in (known.manifest for known in of_tag)
        ),
    )


def _problem(lead: NodeManifest, lost: MissingShards, *, is_one_of_several: bool) -> str:
    which = f" (generation {lead.generation})" if is_one_of_several else ""
    again = "; save again" if lost.apart else ""
    return f"{lead.tag}{which} is not committed: {lost.text}{again}"


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
        if (members := generation.newest_revisions(read_generation(store, where)))
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
    """Return when each was saved (Unix seconds, from names of manifests; 0: an early release's), and when its
    last part came (ns, the store's time)."""
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
