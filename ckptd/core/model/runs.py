"""Identify the run of a checkpoint, and choose the run that may commit in a remote (ADR 0185).

A run is what one training saved, over restarts, nodes and world sizes. Its id stands in all that it commits.
A remote keeps a row of numbered documents, each created once: the highest names the run that goes on there
and the place that saves it. Two places that save whole checkpoints of their own are never one run's. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from ckptd.base.identity import Model
from ckptd.base.names import ROOT
from ckptd.core.model.listing import OURS
from ckptd.core.model.manifest import Commit, Document, NodeManifest, TombstoneHeader

if TYPE_CHECKING:
    from ckptd.core.model.heartbeat import Heartbeat, SeenNode

RUNS = f"{ROOT}/runs/"
RUN_FILE = "run.json"
RUN_FILE_PATH = f"{OURS}/{RUN_FILE}"
SHORT = 8
"""Letters of a run id that are shown, and that name it where no other begins so."""

How = Literal["begun", "resumed", "recognised", "joined"]
_Committed = TypeVar("_Committed", Commit, NodeManifest)


class Place(Model):
    """The place where a run is saved."""

    node: str
    node_id: str
    host: str = ""
    user: str = ""
    save_dir: str = ""

    @property
    def words(self) -> str:
        """`user@host:save_dir`."""
        return f"{self.user or '?'}@{self.host or self.node}:{self.save_dir or '?'}"


class Part(Model):
    """The part of a save that one node has."""

    is_whole: bool = True
    shards: tuple[tuple[int, int], ...] = ()
    """(data-parallel rank, model-parallel rank), where it is not whole."""
    grid: tuple[int, int, int] | None = None
    """(dp, mm_count, zero_stage)."""
    is_shared: bool = False
    """Hosts share the directory (`shared_fs`)."""


class Row(Document, Place, Part):
    """`_ckptd/runs/<number>.json`: from here on this run goes on in that place. Create-only."""

    job_id: str
    number: int
    run_id: str
    created_at: str
    """RFC 3339, UTC; shown, and nothing else."""


class RunFile(Model):
    """`<save_dir>/_ckptd/run.json`: the run that this directory holds. It goes with what lies there."""

    run_id: str
    place: str
    """Digest of the directory's path and inode: a copy of the directory is another place."""
    how: How
    known: tuple[tuple[str, int], ...] = ()
    """(remote id, number of the newest row there) when `resume` wrote this."""
    accepted: tuple[tuple[str, int], ...] = ()
    """(remote id, number of the newest row under which this place may write there)."""
    left: str | None = None
    """The run that this directory held before it was emptied and saved into anew."""

    def knows(self, remote_id: str) -> int:
        """Return the newest row that `resume` saw; 0: none."""
        return dict(self.known).get(remote_id, 0)

    def is_accepted(self, remote_id: str) -> int:
        """Return the newest row under which this place may write there; 0: none."""
        return dict(self.accepted).get(remote_id, 0)

    def accepting(self, remote_id: str, number: int, run_id: str) -> RunFile:
        """Return a copy that records the row under which a remote accepted this place."""
        rows = {**dict(self.accepted), remote_id: number}
        how: How = self.how if run_id == self.run_id else "joined"
        return self.model_copy(update={"accepted": tuple(sorted(rows.items())), "run_id": run_id, "how": how})


class Claim(Place, Part):
    """The facts that a place states about itself before it writes to a remote."""

    run_id: str
    is_new: bool = False
    """The run begins here, and no remote has heard of it."""
    left: str | None = None
    was_resumed: bool = False
    knows: int = 0
    accepted: int = 0


class ClaimVerdict(Model):
    """The verdict: write under that run, after a row of its own (`appends`), or not at all (`others`)."""

    run_id: str
    appends: bool = False
    others: tuple[Place, ...] = ()
    """Other writers: nothing is uploaded to that remote, and nothing deleted from it."""


class RunSeen(Model):
    """The newest row, and which one: as a remote's child read it after a claim."""

    run_id: str
    number: int
    others: tuple[Place, ...] = ()
    """Not empty: the claim was refused."""


def run_of(document: NodeManifest | Commit | TombstoneHeader | Heartbeat, job_id: str) -> str:
    """The run of a document; what releases before wrote is of the first run, which bears the job's id."""
    return document.run_id or job_id


def run_of_all(documents: Iterable[_Committed]) -> list[str]:
    """Return the runs of documents, each once, sorted."""
    return sorted({run_of(document, document.job_id) for document in documents})


def of_run(documents: Iterable[_Committed], run_id: str | None) -> list[_Committed]:
    """Return those of one run; None: all."""
    return [d for d in documents if run_id is None or run_of(d, d.job_id) == run_id]


