"""A small world for the commit protocol: nodes with saves of one tag, one remote, everything that may go wrong.

What runs is shipped code (`ckptd.remote.commit`, `retire`, `observe`, `core.generation`, `core.coverage`), one
store operation a step; only the moving of bytes is short: a file is one object of a few bytes. Between any two
operations a trainer may save again, a daemon die (its last request may still arrive), a node be replaced.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

from ckptd.core import manifest as documents_of
from ckptd.core.generation import (
    Already,
    GenerationChoice,
    SeenCommit,
    SeenManifest,
    Use,
    choose_generation,
)
from ckptd.core.identity import FileIdentity, FolderIdentity
from ckptd.core.layouts import Grid, parse_shard_name
from ckptd.core.manifest import NodeManifest, RemoteIdentity, SaveWindow, Writer, folder_name, to_bytes
from ckptd.core.save import SealedFile, SealedSave
from ckptd.errors import CkptdError, RemoteError, SourceChanged, TargetExists, VerifyError
from ckptd.remote import commit, documents, observe, retire
from ckptd.remote.checksums import crc64, to_hex
from ckptd.remote.messages import Retire, ShipFile, ShipOrder
from ckptd.remote.pacing import Pacer
from ckptd.remote.reader import live_commits, manifests_of
from ckptd.remote.store import Abilities, ObjectInfo
from ckptd.remote.transfer import Carried, Control, Transfer
from tests.model.explorer import Io, Programs
from tests.stores.scene import JOB_ID, MODEL, OPTIM

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from ckptd.core.coverage import KnownManifest
    from ckptd.remote.messages import TagView

TAG = "global_step5"
APART_SECONDS = 1000
IDENTITY = RemoteIdentity(remote_id="r", job_id=JOB_ID, job="job", created="then")
Chooser = "Callable[[SealedSave, TagView], GenerationChoice]"


def content_of(number: int, path: str) -> bytes:
    """What the trainer wrote into `path` at save `number`."""
    return f"save {number} {path}".encode()


class Slot(NamedTuple):
    """A place in the training run: its ranks' shards, whichever machine stands there."""

    names: tuple[str, ...]
    """The machines that stand there one after the other."""
    paths: tuple[str, ...]


TWO_NODES = (Slot(("n0",), (OPTIM.format(d=0), MODEL)), Slot(("n1", "n1b"), (OPTIM.format(d=1),)))
TWO_REPLICAS = (
    Slot(("n0",), (OPTIM.format(d=0), MODEL)),
    Slot(("n1", "n1b"), (OPTIM.format(d=1), MODEL)),
)


class Actor(NamedTuple):
    """A slot's machine and its daemon."""

    name: int
    """Index in the slot's names."""
    saved: int
    """The save that lies on its disk; 0: none."""
    is_done: bool
    """Its save is committed as far as it knows."""
    at: int
    """Where its program stands; -1: idle."""
    crashes: int
    """How often its daemon may still die."""
    stray: tuple[Hashable, ...] | None = None
    """A request of a dead daemon that is still under way."""


IDLE = -1


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
    saves: int = 2
    crashes: tuple[int, ...] = (0, 0)
    """How often the daemon of each slot may die."""
    is_describing: bool = False
    """The remote may change between two readings of one look at it."""
    is_replaced: bool = False
    """The second slot's machine may be lost with its disk, and another stand in for it."""
    has_strays: bool = False
    is_create_only: bool = True
    most_generations: int = 3
    chooser: Callable[[SealedSave, TagView], GenerationChoice] | None = None
    retired: tuple[documents.Stem, ...] = ()
    """What every node retires as soon as something newer is committed."""
    has_reader: bool = False


