"""One seed, one history of a job on many nodes: saves, deaths, replacements, delays, rewinds, retention.

The trainer is one run over all nodes; when a machine is lost it begins anew from the newest COMMIT. At the
end everything heals, all go on, and the judge asks whether what is whole is committed.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

from ckptd.base.names import IDENTITY_KEY
from ckptd.core.model import manifest as documents_of
from ckptd.core.model.manifest import RemoteIdentity, to_bytes
from ckptd.core.policy.remote import keep_remote
from ckptd.storage.remote import commit, documents
from ckptd.storage.remote import documents as look
from ckptd.storage.remote.observe import live_commits
from ckptd.storage.remote.transfer import Carried, Transfer
from tests.fleet.engine import Engine
from tests.fleet.judge import Broken, Judge
from tests.fleet.node import CURRENT, Daemon, Job, Machine, Written
from tests.fleet.remote import Network, Remote
from tests.stores.scene import JOB_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

IDENTITY = RemoteIdentity(remote_id="r", job_id=JOB_ID, job="job", created="then")
HEALED_SECONDS = 2400.0
_LINKS = ((0.02, 0.0), (0.02, 1.0), (0.02, 50.0), (0.3, 1.0), (2.0, 1.0))
"""Latency and jitter of one request."""
SECOND_NUMBER = 10_000
"""Saves of the second run bear numbers from here on."""
START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a history is, and what may happen in it."""

    nodes: int
    checkpoints: int
    faults: bool = True
    interval_seconds: tuple[float, float] = (70.0, 300.0)
    skew_seconds: float = 8.0
    remote_limit: int | None = 0
    """0: drawn."""
    network: Network | None = None
    trainer_keeps: int | None = None
    """So many of its saves the trainer leaves on each disk; None: all."""
    naps: bool = True
    """Turns that nothing can come of are not lived."""
    runs: int = 1
    """2: another job of that name, on nodes of its own, saves into the same remote (docs/adr/0185)."""


