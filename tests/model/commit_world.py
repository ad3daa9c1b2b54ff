"""A small world for the commit protocol: nodes with saves of one tag, one remote, all that may go wrong.

Between any two operations of a node on the remote a trainer may save again, a daemon die (its last request
may still arrive), a machine be lost with its disk. All states are visited (tests/model/explorer.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptd.base.names import IDENTITY_KEY
from ckptd.core.model.generation import AlreadyCommitted, GenerationChoice, JoinGeneration
from ckptd.core.model.manifest import commit_key, sha256_of, to_bytes
from ckptd.errors import CkptdError
from ckptd.storage.remote import commit, deletion, observe
from ckptd.storage.remote.messages import DeleteCommit
from ckptd.storage.remote.observe import live_commits, manifests_of, read_remote
from ckptd.storage.remote.transfer import TransferControl
from ckptd.storage.stores.base import Abilities
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.rate_limit import RateLimiter
from tests.model import commit_code as code
from tests.model.commit_code import IDENTITY, TAG, TWO_NODES, PlainStore, Slot, StepStore, content_of
from tests.model.commit_judge import Judged, judge
from tests.model.explorer import Io, Programs

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from ckptd.core.model.save import SealedSave
    from ckptd.storage.remote.messages import TagView

IDLE = -1
MIXED, NOTHING = -1, -2
"""What a restore may give back instead of a save."""
_CONTROL = TransferControl(
    pacer=RateLimiter(), check=lambda: None, on_moving=lambda *_: None, on_done=lambda _: None
)
_LATE = ("put", "create", "upload")
"""Requests that may be under way when a daemon dies. Not `delete`: no order of operations survives that."""


class Actor(NamedTuple):
    """A slot's machine and its daemon."""

    name: int
    """Index in the slot's names."""
    saved: int
    """The save that lies on its disk, 0: none; of `delete_commit`: the generation that is to go."""
    is_done: bool
    """Its save is committed, as far as it knows; its task is fulfilled."""
    at: int
    """Where its program stands; -1: idle."""
    crashes: int
    """How often its daemon may still die."""
    stray: tuple[Hashable, ...] | None = None
    """A request of a dead daemon that is still under way."""


class State(NamedTuple):
    """Of the whole world; `store` is the number of what lies in the remote."""

    store: int
    actors: tuple[Actor, ...]


Step = tuple[str, State, bool]
"""What happens, what is then, and whether it happens by itself (fairness)."""
Move = tuple[str, Actor, int, bool]
"""The same of one slot: what happens, the slot and the store after it."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What may happen in this world."""

    slots: tuple[Slot, ...] = TWO_NODES
    before: tuple[int, ...] = ()
    """Saves that all nodes uploaded, one after the other, before the story begins."""
    listed: tuple[int, ...] = ()
    """Slots that have uploaded the save at hand."""
    asleep: tuple[int, ...] = ()
    """Slots whose daemon does not run."""
    saves: int = 2
    """The last save that trainers make."""
    crashes: tuple[int, ...] = (0, 0)
    """How often the daemon of each slot may die."""
    has_strays: bool = False
    """The last request of a daemon that died may arrive whenever it likes."""
    is_replaced: bool = False
    """The second slot's machine may be lost with its disk, and another stand in for it."""
    is_create_only: bool = True
    is_describing: bool = False
    """The remote may change between two readings of one look at it."""
    most_generations: int = 2
    """Worlds with more are not looked into."""
    chooser: Callable[[SealedSave, TagView], GenerationChoice] = code.choose