@cache
def sealed(slot: Slot, number: int) -> SealedSave:
    """Save `number` as the daemon of that slot sealed it."""
    rows = []
    for path in slot.paths:
        named = parse_shard_name(path)
        assert named is not None
        data = content_of(number, path)
        rows.append(
            SealedFile(
                path=path,
                identity=FileIdentity(
                    dev=1, ino=1, size_bytes=len(data), mtime_ns=number, ctime_ns=number
                ),
                fingerprint=documents_of.sha256_of(data),
                role=named.role,
                shard=named.shard,
            )
        )
    at_ns = number * APART_SECONDS * 10**9
    return SealedSave(
        tag=TAG,
        folder=FolderIdentity(dev=1, ino=2),
        files=tuple(rows),
        grid=Grid(dp=2, mm_count=1, zero_stage=2),
        branch=1,
        step=5,
        save_seq=number,
        window=SaveWindow(first=at_ns, last=at_ns),
        writer=Writer(),
    )


@cache
def order_of(slot: Slot, name: int, number: int, generation: int) -> ShipOrder:
    """The daemon's order to ship a save as a generation."""
    save = sealed(slot, number)
    node = slot.names[name]
    folder = folder_name(TAG, generation, "zero")
    head = NodeManifest(
        job_id=JOB_ID,
        tag=TAG,
        generation=generation,
        form="zero",
        folder=folder,
        node=node,
        node_id=f"id-{node}",
        ckptd_version="0",
        config_digest="c",
        branch=save.branch,
        step=save.step,
        save_seq=save.save_seq,
        save_window=save.window,
        grid=save.grid,
        files=(),
    )
    rows = tuple(
        ShipFile(
            path=file.path,
            key=f"{folder}/{file.path}",
            source=file.path,
            identity=file.identity,
            bytes=file.identity.size_bytes,
            role=file.role,
            shard=file.shard,
            fingerprint=file.fingerprint,
        )
        for file in save.files
    )
    return ShipOrder(root="", manifest=head, files=rows)


def choose(save: SealedSave, view: TagView) -> GenerationChoice:
    """As the daemon asks `choose_generation`."""
    return choose_generation(
        save,
        JOB_ID,
        manifests=[
            SeenManifest(
                generation=m.manifest.generation,
                form=m.manifest.form,
                manifest=m.manifest,
                committed=m.committed,
            )
            for m in view.manifests
        ],
        commits=[
            SeenCommit(
                generation=c.commit.generation,
                form=c.commit.form,
                key=c.key,
                sha256=c.sha256,
                disputed=c.disputed,
            )
            for c in view.commits
        ],
        tombstones=view.retired,
        save_spread_seconds=60,
    )