def ranked(rows: Sequence[Row], committed: Iterable[str]) -> tuple[str, ...]:
    """Runs, that of the newest row first; `committed`: runs of COMMITs, which releases before gave no row."""
    by_row = [row.run_id for row in sorted(rows, key=lambda row: -row.number)]
    return tuple(dict.fromkeys([*by_row, *sorted(committed)]))


def pointed_at(rows: Sequence[Row], commits: Sequence[Commit]) -> list[Commit]:
    """The COMMITs that pointers follow: of the newest run that has committed a ZeRO form, else anything.

    A run that has begun and committed nothing yet leaves them where they are.
    """
    for those in ([c for c in commits if c.form == "zero" and not c.grid.is_model_only], commits):
        having = set(run_of_all(those))
        run_id = next((run for run in ranked(rows, having) if run in having), None)
        if run_id is not None:
            return of_run(commits, run_id)
    return []


def short(run_id: str) -> str:
    """Return the text that is shown."""
    return run_id[:SHORT]


# --- The run that may commit -----------------------------------------------------------------------------


def judge(
    claim: Claim, row: Row | None, seen: Iterable[SeenNode], *, job_id: str, is_virgin: bool
) -> ClaimVerdict:
    """Judge whether that place may write to a remote whose newest row is `row`; `seen`: heartbeats there.

    `is_virgin`: nothing was ever committed there, by no release.
    """
    if row is None:
        is_first = claim.is_new and is_virgin
        return ClaimVerdict(run_id=job_id if is_first else claim.run_id, appends=True)
    alive = _living(claim, row, seen)
    if claim.is_shared and row.is_shared and _is_of_directory(claim, row, alive):
        return ClaimVerdict(run_id=row.run_id)
    is_here = _is_here(claim, row)
    if row.run_id == claim.run_id:
        is_same = row.node_id == claim.node_id
        if is_here or (row.node == claim.node and _are_parts(claim, row)):
            return ClaimVerdict(run_id=row.run_id, appends=not is_same)
        if claim.accepted >= row.number or _are_of_one(claim, row, alive):
            return ClaimVerdict(run_id=row.run_id)
        if claim.was_resumed and claim.knows >= row.number:
            return ClaimVerdict(run_id=row.run_id, appends=True)
    elif claim.is_new and alive and row.run_id != claim.left and _are_of_one(claim, row, alive):
        return ClaimVerdict(run_id=row.run_id)
    if not alive:
        return ClaimVerdict(run_id=claim.run_id, appends=True)
    return ClaimVerdict(run_id=row.run_id, others=tuple(_place_in(one, row) for one in alive))


def _is_of_directory(claim: Claim, row: Row, alive: Sequence[Heartbeat]) -> bool:
    """Whether a host that shares its directory goes on with what another of its hosts began, or it before."""
    if row.run_id == claim.run_id:
        return True
    return claim.is_new and row.run_id != claim.left and (bool(alive) or row.node_id == claim.node_id)


def _living(claim: Claim, row: Row, seen: Iterable[SeenNode]) -> list[Heartbeat]:
    """Return who goes on with the run of the row in another place than ours and was heard of lately."""
    found = []
    for one in seen:
        beat = one.heartbeat
        # of a shared directory each host is one, were they containers of one name
        is_ours = beat is not None and (
            beat.node_id == claim.node_id if claim.is_shared else _is_here(claim, beat)
        )
        if beat is None or one.is_dead or is_ours:
            continue
        # a daemon beats before it knows its run
        is_of_row = beat.node_id == row.node_id and beat.run_id is None
        if is_of_row or beat.run_id == row.run_id:
            found.append(beat)
    return found


def _is_here(claim: Claim, other: Row | Heartbeat) -> bool:
    """Our own place, perhaps before its state was lost: the lock of save_dir keeps a second daemon out."""
    if other.node_id == claim.node_id:
        return True
    return bool(claim.save_dir) and (other.host, other.save_dir) == (claim.host, claim.save_dir)


def _are_parts(claim: Claim, row: Row) -> bool:
    return not claim.is_whole and not row.is_whole and claim.grid == row.grid


def _are_of_one(claim: Claim, row: Row, alive: Sequence[Heartbeat]) -> bool:
    """Tell whether both save parts of the same checkpoints: no shard is saved twice."""
    if not _are_parts(claim, row):
        return False
    others = {shard for beat in alive if beat.node != claim.node for shard in beat.shards or ()}
    is_row_alive = any(beat.node_id == row.node_id for beat in alive)
    others |= set(row.shards) if is_row_alive and row.node != claim.node else set()
    return others.isdisjoint(claim.shards)


def _place_in(beat: Heartbeat, row: Row) -> Place:
    """Return the place of a node; until its daemon's heartbeat names one, its row does."""
    if not beat.save_dir and beat.node_id == row.node_id:
        return Place(node=row.node, node_id=row.node_id, host=row.host, user=row.user, save_dir=row.save_dir)
    return Place(node=beat.node, node_id=beat.node_id, host=beat.host, user=beat.user, save_dir=beat.save_dir)
