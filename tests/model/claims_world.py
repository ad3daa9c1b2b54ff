"""A small world of places that claim a run in one remote: all interleavings of their requests (adr/0185).

The real `claim_run` runs over a store that answers one request a step. Between any two of them another
place asks, a daemon dies or is not heard of for long, and comes back.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from ckptd.core.model.heartbeat import HEARTBEATS, Heartbeat, heartbeat_key
from ckptd.core.model.manifest import to_bytes
from ckptd.core.model.runs import RUNS, Claim, Row
from ckptd.core.policy.leases import number_of, numbered
from ckptd.storage.remote import runs
from ckptd.storage.stores.base import ObjectInfo
from tests.model.explorer import Io, Programs
from tests.stores.offers import OffersNothing

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

JOB_ID = "j"
NOW_SECONDS = 10_000.0
SILENT_SECONDS = 1_000.0
"""Since when nobody heard of a place that counts as dead."""
IDLE = -1
GRID = (2, 1, 3)
MOST_ROWS = 5
"""Nobody claims anything beyond."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One place, and what its directory tells of its run."""

    name: str
    run_id: str
    is_new: bool = True
    shards: tuple[tuple[int, int], ...] | None = None
    """None: it saves whole checkpoints."""
    knows: int | None = None
    """It was resumed after that row."""
    crashes: int = 0
    silences: int = 0
    """How often it may fall silent, dead or not."""


class Place(NamedTuple):
    """A place as it is now."""

    at: int
    """Where its claim stands; -1: it makes none."""
    run_id: str
    accepted: int
    """The number of the row under which it may write; 0: none."""
    beat: str | None
    """The run that its heartbeat tells; None: there is none."""
    is_heard: bool
    """Its heartbeat is not old."""
    crashes: int
    silences: int
    quiet: frozenset[int] = frozenset()
    """Places that were silent at some time since its claim began."""


class State(NamedTuple):
    """Of the whole world."""

    rows: tuple[tuple[int, str], ...]
    """(place, run) of each row, by number."""
    places: tuple[Place, ...]
    wrong: str | None = None


class AskingStore(OffersNothing):
    """The verbs that a claim uses, each one request."""

    url = "memory:"

    def __init__(self, io: Io) -> None:
        self._io = io

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        listed = self._io.ask("list", prefix)
        assert isinstance(listed, tuple)
        return iter([ObjectInfo(key=key, bytes=1, mtime_ns=mtime_ns) for key, mtime_ns in listed])

    def get(self, key: str) -> bytes | None:
        found = self._io.ask("get", key)
        assert found is None or isinstance(found, bytes)
        return found

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return bool(self._io.ask("create", key, Row.model_validate_json(data).run_id))


