"""What must never be in a fleet's remote and on its disks, judged at each change by reading JSON.

The judge knows which save wrote each line, when each COMMIT came and went, and the policy of the job.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fleet.node import Daemon, Job, Row
    from tests.fleet.remote import Remote

PERMIT_SECONDS = 60.0
BEST_SECONDS = 600.0
"""What has been the best for so long every node has heard of."""
LET_GO_SECONDS = 300.0
"""A removal that began so long before a history's end is over, and every node has heard of it."""
_COMMIT = re.compile(r"_ckptd/commits/(.+)~g(\d+)~zero\.json$")


class Broken(AssertionError):
    """A promise was broken; the message says which."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A COMMIT as the judge read it."""

    key: str
    number: int
    """The save that it holds."""
    order: tuple[int, int, int]
    objects: frozenset[str]
    folder: str
    by: str
    """Whose model states they are."""


@dataclass
class Judge:
    """Hears every change of the remote and every prune."""

    remote: Remote
    job: Job
    run_id: str | None = None
    """The run whose documents it judges; None: there is one."""
    beside: Judge | None = None
    """Of another run in that remote."""
    others: frozenset[str] = frozenset()
    """Nodes that were configured otherwise: they may delete nothing."""
    live: dict[str, Committed] = field(default_factory=dict)
    entombed: set[str] = field(default_factory=set)
    risen: set[str] = field(default_factory=set)
    """COMMITs that a late request created again under their tombstone: they count no more, and must go."""
    made: dict[int, list[str]] = field(default_factory=dict)
    """Save → keys of all COMMITs that it ever had and nobody disputed."""
    disputed: dict[str, float] = field(default_factory=dict)
    """And when."""
    let_go: dict[str, tuple[Committed, float]] = field(default_factory=dict)
    """COMMITs that went under a tombstone, and when that was made."""
    clock: Callable[[], float] = lambda: 0.0
    words: dict[int, str | None] = field(default_factory=dict)
    """Save → the tag that the trainer called the best when it was made."""
    came: dict[str, float] = field(default_factory=dict)
    """When each COMMIT came."""
    best_seconds: float = BEST_SECONDS
    _said: list[tuple[float, str | None]] = field(default_factory=list)
    """What the newest COMMIT called the best, and since when: each change."""
    now: Daemon | None = None
    deletions: int = 0

    def on_change(self, verb: str, key: str, before: bytes | None, after: bytes | None) -> None:
        """After each change of the remote.

        Raises:
            Broken: it must not be.
        """
        found = _COMMIT.match(key)
        if self._is_anothers(key, before, after):
            return
        if found is not None:
            self._commit(key, before, after)
        elif key.startswith("_ckptd/retired/") and after is not None:
            self._entomb(key, json.loads(after))
        elif key.startswith("_ckptd/disputes/") and after is not None:
            self._dispute(json.loads(after))
        elif key == "latest":
            self._latest(after)
        elif not key.startswith("_ckptd/") and after is None:
            self.deletions += 1
            holder = next((c.key for c in self.live.values() if key in c.objects), None)
            if holder is not None and holder not in self.entombed:
                raise Broken(f"{key} was removed, which {holder} lists")
        if key.startswith(("_ckptd/commits/", "_ckptd/retired/", "_ckptd/disputes/")):
            self.hear()

    def _is_anothers(self, key: str, before: bytes | None, after: bytes | None) -> bool:
        """A COMMIT, tombstone or dispute of another run: its own judge hears of it."""
        data = after if after is not None else before
        if self.run_id is None or data is None:
            return False
        if key.startswith("_ckptd/disputes/"):
            return all(not _names(k, json.loads(data)) for k in self.live)
        is_document = key.startswith(("_ckptd/commits/", "_ckptd/retired/"))
        return is_document and json.loads(data)["run_id"] != self.run_id

    def _commit(self, key: str, before: bytes | None, after: bytes | None) -> None:
        if after is None:
            self.deletions += 1
            if key not in self.entombed:
                raise Broken(f"{key} was removed without a tombstone")
            self.live.pop(key, None)
            self.risen.discard(key)
            return
        if before is not None:
            raise Broken(f"{key} was replaced")
        if key in self.entombed and self.remote.is_late:
            self.risen.add(key)
            return
        commit = self._read(key, json.loads(after))
        self.live[key] = commit
        self.came[key] = self.clock()
        keys = self.made.setdefault(commit.number, [])
        keys.append(key)
        counted = [k for k in keys if k not in self.disputed]
        if len(counted) > 1:
            raise Broken(f"save {commit.number} has several COMMITs: {', '.join(counted)}")

    def _read(self, key: str, document: dict[str, Any]) -> Committed:
        objects: dict[str, str] = {}
        for ref in document["manifests"]:
            data = self.remote.get(ref["key"])
            if data is None:
                raise Broken(f"{key} rests on {ref['key']}, which is not there")
            objects |= {file["key"]: file["path"] for file in json.loads(data)["files"]}
        numbers: set[int] = set()
        by = ""
        for name in objects:
            data = self.remote.get(name)
            if data is None:
                raise Broken(f"{key} lists {name}, which is not there")
            numbers.add(int(data.split()[1]))
            by = data.decode().partition(" of ")[2] or by
        if len(numbers) != 1:
            raise Broken(f"{key} mixes saves {sorted(numbers)}")
        named = (re.search(r"pp_rank_(\d+)_mp_rank_(\d+)_optim", path) for path in objects.values())
        held = {(int(m[1]), int(m[2])) for m in named if m is not None}
        wanted = {(d, stage) for d in range(self.job.grid.dp) for stage in range(self.job.stages)}
        if held != wanted:
            raise Broken(f"{key} holds ranks {sorted(held)} of {len(wanted)}")
        order = document["branch"], document["step"], document["save_seq"]
        return Committed(key, numbers.pop(), order, frozenset(objects), document["folder"], by)

    def _entomb(self, key: str, document: dict[str, Any]) -> None:
        name = key.replace("/retired/", "/commits/")
        commit = self.live.get(name)
        if commit is None:
            raise Broken(f"{key}: there is no such COMMIT")
        counted = [c for c in self.live.values() if c.key not in self.entombed and c.key not in self.disputed]
        limit = self.job.remote_limit
        newer = [c for c in counted if c.order > commit.order]
        if name not in self.disputed and (limit is None or len(newer) < limit):
            raise Broken(f"{name} is let go, though the policy keeps it: {document['reason']}")
        if name not in self.disputed and document["tag"] == self.best():
            raise Broken(f"{name} is let go, and is the best")
        self.entombed.add(name)
        self.let_go[name] = (commit, self.clock())

    def best(self) -> str | None:
        """What the trainer called the best in whatever was the newest COMMIT, for a while now."""
        begin = self.clock() - self.best_seconds
        old = [c for c in self._counted() if self.came[c.key] <= begin]
        # an older save that is committed late, and a newer soon after, leave a node with what it just read
        ends = [at for at, _ in self._said[1:]] + [self.clock()]
        lately = {word for (_, word), end in zip(self._said, ends, strict=True) if end > begin}
        words = lately | {self._word(old)}
        return words.pop() if len(words) == 1 else None

    def hear(self) -> None:
        """After COMMITs came or went."""
        word = self._word(self._counted())
        if not self._said or self._said[-1][1] != word:
            self._said.append((self.clock(), word))

    def _counted(self) -> list[Committed]:
        gone = self.entombed | self.disputed.keys()
        return [c for c in self.live.values() if c.key not in gone]

    def _word(self, commits: list[Committed]) -> str | None:
        named = [c for c in commits if self.words[c.number] is not None]
        return self.words[max(named, key=lambda c: c.order).number] if named else None

    def _dispute(self, document: dict[str, Any]) -> None:
        key = next((k for k in self.live if _names(k, document)), None)
        if key is not None:
            self.disputed.setdefault(key, self.clock())

    def _latest(self, after: bytes | None) -> None:
        folder = None if after is None else after.decode()
        # one that comes late is another's word until the next that points: ckptd decides by COMMITs (P6)
        if folder is None or self.remote.is_late:
            return
        beside = self.beside.live.values() if self.beside is not None else ()
        if all(c.folder != folder for c in (*self.live.values(), *beside)):
            raise Broken(f"latest names {folder}, which is not committed")

    def on_prune(self, daemon: Daemon, row: Row) -> None:
        """Before a node lets a checkpoint of its disk go."""
        self.deletions += 1
        machine, number, name = daemon.machine, row.written.number, daemon.machine.name
        if name in self.others:
            raise Broken(f"{name} is configured otherwise and lets {row.save.tag} go")
        if under_way := machine.in_flight(self.clock()):
            raise Broken(f"{name} lets save {number} go while {', '.join(under_way)} is saved")
        if row.save.tag == self.best():
            raise Broken(f"{name} lets save {number} ({row.save.tag}) go, which is the best")
        live = [c for c in self.live.values() if c.key not in self.disputed]
        # what was confirmed a moment ago another node may let go meanwhile, as both policies have it
        lately = [c for c, at in self.let_go.values() if self.clock() - at <= PERMIT_SECONDS]
        mine = [c for c in [*live, *lately] if c.number == number]
        if not mine:
            raise Broken(f"{name} lets save {number} ({row.save.tag}) go, which no COMMIT holds")
        limit = machine.job.local_limit
        held = {w.number for w in machine.disk.values()}
        # nor can it know of a dispute that came while the prune was under way: its own COMMIT stands
        then = self.clock() - PERMIT_SECONDS
        counted = (c for c in self.live.values() if self.disputed.get(c.key, then) >= then)
        newer = [c for c in counted if c.number in held and c.order > mine[0].order]
        if limit is None or len(newer) < limit:
            raise Broken(f"{name} lets save {number} go, though its policy keeps it")

    def at_the_end(self, disks: list[set[int]], tags: dict[int, str], daemons: list[Daemon]) -> None:
        """All went on and nobody failed any more: what is whole is committed.

        `disks`: the saves on each slot's disk. A node that announced that it replaces objects and lost its
        state leaves that generation to nobody (docs/internals/commit.md).
        """
        left = {
            name.rpartition("/")[2].partition("~")[0] for name in self.remote.folders if "/leases/" in name
        }
        leaving = {k for k, (_, at) in self.let_go.items() if self.clock() - at < LET_GO_SECONDS}
        for number in set.intersection(*disks):
            if tags[number] not in left and not [
                key for key in self.made.get(number, []) if key not in self.disputed
            ]:
                raise Broken(f"save {number} is whole on all nodes and has no COMMIT")
        for daemon in daemons:
            for row in daemon.machine.rows:
                is_open = row.state == "present" and row.record.state not in ("committed", "retired")
                number, tag = row.written.number, row.save.tag
                # who has seen a COMMIT go, and not yet why, takes the save for a new one until it asks
                stands = (k for k in self.made.get(number, []) if k not in self.disputed and k not in leaving)
                if is_open and tag not in left and any(stands):
                    raise Broken(
                        f"{daemon.machine.name} does not know that save {number} ({tag}) is committed"
                    )
        for name in self.entombed - leaving:
            where = name.rpartition("/")[2].removesuffix(".json")
            rest = [f for f in self.remote.folders if f.endswith(f"/nodes/{where}")]
            if rest:
                raise Broken(f"{name} was let go, and {rest[0]} is there still")
        gone = [key for key in self.entombed - leaving if key in self.live or key in self.risen]
        if gone:
            raise Broken(f"{gone[0]} was let go and is there still")


def _names(key: str, document: dict[str, Any]) -> bool:
    found = _COMMIT.match(key)
    return found is not None and (found[1], int(found[2])) == (document["tag"], document["generation"])
