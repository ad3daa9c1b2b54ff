"""One node of a simulated fleet: what its daemon does between its disk and the remote, over the real code.

As `daemon/job.py` has it: observe, seal, choose generations, plan, act. The planner, retention, generations,
shipping, committing and retiring are ckptd's own; the journal is a list, a file one line.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.base.names import IDENTITY_KEY
from ckptd.base.retry import backoff_seconds
from ckptd.core.completeness.markers import replicas
from ckptd.core.completeness.order import next_order, sealing_order
from ckptd.core.model.generation import AlreadyCommitted, GenerationRetired, JoinGeneration, choose_generation
from ckptd.core.model.layouts import Grid, Role, parse_shard_name
from ckptd.core.model.manifest import NodeManifest, folder_name, sha256_of
from ckptd.core.model.records import ZERO, DerivedRecord, DerivedState, UploadRecord, UploadState
from ckptd.core.model.save import Order, SaveWindow, SealedFile, SealedSave, Writer
from ckptd.core.policy import actions as act
from ckptd.core.policy.planner import plan
from ckptd.core.policy.remote import TURN_SECONDS
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.core.policy.view import Confirmation, Disk, GenerationAnswer, JobView, RemoteView, SaveView
from ckptd.daemon.state.deletions import due_since
from ckptd.daemon.state.remote_sync import as_committed, commits_in, unread_manifests
from ckptd.daemon.state.upload_records import note_parts, waiting_on
from ckptd.daemon.state.view_builder import as_planned
from ckptd.daemon.uploads.remote_deletion import patience_seconds
from ckptd.daemon.uploads.session import commits_of, of_run
from ckptd.daemon.uploads.uploads import STEP_IN_SECONDS
from ckptd.errors import CkptdError, SourceChanged
from ckptd.storage.remote import commit, deletion, observe
from ckptd.storage.remote.documents import DocumentCache
from ckptd.storage.remote.messages import DeleteCommit, UploadedObject, UploadFile, UploadRequest
from ckptd.storage.remote.transfer import TransferControl
from ckptd.storage.stores.base import Abilities
from ckptd.storage.stores.rate_limit import RateLimiter
from tests.fleet.engine import Program
from tests.fleet.nap import MOST_MORE_SECONDS, OBSERVE_SECONDS, PAUSE_SECONDS, Look, Nap, Phase
from tests.fleet.remote import FleetStore
from tests.stores.scene import JOB_ID

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from ckptd.core.model.manifest import Commit, RemoteIdentity
    from ckptd.daemon.state.upload_records import CommitWait
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.messages import Observation, TagView
    from ckptd.storage.stores.base import Store
    from tests.fleet.engine import Engine
    from tests.fleet.remote import Network, Remote

NAS = "nas"
SPREAD_SECONDS = 60.0
SETTLE_SECONDS = 5.0
AT_REST_SECONDS = 60.0
LATE_PRUNES = 0.5
"""How often all workers are busy while a prune is due."""
ABILITIES = Abilities(create_only=True, checksum="crc64nvme", resumable=True)
_BESIDE = (Role.SIDE, Role.EXTRA)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all nodes of the job agree on (but for one that was configured otherwise)."""

    ranks: int
    stage: int
    are_pickles_equal: bool
    """False: replicas of one tensor differ in bytes from node to node."""
    has_replicas: bool
    """Each node has the model states; else rank 0's alone."""
    local_limit: int | None
    remote_limit: int | None
    stages: int = 1
    """Of a pipeline; each has as many data-parallel ranks as the others."""

    @property
    def grid(self) -> Grid:
        """As metadata of each shard proves it."""
        dp = self.ranks // self.stages
        return Grid(dp=dp, mm_count=self.stages, tp=1, pp=self.stages, zero_stage=self.stage)

    @property
    def digest(self) -> str:
        """As `config_digest`: of what is kept."""
        return f"limits {self.local_limit} {self.remote_limit}"

    def paths(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The shards that some ranks save."""
        cells = [divmod(rank, self.ranks // self.stages) for rank in ranks]
        found = [optim_name(d, stage) for stage, d in cells]
        if self.stage == 3:
            found += [f"zero_pp_rank_{d}_mp_rank_{stage:02d}_model_states.pt" for stage, d in cells]
        else:
            models = {stage for stage, d in cells if self.has_replicas or d == 0}
            found += [f"mp_rank_{stage:02d}_model_states.pt" for stage in sorted(models)]
        return tuple(found)


def optim_name(d: int, stage: int) -> str:
    """An optimizer shard."""
    return f"bf16_zero_pp_rank_{d}_mp_rank_{stage:02d}_optim_states.pt"


@dataclass(frozen=True, slots=True)
class Written:
    """What the trainer's ranks wrote under a tag."""

    number: int
    step: int
    at_seconds: float
    """By the node's own clock."""
    done_seconds: float
    """By the story's."""
    by: str = ""
    """Whose pickles they are."""
    best: str | None = None
    """The tag that the trainer calls the best, as it notes beside rank 0's shards."""


@dataclass
class Row:
    """A sealed save in a node's journal."""

    id: int
    written: Written
    save: SealedSave
    record: UploadRecord
    state: str = "present"
    uploaded: dict[str, UploadedObject] = field(default_factory=dict)
    manifest_sha256: str = ""
    waiting: CommitWait | None = None
    heard: Commit | None = None
    """What its COMMIT said."""


@dataclass
class Machine:
    """A machine with its disk and state directory; both go with it."""

    name: str
    node_id: str
    ranks: tuple[int, ...]
    job: Job
    run_id: str | None = None
    """Of the run that it saves; None: there is one."""
    disk: dict[str, Written] = field(default_factory=dict)
    latest: str | None = None
    rows: list[Row] = field(default_factory=list)
    present: list[Row] = field(default_factory=list)
    """Those of them whose checkpoint lies on the disk: few of a thousand."""

    def lose_journal(self, node_id: str) -> None:
        """The state directory is gone."""
        self.rows, self.present, self.node_id = [], [], node_id

    def end(self, row: Row, state: str) -> None:
        """Its checkpoint is no longer there."""
        row.state = state
        self.present.remove(row)

    def in_flight(self, now: float) -> frozenset[str]:
        """Tags whose files changed a moment ago (`daemon/intake/sealer.py`)."""
        return frozenset(t for t, w in self.disk.items() if now < w.done_seconds + SETTLE_SECONDS)

    def content(self, written: Written, path: str) -> bytes:
        """The line that stands for a shard's bytes."""
        is_own = not self.job.are_pickles_equal and path.startswith("mp_rank_")
        return f"save {written.number} {path}{' of ' + written.by if is_own else ''}".encode()


class Daemon:
    """The daemon of one machine from a start to its end; what it remembers is gone then."""

    def __init__(
        self,
        machine: Machine,
        engine: Engine,
        remote: Remote,
        network: Network,
        identity: RemoteIdentity,
        chance: Random,
        counts: Counter[str],
        latest_looks: float = 0.0,
        *,
        naps: bool = True,
    ) -> None:
        self.machine = machine
        self.engine = engine
        self.identity = identity
        self.chance = chance
        self.late_looks = latest_looks
        """How often an observation comes too late to be planned on."""
        self.late_prunes = LATE_PRUNES
        self.store = FleetStore(remote, network, chance, counts)
        self.ground = observe.AttachedRemote(store=self.store, abilities=ABILITIES, identity=identity)  # type: ignore[arg-type]
        self.cache = DocumentCache()
        self.observation: Observation | None = None
        """Of its run alone, as `daemon/uploads/session.py` has it."""
        self.seen_all: Observation | None = None
        self.observed_at = -AT_REST_SECONDS
        self.is_stale = True
        self.tag_views: dict[str, TagView] = {}
        self.generations: dict[tuple[int, str, str], GenerationAnswer] = {}
        self.confirmations: dict[int, Confirmation] = {}
        self.due_since: dict[tuple[str, str], float] = {}
        self.retiring_since: dict[Stem, float] = {}
        self.is_first_scan = True
        self.idle_until: float | None = None
        """None: in the middle of a turn."""
        self.naps = naps
        self.nap: Nap | None = None
        self.begun: Nap | None = None
        """A nap that ended in the middle of a look."""
        self.usual: Look | None = None
        """What a look asks as long as the remote stays as it is."""
        self.program = Program(engine, machine.name, self.run)
        self.store.program = self.program

    # --- the turn --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until it is killed."""
        while True:
            try:
                did = self.turn()
            except CkptdError:
                self.observation, self.is_stale = None, True
                self.program.wait(PAUSE_SECONDS + MOST_MORE_SECONDS * self.chance.random())
                continue
            if not did:
                self._rest()

    def hint(self) -> None:
        """The trainer wrote something."""
        seconds = SETTLE_SECONDS + 0.1
        # a trainer that saves again and again postpones nothing
        if self.idle_until is not None and self.engine.now + seconds < self.idle_until:
            self.idle_until = self.engine.now + seconds
            self.program.wake_in(seconds)

    def _rest(self) -> None:
        """Until the next turn; those that nothing can come of are not lived."""
        now = self.engine.now
        until, rest_seconds = self._nothing_before(), self._rest_seconds()
        if until <= now or self.usual is None:
            self._idle_until(now + rest_seconds)
            return
        nap = self.nap = Nap(
            self.usual, self.store, self.chance, self.late_looks,
            now=now, observed_at=self.observed_at, rest_seconds=rest_seconds,
        )  # fmt: skip
        try:
            self.program.doze(until)
        finally:
            nap.advance(self.engine.now)
            self.nap = None
        self.observed_at = nap.observed_at
        if nap.has_failed:
            self.observation, self.is_stale = None, True
        if nap.phase is Phase.REST:
            self._idle_until(nap.ends)
        elif nap.phase is Phase.PAUSE:
            self.program.wait_until(nap.ends)
        else:
            self.begun = nap

    def _idle_until(self, when: float) -> None:
        self.idle_until = when
        self.program.wait_until(when)
        self.idle_until = None

    def _nothing_before(self) -> float:
        """Until when turns decide nothing, as the last one did not, unless somebody changes something; 0: no
        telling."""
        machine, seen, usual, now = self.machine, self.observation, self.usual, self.engine.now
        is_known = usual is not None and usual.version == self.store.remote.version
        if not self.naps or not is_known or seen is None or self.is_stale:
            return 0.0
        if self.confirmations or self._young():
            return 0.0
        due = [r.record.retry_at_seconds for r in machine.present if r.record.state in _OPEN]
        if seen.retiring:
            ends = self._finishes_at(seen)
            if ends <= now:
                return 0.0
            due.append(ends)
        # whose turn it is to retire something changes each minute, until it has been every node's
        turns = ((since, int((now - since) // TURN_SECONDS) + 1) for since in self.due_since.values())
        due += [since + turn * TURN_SECONDS for since, turn in turns if turn <= 2 * machine.job.ranks + 2]
        # the turn at that very moment is lived
        return math.nextafter(min((at for at in due if at > now), default=NEVER), 0.0)

    def _young(self) -> list[Written]:
        return [w for tag, w in self.machine.disk.items() if self._row(tag, w) is None]

    def _rest_seconds(self) -> float:
        machine, now = self.machine, self.engine.now
        young = self._young()
        if young:
            return max(0.1, min(w.done_seconds for w in young) + SETTLE_SECONDS - now + 0.1)
        is_open = any(r.record.state in _OPEN for r in machine.present)
        is_busy = is_open or self.confirmations or self.due_since or self.observation is None
        return OBSERVE_SECONDS if is_busy else AT_REST_SECONDS

    def turn(self) -> bool:
        """Look, decide, do; True: something was done."""
        self._look()
        assert self.observation is not None
        self._seal()
        self._hear_of_commits(self.observation)
        self._choose()
        self._adopt_commits(self.observation)
        view = self.view(self.observation)
        planned = plan(view)
        self.due_since = due_since(self.due_since, planned.remote_verdicts, view.now_seconds)
        did = self._act(planned.actions)
        self.is_first_scan, was_first = False, self.is_first_scan
        return any(did) or was_first

    def _look(self) -> None:
        now, store, begun = self.engine.now, self.store, self.begun
        store.log, version, self.begun = [], store.remote.version, None
        if begun is None:
            is_due = self.is_stale or now - self.observed_at >= OBSERVE_SECONDS
            is_late = self.observation is not None and self.chance.random() < self.late_looks
            if not is_due or (is_late and not self.is_stale):
                return
        else:
            now, version = begun.began, begun.look.version
            store.due, store.ahead = begun.ends, deque(begun.look.asked[: begun.step])
        found = observe.observe(self.store, self.identity, self.cache)  # type: ignore[arg-type]
        run_id = self.machine.run_id
        self.seen_all, self.observation = found, found if run_id is None else of_run(found, run_id)
        self.observed_at, self.is_stale = now, False
        if version != store.remote.version:
            self.usual = None
        elif begun is None:
            # documents that were read once are not read again
            again = (a for a in store.log if a.verb == "list" or a.key in _READ_EACH_TIME)
            self.usual = Look(version, tuple(again))

    # --- sealing --------------------------------------------------------------------------------------------

    def _row(self, tag: str, written: Written) -> Row | None:
        rows = (r for r in self.machine.present if r.save.tag == tag)
        return next((r for r in rows if r.written == written), None)

    def _seal(self) -> None:
        machine, seen = self.machine, self.observation
        assert seen is not None
        for row in list(machine.present):
            if machine.disk.get(row.save.tag) != row.written:
                machine.end(row, "gone")
        fresh = {t: w for t, w in machine.disk.items() if self._row(t, w) is None}
        due = {t: w for t, w in fresh.items() if self.engine.now >= w.done_seconds + SETTLE_SECONDS}
        known = self._known_tags()
        for tag in sealing_order({t: w.step for t, w in due.items()}, machine.latest):
            if tag in known and tag not in self.tag_views and all(r.save.tag != tag for r in machine.rows):
                self._describe(tag)
            self._seal_one(tag, due[tag])

    def _seal_one(self, tag: str, written: Written) -> None:
        machine, seen = self.machine, self.observation
        if machine.disk.get(tag) != written or seen is None:
            return
        files = self._files(written)
        order = self._known_order(tag, {(f.path, f.fingerprint) for f in files})
        if order is None:
            orders = [r.save.order for r in machine.rows]
            orders += [Order(c.commit.branch, c.commit.step, c.commit.save_seq) for c in seen.commits]
            orders += [Order(t.branch, t.step, t.save_seq) for t in seen.retired]
            order = next_order(written.step, max(orders, default=None))
        at_ns = int(written.at_seconds * 1e9)
        save = SealedSave(
            tag=tag,
            folder=FolderIdentity(dev=1, ino=written.number),
            files=files,
            grid=machine.job.grid,
            branch=order.branch,
            step=order.step,
            save_seq=order.save_seq,
            run_id=machine.run_id,
            window=SaveWindow(first=at_ns, last=at_ns),
            is_part=machine.job.ranks > len(machine.ranks),
            best_checkpoint=written.best if 0 in machine.ranks else None,
            writer=Writer(),
        )
        row = Row(len(machine.rows) + 1, written, save, UploadRecord(remote=NAS, form=ZERO))
        machine.rows.append(row)
        machine.present.append(row)

    def _files(self, written: Written) -> tuple[SealedFile, ...]:
        machine, rows = self.machine, []
        mtime_ns = int(written.at_seconds * 1e9)
        for path in machine.job.paths(machine.ranks):
            named = parse_shard_name(path)
            assert named is not None
            data = machine.content(written, path)
            identity = FileIdentity(
                dev=1, ino=1, size_bytes=len(data), mtime_ns=mtime_ns, ctime_ns=written.number
            )
            rows.append(
                SealedFile(
                    path=path,
                    identity=identity,
                    fingerprint=sha256_of(data)[:16],
                    tensor_fingerprint=f"{written.number} {path}",
                    role=named.role,
                    shard=named.shard,
                )
            )
        return tuple(rows)

    def _known_order(self, tag: str, wanted: set[tuple[str, str]]) -> Order | None:
        for row in self.machine.rows:
            if row.save.tag == tag and set(row.save.fingerprints) == wanted:
                return row.save.order
        if tag in self.tag_views:
            for seen in commits_of(self.tag_views[tag])[0]:
                mine = (f for f in seen.manifest.files if f.role not in _BESIDE and f.replica_of is None)
                shards = {(f.path, f.fingerprint) for f in mine}
                is_own = self.machine.run_id in (None, seen.manifest.run_id)
                if is_own and seen.committed and shards and shards <= wanted:
                    return Order(seen.manifest.branch, seen.manifest.step, seen.manifest.save_seq)
        return None

    # --- generations ----------------------------------------------------------------------------------------

    def _known_tags(self) -> frozenset[str]:
        seen = self.seen_all
        assert seen is not None
        return frozenset(
            {v.commit.tag for v in seen.commits}
            | set(seen.retired_tags)
            | {tag for tag, _, _ in seen.uncommitted}
        )

    def _hear_of_commits(self, seen: Observation) -> None:
        made = {(v.commit.tag, v.commit.generation) for v in seen.commits}
        disputed = {v.sha256 for v in seen.commits if v.disputed}
        held = {(v.key, v.sha256) for v in seen.commits if not v.disputed}
        for row in self.machine.present:
            record = row.record
            update: dict[str, object] = {}
            is_lost = (record.commit_key, record.commit_sha256) not in held
            if record.state is UploadState.COMMITTED and (record.commit_sha256 in disputed or is_lost):
                update = {"state": UploadState.NEW, "commit_key": None, "commit_sha256": None}
            elif record.state is UploadState.WAITING and (row.save.tag, record.generation) in made:
                update = {"retry_at_seconds": 0.0} if record.retry_at_seconds else {}
            if update:
                row.record = record.model_copy(update=update)
                self.tag_views.pop(row.save.tag, None)
            elif record.state is UploadState.WAITING and row.waiting is not None:
                self._hear_of_parts(row, row.waiting, seen)

    def _hear_of_parts(self, row: Row, waiting: CommitWait, seen: Observation) -> None:
        record = row.record
        row.waiting, again_at = note_parts(
            waiting,
            record.retry_at_seconds,
            is_whole=(row.save.tag, record.generation, ZERO) in seen.listed_whole,
            now_seconds=self.engine.now,
        )
        if again_at != record.retry_at_seconds:
            row.record = record.model_copy(update={"retry_at_seconds": again_at})

    def _choose(self) -> None:
        machine = self.machine
        for row in machine.present:
            key = (row.id, NAS, ZERO)
            is_open = row.record.state in _OPEN
            if not is_open or key in self.generations or row.save.tag not in self.tag_views:
                continue
            view = self.tag_views[row.save.tag]
            manifests, commits = commits_of(view)
            choice = choose_generation(
                row.save,
                JOB_ID,
                manifests=manifests,
                commits=commits,
                tombstones=view.retired,
                save_spread_seconds=SPREAD_SECONDS,
                run_id=machine.run_id,
                named=unread_manifests(view),
            )
            match choice:
                case JoinGeneration(generation=g):
                    self.generations[key] = GenerationAnswer(generation=g)
                case AlreadyCommitted() as already:
                    found = {
                        "state": UploadState.COMMITTED,
                        "generation": already.generation,
                        "commit_key": already.commit_key,
                        "commit_sha256": already.commit_sha256,
                    }
                    row.record = row.record.model_copy(update=found)
                    self.is_stale = True
                case GenerationRetired(generation=g):
                    row.record = row.record.model_copy(update={"state": UploadState.DELETED, "generation": g})

    def _adopt_commits(self, seen: Observation) -> None:
        commits = commits_in(seen)
        for row in self.machine.rows:
            record = row.record
            if record.state is UploadState.COMMITTED:
                commit = commits.get((record.commit_key, record.commit_sha256))
                # what it said once it says again
                if commit is not None and commit is not row.heard:
                    row.save, row.heard = as_committed(row.save, [commit]), commit

    # --- what the planner sees ------------------------------------------------------------------------------

    def view(self, seen: Observation) -> JobView:
        """The view of this turn."""
        machine, job = self.machine, self.machine.job
        present = machine.present
        saves = tuple(
            SaveView(
                id=row.id,
                save=row.save,
                is_adopted=True,
                was_found_first=False,
                is_intact=machine.disk.get(row.save.tag) == row.written,
                is_present=True,
                uploads={(NAS, ZERO): row.record},
                universal=_REFUSED,
            )
            for row in present
        )
        remote = RemoteView(
            name=NAS,
            is_required=True,
            forms=(ZERO,),
            is_attached=True,
            is_busy=False,
            commits=tuple(as_planned(v) for v in seen.commits if not v.disputed),
            known_tags=self._known_tags(),
            retention=RetentionPolicy(save_total_limit=job.remote_limit),
        )
        sealed = {row.save.tag for row in present}
        return JobView(
            saves=saves,
            remotes=(remote,),
            local_forms=(),
            local_retention=RetentionPolicy(save_total_limit=job.local_limit),
            existing="newest",
            latest=machine.latest,
            latest_universal=None,
            is_save_in_flight=bool(machine.in_flight(self.engine.now)),
            is_first_scan=self.is_first_scan,
            is_paused=False,
            may_delete=True,
            deletions_left=10,
            disk=Disk(free_bytes=1 << 50, reserve_bytes=0, can_clone=False),
            generations=self.generations,
            confirmations=self.confirmations,
            is_converting=False,
            now_seconds=self.engine.now,
            pinned_tags=frozenset(),
            node=machine.name,
            due_since_seconds=self.due_since,
            config_digest=job.digest,
            unsealed_tags=frozenset(machine.disk.keys() - sealed),
        )

    # --- acting ---------------------------------------------------------------------------------------------

    def _act(self, actions: Sequence[act.Action]) -> list[bool]:
        """All of a plan begins at once, so a prune waits for no remote; but workers may be busy."""
        prunes = [action for action in actions if isinstance(action, act.DeleteLocal)]
        others = [action for action in actions if not isinstance(action, act.DeleteLocal)]
        planned = dict(self.machine.disk)
        are_busy = bool(prunes) and self.chance.random() < self.late_prunes
        did = [] if are_busy else [self._prune(prune, planned) for prune in prunes]
        assert self.observation is not None
        did += [self._finish(self.observation), *(self._do(action) for action in others)]
        if are_busy:
            self.while_busy()
        return did + ([self._prune(prune, planned) for prune in prunes] if are_busy else [])

    def while_busy(self) -> None:
        """The story's: what happens until a worker is free for a prune."""

    def _do(self, action: act.Action) -> bool:
        match action:
            case act.Describe(tag=tag):
                self._describe(tag)
            case act.Upload():
                self._upload(action)
            case act.ConfirmCommits(save_id=save_id, commits=commits):
                asked = self.engine.now
                refs = tuple((ref.key, ref.sha256) for ref in commits)
                if observe.confirm(self.store, refs, self.identity).ok:  # type: ignore[arg-type]
                    self.confirmations[save_id] = Confirmation(commits=commits, at_seconds=asked)
                else:
                    row = self.machine.rows[save_id - 1]
                    lost = {"state": UploadState.NEW, "commit_key": None, "commit_sha256": None}
                    row.record = row.record.model_copy(update=lost)
                    self.tag_views.pop(row.save.tag, None)
                    self.is_stale = True
            case act.DeleteRemote():
                self._retire(action)
            case _:
                return False
        return True

    def _describe(self, tag: str) -> None:
        self.tag_views[tag] = observe.describe(
            self.store,  # type: ignore[arg-type]
            tag,
            self.identity,
            node=self.machine.name,
            manifests=self.ground.manifests,
        )

    def _prune(self, action: act.DeleteLocal, planned: dict[str, Written]) -> bool:
        machine, permit, row = self.machine, action.permit, self.machine.rows[action.save_id - 1]
        self.confirmations.pop(row.id, None)
        is_there = machine.disk.get(row.save.tag) == row.written
        if permit.is_valid_at(self.engine.now) and is_there and self.is_undisturbed(row.save.tag, planned):
            self.on_prune(row)
            del machine.disk[row.save.tag]
            machine.end(row, "pruned")
        return True

    def is_undisturbed(self, tag: str, planned: dict[str, Written]) -> bool:
        """No save began since that was planned (`daemon/actions/local_deletion.py`)."""
        return all(planned.get(other) == w for other, w in self.machine.disk.items() if other != tag)

    def on_prune(self, row: Row) -> None:
        """The judge's."""

    def _retire(self, action: act.DeleteRemote) -> None:
        order = DeleteCommit(
            tag=action.commit.tag,
            generation=action.commit.generation,
            form=action.commit.form,
            reason=action.reason,
            commit_sha256=action.commit.sha256,
            counted=action.counted,
        )
        self.is_stale = True
        self.tag_views.pop(action.commit.tag, None)
        deletion.delete_commit(self.ground, order, lambda: None)
        for row in self.machine.rows:
            if row.record.commit_sha256 == action.commit.sha256:
                row.record = row.record.model_copy(update={"state": UploadState.DELETED})

    def _finish(self, seen: Observation) -> bool:
        """A removal that somebody began and did not end."""
        if self.is_first_scan or not seen.retiring:
            return False
        tag, generation, form = where = seen.retiring[0]
        self.retiring_since.setdefault(where, self.engine.now)
        stone = next((t for t in seen.retired if (t.tag, t.generation, t.form) == where), None)
        if stone is None or self.engine.now < self._finishes_at(seen):
            return False
        order = DeleteCommit(
            tag=tag, generation=generation, form=form, reason=stone.reason, commit_sha256=stone.commit_sha256
        )
        self.is_stale = True
        deletion.delete_commit(self.ground, order, lambda: None)
        return True

    def _finishes_at(self, seen: Observation) -> float:
        """When this node ends the removal that is under way; 0: it has not seen it yet."""
        since = self.retiring_since.get(seen.retiring[0])
        return 0.0 if since is None else since + patience_seconds(seen, self.machine.name)

    def _upload(self, action: act.Upload) -> None:
        row = self.machine.rows[action.save_id - 1]
        if row.record.generation not in (None, action.generation):
            row.uploaded.clear()
        row.record = row.record.model_copy(update={"generation": action.generation})
        order = self._order(row, action.generation)
        control = TransferControl(
            pacer=_PACER,
            check=lambda: None,
            on_moving=lambda *_: None,
            on_done=lambda done: row.uploaded.update({done.key: done}),
        )
        self.is_stale = True
        with self._asking():
            try:
                result = commit.upload_form(self.ground, order, control, self._origin)
            except SourceChanged:
                row.uploaded.clear()
                row.record = self._again(row.record)
                return
            except CkptdError:
                row.record = self._again(row.record)
                raise
        self.tag_views.pop(row.save.tag, None)
        self.generations.pop((row.id, NAS, ZERO), None)
        if result.outcome == "committed" and result.commit is not None:
            update = {
                "state": UploadState.COMMITTED,
                "generation": result.commit.commit.generation,
                "commit_key": result.commit.key,
                "commit_sha256": result.commit.sha256,
                "tries": 0,
            }
            row.record = row.record.model_copy(update=update)
        elif result.outcome == "waiting":
            row.waiting = waiting_on(row.waiting, result, STEP_IN_SECONDS)
            again = self.engine.now + row.waiting.retry_seconds
            update = {"state": UploadState.WAITING, "retry_at_seconds": again}
            row.record = row.record.model_copy(update=update)
        else:
            row.uploaded.clear()
            row.record = self._again(row.record)

    def _again(self, record: UploadRecord) -> UploadRecord:
        tries = record.tries + 1
        wait_seconds = min(backoff_seconds(min(tries, 6)), 120.0)
        return record.model_copy(
            update={
                "state": UploadState.FAILED,
                "tries": tries,
                "retry_at_seconds": self.engine.now + wait_seconds,
            }
        )

    def _order(self, row: Row, generation: int) -> UploadRequest:
        save, machine = row.save, self.machine
        folder = folder_name(save.tag, generation, ZERO)
        head = NodeManifest(
            job_id=JOB_ID,
            tag=save.tag,
            generation=generation,
            form=ZERO,
            folder=folder,
            node=machine.name,
            node_id=machine.node_id,
            run_id=save.run_id,
            ckptd_version="0",
            config_digest=machine.job.digest,
            branch=save.branch,
            step=save.step,
            save_seq=save.save_seq,
            save_window=save.window,
            best_checkpoint=save.best_checkpoint,
            grid=save.grid,
            files=(),
        )
        elsewhere = replicas(save)
        rows = tuple(
            UploadFile(
                path=file.path,
                is_replica=file.path in elsewhere,
                key=f"{folder}/{file.path}",
                source=f"{save.tag}/{file.path}",
                identity=file.identity,
                bytes=file.identity.size_bytes,
                role=file.role,
                shard=file.shard,
                fingerprint=file.fingerprint,
                tensor_fingerprint=file.tensor_fingerprint,
            )
            for file in save.files
        )
        return UploadRequest(
            root="",
            manifest=head,
            files=rows,
            uploaded=tuple(row.uploaded.values()),
            steps_in=row.record.state is UploadState.WAITING,
        )

    # --- the disk, as shipping sees it -----------------------------------------------------------------

    @contextmanager
    def _asking(self) -> Iterator[None]:
        CURRENT[self.program.name] = self
        yield

    @contextmanager
    def _origin(
        self, order: UploadRequest, _root: int, _control: TransferControl, _store: Store
    ) -> Iterator[Origin]:
        yield Origin(order, self)

    def why_changed(self, file: UploadFile) -> str | None:
        """As `origin.changed`."""
        assert file.identity is not None
        found = self.machine.disk.get(file.source.partition("/")[0])
        if found is None:
            return f"{file.path} vanished"
        return None if found.number == file.identity.ctime_ns else f"{file.path} is another save's"


class Origin:
    """The node's disk."""

    most_lanes = 1
    is_afar = False

    def __init__(self, order: UploadRequest, daemon: Daemon) -> None:
        self.order = order
        self._daemon = daemon

    @contextmanager
    def opened(self, file: UploadFile) -> Iterator[LocalFile]:
        """A shard as it lies there now."""
        found = self._daemon.machine.disk.get(file.source.partition("/")[0])
        if found is None:
            raise SourceChanged(f"{file.path} vanished")
        yield LocalFile(self._daemon.machine.content(found, file.path))

    def held(self, _file: UploadFile) -> tuple[()]:
        return ()

    def why_changed(self, file: UploadFile) -> str | None:
        return self._daemon.why_changed(file)

    def recheck(self) -> None:
        """Raises: SourceChanged."""
        for file in self.order.files:
            reason = self.why_changed(file)
            if reason is not None:
                raise SourceChanged(reason)


class LocalFile:
    """A line of text."""

    mode, folder_mode, gid = 0o644, 0o755, None

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def drop(self, offset: int, length: int) -> None:
        """No page cache here."""


CURRENT: dict[str, Daemon] = {}
"""By thread: `commit` asks for files by descriptor, which is none here."""
NEVER = 1e18
_READ_EACH_TIME = (IDENTITY_KEY, "latest", "latest_universal")
_OPEN = (UploadState.NEW, UploadState.FAILED, UploadState.WAITING)
_REFUSED = DerivedRecord(state=DerivedState.REFUSED)
_PACER = RateLimiter()
NODE_IDS = itertools.count()
__all__ = ["Daemon", "Job", "Machine", "Written", "replace"]