@dataclass
class World:
    """All states of one set of rules: what steps lead on, what must never be, what must stay reachable."""

    rules: Rules
    programs: Programs = field(init=False)
    _retired_sha256: str = ""
    _stores: list[dict[str, bytes]] = field(default_factory=list)
    _numbers: dict[frozenset[tuple[str, bytes]], int] = field(default_factory=dict)
    _done: dict[tuple[int, tuple[Hashable, ...]], tuple[Hashable, int]] = field(default_factory=dict)
    _moved: dict[tuple[int, int, Actor], tuple[Move, ...]] = field(default_factory=dict)
    _judged: dict[int, Judged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = Programs(self._run)
        self._is_deleting = any(slot.task == "delete" for slot in self.rules.slots)

    def start(self) -> State:
        """Everybody holds the save after those before; the first generation is the one to be deleted."""
        rules, store = self.rules, self._intern({IDENTITY_KEY: to_bytes(IDENTITY)})
        now = len(rules.before) + 1
        uploaded = [(number, index) for number in rules.before for index in range(len(rules.slots))]
        for number, index in [*uploaded, *((now, index) for index in rules.listed)]:
            if rules.slots[index].task == "upload":
                store = self._alone(store, index, Actor(0, number, False, IDLE, 0))
        if self._is_deleting:
            self._retired_sha256 = sha256_of(self._stores[store][commit_key(TAG, 1, "zero")])
        saved = {"upload": now, "delete": 1, "read": 0}
        actors = [
            Actor(0, saved[slot.task], False, IDLE, crashes)
            for slot, crashes in zip(rules.slots, rules.crashes, strict=True)
        ]
        return State(store, tuple(actors))

    def _alone(self, store: int, index: int, actor: Actor) -> int:
        """One attempt with nobody about; the store after it."""
        while True:
            _, actor, store, _ = next(self._own_steps(store, index, actor, ""))
            if actor.at == IDLE:
                return store

    # --- programs ---------------------------------------------------------------------------------------

    def _run(self, io: Io, key: Hashable) -> tuple[Hashable, ...]:
        """(outcome, save, generation to use)."""
        assert isinstance(key, tuple)
        what, *more = key
        with code.asking(io):
            try:
                return getattr(self, f"_{what}")(io, *more)  # type: ignore[no-any-return]
            except CkptdError as error:
                return type(error).__name__, 0

    def _describe(self, io: Io, index: int, number: int) -> tuple[Hashable, ...]:
        """What `choose_generation` says; in one step, unless every reading of the remote is to be one."""
        if self.rules.is_describing:
            return self._chosen(StepStore(io), index, number)
        found = io.ask("choose", TAG, index, number)
        assert isinstance(found, tuple)
        return found

    def _chosen(self, store: StepStore | PlainStore, index: int, number: int) -> tuple[Hashable, ...]:
        node = self.rules.slots[index].names[0]
        view = observe.describe(store, TAG, IDENTITY, node=node)  # type: ignore[arg-type]
        choice = self.rules.chooser(code.sealed(self.rules.slots[index], number), view)
        if isinstance(choice, JoinGeneration):
            return "use", number, choice.generation
        return "already" if isinstance(choice, AlreadyCommitted) else "retired", number

    def _upload(self, io: Io, index: int, name: int, number: int, generation: int) -> tuple[Hashable, ...]:
        order = code.order_of(self.rules.slots[index], name, number, generation)
        return commit.upload_form(self._ground(io), order, _CONTROL, code.on_this_disk).outcome, number

    def _delete(self, io: Io, generation: int) -> tuple[Hashable, ...]:
        order = DeleteCommit(
            tag=TAG, generation=generation, form="zero", reason="", commit_sha256=self._retired_sha256
        )
        deletion.delete_commit(self._ground(io), order, lambda: None)
        return "retired", generation

    def _read(self, io: Io) -> tuple[Hashable, ...]:
        """As a restore: the newest COMMIT whose every byte is right, else the one before; what went meanwhile
        is looked for again."""
        store = StepStore(io)
        found = live_commits(read_remote(store))  # type: ignore[arg-type]
        for view in reversed(found):
            try:
                files = [f for manifest in manifests_of(store, view) for f in manifest.files]  # type: ignore[arg-type]
            except CkptdError:
                continue
            data = [store.get(file.key) or b"" for file in files]
            if all(to_hex(crc64(d)) == f.checksums.crc64nvme for d, f in zip(data, files, strict=True)):
                numbers = {int(d.split()[1]) for d in data}
                return "restored", min(numbers) if len(numbers) == 1 else MIXED
        return ("gone", 0) if found else ("restored", NOTHING)

    def _ground(self, io: Io) -> observe.AttachedRemote:
        abilities = Abilities(create_only=self.rules.is_create_only, checksum=None, resumable=True)
        return observe.AttachedRemote(store=StepStore(io), abilities=abilities, identity=IDENTITY)  # type: ignore[arg-type]

    def _next(self, index: int, actor: Actor) -> tuple[Hashable, ...] | None:
        """What an idle slot begins."""
        task = self.rules.slots[index].task
        if actor.is_done or (task == "upload" and actor.saved == 0):
            return None
        return {
            "upload": ("describe", index, actor.saved),
            "delete": ("delete", actor.saved),
            "read": ("read",),
        }[task]

    # --- steps ------------------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[Step]:
        """Every step that the world may take."""
        if self._judge(state.store).generations > self.rules.most_generations:
            return
        for index, actor in enumerate(state.actors):
            for label, after, store, is_fair in self._moves(state.store, index, actor):
                actors = (*state.actors[:index], after, *state.actors[index + 1 :])
                yield label, State(store, actors), is_fair

    def _moves(self, store: int, index: int, actor: Actor) -> tuple[Move, ...]:
        """What can happen to one slot, up to where it meets the others again.

        Operations that concern nobody else follow each other in one go, with all that can befall their own
        node between them: the others may as well wait (partial order reduction).
        """
        found = self._moved.get((store, index, actor))
        if found is None:
            moves: list[Move] = []
            for label, after, then, is_fair in self._steps(store, index, actor):
                if self._judge(then).wrong or not self._concerns_nobody(then, index, after):
                    moves.append((label, after, then, is_fair))
                    continue
                for more, last, end, is_more_fair in self._moves(then, index, after):
                    moves.append((f"{label}\n{more}", last, end, is_fair and is_more_fair))
            found = self._moved[store, index, actor] = tuple(moves)
        return found

    def _concerns_nobody(self, store: int, index: int, actor: Actor) -> bool:
        op = None if actor.at == IDLE else self.programs.op(actor.at)
        if op is None or op[0] in ("look", "read"):
            return op is not None
        folder, _, path = str(op[1]).rpartition("/")
        slots = [number for number, slot in enumerate(self.rules.slots) if path in slot.paths]
        is_own = slots == [index] and not (self._is_deleting and folder == TAG)
        is_seen = op[0] == "upload" and op[1] in self._judge(store).keys
        return is_own and not is_seen and op[0] in ("get", "stat", "upload") and actor.stray is None

    def _steps(self, store: int, index: int, actor: Actor) -> Iterator[Move]:
        slot = self.rules.slots[index]
        name = slot.names[actor.name]
        yield from self._own_steps(store, index, actor, name)
        if actor.stray is not None:
            _, after = self._answer(store, actor.stray, actor)
            yield f"{name}: late {_words(actor.stray)}", actor._replace(stray=None), after, True
        if slot.task == "upload" and actor.saved < self.rules.saves:
            fresh = actor._replace(saved=max(actor.saved + 1, len(self.rules.before) + 1), is_done=False)
            yield f"{name}: save {fresh.saved}", fresh, store, False
        if actor.crashes and actor.at != IDLE:
            yield from self._crashes(store, actor._replace(crashes=actor.crashes - 1), name)
        if self.rules.is_replaced and actor.name + 1 < len(slot.names):
            fresh = actor._replace(name=actor.name + 1, saved=0, is_done=False, at=IDLE)
            yield f"{name}: replaced by {slot.names[fresh.name]}", fresh, store, False

    def _own_steps(self, store: int, index: int, actor: Actor, name: str) -> Iterator[Move]:
        if actor.at == IDLE:
            if index in self.rules.asleep and name:
                return
            key = self._next(index, actor)
            if key is not None:
                actor = actor._replace(at=self.programs.begin(key))
            elif self._has_lost(store, index, actor):
                yield f"{name}: finds its COMMIT gone", actor._replace(is_done=False), store, True
                return
            else:
                return
        op = self.programs.op(actor.at)
        assert op is not None
        answer, then = self._answer(store, op, actor)
        after, then = self._settled(then, index, actor._replace(at=self.programs.go_on(actor.at, answer)))
        yield f"{name}: {_words(op)} → {_short(answer)}", after, then, True

    def _has_lost(self, store: int, index: int, actor: Actor) -> bool:
        is_shipping = self.rules.slots[index].task == "upload"
        return is_shipping and actor.is_done and actor.saved not in self._judge(store).committed

    def _crashes(self, store: int, actor: Actor, name: str) -> Iterator[Move]:
        """Before its request left, with the request under way, or when its last answer was lost."""
        dead = actor._replace(at=IDLE)
        yield f"{name}: dies", dead, store, False
        op = self.programs.op(actor.at)
        assert op is not None
        if self.rules.has_strays and actor.stray is None and op[0] in _LATE:
            stray = op
            if op[0] == "upload":
                stray = ("arrive", op[1], content_of(actor.saved, str(op[2])))
            yield f"{name}: dies, {_words(op)} under way", dead._replace(stray=stray), store, False
        answer, then = self._answer(store, op, actor)
        if self.programs.op(self.programs.go_on(actor.at, answer)) is None:
            yield f"{name}: {_words(op)}, dies", dead, then, False

    def _settled(self, store: int, index: int, actor: Actor) -> tuple[Actor, int]:
        """Go on with what nobody else can change, and with what follows from a program's end."""
        while actor.at != IDLE:
            op = self.programs.op(actor.at)
            if op is None:
                actor = self._ended(index, actor)
            elif self._is_stable(store, op):
                answer, store = self._answer(store, op, actor)
                actor = actor._replace(at=self.programs.go_on(actor.at, answer))
            else:
                break
        return actor, store

    def _ended(self, index: int, actor: Actor) -> Actor:
        """Back to idle, or on with the generation that was chosen; a save since then has a row of its own."""
        outcome, number, *more = self.programs.result(actor.at)
        assert isinstance(number, int)
        if outcome == "use" and number == actor.saved:
            key = ("upload", index, actor.name, number, more[0])
            return actor._replace(at=self.programs.begin(key))
        if outcome == "restored":
            return actor._replace(at=IDLE, is_done=True, saved=number)
        is_done = number == actor.saved and outcome in ("already", "committed", "retired")
        return actor._replace(at=IDLE, is_done=actor.is_done or is_done)

    def _is_stable(self, store: int, op: tuple[Hashable, ...]) -> bool:
        """A read whose answer nothing can change any more needs no step of its own."""
        verb, key = op[0], str(op[1]) if len(op) > 1 else ""
        if verb not in ("get", "list") or key == IDENTITY_KEY:
            return verb == "get"
        if self._is_deleting:
            return False
        if key.startswith("_ckptd/retired/"):
            return True
        is_document = key.startswith(("_ckptd/nodes/", "_ckptd/commits/"))
        return verb == "get" and is_document and key in self._stores[store]

    # --- the remote and the disks -----------------------------------------------------------------------

    def _intern(self, objects: dict[str, bytes]) -> int:
        key = frozenset(objects.items())
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._stores)
            self._stores.append(objects)
        return found

    def _answer(self, store: int, op: tuple[Hashable, ...], actor: Actor) -> tuple[Hashable, int]:
        verb = op[0]
        if verb == "look":
            return actor.saved, store
        if verb == "read":
            return content_of(actor.saved, str(op[1])), store
        if verb == "upload":
            op = ("arrive", op[1], content_of(actor.saved, str(op[2])))
        found = self._done.get((store, op))
        if found is None:
            objects = dict(self._stores[store])
            answer = self._do(objects, op)
            after = store if objects == self._stores[store] else self._intern(objects)
            found = self._done[store, op] = (answer, after)
        return found

    def _do(self, objects: dict[str, bytes], op: tuple[Hashable, ...]) -> Hashable:
        verb, key, *more = op
        if verb == "choose":
            return self._chosen(PlainStore(objects), *more)  # type: ignore[arg-type]
        if verb == "point":
            return observe.point(PlainStore(objects))  # type: ignore[arg-type, func-returns-value]
        assert isinstance(key, str)
        answer: Hashable = code.perform(
            objects, str(verb), key, *more, is_create_only=self.rules.is_create_only
        )
        return answer

    # --- what is right ----------------------------------------------------------------------------------

    def wrong(self, state: State) -> str | None:
        """Why the state must not be."""
        for slot, actor in zip(self.rules.slots, state.actors, strict=True):
            if slot.task == "read" and actor.saved == MIXED:
                return "a restore gave back two saves"
            if slot.task == "read" and actor.saved == NOTHING:
                return "a restore found nothing"
        return self._judge(state.store).wrong

    def is_good(self, state: State) -> bool:
        """The newest whole save, or a newer one, is committed and what was to go is gone; or it is beyond."""
        judged, pairs = self._judge(state.store), list(zip(self.rules.slots, state.actors, strict=True))
        if judged.generations > self.rules.most_generations:
            return True
        whole = 0
        for number in range(1, self.rules.saves + 1):
            held = [(actor.saved == number, slot.paths) for slot, actor in pairs if slot.task == "upload"]
            shares = [is_held or all((number, p) in judged.listed for p in paths) for is_held, paths in held]
            if any(is_held for is_held, _ in held) and all(shares):
                whole = number
        gone = all(actor.saved not in judged.kept for slot, actor in pairs if slot.task == "delete")
        return gone and max(judged.committed, default=0) >= whole

    def _judge(self, store: int) -> Judged:
        found = self._judged.get(store)
        if found is None:
            found = self._judged[store] = judge(self._stores[store])
        return found


def _words(op: tuple[Hashable, ...]) -> str:
    return " ".join(str(part) for part in op[:2])


def _short(answer: Hashable) -> str:
    if isinstance(answer, bytes):
        return answer.decode()[:40]
    return f"{len(answer)} found" if isinstance(answer, tuple) else str(answer)