class World:
    """Places, and all that may happen next."""

    def __init__(
        self, specs: tuple[Spec, ...], rows: tuple[tuple[int, str], ...] = (), *, is_beating: bool = True
    ) -> None:
        """`rows`: what is there before; `is_beating` False: a claim says nothing before its row."""
        self.specs = specs
        self._is_beating = is_beating
        self._rows = rows
        self.programs = Programs(self._claim)

    def start(self) -> State:
        """All daemons have said that they live, and of which run their directories are."""
        owners = dict(self._rows)
        places = tuple(
            Place(
                IDLE,
                owners.get(index, spec.run_id),
                len(self._rows) if self._rows and self._rows[-1][0] == index else 0,
                owners.get(index, spec.run_id),
                True,
                spec.crashes,
                spec.silences,
            )
            for index, spec in enumerate(self.specs)
        )
        return State(self._rows, places)

    # --- the real code ------------------------------------------------------------------------------

    def _claim(self, io: Io, key: Hashable) -> tuple[Hashable, ...]:
        assert isinstance(key, tuple)
        index, run_id, accepted = key
        claim = self._claim_of(index, run_id, accepted)
        seen = runs.claim_run(
            AskingStore(io),  # type: ignore[arg-type]
            claim,
            JOB_ID,
            lambda found: self._beat(io, found),
        )
        return seen.run_id, seen.number, len(seen.others)

    def _beat(self, io: Io, run_id: str) -> None:
        if self._is_beating:
            io.ask("beat", run_id)

    def _claim_of(self, index: int, run_id: str, accepted: int) -> Claim:
        spec = self.specs[index]
        return Claim(
            node=spec.name,
            node_id=f"id-{spec.name}",
            host=f"host-{spec.name}",
            save_dir=f"/{spec.name}",
            run_id=run_id,
            is_new=spec.is_new and run_id == spec.run_id and not accepted,
            was_resumed=spec.knows is not None,
            knows=spec.knows or 0,
            accepted=accepted,
            is_whole=spec.shards is None,
            shards=spec.shards or (),
            grid=None if spec.shards is None else GRID,
        )

    # --- what happens ----------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[str, State, bool]]:
        """One request, or one mishap."""
        for index, (spec, place) in enumerate(zip(self.specs, state.places, strict=True)):
            if place.at == IDLE:
                is_due = place.accepted < len(state.rows) or place.accepted == 0
                if is_due and len(state.rows) < MOST_ROWS:
                    quiet = frozenset(i for i, other in enumerate(state.places) if not other.is_heard)
                    at = self.programs.begin((index, place.run_id, place.accepted))
                    yield self._with(state, index, f"{spec.name} claims", at=at, quiet=quiet)
            else:
                yield self._asked(state, index)
            if place.crashes and place.at != IDLE:
                # what it has written stays as it is
                crashes = place.crashes - 1
                yield self._with(state, index, f"{spec.name} dies", at=IDLE, crashes=crashes)
            if place.is_heard and place.silences:
                yield self._silent(state, index)
            if not place.is_heard and place.beat is not None:
                # who claims tells the run of its claim; a daemon that starts, that of its directory
                beat = place.beat if place.at != IDLE else place.run_id
                yield self._with(state, index, f"{spec.name} beats again", is_heard=True, beat=beat)

    def _with(self, state: State, index: int, label: str, **changed: Any) -> tuple[str, State, bool]:
        place = state.places[index]._replace(**changed)
        places = (*state.places[:index], place, *state.places[index + 1 :])
        return label, state._replace(places=places), True

    def _silent(self, state: State, index: int) -> tuple[str, State, bool]:
        place = state.places[index]
        places = [other._replace(quiet=other.quiet | {index}) if other.at != IDLE else other
                  for other in state.places]  # fmt: skip
        places[index] = places[index]._replace(is_heard=False, silences=place.silences - 1)
        return f"{self.specs[index].name} is silent", state._replace(places=tuple(places)), True

    def _asked(self, state: State, index: int) -> tuple[str, State, bool]:
        """The next request of a claim is answered."""
        spec, place = self.specs[index], state.places[index]
        op = self.programs.op(place.at)
        assert op is not None
        label = f"{spec.name} {' '.join(map(str, op))}"
        answer: Hashable = None
        match op:
            case "list", str(prefix):
                answer = self._listed(state, prefix)
            case "get", str(key):
                answer = self._read(state, key)
            case "beat", str(run_id):
                state = self._with(state, index, "", beat=run_id, is_heard=True)[1]
            case "create", str(key), str(run_id):
                is_next = number_of(RUNS, key) == len(state.rows) + 1
                answer = is_next
                if is_next:
                    state = self._appended(state, index, run_id)
        at = self.programs.go_on(place.at, answer)
        changed: dict[str, Any] = {"at": at}
        if self.programs.op(at) is None:
            found, number, others = self.programs.result(at)
            changed = {"at": IDLE, "quiet": frozenset()}
            if others == 0:
                changed |= {"run_id": found, "accepted": number}
        return self._with(state, index, label, **changed)

    def _listed(self, state: State, prefix: str) -> Hashable:
        if prefix == RUNS:
            return tuple((numbered(RUNS, number), 1) for number in range(1, len(state.rows) + 1))
        if prefix != HEARTBEATS:
            return ()
        return tuple(
            (heartbeat_key(spec.name), int((NOW_SECONDS - SILENT_SECONDS * (not place.is_heard)) * 1e9))
            for spec, place in zip(self.specs, state.places, strict=True)
            if place.beat is not None
        )

    def _read(self, state: State, key: str) -> bytes | None:
        if key.startswith(RUNS):
            number = number_of(RUNS, key)
            index, run_id = state.rows[number - 1]
            claim = self._claim_of(index, run_id, 0)
            row = runs.row_of(claim, JOB_ID, run_id, number)
            return to_bytes(row.model_copy(update={"created_at": "2026-01-01T00:00:00+00:00"}))
        for spec, place in zip(self.specs, state.places, strict=True):
            if key == heartbeat_key(spec.name):
                return to_bytes(self._heartbeat(spec, place))
        return None

    def _heartbeat(self, spec: Spec, place: Place) -> Heartbeat:
        return Heartbeat(
            job_id=JOB_ID,
            job="job",
            node=spec.name,
            node_id=f"id-{spec.name}",
            config_digest="c",
            ckptd_version="0",
            as_of="2026-01-01T00:00:00+00:00",
            state="ok",
            shards=spec.shards,
            run_id=place.beat,
            host=f"host-{spec.name}",
            save_dir=f"/{spec.name}",
        )

    # --- what must not be ------------------------------------------------------------------------------

    def _appended(self, state: State, index: int, run_id: str) -> State:
        """A row more: over a place that lived all the while only where it was told to, or is a part."""
        wrong, spec = state.wrong, self.specs[index]
        if state.rows and state.rows[-1][0] != index:
            owner = state.rows[-1][0]
            held = state.places[owner]
            lived = owner not in state.places[index].quiet and (held.at != IDLE or held.accepted)
            if lived and spec.knows != len(state.rows):
                wrong = f"{spec.name} appended a row while {self.specs[owner].name} lived"
        return state._replace(rows=(*state.rows, (index, run_id)), wrong=wrong)

    def wrong(self, state: State) -> str | None:
        """Why a state must not be."""
        if state.wrong is not None:
            return state.wrong
        may = [
            index
            for index, place in enumerate(state.places)
            if state.rows and place.accepted == len(state.rows) and place.is_heard
        ]
        for index in may:
            run_id = state.rows[-1][1]
            if state.places[index].run_id != run_id:
                return f"{self.specs[index].name} writes as another run than {run_id}, which the row names"
            for other in may:
                if other != index and not self._are_parts(index, other):
                    return f"{self.specs[index].name} and {self.specs[other].name} both write there"
        return None

    def is_good(self, state: State) -> bool:
        """Somebody may write there."""
        return any(place.accepted == len(state.rows) > 0 for place in state.places)

    def _are_parts(self, index: int, other: int) -> bool:
        mine, theirs = self.specs[index].shards, self.specs[other].shards
        return mine is not None and theirs is not None and set(mine).isdisjoint(theirs)


@contextmanager
def stepwise() -> Iterator[None]:
    """The store's present is known without a request."""
    with mock.patch.object(runs, "server_time_seconds", lambda _store: NOW_SECONDS):
        yield