@dataclass
class Told:
    """How a history went."""

    seed: int
    broken: str | None = None
    saves: int = 0
    commits: int = 0
    deaths: int = 0
    replaced: int = 0
    deletions: int = 0
    requests: int = 0
    cpu_seconds: float = 0.0
    per_node: dict[str, Counter[str]] = field(default_factory=dict)
    commit_seconds: list[float] = field(default_factory=list)
    """From the last node's seal to COMMIT."""
    lines: list[str] = field(default_factory=list)

    def add(self, other: Told) -> None:
        """What another run in the same remote did."""
        for name in ("saves", "commits", "deaths", "replaced", "deletions", "requests"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.per_node.update(other.per_node)
        self.commit_seconds += other.commit_seconds


class InOrder(Transfer):
    """The real transfer, its files one after the other in the thread that asks."""

    def run(self) -> Carried:
        for file in self._order.files:
            sent = self._upload_one(file)
            if sent is not None:
                self._verify(sent)
        results = tuple(self._results[file.key] for file in self._order.files)
        return Carried(files=results, bytes_sent=self._sent, bytes_skipped=self._skipped)


class Fleet:
    """One history under way."""

    def __init__(self, seed: int, shape: Shape, *, is_loud: bool = False, first: Fleet | None = None) -> None:
        """`first`: the run beside which this one saves into its remote."""
        self.chance = Random(seed if first is None else f"{seed}-beside")
        self.mark = "" if first is None else "b-"
        self.run_id = None if shape.runs == 1 else "first" if first is None else "second"
        self.shape = shape
        self.told = Told(seed)
        self.is_loud = is_loud
        self.engine: Engine = Engine() if first is None else first.engine
        self.remote: Remote = Remote() if first is None else first.remote
        if first is None:
            self.remote.put("put", IDENTITY_KEY, to_bytes(IDENTITY))
        else:
            self.told.lines = first.told.lines
        self.job = self._drawn_job()
        drawn: Network = self._drawn_network() if first is None else first.network
        self.network: Network = shape.network or drawn
        self.ranks = self._drawn_ranks()
        self.counts: dict[str, Counter[str]] = self.told.per_node
        self.odd = self._drawn_odd()
        self.names = 0
        self.machines = [self._machine(slot) for slot in range(shape.nodes)]
        others = frozenset() if self.odd is None else frozenset({self.machines[self.odd].name})
        self.judge = Judge(self.remote, self.job, self.run_id, None, others)
        self.judge.clock = lambda: self.engine.now
        self.daemons: list[Daemon | None] = [None] * shape.nodes
        self.version = self.remote.version
        self.step, self.number = 0, 0 if first is None else SECOND_NUMBER
        self.words: dict[int, str | None] = self.judge.words
        self.best: str | None = None
        self.sealed_at: dict[int, float] = {}
        self.committed_at: dict[int, float] = {}
        self.fleets: list[Fleet] = [self]
        if first is None and shape.runs > 1:
            other = Fleet(seed, shape, is_loud=is_loud, first=self)
            self.fleets.append(other)
            self.judge.beside, other.judge.beside = other.judge, self.judge
        if first is None:
            self.remote.on_change = self._on_any_change

    # --- drawn -----------------------------------------------------------------------------------------

    def _may(self, share: float) -> bool:
        return self.shape.faults and self.chance.random() < share

    def _drawn_job(self) -> Job:
        chance, limit = self.chance, self.shape.remote_limit
        if limit == 0:
            limit = chance.choice([None, 1, 1, 2, 3])
        job = Job(
            ranks=self.shape.nodes,
            stage=chance.choice([2, 3]),
            are_pickles_equal=chance.random() < 0.5,
            has_replicas=chance.random() < 0.6,
            local_limit=chance.choice([None, 1, 2]) if self.shape.faults else 2,
            remote_limit=limit,
        )
        # by the seed, so that all other histories stay what they were; of a restored save one name stands for
        # whose pickles it holds, and two stages have two
        is_pipeline = self.told.seed % 3 == 2 and self.shape.nodes % 2 == 0
        return replace(job, stages=2) if is_pipeline and (job.stage == 3 or job.are_pickles_equal) else job

    def _drawn_network(self) -> Network:
        if not self.shape.faults:
            return Network()
        chance = self.chance
        latency_seconds, jitter = chance.choice(_LINKS)
        return Network(
            latency_seconds=latency_seconds,
            jitter=jitter,
            lost=chance.choice([0.0, 0.0, 0.01, 0.05]),
            refused=chance.choice([0.0, 0.0, 0.02]),
            twice=chance.choice([0.0, 0.05, 0.2]),
        )

    def _drawn_odd(self) -> int | None:
        """The node that is configured otherwise."""
        nodes = self.shape.nodes
        return self.chance.randrange(nodes) if self._may(0.15) and nodes > 1 else None

    def _drawn_ranks(self) -> list[tuple[int, ...]]:
        return [(slot,) for slot in range(self.shape.nodes)]

    def _machine(self, slot: int, name: str = "") -> Machine:
        self.names += 1
        job = self.job if slot != self.odd else replace(self.job, local_limit=1, remote_limit=1)
        if slot == self.odd and job == self.job:
            job = replace(job, local_limit=2, remote_limit=None)
        name = name or f"{self.mark}n{slot}"
        return Machine(name, f"{self.mark}id{self.names:04d}", self.ranks[slot], job, self.run_id)

    # --- daemons ---------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of the timeline."""
        if self.is_loud:
            self.told.lines.append(f"{self.engine.now:9.2f} {text}")

    def start(self, slot: int) -> None:
        """The daemon of a slot starts."""
        if self.daemons[slot] is not None:
            return
        machine = self.machines[slot]
        late = 0.3 if self._may(0.3) else 0.0
        counts = self.counts.setdefault(machine.name, Counter())
        self.say(f"{machine.name}: daemon starts")
        daemon = Daemon(
            machine, self.engine, self.remote, self.network, IDENTITY,
            Random(self.chance.random()), counts, late, naps=self.shape.naps,
        )  # fmt: skip
        daemon.on_prune = lambda row: self.judge.on_prune(daemon, row)  # type: ignore[method-assign]
        CURRENT[machine.name] = daemon
        self.daemons[slot] = daemon

    def stop(self, slot: int) -> None:
        """The daemon of a slot dies."""
        daemon, self.daemons[slot] = self.daemons[slot], None
        if daemon is not None:
            self.told.deaths += 1
            self.say(f"{daemon.machine.name}: daemon dies")
            daemon.program.kill()

    def _on_any_change(self, verb: str, key: str, before: bytes | None, after: bytes | None) -> None:
        self.say(f"   {verb} {key}")
        for fleet in self.fleets:
            fleet.on_change(verb, key, before, after)

    def on_change(self, verb: str, key: str, before: bytes | None, after: bytes | None) -> None:
        """What this run makes of a change of the remote."""
        self.judge.on_change(verb, key, before, after)
        if self.remote.version != self.version:
            self.version = self.remote.version
            for daemon in self.daemons:
                if daemon is not None:
                    daemon.program.stir()
        if after is not None and key in self.judge.live:
            self.committed_at.setdefault(self.judge.live[key].number, self.engine.now)

    # --- what happens ----------------------------------------------------------------------------------

    def run(self) -> Told:
        """The whole history."""
        engine, shape = self.engine, self.shape
        when = max(fleet.begin() for fleet in self.fleets)
        engine.run(when)
        for fleet in self.fleets:
            fleet.heal()
        engine.run(when + (HEALED_SECONDS if shape.faults else 300.0))
        for fleet in self.fleets:
            fleet.end()
        for fleet in self.fleets[1:]:
            self.told.add(fleet.told)
        return self.told

    def begin(self) -> float:
        """Plan what happens; until when."""
        engine, chance, shape = self.engine, self.chance, self.shape
        for slot in range(shape.nodes):
            engine.at(chance.random() * 20 if shape.faults else 0.0, partial(self.start, slot))
        when = 30.0
        for _ in range(shape.checkpoints):
            engine.at(when, self._save)
            interval = chance.uniform(*shape.interval_seconds)
            if self._may(0.5):
                engine.at(when + chance.random() * interval, self._mishap)
            when += interval
        return when

    def _save(self) -> None:
        """The trainer saves on all nodes, or dies while it does."""
        chance = self.chance
        if self._may(0.12):
            self._rewind()
        again = self.step > 0 and self._may(0.12)
        self.step += 0 if again else 10
        self.number += 1
        torn = chance.randrange(self.shape.nodes) if self._may(0.1) else None
        number, step, at = self.number, self.step, self.engine.now
        if chance.random() < 0.3:
            self.best = f"global_step{step}"
        self.words[number] = self.best
        self.say(f"save {number} of step {step}{' is torn' if torn is not None else ''}")
        self.told.saves += 1
        for slot in range(self.shape.nodes):
            if slot != torn:
                lag = chance.random() * self.shape.skew_seconds
                self.engine.at(at + lag, partial(self._write, slot, number, step))

    def _write(self, slot: int, number: int, step: int) -> None:
        machine, tag = self.machines[slot], f"global_step{step}"
        there = machine.disk.get(tag)
        if there is not None and there.number > number:
            return
        self.sealed_at[number] = self.engine.now + 5.0
        now, word = self.engine.now, self.words[number]
        machine.disk[tag] = Written(number, step, START + now, now, machine.name, word)
        if slot == 0:
            machine.latest = tag
        self._rotate(machine)
        daemon = self.daemons[slot]
        if daemon is not None:
            daemon.program.stir()
            self.engine.at(self.engine.now, daemon.hint)

    def _rotate(self, machine: Machine) -> None:
        """The trainer removes what is too old for it, safe or not."""
        keeps = self.shape.trainer_keeps
        if keeps is not None:
            for tag in sorted(machine.disk, key=lambda name: machine.disk[name].number)[:-keeps]:
                del machine.disk[tag]

    def _rewind(self) -> None:
        steps = self.chance.randrange(1, 3)
        self.step = max(0, self.step - 10 * steps)
        self.say(f"the run is rewound to step {self.step}")

    def _mishap(self) -> None:
        chance = self.chance
        slot = chance.randrange(self.shape.nodes)
        match chance.choice(["crash", "crash", "crash twice", "lost", "renamed", "state lost", "slow"]):
            case "crash" | "crash twice" as what:
                self.stop(slot)
                wait = chance.choice([0.0, 1.0, 60.0, 400.0]) * (0.5 + chance.random())
                self.engine.at(self.engine.now + wait, lambda: self.start(slot))
                if what == "crash twice":
                    self.engine.at(self.engine.now + wait + 3 * chance.random(), lambda: self.stop(slot))
                    self.engine.at(self.engine.now + wait + 40, lambda: self.start(slot))
            case "lost":
                self._replace(slot, self.machines[slot].name)
            case "renamed":
                self._replace(slot, f"{self.mark}m{self.names}")
            case "state lost":
                self.stop(slot)
                machine = self.machines[slot]
                self.say(f"{machine.name}: its state directory is lost")
                self.names += 1
                machine.lose_journal(f"id{self.names:04d}")
                self.start(slot)
            case _:
                self._hang(slot, chance.uniform(5, 200))

    def _hang(self, slot: int, seconds: float) -> None:
        """Its process gets no time for a while."""
        daemon = self.daemons[slot]
        if daemon is not None:
            self.say(f"{daemon.machine.name}: hangs for {seconds:.0f} s")
            daemon.program.stir()
            self.engine.at(self.engine.now, partial(daemon.program.wake_in, seconds))

    def _replace(self, slot: int, name: str) -> None:
        """The machine is lost with its disk; the run begins anew from the newest COMMIT, on all nodes."""
        self.stop(slot)
        self.told.replaced += 1
        self.say(f"{self.machines[slot].name} is lost, {name} stands in")
        if self.machines[slot].name in self.judge.others:
            self.judge.others = frozenset({name})
        fresh = self.machines[slot] = self._machine(slot, name)
        judge = self.judge
        live = [c for c in judge.live.values() if c.key not in judge.entombed and c.key not in judge.disputed]
        best = max(live, key=lambda c: c.order, default=None)
        self.step = best.order[1] if best is not None else 0
        self.best = self.words[best.number] if best is not None else None
        if best is not None:
            tag = f"global_step{best.order[1]}"
            fresh.latest = tag
            for machine in self.machines:
                there = machine.disk.get(tag)
                if there is None or there.number != best.number:
                    at = self.engine.now
                    machine.disk[tag] = Written(
                        best.number, best.order[1], START + at, at, best.by, self.best
                    )
            for daemon in self.daemons:
                if daemon is not None:
                    daemon.program.stir()
        self.engine.at(self.engine.now + 20, lambda: self.start(slot))

    def heal(self) -> None:
        """No more faults."""
        self.say("all heals")
        self._settle()
        if self.shape.faults:
            self.network.lost = self.network.refused = self.network.twice = 0.0
            self.network.latency_seconds, self.network.jitter = 0.02, 1.0
        for slot in range(self.shape.nodes):
            self.start(slot)

    def _settle(self) -> None:
        """Who naps has asked what it would have asked by now."""
        for daemon in self.daemons:
            if daemon is not None and daemon.nap is not None:
                daemon.nap.advance(self.engine.now)

    def end(self) -> None:
        """Judge what is left."""
        self._settle()
        disks, tags = self._disks()
        self.judge.at_the_end(disks, tags, [daemon for daemon in self.daemons if daemon is not None])
        self._agree()
        told = self.told
        told.commits = sum(len(keys) for keys in self.judge.made.values())
        told.deletions = self.judge.deletions
        told.requests = sum(sum(counts.values()) for counts in self.counts.values())
        for number, at in self.committed_at.items():
            told.commit_seconds.append(at - self.sealed_at.get(number, at))
        for slot in range(self.shape.nodes):
            daemon = self.daemons[slot]
            if daemon is not None:
                daemon.program.kill()

    def _disks(self) -> tuple[list[set[int]], dict[int, str]]:
        """The saves on each disk, and the tag of each."""
        disks = [{w.number for w in m.disk.values()} for m in self.machines]
        return disks, {w.number: tag for m in self.machines for tag, w in m.disk.items()}

    def _agree(self) -> None:
        """All nodes of one configuration keep the same and would resume from the same."""
        kept: dict[tuple[str, ...], str] = {}
        resumes: dict[str | None, str] = {}
        for slot, daemon in enumerate(self.daemons):
            seen = daemon.observation if daemon is not None else None
            if daemon is None or seen is None:
                raise Broken(f"n{slot} never saw the remote again")
            live = live_commits(seen)
            resumes.setdefault(live[-1].key if live else None, daemon.machine.name)
            if slot != self.odd:
                verdicts = keep_remote(replace(daemon.view(seen), saves=(), unsealed_tags=frozenset()))
                keys = tuple(sorted(key for (_, key), verdict in verdicts.items() if verdict.keeps))
                kept.setdefault(keys, daemon.machine.name)
        if len(resumes) > 1:
            raise Broken(f"nodes would resume from {resumes}")
        if len(kept) > 1:
            raise Broken(f"nodes keep different sets: {kept}")


@contextmanager
def staged() -> Iterator[None]:
    """The real code, its files and its clock those of the fleet that runs."""

    def here() -> Daemon:
        return CURRENT[threading.current_thread().name]

    def changed(_root: int, source: str, identity: Any, name: str) -> str | None:
        found = here().machine.disk.get(source.partition("/")[0])
        if found is None:
            return f"{name} vanished"
        return None if found.number == identity.ctime_ns else f"{name} is another save's"

    def now() -> str:
        return datetime.fromtimestamp(START + here().engine.now, UTC).isoformat()

    parse = lru_cache(maxsize=200_000)(documents_of.parse)
    patches: list[Any] = [
        mock.patch.object(commit, "Transfer", InOrder),
        mock.patch.object(commit, "changed", changed),
        mock.patch.object(commit, "open_root", lambda _path: os.dup(_NOWHERE)),
        mock.patch.object(commit, "now_utc", now),
        mock.patch.object(documents, "parse", parse),
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


_NOWHERE = os.open("/", os.O_PATH)


def tell(seed: int, shape: Shape, *, is_loud: bool = False) -> Told:
    """Live one history; `broken` says what went wrong."""
    # of few nodes all manifests are read: every second history goes as if they were many
    few = 0 if seed % 2 and shape.faults else look.FEW
    with mock.patch.object(look, "FEW", few):
        return lived(Fleet(seed, shape, is_loud=is_loud))


def lived(fleet: Fleet) -> Told:
    """As `tell`, of a fleet that has not begun."""
    random.seed(fleet.told.seed)  # how long real code waits after a failure
    try:
        return fleet.run()
    except Broken as error:
        fleet.told.broken = str(error)
        for daemon in (daemon for one in fleet.fleets for daemon in one.daemons):
            if daemon is not None:
                daemon.program.abandon()
        return fleet.told