class StepStore:
    """The store as a program sees it: every verb is a question to the world."""

    url = "memory:"
    lanes = 1

    def __init__(self, io: Io) -> None:
        self.io = io

    def get(self, key: str) -> bytes | None:
        found = self.io.ask("get", key)
        assert found is None or isinstance(found, bytes)
        return found

    def put(self, key: str, data: bytes) -> None:
        self.io.ask("put", key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return bool(self.io.ask("create", key, data))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self.io.ask("list", prefix)
        assert isinstance(found, tuple)
        return iter([ObjectInfo(key=key, bytes=size) for key, size in found])

    def stat(self, key: str) -> ObjectInfo | None:
        size = self.io.ask("stat", key)
        assert size is None or isinstance(size, int)
        return None if size is None else ObjectInfo(key=key, bytes=size)

    def delete(self, key: str) -> None:
        self.io.ask("delete", key)

    def discard(self, key: str, token: str = "") -> None:
        """Nothing is left half done here."""

    def free_bytes(self) -> int | None:
        return None

    def upload(self, key: str, _source: object, **_: object) -> int:
        """One step; the bytes are those that lie on the disk at that moment."""
        sent = self.io.ask("upload", key, key.rpartition("/")[2])
        if sent is None:
            raise TargetExists(f"{key} appeared")
        assert isinstance(sent, bytes)
        return crc64(sent)

    def verify(self, key: str, size_bytes: int, crc: int, _: object) -> str:
        data = self.get(key) or b""
        if (len(data), crc64(data)) != (size_bytes, crc):
            self.delete(key)
            raise VerifyError(f"{key} differs")
        return "read-back"


class LocalFile:
    """A shard on the disk of the node that the program runs on."""

    mode = 0o644
    folder_mode = 0o755
    gid = None

    def __init__(self, io: Io, file: ShipFile) -> None:
        self._io = io
        self.path = file.source
        self.size_bytes = file.bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        data = self._io.ask("read", self.path)
        assert isinstance(data, bytes)
        buffer[: len(data)] = data
        return len(data)

    def drop(self, offset: int, length: int) -> None:
        """No page cache here."""


class StepTransfer(Transfer):
    """The shipped transfer, its files one after the other and each a few bytes."""

    def run(self) -> Carried:
        for file in self._order.files:
            sent = self._ship(file)
            if sent is not None:
                self._verify(sent)
        return Carried(
            files=tuple(self._results[file.key] for file in self._order.files), bytes_sent=0, bytes_skipped=0
        )

    def _ship(self, file: ShipFile):  # type: ignore[no-untyped-def]
        store = self._store
        assert isinstance(store, StepStore)
        sent = self._settle(file, LocalFile(store.io, file), file.fingerprint)
        if changed_in(store.io, file) is not None:
            raise SourceChanged(f"{file.path} was written while it was shipped")
        return sent


def changed_in(io: Io, file: ShipFile) -> str | None:
    """As `transfer.changed`: the save that lies there is not the sealed one."""
    number = io.ask("look")
    assert file.identity is not None
    if number == 0:
        return f"{file.path} vanished"
    return None if number == file.identity.mtime_ns else f"{file.path} is another save's"


_IO: list[Io] = []
"""Of the program that runs: `commit` asks for files by descriptor, which is none here."""


@contextmanager
def stepwise(*, is_pointing: bool) -> Iterator[None]:
    """The shipped code, with files and time of this world; without `is_pointing` pointers move in one step."""

    def point(store: object) -> None:
        assert isinstance(store, StepStore)
        store.io.ask("point", "latest")

    patches = [
        mock.patch.object(commit, "Transfer", StepTransfer),
        mock.patch.object(commit, "changed", lambda _root, file: changed_in(_IO[-1], file)),
        mock.patch("ckptd.remote.transfer.changed", lambda _root, file: changed_in(_IO[-1], file)),
        mock.patch.object(commit, "_open_root", lambda _path: os.open("/", os.O_PATH)),
        mock.patch.object(commit, "_now", lambda: "2026-01-01T00:00:00+00:00"),
        mock.patch.object(documents, "parse", lru_cache(maxsize=None)(documents_of.parse)),
        mock.patch.object(observe, "parse", lru_cache(maxsize=None)(documents_of.parse)),
    ]
    if not is_pointing:
        patches += [mock.patch.object(commit, "point", point), mock.patch.object(retire, "point", point)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@dataclass
class World:
    """All states of one set of rules: what steps lead on, what must never be, what must stay reachable."""

    rules: Rules
    programs: Programs = field(init=False)
    _stores: list[dict[str, bytes]] = field(default_factory=list)
    _numbers: dict[frozenset[tuple[str, bytes]], int] = field(default_factory=dict)
    _done: dict[tuple[int, tuple[Hashable, ...]], tuple[Hashable, int]] = field(default_factory=dict)
    _moved: dict[tuple[int, int, Actor], tuple[Move, ...]] = field(default_factory=dict)
    _judged: dict[int, Judged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = Programs(self._run)

    def start(self) -> State:
        """Nobody has shipped anything; everybody holds save 1."""
        rules = self.rules
        store = self._intern({documents.IDENTITY_KEY: to_bytes(IDENTITY)})
        return State(store, tuple(Actor(0, 1, False, IDLE, crashes) for crashes in rules.crashes))

    # --- programs ---------------------------------------------------------------------------------------

    def _run(self, io: Io, key: Hashable) -> tuple[Hashable, ...]:
        """(outcome, save, generation to use)."""
        assert isinstance(key, tuple)
        what, *more = key
        _IO.append(io)
        try:
            return self._describe(io, *more) if what == "describe" else self._ship(io, *more)
        except CkptdError as error:
            return type(error).__name__, 0
        finally:
            _IO.pop()

    def _describe(self, io: Io, index: int, number: int) -> tuple[Hashable, ...]:
        """What `choose_generation` says; in one step, unless every reading of the remote is to be one."""
        if not self.rules.is_describing:
            found = io.ask("choose", TAG, index, number)
            assert isinstance(found, tuple)
            return found
        return self._chosen(StepStore(io), index, number)

    def _chosen(self, store: object, index: int, number: int) -> tuple[Hashable, ...]:
        view = observe.describe(store, TAG, IDENTITY)  # type: ignore[arg-type]
        choice = (self.rules.chooser or choose)(sealed(self.rules.slots[index], number), view)
        if isinstance(choice, Use):
            return "use", number, choice.generation
        return "already" if isinstance(choice, Already) else "retired", number

    def _ship(self, io: Io, index: int, name: int, number: int, generation: int) -> tuple[Hashable, ...]:
        abilities = Abilities(create_only=self.rules.is_create_only, checksum=None, resumable=True)
        ground = commit.Ground(store=StepStore(io), abilities=abilities, identity=IDENTITY)  # type: ignore[arg-type]
        order = order_of(self.rules.slots[index], name, number, generation)
        control = Control(
            pacer=_PACER, check=lambda: None, on_moving=lambda *_: None, on_done=lambda _: None
        )
        return commit.ship(ground, order, control).outcome, number

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
                if self._judge(then).wrong or not self._concerns_nobody(index, after):
                    moves.append((label, after, then, is_fair))
                    continue
                for more, last, end, is_more_fair in self._moves(then, index, after):
                    moves.append((f"{label}\n{more}", last, end, is_fair and is_more_fair))
            found = self._moved[store, index, actor] = tuple(moves)
        return found

    def _concerns_nobody(self, index: int, actor: Actor) -> bool:
        op = None if actor.at == IDLE else self.programs.op(actor.at)
        if op is None or op[0] in ("look", "read"):
            return op is not None
        path = str(op[1]).rpartition("/")[2]
        slots = [number for number, slot in enumerate(self.rules.slots) if path in slot.paths]
        return slots == [index] and op[0] in ("get", "stat", "upload") and actor.stray is None

    def _steps(self, store: int, index: int, actor: Actor) -> Iterator[Move]:
        names = self.rules.slots[index].names
        name = names[actor.name]
        yield from self._own_steps(store, index, actor, name)
        if actor.stray is not None:
            _, after = self._answer(store, actor.stray, actor)
            yield f"{name}: late {_words(actor.stray)}", actor._replace(stray=None), after, True
        if actor.saved < self.rules.saves:
            fresh = actor._replace(saved=actor.saved + 1, is_done=False)
            yield f"{name}: save {fresh.saved}", fresh, store, False
        if actor.crashes and actor.at != IDLE:
            yield from self._crashes(store, actor._replace(crashes=actor.crashes - 1), name)
        if self.rules.is_replaced and actor.name + 1 < len(names):
            fresh = actor._replace(name=actor.name + 1, saved=0, is_done=False, at=IDLE)
            yield f"{name}: replaced by {names[fresh.name]}", fresh, store, False

    def _own_steps(self, store: int, index: int, actor: Actor, name: str) -> Iterator[Move]:
        if actor.at == IDLE:
            if actor.saved and not actor.is_done:
                actor = actor._replace(at=self.programs.begin(("describe", index, actor.saved)))
            elif actor.is_done and actor.saved not in self._judge(store).committed:
                yield f"{name}: finds its COMMIT gone", actor._replace(is_done=False), store, True
                return
            else:
                return
        op = self.programs.op(actor.at)
        assert op is not None
        answer, then = self._answer(store, op, actor)
        after = actor._replace(at=self.programs.go_on(actor.at, answer))
        yield f"{name}: {_words(op)} → {_short(answer)}", self._settled(then, index, after), then, True

    def _crashes(self, store: int, actor: Actor, name: str) -> Iterator[Move]:
        """Before its request left, with the request under way, or when its last answer was lost."""
        dead = actor._replace(at=IDLE)
        yield f"{name}: dies", dead, store, False
        op = self.programs.op(actor.at)
        assert op is not None
        if self.rules.has_strays and actor.stray is None and op[0] in ("put", "create", "upload", "delete"):
            stray = op
            if op[0] == "upload":
                stray = ("arrive", op[1], content_of(actor.saved, str(op[2])))
            yield f"{name}: dies, {_words(op)} under way", dead._replace(stray=stray), store, False
        answer, then = self._answer(store, op, actor)
        if self.programs.op(self.programs.go_on(actor.at, answer)) is None:
            yield f"{name}: {_words(op)}, dies", dead, then, False

    def _settled(self, store: int, index: int, actor: Actor) -> Actor:
        """Go on with what nobody else can change, and with what follows from a program's end."""
        while actor.at != IDLE:
            op = self.programs.op(actor.at)
            if op is None:
                actor = self._ended(index, actor)
            elif self._is_stable(store, op):
                answer, _ = self._answer(store, op, actor)
                actor = actor._replace(at=self.programs.go_on(actor.at, answer))
            else:
                break
        return actor

    def _ended(self, index: int, actor: Actor) -> Actor:
        """Back to idle, or on from the generation that was chosen; a save since then has a row of its own."""
        outcome, number, *more = self.programs.result(actor.at)
        if outcome == "use" and number == actor.saved:
            key = ("ship", index, actor.name, number, more[0])
            return actor._replace(at=self.programs.begin(key))
        is_done = number == actor.saved and outcome in ("already", "committed", "retired")
        return actor._replace(at=IDLE, is_done=actor.is_done or is_done)

    def _is_stable(self, store: int, op: tuple[Hashable, ...]) -> bool:
        """A read whose answer nothing can change any more needs no step of its own."""
        verb, *more = op
        key = str(more[0]) if more else ""
        if key == documents.IDENTITY_KEY:
            return True
        if verb not in ("get", "list") or self.rules.retired:
            return False
        if key.startswith("_ckptd/retired/"):
            return True
        return verb == "get" and key in self._stores[store] and key.startswith(("_ckptd/nodes/", "_ckptd/commits/"))

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
            return self._chosen(_Plain(objects), *more)  # type: ignore[arg-type]
        data = more[0] if more else b""
        assert isinstance(key, str)
        assert isinstance(data, bytes)
        match verb:
            case "get":
                return objects.get(key)
            case "list":
                return tuple(sorted((k, len(v)) for k, v in objects.items() if k.startswith(key)))
            case "stat":
                return len(objects[key]) if key in objects else None
            case "put":
                objects[key] = data
            case "delete":
                objects.pop(key, None)
            case "create":
                if self.rules.is_create_only and key in objects:
                    return False
                objects[key] = data
                return True
            case "arrive":
                if key in objects:
                    return None
                objects[key] = data
                return data
            case "point":
                observe.point(_Plain(objects))  # type: ignore[arg-type]
            case _:
                raise AssertionError(op)
        return None

    # --- what is right ----------------------------------------------------------------------------------

    def wrong(self, state: State) -> str | None:
        """Why the state must not be."""
        return self._judge(state.store).wrong

    def is_good(self, state: State) -> bool:
        """The newest whole save, or a newer one, is committed; or this lies beyond the bound."""
        judged = self._judge(state.store)
        whole = 0
        for number in range(1, self.rules.saves + 1):
            held = [actor.saved == number for actor in state.actors]
            listed = [
                all((number, path) in judged.listed for path in slot.paths) for slot in self.rules.slots
            ]
            if any(held) and all(h or x for h, x in zip(held, listed, strict=True)):
                whole = number
        is_beyond = judged.generations > self.rules.most_generations
        return is_beyond or max(judged.committed, default=0) >= whole

    def _judge(self, store: int) -> Judged:
        found = self._judged.get(store)
        if found is None:
            found = self._judged[store] = judge(self._stores[store])
        return found


_PACER = Pacer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What some objects mean."""

    wrong: str | None = None
    committed: frozenset[int] = frozenset()
    """Saves with a COMMIT that counts."""
    listed: frozenset[tuple[int, str]] = frozenset()
    """(save, path) of everything that a manifest of a generation lists that is neither disputed nor retired."""
    generations: int = 0


def judge(objects: dict[str, bytes]) -> Judged:
    """Whether these objects may be, and what they hold."""
    store = _Plain(objects)
    seen = observe.observe(store, IDENTITY)  # type: ignore[arg-type]
    committed: set[int] = set()
    for view in live_commits(seen):
        try:
            files = [file for manifest in manifests_of(store, view) for file in manifest.files]  # type: ignore[arg-type]
        except CkptdError as error:
            return Judged(wrong=error.message)
        for file in files:
            data = objects.get(file.key, b"")
            if to_hex(crc64(data)) != file.checksums.crc64nvme:
                return Judged(wrong=f"{view.key}: {file.key} is not what was committed but {data!r}")
        numbers = {int(objects[file.key].split()[1]) for file in files}
        if len(numbers) != 1:
            return Judged(wrong=f"{view.key} mixes saves {numbers}")
        committed |= numbers
    wheres = documents.generations_with_manifests(store)  # type: ignore[arg-type]
    held = {where: documents.read_generation(store, where) for where in wheres}  # type: ignore[arg-type]
    retired = set(map(documents.stem_of, seen.retired))
    taken = {documents.stem_of(view.commit) for view in seen.commits} | retired
    given_up = {documents.stem_of(view.commit) for view in seen.commits if view.disputed} | retired
    for manifests in held.values():
        for known in manifests:
            for file in known.manifest.files:
                if to_hex(crc64(objects.get(file.key, b""))) != file.checksums.crc64nvme:
                    return Judged(wrong=f"{known.key}: {file.key} is not what was listed")
    return Judged(
        wrong=_sent_twice({where: known for where, known in held.items() if where not in taken}),
        committed=frozenset(committed),
        listed=frozenset(
            (known.manifest.save_seq, file.path)
            for where, manifests in held.items()
            if where not in given_up
            for known in manifests
            for file in known.manifest.files
        ),
        generations=max((where[1] for where in wheres), default=0),
    )


def _sent_twice(held: dict[documents.Stem, tuple[KnownManifest, ...]]) -> str | None:
    """A node that ships one save into two open generations, though no other save spoilt the first."""
    seen: dict[tuple[str, int], int] = {}
    for where, manifests in sorted(held.items()):
        if len({known.manifest.save_seq for known in manifests}) != 1:
            continue
        for known in manifests:
            key = known.manifest.node, known.manifest.save_seq
            if seen.setdefault(key, where[1]) != where[1]:
                return f"{key[0]} sent save {key[1]} as generation {seen[key]} and as {where[1]}"
    return None


class _Plain:
    """Objects that lie still: for the judge, and for what is done in one step."""

    url = "memory:"
    lanes = 1

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects

    def get(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def put(self, key: str, data: bytes) -> None:
        self._objects[key] = data

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(
            [ObjectInfo(key=k, bytes=len(v)) for k, v in sorted(self._objects.items()) if k.startswith(prefix)]
        )

    def free_bytes(self) -> int | None:
        return None


def _words(op: tuple[Hashable, ...]) -> str:
    return " ".join(str(part) for part in op[:2])


def _short(answer: Hashable) -> str:
    if isinstance(answer, bytes):
        return answer.decode()[:40]
    return str(len(answer)) + " found" if isinstance(answer, tuple) else str(answer)
